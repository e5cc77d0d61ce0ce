"""Estimates the memory and the time of a step in one layout, from the passes of its layers and the rates of a card.

Times are those of the slowest rank, in seconds. A GPU and its host work at the same time, so a micro-batch takes as
long as the slower of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from xorl.config import Config
from xorl.config.preference import WITH_REFERENCE
from xorl.core.mesh import ParallelDims
from xorl.core.models.stages import Stage
from xorl.core.nn.all_gather import sent_share
from xorl.core.nn.moe import Experts
from xorl.core.optim.newton_schulz import orthogonalisation_flops
from xorl.core.parallel.copy_engine import WINDOW_BYTES
from xorl.core.parallel.schedule import actions, idle_share
from xorl.train.architecture import Architecture
from xorl.train.layer_kernels import dispatch_name, num_active
from xorl.train.model import DTYPES, KeptDtypes, pipeline_stages, sketch_model
from xorl.train.parallel_sizes import chunks_of
from xorl.train.plan.passes import NOTHING, Cost, ModelPass, Passes
from xorl.train.plan.rates import GIB, Rates
from xorl.train.plan.work import Work, work_of
from xorl.train.recompute_choice import USABLE
from xorl.train.step_memory import (
    IN_FLIGHT,
    NO_SIZE,
    NUM_STATES,
    Sizes,
    gathered_itemsizes,
    held_of,
    pass_peak,
    ring_bytes,
    sketch_of,
)

# Of a device, for CUDA's context and loaded kernels.
CONTEXT_BYTES = 0.6 * GIB
# Of Muon's three products, two are symmetric, and only a triangle of them is computed.
COMPUTED_SHARE = 2 / 3
# Operations that the host launches for a layer in CUDA graphs: two graphs, copies, and sums of gradients.
GRAPH_LAUNCHES = 15
# Seconds of the host for each parameter of a unit: FSDP2 lists on the host where blocks of its gradients go.
LISTING_S = 1e-11
# The time of a backward pass, in forward passes.
BACKWARD = 2.0


@dataclass(frozen=True)
class Estimate:
    """The step of a layout, on the rank that takes longest and the rank that needs most.

    seconds: of a step, by what takes them; they add up to it. memory: bytes on the device, by what needs them; they add
    up to the peak. usable: bytes that a step may take. bound: the peak if gradients on their way were there throughout,
    as `recompute_policy: auto` assumes.
    """

    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    usable: float
    bound: float

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak(self) -> float:
        """Bytes at the peak of a step."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable


class _Part(NamedTuple):
    """The work of one rank in a step. chunks_s: of both passes of a micro-batch, for each chunk of layers."""

    seconds: dict[str, float]
    chunks_s: list[float]
    memory: dict[str, float]
    beyond: float

    @property
    def busy_s(self) -> float:
        return sum(self.seconds.values())


