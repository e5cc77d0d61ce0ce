"""Writes Python's documentation topics as a tokenized dataset: `uv run tools/pydoc_corpus.py`.

The text is that of `pydoc_data.topics`, which is part of every Python; it differs between versions. Whole topics are
held out, and the tokenizer, a byte-level BPE, is trained only on the others. Nothing is masked.
"""

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from workspace import ROOT

OUT = ROOT / "outputs" / "pydoc_topics" / "data"
VOCAB_SIZE = 1024
ROW_TOKENS = 512
HELDOUT_FRACTION = 0.1
MAX_COPIED = 0.25
END = "<|endoftext|>"


def distinct_topics(texts: Mapping[str, str]) -> dict[str, str]:
    """Removes topics that mostly copy longer ones, so that held-out text does not occur in the training data."""
    kept: dict[str, str] = {}
    seen: set[str] = set()
    for name in sorted(texts, key=lambda name: (-len(texts[name]), name)):
        paragraphs = [paragraph.strip() for paragraph in texts[name].split("\n\n")]
        copied = sum(len(paragraph) for paragraph in paragraphs if paragraph in seen)
        if copied <= MAX_COPIED * sum(map(len, paragraphs)):
            kept[name] = texts[name]
            seen.update(paragraphs)
    return kept


def split_topics(texts: Mapping[str, str], fraction: float) -> tuple[list[str], list[str]]:
    """Returns the names of the training topics and of the held-out topics, with about this fraction of the characters.

    Topics are held out in the order of a hash of their names, as long as they fit.
    """
    room = fraction * sum(map(len, texts.values()))
    heldout: list[str] = []
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        if len(texts[name]) <= room:
            heldout.append(name)
            room -= len(texts[name])
    return sorted(texts.keys() - set(heldout)), sorted(heldout)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE; digits stay separate tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def rows(text: str, tokenizer: Tokenizer, row_tokens: int) -> list[list[int]]:
    """Splits a topic's tokens and the end token into rows. A last row of one token predicts nothing and is dropped."""
    ids = [*tokenizer.encode(text).ids, tokenizer.token_to_id(END)]
    pieces = [ids[start : start + row_tokens] for start in range(0, len(ids), row_tokens)]
    return [piece for piece in pieces if len(piece) > 1]


def main() -> None:
    """Parses the command line and writes train.jsonl, heldout.jsonl and the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write into")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="vocabulary size of the tokenizer")
    parser.add_argument("--row-tokens", type=int, default=ROW_TOKENS, help="maximum tokens per row")
    parser.add_argument("--heldout-fraction", type=float, default=HELDOUT_FRACTION, help="held-out part of the text")
    options = parser.parse_args()

    texts = distinct_topics(topics)
    train, heldout = split_topics(texts, options.heldout_fraction)
    tokenizer = train_tokenizer([texts[name] for name in train], options.vocab_size)
    print(f"topics  {len(topics)}, of which {len(topics) - len(texts)} are skipped as copies of longer ones")
    options.out.mkdir(parents=True, exist_ok=True)
    for file, names in (("train.jsonl", train), ("heldout.jsonl", heldout)):
        dataset = [
            {"topic": name, "input_ids": row}
            for name in names
            for row in rows(texts[name], tokenizer, options.row_tokens)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in dataset)
        (options.out / file).write_text(lines, encoding="utf-8")
        counts = f"{len(names)} topics, {len(dataset)} rows, {sum(len(row['input_ids']) for row in dataset):,} tokens"
        print(f"{options.out / file}  {counts}")
    tokenizer.save(str(options.out / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (options.out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
