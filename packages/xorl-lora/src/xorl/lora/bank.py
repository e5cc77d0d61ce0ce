"""AdapterBank: many adapters over one frozen base, mixed in one pass, each trained by its own optimizer.

Each process holds a whole bank. The gradients of a process's tokens stay there until `step` sums those of one adapter
over all processes. Each process also decides by itself which adapters are on its device.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xorl.core.models.initial import fill_uniform_, key_of
from xorl.core.optim import gradient_scale
from xorl.kernels.grouped_linear import TokenGroups
from xorl.kernels.optim import adamw_
from xorl.lora.bank_layer import BankedLinear
from xorl.lora.bank_slots import Slots
from xorl.lora.inject import Adapter, adapters
from xorl.lora.linear import LowRank, initial_bound
from xorl.lora.pages import Pages
from xorl.lora.snapshot import GRAD, STATES, VALUE, AdapterSnapshot
from xorl.lora.spec import AdapterSpec
from xorl.lora.targets import plain, resolve


@dataclass(frozen=True)
class Adam:
    """Hyperparameters of one step of AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101). Raises ValueError."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {self.betas}")
        if not self.eps > 0:
            raise ValueError(f"eps must be above 0, got {self.eps}")
        if not (math.isfinite(self.lr) and self.lr >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"lr and weight_decay must be finite, and lr at least 0: {self.lr}, {self.weight_decay}")


class StepOutcome(NamedTuple):
    """0-dim fp32 tensors on the device: the norm of the divided gradient; skipped, 1 if it was not finite, else 0.

    A skipped step changes nothing. norms: of the undivided gradient, by kind of layer, if requested.
    """

    grad_norm: Tensor
    skipped: Tensor
    norms: dict[str, Tensor]


@dataclass
class _Entry:
    """An adapter: its spec, the places that it adapts, and whether it has gradients for a step."""

    spec: AdapterSpec
    places: tuple[int, ...]
    has_gradient: bool = False


