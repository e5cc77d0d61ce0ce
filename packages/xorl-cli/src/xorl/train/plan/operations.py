"""Records what a pass computes: the operations that the dispatcher sees, and the memory that their results take.

It works on real tensors and on those of the meta device, whose passes take no time and no memory. Shapes: a product
multiplies [M, K] by [K, N].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from xorl.core.nn.all_gather import passes_of
from xorl.core.nn.gathered_experts import MAX_GRAPH_TOKENS
from xorl.kernels.linear_ce import GRADIENT_BYTES, LOGITS_BYTES, chunk_rows
from xorl.kernels.torch_private import (
    OpOverload,
    UncompiledDispatchMode,
    changes_inputs,
    counted_flops,
    operator_name,
    storage_key,
    tree_leaves,
)

Kind = Literal["products", "attention", "experts", "recurrences", "exchanges", "elements"]
Collective = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]

aten = torch.ops.aten
# Read a few rows of their first input, not all.
LOOKUPS = frozenset({"embedding", "index", "index_select", "gather", "slice_backward"})
# Take no time of their own: the device only waits, or nothing runs.
FREE = frozenset({"wait_tensor", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach"})
HEAD = "linear_cross_entropy"
EXPERTS = ("experts", "experts_backward", "adapted_experts", "adapted_experts_backward")
# Experts together with the exchange of their tokens.
GATHERED_EXPERTS = ("gathered_experts", "gathered_experts_backward")
# With a CUDA graph: of copies of its inputs and outputs, and of the graph.
GRAPH_LAUNCHES = 4
QUANTIZED_PRODUCTS = ("quantized_linear", "quantized_linear_grad")
RECURRENCES = ("gated_delta", "state_space")
EXCHANGES: Mapping[str, Collective] = MappingProxyType(
    {
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
        "all_reduce": "all_reduce",
        "gather_tokens": "all_gather",
        "gather_rows": "all_gather",
        "reduce_rows": "all_to_all",
        "reduce_tokens": "all_to_all",
    }
)


class Product(NamedTuple):
    """A matrix product; `number` of the same sizes."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    number: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.number


@dataclass(frozen=True)
class Operation:
    """One operation of a pass.

    name: the operator's, without its namespace. num_bytes: read and written. flops: of its products.
    products: what it multiplies. is_backward: of attention and experts. scale: the tokens of a document (attention) or
    the rows of an expert, on which the rate depends. channels: of a head. collective: of an exchange among `ranks`,
    with the bytes of all of them together in `num_bytes`. ring_bytes: keys and values that attention fetches in a ring.
    is_plain: of elements, by torch itself. launches: kernels that it launches.
    """

    kind: Kind
    name: str
    num_bytes: float
    flops: float = 0.0
    products: tuple[Product, ...] = ()
    is_backward: bool = False
    scale: float = 1.0
    channels: int = 0
    collective: Collective | None = None
    ranks: int = 1
    ring_bytes: float = 0.0
    is_plain: bool = False
    launches: int = 1


