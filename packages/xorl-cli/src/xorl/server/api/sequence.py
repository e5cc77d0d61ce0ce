"""Finds the model and seq_id of a refused request, so that later calls of the model do not wait for it."""

from __future__ import annotations

import re

import zstandard
from starlette.requests import Request

from xorl.server.api.gate import HEAD_BYTES, decompress
from xorl.server.identifiers import check_model_id

_MODEL_ID = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,200})"')
_SEQ_ID = re.compile(rb'"seq_id"\s*:\s*(\d{1,16})(?!\d)')
# In protobuf: the tag and length of field 1, a string, and later the tag of field 2 with a varint of up to five bytes.
_STRING = re.compile(rb"\x0a([\x01-\x7f]|[\x80-\xff]\x01)", re.DOTALL)
_VARINT = re.compile(rb"\x10([\x80-\xff]{0,4}[\x00-\x7f])", re.DOTALL)


def sequence_of(request: Request) -> tuple[str, int] | None:
    """The model and seq_id at the beginning of a request's body, where both clients put them; None if not found."""
    head: bytes = getattr(request.state, "head", b"")
    if request.headers.get("content-encoding") == "zstd":
        try:
            head = decompress(head, HEAD_BYTES)
        except zstandard.ZstdError:
            return None
    found = _in_protobuf(head) if is_protobuf(request) else _in_json(head)
    if found is None:
        return None
    try:
        return check_model_id(found[0].decode()), found[1]
    except ValueError:
        return None


def is_protobuf(request: Request) -> bool:
    """Whether the request's body is protobuf, by its content type."""
    return request.headers.get("content-type", "").startswith("application/x-protobuf")


def _in_json(head: bytes) -> tuple[bytes, int] | None:
    model_id, seq_id = _MODEL_ID.search(head), _SEQ_ID.search(head)
    return None if model_id is None or seq_id is None else (model_id[1], int(seq_id[1]))


def _in_protobuf(head: bytes) -> tuple[bytes, int] | None:
    length = _STRING.match(head)
    if length is None:
        return None
    size = length[1][0] if len(length[1]) == 1 else (length[1][0] & 0x7F) + (length[1][1] << 7)
    end = length.end() + size
    number = _VARINT.match(head, end)
    if number is None:
        return None
    seq_id = sum((byte & 0x7F) << (7 * index) for index, byte in enumerate(number[1]))
    return head[length.end() : end], seq_id
