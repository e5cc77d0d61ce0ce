"""Trainer: takes a user's own module, optimizer class and loader, and trains in one process.

The module maps token ids [B, S] to logits [B, S, V]. Several processes are in distributed.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, Required, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from xorl.core.loss import IGNORE
from xorl.core.optim import scale_and_clip_
from xorl.core.runtime import local_rank, world_size
from xorl.train.module.loader import (
    Batch,
    batches_of_epoch,
    has_order_of_its_own,
    read_batch,
    refuse_unshifted,
    require_shares,
    rows_per_batch,
)
from xorl.train.module.saving import ModuleState, Progress, group_numbers
from xorl.train.observe.observer import DivergedError

logger = logging.getLogger(__name__)

StateDictType = Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"]
MixedPrecision = Literal["bf16"]
LossFunction = Callable[..., Tensor]


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in fp32: the sum of -log p(label) over the labels that are not -100.

    logits [B, S, V]; labels [B, S] int64, labels[b, s] being the token after position s.
    """
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
        what = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"model: it returned {what}, and logits of shape {[*labels.shape, 'vocabulary']} are wanted; for another "
            "kind of output give loss_fn, e.g. lambda output, labels: next_token_loss(output.logits, labels)"
        )
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


class TrainerOptions(TypedDict, total=False):
    """The keyword arguments that all trainers share; `Trainer` says what they mean."""

    device: str | torch.device | None
    context_length: int | None
    grad_accum_steps: int
    learning_rate: Required[float | Callable[[int], float]]
    weight_decay: float
    grad_clip_norm: float | None
    mixed_precision_policy: MixedPrecision | None
    loss_fn: LossFunction
    optimizer_options: Mapping[str, object] | None


