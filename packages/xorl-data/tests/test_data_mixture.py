"""Mixtures: exact shares, each document as often as it goes, the same for the same seed, none held out twice."""

from collections import Counter
from dataclasses import replace

import pytest

from data_files import make_rows, rows_of, write_jsonl
from xorl.data import DataError, DatasetEntry, prepare, split_documents
from xorl.data.mixture import Share, num_drawn


@pytest.fixture
def entries(tmp_path):
    """Three datasets of 60, 30 and 10 rows, each with a first id that tells it."""

    def make(*changes):
        made = []
        for number, (num, change) in enumerate(zip((60, 30, 10), changes, strict=True)):
            rows = make_rows(num, seed=number)
            for index, row in enumerate(rows):
                row["input_ids"] = row["labels"] = [number, index, *row["input_ids"]]
            path = write_jsonl(tmp_path / f"{number}.jsonl", rows)
            made.append(DatasetEntry(str(path), **change))
        return made

    return make


def times_of(documents):
    """How often each document of each dataset comes: [{index: times}, ...]."""
    counts = [Counter(), Counter(), Counter()]
    for index in range(len(documents)):
        ids = documents.document(index)[0]
        counts[ids[0]][int(ids[1])] += 1
    return counts


@pytest.mark.parametrize(
    ("sizes", "shares", "drawn"),
    [
        ([60, 30, 10], [Share()] * 3, [60, 30, 10]),
        ([60, 30, 10], [Share(weight=w) for w in (1, 1, 2)], [25, 25, 50]),
        ([60, 30, 10], [Share(weight=w) for w in (1, 1, 1)], [34, 33, 33]),
        ([60, 30, 10], [Share(num_epochs=e) for e in (0.5, 2, 1.25)], [30, 60, 12]),
        ([60, 30, 10], [Share(), Share(num_epochs=3), Share()], [60, 90, 10]),
        ([60, 30, 10], [Share(weight=w) for w in (1, 1, 1e-9)], [50, 50, 1]),
    ],
)
def test_shares_are_exact(sizes, shares, drawn):
    """Catches rounding that loses documents, and weights that are taken for repetitions."""
    assert num_drawn(sizes, shares) == drawn


def test_every_document_comes_as_often_as_any_other_of_its_dataset(entries, options):
    """Catches draws with replacement, which would repeat one document and miss another."""
    documents = prepare(entries({"weight": 1}, {"weight": 1}, {"weight": 2}), options)
    counts = times_of(documents)
    assert [sum(count.values()) for count in counts] == [25, 25, 50]
    assert [set(count.values()) for count in counts] == [{1}, {1}, {5}]
    counts = times_of(prepare(entries({"num_epochs": 2.5}, {}, {"num_epochs": 0.5}), options))
    assert [Counter(count.values()) for count in counts] == [{3: 30, 2: 30}, {1: 30}, {1: 5}]


def test_the_mixture_is_a_function_of_data_shares_and_seed(entries, options):
    """Catches a draw that changes between starts, or an order that claims to be another's."""
    weights = ({"weight": 3}, {"weight": 2}, {"weight": 1})
    shuffled = replace(options, shuffle_merged=True, shuffle_before_merging=True)
    first, again = prepare(entries(*weights), shuffled), prepare(entries(*weights), shuffled)
    assert first.fingerprint == again.fingerprint
    assert rows_of(first) == rows_of(again)
    others = [
        prepare(entries(*weights), replace(shuffled, seed=9)),
        prepare(entries(*weights[::-1]), shuffled),
        prepare(entries({}, {}, {}), shuffled),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert first.receipt.datasets[0].drawn == 50
    assert "drawn=50" in first.receipt.lines()[0]


def test_what_a_mixture_repeats_is_not_held_out_and_trained_on(entries, options):
    """Catches a held-out loss that falls because a copy of the document is trained on."""
    documents = prepare(entries({"num_epochs": 3}, {"num_epochs": 0.5}, {}), options)
    train, held_out = split_documents(documents, 0.2, seed=1)
    assert len(held_out) == round(0.2 * (60 + 15 + 10))
    seen = {str(row) for row in rows_of(train)}
    assert not seen & {str(row) for row in rows_of(held_out)}
    assert len(seen) + len(held_out) == 85
    assert len({str(row) for row in rows_of(held_out)}) == len(held_out)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (({"weight": 1, "num_epochs": 1}, {}, {}), r"entries\[0\]: set weight or num_epochs, not both"),
        (({"weight": 1}, {}, {"weight": 1}), r"entries\[1\].weight: not set, but other entries have"),
        (({"num_epochs": 0}, {}, {}), r"entries\[0\].num_epochs: 0, want a number above 0"),
        (({"weight": -1}, {"weight": 1}, {"weight": 1}), r"entries\[0\].weight: -1"),
    ],
)
def test_shares_that_contradict_each_other_are_refused(entries, options, changes, words):
    """Catches a share that is accepted and ignored."""
    with pytest.raises(DataError, match=words):
        prepare(entries(*changes), options)
