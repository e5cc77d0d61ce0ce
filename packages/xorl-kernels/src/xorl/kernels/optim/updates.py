"""The updates as callers know them: in place, elementwise, in fp32; by a kernel on a GPU, in plain torch elsewhere.

All tensors of a call are contiguous, of the same number of elements, on one device. bf16 results are rounded
stochastically: an update that is smaller than half of a value's last place, which rounding to nearest would drop every
time, happens as often as it should. Nothing is changed where `skip`, a 0-dim tensor on that device, is not zero.
"""

from types import ModuleType

import torch
from torch import Tensor

from xorl.kernels.optim import reference
from xorl.kernels.optim.noise import Noise

DTYPES = (torch.float32, torch.bfloat16)


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: Tensor,
    skip: Tensor,
    noise: Noise,
) -> None:
    """One step of AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101, algorithm 2) on fp32 or bf16 tensors.

    corrections: fp32 [2], 1 - beta ** step for the two betas.
    """
    tensors = (param, grad, exp_avg, exp_avg_sq)
    _check(*tensors)
    if param.numel():
        hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _implementation(param).adamw_(*tensors, **hyper, corrections=corrections, skip=skip, noise=noise)


def momentum_(
    buffer: Tensor,
    grad: Tensor,
    update: Tensor | None,
    *,
    momentum: float,
    nesterov: bool,
    skip: Tensor,
    noise: Noise,
) -> None:
    """buffer = momentum * buffer + (1 - momentum) * grad, and the direction that follows from it into `update`.

    The direction is the new buffer before it is rounded or, with nesterov, the same mean of it and the gradient again;
    it is rounded to nearest to the dtype of `update`. Where the step is skipped `update` is left as it is.
    """
    _check(*(tensor for tensor in (buffer, grad, update) if tensor is not None))
    if buffer.numel():
        _implementation(buffer).momentum_(
            buffer, grad, update, momentum=momentum, nesterov=nesterov, skip=skip, noise=noise
        )


def descend_(param: Tensor, update: Tensor, *, keep: float, rate: float, skip: Tensor, noise: Noise) -> None:
    """param = keep * param - rate * update."""
    _check(param, update)
    if param.numel():
        _implementation(param).descend_(param, update, keep=keep, rate=rate, skip=skip, noise=noise)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """tensor = factor * tensor, rounded to nearest; factor is a 0-dim fp32 tensor, and is not rounded first."""
    _check(tensor)
    if tensor.numel():
        _implementation(tensor).scale_(tensor, factor)


def _check(*tensors: Tensor) -> None:
    first = tensors[0]
    for tensor in tensors:
        assert tensor.is_contiguous(), f"strides {tensor.stride()}"
        assert tensor.numel() == first.numel(), f"{tensor.numel()} and {first.numel()} elements"
        assert tensor.device == first.device, f"{tensor.device} and {first.device}"
        assert tensor.dtype in DTYPES, f"{tensor.dtype} is neither fp32 nor bf16"


def _implementation(tensor: Tensor) -> ModuleType:
    if not tensor.is_cuda:
        return reference
    # Triton is there where torch has a GPU to run it on, and not on every machine without one.
    from xorl.kernels.optim import triton_updates  # noqa: PLC0415

    return triton_updates
