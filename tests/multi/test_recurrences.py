"""The decays of recurrences: sharded, trained, saved and exported in fp32, whatever the dtype of other parameters."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from layouts import LAYOUTS, engine_for, run_config
from passes import export_to, forward_backward_of
from tiny_models import hf_config, write_config
from xorl.core.nn.gated_delta_net import Decay

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
        engine = engine_for(config)
        used: list[Tensor] = []
        for module in engine.model.module.modules():
            if isinstance(module, Decay):
                module.register_forward_pre_hook(lambda module, _: used.append(module.A_log.detach().clone()))
        parameter = engine.model.module.get_parameter(NAME)
        before = engine.model.shares.gather(NAME, parameter).clone()
        engine.optim_step(1e-4, forward_backward_of(engine, config).num_trained_tokens)
        after = engine.model.shares.gather(NAME, parameter).clone()
        export_to(tmp_path / "export", engine, config)
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
