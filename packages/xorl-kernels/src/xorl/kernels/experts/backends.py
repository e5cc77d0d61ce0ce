"""The implementations of experts by name. To add one, add its products to this folder and register it here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from xorl.kernels.arguments import check_at_least, check_device_type, check_floating
from xorl.kernels.experts import grouped, reference
from xorl.kernels.experts.adapted import Factors
from xorl.kernels.experts.gates import SILU, Biases, Gate
from xorl.kernels.experts.quantized import ExpertsWeight
from xorl.kernels.fused import triton_refusal
from xorl.kernels.fused.device import missing_device
from xorl.kernels.grouped import product_refusal
from xorl.kernels.quant.fp8 import fp8_refusal
from xorl.kernels.registry import Backend, Registry


class ExpertsFn(Protocol):
    """Computes the experts of a layer, as `reference.experts`."""

    def __call__(
        self,
        x: Tensor,
        gate_up: ExpertsWeight,
        down: ExpertsWeight,
        weights: Tensor,
        ids: Tensor,
        num_real: Tensor | None = None,
        *,
        num_rows: int | None = None,
        num_passes: int = 1,
        gate: Gate = SILU,
        biases: Biases | None = None,
        recompute: bool = False,
        factors: Factors | None = None,
    ) -> Tensor:
        """[T, D]."""
        ...


@dataclass(frozen=True)
class ExpertsRequest:
    """The requirements of a model's experts.

    Attributes:
        device_type: "cpu", "cuda", ...
        dtype: of x and of the weights, if they are not quantised.
        width, expert_width: D and F of `reference.experts`.

    Raises ValueError for values of other types.
    """

    device_type: str
    dtype: torch.dtype
    width: int
    expert_width: int

    def __post_init__(self) -> None:
        check_device_type(self.device_type)
        check_floating("dtype", self.dtype)
        check_at_least("width", self.width, 1)
        check_at_least("expert_width", self.expert_width, 1)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"device={self.device_type} dtype={dtype} width={self.width} expert_width={self.expert_width}"


def _native_refusal(request: ExpertsRequest) -> str | None:
    # On a CPU, a loop over the experts replaces torch's kernel; there is no device for the host to wait for.
    if request.device_type == "cpu":
        return None
    return missing_device(request.device_type) or product_refusal(request.dtype, request.width, request.expert_width)


def _triton_refusal(request: ExpertsRequest) -> str | None:
    if request.dtype == torch.float64:
        return "it computes in fp32"
    return triton_refusal(request.device_type) or missing_device(request.device_type)


def _fp8_refusal(request: ExpertsRequest) -> str | None:
    refusal = fp8_refusal(torch.device(request.device_type))
    return refusal or (None if request.device_type == "cpu" else _triton_refusal(request))


def _quack_refusal(request: ExpertsRequest) -> str | None:
    if request.device_type != "cuda":
        return f"it runs on CUDA devices, not on {request.device_type}"
    return missing_device(request.device_type) or product_refusal(request.dtype, request.width, request.expert_width)


def _quack_missing() -> str | None:
    if find_spec("quack") is None:
        return "the package quack-kernels is not installed: uv pip install 'xorl-kernels[fa4]'"
    return None


def _load(name: str) -> ExpertsFn:
    try:
        import_module(f"xorl.kernels.experts.products_{name}")
    except ImportError:
        raise
    except Exception as error:
        # With a version of nvidia-cutlass-dsl that it does not support, quack-kernels raises various errors.
        raise ImportError(f"{type(error).__name__}: {error}") from error
    return partial(grouped.experts, products=name)


def products_name(experts: ExpertsFn) -> str | None:
    """The grouped products that `experts` computes with (`grouped.experts`); None: it computes otherwise."""
    return experts.keywords["products"] if isinstance(experts, partial) else None


EXPERTS: Registry[ExpertsRequest, ExpertsFn] = Registry(
    # Fastest first, as measured on Hopper (docs/records/experts.md).
    "experts",
    ExpertsRequest,
    preference=("quack", "native", "triton", "eager"),
)
EXPERTS.register(
    Backend("eager", load=lambda: reference.experts, refusal=lambda request: missing_device(request.device_type))
)
EXPERTS.register(Backend("native", load=lambda: _load("native"), refusal=_native_refusal))
EXPERTS.register(Backend("triton", load=lambda: _load("triton"), refusal=_triton_refusal))
# Not for auto: it rounds to fp8.
EXPERTS.register(Backend("fp8", load=lambda: _load("fp8"), refusal=_fp8_refusal))
EXPERTS.register(Backend("quack", load=lambda: _load("quack"), refusal=_quack_refusal, missing=_quack_missing))
