"""Which place in which model's order a refused body would have had: later requests must not wait for it."""

from __future__ import annotations

import re

import zstandard
from starlette.requests import Request

from xorl.server.api.gate import HEAD_BYTES, decompress
from xorl.server.identifiers import check_model_id

_MODEL_ID = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,200})"')
_SEQ_ID = re.compile(rb'"seq_id"\s*:\s*(\d{1,16})(?!\d)')
# In protobuf: field 1 with a length, then field 2 with a number of up to five bytes.
_PROTOBUF = re.compile(rb"\x0a([\x01-\x7f]|[\x80-\xff]\x01)", re.DOTALL)
_NUMBER = re.compile(rb"\x10([\x80-\xff]{0,4}[\x00-\x7f])", re.DOTALL)


def place_of(request: Request) -> tuple[str, int] | None:
    """The model and seq_id at the begin of a request's body, where both clients put them; None without them."""
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
    """Whether the body says that it is."""
    return request.headers.get("content-type", "").startswith("application/x-protobuf")


def _in_json(head: bytes) -> tuple[bytes, int] | None:
    model_id, seq_id = _MODEL_ID.search(head), _SEQ_ID.search(head)
    return None if model_id is None or seq_id is None else (model_id[1], int(seq_id[1]))


def _in_protobuf(head: bytes) -> tuple[bytes, int] | None:
    length = _PROTOBUF.match(head)
    if length is None:
        return None
    size = length[1][0] if len(length[1]) == 1 else (length[1][0] & 0x7F) + (length[1][1] << 7)
    end = length.end() + size
    number = _NUMBER.match(head, end)
    if number is None:
        return None
    seq_id = sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(number[1]))
    return head[length.end() : end], seq_id
