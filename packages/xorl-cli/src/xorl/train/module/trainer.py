"""Trainer: trains a user-defined module with a given optimizer class and data loader, in one process.

The module maps token ids [B, S] to logits [B, S, V]. The trainers for several processes are in distributed.py.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Literal, Required, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from xorl.core.loss import IGNORE
from xorl.core.mesh import Mesh
from xorl.core.optim import scale_and_clip_
from xorl.core.runtime import local_rank, world_size
from xorl.train.module.loader import (
    Batch,
    batches_of_epoch,
    has_random_order,
    read_batch,
    reject_unshifted_labels,
    require_sharding,
    rows_per_batch,
)
from xorl.train.module.saving import ModuleState, TrainerProgress, group_scalars
from xorl.train.observe.observer import DivergedError, key_values

logger = logging.getLogger(__name__)

StateDictType = Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"]
MixedPrecision = Literal["bf16"]
LossFunction = Callable[..., Tensor]


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in fp32: the sum of -log p(label) over the labels that are not -100.

    logits [B, S, V]; labels [B, S] int64, where labels[b, s] is the token after position s.
    """
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"model: expected logits of shape {[*labels.shape, 'vocabulary']}, got {got}; for another kind of output "
            "set loss_fn, e.g. lambda output, labels: next_token_loss(output.logits, labels)"
        )
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


