"""Whole layers in CUDA graphs: the host launches a layer's forward or backward pass at once, not kernel by kernel.

With few tokens, launching the kernels of a layer takes the host longer than the GPU computes. A graph reads parameters
where they are, so these must not move: they stay in one process and under ddp, but FSDP2 gathers them into new memory.

The first pass of rows of a size runs as usual. The second one captures each layer's forward pass and right after it the
backward pass, and later ones replay them. What a pass needs later is copied out of the memory that graphs share:
outputs, gradients, and what a layer saves for its backward pass, which is little if this computes the layer again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from xorl.core.graphs import MAX_GRAPHS, MAX_SIZES, GraphMemory
from xorl.core.nn.all_gather import AllGather
from xorl.core.nn.attention import Attention
from xorl.core.nn.gated_delta_net import GatedDeltaNet
from xorl.core.nn.latent import LatentAttention
from xorl.core.nn.moe import Experts, LayerRoutes
from xorl.core.nn.short_conv import ShortConv
from xorl.core.nn.state_space import StateSpace
from xorl.kernels.experts.routing import Routing
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.torch_private import TreeSpec, foreach_copy_, tree_flatten, tree_unflatten

logger = logging.getLogger(__name__)

Forward = Callable[..., object]


class _Row(NamedTuple):
    """A row as graphs see it.

    layout: padded with empty documents.
    tensors: those of the layout on the device.
    sizes: equal for rows that share graphs.
    """

    layout: SequenceLayout
    tensors: list[Tensor]
    sizes: Hashable


class _Buffers:
    """What the graphs of all layers read whose inputs have the same sizes.

    Args:
        row: the first row of these sizes.
        inputs: of a layer: the hidden states, the row's tensors and others, in this order.

    Attributes:
        layout: the row with the buffers as its tensors.
        inputs: the buffers of inputs.
    """

    def __init__(self, row: _Row, inputs: Sequence[Tensor]) -> None:
        self.inputs = [torch.empty_like(each) for each in inputs]
        self.layout = row.layout.with_device_tensors(iter(self.inputs[1:]))
        # The tensors that were copied last: those of a row are copied once for all layers.
        self._held: list[Tensor | None] = [None] * len(inputs)
        self._scratch: dict[Hashable, Tensor] = {}

    def fill(self, inputs: Sequence[Tensor]) -> None:
        """Copy the inputs of a call. All but hidden states keep their values as long as they are used."""
        changed = [index for index, each in enumerate(inputs) if self._held[index] is not each]
        foreach_copy_([self.inputs[index] for index in changed], [inputs[index].detach() for index in changed])
        self._held[1:] = inputs[1:]

    def scratch(self, purpose: str, like: Sequence[Tensor]) -> list[Tensor]:
        """Further buffers with the shapes of these tensors, the same ones for the same purpose."""
        keys = [(purpose, index, each.shape, each.dtype) for index, each in enumerate(like)]
        for key, each in zip(keys, like, strict=True):
            if key not in self._scratch:
                self._scratch[key] = torch.empty_like(each)
        return [self._scratch[key] for key in keys]


class _Structure(NamedTuple):
    """Where a value has tensors, possibly inside of tuples."""

    leaves: tuple[object, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, value: object) -> tuple[list[Tensor], _Structure]:
        """The tensors in a value, and the rest of it."""
        leaves, spec = tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return tensors, cls(tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec)

    def around(self, tensors: Iterable[Tensor]) -> object:
        """The value with these tensors."""
        found = iter(tensors)
        return tree_unflatten([next(found) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)


_TENSOR = object()


@dataclass(frozen=True)
class _CapturedLayer:
    """The two graphs of a layer, with what they read and write.

    Attributes:
        buffers, saved, grad_outputs: what they read; the last two are for the backward pass alone.
        outputs, to_save, gradients: what they write, in memory that other graphs overwrite. Gradients are those of the
            hidden states and of each trained parameter, None where there is none.
        differentiable: which outputs have a gradient.
        structure: of what the layer returns.
    """

    buffers: _Buffers
    saved: Sequence[Tensor]
    grad_outputs: Sequence[Tensor]
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    outputs: Sequence[Tensor]
    to_save: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    differentiable: Sequence[bool]
    structure: _Structure


class LayerGraphs:
    """The graphs of a model's layers, which must be compiled and recomputed as a whole."""

    def __init__(self) -> None:
        self._memory = GraphMemory()
        # Keys of which both passes have run once, so that a capture compiles nothing.
        self._ready: set[Hashable] = set()
        self._captured: dict[Hashable, _CapturedLayer] = {}
        self._sizes: set[Hashable] = set()
        self._buffers: dict[Hashable, _Buffers] = {}
        self._last: tuple[SequenceLayout, _Row | None] | None = None
        self._has_warned = False

    def __len__(self) -> int:
        """The number of captured layers, counted once for each size."""
        return len(self._captured)

    def install(self, layers: Sequence[nn.Module]) -> None:
        """Wrap the forward functions of `layers`, in place. Calls without gradients are launched as before."""
        for number, layer in enumerate(layers):
            layer.forward = self._graphed(number, layer, layer.forward)

    def _graphed(self, number: int, layer: nn.Module, forward: Forward) -> Forward:
        weights: list[Tensor] = []

        def call(hidden: Tensor, layout: SequenceLayout, *others: object) -> object:
            if not (torch.is_grad_enabled() and hidden.requires_grad):
                return forward(hidden, layout, *others)
            if not weights:  # only now, because parameters on the meta device have been replaced
                weights.extend([*layer.parameters(), *layer.buffers()])
            row = self._row_of(layout)
            if row is None:
                return forward(hidden, layout, *others)
            given, structure = _Structure.of(others)
            inputs = [hidden, *row.tensors, *given]
            shapes = tuple((each.shape, each.dtype) for each in inputs)
            sizes = row.sizes, structure.leaves, shapes, layer.training
            key = number, sizes, tuple((weight.data_ptr(), weight.requires_grad) for weight in weights)
            captured = self._captured.get(key)
            if captured is None:
                if key not in self._ready:
                    # The first two passes compile kernels and choose configurations.
                    hidden.register_hook(lambda _: self._ready.add(key))
                    return _without_empty(forward(hidden, row.layout, *others), len(layout.lengths))
                if sizes not in self._buffers:
                    self._buffers[sizes] = _Buffers(row, inputs)
                if len(self._captured) >= MAX_GRAPHS:
                    # Graphs of parameters that have moved are never used again.
                    self._captured.clear()
                    self._memory = GraphMemory()
                captured = self._captured[key] = self._capture(layer, forward, self._buffers[sizes], structure)
            trained = [weight for weight in weights if weight.requires_grad]
            outputs = _Replay.apply(captured, len(inputs), *inputs, *trained)
            return _without_empty(captured.structure.around(outputs), len(layout.lengths))

        return call

    def _row_of(self, layout: SequenceLayout) -> _Row | None:
        """The row of a pass as graphs see it; None if it gets none."""
        if self._last is None or self._last[0] is not layout:
            self._last = layout, self._new_row(layout)
        return self._last[1]

    def _new_row(self, layout: SequenceLayout) -> _Row | None:
        rounded = layout.rounded()
        if rounded is None:
            return None
        sizes = len(rounded.offsets), rounded.max_seqlen, layout.whole.num_tokens, layout.rows.most_tokens
        if sizes not in self._sizes and len(self._sizes) == MAX_SIZES:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "CUDA graphs: %d sizes of rows have graphs, and kernels for further ones are launched one by one; "
                    "pad rows to a larger multiple for fewer sizes",
                    MAX_SIZES,
                )
            return None
        self._sizes.add(sizes)
        return _Row(rounded, rounded.device_tensors(), sizes)

    def _capture(self, layer: nn.Module, forward: Forward, buffers: _Buffers, structure: _Structure) -> _CapturedLayer:
        # Autograd computes the gradient of a leaf on the stream that first used it, so the graphs have leaves of their
        # own, which share the memory of hidden states and parameters.
        hidden = buffers.inputs[0].detach().requires_grad_()
        module = _Called(layer, forward)
        leaves: dict[str, Tensor] = {
            name: nn.Parameter(each.detach(), each.requires_grad) for name, each in module.named_parameters()
        }
        layout = buffers.layout
        others = structure.around(buffers.inputs[1 + len(layout.device_tensors()) :])
        assert isinstance(others, tuple)
        fixed = {_address(each) for each in (*buffers.inputs, *layer.parameters(), *layer.buffers(), *_on_host(layout))}
        to_save: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor | int:
            if _address(tensor) in fixed:
                return tensor
            assert tensor.is_contiguous(), "a recomputed layer saves only results of operators"
            to_save.append(tensor.detach())
            return len(to_save) - 1

        def unpack(packed: Tensor | int) -> Tensor:
            return saved[packed] if isinstance(packed, int) else packed

        with self._memory.capture() as forward_graph, saved_tensors_hooks(pack, unpack):
            returned, structure = _Structure.of(functional_call(module, leaves, (hidden, layout, *others)))
            outputs = [each.contiguous() for each in returned]
        saved = buffers.scratch("saved", to_save)
        with_gradient = [each for each in outputs if each.requires_grad]
        grad_outputs = buffers.scratch("gradient", with_gradient)
        wanted = [hidden, *(leaf for leaf in leaves.values() if leaf.requires_grad)]
        with self._memory.capture() as backward_graph:
            found = torch.autograd.grad(with_gradient, wanted, grad_outputs, allow_unused=True)
            gradients = [None if each is None else each.contiguous() for each in cast("Sequence[Tensor | None]", found)]
        place_of = self._memory.place_of
        return _CapturedLayer(
            buffers,
            saved,
            grad_outputs,
            forward_graph,
            backward_graph,
            [place_of(each.detach()) for each in outputs],
            [place_of(each) for each in to_save],
            [None if each is None else place_of(each) for each in gradients],
            [each.requires_grad for each in outputs],
            structure,
        )


