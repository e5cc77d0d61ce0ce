"""The worker's operations: each is a method of `Worker`, listed in the table near the end of this file.

Every operation runs on all ranks in the same order; its result is rank 0's. An operation that fails returns a `Failure`
and changes nothing. If it fails after it began to change a model, that model is dropped on all ranks and the failure
says so (`model_given_up`).
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from xorl.ckpt import CheckpointError
from xorl.core.loss.metrics import NUM_TRAINED
from xorl.core.models.router_losses import RouterSums
from xorl.lora import Adam
from xorl.server.collectives import all_or_none, gather_numbers
from xorl.server.context_length import ContextOverflow
from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import (
    CANCELLED,
    Health,
    HealthResult,
    Operation,
    Result,
    Resume,
    Shutdown,
    ShutdownResult,
    Suspended,
    Work,
)
from xorl.server.operations import (
    AbortGradients,
    CreateModel,
    Failure,
    ForwardBackward,
    GradientsAborted,
    Loaded,
    LoadWeights,
    LossResult,
    ModelCreated,
    OptimResult,
    OptimStep,
    Sample,
    Saved,
    SaveFullWeights,
    SaveWeights,
    SaveWeightsForSampler,
    SyncResult,
    SyncWeights,
    Unloaded,
    UnloadModel,
)
from xorl.server.worker.adapters import AdapterModels
from xorl.server.worker.base import Base
from xorl.server.worker.calls import RETURN_ROUTES, PassCall, read_call
from xorl.server.worker.full import WholeModel
from xorl.server.worker.interrupts import NO_INTERRUPTS, Interrupts
from xorl.server.worker.models import Models, UnknownName
from xorl.server.worker.passes import Pass, PassCancelled, PassRunner, Verdict
from xorl.server.worker.routes import RoutedLayers
from xorl.server.worker.sampling import SampleCall, WorkerSampler
from xorl.server.worker.saved_models import AlreadySaved, PartiallyLoaded, PendingSave, SavedModels
from xorl.server.worker.syncing import WeightSyncer
from xorl.train.data import padding_multiple

logger = logging.getLogger(__name__)

ReadT = TypeVar("ReadT")


class UnknownModel(UnknownName):
    """The operation's model does not exist on the workers."""


@dataclass
class ModelProgress:
    """A model's number of optimizer steps, and what was added up since the last one."""

    num_steps: int = 0
    num_passes: int = 0
    num_trained: float = 0.0
    routers: RouterSums | None = None
    has_replayed: bool = False

    def forget_gradient(self) -> None:
        """Reset the counts of the accumulated gradient."""
        self.num_passes, self.num_trained, self.routers, self.has_replayed = 0, 0.0, None, False

    def add_routers(self, routers: RouterSums, *, has_replayed: bool) -> None:
        """Add the sums of a pass."""
        self.routers = routers if self.routers is None else self.routers + routers
        self.has_replayed |= has_replayed

    def router_metrics(self) -> dict[str, Tensor]:
        """The metrics of the sums, with those of replayed routes if there were any."""
        if self.routers is None:
            return {}
        return self.routers.metrics() | (self.routers.replay_metrics() if self.has_replayed else {})


