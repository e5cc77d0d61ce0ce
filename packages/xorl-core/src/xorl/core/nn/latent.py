"""Attention whose heads are projected from latents (multi-head latent attention, arXiv:2405.04434).

For training, keys and values of all heads are computed from their latent. The channels of keys that rotate are the same
for all heads, and do not go through it.

Shapes: T tokens, D model width, H heads, C channels of a head of queries and keys, of which the last R rotate, V
channels of a head of values, P ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xorl.core.nn.attention import AttentionConfig, attend
from xorl.core.nn.kernels import LayerKernels
from xorl.core.nn.layers import Linear
from xorl.core.nn.norms import NormConfig, RMSNorm
from xorl.kernels.fused import RopeTables
from xorl.kernels.layout import SequenceLayout


class LatentAttention(nn.Module):
    """Causal self-attention over a packed row, as `Attention`; [T, D] -> [T, D].

    Ranks that share its matrices compute the latents of their own tokens, [T / P, D], which are all that they exchange
    before the heads.
    """

    def __init__(self, width: int, config: AttentionConfig, *, kernels: LayerKernels) -> None:
        super().__init__()
        assert config.latent is not None, "`Attention` computes heads from the input"
        self.ranks = ranks = kernels.tensor
        self.latent, self.head_dim = config.latent, config.head_dim
        self.spec, self.kernels = config.spec, kernels
        self.interleaved = config.rope is not None and config.rope.interleaved
        q_rank, kv_rank, rope_dim = self.latent.q_rank, self.latent.kv_rank, self.latent.rope_dim
        num_heads, head_dim, norm = config.num_heads, config.head_dim, NormConfig("rms", self.latent.eps)
        if q_rank is None:
            self.q_proj = Linear.column_parallel(width, [config.q_rows], bias=False, ranks=ranks, head=head_dim)
        else:
            self.q_a_proj = Linear(width, q_rank, bias=config.qkv_bias)
            self.q_a_layernorm = RMSNorm(q_rank, norm, kernels)
            self.q_b_proj = Linear.column_parallel(q_rank, [config.q_rows], bias=False, ranks=ranks, head=head_dim)
        self.kv_a_proj_with_mqa = Linear(width, kv_rank + rope_dim, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(kv_rank, norm, kernels)
        rows = head_dim - rope_dim + config.v_head_dim
        self.kv_b_proj = Linear.column_parallel(kv_rank, [num_heads * rows], bias=False, ranks=ranks, head=rows)
        self.o_proj = Linear.row_parallel(num_heads * config.v_head_dim, width, bias=config.o_bias, ranks=ranks)

    @property
    def expansions(self) -> tuple[Linear, ...]:
        """The projections from latents to heads, whose outputs are far wider than what they are computed from."""
        return (self.kv_b_proj,) if self.latent.q_rank is None else (self.q_b_proj, self.kv_b_proj)

    def forward(self, x: Tensor, layout: SequenceLayout, rope: RopeTables | None) -> Tensor:
        q, kv, k_rope = self._latents(x)
        if self.ranks.size > 1:
            widths = [q.shape[-1], kv.shape[-1], k_rope.shape[-1]]
            q, kv, k_rope = self.ranks.gather(torch.cat((q, kv, k_rope), dim=-1)).split(widths, dim=-1)
        q, k, v = self._heads(q, kv, k_rope, rope)
        out = attend(self.kernels.attention, q, k, v, layout, self.spec)  # [T, H, V]
        return self.ranks.scatter(self.o_proj(out.flatten(-2)))

    def _latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What queries are projected from, the latent of keys and values, and the keys' channels that rotate."""
        kv, k_rope = self.kv_a_proj_with_mqa(x).split([self.latent.kv_rank, self.latent.rope_dim], dim=-1)
        _, kv = self.kv_a_layernorm(kv)
        if self.latent.q_rank is None:
            return x, kv, k_rope
        _, q = self.q_a_layernorm(self.q_a_proj(x))
        return q, kv, k_rope

    def _heads(self, q: Tensor, kv: Tensor, k_rope: Tensor, rope: RopeTables | None) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [T, H, C], rotated, and v [T, H, V]."""
        rope_dim = self.latent.rope_dim
        fixed = self.head_dim - rope_dim
        project = self.q_proj if self.latent.q_rank is None else self.q_b_proj
        q_fixed, q_rope = project(q).unflatten(-1, (-1, self.head_dim)).split([fixed, rope_dim], dim=-1)
        heads = self.kv_b_proj(kv).unflatten(-1, (-1, fixed + self.latent.v_head_dim))
        k_fixed, v = heads.split([fixed, self.latent.v_head_dim], dim=-1)
        k_rope = k_rope[:, None]  # [T, 1, R]
        if rope is not None:
            q_rope, k_rope = (
                self.kernels.rotate(each.contiguous(), rope, interleaved=self.interleaved) for each in (q_rope, k_rope)
            )
        q = torch.cat((q_fixed, q_rope), dim=-1)
        k = torch.cat((k_fixed, k_rope.expand(-1, k_fixed.shape[1], -1)), dim=-1)
        return self.kernels.round_heads(q), self.kernels.round_heads(k), v
