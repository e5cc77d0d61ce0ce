"""Clients' models as adapters over one frozen base, many at once in a bank."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import Tensor

from xorl.ckpt import Stateful
from xorl.ckpt.layout import JSON
from xorl.core.loss import LossFn
from xorl.core.nn import Linear
from xorl.core.nn.moe import ExpertLinear
from xorl.lora import Adam, AdapterBank, AdapterSpec
from xorl.lora.bank_slots import factor_counts
from xorl.lora.snapshot import STATES, AdapterSnapshot
from xorl.lora.targets import Site, resolve, sites_of
from xorl.server.identifiers import seed_of
from xorl.server.operations import LoraSpec
from xorl.server.worker.base import Base
from xorl.server.worker.models import UnknownName
from xorl.server.worker.passes import Row
from xorl.train.adapters.files import AdapterFiles
from xorl.train.adapters.inject import SHARING_OPTIONS, expert_sharing
from xorl.train.bank_engine import BankEngine, MixedBatch
from xorl.train.engine import OnOutput, StepLosses, Update

logger = logging.getLogger(__name__)

# The share of host memory that all ranks together use for adapters that are not on the device; others go to disk.
HOST_SHARE = 0.25
# The maximum number of sources to sample from that no unfinished sample needs. The least recently used are dropped.
NUM_SOURCES = 64
SPILL_FOLDER = "service/adapters"


@dataclass(frozen=True)
class AdapterModel:
    """One client's adapter: its spec and the seed of its initial values."""

    spec: AdapterSpec
    seed: int


