"""Helpers for testing kernels: tolerances by dtype, NaN in uninitialised memory, comparison with the plain twin."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from xorl.kernels.torch_private import TorchDispatchMode, custom_operator_code

Kernel = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Tolerance:
    """The allowed error of a result, relative to the reference.

    Attributes:
        worst: largest absolute difference, divided by the largest absolute value.
        mean: norm of the difference, divided by the norm. A kernel that drops a row may pass `worst`, but not `mean`.
    """

    worst: float
    mean: float


# A few times the rounding error of the dtype, for products of a few hundred terms accumulated in fp32 and rounded once.
TOLERANCES: Mapping[torch.dtype, Tolerance] = MappingProxyType(
    {
        torch.float64: Tolerance(worst=1e-12, mean=1e-13),
        torch.float32: Tolerance(worst=1e-5, mean=2e-6),
        torch.float16: Tolerance(worst=4e-3, mean=1e-3),
        torch.bfloat16: Tolerance(worst=3e-2, mean=8e-3),
    }
)


def mend_interpreter() -> None:
    """Work around two faults of Triton's interpreter.

    Loops whose bounds are known only at run time: Triton 3.6 relies on a conversion of arrays to integers that NumPy
    2.4 removed. Comparisons of scalars in masks: in Triton 3.6 to 3.9, the broadcast result has the dtype of the
    operands, which loads refuse from 3.9 on.
    """
    from triton.runtime import interpreter  # noqa: PLC0415 - needs Triton

    builder = interpreter.InterpreterBuilder
    create_splat = builder.create_splat

    def create_splat_of_dtype(
        self: interpreter.InterpreterBuilder, ret_ty: object, arg: interpreter.TensorHandle
    ) -> interpreter.TensorHandle:
        if arg.data.dtype == bool:
            arg = interpreter.TensorHandle(arg.data, interpreter.tl.int1)
        return create_splat(self, ret_ty, arg)

    builder.create_splat = create_splat_of_dtype
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def nan_poisoned_empty() -> AbstractContextManager[object]:
    """A context in which Python code gets uninitialised memory filled with NaN, to detect reads before writes.

    Also covers the backward pass and the Python code of custom operators, but not memory that torch's operators
    allocate internally.
    """
    return _PoisonEmpty()


def assert_matches_reference(
    kernel: Kernel,
    reference: Kernel,
    inputs: Sequence[Tensor],
    *,
    tolerance: Tolerance | None = None,
    seed: int = 0,
) -> None:
    """Compare a kernel with its plain twin: the outputs, and the gradients of all floating-point inputs.

    The kernel runs on `inputs` under `nan_poisoned_empty`, the reference on the same values in fp64. Outputs must agree
    in number, shape and value. Gradients are those of one random linear function of all outputs.

    Args:
        kernel: takes `inputs`, returns one tensor or a tuple of tensors.
        reference: has the same signature.
        inputs: floating-point tensors are differentiated, others passed through.
        tolerance: the default is that of the least precise floating-point input.
        seed: seeds the random linear function.

    Raises:
        AssertionError: names the output or gradient and its error.
    """
    floating = [x.dtype for x in inputs if x.is_floating_point()]
    tolerance = tolerance or max((TOLERANCES[dtype] for dtype in floating), key=lambda limits: limits.mean)
    with nan_poisoned_empty():
        outputs, gradients = _run(kernel, inputs, seed)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    expected_outputs, expected_gradients = _run(reference, wide, seed)
    num_outputs, num_expected = len(outputs), len(expected_outputs)
    assert num_outputs == num_expected, f"{num_outputs} outputs, but the reference has {num_expected}"
    for index, (actual, expected) in enumerate(zip(outputs, expected_outputs, strict=True)):
        assert_close(f"output {index}", actual, expected, tolerance)
    for index, (actual, expected) in enumerate(zip(gradients, expected_gradients, strict=True)):
        assert_close(f"gradient of input {index}", actual, expected, tolerance)


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: Tolerance) -> None:
    """Fail, naming the tensor and its errors, unless `actual` is finite and within `tolerance` of `expected`."""
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert bool(torch.isfinite(actual).all()), f"{name}: {int((~torch.isfinite(actual)).sum())} values are not finite"
    difference = actual.double() - expected.double()
    if difference.numel() == 0 or not bool(difference.any()):
        return
    worst = (difference.abs().max() / expected.abs().max()).item()
    mean = (difference.norm() / expected.norm()).item()
    within = worst <= tolerance.worst and mean <= tolerance.mean
    assert within, (
        f"{name}: worst error {worst:.2e} (limit {tolerance.worst:.0e}), "
        f"mean error {mean:.2e} (limit {tolerance.mean:.0e}), relative to the reference"
    )


def _run(kernel: Kernel, inputs: Sequence[Tensor], seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of `kernel`, and gradients of its floating-point inputs."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    result = kernel(*leaves)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    generator = torch.Generator("cpu").manual_seed(seed)
    # Values that bfloat16 represents exactly, so that kernel and reference differentiate the same function.
    cotangents = [
        torch.randn(output.shape, generator=generator).bfloat16().to(output.device, output.dtype) for output in outputs
    ]
    differentiated = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(outputs, differentiated, cotangents)
    return [output.detach() for output in outputs], list(gradients)


class _PoisonEmpty(TorchDispatchMode):
    ALLOCATORS = (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    )

    def __torch_dispatch__(
        self,
        func: Callable[..., Tensor],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if (code := custom_operator_code(func)) is not None:
            # torch runs a custom operator's Python code without the caller's modes, so call it under this one.
            with self:
                return code(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in self.ALLOCATORS and result.is_floating_point():
            result.fill_(float("nan"))
        return result