@dataclass(frozen=True)
class StepMetrics:
    """The steps since the record before, over all ranks: loss is nats per trained token, tokens_per_s counts all.

    grad_norm, before clipping, and lr are those of the last of these steps.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    num_trained_tokens: int
    tokens_per_s: float


class Trainer:
    """Trains `model` in one process.

    The gradient of a step is the sum over its trained tokens, of all micro-batches (and ranks), divided once by their
    number, so it does not depend on how the rows are split.

    model: maps token ids [B, S] (and, as keyword arguments, whatever else the batches hold) to what loss_fn takes.
    optimizer_class: called as (parameters, lr=, weight_decay=, **optimizer_options) once the model is placed.
    loader: an iterable of batches, one micro-batch each: token ids [B, S], whose labels are then the next tokens, or
    (ids, labels), or a mapping with input_ids and labels. Labels are already shifted; -100 is not trained.
    device: the default is this process's GPU if there is one, else the CPU.
    context_length: the longest row that is accepted; the default is any.
    grad_accum_steps: micro-batches per optimizer step; the last step of an epoch takes those that are left.
    learning_rate: a number, or a function of the optimizer step, counted from 1, such as `xorl.core.optim.Schedule`.
    grad_clip_norm: the largest norm of the gradient over all parameters; None does not clip.
    mixed_precision_policy: "bf16" runs the model under torch.autocast: fp32 parameters, matrix products in bf16.
    loss_fn: (model output, labels [B, S]) -> the SUM over the labels that are not -100.

    `step` counts optimizer steps, `model` is the module that was given, placed, and `optimizer` what was made of the
    class.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        loader: Iterable[Batch],
        *,
        learning_rate: float | Callable[[int], float],
        device: str | torch.device | None = None,
        context_length: int | None = None,
        grad_accum_steps: int = 1,
        weight_decay: float = 0.0,
        grad_clip_norm: float | None = None,
        mixed_precision_policy: MixedPrecision | None = None,
        loss_fn: LossFunction = next_token_loss,
        optimizer_options: Mapping[str, object] | None = None,
    ) -> None:
        if grad_accum_steps < 1:
            raise ValueError(f"grad_accum_steps must be at least 1, not {grad_accum_steps}")
        if grad_clip_norm is not None and not grad_clip_norm > 0:
            raise ValueError(f"grad_clip_norm must be above 0, or None for no limit, not {grad_clip_norm}")
        if isinstance(optimizer_class, torch.optim.Optimizer):
            raise ValueError("optimizer_class wants a class such as torch.optim.AdamW: the model is placed before it")
        self.num_ranks = self._count_ranks()
        require_shares(loader, self.num_ranks)
        _check_model(model, mixed_precision_policy)
        self.loader = loader
        self.device = _device(device)
        self.step = 0
        self.model = model
        self._forward = self._place(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._lr = learning_rate if callable(learning_rate) else None
        first_lr = learning_rate(1) if callable(learning_rate) else learning_rate
        options = dict(optimizer_options or {})
        self.optimizer = optimizer_class(self._parameters, lr=first_lr, weight_decay=weight_decay, **options)
        self._state = ModuleState(model, self.optimizer, self.device, group_numbers(self.optimizer))
        self._loss_fn = loss_fn
        self._context_length = context_length
        self._grad_accum_steps = grad_accum_steps
        self._grad_clip_norm = grad_clip_norm
        self._autocast = mixed_precision_policy == "bf16"
        self._epoch = 0
        self._batch = 0
        self._batches: Iterator[Batch] | None = None

    def train(self, epochs: int = 1, max_steps: int | None = None, log_interval: int = 50) -> list[StepMetrics]:
        """Train until `epochs` passes over the loader or `max_steps` optimizer steps are done; collective.

        Both count from the start of the run, whatever was done by an earlier call or before the checkpoint that was
        loaded. Rank 0 logs every `log_interval` steps, and the last one; every rank gets these records back.
        Raises DivergedError on every rank, before the update, where the loss or the gradient is not finite.
        """
        if log_interval < 1:
            raise ValueError(f"log_interval must be at least 1, not {log_interval}")
        self._forward.train()
        records: list[StepMetrics] = []
        window = _Window()
        while max_steps is None or self.step < max_steps:
            group = self._next_group(epochs)
            if not group:
                break
            window.add(*self._take_step(group))
            if self.step % log_interval == 0:
                records.append(self._record(window))
                window = _Window()
        if window.num_steps:
            records.append(self._record(window))
        return records

    def save_checkpoint(self, path: str | Path, state_dict_type: StateDictType = "FULL_STATE_DICT") -> Path:
        """Save model, optimizer, random number generators and the place in the data; collective. Returns what was made.

        FULL_STATE_DICT writes one file, gathered on rank 0, in place of what `path` held. Without xorl it is read by
        `module.load_state_dict(torch.load(path, weights_only=True)["model"])`.
        SHARDED_STATE_DICT writes a new folder `{path}/global_step_{step}`, to which each rank writes its own shard; one
        that is there from another run is an error, and `{path}/latest` names the newest.
        """
        if state_dict_type not in get_args(StateDictType):
            known = ", ".join(get_args(StateDictType))
            raise ValueError(f"state_dict_type {state_dict_type!r} is unknown; use one of {known}")
        progress = Progress(self.step, self._epoch, self._batch * rows_per_batch(self.loader, self.num_ranks))
        save = self._state.save_file if state_dict_type == "FULL_STATE_DICT" else self._state.save_shards
        return save(Path(path), progress)

    def load_checkpoint(self, path: str | Path) -> None:
        """Continue from a checkpoint of any trainer and either kind, saved on any number of ranks; collective.

        With the same loader options and ranks the run goes on as if it had not stopped. On another number of ranks the
        same rows follow, if what is read at a time divides those already read, and dropout draws other numbers.
        """
        path = Path(path)
        progress = self._state.load_shards(path) if path.is_dir() else self._state.load_file(path)
        at_a_time = rows_per_batch(self.loader, self.num_ranks)
        if progress.rows % at_a_time:
            raise ValueError(
                f"{path} stands after {progress.rows} rows of its epoch, and now {at_a_time} are read at a time "
                "(batch_size x ranks), which does not divide them: change the batch_size or the number of ranks"
            )
        if has_order_of_its_own(self.loader):
            logger.warning("loader: the order of a RandomSampler cannot be continued, so rows will repeat or be missed")
        self.step, self._epoch, self._batch = progress.step, progress.epoch, progress.rows // at_a_time
        self._batches = None

    def _count_ranks(self) -> int:
        count = dist.get_world_size() if dist.is_initialized() else world_size()
        if count > 1:
            raise ValueError(f"Trainer trains in one process, and {count} run: use DDPTrainer or FSDPTrainer")
        return 1

    def _place(self, model: nn.Module) -> nn.Module:
        """Put `model` where it trains, in place, and return what to call."""
        return model.to(self.device)

    def _accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward pass of a micro-batch."""
        return nullcontext()

    def _reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """`tensor` over all ranks, in place."""
        return tensor

    def _next_group(self, epochs: int) -> list[Batch]:
        """The micro-batches of the next step, as many on every rank; none where `epochs` are over. Collective."""
        while self._epoch < epochs:
            if self._batches is None:
                self._batches = batches_of_epoch(self.loader, self._epoch, self._batch)
            group = list(islice(self._batches, self._grad_accum_steps))
            # Streams may end a batch earlier on one rank, and every rank must take part in every reduction.
            least = self._reduce_(torch.tensor(len(group), device=self.device), dist.ReduceOp.MIN)
            group = group[: int(least)]
            self._batch += len(group)
            if group:
                return group
            if self._batch == 0:
                raise ValueError("loader: it gave no batch; has it fewer rows than batch_size x ranks?")
            self._epoch, self._batch, self._batches = self._epoch + 1, 0, None
        return []

    def _take_step(self, group: list[Batch]) -> tuple[float, float, float, float]:
        """One optimizer step: the sum of the losses, trained tokens, all tokens, and the gradient's norm."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for index, batch in enumerate(group):
            with self._accumulation(is_last=index == len(group) - 1):
                sums += self._backward(batch, is_first=self.step == 0 and index == 0)
        self._reduce_(sums, dist.ReduceOp.SUM)
        # Gradients that are offloaded lie in host memory.
        divisor = sums[1].clamp(min=1).to(self._parameters[0].device, torch.float32)
        norm = scale_and_clip_(self._parameters, divisor, self._grad_clip_norm)
        # An optimizer of any class cannot be told to skip on the device, so the host waits for these four numbers.
        loss_sum, trained, tokens, grad_norm = torch.cat([sums, norm.to(sums).reshape(1)]).tolist()
        if not (math.isfinite(loss_sum) and math.isfinite(grad_norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise DivergedError(
                self.step + 1,
                f"the loss is {loss_sum / max(1.0, trained)}, the gradient's norm {grad_norm}. "
                "The update was not applied. Lower learning_rate or look at this step's data",
            )
        if not trained:
            raise ValueError(f"loader: no token of step {self.step + 1} is trained; all labels are {IGNORE}")
        if self._lr is not None:
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = self._lr(self.step + 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss_sum, trained, tokens, grad_norm

    def _backward(self, batch: Batch, *, is_first: bool) -> Tensor:
        """Add a micro-batch's gradient; returns its loss, trained tokens and tokens."""
        rows = read_batch(batch, self._context_length)
        if is_first:
            refuse_unshifted(rows)
        rows = rows.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            loss = self._loss_fn(self._forward(rows.input_ids, **rows.extras), rows.labels)
        loss.backward()
        counts = torch.stack([(rows.labels != IGNORE).sum(), torch.tensor(rows.labels.numel(), device=self.device)])
        return torch.cat([loss.detach().double().reshape(1), counts.double()])

    def _record(self, window: _Window) -> StepMetrics:
        lr = float(self.optimizer.param_groups[0]["lr"])
        metrics = window.metrics(self.step, self._epoch, lr)
        if not dist.is_initialized() or dist.get_rank() == 0:
            pairs = asdict(metrics).items()
            cells = (f"{name}={value:.5g}" if isinstance(value, float) else f"{name}={value}" for name, value in pairs)
            logger.info(" ".join(cells))
        return metrics


class _Window:
    """Sums over the steps between two records."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._start = time.perf_counter()
        self._loss_sum = self._trained = self._tokens = self._grad_norm = 0.0

    def add(self, loss_sum: float, trained: float, tokens: float, grad_norm: float) -> None:
        self.num_steps += 1
        self._loss_sum += loss_sum
        self._trained += trained
        self._tokens += tokens
        self._grad_norm = grad_norm

    def metrics(self, step: int, epoch: int, lr: float) -> StepMetrics:
        loss, rate = self._loss_sum / self._trained, self._tokens / (time.perf_counter() - self._start)
        return StepMetrics(step, epoch, loss, self._grad_norm, lr, int(self._trained), rate)


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _check_model(model: nn.Module, mixed_precision_policy: MixedPrecision | None) -> None:
    if mixed_precision_policy not in {None, *get_args(MixedPrecision)}:
        raise ValueError(f"mixed_precision_policy {mixed_precision_policy!r} is unknown; use 'bf16' or None")
    if isinstance(model, (DistributedDataParallel, FSDPModule)):
        raise ValueError("model: it is distributed already; give the module itself")
    if any(name.startswith("_orig_mod.") for name, _ in model.named_parameters()):
        raise ValueError(
            "model: torch.compile(model) renames its parameters, and checkpoints would not fit the plain module; "
            "compile in place with model.compile()"
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("model: some of its tensors are on the meta device and have no values; make it on the CPU")
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("model: no parameter requires a gradient, so there is nothing to train")
    if mixed_precision_policy == "bf16":
        for name, parameter in trained:
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"model: {name} is {parameter.dtype}, and mixed_precision_policy='bf16' trains parameters kept in "
                    "fp32: call model.float()"
                )
