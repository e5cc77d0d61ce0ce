"""From a configuration to a Run: everything the training loop needs, built in the one order that works."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from xorl.ckpt import Checkpointer, CheckpointError, Manifest, read_manifest
from xorl.config import Config, TrainConfig
from xorl.core import runtime
from xorl.core.loss import LossFn, cross_entropy, score_tokens
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import Decoder, DecoderConfig
from xorl.core.optim import MuonOptions, Schedule, build_optimizer, weight_decays
from xorl.core.parallel import ParallelModel
from xorl.core.runtime import Runtime
from xorl.data import DataPlan, StepLoader
from xorl.data.stream import Stream, StreamPlan
from xorl.lora import AdaptiveNoise, adapters, quantized_linears
from xorl.train.adapters.files import AdapterFiles
from xorl.train.adapters.inject import AdapterMerging, adapter_spec, flops_of
from xorl.train.architecture import Architecture
from xorl.train.checkpoint_model import describe_model, require_resumable
from xorl.train.checkpoints import (
    Checkpoints,
    SavePoints,
    is_exported,
    saved_data,
    saved_stream_positions,
    saved_stream_tally,
)
from xorl.train.data import (
    DataIdentity,
    Loader,
    PackedDocuments,
    Plan,
    RunData,
    StreamState,
    build_loader,
    build_stream_loader,
    eval_plan,
    plan_steps,
    prepare_data,
    with_chat_template,
    write_receipt,
)
from xorl.train.engine import Engine
from xorl.train.evaluate import EvalPoints
from xorl.train.export.folder import AdapterExport, ModelExport
from xorl.train.model import (
    DTYPES,
    at_one_checkpoint,
    build_model,
    check_model,
    head_options_of,
    read_architecture,
)
from xorl.train.observe.observer import MetricsFile, Observer, Sink, StructuredLines, is_evaluated
from xorl.train.observe.profile import Profiler, profiler_of
from xorl.train.observe.progress import Phases, ProgressBar
from xorl.train.output_dir import begin
from xorl.train.quantization import scheme_of
from xorl.train.recompute_choice import MicroBatch, choose_recomputation
from xorl.train.recorded_options import recorded_options

logger = logging.getLogger(__name__)

# In output_dir: what became of every sample, and what every step and evaluation measured.
RECEIPT = "data_receipt.json"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Run:
    """A run that is ready to train: see `loop.train`.

    evaluates_first: whether the step that it starts from is still to be evaluated.
    """

    runtime: Runtime
    engine: Engine
    loss_fn: LossFn
    score_fn: LossFn
    loader: Loader
    eval_loader: StepLoader | None
    schedule: Schedule
    observer: Observer
    checkpoints: Checkpoints
    before_step: tuple[Callable[[int], None], ...]
    profiler: Profiler
    output_dir: Path
    num_steps: int
    start_step: int
    evaluates_first: bool
    evaluates_after: EvalPoints
    gc_steps: int
    empty_cache_steps: int
    architecture: Architecture
    mean_document_len: float | None
    phases: Phases


class RunComplete(Exception):
    """The checkpoint to resume from is that of the last step: there is nothing left to train."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


EngineMaker = Callable[[Config, Architecture, Mesh, torch.device], Engine]