class TrainerOptions(TypedDict, total=False):
    """The keyword arguments that all trainers share; documented in `Trainer`."""

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
    """Metrics of the steps since the previous record, over all ranks.

    loss: nats per trained token. tokens_per_s: counts all tokens. grad_norm (before clipping) and lr: of the last step.
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

    The gradient of a step is summed over the trained tokens of all micro-batches (and ranks) and divided once by their
    number, so it does not depend on how the rows are split.

    model: maps token ids [B, S], and the other entries of a batch as keyword arguments, to the input of loss_fn.
    optimizer_class: called as (parameters, lr=, weight_decay=, **optimizer_options) after the model is placed.
    loader: an iterable of micro-batches: token ids [B, S], (ids, labels), or a mapping with input_ids and labels. Given
    labels must already be shifted, and -100 is not trained; without labels, the next tokens are the labels.
    device: default: this process's GPU if there is one, else the CPU.
    context_length: the longest accepted row; default: no limit. A row without labels may have one id more, the label
    of its last position.
    grad_accum_steps: micro-batches per optimizer step; the last step of an epoch takes the remaining ones.
    learning_rate: a number, or a function of the optimizer step, counted from 1, such as `xorl.core.optim.Schedule`.
    grad_clip_norm: the maximum gradient norm over all parameters; None and 0 disable clipping.
    mixed_precision_policy: "bf16" runs the model under torch.autocast: fp32 parameters, matrix products in bf16.
    loss_fn: (model output, labels [B, S]) -> the SUM of the loss over the labels that are not -100.

    Attributes: `step` counts optimizer steps; `model` is the given module, placed in-place; `optimizer` is the instance
    of optimizer_class.
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
        if grad_clip_norm is not None and not grad_clip_norm >= 0:
            raise ValueError(f"grad_clip_norm must be above 0, or 0 or None for no limit, not {grad_clip_norm}")
        if isinstance(optimizer_class, torch.optim.Optimizer):
            raise ValueError(
                "optimizer_class must be a class such as torch.optim.AdamW: it is created after model placement"
            )
        self.num_ranks = self._count_ranks()
        require_sharding(loader, self.num_ranks)
        _check_model(model, mixed_precision_policy)
        self.loader = loader
        self.device = _device(device)
        self.step = 0
        self.model = model
        self._mesh: Mesh | None = None
        self._forward = self._place(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._lr = learning_rate if callable(learning_rate) else None
        first_lr = _rate(learning_rate, 1)
        options = dict(optimizer_options or {})
        self.optimizer = optimizer_class(self._parameters, lr=first_lr, weight_decay=weight_decay, **options)
        self._state = ModuleState(model, self.optimizer, self.device, group_scalars(self.optimizer))
        self._loss_fn = loss_fn
        self._context_length = context_length
        self._grad_accum_steps = grad_accum_steps
        self._grad_clip_norm = grad_clip_norm
        self._autocast = mixed_precision_policy == "bf16"
        self._epoch = 0
        self._batch = 0
        self._batches: Iterator[Batch] | None = None

    def train(self, epochs: int = 1, max_steps: int | None = None, log_interval: int = 50) -> list[StepMetrics]:
        """Train for `epochs` passes over the loader or `max_steps` optimizer steps, whichever ends first; collective.

        Both count from the start of the run, including earlier calls and the steps before a loaded checkpoint. Rank 0
        logs a record every `log_interval` steps and after the last one, to standard output if the program has not set
        up logging; every rank returns all records.
        Raises DivergedError on every rank, before the update, if the loss or the gradient is not finite.
        """
        if log_interval < 1:
            raise ValueError(f"log_interval must be at least 1, not {log_interval}")
        self._forward.train()
        _show_records()
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
        """Save model, optimizer, random states and the position in the data; collective. Returns the path written.

        FULL_STATE_DICT writes a single file, gathered on rank 0, and replaces an existing one. It can be read without
        xorl: `module.load_state_dict(torch.load(path, weights_only=True)["model"])`.
        SHARDED_STATE_DICT writes a new folder `{path}/global_step_{step}`, each rank its own shard, and the name of
        the newest to `{path}/latest`. A folder of that name from another run is an error.
        """
        if state_dict_type not in get_args(StateDictType):
            known = ", ".join(get_args(StateDictType))
            raise ValueError(f"state_dict_type {state_dict_type!r} is unknown; use one of {known}")
        progress = TrainerProgress(self.step, self._epoch, self._batch * rows_per_batch(self.loader, self.num_ranks))
        save = self._state.save_file if state_dict_type == "FULL_STATE_DICT" else self._state.save_shards
        return save(Path(path), progress)

    def load_checkpoint(self, path: str | Path) -> None:
        """Resume from a checkpoint of either kind, saved by any trainer on any number of ranks; collective.

        With the same loader options and number of ranks, the run continues as if uninterrupted. On another number of
        ranks, the same rows follow if batch_size x ranks divides the rows already read; dropout masks differ.
        """
        path = Path(path)
        progress = self._state.load_shards(path) if path.is_dir() else self._state.load_file(path)
        batch_rows = rows_per_batch(self.loader, self.num_ranks)
        if progress.rows % batch_rows:
            raise ValueError(
                f"{path} was saved after {progress.rows} rows of its epoch, which is not a multiple of {batch_rows} "
                "(batch_size x ranks): change the batch_size or the number of ranks"
            )
        if has_random_order(self.loader):
            logger.warning("loader: the order of a RandomSampler cannot be resumed; rows will be repeated or skipped")
        self.step, self._epoch, self._batch = progress.step, progress.epoch, progress.rows // batch_rows
        self._batches = None

    def _count_ranks(self) -> int:
        count = dist.get_world_size() if dist.is_initialized() else world_size()
        if count > 1:
            raise ValueError(f"Trainer trains in one process, but {count} are running; use DDPTrainer or FSDPTrainer")
        return 1

    def _place(self, model: nn.Module) -> nn.Module:
        """Move or wrap `model`, in place, and return the module to call for the forward pass.

        Sets `_mesh` if the model is placed on several ranks.
        """
        return model.to(self.device)

    def _accumulation(self, *, is_last: bool) -> AbstractContextManager[None]:
        """The context of a micro-batch's forward and backward pass."""
        return nullcontext()

    def _reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce `tensor` over all ranks, in place."""
        if self._mesh is not None:
            dist.all_reduce(tensor, op=op, group=self._mesh.loss.group)
        return tensor

    def _next_group(self, epochs: int) -> list[Batch]:
        """The micro-batches of the next step, equally many on every rank; [] after the last epoch. Collective."""
        while self._epoch < epochs:
            if self._batches is None:
                self._batches = batches_of_epoch(self.loader, self._epoch, self._batch)
            group = list(islice(self._batches, self._grad_accum_steps))
            # A stream may end one batch earlier on some rank, but every rank must take part in every reduction.
            smallest = self._reduce_(torch.tensor(len(group), device=self.device), dist.ReduceOp.MIN)
            group = group[: int(smallest)]
            self._batch += len(group)
            if group:
                return group
            if self._batch == 0:
                raise ValueError("loader: it yielded no batch; check that it has at least batch_size x ranks rows")
            self._epoch, self._batch, self._batches = self._epoch + 1, 0, None
        return []

    def _take_step(self, group: list[Batch]) -> tuple[float, float, float, float]:
        """Take one optimizer step; returns the summed loss, trained tokens, all tokens, and the gradient norm."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for index, batch in enumerate(group):
            with self._accumulation(is_last=index == len(group) - 1):
                sums += self._backward(batch, is_first=self.step == 0 and index == 0)
        self._reduce_(sums, dist.ReduceOp.SUM)
        # With cpu_offload, the gradients are in host memory.
        divisor = sums[1].clamp(min=1).to(self._parameters[0].device, torch.float32)
        norm = scale_and_clip_(self._parameters, divisor, self._grad_clip_norm)
        # An arbitrary optimizer cannot skip a step on the device, so the host has to wait for these four numbers.
        loss_sum, trained, tokens, grad_norm = torch.cat([sums, norm.to(sums).reshape(1)]).tolist()
        if not (math.isfinite(loss_sum) and math.isfinite(grad_norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise DivergedError(
                self.step + 1,
                f"the loss is {loss_sum / max(1.0, trained)} and the gradient norm {grad_norm}. "
                "The update was not applied. Lower learning_rate or check this step's data",
            )
        if not trained:
            raise ValueError(f"loader: no token of step {self.step + 1} is trained, because all labels are {IGNORE}")
        if self._lr is not None:
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = _rate(self._lr, self.step + 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss_sum, trained, tokens, grad_norm

    def _backward(self, batch: Batch, *, is_first: bool) -> Tensor:
        """Accumulate the gradient of a micro-batch; returns its loss, trained tokens and all tokens."""
        rows = read_batch(batch, self._context_length)
        if is_first:
            reject_unshifted_labels(rows)
        rows = rows.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            loss = self._loss_fn(self._forward(rows.input_ids, **rows.extras), rows.labels)
        _check_loss(loss)
        loss.backward()
        counts = torch.stack([(rows.labels != IGNORE).sum(), torch.tensor(rows.labels.numel(), device=self.device)])
        return torch.cat([loss.detach().double().reshape(1), counts.double()])

    def _record(self, window: _Window) -> StepMetrics:
        lr = float(self.optimizer.param_groups[0]["lr"])
        metrics = window.metrics(self.step, self._epoch, lr)
        if not dist.is_initialized() or dist.get_rank() == 0:
            logger.info(key_values(asdict(metrics)))
        return metrics


def _rate(learning_rate: float | Callable[[int], float], step: int) -> float:
    """The learning rate of a step. Raises ValueError if it is not a number."""
    rate: object = learning_rate(step) if callable(learning_rate) else learning_rate
    if isinstance(rate, bool) or not isinstance(rate, Real):
        got = f"{type(rate).__name__} {rate!r}" + f" in step {step}" * callable(learning_rate)
        raise ValueError(
            f"learning_rate: want a number, or a function from the step to a number, got {got}; for rates that change "
            "with the step, pass a function such as xorl.core.optim.Schedule or lambda step: rates[step - 1]"
        )
    return float(rate)


def _check_loss(loss: object) -> None:
    """Raise ValueError unless the result of a loss_fn is one number that has a gradient."""
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"loss_fn: want a tensor, got {type(loss).__name__} {loss!r}, which has no gradient; return the sum of the "
            "loss as a tensor, without .item() or float()"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn: want the sum of the loss over the trained labels, one number, got a tensor of "
            f"{list(loss.shape)}; return loss.sum(), or use reduction='sum'"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn: its result has no gradient, because it does not depend on the parameters; compute it from the "
            "model's output, without detach() or torch.no_grad()"
        )


def _show_records() -> None:
    """Write the records to standard output, line by line, unless the program has set up logging itself."""
    if logger.hasHandlers():
        return
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.setLevel(logging.INFO)


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
        raise ValueError("model: it is already wrapped for distributed training; pass the plain module")
    if any(name.startswith("_orig_mod.") for name, _ in model.named_parameters()):
        raise ValueError(
            "model: torch.compile(model) renames the parameters, so checkpoints would not fit the plain module; "
            "compile in place with model.compile()"
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("model: some tensors are on the meta device and have no values; create the model on the CPU")
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("model: no parameter requires a gradient, so there is nothing to train")
    if mixed_precision_policy == "bf16":
        for name, parameter in trained:
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"model: {name} is {parameter.dtype}, but mixed_precision_policy='bf16' needs fp32 parameters; "
                    "call model.float()"
                )
