"""Weights that ranks read from files and export again return to the bit, also experts in stacks and from MXFP4."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from layouts import LAYOUTS, ONE_PROCESS, engine_for, run_config
from passes import export_to
from ranks import Launch, Launches
from tiny_models import BESIDE, hf_config, write_config
from xorl.ckpt.reader import source_shapes
from xorl.core import runtime
from xorl.core.models.mxfp4 import BLOCKS, SCALES, dequantized
from xorl.core.models.stacks import stack_of, stacked_shape
from xorl.train.model_source import read_architecture

# Blocks of 32 divide all rows of MXFP4.
GPT_OSS = hf_config("gpt_oss", hidden_size=64, intermediate_size=32)
MODELS = {
    "stacked": GPT_OSS,
    "mxfp4": GPT_OSS,
    "beside a block": hf_config("gemma4_text", **BESIDE),
    "corrections": hf_config("glm4_moe"),
    "decays": hf_config("qwen3_5_text"),
    "scalars and constants": hf_config("apertus"),
    "read by all ranks": hf_config("llama"),
}
EXPERTS = ("stacked", "mxfp4", "beside a block", "corrections")
IN_FP32 = ("correction_bias", ".A_log", ".dt_bias")
# Of a layer that predicts further tokens, which is copied.
FURTHER = "model.layers.2.eh_proj.weight"
CASES = [
    (name, layout)
    for name in MODELS
    for layout in ("", "fsdp 2", "ep 2", "tp 2, fsdp", "pp 2")
    if layout != "ep 2" or name in EXPERTS
]


def write_model(folder: Path) -> dict[str, Tensor]:
    """Random weights in bf16 and fp32, or experts in MXFP4. Returns the tensors that an export should have."""
    name_of_model = folder.name
    write_config(folder, MODELS[name_of_model])
    architecture = read_architecture(run_config(folder.parent, name_of_model, {}).model)
    names = architecture.spec.checkpoint_names.experts
    shapes = source_shapes(architecture.recipes(merge_qkv=True))
    members: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        members.setdefault(name if names is None else stack_of(name, names), []).append(shape)
    generator = torch.Generator().manual_seed(0)
    saved: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for name, found in members.items():
        shape = found[0] if name in shapes else stacked_shape(found[0], len(found), name, names)
        saved[name] = torch.randn(shape, generator=generator).mul(0.2)
        if not name.endswith(IN_FP32):
            saved[name] = saved[name].bfloat16()
        if name_of_model == "mxfp4" and len(shape) == 3:
            num_experts, num_inputs, num_outputs = shape
            size = (num_experts, num_outputs, num_inputs // 32)
            blocks = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 126, size, generator=generator, dtype=torch.uint8)
            saved[name] = convert_moe_packed_tensors(blocks, scales)
            written |= {f"{name}{BLOCKS}": blocks, f"{name}{SCALES}": scales}
        else:
            written[name] = saved[name]
    if name_of_model == "corrections":
        saved[FURTHER] = written[FURTHER] = torch.randn(3, 2, generator=generator).bfloat16()
    if name_of_model == "mxfp4":
        write_config(folder, {**MODELS[name_of_model], "quantization_config": {"quant_method": "mxfp4"}})
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    return saved


def exported(folder: Path, name: str, layout: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The tensors and config.json that a layout exports of a model that it has read; on rank 0."""
    train = {
        **(LAYOUTS[layout].train if layout else ONE_PROCESS),
        "enable_mixed_precision": True,
        "param_dtype": "bf16",
        "load_weights_mode": "all_ranks" if name == "read by all ranks" else "broadcast",
    }
    of_model = {"config_path": None, "model_path": str(folder / name)}
    config, target = run_config(folder, name, train, of_model=of_model), folder / f"{name}, {layout}"
    export_to(target, engine_for(config), config)
    if runtime.global_rank() > 0:
        return {}, {}
    return load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Launches, dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("models")
    saved = {name: write_model(folder / name) for name in MODELS}
    cells = {(name, layout): (2 if layout else 1, partial(exported, folder, name, layout)) for name, layout in CASES}
    return launch(cells), saved


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_weights_come_back_to_the_bit(name: str, layout: str, found) -> None:
    # Catches rows or columns of other ranks, layers under the numbers that they have within a stage, a file of one
    # stage's tensors, a shard without rows that is read or gathered wrongly, and a constant that is lost, cast or of
    # one dim. Of experts: outputs of gate and up that change places, transposed matrices, nibbles in the wrong order,
    # scales of other blocks, ranks that read the experts of others, and an export that says that it is quantised.
    # Corrections and decays that are exported in bf16, and layers that predict further tokens and get lost.
    launches, saved = found
    tensors, config = launches(name, layout)[0]
    assert tensors.keys() == saved[name].keys()
    for key, tensor in tensors.items():
        assert tensor.dtype == saved[name][key].dtype, key
        assert torch.equal(tensor, saved[name][key]), key
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_mxfp4_has_all_values_of_transformers() -> None:
    # Catches a code, a sign or a power of two that is read otherwise.
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 16)
    scales = torch.arange(100, 116, dtype=torch.uint8).view(1, 2, 8)
    found = dequantized(blocks, scales)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.transpose(1, 2), convert_moe_packed_tensors(blocks, scales))
