"""Statistics of the documents of each dataset: lengths, trained tokens, BOS and EOS, duplicates.

To limit the cost, only the first documents are searched for duplicates; the figures state how many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import xxhash

from xorl.data.batch import IGNORE
from xorl.data.formats import TextTokenizer
from xorl.data.receipt import Counts, Receipt

# The documents per dataset that are read for BOS, EOS and duplicates, and the tokens of each for near-duplicates.
_NUM_EXAMINED = 20_000
_MAX_HASHED_TOKENS = 2_048
# Tokens per shingle, and hashes per signature, in bands: finds 99.98 % of the pairs with 80 % of shingles in common.
_SHINGLE_TOKENS = 5
_BANDS, _ROWS = 16, 4
# The minimum fraction of equal signature hashes, which estimates the fraction of shingles in common.
_MIN_SIMILARITY = 0.8


@dataclass(frozen=True)
class Histogram:
    """The counts between consecutive edges; there is one more edge than counts.

    is_whole: values are whole numbers, and no count includes its upper edge.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    is_whole: bool = False


@dataclass(frozen=True)
class DatasetStatistics:
    """Statistics of one dataset's documents.

    Fractions refer to the first `num_examined` documents and are None if the tokenizer has no such token. Duplicates
    are documents that are equal, or nearly equal, to an earlier one.
    """

    name: str
    counts: Counts
    lengths: Histogram
    trained_fraction: Histogram
    percentiles: dict[int, int]
    num_examined: int
    begins_with_bos: float | None
    begins_with_two_bos: float | None
    ends_with_eos: float | None
    trains_eos: float | None
    exact_duplicates: int
    near_duplicates: int


class CountedDocuments(Protocol):
    """The input of dataset_statistics: PreparedDocuments, or a StreamSample."""

    receipt: Receipt
    lengths: np.ndarray
    num_trained: np.ndarray

    def distinct(self) -> tuple[np.ndarray, np.ndarray]: ...

    def datasets(self) -> np.ndarray: ...

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...


def dataset_statistics(documents: CountedDocuments, tokenizer: TextTokenizer | None) -> list[DatasetStatistics]:
    """The statistics of each dataset of the merged documents; documents that a mixture repeats count once."""
    _, indices = documents.distinct()
    datasets = documents.datasets()[indices]
    return [
        _statistics_of(documents, indices[datasets == index], dataset.name, dataset.counts, tokenizer)
        for index, dataset in enumerate(documents.receipt.datasets)
    ]


def fill_histogram(fills: np.ndarray) -> Histogram:
    """A histogram of the fills of bins, given as fractions [B] of their capacity."""
    return _histogram(fills, np.linspace(0, 1, 21))


def _statistics_of(
    documents: CountedDocuments, indices: np.ndarray, name: str, counts: Counts, tokenizer: TextTokenizer | None
) -> DatasetStatistics:
    lengths = documents.lengths[indices]
    trained = documents.num_trained[indices] / np.maximum(lengths - 1, 1)
    longest = max(2, int(lengths.max(initial=1)))
    edges = np.unique(np.geomspace(1, longest + 1, 25).astype(np.int64)).astype(np.float64)
    examined = indices[:_NUM_EXAMINED]
    boundaries = _BoundaryTokens(
        None if tokenizer is None else tokenizer.bos_id, None if tokenizer is None else tokenizer.eos_id
    )
    seen: set[int] = set()
    near = NearDuplicates()
    exact = num_near = 0
    for index in examined:
        ids, labels = documents.document(int(index))
        boundaries.add(ids, labels)
        content = xxhash.xxh3_64_intdigest(ids.tobytes())
        if content in seen:
            exact += 1
            continue
        seen.add(content)
        num_near += near.seen_before(ids)
    marks = (1, 10, 50, 90, 99, 100)
    values = np.percentile(lengths, marks).astype(int).tolist() if len(lengths) else [0] * len(marks)
    return DatasetStatistics(
        name=name,
        counts=counts,
        lengths=replace(_histogram(lengths, edges), is_whole=True),
        trained_fraction=_histogram(trained, np.linspace(0, 1, 21)),
        percentiles=dict(zip(marks, values, strict=True)),
        num_examined=len(examined),
        begins_with_bos=boundaries.fraction("bos"),
        begins_with_two_bos=boundaries.fraction("two_bos"),
        ends_with_eos=boundaries.fraction("eos"),
        trains_eos=boundaries.fraction("trained_eos"),
        exact_duplicates=exact,
        near_duplicates=num_near,
    )


def _histogram(values: np.ndarray, edges: np.ndarray) -> Histogram:
    counts, _ = np.histogram(values, edges)
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))


class _BoundaryTokens:
    """Counts the documents that begin with BOS and end with EOS."""

    def __init__(self, bos_id: int | None, eos_id: int | None) -> None:
        self._bos_id, self._eos_id = bos_id, eos_id
        self._counts = {"bos": 0, "two_bos": 0, "eos": 0, "trained_eos": 0}
        self._total = 0

    def add(self, ids: np.ndarray, labels: np.ndarray) -> None:
        self._total += 1
        if len(ids) and self._bos_id is not None:
            self._counts["bos"] += bool(ids[0] == self._bos_id)
            self._counts["two_bos"] += bool(len(ids) > 1 and ids[0] == ids[1] == self._bos_id)
        if len(ids) and self._eos_id is not None:
            # A newline may follow EOS.
            at_end = np.flatnonzero(ids[-3:] == self._eos_id)
            self._counts["eos"] += bool(len(at_end))
            self._counts["trained_eos"] += bool(np.any(labels[ids == self._eos_id] != IGNORE))

    def fraction(self, name: str) -> float | None:
        token_id = self._bos_id if "bos" in name else self._eos_id
        return self._counts[name] / self._total if self._total and token_id is not None else None


class NearDuplicates:
    """Finds documents that share most of their token shingles, by MinHash signatures in bands."""

    def __init__(self) -> None:
        generator = np.random.PCG64(0)
        size = _BANDS * _ROWS
        raw = generator.random_raw(2 * size)
        self._factors = raw[:size] | np.uint64(1)
        self._offsets = raw[size:]
        self._buckets: list[dict[bytes, int]] = [{} for _ in range(_BANDS)]
        self._signatures: list[np.ndarray] = []

    def seen_before(self, ids: np.ndarray) -> bool:
        """Adds a document. Returns whether a similar one was added before."""
        shingles = self._shingles(ids[:_MAX_HASHED_TOKENS])
        if not len(shingles):
            return False
        signature = np.min((shingles[:, None] * self._factors + self._offsets) >> np.uint64(32), axis=0)
        found = False
        number = len(self._signatures)
        self._signatures.append(signature.astype(np.uint32))
        for band, bucket in enumerate(self._buckets):
            other = bucket.setdefault(signature[band * _ROWS : (band + 1) * _ROWS].tobytes(), number)
            if other != number and not found:
                found = bool(np.mean(self._signatures[other] == self._signatures[number]) >= _MIN_SIMILARITY)
        return found

    @staticmethod
    def _shingles(ids: np.ndarray) -> np.ndarray:
        """The distinct hashes of all runs of tokens. Shorter documents, which are often equal by chance, have none."""
        num = len(ids) - _SHINGLE_TOKENS + 1
        if num < 1:
            return np.empty(0, np.uint64)
        hashes = np.zeros(num, dtype=np.uint64)
        for offset in range(_SHINGLE_TOKENS):
            hashes = (hashes ^ ids[offset : offset + num].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        return np.unique(hashes ^ (hashes >> np.uint64(29)))
