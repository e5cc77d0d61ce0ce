"""Choosing experts, and sums over documents; both deterministic and without a host synchronisation.

Shapes: T tokens, E experts, K experts per token, N documents, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from xorl.kernels.fused import triton_refusal

# Rows summed at once: a document is a range of whole blocks, and parts of the two at its ends.
BLOCK = 64


@torch.library.custom_op("xorl::top_experts", mutates_args=())
def top_experts(scores: Tensor, num_active: int) -> Tensor:
    """The experts with the highest scores [T, E], best first: [T, K] int64. Of equal scores, the lowest index wins.

    One operator without a gradient, so that recomputation can keep its output: a recomputed score may differ in its
    last bit, and tokens must not change their experts.
    """
    if scores.dtype == torch.float32 and triton_refusal(scores.device.type) is None:
        from xorl.kernels.experts import routing_triton  # noqa: PLC0415 - needs Triton

        return routing_triton.top_experts(scores, num_active)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :num_active].contiguous()


@top_experts.register_fake
def _(scores: Tensor, num_active: int) -> Tensor:
    return scores.new_empty(scores.shape[0], num_active, dtype=torch.int64)


@torch.library.custom_op("xorl::document_sums", mutates_args=())
def document_sums(values: Tensor, cu_seqlens: Tensor, document_ids: Tensor) -> Tensor:
    """Sums over the tokens of each document: [T, C] to [N, C], differentiable.

    Args:
        values: fp32 or fp64.
        cu_seqlens: [N + 1] int32, the first token of each document, and T.
        document_ids: [T] int64, the document of each token.
    """
    num_tokens, num_columns = values.shape
    num_blocks = num_tokens // BLOCK + 1
    padded = values.new_zeros(num_blocks * BLOCK, num_columns)
    padded[:num_tokens] = values
    blocks = padded.view(num_blocks, BLOCK, num_columns)
    before = torch.zeros(num_blocks + 1, num_columns, dtype=torch.float64, device=values.device)
    torch.cumsum(blocks.sum(1, dtype=torch.float64), 0, out=before[1:])
    # The sum of all tokens before each boundary: of the blocks before its block, and of the rows before it there.
    boundaries = cu_seqlens.long()
    block = boundaries // BLOCK
    is_before = torch.arange(BLOCK, device=values.device) < (boundaries % BLOCK)[:, None]
    inside = blocks[block].masked_fill(~is_before[:, :, None], 0).sum(1, dtype=torch.float64)
    return (before[block] + inside).diff(dim=0).to(values.dtype)


@document_sums.register_fake
def _(values: Tensor, cu_seqlens: Tensor, document_ids: Tensor) -> Tensor:
    return values.new_empty(cu_seqlens.shape[0] - 1, values.shape[1])


def _save(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _differentiate(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
    (document_ids,) = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue] set by save_for_backward
    return grad[document_ids], None, None


document_sums.register_autograd(_differentiate, setup_context=_save)
