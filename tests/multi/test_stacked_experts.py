"""Files that stack the experts of a layer: read and exported on several ranks to the bit, also from MXFP4."""

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
from xorl.core.models.mxfp4 import BLOCKS, SCALES, dequantized
from xorl.core.models.stacks import stack_of, stacked_shape
from xorl.train.model_source import read_architecture

# Blocks of 32 divide all rows of MXFP4.
GPT_OSS = hf_config("gpt_oss", hidden_size=64, intermediate_size=32)
SHAPES = {"stacked": GPT_OSS, "mxfp4": GPT_OSS, "beside a block": hf_config("gemma4_text", **BESIDE)}
IN_BF16 = {"enable_mixed_precision": True, "param_dtype": "bf16"}


def write_model(folder: Path, *, is_quantized: bool) -> dict[str, Tensor]:
    """A model whose experts are stacked, or stored as MXFP4. Returns the tensors of the former."""
    shape_of_model = SHAPES[folder.name]
    write_config(folder, shape_of_model)
    architecture = read_architecture(run_config(folder.parent, folder.name, {}).model)
    names = architecture.spec.checkpoint_names.experts
    assert names is not None
    shapes = source_shapes(architecture.recipes(merge_qkv=True))
    members: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        members.setdefault(stack_of(name, names), []).append(shape)
    generator = torch.Generator().manual_seed(0)
    saved: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for name, found in members.items():
        shape = found[0] if name in shapes else stacked_shape(found[0], len(found), name, names)
        saved[name] = torch.randn(shape, generator=generator).mul(0.2).bfloat16()
        if is_quantized and len(shape) == 3:
            num_experts, num_inputs, num_outputs = shape
            size = (num_experts, num_outputs, num_inputs // 32)
            blocks = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 126, size, generator=generator, dtype=torch.uint8)
            saved[name] = convert_moe_packed_tensors(blocks, scales)
            written |= {f"{name}{BLOCKS}": blocks, f"{name}{SCALES}": scales}
        else:
            written[name] = saved[name]
    if is_quantized:
        write_config(folder, {**shape_of_model, "quantization_config": {"quant_method": "mxfp4"}})
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    return saved


def export(folder: Path, name: str, layout: str) -> None:
    """Load a model in a layout and export it."""
    train = {**(LAYOUTS[layout].train if layout else ONE_PROCESS), **IN_BF16}
    of_model = {"config_path": None, "model_path": str(folder / name)}
    config = run_config(folder, name, train, of_model=of_model)
    export_to(folder / f"{name}, {layout}", engine_for(config), config)


CASES = [(name, layout) for name in SHAPES for layout in ("", "fsdp 2", "ep 2", "tp 2, fsdp", "pp 2")]


@pytest.fixture(scope="module")
def found(
    launch: Launch, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Launches, Path, dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("models")
    saved = {name: write_model(folder / name, is_quantized=name == "mxfp4") for name in SHAPES}
    calls = {(name, layout): (2 if layout else 1, partial(export, folder, name, layout)) for name, layout in CASES}
    return launch(calls), folder, saved


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_experts_come_back_to_the_bit(name: str, layout: str, found) -> None:
    # Catches outputs of gate and up that change places, transposed matrices, nibbles in the wrong order, scales of
    # other blocks, ranks that read the experts of others, and an export that says that it is quantised.
    launches, folder, saved = found
    launches(name, layout)
    exported = load_file(folder / f"{name}, {layout}" / "model.safetensors")
    assert exported.keys() == saved[name].keys()
    assert all(torch.equal(tensor, saved[name][key]) for key, tensor in exported.items())
    config = json.loads((folder / f"{name}, {layout}" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_mxfp4_has_all_values_of_transformers() -> None:
    # Catches a code, a sign or a power of two that is read otherwise.
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 16)
    scales = torch.arange(100, 116, dtype=torch.uint8).view(1, 2, 8)
    found = dequantized(blocks, scales)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.transpose(1, 2), convert_moe_packed_tensors(blocks, scales))
