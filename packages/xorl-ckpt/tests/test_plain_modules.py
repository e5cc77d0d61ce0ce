"""Modules and optimizers of torch as they come: saved, loaded, exported and read back without anything of xorl's."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import xorl.ckpt.state
from xorl.ckpt import Checkpointer, CheckpointError, SafetensorsSource, export_hf, layout, load_weights
from xorl.ckpt.export import published, source_groups, write_model
from xorl.ckpt.saved_tensors import SavedParameters


def state_of(kind: type[torch.optim.Optimizer], **options: object) -> dict[str, Any]:
    """A training state: a module, and an optimizer of it."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    return {"model": module, "optimizer": kind(module.parameters(), **{"lr": 0.1, **options})}


def train(state: dict[str, Any], seed: int) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    state["model"](x).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def assert_same_weights(state: dict[str, Any], other: dict[str, Any]) -> None:
    torch.testing.assert_close(other["model"].state_dict(), state["model"].state_dict(), rtol=0, atol=0)


class Counting(torch.optim.Optimizer):
    """Counts its steps in an int, as optimizers outside torch may do."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"] / state["step"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Counting, {}),
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
    state, other = state_of(kind, **options), state_of(kind, **options)
    for seed in (0, 1):
        train(state, seed)
    state["optimizer"].param_groups[0]["lr"] = 0.05
    Checkpointer(str(tmp_path)).save(1, state)
    Checkpointer(tmp_path).load(str(tmp_path / "global_step_1"), other)
    assert other["optimizer"].param_groups[0]["lr"] == 0.05
    for seed in (2, 3):
        train(state, seed)
        train(other, seed)
    assert_same_weights(state, other)


@pytest.mark.parametrize(("kind", "options"), [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})])
@pytest.mark.parametrize("is_live", [False, True])
def test_parameters_without_gradients_have_no_state_after_loading(tmp_path, kind, options, is_live) -> None:
    # Catches a run that cannot resume itself because a layer is frozen or unused, and state that a parameter keeps from
    # after the checkpoint.
    state, other = state_of(kind, **options), state_of(kind, **options)
    state["model"][0].requires_grad_(False)
    train(state, 1)
    path = Checkpointer(tmp_path).save(1, state)
    if is_live:
        train(other, 5)
    other["model"][0].requires_grad_(False)
    Checkpointer(tmp_path).load(path, other)
    kept = other["optimizer"].state
    assert [name for name, each in other["model"].named_parameters() if kept.get(each)] == ["2.weight", "2.bias"]
    for each in (state, other):
        each["model"].requires_grad_(True)
        train(each, 2)
    assert_same_weights(state, other)


@pytest.mark.parametrize(
    ("kind", "saved", "other"),
    [
        (torch.optim.SGD, {"lr": 1, "momentum": 0.9}, {"lr": 1, "momentum": 0.9}),
        (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}, {"weight_decay": 0, "momentum": 1}),
        (torch.optim.AdamW, {"betas": (0.5, 0.75)}, {"betas": (0.0, 0.0)}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.5), "foreach": False}, {"lr": 1, "foreach": True}),
        (torch.optim.AdamW, {"lr": 1}, {"lr": torch.tensor(0.5), "foreach": False}),
        (torch.optim.AdamW, {}, {"betas": (torch.tensor(0.1).double(), torch.tensor(0.1).double()), "foreach": False}),
        (torch.optim.Adafactor, {}, {"eps": (0.1, 0.1)}),
    ],
)
@pytest.mark.parametrize("scheduled", ["both", "saved"])
def test_hyperparameters_come_back_whatever_their_type(tmp_path, kind, saved, other, scheduled) -> None:
    # Catches a resume that 1 instead of 1.0 blocks, betas and flags that are not restored, and a scheduler created
    # after loading, whose initial_lr is only in the checkpoint.
    state, fresh = state_of(kind, **saved), state_of(kind, **other)
    scheduler = torch.optim.lr_scheduler.StepLR(state["optimizer"], 1, gamma=0.5)
    train(state, 1)
    scheduler.step()
    path = Checkpointer(tmp_path).save(1, state)
    if scheduled == "both":
        torch.optim.lr_scheduler.StepLR(fresh["optimizer"], 1, gamma=0.5)
    Checkpointer(tmp_path).load(path, fresh)
    skipped = ("params", "foreach", "fused", "capturable", "differentiable")
    [expected], [found] = (
        [{key: value for key, value in group.items() if key not in skipped} for group in each["optimizer"].param_groups]
        for each in (state, fresh)
    )
    assert found == expected
    [group] = fresh["optimizer"].param_groups
    assert group.get("foreach") == other.get("foreach")
    assert isinstance(group["lr"], torch.Tensor) == isinstance(other.get("lr"), torch.Tensor)


@pytest.mark.parametrize(("kind", "options"), [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})])
def test_gradients_do_not_hinder_saving_or_loading(tmp_path, kind, options) -> None:
    # Catches a save or a resume between a backward pass and its step that is refused or loses the gradients.
    state = state_of(kind, weight_decay=0.1, **options)
    for step in (1, 2):
        state["model"](torch.ones(5, 4)).square().mean().backward()
        path = Checkpointer(tmp_path).save(step, state)
        other = state_of(kind, weight_decay=0.1, **options)
        other["model"](torch.ones(5, 4)).mean().backward()
        before = [parameter.grad.clone() for parameter in other["model"].parameters()]
        Checkpointer(tmp_path).load(path, other)
        after = [parameter.grad for parameter in other["model"].parameters()]
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        state["optimizer"].step()
        for mine, its in zip(other["model"].parameters(), state["model"].parameters(), strict=True):
            mine.grad = its.grad.clone()
        other["optimizer"].step()
        assert_same_weights(state, other)
        state["optimizer"].zero_grad()


def test_a_load_that_fails_leaves_the_optimizer_alone(tmp_path) -> None:
    # Catches moments that exist after "nothing was loaded", and another optimizer that is taken for the saved one.
    state = state_of(torch.optim.AdamW)
    train(state, 1)
    path = Checkpointer(tmp_path).save(1, state)
    for kind in (torch.optim.SGD, torch.optim.NAdam):
        other = state_of(kind)
        with pytest.raises(CheckpointError, match="missing from the checkpoint"):
            Checkpointer(tmp_path).load(path, other)
        assert not other["optimizer"].state
        assert other["optimizer"].param_groups[0]["lr"] == 0.1


def test_what_cannot_be_saved_of_an_optimizer_is_said(tmp_path) -> None:
    # Catches a state that is left out silently, and an optimizer whose parameters nothing names.
    with pytest.raises(CheckpointError, match="4 parameters of the optimizer AdamW have no name; pass the module"):
        Checkpointer(tmp_path).save(1, {"optimizer": state_of(torch.optim.AdamW)["optimizer"]})
    state = state_of(torch.optim.LBFGS)
    module, optimizer = state.values()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        (loss := module(torch.ones(2, 4)).square().sum()).backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    with pytest.raises(CheckpointError, match="LBFGS keeps a list as"):
        Checkpointer(tmp_path).save(1, state)


def test_a_plain_module_is_exported_and_read_without_recipes(tmp_path) -> None:
    # Catches a hand-written recipe for each parameter.
    module, other = (state_of(torch.optim.SGD)["model"] for _ in range(2))
    export_hf(dict(module.named_parameters()), None, str(tmp_path / "out"), hf_config={"model_type": "mine"})
    load_weights(dict(other.named_parameters()), None, SafetensorsSource(str(tmp_path / "out")))
    torch.testing.assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)
    wider = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        load_weights(dict(wider.named_parameters()), None, SafetensorsSource(tmp_path / "out"))


def counting_module() -> nn.Module:
    """A module with a counter of 0 dims, num_batches_tracked."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    module(torch.randn(5, 4))
    return module


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_counters_keep_their_dtype_and_come_back(tmp_path, dtype) -> None:
    # Catches a counter that is rounded to bfloat16, and buffers without dims that can be written but not read.
    module, other = counting_module(), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    folder = export_hf(module.state_dict(), None, tmp_path / "out", hf_config={"model_type": "mine"}, dtype=dtype)
    with SafetensorsSource(folder) as source:
        assert source.dtype("1.num_batches_tracked") == torch.int64
    for bucket_bytes in (1, 1 << 20):
        load_weights(other.state_dict(), None, SafetensorsSource(folder), bucket_bytes=bucket_bytes)
        for name, value in module.state_dict().items():
            expected = value.to(dtype or value.dtype).to(value.dtype) if value.is_floating_point() else value
            assert torch.equal(other.state_dict()[name], expected)
    assert json.loads((folder / "config.json").read_text())["dtype"] == ("bfloat16" if dtype else "float32")