def build_run(config: Config, *, make_engine: EngineMaker | None = None) -> Run:
    """Build this process's part of the job. Collective; the data is prepared before this process joins the others.

    make_engine replaces `build_engine`. Raises ValueError for what the user can correct, RunComplete if the run has
    taken all its steps already.
    """
    train, phases = config.train, Phases()
    output_dir, checkpointer, resumed = begin(train)
    if train.load_weights_mode == "dcp":
        config = config.model_copy(update={"model": at_one_checkpoint(config.model)})
    architecture = read_architecture(config.model, train.load_weights_mode)
    _check(config, architecture)
    manifest = None
    if resumed is not None:
        manifest = read_manifest(resumed)
        require_resumable(resumed, manifest, config.model, architecture)
    with phases("data", f"prepared_path={config.data.dataset_prepared_path}"):
        data = prepared_for(config, architecture)
        architecture = with_chat_template(architecture, config.data)

    place, mesh = join(config, phases)
    require_agreement("train.output_dir / load_checkpoint_path", str(resumed))
    if train.load_weights_mode == "dcp":
        require_agreement("model.model_path", str(config.model.model_path))
    plan = plan_of(config, data, mesh, None if manifest is None else saved_data(manifest))
    held_out_content = None if data.held_out is None else data.held_out.documents.fingerprint
    require_agreement("data", f"training {plan.hash} of {plan.num_steps} steps, held out {held_out_content}")
    if place.is_main and not isinstance(data.train, Stream):
        write_receipt(output_dir / RECEIPT, data, plan)
    evaluates_after, evaluates_first = EvalPoints(plan.num_steps, train.eval_steps), True
    if resumed is not None and manifest is not None:
        evaluates_first = lacks_evaluation(data, evaluates_after, output_dir / METRICS, manifest.step)
        lacks_results = evaluates_first or (train.save_hf_weights and not is_exported(resumed))
        is_own = resumed.parent == checkpointer.root
        require_work_left(resumed, manifest.step, plan.num_steps, lacks_results=is_own and lacks_results)

    if train.recompute_policy == "auto":
        with phases("probe", "recompute_policy=auto"):
            batch = MicroBatch.of(config, _longest_document(data.train))
            chosen = choose_recomputation(config, architecture, mesh, place.device, batch)
            config = config.model_copy(update={"train": chosen})
    with phases("model", f"architecture={architecture.spec.architecture} device={place.device}"):
        engine = (make_engine or build_engine)(config, architecture, mesh, place.device)
    loader, stream = _loader(config, data, plan, mesh, place, manifest, architecture.config.hidden_size)
    checkpoints = _checkpoints(config, checkpointer, engine, place, plan, architecture, stream)
    start_step = 0
    if resumed is not None:
        with phases("resume", f"path={resumed}"):
            start_step = checkpoints.restore(resumed)
    head_options = head_options_of(config.model, train)
    return Run(
        runtime=place,
        engine=engine,
        loss_fn=partial(cross_entropy, **head_options),
        score_fn=partial(score_tokens, **head_options),
        loader=loader,
        eval_loader=eval_loader_of(config, data, mesh, architecture.config.hidden_size),
        schedule=schedule_of(config, plan),
        observer=Observer(
            place.device, place.world_size, sinks_of(config, output_dir, plan, start_step, place), engine.timer
        ),
        checkpoints=checkpoints,
        before_step=_before_step(config, engine),
        profiler=profiler_of(train, place, start_step, plan.num_steps),
        output_dir=output_dir,
        num_steps=plan.num_steps,
        start_step=start_step,
        evaluates_first=evaluates_first,
        evaluates_after=evaluates_after,
        gc_steps=train.gc_steps,
        empty_cache_steps=train.empty_cache_steps,
        architecture=architecture,
        mean_document_len=None if isinstance(data.train, Stream) else float(data.train.documents.lengths.mean()),
        phases=phases,
    )


def _check(config: Config, architecture: Architecture) -> None:
    """Raise ValueError for everything that can be found out without the data, whose preparation may take hours."""
    if config.lora.sweep:
        raise ValueError("lora.sweep: `xorl train` trains its members; this is for one adapter: leave the option out")
    train, device = config.train, torch.device(runtime.own_device_type())
    sketch = check_model(architecture, config.model, train, config.lora, device)
    trained = [(path, parameter) for path, parameter in sketch.named_parameters() if parameter.requires_grad]
    weight_decays(trained, train.weight_decay, train.no_decay_modules, train.no_decay_params)


