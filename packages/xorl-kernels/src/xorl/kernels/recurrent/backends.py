"""The implementations of recurrent layers by name. To add one, add its file to this folder and register it here."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from xorl.kernels.arguments import check_at_least, check_device_type, check_floating
from xorl.kernels.attention.limits import HOPPER, installed_version
from xorl.kernels.fused import triton_refusal
from xorl.kernels.fused.device import missing_device
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.recurrent.causal_conv import Activation, causal_conv
from xorl.kernels.recurrent.gated_delta import gated_delta
from xorl.kernels.recurrent.norms import gated_norm, norm_of_gated, unit_norm
from xorl.kernels.recurrent.state_space import state_space
from xorl.kernels.registry import Backend, Registry

# fla.py calls private functions of the library, so it supports only one version.
FLA_VERSION = "0.6.0"
FLA_MAX_KEY_DIM = 256


class GatedDeltaFn(Protocol):
    """Computes the gated delta rule, as `gated_delta`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: SequenceLayout) -> Tensor:
        """[T, H, V]."""
        ...


class StateSpaceFn(Protocol):
    """Computes the scan of a state space, as `state_space`."""

    def __call__(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, layout: SequenceLayout
    ) -> Tensor:
        """[T, H, P]."""
        ...


class CausalConvFn(Protocol):
    """Computes a causal convolution, as `causal_conv`."""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, layout: SequenceLayout
    ) -> Tensor:
        """[T, C]."""
        ...


@dataclass(frozen=True)
class RecurrenceFns:
    """The functions of recurrent layers. The plain ones, which are the defaults, define what they compute."""

    gated_delta: GatedDeltaFn = gated_delta
    causal_conv: CausalConvFn = causal_conv
    unit_norm: Callable[[Tensor, float], Tensor] = unit_norm
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = gated_norm
    state_space: StateSpaceFn = state_space
    norm_of_gated: Callable[[Tensor, Tensor, Tensor, float], Tensor] = norm_of_gated


PLAIN_RECURRENCE = RecurrenceFns()


@dataclass(frozen=True)
class RecurrenceRequest:
    """The requirements of a model's recurrent layers.

    Attributes:
        device_type: "cpu", "cuda", ...
        dtype: of the activations.
        heads: the channels of a head of keys, and of values, of the gated delta rule; None: there is none.
        states: the channels of a head, and of its states, of a state space; None: there is none.

    Without both, there are convolutions alone.

    Raises ValueError for values of other types.
    """

    device_type: str
    dtype: torch.dtype
    heads: tuple[int, int] | None = None
    states: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_device_type(self.device_type)
        check_floating("dtype", self.dtype)
        for name, sizes in (("heads", self.heads), ("states", self.states)):
            for each in sizes or ():
                check_at_least(name, each, 1)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"device={self.device_type} dtype={dtype} heads={self.heads} states={self.states}"


def _fla_refusal(request: RecurrenceRequest) -> str | None:
    if (reason := triton_refusal(request.device_type) or missing_device(request.device_type)) is not None:
        return reason
    if request.dtype != torch.bfloat16:
        return f"it computes in bf16, not in {str(request.dtype).removeprefix('torch.')}"
    if request.heads is not None and request.heads[0] > FLA_MAX_KEY_DIM:
        return f"it supports key heads of up to {FLA_MAX_KEY_DIM} channels, but the model has {request.heads[0]}"
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return "it is certified for Hopper GPUs alone"
    return None


def _fla_missing() -> str | None:
    found, install = installed_version("fla-core"), "uv pip install 'xorl-kernels[fla]'"
    if found is None or find_spec("fla") is None:
        return f"the package fla-core is not installed: {install}"
    return None if found == FLA_VERSION else f"fla-core {found} is installed, but {FLA_VERSION} is needed: {install}"


def _load_fla() -> RecurrenceFns:
    return import_module("xorl.kernels.recurrent.fla").FUNCTIONS


def _load_batched() -> RecurrenceFns:
    return import_module("xorl.kernels.recurrent.batched").FUNCTIONS


def _load_triton() -> RecurrenceFns:
    return import_module("xorl.kernels.recurrent.space_triton").FUNCTIONS


def _triton_refusal(request: RecurrenceRequest) -> str | None:
    if request.states is None:
        return "it is for state spaces"
    return triton_refusal(request.device_type) or missing_device(request.device_type)


def _batched_refusal(request: RecurrenceRequest) -> str | None:
    if request.device_type == "cpu":
        return "it is for devices on which many small operations take long, which a CPU is not"
    return missing_device(request.device_type)


RECURRENCES: Registry[RecurrenceRequest, RecurrenceFns] = Registry(
    "recurrence", RecurrenceRequest, preference=("fla", "triton", "batched", "plain")
)
RECURRENCES.register(
    Backend("plain", load=lambda: PLAIN_RECURRENCE, refusal=lambda request: missing_device(request.device_type))
)
RECURRENCES.register(Backend("batched", load=_load_batched, refusal=_batched_refusal))
RECURRENCES.register(Backend("triton", load=_load_triton, refusal=_triton_refusal))
RECURRENCES.register(Backend("fla", load=_load_fla, refusal=_fla_refusal, missing=_fla_missing))
