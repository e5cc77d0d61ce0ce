"""Corrections of routers: nothing changes a bit of them but `train.router_correction_rate`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from layouts import LAYOUTS, ONE_PROCESS, engine_for, run_config
from passes import export_to, forward_backward_of
from placement import whole
from tiny_models import hf_config, write_config
from xorl.ckpt.reader import source_shapes
from xorl.core.nn.moe import MixtureOfExperts
from xorl.train.model_source import read_architecture

FAMILY = "glm4_moe"
RATE = 1e-2
FURTHER = "model.layers.2.eh_proj.weight"
IN_BF16 = {"enable_mixed_precision": True, "param_dtype": "bf16", "reshard_after_forward": True}


def write_model(folder: Path) -> dict[str, Tensor]:
    """Weights in bf16, corrections in fp32, and a layer that predicts further tokens."""
    write_config(folder, hf_config(FAMILY))
    generator = torch.Generator().manual_seed(0)
    recipes = read_architecture(run_config(folder.parent, folder.name, {}).model).recipes(merge_qkv=True)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in source_shapes(recipes).items()}
    saved = {name: w if name.endswith("correction_bias") else w.mul(0.2).bfloat16() for name, w in weights.items()}
    saved[FURTHER] = torch.randn(3, 2, generator=generator).bfloat16()
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    return saved


@pytest.mark.parametrize("layout", ["fsdp 2", "ep 2", "tp 2, fsdp"])
def test_corrections_stay_as_they_are(layout: str, run_ranks, tmp_path: Path) -> None:
    # Catches corrections that are gathered or exported in bf16, decayed, dropped, or freed with a router that is a unit
    # of its own, and layers that predict further tokens and get lost.
    saved = write_model(tmp_path / FAMILY)
    name = next(name for name in saved if name.endswith("correction_bias"))
    train = {**LAYOUTS[layout].train, **IN_BF16, "weight_decay": 0.5}
    folder = {"config_path": None, "model_path": str(tmp_path / FAMILY), "basic_modules": ["gate"]}

    def run() -> list[Tensor]:
        config = run_config(tmp_path, FAMILY, train, of_model=folder)
        engine = engine_for(config)
        used: list[Tensor] = []
        for mixture in engine.model.module.modules():
            if isinstance(mixture, MixtureOfExperts):
                mixture.register_forward_pre_hook(lambda mixture, _: used.append(mixture.correction.detach().clone()))
        for step in range(2):
            engine.optim_step(1e-2, forward_backward_of(engine, config, step).num_trained_tokens)
        export_to(tmp_path / "export", engine, config)
        return used

    for used in run_ranks(run, 2):
        assert used
        assert all(torch.equal(one, saved[name]) for one in used)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(exported[name], saved[name])
    assert {key for key, tensor in exported.items() if tensor.dtype == torch.float32} == {name}
    assert torch.equal(exported[FURTHER], saved[FURTHER])
    assert exported.keys() == saved.keys()
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"


def corrected(layout: str, folder: Path) -> list[Tensor]:
    """The corrections of a model's layers after two steps that change them."""
    options = {**(LAYOUTS[layout].train if layout else ONE_PROCESS), "router_correction_rate": RATE}
    config = run_config(folder, FAMILY, options, of_model={"config_path": None, "model_path": str(folder / FAMILY)})
    engine = engine_for(config)
    for step in range(2):
        losses = forward_backward_of(engine, config, step)
        engine.correct_routers(losses, engine.optim_step(1e-2, losses.num_trained_tokens))
    mixtures = [each for each in engine.model.module.modules() if isinstance(each, MixtureOfExperts)]
    return [whole(each.correction) for each in mixtures]


@pytest.mark.parametrize("layout", ["fsdp 2", "ep 2", "tp 2, fsdp", "pp 2"])
def test_corrections_even_out_the_load(layout: str, run_ranks, tmp_path: Path) -> None:
    # Catches counts of one rank alone, of all layers together, and the wrong direction.
    saved = write_model(tmp_path / FAMILY)
    name = next(name for name in saved if name.endswith("correction_bias"))
    [[one]] = run_ranks(lambda: corrected("", tmp_path), 1)
    steps = (one - saved[name]) / RATE
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    assert steps.abs().max() <= 2
    assert steps.any()
    by_rank = run_ranks(lambda: corrected(layout, tmp_path), 2)
    found = [other for of_rank in by_rank for other in of_rank]
    assert len(found) == (1 if layout == "pp 2" else 2)  # one stage has no experts
    assert all(torch.equal(other, one) for other in found)
