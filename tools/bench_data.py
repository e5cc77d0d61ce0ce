"""Measures the preparation of conversations: `uv run tools/bench_data.py [--processes 2] [--conversations 20000]`.

Compares preparing chat data (reading JSON, rendering, tokenizing, masking, writing the cache) with the time in which
the tokenizers library alone encodes the same rendered texts in as many processes: with offsets, which masks need, and
without. The text is Python's documentation, in turns of lognormal length; the tokenizer is a byte-level BPE trained on
it; the templates are those of tests/golden/chat. The runs alternate, and medians are printed, because processor time
varies with other load on the machine.
"""

import argparse
import json
import logging
import multiprocessing
import pydoc_data.topics
import random
import resource
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from workspace import ROOT
from xorl.data import DatasetEntry, PrepareOptions, prepare
from xorl.data.formats import ChatFormat, TextTokenizer, load_tokenizer

VOCAB_SIZE = 8192
MEDIAN_WORDS = 60  # per message, about a paragraph
GOLDEN = ROOT / "tests" / "golden" / "chat"
# One template renders every beginning of a conversation as a prefix of the whole; the other does not, because only the
# last answer keeps its reasoning.
TEMPLATES = ("chatml", "qwen3")


def main() -> None:
    """Prints one row of docs/records/data.md per template."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    logging.disable()
    text = " ".join(pydoc_data.topics.topics.values())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        write_conversations(rows, text.split(" "), options.conversations)
        print("| template | tokens | offsets, CPU s | ids, CPU s | rendering, CPU s | prepared, CPU s | shares |")
        print("|---|---|---|---|---|---|---|")
        for template in TEMPLATES:
            write_tokenizer(folder / template, text, (GOLDEN / f"{template}.jinja").read_text())
            print(measure(template, rows, folder, options.processes, options.repeats), flush=True)


def measure(template: str, rows: Path, folder: Path, processes: int, repeats: int) -> str:
    """Returns one row of the table: processor seconds, and speeds relative to the library.

    These are relative to its speed with offsets, to the same excluding the rendering, and to its speed without offsets.
    """
    tokenizer = load_tokenizer(folder / template)
    texts = render_all(rows, tokenizer)
    prepared: list[int] = []

    def whole() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            options = PrepareOptions(
                bin_len=1 << 20, tokenizer_folder=folder / template, prepared_path=Path(cache), num_proc=processes
            )
            prepared.append(int(prepare([DatasetEntry(str(rows), type="chat")], options).lengths.sum()))

    runs: dict[str, Callable[[], object]] = {
        "offsets": partial(alone, tokenizer.core.encode_batch, texts, processes),
        "ids": partial(alone, tokenizer.core.encode_batch_fast, texts, processes),
        "rendering": partial(render_all, rows, tokenizer),
        "prepared": whole,
    }
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            spent[name].append(timed(run))
    with_offsets, ids_alone, rendering, ours = (np.array(spent[name]) for name in runs)
    shares = (with_offsets / ours, with_offsets / (ours - rendering), ids_alone / ours)
    seconds = " | ".join(f"{median(each):.1f}" for each in spent.values())
    return (
        f"| {template} | {prepared[0]:,} | {seconds} | " + ", ".join(f"{median(share):.0%}" for share in shares) + " |"
    )


def render_all(rows: Path, tokenizer: TextTokenizer) -> list[str]:
    """Parses the rows and returns their rendered texts."""
    form = ChatFormat(1 << 20, "error", "limit", tokenizer)
    return [form.render(json.loads(line)).text for line in rows.open()]


def alone(encode: Callable[..., Sequence[Encoding]], texts: Sequence[str], processes: int) -> None:
    """Runs the library in this many processes, each with a share of the texts."""
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=encode_all, args=(encode, texts[number::processes])) for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def encode_all(encode: Callable[..., Sequence[Encoding]], texts: Sequence[str]) -> None:
    """Encodes the texts and reads the ids, the minimum that training needs."""
    for first in range(0, len(texts), 500):
        for encoding in encode(list(texts[first : first + 500]), add_special_tokens=False):
            assert encoding.ids


def timed(run: Callable[[], object]) -> float:
    """Processor seconds of a run, including the processes that it starts and waits for."""
    before = cpu_seconds()
    run()
    return cpu_seconds() - before


def cpu_seconds() -> float:
    """Processor time of this process and of the child processes it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def write_conversations(path: Path, words: Sequence[str], num: int) -> None:
    """Writes conversations of 1 to 4 questions and answers, made of consecutive words of a text."""
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
    """Trains a byte-level BPE on the text, with the template's special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
