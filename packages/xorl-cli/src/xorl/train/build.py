"""Builds a Run, which is everything the training loop uses, from a configuration."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import nn

from xorl.ckpt.layout import JSON
from xorl.config import Config
from xorl.config.local import TrainConfig
from xorl.core.loss import weighted_cross_entropy
from xorl.core.mesh import Mesh
from xorl.core.models import Decoder
from xorl.core.models.recipes import stacked_tensors
from xorl.core.nn.roles import NOT_DECAYED
from xorl.core.nn.share import whole_counts
from xorl.core.optim import MuonOptions, build_optimizer
from xorl.core.optim.decay import require_no_decay_matches, tensor_names, undecayed, unmatched_no_decay
from xorl.core.parallel import ParallelModel
from xorl.core.runtime import GarbageCollection, default_device_type
from xorl.data import DataPlan
from xorl.data.stream import Stream, StreamPlan
from xorl.lora import adapters
from xorl.lora.quantized import AdaptiveNoise, quantized_layers
from xorl.train.adapters.files import AdapterFiles
from xorl.train.adapters.inject import AdapterMerging, adapter_spec, flops_of
from xorl.train.architecture import Architecture
from xorl.train.base_weights import base_fingerprint
from xorl.train.checkpoints import Checkpoints
from xorl.train.data import Loader, PackedDocuments, StreamState, build_loader, build_stream_loader
from xorl.train.engine import Engine
from xorl.train.export.folder import AdapterExport, ModelExport, export_folder, is_complete_export
from xorl.train.export.rest import Rest
from xorl.train.images import image_flops_of, lr_scales
from xorl.train.loop import Run
from xorl.train.model import DTYPES, build_model, check_model, stage_of
from xorl.train.model_source import MODEL_PATH
from xorl.train.observe.diverged import NonFiniteSteps
from xorl.train.observe.opening import log_opening
from xorl.train.observe.profile import build_profiler
from xorl.train.preference import Preference
from xorl.train.recompute_choice import MicroBatch, choose_recomputation
from xorl.train.reference import with_references
from xorl.train.startup import (
    PreparedRun,
    Startup,
    build_evaluation,
    build_observer,
    build_schedule,
    largest_images,
    longest_document,
    start_up,
)
from xorl.train.watchdog import Watchdog

logger = logging.getLogger(__name__)


EngineMaker = Callable[[Config, Architecture, Mesh, torch.device], Engine]


def build_run(config: Config, *, make_engine: EngineMaker | None = None, watchdog: Watchdog | None = None) -> Run:
    """Build this process's part of the job. Collective; the data is prepared before this process joins the others.

    make_engine replaces `build_engine`; watchdog watches this process from the time it joins the others. Raises
    ValueError for errors that the user can correct, RunComplete if the run has already taken all its steps.
    """
    startup = start_up(config, _check, watchdog)
    [run] = startup.runs.values()
    runtime = startup.runtime
    if runtime.is_main and not isinstance(run.data.train, Stream):
        run.write_receipt()
    evaluates_at_start = startup.evaluates_at_start(run)
    if (resumed := startup.resumed) is not None:
        is_exported = not config.train.save_hf_weights or is_complete_export(export_folder(resumed.path))
        lacks_results = evaluates_at_start or not is_exported
        is_own_checkpoint = resumed.path.parent == startup.checkpointer.root
        startup.require_work_left(lacks_results=is_own_checkpoint and lacks_results)

    startup = _with_recomputation(startup, run)
    config, architecture, phases = startup.config, run.architecture, startup.phases
    with phases("model", "Loading the model"):
        engine = (make_engine or build_engine)(config, architecture, startup.mesh, runtime.device)
    preference = Preference.of(config, engine)
    if preference is not None:
        run = _with_references(startup, run, preference)
    loader, stream = _loader(startup, run)
    fingerprint = None
    if adapters(engine.model.whole):
        fingerprint = base_fingerprint(MODEL_PATH, config.model.model_path, config.train.load_weights_mode)
    files = _adapter_files(config, architecture, engine, fingerprint)
    written = {} if files is None else {"": files}
    checkpoints = Checkpoints(startup, engine, architecture, fingerprint, adapters=lambda: written, stream=stream)
    loaded = checkpoints.resume()
    start_step = 0 if loaded is None else loaded.step
    log_opening(startup, start_step)
    skips = config.train.on_nonfinite == "skip"
    loss_fn = weighted_cross_entropy if preference is None else preference.loss
    nonfinite = NonFiniteSteps(engine, loader, loss_fn, startup.output_dir, skips=skips)
    observer = build_observer(startup, start_step, engine.timer)
    observer.on_nonfinite = nonfinite.handle
    return Run(
        startup=startup,
        loss_fn=loss_fn,
        observer=observer,
        checkpoints=checkpoints,
        profiler=build_profiler(config.train, runtime, start_step, startup.num_steps),
        garbage_collection=GarbageCollection(config.train.gc_steps, config.train.empty_cache_steps),
        start_step=start_step,
        engine=engine,
        loader=loader,
        evaluation=build_evaluation(
            startup, run, engine, observer.write, at_start=evaluates_at_start, preference=preference
        ),
        schedule=build_schedule(run),
        before_step=_before_step(config, engine),
        nonfinite=nonfinite,
        preference=preference,
        final_export=_final_export(config, architecture, engine, files),
    )


def _check(config: Config, architecture: Architecture) -> None:
    if config.lora.sweep:
        raise ValueError("lora.sweep: `xorl train` trains its members; this is for one adapter: leave the option out")
    train, device = config.train, torch.device(default_device_type())
    sketch = check_model(architecture, config.model, train, config.lora, device)
    parameters = dict(sketch.named_parameters())
    stacked = _tensors_of(sketch, architecture, config)
    entries = train.no_decay_modules, train.no_decay_params
    require_no_decay_matches(tensor_names(parameters, stacked), *entries)
    trained = tensor_names([path for path, parameter in parameters.items() if parameter.requires_grad], stacked)
    for option, parts in unmatched_no_decay(trained, *entries).items():
        logger.info("options without effect: train.%s %s (matches only frozen parameters)", option, ", ".join(parts))
    if free := undecayed(trained, *entries) | set(tensor_names(_never_decayed(sketch), stacked)):
        shown = dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in trained if name in free)
        level = logging.INFO if train.no_decay_modules or train.no_decay_params else logging.DEBUG
        logger.log(level, "No weight decay on %d of %d tensors: %s.", len(free), len(trained), ", ".join(shown))


def _tensors_of(module: nn.Module, architecture: Architecture, config: Config) -> dict[str, list[tuple[str, int]]]:
    """For each parameter, the names that users see of its tensors, those of checkpoints, and their rows."""
    tensors = stacked_tensors(architecture.recipes(merge_qkv=config.model.merge_qkv))
    paths = {parameter: path for path, parameter in module.named_parameters()}
    for name, adapter in adapters(module).items():
        own = {"A": adapter.A, "B": adapter.B, "magnitude_offset": adapter.magnitude_offset}
        # All rows, of which this rank may hold some.
        tensors |= {paths[each]: [(f"{name}.{leaf}", sys.maxsize)] for leaf, each in own.items() if each is not None}
    return tensors


def _never_decayed(module: Decoder) -> list[str]:
    """The names of parameters without weight decay, such as trained scalars: smaller values are not simpler."""
    roles = module.parameter_roles()
    return [name for name, each in module.named_parameters() if roles[name] in NOT_DECAYED and each.requires_grad]


def _with_recomputation(startup: Startup, run: PreparedRun) -> Startup:
    """Replace train.recompute_policy: auto by the setting that is measured to be the fastest. Collective."""
    config = startup.config
    if config.train.recompute_policy != "auto":
        return startup
    with startup.phases("probe", "Measuring how much has to be recomputed (train.recompute_policy: auto)"):
        grids = largest_images(run.data.train, config.train.micro_batch_size)
        batch = MicroBatch.of(config, longest_document(run.data.train), grids)
        chosen = choose_recomputation(config, run.architecture, startup.mesh, startup.runtime.device, batch)
    return replace(startup, config=config.model_copy(update={"train": chosen}))


def _with_references(startup: Startup, run: PreparedRun, preference: Preference) -> PreparedRun:
    """The run with the scores of the reference model, if that is the initial model, which the engine must still hold.

    Collective. Raises ValueError if `kto` could not compare any pairs.
    """
    config, data = startup.config, run.data
    parts = {"data.datasets": data.train, "held-out data": data.held_out}
    packed = {name: part for name, part in parts.items() if isinstance(part, PackedDocuments)}
    for name, part in packed.items():
        if preference.loss.needs_baseline and (np.diff(part.bins.offsets) < 2).all():
            raise ValueError(
                f"data.sample_packing_sequence_len: loss kto compares answers with the prompts of other pairs in their "
                f"bin, but no bin of {name} has two pairs: raise it"
            )
    if not preference.loss.needs_reference or preference.from_base:
        return run
    with startup.phases("reference", "Scoring the pairs with the initial model (train.preference_reference)"):
        scored = {name: with_references(part, preference, config, run.architecture) for name, part in packed.items()}
    train, held_out = (scored.get(name) for name in parts)
    assert train is not None, "a stream has no initial reference; the configuration was checked"
    return replace(run, data=replace(data, train=train, held_out=held_out))


def _loader(startup: Startup, run: PreparedRun) -> tuple[Loader, StreamState | None]:
    """The loader of the training data and, for a stream, its state for checkpoints."""
    config, data, plan, mesh, runtime = run.config, run.data, run.plan, startup.mesh, startup.runtime
    if not isinstance(data.train, Stream):
        assert isinstance(plan, DataPlan), "plan_steps returns a DataPlan for packed documents"
        return build_loader(config, data.train, plan, mesh, run.architecture), None
    assert isinstance(plan, StreamPlan), "plan_steps returns a StreamPlan for a stream"
    saved = {} if startup.resumed is None else cast(Mapping[str, JSON], startup.resumed.manifest.info["data"])
    positions = cast("list[list[int]] | None", saved.get("stream_positions"))
    before = cast("list[int] | None", saved.get("stream_tally"))
    if startup.resumed is not None and before is None:
        step = startup.resumed.manifest.step
        logger.warning("stream: the checkpoint has no counts, so the data receipt begins at step=%d", step)
    loader = build_stream_loader(config, data.train, plan, mesh, positions)
    stream = StreamState(data.train, loader, mesh, runtime.device, before=before, write=run.write_receipt)
    if runtime.is_main:
        stream.write_receipt()  # so that a run which ends before its first checkpoint has one too
    return loader, stream


def build_engine(config: Config, architecture: Architecture, mesh: Mesh, device: torch.device) -> Engine:
    """xorl's own engine: the model on its devices, and its optimizer. Collective."""
    stage = stage_of(config, architecture, mesh)
    model = build_model(architecture, config.model, config.train, config.lora, mesh, device, stage=stage)
    return engine_over(model, config, architecture, device)