class Worker:
    """One rank of the service with its part of the models."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self.models: Models = AdapterModels(base) if base.local.lora.enable_lora else WholeModel(base)
        self.saved = SavedModels(base, self.models)
        bank = self.models.bank if isinstance(self.models, AdapterModels) else None
        self.sampling = WorkerSampler(base, self.models, self.saved, bank)
        self._syncing = WeightSyncer(base, self.models)
        self._routed = RoutedLayers.of(base.architecture.config)
        self._passes = PassRunner(base, self.models.engine, padding_multiple(base.local), self._routed)
        self._progress: dict[str, ModelProgress] = {}
        self._suspended: dict[str, Pass] = {}  # by the id of its operation
        # The model that the current operation changes in place; if the operation fails, its state is undefined.
        self._partially_changed: str | None = None

    def run(self, work: Work, interrupts: Interrupts = NO_INTERRUPTS) -> Sequence[Result | PendingSave]:
        """The result of each operation on rank 0; other ranks return a list of the same length. Collective.

        With save_async, the result of a save is a PendingSave, which gets its result later.

        interrupts: only rank 0's are used.
        """
        first = work.operations[0]
        self.base.position.move(type(first).__name__)
        self.saved.before_change()
        self._cancel_left_behind(work)
        # All operations of a Work have the same type; of most types there is only one.
        if isinstance(first, ForwardBackward | Resume):
            return self._run_passes(work, interrupts)
        if isinstance(first, Sample):
            samples = self._read(work, self._read_sample)
            run = partial(self.sampling.run, cancelled=interrupts.cancelled, wants_pause=interrupts.pauses(work))
            return self._run_groups(work, samples, self._sample_groups(samples), run)
        try:
            with all_or_none(type(first).__name__):
                return [_OPERATIONS[type(first)](self, first, work.ids[0])]
        except Exception as problem:  # noqa: BLE001 - every error is reported to its client; the worker keeps running
            if self._partially_changed is None:
                return [failure_of(problem)]
            return [self._drop_model(self._partially_changed, problem)]
        finally:
            self._partially_changed = None

    def _drop_model(self, model_id: str, problem: Exception) -> Failure:
        """Drop a model that a failed operation has changed partially: it must not be trained further."""
        cause = problem.__cause__ if isinstance(problem, PartiallyLoaded) else problem
        assert isinstance(cause, Exception)
        failure = failure_of(cause, is_server=True)
        self._forget(model_id)
        advice = f"model {model_id} is rebuilt as it was before this call, which may be retried"
        return replace(failure, message=f"{failure.message}; {advice}", model_given_up=True)

    def _run_passes(self, work: Work, interrupts: Interrupts) -> list[Result]:
        wants_pause = interrupts.pauses(work)

        def verdict() -> Verdict:
            if all(operation_id in interrupts.cancelled for operation_id in work.ids):
                return Verdict.CANCEL
            return Verdict.PAUSE if len(work.ids) == 1 and wants_pause() else Verdict.CONTINUE

        suspended = self._suspended.pop(work.ids[0], None)
        if suspended is not None:
            resume = partial(self._advance, work.ids[0], verdict)
            return self._run_groups(work, [suspended], [[0]], lambda passes: resume(passes[0]))
        if isinstance(work.operations[0], Resume):
            return [Failure("server", 500, f"the workers do not hold the pass of {work.ids[0]}: send it again")]
        calls = self._read(work, self._read_call)

        def run(chosen: list[PassCall]) -> Sequence[Result]:
            return self._advance(work.ids[0], verdict, self._passes.begin(chosen))

        return self._run_groups(work, calls, self._call_groups(calls), run)

    def _advance(self, operation_id: str, verdict: Callable[[], Verdict], running: Pass) -> Sequence[Result]:
        """Compute a pass to its end or to its next pause."""
        self.sampling.before_training()
        if not running.advance(verdict):
            self._suspended[operation_id] = running
            return [Suspended(running.done)]
        for call, result in zip(running.calls, running.results, strict=True):
            if not call.forward_only:
                self._count_pass(call, result, running.routers.get(call.model_id))
        return running.results

    def _count_pass(self, call: PassCall, result: LossResult, routers: RouterSums | None) -> None:
        progress = self._progress[call.model_id]
        progress.num_passes += 1
        progress.num_trained += result.metrics[NUM_TRAINED]
        if routers is not None and self.base.config.log_router_stats:
            has_replayed = any(example.routes is not None for example in call.examples)
            progress.add_routers(routers, has_replayed=has_replayed)

    def is_suspended(self, operation_id: str) -> bool:
        """Whether a pass of this id has begun and is suspended."""
        return operation_id in self._suspended

    def _cancel_left_behind(self, work: Work) -> None:
        """Cancel suspended passes of models that other operations now use, since no one will resume these passes.

        A pass that is sent again alone continues. If it is sent again in a group, it begins again.
        """
        used = {getattr(operation, "model_id", None) for operation in work.operations}
        for operation_id, suspended in list(self._suspended.items()):
            if list(work.ids) != [operation_id] and not used.isdisjoint(suspended.model_ids):
                del self._suspended[operation_id]
                suspended.cancel()

    def _read(self, work: Work, read: Callable[[Any, str], ReadT]) -> list[ReadT | Failure]:
        """Each operation validated by `read`, or its failure; the same on every rank."""
        found: list[ReadT | Failure] = []
        for operation, operation_id in zip(work.operations, work.ids, strict=True):
            try:
                found.append(read(operation, operation_id))
            except Exception as problem:  # noqa: BLE001 - as in `run`
                found.append(failure_of(problem))
        return found

    def _run_groups(
        self,
        work: Work,
        read: Sequence[ReadT | Failure],
        groups: Sequence[Sequence[int]],
        run: Callable[[list[ReadT]], Sequence[Result]],
    ) -> list[Result]:
        """Run each group of operations in one pass. If a group fails, the others still run."""
        results: dict[int, Result] = {index: one for index, one in enumerate(read) if isinstance(one, Failure)}
        for members in groups:
            chosen = [one for one in (read[index] for index in members) if not isinstance(one, Failure)]
            try:
                with all_or_none(type(work.operations[0]).__name__):
                    found = run(chosen)
            except PassCancelled:
                found = [CANCELLED] * len(members)
            except Exception as problem:  # noqa: BLE001 - as in `run`
                # `_read` has already found the errors of clients.
                found = [failure_of(problem, is_server=True)] * len(members)
            results |= zip(members, found, strict=True)
        return [results[index] for index in range(len(read))]

    def _read_call(self, operation: ForwardBackward, _: str) -> PassCall:
        self._require(operation.model_id)
        config = self.base.config
        vocab_size = self.base.architecture.config.vocab_size
        bin_len = config.sample_packing_sequence_len
        call = read_call(operation, bin_len=bin_len, vocab_size=vocab_size, routed=self._routed)
        if call.returns_routes and self.base.mesh.dims.pp > 1:
            raise ValueError(
                f"{RETURN_ROUTES}: each stage of a pipeline has the routes of its own layers only: leave it out, or "
                "start the service with pipeline_parallel_size: 1"
            )
        most = self.base.architecture.config.max_position_embeddings
        longest = max(len(example.tokens) for example in call.examples)
        if longest > most and self.base.architecture.config.learned_positions:
            raise ValueError(f"a datum has {longest} tokens, but the model has only {most} positions")
        return call

    def _call_groups(self, calls: Sequence[PassCall | Failure]) -> list[list[int]]:
        """The calls that share a pass: same key, different models, at most `max_per_pass`."""
        groups: dict[tuple[object, ...], list[int]] = {}
        seen: Counter[object] = Counter()
        for index, call in enumerate(calls):
            if isinstance(call, Failure):
                continue
            seen[call.model_id] += 1
            seen[key := (call.key, seen[call.model_id])] += 1
            groups.setdefault((*key, (seen[key] - 1) // self.models.max_per_pass), []).append(index)
        return list(groups.values())

    def _read_sample(self, operation: Sample, operation_id: str) -> SampleCall:
        source = self.sampling.source_of(operation.sampler)
        request = self.sampling.request(operation, operation_id, source)
        return SampleCall(operation_id, request, source)

    def _sample_groups(self, samples: Sequence[SampleCall | Failure]) -> list[list[int]]:
        groups: dict[str | None, list[int]] = {}
        for index, sample in enumerate(samples):
            if not isinstance(sample, Failure):
                groups.setdefault(None if self.models.samples_together else sample.source, []).append(index)
        return list(groups.values())

    def _require(self, model_id: str) -> ModelProgress:
        if model_id not in self._progress:
            raise UnknownModel(f"there is no model {model_id!r} on the workers")
        return self._progress[model_id]

    def _forget(self, model_id: str) -> None:
        self.models.remove(model_id)
        del self._progress[model_id]

    def _changed(self, model_id: str) -> None:
        """Notify the sampler that a model's weights changed. Sources of adapters are copies and do not change."""
        if self.models.lora(model_id) is None:
            self.sampling.weights_changed()

    def create_model(self, operation: CreateModel, _: str) -> ModelCreated:
        model_id, start = operation.model_id, operation.checkpoint
        if model_id in self._progress:
            raise ValueError(f"model {model_id!r} already exists")
        progress = ModelProgress()
        try:
            # If one rank fails, the others must not keep the model or wait for it in a collective.
            with all_or_none("creating the model"):
                saved = None if start is None else self.saved.describe(start)
                self.models.create(model_id, operation.lora, saved)
            with all_or_none("reading the checkpoint"):
                if start is not None:
                    progress.num_steps = self.saved.load(model_id, start, with_optimizer=operation.with_optimizer)
        except BaseException:
            if model_id in self.models.names:
                self.models.remove(model_id)
            raise
        self._progress[model_id] = progress
        self._changed(model_id)
        rank, alpha = self.models.lora(model_id) or (None, None)
        return ModelCreated(model_id, rank, alpha, progress.num_steps, self.saved.estimated_bytes(model_id))

    def unload_model(self, operation: UnloadModel, _: str) -> Unloaded:
        self._require(operation.model_id)
        self._forget(operation.model_id)
        return Unloaded(operation.model_id)

    def optim_step(self, operation: OptimStep, _: str) -> OptimResult:
        progress = self._require(operation.model_id)
        config = self.base.config
        if not operation.grad_clip_norm >= 0:
            raise ValueError(f"grad_clip_norm must be 0 (no clipping) or more, got {operation.grad_clip_norm}")
        adam = Adam(
            operation.learning_rate,
            (operation.beta1, operation.beta2),
            operation.eps,
            operation.weight_decay,
        )
        if not progress.num_passes:
            # Without a gradient, Adam would still move the weights by its momentum.
            skipped = {"grad_norm": 0.0, "step": float(progress.num_steps), "skipped": 1.0, "no_gradient": 1.0}
            return OptimResult(skipped | {"learning_rate": operation.learning_rate})
        divisor = max(progress.num_trained, 1.0) if config.grad_normalization == "token_mean" else 1.0
        # All ranks get here or none, since operation and progress are the same on all.
        self._partially_changed = operation.model_id
        update = self.models.step(
            operation.model_id,
            adam,
            divisor,
            operation.grad_clip_norm or None,
            with_norms=config.log_gradient_norms,
        )
        by_kind = {f"grad_norm/{kind}": norm / divisor for kind, norm in update.norms.items()}
        by_name = by_kind | progress.router_metrics()
        norm, is_skipped, *rest = torch.stack([update.grad_norm, update.skipped, *by_name.values()]).tolist()
        progress.num_steps += not is_skipped
        num_trained = progress.num_trained
        progress.forget_gradient()
        self._changed(operation.model_id)
        metrics = {
            "grad_norm": norm,
            "learning_rate": operation.learning_rate,
            "step": float(progress.num_steps),
            "skipped": is_skipped,
            "num_trained_tokens": num_trained,
        }
        return OptimResult(metrics | dict(zip(by_name, rest, strict=True)))

    def abort_gradients(self, operation: AbortGradients, _: str) -> GradientsAborted:
        progress = self._require(operation.model_id)
        self.models.zero_grad(operation.model_id)
        progress.forget_gradient()
        return GradientsAborted(operation.model_id, progress.num_steps)

    def save_weights(self, operation: SaveWeights, operation_id: str) -> Saved | PendingSave:
        progress = self._require(operation.model_id)
        ref = CheckpointRef(operation.model_id, "weights", operation.name)
        saved = self.saved.save(
            operation.model_id,
            ref,
            operation_id=operation_id,
            num_steps=progress.num_steps,
            with_optimizer=True,
            replaces=operation.overwrite,
            user_metadata=operation.user_metadata,
        )
        self.sampling.checkpoint_saved(ref)
        return saved

    def load_weights(self, operation: LoadWeights, _: str) -> Loaded:
        progress = self._require(operation.model_id)
        try:
            num_steps = self.saved.load(operation.model_id, operation.checkpoint, with_optimizer=operation.optimizer)
        except PartiallyLoaded:
            self._partially_changed = operation.model_id
            raise
        progress.num_steps = num_steps
        progress.forget_gradient()
        self._changed(operation.model_id)
        return Loaded(operation.model_id, operation.checkpoint, num_steps)

    def save_weights_for_sampler(self, operation: SaveWeightsForSampler, operation_id: str) -> Saved | PendingSave:
        progress = self._require(operation.model_id)
        assert operation.name is not None, "the orchestrator names every checkpoint"
        ref = CheckpointRef(operation.model_id, "sampler_weights", operation.name)
        saved = self.saved.save(
            operation.model_id,
            ref,
            operation_id=operation_id,
            num_steps=progress.num_steps,
            with_optimizer=False,
            user_metadata=operation.user_metadata,
        )
        self.sampling.checkpoint_saved(ref)
        if operation.sampler_id is not None:
            # The client samples from these weights next, and they need not be read back for that.
            self.sampling.keep_weights(operation.model_id, ref)
        return saved

    def save_full_weights(self, operation: SaveFullWeights, _: str) -> Saved:
        self._require(operation.model_id)
        ref = CheckpointRef(operation.model_id, "external_weights", operation.name)
        return self.saved.export(operation.model_id, ref, operation.dtype, is_merged=operation.is_merged)

    def sync_weights(self, operation: SyncWeights, _: str) -> SyncResult:
        self._require(operation.model_id)
        return self._syncing.send(operation)

    def health(self, _: Health, __: str) -> HealthResult:
        used, total = list[int](), list[int]()
        if self.base.device.type == "cuda":
            free, size = torch.cuda.mem_get_info(self.base.device)
            for row in gather_numbers([size - free, size]):
                used.append(row[0])
                total.append(row[1])
        most = self.base.architecture.config.max_position_embeddings
        return HealthResult(self.base.runtime.world_size, used, total, most)

    def shut_down(self, _: Shutdown, __: str) -> ShutdownResult:
        self.saved.finish()
        return ShutdownResult()


