"""AdapterBank: many adapters over one frozen base, mixed in one pass, each with its own optimizer state.

Each process holds a whole bank and accumulates the gradients of its own tokens; `step` sums the gradient of one adapter
over all processes. Each process decides independently which adapters are on its device.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xorl.core.models.initial import fill_uniform_, key_of
from xorl.core.nn import Linear
from xorl.core.nn.moe import ExpertLinear
from xorl.core.optim import gradient_scale
from xorl.kernels.arguments import check_choice
from xorl.kernels.grouped_linear import TokenGroups
from xorl.kernels.optim import adamw_
from xorl.lora.adam import Adam, StepOutcome
from xorl.lora.arguments import check_instance, check_integer, check_number
from xorl.lora.bank_layer import ActiveRows, belongs_to_bank
from xorl.lora.bank_slots import Slots
from xorl.lora.inject import Adapter, adapters, new_expert_pair, new_pair
from xorl.lora.linear import LowRank, initial_bound
from xorl.lora.snapshot import GRAD, STATES, VALUE, AdapterSnapshot, SnapshotStore
from xorl.lora.spec import AdapterSpec, ExpertSharing, spec_of
from xorl.lora.targets import Site, resolve, without_wrappers


@dataclass
class _Entry:
    """An adapter: its spec, the indices of its segments in a slot, and whether it has accumulated gradients."""

    spec: AdapterSpec
    segments: tuple[int, ...]
    has_gradient: bool = False


class AdapterBank:
    """Adapters by name on the linear layers and the experts of `model`, which the bank freezes.

    At most `num_resident` adapters are on the device; with gradients and optimizer state they take 16 bytes per value.
    Adapters are loaded to the device when needed, evicting the least recently used one. With expert parallelism each
    process holds the adapters of all experts, and computes those of its own.

    Args:
        model: already sharded or replicated, and not run yet; nn.Linear layers are replaced by layers that support
            adapters.
        targets: the layers that adapters of this bank may adapt; each adapter adapts some or all of them.
        num_resident: the number of adapters that fit on the device.
        max_rank: the largest rank of an adapter; every slot is allocated for it.
        device: the model's device.
        expert_sharing: that of all adapters on experts; see `AdapterSpec`.
        host_limit, folder: see `SnapshotStore`. Each process needs a separate folder.
        group: the ranks whose gradients `step` sums; None for this process alone.
        whole: if `model` is a stage of a pipeline, the whole model on the meta device. Specs are those of the whole
            model; each process holds what is on its own stage.
        stages: the ranks that have the other stages; the norm of a gradient is that of all.

    Raises ValueError for targets that cannot have adapters or that a bank does not support, and if `model` has
    adapters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        targets: Sequence[str] | str = "all-linear",
        num_resident: int,
        max_rank: int,
        device: torch.device | str,
        expert_sharing: ExpertSharing = "none",
        host_limit: int | None = None,
        folder: Path | str | None = None,
        group: dist.ProcessGroup | None = None,
        whole: nn.Module | None = None,
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        check_integer("num_resident", num_resident, at_least=1)
        check_integer("max_rank", max_rank, at_least=1)
        check_choice("expert_sharing", expert_sharing, ExpertSharing)
        if adapters(model) or belongs_to_bank(model):
            raise ValueError(
                f"{type(model).__name__} already has adapters; create the bank on a model without adapters"
            )
        self._whole = model if whole is None else whole
        sites = resolve(spec_of(targets, max_rank), self._whole)
        if embeddings := [site.name for site in sites if not site.is_linear]:
            raise ValueError(f"targets: a bank adapts only linear layers, but {', '.join(embeddings)} is an embedding")
        self._max_rank = max_rank
        self._group, self._stages = group, stages
        self._sites = {site.name: site for site in sites}
        paths = {path for path, _ in model.named_modules()}
        held = [site for site in sites if site.path in paths]
        if not held:
            raise ValueError(f"targets: none of {', '.join(list(self._sites)[:5])} is on this stage of the pipeline")
        self._store = SnapshotStore(host_limit=host_limit, folder=None if folder is None else Path(folder))
        model.requires_grad_(False)
        # One extra slot, which stays zero, for tokens without an adapter.
        self._slots = Slots(
            model,
            held,
            num_slots=num_resident + 1,
            max_rank=max_rank,
            sharing=expert_sharing,
            device=device,
            names=list(self._sites),
        )
        self._sharing = expert_sharing
        self._base_slot = num_resident
        self._free = list(range(num_resident))[::-1]
        self._entries: dict[str, _Entry] = {}
        self._resident: OrderedDict[str, int] = OrderedDict()
        groups = TokenGroups.of([(self._base_slot, 0)], num_resident + 1)
        self._assigned: frozenset[str] = frozenset()
        self._rows = ActiveRows(TokenGroups(*(tensor.to(device) for tensor in groups)))
        self._slots.attach(self._rows)
        # Of the whole model and not in the layers, since compiled code would be compiled again.
        model.register_forward_pre_hook(lambda module, inputs: self._rows.check_resident())

    @property
    def names(self) -> tuple[str, ...]:
        """All adapters, in the order in which they were added."""
        return tuple(self._entries)

    @property
    def num_resident(self) -> int:
        """The number of adapters that fit on the device, and so into one pass of all ranks."""
        return self._base_slot

    @property
    def num_per_pass(self) -> int:
        """The number of adapters in one pass of this rank, whatever those of other ranks are."""
        if not self._slots.divides_experts or self._group is None:
            return self._base_slot
        return self._base_slot // dist.get_world_size(self._group)

    @property
    def resident(self) -> tuple[str, ...]:
        """The adapters on the device, least recently used first."""
        return tuple(self._resident)

    def spec(self, name: str) -> AdapterSpec:
        """The spec of an adapter."""
        return self._entry(name).spec

    def num_values(self, name: str) -> int:
        """The number of trained values of an adapter."""
        entry = self._entry(name)
        return sum(math.prod(shape) for _, shape in self._slots.names(entry.spec, entry.segments))

    def add(self, name: str, spec: AdapterSpec, *, seed: int = 0) -> None:
        """Add a new adapter, initialised as by `inject` with this spec and seed.

        Raises ValueError if the name exists, the spec does not fit this bank, or the seed is no integer.
        """
        check_integer("seed", seed)
        check_instance("name", name, str)  # None stands for no adapter
        if name in self._entries:
            raise ValueError(f"adapter {name!r} already exists")
        entry = _Entry(spec, self._segments_of(spec))
        slot = self._assign_slot(name, entry)
        try:
            for segment in (self._slots.segments[index] for index in entry.segments):
                view, _ = self._slots.views(VALUE, slot, segment, spec)
                part = torch.empty(view.shape[:-1].numel(), view.shape[-1], device=view.device)
                key = key_of(seed, f"{segment.site.name}.lora_A", part.shape)
                fill_uniform_(part, bound=initial_bound(part.shape[1]), key=key, shape=part.shape, offset=(0, 0))
                view.copy_(part.view(view.shape))
        except BaseException:
            self.remove(name)
            raise

    def restore(self, name: str, snapshot: AdapterSnapshot) -> None:
        """Add or replace an adapter from `snapshot`, with its optimizer state.

        Raises ValueError if it does not fit. After any error, an existing adapter of this name is unchanged.
        """
        spec = snapshot.spec
        entry = _Entry(spec, self._segments_of(spec))
        check_instance("name", name, str)
        snapshot = AdapterSnapshot.of_tensors(spec, self._slots.names(spec, entry.segments), snapshot.tensors())
        entry.has_gradient = GRAD in snapshot.values
        if name in self._resident:
            self._evict(name)
        self._assign_slot(name, entry, snapshot=snapshot)
        self._store.drop(name)

    def copy(self, name: str, to: str) -> None:
        """Add a new adapter with the values of another one, without its optimizer state.

        The values are copied on the device. Raises ValueError if the name exists.
        """
        check_instance("to", to, str)
        if to in self._entries:
            raise ValueError(f"adapter {to!r} already exists")
        if self._base_slot == 1:
            copied = self.snapshot(name)
            values = {kind: flat if kind == VALUE else torch.zeros_like(flat) for kind, flat in copied.values.items()}
            self.restore(to, AdapterSnapshot(copied.spec, 0, copied.names, values))
            return
        source, entry = self._load(name), self._entry(name)
        target = self._assign_slot(to, _Entry(entry.spec, entry.segments), keep=(name,))
        self._slots.rows[VALUE][target].copy_(self._slots.rows[VALUE][source])

    def remove(self, name: str) -> None:
        """Delete an adapter."""
        self._entry(name)
        if name in self._resident:
            self._release(name)
        self._store.drop(name)
        del self._entries[name]

    def activate(self, runs: Sequence[tuple[str | None, int]], *, keeps_earlier: bool = False) -> Hashable:
        """Assign the tokens of the next forward passes to adapters: (adapter, number of tokens) along the row.

        None means no adapter. The assignment holds until the next call, which must come after the backward pass, unless
        `keeps_earlier`: then what earlier passes saved stays as it is, but a pass that is recomputed needs its
        assignment again. Before the first call, no token has one. Other methods may need the place of an adapter of the
        assignment: then a pass of the model raises ValueError until the next call. Gradients accumulate until `step` or
        `zero_grad`. Returns a key: passes with equal keys launch the same kernels on the same memory, unless
        `keeps_earlier`.

        Where adapted experts are divided among ranks, this is collective, and the adapters of all ranks count.

        Raises ValueError for an unknown adapter, for one whose tokens are not adjacent, for a run without tokens, and
        for more adapters than fit on the device at once. A pass over another number of tokens raises it too, except in
        compiled code.
        """
        _check_runs(runs)
        wanted = self._agreed([name for name, _ in runs if name is not None])
        if len(wanted) > self._base_slot:
            raise ValueError(f"{len(wanted)} adapters in one pass, but the bank holds only {self._base_slot} at once")
        for name in wanted:
            self._entry(name)
        for name in wanted:
            self._load(name, keep=wanted)
            self._entries[name].has_gradient |= torch.is_grad_enabled()
        numbered = [(self._base_slot if name is None else self._resident[name], length) for name, length in runs]
        single = numbered[0][0] if len(numbered) == 1 else None
        self._slots.select(single, frozenset(segment for name in wanted for segment in self._entries[name].segments))
        if keeps_earlier:
            self._rows.groups = TokenGroups(*map(torch.empty_like, self._rows.groups))
        if single is None or self._slots.divides_experts:
            for target, source in zip(self._rows.groups, TokenGroups.of(numbered, self._base_slot + 1), strict=True):
                on_gpu = target.device.type == "cuda"
                target.copy_(source.pin_memory() if on_gpu else source, non_blocking=on_gpu)
        if self._slots.divides_experts:
            passing = torch.tensor([*(self._resident[name] for name in wanted), self._base_slot])
            places = torch.zeros(self._base_slot + 1, dtype=torch.int64)
            places[passing] = torch.arange(len(passing))
            device = self._rows.groups.ends.device
            self._rows.passing, self._rows.places = passing.to(device), places.to(device)
        self._rows.num_rows = sum(length for _, length in runs)
        self._assigned, self._rows.gone = frozenset(wanted), None
        return self._slots.selected

    @torch.no_grad()
    def step(
        self,
        name: str,
        adam: Adam,
        *,
        divisor: Tensor | float = 1.0,
        max_norm: float | None = None,
        kind_of: Callable[[str], str] | None = None,
    ) -> StepOutcome:
        """Take an optimizer step for one adapter and zero its gradient; collective.

        The gradient is summed over the ranks, divided by `divisor` and clipped to `max_norm`. A gradient that is not
        finite is zeroed without a step; the check does not synchronise with the host. `kind_of` requests the norm of
        each kind of layer; it maps the name of an adapted layer to its kind.

        Raises ValueError for an unknown adapter, and for a negative `divisor` or `max_norm`.
        """
        check_instance("adam", adam, Adam)
        for argument, number in (("divisor", divisor), ("max_norm", max_norm)):
            if number is not None and not isinstance(number, Tensor):
                check_number(argument, number)
                if number < 0:
                    raise ValueError(f"{argument} must be at least 0, got {number}")
        slot = self._load(name)
        values, exp_avg, exp_avg_sq = (self._slots.rows[kind][slot] for kind in (VALUE, *STATES))
        values = values.detach()
        values.grad = self._slots.gradient(slot, self._entries[name].segments)
        if self._group is not None:
            dist.all_reduce(values.grad, group=self._group)
        norms, total = {}, None
        if kind_of is not None:
            kinds, sums = self._slots.square_sums(values.grad, kind_of)
            if self._stages is not None:
                dist.all_reduce(sums, group=self._stages)
            norms, total = dict(zip(kinds, sums.sqrt().unbind(), strict=True)), sums.sum().sqrt()
        norm, scale = gradient_scale([values], divisor, max_norm, total, stages=self._stages)
        skipped = (~torch.isfinite(norm)).float()
        count = self._slots.steps[slot]
        count += 1 - skipped
        adamw_(
            [values],
            [values.grad],
            [exp_avg],
            [exp_avg_sq],
            [count],
            lr=adam.lr,
            betas=adam.betas,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_scale=scale,
            skip=skipped,
            noises=None,
        )
        self.zero_grad(name)
        return StepOutcome(norm, skipped, norms)

    def zero_grad(self, name: str) -> None:
        """Zero the accumulated gradient of one adapter."""
        self._slots.zero_gradient(self._load(name))
        self._entries[name].has_gradient = False

    @contextmanager
    def gradients_kept(self, names: Collection[str]) -> Iterator[dict[str, Tensor]]:
        """Restore these adapters' gradients if the body raises. Yields copies, which may be moved to the host."""
        earlier = {
            name: self._slots.gradient(self._load(name), self._entries[name].segments).clone()
            for name in names
            if self._entry(name).has_gradient
        }
        try:
            yield earlier
        except BaseException:
            for name in names:
                self.zero_grad(name)
                if name in earlier:
                    slot = self._load(name)
                    self._slots.set_gradient(slot, earlier[name].to(self._slots.rows[VALUE].device))
                self._entries[name].has_gradient = name in earlier
            raise

    def gradients(self, name: str) -> dict[str, Tensor]:
        """Views or copies of this rank's accumulated gradients of one adapter, by `{layer}.lora_A` and so on."""
        entry = self._entry(name)
        found = self._slots.tensors(GRAD, self._load(name), entry.spec, entry.segments)
        return {key: found[key].reshape(shape) for key, shape in self._slots.names(entry.spec, entry.segments)}

    def adapters(self, name: str) -> dict[str, Adapter]:
        """One adapter by the names of its layers, in the form that `xorl.lora.adapters` returns for a model.

        The values may share memory with the bank until the adapter is evicted: use them before other calls. Those of
        layers on other stages are on the meta device.
        """
        slot, entry = self._load(name), self._entries[name]
        held = {self._slots.segments[index].site.name: self._slots.segments[index] for index in entry.segments}
        found: dict[str, Adapter] = {}
        for site in resolve(entry.spec, self._whole):
            layer = self._whole.get_submodule(site.path)
            pair = self._pair_of(site, entry.spec)
            if (segment := held.get(site.name)) is not None:
                layer = segment.layer
                views = self._slots.views(VALUE, slot, segment, entry.spec)
                a, b = (nn.Parameter(view.reshape(-1, view.shape[-1])) for view in views)
                pair.set_factor("A", a)
                pair.set_factor("B", b)
            assert isinstance(layer, Linear | ExpertLinear)
            found[site.name] = Adapter(site.name, pair, layer, without_wrappers(site.path))
        return found

    def snapshot(self, name: str) -> AdapterSnapshot:
        """Copy one adapter with its optimizer state, without gradients, to host memory; it stays on the device."""
        entry, kinds = self._entry(name), (VALUE, *STATES)
        if name in self._resident:
            return self._slots.read(self._resident[name], entry.spec, entry.segments, kinds)
        stored = self._store.get(name)
        return AdapterSnapshot(stored.spec, stored.step, stored.names, {kind: stored.values[kind] for kind in kinds})

    def save(self, name: str, path: Path | str) -> None:
        """Write one adapter with its optimizer state to a file, atomically."""
        self.snapshot(name).write(Path(path))

    def load(self, name: str, path: Path | str) -> None:
        """Load an adapter from a file that `save` wrote, bit for bit. Raises ValueError if it does not fit."""
        self.restore(name, AdapterSnapshot.read(Path(path)))

    def _agreed(self, names: Sequence[str]) -> list[str]:
        """The different names; where experts are divided, those of all ranks in the same order on each. Collective."""
        if not self._slots.divides_experts:
            return list(dict.fromkeys(names))
        assert self._group is not None
        of_ranks: list[Sequence[str]] = [()] * dist.get_world_size(self._group)
        dist.all_gather_object(of_ranks, names, group=self._group)
        return sorted({name for of_rank in of_ranks for name in of_rank})

    def _load(self, name: str, keep: Sequence[str] = ()) -> int:
        """Load an adapter to the device without evicting any in `keep`, and return its slot."""
        entry = self._entry(name)
        if name not in self._resident:
            self._assign_slot(name, entry, keep, self._store.get(name))
            self._store.drop(name)
        self._resident.move_to_end(name)
        return self._resident[name]

    def _assign_slot(
        self, name: str, entry: _Entry, keep: Sequence[str] = (), snapshot: AdapterSnapshot | None = None
    ) -> int:
        """Assign a slot to an adapter, filled from `snapshot` or empty, and return it; may evict one outside `keep`.

        If this fails, the slot is free, and the adapter is stored where it was before.
        """
        if not self._free:
            self._evict(next(other for other in self._resident if other not in keep))
        slot = self._free[-1]
        try:
            self._slots.assign(slot, entry.spec, entry.segments)
            if snapshot is not None:
                self._slots.write(slot, entry.segments, snapshot)
        except BaseException:
            self._slots.clear(slot)
            raise
        self._free.pop()
        self._entries[name] = entry
        self._resident[name] = slot
        return slot

    def _evict(self, name: str) -> None:
        entry = self._entries[name]
        kinds = (VALUE, *STATES, *([GRAD] if entry.has_gradient else []))
        snapshot = self._slots.read(self._resident[name], entry.spec, entry.segments, kinds)
        self._release(name)
        self._store.put(name, snapshot)

    def _release(self, name: str) -> None:
        slot = self._resident.pop(name)
        if name in self._assigned:
            self._rows.gone = name
        self._slots.clear(slot)
        self._free.append(slot)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ValueError(f"unknown adapter {name!r}; the bank has {', '.join(map(repr, self._entries)) or 'none'}")
        return self._entries[name]

    def _segments_of(self, spec: AdapterSpec) -> tuple[int, ...]:
        """The indices of this stage's segments that `spec` adapts. Raises ValueError if it does not fit this bank."""
        check_instance("spec", spec, AdapterSpec)
        for option in ("dropout", "use_dora", "modules_to_save"):
            if getattr(spec, option):
                raise ValueError(f"{option} is {getattr(spec, option)}: a bank does not support it")
        numbered = {segment.site.name: index for index, segment in enumerate(self._slots.segments)}
        sites = resolve(spec, self._whole)
        if spec.expert_sharing != self._sharing and any(site.members for site in sites):
            raise ValueError(
                f"expert_sharing is {spec.expert_sharing!r}: all adapters of this bank have {self._sharing!r}"
            )
        if outside := [site.name for site in sites if site.name not in self._sites]:
            raise ValueError(f"targets: {', '.join(outside[:5])} is not among the bank's targets")
        for site in sites:
            if (rank := spec.rank_of(*site.names)) > self._max_rank:
                raise ValueError(f"rank of {site.name} is {rank}, above the bank's max_rank {self._max_rank}")
        return tuple(numbered[site.name] for site in sites if site.name in numbered)

    def _pair_of(self, site: Site, spec: AdapterSpec) -> LowRank:
        """The parameters of the adapter on a site, without memory."""
        device = torch.device("meta")
        if not site.members:
            layer = self._whole.get_submodule(site.path)
            assert isinstance(layer, Linear | nn.Linear)
            return new_pair(site, spec, layer.in_features, device)
        pair = new_expert_pair(site, spec, self._whole, device)
        pair.held, pair.shares = range(len(site.members)), {}
        return pair


def _check_runs(runs: Sequence[tuple[str | None, int]]) -> None:
    """Raise ValueError unless `runs` are as `AdapterBank.activate` wants them."""
    is_list = isinstance(runs, (list, tuple)) and all(isinstance(run, (list, tuple)) and len(run) == 2 for run in runs)
    if not is_list:
        raise ValueError(f"runs must be a list of (adapter, number of tokens), such as [('a', 8)], got {runs!r}")
    for name, length in runs:
        check_integer(f"runs: the number of tokens of {name!r}", length, at_least=1)
    names = [name for name, _ in runs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"runs: the tokens of {twice!r} must be adjacent, but it has {names.count(twice)} runs")