def engine_over(model: ParallelModel, config: Config, architecture: Architecture, device: torch.device) -> Engine:
    """An engine that trains a parallelized model, with the optimizer of the configuration."""
    train = config.train
    whole = model.whole
    assert isinstance(whole, Decoder)
    assert isinstance(model.module, Decoder)
    names = [name for name, _ in whole.named_parameters()]
    optimizer = build_optimizer(
        train.optimizer,
        model.module.named_parameters(),
        lr=train.lr,
        weight_decay=train.weight_decay,
        no_decay_modules=train.no_decay_modules,
        no_decay_params=train.no_decay_params,
        never_decayed=_never_decayed(model.module),
        state_dtype=DTYPES[train.optimizer_dtype],
        seed=train.seed,
        muon=_muon_options(train, model) if train.optimizer == "muon" else None,
        shares=model.shares,
        lr_scales=lr_scales(model.module, train),
        stacked=_tensors_of(model.module, architecture, config),
        all_names=tensor_names(names, _tensors_of(whole, architecture, config)) if whole is not model.module else None,
    )
    return Engine(
        model,
        optimizer,
        device,
        max_grad_norm=train.max_grad_norm,
        flops=flops_of(architecture.config, whole),
        image_flops=image_flops_of(whole),
        schedule=train.pipeline_parallel_schedule,
    )


