"""How a run or a sweep starts: the steps before the model is built, which both take in the same order.

Also builds what runs and sweeps share: schedules, evaluations and the observer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from xorl.ckpt import Checkpointer, CheckpointError, read_manifest
from xorl.ckpt.layout import Manifest, step_of
from xorl.config import Config
from xorl.config.options import changed_options, yaml_text
from xorl.config.resolve import member_config
from xorl.core.join import rendezvous
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import DecoderConfig
from xorl.core.optim import Schedule
from xorl.core.runtime import (
    Runtime,
    all_ranks_agree,
    enable_determinism,
    global_rank,
    is_launched,
    on_any_rank,
    refuse_launch_blocking,
    seed_everything,
    set_timeouts,
    world_size,
)
from xorl.core.runtime import init as init_runtime
from xorl.data import DataPlan
from xorl.data.images import ImageSettings
from xorl.data.receipt import Receipt
from xorl.data.stream import Stream
from xorl.train.architecture import Architecture
from xorl.train.checkpoint_model import require_resumable
from xorl.train.data import (
    DataIdentity,
    PackedDocuments,
    Plan,
    RunData,
    build_loader,
    padding_multiple,
    plan_steps,
    prepare_data,
    with_chat_template,
    write_receipt,
)
from xorl.train.deadline import Deadline
from xorl.train.end_tokens import with_end_tokens
from xorl.train.engine import Engine
from xorl.train.evaluate import EvalPoints, Evaluation, Scorer, evaluate
from xorl.train.images import ENCODER_AND_DECODER, image_settings, largest_grids
from xorl.train.model_source import pin_checkpoint, read_architecture
from xorl.train.observe.metrics_file import Metrics, MetricsFile, is_evaluated, last_step
from xorl.train.observe.observer import Observer, Sink
from xorl.train.observe.progress import Phases, progress_sink
from xorl.train.observe.run_file import write_run_file
from xorl.train.observe.timing import StepTimer
from xorl.train.observe.waits import FIRST_STEP, FIRST_STEP_IN_GRAPHS, WaitWatch
from xorl.train.output_dir import MEMBERS, METRICS, RECEIPT, STARTED_FROM, open_output_dir, start_of
from xorl.train.preference import Preference
from xorl.train.saves import Saves
from xorl.train.transports import FSDP_COLLECTIVES, all_choices, keep_choices_of
from xorl.train.watchdog import COLLECTIVE_TIMEOUT, Position, Watchdog

logger = logging.getLogger(__name__)


class RunComplete(Exception):
    """The checkpoint to resume from was saved after the last step: nothing is left to train."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class PreparedRun:
    """A run, or a member of a sweep, whose data is prepared and planned.

    architecture: with the chat template of the data. folder: for the metrics and the data receipt.
    """

    config: Config
    architecture: Architecture
    data: RunData
    plan: Plan
    folder: Path

    @property
    def eval_points(self) -> EvalPoints:
        return EvalPoints(self.plan.num_steps, self.config.train.eval_steps)

    def write_receipt(self, streamed: Receipt | None = None) -> None:
        """Write the data receipt; `streamed` is the training part if the data is a stream."""
        write_receipt(self.folder / RECEIPT, self.data, self.plan, streamed)


@dataclass(frozen=True)
class Startup:
    """The state of a job just before its model is built.

    resumed: None starts from scratch. architecture: of the base. runs: a run under the name "", or the members of a
    sweep under theirs. position: this rank's, for the watchdog.
    """

    config: Config
    output_dir: Path
    checkpointer: Checkpointer
    resumed: ResumePoint | None
    architecture: Architecture
    runtime: Runtime
    mesh: Mesh
    runs: Mapping[str, PreparedRun]
    phases: Phases
    position: Position

    @property
    def longest(self) -> PreparedRun:
        """The run with the most steps; it decides when the job saves and ends."""
        return max(self.runs.values(), key=lambda run: run.plan.num_steps)

    @property
    def num_steps(self) -> int:
        return self.longest.plan.num_steps

    def saves(self) -> Saves:
        """The saves of the job as its options set them. Collective; call it once the model is placed."""
        train, choices = self.config.train, all_choices()
        resumed = None if self.resumed is None else self.resumed.path
        return Saves(
            self.checkpointer,
            in_background=train.save_async,
            stops_on_failure=train.on_save_failure == "stop",
            info={
                STARTED_FROM: start_of(self.checkpointer.root, train.load_checkpoint_path, resumed),
                **({FSDP_COLLECTIVES: dict(choices)} if choices else {}),
            },
        )

    def deadline(self, saves: Saves) -> Callable[[], bool]:
        """Whether the job must end now to be saved before `train.max_time`. Call it once in each step."""
        limit_s = self.config.train.max_time
        return (lambda: False) if limit_s is None else Deadline(limit_s, lambda: saves.longest_s).is_due

    def evaluates_at_start(self, run: PreparedRun) -> bool:
        """Whether to evaluate `run` before its first step. Collective.

        A new run always is. A resumed one is if it was stopped during the evaluation of its checkpoint's step.
        """
        if self.resumed is None:
            return True
        step = self.resumed.manifest.step
        if run.data.held_out is None or not run.eval_points(step):
            return False
        return not on_any_rank(global_rank() == 0 and is_evaluated(run.folder / METRICS, step))

    def require_work_left(self, *, lacks_results: bool) -> None:
        """Raise RunComplete if the checkpoint is from the last step, unless an evaluation or export is missing."""
        if self.resumed is None:
            return
        step = self.resumed.manifest.step
        if step > self.num_steps or (step == self.num_steps and not lacks_results):
            raise RunComplete(self.resumed.path)