def join(config: Config, phases: Phases) -> tuple[Runtime, Mesh]:
    """Collective: joins the other processes of the job, seeds the generators, and arranges the processes in a mesh."""
    with phases("join", f"world_size={runtime.world_size()}"):
        place = runtime.init()
        runtime.seed_everything(config.train.seed, place.rank)
        return place, Mesh(parallel_dims(config, place.world_size), place.device.type)


def lacks_evaluation(data: RunData, is_due: EvalPoints, metrics: Path, step: int) -> bool:
    """Whether an evaluation after `step` is due that `metrics` lacks, since its run was stopped. Collective."""
    if data.held_out is None or not is_due(step):
        return False
    return not runtime.on_any_rank(runtime.global_rank() == 0 and is_evaluated(metrics, step))


def require_work_left(resumed: Path, saved_step: int, num_steps: int, *, lacks_results: bool) -> None:
    """Raise RunComplete if no step is left to train after the checkpoint, nor the last evaluation or export to make."""
    if saved_step > num_steps or (saved_step == num_steps and not lacks_results):
        raise RunComplete(resumed)


def prepared_for(config: Config, architecture: Architecture) -> RunData:
    """The run's data, prepared. Raises ValueError if a document is too long for the model."""
    data = prepare_data(config, architecture.config.vocab_size, architecture.tokenizer_folder, architecture.hf_config)
    check_lengths(data, architecture.config, config.data.pad_to_multiple_of)
    return data


def _loader(
    config: Config,
    data: RunData,
    plan: Plan,
    mesh: Mesh,
    place: Runtime,
    manifest: Manifest | None,
    hidden_size: int,
) -> tuple[Loader, StreamState | None]:
    """The loader of the training data and, of a stream, the state that checkpoints keep of it."""
    if not isinstance(data.train, Stream):
        assert isinstance(plan, DataPlan), "plan_steps gives the plan of what it is given"
        return build_loader(config, data.train, plan, mesh, hidden_size), None
    assert isinstance(plan, StreamPlan), "plan_steps gives the plan of what it is given"
    saved = None if manifest is None else saved_stream_positions(manifest)
    loader = build_stream_loader(config, data.train, plan, mesh, saved)
    before = None if manifest is None else saved_stream_tally(manifest)
    if manifest is not None and before is None:
        logger.warning("stream: the checkpoint has no counts, so the data receipt begins at step=%d", manifest.step)
    write = partial(write_receipt, Path(config.train.output_dir) / RECEIPT, data, plan)
    stream = StreamState(data.train, loader, mesh, place.device, before=before, write=write)
    if place.is_main:
        stream.write_receipt()  # so that a run which ends before its first checkpoint has one too
    return loader, stream


def eval_loader_of(config: Config, data: RunData, mesh: Mesh, hidden_size: int) -> StepLoader | None:
    """The loader of the held-out data; None if there are none."""
    if data.held_out is None:
        return None
    return build_loader(config, data.held_out, eval_plan(config, data.held_out, mesh.dp_size), mesh, hidden_size)


def require_agreement(option: str, found: str) -> None:
    """Collective: raise ValueError unless all ranks found the same.

    Otherwise they would wait for each other in different collectives, or train on a mixture of data.
    """
    if not runtime.all_ranks_agree(found):
        raise ValueError(
            f"{option}: not every node sees the same files: rank {runtime.global_rank()} found {found}, others "
            "something else. Use a folder that all nodes share, or copy the same files to each"
        )


def check_lengths(data: RunData, model: DecoderConfig, pad_to_multiple_of: int) -> None:
    """Raises ValueError for documents longer than the model's learned positions: the first one would end the run."""
    if model.rope is None and pad_to_multiple_of > model.max_position_embeddings:
        raise ValueError(
            f"data.pad_to_multiple_of: {pad_to_multiple_of}, more than the model's {model.max_position_embeddings} "
            "learned positions, which padding has to fit as well; choose that or less"
        )
    for option, part in (("data.datasets", data.train), ("data.test_datasets", data.held_out)):
        longest = 0 if part is None else _longest_document(part)
        if longest <= model.max_position_embeddings:
            continue
        if model.rope is None:
            raise ValueError(
                f"{option}: a document of {longest} tokens does not fit the model's {model.max_position_embeddings} "
                f"learned positions; cut documents with max_seq_len: {model.max_position_embeddings} or less"
            )
        logger.warning(
            "%s: longest document=%d tokens, beyond the model's max_position_embeddings=%d",
            option,
            longest,
            model.max_position_embeddings,
        )


