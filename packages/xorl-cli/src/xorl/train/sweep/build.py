"""Builds a Sweep from a configuration: one frozen base, and the data, schedule and adapter of each member."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch

from xorl.config import Config
from xorl.config.resolve import member_config
from xorl.core.loss import LossFn, LossOutput, weighted_cross_entropy
from xorl.core.models import Decoder, training_flops
from xorl.core.models.flops import matmul_parameters
from xorl.core.runtime import GarbageCollection, default_device_type
from xorl.data import DataPlan, PackedBatch
from xorl.lora import AdapterBank, AdapterSpec
from xorl.lora.targets import resolve
from xorl.train.adapters.files import AdapterFiles
from xorl.train.adapters.inject import adapter_spec, expert_sharing, num_used
from xorl.train.architecture import Architecture
from xorl.train.bank_engine import BankEngine, MixedBatch
from xorl.train.base_weights import base_fingerprint
from xorl.train.checkpoints import Checkpoints
from xorl.train.data import PackedDocuments, build_loader
from xorl.train.evaluate import Scorer
from xorl.train.model import build_model, check_model
from xorl.train.model_source import MODEL_PATH
from xorl.train.observe.metrics_file import MetricsFile
from xorl.train.observe.opening import log_opening
from xorl.train.observe.profile import build_profiler
from xorl.train.output_dir import METRICS
from xorl.train.startup import Startup, build_evaluation, build_observer, build_schedule, start_up
from xorl.train.sweep.sweep import ADAPTERS, Member, Sweep, is_exported, member_adapter
from xorl.train.watchdog import Watchdog

logger = logging.getLogger(__name__)


def build_sweep(config: Config, *, watchdog: Watchdog | None = None) -> Sweep:
    """Build this process's part of the job. Collective; the data is prepared before this process joins the others.

    `watchdog` watches this process from the time it joins the others. Raises ValueError for errors that the user can
    correct, RunComplete if every member has already taken all its steps.
    """
    startup = start_up(config, _check, watchdog)
    runtime, phases = startup.runtime, startup.phases
    evaluated_at_start = {name for name, run in startup.runs.items() if startup.evaluates_at_start(run)}
    if (resumed := startup.resumed) is not None:
        lacks_export = config.train.save_hf_weights and not all(
            is_exported(member_adapter(startup.output_dir, name), resumed.path) for name in startup.runs
        )
        startup.require_work_left(lacks_results=bool(evaluated_at_start) or lacks_export)

    with phases("model", "Loading the model"):
        engine = _build_engine(startup)
    fingerprint = base_fingerprint(MODEL_PATH, config.model.model_path, config.train.load_weights_mode)
    files = partial(_files, startup, engine, fingerprint)
    files()  # refuses a form before anything is trained
    checkpoints = Checkpoints(
        startup,
        engine,
        startup.architecture,
        fingerprint,
        adapters=lambda: {f"{ADAPTERS}/{name}": each for name, each in files().items()},
    )
    loaded = checkpoints.resume()
    start_step = 0 if loaded is None else loaded.step
    diverged = [] if loaded is None else cast(Sequence[str], loaded.scalars["diverged"])
    if runtime.is_main:
        for run in startup.runs.values():
            run.folder.mkdir(parents=True, exist_ok=True)
            run.write_receipt()
    log_opening(startup, start_step)
    sweep = Sweep(
        startup=startup,
        loss_fn=weighted_cross_entropy,
        observer=build_observer(startup, start_step, engine.timer),
        checkpoints=checkpoints,
        profiler=build_profiler(config.train, runtime, start_step, startup.num_steps),
        garbage_collection=GarbageCollection(config.train.gc_steps, config.train.empty_cache_steps),
        start_step=start_step,
        engine=engine,
        members=[
            _member(startup, engine, name, start_step, at_start=name in evaluated_at_start, diverged=name in diverged)
            for name in startup.runs
        ],
        files=files,
    )
    sweep.observer.on_member = sweep.record
    return sweep


def _check(config: Config, architecture: Architecture) -> None:
    device = torch.device(default_device_type())
    _adapters_of(config, architecture, check_model(architecture, config.model, config.train, config.lora, device))


def _adapters_of(
    config: Config, architecture: Architecture, module: Decoder
) -> tuple[dict[str, AdapterSpec], list[str]]:
    """The adapters of each member, and the names of all layers that any of them adapts."""
    specs: dict[str, AdapterSpec] = {}
    for member in config.lora.sweep:
        spec = adapter_spec(member_config(config, member).lora, architecture.spec, architecture.config)
        assert spec is not None, "checked by the configuration"
        specs[member.name] = spec
    try:
        return specs, sorted({site.name for spec in specs.values() for site in resolve(spec, module)})
    except ValueError as error:
        raise ValueError(f"lora.sweep / lora.lora_target_modules: {error}") from error


def _build_engine(startup: Startup) -> BankEngine:
    config, architecture, mesh, device = startup.config, startup.architecture, startup.mesh, startup.runtime.device
    model = build_model(architecture, config.model, config.train, config.lora, mesh, device)
    assert isinstance(model.module, Decoder)
    specs, targets = _adapters_of(config, architecture, model.module)
    ranks = [rank for spec in specs.values() for rank in (spec.rank, *spec.rank_pattern.values())]
    try:
        bank = AdapterBank(
            model.module,
            targets=targets,
            num_resident=len(specs),
            max_rank=max(ranks),
            device=device,
            expert_sharing=expert_sharing(config.lora),
            group=mesh.loss.group,
        )
        for name, spec in specs.items():
            bank.add(name, spec, seed=startup.runs[name].config.train.seed)
    except ValueError as error:
        raise ValueError(f"lora.sweep / lora.lora_target_modules: {error}") from error
    logger.debug("sweep=%d trained_parameters=%d", len(specs), sum(bank.num_values(name) for name in specs))
    num_frozen = matmul_parameters(architecture.config)
    num_added = {name: sum(map(num_used, bank.adapters(name).values())) for name in specs}

    def flops(name: str, lengths: Sequence[int]) -> int:
        return training_flops(architecture.config, lengths, num_frozen=num_frozen, num_added=num_added[name])

    return BankEngine(model, bank, device, flops=flops)


def _member(
    startup: Startup, engine: BankEngine, name: str, start_step: int, *, at_start: bool, diverged: bool
) -> Member:
    run = startup.runs[name]
    assert isinstance(run.data.train, PackedDocuments), "a sweep does not stream"
    assert isinstance(run.plan, DataPlan), "a sweep does not stream"
    member = Member(
        name,
        loader=build_loader(run.config, run.data.train, run.plan, startup.mesh, run.architecture),
        schedule=build_schedule(run),
        num_steps=run.plan.num_steps,
        weight_decay=run.config.train.weight_decay,
        metrics=MetricsFile(run.folder / METRICS, start_step) if startup.runtime.is_main else None,
        diverged=diverged,
    )

    def forward(batch: PackedBatch, loss_fn: LossFn) -> LossOutput | None:
        return engine.forward(MixedBatch.of([(name, batch)]), loss_fn)

    scorer = Scorer(engine.model, engine.device, forward)
    member.evaluation = build_evaluation(startup, run, scorer, member.write, at_start=at_start)
    return member


def _files(startup: Startup, engine: BankEngine, fingerprint: str | None) -> dict[str, AdapterFiles]:
    """The files of each member's adapter. fingerprint: of the base weights."""
    config, bank = startup.config, engine.bank
    found: dict[str, AdapterFiles] = {}
    for name, run in startup.runs.items():
        try:
            found[name] = AdapterFiles.of(
                engine.model,
                bank.spec(name),
                config.model.model_path,
                startup.architecture.recipes(merge_qkv=config.model.merge_qkv),
                bank_adapters=bank.adapters(name),
                others=run.architecture.files_beside_adapter(),
                form=config.lora.moe_lora_format,
                base_fingerprint=fingerprint,
                is_part=startup.architecture.spec.checkpoint_names.is_part,
            )
        except ValueError as error:
            raise ValueError(re.sub(r"^form: ", f"lora.moe_lora_format, for {name}: ", str(error))) from error
    return found
