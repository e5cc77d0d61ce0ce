"""Decays of recurrences and corrections of routers: in fp32 whatever the dtype of other parameters; what changes them.

test_read_and_exported.py has their files.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from layouts import LAYOUTS, ONE_PROCESS, engine_for, run_config
from passes import forward_backward_of
from placement import whole
from ranks import Launch, Launches
from tiny_models import hf_config, write_config
from xorl.core.nn.gated_delta_net import Decay
from xorl.core.nn.moe import MixtureOfExperts
from xorl.lora.adam import Adam
from xorl.train.engine import Engine
from xorl.train.verify import _draw

IN_BF16 = {"enable_mixed_precision": True, "param_dtype": "bf16", "reshard_after_forward": True}
DECAYS, CORRECTIONS = "qwen3_5_text", "glm4_moe"
LR, RATE = 1e-4, 1e-2
# By family: what holds them, and their name there.
HELD: dict[str, tuple[type[nn.Module], str]] = {DECAYS: (Decay, "A_log"), CORRECTIONS: (MixtureOfExperts, "correction")}
CASES = [
    *((DECAYS, layout) for layout in ("fsdp 2", "tp 2, fsdp", "ulysses 2, ddp")),
    *((CORRECTIONS, layout) for layout in ("fsdp 2", "ep 2", "tp 2, fsdp")),
]
SUMMED = ("fsdp 2", "ddp 2")
EVENED = ("fsdp 2", "ep 2", "tp 2, fsdp", "pp 2")


def tensors_of(engine: Engine, family: str) -> list[Tensor]:
    """Whole copies of the decays or corrections of a rank's layers. Collective."""
    named, gather = engine.model.module.named_parameters(), engine.model.shares.gather
    return [gather(name, one).clone() for name, one in named if name.endswith(HELD[family][1])]


def after_a_step(folder: Path, family: str, layout: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """What the layers compute with, and what the first has before and after a step."""
    train = {**LAYOUTS[layout].train, **IN_BF16, "weight_decay": 0.5 if family == CORRECTIONS else 0.0}
    # A router that is a unit of its own is freed after its use.
    of_model = {"basic_modules": ["gate"]} if family == CORRECTIONS else {}
    config = run_config(folder, family, train, of_model=of_model)
    engine = engine_for(config)
    _draw(engine.model.module)
    used: list[Tensor] = []
    kind, attribute = HELD[family]
    for module in engine.model.module.modules():
        if isinstance(module, kind):
            module.register_forward_pre_hook(lambda one, _: used.append(getattr(one, attribute).detach().clone()))
    before, *_ = tensors_of(engine, family)
    engine.optim_step(LR, forward_backward_of(engine, config).num_trained_tokens)
    return used, before, tensors_of(engine, family)[0]


def summed(folder: Path, layout: str) -> list[Tensor]:
    """The gradients of a rank's decays after a step of several micro-batches."""
    config = run_config(folder, DECAYS, {**(LAYOUTS[layout].train if layout else ONE_PROCESS), **IN_BF16})
    engine = engine_for(config)
    forward_backward_of(engine, config)
    named = engine.model.module.named_parameters()
    return [whole(parameter.grad) for name, parameter in named if name.endswith(HELD[DECAYS][1])]


def corrected(folder: Path, layout: str) -> tuple[list[Tensor], list[Tensor]]:
    """The corrections of a rank's layers before and after two steps that change them."""
    options = {**(LAYOUTS[layout].train if layout else ONE_PROCESS), "router_correction_rate": RATE}
    config = run_config(folder, CORRECTIONS, options)
    engine = engine_for(config)
    _draw(engine.model.module)
    before = tensors_of(engine, CORRECTIONS)
    for step in range(2):
        losses = forward_backward_of(engine, config, step)
        engine.correct_routers(losses, engine.optim_step(1e-2, losses.num_trained_tokens))
    mixtures = [each for each in engine.model.module.modules() if isinstance(each, MixtureOfExperts)]
    return before, [whole(each.correction) for each in mixtures]


def decayed_by(folder: Path) -> set[str]:
    """The last parts of the names of parameters that the weight decay of a client's step changes."""
    config = run_config(folder, DECAYS, ONE_PROCESS)
    engine = engine_for(config)
    _draw(engine.model.module)
    named = {name: one for name, one in engine.model.module.named_parameters() if one.requires_grad}
    before = {name: one.detach().clone() for name, one in named.items()}
    for one in named.values():
        one.grad = torch.zeros_like(one)
    engine.optim_step_with(Adam(lr=1e-2, weight_decay=0.5), 1.0, None)
    return {name.rpartition(".")[2] for name, one in named.items() if not torch.equal(one, before[name])}


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = tmp_path_factory.mktemp("models")
    for family in HELD:
        write_config(folder / family, hf_config(family))
    cells = {(family, layout): (2, partial(after_a_step, folder, family, layout)) for family, layout in CASES}
    cells |= {("evened", layout): (2 if layout else 1, partial(corrected, folder, layout)) for layout in ("", *EVENED)}
    cells |= {("summed", layout): (2 if layout else 1, partial(summed, folder, layout)) for layout in ("", *SUMMED)}
    cells["decayed", ""] = (1, partial(decayed_by, folder))
    return launch(cells)


def test_a_client_cannot_decay_what_has_no_weight_decay(found: Launches) -> None:
    # Catches decays of recurrences that shrink in each step because a client asked for weight decay.
    [names] = found("decayed", "")
    assert "weight" in names
    assert not names & {"A_log", "dt_bias"}


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_decays_and_corrections_are_in_fp32_everywhere(family: str, layout: str, found: Launches) -> None:
    # Catches decays that are gathered, reduced or kept in bf16, in which small updates are lost, and corrections that
    # are gathered in bf16, decayed, dropped, or freed with a router that is a unit of its own.
    for used, before, after in found(family, layout):
        assert used
        assert all(each.dtype == torch.float32 for each in (*used, before, after))
        assert not torch.equal(used[0], used[0].bfloat16().float())
        assert set(used[0].flatten().tolist()) <= set(before.flatten().tolist())
        if family == CORRECTIONS:
            assert torch.equal(after, before)
        else:
            # A bf16 number of this size would not move by less than 1e-2.
            assert ((after - before).abs() - LR).abs().max() < 0.2 * LR


@pytest.mark.parametrize("layout", SUMMED)
def test_gradients_of_decays_are_sums_over_micro_batches(layout: str, found: Launches) -> None:
    # Catches sums of earlier micro-batches that replicas sum again with each later one.
    [expected] = found("summed", "")
    for gradients in found("summed", layout):
        torch.testing.assert_close(gradients, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("layout", EVENED)
def test_corrections_even_out_the_load(layout: str, found: Launches) -> None:
    # Catches counts of one rank alone, of all layers together, and the wrong direction.
    [([before], [one])] = found("evened", "")
    steps = (one - before) / RATE
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    assert steps.abs().max() <= 2
    assert steps.any()
    others = [other for _, of_rank in found("evened", layout) for other in of_rank]
    assert len(others) == (1 if layout == "pp 2" else 2)  # one stage has no experts
    assert all(torch.equal(other, one) for other in others)
