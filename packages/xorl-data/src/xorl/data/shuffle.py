"""Digests and seeded permutations that are the same on every machine and with every version of NumPy.

A resumed run must see the order of the interrupted one, so nothing here may depend on Python's randomised hash or on
NumPy's Generator methods, whose streams may change between releases. The raw streams of its bit generators do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

Scalar = str | int | float | bool | None
JSON = Scalar | Sequence["JSON"] | Mapping[str, "JSON"]


def digest(*parts: JSON) -> str:
    """A 128-bit hexadecimal digest of JSON values, independent of the order of dict keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode())


def permutation(num: int, *key: Scalar) -> np.ndarray:
    """A permutation of range(num), int64, that depends on `num` and `key` alone."""
    bits = np.random.PCG64(int(digest(*key), 16)).random_raw(num)
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)
