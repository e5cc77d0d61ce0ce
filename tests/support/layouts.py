"""The table of layouts and of the runs that each computes, and what computes them. A new axis or family is a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from image_models import IMAGE_LAYOUTS, IMAGE_MODELS, IMAGE_RUNS
from placement import mesh_of
from tiny_models import BESIDE, LATENT_EXPERTS, hf_config, write_config
from xorl.ckpt.reader import source_shapes
from xorl.config import Config, config_from_mapping
from xorl.core import runtime
from xorl.core.mesh import Mesh
from xorl.kernels.attention import ring
from xorl.lora import adapters
from xorl.lora.quantized import AdaptiveNoise
from xorl.train import verify
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
Options = Mapping[str, object]
NO_OPTIONS: Options = MappingProxyType({})

# One family of each kind: where norms stand and what they normalise, which layers rotate and how, scales, biases,
# trained scalars.
FAMILIES = (
    "apertus",
    "cohere2",
    "deepseek_v3",
    "exaone4",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "granite",
    "olmo2",
    "smollm3",
    "starcoder2",
)
# Layers whose state passes through a document, which a ring cannot compute.
RECURRENT = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "nemotron_h")
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, dict[str, object]] = {
    "llama": hf_config("llama", max_position_embeddings=20, rope_parameters=DYNAMIC),
    "qwen3": hf_config("qwen3", num_attention_heads=8, num_key_value_heads=2, intermediate_size=64),
    **IMAGE_MODELS,
    "one head": hf_config("llama", num_key_value_heads=1),
    # Four ranks can share its matrices in blocks of 16.
    "blocks": hf_config("qwen3", head_dim=16, intermediate_size=64),
    "mistral": hf_config("mistral", sliding_window=5),
    "gpt2": hf_config("gpt2"),
    "qwen3_moe": hf_config(
        "qwen3_moe",
        moe_intermediate_size=48,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        pad_token_id=3,
    ),
    "mixtral": hf_config("mixtral"),
    "glm4_moe": hf_config("glm4_moe", moe_intermediate_size=48),
    "qwen2_moe": hf_config("qwen2_moe", mlp_only_layers=[1]),
    "deepseek_v3, experts": hf_config("deepseek_v3", first_k_dense_replace=1),
    "gemma4_text, experts": hf_config("gemma4_text", **BESIDE),
    "nemotron_h, experts": hf_config("nemotron_h", **LATENT_EXPERTS),
    "granitemoehybrid": hf_config(
        "granitemoehybrid", num_local_experts=4, intermediate_size=24, output_router_logits=True
    ),
    "gpt_oss": hf_config("gpt_oss", intermediate_size=32, output_router_logits=True, router_aux_loss_coef=0.1),
    **{name: hf_config(name) for name in FAMILIES},
    **{name: hf_config(name, intermediate_size=64) for name in RECURRENT},
    "deepseek_v3": hf_config("deepseek_v3", first_k_dense_replace=2),
    "gpt2, 4 layers": hf_config("gpt2", n_layer=4),
    "llama, 4 layers": hf_config("llama", num_hidden_layers=4),
    "qwen3_moe, 4 layers": hf_config(
        "qwen3_moe",
        num_hidden_layers=4,
        mlp_only_layers=[0, 2],
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    ),
}


@dataclass(frozen=True)
class Run:
    """A model and the options of sections train and lora that every layout computes it with."""

    model: str
    train: Options = field(default_factory=dict)
    lora: Options = field(default_factory=dict)


LORA = {"enable_lora": True, "lora_rank": 4, "lora_target_modules": "all-linear"}
QLORA = {**LORA, "enable_qlora": True, "quant_format": "nf4", "quant_group_size": 16}
EXPERT_LORA = {**LORA, "lora_target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
MUON = {"optimizer": "muon"}
RECOMPUTE = {"enable_gradient_checkpointing": True}
BY_OPERATION = {**RECOMPUTE, "recompute_policy": "operation"}
MOE_ACT = {"moe_checkpoint_method": "moe_act"}
RUNS: dict[str, Run] = {
    "llama": Run("llama"),
    "llama, LoRA": Run("llama", lora=LORA),
    "qwen3": Run("qwen3"),
    "qwen3, LoRA": Run("qwen3", MUON, LORA),
    "qwen3, tied LoRA": Run("qwen3", lora={**LORA, "lora_target_modules": ["q_proj", "down_proj", "embed_tokens"]}),
    "qwen3, DoRA": Run("qwen3", lora={**LORA, "use_dora": True}),
    "qwen3, QLoRA": Run("qwen3", lora=QLORA),
    "qwen3, nvfp4": Run("qwen3", lora={**QLORA, "quant_format": "nvfp4"}),
    "block_fp8, noise": Run("blocks", lora={**QLORA, "quant_format": "block_fp8", "enable_aqn": True}),
    "noise": Run("blocks", lora={**QLORA, "enable_aqn": True}),
    "qwen3, operation": Run("qwen3", BY_OPERATION),
    "qwen3, Muon": Run("qwen3", {**MUON, **BY_OPERATION}),
    "one key/value head": Run("one head", MUON, {**LORA, "lora_target_modules": ["q_proj", "v_proj"]}),
    "mistral": Run("mistral"),
    "gpt2": Run("gpt2", RECOMPUTE),
    "mixtral, Muon": Run("mixtral", MUON),
    "qwen3_moe": Run("qwen3_moe", {"router_z_loss_coef": 0.1}),
    "qwen3_moe, recomputed": Run("qwen3_moe", RECOMPUTE),
    "qwen3_moe, moe_act": Run("qwen3_moe", {**RECOMPUTE, **MOE_ACT}),
    "qwen3_moe, operation": Run("qwen3_moe", BY_OPERATION),
    "qwen3_moe, operation and moe_act": Run("qwen3_moe", {**BY_OPERATION, **MOE_ACT}),
    "qwen3_moe, LoRA": Run("qwen3_moe", lora=LORA),
    "qwen3_moe, adapted experts": Run("qwen3_moe", MUON, EXPERT_LORA),
    "qwen3_moe, adapted experts, recomputed": Run("qwen3_moe", RECOMPUTE, EXPERT_LORA),
    "qwen3_moe, QLoRA": Run("qwen3_moe", lora=QLORA),
    "qwen3_moe, QLoRA, adapted experts": Run("qwen3_moe", RECOMPUTE, {**QLORA, **EXPERT_LORA}),
    "qwen3_moe, shared adapters": Run("qwen3_moe", MUON, {**EXPERT_LORA, "moe_shared_lora": True}),
    "qwen3_moe, outer factors shared": Run("qwen3_moe", RECOMPUTE, {**EXPERT_LORA, "moe_hybrid_shared_lora": True}),
}
RUNS |= {name: Run(name) for name in FAMILIES}
# Scores that are corrected and grouped, and shared experts.
RUNS |= {
    "glm4_moe": Run("glm4_moe", {**MUON, "router_aux_loss_coef": 0.1}),
    "glm4_moe, adapted experts": Run("glm4_moe", RECOMPUTE, EXPERT_LORA),
    "glm4_moe, QLoRA": Run("glm4_moe", lora={**QLORA, **EXPERT_LORA}),
    "qwen2_moe": Run("qwen2_moe"),
    "deepseek_v3, experts": Run("deepseek_v3, experts", BY_OPERATION),
    # Experts beside a feed-forward block, with norms of their own.
    "gemma4_text, experts": Run("gemma4_text, experts", {"router_z_loss_coef": 0.1}),
    "gemma4_text, adapted experts": Run("gemma4_text, experts", RECOMPUTE, EXPERT_LORA),
    # Sinks, and experts with biases.
    "gpt_oss": Run("gpt_oss", MUON),
    "gpt_oss, adapted experts": Run("gpt_oss", {**RECOMPUTE, **MOE_ACT}, EXPERT_LORA),
    "gpt_oss, QLoRA": Run("gpt_oss", lora={**QLORA, **EXPERT_LORA}),
}
RUNS |= {
    "qwen3_5": Run("qwen3_5_text", BY_OPERATION),
    "qwen3_5, Muon": Run("qwen3_5_text", {**MUON, **RECOMPUTE, "recompute_modules": ["self_attn"]}),
    "qwen3_5, LoRA": Run("qwen3_5_text", lora=LORA),
    "qwen3_5, QLoRA": Run("qwen3_5_text", lora=QLORA),
    "lfm2": Run("lfm2", MUON, LORA),
    "qwen3_5_moe": Run("qwen3_5_moe_text", {**RECOMPUTE, "router_aux_loss_coef": 0.1}),
    "qwen3_next": Run("qwen3_next"),
    "qwen3_next, LoRA": Run("qwen3_next", lora=LORA),
    "nemotron_h": Run("nemotron_h", {**MUON, **RECOMPUTE, "recompute_modules": ["self_attn"]}),
    "nemotron_h, LoRA": Run("nemotron_h", lora=LORA),
    "nemotron_h, experts": Run("nemotron_h, experts", RECOMPUTE),
    "granitemoehybrid": Run("granitemoehybrid", {"router_aux_loss_coef": 0.1}),
}
HYBRIDS = ("qwen3_5", "qwen3_5, Muon", "qwen3_5, LoRA", "qwen3_5, QLoRA", "lfm2", "nemotron_h")
RUNS |= {
    "pipeline: gpt2": Run("gpt2, 4 layers"),
    "pipeline: llama": Run("llama, 4 layers", BY_OPERATION),
    "pipeline: LoRA": Run("llama, 4 layers", lora=LORA),
    # Some stages have nothing to train.
    "pipeline: the last layer": Run("llama, 4 layers", lora={**LORA, "lora_target_modules": ["3.self_attn.q_proj"]}),
    "pipeline: the first layer": Run("llama, 4 layers", lora={**LORA, "lora_target_modules": ["0.self_attn.q_proj"]}),
    "pipeline: qwen3_moe": Run("qwen3_moe, 4 layers", {"router_z_loss_coef": 0.1}),
}
FEW_STAGED = ("pipeline: gpt2", "pipeline: llama", "pipeline: the last layer", "pipeline: qwen3_moe")
STAGED_HYBRIDS = ("qwen3_5", "qwen3_5, LoRA", "lfm2", "nemotron_h")
BESIDE_BLOCK = ("gemma4_text, experts", "gemma4_text, adapted experts")
# Losses of pairs of answers; adapters are switched off for the reference model.
RUNS |= {
    "dpo": Run("llama", {"loss": "dpo"}),
    "dpo, LoRA": Run("qwen3", {"loss": "dpo", "dpo_length_normalized": True}, LORA),
    "dpo, adapted experts": Run("qwen3_moe", {"loss": "dpo", **RECOMPUTE}, EXPERT_LORA),
    "kto": Run("llama", {"loss": "kto"}),
    "kto, LoRA": Run("qwen3", {"loss": "kto", **BY_OPERATION}, LORA),
    "orpo": Run("gpt2", {"loss": "orpo"}),
    "simpo": Run("qwen3_moe", {"loss": "simpo", "preference_label_smoothing": 0.1}),
}
# Each loss, with and without adapters, where rows are whole; what differs where they are shared.
PREFERENCES = ("dpo", "dpo, LoRA", "dpo, adapted experts", "kto", "kto, LoRA", "orpo", "simpo")
SOME_PREFERENCES = ("dpo, LoRA", "kto", "orpo")
GPT_OSS = ("gpt_oss", "gpt_oss, adapted experts", "gpt_oss, QLoRA")
PIPELINE = tuple(name for name in RUNS if name.startswith("pipeline"))
SHARED = ("qwen3_moe, shared adapters", "qwen3_moe, outer factors shared")
# Of full weights, whose rows or heads may be divided in several ways, and of adapters.
CONTEXT = ("llama, LoRA", "qwen3_moe")
ALL_CONTEXT = (
    *FAMILIES,
    *(
        name
        for name, run in RUNS.items()
        if run.model in ("llama", "qwen3", "mistral", "gpt2") and "loss" not in run.train
    ),
    "qwen3_moe",
    "qwen3_moe, operation and moe_act",
)
# Windows, learned positions, norms over all heads, layers without a rotation, scales, pairs of answers.
FEW_CONTEXT = ("mistral", "gpt2", "olmo2", "smollm3", "gemma4_text", "dpo, LoRA")
# How weights are stored and updated does not depend on how rows are divided: Ulysses has the other runs.
RING_RUNS = (*FAMILIES, "llama, LoRA", "qwen3, operation", "qwen3, QLoRA", "mistral", "gpt2", *ALL_CONTEXT[-2:])
FEW_EXPERTS = ("qwen3_moe", "mixtral, Muon", "qwen3_moe, adapted experts")
EXPERTS = (*FEW_EXPERTS, "qwen3_moe, outer factors shared")
TENSOR = (
    "llama, LoRA",
    "qwen3, LoRA",
    "qwen3, Muon",
    "qwen3, tied LoRA",
    "qwen3, QLoRA",
    "qwen3, nvfp4",
    "block_fp8, noise",
    "noise",
    "qwen3, operation",
    "mistral",
    "gpt2",
    *FAMILIES,
)
TENSOR_EXPERTS = (
    "qwen3_moe",
    "mixtral, Muon",
    "qwen3_moe, recomputed",
    "qwen3_moe, LoRA",
    "qwen3_moe, outer factors shared",
)
ALL_EXPERTS = tuple(
    name
    for name, run in RUNS.items()
    if run.model in ("qwen3_moe", "mixtral")
    and name not in (*ALL_CONTEXT[-1:], "qwen3_moe, LoRA", "qwen3_moe, adapted experts, recomputed")
    and "loss" not in run.train
)
OTHER_EXPERTS = (
    "glm4_moe",
    "glm4_moe, QLoRA",
    "qwen3_next",
    "granitemoehybrid",
    "nemotron_h, experts",
    "deepseek_v3, experts",
    *BESIDE_BLOCK,
    *GPT_OSS,
)
SOME_EXPERTS = (
    "qwen3_moe",
    "qwen3_moe, operation and moe_act",
    "gpt_oss",
    "deepseek_v3, experts",
    "gemma4_text, experts",
)
STAGED = (
    *PIPELINE,
    *FAMILIES,
    "qwen3, LoRA",
    "qwen3, Muon",
    "qwen3, tied LoRA",
    "qwen3, DoRA",
    "qwen3, QLoRA",
    "mixtral, Muon",
    "qwen3_moe, adapted experts, recomputed",
)


@dataclass(frozen=True)
class Layout:
    """Options of section train that place a run on a number of ranks, and the names of the runs to compare there."""

    num_ranks: int
    runs: tuple[str, ...]
    train: Options


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
LAYOUTS: dict[str, Layout] = {
    "ddp 2": _layout(2, (*SHARED, "dpo, LoRA", "kto"), **DDP),
    # "ulysses 2" shards the parameters of all families, too.
    "fsdp 2": _layout(2, (*SHARED, *PREFERENCES, "qwen3", "qwen3_next, LoRA", "gpt_oss")),
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
    "hsdp 2": _layout(4, SHARED, **HSDP),
    "ulysses 4": _layout(4, (*CONTEXT, "qwen3"), ulysses_parallel_size=4),
    "dp 2, ulysses 2": _layout(4, CONTEXT, **ULYSSES),
    "dp 2, ulysses 2, none": _layout(4, CONTEXT, **ULYSSES, cp_fsdp_mode="none"),
    "dp 2, ulysses 2, ddp": _layout(4, CONTEXT, **ULYSSES, **DDP),
    "hsdp 2, ulysses 2": _layout(4, CONTEXT, **ULYSSES, **HSDP),
    "ring 4": _layout(4, CONTEXT, ringattn_parallel_size=4),
    "dp 2, ring 2": _layout(4, CONTEXT, **RING),
    "dp 2, ring 2, ddp": _layout(4, CONTEXT, **RING, **DDP),
    "ring 2, ulysses 2": _layout(4, (*CONTEXT, *FEW_CONTEXT), **RING, **ULYSSES),
    "ring 2, ulysses 2, ulysses_only": _layout(4, CONTEXT, **RING, **ULYSSES, cp_fsdp_mode="ulysses_only"),
    "ring 2, ulysses 2, ring_only": _layout(4, CONTEXT, **RING, **ULYSSES, cp_fsdp_mode="ring_only"),
    "ep 4": _layout(4, (*EXPERTS, "deepseek_v3, experts", *GPT_OSS[:2]), expert_parallel_size=4),
    "ep 2, fsdp 2": _layout(4, (*EXPERTS, "qwen3_moe, shared adapters", "glm4_moe, adapted experts"), **EP),
    "ep 2 outside, fsdp 2": _layout(4, FEW_EXPERTS, **EP, ep_outside=True),
    "hsdp 2, ep 2": _layout(4, FEW_EXPERTS, **EP, **HSDP),
    "dp 2, ulysses 2, ep 2": _layout(4, FEW_EXPERTS, **EP, **ULYSSES),
    "dp 2, ring 2, ep 4": _layout(4, FEW_EXPERTS[::2], **RING, expert_parallel_size=4),
}
RUNS |= {name: Run(*each) for name, each in IMAGE_RUNS.items()}
LAYOUTS |= {name: replace(LAYOUTS[name], runs=(*LAYOUTS[name].runs, *runs)) for name, runs in IMAGE_LAYOUTS.items()}


def write_models(folder: Path) -> Path:
    """The folder, with a folder for each of MODELS."""
    for name, shape in MODELS.items():
        write_config(folder / name, shape)
    return folder


def write_weights(folder: Path, model: str, dtype: torch.dtype = torch.float32) -> None:
    """Random weights beside the description of a model that `write_models` wrote, for `model_path`."""
    generator = torch.Generator().manual_seed(0)
    recipes = read_architecture(run_config(folder, model, {}).model).recipes(merge_qkv=True)
    shapes = source_shapes(recipes).items()
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes}
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
        "train": {"output_dir": str(folder / "out"), "enable_mixed_precision": False, **train},
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


def weights_of(engine: Engine, config: Config) -> dict[str, Tensor]:
    """The model as others read it, with adapters merged in; on rank 0. Collective."""
    merged = adapters(engine.model.module) or None
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "NUM_STEPS", num_steps)
        return verify.take_steps(engine, config, verify.read_verified(config), num_bins)


def run_in_layout(folder: Path, run: Run, train: Options, *, num_steps: int | None = None) -> Result:
    """The steps of a run in a layout. One ring exchanges the heads in several parts, as large models do."""
    config = run_config(folder, run.model, {**train, **run.train}, run.lora)
    if train == ONE_PROCESS:
        return steps(one_process(config))
    dims = mesh_for(config).dims
    with pytest.MonkeyPatch.context() as patch:
        if dims.ring == dims.world_size == 2:
            patch.setattr(ring, "MIN_PART_ELEMENTS", 1)
        return steps(config, num_steps=num_steps)
