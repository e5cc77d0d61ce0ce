"""Engine: forward, backward and optimizer step, for the training loop as well as the service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xorl.ckpt import OptimizerState, Stateful
from xorl.core.loss import LossFn, LossOutput
from xorl.core.models import Decoder
from xorl.core.models.router_losses import RouterLosses, RouterSums
from xorl.core.optim import Fp32Accumulation, gradient_norms, gradient_scale
from xorl.core.parallel import ParallelModel
from xorl.core.parallel.executor import Tensors
from xorl.core.parallel.exposed import record_waits
from xorl.core.parallel.schedule import Schedule
from xorl.data import PackedBatch
from xorl.lora import Adam
from xorl.train.divided import DividedState
from xorl.train.model_passes import ModelPasses, call_model, executor_of, forward_through, routers_of
from xorl.train.observe.timing import StepTimer

OnOutput = Callable[[int, LossOutput], None]
"""(index of a micro-batch of this rank, its loss output, on the device) -> None. If ranks share rows, the output is of
this rank's part of the row."""


# The fields of `StepLosses` without those of routers.
NUM_SUMS = 5


@dataclass(frozen=True)
class StepLosses:
    """Sums over the tokens of all micro-batches and all ranks: fp64 scalars on the device, not yet read back.

    num_terms: what the loss is the mean over: the pairs if the rows are pairs of answers, else the trained tokens.
    routers: of a mixture of experts; None for other models.
    """

    loss_sum: Tensor
    num_terms: Tensor
    num_trained_tokens: Tensor
    num_tokens: Tensor
    flops: Tensor
    routers: RouterSums | None = None

    @property
    def divisor(self) -> Tensor:
        """The divisor of the gradient for `optim_step`; NaN, which skips the update, if the loss is not finite."""
        return torch.where(torch.isfinite(self.loss_sum), self.num_terms.clamp(min=1), torch.nan)

    @property
    def sums(self) -> Tensor:
        """The fields without those of routers, [NUM_SUMS]."""
        return torch.stack([self.loss_sum, self.num_terms, self.num_trained_tokens, self.num_tokens, self.flops])

    @classmethod
    def of(cls, sums: Tensor, routers: RouterLosses | None = None) -> StepLosses:
        """From all sums as one tensor: the fields in order and, with `routers`, those of the routers."""
        of_routers = None if routers is None else RouterSums(sums[NUM_SUMS:], routers.num_experts)
        return cls(*sums[:NUM_SUMS].unbind(), routers=of_routers)


@dataclass(frozen=True)
class Update:
    """The result of an optimizer step: scalars on the device, the same on every rank.

    grad_norm: of the divided gradient, before clipping. skipped: 1 if it was not finite, so that nothing changed.
    norms: of the undivided gradient by kind of layer, if requested.
    """

    grad_norm: Tensor
    skipped: Tensor
    norms: Mapping[str, Tensor] = field(default_factory=dict)


