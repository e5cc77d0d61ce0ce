"""Streams over an object store: the same rows as from the disk, in parts, by row groups and lines."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from object_store import object_store
from xorl.data import DataError, DatasetEntry
from xorl.data.stream import StreamLoader, StreamOptions, StreamPlan, files, open_stream, reading

ROWS = [{"input_ids": list(range(i, i + 12))} for i in range(200)]


@pytest.fixture(scope="module")
def bucket() -> Iterator[object]:
    with pytest.MonkeyPatch.context() as patch, object_store(patch) as client:
        patch.setattr(reading, "_STORAGES", {})
        yield client


def first_ids(entry: DatasetEntry, folder: Path, num_workers: int = 0) -> list[int]:
    """The first token of every document of the first bins."""
    stream = open_stream([entry], StreamOptions(64, vocab_size=1000), index_path=folder)
    plan = StreamPlan.over(stream, bins_per_step=80, max_steps=1)
    loader = StreamLoader(stream, plan, micro_batch_size=1, num_workers=num_workers)
    batches = [batch for _, batches in loader.steps() for batch in batches]
    return [int(batch.input_ids[at]) for batch in batches for at in batch.cu_seqlens[:-1]]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_objects_are_streamed_in_parts(bucket, tmp_path, monkeypatch, kind) -> None:
    # Catches rows that are lost where a range of an object ends, and workers that share a connection.
    monkeypatch.setattr(files, "BLOCK_BYTES", 2000)
    path = tmp_path / f"rows.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    if kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=20)
    else:
        path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    bucket.upload_file(str(path), "corpus", path.name)
    entry = DatasetEntry(f"s3://corpus/{path.name}")
    found = first_ids(entry, tmp_path / "index")
    assert set(found) == set(range(200))
    assert found == first_ids(entry, tmp_path / "index", num_workers=2)


def test_an_object_that_changes_is_noticed(bucket, tmp_path) -> None:
    # Catches a run whose second half is trained on other data than its first.
    body = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    bucket.put_object(Bucket="corpus", Key="changing.jsonl", Body=body)
    stream = open_stream([DatasetEntry("s3://corpus/changing.jsonl")], StreamOptions(64), index_path=tmp_path)
    bucket.put_object(Bucket="corpus", Key="changing.jsonl", Body=body[::-1])
    plan = StreamPlan.over(stream, bins_per_step=4, max_steps=2)
    with pytest.raises(DataError, match=r"s3://corpus/changing.jsonl changed while it was streamed"):
        next(StreamLoader(stream, plan, micro_batch_size=1).steps())