class Estimator:
    """Estimates layouts of one model on one kind of card.

    Args:
        longest: tokens of a document, of which rows are full.
    """

    def __init__(self, architecture: Architecture, rates: Rates, longest: int) -> None:
        self._architecture = architecture
        self._rates = rates
        self._passes = Passes(architecture, longest)
        self._sizes: dict[object, _HeldSizes] = {}
        self._works: dict[object, tuple[Cost, Work]] = {}

    @property
    def usable(self) -> float:
        """Bytes of a device that a step may take."""
        return USABLE * (self._rates.memory_gib * GIB - CONTEXT_BYTES)

    def estimate(self, config: Config, dims: ParallelDims) -> Estimate:
        """The step of `config`, whose recomputation is not `auto`, in a layout."""
        whole = Stage((range(self._architecture.config.num_layers),))
        stages = pipeline_stages(config, self._architecture) if dims.pp > 1 else [whole]
        model_pass = self._layers(config, dims)
        parts = [self._part(config, dims, stages, number, model_pass) for number in range(len(stages))]
        slowest = max(parts, key=lambda part: part.busy_s)
        seconds = dict(slowest.seconds)
        if dims.pp > 1:
            count, schedule = config.train.gradient_accumulation_steps, config.train.pipeline_parallel_schedule
            costs = [[chunk / (1 + BACKWARD) for chunk in part.chunks_s] for part in parts]
            idle = idle_share(schedule, costs, count, backward=BACKWARD)
            passes = [count * sum(part.chunks_s) for part in parts]
            waiting = sum(passes) / len(parts) / (1 - idle) - max(passes)
            seconds["pipeline"] = max(waiting, 0.0)
        largest = max(parts, key=lambda part: sum(part.memory.values()))
        shown = {name: value for name, value in seconds.items() if value}
        return Estimate(shown, largest.memory, self.usable, sum(largest.memory.values()) + largest.beyond)

    def _layers(self, config: Config, dims: ParallelDims) -> ModelPass:
        """The pass with recomputation in as many layers as the options say."""
        train = config.train
        made = self._passes.of(config, dims)
        count = train.recompute_num_layers
        if count is None or not train.enable_gradient_checkpointing:
            return made
        without = train.model_copy(update={"enable_gradient_checkpointing": False, "recompute_policy": "module"})
        kept = self._passes.of(config.model_copy(update={"train": without}), dims)
        return replace(
            made,
            forward=(*made.forward[:count], *kept.forward[count:]),
            backward=(*made.backward[:count], *kept.backward[count:]),
        )

    def _part(
        self, config: Config, dims: ParallelDims, stages: Sequence[Stage], number: int, model_pass: ModelPass
    ) -> _Part:
        train, stage = config.train, stages[number]
        embedding = model_pass.embedding if stage.is_first else NOTHING
        head = model_pass.head if stage.is_last else NOTHING
        layers = _layers_of(stage)
        reference = train.preference_reference == "base" and train.loss in WITH_REFERENCE
        again = 1 + reference
        forward = [embedding, *(model_pass.forward[index] for index in layers), head] * again
        backward = [*(model_pass.backward[index] for index in layers), model_pass.rest]
        work = self._work(config, dims, [*forward, *backward])
        exposed, num_units = self._gathers(config, dims, stage, model_pass)
        sending = self._sending_s(config, dims, len(stage.chunks))
        host = self._rates.host
        launch_us = host.compiled_us if train.enable_compile else host.operation_us
        launches = work.launches
        if train.enable_cuda_graphs:
            outside = [embedding, head, model_pass.rest]
            launches = self._work(config, dims, outside).launches + GRAPH_LAUNCHES * len(layers)
        launching = (launches * launch_us + num_units * host.unit_us) * 1e-6
        if num_units:
            units = self._held_sizes(config, dims, stage).units
            listed = sum(unit.rest.trained + unit.experts.trained * (dims.num_expert_shards > 1) for unit in units)
            launching += LISTING_S * listed
        seconds = {
            **work.computing,
            "exchanges": work.exchanging + sending,
            "fsdp": exposed,
            "accumulation": self._accumulating_s(config, dims, stage),
        }
        count = train.gradient_accumulation_steps
        seconds = {name: value * count for name, value in seconds.items()}
        seconds["optimizer"] = self._optimizer_s(config, dims, stage)
        # The host launches the next micro-batch, or the next step, while the GPU computes.
        seconds["host"] = max(launching * count - sum(seconds.values()), 0.0)
        both = (model_pass.forward, model_pass.backward)
        chunks_s = [
            self._work(config, dims, [costs[index] for index in chunk for costs in both]).gpu_s
            for chunk in stage.chunks
        ]
        for chunk, cost in ((0, embedding), (len(chunks_s) - 1, head)):
            chunks_s[chunk] += self._work(config, dims, [cost]).gpu_s
        memory, beyond = self._memory(config, dims, stages, number, model_pass)
        return _Part(seconds, chunks_s, memory, beyond)

    def _work(self, config: Config, dims: ParallelDims, costs: Iterable[Cost]) -> Work:
        sent = 1.0
        if dims.ep > 1 and dispatch_name(self._architecture.config, config.model, dims.ep) != "allgather":
            sent = sent_share(dims.ep, num_active(self._architecture.config))
        computing: dict[str, float] = {}
        exchanging, launches = 0.0, 0.0
        for cost in costs:
            key = id(cost), sent, config.train.enable_compile
            if key not in self._works:
                # With the cost, so that no other gets its id.
                self._works[key] = cost, work_of(cost, self._rates, sent, compiled=config.train.enable_compile)
            work = self._works[key][1]
            for kind, seconds in work.computing.items():
                computing[kind] = computing.get(kind, 0.0) + seconds
            exchanging += work.exchanging
            launches += work.launches
        return Work(computing, exchanging, launches)

    def _gathers(self, config: Config, dims: ParallelDims, stage: Stage, model_pass: ModelPass) -> tuple[float, int]:
        """Seconds of a micro-batch that gathers and reductions of gradients cost, and how often units communicate.

        Those of a layer run beside the computation of its neighbours: what is longer is exposed, and the rest slows the
        products beside it. Nothing is beside the first gather and the last reduction. Replicas sum gradients in the
        last micro-batch of a step alone, except under ddp in half precision; the seconds are the mean of all.
        """
        train, links = config.train, self._rates.links
        if train.data_parallel_mode == "none" or dims.num_shards * dims.num_replicas == 1:
            return 0.0, 0
        uses_engines = train.fsdp_collectives != "nccl" and dims.num_shards > 1
        transport = "copy_engine" if uses_engines else "nccl"
        gather, reduce = ("engine_gather", "engine_reduce") if uses_engines else ("all_gather", "reduce_scatter")
        widening = 1 if uses_engines else 2
        count = train.gradient_accumulation_steps
        keeps = train.pipeline_parallel_size > 1 and not train.enable_full_shard
        share = links.beside_products[transport]
        trained = KeptDtypes.of(train, config.lora).trained
        # Replicas of shards exchange fp32 sums; replicas under ddp send gradients in their own dtype.
        summed = 4.0 if train.data_parallel_mode == "fsdp2" else trained.itemsize

        def times(unit: _Unit, is_summed: bool) -> tuple[float, float]:
            """Seconds of the gathers, and of the reductions, of a unit in one direction."""
            gathering = sum(
                links.seconds(gather, ranks, size.gathered_bytes)
                for ranks, size in ((dims.num_shards, unit.rest), (dims.num_expert_shards, unit.experts))
            )
            reducing = sum(
                links.seconds(reduce, ranks, size.trained * 2.0 * widening)
                + is_summed * links.seconds("all_reduce", replicas, size.trained * summed / ranks)
                for ranks, replicas, size in (
                    (dims.num_shards, dims.num_replicas, unit.rest),
                    (dims.num_expert_shards, dims.num_expert_replicas, unit.experts),
                )
            )
            return gathering, reducing

        sizes = self._held_sizes(config, dims, stage)

        computing = [
            [self._work(config, dims, [costs[index]]).gpu_s for costs in (model_pass.forward, model_pass.backward)]
            for index in _layers_of(stage)
        ]

        def exposed(is_summed: bool) -> float:
            total = sum(times(_Unit(sizes.outside, NO_SIZE), is_summed))
            for unit, beside_unit in zip(sizes.units, computing, strict=True):
                gathering, reducing = times(unit, is_summed)
                gathering *= 1 / count if keeps else 1
                moved = [gathering, reducing + (gathering if train.enable_full_shard else 0.0)]
                for communicating, beside in zip(moved, beside_unit, strict=True):
                    total += max(communicating - beside, 0.0) + share * min(communicating, beside)
            return total

        is_sharded = train.data_parallel_mode == "fsdp2"  # torch itself sums the buckets of replicas
        num_summed = 1 if is_sharded or trained == torch.float32 else count
        mean = (num_summed * exposed(True) + (count - num_summed) * exposed(False)) / count
        return mean, is_sharded * (len(sizes.units) + 1) * (1 + (dims.ep > 1))

    def _held_sizes(self, config: Config, dims: ParallelDims, stage: Stage) -> _HeldSizes:
        """What the ranks that share a stage have together, and what one has of it."""
        key = dims.tp, dims.ep, config.train.fp8, config.train.enable_mixed_precision, stage
        if key not in self._sizes:
            itemsizes = gathered_itemsizes(config)
            own = sketch_of(config, self._architecture, stage, dims)
            units = [_Unit.of(layer, *itemsizes) for layer in own.layers]
            held = Sizes.of(own, *itemsizes)
            whole = held
            if dims.tp * dims.ep > 1:
                whole = self._held_sizes(config, replace(dims, tp=1, ep=1), stage).whole
            ends = [
                NO_SIZE if end is None else Sizes.of(end, *itemsizes) for end in (own.model.embed_tokens, own.lm_head)
            ]
            self._sizes[key] = _HeldSizes(whole, held, units, *ends)
        return self._sizes[key]

    def _sending_s(self, config: Config, dims: ParallelDims, num_chunks: int) -> float:
        """Seconds in which hidden states of a micro-batch and their gradients pass between stages."""
        if dims.pp == 1:
            return 0.0
        tokens = config.train.micro_batch_size * config.data.sample_packing_sequence_len
        tokens /= dims.ring * dims.ulysses * dims.tp
        num_bytes = tokens * self._architecture.config.hidden_size * (2 if config.train.enable_mixed_precision else 4)
        # Both ways; `seconds` counts what reaches one of two ranks as half of the whole.
        return 2 * num_chunks * self._rates.links.seconds("send", 2, 2 * num_bytes)

    def _accumulating_s(self, config: Config, dims: ParallelDims, stage: Stage) -> float:
        """Seconds to add the gradient of a micro-batch to the sum in fp32."""
        train = config.train
        if train.gradient_accumulation_steps == 1 or KeptDtypes.of(train, config.lora).trained == torch.float32:
            return 0.0
        return self._rates.memory_s(10 * self._trained(config, dims, stage))

    def _trained(self, config: Config, dims: ParallelDims, stage: Stage) -> float:
        """Trained parameters that a rank keeps."""
        sizes = self._held_sizes(config, dims, stage)
        rest = sizes.outside.trained + sum(unit.rest.trained for unit in sizes.units)
        return rest / dims.num_shards + sum(unit.experts.trained for unit in sizes.units) / dims.num_expert_shards

    def _optimizer_s(self, config: Config, dims: ParallelDims, stage: Stage) -> float:
        """Seconds of clipping and the optimizer's step: what they read and write, and what Muon multiplies."""
        train, trained = config.train, self._trained(config, dims, stage)
        kept = KeptDtypes.of(train, config.lora).trained.itemsize
        state = kept if train.optimizer == "adamw" else DTYPES[train.optimizer_dtype].itemsize
        gradient = 4 if train.gradient_accumulation_steps > 1 else kept
        moved = trained * (2 * kept + gradient + 2 * NUM_STATES[train.optimizer] * state)
        seconds = moved / (self._rates.adamw_gbps * 1e9) + self._rates.memory_s(trained * gradient)
        if train.optimizer != "muon":
            return seconds
        module = sketch_model(self._architecture, config.model, train, config.lora)
        flops = sum(
            orthogonalisation_flops(rows, parameter.shape[1], train.muon_ns_steps)
            for name, stacked in module.layer_matrices().items()
            for parameter in [module.get_parameter(name)]
            if parameter.requires_grad
            for rows in stacked
        )
        width = self._architecture.config.hidden_size
        per_flop = self._rates.product_s(width, width, width, "bf16") / (2 * width**3)
        return seconds + COMPUTED_SHARE * flops * per_flop / dims.world_size

    def _memory(
        self, config: Config, dims: ParallelDims, stages: Sequence[Stage], number: int, model_pass: ModelPass
    ) -> tuple[dict[str, float], float]:
        """Bytes at the peak of a step, by what they are, and how many more `recompute_policy: auto` assumes."""
        train, stage = config.train, stages[number]
        sizes, layers = self._held_sizes(config, dims, stage), _layers_of(stage)
        uses_engines = train.fsdp_collectives != "nccl" and dims.num_shards > 1
        held = held_of(
            config,
            dims,
            sizes.whole,
            sizes.held,
            sizes.in_layers,
            num_layers=len(layers),
            by_copy_engines=uses_engines,
        )
        profiles = [
            replace(
                model_pass.profile(index),
                embedding=(model_pass.embedding if stage.is_first else NOTHING).memory,
                head=(model_pass.head if stage.is_last else NOTHING).memory,
            )
            for index in layers
        ]
        parts = {name: value for name, value in held.parts.items() if value}
        travelling = parts.pop(IN_FLIGHT, 0.0)
        windows = min(WINDOW_BYTES if uses_engines else 0, travelling)
        sent = gathered_itemsizes(config)[0] if uses_engines else torch.float32.itemsize
        if train.data_parallel_mode == "ddp":
            sent = KeptDtypes.of(train, config.lora).trained.itemsize
        flying, at_end = sizes.beside_backward(dims, sent, parts.get("gathered", 0.0))
        peak = pass_peak(profiles, held.gradient_ratio, beside_backward=flying, beside_rest=at_end)
        bound = travelling - windows + pass_peak(profiles, held.gradient_ratio)
        if dims.pp > 1:
            kept = [sum(model_pass.forward[index].memory.kept for index in chunk) for chunk in stage.chunks]
            peak += _in_flight(config, stages, number, kept) - sum(kept)
        num_tokens = train.micro_batch_size * config.data.sample_packing_sequence_len // dims.ring // dims.ulysses
        ring = ring_bytes(config, self._architecture, num_tokens)
        if windows:
            parts["windows"] = windows
        if train.enable_cuda_graphs:
            # Graphs compute a layer in memory that nothing else uses.
            parts["graphs"] = max(model_pass.backward[index].memory.peak for index in layers)
        return {**parts, "activations": peak + ring}, max(bound - peak, 0.0)