def _longest_document(data: PackedDocuments | Stream) -> int:
    """In tokens; for a stream, its limit."""
    if isinstance(data, Stream):
        return max(entry.form.limit for entry in data.entries)
    return int(data.documents.lengths.max())


def parallel_dims(config: Config, world_size: int) -> ParallelDims:
    """How the processes of a run are arranged."""
    train = config.train
    return ParallelDims.resolve(
        train.data_parallel_mode,
        world_size,
        shard_size=train.data_parallel_shard_size,
        replicate_size=train.data_parallel_replicate_size,
    )


def plan_of(config: Config, data: RunData, mesh: Mesh, saved: DataIdentity | None) -> Plan:
    """The order of the bins. Raises CheckpointError if it differs from `saved`, the order in the checkpoint."""
    plan = plan_steps(config, data.train, mesh.dp_size, None if saved is None else saved.bins_per_step)
    if isinstance(plan, DataPlan) and not plan.shuffle and saved == DataIdentity.of(replace(plan, shuffle=True)):
        logger.warning(
            "data.shuffle_merged_datasets: this checkpoint is of a version that shuffled packed rows whatever this "
            "option said; the run goes on in that order"
        )
        return replace(plan, shuffle=True)
    if saved is not None and saved != DataIdentity.of(plan):
        raise CheckpointError(
            "train.load_checkpoint_path: the data is not what this checkpoint was trained on, or comes in another "
            f"order ({saved.num_bins} bins, {saved.order[:8]}; now {plan.num_bins} bins, {plan.hash[:8]}), so its "
            "place in the data means nothing. Restore the data options and train.seed, or start a new run from the "
            "exported model with --model.model_path"
        )
    return plan


def build_engine(config: Config, architecture: Architecture, mesh: Mesh, device: torch.device) -> Engine:
    """xorl's own engine: the model as it is placed, and its optimizer; collective."""
    model = build_model(architecture, config.model, config.train, config.lora, mesh, device)
    return engine_over(model, config, architecture, device)


def engine_over(model: ParallelModel, config: Config, architecture: Architecture, device: torch.device) -> Engine:
    """An engine that trains a placed model, with the optimizer of the configuration."""
    train = config.train
    assert isinstance(model.module, Decoder)
    optimizer = build_optimizer(
        train.optimizer,
        model.module.named_parameters(),
        lr=train.lr,
        weight_decay=train.weight_decay,
        no_decay_modules=train.no_decay_modules,
        no_decay_params=train.no_decay_params,
        state_dtype=DTYPES[train.optimizer_dtype],
        seed=train.seed,
        muon=_muon_options(train, model) if train.optimizer == "muon" else None,
    )
    return Engine(
        model,
        optimizer,
        device,
        max_grad_norm=train.max_grad_norm,
        flops=flops_of(architecture.config, model.module),
    )


def _muon_options(train: TrainConfig, model: ParallelModel) -> MuonOptions:
    assert isinstance(model.module, Decoder)
    return MuonOptions(
        matrices=model.module.layer_matrices(),
        lr=train.muon_lr,
        momentum=train.muon_momentum,
        nesterov=train.muon_nesterov,
        num_steps=train.muon_ns_steps,
        adjust_lr=train.muon_adjust_lr_fn or "original",
        replicas=model.mesh.dp_group if train.data_parallel_mode == "ddp" else None,
    )


