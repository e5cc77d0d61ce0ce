"""The device memory of a bank: a slot for each adapter on the device, and the views that each layer computes with.

A slot is one flat row of values, and one of each AdamW state, so that an optimizer step is one operation, whatever the
number of layers. Gradients are stored layer by layer, all slots together, since autograd needs the gradient of a leaf
contiguous.

Shapes: S slots, N values that a slot has room for, R largest rank, I input and P output features of a part of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xorl.core.nn import Linear
from xorl.kernels.grouped_linear import TokenGroups
from xorl.lora.bank_layer import BankedLinear, SlotPair, StackedPair
from xorl.lora.linear import TorchLinear
from xorl.lora.snapshot import GRAD, STATES, VALUE, AdapterSnapshot, Names, split_at
from xorl.lora.spec import AdapterSpec
from xorl.lora.targets import Site

# Grouped products need rows that are multiples of 16 bytes, in bf16.
RANK_MULTIPLE = 8


@dataclass(frozen=True)
class Place:
    """The place of a part of a layer in a slot: A [R, I] from `start_a` on, B [P, R] from `start_b` to `stop`."""

    site: Site
    layer: Linear
    start_a: int
    start_b: int
    stop: int

    @property
    def num_outputs(self) -> int:
        """P."""
        return self.site.stop - self.site.start


class Slots:
    """`num_slots` slots with room for adapters of `max_rank` on `sites`, which are linear layers of `model`.

    nn.Linear layers are replaced by layers that take adapters. Slots are zero until they are written.
    """

    def __init__(
        self, model: nn.Module, sites: Sequence[Site], *, num_slots: int, max_rank: int, device: torch.device | str
    ) -> None:
        self.room = -(-max_rank // RANK_MULTIPLE) * RANK_MULTIPLE
        self.places = _places(model, sites, self.room)
        shape = (num_slots, self.places[-1].stop)
        self.rows = {kind: torch.zeros(shape, dtype=torch.float32, device=device) for kind in (VALUE, *STATES)}
        self._grads = torch.zeros(math.prod(shape), device=device)
        self._gathered = torch.zeros(self.places[-1].stop, device=device)
        # Cached by slot: an adapter has hundreds of parts, and the host would create their views in each optimizer
        # step.
        self._grad_views: dict[int, list[tuple[Tensor, Tensor]]] = {}
        # The indices of the places on each layer; and by slot, the leaves of each layer, created when needed.
        self._indices: dict[Linear, list[int]] = {}
        self._alone: dict[int, dict[Linear, tuple[SlotPair, ...]]] = {}
        self.chosen: tuple[int | None, frozenset[int]] | None = None
        # By the function that maps a layer's name to its kind: the kinds, the number of values and the kind of each
        # place.
        self._kinds: dict[Callable[[str], str], tuple[list[str], Tensor, Tensor]] = {}
        self.steps = torch.zeros(num_slots, device=device)
        self._scales = torch.zeros(len(self.places), num_slots, device=device)

    def attach(self, groups: TokenGroups) -> None:
        """Set the layers' adapters: leaves that share the slots' memory, as do their gradients."""
        by_layer: dict[Linear, list[StackedPair]] = {}
        for index, (place, scale) in enumerate(zip(self.places, self._scales, strict=True)):
            a, b = (self._leaf(*part) for part in self._parts(place))
            part = (place.site.start, place.site.stop)
            by_layer.setdefault(place.layer, []).append(StackedPair(place.site.name, part, a, b, scale))
            self._indices.setdefault(place.layer, []).append(index)
        for layer, pairs in by_layer.items():
            layer.adapter = BankedLinear(pairs, groups)

    def choose(self, slot: int | None, places: frozenset[int]) -> None:
        """Assign all tokens to one slot's adapter, or with None to those of the groups; these adapters are on `places`.

        A head without any of them is computed without an adapter, which saves the gradient of its weight. Other layers
        skip theirs only if no adapter is used at all: otherwise each set of places would need its own compiled code.
        """
        if (slot, places) == self.chosen:
            return
        if slot is not None and slot not in self._alone:
            self._alone[slot] = {
                layer: tuple(self._slot_pair(slot, index) for index in indices)
                for layer, indices in self._indices.items()
            }
        for layer, indices in self._indices.items():
            assert isinstance(layer.adapter, BankedLinear)
            is_head = self.places[indices[0]].site.is_head
            is_spared = not places or (is_head and not any(index in places for index in indices))
            layer.adapter.alone = () if is_spared else None if slot is None else self._alone[slot][layer]
        self.chosen = slot, places

    def names(self, spec: AdapterSpec, places: Sequence[int]) -> Names:
        """The names of an adapter's tensors at these places."""
        names: list[tuple[str, tuple[int, ...]]] = []
        for place in (self.places[index] for index in places):
            rank = spec.rank_of(place.site.name)
            names.append((f"{place.site.name}.lora_A", (rank, place.layer.in_features)))
            names.append((f"{place.site.name}.lora_B", (place.num_outputs, rank)))
        return names

    def tensors(self, kind: str, slot: int, spec: AdapterSpec, places: Sequence[int]) -> dict[str, Tensor]:
        """Views of a slot's content, by the names of `names`."""
        pairs = [self.views(kind, slot, self.places[index], spec) for index in places]
        views = [view for pair in pairs for view in pair]
        return dict(zip((name for name, _ in self.names(spec, places)), views, strict=True))

    def views(self, kind: str, slot: int, place: Place, spec: AdapterSpec) -> tuple[Tensor, Tensor]:
        """A [rank, I] and B [P, rank] of one part, in the memory of a slot."""
        rank = spec.rank_of(place.site.name)
        a, b = (self._stacked(kind, *part)[slot] for part in self._parts(place))
        return a[:rank], b[:, :rank]

    def gradient(self, slot: int, places: Sequence[int]) -> Tensor:
        """The gradient of a slot in the layout of its values, zero outside of `places`; valid until the next call."""
        views = self._gradients(slot)
        parts = [part for index in places for part in views[2 * index : 2 * index + 2]]
        self._gathered.zero_()
        torch._foreach_copy_([target for target, _ in parts], [grad for _, grad in parts])
        return self._gathered

    def set_gradient(self, slot: int, gradient: Tensor) -> None:
        """Set the gradient of a slot to a result of `gradient`."""
        views = self._gradients(slot)
        starts = [target.storage_offset() for target, _ in views]
        sources = [gradient[start : start + len(grad)] for start, (_, grad) in zip(starts, views, strict=True)]
        torch._foreach_copy_([grad for _, grad in views], sources)

    def norms(self, gradient: Tensor, kind_of: Callable[[str], str]) -> dict[str, Tensor]:
        """The norm of each kind of layer in the result of `gradient`: 0-dim fp32."""
        if kind_of not in self._kinds:
            kinds = [kind_of(place.site.name) for place in self.places]
            names = list(dict.fromkeys(kinds))
            lengths = torch.tensor([place.stop - place.start_a for place in self.places], device=gradient.device)
            indices = torch.tensor([names.index(kind) for kind in kinds], device=gradient.device)
            self._kinds[kind_of] = names, lengths, indices
        names, lengths, indices = self._kinds[kind_of]
        squares = torch.segment_reduce(gradient.square(), "sum", lengths=lengths)
        sums = torch.zeros(len(names), device=gradient.device).index_add_(0, indices, squares)
        return dict(zip(names, sums.sqrt().unbind(), strict=True))

    def zero_gradient(self, slot: int) -> None:
        """Zero the gradient of a slot."""
        torch._foreach_zero_([grad for _, grad in self._gradients(slot)])

    def take(self, slot: int, spec: AdapterSpec, places: Sequence[int]) -> None:
        """Assign an empty slot to an adapter."""
        for index in places:
            self._scales[index, slot] = spec.scale_of(self.places[index].site.name)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        for rows in self.rows.values():
            rows[slot].zero_()
        self.zero_gradient(slot)
        self._scales[:, slot] = 0
        self.steps[slot] = 0

    @torch.no_grad()
    def read(self, slot: int, spec: AdapterSpec, places: Sequence[int], kinds: Sequence[str]) -> AdapterSnapshot:
        """Copy a slot's content to host memory."""
        # One copy per kind: a large adapter has hundreds of tensors.
        flat = {
            kind: torch.cat([part.reshape(-1) for part in self.tensors(kind, slot, spec, places).values()]).cpu()
            for kind in kinds
        }
        return AdapterSnapshot(spec, int(self.steps[slot]), self.names(spec, places), flat)

    @torch.no_grad()
    def write(self, slot: int, places: Sequence[int], snapshot: AdapterSnapshot) -> None:
        """Copy the result of `read` into a slot that was taken for it."""
        bounds = split_at(snapshot.names)
        for kind, flat in snapshot.values.items():
            moved = flat.to(self.steps.device)
            for view, (start, stop) in zip(
                self.tensors(kind, slot, snapshot.spec, places).values(), bounds, strict=True
            ):
                view.copy_(moved[start:stop].view(view.shape))
        self.steps[slot] = snapshot.step

    def _parts(self, place: Place) -> tuple[tuple[int, tuple[int, int]], tuple[int, tuple[int, int]]]:
        """The offsets of A [R, I] and B [P, R] of a place in a row, and their shapes."""
        a, b = (self.room, place.layer.in_features), (place.num_outputs, self.room)
        return (place.start_a, a), (place.start_b, b)

    def _stacked(self, kind: str, start: int, shape: tuple[int, int]) -> Tensor:
        """The tensors at offset `start` in the rows of all slots: [S, *shape]."""
        num_slots, size = len(self.steps), math.prod(shape)
        if kind == GRAD:
            return self._grads[start * num_slots : (start + size) * num_slots].view(num_slots, *shape)
        return self.rows[kind][:, start : start + size].view(num_slots, *shape)

    def _gradients(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """(its part of `_gathered`, the gradient), flat, for A and B of each place in turn."""
        if slot not in self._grad_views:
            parts = [part for place in self.places for part in self._parts(place)]
            grads = [(start, self._stacked(GRAD, start, shape)[slot].reshape(-1)) for start, shape in parts]
            self._grad_views[slot] = [(self._gathered[start : start + len(grad)], grad) for start, grad in grads]
        return self._grad_views[slot]

    def _slot_pair(self, slot: int, index: int) -> SlotPair:
        leaves: list[Tensor] = []
        for start, shape in self._parts(self.places[index]):
            leaf = self._stacked(VALUE, start, shape)[slot].detach().requires_grad_()
            leaf.grad = self._stacked(GRAD, start, shape)[slot]
            leaves.append(leaf)
        down, up = leaves
        return SlotPair(down, up, self._scales[index, slot])

    def _leaf(self, start: int, shape: tuple[int, int]) -> Tensor:
        leaf = self._stacked(VALUE, start, shape).detach().requires_grad_()
        leaf.grad = self._stacked(GRAD, start, shape)
        return leaf


def _places(model: nn.Module, sites: Sequence[Site], room: int) -> list[Place]:
    places: list[Place] = []
    start = 0
    for site in sites:
        layer = model.get_submodule(site.path)
        if isinstance(layer, nn.Linear):
            layer = TorchLinear(layer)
            model.set_submodule(site.path, layer)
        assert isinstance(layer, Linear)
        start_b = start + room * layer.in_features
        stop = start_b + (site.stop - site.start) * room
        places.append(Place(site, layer, start, start_b, stop))
        start = stop
    return places
