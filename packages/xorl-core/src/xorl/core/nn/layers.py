"""Linear, embedding and feed-forward modules that compute in the dtype of their input.

Each module casts its weight to the dtype of the input, so fp32 parameters and parameters gathered in bf16 give the same
results, without autocast. Parameters are uninitialised; `Decoder.init_weights` or a checkpoint provides the values.

Shapes: T tokens, D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xorl.core.nn.kernels import LayerKernels
from xorl.core.nn.lookup import look_up
from xorl.core.nn.roles import Role
from xorl.core.nn.share import ENDS, Share
from xorl.core.nn.tensor import ALONE, TensorRanks
from xorl.core.nn.xielu import XIELU
from xorl.kernels.low_rank import adapted_linear


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "swish": F.silu,
        "gelu": F.gelu,
        "gelu_new": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "quick_gelu": _quick_gelu,
        "relu": F.relu,
        "relu2": _squared_relu,
    }
)
# Those with parameters, of plain feed-forward blocks.
TRAINED_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType({"xielu": XIELU})

SWIGLU_ACTIVATIONS = ("silu", "swish")


class LinearAdapterProtocol(Protocol):
    """An adapter on a linear layer: a module that changes the layer's output."""

    def __call__(self, x: Tensor, layer: Linear) -> Tensor:
        """The adapted output of `layer` for x; the unadapted one is `layer.base(x)`."""
        ...

    def operands(self, x: Tensor, layer: Linear) -> tuple[Tensor, Tensor]:
        """Two matrices whose product is the output: see `Linear.operands`."""
        ...


class EmbeddingAdapterProtocol(Protocol):
    """An adapter on an embedding."""

    def __call__(self, ids: Tensor, rows: Tensor) -> Tensor:
        """The adapted output for `ids`; `rows` is the unadapted one."""
        ...