class AdapterBank:
    """Adapters by name on the linear layers of `model`, which the bank freezes.

    At most `num_resident` adapters are on the device; with gradients and optimizer state they take 16 bytes per value.
    An adapter that is needed is loaded automatically and replaces the least recently used one.

    Args:
        model: already placed, sharded or replicated, and not run yet; nn.Linear layers are replaced by layers that take
            adapters.
        targets: the layers that adapters of this bank may be on; each adapter is on all of them or on some.
        num_resident: how many fit on the device.
        max_rank: largest rank of an adapter; every slot has room for it.
        device: of the model.
        host_limit, folder: see `Pages`. Each process needs a folder of its own.
        group: the ranks whose gradients `step` sums; None for this process alone.

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
        host_limit: int | None = None,
        folder: Path | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if num_resident < 1:
            raise ValueError(f"num_resident must be at least 1, got {num_resident}")
        if adapters(model) or any(isinstance(module, BankedLinear) for module in model.modules()):
            raise ValueError(f"{type(model).__name__} already has adapters; a bank takes a model without")
        sites = resolve(
            AdapterSpec(rank=max_rank, targets="all-linear" if targets == "all-linear" else tuple(targets)), model
        )
        if embeddings := [site.name for site in sites if not site.is_linear]:
            raise ValueError(f"targets: a bank adapts linear layers, and {', '.join(embeddings)} is an embedding")
        self._model = model
        self._max_rank = max_rank
        self._group = group
        self._pages = Pages(host_limit=host_limit, folder=folder)
        model.requires_grad_(False)
        # One more slot, which stays zero, for tokens of the base alone.
        self._slots = Slots(model, sites, num_slots=num_resident + 1, max_rank=max_rank, device=device)
        self._base_slot = num_resident
        self._free = list(range(num_resident))[::-1]
        self._entries: dict[str, _Entry] = {}
        self._resident: OrderedDict[str, int] = OrderedDict()
        groups = TokenGroups.of([(self._base_slot, 0)], num_resident + 1)
        self._groups = TokenGroups(*(tensor.to(device) for tensor in groups))
        self._slots.attach(self._groups)

    @property
    def names(self) -> tuple[str, ...]:
        """All adapters, in the order in which they were added."""
        return tuple(self._entries)

    @property
    def num_resident(self) -> int:
        """How many adapters fit on the device, and so into one pass."""
        return self._base_slot

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
        return sum(math.prod(shape) for _, shape in self._slots.names(entry.spec, entry.places))

    def add(self, name: str, spec: AdapterSpec, *, seed: int = 0) -> None:
        """Add a new adapter, with the values that `inject` with this spec and seed would give it.

        Raises ValueError for a name that is taken and for a spec that does not fit this bank.
        """
        if name in self._entries:
            raise ValueError(f"there is an adapter {name!r} already")
        entry = _Entry(spec, self._fitting(spec))
        slot = self._enter(name, entry)
        try:
            for place in (self._slots.places[index] for index in entry.places):
                part, _ = self._slots.views(VALUE, slot, place, spec)
                key = key_of(seed, f"{place.site.name}.lora_A", part.shape)
                fill_uniform_(part, bound=initial_bound(part.shape[1]), key=key, shape=part.shape, offset=(0, 0))
        except BaseException:
            self.remove(name)
            raise

    def restore(self, name: str, snapshot: AdapterSnapshot) -> None:
        """Restore an adapter from `snapshot`, with its optimizer; a new one, or in place of the one of this name.

        Raises ValueError if it does not fit. After any error, an existing adapter of this name is unchanged.
        """
        spec = snapshot.spec
        entry = _Entry(spec, self._fitting(spec))
        snapshot = AdapterSnapshot.of_tensors(spec, self._slots.names(spec, entry.places), snapshot.tensors())
        entry.has_gradient = GRAD in snapshot.values
        if name in self._resident:
            self._put_away(name)
        self._enter(name, entry, snapshot=snapshot)
        self._pages.drop(name)

    def copy(self, name: str, to: str) -> None:
        """Add a new adapter with the current values of another one, without its optimizer state, on the device.

        Raises ValueError for a name that is taken.
        """
        if to in self._entries:
            raise ValueError(f"there is an adapter {to!r} already")
        if self._base_slot == 1:
            held = self.snapshot(name)
            values = {kind: flat if kind == VALUE else torch.zeros_like(flat) for kind, flat in held.values.items()}
            self.restore(to, AdapterSnapshot(held.spec, 0, held.names, values))
            return
        source, entry = self._load(name), self._entry(name)
        target = self._enter(to, _Entry(entry.spec, entry.places), keep=(name,))
        self._slots.rows[VALUE][target].copy_(self._slots.rows[VALUE][source])

    def remove(self, name: str) -> None:
        """Forget an adapter."""
        self._entry(name)
        if name in self._resident:
            self._release(name)
        self._pages.drop(name)
        del self._entries[name]

    def activate(self, runs: Sequence[tuple[str | None, int]]) -> Hashable:
        """Assign the tokens of the following forward passes to adapters: (adapter, number of tokens) along the row.

        None means the base alone. The assignment holds until the next call, and the backward pass must come before
        that. Gradients add up until `step` or `zero_grad`. Returns a key: passes with equal keys launch the same
        kernels on the same memory.

        Raises ValueError for an unknown adapter, for one whose tokens are not adjacent, and for more adapters than fit
        on the device at once.
        """
        wanted = [name for name, _ in runs if name is not None]
        if len(set(wanted)) > self._base_slot:
            raise ValueError(f"{len(set(wanted))} adapters in one pass, and the bank holds {self._base_slot} at once")
        for name in wanted:
            self._entry(name)
        for name in wanted:
            self._load(name, keep=wanted)
            self._entries[name].has_gradient |= torch.is_grad_enabled()
        numbered = [(self._base_slot if name is None else self._resident[name], length) for name, length in runs]
        alone = numbered[0][0] if len(numbered) == 1 else None
        self._slots.choose(alone, frozenset(place for name in wanted for place in self._entries[name].places))
        if alone is None:
            for target, source in zip(self._groups, TokenGroups.of(numbered, self._base_slot + 1), strict=True):
                on_gpu = target.device.type == "cuda"
                target.copy_(source.pin_memory() if on_gpu else source, non_blocking=on_gpu)
        return self._slots.chosen

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
        """Sum one adapter's gradient over the ranks, divide it, clip it to `max_norm`, step and zero it. Collective.

        A gradient that is not finite is zeroed without a step; the host does not wait to check it. kind_of maps the
        name of an adapted layer to a kind of layer, and requests the norm of each kind.
        """
        slot = self._load(name)
        values, exp_avg, exp_avg_sq = (self._slots.rows[kind][slot] for kind in (VALUE, *STATES))
        values = values.detach()
        values.grad = self._slots.gradient(slot, self._entries[name].places)
        if self._group is not None:
            dist.all_reduce(values.grad, group=self._group)
        norms = {} if kind_of is None else self._slots.norms(values.grad, kind_of)
        total = torch.stack([*norms.values()]).square().sum().sqrt() if norms else None
        norm, scale = gradient_scale([values], divisor, max_norm, total)
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
        """Drop the accumulated gradient of one adapter."""
        self._slots.zero_gradient(self._load(name))
        self._entries[name].has_gradient = False

    @contextmanager
    def gradients_kept(self, names: Collection[str]) -> Iterator[None]:
        """A context for forward and backward passes: restores the earlier gradients of these adapters if they raise."""
        earlier = {
            name: self._slots.gradient(self._load(name), self._entries[name].places).clone()
            for name in names
            if self._entry(name).has_gradient
        }
        try:
            yield
        except BaseException:
            for name in names:
                self.zero_grad(name)
                if name in earlier:
                    self._slots.set_gradient(self._load(name), earlier[name])
                self._entries[name].has_gradient = name in earlier
            raise

    def gradients(self, name: str) -> dict[str, Tensor]:
        """Views of this rank's accumulated gradients of one adapter, by `{layer}.lora_A` and `{layer}.lora_B`."""
        entry = self._entry(name)
        return self._slots.tensors(GRAD, self._load(name), entry.spec, entry.places)

    def adapters(self, name: str) -> dict[str, Adapter]:
        """One adapter's parts by the names of the adapted layers, as `xorl.lora.adapters` returns for a model.

        They share memory with the bank until the adapter leaves the device: use them before other calls.
        """
        slot, entry = self._load(name), self._entries[name]
        found: dict[str, Adapter] = {}
        for place in (self._slots.places[index] for index in entry.places):
            site = place.site
            pair = LowRank(
                site.name,
                rank=entry.spec.rank_of(site.name),
                alpha=entry.spec.alpha_of(site.name),
                scale=entry.spec.scale_of(site.name),
                part=(site.start, site.stop),
                in_features=place.layer.in_features,
                use_dora=False,
                device=torch.device("meta"),
            )
            pair.A, pair.B = (nn.Parameter(view) for view in self._slots.views(VALUE, slot, place, entry.spec))
            found[site.name] = Adapter(site.name, pair, place.layer, plain(site.path))
        return found

    def snapshot(self, name: str) -> AdapterSnapshot:
        """Copy one adapter with its optimizer state, without gradients, to host memory; it stays on the device."""
        entry, kinds = self._entry(name), (VALUE, *STATES)
        if name in self._resident:
            return self._slots.read(self._resident[name], entry.spec, entry.places, kinds)
        away = self._pages.look(name)
        return AdapterSnapshot(away.spec, away.step, away.names, {kind: away.values[kind] for kind in kinds})

    def save(self, name: str, path: Path) -> None:
        """Write one adapter with its optimizer state to a file, atomically."""
        self.snapshot(name).write(path)

    def load(self, name: str, path: Path) -> None:
        """Load an adapter, to the bit, from a file of `save`. Raises ValueError if it is none or does not fit."""
        self.restore(name, AdapterSnapshot.read(path))

    def _load(self, name: str, keep: Sequence[str] = ()) -> int:
        """The slot of an adapter, after loading it to the device; this evicts none of `keep`."""
        entry = self._entry(name)
        if name not in self._resident:
            self._enter(name, entry, keep, self._pages.look(name))
            self._pages.drop(name)
        self._resident.move_to_end(name)
        return self._resident[name]

    def _enter(
        self, name: str, entry: _Entry, keep: Sequence[str] = (), snapshot: AdapterSnapshot | None = None
    ) -> int:
        """A slot for an adapter, filled from `snapshot` or empty; evicts an adapter outside `keep` if needed.

        If this fails, the slot is free, and the adapter is where it was.
        """
        if not self._free:
            self._put_away(next(other for other in self._resident if other not in keep))
        slot = self._free[-1]
        try:
            self._slots.take(slot, entry.spec, entry.places)
            if snapshot is not None:
                self._slots.write(slot, entry.places, snapshot)
        except BaseException:
            self._slots.clear(slot)
            raise
        self._free.pop()
        self._entries[name] = entry
        self._resident[name] = slot
        return slot

    def _put_away(self, name: str) -> None:
        entry = self._entries[name]
        kinds = (VALUE, *STATES, *([GRAD] if entry.has_gradient else []))
        snapshot = self._slots.read(self._resident[name], entry.spec, entry.places, kinds)
        self._release(name)
        self._pages.put(name, snapshot)

    def _release(self, name: str) -> None:
        slot = self._resident.pop(name)
        self._slots.clear(slot)
        self._free.append(slot)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ValueError(f"there is no adapter {name!r}; there are {', '.join(map(repr, self._entries)) or 'none'}")
        return self._entries[name]

    def _fitting(self, spec: AdapterSpec) -> tuple[int, ...]:
        """The places that `spec` adapts. Raises ValueError if this bank cannot hold it."""
        for option in ("dropout", "use_dora", "modules_to_save"):
            if getattr(spec, option):
                raise ValueError(f"{option} is {getattr(spec, option)}: adapters of a bank have none")
        numbered = {place.site.name: index for index, place in enumerate(self._slots.places)}
        chosen = [site.name for site in resolve(spec, self._model)]
        if outside := [name for name in chosen if name not in numbered]:
            raise ValueError(f"targets: {', '.join(outside[:5])} is not among the targets of the bank")
        for name in chosen:
            if spec.rank_of(name) > self._max_rank:
                raise ValueError(f"rank of {name} is {spec.rank_of(name)}, and the bank has room for {self._max_rank}")
        return tuple(numbered[name] for name in chosen)
