"""Self-attention of a decoder layer: projections, norms of queries and keys, rotation; the kernel is passed in.

Shapes: T tokens, D model width, H query heads, G key/value heads, C channels of a head.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from xorl.core.nn.layers import Linear, RMSNorm
from xorl.core.nn.rotary import RopeTables, apply_rope
from xorl.kernels.attention import AttentionFn
from xorl.kernels.layout import SequenceLayout


class Attention(nn.Module):
    """Causal self-attention over a packed row, [T, D] -> [T, D].

    Args:
        width: D.
        num_heads, num_kv_heads, head_dim: H, G and C.
        scale: multiplies the scores.
        window: how many tokens, itself included, a token sees; None for all before it.
        qkv_bias, o_bias: whether the projections have biases.
        qk_norm_eps: when not None, an RMS norm over C on queries and keys before the rotation.
        merge_qkv: one matrix `qkv_proj` with the rows of q, then k, then v, or three matrices.
        attention: the kernel.
    """

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm_eps: float | None,
        merge_qkv: bool,
        attention: AttentionFn,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.scale = scale
        self.window = window
        self.attention = attention
        self.merge_qkv = merge_qkv
        self.row_counts = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        if merge_qkv:
            self.qkv_proj = Linear(width, sum(self.row_counts), bias=qkv_bias)
        else:
            self.q_proj = Linear(width, self.row_counts[0], bias=qkv_bias)
            self.k_proj = Linear(width, self.row_counts[1], bias=qkv_bias)
            self.v_proj = Linear(width, self.row_counts[2], bias=qkv_bias)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.o_proj = Linear(num_heads * head_dim, width, bias=o_bias)

    @property
    def stacked_rows(self) -> Mapping[str, Sequence[int]]:
        """The matrices that are several in one, by name, with the rows of each."""
        return {"qkv_proj": self.row_counts} if self.merge_qkv else {}

    def forward(self, x: Tensor, layout: SequenceLayout, rope: RopeTables | None) -> Tensor:
        if self.merge_qkv:
            q, k, v = self.qkv_proj(x).split(self.row_counts, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))  # [T, H or G, C]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        out = self.attention(q, k, v, layout, scale=self.scale, window=self.window)  # [T, H, C]
        return self.o_proj(out.flatten(-2))
