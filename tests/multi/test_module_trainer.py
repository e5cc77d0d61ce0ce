"""The trainers of a user's own module take the same steps on any number of ranks, and go on from what they saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # every optimizer imports it when it is made: once here, not in each rank
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler, IterableDataset

from examples import EXAMPLES, run_example
from xorl.train.module.distributed import DDPTrainer, FSDPTrainer
from xorl.train.module.loader import DataLoader
from xorl.train.module.trainer import StepMetrics, Trainer

VOCABULARY, NUM_ROWS, LENGTH, WIDTH = 23, 28, 6, 12
TRANSFORMER = {"auto_wrap_policy": "transformer"}
PLACEMENTS = {
    # name: (trainer, ranks, options)
    "ddp": (DDPTrainer, 2, {}),
    "whole": (FSDPTrainer, 2, {}),
    "layers": (FSDPTrainer, 2, TRANSFORMER),
    "sizes": (FSDPTrainer, 2, {"auto_wrap_policy": "size", "min_num_params": 60}),
    "kept": (FSDPTrainer, 2, {"sharding_strategy": "SHARD_GRAD_OP", **TRANSFORMER}),
    "offloaded": (FSDPTrainer, 2, {"cpu_offload": True}),
    "host": (FSDPTrainer, 4, {"sharding_strategy": "HYBRID_SHARD", **TRANSFORMER}),
    "hybrid": (FSDPTrainer, 4, {"sharding_strategy": "HYBRID_SHARD", "shard_size": 2, **TRANSFORMER}),
}


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.mix(self.norm(x))))


class TiedModel(nn.Module):
    """The head's weight is the embedding's, as in most small language models; a buffer takes part too."""

    def __init__(self, seed: int = 0, dropout: float = 0.0, *, sits_out: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # The second layer takes part in passes 1, 4, 5, 8, ...
        self.sits_out, self.num_passes = sits_out, 0
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * self.scale
        self.num_passes += 1
        for layer in self.layers[:1] if self.sits_out and self.num_passes % 4 in (2, 3) else self.layers:
            x = layer(x)
        return self.head(x)


def rows() -> list[dict[str, Tensor]]:
    """Rows whose numbers of trained tokens differ widely."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for index in range(NUM_ROWS):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels[index % LENGTH :] = -100
        made.append({"input_ids": ids, "labels": labels if index % LENGTH else ids.flip(0)})
    return made


