"""A linear layer with a separate weight for each group of adjacent tokens in a row.

One launch computes all groups. The group ends are on the device, so the host does not wait for them, and compiled code
does not depend on them. In bf16 on GPUs from Hopper on, it uses torch's grouped matrix products; elsewhere a loop over
the groups, which is the plain twin.

Shapes: T tokens, S weights, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.arguments import as_integers, check_one_device, is_readable
from xorl.kernels.grouped import grouped_outer, grouped_product

# torch's kernels require operand strides that are multiples of this many bytes.
ALIGNMENT_BYTES = 16


class TokenGroups(NamedTuple):
    """Assigns tokens to S weights. The tensors are on the same device as the tokens.

    ends: [S] int32, the end of each group, in row order; groups may be empty, and the last one ends at T.
    order: [S] int64, the weight of each group; every weight occurs once.
    inverse: [S] int64, the group of each weight.
    """

    ends: Tensor
    order: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]], num_weights: int) -> TokenGroups:
        """Build the groups on the CPU from `runs`: (weight, number of tokens) of each group in row order.

        Raises ValueError if a weight has two groups, since its tokens must be adjacent, if there is no such weight, or
        for a negative number of tokens.
        """
        order = list(as_integers("runs", [weight for weight, _ in runs]))
        lengths = list(as_integers("runs", [length for _, length in runs]))
        if any(not 0 <= weight < num_weights for weight in order) or any(length < 0 for length in lengths):
            raise ValueError(
                f"runs must be (weight, number of tokens) with weights in [0, {num_weights}) and at least 0 tokens; "
                f"got {list(runs)}"
            )
        if len(set(order)) < len(order):
            raise ValueError(f"tokens of one weight must be adjacent; the row has groups of the weights {order}")
        order += sorted(set(range(num_weights)) - set(order))
        lengths += [0] * (num_weights - len(runs))
        indices = torch.tensor(order, dtype=torch.int64)
        return cls(torch.tensor(list(accumulate(lengths)), dtype=torch.int32), indices, indices.argsort())


def grouped_linear(x: Tensor, weight: Tensor, groups: TokenGroups, addend: Tensor | None = None) -> Tensor:
    """x[t] @ weight[s].T + addend[t] for each token t in the group of weight s: [T, N] in the dtype of x.

    Products accumulate in fp32 and are rounded once before the addition. The gradient of a weight without tokens is
    zero.

    Args:
        x: [T, K].
        weight: [S, N, K], in the dtype of x.
        groups: the groups of T tokens and S weights. On a GPU their ends are not checked, since the host would wait;
            the output of tokens beyond the last end is undefined.
        addend: [T, N] in the dtype of x, or None.

    Raises ValueError for shapes, dtypes or devices that do not fit, and on a CPU if the groups do not end at T.
    """
    if not torch.compiler.is_compiling():
        _check(x, weight, groups, addend)
    out = _grouped_linear(x, weight, *groups)
    return out if addend is None else out + addend


def _check(x: Tensor, weight: Tensor, groups: TokenGroups, addend: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or x.dtype != weight.dtype:
        raise ValueError(
            f"x must be [T, K] and weight [S, N, K] in the same dtype; got {list(x.shape)} in {x.dtype} and "
            f"{list(weight.shape)} in {weight.dtype}"
        )
    check_one_device(x=x, weight=weight, addend=addend, groups=groups.ends)
    if len(groups.ends) != len(weight):
        raise ValueError(f"groups are of {len(groups.ends)} weights, but weight has {len(weight)}")
    if is_readable(groups.ends) and len(weight):
        if int(groups.ends[-1]) != len(x):
            raise ValueError(f"groups are of {int(groups.ends[-1])} tokens, but x has {len(x)}")
        is_order = torch.equal(groups.order.sort().values, torch.arange(len(weight)))
        if not is_order or (groups.ends.diff() < 0).any() or groups.ends[0] < 0:
            raise ValueError("groups must have ends in row order and each weight once, as TokenGroups.of builds them")
    if addend is not None and (addend.shape != (len(x), weight.shape[1]) or addend.dtype != x.dtype):
        raise ValueError(
            f"addend must be [{len(x)}, {weight.shape[1]}] in {x.dtype}; got {list(addend.shape)} in {addend.dtype}"
        )


@torch.library.custom_op("xorl::grouped_linear", mutates_args=())
def _grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return grouped_product(x, weight[order].transpose(1, 2), ends)


@_grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("xorl::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor, order: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    grad = grad.contiguous()
    return grouped_product(grad, weight[order], ends), grouped_outer(grad, x, ends)[inverse]


@_grouped_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor, order: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), weight.new_empty(weight.shape)


def _save(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    # The caller may reuse the groups' tensors after the backward pass. `save_for_backward` raises if it does so before.
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
    x, weight, ends, order, inverse = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue] set above
    grad_x, grad_weight = _grouped_linear_backward(grad, x, weight, ends, order, inverse)
    return grad_x, grad_weight, None, None, None


_grouped_linear.register_autograd(_differentiate, setup_context=_save)