_OPERATIONS: Mapping[type[Operation], Callable[[Worker, Any, str], Result | PendingSave]] = {
    CreateModel: Worker.create_model,
    UnloadModel: Worker.unload_model,
    OptimStep: Worker.optim_step,
    AbortGradients: Worker.abort_gradients,
    SaveWeights: Worker.save_weights,
    LoadWeights: Worker.load_weights,
    SaveWeightsForSampler: Worker.save_weights_for_sampler,
    SaveFullWeights: Worker.save_full_weights,
    SyncWeights: Worker.sync_weights,
    Health: Worker.health,
    Shutdown: Worker.shut_down,
}


def failure_of(problem: Exception, *, is_server: bool = False) -> Failure:
    """The failure that reports an exception to the client. is_server: never an error of the client."""
    for kind, status in ((UnknownName, 404), (AlreadySaved, 409), (ValueError, 400), (CheckpointError, 400)):
        if isinstance(problem, kind) and not is_server:
            code = problem.code if isinstance(problem, ContextOverflow) else None
            return Failure("user", status, str(problem), isinstance(problem, UnknownModel), code)
    logger.error("event=operation_failed error=%r", problem, exc_info=problem)
    if os.strerror(errno.ENOSPC) in str(problem):
        return Failure("server", 507, f"{problem}: delete checkpoints or free space on the service's disk")
    if isinstance(problem, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        reason = (
            "the GPUs ran out of memory: send fewer tokens per call or lower the service's sample_packing_sequence_len"
        )
        return Failure("server", 500, f"{reason} ({str(problem).splitlines()[0]})")
    return Failure("server", 500, f"{type(problem).__name__}: {problem}")
