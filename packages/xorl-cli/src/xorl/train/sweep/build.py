"""From a configuration to a Sweep: what `xorl.train.build` does for one run, for each member, and once for the base."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from xorl.ckpt import Checkpointer, CheckpointError, Manifest, read_manifest
from xorl.config import Config, member_config
from xorl.core import runtime
from xorl.core.loss import cross_entropy, score_tokens
from xorl.core.mesh import Mesh
from xorl.core.models import Decoder, matmul_parameters, training_flops
from xorl.core.runtime import Runtime
from xorl.data import DataPlan
from xorl.lora import AdapterBank, AdapterSpec
from xorl.lora.targets import resolve
from xorl.train.adapters.files import AdapterFiles
from xorl.train.adapters.inject import adapter_spec
from xorl.train.architecture import Architecture
from xorl.train.bank_engine import BankEngine
from xorl.train.build import (
    METRICS,
    RECEIPT,
    eval_loader_of,
    join,
    lacks_evaluation,
    plan_of,
    prepared_for,
    require_agreement,
    require_work_left,
    schedule_of,
    sinks_of,
)
from xorl.train.checkpoint_model import describe_model, require_resumable
from xorl.train.checkpoints import SavePoints
from xorl.train.data import DataIdentity, PackedDocuments, RunData, build_loader, with_chat_template, write_receipt
from xorl.train.evaluate import EvalPoints
from xorl.train.model import build_model, check_model, head_options_of, read_architecture
from xorl.train.observe.observer import MetricsFile, Observer
from xorl.train.observe.profile import profiler_of
from xorl.train.observe.progress import Phases
from xorl.train.output_dir import begin
from xorl.train.quantization import scheme_of
from xorl.train.recorded_options import recorded_options
from xorl.train.sweep.loop import Member, Sweep
from xorl.train.sweep.saving import MEMBERS, SweepSaving, is_exported, saved_members

logger = logging.getLogger(__name__)


def build_sweep(config: Config) -> Sweep:
    """Build this process's part of the job. Collective; the data is prepared before this process joins the others.

    Raises ValueError for what the user can correct, RunComplete if every member has taken all its steps already.
    """
    train, phases = config.train, Phases()
    output_dir, checkpointer, resumed = begin(train)
    architecture = read_architecture(config.model)
    manifest = None
    if resumed is not None:
        manifest = read_manifest(resumed)
        require_resumable(resumed, manifest, config.model, architecture)
    own = {member.name: member_config(config, member) for member in config.lora.sweep}
    device = torch.device(runtime.own_device_type())
    _adapters_of(own, architecture, check_model(architecture, config.model, train, config.lora, device))
    with phases("data", f"prepared_path={config.data.dataset_prepared_path}"):
        data = {name: prepared_for(member, architecture) for name, member in own.items()}
        trained = {name: with_chat_template(architecture, member.data) for name, member in own.items()}
    place, mesh = join(config, phases)
    require_agreement("train.output_dir / load_checkpoint_path", str(resumed))
    plans = _plans(own, data, mesh, manifest)
    require_agreement("data", f"training {[(name, plan.hash, plan.num_steps) for name, plan in plans.items()]}")
    num_steps = max(plan.num_steps for plan in plans.values())
    unevaluated = list(own)
    if manifest is not None and resumed is not None:
        points = {name: EvalPoints(plan.num_steps, train.eval_steps) for name, plan in plans.items()}
        folder = output_dir / MEMBERS
        unevaluated = [
            name for name in own if lacks_evaluation(data[name], points[name], folder / name / METRICS, manifest.step)
        ]
        lacks_export = train.save_hf_weights and not all(is_exported(output_dir, name, resumed) for name in own)
        require_work_left(resumed, manifest.step, num_steps, lacks_results=bool(unevaluated) or lacks_export)
    with phases("model", f"architecture={architecture.spec.architecture} device={place.device}"):
        engine = _build_engine(config, own, architecture, mesh, place.device)
    saving = _saving(config, checkpointer, engine, place, plans, architecture, trained)
    start_step, diverged = 0, list[str]()
    if resumed is not None:
        with phases("resume", f"path={resumed}"):
            start_step, diverged = saving.restore(resumed)
    for name, plan in plans.items():
        if place.is_main:
            (output_dir / MEMBERS / name).mkdir(parents=True, exist_ok=True)
            write_receipt(output_dir / MEMBERS / name / RECEIPT, data[name], plan)
    members = [_member(name, own[name], data[name], plans[name], mesh, place, architecture, start_step) for name in own]
    for member in members:
        member.diverged = member.name in diverged
        member.evaluates_first = member.name in unevaluated
    longest = max(plans.values(), key=lambda plan: plan.num_steps)
    head_options = head_options_of(config.model, train)
    return Sweep(
        runtime=place,
        engine=engine,
        loss_fn=partial(cross_entropy, **head_options),
        score_fn=partial(score_tokens, **head_options),
        members=members,
        observer=Observer(
            place.device, place.world_size, sinks_of(config, output_dir, longest, start_step, place), engine.timer
        ),
        saving=saving,
        profiler=profiler_of(train, place, start_step, num_steps),
        config=config,
        output_dir=output_dir,
        num_steps=num_steps,
        start_step=start_step,
    )


def _plans(
    own: Mapping[str, Config], data: Mapping[str, RunData], mesh: Mesh, manifest: Manifest | None
) -> dict[str, DataPlan]:
    """The order of each member's data. Raises CheckpointError where a checkpoint is of other members or data."""
    saved = {} if manifest is None else saved_members(manifest)
    if manifest is not None and set(saved) != set(own):
        held = f"a sweep of {', '.join(sorted(saved))}" if saved else "no sweep"
        raise CheckpointError(
            f"train.load_checkpoint_path: the checkpoint is of {held}, and lora.sweep has {', '.join(sorted(own))}: "
            "restore the members, or start anew in another train.output_dir"
        )
    plans: dict[str, DataPlan] = {}
    for name, config in own.items():
        plan = plan_of(config, data[name], mesh, saved.get(name))
        assert isinstance(plan, DataPlan), "a sweep does not stream"
        plans[name] = plan
    return plans