class Recorder(UncompiledDispatchMode):
    """Records operations, and counts the bytes of tensors computed under it: a `Meter` of step_memory.

    `phases` has the operations between two calls of `restart`, which `profile_pass` makes at the end of each phase.

    Args:
        lengths: the tokens of the documents of a row.
        ranks: the numbers of ranks of process groups, by the names by which operators know these.

    Attributes:
        repeats_compiled: compiled layers are being recomputed. They skip experts whose backward pass recomputes these.
    """

    def __init__(self, lengths: Sequence[int], ranks: Mapping[str, int] = MappingProxyType({})) -> None:
        super().__init__()
        self._ranks = ranks
        self.repeats_compiled = False
        self.phases: list[list[Operation]] = [[]]
        self._length = sum(each * each for each in lengths) / max(sum(lengths), 1)
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held = self._peak = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        storages = {storage_key(tensor) for tensor in given}
        made: list[Tensor] = []
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (key := storage_key(leaf)) not in storages:
                storage = leaf.untyped_storage()
                self._storages[key] = StorageWeakRef(storage), storage.nbytes()
                storages.add(key)
                made.append(leaf)
        name = operator_name(func)
        if made or changes_inputs(func):
            self._peak = max(self._peak, self.held() + _inner_bytes(name, args))
            if name not in FREE and not (self.repeats_compiled and name == GATHERED_EXPERTS[0]):
                self.phases[-1].append(self._operation(func, name, args, kwargs, given, made, result))
        return result

    def held(self) -> int:
        """Bytes of the tensors that still exist."""
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(size for _, size in self._storages.values())

    def peak(self) -> int:
        """The most bytes since `restart`."""
        return self._peak

    def restart(self) -> None:
        """Begin a new phase."""
        self._peak = self.held()
        self.phases.append([])

    def _operation(
        self,
        func: OpOverload,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        made: Sequence[Tensor],
        result: object,
    ) -> Operation:
        written = sum(map(_num_bytes, made))
        num_bytes = 2.0 * written if name in LOOKUPS else written + sum(map(_num_bytes, given))
        if changes_inputs(func):
            num_bytes += _num_bytes(given[0]) if given else 0
        if (collective := EXCHANGES.get(name)) is not None:
            whole = float(max(sum(map(_num_bytes, given)), sum(map(_num_bytes, made))))
            return Operation("exchanges", name, whole, collective=collective, ranks=self._ranks_of(args))
        if name.startswith("attention_"):
            return self._attention(func, name, args, kwargs, num_bytes, result)
        if name in EXPERTS:
            return _experts(name, args, num_bytes, self._ranks.get("ep", 1))
        if name in GATHERED_EXPERTS:
            return _gathered_experts(name, args, num_bytes)
        if name.startswith(RECURRENCES):
            return Operation("recurrences", name, num_bytes, flops=float(counted_flops(func, args, kwargs, result)))
        if products := _products(name, args, made):
            return Operation("products", name, num_bytes, sum(each.flops for each in products), tuple(products))
        return Operation("elements", name, num_bytes, is_plain=func.namespace == "aten")

    def _attention(
        self,
        func: OpOverload,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_bytes: float,
        result: object,
    ) -> Operation:
        is_backward = name.endswith("_backward")
        q = args[1 if is_backward else 0]
        flops = float(counted_flops(func, args, kwargs, result))
        in_ring = "_ring" in name
        ranks = self._ranks_of(args) if in_ring else 1
        # Keys and values; backward their gradients, too, in fp32.
        fetched = sum(map(_num_bytes, args[2:4] if is_backward else args[1:3])) * (3 if is_backward else 1)
        return Operation(
            "attention",
            name,
            num_bytes,
            flops,
            is_backward=is_backward,
            scale=self._length,
            channels=q.shape[-1],
            ranks=ranks,
            ring_bytes=float(fetched * ranks) if in_ring else 0.0,
        )

    def _ranks_of(self, args: Sequence[Any]) -> int:
        """The number of ranks of the process group that an operator names."""
        return next((self._ranks[arg] for arg in args if isinstance(arg, str) and arg in self._ranks), 1)


def _products(name: str, args: Sequence[Any], made: Sequence[Tensor]) -> list[Product]:
    """The products of an operator that is nothing else; none of others."""
    match name:
        case "mm" | "_scaled_mm" | "linear":
            a, b = args[:2]
            return [Product(a.shape[0], b.shape[1], a.shape[1], _operand(a))]
        case "addmm" | "addmm_":
            a, b = args[1:3]
            return [Product(a.shape[0], b.shape[1], a.shape[1], _operand(a))]
        case "bmm":
            a, b = args[:2]
            return [Product(a.shape[1], b.shape[2], a.shape[2], _operand(a), a.shape[0])]
        case "baddbmm":
            a, b = args[1:3]
            return [Product(a.shape[1], b.shape[2], a.shape[2], _operand(a), a.shape[0])]
        case _ if name in QUANTIZED_PRODUCTS:
            x = args[0]
            return [Product(x.shape[0], made[0].shape[1], x.shape[1], _operand(x))]
        case _ if name == HEAD:
            hidden, weight = args[:2]
            sizes = (hidden.shape[0], weight.shape[0], hidden.shape[1])
            return [Product(*sizes, _operand(hidden), 1 + bool(args[-2]) + bool(args[-1]))]
        case _ if name.endswith(("grad_input", "add_product_", "scaled_product")):
            a, b = args[0], args[1]
            return [Product(a.shape[0], made[0].shape[1] if made else b.shape[0], a.shape[1], _operand(a))]
        case _:
            return []


def _operand(x: Tensor) -> torch.dtype:
    return x.dtype


