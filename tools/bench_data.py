"""Measures the preparation of conversations: `uv run tools/bench_data.py [--processes 2] [--conversations 20000]`.

Compares preparing chat data (reading JSON, rendering the template for every turn, tokenizing, masking, writing the
cache) with what the tokenizers library alone takes to encode the rendered texts, with offsets, in as many processes.
The text is that of Python's own documentation, in turns of lognormal length; the tokenizer is a byte-level BPE of it.
"""

import argparse
import json
import logging
import multiprocessing
import pydoc_data.topics
import random
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from xorl.data import DatasetEntry, PrepareOptions, load_tokenizer, prepare
from xorl.data.formats import ChatFormat
from xorl.data.formats.turns import Rendered

VOCAB_SIZE = 8192
MEDIAN_WORDS = 60  # of a message: a paragraph
TEMPLATES = {
    "stable": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # As templates of thinking models: the last answer is written otherwise than those before it.
    "thinking": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{% if loop.last and message.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}


@dataclass(frozen=True)
class Spent:
    """Seconds on the clock, and of all processors together."""

    wall_s: float
    cpu_s: float


def main() -> None:
    """Prints a row of docs/benchmarks.md for each template."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many is taken")
    options = parser.parse_args()
    logging.disable()
    text = " ".join(pydoc_data.topics.topics.values())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        write_conversations(rows, text.split(" "), options.conversations)
        print("| template | tokens | tokenizers alone, CPU s | prepared, CPU s | share of its speed | wall s |")
        print("|---|---|---|---|---|---|")
        for template in TEMPLATES:
            write_tokenizer(folder / template, text, TEMPLATES[template])
            print(measure(template, rows, folder, options.processes, options.repeats), flush=True)


def measure(template: str, rows: Path, folder: Path, processes: int, repeats: int) -> str:
    """One row of the table."""
    tokenizer = load_tokenizer(folder / template)
    form = ChatFormat(1 << 20, "error", "limit", tokenizer)
    rendered: list[Rendered] = [form.render(json.loads(line)) for line in rows.open()]
    texts = [each.text for each in rendered]
    shares = [texts[number::processes] for number in range(processes)]

    def alone() -> None:
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=encode_all, args=(tokenizer.core, share)) for share in shares]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    prepared: list[int] = []

    def whole() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            options = PrepareOptions(
                bin_len=1 << 20, tokenizer_folder=folder / template, prepared_path=Path(cache), num_proc=processes
            )
            prepared.append(int(prepare([DatasetEntry(str(rows), type="chat")], options).lengths.sum()))

    baseline, ours = best_of(alone, repeats), best_of(whole, repeats)
    return (
        f"| {template} | {prepared[0]:,} | {baseline.cpu_s:.1f} | {ours.cpu_s:.1f} | {baseline.cpu_s / ours.cpu_s:.0%} "
        f"| {baseline.wall_s:.1f} and {ours.wall_s:.1f} |"
    )


def encode_all(core: Tokenizer, texts: Sequence[str]) -> None:
    """What a mask needs at least: ids, and where each token is in the text."""
    for first in range(0, len(texts), 500):
        for encoding in core.encode_batch(list(texts[first : first + 500]), add_special_tokens=False):
            assert len(encoding.ids) == len(encoding.offsets)


def best_of(run: Callable[[], None], repeats: int) -> Spent:
    """The run that took the least processor time: other work on the machine only adds to it."""
    return min((timed(run) for _ in range(repeats)), key=lambda spent: spent.cpu_s)


def timed(run: Callable[[], None]) -> Spent:
    """What a run takes, with the processes that it starts and waits for."""
    wall, cpu = time.monotonic(), cpu_seconds()
    run()
    return Spent(time.monotonic() - wall, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """Processor time of this process and those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def write_conversations(path: Path, words: Sequence[str], num: int) -> None:
    """Conversations of 1 to 4 questions and answers, of words that follow one another in a text."""
    generator = random.Random(0)
    with path.open("w") as file:
        for _ in range(num):
            messages = []
            for number in range(2 * generator.randint(1, 4)):
                length = max(1, min(2000, round(generator.lognormvariate(0, 1) * MEDIAN_WORDS)))
                start = generator.randrange(len(words) - length)
                role = "assistant" if number % 2 else "user"
                messages.append({"role": role, "content": " ".join(words[start : start + length])})
            file.write(json.dumps({"messages": messages}) + "\n")


def write_tokenizer(folder: Path, text: str, template: str) -> None:
    """A byte-level BPE over the text, with the template's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|im_start|>", "<|im_end|>")])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