def _muon_options(train: TrainConfig, model: ParallelModel) -> MuonOptions:
    assert isinstance(model.module, Decoder)
    matrices, shares = model.module.layer_matrices(), model.shares
    divided = {name: shares.of_ranks(name) for name in matrices if name in shares and "tp" in shares[name].divided_over}
    return MuonOptions(
        matrices=matrices | {name: whole_counts(by_rank, matrices[name]) for name, by_rank in divided.items()},
        lr=train.muon_lr,
        momentum=train.muon_momentum,
        nesterov=train.muon_nesterov,
        num_steps=train.muon_ns_steps,
        adjust_lr=train.muon_adjust_lr_fn or "original",
        replicas=model.mesh.loss.group if train.data_parallel_mode == "ddp" else None,
        divided=divided,
        shards=model.mesh.holders if divided else None,
    )


def _adapter_files(
    config: Config, architecture: Architecture, engine: Engine, fingerprint: str | None
) -> AdapterFiles | None:
    """The writer of the model's adapters, if it has any. fingerprint: of the base weights."""
    lora = config.lora
    # The engine of a benchmark's peer has none of our adapters.
    if not adapters(engine.model.whole):
        return None
    spec = adapter_spec(lora, architecture.spec, architecture.config)
    assert spec is not None, "a model only has adapters if the configuration enables them"
    base = config.model.model_path
    if lora.merge_lora_interval:
        # No other tool can load this base; a name that is no model says so, to people and to `check_name`.
        base = f"{base or config.model.config_path} (with adapters merged into it while training)"
    return AdapterFiles.of(
        engine.model,
        spec,
        base,
        architecture.recipes(merge_qkv=config.model.merge_qkv),
        others=architecture.files_beside_adapter(),
        form=lora.moe_lora_format,
        base_fingerprint=None if lora.merge_lora_interval else fingerprint,
        is_part=architecture.spec.checkpoint_names.is_part,
    )


