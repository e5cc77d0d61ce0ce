"""Writes the training data of the quickstart: `uv run tools/make_quickstart.py [--out configs/quickstart]`.

Generates six kinds of small text problems with checkable answers, as tokenized JSONL and some of them as conversations
and as pairs of answers, and a byte-level BPE tokenizer trained on them. The same seed writes the same bytes. The
model's config.json beside them is written by hand.
"""

import argparse
import json
import random
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from workspace import ROOT

OUT = ROOT / "configs" / "quickstart"
SEED = 0
TRAIN_PER_TASK, HELDOUT_PER_TASK = 1000, 50
END, PAD = "<|endoftext|>", "<|pad|>"
IGNORE = -100
NUM_CONVERSATIONS = 600
NUM_PAIRS = 1500
# Enough for the 256 bytes, the two special tokens and a merged token for every word of a prompt.
MAX_VOCAB_SIZE = 320
MAX_LENGTH = 64

Below = Callable[[int], int]  # below(n) returns a random integer from 0 to n - 1


@dataclass(frozen=True)
class Problem:
    """A question and its answer. Problems of a task with equal keys are duplicates."""

    prompt: str
    answer: str
    key: str


def copy_word(below: Below) -> Problem:
    """The word itself."""
    word = _letters(below, string.ascii_uppercase, 3, 6)
    return Problem(f"copy {word} =", word, key=word)


def reverse(below: Below) -> Problem:
    """The word from its last letter to its first."""
    word = _letters(below, string.ascii_uppercase, 3, 6)
    return Problem(f"reverse {word} =", word[::-1], key=word)


def shift(below: Below) -> Problem:
    """Each letter replaced by the next one in the alphabet."""
    word = _letters(below, string.ascii_uppercase[:-1], 3, 6)
    return Problem(f"shift {word} =", "".join(chr(ord(letter) + 1) for letter in word), key=word)


def sort_digits(below: Below) -> Problem:
    """The digits from smallest to largest."""
    digits = _letters(below, string.digits, 3, 6)
    answer = "".join(sorted(digits))
    return Problem(f"sort {digits} =", answer, key=answer)


def maximum(below: Below) -> Problem:
    """The larger of two numbers."""
    first, second = below(100), below(100)
    smaller, larger = sorted((first, second))
    return Problem(f"max {first:02d} {second:02d} =", f"{larger:02d}", key=f"{smaller} {larger}")


def increment(below: Below) -> Problem:
    """The number plus one."""
    number = below(9999)
    return Problem(f"increment {number} =", str(number + 1), key=str(number))


TASKS = (copy_word, reverse, shift, sort_digits, maximum, increment)


def make_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Returns training and held-out problems, shuffled; no problem is in both."""
    uniform = random.Random(seed).random  # the only method whose sequence Python guarantees

    def below(limit: int) -> int:
        return int(uniform() * limit)

    train: list[Problem] = []
    heldout: list[Problem] = []
    for task in TASKS:
        different: dict[str, Problem] = {}
        while len(different) < TRAIN_PER_TASK + HELDOUT_PER_TASK:
            problem = task(below)
            different.setdefault(problem.key, problem)
        problems = list(different.values())
        heldout += problems[:HELDOUT_PER_TASK]
        train += problems[HELDOUT_PER_TASK:]
    return sorted(train, key=lambda _: uniform()), sorted(heldout, key=lambda _: uniform())


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Trains a byte-level BPE, which can encode any text; capital letters and digits stay separate tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[A-Z0-9]"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE,
        special_tokens=[END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenized_row(problem: Problem, tokenizer: Tokenizer) -> dict[str, object]:
    """One line of the dataset: the answer and the end token are trained, the prompt is not."""
    prompt = tokenizer.encode(problem.prompt).ids
    answer = [*tokenizer.encode(problem.answer).ids, tokenizer.token_to_id(END)]
    return {
        "prompt": problem.prompt,
        "answer": problem.answer,
        "input_ids": prompt + answer,
        "labels": [IGNORE] * len(prompt) + answer,
    }


def write_quickstart(folder: Path, seed: int) -> list[Path]:
    """Writes the datasets and the tokenizer, and returns their paths."""
    train, heldout = make_problems(seed)
    tokenizer = train_tokenizer(problem.prompt + problem.answer for problem in train)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
    }
    texts = {
        "train.jsonl": _lines(train, tokenizer),
        "heldout.jsonl": _lines(heldout, tokenizer),
        "chat.jsonl": _conversations(train[: 2 * NUM_CONVERSATIONS]),
        "preference.jsonl": _pairs(train[-NUM_PAIRS:]),
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return [folder / name for name in texts]


def main() -> None:
    """Parses the command line and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write into")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the problems")
    options = parser.parse_args()
    for path in write_quickstart(options.out, options.seed):
        print(f"{path}  {path.stat().st_size:,} bytes")


def _letters(below: Below, alphabet: str, shortest: int, longest: int) -> str:
    length = shortest + below(longest - shortest + 1)
    return "".join(alphabet[below(len(alphabet))] for _ in range(length))


def _lines(problems: Iterable[Problem], tokenizer: Tokenizer) -> str:
    rows = (tokenized_row(problem, tokenizer) for problem in problems)
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def _conversations(problems: Sequence[Problem]) -> str:
    """Two problems per conversation, as text: the training data of configs/local/chat.yaml."""
    lines = []
    for pair in zip(problems[::2], problems[1::2], strict=True):
        messages = [
            {"role": role, "content": text}
            for problem in pair
            for role, text in (("user", problem.prompt), ("assistant", problem.answer))
        ]
        lines.append(json.dumps({"messages": messages}, separators=(",", ":")) + "\n")
    return "".join(lines)


def _pairs(problems: Sequence[Problem]) -> str:
    """Right answers beside answers in the other kind of characters: the training data of configs/local/preference.yaml.

    The rejected answer is that of the next problem which asks for digits instead of letters, or the reverse.
    """
    lines = []
    for number, problem in enumerate(problems):
        others = (problems[(number + step) % len(problems)] for step in range(1, len(problems)))
        other = next(each for each in others if each.answer.isdigit() != problem.answer.isdigit())
        row = {
            "prompt": [{"role": "user", "content": problem.prompt}],
            "chosen": [{"role": "assistant", "content": problem.answer}],
            "rejected": [{"role": "assistant", "content": other.answer}],
        }
        lines.append(json.dumps(row, separators=(",", ":")) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    main()
