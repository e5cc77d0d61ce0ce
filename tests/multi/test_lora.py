"""Adapters train the same on every placement, and what is folded into shards is what is folded into whole weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from placement import whole
from tiny_models import hf_config, write_config
from xorl.config import Config, config_from_mapping
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh, ParallelDims
from xorl.data.batch import Document, collate
from xorl.lora import adapter_parameters, load_adapter_state_dict
from xorl.lora.inject import base_parameters
from xorl.lora.peft import load_adapter, save_adapter
from xorl.train.adapters.files import AdapterFiles, trained_base_parameters
from xorl.train.adapters.inject import AdapterMerging, adapter_spec
from xorl.train.build import build_engine
from xorl.train.engine import Engine
from xorl.train.model_source import read_architecture

HF_CONFIG = hf_config()
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    # name: (ranks, options of section train)
    "none": (1, {"data_parallel_mode": "none"}),
    "ddp-2": (2, {"data_parallel_mode": "ddp"}),
    "zero3-2": (2, {}),
    "zero2-2": (2, {"enable_full_shard": False}),
    "hsdp-2x2": (4, {"data_parallel_shard_size": 2, "data_parallel_replicate_size": 2}),
    "zero3-4": (4, {}),
}
LORA: dict[str, object] = {"enable_lora": True, "lora_rank": 5, "rank_pattern": {"v_proj": 3}}
KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "dora beside a whole norm": {"use_dora": True, "modules_to_save": ["model.norm"]},
    "head and embedding": {"lora_target_modules": ["q_proj", "v_proj", "embed_tokens", "lm_head"]},
}
NUM_ROWS = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_config(tmp_path, HF_CONFIG)
    return tmp_path


def config_of(folder: Path, layout: str, lora: Mapping[str, object], train: Mapping[str, object]) -> Config:
    mode = LAYOUTS[layout][1]
    options = {"output_dir": "o", "enable_mixed_precision": False, "enable_gradient_checkpointing": False}
    return config_from_mapping(
        {
            "model": {"config_path": str(folder)},
            "data": {"datasets": [{"path": "a"}]},
            "train": {**options, **mode, **train},
            "lora": {**LORA, **lora},
        }
    ).config


def engine_of(folder: Path, layout: str, lora: Mapping[str, object] = {}, train: Mapping[str, object] = {}) -> Engine:
    config = config_of(folder, layout, lora, train)
    sizes = config.train.data_parallel_shard_size, config.train.data_parallel_replicate_size
    dims = ParallelDims.resolve(
        config.train.data_parallel_mode, LAYOUTS[layout][0], shard_size=sizes[0], replicate_size=sizes[1]
    )
    engine = build_engine(config, read_architecture(config.model), Mesh(dims, "cpu"), torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    parameters = adapter_parameters(engine.model.module)
    # As if trained: with B at zero A has no gradient.
    values = {name: torch.randn(value.shape, generator=generator) * 0.1 for name, value in sorted(parameters.items())}
    load_adapter_state_dict(engine.model.module, values)
    return engine


def batches(engine: Engine, micro_batch_size: int) -> list:
    generator = torch.Generator().manual_seed(7)
    bins = []
    for index in range(NUM_ROWS):
        ids = [torch.randint(0, 64, (length,), generator=generator) for length in (3 + index, 5)]
        labels = [
            torch.where(torch.rand(len(each), generator=generator) < index / NUM_ROWS, -100, each) for each in ids
        ]
        bins.append([Document(a.numpy(), b.numpy()) for a, b in zip(ids, labels, strict=True)])
    mesh = engine.model.mesh
    own = bins[mesh.data.rank :: mesh.data.size]
    return [
        collate(list(chain.from_iterable(own[start : start + micro_batch_size])), pad_to_multiple_of=8)
        for start in range(0, len(own), micro_batch_size)
    ]


def gradient(engine: Engine, micro_batch_size: int) -> dict[str, Tensor]:
    losses = engine.forward_backward(batches(engine, micro_batch_size), cross_entropy)
    trained = {name: p for name, p in engine.model.module.named_parameters() if p.requires_grad}
    assert not [
        name for name, p in engine.model.module.named_parameters() if not p.requires_grad and p.grad is not None
    ]
    return {name: whole(p.grad) / losses.num_trained_tokens for name, p in trained.items()}


def assert_same(expected: dict[str, Tensor], measured: dict[str, Tensor], limit: float) -> None:
    assert expected.keys() == measured.keys()
    for name, tensor in expected.items():
        assert tensor.norm() > 0, name
        assert (measured[name] - tensor).norm() <= limit * tensor.norm(), name


@pytest.mark.multi
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_adapters_does_not_depend_on_the_split(kind: str, folder: Path, run_ranks) -> None:
    # Catches adapters sharded with other rows than their weights, and a mean over ranks or micro-batches.
    lora = KINDS[kind]
    [expected] = run_ranks(lambda: gradient(engine_of(folder, "none", lora), NUM_ROWS), 1)
    for layout in LAYOUTS if kind == "plain" else ("zero3-2", "hsdp-2x2"):
        for by_size in run_ranks(
            lambda layout=layout: [gradient(engine_of(folder, layout, lora), size) for size in (1, 2)],
            LAYOUTS[layout][0],
        ):
            for measured in by_size:
                assert_same(expected, measured, 2e-6)


RECOMPUTE: dict[str, dict[str, object]] = {
    "layer": {"enable_gradient_checkpointing": True},
    "operation": {"enable_gradient_checkpointing": True, "recompute_policy": "operation"},
    "mlp": {"enable_gradient_checkpointing": True, "recompute_modules": ["mlp"]},
    "reentrant": {"enable_gradient_checkpointing": True, "enable_reentrant": True},
}


@pytest.mark.multi
def test_recomputation_changes_no_gradient_of_adapters(folder: Path, run_ranks) -> None:
    # Catches the first layer's adapters left without gradients, as its input has none, and other dropout the second
    # time.
    def all_kinds(layout: str) -> list[dict[str, Tensor]]:
        found = []
        for train in ({}, *RECOMPUTE.values()):
            engine = engine_of(folder, layout, {"lora_dropout": 0.3}, train)
            torch.manual_seed(engine.model.mesh.data.rank)
            found.append(gradient(engine, 4))
        return found

    for layout in ("ddp-2", "zero3-2"):
        for expected, *measured in run_ranks(lambda layout=layout: all_kinds(layout), 2):
            for each in measured:
                assert_same(expected, each, 1e-6)


def after_steps(engine: Engine, num_steps: int, merge_after: int | None) -> tuple[dict[str, Tensor], float]:
    merging = AdapterMerging(
        engine.model, engine.optimizer, interval=merge_after or num_steps, seed=0, resets_optimizer=True
    )
    for step in range(1, num_steps + 1):
        merging.before(step)
        losses = engine.forward_backward(batches(engine, 4), cross_entropy)
        engine.optim_step(0.01, divisor=losses.num_trained_tokens)
    loss = engine.forward_backward(batches(engine, 4), cross_entropy).loss_sum
    return {name: whole(p) for name, p in engine.model.module.named_parameters()}, float(loss)


@pytest.mark.multi
@pytest.mark.parametrize("options", [{"optimizer": "muon", "optimizer_dtype": "fp32"}, {"optimizer": "adamw"}])
def test_steps_and_merges_do_not_depend_on_the_placement(options: dict, folder: Path, run_ranks) -> None:
    # Catches a merge into the wrong rows of a shard, and one that forgets DoRA's norms, gathered copies or a state.
    lora = {"use_dora": True}

    def run(layout: str) -> tuple[dict[str, Tensor], float]:
        return after_steps(engine_of(folder, layout, lora, {"weight_decay": 0.0, "lr": 0.01, **options}), 4, 2)

    [(expected, loss)] = run_ranks(lambda: run("none"), 1)
    for layout in ("ddp-2", "hsdp-2x2"):
        for measured, its_loss in run_ranks(lambda layout=layout: run(layout), LAYOUTS[layout][0]):
            assert its_loss == pytest.approx(loss, rel=1e-5)
            moved = {name: value for name, value in expected.items() if value.norm() > 0}
            assert_same(moved, {name: measured[name] for name in moved}, 2e-3)


@pytest.mark.multi
def test_base_is_kept_in_bf16_and_adapters_in_fp32(folder: Path, run_ranks) -> None:
    # Catches a base that takes twice the memory, and adapters that round their updates away.
    def dtypes(layout: str) -> tuple[set, set, float]:
        engine = engine_of(folder, layout, {}, {"enable_mixed_precision": True})
        base, own = base_parameters(engine.model.module), adapter_parameters(engine.model.module)
        losses = engine.forward_backward(batches(engine, 1), cross_entropy)
        engine.optim_step(0.01, divisor=losses.num_trained_tokens)
        grads_and_states = {value.dtype for state in engine.optimizer.state.values() for value in state.values()}
        assert grads_and_states == {torch.float32}
        return {p.dtype for p in base.values()}, {p.dtype for p in own.values()}, float(losses.loss_sum)

    [(_, _, expected)] = run_ranks(lambda: dtypes("none"), 1)
    for layout in ("ddp-2", "zero3-2"):
        for base, own, loss in run_ranks(lambda layout=layout: dtypes(layout), LAYOUTS[layout][0]):
            assert (base, own) == ({torch.bfloat16}, {torch.float32})
            assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.multi
@pytest.mark.parametrize("kind", KINDS)
def test_files_of_adapters_are_the_same_to_the_bit_on_every_placement(
    kind: str, folder: Path, tmp_path: Path, run_ranks
) -> None:
    # Catches a shard that is written as the whole, rows in another order, and a file that names its ranks.
    lora = KINDS[kind]

    def write(layout: str) -> None:
        engine = engine_of(folder, layout, lora)
        # Adapters alone have other values than they start with; what is trained whole, too.
        for parameter in trained_base_parameters(engine.model.module).values():
            parameter.data.add_(0.5)
        config = config_of(folder, layout, lora, {})
        architecture = read_architecture(config.model)
        spec = adapter_spec(config.lora, architecture.spec)
        assert spec is not None
        target = tmp_path / layout
        if engine.model.mesh.data.rank == 0:
            target.mkdir()
        files = AdapterFiles.of(engine.model, spec, "base", architecture.recipes(merge_qkv=True)).write(target)
        assert len(files) == (2 if engine.model.mesh.data.rank == 0 else 0)

    for layout in LAYOUTS if kind == "plain" else ("none", "zero3-4"):
        run_ranks(lambda layout=layout: write(layout), LAYOUTS[layout][0])
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (tmp_path / layout / name).read_bytes() == (tmp_path / "none" / name).read_bytes(), (layout, name)
    keys = load_file(tmp_path / "none" / "adapter_model.safetensors").keys()
    assert ("base_model.model.model.norm.weight" in keys) == bool(lora.get("modules_to_save"))


@pytest.mark.multi
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_saves_and_loads_whole_folders(kind: str, folder: Path, tmp_path: Path, run_ranks) -> None:
    # Catches a shard that is written as the whole, and a folder that says something else than that of a run.
    lora = KINDS[kind]

    def both() -> None:
        engine = engine_of(folder, "zero3-2", lora)
        for parameter in trained_base_parameters(engine.model.module).values():
            parameter.data.add_(0.5)
        config = config_of(folder, "zero3-2", lora, {})
        architecture = read_architecture(config.model)
        spec = adapter_spec(config.lora, architecture.spec)
        assert spec is not None
        (tmp_path / "run").mkdir(exist_ok=True)
        AdapterFiles.of(engine.model, spec, "base", architecture.recipes(merge_qkv=True)).write(tmp_path / "run")
        save_adapter(engine.model.module, spec, tmp_path / "library", base="base")
        dist.barrier()
        other = engine_of(folder, "zero3-2", lora)
        for parameter in adapter_parameters(other.model.module).values():
            parameter.data.zero_()
        load_adapter(other.model.module, tmp_path / "library")
        loaded = dict(other.model.module.named_parameters())
        for name, parameter in engine.model.module.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(whole(loaded[name]), whole(parameter), rtol=0, atol=1e-6)

    run_ranks(both, 2)
    run, library = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("run", "library"))
    assert run.keys() == library.keys()
    assert all(torch.equal(run[name], library[name]) for name in run)
    run, library = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("run", "library"))
    assert run == library
