"""The public update functions: in place, elementwise, in fp32; kernels on CUDA devices, plain torch elsewhere.

All tensors of a call must be contiguous, fp32 or bf16, and on one device; a parameter, its gradient and its state must
have the same number of elements. Others, and hyperparameters out of range, raise ValueError. With a `Noise`, bf16
results are rounded stochastically. Updates smaller than half a unit in the last place, which rounding to nearest would
always drop, then take effect on average. Without a `Noise`, results are rounded to nearest. `grad_scale` and `skip` are
0-dim fp32 tensors that are read on the device: gradients are divided by `grad_scale` as they are read, and nothing
changes if `skip` is not zero.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from xorl.kernels.arguments import check_number, check_type
from xorl.kernels.optim import reference
from xorl.kernels.optim.noise import Noise
from xorl.kernels.torch_private import fused_adamw_

DTYPES = (torch.float32, torch.bfloat16)


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None,
    skip: Tensor,
    noises: Sequence[Noise] | None,
) -> None:
    """One step of AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101, algorithm 2) on lists of tensors.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: contiguous, fp32 or bf16. The gradients may be overwritten.
        steps: 0-dim, already incremented, and fp32 if `noises` is None.
        grad_scale: 0-dim fp32, divides the gradients. None: 1.
        skip: 0-dim fp32; if it is not zero, nothing changes. Usually whether the gradients have values that are not
            finite, so that the host need not wait for the answer. `torch.zeros(())` never skips.
        noises: of each parameter, to round bf16 results stochastically. None: to nearest.
    """
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    _check_lengths(**lists, steps=steps, noises=noises)
    for index, quad in enumerate(zip(*lists.values(), strict=True)):
        _check(tuple(lists), quad, index)
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        check_number(name, value)
    for index, beta in enumerate(betas):
        _check_fraction(f"betas[{index}]", beta)
    if not any(param.numel() for param in params):
        return
    _check_scalars(params[0].device, grad_scale, skip)
    hyper = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    dtypes = {tensor.dtype for tensors in (params, exp_avgs, exp_avg_sqs) for tensor in tensors}
    if noises is None and len(dtypes) == 1 and not params[0].is_cuda:
        # torch's function uses all cores, which is worth its two extra roundings: of gradients in a wider dtype to that
        # of the parameters, and of the factor 1 - lr * weight_decay.
        fused_adamw_(
            list(params),
            [grad.to(params[0].dtype) for grad in grads],
            list(exp_avgs),
            list(exp_avg_sqs),
            [],
            list(steps),
            **hyper,
            beta1=betas[0],
            beta2=betas[1],
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=skip,
        )
        return
    counts = torch.stack(list(steps)).double()
    corrections = torch.stack([1 - beta**counts for beta in betas], dim=1).float()
    options = {"corrections": corrections, "grad_scale": grad_scale, "skip": skip, "noises": noises}
    _list_kernels(params[0]).adamw_(*lists.values(), **hyper, betas=betas, **options)


def momentum_(
    buffer: Tensor,
    grad: Tensor,
    update: Tensor | None,
    *,
    momentum: float,
    nesterov: bool,
    grad_scale: Tensor | None,
    skip: Tensor,
    noise: Noise,
) -> None:
    """buffer = momentum * buffer + (1 - momentum) * grad; the resulting direction is written to `update`.

    The direction is the new buffer before rounding or, with `nesterov`, momentum * (that buffer) + (1 - momentum) *
    grad. It is rounded to nearest in the dtype of `update`. If the step is skipped, `update` does not change.
    `grad_scale` and `skip` are those of `adamw_`.
    """
    tensors = (buffer, grad) if update is None else (buffer, grad, update)
    _check(("buffer", "grad", "update"), tensors)
    _check_scalars(buffer.device, grad_scale, skip)
    _check_fraction("momentum", momentum)
    if buffer.numel():
        options = {"grad_scale": grad_scale, "skip": skip, "noise": noise}
        _tensor_kernels(buffer).momentum_(buffer, grad, update, momentum=momentum, nesterov=nesterov, **options)


def descend_(
    param: Tensor,
    update: Tensor,
    *,
    decay: float,
    rate: float,
    grad_scale: Tensor | None,
    skip: Tensor,
    noise: Noise | None,
) -> None:
    """param -= rate * update + decay * param. The update may be a gradient, which `grad_scale` then divides.

    `decay` is the learning rate times the weight decay. It is not applied as a factor of 1 - decay, because that would
    be rounded to a multiple of 2**-24, which is coarse compared with `decay`. `skip` is that of `adamw_`.
    """
    _check(("param", "update"), (param, update))
    _check_scalars(param.device, grad_scale, skip)
    check_number("decay", decay)
    check_number("rate", rate)
    if param.numel():
        options = {"grad_scale": grad_scale, "skip": skip, "noise": noise}
        _tensor_kernels(param).descend_(param, update, decay=decay, rate=rate, **options)


def scale_(tensor: Tensor, factor: Tensor) -> None:
    """tensor = factor * tensor, rounded to nearest. `factor` is a 0-dim fp32 tensor and is not rounded first."""
    _check(("tensor",), (tensor,))
    _check_scalar("factor", factor, tensor.device)
    if tensor.numel():
        _tensor_kernels(tensor).scale_(tensor, factor)


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements, 0-dim, accumulated in fp32; tensors of any dtype and strides."""
    if not tensors:
        raise ValueError("tensors must have at least one tensor")
    if not any(tensor.numel() for tensor in tensors):
        return torch.zeros((), device=tensors[0].device)
    is_supported = all(tensor.dtype in DTYPES and tensor.is_contiguous() for tensor in tensors)
    return (_list_kernels(tensors[0]) if is_supported else reference).square_sum(tensors)


