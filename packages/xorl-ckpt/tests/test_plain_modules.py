"""Modules and optimizers of torch as they come: saved, loaded, exported and read back without anything of xorl's."""

import pytest
import torch
from torch import nn

from xorl.ckpt import Checkpointer, CheckpointError, SafetensorsSource, export_hf, load_weights


def module_and(kind: type[torch.optim.Optimizer], **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    return module, kind(module.parameters(), lr=0.1, **options)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    module(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.SGD, {}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_an_optimizer_of_torch_continues_to_the_bit(tmp_path, kind, options) -> None:
    # Catches moments, step counts or a learning rate that a resumed run does not have.
    module, optimizer = module_and(kind, **options)
    train(module, optimizer, 1)
    optimizer.param_groups[0]["lr"] = 0.05
    Checkpointer(str(tmp_path)).save(1, {"model": module, "optimizer": optimizer})
    other, others_optimizer = module_and(kind, **options)
    Checkpointer(tmp_path).load(str(tmp_path / "global_step_1"), {"model": other, "optimizer": others_optimizer})
    assert others_optimizer.param_groups[0]["lr"] == 0.05
    for seed in (2, 3):
        train(module, optimizer, seed)
        train(other, others_optimizer, seed)
    torch.testing.assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)


def test_what_cannot_be_saved_of_an_optimizer_is_said(tmp_path) -> None:
    # Catches a state that is left out silently, and an optimizer whose parameters nothing names.
    module, optimizer = module_and(torch.optim.AdamW)
    with pytest.raises(CheckpointError, match="4 parameters of the optimizer AdamW have no name; pass the module"):
        Checkpointer(tmp_path).save(1, {"optimizer": optimizer})
    module, optimizer = module_and(torch.optim.LBFGS)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        (loss := module(torch.ones(2, 4)).square().sum()).backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    with pytest.raises(CheckpointError, match="LBFGS keeps a list as"):
        Checkpointer(tmp_path).save(1, {"model": module, "optimizer": optimizer})


def test_a_plain_module_is_exported_and_read_without_recipes(tmp_path) -> None:
    # Catches a hand-written recipe for each parameter.
    module, other = module_and(torch.optim.SGD)[0], module_and(torch.optim.SGD)[0]
    export_hf(dict(module.named_parameters()), None, str(tmp_path / "out"), hf_config={"model_type": "mine"})
    load_weights(dict(other.named_parameters()), None, SafetensorsSource(str(tmp_path / "out")))
    torch.testing.assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)
    wider = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        load_weights(dict(wider.named_parameters()), None, SafetensorsSource(tmp_path / "out"))
