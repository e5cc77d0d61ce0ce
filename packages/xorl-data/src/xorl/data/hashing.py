"""Digests of values and files, and seeded permutations, that are the same on every machine and NumPy version.

A resumed run must see the same order as the interrupted one. So nothing here may depend on Python's randomised hash, or
on NumPy's Generator, whose streams may change between releases. The raw streams of NumPy's bit generators are stable.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash

from xorl.data.errors import DataError

Scalar = str | int | float | bool | None
JSON = Scalar | Sequence["JSON"] | Mapping[str, "JSON"]

HASH_BLOCK_BYTES = 16 << 20


def digest(*parts: JSON) -> str:
    """A 128-bit hexadecimal digest of JSON values and integers of NumPy, independent of the order of dict keys."""
    return xxhash.xxh3_128_hexdigest(
        json.dumps(parts, sort_keys=True, separators=(",", ":"), default=operator.index).encode()
    )


def hash_file(path: Path) -> str:
    """The xxh3_128 of a file's content, in hexadecimal."""
    hasher = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(HASH_BLOCK_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def hash_files(paths: Sequence[Path]) -> list[str]:
    """The xxh3_128 of each file of a source. Raises DataError if one cannot be read."""
    hashes = []
    for path in paths:
        try:
            hashes.append(hash_file(path))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return hashes


def permutation(num: int, *key: Scalar) -> np.ndarray:
    """A permutation of range(num), int64, that depends only on `num` and `key`."""
    bits = np.random.PCG64(int(digest(*key), 16)).random_raw(num)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)
