"""Converts clients' tensors and tokens (dense or sparse, JSON or bytes) to Arrays. T tokens, K targets at each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from xorl.server.api.responses import InvalidField
from xorl.server.datum import ITEM_BYTES, Array, Dtype

_INTEGERS = ("int32", "int64")
_MAX_DIMENSIONS = 2


class TensorJson(msgspec.Struct, frozen=True):
    """A tensor in JSON: flat values, or the nonzero values of a sparse tensor (CSR) with the sparse_* fields."""

    data: list[float]
    dtype: str = "float32"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class ByteBudget:
    """The limit on the total size of the dense tensors of one request."""

    def __init__(self, num_bytes: int) -> None:
        self._left = self._total = num_bytes

    def take(self, shape: Sequence[int], item_bytes: int) -> None:
        """Reserve memory for a tensor before it is allocated. Raises ValueError if the limit is exceeded."""
        if any(size < 0 for size in shape) or len(shape) > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor must have 1 or 2 dimensions of size 0 or more, got shape {list(shape)[:8]}")
        self._left -= math.prod(shape) * item_bytes
        if self._left < 0:
            raise ValueError(
                f"the tensors of the request take more than {self._total} bytes: send fewer datums at once"
            )


def tokens_array(tokens: Sequence[int] | NDArray[np.generic], vocab_size: int | None, what: str) -> Array:
    """Token ids as int32 [T]. Raises InvalidField for ids outside the vocabulary."""
    try:
        ids = np.asarray(tokens, dtype=np.int64).reshape(-1)
    except (OverflowError, ValueError, TypeError):
        raise InvalidField(what, "has values that are not token ids") from None
    limit = vocab_size or 2**31
    if ids.size and not (ids.min() >= 0 and ids.max() < limit):
        bad = ids[(ids < 0) | (ids >= limit)][0]
        raise InvalidField(what, f"has token {bad}, but token ids must be 0 to {limit - 1}")
    return Array.of(ids.astype(np.int32))


def array_of_json(tensor: TensorJson, budget: ByteBudget, what: str) -> Array:
    """A tensor in JSON as an int64 or float32 Array. Raises ValueError if it is invalid."""
    dtype = "int64" if tensor.dtype in _INTEGERS else "float32"
    try:
        if tensor.dtype not in (*_INTEGERS, "float32", "bfloat16", "float16", "float64"):
            raise ValueError(f"dtype must be one of int64, int32, float32, bfloat16, got {tensor.dtype[:40]!r}")
        values = np.array(tensor.data, dtype=np.float64)
        if dtype == "int64" and not (np.array_equal(values, np.trunc(values)) and (np.abs(values) < 2**53).all()):
            raise ValueError(f"dtype is {tensor.dtype}, but a value is not an integer below 2^53")
        values = values.astype(dtype)
        shape = [len(values)] if tensor.shape is None else tensor.shape
        crow, columns = tensor.sparse_crow_indices, tensor.sparse_col_indices
        if crow is None and columns is None:
            return _dense(values, shape, budget)
        if crow is None or columns is None or tensor.shape is None:
            raise ValueError("a sparse tensor must have sparse_crow_indices, sparse_col_indices and shape")
        return _of_csr(values, np.array(crow, dtype=np.int64), np.array(columns, dtype=np.int64), shape, budget)
    except (ValueError, OverflowError) as problem:
        raise ValueError(f"{what}: {problem}") from None


def array_of_bytes(
    dtype: Dtype,
    shape: Sequence[int],
    dense: bytes,
    csr: tuple[bytes, bytes, bytes] | None,
    budget: ByteBudget,
    what: str,
) -> Array:
    """A tensor in little-endian bytes as an int64 or float32 Array. Raises ValueError if lengths do not match.

    csr: the values, row starts and columns (int64) of a sparse tensor, instead of `dense`.
    """
    try:
        item_bytes = ITEM_BYTES[dtype]
        if csr is None:
            if not shape:
                shape = [len(dense) // item_bytes]
            budget.take(shape, item_bytes)
            return _widened(Array(dtype, tuple(shape), dense))
        values, crow, columns = csr
        count = len(values) // item_bytes
        widened = _widened(Array(dtype, (count,), values)).numpy()
        return _of_csr(widened, np.frombuffer(crow, "<i8"), np.frombuffer(columns, "<i8"), shape, budget)
    except ValueError as problem:
        raise ValueError(f"{what}: {problem}") from None


def _widened(array: Array) -> Array:
    """int32 as int64 and bfloat16 as float32, so that an input has the same dtype for all clients."""
    if array.dtype in ("int64", "float32"):
        return array
    return Array.of(array.numpy().astype(np.int64 if array.dtype == "int32" else np.float32))


def _dense(values: NDArray[np.generic], shape: Sequence[int], budget: ByteBudget) -> Array:
    budget.take(shape, values.itemsize)
    if math.prod(shape) != values.size:
        raise ValueError(f"shape {list(shape)} needs {math.prod(shape)} values, got {values.size}")
    return Array.of(values.reshape(tuple(shape)))


def _of_csr(
    values: NDArray[np.generic],
    crow: NDArray[np.int64],
    columns: NDArray[np.int64],
    shape: Sequence[int],
    budget: ByteBudget,
) -> Array:
    """A CSR tensor as a dense [R, C]: row r has values[crow[r]:crow[r + 1]] in columns[crow[r]:crow[r + 1]]."""
    if len(shape) != 2:
        raise ValueError(f"a sparse tensor must have 2 dimensions, got shape {list(shape)[:8]}")
    budget.take(shape, values.itemsize)
    num_rows, num_columns = shape
    counts = np.diff(crow)
    if (
        len(crow) != num_rows + 1
        or crow[0] != 0
        or crow[-1] != len(values)
        or len(columns) != len(values)
        or (counts < 0).any()
        or (columns.size > 0 and not (columns.min() >= 0 and columns.max() < num_columns))
    ):
        raise ValueError(f"row starts and columns do not describe a sparse tensor of shape {list(shape)}")
    dense = np.zeros((num_rows, num_columns), dtype=values.dtype)
    dense[np.repeat(np.arange(num_rows), counts), columns] = values
    return Array.of(dense)
