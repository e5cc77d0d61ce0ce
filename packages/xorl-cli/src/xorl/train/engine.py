"""Engine: forward, backward and optimizer step, for the training loop as well as the service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xorl.ckpt import OptimizerState, Stateful
from xorl.core.loss import LossFn, LossOutput
from xorl.core.models import Decoder
from xorl.core.models.image_config import ImageInput
from xorl.core.models.router_losses import RouterLosses, RouterSums
from xorl.core.optim import Fp32Accumulation, gradient_norms, gradient_scale
from xorl.core.parallel import ParallelModel
from xorl.core.parallel.executor import Executor, Tensors
from xorl.core.parallel.exposed import record_waits
from xorl.core.parallel.schedule import Schedule
from xorl.data import PackedBatch
from xorl.data.batch import LABELS, PREFERENCE, trained_tokens
from xorl.data.images import Images
from xorl.kernels.copies import copy_to
from xorl.kernels.layout import SequenceLayout
from xorl.lora import Adam
from xorl.train.divided import DividedState
from xorl.train.observe.timing import StepTimer
from xorl.train.rows import among_ranks, part_of

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
        """What `optim_step` divides the gradient by; NaN, which skips the update, if the loss is not finite."""
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
        options = {"betas": adam.betas, "eps": adam.eps, "weight_decay": adam.weight_decay}
        for group in self.optimizer.param_groups:
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
        norms = gradient_norms(list(by_kind.values()), self._divided, self._stages)
        return dict(zip(by_kind, norms.unbind(), strict=True))

    def _step(
        self, lr: float, divisor: Tensor | float, max_grad_norm: float | None, norm: Tensor | None = None
    ) -> Update:
        norm, scale = gradient_scale(
            self._parameters, divisor, max_grad_norm, norm, divided=self._divided, stages=self._stages
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


class ModelPasses:
    """The passes of a model for the micro-batches of a call, for `Executor.run`.

    Args:
        call: (index of a micro-batch, what the stage before sent, chunk) -> the result of the model.
        take: called after each forward pass, with the index of the micro-batch; the loss, of the last chunk; and, of a
            mixture of experts, the values of `RouterSums` by document.
        accumulation: of the trained parameters.
        prepare: called with the index of the micro-batch before its forward pass, and again before its backward pass
            if there are others in between.
    """

    def __init__(
        self,
        model: ParallelModel,
        timer: StepTimer,
        batches: Sequence[PackedBatch],
        call: Callable[[int, Tensors, int], LossOutput | Tensors],
        take: Callable[[int, LossOutput | None, Tensor | None], None],
        accumulation: Fp32Accumulation,
        prepare: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._model, self._timer, self._batches = model, timer, batches
        self._call, self._take, self._prepare = call, take, prepare
        self._accumulation = accumulation

    def received(self, index: int, chunk: int) -> Tensors:
        """Empty tensors for what the stage before sends."""
        return received_of(self._model, self._batches[index], chunk)

    def forward(self, index: int, chunk: int, received: Tensors) -> Tensors:
        """What the next stage receives; of the last one, the loss."""
        self._prepare(index)
        set_aside = self._accumulation.micro_batch() if self._model.has_buckets else nullcontext()
        with set_aside, self._model.accumulation(is_last=self._is_last(index)):
            result = self._call(index, received, chunk)
        self._timer.mark("forward")
        routers = routers_of(self._model)
        by_document = None if routers is None else routers.take()
        if isinstance(result, LossOutput):
            self._take(index, result, by_document)
            return (result.sum,)
        self._take(index, None, by_document)
        return result

    def backward(self, index: int, chunk: int, outputs: Tensors, gradients: Tensors | None) -> None:
        """Compute gradients; none if the stages up to this one have nothing to train."""
        if self._model.mesh.dims.pp > 1:  # other passes may have been computed in between
            self._prepare(index)
        given = (None,) * len(outputs) if gradients is None else gradients
        # The loss is an error if nothing is trained.
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, given, strict=True)
            if output.requires_grad or gradients is None
        ]
        with self._accumulation.micro_batch(), self._model.accumulation(is_last=self._is_last(index)):
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
            self._timer.end_wait()
        self._timer.mark("backward")

    def waited(self) -> None:
        """Assign the time since the last pass to the pipeline."""
        self._timer.mark("pipeline")

    def _is_last(self, index: int) -> bool:
        return index == len(self._batches) - 1


def executor_of(model: ParallelModel, schedule: Schedule = "1F1B") -> Executor:
    """What runs the passes of a model on this rank."""
    num_chunks = len(model.module.stage.chunks) if isinstance(model.module, Decoder) else 1
    return Executor(schedule, model.mesh.stage, model.mesh.dims.pp, num_chunks, model.mesh.links)


def received_of(model: ParallelModel, batch: PackedBatch, chunk: int) -> Tensors:
    """Empty tensors for what the stage before sends of a micro-batch."""
    module = model.module
    if not isinstance(module, Decoder):
        return ()
    num_tokens = len(batch.input_ids) // model.mesh.rows.size
    shapes = module.received(num_tokens, len(batch.lengths), chunk)
    dtypes = (module.compute_dtype, torch.float32)
    device = torch.device(model.mesh.device_type)
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=False))


def forward_through(
    executor: Executor, model: ParallelModel, batch: PackedBatch, call: Callable[[Tensors, int], LossOutput | Tensors]
) -> LossOutput | None:
    """The loss of one micro-batch; None on stages before the last. call: as for `ModelPasses`, of this micro-batch."""
    output: LossOutput | None = None

    def forward(chunk: int, received: Tensors) -> Tensors:
        nonlocal output
        result = call(received, chunk)
        if not isinstance(result, LossOutput):
            return result
        output = result
        return ()

    executor.forward(partial(received_of, model, batch), forward)
    return output


def call_model(
    model: ParallelModel,
    batch: PackedBatch,
    loss_fn: LossFn,
    device: torch.device,
    received: Tensors = (),
    chunk: int = 0,
) -> LossOutput | Tensors:
    """The loss of one micro-batch on this rank; differentiable if gradients are enabled.

    Ranks that share rows pass the whole batch, and each computes the loss of its own tokens. A stage of a pipeline that
    is not the last one returns what the next one receives; see `Decoder.forward` for `received` and `chunk`.
    """
    batch = batch.to(device, non_blocking=True)
    is_padded = batch.num_tokens < len(batch.input_ids)
    layout = SequenceLayout(
        batch.cu_seqlens,
        batch.positions,
        batch.lengths,
        num_real=batch.cu_seqlens[-2 if is_padded else -1],
        num_trained=None if routers_of(model) is None else terms_by_document(batch),
    )
    layout = part_of(layout, model.mesh)
    if model.gathers_tokens:
        layout = among_ranks(layout, model.mesh)
    targets = {name: layout.local(values) for name, values in {LABELS: batch.labels, **batch.targets}.items()}
    input_ids = layout.local(batch.input_ids)
    # Other modules than decoders take no further inputs.
    options: dict[str, object] = {name: layout.local(values) for name, values in batch.inputs.items()}
    if batch.images is not None:
        options["images"] = image_input(batch.images, layout, model.module, device)
    if model.mesh.dims.pp > 1:
        options |= {"received": received, "chunk": chunk}
    return model.forward(input_ids, layout, loss=lambda hidden, head: loss_fn(hidden, head, targets, layout), **options)


def image_input(images: Images, layout: SequenceLayout, module: nn.Module, device: torch.device) -> ImageInput:
    """The images of a row for the model; `layout` is of this rank's part of it, whose places alone are named."""
    # On the host, so that nobody has to wait for the device.
    of_tokens = layout.local(images.features)
    if isinstance(module, Decoder):
        of_tokens = module.ranks.local(of_tokens)
    places = torch.nonzero(of_tokens >= 0)[:, 0]
    features = of_tokens[places]
    return ImageInput(
        images.patches, images.grids, copy_to(device, places), copy_to(device, features), images.mean, images.std
    )


def routers_of(model: ParallelModel) -> RouterLosses | None:
    """The losses and statistics of a mixture of experts; None for other models."""
    return model.module.routers if isinstance(model.module, Decoder) else None


def terms_by_document(batch: PackedBatch) -> Tensor:
    """[N], how many of the terms that the loss is the mean over each document has: trained tokens, or half a pair."""
    if (side := batch.targets.get(PREFERENCE)) is not None:
        return side[batch.cu_seqlens[:-1].long()].abs() / 2
    is_trained = trained_tokens(batch.labels, batch.targets)
    before = torch.cat([batch.labels.new_zeros(1), is_trained.cumsum(0)])
    return before[batch.cu_seqlens.long()].diff()


def to_device(numbers: Sequence[float] | Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """Numbers as fp64 on the device, copied without making the host wait."""
    # A copy from pageable memory would make the host wait for all work queued before it.
    values = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return values.to(device, non_blocking=True)