class ModelState:
    """A module's parameters and persistent buffers by name, sharded as they are, for checkpoints.

    `trained_only` leaves out frozen parameters.
    """

    def __init__(self, module: nn.Module, *, trained_only: bool = False) -> None:
        frozen = {name for name, parameter in module.named_parameters() if trained_only and not parameter.requires_grad}
        self._tensors = {name: tensor.detach() for name, tensor in module.state_dict().items() if name not in frozen}

    def state_dict(self) -> dict[str, Tensor]:
        """Views of the live tensors: loading into them in place loads the model."""
        return self._tensors

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` into the module; tensors that were loaded in place are skipped."""
        for name, tensor in self._tensors.items():
            if state[name] is not tensor:
                tensor.copy_(state[name])


class Engine:
    """A parallelized model and its optimizer, made by `build_optimizer` so that it scales gradients on the device.

    Gradients are sums over all tokens since the last `optim_step`, independent of how these are split into calls,
    micro-batches and ranks; only `optim_step` divides them. `timer` measures the phases of a step.

    Args:
        flops: lengths of documents -> floating-point operations to train on them.
        image_flops: grids of images -> those to encode them.
        schedule: the order of passes in a pipeline.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        max_grad_norm: float | None,
        flops: Callable[[Sequence[int]], float],
        image_flops: Callable[[Sequence[tuple[int, int]]], float] = lambda _: 0.0,
        schedule: Schedule = "1F1B",
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self._max_grad_norm = max_grad_norm
        self._flops, self._image_flops = flops, image_flops
        self.timer = StepTimer(device)
        record_waits(model, self.timer)
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._divided = model.shares.divided(model.module)
        self._stages = model.mesh.pp.group if model.mesh.pp.size > 1 else None
        # Frozen parameters show it too, on a stage of a pipeline that trains none. With offloading, it is the host.
        self._gradients_on = next((p.device for p in model.module.parameters()), device)
        self._accumulation = Fp32Accumulation(self._parameters)
        self._executor = executor_of(model, schedule)

    def forward_backward(
        self, batches: Iterable[PackedBatch], loss_fn: LossFn, on_output: OnOutput | None = None
    ) -> StepLosses:
        """Add the gradient of the loss, summed over the tokens of `batches` on all ranks.

        Collective: every rank must pass the same number of micro-batches. `on_output` is called for each micro-batch
        between its forward and its backward pass.
        """
        self.model.train()
        pending = list(batches)
        routers = routers_of(self.model)
        self.timer.start()
        self.model.drop_replicated_gradients()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        routing = torch.zeros(0 if routers is None else routers.num_sums, dtype=torch.float64, device=self.device)

        def take(index: int, output: LossOutput | None, by_document: Tensor | None) -> None:
            nonlocal loss_sum, routing
            if by_document is not None:
                routing += by_document.sum(0)
            if output is not None:
                loss_sum += output.sum.detach()
                if on_output is not None:
                    on_output(index, output)

        def call(index: int, received: Tensors, chunk: int) -> LossOutput | Tensors:
            return self._call(pending[index], loss_fn, received, chunk)

        passes = ModelPasses(self.model, self.timer, pending, call, take, self._accumulation)
        self._executor.run(len(pending), passes)
        sums = torch.cat([loss_sum.reshape(1), self._counts(pending), routing])
        dist.all_reduce(sums, group=self.model.mesh.losses.group)
        self.timer.mark("comm")
        return StepLosses.of(sums, routers)

    @torch.no_grad()
    def forward(self, batch: PackedBatch, loss_fn: LossFn) -> LossOutput | None:
        """The loss of one micro-batch on this rank, without gradients; None on stages of a pipeline before the last.

        Collective where parameters are sharded, and among the stages.
        """
        self.model.train(False)
        return forward_through(self._executor, self.model, batch, partial(self._call, batch, loss_fn))

    def optim_step(self, lr: float, divisor: Tensor | float) -> Update:
        """Divide the accumulated gradient by `divisor`, clip it, take an optimizer step, and clear the gradient.

        lr is the schedule's learning rate; each parameter group multiplies it by its own scale. If the gradient is not
        finite, the step is skipped; the optimizer reads that flag on the device, so the host need not wait.
        """
        self.model.shares.sum_gradients(self.model.module)
        return self._step(lr, divisor, self._max_grad_norm)

    def optim_step_with(
        self,
        adam: Adam,
        divisor: Tensor | float,
        max_grad_norm: float | None,
        kind_of: Callable[[str], str] | None = None,
    ) -> Update:
        """`optim_step` with hyperparameters for this step alone. A `max_grad_norm` of None does not clip.

        The optimizer uses the hyperparameters of `adam` that it has; all have lr and weight_decay. `kind_of` (name of a
        parameter -> kind of layer), if given, requests gradient norms by kind of layer.
        """
        for group in self.optimizer.param_groups:
            decay = adam.weight_decay if group["decays"] else 0.0
            options = {"betas": adam.betas, "eps": adam.eps, "weight_decay": decay}
            group.update({key: value for key, value in options.items() if key in group})
        self.model.shares.sum_gradients(self.model.module)
        norms = {} if kind_of is None else self._norms(kind_of)
        total = torch.stack([*norms.values()]).square().sum().sqrt() if norms else None
        update = self._step(adam.lr, divisor, max_grad_norm, total)
        return Update(update.grad_norm, update.skipped, norms)

    def correct_routers(self, losses: StepLosses, update: Update) -> None:
        """After `optim_step`: change the corrections of routers that have any, if the options of routers ask for it."""
        routers = routers_of(self.model)
        if losses.routers is not None and routers is not None and routers.options.correction_rate:
            assert isinstance(self.model.module, Decoder), "other models have no routers"
            self.model.module.correct_routers(losses.routers, skipped=update.skipped)

    def zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """Around `forward_backward`: if it raises, restore the earlier gradients and make the model usable again.

        This costs a copy of the gradients, so it is for callers that cannot restart. Every rank must fail or none:
        otherwise the others would wait in a collective.
        """
        earlier = [None if p.grad is None else p.grad.detach().clone() for p in self._parameters]
        try:
            yield
        except BaseException:
            self.model.recover()
            for parameter, gradient in zip(self._parameters, earlier, strict=True):
                parameter.grad = None
                if parameter.dtype != torch.float32:
                    # Several micro-batches accumulate in fp32 (`Fp32Accumulation`); one keeps the parameter's dtype.
                    parameter.grad_dtype = parameter.dtype if gradient is None else gradient.dtype
                parameter.grad = gradient
            raise

    def _norms(self, kind_of: Callable[[str], str]) -> dict[str, Tensor]:
        """Collective where parameters are sharded."""
        # The stages of a pipeline have parameters of different kinds.
        by_kind: dict[str, list[Tensor]] = {kind_of(name): [] for name in self.model.trained_names}
        for name, parameter in self.model.module.named_parameters():
            if parameter.requires_grad:
                by_kind[kind_of(name)].append(parameter)
        norms = gradient_norms(list(by_kind.values()), self._divided, self._stages, self._gradients_on)
        return dict(zip(by_kind, norms.unbind(), strict=True))

    def _step(
        self, lr: float, divisor: Tensor | float, max_grad_norm: float | None, norm: Tensor | None = None
    ) -> Update:
        norm, scale = gradient_scale(
            self._parameters,
            divisor,
            max_grad_norm,
            norm,
            divided=self._divided,
            stages=self._stages,
            device=self._gradients_on,
        )
        skipped = (~torch.isfinite(norm)).float()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        # The attributes that torch's gradient scaler sets: the optimizer scales gradients as it reads them, which saves
        # a pass over them.
        self.optimizer.grad_scale = scale  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.found_inf = skipped  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()
        self.model.drop_gathered()
        self.optimizer.zero_grad(set_to_none=True)
        self.timer.mark("optimizer")
        # The norm of gradients in host memory is there as well.
        return Update(norm.to(self.device), skipped.to(self.device))

    def state(self, *, trained_only: bool = False) -> dict[str, Stateful]:
        """The parts of a checkpoint, by name; `trained_only` leaves out frozen parameters."""
        module, shares = self.model.module, self.model.shares
        state: dict[str, Stateful] = {
            "model": ModelState(module, trained_only=trained_only),  # first: it frees gathered parameters
            "optimizer": OptimizerState(self.optimizer, module.named_parameters()),
        }
        return {name: DividedState(one, shares) for name, one in state.items()} if shares else state

    def _call(
        self, batch: PackedBatch, loss_fn: LossFn, received: Tensors = (), chunk: int = 0
    ) -> LossOutput | Tensors:
        return call_model(self.model, batch, loss_fn, self.device, received, chunk)

    def _counts(self, batches: Sequence[PackedBatch]) -> Tensor:
        """Terms of the loss, trained tokens, tokens and FLOPs of this rank's micro-batches, on the device.

        If ranks share rows, only the first of them counts, and of a pipeline the last stage.
        """
        if self.model.mesh.context.rank > 0 or self.model.mesh.pp.rank > 0:
            batches = []
        terms = sum(batch.num_terms for batch in batches)
        trained = sum(batch.num_trained_tokens for batch in batches)
        tokens = sum(batch.num_tokens for batch in batches)
        flops = sum(self._flops(batch.document_lengths) for batch in batches)
        images = [batch.images for batch in batches if batch.images is not None and batch.images.num_images]
        flops += sum(self._image_flops(each.grids) for each in images)
        return to_device([terms, trained, tokens, flops], self.device)


def to_device(numbers: Sequence[float] | Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """Numbers as fp64 on the device, copied without making the host wait."""
    # A copy from pageable memory would make the host wait for all work queued before it.
    values = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return values.to(device, non_blocking=True)