def _build_engine(
    config: Config, own: Mapping[str, Config], architecture: Architecture, mesh: Mesh, device: torch.device
) -> BankEngine:
    model = build_model(architecture, config.model, config.train, config.lora, mesh, device)
    assert isinstance(model.module, Decoder)
    specs, targets = _adapters_of(own, architecture, model.module)
    ranks = [rank for spec in specs.values() for rank in (spec.rank, *spec.rank_pattern.values())]
    try:
        bank = AdapterBank(
            model.module,
            targets=targets,
            num_resident=len(specs),
            max_rank=max(ranks),
            device=device,
            group=mesh.dp_group,
        )
        for name, spec in specs.items():
            bank.add(name, spec, seed=own[name].train.seed)
    except ValueError as error:
        raise ValueError(f"lora.sweep / lora.lora_target_modules: {error}") from error
    logger.info("sweep=%d trained_parameters=%d", len(specs), sum(bank.num_values(name) for name in specs))
    num_frozen = matmul_parameters(architecture.config)

    def flops(name: str, lengths: Sequence[int]) -> int:
        return training_flops(architecture.config, lengths, num_frozen=num_frozen, num_added=bank.num_values(name))

    return BankEngine(model, bank, device, flops=flops)


def _adapters_of(
    own: Mapping[str, Config], architecture: Architecture, module: Decoder
) -> tuple[dict[str, AdapterSpec], list[str]]:
    """What each member adapts and how, and the names of all layers with adapters."""
    specs: dict[str, AdapterSpec] = {}
    for name, member in own.items():
        spec = adapter_spec(member.lora, architecture.spec.adapter_targets)
        assert spec is not None, "checked by the configuration"
        specs[name] = spec
    try:
        return specs, sorted({site.name for spec in specs.values() for site in resolve(spec, module)})
    except ValueError as error:
        raise ValueError(f"lora.sweep / lora.lora_target_modules: {error}") from error


def _member(
    name: str,
    config: Config,
    data: RunData,
    plan: DataPlan,
    mesh: Mesh,
    place: Runtime,
    architecture: Architecture,
    start_step: int,
) -> Member:
    hidden_size = architecture.config.hidden_size
    assert isinstance(data.train, PackedDocuments), "a sweep does not stream"
    return Member(
        name,
        config,
        loader=build_loader(config, data.train, plan, mesh, hidden_size),
        eval_loader=eval_loader_of(config, data, mesh, hidden_size),
        schedule=schedule_of(config, plan),
        num_steps=plan.num_steps,
        evaluates_after=EvalPoints(plan.num_steps, config.train.eval_steps),
        metrics=MetricsFile(Path(config.train.output_dir) / MEMBERS / name / METRICS, start_step)
        if place.is_main
        else None,
    )


def _saving(
    config: Config,
    checkpointer: Checkpointer,
    engine: BankEngine,
    place: Runtime,
    plans: Mapping[str, DataPlan],
    architecture: Architecture,
    trained: Mapping[str, Architecture],
) -> SweepSaving:
    train, bank = config.train, engine.bank
    recipes = architecture.recipes(merge_qkv=config.model.merge_qkv)

    def files(name: str) -> AdapterFiles:
        return AdapterFiles.of(
            engine.model,
            bank.spec(name),
            config.model.model_path,
            recipes,
            found=bank.adapters(name),
            chat_template=trained[name].chat_template,
        )

    longest = max(plans.values(), key=lambda plan: plan.num_steps)
    return SweepSaving(
        checkpointer,
        bank,
        place,
        due=SavePoints(longest.num_steps, longest.steps_per_epoch, train.save_steps, train.save_epochs),
        data={name: DataIdentity.of(plan) for name, plan in plans.items()},
        model=describe_model(config.model, architecture, scheme_of(engine.model.module)),
        options=recorded_options(config),
        files=files,
        spec=architecture.spec,
        output_dir=Path(train.output_dir),
        exports=train.save_hf_weights,
    )