class AdapterRows:
    """Runs rows with the adapters of a bank (see `passes.RowEngine`)."""

    def __init__(self, engine: BankEngine) -> None:
        self._engine = engine

    def rows_per_block(self, *, forward_only: bool) -> int:
        """One: adapters accumulate gradients on each rank, so ranks may do other work between any two rows."""
        del forward_only
        return 1

    def gradients_kept(self, model_ids: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        return self._engine.bank.gradients_kept(model_ids)

    def forward_backward(
        self,
        rows: Sequence[Row],
        loss_fn: LossFn,
        model_ids: Sequence[str],
        on_output: OnOutput,
        whole: AbstractContextManager[None],
    ) -> Mapping[str, StepLosses]:
        mixed = [MixedBatch.of(row) for row in rows]
        losses = self._engine.forward_backward(mixed, loss_fn, model_ids, on_output, whole)
        # Discard the timings: the service does not report them, and they would pile up without optimizer steps.
        self._engine.timer.take()
        return losses

    def forward(self, rows: Sequence[Row], loss_fn: LossFn, on_output: OnOutput) -> None:
        for index, row in enumerate(rows):
            output = self._engine.forward(MixedBatch.of(row), loss_fn)
            if output is not None:
                on_output(index, output)


class AdapterModels:
    """The adapters of all clients (see `models.Models`); a source to sample from is an adapter of the bank."""

    samples_together = True

    def __init__(self, base: Base) -> None:
        """Raises ValueError with the option that does not fit the base."""
        self._base = base
        config, mesh = base.config, base.mesh
        self._sites = _available_sites(base)
        self._names = tuple(sites_of(base.model.whole))
        sharing = expert_sharing(base.local.lora)
        if sharing != "none" and not any(site.members for site in self._sites):
            option = SHARING_OPTIONS[sharing]
            raise ValueError(f"{option}: lora_target_modules names no layer of experts; add some, or set it to false")
        assert config.max_lora_rank is not None, "resolved by the configuration"
        try:
            self.bank = AdapterBank(
                base.module,
                targets=[site.name for site in self._sites],
                num_resident=config.lora_models_on_device,
                max_rank=config.max_lora_rank,
                device=base.device,
                expert_sharing=sharing,
                host_limit=_host_limit(base, self._sites, config.max_lora_rank),
                folder=base.output_dir / SPILL_FOLDER / f"rank{base.runtime.rank}",
                group=mesh.loss.group,
                whole=base.model.whole,
                stages=mesh.pp.group if mesh.pp.size > 1 else None,
            )
            # Validate the options for adapters now, not when the first client creates one.
            self.bank.add("", self._spec(LoraSpec()))
            self.bank.remove("")
        except ValueError as error:
            raise ValueError(f"lora_target_modules / lora_rank: {error}") from error
        if self.bank.num_per_pass < 1:
            raise ValueError(
                f"lora_models_on_device: {self.bank.num_resident} is below the {base.runtime.world_size} workers. They "
                "compute adapted experts for each other's tokens, so each holds the adapters of all; raise it"
            )
        bank_engine = BankEngine(
            base.model,
            self.bank,
            base.device,
            flops=lambda name, lengths: 0.0,
            schedule=base.local.train.pipeline_parallel_schedule,
        )
        self._bank_engine = bank_engine
        self.engine = AdapterRows(bank_engine)
        self._models: dict[str, AdapterModel] = {}
        self._sources: OrderedDict[str, None] = OrderedDict()

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._models)

    @property
    def max_per_pass(self) -> int:
        return self.bank.num_resident

    def create(self, model_id: str, lora: LoraSpec | None, saved: Mapping[str, JSON] | None) -> None:
        if lora is None and saved is not None:
            model = _from_json(saved)
        else:
            lora = lora or LoraSpec()
            seed = seed_of(model_id, self._base.local.train.seed) if lora.seed is None else lora.seed
            model = AdapterModel(self._spec(lora), seed)
        if saved is not None and _shape_of(_from_json(saved).spec) != _shape_of(model.spec):
            raise ValueError("the checkpoint's adapter differs from the requested one in rank, alpha or layers")
        self.bank.add(model_id, model.spec, seed=model.seed)
        self._models[model_id] = model

    def remove(self, model_id: str) -> None:
        self._model(model_id)
        del self._models[model_id]
        self.bank.remove(model_id)

    def describe(self, model_id: str) -> dict[str, JSON]:
        """The adapter's spec and seed, and the parts of the decoder that it trains, as clients name them."""
        model = self._model(model_id)
        sites = [site for site in self._sites if any(_is_target(site.name, name) for name in model.spec.targets)]
        parts = sorted({_part_of(site) for site in sites})
        return {"lora": {"spec": cast(JSON, asdict(model.spec)), "seed": model.seed, "parts": parts}}

    def lora(self, model_id: str) -> tuple[int, float] | None:
        spec = self._model(model_id).spec
        return spec.rank, spec.alpha

    def step(self, model_id: str, adam: Adam, divisor: float, max_norm: float | None, *, with_norms: bool) -> Update:
        """Take a step of AdamW; norms are grouped by the last part of the adapted layers' names."""
        self._model(model_id)
        return self._bank_engine.optim_step(model_id, adam, divisor, max_norm, _kind_of if with_norms else None)

    def zero_grad(self, model_id: str) -> None:
        self._model(model_id)
        self.bank.zero_grad(model_id)

    def state(self, model_id: str, *, with_optimizer: bool) -> Mapping[str, Stateful]:
        self._model(model_id)
        return {"adapter": AdapterState(self.bank, model_id, with_optimizer=with_optimizer)}

    def before_loading(self, model_id: str) -> None:
        """Has nothing to do: sources are copies and do not depend on the model's weights."""
        self._model(model_id)

    def after_loading(self, model_id: str, *, keeps_optimizer: bool) -> None:
        if not keeps_optimizer:
            held = self.bank.snapshot(model_id)
            values = {kind: torch.zeros_like(flat) if kind in STATES else flat for kind, flat in held.values.items()}
            self.bank.restore(model_id, AdapterSnapshot(held.spec, 0, held.names, values))
        self.bank.zero_grad(model_id)

    def adapter_files(self, model_id: str) -> AdapterFiles:
        """The adapter, as views of the bank's memory; valid until another adapter is loaded there."""
        base, model = self._base, self._model(model_id)
        return AdapterFiles.of(
            base.model,
            model.spec,
            base.local.model.model_path or base.local.model.config_path,
            base.architecture.recipes(merge_qkv=base.local.model.merge_qkv),
            bank_adapters=self.bank.adapters(model_id),
            others=base.architecture.files_beside_adapter(),
            base_fingerprint=cast("str | None", base.identity["weights"]),
            is_part=base.architecture.spec.checkpoint_names.is_part,
        )

    def snapshot(self, model_id: str, source: str) -> None:
        """Copy the adapter's values to another name in the bank."""
        self._model(model_id)
        self.release_source(source)
        self.bank.copy(model_id, source)
        self._sources[source] = None

    def has_source(self, source: str) -> bool:
        return source in self._sources

    def load_source(
        self,
        source: str,
        saved: Mapping[str, JSON],
        read: Callable[[Mapping[str, Stateful]], None],
        *,
        has_optimizer: bool,
    ) -> None:
        self.bank.add(source, _from_json(saved).spec)
        try:
            read({"adapter": AdapterState(self.bank, source, with_optimizer=has_optimizer)})
        except BaseException:
            self.bank.remove(source)
            raise
        self._sources[source] = None

    def release_source(self, source: str) -> None:
        if source in self._sources:
            self._forget(source)

    def release_idle_sources(self, needed: Collection[str | None]) -> None:
        idle = [source for source in self._sources if source not in needed]
        for source in idle[: max(len(idle) - NUM_SOURCES, 0)]:
            self._forget(source)

    @contextmanager
    def sampling_from(self, sources: Sequence[str | None]) -> Iterator[Sequence[str | None]]:
        for source in sources:
            if source is not None:
                self._sources.move_to_end(source)
        yield sources

    def _model(self, model_id: str) -> AdapterModel:
        if model_id not in self._models:
            raise UnknownName(f"there is no model {model_id!r} on the workers")
        return self._models[model_id]

    def _spec(self, lora: LoraSpec) -> AdapterSpec:
        config, options = self._base.config, self._base.local.lora
        rank = config.lora_rank if lora.rank is None else lora.rank
        if config.max_lora_rank is not None and rank > config.max_lora_rank:
            raise ValueError(
                f"rank {rank} is above this service's maximum of {config.max_lora_rank}: request a lower rank, or "
                "start the service with a higher max_lora_rank"
            )
        chosen = _chosen(self._sites, lora)
        return AdapterSpec(
            rank=rank,
            alpha=config.lora_alpha if lora.alpha is None else lora.alpha,
            targets=_target_names(self._names, chosen),
            expert_sharing=expert_sharing(options) if any(site.members for site in chosen) else "none",
            use_rslora=options.use_rslora,
            use_dora=options.use_dora,
            dropout=options.lora_dropout,
            rank_pattern=options.rank_pattern,
            alpha_pattern=options.alpha_pattern,
            modules_to_save=tuple(options.modules_to_save),
        )

    def _forget(self, source: str) -> None:
        del self._sources[source]
        self.bank.remove(source)


