"""Expert parallelism: every layout computes what one process computes, on rows of uneven documents."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny_models import hf_config, write_config
from xorl.config import Config, config_from_mapping
from xorl.core import runtime
from xorl.core.mesh import Mesh
from xorl.train.build import build_engine
from xorl.train.model import read_architecture
from xorl.train.startup import parallel_dims
from xorl.train.verify import Result, compare, one_process, take_steps

pytestmark = pytest.mark.multi
NUM_BINS = 8

MODELS: dict[str, dict[str, object]] = {
    "qwen3_moe": hf_config(
        "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], output_router_logits=True, router_aux_loss_coef=0.1
    ),
    "mixtral": hf_config("mixtral"),
}
FSDP = {"data_parallel_mode": "fsdp2"}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "ep 2": (2, {**FSDP, "expert_parallel_size": 2}),
    "ep 2, ulysses 2": (2, {**FSDP, "expert_parallel_size": 2, "ulysses_parallel_size": 2}),
    "ep 2, ring 2": (2, {**FSDP, "expert_parallel_size": 2, "ringattn_parallel_size": 2}),
    "ep 4": (4, {**FSDP, "expert_parallel_size": 4}),
    "ep 2, fsdp 2": (4, {**FSDP, "expert_parallel_size": 2}),
    "ep 2 outside, fsdp 2": (4, {**FSDP, "expert_parallel_size": 2, "ep_outside": True}),
    "hsdp 2, ep 2": (4, {**FSDP, "expert_parallel_size": 2, "data_parallel_replicate_size": 2}),
    "dp 2, ulysses 2, ep 2": (4, {**FSDP, "expert_parallel_size": 2, "ulysses_parallel_size": 2}),
    "dp 2, ring 2, ep 4": (4, {**FSDP, "expert_parallel_size": 4, "ringattn_parallel_size": 2}),
}
LORA = {"enable_lora": True, "lora_rank": 4, "lora_target_modules": "all-linear"}
RECOMPUTE = {"enable_gradient_checkpointing": True}
# By name: (model, options of train, options of lora).
RUNS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "qwen3_moe": ("qwen3_moe", {"router_z_loss_coef": 0.1}, {}),
    "mixtral, Muon": ("mixtral", {"optimizer": "muon"}, {}),
    "qwen3_moe, recomputed": ("qwen3_moe", RECOMPUTE, {}),
    "qwen3_moe, moe_act": ("qwen3_moe", {**RECOMPUTE, "moe_checkpoint_method": "moe_act"}, {}),
    "qwen3_moe, operation": ("qwen3_moe", {**RECOMPUTE, "recompute_policy": "operation"}, {}),
    "qwen3_moe, LoRA": ("qwen3_moe", {}, LORA),
    "qwen3_moe, QLoRA": (
        "qwen3_moe",
        {},
        {**LORA, "enable_qlora": True, "quant_format": "nf4", "quant_group_size": 16},
    ),
}
# All layouts compute these runs; WITH_ALL_RUNS compute the others, too.
BASIC_RUNS = ("qwen3_moe", "mixtral, Muon", "qwen3_moe, LoRA")
WITH_ALL_RUNS = ("ep 2", "ep 2, fsdp 2")


def run_config(folder: Path, model: str, train: dict[str, object], lora: dict[str, object]) -> Config:
    values = {
        "model": {"config_path": str(folder / model)},
        "data": {"datasets": [{"path": "a"}]},
        "train": {"output_dir": str(folder / "out"), "enable_mixed_precision": False, **train},
        "lora": lora,
    }
    return config_from_mapping(values).config


def steps(config: Config, mesh: Mesh) -> Result:
    runtime.seed_everything(0)
    architecture = read_architecture(config.model)
    engine = build_engine(config, architecture, mesh, torch.device("cpu"))
    return take_steps(engine, config, architecture, NUM_BINS)


@pytest.mark.parametrize("world_size", [2, 4])
def test_layouts_equal_one_process(run_ranks, tmp_path: Path, world_size: int) -> None:
    # Catches gradients that are doubled or divided over the ranks, tokens that get lost, norms of some experts, and a
    # router without gradients.
    for name, shape in MODELS.items():
        write_config(tmp_path / name, shape)

    def results(options: dict[str, object], names: tuple[str, ...]) -> dict[str, Result]:
        configs = {
            name: run_config(tmp_path, RUNS[name][0], {**options, **RUNS[name][1]}, RUNS[name][2]) for name in names
        }
        if options["data_parallel_mode"] == "none":
            configs = {name: one_process(config) for name, config in configs.items()}
        # One mesh for all, because each has groups of its own, whose connections add up.
        mesh = Mesh(parallel_dims(next(iter(configs.values())), runtime.world_size()), "cpu")
        return {name: steps(config, mesh) for name, config in configs.items()}

    [whole] = run_ranks(lambda: results({"data_parallel_mode": "none"}, tuple(RUNS)), 1)
    layouts = {layout: options for layout, (num_ranks, options) in LAYOUTS.items() if num_ranks == world_size}
    found = run_ranks(
        lambda: {
            layout: results(options, tuple(RUNS) if layout in WITH_ALL_RUNS else BASIC_RUNS)
            for layout, options in layouts.items()
        },
        world_size,
    )[0]
    failed = []
    for layout, by_name in found.items():
        for name, result in by_name.items():
            differences = compare(result, whole[name])
            failed += [(name, layout, kind, one) for kind, one in differences.items() if not one.is_within]
    assert not failed, "\n".join(map(str, failed))
