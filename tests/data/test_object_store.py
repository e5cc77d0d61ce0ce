"""Object stores, against a server that speaks S3."""

import json
from collections.abc import Iterator

import pytest

from object_store import object_store
from xorl.data import DataError, DataFailure, DatasetEntry, PrepareOptions, downloads, prepare

ROWS = [{"input_ids": list(range(i, i + 12))} for i in range(60)]


def lines(rows: list[dict[str, list[int]]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.setattr(downloads, "FIRST_WAIT_S", 0.01)
    with object_store(monkeypatch) as client:
        yield client


def documents_of(entry: DatasetEntry, options: PrepareOptions) -> list[dict[str, list[int]]]:
    documents = prepare([entry], options)
    return [{"input_ids": documents.document(index)[0].tolist()} for index in range(len(documents))]


def test_objects_are_read_by_name_pattern_and_folder(bucket, tmp_path) -> None:
    # Catches objects that are missed or read in another order, a split that leaks, and a copy that outlives its object.
    options = PrepareOptions(bin_len=64, prepared_path=tmp_path, shuffle_before_merging=False, shuffle_merged=False)
    for name, rows in {"train-0": ROWS[:20], "train-1": ROWS[20:50], "test-0": ROWS[50:]}.items():
        bucket.put_object(Bucket="corpus", Key=f"web/{name}.jsonl", Body=lines(rows))
    assert documents_of(DatasetEntry("s3://corpus/web"), options) == ROWS[:50]
    assert documents_of(DatasetEntry("s3://corpus/web", split="test"), options) == ROWS[50:]
    assert documents_of(DatasetEntry("s3://corpus/web/train-1.jsonl"), options) == ROWS[20:50]
    assert documents_of(DatasetEntry("s3://corpus/web/t*-0.jsonl"), options) == ROWS[50:] + ROWS[:20]
    named = DatasetEntry("s3://corpus/web", data_files=["train-1.jsonl", "test-*"], ds_type="json")
    assert documents_of(named, options) == ROWS[20:]

    one, every = "{config_name: one, data_files: train-1.jsonl}", "{config_name: all, data_files: '*'}"
    readme = f"---\nconfigs:\n- {one}\n- {every}\n---\n"
    bucket.put_object(Bucket="corpus", Key="web/README.md", Body=readme.encode())
    assert documents_of(DatasetEntry("s3://corpus/web", name="one"), options) == ROWS[20:50]
    assert documents_of(DatasetEntry("s3://corpus/web", name="all"), options) == ROWS[50:] + ROWS[:50]
    with pytest.raises(DataError, match=r"entries\[0\]: s3://corpus/web .* pick one .*\['one', 'all'\]; set .*name"):
        prepare([DatasetEntry("s3://corpus/web")], options)

    bucket.put_object(Bucket="corpus", Key="web/train-1.jsonl", Body=lines(ROWS[::-1]))
    assert documents_of(DatasetEntry("s3://corpus/web/train-1.jsonl"), options) == ROWS[::-1]
    with pytest.raises(DataError, match=r"entries\[0\].path: s3://corpus/none does not exist"):
        prepare([DatasetEntry("s3://corpus/none")], options)


def test_a_store_that_cannot_be_reached_is_the_environment(bucket, tmp_path, monkeypatch) -> None:
    # Catches a network failure that is reported as bad input, or waited for without end.
    monkeypatch.setattr(downloads, "ATTEMPTS", 2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    # botocore has attempts of its own within each of ours.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    with pytest.raises(DataFailure, match=r"s3://elsewhere/rows.jsonl: .*\(2 attempts\)"):
        prepare([DatasetEntry("s3://elsewhere/rows.jsonl")], PrepareOptions(bin_len=64, prepared_path=tmp_path))