class Linear(nn.Module):
    """x @ weight.T + bias in the dtype of x. weight is [out, in].

    Subclasses that store the weight or compute the product differently override `base` and `dense_weight`, and
    `base_plus` if they can fuse it.

    Attributes:
        adapter: None, or an adapter. The layer's own parameters keep their names.
        ranks: the ranks that share the weight.
        shares: what it holds of the parameters, if ranks share them.
        adds_bias: whether the output includes the bias. Where ranks add up their outputs, only one of them adds it.
        stored: see `StoresWeight`; empty, except in subclasses with a weight in another format.
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"weight": "dense", "bias": "bias"})

    ranks: TensorRanks = ALONE

    shares: Mapping[str, Share] = MappingProxyType({})

    adds_bias: bool = True

    stored: ClassVar[tuple[str, ...]] = ()

    bias: nn.Parameter | None
    adapter: LinearAdapterProtocol | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.adapter = None

    @classmethod
    def column_parallel(
        cls, in_features: int, counts: Sequence[int], *, bias: bool, ranks: TensorRanks, head: int = 0
    ) -> Self:
        """A layer that stacks matrices of `counts` outputs, each of which the ranks share by its outputs.

        head: if not 0, the outputs of a head, which ranks share as a whole; see `TensorRanks.range_of`.
        """
        layer = cls(in_features, sum(ranks.num_of(count, head) for count in counts), bias=bias)
        layer.ranks = ranks
        if (share := ranks.rows_of(counts, head)) is not None:
            layer.shares = {"weight": share, "bias": share} if bias else {"weight": share}
        return layer

    @classmethod
    def row_parallel(cls, in_features: int, out_features: int, *, bias: bool, ranks: TensorRanks) -> Self:
        """A layer that the ranks share by its inputs: the output is the sum of those of all ranks."""
        layer = cls(ranks.num_of(in_features), out_features, bias=bias)
        layer.ranks = ranks
        if (share := ranks.columns_of(out_features, in_features)) is not None:
            layer.shares = {"weight": share}
        layer.adds_bias = ranks.group.rank == 0
        return layer

    @property
    def is_plain_and_trained(self) -> bool:
        """Whether the output is the plain product with a trained weight, without an adapter or a subclass's `base`."""
        return self.adapter is None and type(self).base is Linear.base and self.weight.requires_grad

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.adapter is None else self.adapter(x, self)

    def base(self, x: Tensor) -> Tensor:
        """The output of the layer without its adapter."""
        return F.linear(x, self.weight.to(x.dtype), self.added_bias(x.dtype))

    def added_bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias in `dtype`. Zeros if another rank adds it, so that it still has a gradient, as DDP requires."""
        if self.bias is None:
            return None
        return self.bias.to(dtype) if self.adds_bias else self.bias.to(dtype) * 0

    def base_plus(self, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """base(x) + (x @ down.T) @ up.T for x [T, in], down [R, in] and up [out, R], all of one dtype."""
        if type(self).base is Linear.base and not self.weight.requires_grad:
            return adapted_linear(x, self.weight.to(x.dtype), self.added_bias(x.dtype), down, up)
        return torch.addmm(self.base(x), x @ down.t(), up.t())

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight that `base` multiplies with, [out, in], in `dtype`."""
        return self.weight.to(dtype)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(a [T, K], b [out, K]) whose product a @ b.T is the output, for callers that fuse it. Requires bias=False."""
        assert self.bias is None, "operands() does not support a bias"
        return (x, self.dense_weight(x.dtype)) if self.adapter is None else self.adapter.operands(x, self)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class Embedding(nn.Module):
    """Rows of weight [V, D] by id, in the dtype of the weight; the caller casts to the compute dtype.

    If ranks share the rows, the output is zero for ids of other ranks, and the caller adds up those of all ranks.

    Attributes:
        num_rows: V, of all ranks.
        shares: what it holds of the weight, if ranks share it.
        padding_idx: the id of padding, whose row gets no gradient from here, as in nn.Embedding; or None.
        adapter: None, or an adapter.
    """

    roles: ClassVar[Mapping[str, Role]] = MappingProxyType({"weight": "embedding"})

    adapter: EmbeddingAdapterProtocol | None

    def __init__(self, num_rows: int, width: int, padding_idx: int | None = None, ranks: TensorRanks = ALONE) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.padding_idx = padding_idx
        self.held = range(*ranks.range_of(num_rows))
        self.weight = nn.Parameter(torch.empty(len(self.held), width))
        share = ranks.rows_of([num_rows])
        self.shares: Mapping[str, Share] = {} if share is None else {"weight": share}
        self.adapter = None

    def share_between_ends(self) -> None:
        """Declare that the first and the last stage of a pipeline have this weight, as it is also that of the head."""
        num_rows = self.weight.shape[0]
        share = self.shares.get("weight", Share(num_rows, ((0, num_rows),)))
        self.shares = {"weight": replace(share, summed_over=(*share.summed_over, ENDS))}

    def forward(self, ids: Tensor) -> Tensor:
        if len(self.held) == self.num_rows:
            return self._rows(ids, self.padding_idx)
        is_held = (ids >= self.held.start) & (ids < self.held.stop)
        padding = None
        if self.padding_idx is not None and self.padding_idx in self.held:
            padding = self.padding_idx - self.held.start
        return self._rows((ids - self.held.start).where(is_held, 0), padding).masked_fill(~is_held[..., None], 0)

    def _rows(self, ids: Tensor, padding_idx: int | None) -> Tensor:
        rows = look_up(ids, self.weight, padding_idx)
        return rows if self.adapter is None else self.adapter(ids, rows)

    def extra_repr(self) -> str:
        return f"{self.num_rows}, {self.weight.shape[1]}"


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one matrix, with the gate's rows first (arXiv:2002.05202)."""

    def __init__(self, width: int, hidden_width: int, *, activation: str, bias: bool, kernels: LayerKernels) -> None:
        super().__init__()
        is_swiglu = activation in SWIGLU_ACTIVATIONS
        self.gated = kernels.swiglu if is_swiglu else _gated_by(ACTIVATIONS[activation])
        self.gated_linear = kernels.swiglu_linear if is_swiglu else None
        self.ranks = kernels.tensor
        self.gate_up_proj = Linear.column_parallel(width, (hidden_width,) * 2, bias=bias, ranks=self.ranks)
        self.down_proj = Linear.row_parallel(hidden_width, width, bias=bias, ranks=self.ranks)

    @property
    def stacked_rows(self) -> Mapping[str, Sequence[int]]:
        """By name of each projection that stacks several matrices: the number of rows of each of them."""
        return {"gate_up_proj": (self.gate_up_proj.out_features // 2,) * 2}

    def forward(self, x: Tensor) -> Tensor:
        gate_up, down = self.gate_up_proj(self.ranks.gather(x)), self.down_proj  # [T, 2F]
        if self.gated_linear is None or not down.is_plain_and_trained:
            return self.ranks.scatter(down(self.gated(gate_up)))  # [T, F]
        return self.ranks.scatter(self.gated_linear(gate_up, down.weight.to(x.dtype), down.added_bias(x.dtype)))


class PlainMLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, width: int, hidden_width: int, *, activation: str, bias: bool, ranks: TensorRanks) -> None:
        super().__init__()
        self.activation = _make_activation(activation)
        self.ranks = ranks
        self.up_proj = Linear.column_parallel(width, (hidden_width,), bias=bias, ranks=ranks)
        self.down_proj = Linear.row_parallel(hidden_width, width, bias=bias, ranks=ranks)

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.scatter(self.down_proj(self.activation(self.up_proj(self.ranks.gather(x)))))


def _make_activation(name: str) -> Callable[[Tensor], Tensor]:
    return TRAINED_ACTIVATIONS[name]() if name in TRAINED_ACTIVATIONS else ACTIVATIONS[name]


def _gated_by(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)  # [T, F] each
        return activation(gate) * up

    return gated