def build(
    name: str,
    *,
    dropout: float = 0.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    sits_out: bool = False,
    optimizer_class=torch.optim.SGD,
    **options,
) -> Trainer:
    """A trainer that reads 4 rows at a time over all ranks, in steps of 8."""
    kind, num_ranks, placement = PLACEMENTS[name] if name != "none" else (Trainer, 1, {})
    if placement.get("auto_wrap_policy") == "transformer":
        placement = {**placement, "transformer_layer_cls": Layer}
    loader = DataLoader(rows(), 4 // num_ranks, distributed=num_ranks > 1)
    options = {"learning_rate": 0.5, "grad_clip_norm": 0.5, "grad_accum_steps": 2, **options}
    model = TiedModel(seed, dropout, sits_out=sits_out).to(dtype)
    return kind(model, optimizer_class, loader, device="cpu", **placement, **options)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    whole = {}
    for name, tensor in trainer.model.state_dict().items():
        whole[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
    return whole


def train_for(trainer: Trainer, num_steps: int) -> tuple[dict[str, Tensor], list[StepMetrics]]:
    records = trainer.train(epochs=9, max_steps=num_steps, log_interval=1)
    return weights(trainer), records


def norms_of(records: list[StepMetrics]) -> list[float]:
    return [record.grad_norm for record in records]


def assert_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        difference = float((theirs[name] - tensor).norm() / tensor.norm())
        assert difference <= tolerance, f"{name} differs by {difference:.1e}"


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_placement_does_not_change_the_steps(num_ranks: int, run_ranks) -> None:
    # Catches means of means, tied weights torn apart, and ranks that start from weights of their own.
    def each_placement() -> dict[str, tuple]:
        names = [name for name, (_, ranks, _) in PLACEMENTS.items() if ranks == num_ranks]
        # All but rank 0 make other weights, as a script without a seed does.
        return {name: train_for(build(name, seed=int(os.environ["RANK"])), 5) for name in names}

    [(reference, records)] = run_ranks(lambda: train_for(build("none"), 5), 1)
    # 28 rows are 7 micro-batches, so the 4th step is smaller, and the 5th belongs to the second epoch.
    assert [record.epoch for record in records] == [0, 0, 0, 0, 1]
    assert all(record.grad_norm > 0.5 for record in records), "nothing was clipped"
    for by_name in run_ranks(each_placement, num_ranks):
        for placed, placed_records in by_name.values():
            assert_alike(reference, placed, 1e-6)
            for ours, theirs in zip(records, placed_records, strict=True):
                assert theirs.num_trained_tokens == ours.num_trained_tokens
                assert theirs.loss == pytest.approx(ours.loss, rel=1e-6)
                assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=2e-6)


# Of weights after 4 steps, and of gradient norms, which are computed in fp32.
TOLERANCES = {torch.float64: (1e-6, 1e-6), torch.bfloat16: (0.01, 0.02)}


def test_parameters_may_have_any_dtype(run_ranks) -> None:
    # Catches sums of earlier micro-batches that half-precision replicas add up over the ranks again in each one.
    def each(names: list[str]) -> list[dict[str, tuple]]:
        return [{name: train_for(build(name, dtype=dtype), 4) for name in names} for dtype in TOLERANCES]

    [alone] = run_ranks(lambda: each(["none"]), 1)
    for placed in run_ranks(lambda: each(["ddp", "layers"]), 2):
        for one, by_name, (of_weights, of_norms) in zip(alone, placed, TOLERANCES.values(), strict=True):
            reference, records = one["none"]
            for ours, ours_records in by_name.values():
                assert_alike(reference, ours, of_weights)
                assert norms_of(ours_records) == pytest.approx(norms_of(records), rel=of_norms)


def test_a_layer_may_sit_out_micro_batches(run_ranks) -> None:
    # Catches gradients of a unit that has none in the last micro-batch: lost, or added to the next step's.
    names = [name for name, (_, ranks, _) in PLACEMENTS.items() if ranks == 4]
    [(reference, records)] = run_ranks(lambda: train_for(build("none", sits_out=True), 3), 1)
    for by_name in run_ranks(lambda: {name: train_for(build(name, sits_out=True), 3) for name in names}, 4):
        for ours, ours_records in by_name.values():
            assert_alike(reference, ours, 1e-6)
            assert norms_of(ours_records) == pytest.approx(norms_of(records), rel=2e-6)


def test_mixed_precision_computes_in_bf16_and_keeps_fp32(run_ranks) -> None:
    # Catches parameters or sums of gradients that are rounded to bf16, and a policy that changes nothing.
    def both() -> dict[str, tuple]:
        return {name: train_for(build(name, mixed_precision_policy="bf16"), 4) for name in ("ddp", "layers")}

    [(exact, records)] = run_ranks(lambda: train_for(build("none"), 4), 1)
    for by_name in run_ranks(both, 2):
        for placed, placed_records in by_name.values():
            assert {tensor.dtype for tensor in placed.values()} == {torch.float32}
            assert_alike(exact, placed, 0.05)
            pairs = list(zip(records, placed_records, strict=True))
            assert all(theirs.loss == pytest.approx(ours.loss, rel=0.01) for ours, theirs in pairs)
            assert any(theirs.loss != ours.loss for ours, theirs in pairs)


def test_a_run_goes_on_exactly_where_it_was_saved(run_ranks, tmp_path: Path) -> None:
    # Catches lost moments of the optimizer, repeated rows and other dropout after a restart.
    options = {"optimizer_class": torch.optim.AdamW, "dropout": 0.3, "learning_rate": 1e-2, "weight_decay": 0.1}

    def stop_and_go_on() -> list[tuple]:
        pairs = []
        for name in ("ddp", "layers"):
            for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
                straight = train_for(build(name, **options), 6)
                first = build(name, **options)
                train_for(first, 3)
                made = first.save_checkpoint(tmp_path / name / kind, state_dict_type=kind)
                second = build(name, seed=1, **options)
                second.load_checkpoint(tmp_path / name / kind)
                assert second.step == 3
                assert made.exists()
                pairs.append((straight, train_for(second, 6)))
        return pairs

    for pairs in run_ranks(stop_and_go_on, 2):
        for (straight, records), (resumed, later) in pairs:
            assert_alike(straight, resumed)
            assert [(record.loss, record.grad_norm) for record in records[3:]] == [
                (record.loss, record.grad_norm) for record in later
            ]


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_checkpoint_fits_every_trainer_and_number_of_ranks(kind: str, run_ranks, tmp_path: Path) -> None:
    # Catches names with prefixes of a wrapper, shards that only their own ranks can read, and lost data order.
    options = {"optimizer_class": torch.optim.AdamW, "learning_rate": 1e-2}
    path = tmp_path / "saved"

    def save() -> tuple:
        trainer = build("layers", **options)
        before = train_for(trainer, 2)[0]
        trainer.save_checkpoint(path, state_dict_type=kind)
        return before, train_for(trainer, 5)

    def go_on(name: str) -> tuple:
        trainer = build(name, seed=3, **options)
        trainer.load_checkpoint(path)
        return train_for(trainer, 5)

    saved, (reference, records) = run_ranks(save, 2)[0]
    for name, num_ranks in (("none", 1), ("ddp", 2), ("hybrid", 4)):
        continued, later = run_ranks(lambda name=name: go_on(name), num_ranks)[0]
        # AdamW divides small gradients by small gradients, which magnifies the order of their summation.
        assert_alike(reference, continued, 1e-4)
        for ours, theirs in zip(records, later, strict=True):
            assert theirs.num_trained_tokens == ours.num_trained_tokens
            assert theirs.loss == pytest.approx(ours.loss, rel=1e-5)
    if kind == "FULL_STATE_DICT":
        plain = TiedModel(seed=9)
        plain.load_state_dict(torch.load(path, weights_only=True)["model"])
        assert_alike(saved, dict(plain.state_dict()))


def test_rows_that_are_not_divided_are_refused(run_ranks) -> None:
    # Catches ranks that all train on the same rows.
    def attempts() -> list[str]:
        def attempt(kind: type[Trainer], loader: object) -> str:
            try:
                kind(TiedModel(), torch.optim.SGD, loader, learning_rate=0.1, device="cpu")
            except ValueError as error:
                return str(error)
            return "accepted"

        shared = TorchDataLoader(rows(), 2, sampler=DistributedSampler(range(NUM_ROWS)))
        alone = TorchDataLoader(rows(), 2, sampler=DistributedSampler(range(NUM_ROWS), num_replicas=3, rank=0))
        own = DataLoader(rows(), 2, distributed=True)
        return [
            attempt(DDPTrainer, DataLoader(rows(), 2)),
            attempt(FSDPTrainer, TorchDataLoader(rows(), 2)),
            attempt(FSDPTrainer, [rows()]),
            attempt(DDPTrainer, alone),
            attempt(Trainer, own),
            attempt(DDPTrainer, shared),
            attempt(DDPTrainer, own),
        ]

    for messages in run_ranks(attempts, 2):
        assert [message.partition(":")[0] for message in messages[:4]] == ["loader"] * 4
        assert "distributed=True" in messages[0]
        assert "3 ranks" in messages[3]
        assert "DDPTrainer" in messages[4]
        assert messages[5:] == ["accepted"] * 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter([row["input_ids"] for row in rows()[:7]])


def test_a_stream_that_ends_unevenly_ends_the_epoch_for_all(run_ranks) -> None:
    # Catches a rank that waits in a reduction for another one whose stream is at its end.
    def read() -> list[int]:
        loader = DataLoader(Stream(), 1, num_workers=1, distributed=True)
        trainer = DDPTrainer(TiedModel(), torch.optim.SGD, loader, learning_rate=0.1, device="cpu")
        return [record.num_trained_tokens for record in trainer.train(epochs=2, log_interval=1)]

    assert run_ranks(read, 2) == [[2 * (LENGTH - 1)] * 6] * 2


def under_torchrun(script: Path, folder: Path) -> str:
    """What two ranks write that start as the example's first lines say."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*launcher, str(script)], cwd=folder, env=environment, text=True, capture_output=True, check=False, timeout=200
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("script", "saved", "gain"),
    [
        ("train_ddp.py", "model.pt", 0.8),
        ("train_fsdp.py", "sharded/latest", 0.8),
        ("pretrain_text.py", "model.pt", 0.95),
    ],
)
def test_the_examples_run_as_their_first_lines_say(
    script: str, saved: str, gain: float, run_ranks, tmp_path: Path
) -> None:
    # Catches examples that no longer fit the code they explain.
    path = EXAMPLES / script
    assert f"torchrun --nproc-per-node=2 examples/{script}\n" in path.read_text()
    if script == "train_ddp.py":
        written = under_torchrun(path, tmp_path)
    else:
        written = "".join(told for _, told in run_ranks(lambda: run_example(path, tmp_path), 2))
    lines = [line for line in written.splitlines() if line.startswith("step=")]
    # Each rank that logged would add lines of its own.
    assert [line.split()[0] for line in lines] == ["step=10", "step=20", "step=30", "step=40"]
    losses = [float(line.partition("loss=")[2].split()[0]) for line in lines]
    assert losses[-1] < gain * losses[0]
    model = torch.load(tmp_path / "checkpoints" / "model.pt", weights_only=True)["model"]
    assert "blocks.1.qkv.weight" in model
    assert (tmp_path / "checkpoints" / saved).exists()