def test_a_checkpoint_becomes_safetensors_without_recipes(tmp_path, manager) -> None:
    # Catches recipes by hand for each tensor, and a counter that is written as bfloat16.
    module = counting_module()
    path = Checkpointer(tmp_path / "run", manager=manager).save(1, {"model": module})
    with published(tmp_path / "out") as folder:
        write_model(folder, source_groups(SavedParameters(path, "model", None)), hf_config={})
    torch.testing.assert_close(
        load_file(tmp_path / "out" / "model.safetensors"), dict(module.state_dict()), rtol=0, atol=0
    )
    with pytest.raises(CheckpointError, match=r"part: 'other' is not a part of .*, which has model"):
        SavedParameters(path, "other", None)


def test_groups_of_other_parameters_are_refused(tmp_path):
    # Catches the learning rate of one module that is restored for another.
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": [*layer.parameters()], "lr": lr} for layer, lr in zip(model, (0.1, 0.5), strict=True)]
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(1, {"model": model, "optimizer": torch.optim.AdamW(groups)})
    for other in (groups[::-1], [{"params": [model[0].weight]}, {"params": [model[0].bias, *model[1].parameters()]}]):
        with pytest.raises(CheckpointError, match="the parameter groups of AdamW have other parameters than in the"):
            checkpointer.load(path, {"model": model, "optimizer": torch.optim.AdamW(other)})
    again = torch.optim.AdamW([{**group, "lr": 1.0} for group in groups])
    checkpointer.load(path, {"model": model, "optimizer": again})
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.5]


