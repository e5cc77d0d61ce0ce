"""The table of layouts with the runs that each computes, and what computes them. A new axis is a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from image_models import IMAGE_LAYOUTS
from placement import mesh_of
from table_of_runs import (
    ADAPTED,
    ALL_CONTEXT,
    ALL_EXPERTS,
    BESIDE_BLOCK,
    CONTEXT,
    EXPERTS,
    FEW_CONTEXT,
    FEW_EXPERTS,
    FEW_STAGED,
    FULL,
    GATHERED,
    GPT_OSS,
    HYBRIDS,
    MODELS,
    NO_OPTIONS,
    OTHER_EXPERTS,
    PREFERENCES,
    RECOMPUTED,
    RING_RUNS,
    SHARED,
    SOME_EXPERTS,
    SOME_PREFERENCES,
    SPLIT,
    SPLIT_LORA,
    STAGED,
    STAGED_HYBRIDS,
    TENSOR,
    TENSOR_EXPERTS,
    Options,
    Run,
)
from tiny_models import write_config
from xorl.ckpt.reader import source_shapes
from xorl.config import Config, config_from_mapping
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh
from xorl.core.parallel import fsdp
from xorl.core.torch_private import gather_in_place
from xorl.kernels.attention import ring
from xorl.lora import Adapter, adapters
from xorl.lora.quantized import AdaptiveNoise
from xorl.train import model, verify
from xorl.train.build import build_engine
from xorl.train.engine import Engine
from xorl.train.export.hf_weights import hf_groups
from xorl.train.model_source import read_architecture
from xorl.train.startup import parallel_dims
from xorl.train.verify import Result, one_process

NUM_BINS = 8
# The gradients of a step show most of what a layout can get wrong; that an update reaches the next pass, a second step
# shows; and what an optimizer keeps by matrix, a third one.
NUM_STEPS, NUM_STEPS_OF_MUON = 2, 3


@dataclass(frozen=True)
class Layout:
    """Options of section train that place a run on a number of ranks, and the names of the runs to compare there.

    model: options of that section. num_passes: of a step on each rank. in_place: FSDP2 gathers each parameter to where
    it is used, as it does by copy engines.
    """

    num_ranks: int
    runs: tuple[str, ...]
    train: Options
    model: Options = field(default_factory=dict)
    num_passes: int = verify.NUM_MICRO_BATCHES
    in_place: bool = False


def _layout(num_ranks: int, runs: tuple[str, ...], **train: object) -> Layout:
    return Layout(num_ranks, runs, {"data_parallel_mode": "fsdp2", **train})


ULYSSES = {"ulysses_parallel_size": 2}
RING = {"ringattn_parallel_size": 2}
EP = {"expert_parallel_size": 2}
TP = {"tensor_parallel_size": 2}
PP = {"pipeline_parallel_size": 2}
GPIPE, INTERLEAVED = ({"pipeline_parallel_schedule": schedule} for schedule in ("GPipe", "Interleaved1F1B"))
DDP = {"data_parallel_mode": "ddp"}
HSDP = {"data_parallel_replicate_size": 2}
ONE_PROCESS: Options = {"data_parallel_mode": "none"}
UNITS = ["mlp", "Attention", "norm", "Decoder"]
LAYOUTS: dict[str, Layout] = {
    "one rank": Layout(1, (*SPLIT, *RECOMPUTED), ONE_PROCESS, num_passes=NUM_BINS),
    "fsdp 1": _layout(1, SPLIT[:2]),
    "ddp 2": _layout(
        2, (*SPLIT, "qwen3_moe, operation", "qwen3, operation", "qwen3, mlp", *SHARED, "dpo, LoRA", "kto"), **DDP
    ),
    "ddp 4": _layout(4, SPLIT, **DDP),
    # "ulysses 2" shards the parameters of all families, too.
    "fsdp 2": _layout(
        2,
        (
            *(*SPLIT, *RECOMPUTED, *SPLIT_LORA, "qwen3_moe, recomputed", "qwen3_moe, operation"),
            *(*SHARED, *PREFERENCES, "qwen3", "qwen3_next, LoRA", "gpt_oss"),
        ),
    ),
    "fsdp 2, in place": replace(_layout(2, (*SPLIT, *RECOMPUTED, "qwen3_moe, operation")), in_place=True),
    "fsdp 2, a bin in each pass": replace(_layout(2, SPLIT), num_passes=NUM_BINS // 2),
    "fsdp 2, kept": _layout(2, (*SPLIT, *RECOMPUTED), enable_full_shard=False),
    # Offloading is refused on the CPU, which it does nothing for.
    "fsdp 2, offloaded": _layout(2, (*SPLIT[:3], *RECOMPUTED), enable_cpu_offload=True),
    "fsdp 2, further units": replace(_layout(2, ("qwen3",)), model={"basic_modules": UNITS}),
    "fsdp 4": _layout(4, SPLIT),
    "ulysses 2": _layout(
        2,
        (
            *(*ALL_CONTEXT, *SOME_PREFERENCES, *SHARED, *HYBRIDS),
            *("qwen3_5_moe", "qwen3_next", "granitemoehybrid", "gpt_oss"),
        ),
        **ULYSSES,
    ),
    "ulysses 2, none": _layout(2, CONTEXT, **ULYSSES, cp_fsdp_mode="none"),
    "ulysses 2, ddp": _layout(2, CONTEXT, **ULYSSES, **DDP),
    "ring 2": _layout(2, (*RING_RUNS, *SOME_PREFERENCES, "gpt_oss"), **RING),
    "ring 2, none": _layout(2, CONTEXT, **RING, cp_fsdp_mode="none"),
    "ep 2": _layout(2, (*ALL_EXPERTS, *OTHER_EXPERTS), **EP),
    "ep 2, a bin in each pass": replace(_layout(2, EXPERTS[:1], **EP), num_passes=NUM_BINS // 2),
    "ep 2, ulysses 2": _layout(2, (*FEW_EXPERTS, "qwen3_5_moe"), **EP, **ULYSSES),
    "ep 2, ring 2": _layout(2, FEW_EXPERTS[::2], **EP, **RING),
    "tp 2": _layout(2, (*TENSOR, *SOME_PREFERENCES, *HYBRIDS, "nemotron_h, LoRA"), **{**TP, **ONE_PROCESS}),
    "tp 2, fsdp": _layout(
        2,
        (
            *TENSOR_EXPERTS,
            "dpo, adapted experts",
            *("glm4_moe", "qwen2_moe", "qwen3_5_moe", "qwen3_next", "qwen3_next, LoRA", "nemotron_h, experts"),
            *BESIDE_BLOCK,
            *GPT_OSS[:2],
        ),
        **TP,
    ),
    "tp 2, ep 2": _layout(2, SOME_EXPERTS, **TP, **EP),
    "pp 2": _layout(
        2,
        (
            *(*STAGED, *SOME_PREFERENCES, *STAGED_HYBRIDS, *BESIDE_BLOCK),
            *("qwen3_5_moe", "deepseek_v3, experts", *GPT_OSS[:2]),
        ),
        **PP,
    ),
    "pp 2, none": _layout(2, ("pipeline: gpt2", "pipeline: LoRA"), **{**PP, **ONE_PROCESS}),
    "pp 2, GPipe": _layout(2, ("pipeline: gpt2", "pipeline: qwen3_moe"), **PP, **GPIPE),
    "pp 2, interleaved": _layout(2, FEW_STAGED, **PP, **INTERLEAVED),
    "pp 2, gathering for each pass": _layout(2, ("pipeline: llama",), **PP, reshard_after_forward=True),
    "pp 4": _layout(4, FEW_STAGED, pipeline_parallel_size=4),
    "pp 2, fsdp 2": _layout(4, ("pipeline: gpt2", "qwen3, tied LoRA", "qwen3, Muon"), **PP),
    "pp 2, hsdp 2": _layout(4, ("pipeline: gpt2", "pipeline: qwen3_moe"), **PP, **HSDP),
    "pp 2, ulysses 2": _layout(4, ("pipeline: gpt2", "dpo, LoRA", "kto"), **PP, **ULYSSES),
    "pp 2, ulysses 2, ep 2": _layout(4, ("pipeline: qwen3_moe",), **PP, **ULYSSES, **EP),
    "pp 2, ring 2": _layout(4, ("pipeline: llama", "pipeline: qwen3_moe"), **PP, **RING),
    "pp 2, ep 2": _layout(4, ("pipeline: qwen3_moe", "mixtral, Muon"), **PP, **EP),
    "pp 2, tp 2": _layout(4, ("pipeline: gpt2", "qwen3, tied LoRA", "pipeline: qwen3_moe", "dpo"), **PP, **TP),
    "pp 2, tp 2, interleaved": _layout(4, ("pipeline: gpt2",), **{**PP, **TP, **INTERLEAVED, **ONE_PROCESS}),
    "tp 4": _layout(
        4,
        ("gpt2", "olmo2", "qwen3, LoRA", "qwen3, Muon", "block_fp8, noise", "noise"),
        **{**ONE_PROCESS, "tensor_parallel_size": 4},
    ),
    "tp 2, fsdp 2": _layout(
        4,
        (
            "qwen3, tied LoRA",
            "qwen3, LoRA",
            "qwen3, Muon",
            "qwen3, nvfp4",
            "block_fp8, noise",
            "one key/value head",
            "gpt2",
            "qwen3_moe, adapted experts, recomputed",
        ),
        **TP,
    ),
    "tp 2, ddp 2": _layout(4, ("gpt2", "qwen3, Muon"), **TP, **DDP),
    "tp 2, ulysses 2": _layout(4, ("llama", "qwen3_moe", "one key/value head", "qwen3_5, Muon"), **TP, **ULYSSES),
    "tp 2, ring 2": _layout(4, ("gpt2", "qwen3_moe", "kto, LoRA"), **TP, **RING),
    "tp 2, fsdp 2, ep 4": _layout(4, ("qwen3_moe",), **TP, expert_parallel_size=4),
    "tp 2, fsdp 2, ep 2": _layout(4, ("qwen3_moe", "mixtral, Muon", "gpt_oss"), **TP, **EP),
    "hsdp 2": _layout(4, (*SPLIT, *SPLIT_LORA, *SHARED), **HSDP),
    "ulysses 4": _layout(4, (FULL, "qwen3"), ulysses_parallel_size=4),
    "dp 2, ulysses 2": _layout(4, (FULL,), **ULYSSES),
    "dp 2, ulysses 2, none": _layout(4, CONTEXT, **ULYSSES, cp_fsdp_mode="none"),
    "dp 2, ulysses 2, ddp": _layout(4, (ADAPTED,), **ULYSSES, **DDP),
    "hsdp 2, ulysses 2": _layout(4, (FULL,), **ULYSSES, **HSDP),
    "ring 4": _layout(4, (ADAPTED,), ringattn_parallel_size=4),
    "dp 2, ring 2": _layout(4, (ADAPTED,), **RING),
    "dp 2, ring 2, ddp": _layout(4, (FULL,), **RING, **DDP),
    "ring 2, ulysses 2": _layout(4, (*CONTEXT, *FEW_CONTEXT), **RING, **ULYSSES),
    "ring 2, ulysses 2, ulysses_only": _layout(4, (ADAPTED,), **RING, **ULYSSES, cp_fsdp_mode="ulysses_only"),
    "ring 2, ulysses 2, ring_only": _layout(4, (FULL,), **RING, **ULYSSES, cp_fsdp_mode="ring_only"),
    "ep 4": _layout(4, (*EXPERTS, "deepseek_v3, experts", *GPT_OSS[:2]), expert_parallel_size=4),
    "ep 4, gathered": replace(_layout(4, GATHERED, expert_parallel_size=4), model={"ep_dispatch": "allgather"}),
    "ep 4, ddp": _layout(4, (*FEW_EXPERTS, "qwen3_moe, shared adapters"), **DDP, expert_parallel_size=4),
    "dp 2, ulysses 2, ep 4, ddp": _layout(4, FEW_EXPERTS[:1], **DDP, **ULYSSES, expert_parallel_size=4),
    "hsdp 4, ep 2": _layout(4, FEW_EXPERTS[:1], **EP, data_parallel_shard_size=1),
    "ep 2, fsdp 2": _layout(4, (*EXPERTS, "qwen3_moe, shared adapters", "glm4_moe, adapted experts"), **EP),
    "ep 2 outside, fsdp 2": _layout(4, FEW_EXPERTS, **EP, ep_outside=True),
    "hsdp 2, ep 2": _layout(4, FEW_EXPERTS, **EP, **HSDP),
    "dp 2, ulysses 2, ep 2": _layout(4, FEW_EXPERTS, **EP, **ULYSSES),
    "dp 2, ring 2, ep 4": _layout(4, FEW_EXPERTS[::2], **RING, expert_parallel_size=4),
}
LAYOUTS |= {name: replace(LAYOUTS[name], runs=(*LAYOUTS[name].runs, *runs)) for name, runs in IMAGE_LAYOUTS.items()}


def write_models(folder: Path) -> Path:
    """The folder, with a folder for each of MODELS."""
    for name, shape in MODELS.items():
        write_config(folder / name, shape)
    return folder


def write_weights(folder: Path, model: str) -> None:
    """Random weights beside a model's config.json, for `model_path`."""
    generator = torch.Generator().manual_seed(0)
    recipes = read_architecture(run_config(folder, model, {}).model).recipes(merge_qkv=True)
    shapes = source_shapes(recipes).items()
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes}
    save_file(weights, folder / model / "model.safetensors", {"format": "pt"})


