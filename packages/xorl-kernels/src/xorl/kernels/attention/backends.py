"""The table of attention backends: a new one is a file beside this and a line here."""

from xorl.kernels.attention.interface import AttentionFn, AttentionRequest
from xorl.kernels.attention.native import native_attention, native_refusal
from xorl.kernels.attention.reference import eager_attention
from xorl.kernels.attention.sdpa import sdpa_attention
from xorl.kernels.registry import Backend, Registry

ATTENTION: Registry[AttentionRequest, AttentionFn] = Registry("attention", preference=("native", "sdpa"))

ATTENTION.register(Backend("eager", load=lambda: eager_attention, refusal=lambda request: None))
ATTENTION.register(Backend("sdpa", load=lambda: sdpa_attention, refusal=lambda request: None))
ATTENTION.register(Backend("native", load=lambda: native_attention, refusal=native_refusal))


def resolve_attention(name: str, request: AttentionRequest) -> AttentionFn:
    """The attention function called `name` ("auto" picks), checked against what it will be asked to run.

    Raises:
        ValueError: no backend has that name.
        RuntimeError: the backend cannot run the request; the message says why and what else can.
    """
    return ATTENTION.resolve(name, request)