def start_up(
    config: Config, check: Callable[[Config, Architecture], object], watchdog: Watchdog | None = None
) -> Startup:
    """Take every step before the model is built. Collective.

    `check` raises ValueError for everything that can be refused without the data, whose preparation may take hours.
    The data is prepared before this process joins the others, so that they do not time out while they wait.
    """
    train, position = config.train, Position() if watchdog is None else watchdog.position
    phases = Phases(position.move)
    if train.enable_full_determinism:
        enable_determinism()
    elif not train.allow_cuda_launch_blocking:
        refuse_launch_blocking()
    checkpointer, resumed_path = open_output_dir(train)
    if train.load_weights_mode == "dcp":
        config = config.model_copy(update={"model": pin_checkpoint(config.model)})
    architecture = read_architecture(config.model, train.load_weights_mode, config.lora.adapter_path)
    check(config, architecture)
    resumed = None
    if resumed_path is not None:
        try:
            resumed = ResumePoint(resumed_path, read_manifest(resumed_path))
            require_resumable(resumed_path, resumed.manifest, config.model, architecture)
        except CheckpointError as error:
            raise CheckpointError(f"train.load_checkpoint_path: {error}") from error
    configs = {member.name: member_config(config, member) for member in config.lora.sweep} or {"": config}
    with phases("data"):
        prepared = {name: _prepare_data(run_config, architecture) for name, run_config in configs.items()}
        data = {name: each for name, (each, _) in prepared.items()}
        trained = {
            name: _with_images(
                with_end_tokens(with_chat_template(architecture, run_config.data), data[name].end_tokens),
                run_config,
                *prepared[name],
            )
            for name, run_config in configs.items()
        }

    with phases("join", f"Waiting until all {world_size()} ranks have started"):
        peers = rendezvous(global_rank(), world_size()) if is_launched() else None
        if watchdog is not None:
            watchdog.start(peers, global_rank())
        runtime = init_runtime(timeout_s=COLLECTIVE_TIMEOUT.total_seconds(), peers=peers)
        mesh = Mesh(parallel_dims(config, runtime.world_size), runtime.device.type)
        set_timeouts(COLLECTIVE_TIMEOUT)
        logger.debug("%s", mesh.describe())
        # Ranks with different tokens draw different dropout masks.
        seed_everything(train.seed, mesh.losses.rank)
    require_agreement("train.output_dir / load_checkpoint_path", str(resumed_path))
    if resumed is not None:
        keep_choices_of(resumed.manifest.info, resumed.path)
    if runtime.is_main:
        checkpointer.complete_interrupted(resumed_path)
    if train.load_weights_mode == "dcp":
        require_agreement("model.model_path", str(config.model.model_path))
    plans = _plans(configs, data, mesh, resumed)
    output_dir = Path(train.output_dir)
    folders = {name: output_dir / MEMBERS / name if config.lora.sweep else output_dir for name in configs}
    runs = {
        name: PreparedRun(run_config, trained[name], data[name], plans[name], folders[name])
        for name, run_config in configs.items()
    }
    require_agreement("data", "; ".join(map(_data_summary, runs.values())))
    return Startup(config, output_dir, checkpointer, resumed, architecture, runtime, mesh, runs, phases, position)


def _prepare_data(config: Config, architecture: Architecture) -> tuple[RunData, ImageSettings | None]:
    vocab_size, tokens = architecture.config.vocab_size, architecture.special_tokens
    images = image_settings(architecture, config.data)
    data = prepare_data(config, vocab_size, architecture.tokenizer_folder, tokens, images=images)
    _check_lengths(data, architecture.config, padding_multiple(config))
    return data, images


