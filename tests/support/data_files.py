"""Rows for tests of data, the files that hold them, and a tokenizer."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors


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


def write_table(kind: str, path: Path, table: pa.Table) -> None:
    """In several groups or batches, where the format has them. kind: parquet, feather, arrow or arrow stream."""
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif kind == "feather":
        pyarrow.feather.write_feather(table, path)
    else:
        new = {"arrow": pa.ipc.new_file, "arrow stream": pa.ipc.new_stream}[kind]
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)


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
    elif kind == "txt":
        path.write_text("".join(" ".join(map(str, row["input_ids"])) + "\n" for row in rows))
    else:
        write_table(kind, path, pa.Table.from_pylist(rows))
    return path


def rows_of(documents):
    """The rows that prepared documents hold, in order."""
    pairs = [documents.document(index) for index in range(len(documents))]
    return [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in pairs]


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(
    folder: Path, *, template=CHAT_TEMPLATE, adds_bos=False, eos="<|end|>", pad=None, spaces_first=False
) -> Path:
    """A tokenizer of bytes, with the special tokens of CHAT_TEMPLATE; ids from 256 on are special.

    spaces_first: of ASCII characters instead, with a space before the first one of a text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if spaces_first:
        alphabet = [*map(chr, range(255)), "\N{LOWER ONE EIGHTH BLOCK}"]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    if spaces_first:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
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
