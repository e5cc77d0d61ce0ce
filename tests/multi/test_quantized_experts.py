"""QLoRA over experts on several ranks: the same bytes, gradients and exports for every placement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from expert_reads import counted_reads
from tiny_models import hf_config, write_config
from xorl.ckpt import SafetensorsSource
from xorl.ckpt.reader import source_shapes
from xorl.config import Config, config_from_mapping
from xorl.core import runtime
from xorl.core.mesh import Mesh
from xorl.kernels.quant.block_fp8 import quantize_block_fp8
from xorl.lora.merge import fold_
from xorl.lora.quantized import AdaptiveNoise, num_parameters, quantized_layers
from xorl.train.build import build_engine
from xorl.train.export.hf_weights import ExportWeights
from xorl.train.model_source import read_architecture
from xorl.train.startup import parallel_dims
from xorl.train.verify import Result, compare, one_process, take_steps

pytestmark = pytest.mark.multi

SHAPE = hf_config(
    "qwen3_moe", head_dim=32, intermediate_size=64, moe_intermediate_size=32, mlp_only_layers=[1], num_experts=8
)
FORMATS = {"nf4": 16, "nvfp4": 16, "block_fp8": 32}
ONE = {"data_parallel_mode": "none"}
FSDP = {"data_parallel_mode": "fsdp2"}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "ddp 2": (2, {"data_parallel_mode": "ddp"}),
    "fsdp 2": (2, FSDP),
    "ep 2": (2, {**FSDP, "expert_parallel_size": 2}),
    "hsdp 2x2": (4, {**FSDP, "data_parallel_replicate_size": 2}),
    "ep 2, fsdp 2": (4, {**FSDP, "expert_parallel_size": 2}),
    "ep 4": (4, {**FSDP, "expert_parallel_size": 4}),
}
TARGETS = ["q_proj", "gate_proj", "up_proj", "down_proj"]


def config_of(folder: Path, quant_format: str, train: dict[str, object], *, mode: str | None = None) -> Config:
    """With random weights, or those in the folder, read in a mode."""
    model = {"config_path": str(folder)} if mode is None else {"model_path": str(folder)}
    values = {
        "model": model,
        "data": {"datasets": [{"path": "a"}]},
        "train": {
            "output_dir": str(folder / "out"),
            "enable_mixed_precision": False,
            **({} if mode is None else {"load_weights_mode": mode}),
            **train,
        },
        "lora": {
            "enable_qlora": True,
            "quant_format": quant_format,
            "quant_group_size": FORMATS[quant_format],
            "lora_rank": 4,
            "lora_target_modules": TARGETS,
        },
    }
    return config_from_mapping(values).config


@dataclass(frozen=True)
class Found:
    """Stored bytes and the number of weights at the start; a step with noise; bytes and exports after a merge."""

    first: dict[str, Tensor]
    num_weights: int
    step: Result
    merged: dict[str, Tensor]
    exported: dict[str, Tensor]


def run(config: Config) -> Found:
    if config.train.data_parallel_mode == "none":
        config = one_process(config)
    runtime.seed_everything(0)
    architecture = read_architecture(config.model)
    mesh = Mesh(parallel_dims(config, runtime.world_size()), "cpu")
    engine = build_engine(config, architecture, mesh, torch.device("cpu"))
    module = engine.model.module

    def stored() -> dict[str, Tensor]:
        names = [f"{path}.{field}" for path, layer in quantized_layers(module).items() for field in layer.stored]
        held = dict(module.named_parameters())
        return {name: engine.model.parts.gather(name, held[name]).clone() for name in names if name in held}

    first = stored()
    AdaptiveNoise(module, alpha=0.5, seed=0).set_step(3)
    step = take_steps(engine, config, architecture, 8)
    engine.model.drop_gathered()
    fold_(module)
    recipes = architecture.recipes(merge_qkv=config.model.merge_qkv)
    weights = ExportWeights(engine.model, recipes, None, {})
    exported = {name: weights.gather(name).clone() for name in recipes if ".experts." in name}
    return Found(first, num_parameters(module), step, stored(), exported)


@pytest.mark.parametrize(
    ("quant_format", "layouts"),
    [
        ("nf4", ("ep 2", "ep 4")),
        ("nvfp4", ("ddp 2", "fsdp 2", "ep 2", "hsdp 2x2", "ep 2, fsdp 2")),
        ("block_fp8", ("fsdp 2", "ep 2, fsdp 2")),
    ],
)
def test_bytes_gradients_and_merges_do_not_depend_on_the_placement(
    quant_format: str, layouts: tuple[str, ...], tmp_path: Path, run_ranks
) -> None:
    # Catches global scales of a shard, noise by the rank's own index, experts under another one's number, bytes that
    # mixed precision casts, and a merge of other rows than the rank's own.
    write_config(tmp_path, SHAPE)
    [wanted] = run_ranks(lambda: run(config_of(tmp_path, quant_format, ONE)), 1)
    assert sum(".experts." in name for name in wanted.first) == (6 if quant_format == "nvfp4" else 4)
    for layout in layouts:
        num_ranks, train = LAYOUTS[layout]
        found = run_ranks(lambda train=train: run(config_of(tmp_path, quant_format, train)), num_ranks)
        for one in found:
            assert one.num_weights == wanted.num_weights
            torch.testing.assert_close(one.first, wanted.first, rtol=0, atol=0)
        differences = compare(found[0].step, wanted.step)
        assert all(one.is_within for one in differences.values()), (layout, differences)
        for name, tensor in wanted.exported.items():
            # Weights that the merge leaves on the border of two codes may fall to either side.
            assert (found[-1].exported[name] - tensor).norm() <= 1e-2 * tensor.norm(), (layout, name)
    assert any(not torch.equal(wanted.merged[name], value) for name, value in wanted.first.items())


def write_weights(folder: Path, *, is_quantised: bool) -> None:
    """A checkpoint in bf16 or in blocks of E4M3, under the names of transformers."""
    stored = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["mlp.gate", "lm_head"]}
    write_config(folder, {**SHAPE, **({"quantization_config": stored} if is_quantised else {})})
    architecture = read_architecture(config_of(folder, "nf4", ONE).model)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(size, generator=generator).bfloat16()
        for name, size in source_shapes(architecture.recipes(merge_qkv=True)).items()
    }
    for name in [one for one in tensors if one.endswith("_proj.weight")] if is_quantised else ():
        tensors[name], tensors[f"{name}_scale_inv"] = quantize_block_fp8(tensors[name], 32)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("mode", ["all_ranks", "broadcast"])
@pytest.mark.parametrize("quant_format", ["nvfp4", "block_fp8", "stored"])
def test_each_rank_reads_and_quantises_its_own_experts(quant_format: str, mode: str, tmp_path: Path, run_ranks) -> None:
    # Catches ranks that read all experts, those of a neighbour, and stored codes that are quantised again.
    is_stored = quant_format == "stored"
    quant_format = "block_fp8" if is_stored else quant_format
    write_weights(tmp_path, is_quantised=is_stored)
    total = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))

    def load(train: dict[str, object]) -> tuple[dict[str, Tensor], float]:
        config = config_of(tmp_path, quant_format, train, mode=mode)
        config = one_process(config) if train == ONE else config
        mesh = Mesh(parallel_dims(config, runtime.world_size()), "cpu")
        with counted_reads() as sizes:
            engine = build_engine(config, read_architecture(config.model), mesh, torch.device("cpu"))
        model = engine.model
        held = {name: model.parts.gather(name, one) for name, one in model.module.named_parameters()}
        return {name: one for name, one in held.items() if ".adapter." not in name}, sum(sizes) / total

    [(wanted, share)] = run_ranks(lambda: load(ONE), 1)
    codes = wanted["model.layers.0.mlp.experts.gate_up_proj.weight"]
    assert codes.dtype == torch.uint8
    if is_stored:
        with SafetensorsSource(tmp_path) as source:
            up = source.read("model.layers.0.mlp.experts.5.up_proj.weight").view(torch.uint8)
        assert torch.equal(codes.flatten(0, 1)[5 * 64 + 32 : 6 * 64], up)
    for layout in ("ep 2", "fsdp 2"):
        for rank, (found, part) in enumerate(run_ranks(lambda layout=layout: load(LAYOUTS[layout][1]), 2)):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            assert part == pytest.approx((share / 2) if mode == "all_ranks" else share * (rank == 0))