def _with_images(
    architecture: Architecture, config: Config, data: RunData, settings: ImageSettings | None
) -> Architecture:
    """The architecture with how images are read, if the data has any."""
    if architecture.config.images is None:
        return architecture
    if not data.has_images:
        for name, value, default in changed_options(config.train, ENCODER_AND_DECODER):
            raise ValueError(
                f"train.{name}: {yaml_text(value)}, but no conversation has an image, so the image encoder would not "
                f"be trained; set it to {yaml_text(default)}"
            )
        logger.info("images: none in the data; the image encoder is not used, and stays as it is")
        return architecture
    if config.lora.sweep:
        raise ValueError("lora.sweep: its members cannot be trained on images yet; train them one by one")
    if config.train.freeze_encoders and not config.lora.enable_lora:
        logger.info("images: the image encoder is not trained (train.freeze_encoders)")
    return replace(architecture, images=settings)


def _check_lengths(data: RunData, model: DecoderConfig, pad_to_multiple_of: int) -> None:
    """Raise ValueError for documents longer than the model's learned positions; the first one would end the run."""
    limit = model.max_position_embeddings
    if model.learned_positions and pad_to_multiple_of > limit:
        raise ValueError(
            f"data.pad_to_multiple_of: {pad_to_multiple_of} exceeds the model's {limit} learned positions, which "
            f"padding needs as well; use {limit} or less"
        )
    for option, part in (("data.datasets", data.train), ("data.test_datasets", data.held_out)):
        longest = 0 if part is None else longest_document(part)
        if longest <= limit:
            continue
        if model.learned_positions:
            raise ValueError(
                f"{option}: a document of {longest} tokens does not fit the model's {limit} learned positions; cut "
                f"documents with max_seq_len: {limit} or less"
            )
        logger.warning(
            "%s: longest document=%d tokens, beyond the model's max_position_embeddings=%d", option, longest, limit
        )


def longest_document(data: PackedDocuments | Stream) -> int:
    """The most tokens of a document; for a stream, its limit."""
    if isinstance(data, Stream):
        return max(entry.format.limit for entry in data.entries)
    return int(data.documents.lengths.max())


def largest_images(data: PackedDocuments | Stream, num_bins: int) -> list[tuple[int, int]]:
    """The grids of the images of the micro-batch of `num_bins` bins with the most patches; none in text."""
    return [] if isinstance(data, Stream) else largest_grids(data.documents, data.bins, num_bins)


def parallel_dims(config: Config, world_size: int) -> ParallelDims:
    """The sizes of the mesh's axes."""
    train = config.train
    return ParallelDims.resolve(
        train.data_parallel_mode,
        world_size,
        shard_size=train.data_parallel_shard_size,
        replicate_size=train.data_parallel_replicate_size,
        pp=train.pipeline_parallel_size,
        ring=train.ringattn_parallel_size,
        ulysses=train.ulysses_parallel_size,
        tp=train.tensor_parallel_size,
        context_sharding=train.cp_fsdp_mode,
        ep=train.expert_parallel_size,
        ep_outside=train.ep_outside,
    )


def require_agreement(option: str, found: str) -> None:
    """Raise ValueError unless all ranks found the same. Collective.

    Ranks that disagree would wait for each other in different collectives, or train on a mixture of data.
    """
    if not all_ranks_agree(found):
        raise ValueError(
            f"{option}: not every node sees the same files: rank {global_rank()} found {found}, other ranks found "
            "something else. Use a folder that all nodes share, or copy the same files to each"
        )


def _data_summary(run: PreparedRun) -> str:
    held_out = None if run.data.held_out is None else run.data.held_out.documents.fingerprint
    return f"training {run.plan.hash} of {run.plan.num_steps} steps, held out {held_out}"


def _plans(
    configs: Mapping[str, Config], data: Mapping[str, RunData], mesh: Mesh, resumed: ResumePoint | None
) -> dict[str, Plan]:
    saved = {} if resumed is None else saved_data_of(resumed.manifest, configs.keys())
    return {name: plan_of(config, data[name], mesh, saved.get(name)) for name, config in configs.items()}


def saved_data_of(manifest: Manifest, members: Collection[str]) -> dict[str, DataIdentity]:
    """The training data recorded in a checkpoint: by member for a sweep, else under the name "".

    Raises CheckpointError if the checkpoint is not of these members of a sweep, or of no run at all.
    """
    info = manifest.info
    saved = cast(Mapping[str, Mapping[str, str | int]], {"": info["data"]} if "data" in info else info.get("sweep", {}))
    if not saved:
        raise CheckpointError(
            "train.load_checkpoint_path: the checkpoint has no position in training data, so no run can resume from "
            "it; a service or another program saved it. To start a new run from its weights, set lora.adapter_path to "
            "it if it has an adapter, else model.model_path, with train.load_weights_mode: dcp"
        )
    if set(saved) != set(members):
        in_checkpoint, in_config = (", ".join(sorted(filter(None, names))) for names in (saved, members))
        raise CheckpointError(
            f"train.load_checkpoint_path: the checkpoint is of "
            f"{f'a sweep of {in_checkpoint}' if in_checkpoint else 'no sweep'}, and lora.sweep has "
            f"{in_config or 'no members'}: restore the members, or start a new run in another train.output_dir"
        )
    return {
        name: DataIdentity(str(data["order"]), int(data["num_bins"]), int(data["bins_per_step"]))
        for name, data in saved.items()
    }


