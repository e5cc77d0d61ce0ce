"""Rows, and files that hold them in every format."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from xorl.data import DatasetEntry, PrepareOptions, prepare
from xorl.data.formats import load_tokenizer
from xorl.data.inspect import text_segments, trained_texts
from xorl.data.stream import StreamOptions, open_stream

Rows = list[dict[str, list[int]]]


def make_rows(num, seed=0, longest=40, shortest=2):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num):
        ids = rng.integers(0, 1000, rng.integers(shortest, longest + 1))
        labels = np.where(rng.random(len(ids)) < 0.3, -100, ids)
        labels[-1] = ids[-1]
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def write_jsonl(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_as(kind: str, folder: Path, rows) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        return write_jsonl(path, rows)
    if kind == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({k: json.dumps(v) for k, v in row.items()} for row in rows)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif kind == "feather":
        pyarrow.feather.write_feather(pa.Table.from_pylist(rows), path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, pa.Table.from_pylist(rows).schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows), max_chunksize=5)
    elif kind == "txt":
        path.write_text("".join(" ".join(map(str, row["input_ids"])) + "\n" for row in rows))
    else:
        raise AssertionError(kind)
    return path


@pytest.fixture
def options(tmp_path):
    """Options that keep the source's order, with the cache in the test's folder."""
    return PrepareOptions(
        bin_len=64,
        vocab_size=1000,
        prepared_path=tmp_path / "prepared",
        shuffle_before_merging=False,
        shuffle_merged=False,
    )


@pytest.fixture(name="make_rows")
def _make_rows():
    return make_rows


@pytest.fixture(name="write_jsonl")
def _write_jsonl():
    return write_jsonl


@pytest.fixture(name="write_as")
def _write_as():
    return write_as


@pytest.fixture
def prepare_rows(tmp_path, options):
    """Returns a function that writes rows to a file, and prepares it with an entry's options."""

    def prepared(rows, options=options, *, file="jsonl", **entry):
        return prepare([DatasetEntry(str(write_as(file, tmp_path, rows)), **entry)], options)

    return prepared


@pytest.fixture
def rows_of():
    """The rows that prepared documents hold, in order."""

    def read(documents):
        pairs = [documents.document(index) for index in range(len(documents))]
        return [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in pairs]

    return read


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder: Path, *, template=CHAT_TEMPLATE, adds_bos=False, eos="<|end|>", pad=None) -> Path:
    """A tokenizer of bytes, with the special tokens of CHAT_TEMPLATE; ids from 256 on are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|pad|>"]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "chat_template": template}
    config |= {"eos_token": eos, "pad_token": pad}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.fixture(name="write_tokenizer")
def _write_tokenizer():
    return write_tokenizer


@pytest.fixture
def write_template(tmp_path):
    """Returns a function that writes a chat template to own.jinja, and returns its path."""

    def written(template: str) -> str:
        path = tmp_path / "own.jinja"
        path.write_text(template)
        return str(path)

    return written


@pytest.fixture
def text_options(options, tmp_path):
    """Options for text formats: the tokenizer of bytes, and a bin that holds a conversation."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    return replace(options, bin_len=512, tokenizer_folder=folder)


@pytest.fixture
def texts(text_options, tmp_path):
    """Returns a function that prepares rows, or a file, and returns (whole text, trained texts) of each document."""

    def read(rows, options=text_options, *, file="jsonl", **entry):
        path = write_as(file, tmp_path, rows) if isinstance(rows, list) else rows
        documents = prepare([DatasetEntry(str(path), **entry)], options)
        tokenizer = load_tokenizer(options.tokenizer_folder)
        parts = [text_segments(*documents.document(index), tokenizer) for index in range(len(documents))]
        return [("".join(part.text for part in own), list(trained_texts(own))) for own in parts]

    return read


@pytest.fixture
def text_stream(text_options):
    """Returns a function that opens a stream of the texts of a file."""

    def opened(path, *, bin_len=512, shuffle=True, **entry):
        folder, index_path = text_options.tokenizer_folder, text_options.prepared_path / "streams"
        options = StreamOptions(bin_len, vocab_size=text_options.vocab_size, tokenizer_folder=folder, shuffle=shuffle)
        return open_stream([DatasetEntry(str(path), **entry)], options, index_path=index_path)

    return opened
