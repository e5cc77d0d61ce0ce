"""Recorded experts in the forms in which inference engines return them, and back. No checks against the model.

Shapes: R rows (tokens), L layers, K experts per token.
"""

from __future__ import annotations

import base64
import binascii

import msgspec
import numpy as np
from numpy.typing import NDArray

from xorl.server.api.responses import JSON
from xorl.server.api.tensors import ByteBudget
from xorl.server.datum import Array

_DTYPES = ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64")
_RANGE = np.iinfo(np.int16)


class RecordJson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record as one array: values or their little-endian bytes in base64, with their shape [R, L, K]."""

    data: str | list[int]
    shape: list[int]
    dtype: str = "int32"


Record = RecordJson | str | list[list[list[int]]]
"""A record with its shape; the bytes of int32 values in base64, as SGLang returns them; or nested lists [R][L][K]."""


def record_array(record: Record, budget: ByteBudget, what: str) -> Array:
    """A record as int16 [R, L, K]; flat if it has no shape. Raises ValueError if it is invalid."""
    try:
        values = _values(record)
        budget.take([values.size], 2)
        outside = values[(values < _RANGE.min) | (values > _RANGE.max)]
        if outside.size:
            raise ValueError(f"{outside.flat[0]} is not the index of an expert")
        return Array.of(values.astype(np.int16))
    except (ValueError, OverflowError) as problem:
        raise ValueError(f"{what}: {problem}") from None


def _values(record: Record) -> NDArray[np.integer]:
    if isinstance(record, str):
        return _decoded(record, "int32")
    if isinstance(record, RecordJson):
        if record.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {record.dtype[:40]!r}")
        data = record.data
        values = np.array(data, np.int64) if isinstance(data, list) else _decoded(data, record.dtype)
        shape = record.shape
        if len(shape) != 3 or min(shape) < 0 or shape[0] * shape[1] * shape[2] != values.size:
            raise ValueError(
                f"shape must be [tokens, layers, experts per token] of the {values.size} values, got {shape[:8]}"
            )
        return values.reshape(shape)
    sizes = {(len(row), len(layer)) for row in record for layer in row}
    if len(sizes) > 1 or (record and not sizes) or any(len(row) != len(record[0]) for row in record):
        raise ValueError("all tokens must have the same number of layers, and all layers the same number of experts")
    return np.array(record, np.int64) if record else np.zeros(0, np.int64)


def _decoded(text: str, dtype: str) -> NDArray[np.integer]:
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as problem:
        raise ValueError(f"the text is not base64: {problem}") from None
    numbers = np.dtype(dtype).newbyteorder("<")
    if len(data) % numbers.itemsize:
        raise ValueError(f"{len(data)} bytes are no {dtype} values")
    return np.frombuffer(data, numbers)


def record_base64(*parts: Array | None) -> str:
    """Parts of a record, one after the other, as SGLang returns a record: int32 bytes in base64."""
    values = [part.numpy().astype("<i4").tobytes() for part in parts if part is not None]
    return base64.b64encode(b"".join(values)).decode()


def record_json(*parts: Array | None) -> JSON:
    """Parts of a record, one after the other, in a form that `RecordJson` reads; None without any."""
    shapes = [part.shape for part in parts if part is not None]
    if not shapes:
        return None
    shape = [sum(rows for rows, *_ in shapes), *shapes[0][1:]]
    return {"data": record_base64(*parts), "shape": shape, "dtype": "int32"}
