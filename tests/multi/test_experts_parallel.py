"""Expert parallelism: every layout computes what one process computes, on rows of uneven documents."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import fake_deepep
from expert_reads import counted_reads
from tiny_models import hf_config, write_config
from xorl.ckpt.reader import source_shapes
from xorl.config import Config, config_from_mapping, load_config
from xorl.core import runtime
from xorl.core.mesh import Mesh
from xorl.core.nn import moe
from xorl.core.nn.dispatch import AllToAll
from xorl.train import model as model_module
from xorl.train import verify
from xorl.train.build import build_engine
from xorl.train.model import build_model
from xorl.train.model_source import read_architecture
from xorl.train.run import run_training
from xorl.train.startup import parallel_dims
from xorl.train.verify import Result, compare, one_process, take_steps

pytestmark = pytest.mark.multi
NUM_BINS = 8

MODELS: dict[str, dict[str, object]] = {
    "qwen3_moe": hf_config(
        "qwen3_moe",
        moe_intermediate_size=48,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    ),
    "mixtral": hf_config("mixtral"),
}
FSDP = {"data_parallel_mode": "fsdp2"}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "ep 2": (2, {**FSDP, "expert_parallel_size": 2}),
    "ep 2, ulysses 2": (2, {**FSDP, "expert_parallel_size": 2, "ulysses_parallel_size": 2}),
    "ep 2, ring 2": (2, {**FSDP, "expert_parallel_size": 2, "ringattn_parallel_size": 2}),
    "ep 4": (4, {**FSDP, "expert_parallel_size": 4}),
    "ep 2, fsdp 2": (4, {**FSDP, "expert_parallel_size": 2}),
    "ep 2 outside, fsdp 2": (4, {**FSDP, "expert_parallel_size": 2, "ep_outside": True}),
    "hsdp 2, ep 2": (4, {**FSDP, "expert_parallel_size": 2, "data_parallel_replicate_size": 2}),
    "dp 2, ulysses 2, ep 2": (4, {**FSDP, "expert_parallel_size": 2, "ulysses_parallel_size": 2}),
    "dp 2, ring 2, ep 4": (4, {**FSDP, "expert_parallel_size": 4, "ringattn_parallel_size": 2}),
    "ddp 2": (2, {"data_parallel_mode": "ddp"}),
    "fsdp 2": (2, FSDP),
    "ulysses 2": (2, {**FSDP, "ulysses_parallel_size": 2}),
    "hsdp 2": (4, {**FSDP, "data_parallel_replicate_size": 2}),
}
LORA = {"enable_lora": True, "lora_rank": 4, "lora_target_modules": "all-linear"}
QLORA = {**LORA, "enable_qlora": True, "quant_format": "nf4", "quant_group_size": 16}
EXPERT_LORA = {**LORA, "lora_target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
RECOMPUTE = {"enable_gradient_checkpointing": True}
# By name: (model, options of train, options of lora).
RUNS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "qwen3_moe": ("qwen3_moe", {"router_z_loss_coef": 0.1}, {}),
    "mixtral, Muon": ("mixtral", {"optimizer": "muon"}, {}),
    "qwen3_moe, recomputed": ("qwen3_moe", RECOMPUTE, {}),
    "qwen3_moe, moe_act": ("qwen3_moe", {**RECOMPUTE, "moe_checkpoint_method": "moe_act"}, {}),
    "qwen3_moe, operation": ("qwen3_moe", {**RECOMPUTE, "recompute_policy": "operation"}, {}),
    "qwen3_moe, LoRA": ("qwen3_moe", {}, LORA),
    "qwen3_moe, adapted experts": ("qwen3_moe", {"optimizer": "muon"}, EXPERT_LORA),
    "qwen3_moe, adapted experts, recomputed": ("qwen3_moe", RECOMPUTE, EXPERT_LORA),
    "qwen3_moe, QLoRA": ("qwen3_moe", {}, QLORA),
    "qwen3_moe, QLoRA, adapted experts": ("qwen3_moe", RECOMPUTE, {**QLORA, **EXPERT_LORA}),
    "qwen3_moe, shared adapters": ("qwen3_moe", {"optimizer": "muon"}, {**EXPERT_LORA, "moe_shared_lora": True}),
    "qwen3_moe, outer factors shared": ("qwen3_moe", RECOMPUTE, {**EXPERT_LORA, "moe_hybrid_shared_lora": True}),
}
SHARED_RUNS = ("qwen3_moe, shared adapters", "qwen3_moe, outer factors shared")
# Layouts with expert parallelism compute these runs, and others SHARED_RUNS; WITH_ALL_RUNS compute the others, too.
BASIC_RUNS = (
    "qwen3_moe",
    "mixtral, Muon",
    "qwen3_moe, LoRA",
    "qwen3_moe, adapted experts",
    "qwen3_moe, outer factors shared",
)
WITH_ALL_RUNS = ("ep 2", "ep 2, fsdp 2")


def runs_of(layout: str, options: dict[str, object]) -> tuple[str, ...]:
    """The runs that a layout computes."""
    if "expert_parallel_size" not in options:
        return SHARED_RUNS
    return tuple(RUNS) if layout in WITH_ALL_RUNS else BASIC_RUNS


def run_config(
    folder: Path,
    model: str,
    train: dict[str, object],
    lora: dict[str, object],
    of_model: Mapping[str, object] = MappingProxyType({}),
) -> Config:
    values = {
        "model": {"config_path": str(folder / model), **of_model},
        "data": {"datasets": [{"path": "a"}]},
        "train": {"output_dir": str(folder / "out"), "enable_mixed_precision": False, **train},
        "lora": lora,
    }
    return config_from_mapping(values).config


def take_steps_of(config: Config, mesh: Mesh, num_bins: int = NUM_BINS) -> Result:
    runtime.seed_everything(0)
    architecture = read_architecture(config.model)
    engine = build_engine(config, architecture, mesh, torch.device("cpu"))
    return take_steps(engine, config, architecture, num_bins)


@pytest.mark.parametrize("world_size", [2, 4])
def test_layouts_equal_one_process(run_ranks, tmp_path: Path, world_size: int) -> None:
    # Catches gradients that are doubled or divided over the ranks, tokens that get lost, norms of some experts, and a
    # router without gradients, and factors of all experts whose gradients are summed over some ranks only.
    for name, shape in MODELS.items():
        write_config(tmp_path / name, shape)

    def results(options: dict[str, object], names: Sequence[str]) -> dict[str, Result]:
        configs = {
            name: run_config(tmp_path, RUNS[name][0], {**options, **RUNS[name][1]}, RUNS[name][2]) for name in names
        }
        if options["data_parallel_mode"] == "none":
            configs = {name: one_process(config) for name, config in configs.items()}
        # One mesh for all, because each has groups of its own, whose connections add up.
        mesh = Mesh(parallel_dims(next(iter(configs.values())), runtime.world_size()), "cpu")
        return {name: take_steps_of(config, mesh) for name, config in configs.items()}

    [whole] = run_ranks(lambda: results({"data_parallel_mode": "none"}, list(RUNS)), 1)
    layouts = {layout: options for layout, (num_ranks, options) in LAYOUTS.items() if num_ranks == world_size}
    found = run_ranks(
        lambda: {layout: results(options, runs_of(layout, options)) for layout, options in layouts.items()},
        world_size,
    )[0]
    failed = []
    for layout, by_name in found.items():
        for name, result in by_name.items():
            differences = compare(result, whole[name])
            failed += [(name, layout, kind, one) for kind, one in differences.items() if not one.is_within]
    assert not failed, "\n".join(map(str, failed))


def test_ranks_without_tokens_and_many_micro_batches(run_ranks, tmp_path: Path) -> None:
    # Catches a rank that waits for others because none of its experts was chosen, gradients of such experts that are
    # missing instead of zero, and gradients that are counted once more for every micro-batch if ep equals dp.
    write_config(tmp_path / "qwen3_moe", MODELS["qwen3_moe"])

    def both(options: dict[str, object]) -> list[Result]:
        config = run_config(tmp_path, "qwen3_moe", options, {})
        mesh = Mesh(parallel_dims(config, runtime.world_size()), "cpu")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify, "NUM_MICRO_BATCHES", 16)
            many = take_steps_of(config, mesh, 32)
            patch.setattr(moe, "top_experts", lambda scores, count: torch.arange(count).expand(len(scores), count))
            return [many, take_steps_of(config, mesh, 32)]

    whole = run_ranks(lambda: both({"data_parallel_mode": "none"}), 1)[0]
    for mine, theirs in zip(run_ranks(lambda: both(LAYOUTS["ep 2"][1]), 2)[0], whole, strict=True):
        differences = compare(mine, theirs)
        assert all(one.is_within for one in differences.values()), differences
    unused = whole[1].gradients["model.layers.0.mlp.experts.down_proj.weight"].chunk(2)[1]
    assert not unused.any()


def test_padding_is_not_sent(run_ranks, tmp_path: Path) -> None:
    # Catches padding that takes room and time on other ranks.
    group_size = 2

    def rows_received() -> int:
        mesh = Mesh(parallel_dims(run_config(tmp_path, "", LAYOUTS["ep 2"][1], {}), group_size), "cpu")
        assert mesh.ep is not None
        dispatcher = AllToAll(mesh.ep.ranks)
        ids = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]])
        plan = dispatcher.plan(ids, 4, torch.tensor(2))
        x = torch.arange(4.0)[:, None].expand(4, 3)
        received = dispatcher.dispatch(x, torch.ones(4, 2), plan)
        back = dispatcher.combine(received.x, plan)
        assert received.x[:, 0].tolist() == [float(mesh.ep.rank)] * 2
        assert back.tolist() == [[0.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]
        return received.num_rows

    assert run_ranks(rows_received, group_size) == [4, 4]


@pytest.mark.parametrize("mode", ["all_ranks", "broadcast"])
def test_each_rank_reads_its_own_experts(mode: str, run_ranks, tmp_path: Path) -> None:
    # Catches ranks that read all experts, and experts of another rank.
    shape = hf_config("qwen3_moe", num_experts=8)
    folder = write_config(tmp_path / "qwen3_moe", shape)
    architecture = read_architecture(run_config(tmp_path, "qwen3_moe", {}, {}).model)
    generator = torch.Generator().manual_seed(0)
    shapes = source_shapes(architecture.recipes(merge_qkv=True))
    saved = {name: torch.randn(size, generator=generator) for name, size in shapes.items()}
    save_file(saved, folder / "model.safetensors")
    total = sum(tensor.nbytes for name, tensor in saved.items() if ".experts." in name)

    def load(layout: dict[str, object]) -> tuple[dict[str, Tensor], float]:
        config = run_config(tmp_path, "qwen3_moe", layout, {})
        train = config.train.model_copy(update={"load_weights_mode": mode})
        model_config = config.model.model_copy(update={"model_path": str(folder)})
        mesh = Mesh(parallel_dims(config, runtime.world_size()), "cpu")
        with counted_reads() as sizes:
            model = build_model(architecture, model_config, train, config.lora, mesh, torch.device("cpu"))
        gathered = {name: model.parts.gather(name, weight) for name, weight in model.module.named_parameters()}
        return gathered, sum(sizes) / total

    [(whole, _)] = run_ranks(lambda: load({"data_parallel_mode": "none"}), 1)
    for rank, (found, share) in enumerate(run_ranks(lambda: load(LAYOUTS["ep 4"][1]), 4)):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        assert share == (0.25 if mode == "all_ranks" else float(rank == 0))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_from_before_experts_were_divided_resumes(
    world_size: int, run_ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches a format that forgets its past: the checkpoint was written when only FSDP2 divided parameters.
    saved = Path(__file__).parent / "checkpoints" / "before_parts"
    checkpoints = tmp_path / "out" / "checkpoints"
    shutil.copytree(saved / "global_step_2", checkpoints / "global_step_2")
    (checkpoints / "latest").write_text("global_step_2")
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("global_step_2", "*.json"))
    (tmp_path / "model").mkdir()
    shutil.copy(saved / "config.json", tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    def resume() -> int:
        os.chdir(tmp_path)
        sizes = {"expert_parallel_size": world_size, "gradient_accumulation_steps": 4 // world_size}
        options = [f"--train.{name}={size}" for name, size in sizes.items()]
        return run_training(load_config(tmp_path / "config.yaml", [*options, "--train.load_checkpoint_path=auto"]))

    assert run_ranks(resume, world_size) == [0] * world_size
    expected = [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()]
    measured = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in measured] == [3, 4]
    for before, now in zip(expected[2:], measured, strict=True):
        assert now["loss"] == pytest.approx(before["loss"], rel=1e-6)
        assert now["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("is_async", [False, True])
def test_deepep_computes_what_one_process_computes(
    is_async: bool, run_ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches an exchange without its handle, weights without gradients, a result that is used before it is there, and
    # options that do not reach the library.
    write_config(tmp_path / "qwen3_moe", MODELS["qwen3_moe"])
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deepep)
    monkeypatch.setattr(model_module, "deepep_refusal", lambda device_type, dtype: None)

    def result(layout: dict[str, object], **options: object) -> Result:
        # A layer that is recomputed ends before the output of its experts is used.
        config = run_config(tmp_path, "qwen3_moe", {**layout, "enable_gradient_checkpointing": not is_async}, {})
        config = config.model_copy(update={"model": config.model.model_copy(update=options)})
        found = take_steps_of(config, Mesh(parallel_dims(config, runtime.world_size()), "cpu"))
        if options:
            assert fake_deepep.Buffer.num_sms == 12
            events = fake_deepep.Buffer.events
            assert [event.num_waits for event in events] == [1] * len(events)
            assert bool(events) == is_async
        return found

    [whole] = run_ranks(lambda: result({"data_parallel_mode": "none"}), 1)
    options = {"ep_dispatch": "deepep", "deepep_num_sms": 12, "deepep_async_combine": is_async}
    found = run_ranks(lambda: result(LAYOUTS["ep 2"][1], **options), 2)[0]
    differences = compare(found, whole)
    assert all(one.is_within for one in differences.values()), differences
    with pytest.raises(AssertionError, match=r"buffer_bytes: DeepEP needs .* make it larger"):
        run_ranks(lambda: result(LAYOUTS["ep 2"][1], **options, deepep_buffer_size_gb=1e-6), 2)


def test_deepep_is_refused_where_it_cannot_run(tmp_path: Path) -> None:
    # Catches a run that falls back to another exchange in silence.
    write_config(tmp_path / "qwen3_moe", MODELS["qwen3_moe"])
    config = run_config(tmp_path, "qwen3_moe", LAYOUTS["ep 2"][1], {})
    model = config.model.model_copy(update={"ep_dispatch": "deepep"})
    architecture = read_architecture(config.model)
    with pytest.raises(ValueError, match=r"model\.ep_dispatch: deepep cannot run here: .* is not installed"):
        model_module.check_model(architecture, model, config.train, config.lora, torch.device("cpu"))


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    # Catches experts that are left over, and ranks that hold none.
    write_config(tmp_path / "qwen3_moe", MODELS["qwen3_moe"])
    config = run_config(tmp_path, "qwen3_moe", {**FSDP, "expert_parallel_size": 3}, {})
    architecture = read_architecture(config.model)
    with pytest.raises(ValueError, match=r"expert_parallel_size: 3 ranks cannot share 4 experts equally; .* is 2"):
        model_module.check_model(architecture, config.model, config.train, config.lora, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"ep: 3 does not divide the 4 ranks .*dp_shard 4"):
        parallel_dims(config, 4)
    for options, message in (
        ({"data_parallel_mode": "ddp"}, "ddp does not shard, so expert_parallel_size cannot be 2"),
        ({**FSDP, "enable_compile": True}, "with alltoall, .* cannot be compiled: set enable_compile to false"),
        ({**FSDP, "recompute_policy": "auto", **RECOMPUTE}, "auto measures the layers on one GPU, but alltoall"),
    ):
        with pytest.raises(ValueError, match=message):
            run_config(tmp_path, "qwen3_moe", {"expert_parallel_size": 2, **options}, {}, {"ep_dispatch": "alltoall"})
    # With 2 of 4 experts, 4 ranks are sent 44 % of all tokens.
    config = run_config(tmp_path, "qwen3_moe", {**LAYOUTS["ep 4"][1], "enable_compile": True}, {})
    with pytest.raises(ValueError, match=r"train\.enable_compile: true, but .* auto takes alltoall"):
        model_module.check_model(architecture, config.model, config.train, config.lora, torch.device("cpu"))
