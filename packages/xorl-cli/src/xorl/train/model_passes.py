"""The passes of a model over its micro-batches: what `Engine` and `BankEngine` give to an `Executor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from xorl.core.loss import LossFn, LossOutput
from xorl.core.models import Decoder
from xorl.core.models.image_config import ImageInput
from xorl.core.models.router_losses import RouterLosses
from xorl.core.optim import Fp32Accumulation
from xorl.core.parallel import ParallelModel
from xorl.core.parallel.executor import Executor, Tensors
from xorl.core.parallel.schedule import Schedule
from xorl.data import PackedBatch
from xorl.data.batch import LABELS, PREFERENCE, trained_tokens
from xorl.data.images import Images
from xorl.kernels.copies import copy_to
from xorl.kernels.layout import SequenceLayout
from xorl.train.observe.timing import StepTimer
from xorl.train.rows import among_ranks, part_of


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
        """The tensors for the next stage; of the last one, the loss."""
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
    """The executor of a model's passes on this rank."""
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
    # On the host, which then need not wait for the device.
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
