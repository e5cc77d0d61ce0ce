"""The attention backends of this package, and the registration of others."""

import inspect
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from xorl.kernels.attention.interface import AttentionFn, AttentionRequest
from xorl.kernels.attention.limits import (
    AMPERE,
    BLACKWELL,
    HOPPER,
    MAX_HEAD_DIM,
    flash_refusal,
    installed_version,
    uncapped_refusal,
)
from xorl.kernels.attention.native import native_attention, native_refusal
from xorl.kernels.attention.operator import PackedAttention
from xorl.kernels.attention.plain import FunctionAttention, PlainAttention
from xorl.kernels.attention.reference import eager_attention
from xorl.kernels.attention.sdpa import sdpa_attention
from xorl.kernels.fused.device import missing_device
from xorl.kernels.registry import Backend, Registry

FLASH_2_MIN_VERSION = (2, 8)
# flash4.py calls private functions of the library, so it supports only one version.
FLASH_4_VERSION = "4.0.0b36"
# For wider heads the library sums gradients in no fixed order, even if determinism is requested.
FLASH_3_MAX_DETERMINISTIC_HEAD_DIM = 192
# The head_dims with correct gradients on Hopper.
FLASH_4_HOPPER_HEAD_DIMS = (32, 64, 128, 192, 256)
# Blackwell supports head_dims up to this, and 256.
FLASH_4_MAX_BLACKWELL_HEAD_DIM = 128


def resolve_attention(name: str, request: AttentionRequest) -> AttentionFn:
    """The attention function of the backend `name`; "auto" chooses the best one that can serve the request.

    Raises:
        ValueError: there is no backend of that name.
        RuntimeError: the backend cannot run the request; the message gives the reason and the backends that can.
    """
    return ATTENTION.resolve(name, request)


def register_attention(
    name: str,
    function: PlainAttention | PackedAttention,
    *,
    refusal: Callable[[AttentionRequest], str | None] = lambda request: None,
) -> None:
    """Add a backend, which `resolve_attention` then finds by its name; "auto" never chooses it.

    Args:
        function: a plain function `(q, k, v, layout, *, scale, window) -> [T, H, C]` that autograd differentiates, or a
            `PackedAttention` with kernels for both passes, which also gives the log-sum-exp and works in rings.
        refusal: returns the reason why the backend cannot serve a request, or None if it can.

    Raises ValueError if there is a backend of that name, and for functions that do not take these arguments.
    """
    if not isinstance(function, PackedAttention):
        _check_call("function", function, "(q, k, v, layout, *, scale, window)", 4, ("scale", "window"))
    _check_call("refusal", refusal, "(request)", 1)
    attention = function if isinstance(function, PackedAttention) else FunctionAttention(name, function)

    def refused(request: AttentionRequest) -> str | None:
        if request.sinks and not isinstance(attention, PackedAttention):
            return "it returns no log-sum-exp, which the sinks of the model's heads need"
        if not request.causal and not isinstance(attention, PackedAttention):
            return "it is causal"
        if not (isinstance(attention, PackedAttention) and attention.caps_scores) and uncapped_refusal(request):
            return uncapped_refusal(request)
        return refusal(request)

    ATTENTION.register(Backend(name, load=lambda: attention, refusal=refused))