class AdapterState:
    """The state of one adapter of a bank, for checkpoints; with or without its optimizer's state."""

    def __init__(self, bank: AdapterBank, name: str, *, with_optimizer: bool) -> None:
        self._bank = bank
        self._name = name
        self._with_optimizer = with_optimizer

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the tensors on the host; a load fills them and passes them to `load_state_dict`."""
        held = self._bank.snapshot(self._name)
        tensors = held.tensors()
        return tensors if self._with_optimizer else {name: tensors[name] for name, _ in held.names}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set the adapter's values, and its optimizer's state if `state` has it."""
        held = self._bank.snapshot(self._name)
        tensors = {**held.tensors(), **state}
        self._bank.restore(self._name, AdapterSnapshot.of_tensors(held.spec, held.names, tensors))


def _kind_of(name: str) -> str:
    return name.rpartition(".")[2]


def _available_sites(base: Base) -> list[Site]:
    """The layers that clients may train: the configured targets, or by default the architecture's and its head."""
    options = base.local.lora
    targets = options.lora_target_modules
    if targets is None:
        head = [site.name for site in sites_of(base.model.whole).values() if site.is_head and site.refusal is None]
        targets = [*base.architecture.spec.default_targets(base.architecture.config), *head]
    spec = AdapterSpec(targets=targets if isinstance(targets, str) else tuple(targets))
    try:
        return list(resolve(spec, base.model.whole))
    except ValueError as error:
        raise ValueError(f"lora_target_modules: {error}") from error


def _host_limit(base: Base, sites: Sequence[Site], max_rank: int) -> int:
    """How many adapters of the largest size a rank keeps in host memory: values and two optimizer states, in fp32."""
    widths = 0
    for site in sites:
        layer = cast("Linear | ExpertLinear", base.model.whole.get_submodule(site.path))
        num_a, num_b = factor_counts(site, expert_sharing(base.local.lora))
        widths += layer.in_features * num_a + (site.stop - site.start) * num_b
    num_bytes = 3 * 4 * max_rank * widths
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(HOST_SHARE * total / base.runtime.world_size / num_bytes)


def _chosen(sites: Sequence[Site], lora: LoraSpec) -> list[Site]:
    """The sites that a client selected. Raises ValueError if there are none, or for an unknown layer."""
    wanted = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed, "other": True}
    chosen = [site for site in sites if wanted[_part_of(site)]]
    if lora.target_modules is not None:
        chosen = [site for site in chosen if any(_is_target(site.name, name) for name in lora.target_modules)]
        for name in lora.target_modules:
            if not any(_is_target(site.name, name) for site in sites):
                known = sorted({site.name.rpartition(".")[2] for site in sites})
                raise ValueError(f"target_modules: {name!r} must be one of the adapted layers: {', '.join(known)}")
    if not chosen:
        raise ValueError(
            "the adapter would train nothing: set train_attn, train_mlp or train_unembed (models with tied embeddings "
            "do not support train_unembed)"
        )
    return chosen


def _part_of(site: Site) -> str:
    """attn, mlp, unembed or other. The names of the two halves of a decoder layer end in attn or mlp."""
    if site.is_head:
        return "unembed"
    parts = site.name.split(".")
    return next((kind for kind in ("attn", "mlp") if any(part.endswith(kind) for part in parts)), "other")


def _is_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _target_names(all_names: Iterable[str], chosen: Sequence[Site]) -> tuple[str, ...]:
    """The shortest suffixes of names that match the chosen sites and no other site of the model."""
    others = set(all_names) - {site.name for site in chosen}
    names: dict[str, None] = {}
    for site in chosen:
        parts = site.name.split(".")
        suffixes = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
        names[next(s for s in suffixes if not any(_is_target(other, s) for other in others))] = None
    return tuple(names)


def _shape_of(spec: AdapterSpec) -> tuple[object, ...]:
    return spec.rank, spec.alpha, frozenset(spec.targets), spec.use_rslora


def _from_json(saved: Mapping[str, JSON]) -> AdapterModel:
    """The model that `describe` described. Raises ValueError for a checkpoint of full weights."""
    lora = saved.get("lora")
    if not isinstance(lora, Mapping):
        raise ValueError("the checkpoint holds full weights, but this service trains adapters")
    content = cast(Mapping[str, object], lora["spec"])
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    return AdapterModel(AdapterSpec(**fields), cast(int, lora["seed"]))  # pyright: ignore[reportArgumentType]