def graphs_refusal(layers: Iterable[nn.Module]) -> str | None:
    """Why these layers cannot be captured with any kernels; None if they can.

    A capture contains no wait of the host for the device, no random numbers, which would be those of the capture, and
    no tensors but inputs and those of the layer.
    """
    for module in (module for layer in layers for module in layer.modules()):
        if isinstance(module, GatedDeltaNet | ShortConv | StateSpace):
            return f"the host reads the documents for the recurrence of {type(module).__name__}"
        if isinstance(module, nn.Dropout) and module.p:
            return "dropout would draw the same numbers in each step"
        if isinstance(module, Experts) and module.adapter is not None:
            return "adapters of experts are chosen outside of the layer"
    return None


def kernels_refusal(layers: Iterable[nn.Module]) -> str | None:
    """Why these layers cannot be captured with the kernels that they have; None if they can."""
    for module in (module for layer in layers for module in layer.modules()):
        if isinstance(module, Experts) and not isinstance(module.dispatcher, AllGather | None):
            return "the host reads how many tokens are exchanged, except with allgather"
        if isinstance(module, Experts) and not module.products:
            return "the host reads how many tokens an expert has, except with grouped products"
        if isinstance(module, Attention | LatentAttention):
            attention = module.kernels.attention
            if getattr(attention, "reads_lengths", True):
                name = getattr(attention, "name", "this function")
                return f"with attention by {name}, the host reads the lengths of documents; use flash attention"
    return None


