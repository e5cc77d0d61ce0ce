"""Adapters on every placement: recomputation with dropout, merges into shards, dtypes, files.

test_layouts.py compares their gradients with those of one process.
"""

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor

from layouts import LAYOUTS, ONE_PROCESS, engine_for, run_config
from passes import forward_backward_of
from placement import assert_same, whole
from ranks import Launch, Launches
from table_of_runs import NO_OPTIONS, RUNS, Options
from tiny_models import hf_config, write_config
from xorl.config import Config
from xorl.lora import AdapterSpec, adapter_parameters
from xorl.lora.inject import base_parameters
from xorl.lora.peft import load_adapter, save_adapter
from xorl.train.adapters.files import AdapterFiles, trained_base_parameters
from xorl.train.adapters.inject import AdapterMerging, adapter_spec
from xorl.train.engine import Engine
from xorl.train.model_source import read_architecture
from xorl.train.verify import _draw

LORA: dict[str, object] = {"enable_lora": True, "lora_rank": 5, "rank_pattern": {"v_proj": 3}}
KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "dora beside a whole norm": {"use_dora": True, "modules_to_save": ["model.norm"]},
    "head and embedding": {"lora_target_modules": ["q_proj", "v_proj", "embed_tokens", "lm_head"]},
}
RECOMPUTED = ("qwen3, layer", "qwen3, operation", "qwen3, mlp", "qwen3, reentrant")
NUM_BINS = 4
OPTIMIZERS: dict[str, dict[str, object]] = {
    "muon": {"optimizer": "muon", "optimizer_dtype": "fp32"},
    "adamw": {"optimizer": "adamw"},
}
# By kind: the layouts whose files are compared with those of one process.
WRITTEN = [
    *(("plain", layout) for layout in ("ddp 2", "fsdp 2", "fsdp 2, kept", "hsdp 2", "fsdp 4")),
    *((kind, "fsdp 4") for kind in list(KINDS)[1:]),
]
FILES = ("adapter_model.safetensors", "adapter_config.json")


def engine_of(
    folder: Path, layout: str | None, lora: Options = NO_OPTIONS, train: Options = NO_OPTIONS
) -> tuple[Engine, Config]:
    """An engine in a layout or one process, and its configuration; adapters have values as if they were trained."""
    placed = LAYOUTS[layout].train if layout else ONE_PROCESS
    config = run_config(folder, "model", {**placed, **train}, {**LORA, **lora})
    engine = engine_for(config)
    _draw(engine.model.module)
    return engine, config


def gradient(engine: Engine, config: Config) -> dict[str, Tensor]:
    losses = forward_backward_of(engine, config, num_bins=NUM_BINS)
    named = dict(engine.model.module.named_parameters())
    assert not [name for name, p in named.items() if not p.requires_grad and p.grad is not None]
    return {name: whole(p.grad) / losses.num_trained_tokens for name, p in named.items() if p.requires_grad}


def recomputed_gradients(folder: Path, layout: str) -> list[dict[str, Tensor]]:
    """Without recomputation, then with each kind."""
    found = []
    for train in (NO_OPTIONS, *(RUNS[name].train for name in RECOMPUTED)):
        engine, config = engine_of(folder, layout, {"lora_dropout": 0.3}, train)
        torch.manual_seed(engine.model.mesh.data.rank)
        found.append(gradient(engine, config))
    return found


def merged_steps(folder: Path, layout: str | None, optimizer: str) -> tuple[dict[str, Tensor], float]:
    """The parameters after four steps with a merge in between, and the loss then."""
    train = {"weight_decay": 0.0, "lr": 0.01, **OPTIMIZERS[optimizer]}
    engine, config = engine_of(folder, layout, {"use_dora": True}, train)
    merging = AdapterMerging(engine.model, engine.optimizer, interval=2, seed=0, resets_optimizer=True)
    for step in range(1, 5):
        merging.before(step)
        losses = forward_backward_of(engine, config, num_bins=NUM_BINS)
        engine.optim_step(0.01, divisor=losses.num_trained_tokens)
    loss = forward_backward_of(engine, config, num_bins=NUM_BINS).loss_sum
    return {name: whole(p) for name, p in engine.model.module.named_parameters()}, float(loss)


def dtypes(folder: Path, layout: str | None) -> tuple[set, set, float]:
    """Of the base and of the adapters, and the loss."""
    engine, config = engine_of(folder, layout, train={"enable_mixed_precision": True})
    base, own = base_parameters(engine.model.module), adapter_parameters(engine.model.module)
    losses = forward_backward_of(engine, config, num_bins=NUM_BINS)
    engine.optim_step(0.01, divisor=losses.num_trained_tokens)
    assert {value.dtype for state in engine.optimizer.state.values() for value in state.values()} == {torch.float32}
    return {p.dtype for p in base.values()}, {p.dtype for p in own.values()}, float(losses.loss_sum)


