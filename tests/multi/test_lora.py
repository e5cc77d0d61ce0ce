"""Adapters on every placement: recomputation with dropout, merges into shards, dtypes, files.

test_layouts.py compares their gradients with those of one process.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor

from local_options import local_config
from placement import assert_same, batches_of, mesh_of, whole
from ranks import Launch, Launches
from tiny_models import hf_config, write_config
from xorl.config import Config
from xorl.core.loss import cross_entropy
from xorl.core.mesh import ParallelDims
from xorl.lora import AdapterSpec, adapter_parameters, load_adapter_state_dict
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
RECOMPUTE: dict[str, dict[str, object]] = {
    "layer": {"enable_gradient_checkpointing": True},
    "operation": {"enable_gradient_checkpointing": True, "recompute_policy": "operation"},
    "mlp": {"enable_gradient_checkpointing": True, "recompute_modules": ["mlp"]},
    "reentrant": {"enable_gradient_checkpointing": True, "enable_reentrant": True},
}
OPTIMIZERS: dict[str, dict[str, object]] = {
    "muon": {"optimizer": "muon", "optimizer_dtype": "fp32"},
    "adamw": {"optimizer": "adamw"},
}
# By kind: the layouts whose files are compared.
WRITTEN = [(kind, layout) for kind in KINDS for layout in (LAYOUTS if kind == "plain" else ("none", "zero3-4"))]
FILES = ("adapter_model.safetensors", "adapter_config.json")


def config_of(folder: Path, layout: str, lora: Mapping[str, object], train: Mapping[str, object]) -> Config:
    options = {"enable_mixed_precision": False, "enable_gradient_checkpointing": False}
    return local_config(folder, lora={**LORA, **lora}, **{**options, **LAYOUTS[layout][1], **train})


def engine_of(folder: Path, layout: str, lora: Mapping[str, object] = {}, train: Mapping[str, object] = {}) -> Engine:
    config = config_of(folder, layout, lora, train)
    sizes = config.train.data_parallel_shard_size, config.train.data_parallel_replicate_size
    dims = ParallelDims.resolve(
        config.train.data_parallel_mode, LAYOUTS[layout][0], shard_size=sizes[0], replicate_size=sizes[1]
    )
    engine = build_engine(config, read_architecture(config.model), mesh_of(dims), torch.device("cpu"))
    generator = torch.Generator().manual_seed(4)
    parameters = adapter_parameters(engine.model.module)
    # As if trained: with B at zero A has no gradient.
    values = {name: torch.randn(value.shape, generator=generator) * 0.1 for name, value in sorted(parameters.items())}
    load_adapter_state_dict(engine.model.module, values)
    return engine


def gradient(engine: Engine) -> dict[str, Tensor]:
    losses = engine.forward_backward(batches_of(engine, NUM_ROWS, 4), cross_entropy)
    trained = {name: p for name, p in engine.model.module.named_parameters() if p.requires_grad}
    assert not [
        name for name, p in engine.model.module.named_parameters() if not p.requires_grad and p.grad is not None
    ]
    return {name: whole(p.grad) / losses.num_trained_tokens for name, p in trained.items()}


def recomputed_gradients(folder: Path, layout: str) -> list[dict[str, Tensor]]:
    """Without recomputation, then with each kind."""
    found = []
    for train in ({}, *RECOMPUTE.values()):
        engine = engine_of(folder, layout, {"lora_dropout": 0.3}, train)
        torch.manual_seed(engine.model.mesh.data.rank)
        found.append(gradient(engine))
    return found


def after_steps(engine: Engine, num_steps: int, merge_after: int | None) -> tuple[dict[str, Tensor], float]:
    merging = AdapterMerging(
        engine.model, engine.optimizer, interval=merge_after or num_steps, seed=0, resets_optimizer=True
    )
    for step in range(1, num_steps + 1):
        merging.before(step)
        losses = engine.forward_backward(batches_of(engine, NUM_ROWS, 4), cross_entropy)
        engine.optim_step(0.01, divisor=losses.num_trained_tokens)
    loss = engine.forward_backward(batches_of(engine, NUM_ROWS, 4), cross_entropy).loss_sum
    return {name: whole(p) for name, p in engine.model.module.named_parameters()}, float(loss)


def merged_steps(folder: Path, layout: str, optimizer: str) -> tuple[dict[str, Tensor], float]:
    train = {"weight_decay": 0.0, "lr": 0.01, **OPTIMIZERS[optimizer]}
    return after_steps(engine_of(folder, layout, {"use_dora": True}, train), 4, 2)


def dtypes(folder: Path, layout: str) -> tuple[set, set, float]:
    """Of the base and of the adapters, and the loss."""
    engine = engine_of(folder, layout, {}, {"enable_mixed_precision": True})
    base, own = base_parameters(engine.model.module), adapter_parameters(engine.model.module)
    losses = engine.forward_backward(batches_of(engine, NUM_ROWS, 1), cross_entropy)
    engine.optim_step(0.01, divisor=losses.num_trained_tokens)
    grads_and_states = {value.dtype for state in engine.optimizer.state.values() for value in state.values()}
    assert grads_and_states == {torch.float32}
    return {p.dtype for p in base.values()}, {p.dtype for p in own.values()}, float(losses.loss_sum)


def write(folder: Path, layout: str, kind: str, target: Path) -> tuple[Engine, AdapterSpec]:
    """Writes the files of an engine's adapters as a run does."""
    engine = engine_of(folder, layout, KINDS[kind])
    # Adapters alone have other values than they start with; what is trained whole, too.
    for parameter in trained_base_parameters(engine.model.module).values():
        parameter.data.add_(0.5)
    config = config_of(folder, layout, KINDS[kind], {})
    architecture = read_architecture(config.model)
    spec = adapter_spec(config.lora, architecture.spec, architecture.config)
    assert spec is not None
    target.mkdir(parents=True, exist_ok=True)
    files = AdapterFiles.of(engine.model, spec, "base", architecture.recipes(merge_qkv=True)).write(target)
    assert len(files) == (2 if engine.model.mesh.data.rank == 0 else 0)
    return engine, spec