def _check_call(
    argument: str, function: object, wanted: str, num_positional: int, keywords: Sequence[str] = ()
) -> None:
    """Raise ValueError unless `function` can be called as in `wanted`."""
    if not callable(function):
        raise ValueError(f"{argument} must be a function {wanted}; got {function!r}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function without a signature, such as a built-in one
        return
    try:
        signature.bind(*range(num_positional), **dict.fromkeys(keywords))
    except TypeError as error:
        raise ValueError(f"{argument} must take {wanted}; it takes {signature}: {error}") from error


def _missing_device(request: AttentionRequest) -> str | None:
    return missing_device(request.device_type)


def _sdpa_refusal(request: AttentionRequest) -> str | None:
    return uncapped_refusal(request) or missing_device(request.device_type)


def _flash_2_missing() -> str | None:
    found = installed_version("flash-attn")
    install = "uv pip install --no-build-isolation 'xorl-kernels[fa2]'"
    if found is None or find_spec("flash_attn_2_cuda") is None:
        return f"the package flash-attn is not installed: {install}"
    if tuple(int(part) for part in found.split(".")[:2]) < FLASH_2_MIN_VERSION:
        return f"flash-attn {found} is installed, but 2.8 or later is needed: {install}"
    return None


def _flash_3_refusal(request: AttentionRequest) -> str | None:
    refused = flash_refusal(request, HOPPER, HOPPER)
    if refused is None and request.deterministic and request.head_dim > FLASH_3_MAX_DETERMINISTIC_HEAD_DIM:
        return f"its gradients are deterministic up to head_dim 192, but the model has {request.head_dim}"
    return refused


def _flash_3_missing() -> str | None:
    if find_spec("flash_attn_3") is None:
        return (
            "the package flash_attn_3 is not installed, and no package index has it: "
            "build it from the folder hopper of the flash-attention repository"
        )
    return None


def _flash_4_refusal(request: AttentionRequest) -> str | None:
    refused = flash_refusal(request, HOPPER, BLACKWELL)
    if refused is not None:
        return refused
    head_dim, on_hopper = request.head_dim, torch.cuda.get_device_capability()[0] == HOPPER
    if on_hopper and head_dim not in FLASH_4_HOPPER_HEAD_DIMS:
        return f"on this device it needs a head_dim in {FLASH_4_HOPPER_HEAD_DIMS}, but the model has {head_dim}"
    if not on_hopper and head_dim > FLASH_4_MAX_BLACKWELL_HEAD_DIM and head_dim != MAX_HEAD_DIM:
        return f"on this device it needs a head_dim of up to 128, or 256, but the model has {head_dim}"
    return None


def _flash_4_missing() -> str | None:
    found = installed_version("flash-attn-4")
    if found == FLASH_4_VERSION:
        return None
    install = "uv pip install 'xorl-kernels[fa4]'"
    if found is None:
        return f"the package flash-attn-4 is not installed: {install}"
    return f"flash-attn-4 {found} is installed, but {FLASH_4_VERSION} is needed: {install}"


def _load_flash_4() -> AttentionFn:
    """Set up the library's disk cache of compiled kernels, which must happen before the import, and import it."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(root / "xorl" / "flash_attention_4"))
    return _library("flash4", "flash_attention_4")()


def _library(module: str, name: str) -> Callable[[], AttentionFn]:
    """A loader that imports `module`, which imports its library at the top, and returns the function `name`."""
    return lambda: getattr(import_module(f"xorl.kernels.attention.{module}"), name)


ATTENTION: Registry[AttentionRequest, AttentionFn] = Registry(
    # Fastest first, as measured on Hopper. The last two are for models that cap scores: `native` runs the kernels of
    # `flash_attention_2`, but does not cap scores.
    "attention",
    AttentionRequest,
    preference=("flash_attention_4", "flash_attention_3", "native", "sdpa", "flash_attention_2", "eager"),
)
ATTENTION.register(Backend("eager", load=lambda: eager_attention, refusal=_missing_device))
ATTENTION.register(Backend("sdpa", load=lambda: sdpa_attention, refusal=_sdpa_refusal))
ATTENTION.register(Backend("native", load=lambda: native_attention, refusal=native_refusal))
ATTENTION.register(
    Backend(
        "flash_attention_2",
        load=_library("flash2", "flash_attention_2"),
        refusal=lambda request: flash_refusal(request, AMPERE),
        missing=_flash_2_missing,
    )
)
ATTENTION.register(
    Backend(
        "flash_attention_3",
        load=_library("flash3", "flash_attention_3"),
        refusal=_flash_3_refusal,
        missing=_flash_3_missing,
    )
)
ATTENTION.register(
    Backend(
        "flash_attention_4",
        load=_load_flash_4,
        refusal=_flash_4_refusal,
        missing=_flash_4_missing,
    )
)
