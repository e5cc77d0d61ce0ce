"""What a row becomes: both ways of encoding agree, and the overflow policies do what they say."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from data_files import make_rows
from xorl.data import DataError
from xorl.data.chunks import LoadedChunk
from xorl.data.formats import TokenizedFormat


def encode(rows, *, as_table=False, **changes):
    form = TokenizedFormat(**{"limit": 16, "overflow": "truncate", "limit_option": "max", **changes})
    content = pa.Table.from_pylist(rows) if as_table else rows
    return form.encode(LoadedChunk("rows", "row", 0, 0, content))


def documents(encoded):
    ends = np.cumsum(encoded.lengths)
    labels = encoded.input_ids if encoded.labels is None else encoded.labels
    spans = [slice(end - length, end) for end, length in zip(ends, encoded.lengths, strict=True)]
    return [(encoded.input_ids[span].tolist(), labels[span].tolist()) for span in spans]


@pytest.mark.parametrize("overflow", ["truncate", "drop", "split"])
@pytest.mark.parametrize("columns", [None, ("input_ids",), ("weight", "input_ids", "labels", "attention_mask")])
def test_the_vectorised_way_agrees_with_the_plain_one(overflow, columns):
    """Catches a fast path that means something else than the code that the errors come from."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        rows = [*make_rows(50, seed=seed, shortest=1), {"input_ids": [], "labels": []}]
        for row in rows:
            row["attention_mask"] = (rng.random(len(row["input_ids"])) < 0.9).astype(int).tolist()
            if columns is not None:
                row["weight"] = rng.random(len(row["input_ids"])).astype(np.float32).tolist()
        fast = encode(rows, as_table=True, overflow=overflow, columns=columns)
        plain = encode(rows, overflow=overflow, columns=columns)
        for field in dataclasses.fields(fast):
            first, second = getattr(fast, field.name), getattr(plain, field.name)
            if isinstance(first, dict):
                assert first.keys() == second.keys()
                assert all(np.array_equal(first[name], second[name]) for name in first)
            else:
                assert np.array_equal(first, second), field.name
        assert fast.counts.tokens == len(fast.input_ids) == fast.lengths.sum()


def test_masked_tokens_are_left_out_wherever_they_are():
    """Catches padding, left or right, that is packed and attended to as text."""
    rows = [
        {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1], "labels": [-100, -100, 5, 6]},
        {"input_ids": [7, 8, 0, 0], "attention_mask": [1, 1, 0, 0], "labels": [7, 8, -100, -100]},
    ]
    for as_table in (True, False):
        encoded = encode(rows, as_table=as_table)
        assert documents(encoded) == [([5, 6], [5, 6]), ([7, 8], [7, 8])]
        assert encoded.counts.masked_tokens == 4
    flags = [{**row, "attention_mask": [bool(m) for m in row["attention_mask"]]} for row in rows]
    assert documents(encode(flags, as_table=True)) == [([5, 6], [5, 6]), ([7, 8], [7, 8])]


LONG = [{"input_ids": list(range(10))}, {"input_ids": [1, 2]}]


@pytest.mark.parametrize(
    ("overflow", "expected", "counted"),
    [
        ("truncate", [[0, 1, 2, 3], [1, 2]], {"truncated": 1, "kept": 2}),
        ("drop", [[1, 2]], {"dropped": 1, "kept": 1}),
        ("split", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [1, 2]], {"split": 1, "kept": 2, "documents": 4}),
    ],
)
def test_overflow_does_what_it_says_and_counts_it(overflow, expected, counted):
    """Catches samples cut or dropped without a word."""
    for as_table in (True, False):
        encoded = encode(LONG, as_table=as_table, limit=4, overflow=overflow)
        assert [ids for ids, _ in documents(encoded)] == expected
        assert {name: getattr(encoded.counts, name) for name in counted} == counted
        assert encoded.counts.samples == 2


def test_overflow_error_names_the_row_and_its_length():
    """Catches `error` that behaves as `truncate`."""
    with pytest.raises(
        DataError,
        match=r"rows, row 0 .*: 10 tokens, more than max = 4.*raise max, or choose another overflow, such as drop$",
    ):
        encode(LONG, limit=4, overflow="error")


def test_labels_lost_to_the_limit_are_told_from_labels_that_never_were():
    """Catches the count that the stop above one percent relies on."""
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, -100, -100, 5]},
        {"input_ids": [1, 2, 3], "labels": [-100, -100, -100]},
        {"input_ids": [1, 2, 3], "labels": [1, -100, -100]},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
    ]
    counts = encode(rows, limit=4).counts
    assert (counts.untrained, counts.untrained_by_overflow, counts.trained_tokens) == (3, 1, 2)


def test_every_integer_width_and_list_kind_is_read_vectorised():
    """Catches files of other writers that fall to the slow way, or overflow on it."""
    for kind in (pa.int8(), pa.uint16(), pa.uint32(), pa.int64(), pa.uint64()):
        for lists in (pa.list_(kind), pa.large_list(kind), pa.list_(kind, 3)):
            table = pa.table({"input_ids": pa.array([[1, 2, 3], [4, 5, 6]], type=lists)})
            encoded = TokenizedFormat(16, "truncate", "max").encode(LoadedChunk("r", "row", 0, 0, table))
            assert [ids for ids, _ in documents(encoded)] == [[1, 2, 3], [4, 5, 6]]
            assert encoded.input_ids.dtype == np.int32


def test_strings_hold_ids_as_json_or_separated_by_spaces():
    """Catches a spelling of CSV and text files that is misread."""
    rows = [{"input_ids": "1 2  3"}, {"input_ids": " [4, 5] "}, {"input_ids": "6"}]
    assert [ids for ids, _ in documents(encode(rows))] == [[1, 2, 3], [4, 5], [6]]
    for bad in ("1, 2", "1 x", "[1, 2", "1.5", '["1"]', "{}", "[[1]]"):
        with pytest.raises(DataError, match=r"rows, row 0 .* input_ids contains .*want a list of integers"):
            encode([{"input_ids": bad}])