def written(folder: Path, layout: str, kind: str, target: Path) -> list[bytes]:
    write(folder, layout, kind, target)
    dist.barrier()
    return [(target / name).read_bytes() for name in FILES]


def saved_and_loaded(folder: Path, kind: str, target: Path) -> list[tuple[bytes, bytes]]:
    """The files of a run and of the library; what is trained is the same after loading."""
    engine, spec = write(folder, "zero3-2", kind, target / "run")
    save_adapter(engine.model.module, spec, target / "library", base="base")
    dist.barrier()
    other = engine_of(folder, "zero3-2", KINDS[kind])
    for parameter in adapter_parameters(other.model.module).values():
        parameter.data.zero_()
    load_adapter(other.model.module, target / "library")
    loaded = dict(other.model.module.named_parameters())
    for name, parameter in engine.model.module.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(whole(loaded[name]), whole(parameter), rtol=0, atol=1e-6)
    return [((target / "run" / name).read_bytes(), (target / "library" / name).read_bytes()) for name in FILES]


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """By layout and what is computed: the table of this module."""
    folder = write_config(tmp_path_factory.mktemp("model"), HF_CONFIG)
    files = tmp_path_factory.mktemp("files")
    cells = {}

    def add(layout: str, *key: str, compute: Callable[..., object], **options: object) -> None:
        cells[layout, *key] = (LAYOUTS[layout][0], partial(compute, folder, layout, **options))

    for kind in KINDS:
        cells["zero3-2", "loaded", kind] = (2, partial(saved_and_loaded, folder, kind, files / kind))
    for kind, layout in WRITTEN:
        add(layout, "written", kind, compute=written, kind=kind, target=files / f"{layout} {kind}")
    for layout in ("ddp-2", "zero3-2"):
        add(layout, "recomputed", compute=recomputed_gradients)
    for layout, optimizer in product(("none", "ddp-2", "hsdp-2x2"), OPTIMIZERS):
        add(layout, "merged", optimizer, compute=merged_steps, optimizer=optimizer)
    for layout in ("none", "ddp-2", "zero3-2"):
        add(layout, "dtypes", compute=dtypes)
    return launch(cells)


@pytest.mark.parametrize("layout", ["ddp-2", "zero3-2"])
def test_recomputation_changes_no_gradient_of_adapters(layout: str, found: Launches) -> None:
    # Catches the first layer's adapters left without gradients, as its input has none, and other dropout the second
    # time.
    for expected, *measured in found(layout, "recomputed"):
        for each in measured:
            assert all(value.norm() > 0 for value in expected.values())
            assert_same(expected, each)


@pytest.mark.parametrize("layout", ["ddp-2", "hsdp-2x2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_and_merges_do_not_depend_on_the_placement(optimizer: str, layout: str, found: Launches) -> None:
    # Catches a merge into the wrong rows of a shard, and one that forgets DoRA's norms, gathered copies or a state.
    [(expected, loss)] = found("none", "merged", optimizer)
    for measured, its_loss in found(layout, "merged", optimizer):
        assert its_loss == pytest.approx(loss, rel=1e-5)
        moved = {name: value for name, value in expected.items() if value.norm() > 0}
        assert_same(moved, {name: measured[name] for name in moved}, 2e-3)


@pytest.mark.parametrize("layout", ["ddp-2", "zero3-2"])
def test_base_is_kept_in_bf16_and_adapters_in_fp32(layout: str, found: Launches) -> None:
    # Catches a base that takes twice the memory, and adapters that round their updates away.
    [(_, _, expected)] = found("none", "dtypes")
    for base, own, loss in found(layout, "dtypes"):
        assert (base, own) == ({torch.bfloat16}, {torch.float32})
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "layout"), WRITTEN)
def test_files_of_adapters_are_the_same_to_the_bit_on_every_placement(kind: str, layout: str, found: Launches) -> None:
    # Catches a shard that is written as the whole, rows in another order, and a file that names its ranks.
    [expected] = found("none", "written", kind)
    assert all(files == expected for files in found(layout, "written", kind))
    assert ("base_model.model.model.norm.weight" in load(expected[0])) == bool(KINDS[kind].get("modules_to_save"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_saves_and_loads_whole_folders(kind: str, found: Launches) -> None:
    # Catches a shard that is written as the whole, and a folder that says something else than that of a run.
    (run, library), (run_config, library_config) = found("zero3-2", "loaded", kind)[0]
    torch.testing.assert_close(load(library), load(run), rtol=0, atol=0)
    assert json.loads(run_config) == json.loads(library_config)
