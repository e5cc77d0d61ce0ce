"""Linear layers that multiply in fp8, in the forward pass and for both gradients, with dynamic scales; and experts.

`tensorwise` uses one scale per matrix, with activations and weights in E4M3 and gradients in E5M2 (arXiv:2209.05433).
`rowwise` uses one scale for each vector along the contraction dimension; with so many scales, E4M3 has enough range for
gradients too (arXiv:2412.19437, section 3.3.2). The forward product uses fast accumulation; the products for the
gradients accumulate in fp32. Parameters, their names and their gradients are those of `Linear`. Experts always have one
scale for each vector, and gradients of their weights are not multiplied in fp8 (`xorl.kernels.experts.products_fp8`).

`xorl.core.parallel.fp8` makes the quantised copies of weights and gathers them.

Shapes: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from xorl.core.nn.layers import Linear
from xorl.core.nn.moe import Experts
from xorl.kernels.arguments import check_choice
from xorl.kernels.experts import EXPERTS, ExpertsRequest
from xorl.kernels.quant.fp8 import (
    E4M3,
    E5M2,
    amax,
    cast_axiswise,
    cast_columnwise,
    cast_rowwise,
    cast_tensorwise,
    cast_tensorwise_both,
    scaled_mm,
    transpose,
)

Fp8Recipe = Literal["tensorwise", "rowwise"]

# Not quantised: rounding could change which experts are selected, and the product is too small to save time.
ROUTERS = ("router", "gate")
FEATURE_MULTIPLE = 16
EXPERTS_IN_FP8 = "fp8"


def convert_linears(layers: nn.Module, recipe: Fp8Recipe, exclude: Sequence[str] = ROUTERS) -> tuple[str, ...]:
    """Replace every `Linear` inside `layers`, in place, by an `Fp8Linear` with the same parameters.

    Layers whose path ends in one of the names in `exclude`, as whole path components, are kept. Returns the paths of
    the replaced layers.

    Raises ValueError, before anything is changed, for an unknown recipe, for names in `exclude` that no module has
    (other than those of routers), and for feature counts that fp8 matrix units do not support.
    """
    check_choice("recipe", recipe, Fp8Recipe)
    linears = fp8_linears(layers, exclude)
    for path, linear in linears.items():
        layers.set_submodule(path, Fp8Linear(linear, recipe))
    return tuple(linears)


def fp8_linears(layers: nn.Module, exclude: Sequence[str] = ROUTERS) -> dict[str, Linear]:
    """The layers that `convert_linears` replaces, by path; raises ValueError as it does."""
    if isinstance(exclude, str):
        raise ValueError(f"exclude: must be a list of names, got {exclude!r}; write [{exclude!r}]")
    modules = dict(layers.named_modules())
    unknown = [name for name in exclude if name not in ROUTERS and not any(_ends_in(path, name) for path in modules)]
    if unknown:
        raise ValueError(f"exclude: no module is named {', '.join(unknown)}")
    linears = {
        path: module
        for path, module in modules.items()
        if type(module) is Linear and not any(_ends_in(path, name) for name in exclude)
    }
    refused = [
        f"{path} [{linear.out_features}, {linear.in_features}]"
        for path, linear in linears.items()
        if linear.out_features % FEATURE_MULTIPLE or linear.in_features % FEATURE_MULTIPLE
    ]
    if refused:
        raise ValueError(
            f"fp8: its matrix units need feature counts that are multiples of {FEATURE_MULTIPLE}, but "
            f"{len(refused)} linear layers have other sizes: {', '.join(refused[:4])}; "
            'set fp8="none" for this model, or share its matrices among fewer ranks'
        )
    return linears


def convert_experts(layers: nn.Module, device_type: str) -> None:
    """Make all `Experts` inside `layers` multiply in fp8, in place. Raises ValueError as `check_experts` does."""
    check_experts(layers, device_type)
    for module in layers.modules():
        if isinstance(module, Experts):
            module.use_kernel(EXPERTS.resolve(EXPERTS_IN_FP8, _request(module, device_type)))


def check_experts(layers: nn.Module, device_type: str) -> None:
    """Raise ValueError if the experts inside `layers` cannot multiply in fp8 on this type of device."""
    try:
        for module in layers.modules():
            if isinstance(module, Experts):
                EXPERTS.check(EXPERTS_IN_FP8, _request(module, device_type))
    except RuntimeError as error:
        raise ValueError(f'fp8: {error}; set fp8="none"') from error


def _request(experts: Experts, device_type: str) -> ExpertsRequest:
    up, down = experts.gate_up_proj, experts.down_proj
    return ExpertsRequest(device_type, torch.bfloat16, up.in_features, down.in_features)


def _ends_in(path: str, name: str) -> bool:
    return f".{path}".endswith(f".{name}")


class Fp8Linear(Linear):
    """x @ weight.T + bias in the dtype of x, multiplied in fp8.

    Attributes:
        recipe: the scaling.
        weight_fp8, weight_descale: under `tensorwise`, an fp8 copy of the weight [O, I] and its scale. The code that
            sets them keeps them current; `weight` then only receives the gradient. If None, each forward pass
            quantises the weight.
    """

    weight_fp8: Tensor | None
    weight_descale: Tensor | None

    def __init__(self, linear: Linear, recipe: Fp8Recipe) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.adapter = linear.adapter
        self.shares, self.adds_bias = linear.shares, linear.adds_bias
        self.recipe = recipe
        self.weight_fp8 = None
        self.weight_descale = None
        self.train(linear.training)

    def base(self, x: Tensor) -> Tensor:
        """The output of the layer without its adapter, multiplied in fp8."""
        rows = x.reshape(-1, self.in_features)  # [T, I]
        y = self._tensorwise(rows) if self.recipe == "tensorwise" else self._rowwise(rows)
        y = y.unflatten(0, x.shape[:-1]) if x.dim() != 2 else y
        bias = self.added_bias(x.dtype)
        return y if bias is None else y + bias

    def _tensorwise(self, x: Tensor) -> Tensor:
        weight_fp8, weight_descale = self.weight_fp8, self.weight_descale
        if weight_fp8 is None or weight_descale is None:
            weight = self.weight.detach()
            weight_fp8, weight_descale = cast_tensorwise(weight, amax(weight), E4M3)
        if torch.is_grad_enabled():
            y = _TensorwiseLinear.apply(x, self.weight, weight_fp8, weight_descale, self.weight.requires_grad)
            assert isinstance(y, Tensor)
            return y
        x_fp8, x_descale = cast_tensorwise(x, _max_abs(x), E4M3)
        return scaled_mm(x_fp8, weight_fp8, x_descale, weight_descale, out_dtype=x.dtype, fast_accumulation=True)

    def _rowwise(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if torch.is_grad_enabled():
            y = _RowwiseLinear.apply(x, weight, self.weight.requires_grad)
            assert isinstance(y, Tensor)
            return y
        x_fp8, x_descale = cast_rowwise(x, E4M3)
        return _rowwise_product(x_fp8, x_descale, weight, x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.recipe}"


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    weight_dtype: torch.dtype


class _TensorwiseLinear(torch.autograd.Function):
    """x is saved for the backward pass only if the weight is trained."""

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, weight: Tensor, weight_fp8: Tensor, weight_descale: Tensor, is_trained: bool
    ) -> Tensor:
        if is_trained:
            x_fp8, x_fp8_t, x_descale = cast_tensorwise_both(x, _max_abs(x), E4M3)
            ctx.save_for_backward(weight_fp8, weight_descale, x_fp8_t, x_descale)
        else:
            x_fp8, x_descale = cast_tensorwise(x, _max_abs(x), E4M3)
            ctx.save_for_backward(weight_fp8, weight_descale)
        ctx.weight_dtype = weight.dtype
        return scaled_mm(x_fp8, weight_fp8, x_descale, weight_descale, out_dtype=x.dtype, fast_accumulation=True)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator has no types
        ctx: _Context, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        weight_fp8, weight_descale, *saved_x = ctx.saved_tensors
        grad_x, grad_weight = None, None
        if saved_x:
            x_fp8_t, x_descale = saved_x
            grad_fp8, grad_fp8_t, grad_descale = cast_tensorwise_both(grad, _max_abs(grad), E5M2)
            grad_weight = scaled_mm(
                grad_fp8_t, x_fp8_t, grad_descale, x_descale, out_dtype=ctx.weight_dtype, fast_accumulation=False
            )
        else:
            grad_fp8, grad_descale = cast_tensorwise(grad, _max_abs(grad), E5M2)
        if ctx.needs_input_grad[0]:
            grad_x = _tensorwise_grad_input(grad_fp8, weight_fp8, grad_descale, weight_descale, grad.dtype)
        return grad_x, grad_weight, None, None, None


class _RowwiseLinear(torch.autograd.Function):
    """x is saved for the backward pass only if the weight is trained."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, is_trained: bool) -> Tensor:
        if is_trained:
            x_fp8, x_descale, x_fp8_t, x_descale_t = cast_axiswise(x, E4M3)
            ctx.save_for_backward(weight, x_fp8_t, x_descale_t)
        else:
            x_fp8, x_descale = cast_rowwise(x, E4M3)
            ctx.save_for_backward(weight)
        return _rowwise_product(x_fp8, x_descale, weight, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator has no types
        ctx: _Context, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        weight, *saved_x = ctx.saved_tensors
        grad_x, grad_weight = None, None
        if saved_x:
            x_fp8_t, x_descale_t = saved_x
            grad_fp8, grad_descale, grad_fp8_t, grad_descale_t = cast_axiswise(grad, E4M3)
            grad_weight = scaled_mm(
                grad_fp8_t, x_fp8_t, grad_descale_t, x_descale_t, out_dtype=weight.dtype, fast_accumulation=False
            )
        else:
            grad_fp8, grad_descale = cast_rowwise(grad, E4M3)
        if ctx.needs_input_grad[0]:
            grad_x = _rowwise_grad_input(grad_fp8, grad_descale, weight, grad.dtype)
        return grad_x, grad_weight, None


def _max_abs(x: Tensor) -> Tensor:
    """The largest absolute value. Eager and compiled code compute it differently, for speed, with the same result."""
    if torch.compiler.is_compiling():
        # Reduce rows first: the compiler then fuses it into the kernel that computes x, which mostly runs over rows.
        largest = x.abs().amax(dim=-1).amax()
        return largest if largest.dtype == torch.float32 else largest.float()
    return amax(x)


def _rowwise_product(x_fp8: Tensor, x_descale: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    weight_fp8, weight_descale = cast_rowwise(weight, E4M3)
    return scaled_mm(x_fp8, weight_fp8, x_descale, weight_descale, out_dtype=dtype, fast_accumulation=True)


# These two products are custom operators to hide a transposed copy of the weight from the compiler. The copy does not
# depend on the gradient, so the compiler would make it in the forward pass and keep it until the backward pass.


@torch.library.custom_op("xorl::fp8_tensorwise_grad_input", mutates_args=())
def _tensorwise_grad_input(
    grad_fp8: Tensor, weight_fp8: Tensor, grad_descale: Tensor, weight_descale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Gradient [T, O] @ weight [O, I]."""
    return scaled_mm(
        grad_fp8, transpose(weight_fp8), grad_descale, weight_descale, out_dtype=dtype, fast_accumulation=False
    )


@torch.library.custom_op("xorl::fp8_rowwise_grad_input", mutates_args=())
def _rowwise_grad_input(grad_fp8: Tensor, grad_descale: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient [T, O] @ weight [O, I]; quantises the weight."""
    weight_fp8_t, weight_descale = cast_columnwise(weight, E4M3)
    return scaled_mm(grad_fp8, weight_fp8_t, grad_descale, weight_descale, out_dtype=dtype, fast_accumulation=False)


@_tensorwise_grad_input.register_fake
def _(grad_fp8: Tensor, weight_fp8: Tensor, grad_descale: Tensor, weight_descale: Tensor, dtype: torch.dtype) -> Tensor:
    return grad_fp8.new_empty((grad_fp8.shape[0], weight_fp8.shape[1]), dtype=dtype)


@_rowwise_grad_input.register_fake
def _(grad_fp8: Tensor, grad_descale: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return grad_fp8.new_empty((grad_fp8.shape[0], weight.shape[1]), dtype=dtype)
