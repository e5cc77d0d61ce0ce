"""tinker's protobuf messages: a table of their layout, from which the message classes are generated.

A field is (name, number, type, oneof or ""); a + after the type means repeated. As on the wire, maps are repeated
pairs and enums are int32.
"""

from __future__ import annotations

from typing import Protocol, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

_PACKAGE = "xorl.client"
_Scalar = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Scalar.TYPE_BOOL,
    "bytes": _Scalar.TYPE_BYTES,
    "double": _Scalar.TYPE_DOUBLE,
    "int32": _Scalar.TYPE_INT32,
    "int64": _Scalar.TYPE_INT64,
    "string": _Scalar.TYPE_STRING,
    "uint32": _Scalar.TYPE_UINT32,
}
_LAYOUT: dict[str, tuple[tuple[str, int, str, str], ...]] = {
    "SparseCsr": (("values", 1, "bytes", ""), ("crow_indices", 2, "bytes", ""), ("col_indices", 3, "bytes", "")),
    "Tensor": (
        ("dense", 1, "bytes", "encoding"),
        ("sparse_csr", 2, "SparseCsr", "encoding"),
        ("dtype", 3, "int32", ""),
        ("shape", 4, "int64+", ""),
    ),
    "NamedTensor": (("key", 1, "string", ""), ("value", 2, "Tensor", "")),
    "EncodedText": (("tokens", 1, "bytes", ""),),
    "Image": (("data", 1, "bytes", ""), ("format", 2, "string", ""), ("expected_tokens", 3, "int32", "")),
    "Dmel": (("dmel", 1, "bytes", ""),),
    "Chunk": (
        ("encoded_text", 1, "EncodedText", "chunk"),
        ("image", 2, "Image", "chunk"),
        ("dmel", 3, "Dmel", "chunk"),
    ),
    "Datum": (("model_input", 1, "Chunk+", ""), ("loss_fn_inputs", 2, "NamedTensor+", "")),
    "LossOption": (("number", 1, "double", "value"), ("text", 2, "string", "value")),
    "NamedLossOption": (("key", 1, "string", ""), ("value", 2, "LossOption", "")),
    "NamedNumber": (("key", 1, "string", ""), ("value", 2, "double", "")),
    "ForwardBackwardRequest": (
        ("model_id", 1, "string", ""),
        ("seq_id", 2, "int32", ""),
        ("data", 3, "Datum+", ""),
        ("loss_fn", 4, "string", ""),
        ("loss_fn_config", 5, "NamedNumber+", ""),
        ("forward_only", 6, "bool", ""),
        ("loss_fn_config_v2", 7, "NamedLossOption+", ""),
    ),
    "BatchedTensor": (
        ("data", 1, "bytes", ""),
        ("offsets", 2, "bytes", ""),
        ("dtype", 3, "int32", ""),
        ("trailing_shape", 4, "int64+", ""),
    ),
    "NamedBatchedTensor": (("key", 1, "string", ""), ("value", 2, "BatchedTensor", "")),
    "ArrayRecord": (
        ("type_tag", 1, "string", ""),
        ("fields", 2, "NamedBatchedTensor+", ""),
        ("num_datums", 3, "int64", ""),
    ),
    "ForwardBackwardOutput": (
        ("loss_fn_output_type", 1, "string", ""),
        ("loss_fn_outputs", 2, "ArrayRecord+", ""),
        ("metrics", 3, "NamedNumber+", ""),
    ),
    "TopLogprobs": (
        ("token_ids", 1, "bytes", ""),
        ("logprobs", 2, "bytes", ""),
        ("k", 3, "uint32", ""),
        ("length", 4, "uint32", ""),
    ),
    "SampledSequence": (
        ("stop_reason", 1, "int32", ""),
        ("tokens", 2, "bytes", ""),
        ("logprobs", 3, "bytes", ""),
        ("topk_sampled_logprobs", 4, "TopLogprobs", ""),
    ),
    "SampleResponse": (
        ("sequences", 1, "SampledSequence+", ""),
        ("prompt_logprobs", 2, "bytes", ""),
        ("topk_prompt_logprobs", 3, "TopLogprobs", ""),
        ("prompt_cache_hit_tokens", 4, "int32", ""),
        ("target_prompt_logprobs", 5, "Tensor", ""),
        ("prompt_alt_tokens", 6, "Alternatives", ""),
    ),
    "Alternatives": (("tokens", 1, "Tensor", ""), ("logprobs", 2, "Tensor", "")),
}

DTYPES = {"float32": 1, "int64": 2, "int32": 3, "bfloat16": 4}
"""The enum values of dtypes."""


class MessageClass(Protocol):
    """A message's class, as far as it is used; its fields are in the table."""

    def __call__(self, **fields: object) -> Message: ...


def _classes() -> dict[str, MessageClass]:
    file = descriptor_pb2.FileDescriptorProto(name="xorl/client.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _LAYOUT.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind, oneof in fields:
            base = kind.removesuffix("+")
            label = _Scalar.LABEL_REPEATED if kind.endswith("+") else _Scalar.LABEL_OPTIONAL
            field = message.field.add(name=field_name, number=number, label=label)
            if base in _SCALARS:
                field.type = _SCALARS[base]
            else:
                field.type = _Scalar.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{base}"
            if oneof:
                if not message.oneof_decl:
                    message.oneof_decl.add(name=oneof)
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _LAYOUT}
    return {name: cast(MessageClass, message_factory.GetMessageClass(found[name])) for name in _LAYOUT}


MESSAGES = _classes()
"""The message classes by name."""


def parse(name: str, data: bytes) -> Message:
    """Parse a message of the type `name`. Raises ValueError if `data` is not one."""
    message = MESSAGES[name]()
    try:
        message.ParseFromString(data)
    except DecodeError as problem:
        raise ValueError(f"the body is not a valid {name} in protobuf: {problem}") from None
    return message
