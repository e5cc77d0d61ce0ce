"""Tensors as they travel between processes, and Datum, one sequence with what a loss needs of it. No torch here."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Dtype = Literal["int32", "int64", "float32", "bfloat16"]
ITEM_BYTES: dict[Dtype, int] = {"int32": 4, "int64": 8, "float32": 4, "bfloat16": 2}


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor: row-major little-endian values.

    Raises ValueError, also while it is decoded, where shape and data do not agree.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"a shape has sizes of 0 or more, got {list(self.shape)}")
        wanted = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if len(self.data) != wanted:
            raise ValueError(
                f"an array of shape {list(self.shape)} in {self.dtype} has {wanted} bytes, got {len(self.data)}"
            )

    @classmethod
    def of(cls, values: NDArray[np.generic]) -> Array:
        """An array of int32, int64 or float32 values; others raise ValueError."""
        dtype = values.dtype.name
        if dtype not in ("int32", "int64", "float32"):
            raise ValueError(f"an array is made of int32, int64 or float32, got {dtype}")
        return cls(dtype, values.shape, np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes())

    def numpy(self) -> NDArray[np.generic]:
        """A read-only view of the values; bfloat16, which numpy lacks, is widened to float32."""
        if self.dtype == "bfloat16":
            bits = np.frombuffer(self.data, dtype="<u2").astype(np.uint32) << 16
            return bits.view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


class Datum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sequence: tokens int32 [T], and what its loss needs by name.

    Arrays are [T], or [T, K] for several targets at each place: target_tokens (int64, already shifted by the client:
    target_tokens[i] follows tokens[:i + 1]), weights, advantages, logprobs, clip_low_threshold and what else the
    client calls its inputs, all dense and float32 but for tokens.

    Raises ValueError, also while it is decoded, where lengths do not agree.
    """

    tokens: Array
    arrays: dict[str, Array]

    def __post_init__(self) -> None:
        if self.tokens.dtype != "int32" or len(self.tokens.shape) != 1 or not self.tokens.shape[0]:
            raise ValueError(
                f"the tokens of a datum are int32 [T] with T of at least 1, got {self.tokens.dtype} "
                f"{list(self.tokens.shape)}"
            )
        for name, array in self.arrays.items():
            if len(array.shape) not in (1, 2) or array.shape[0] != self.tokens.shape[0]:
                raise ValueError(
                    f"{name} of a datum of {self.tokens.shape[0]} tokens has a value, or a row of them, for each; "
                    f"got shape {list(array.shape)}"
                )
