"""The device memory of a bank: one slot for each adapter on the device, and the views that layers compute with.

A slot is one flat row of values, and one row of each AdamW state, so an optimizer step is one operation regardless of
the number of layers. A segment is the range of a slot that holds the adapter of one part of a layer. Gradients are
stored by segment, with all slots together, because autograd needs the gradient of a leaf to be contiguous.

Shapes: S slots, R padded rank, I input and P output features of a part of a layer, E experts. Of experts, A [E, R, I]
and B [E, P, R] stand for A [R, I] and B [P, R], with 1 in place of E for a factor that all experts share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xorl.core.nn import Linear
from xorl.core.nn.moe import ExpertLinear, Experts
from xorl.kernels.torch_private import foreach_copy_, foreach_zero_
from xorl.lora.bank_layer import ActiveRows, BankedExperts, BankedLinear, SlotPair, StackedPair
from xorl.lora.experts import SHARED
from xorl.lora.linear import TorchLinear
from xorl.lora.snapshot import GRAD, STATES, VALUE, AdapterSnapshot, NamedShapes, bounds_of
from xorl.lora.spec import AdapterSpec, ExpertSharing
from xorl.lora.targets import Site

# Grouped products in bf16 need rows of a multiple of 16 bytes.
RANK_MULTIPLE = 8


@dataclass(frozen=True)
class Segment:
    """The range of a slot for one part of a layer: A [R, I] at offset `start_a`, B [P, R] from `start_b` to `stop`.

    Attributes:
        owner: the module that computes the adapter: the layer itself, or the experts whose projection it is.
        counts: see `factor_counts`.
    """

    site: Site
    layer: Linear | ExpertLinear
    owner: Linear | Experts
    start_a: int
    start_b: int
    stop: int
    counts: tuple[int, int]

    @property
    def num_outputs(self) -> int:
        """The number of output features, P."""
        return self.site.stop - self.site.start

    @property
    def in_features(self) -> int:
        """The number of input features, I."""
        return self.layer.in_features


class Slots:
    """`num_slots` slots for adapters of up to `max_rank` on `sites`, which are linear layers and experts of `model`.

    nn.Linear layers are replaced by layers that support adapters. Slots are zero until they are written.

    sharing: what the adapters on the experts of a layer share. names: of the sites of all stages of a pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        *,
        num_slots: int,
        max_rank: int,
        sharing: ExpertSharing,
        device: torch.device | str,
        names: Sequence[str],
    ) -> None:
        self._names = names
        self.padded_rank = -(-max_rank // RANK_MULTIPLE) * RANK_MULTIPLE
        self.segments = _segments(model, sites, self.padded_rank, sharing)
        shape = (num_slots, self.segments[-1].stop)
        self.rows = {kind: torch.zeros(shape, dtype=torch.float32, device=device) for kind in (VALUE, *STATES)}
        self._grads = torch.zeros(math.prod(shape), device=device)
        self._gathered = torch.zeros(self.segments[-1].stop, device=device)
        # Cached by slot, because an adapter has hundreds of parts and each optimizer step needs their views.
        self._grad_views: dict[int, list[tuple[Tensor, Tensor]]] = {}
        # The indices of each layer's segments; the leaves of each layer by slot, created on first use.
        self._indices: dict[Linear | Experts, list[int]] = {}
        self._slot_pairs: dict[int, dict[Linear | Experts, tuple[SlotPair, ...]]] = {}
        self.selected: tuple[int | None, frozenset[int]] | None = None
        # Whether ranks compute the experts of each other's tokens.
        self.divides_experts = any(
            isinstance(segment.owner, Experts) and segment.owner.dispatcher is not None for segment in self.segments
        )
        # Cached by `kind_of`: the names of the kinds, and the length and kind index of each segment.
        self._kinds: dict[Callable[[str], str], tuple[list[str], Tensor, Tensor]] = {}
        self.steps = torch.zeros(num_slots, device=device)
        self._scales = torch.zeros(len(self.segments), num_slots, device=device)

    def attach(self, rows: ActiveRows) -> None:
        """Set the adapters of each layer to leaves that, like their gradients, share the slots' memory."""
        by_owner: dict[Linear | Experts, list[StackedPair]] = {}
        for index, (segment, scale) in enumerate(zip(self.segments, self._scales, strict=True)):
            a, b = (self._leaf(*part) for part in self._parts(segment))
            site = segment.site
            pair = StackedPair(site.name, site.path.rpartition(".")[2], (site.start, site.stop), a, b, scale)
            by_owner.setdefault(segment.owner, []).append(pair)
            self._indices.setdefault(segment.owner, []).append(index)
        for owner, pairs in by_owner.items():
            if isinstance(owner, Experts):
                owner.adapter = BankedExperts(pairs, rows, owner)
            else:
                owner.adapter = BankedLinear(pairs, rows)

    def select(self, slot: int | None, segments: frozenset[int]) -> None:
        """Assign all tokens to the adapter in `slot`, or, if None, to adapters by groups. `segments` are in use.

        A head without any of them is computed without an adapter, which saves the gradient of its weight. Other layers
        skip adapters only if none is used at all; otherwise each set of segments would need its own compiled code.
        """
        if (slot, segments) == self.selected:
            return
        if slot is not None and slot not in self._slot_pairs:
            self._slot_pairs[slot] = {
                owner: tuple(self._slot_pair(slot, index) for index in indices)
                for owner, indices in self._indices.items()
            }
        for owner, indices in self._indices.items():
            assert isinstance(owner.adapter, (BankedLinear, BankedExperts))
            if isinstance(owner.adapter, BankedExperts) and owner.adapter.is_divided:
                owner.adapter.single = None  # the other ranks' tokens may have other adapters
                continue
            is_head = self.segments[indices[0]].site.is_head
            is_skipped = not segments or (is_head and not any(index in segments for index in indices))
            owner.adapter.single = () if is_skipped else None if slot is None else self._slot_pairs[slot][owner]
        self.selected = slot, segments

    def names(self, spec: AdapterSpec, segments: Sequence[int]) -> NamedShapes:
        """The names and shapes of an adapter's tensors in these segments: those of experts are rows of one matrix."""
        names: list[tuple[str, tuple[int, ...]]] = []
        for segment in (self.segments[index] for index in segments):
            rank, (num_a, num_b) = spec.rank_of(*segment.site.names), segment.counts
            names.append((f"{segment.site.name}.lora_A", (num_a * rank, segment.in_features)))
            names.append((f"{segment.site.name}.lora_B", (num_b * segment.num_outputs, rank)))
        return names

    def tensors(self, kind: str, slot: int, spec: AdapterSpec, segments: Sequence[int]) -> dict[str, Tensor]:
        """Views of a slot's content by tensor name; see `names`."""
        pairs = [self.views(kind, slot, self.segments[index], spec) for index in segments]
        views = [view for pair in pairs for view in pair]
        return dict(zip((name for name, _ in self.names(spec, segments)), views, strict=True))

    def views(self, kind: str, slot: int, segment: Segment, spec: AdapterSpec) -> tuple[Tensor, Tensor]:
        """Views of A [rank, I] and B [P, rank] of one segment of a slot."""
        rank = spec.rank_of(*segment.site.names)
        a, b = (self._stacked(kind, *part)[slot] for part in self._parts(segment))
        return a[..., :rank, :], b[..., :rank]

    def gradient(self, slot: int, segments: Sequence[int]) -> Tensor:
        """The gradient of a slot in the layout of its values, zero outside `segments`; valid until the next call."""
        views = self._gradients(slot)
        parts = [part for index in segments for part in views[2 * index : 2 * index + 2]]
        self._gathered.zero_()
        foreach_copy_([target for target, _ in parts], [grad for _, grad in parts])
        return self._gathered

    def set_gradient(self, slot: int, gradient: Tensor) -> None:
        """Set the gradient of a slot to one that `gradient` returned."""
        views = self._gradients(slot)
        starts = [target.storage_offset() for target, _ in views]
        sources = [gradient[start : start + len(grad)] for start, (_, grad) in zip(starts, views, strict=True)]
        foreach_copy_([grad for _, grad in views], sources)

    def square_sums(self, gradient: Tensor, kind_of: Callable[[str], str]) -> tuple[list[str], Tensor]:
        """The kinds of layer on all stages, and for each the sum of the squares of `gradient` on this one; fp32.

        gradient: in the layout of a slot.
        """
        if kind_of not in self._kinds:
            kinds = [kind_of(segment.site.name) for segment in self.segments]
            names = list(dict.fromkeys(map(kind_of, self._names)))
            lengths = torch.tensor(
                [segment.stop - segment.start_a for segment in self.segments], device=gradient.device
            )
            indices = torch.tensor([names.index(kind) for kind in kinds], device=gradient.device)
            self._kinds[kind_of] = names, lengths, indices
        names, lengths, indices = self._kinds[kind_of]
        squares = torch.segment_reduce(gradient.square(), "sum", lengths=lengths)
        return names, torch.zeros(len(names), device=gradient.device).index_add_(0, indices, squares)

    def zero_gradient(self, slot: int) -> None:
        """Zero the gradient of a slot."""
        foreach_zero_([grad for _, grad in self._gradients(slot)])

    def assign(self, slot: int, spec: AdapterSpec, segments: Sequence[int]) -> None:
        """Assign an empty slot to an adapter with this spec."""
        for index in segments:
            self._scales[index, slot] = spec.scale_of(*self.segments[index].site.names)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        for rows in self.rows.values():
            rows[slot].zero_()
        self.zero_gradient(slot)
        self._scales[:, slot] = 0
        self.steps[slot] = 0

    @torch.no_grad()
    def read(self, slot: int, spec: AdapterSpec, segments: Sequence[int], kinds: Sequence[str]) -> AdapterSnapshot:
        """Copy a slot's content to host memory."""
        # One copy per kind: a large adapter has hundreds of tensors.
        nothing = self.steps.new_empty(0)
        flat = {
            kind: torch.cat(
                [nothing, *(part.reshape(-1) for part in self.tensors(kind, slot, spec, segments).values())]
            ).cpu()
            for kind in kinds
        }
        return AdapterSnapshot(spec, int(self.steps[slot]), self.names(spec, segments), flat)

    @torch.no_grad()
    def write(self, slot: int, segments: Sequence[int], snapshot: AdapterSnapshot) -> None:
        """Copy a result of `read` into a slot that was assigned with its spec."""
        bounds = bounds_of(snapshot.names)
        for kind, flat in snapshot.values.items():
            moved = flat.to(self.steps.device)
            for view, (start, stop) in zip(
                self.tensors(kind, slot, snapshot.spec, segments).values(), bounds, strict=True
            ):
                view.copy_(moved[start:stop].view(view.shape))
        self.steps[slot] = snapshot.step

    def _parts(self, segment: Segment) -> tuple[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]]]:
        """(offset in a row, shape) of A [R, I] and of B [P, R] of a segment."""
        a, b = (self.padded_rank, segment.in_features), (segment.num_outputs, self.padded_rank)
        if not segment.site.members:
            return (segment.start_a, a), (segment.start_b, b)
        num_a, num_b = segment.counts
        return (segment.start_a, (num_a, *a)), (segment.start_b, (num_b, *b))

    def _stacked(self, kind: str, start: int, shape: tuple[int, ...]) -> Tensor:
        """A view of the tensors at offset `start` of all slots, [S, *shape]."""
        num_slots, size = len(self.steps), math.prod(shape)
        if kind == GRAD:
            return self._grads[start * num_slots : (start + size) * num_slots].view(num_slots, *shape)
        return self.rows[kind][:, start : start + size].view(num_slots, *shape)

    def _gradients(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """(view of `_gathered`, view of the gradient), both flat, for A and B of each segment in turn."""
        if slot not in self._grad_views:
            parts = [part for segment in self.segments for part in self._parts(segment)]
            grads = [(start, self._stacked(GRAD, start, shape)[slot].reshape(-1)) for start, shape in parts]
            self._grad_views[slot] = [(self._gathered[start : start + len(grad)], grad) for start, grad in grads]
        return self._grad_views[slot]

    def _slot_pair(self, slot: int, index: int) -> SlotPair:
        leaves: list[Tensor] = []
        for start, shape in self._parts(self.segments[index]):
            leaf = self._stacked(VALUE, start, shape)[slot].detach().requires_grad_()
            leaf.grad = self._stacked(GRAD, start, shape)[slot]
            leaves.append(leaf)
        down, up = leaves
        return SlotPair(down, up, self._scales[index, slot])

    def _leaf(self, start: int, shape: tuple[int, ...]) -> Tensor:
        leaf = self._stacked(VALUE, start, shape).detach().requires_grad_()
        leaf.grad = self._stacked(GRAD, start, shape)
        return leaf


def factor_counts(site: Site, sharing: ExpertSharing) -> tuple[int, int]:
    """How many matrices A and how many B the adapter on a layer has: E or 1 on experts, else 1."""
    shared = SHARED.get((sharing, site.path.rpartition(".")[2]), ()) if site.members else ("A", "B")
    return 1 if "A" in shared else len(site.members), 1 if "B" in shared else len(site.members)


def _segments(model: nn.Module, sites: Sequence[Site], padded_rank: int, sharing: ExpertSharing) -> list[Segment]:
    segments: list[Segment] = []
    start = 0
    for site in sites:
        layer = owner = model.get_submodule(site.path)
        if isinstance(layer, ExpertLinear):
            owner = model.get_submodule(site.path.rpartition(".")[0])
            assert isinstance(owner, Experts)
        else:
            if isinstance(layer, nn.Linear):
                layer = owner = TorchLinear(layer)
                model.set_submodule(site.path, layer)
            assert isinstance(layer, Linear)
            assert isinstance(owner, Linear)
        num_a, num_b = factor_counts(site, sharing)
        start_b = start + padded_rank * num_a * layer.in_features
        stop = start_b + padded_rank * num_b * (site.stop - site.start)
        segments.append(Segment(site, layer, owner, start, start_b, stop, (num_a, num_b)))
        start = stop
    return segments