def _final_export(
    config: Config, architecture: Architecture, engine: Engine, files: AdapterFiles | None
) -> ModelExport | AdapterExport | None:
    if not config.train.save_hf_weights:
        return None
    if config.lora.save_lora_only:
        assert files is not None, "the configuration was checked"
        return AdapterExport(files, architecture.spec)
    recipes = architecture.recipes(merge_qkv=config.model.merge_qkv)
    dtype = torch.bfloat16 if config.train.enable_mixed_precision else None
    rest = Rest.of(architecture)
    rest.require()
    return ModelExport(engine.model, recipes, architecture, dtype, files, rest)


def _before_step(config: Config, engine: Engine) -> tuple[Callable[[int], None], ...]:
    lora, model = config.lora, engine.model.module
    calls: list[Callable[[int], None]] = []
    # The engine of a benchmark's peer has neither our adapters nor our layers.
    if lora.merge_lora_interval and adapters(model):
        merging = AdapterMerging(
            engine.model,
            engine.optimizer,
            interval=lora.merge_lora_interval,
            seed=config.train.seed,
            resets_optimizer=lora.reset_optimizer_on_merge,
        )
        calls.append(merging.before)
    if lora.enable_aqn and quantized_layers(model):
        calls.append(AdaptiveNoise(model, alpha=lora.aqn_alpha, seed=config.train.seed).set_step)
    return tuple(calls)
