"""Passes of a model on the meta device: what each layer computes, launches and keeps, without memory and in no time.

The layers, their kernels' operators and their recomputation are those of training, so a plan follows them without
knowing any. A few layers stand for all: the first, the last, and one of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from xorl.config import Config
from xorl.core.loss import cross_entropy
from xorl.core.mesh import ParallelDims
from xorl.core.models import Decoder
from xorl.core.models.decoder_config import LayerConfig
from xorl.core.nn import GatedMLP, LayerKernels
from xorl.core.nn.fp8 import Fp8Linear
from xorl.core.parallel.apply import convert_and_recompute_
from xorl.kernels.layout import RankGroup, SequenceLayout
from xorl.kernels.quant.fp8 import E4M3, as_on_a_gpu
from xorl.kernels.torch_private import storage_key
from xorl.train.architecture import Architecture
from xorl.train.data import padding_multiple
from xorl.train.layer_kernels import planned_layer_kernels
from xorl.train.model import parallel_policy, sketch_model
from xorl.train.plan.operations import Operation, Recorder
from xorl.train.recompute_choice import held_by_graphs, lora_of_few_layers
from xorl.train.rows import part_among
from xorl.train.step_memory import PassProfile, Phase, profile_pass, profiled_param_dtype


@dataclass(frozen=True)
class Cost:
    """A phase of a pass: its memory, and its operations."""

    memory: Phase
    operations: Sequence[Operation]


NOTHING = Cost(Phase(0.0, 0.0, 0.0), ())


@dataclass(frozen=True)
class ModelPass:
    """A forward and backward pass of one micro-batch on one rank, by phases; layers by their number in the model."""

    embedding: Cost
    forward: tuple[Cost, ...]
    head: Cost
    backward: tuple[Cost, ...]
    rest: Cost

    def profile(self, layer: int) -> PassProfile:
        """As `pass_peak` takes it: every layer as `layer` is."""
        forward, backward = self.forward[layer].memory, self.backward[layer].memory
        return PassProfile(
            self.embedding.memory,
            (forward,) * len(self.forward),
            self.head.memory,
            (backward,) * len(self.forward),
            self.rest.memory,
        )


class Passes:
    """The passes of a model for configurations that differ in layout and recomputation; each is made once.

    Args:
        longest: tokens of a document, of which rows are full.
    """

    def __init__(self, architecture: Architecture, longest: int) -> None:
        self._architecture = architecture
        self._longest = longest
        self._made: dict[object, ModelPass] = {}

    def of(self, config: Config, dims: ParallelDims) -> ModelPass:
        """The pass of a rank. Recomputation is that of the options, in all layers."""
        train = config.train
        key = (
            train.micro_batch_size,
            *(dims.ring, dims.ulysses, dims.tp, dims.ep),
            train.enable_gradient_checkpointing and (train.recompute_policy, tuple(train.recompute_modules or ())),
            train.enable_activation_offload,
            profiled_param_dtype(config),
        )
        if key not in self._made:
            self._made[key] = self._make(config, dims)
        return self._made[key]

    def _make(self, config: Config, dims: ParallelDims) -> ModelPass:
        layers = self._architecture.config.layers
        chosen = representatives(layers)
        part = replace(
            self._architecture, config=replace(self._architecture.config, layers=tuple(layers[i] for i in chosen))
        )
        lengths = lengths_of(config, self._longest)
        recorder, profile = record_pass(part, config, dims, lengths)
        number = len(chosen)
        phases = recorder.phases[1:-1]  # before the pass, and after it, nothing
        # As in the profile: the backward pass does not reach frozen layers below the first trained one.
        phases[-1:-1] = [[]] * (2 * number + 3 - len(phases))
        costs = [Cost(memory, operations) for memory, operations in zip(_in_order(profile), phases, strict=True)]
        forward, backward = costs[1 : number + 1], costs[number + 2 : 2 * number + 2][::-1]
        if config.train.enable_activation_offload:
            forward, backward = ([_offloaded(cost) for cost in each] for each in (forward, backward))
        places = [_place(index, layers, chosen) for index in range(len(layers))]
        return ModelPass(
            costs[0],
            tuple(forward[place] for place in places),
            costs[number + 1],
            tuple(backward[place] for place in places),
            costs[2 * number + 2],
        )


def representatives(layers: Sequence[LayerConfig]) -> list[int]:
    """The numbers of the layers that stand for all: the first, the last, and one in between of each kind."""
    inner = range(1, len(layers) - 1)
    kinds = {layers[index]: index for index in reversed(inner)}
    return sorted({0, len(layers) - 1, *kinds.values()})


def _place(index: int, layers: Sequence[LayerConfig], chosen: Sequence[int]) -> int:
    """The index in `chosen` of the layer that stands for layer `index`."""
    if index in chosen:
        return chosen.index(index)
    return next(place for place, each in enumerate(chosen) if place and layers[each] == layers[index])


def _in_order(profile: PassProfile) -> list[Phase]:
    return [profile.embedding, *profile.forward, profile.head, *profile.backward[::-1], profile.rest]


def _offloaded(cost: Cost) -> Cost:
    """The cost of a layer whose activations are kept on the host."""
    return replace(cost, memory=replace(cost.memory, kept=0.0))


def lengths_of(config: Config, longest: int) -> list[int]:
    """The documents of a micro-batch's row: as long as possible, and one of what is left."""
    data, multiple = config.data, padding_multiple(config)
    tokens = config.train.micro_batch_size * data.sample_packing_sequence_len
    num_tokens = -(-tokens // multiple) * multiple
    longest = min(longest, data.sample_packing_sequence_len)
    full, left = divmod(num_tokens, longest)
    return [longest] * full + [left] * (left > 0)


def record_pass(
    part: Architecture, config: Config, dims: ParallelDims, lengths: Sequence[int], kernels: LayerKernels | None = None
) -> tuple[Recorder, PassProfile]:
    """A pass of all layers of `part` on a rank of the layout, on the meta device.

    lengths: of the documents of a row. kernels: those of a GPU unless given.
    """
    # A few layers cannot be divided into stages.
    train = config.train.model_copy(
        update={"param_dtype": profiled_param_dtype(config), "pipeline_parallel_size": 1, "recompute_num_layers": None}
    )
    lora = lora_of_few_layers(config.lora, part)
    kernels = kernels or planned_layer_kernels(config.model, train, tp=dims.tp, ep=dims.ep)
    module = sketch_model(part, config.model, train, lora, kernels=kernels)
    convert_and_recompute_(module, replace(parallel_policy(config.model, train), activation_offload_limit=None), "cuda")
    sizes = {"ring": dims.ring, "ulysses": dims.ulysses, "tp": dims.tp, "ep": dims.ep}
    ring, ulysses, tp = (RankGroup(0, sizes[name], name) for name in ("ring", "ulysses", "tp"))
    layout = part_among(SequenceLayout.from_lengths(lengths), ring, ulysses, tp, ("context", "rows"))
    if dims.ep > 1:
        rows = layout.rows.among(layout.rows.num_tokens)
        layout = rows if layout.rows is layout else layout.with_rows(rows)
    recorder = Recorder(lengths, sizes | {"context": dims.ulysses})
    layout = layout.to("meta")
    _add_fp8_weights_(module)
    ids = torch.empty(layout.num_tokens, dtype=torch.int64, device="meta")

    def run() -> None:
        output = module(ids, layout, loss=lambda hidden, head: cross_entropy(hidden, head, {"labels": ids}))
        recorder.repeats_compiled = train.enable_compile
        output.sum.backward()

    with as_on_a_gpu(), _compiled_(module) if train.enable_compile else nullcontext(), recorder:
        profile = profile_pass(module, run, recorder)
    return recorder, profile.holding(held_by_graphs(module, layout.rows.num_tokens))


@contextmanager
def _compiled_(module: nn.Module) -> Iterator[None]:
    """Keep of gated blocks what compiled code keeps: the next layer's input is computed again in the backward pass."""
    results: dict[int, StorageWeakRef] = {}

    def marked(gated: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        result = gated(x)
        results[storage_key(result)] = StorageWeakRef(result.untyped_storage())
        return result

    def pack(saved: Tensor) -> Tensor | torch.Size:
        made = results.get(storage_key(saved))
        # The memory of one that is gone may be that of another tensor now.
        return saved if made is None or made.expired() else saved.shape

    dtype = torch.float32

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        return kept if isinstance(kept, Tensor) else torch.empty(kept, dtype=dtype, device="meta")

    for each in module.modules():
        if isinstance(each, GatedMLP):
            each.gated = partial(marked, each.gated)
    if isinstance(module, Decoder):
        dtype = module.compute_dtype
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _add_fp8_weights_(module: nn.Module) -> None:
    """Give layers in fp8 the copies of their weights that a step computes."""
    for each in module.modules():
        if isinstance(each, Fp8Linear) and each.recipe == "tensorwise":
            each.weight_fp8 = torch.empty(each.weight.shape, dtype=E4M3, device="meta")
            each.weight_descale = torch.empty((), device="meta")
