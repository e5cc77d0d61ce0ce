"""Self-attention of a decoder layer: projections, query/key norms and rotary embedding, with pluggable kernels.

Shapes: T tokens, D model width, H query heads, G key/value heads, C channels of a head.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from xorl.core.nn.kernels import LayerKernels
from xorl.core.nn.layers import HeadNorm, Linear
from xorl.core.nn.ulysses import ulysses_attention
from xorl.kernels.attention import CachedLayout, cached_attention
from xorl.kernels.fused import HeadNorms, HeadShape, RopeTables
from xorl.kernels.layout import SequenceLayout, ShardedLayout


class Attention(nn.Module):
    """Causal self-attention over a packed row, and over cached tokens if the layout has a cache; [T, D] -> [T, D].

    Ranks that share its matrices have [T / P, D] each, and attend to all tokens with their share of the heads.

    Args:
        width: D.
        num_heads, num_kv_heads, head_dim: H, G and C, of all ranks that share the matrices; their number and
            G divide each other.
        scale: the factor on attention scores.
        window: how many tokens a token attends to, itself included; None for all earlier ones.
        qkv_bias, o_bias: whether the projections have biases.
        qk_norm_eps: if not None, apply an RMS norm with this epsilon over C to queries and keys before the rotation.
        merge_qkv: use one matrix `qkv_proj`, with the rows of q, then k, then v, instead of three.
        kernels: the functions that compute everything but the projections.
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
        kernels: LayerKernels,
    ) -> None:
        super().__init__()
        self.ranks = ranks = kernels.tensor
        counts = HeadShape(num_heads, num_kv_heads, head_dim).row_counts
        self.shape = HeadShape(num_heads // ranks.size, max(1, num_kv_heads // ranks.size), head_dim)
        self.scale = scale
        self.window = window
        self.kernels = kernels
        self.merge_qkv = merge_qkv
        if merge_qkv:
            self.qkv_proj = Linear.column_parallel(width, counts, bias=qkv_bias, ranks=ranks, head=head_dim)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                Linear.column_parallel(width, [count], bias=qkv_bias, ranks=ranks, head=head_dim) for count in counts
            )
        self.q_norm = None if qk_norm_eps is None else HeadNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else HeadNorm(head_dim, qk_norm_eps)
        self.o_proj = Linear.row_parallel(num_heads * head_dim, width, bias=o_bias, ranks=ranks)

    @property
    def stacked_rows(self) -> Mapping[str, Sequence[int]]:
        """By name of each projection that stacks several matrices: the number of rows of each of them."""
        return {"qkv_proj": self.shape.row_counts} if self.merge_qkv else {}

    def forward(self, x: Tensor, layout: SequenceLayout, rope: RopeTables | None) -> Tensor:
        x = self.ranks.gather(x)
        projected = (self.qkv_proj(x),) if self.merge_qkv else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q, k, v = self.kernels.split_heads(projected, self.shape, norms, rope)  # [T, H or G, C]
        return self.ranks.scatter(self.o_proj(self._attend(q, k, v, layout).flatten(-2)))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> Tensor:
        options = {"scale": self.scale, "window": self.window}
        if isinstance(layout, CachedLayout):
            return cached_attention(q, k, v, layout, **options)
        if not isinstance(layout, ShardedLayout):
            return self.kernels.attention(q, k, v, layout, **options)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Attention of all tokens of this rank's Ulysses group."""
            if layout.ring.size > 1:
                return self.kernels.attention.in_ring(q, k, v, layout, **options)
            return self.kernels.attention(q, k, v, layout.whole, **options)

        return attend(q, k, v) if layout.ulysses.size == 1 else ulysses_attention(attend, q, k, v, layout.ulysses)
