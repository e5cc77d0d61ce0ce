"""The decays of recurrences: sharded, trained, saved and exported in fp32, whatever the dtype of other parameters."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from layouts import LAYOUTS, mesh_for, run_config
from tiny_models import hf_config, write_config
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.nn.gated_delta_net import Decay
from xorl.train import verify
from xorl.train.build import build_engine
from xorl.train.export.folder import ModelExport
from xorl.train.export.rest import Rest
from xorl.train.model_source import read_architecture

FAMILY = "qwen3_5_text"
IN_BF16 = {"enable_mixed_precision": True, "param_dtype": "bf16", "reshard_after_forward": True}
NAME = "model.layers.0.linear_attn.decay.A_log"


@pytest.mark.parametrize("layout", ["fsdp 2", "tp 2, fsdp", "ulysses 2, ddp"])
def test_decays_are_in_fp32_everywhere(layout: str, run_ranks, tmp_path: Path) -> None:
    # Catches decays that are gathered, reduced, kept or exported in bf16, in which small updates are lost.
    write_config(tmp_path / FAMILY, hf_config(FAMILY))
    train = {**LAYOUTS[layout].train, **IN_BF16}

    def run() -> tuple[list[Tensor], Tensor, Tensor]:
        config = run_config(tmp_path, FAMILY, train)
        architecture = read_architecture(config.model)
        runtime.seed_everything(0)
        mesh = mesh_for(config)
        engine = build_engine(config, architecture, mesh, torch.device("cpu"))
        used: list[Tensor] = []
        for module in engine.model.module.modules():
            if isinstance(module, Decay):
                module.register_forward_pre_hook(lambda module, _: used.append(module.A_log.detach().clone()))
        parameter = engine.model.module.get_parameter(NAME)
        before = engine.model.shares.gather(NAME, parameter).clone()
        batches = verify.batches_of(0, 4, architecture.config.vocab_size, config, mesh)
        losses = engine.forward_backward(batches, cross_entropy)
        engine.optim_step(1e-4, losses.num_trained_tokens)
        after = engine.model.shares.gather(NAME, parameter).clone()
        recipes = architecture.recipes(merge_qkv=config.model.merge_qkv)
        ModelExport(engine.model, recipes, architecture, torch.bfloat16, None, Rest.of(architecture)).write(
            tmp_path / "export"
        )
        return used, before, after

    for used, before, after in run_ranks(run, 2):
        assert all(each.dtype == torch.float32 for each in (*used, before, after))
        assert not torch.equal(used[0], used[0].bfloat16().float())
        # A bf16 number of this size would not move by less than 1e-2.
        assert ((after - before).abs() - 1e-4).abs().max() < 2e-5
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(exported["model.layers.0.linear_attn.A_log"], after)
    assert {name for name, each in exported.items() if each.dtype == torch.float32} == {
        f"model.layers.0.linear_attn.{name}" for name in ("A_log", "dt_bias")
    }
