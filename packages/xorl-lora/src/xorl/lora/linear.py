"""Computes adapters on linear layers and embeddings. inject.py adds them to a model.

Shapes: I input features, O output features of a layer, P those of one adapter, R rank (of a layer: the sum of those of
its adapters), T tokens, V rows of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.core.nn import Embedding, Linear
from xorl.core.nn.lookup import look_up
from xorl.core.nn.roles import Role
from xorl.core.nn.share import Share

Leaf: TypeAlias = Literal["A", "B"]


class LowRank(nn.Module):
    """The parameters of one adapter, which adds scale * B @ A to a part of a weight.

    A is [R, I] and B [P, R]. Both are fp32 for any base, because updates of a small learning rate would vanish in bf16.
    For an embedding of V rows, I is V.

    Attributes:
        name: the adapted layer's name in checkpoints.
        rank, alpha, scale: R, the numerator of the scale, and the scale.
        start, stop: the part's range in the output features of the layer.
        shares: what it holds of A and B, if other ranks hold the rest.
        magnitude_offset: [P] with DoRA, else None: the trained norm of each row of the weight minus its norm in the
            base. It starts at zero and stays small, so that it may be gathered in bf16.
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType(
        {"A": "adapter", "B": "adapter", "magnitude_offset": "adapter"}
    )
    magnitude_offset: nn.Parameter | None

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        alpha: float,
        scale: float,
        part: tuple[int, int],
        in_features: int,
        use_dora: bool,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.name = name
        self.rank = rank
        self.alpha = alpha
        self.scale = scale
        self.start, self.stop = part
        self.shares: Mapping[str, Share] = {}
        num_outputs = self.stop - self.start
        self.A = nn.Parameter(torch.empty(rank, in_features, dtype=torch.float32, device=device))
        self.B = nn.Parameter(torch.empty(num_outputs, rank, dtype=torch.float32, device=device))
        self.magnitude_offset = None
        if use_dora:
            self.magnitude_offset = nn.Parameter(torch.empty(num_outputs, dtype=torch.float32, device=device))

    def factor(self, leaf: Leaf) -> nn.Parameter:
        """The parameter A or B."""
        return cast(nn.Parameter, getattr(self, leaf))

    def count(self, leaf: Leaf) -> int:
        """How many matrices A or B stacks."""
        return 1

    def set_factor(self, leaf: Leaf, value: nn.Parameter) -> None:
        """Replace the parameter A or B."""
        setattr(self, leaf, value)

    def scaled_a(self, dtype: torch.dtype) -> Tensor:
        """scale * A [R, I] in `dtype`."""
        # Cast first, so that fp32 parameters and parameters gathered in `dtype` give the same numbers.
        return self.scaled(self.A.to(dtype))

    def scaled(self, a: Tensor) -> Tensor:
        """scale * a."""
        return a if self.scale == 1.0 else a * self.scale

    def extra_repr(self) -> str:
        return f"{self.name}, rank={self.rank}, scale={self.scale:g}, dora={self.magnitude_offset is not None}"


class _Adapter(nn.Module):
    """The adapters of one layer; each is a child named by the last part of its name."""

    def __init__(self, pairs: Sequence[LowRank], dropout: float) -> None:
        super().__init__()
        self.leaves = tuple(pair.name.rpartition(".")[2] for pair in pairs)
        for leaf, pair in zip(self.leaves, pairs, strict=True):
            self.add_module(leaf, pair)
        self.dropout = nn.Dropout(dropout) if dropout else None

    def pairs(self) -> list[LowRank]:
        """The pairs in the order of their output features."""
        return [cast(LowRank, getattr(self, leaf)) for leaf in self.leaves]


class LinearAdapter(_Adapter):
    """y + scale * (x @ A.T) @ B.T on the output of a linear layer, for all of its parts in one pair of products.

    x is multiplied by the concatenated As. The result is multiplied by a matrix [O, R] with each B at its output
    features and zeros elsewhere; this small product accumulates into the output. All are computed in the dtype of x.
    The adapters of a layer share one dropout mask.

    With DoRA (arXiv:2402.09353, section 4), each row of the adapted weight W + scale * B @ A is scaled to the trained
    norm, without a gradient through its own norm. Norms are fp32.
    """

    def forward(self, x: Tensor, layer: Linear) -> Tensor:
        down, up = self._factors(x.dtype, layer.out_features)
        rows = x.reshape(-1, layer.in_features)
        if self.dropout is None:
            added = layer.base_plus(rows, down, up)
        else:
            added = torch.addmm(layer.base(rows), F.linear(self.dropout(rows), down), up.t())
        added = added.view(*x.shape[:-1], layer.out_features)
        ratio = self._norm_ratio(layer, down, up)
        if ratio is None:
            return added
        ratio = ratio.to(x.dtype)
        return added * ratio if layer.bias is None else added * ratio + layer.bias.to(x.dtype) * (1 - ratio)

    def operands(self, x: Tensor, layer: Linear) -> tuple[Tensor, Tensor]:
        """[x, x @ A.T] [T, I + R] and the weight extended by B [O, I + R], whose product is the output.

        The accumulator of that product then computes the sum, without rounding in between.
        """
        down, up = self._factors(x.dtype, layer.out_features)
        low = F.linear(x if self.dropout is None else self.dropout(x), down)
        weight = torch.cat([layer.dense_weight(x.dtype), up], dim=1)
        ratio = self._norm_ratio(layer, down, up)
        return torch.cat([x, low], dim=1), weight if ratio is None else weight * ratio.to(x.dtype)[:, None]

    def _factors(self, dtype: torch.dtype, out_features: int) -> tuple[Tensor, Tensor]:
        """(scale * A [R, I], B [O, R]) of the layer."""
        pairs = self.pairs()
        downs, ups = [pair.scaled_a(dtype) for pair in pairs], [pair.B.to(dtype) for pair in pairs]
        return join_parts(downs, ups, [(pair.start, pair.stop) for pair in pairs], out_features)

    def _norm_ratio(self, layer: Linear, down: Tensor, up: Tensor) -> Tensor | None:
        """DoRA's factor for each output feature, [O] fp32: one for features without an adapter; None without DoRA."""
        pairs = self.pairs()
        if pairs[0].magnitude_offset is None:
            return None
        base, adapted = row_norms(layer.dense_weight(down.dtype), down, up)
        pieces: list[Tensor] = []
        row = 0
        for pair in pairs:
            assert pair.magnitude_offset is not None, "all adapters of a layer use DoRA, or none"
            pieces += [base[row : pair.start], base[pair.start : pair.stop] + pair.magnitude_offset]
            row = pair.stop
        return torch.cat([*pieces, base[row:]]) / adapted