def plan_of(config: Config, data: RunData, mesh: Mesh, saved: DataIdentity | None) -> Plan:
    """The order of the bins. Raises CheckpointError if it differs from `saved`, the order in the checkpoint."""
    plan = plan_steps(config, data.train, mesh.data.size, None if saved is None else saved.bins_per_step)
    if isinstance(plan, DataPlan) and not plan.shuffle and saved == DataIdentity.of(replace(plan, shuffle=True)):
        logger.warning(
            "data.shuffle_merged_datasets: this checkpoint was saved by a version that shuffled packed rows even if "
            "the option was false; the run keeps that order"
        )
        return replace(plan, shuffle=True)
    if saved is not None and saved != DataIdentity.of(plan):
        raise CheckpointError(
            "train.load_checkpoint_path: the data is not what this checkpoint was trained on, or comes in another "
            f"order ({saved.num_bins} bins, {saved.order[:8]}; now {plan.num_bins} bins, {plan.hash[:8]}), so the run "
            "cannot continue at its position. Restore the data options and train.seed, or start a new run from the "
            "exported model with --model.model_path"
        )
    return plan


def build_schedule(run: PreparedRun) -> Schedule:
    """The learning rate of each step; ten points of it are logged."""
    train = run.config.train
    schedule = Schedule(
        run.plan.num_steps,
        peak=train.lr,
        minimum=train.lr_min,
        start=train.lr_start,
        warmup_ratio=train.lr_warmup_ratio,
        decay_ratio=train.lr_decay_ratio,
        style=train.lr_decay_style,
    )
    logger.debug("lr %s", " ".join(f"{step}:{lr:.3g}" for step, lr in schedule.sample()))
    return schedule


def build_evaluation(
    startup: Startup,
    run: PreparedRun,
    scorer: Engine | Scorer,
    write: Callable[[Metrics], None],
    *,
    at_start: bool,
    preference: Preference | None = None,
) -> Evaluation | None:
    """The evaluation of `run`; None without held-out data. `at_start` is the result of `Startup.evaluates_at_start`.

    preference: of a run on pairs of answers.
    """
    held_out, mesh = run.data.held_out, startup.mesh
    if held_out is None:
        return None
    bins_per_step = run.config.train.micro_batch_size * mesh.data.size
    plan = DataPlan.one_pass(held_out.documents, held_out.bins, bins_per_step=bins_per_step)
    loader = build_loader(run.config, held_out, plan, mesh, run.architecture)

    def score(check: Callable[[], None]) -> dict[str, float]:
        return evaluate(scorer, loader, check) if preference is None else preference.evaluate(loader, check)

    return Evaluation(score, run.eval_points, at_start, write)


def build_observer(startup: Startup, start_step: int, timer: StepTimer) -> Observer:
    """The observer of a job; only the main process writes metrics."""
    runtime, train, sinks = startup.runtime, startup.config.train, list[Sink]()
    is_watched = runtime.device.type == "cuda" and runtime.world_size > 1
    first_step = FIRST_STEP_IN_GRAPHS if train.enable_cuda_graphs else FIRST_STEP
    is_sharded = train.data_parallel_mode == "fsdp2"
    waits = WaitWatch(runtime.device, is_sharded=is_sharded, first_step=first_step) if is_watched else None
    observer = Observer(runtime.device, runtime.world_size, sinks, timer, waits=waits)
    if not runtime.is_main:
        return observer
    write_run_file(
        startup.output_dir,
        startup.config,
        world_size=runtime.world_size,
        start_step=start_step,
        num_steps=startup.num_steps,
    )
    repeats = last_step(startup.output_dir / METRICS) > start_step
    progress = progress_sink(train.log_format, startup.num_steps, start_step)
    sinks += [MetricsFile(startup.output_dir / METRICS, start_step), progress]
    if train.use_wandb:
        # wandb takes a second to import, which runs without it need not wait for.
        from xorl.train.observe.wandb_log import WandbSink  # noqa: PLC0415

        options: Mapping[str, object] = startup.config.model_dump()
        latest = startup.checkpointer.latest()  # later checkpoints are set aside before the first step
        sinks.append(
            WandbSink(
                project=train.wandb_project,
                name=train.wandb_name,
                tags=train.wandb_tags,
                log_interval=train.wandb_log_interval,
                folder=startup.output_dir,
                config=options,
                start_step=start_step,
                went_back=latest is not None and (step_of(latest) or 0) > start_step,
                repeats=repeats,
            )
        )
    return observer
