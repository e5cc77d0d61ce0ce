"""Expert parallelism: exchanges, reading, old checkpoints, and what is refused. See test_layouts, too."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import fake_deepep
from layouts import EP, LAYOUTS, ONE_PROCESS, mesh_for, run_config, steps, write_models
from table_of_runs import RECOMPUTE, Options
from tiny_runs import metrics_of
from xorl.config import load_config
from xorl.core.nn.dispatch import AllToAll
from xorl.train import layer_kernels
from xorl.train import model as model_module
from xorl.train.model_source import read_architecture
from xorl.train.run import run_training
from xorl.train.startup import parallel_dims
from xorl.train.verify import Result, compare


def test_padding_is_not_sent(run_ranks, tmp_path: Path) -> None:
    # Catches padding that takes room and time on other ranks.
    group_size = 2

    def rows_received() -> int:
        mesh = mesh_for(run_config(tmp_path, "", LAYOUTS["ep 2"].train))
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
    expected, measured = metrics_of(saved), metrics_of(tmp_path / "out")
    assert [record["step"] for record in measured] == [3, 4]
    for before, now in zip(expected[2:], measured, strict=True):
        assert now["loss"] == pytest.approx(before["loss"], rel=1e-6)
        assert now["grad_norm"] == pytest.approx(before["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(("model", "is_async"), [("qwen3_moe", False), ("glm4_moe", True)])
def test_deepep_computes_what_one_process_computes(
    model: str, is_async: bool, run_ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches an exchange without its handle, weights without gradients, a result that is used before it is there, lost
    # shared experts, and options that do not reach the library.
    write_models(tmp_path)
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deepep)
    monkeypatch.setattr(layer_kernels, "deepep_refusal", lambda device_type, dtype: None)

    def result(layout: Options, **options: object) -> Result:
        # A layer that is recomputed ends before the output of its experts is used.
        config = run_config(tmp_path, model, {**layout, "enable_gradient_checkpointing": not is_async})
        config = config.model_copy(update={"model": config.model.model_copy(update=options)})
        found = steps(config)
        if options:
            assert fake_deepep.Buffer.num_sms == 12
            events = fake_deepep.Buffer.events
            assert [event.num_waits for event in events] == [1] * len(events)
            assert bool(events) == is_async
        return found

    [whole] = run_ranks(lambda: result(ONE_PROCESS), 1)
    options = {"ep_dispatch": "deepep", "deepep_num_sms": 12, "deepep_async_combine": is_async}
    found = run_ranks(lambda: result(LAYOUTS["ep 2"].train, **options), 2)[0]
    differences = compare(found, whole)
    assert all(one.is_within for one in differences.values()), differences
    with pytest.raises(AssertionError, match=r"buffer_bytes: DeepEP needs .* make it larger"):
        run_ranks(lambda: result(LAYOUTS["ep 2"].train, **options, deepep_buffer_size_gb=1e-6), 2)


def test_deepep_is_refused_where_it_cannot_run(tmp_path: Path) -> None:
    # Catches a run that falls back to another exchange in silence.
    write_models(tmp_path)
    config = run_config(tmp_path, "qwen3_moe", LAYOUTS["ep 2"].train)
    model = config.model.model_copy(update={"ep_dispatch": "deepep"})
    architecture = read_architecture(config.model)
    with pytest.raises(ValueError, match=r"model\.ep_dispatch: deepep cannot run here: .* is not installed"):
        model_module.check_model(architecture, model, config.train, config.lora, torch.device("cpu"))


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    # Catches experts that are left over, and ranks that hold none.
    write_models(tmp_path)
    for mode, advice in (("ddp", "start 2, or .* fsdp2"), ("fsdp2", "nearest size that works is 2")):
        config = run_config(tmp_path, "qwen3_moe", {"data_parallel_mode": mode, "expert_parallel_size": 3})
        architecture = read_architecture(config.model)
        message = f"expert_parallel_size: 3 ranks cannot share 4 experts equally; .*{advice}"
        with pytest.raises(ValueError, match=message):
            model_module.check_model(architecture, config.model, config.train, config.lora, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"ep: 3 does not divide the 4 ranks .*dp_shard 4"):
        parallel_dims(config, 4)
    for options, message in (
        (ONE_PROCESS, "none does not divide rows or parameters, so expert_parallel_size cannot be 2"),
        (
            {"data_parallel_mode": "fsdp2", "enable_compile": True},
            "with alltoall, .* cannot be compiled: set enable_compile to false",
        ),
        (
            {"data_parallel_mode": "fsdp2", "recompute_policy": "auto", **RECOMPUTE},
            "auto measures the layers on one GPU, but alltoall",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run_config(tmp_path, "qwen3_moe", {**EP, **options}, of_model={"ep_dispatch": "alltoall"})
    # With 2 of 4 experts, 4 ranks are sent 44 % of all tokens.
    config = run_config(tmp_path, "qwen3_moe", {**LAYOUTS["ep 4"].train, "enable_compile": True})
    with pytest.raises(ValueError, match=r"train\.enable_compile: true, but .* auto chooses alltoall"):
        model_module.check_model(architecture, config.model, config.train, config.lora, torch.device("cpu"))