def write(folder: Path, layout: str | None, kind: str, target: Path) -> tuple[Engine, AdapterSpec]:
    """Writes the files of an engine's adapters as a run does."""
    engine, config = engine_of(folder, layout, KINDS[kind])
    # Adapters alone have other values than they start with; what is trained whole, too.
    for parameter in trained_base_parameters(engine.model.module).values():
        parameter.data.add_(0.5)
    architecture = read_architecture(config.model)
    spec = adapter_spec(config.lora, architecture.spec, architecture.config)
    assert spec is not None
    target.mkdir(parents=True, exist_ok=True)
    files = AdapterFiles.of(engine.model, spec, "base", architecture.recipes(merge_qkv=True)).write(target)
    assert len(files) == (2 if engine.model.mesh.data.rank == 0 else 0)
    return engine, spec


def written(folder: Path, layout: str | None, kind: str, target: Path) -> list[bytes]:
    write(folder, layout, kind, target)
    dist.barrier()
    return [(target / name).read_bytes() for name in FILES]


def saved_and_loaded(folder: Path, kind: str, target: Path) -> list[tuple[bytes, bytes]]:
    """The files of a run and of the library; what is trained is the same after loading."""
    engine, spec = write(folder, "fsdp 2", kind, target / "run")
    save_adapter(engine.model.module, spec, target / "library", base="base")
    dist.barrier()
    other, _ = engine_of(folder, "fsdp 2", KINDS[kind])
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
    folder = tmp_path_factory.mktemp("models")
    write_config(folder / "model", hf_config())
    files = tmp_path_factory.mktemp("files")
    cells = {}

    def add(layout: str | None, *key: str, compute: Callable[..., object]) -> None:
        num_ranks = LAYOUTS[layout].num_ranks if layout else 1
        cells[layout, *key] = (num_ranks, partial(compute, folder, layout))

    for kind, layout in (*WRITTEN, *((kind, None) for kind in KINDS)):
        add(layout, "written", kind, compute=partial(written, kind=kind, target=files / f"{layout} {kind}"))
    for kind in KINDS:
        cells["loaded", kind] = (2, partial(saved_and_loaded, folder, kind, files / kind))
    for layout in ("ddp 2", "fsdp 2"):
        add(layout, "recomputed", compute=recomputed_gradients)
    for layout, optimizer in product((None, "ddp 2", "hsdp 2"), OPTIMIZERS):
        add(layout, "merged", optimizer, compute=partial(merged_steps, optimizer=optimizer))
    for layout in (None, "ddp 2", "fsdp 2"):
        add(layout, "dtypes", compute=dtypes)
    return launch(cells)


@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2"])
def test_recomputation_changes_no_gradient_of_adapters(layout: str, found: Launches) -> None:
    # Catches the first layer's adapters left without gradients, as its input has none, and other dropout the second
    # time.
    for expected, *measured in found(layout, "recomputed"):
        for each in measured:
            assert all(value.norm() > 0 for value in expected.values())
            assert_same(expected, each)


@pytest.mark.parametrize("layout", ["ddp 2", "hsdp 2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_and_merges_do_not_depend_on_the_placement(optimizer: str, layout: str, found: Launches) -> None:
    # Catches a merge into the wrong rows of a shard, and one that forgets DoRA's norms, gathered copies or a state.
    [(expected, loss)] = found(None, "merged", optimizer)
    for measured, its_loss in found(layout, "merged", optimizer):
        assert its_loss == pytest.approx(loss, rel=1e-5)
        moved = {name: value for name, value in expected.items() if value.norm() > 0}
        assert_same(moved, {name: measured[name] for name in moved}, 2e-3)


@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2"])
def test_base_is_kept_in_bf16_and_adapters_in_fp32(layout: str, found: Launches) -> None:
    # Catches a base that takes twice the memory, and adapters that round their updates away.
    [(_, _, expected)] = found(None, "dtypes")
    for base, own, loss in found(layout, "dtypes"):
        assert (base, own) == ({torch.bfloat16}, {torch.float32})
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "layout"), WRITTEN)
def test_files_of_adapters_are_the_same_to_the_bit_on_every_placement(kind: str, layout: str, found: Launches) -> None:
    # Catches a shard that is written as the whole, rows in another order, and a file that names its ranks.
    [expected] = found(None, "written", kind)
    assert all(files == expected for files in found(layout, "written", kind))
    assert ("base_model.model.model.norm.weight" in load(expected[0])) == bool(KINDS[kind].get("modules_to_save"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_saves_and_loads_whole_folders(kind: str, found: Launches) -> None:
    # Catches a shard that is written as the whole, and a folder that says something else than that of a run.
    (run, library), (run_config, library_config) = found("loaded", kind)[0]
    torch.testing.assert_close(load(library), load(run), rtol=0, atol=0)
    assert json.loads(run_config) == json.loads(library_config)