def _in_flight(config: Config, stages: Sequence[Stage], number: int, kept: Sequence[float]) -> float:
    """The most bytes of activations that a stage holds, if each chunk keeps so many for a micro-batch."""
    train = config.train
    plan = actions(
        train.pipeline_parallel_schedule, number, len(stages), train.gradient_accumulation_steps, chunks_of(train)
    )
    held = most = 0.0
    for action in plan:
        held += kept[action.chunk] * (1 if action.is_forward else -1)
        most = max(most, held)
    return most


def _layers_of(stage: Stage) -> list[int]:
    return sorted(index for chunk in stage.chunks for index in chunk)


@dataclass(frozen=True)
class _Unit:
    """The parameters of a layer, which are gathered together. Experts may be shared by other ranks than the rest."""

    rest: Sizes
    experts: Sizes

    @classmethod
    def of(cls, layer: nn.Module, compute: int, frozen: int) -> _Unit:
        found = [Sizes.of(each, compute, frozen) for each in layer.modules() if isinstance(each, Experts)]
        experts = sum(found, NO_SIZE)
        return cls(Sizes.of(layer, compute, frozen) - experts, experts)


@dataclass(frozen=True)
class _HeldSizes:
    """Sizes of a stage: of all ranks that share it, of one of them, and of parts of the latter."""

    whole: Sizes
    held: Sizes
    units: Sequence[_Unit]
    embedding: Sizes
    head: Sizes

    @property
    def in_layers(self) -> Sizes:
        return sum((unit.rest + unit.experts for unit in self.units), NO_SIZE)

    @property
    def outside(self) -> Sizes:
        """Of the embedding, the last norm and the head."""
        return self.held - self.in_layers

    def beside_backward(self, dims: ParallelDims, sent: float, gathered: float) -> tuple[float, float]:
        """Bytes of communication in the backward pass of the layers, and after it; less than 0 if more is freed.

        Gradients of the previous layer, or of the embedding, are on their way: as they are sent, and as fp32 sums. The
        head is no longer gathered, and after the pass nothing is. Replicas receive gradients of the head and the
        embedding, and add up a part of them; those in fp32 are summed in place.

        Args:
            sent: bytes of a gradient that ranks send.
            gathered: bytes of all parameters that are gathered when the pass begins.
        """
        wide = torch.float32.itemsize
        if gathered:
            each = sent + wide / dims.num_shards
            layers = sum(unit.rest.trained + unit.experts.trained * (dims.num_expert_shards > 1) for unit in self.units)
            flying = layers / len(self.units) * each - self.head.gathered_bytes
            return flying, self.embedding.trained * each - gathered
        if dims.num_replicas == 1 or sent == wide:
            return 0.0, 0.0
        each = sent + (sent + wide) / dims.num_replicas
        return self.head.trained * each, self.embedding.trained * each