def schedule_of(config: Config, plan: Plan) -> Schedule:
    """The learning rate of each step, which is logged at ten points."""
    train = config.train
    schedule = Schedule(
        plan.num_steps,
        peak=train.lr,
        minimum=train.lr_min,
        start=train.lr_start,
        warmup_ratio=train.lr_warmup_ratio,
        decay_ratio=train.lr_decay_ratio,
        style=train.lr_decay_style,
    )
    logger.info("lr %s", " ".join(f"{step}:{lr:.3g}" for step, lr in schedule.sample()))
    return schedule


def _checkpoints(
    config: Config,
    checkpointer: Checkpointer,
    engine: Engine,
    place: Runtime,
    plan: Plan,
    architecture: Architecture,
    stream: StreamState | None,
) -> Checkpoints:
    train, lora = config.train, config.lora
    recipes = architecture.recipes(merge_qkv=config.model.merge_qkv)
    files = None
    # A peer of a benchmark has none of our adapters.
    if adapters(engine.model.module):
        spec = adapter_spec(lora, architecture.spec.adapter_targets)
        assert spec is not None, "where there are adapters, they were asked for"
        base = config.model.model_path
        if lora.merge_lora_interval:
            # No other tool has this base: whoever looks for it finds out, as does `check_name`.
            base = f"{base or config.model.config_path} (with adapters merged into it while training)"
        files = AdapterFiles.of(engine.model, spec, base, recipes, chat_template=architecture.chat_template)
    export: ModelExport | AdapterExport | None = None
    if train.save_hf_weights and lora.save_lora_only:
        assert files is not None, "the configuration was checked"
        export = AdapterExport(files, architecture.spec)
    elif train.save_hf_weights:
        dtype = torch.bfloat16 if train.enable_mixed_precision else None
        export = ModelExport(engine.model, recipes, architecture, dtype, files)
    due = SavePoints(plan.num_steps, plan.steps_per_epoch, train.save_steps, train.save_epochs)
    due.warn()
    return Checkpoints(
        checkpointer,
        engine,
        place,
        due=due,
        data=DataIdentity.of(plan),
        model=describe_model(config.model, architecture, scheme_of(engine.model.module)),
        options=recorded_options(config),
        export=export,
        adapters=files,
        trained_only=lora.save_lora_only,
        stream=stream,
    )


def _before_step(config: Config, engine: Engine) -> tuple[Callable[[int], None], ...]:
    """Functions to call before each step, with its number (from 1); each is collective."""
    lora, model = config.lora, engine.model.module
    calls: list[Callable[[int], None]] = []
    # A peer of a benchmark has none of our adapters, and none of our layers.
    if lora.merge_lora_interval and adapters(model):
        merging = AdapterMerging(
            engine.model,
            engine.optimizer,
            interval=lora.merge_lora_interval,
            seed=config.train.seed,
            resets_optimizer=lora.reset_optimizer_on_merge,
        )
        calls.append(merging.before)
    if lora.enable_aqn and quantized_linears(model):
        calls.append(AdaptiveNoise(model, alpha=lora.aqn_alpha, seed=config.train.seed).before)
    return tuple(calls)


def sinks_of(config: Config, output_dir: Path, plan: Plan, start_step: int, place: Runtime) -> list[Sink]:
    """Where the metrics of a run are written to. Only the main process writes them."""
    if not place.is_main:
        return []
    train = config.train
    bar = ProgressBar(plan.num_steps, start_step) if train.log_format == "progress_bar" else StructuredLines()
    sinks: list[Sink] = [MetricsFile(output_dir / METRICS, start_step), bar]
    if train.use_wandb:
        # wandb takes a second to import, and a run without it need not have it.
        from xorl.train.observe.wandb_log import WandbSink  # noqa: PLC0415

        options: Mapping[str, object] = config.model_dump()
        sinks.append(
            WandbSink(
                project=train.wandb_project,
                name=train.wandb_name,
                tags=train.wandb_tags,
                log_interval=train.wandb_log_interval,
                folder=output_dir,
                config=options,
                is_resumed=start_step > 0,
            )
        )
    return sinks