def run_config(
    folder: Path, model: str, train: Options, lora: Options = NO_OPTIONS, of_model: Options = NO_OPTIONS
) -> Config:
    """The configuration of a run of a model that `write_models` wrote."""
    # The rows of a pipeline have different lengths, unless it is interleaved.
    data = {} if train.get("pipeline_parallel_schedule") == "Interleaved1F1B" else {"pad_to_multiple_of": 8}
    values = {
        "model": {"config_path": str(folder / model), **of_model},
        "data": {
            "datasets": [{"path": "a", "type": "preference" if "loss" in train else "tokenized"}],
            **(data if "pipeline_parallel_size" in train else {}),
        },
        "train": {
            "output_dir": str(folder / "out"),
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
            **train,
        },
        "lora": lora,
    }
    return config_from_mapping(values).config


def mesh_for(config: Config) -> Mesh:
    """The mesh of a configuration over all ranks; collective. Runs in one process share it."""
    return mesh_of(parallel_dims(config, runtime.world_size()))


def engine_for(config: Config, **train: object) -> Engine:
    """An engine over all ranks, with other options of `train`; the same weights for every layout. Collective."""
    runtime.seed_everything(0)
    config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    return build_engine(config, verify.read_verified(config), mesh_for(config), torch.device("cpu"))


