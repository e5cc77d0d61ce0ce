"""Steps, refusals and files of a trainer of a user's own module, in one process."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchDataLoader

from xorl.ckpt import CheckpointError, CheckpointFailure
from xorl.core.optim import Schedule
from xorl.train.module.distributed import Sharding
from xorl.train.module.loader import DataLoader
from xorl.train.module.trainer import Trainer, next_token_loss
from xorl.train.observe.observer import DivergedError

VOCABULARY, LENGTH = 11, 5
IDS = torch.arange(2 * LENGTH).view(2, LENGTH)


class Model(nn.Module):
    def __init__(self, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, VOCABULARY)
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.embedding(ids))))


def rows(count: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (count, 2, LENGTH), generator=generator)
    # Few rows are trained throughout, so that a mean of means is far from the mean.
    for index in range(count):
        ids[index, 1, 1 + index % LENGTH :] = -100
    return [(row[0], row[1]) for row in ids]


def build(
    batch_size: int = 2, *, model: nn.Module | None = None, optimizer_class=torch.optim.AdamW, **options
) -> Trainer:
    options = {"learning_rate": 0.1, "device": "cpu", **options}
    return Trainer(Model() if model is None else model, optimizer_class, DataLoader(rows(), batch_size), **options)


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize(("batch_size", "grad_accum_steps"), [(1, 6), (2, 3), (3, 2)])
def test_accumulation_is_one_large_batch(batch_size: int, grad_accum_steps: int) -> None:
    # Catches means of means: rows have between 1 and 5 trained tokens.
    options = {"optimizer_class": torch.optim.SGD, "learning_rate": 1.0}
    whole = build(6, **options)
    split = build(batch_size, grad_accum_steps=grad_accum_steps, **options)
    [expected, measured] = [trainer.train(epochs=2, log_interval=1) for trainer in (whole, split)]
    for ours, theirs in zip(weights(whole), weights(split), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(expected, measured, strict=True):
        assert (theirs.step, theirs.epoch, theirs.num_trained_tokens) == (
            ours.step,
            ours.epoch,
            ours.num_trained_tokens,
        )
        assert (theirs.loss, theirs.grad_norm) == pytest.approx((ours.loss, ours.grad_norm), rel=1e-6)


def test_a_record_is_the_mean_over_trained_tokens_of_its_steps() -> None:
    # Catches a loss that is averaged over steps, or only that of the last one.
    model = Model()
    with torch.no_grad():
        losses = [
            (float(next_token_loss(model(ids[None]), labels[None])), int((labels != -100).sum()))
            for ids, labels in rows()
        ]
    trainer = build(2, model=model, learning_rate=0.0)
    [first, last] = trainer.train(log_interval=4)
    assert (first.step, last.step) == (4, 6)
    total = first.loss * first.num_trained_tokens + last.loss * last.num_trained_tokens
    assert total == pytest.approx(sum(loss for loss, _ in losses), rel=1e-5)
    assert first.num_trained_tokens + last.num_trained_tokens == sum(count for _, count in losses)


def test_epochs_and_steps_count_from_the_start_of_the_run() -> None:
    # Catches a second call that trains the same rows again, and a schedule that starts anew.
    schedule = Schedule(num_steps=12, peak=0.1, warmup_ratio=0.5, style="linear")
    straight, in_parts = (build(2, learning_rate=schedule) for _ in range(2))
    expected = straight.train(epochs=2, log_interval=1)
    measured = [record for steps in (1, 5, 9, 99) for record in in_parts.train(2, max_steps=steps, log_interval=1)]
    assert [(record.step, record.loss, record.lr) for record in measured] == [
        (record.step, record.loss, record.lr) for record in expected
    ]
    assert [record.lr for record in expected] == [schedule(step) for step in range(1, 13)]
    assert in_parts.train(2) == []


def test_what_is_not_finite_changes_nothing() -> None:
    # Catches weights that are poisoned by one bad batch, in a run that goes on.
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return next_token_loss(logits, labels) * (math.nan if trainer.step == 2 else 1.0)

    trainer = build(loss_fn=loss)
    trainer.train(max_steps=2)
    before = weights(trainer)
    with pytest.raises(DivergedError, match="step 3"):
        trainer.train()
    assert all(torch.equal(*pair) for pair in zip(before, weights(trainer), strict=True))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"loss_fn": lambda out, labels: out[..., 0]}, r"^loss_fn: .* one number, got a tensor of \[2, 5\].*sum"),
        ({"loss_fn": lambda out, labels: out.sum().item()}, r"^loss_fn: want a tensor, got float .*without \.item"),
        ({"loss_fn": lambda out, labels: None}, "^loss_fn: want a tensor, got NoneType None"),
        ({"loss_fn": lambda out, labels: out.detach().sum()}, "^loss_fn: its result has no gradient"),
        ({"learning_rate": [0.1, 0.2]}, r"^learning_rate: .* got list \[0.1, 0.2\]; .* pass a function"),
        ({"learning_rate": "1e-3"}, "^learning_rate: .* got str '1e-3'"),
        ({"learning_rate": lambda step: [0.1]}, r"^learning_rate: .* got list \[0.1\] in step 1"),
        ({"learning_rate": lambda step: 0.1 if step == 1 else None}, "^learning_rate: .* got NoneType None in step 2"),
    ],
)
def test_what_a_user_s_function_returns_is_checked_under_its_name(options: dict, told: str) -> None:
    # Catches errors from inside torch that name neither the argument nor what to return.
    with pytest.raises(ValueError, match=told):
        build(**options).train(epochs=1)


def test_nothing_to_train_on_is_an_error() -> None:
    # Catches a run that "succeeds" at a loss of 0.
    model, options = Model(), {"learning_rate": 0.1, "device": "cpu"}
    untrained = [(ids, torch.full_like(ids, -100)) for ids, _ in rows()]
    with pytest.raises(ValueError, match="no token of step 1"):
        Trainer(model, torch.optim.SGD, DataLoader(untrained, 2), **options).train()
    with pytest.raises(ValueError, match="yielded no batch"):
        Trainer(model, torch.optim.SGD, DataLoader(rows(2), 3), **options).train()
    with pytest.raises(ValueError, match="loss_fn"):
        Trainer(nn.Sequential(nn.Embedding(VOCABULARY, 2), nn.Flatten()), torch.optim.SGD, [IDS], **options).train()


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        (Model(), {"grad_accum_steps": 0}, "grad_accum_steps"),
        (Model(), {"grad_clip_norm": -1.0}, "grad_clip_norm must be above 0"),
        (Model(), {"mixed_precision_policy": "fp16"}, "'fp16'"),
        (Model(), {"optimizer_class": torch.optim.SGD(Model().parameters())}, "class"),
        (Model().bfloat16(), {"mixed_precision_policy": "bf16"}, "float"),
        (torch.compile(Model()), {}, "compile in place"),
        (Model().to("meta"), {}, "meta"),
        (frozen(Model()), {}, "nothing to train"),
    ],
)
def test_what_cannot_be_trained_is_refused(model: nn.Module, options: dict, told: str) -> None:
    # Catches a failure hours later: at the first save, or in the quality of the model.
    with pytest.raises(ValueError, match=told):
        build(model=model, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sharding_strategy": "NO_SHARD"}, "FULL_SHARD"),
        ({"auto_wrap_policy": "layers"}, "'transformer'"),
        ({"auto_wrap_policy": "transformer"}, "must be given together"),
        ({"transformer_layer_cls": nn.Linear}, "must be given together"),
        ({"min_num_params": 10}, "'size'"),
        ({"shard_size": 2}, "HYBRID_SHARD"),
        ({"auto_wrap_policy": "transformer", "transformer_layer_cls": nn.Conv1d}, "no such layer"),
        ({"auto_wrap_policy": "transformer", "transformer_layer_cls": nn.Embedding}, "shares a parameter"),
    ],
)
def test_options_of_sharding_that_cannot_be_are_refused(options: dict, told: str) -> None:
    # Catches options that are accepted and ignored, and a misspelt layer after which all is gathered at once.
    with pytest.raises(ValueError, match=told):
        sharding(**options).units(Nested())


def sharding(**options) -> Sharding:
    defaults = {"sharding_strategy": "FULL_SHARD", "auto_wrap_policy": None, "min_num_params": None}
    return Sharding(**{**defaults, "transformer_layer_cls": None, "cpu_offload": False, "shard_size": None, **options})


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)) for _ in range(2))
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("options", "units"),
    [
        ({}, []),
        ({"auto_wrap_policy": "size"}, []),
        ({"auto_wrap_policy": "size", "min_num_params": 72}, ["layers.0.0", "layers.1.0", "attention"]),
        ({"auto_wrap_policy": "size", "min_num_params": 75}, ["layers.0", "layers.1", "attention"]),
        ({"auto_wrap_policy": "transformer", "transformer_layer_cls": nn.Sequential}, ["layers.0", "layers.1"]),
        (
            {"auto_wrap_policy": "transformer", "transformer_layer_cls": {nn.Sequential, nn.MultiheadAttention}},
            ["layers.0", "layers.1", "attention"],
        ),
    ],
)
def test_parts_that_are_gathered_together(options: dict, units: list[str]) -> None:
    # Catches tied weights in two parts, containers that never run, and weights that are read without being gathered.
    model = Nested()
    names = {module: name for name, module in model.named_modules()}
    assert [names[unit] for unit in sharding(**options).units(model)] == units


class Counting(torch.optim.Optimizer):
    """Keeps numbers beside its tensors, as the optimizers of other libraries do: its steps, and a share that adapts."""

    def __init__(self, params, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "share": 1.0})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
            group["share"] = np.float64(group["share"] * 0.9)
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[parameter] or {"step": 0, "largest": 0.0, "momentum": torch.zeros_like(parameter)}
                self.state[parameter] = state
                state["step"] += 1
                state["largest"] = max(state["largest"], parameter.grad.abs().max().item())
                state["momentum"].mul_(0.9).add_(parameter.grad)
                rate = group["lr"] * group["share"] / (state["step"] * group["num_steps"] * (1 + state["largest"]))
                parameter.add_(state["momentum"], alpha=-rate)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD, Counting])
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("saved_at", [0, 3, 6, 8])
def test_a_run_goes_on_exactly(optimizer_class, kind: str, saved_at: int, tmp_path: Path) -> None:
    # Catches state of an optimizer that is lost, or invented for parameters that never had a gradient; an epoch has 6.
    def trainer() -> Trainer:
        return build(2, model=Model(dropout=0.2), optimizer_class=optimizer_class)

    straight = trainer()
    expected = straight.train(epochs=2, log_interval=1)
    first = trainer()
    first.train(epochs=2, max_steps=saved_at)
    first.save_checkpoint(tmp_path / "saved", state_dict_type=kind)
    torch.manual_seed(9)
    second = trainer()
    second.load_checkpoint(tmp_path / "saved")
    second.save_checkpoint(tmp_path / "saved", state_dict_type=kind)  # what was loaded, which is there already
    measured = second.train(epochs=2, log_interval=1)
    assert [record.loss for record in measured] == [record.loss for record in expected[saved_at:]]
    assert all(torch.equal(*pair) for pair in zip(weights(straight), weights(second), strict=True))
    straight.load_checkpoint(tmp_path / "saved")  # back, with what it has learnt since
    assert [record.loss for record in straight.train(epochs=2, log_interval=1)] == [record.loss for record in measured]


def test_a_file_is_plain_and_replaced_at_once(tmp_path: Path) -> None:
    # Catches a file that needs xorl to be read, and a crash that leaves neither the former file nor the next.
    path = tmp_path / "new" / "model.pt"
    trainer = build()
    trainer.train(max_steps=1)
    assert trainer.save_checkpoint(path) == path
    saved = torch.load(path, weights_only=True)
    plain = Model()
    plain.load_state_dict(saved["model"])
    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), trainer.model.parameters(), strict=True))
    assert (saved["step"], saved["epoch"], saved["rows"]) == (1, 0, 2)
    (path.parent / ".model.pt.saving").mkdir()  # where the next one would be written
    with pytest.raises(CheckpointFailure, match="IsADirectoryError"):
        build().save_checkpoint(path)
    assert torch.load(path, weights_only=True)["step"] == 1
    with pytest.raises(ValueError, match="is a folder"):
        build().save_checkpoint(tmp_path / "new")
    with pytest.raises(ValueError, match="unknown"):
        build().save_checkpoint(path, state_dict_type="LOCAL_STATE_DICT")


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Catches a load that keeps part of the new weights, or goes on at the wrong rows, in silence.
    path = tmp_path / "model.pt"
    trainer = build(2)
    trainer.train(max_steps=1)
    trainer.save_checkpoint(path)
    other = build(model=Model(width=7))
    before = weights(other)
    with pytest.raises(CheckpointError, match=r"embedding.weight is \[11, 6\] in the file, \[11, 7\] here"):
        other.load_checkpoint(path)
    assert all(torch.equal(*pair) for pair in zip(before, weights(other), strict=True))
    with pytest.raises(CheckpointError, match="momentum_buffer is missing"):
        build(optimizer_class=torch.optim.SGD, optimizer_options={"momentum": 0.9}).load_checkpoint(path)
    with pytest.raises(ValueError, match="after 2 rows"):
        build(3).load_checkpoint(path)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        trainer.load_checkpoint(tmp_path / "elsewhere.pt")
    (tmp_path / "weights.pt").write_bytes(b"not a file of torch")
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainer.load_checkpoint(tmp_path / "weights.pt")
    torch.save(Model().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="not written by save_checkpoint"):
        trainer.load_checkpoint(tmp_path / "weights.pt")
    shuffled = Trainer(
        Model(), torch.optim.AdamW, TorchDataLoader(rows(), 2, shuffle=True), learning_rate=0.1, device="cpu"
    )
    shuffled.load_checkpoint(path)
    assert "RandomSampler" in caplog.text