def join_parts(
    downs: Sequence[Tensor], ups: Sequence[Tensor], parts: Sequence[tuple[int, int]], out_features: int
) -> tuple[Tensor, Tensor]:
    """Join the factors of the adapters on a layer's parts: [..., R, I] and [..., O, R], where R is the sum of ranks.

    Args:
        downs: A of each adapter, in the order of the parts, [..., rank, I].
        ups: B of each adapter, [..., P, rank]; it fills the rows of its part, and other rows are zero.
        parts: the range (start, stop) of output features of each adapter.
        out_features: O.
    """
    if len(parts) == 1 and parts[0] == (0, out_features):
        return downs[0], ups[0]
    down = torch.cat([*downs], dim=-2)
    total, before, row = down.shape[-2], 0, 0
    blocks: list[Tensor] = []
    for up, (start, stop) in zip(ups, parts, strict=True):
        # Pad each block at the top with the unadapted rows before it.
        blocks.append(F.pad(up, (before, total - before - up.shape[-1], start - row, 0)))
        before, row = before + up.shape[-1], stop
    if row < out_features:
        blocks.append(down.new_zeros(*ups[0].shape[:-2], out_features - row, total))
    return down, torch.cat(blocks, dim=-2)


@torch.no_grad()
def row_norms(weight: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The norms of the rows of W [O, I] and of W + up @ down, given up [O, R] and down [R, I]: fp32, [O] each.

    Computed without a matrix as large as W: |w + u D|^2 = |w|^2 + 2 (w D^T) . u + u (D D^T) u^T for a row w.
    """
    base = torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(weight.dtype, torch.float32))
    wide_down, wide_up = down.to(base.dtype), up.to(base.dtype)
    cross = (F.linear(weight, down).to(base.dtype) * wide_up).sum(dim=1)
    squares = ((wide_up @ (wide_down @ wide_down.t())) * wide_up).sum(dim=1)
    # The clamp avoids dividing by zero: the magnitude of a zero row is zero too.
    smallest = torch.finfo(torch.float32).tiny
    return base, (base.square() + 2 * cross + squares).clamp(min=smallest).sqrt()


class EmbeddingAdapter(_Adapter):
    """rows + scale * A.T[ids] @ B.T on the rows that an embedding returns, in the dtype of the rows."""

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        (pair,) = self.pairs()
        low = look_up(ids, pair.scaled_a(rows.dtype).t())  # [..., R]
        if self.dropout is not None:
            low = self.dropout(low)
        return rows + F.linear(low, pair.B.to(rows.dtype))


def adapter_of(layer: nn.Module) -> _Adapter | None:
    """The adapters that `layer` owns, or None; those of a bank (see bank.py) are not owned by a layer."""
    adapter = layer.adapter if isinstance(layer, (Linear, Embedding)) else None
    return adapter if isinstance(adapter, _Adapter) else None


class TorchLinear(Linear):
    """Replaces an nn.Linear to support an adapter; has the same parameters, cast to the dtype of x."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.adapter = None
        self.train(linear.training)


def torch_linear(layer: Linear, weight: Tensor) -> nn.Linear:
    """The nn.Linear with `weight` [O, I] and the bias of `layer`."""
    # On the meta device, because its parameters are replaced immediately.
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    linear.weight, linear.bias = cast(nn.Parameter, weight), cast(nn.Parameter, layer.bias)
    return linear.train(layer.training)


class TorchEmbedding(Embedding):
    """Replaces an nn.Embedding to support an adapter; has the same parameter."""

    def __init__(self, embedding: nn.Embedding) -> None:
        nn.Module.__init__(self)
        self.num_rows = embedding.num_embeddings
        self.held, self.shares = range(self.num_rows), {}
        self.padding_idx = embedding.padding_idx
        self.weight = embedding.weight
        self.adapter = None
        self.train(embedding.training)


def torch_embedding(layer: TorchEmbedding) -> nn.Embedding:
    """nn.Embedding with the parameter of `layer`."""
    # On the meta device, because its parameter is replaced immediately.
    sizes = (layer.num_rows, layer.weight.shape[1])
    embedding = nn.Embedding(*sizes, padding_idx=layer.padding_idx, device="meta")
    embedding.weight = layer.weight
    return embedding.train(layer.training)


def initial_bound(in_features: int) -> float:
    """The bound of A's uniform initial values: nn.Linear's default, Kaiming-uniform with a = sqrt(5)."""
    return 1.0 / math.sqrt(in_features)