def weights_of(engine: Engine, config: Config, merged: Mapping[str, Adapter] | None = None) -> dict[str, Tensor]:
    """The model as others read it, with its adapters, or these, merged in; on rank 0. Collective."""
    merged = merged or adapters(engine.model.module) or None
    recipes = read_architecture(config.model).recipes(merge_qkv=config.model.merge_qkv)
    groups = hf_groups(engine.model, recipes, dtype=torch.float32, device=torch.device("cpu"), merged_adapters=merged)
    return {name: tensor.clone() for group in groups for name, tensor in group.make().items()}


def steps(
    config: Config,
    num_bins: int = NUM_BINS,
    change: Callable[[Engine], None] | None = None,
    *,
    num_steps: int | None = None,
) -> Result:
    """Steps from the same weights, unless they are changed, and over the same rows for every layout."""
    engine = engine_for(config)
    if num_steps is None:
        num_steps = NUM_STEPS_OF_MUON if config.train.optimizer == "muon" else NUM_STEPS
    if change is not None:
        change(engine)
    if config.lora.enable_aqn:
        AdaptiveNoise(engine.model.module, alpha=config.lora.aqn_alpha, seed=0).set_step(1)
    architecture = verify.read_verified(config)
    if config.train.data_parallel_mode == "ddp" and verify.preference_loss(config) is None:
        # Only then does DistributedDataParallel lay its buckets out, and gradients into them.
        sizes = architecture.config.vocab_size, config, engine.model.mesh, architecture.images
        engine.forward_backward(verify.batches_of(0, num_bins, *sizes)[:1], cross_entropy)
        engine.zero_grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "NUM_STEPS", num_steps)
        result = verify.take_steps(engine, config, architecture, num_bins)
    if config.train.data_parallel_mode == "ddp":
        assert_replicas_are_alike(engine)
    return result