def _check(names: Sequence[str], tensors: Sequence[Tensor], index: int | None = None) -> None:
    """Raise ValueError for tensors that do not fit each other; `index` is theirs in lists with these names."""
    first = tensors[0]
    for name, tensor in zip(names, tensors, strict=False):
        wrong = None
        if tensor.dtype not in DTYPES:
            wrong = f"must be fp32 or bf16; got {tensor.dtype}"
        elif not tensor.is_contiguous():
            wrong = f"must be contiguous; its strides are {tensor.stride()}"
        elif tensor.numel() != first.numel() or tensor.device != first.device:
            wrong = (
                f"must have {first.numel()} elements on {first.device}, as {names[0]}; it has {tensor.numel()} on "
                f"{tensor.device}"
            )
        if wrong is not None:
            raise ValueError(f"{name}{'' if index is None else f'[{index}]'} {wrong}")


def _check_lengths(**lists: Sequence[object] | None) -> None:
    lengths = {name: len(each) for name, each in lists.items() if each is not None}
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise ValueError(f"all lists must have the same length; got {given}")


def _check_scalars(device: torch.device, grad_scale: Tensor | None, skip: Tensor) -> None:
    if grad_scale is not None:
        _check_scalar("grad_scale", grad_scale, device)
    _check_scalar("skip", skip, device)


def _check_scalar(name: str, scalar: Tensor, device: torch.device) -> None:
    check_type(name, scalar, Tensor, "torch.zeros(())")
    if scalar.dim() or scalar.dtype != torch.float32 or scalar.device != device:
        raise ValueError(
            f"{name} must be a 0-dim fp32 tensor on {device}; got {list(scalar.shape)} in {scalar.dtype} on "
            f"{scalar.device}"
        )


def _check_fraction(name: str, value: float) -> None:
    check_number(name, value)
    if value >= 1:
        raise ValueError(f"{name}: must be below 1, got {value!r}")


def _tensor_kernels(tensor: Tensor) -> ModuleType:
    if not tensor.is_cuda:
        return reference
    # Triton comes with torch's GPU builds, and may be missing elsewhere.
    from xorl.kernels.optim import triton_updates  # noqa: PLC0415

    return triton_updates


def _list_kernels(tensor: Tensor) -> ModuleType:
    if not tensor.is_cuda:
        return reference
    from xorl.kernels.optim import triton_lists  # noqa: PLC0415

    return triton_lists
