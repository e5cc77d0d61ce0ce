"""Optimizers, clipping and optimizer state on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from xorl.core.optim import OptimizerState, build_optimizer, scale_and_clip_


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def with_gradients(module: nn.Module, scale: float = 1.0) -> nn.Module:
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter) * scale
    return module


def test_gradients_are_divided_once_then_clipped_by_one_norm() -> None:
    # Catches clipping before the division, and a norm per parameter.
    module = with_gradients(model(), 10.0)
    expected = [p.grad.clone() / 7 for p in module.parameters()]
    norm = torch.cat([g.flatten() for g in expected]).norm()
    assert norm > 1.0
    measured = scale_and_clip_(list(module.parameters()), torch.tensor(7.0), 1.0)
    torch.testing.assert_close(measured, norm)
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / (norm + 1e-6))


@pytest.mark.parametrize("max_norm", [None, 0.0, 1e9])
def test_unclipped_gradients_are_only_divided(max_norm: float | None) -> None:
    # Catches a clip coefficient above one.
    module = with_gradients(model())
    expected = [p.grad.clone() / 2 for p in module.parameters()]
    scale_and_clip_(list(module.parameters()), 2.0, max_norm)
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_weight_decay_leaves_out_named_modules_and_parameters() -> None:
    # Catches norms and biases that are decayed although the options exclude them.
    module = model()
    optimizer = build_optimizer(
        "adamw", module.named_parameters(), lr=0.1, weight_decay=0.5, no_decay_modules=["1"], no_decay_params=["bias"]
    )
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: decay[id(p)] for name, p in module.named_parameters()}
    assert named == {
        "0.weight": 0.5, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.5, "2.bias": 0.0,
    }  # fmt: skip


def test_unmatched_no_decay_name_is_an_error() -> None:
    # Catches a misspelt exclusion that is silently ignored.
    with pytest.raises(ValueError, match="nrom"):
        build_optimizer("adamw", model().named_parameters(), lr=0.1, weight_decay=0.1, no_decay_modules=["nrom"])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_found_inf_skips_the_update_and_the_step_count(name: str) -> None:
    # Catches a torch version whose fused optimizers no longer read the flag that guards against NaN.
    module = with_gradients(model())
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = build_optimizer(name, module.named_parameters(), lr=0.1, weight_decay=0.1)
    optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(1.0)
    for parameter in module.parameters():
        parameter.grad.fill_(float("nan"))
    optimizer.step()
    for parameter, value in zip(module.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0)
    assert all(state["step"].item() == 0 for state in optimizer.state.values() if "step" in state)


def test_state_is_created_without_changing_parameters_and_continues_to_the_bit() -> None:
    # Catches a resumed optimizer whose moments or step counts differ from those of the run that was not stopped.
    module, twin = model(), model()
    optimizer = build_optimizer("adamw", module.named_parameters(), lr=0.1, weight_decay=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        with_gradients(module)
        optimizer.step()
        optimizer.zero_grad()
    saved = {k: v.clone() for k, v in OptimizerState(optimizer, module.named_parameters()).state_dict().items()}
    assert saved["0.weight.step"] == 3

    twin.load_state_dict(module.state_dict())
    other = build_optimizer("adamw", twin.named_parameters(), lr=0.1, weight_decay=0.1)
    state = OptimizerState(other, twin.named_parameters())
    assert set(state.state_dict()) == set(saved)
    torch.testing.assert_close(dict(twin.state_dict()), dict(module.state_dict()), rtol=0, atol=0)
    state.load_state_dict(saved)
    for owner, owners_optimizer in ((module, optimizer), (twin, other)):
        torch.manual_seed(9)
        with_gradients(owner)
        owners_optimizer.step()
    torch.testing.assert_close(dict(twin.state_dict()), dict(module.state_dict()), rtol=0, atol=0)