@pytest.mark.parametrize("saves_average", [True, False])
def test_an_average_of_the_weights_can_come_and_go(saves_average, tmp_path):
    # Catches names of the optimizer's state that depend on modules that it does not train.
    state, resumed, average = state_of(torch.optim.AdamW), state_of(torch.optim.AdamW), nn.Linear(2, 2)
    train(state, 1)
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(1, {**state, "average": average} if saves_average else state)
    checkpointer.load(path, resumed if saves_average else {**resumed, "average": average}, skip_parts=("average",))
    assert_same_weights(state, resumed)
    assert torch.equal(first_moment(resumed), first_moment(state))


def first_moment(state: dict[str, Any]) -> torch.Tensor:
    return state["optimizer"].state[state["model"][0].weight]["exp_avg"]


def test_names_of_older_checkpoints_are_recognised(tmp_path, monkeypatch):
    # Catches checkpoints of a model and an average of its weights that can no longer be loaded.
    state, resumed, average = state_of(torch.optim.AdamW), state_of(torch.optim.AdamW), nn.Linear(2, 2)
    train(state, 1)
    named = [(f"model.{name}", parameter) for name, parameter in state["model"].named_parameters()]
    with monkeypatch.context() as patched:
        patched.setattr(xorl.ckpt.state, "_named_parameters", lambda *given: named)
        patched.setattr(xorl.ckpt.state.OptimizerState, "_members", lambda self: [])
        path = Checkpointer(tmp_path).save(1, {**state, "average": average})
    assert "optimizer.model.0.weight.exp_avg" in layout.read_manifest(path).tensors
    Checkpointer(tmp_path).load(path, {**resumed, "average": nn.Linear(2, 2)})
    assert torch.equal(first_moment(resumed), first_moment(state))