class _Called(nn.Module):
    """A layer with the function that computes it, for `functional_call`."""

    def __init__(self, layer: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.layer = layer
        self._forward = forward

    def forward(self, *inputs: object) -> object:
        return self._forward(*inputs)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    captured: _CapturedLayer
    num_inputs: int


class _Replay(torch.autograd.Function):
    """A call of a layer by its graphs: of its inputs, and the trained parameters, which the graphs read in place."""

    @staticmethod
    def forward(ctx: _Context, captured: _CapturedLayer, num_inputs: int, *given: Tensor) -> tuple[Tensor, ...]:
        inputs = given[:num_inputs]
        captured.buffers.fill(inputs)
        captured.forward.replay()
        copies = _copies([*captured.outputs, *captured.to_save])
        outputs, saved = copies[: len(captured.outputs)], copies[len(captured.outputs) :]
        ctx.captured, ctx.num_inputs = captured, num_inputs
        ctx.save_for_backward(*inputs, *saved)
        ctx.mark_non_differentiable(*_where(outputs, [not each for each in captured.differentiable]))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] the decorator has no types
        ctx: _Context, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        captured = ctx.captured
        captured.buffers.fill(ctx.saved_tensors[: ctx.num_inputs])
        foreach_copy_(
            [*captured.saved, *captured.grad_outputs],
            [*ctx.saved_tensors[ctx.num_inputs :], *_where(gradients, captured.differentiable)],
        )
        captured.backward.replay()
        copies = iter(_copies([each for each in captured.gradients if each is not None]))
        of_hidden, *of_trained = (None if each is None else next(copies) for each in captured.gradients)
        return None, None, of_hidden, *[None] * (ctx.num_inputs - 1), *of_trained


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(each) for each in tensors]
    foreach_copy_(copies, list(tensors))
    return copies


def _where(values: Sequence[Tensor], flags: Sequence[bool]) -> list[Tensor]:
    return [each for each, flag in zip(values, flags, strict=True) if flag]


def _without_empty(returned: object, num_documents: int) -> object:
    """What a layer returns, without the empty documents of its row."""
    if not isinstance(returned, tuple):
        return returned
    hidden, routes = returned
    if routes.sums is None or len(routes.sums[0]) == num_documents:
        return returned
    sums = Routing(*(each[:num_documents] for each in routes.sums))
    replayed = None if routes.replayed is None else routes.replayed[:num_documents]
    return hidden, LayerRoutes(routes.ids, sums, replayed)


def _on_host(layout: SequenceLayout) -> Iterator[Tensor]:
    for each in (layout, layout.rows, layout.whole, layout.rows.whole):
        yield each.offsets


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
