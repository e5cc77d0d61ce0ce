"""PreparedDocuments: random access to the merged documents in their final order; merging and splitting them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from xorl.data.arguments import checked
from xorl.data.errors import DataError
from xorl.data.hashing import digest, permutation
from xorl.data.images.table import StoredImage
from xorl.data.mixture import Share, drawn_rows, num_drawn
from xorl.data.receipt import Receipt
from xorl.data.sources import shard_range
from xorl.data.store import DocumentStore, joined_patches


class PreparedDocuments:
    """The documents of one or more stores in one order.

    `rows` [N] are document numbers, counted through all stores in turn. `fingerprint` identifies content and order.
    Cheap to pickle and to fork, because stores are pickled by reference.
    """

    def __init__(
        self, stores: Sequence[DocumentStore], rows: np.ndarray, *, fingerprint: str, receipt: Receipt
    ) -> None:
        self._stores = tuple(stores)
        self._starts = [0, *accumulate(len(store.lengths) for store in self._stores)]
        self._rows = rows
        self.fingerprint = fingerprint
        self.receipt = receipt
        self.extra_names = self._stores[0].extra_names
        self.lengths = np.concatenate([store.lengths for store in self._stores])[rows]  # [N] int64
        num_trained = np.concatenate([store.num_trained for store in self._stores])
        self.num_trained = num_trained[rows].astype(np.int64)  # [N], after the shift

    def __len__(self) -> int:
        return len(self._rows)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels) of document `index`, int32, not shifted, read-only."""
        store, row = self._locate(index)
        return store.document(row)

    def extras(self, index: int) -> dict[str, np.ndarray]:
        """The additional per-token columns that the entries selected, float32."""
        if not self.extra_names:
            return {}
        store, row = self._locate(index)
        return store.extras(row)

    def images(self, index: int) -> list[StoredImage]:
        """The images of document `index`, in the order of their tokens."""
        store, row = self._locate(index)
        return store.images(row)

    def image_patches(self) -> np.ndarray | None:
        """[N, 2]: the patches of all images of each document, and the sum of their squares; None without images."""
        found = joined_patches(self._stores)
        return None if found is None else found[self._rows]

    def select(self, indices: np.ndarray, fingerprint: str) -> PreparedDocuments:
        """The documents `indices` in that order. The receipt still covers all documents."""
        return PreparedDocuments(self._stores, self._rows[indices], fingerprint=fingerprint, receipt=self.receipt)

    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct documents, as their numbers in the stores, and the first index of each; sorted by index."""
        rows, indices = np.unique(self._rows, return_index=True)
        order = np.argsort(indices, kind="stable")
        return rows[order], indices[order]

    def has_same_stores(self, other: PreparedDocuments) -> bool:
        """Whether both read stores of the same content, regardless of selection and order."""
        return [store.key for store in self._stores] == [store.key for store in other._stores]

    def row_mask(self, rows: np.ndarray) -> np.ndarray:
        """[N] bool: whether each document is one of `rows`, given as numbers in the stores."""
        return np.isin(self._rows, rows)

    def datasets(self) -> np.ndarray:
        """[N]: the dataset of each document, as its index in the receipt."""
        return np.searchsorted(self._starts, self._rows, side="right") - 1

    def _locate(self, index: int) -> tuple[DocumentStore, int]:
        row = int(self._rows[index])
        if len(self._stores) == 1:
            return self._stores[0], row
        store = bisect_right(self._starts, row) - 1
        return self._stores[store], row - self._starts[store]


def merge(
    stores: Sequence[DocumentStore],
    receipt: Receipt,
    *,
    shares: Sequence[Share],
    seed: int,
    shuffle_before_merging: bool,
    shuffle_merged: bool,
    num_shards: int | None,
    shard_index: int | None,
) -> PreparedDocuments:
    """Merges the documents of all stores by their shares: shuffles each, concatenates, shuffles, takes a shard."""
    sizes = [len(store.lengths) for store in stores]
    drawn = num_drawn(sizes, shares)
    parts = []
    first = 0
    for number, (store, num) in enumerate(zip(stores, drawn, strict=True)):
        local = drawn_rows(sizes[number], num, seed, number, store.key)
        if shuffle_before_merging:
            local = local[permutation(num, "before merging", seed, number, store.key)]
        parts.append(local + first)
        first += sizes[number]
    rows = np.concatenate(parts)
    keys = [store.key for store in stores]
    if shuffle_merged:
        rows = rows[permutation(len(rows), "merged", seed, *keys)]
    if num_shards is not None:
        assert shard_index is not None, "prepare requires both"
        start, stop = shard_range(len(rows), num_shards, shard_index)
        if start == stop:
            raise DataError(
                f"dataset_shard_num: {num_shards} shards of {len(rows)} documents leave shard {shard_index} empty"
            )
        rows = rows[start:stop]
    shuffled = shuffle_before_merging or shuffle_merged
    mixed = drawn != sizes
    order = [
        seed if shuffled or mixed else 0,
        shuffle_before_merging,
        shuffle_merged,
        num_shards or 1,
        shard_index or 0,
    ]
    fingerprint = digest("documents", keys, order, *([drawn] if mixed else []))
    return PreparedDocuments(
        stores, rows, fingerprint=fingerprint, receipt=receipt.with_drawn(drawn) if mixed else receipt
    )


@checked
def split_documents(
    documents: PreparedDocuments, val_set_size: int | float, seed: int
) -> tuple[PreparedDocuments, PreparedDocuments]:
    """Splits into (training, held out), both in the original order.

    `seed` draws the held-out documents: `val_set_size` of them, or that fraction. A document that a mixture repeats
    counts once and is either held out, once, or trained on.
    """
    rows, first_indices = documents.distinct()
    total = len(rows)
    is_fraction = isinstance(val_set_size, float)
    num_held_out = max(1, round(total * val_set_size)) if is_fraction else val_set_size
    valid = 0 < val_set_size < 1 if is_fraction else val_set_size > 0
    if isinstance(val_set_size, bool) or not valid or num_held_out >= total:
        raise DataError(
            f"val_set_size: {val_set_size} of {total} documents cannot be held out; want an integer from 1 to "
            f"{total - 1}, or a fraction between 0 and 1 that leaves documents to train on"
        )
    drawn = permutation(total, "held out", seed, documents.fingerprint)[:num_held_out]
    held_out = np.sort(first_indices[drawn])
    rest = np.flatnonzero(~documents.row_mask(rows[drawn]))
    names = [digest(part, documents.fingerprint, num_held_out, seed) for part in ("training", "held out")]
    return documents.select(rest, names[0]), documents.select(held_out, names[1])