def assert_replicas_are_alike(engine: Engine) -> None:
    """Every replica holds what the first one holds, except for experts that they divide. Collective."""
    group = engine.model.mesh.loss.group
    for name, parameter in engine.model.module.named_parameters():
        share = engine.model.shares.get(name)
        if share is None or "ep" not in share.divided_over:
            first = parameter.detach().clone()
            dist.broadcast(first, group=group, group_src=0)
            assert torch.equal(first, parameter), name


def alone(folder: Path, run: Run) -> Result:
    """The steps of a run in one process."""
    return steps(one_process(run_config(folder, run.model, {**ONE_PROCESS, **run.train}, run.lora)))


def run_in_layout(folder: Path, run: Run, layout: Layout, *, num_steps: int | None = None) -> Result | None:
    """The steps of a run in a layout, on rank 0. One ring exchanges the heads in several parts, as large models do."""
    config = run_config(folder, run.model, {**layout.train, **run.train}, run.lora, layout.model)
    dims = mesh_for(config).dims
    with pytest.MonkeyPatch.context() as patch:
        if dims.ring == dims.world_size == 2:
            patch.setattr(ring, "MIN_PART_ELEMENTS", 1)
        if config.train.enable_cpu_offload:
            patch.setattr(model, "_require_device", lambda *_: None)
        if layout.in_place:
            patch.setattr(fsdp, "uses_copy_engines", lambda *_: True)
            patch.setattr(fsdp, "_use_copy_engines", _use_gloo_in_place)
        patch.setattr(verify, "NUM_MICRO_BATCHES", layout.num_passes)
        found = steps(config, num_steps=num_steps)
    return found if runtime.global_rank() == 0 else None


def _use_gloo_in_place(units: Sequence[FSDPModule], group: dist.ProcessGroup, _: torch.dtype | None) -> None:
    def gather_into(wholes: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], None]:
        def gather(shards: Sequence[Tensor]) -> None:
            for whole, shard in zip(wholes, shards, strict=True):
                dist.all_gather_into_tensor(whole, shard.to(whole.dtype), group=group)

        return gather

    for unit in units:
        gather_in_place(unit, gather_into)