def _experts(name: str, args: Sequence[Any], num_bytes: float, ranks: int = 1) -> Operation:
    """The products of experts: two forward, or those of both gradients.

    Of `ranks` that share the experts, each is offered the choices of all, and has its share of them.
    """
    is_backward, is_adapted = name.endswith("_backward"), name.startswith("adapted")
    x = args[1 if is_backward else 0]
    if is_adapted:
        first = 10 + is_backward
        choices, up_b, num_experts = args[first], args[6 if is_backward else 5], args[18 if is_backward else 14]
        columns = up_b.shape[1]
        trains = False
    else:
        gate_up, choices = args[2 if is_backward else 1], args[5 if is_backward else 4]
        num_experts, columns = gate_up.shape[0], gate_up.shape[1]
        trains = bool(args[11]) if is_backward else False
    num_rows = choices.shape[0] / ranks
    # Up and down; the down product has as many multiply-adds as half of the gated up product.
    forward = 2 * num_rows * x.shape[1] * columns * 1.5
    factor = 1 if not is_backward else 1 + trains
    return Operation(
        "experts",
        name,
        num_bytes,
        forward * factor,
        is_backward=is_backward,
        scale=num_rows / max(num_experts, 1),
        # Of adapters on three matrices: two products each, and backward four.
        launches=10 + 12 * is_adapted if is_backward else 6 + 6 * is_adapted,
    )


def _gathered_experts(name: str, args: Sequence[Any], num_bytes: float) -> Operation:
    """The products of a rank's experts, which the backward pass begins again, and what ranks send each other."""
    is_backward = name.endswith("_backward")
    x, _, ids, gate_up = args[is_backward : 4 + is_backward]
    num_ranks, trains = args[8 + is_backward], is_backward and args[-1]
    forward = 2 * ids.numel() * x.shape[1] * gate_up.shape[1] * 1.5
    # Tokens and sums; backward, gradients of both.
    num_exchanges = 4 if is_backward else 2
    launches = (10 + 6 if is_backward else 6) + num_exchanges
    return Operation(
        "experts",
        name,
        num_bytes,
        forward * (1 + trains + 2 / 3 if is_backward else 1),
        is_backward=is_backward,
        scale=ids.numel() / gate_up.shape[0],
        ranks=num_ranks,
        ring_bytes=float(num_exchanges * num_ranks * _num_bytes(x)),
        launches=launches if len(x) > MAX_GRAPH_TOKENS else GRAPH_LAUNCHES,
    )


def _inner_bytes(name: str, args: Sequence[Any]) -> int:
    """Bytes that an operator allocates and frees again, beside its results."""
    if name == HEAD:
        hidden, weight, fp32, at_once, needs = args[0], args[1], args[4], args[6], args[-2] or args[-1]
        operand, wide = hidden.dtype.itemsize, max(hidden.dtype.itemsize, 4)
        columns = weight.shape[0]
        logits = wide if fp32 else operand
        rows = at_once or chunk_rows(hidden.shape[0], columns * operand, GRADIENT_BYTES)
        if not needs:
            part = at_once or chunk_rows(hidden.shape[0], columns * logits)
            return part * columns * logits
        if logits == operand:
            own = rows * columns * operand
        else:
            part = chunk_rows(min(rows, hidden.shape[0]), columns * logits, LOGITS_BYTES)
            own = part * columns * logits + rows * columns * operand
        return own + rows * hidden.shape[1] * (wide + operand)
    if name in QUANTIZED_PRODUCTS:
        x = args[0]
        return int(args[6] * x.shape[1] * x.dtype.itemsize)
    if name in EXPERTS:
        is_backward, is_adapted = name.endswith("_backward"), name.startswith("adapted")
        x, num_passes = args[1 if is_backward else 0], 1 if is_adapted else args[10 if is_backward else 8]
        num_rows = -(-args[(10 if is_adapted else 4) + is_backward].shape[0] // num_passes)
        columns = args[(5 if is_adapted else 1) + is_backward].shape[1]
        # The gathered rows, the activation, and the rows of the output.
        rows = 2 * x.shape[1] + columns // 2
        if is_backward:
            rows += x.shape[1] + columns
        return num_rows * rows * x.dtype.itemsize
    if name in GATHERED_EXPERTS:
        is_backward = name.endswith("_backward")
        x, _, ids, gate_up = args[is_backward : 4 + is_backward]
        num_ranks = args[8 + is_backward]
        if len(x) <= MAX_GRAPH_TOKENS:
            return 0  # in memory that the graphs hold
        rows, columns = 2 * x.shape[1] + gate_up.shape[1] // 2, gate_up.shape[1]
        rows += (x.shape[1] + columns) * is_backward
        num_rows = -(-ids.numel() * num_ranks // passes_of(num_ranks))
        return (num_rows * rows + (2 + is_backward) * num_ranks * x.numel()) * x.dtype.itemsize
    return 0


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
