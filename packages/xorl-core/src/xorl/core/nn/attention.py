"""Self-attention of a decoder layer: projections, query/key norms and rotary embedding, with pluggable kernels.

Shapes: T tokens, D model width, H query heads, G key/value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from xorl.core.nn.kernels import LayerKernels
from xorl.core.nn.layers import Linear
from xorl.core.nn.norms import HeadNorm, NormConfig, NormOfHeads, unweighted_norm
from xorl.core.nn.roles import Role
from xorl.core.nn.rotary import RopeConfig
from xorl.core.nn.share import Share
from xorl.core.nn.ulysses import ulysses_attention
from xorl.kernels.attention import AttentionFn, AttentionSpec, CachedLayout, cached_attention
from xorl.kernels.fused import HeadNorms, HeadShape, RopeTables
from xorl.kernels.layout import SequenceLayout, ShardedLayout


@dataclass(frozen=True)
class Temperature:
    """A factor on queries, 1 + beta * log(1 + floor(p / trained_length)) at position p of a document.

    It lowers the entropy of attention over long contexts (arXiv:2501.19399).
    """

    beta: float
    trained_length: int

    def of(self, positions: Tensor) -> Tensor:
        """The factors [T], in fp32."""
        return 1 + self.beta * torch.log1p((positions // self.trained_length).float())


@dataclass(frozen=True)
class LatentConfig:
    """How heads are projected from latents, which are narrower than all heads together (arXiv:2405.04434).

    Attributes:
        q_rank: the width of the latent of queries; None: they are projected from the input.
        kv_rank: the width of the latent of keys and values.
        rope_dim: how many channels of a head rotate, the last ones; those of keys are the same for all heads.
        v_head_dim: the channels of a head of values.
        eps: of the norms of latents.
    """

    q_rank: int | None
    kv_rank: int
    rope_dim: int
    v_head_dim: int
    eps: float


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of one layer.

    Attributes:
        scale: the factor on attention scores.
        window: how many tokens a token attends to, itself included; None for all earlier ones.
        softcap: scores become softcap * tanh(scores / softcap); None: no cap.
        sinks: whether the softmax of each head includes a trained score without a value.
        rope: the rotary embedding; None: none.
        qk_norm: whether queries and keys are normalised, each head alone or all heads together.
        norm_after_rope: whether heads are normalised after the rotation.
        clip: clamp queries, keys and values to [-clip, clip], after norms of all heads; None: no clamp.
        temperature: a factor on queries by their position.
        v_is_k: whether values are the keys before their norm and rotation, instead of a projection of their own.
        v_norm: whether the heads of values are normalised, without a weight.
        output_gate: whether the output of each head is multiplied by the sigmoid of a gate. The projection of queries
            then has two blocks of rows for each head: its query and its gate.
        latent: None if heads are projected from the input. Otherwise there are as many heads of keys as of queries,
            and `qkv_bias` is that of the projections of the input.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    rope: RopeConfig | None
    qk_norm: Literal["head", "whole"] | None
    qkv_bias: bool
    o_bias: bool
    norm_after_rope: bool = False
    clip: float | None = None
    temperature: Temperature | None = None
    softcap: float | None = None
    sinks: bool = False
    v_is_k: bool = False
    v_norm: bool = False
    output_gate: bool = False
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"the number of attention heads ({self.num_heads}) must be a multiple of "
                f"the number of key/value heads ({self.num_kv_heads})"
            )
        if self.rope is not None and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.head_dim}")
        if self.norm_after_rope and self.qk_norm == "whole":
            raise ValueError("norm_after_rope: all heads together are normalised before the rotation only")
        unread = ("qk_norm", "norm_after_rope", "clip", "temperature", "sinks", "v_is_k", "v_norm", "output_gate")
        if self.latent is not None and (found := [name for name in unread if getattr(self, name)]):
            raise ValueError(f"latent: heads from latents do not support {', '.join(found)}; leave them out")
        if self.rope is not None:
            self.rope.check_factors(self.head_dim if self.latent is None else self.latent.rope_dim)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Output features of the projections of queries, keys and values, as far as there are any."""
        q, k, v = HeadShape(self.num_heads, self.num_kv_heads, self.head_dim).row_counts
        q = 2 * q if self.output_gate else q
        return (q, k) if self.v_is_k else (q, k, v)

    @property
    def rotary(self) -> tuple[RopeConfig, int] | None:
        """The rotary embedding and the number of channels that it is defined for, for its tables; None without one."""
        width = self.head_dim if self.latent is None else self.latent.rope_dim
        return None if self.rope is None else (self.rope, width)

    @property
    def spec(self) -> AttentionSpec:
        """The part of the configuration that kernels need."""
        return AttentionSpec(self.scale, self.window, self.softcap)

    @property
    def v_head_dim(self) -> int:
        """The channels of a head of values, and of the output."""
        return self.head_dim if self.latent is None else self.latent.v_head_dim

    def num_parameters(self, width: int) -> int:
        """The number of elements of its matrices, in a model of this width."""
        out = width * self.num_heads * self.v_head_dim
        if self.latent is None:
            return width * sum(self.row_counts) + out
        latent = self.latent
        kv_rows = self.num_heads * (self.head_dim - latent.rope_dim + latent.v_head_dim)
        kv = width * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * kv_rows
        q = width * self.q_rows if latent.q_rank is None else latent.q_rank * (width + self.q_rows)
        return q + kv + out

    @property
    def q_rows(self) -> int:
        """Output features of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Output features of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


class Attention(nn.Module):
    """Causal self-attention over a packed row, and over cached tokens if the layout has a cache; [T, D] -> [T, D].

    Ranks that share its matrices have [T / P, D] each, and attend to all tokens with their share of the heads.

    Args:
        width: D.
        config: the numbers of heads are those of all ranks that share the matrices; the number of ranks and of
            key/value heads divide each other.
        norm: the norms of queries and keys, if there are any.
        merge_qkv: use one matrix `qkv_proj`, with the rows of q, then k, then v, instead of three.
        kernels: the functions that compute everything but the projections.

    Attributes:
        sinks: [H], of the heads of this rank; None: there are none.
        shares: what it holds of the sinks, if ranks share the heads.
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"sinks": "scalar"})

    shares: Mapping[str, Share] = MappingProxyType({})

    def __init__(
        self,
        width: int,
        config: AttentionConfig,
        norm: NormConfig,
        *,
        merge_qkv: bool,
        kernels: LayerKernels,
    ) -> None:
        super().__init__()
        self.ranks = ranks = kernels.tensor
        head_dim = config.head_dim
        counts = config.row_counts
        self.shape = HeadShape(config.num_heads // ranks.size, max(1, config.num_kv_heads // ranks.size), head_dim)
        self.spec = config.spec
        self.rope = config.rope
        self.temperature = config.temperature
        self.norm_after_rope = config.norm_after_rope
        self.clip = config.clip
        self.v_is_k = config.v_is_k
        self.output_gate = config.output_gate
        self.v_norm_eps = norm.eps if config.v_norm else None
        self.kernels = kernels
        self.merge_qkv = merge_qkv
        if merge_qkv:
            self.qkv_proj = Linear.column_parallel(width, counts, bias=config.qkv_bias, ranks=ranks, head=head_dim)
        else:
            self.q_proj, self.k_proj, *v_proj = (
                Linear.column_parallel(width, [count], bias=config.qkv_bias, ranks=ranks, head=head_dim)
                for count in counts
            )
            self.v_proj = v_proj[0] if v_proj else None
        self.q_norm = self.k_norm = None
        if config.qk_norm == "head":
            self.q_norm, self.k_norm = HeadNorm(head_dim, norm), HeadNorm(head_dim, norm)
        elif config.qk_norm == "whole":
            self.q_norm, self.k_norm = (
                NormOfHeads(count * head_dim, head_dim, norm, kernels)
                for count in (config.num_heads, config.num_kv_heads)
            )
        self.split_heads = kernels.split_heads_of(config.rope)
        self.sinks = nn.Parameter(torch.empty(self.shape.num_heads)) if config.sinks else None
        if config.sinks and (share := ranks.rows_of([config.num_heads])) is not None:
            self.shares = {"sinks": share}
        self.o_proj = Linear.row_parallel(config.num_heads * head_dim, width, bias=config.o_bias, ranks=ranks)

    @property
    def stacked_rows(self) -> Mapping[str, Sequence[int]]:
        """By name of each projection that stacks several matrices: the number of rows of each of them."""
        return {"qkv_proj": self._row_counts} if self.merge_qkv else {}

    @property
    def _row_counts(self) -> tuple[int, ...]:
        q, *others = self.shape.row_counts[:2] if self.v_is_k else self.shape.row_counts
        return (2 * q if self.output_gate else q, *others)

    def forward(self, x: Tensor, layout: SequenceLayout, rope: RopeTables | None) -> Tensor:
        x = self.ranks.gather(x)
        projected, gate = self._project(x), None
        if self.output_gate:
            projected, gate = self._without_gates(projected)
        q, k, v = self._heads(projected, rope)  # [T, H or G, C]
        if self.v_norm_eps is not None:
            v = unweighted_norm(v, self.v_norm_eps)
        if self.temperature is not None:
            q = self.kernels.round_heads((q * self.temperature.of(layout.positions)[:, None, None]).to(q.dtype))
        sinks = None if self.sinks is None else self.sinks.to(x.dtype)
        out = attend(self.kernels.attention, q, k, v, layout, self.spec, sinks)
        if gate is not None:
            out = out * gate.sigmoid()
        return self.ranks.scatter(self.o_proj(out.flatten(-2)))

    def _without_gates(self, projected: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Queries, keys and values as `_project` returns them, and the gates [T, H, C] that were among queries."""
        q, k, v = projected if len(projected) == 3 else projected[0].split(self._row_counts, dim=-1)
        q, gate = q.unflatten(-1, (-1, 2 * self.shape.head_dim)).chunk(2, dim=-1)
        return (q.flatten(-2), k, v), gate

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """[T, (H + 2G) * C], or queries, keys and values."""
        if not self.merge_qkv:
            q, k = self.q_proj(x), self.k_proj(x)
            return q, k, k if self.v_proj is None else self.v_proj(x)
        qkv = self.qkv_proj(x)
        if not self.v_is_k:
            return (qkv,)
        q, k = qkv.split(self._row_counts, dim=-1)
        return q, k, k

    def _heads(self, projected: tuple[Tensor, ...], rope: RopeTables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normalised and rotated."""
        if isinstance(self.q_norm, NormOfHeads) and isinstance(self.k_norm, NormOfHeads):
            q, k, v = projected if len(projected) == 3 else projected[0].split(self.shape.row_counts, dim=-1)
            projected = self.q_norm(q), self.k_norm(k), v
        if self.clip is not None:
            projected = tuple(each.clamp(-self.clip, self.clip) for each in projected)
        if not isinstance(self.q_norm, HeadNorm) or not isinstance(self.k_norm, HeadNorm):
            return self.split_heads(projected, self.shape, None, rope)
        norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset)
        if not self.norm_after_rope:
            return self.split_heads(projected, self.shape, norms, rope)
        q, k, v = self.split_heads(projected, self.shape, None, rope)
        q = self.kernels.norm(q, norms.q_weight, norms.eps, norms.offset)
        k = self.kernels.norm(k, norms.k_weight, norms.eps, norms.offset)
        return self.kernels.round_heads(q), self.kernels.round_heads(k), v


def attend(
    attention: AttentionFn,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of all heads of these tokens, over cached ones and those of other ranks if the layout has any."""
    if isinstance(layout, CachedLayout):
        return cached_attention(q, k, v, layout, spec, sinks)
    if isinstance(layout, ShardedLayout):
        return sharded_attention(attention, q, k, v, layout, spec, sinks)
    return attention(q, k, v, layout, spec, sinks)


def sharded_attention(
    attention: AttentionFn,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: ShardedLayout,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attention` for this rank's part of a row, [T, H, C]; sinks are those of all heads. Collective."""
    if sinks is not None:
        sinks = sinks.chunk(layout.ulysses.size)[layout.ulysses.rank]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of all tokens of this rank's Ulysses group."""
        if layout.ring.size > 1:
            return attention.in_ring(q, k, v, layout, spec, sinks)
        return attention(q, k, v, layout.whole, spec, sinks)

    return attend(q, k, v) if layout.ulysses.size == 1 else ulysses_attention(attend, q, k, v, layout.ulysses)
