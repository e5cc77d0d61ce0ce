"""Array, a tensor in the form sent between processes, and Datum, one sequence with its loss inputs; without torch."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

Dtype = Literal["int16", "int32", "int64", "float32", "bfloat16"]
ITEM_BYTES: dict[Dtype, int] = {"int16": 2, "int32": 4, "int64": 8, "float32": 4, "bfloat16": 2}


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor as row-major little-endian values.

    Raises ValueError, on construction and on decoding, if the data do not fit the shape.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"the sizes of a shape must be at least 0, got {list(self.shape)}")
        num_bytes = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if len(self.data) != num_bytes:
            raise ValueError(
                f"an array of shape {list(self.shape)} in {self.dtype} has {num_bytes} bytes, got {len(self.data)}"
            )

    @classmethod
    def of(cls, values: NDArray[np.generic]) -> Array:
        """Create an array from int16, int32, int64 or float32 values; other dtypes raise ValueError."""
        dtype = values.dtype.name
        if dtype not in ("int16", "int32", "int64", "float32"):
            raise ValueError(f"the dtype of an array must be int16, int32, int64 or float32, got {dtype}")
        return cls(dtype, values.shape, np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes())

    def numpy(self) -> NDArray[np.generic]:
        """A read-only view of the values; bfloat16, which numpy lacks, is widened to float32."""
        if self.dtype == "bfloat16":
            bits = np.frombuffer(self.data, dtype="<u2").astype(np.uint32) << 16
            return bits.view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


class Datum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sequence: tokens int32 [T], and the inputs of its loss by name.

    Arrays are [T], or [T, K] for K targets at each position: target_tokens (int64, already shifted by the client:
    target_tokens[i] follows tokens[:i + 1]), weights, advantages, logprobs, clip_low_threshold and any other input
    that the client names. All are dense; all but the tokens are float32.

    routed_experts: recorded experts to replay, int16 [T or T - 1, layers, experts per token], or flat if the client did
    not send a shape. The layers are all layers, or all with experts. With T - 1 rows, the last token has no record.

    Raises ValueError, on construction and on decoding, if the lengths differ.
    """

    tokens: Array
    arrays: dict[str, Array]
    routed_experts: Array | None = None

    def __post_init__(self) -> None:
        if self.tokens.dtype != "int32" or len(self.tokens.shape) != 1 or not self.tokens.shape[0]:
            raise ValueError(
                f"the tokens of a datum must be int32 [T] with T >= 1, got {self.tokens.dtype} "
                f"{list(self.tokens.shape)}"
            )
        for name, array in self.arrays.items():
            if len(array.shape) not in (1, 2) or array.shape[0] != self.tokens.shape[0]:
                raise ValueError(
                    f"{name} of a datum of {self.tokens.shape[0]} tokens must have one value, or one row of values, "
                    f"for each token; got shape {list(array.shape)}"
                )
        routes = self.routed_experts
        if routes is not None and (routes.dtype != "int16" or len(routes.shape) not in (1, 3)):
            raise ValueError(
                "the routed_experts of a datum must be int16 [tokens, layers, experts per token], or flat; got "
                f"{routes.dtype} {list(routes.shape)}"
            )
