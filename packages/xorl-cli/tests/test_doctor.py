"""`xorl doctor`: what it says of machines on which something is missing, slow or broken."""

from pathlib import Path

import pytest
import torch

from xorl.cli.doctor import _doctor
from xorl.cli.exit_codes import FAILURE
from xorl.train import doctor
from xorl.train.doctor import Finding, findings

GPU = torch.device("cuda", 0)


def by_part(found: list[Finding]) -> dict[str, list[str]]:
    return {part: [each.status for each in found if each.part == part] for part in {each.part for each in found}}


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpus")
def test_every_part_is_examined_whatever_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches an error in one part that hides the others, and a kernel that is only said to work.
    monkeypatch.setattr(doctor, "_host", lambda num_gpus: 1 / 0)
    monkeypatch.setattr(doctor, "_compare_norms", lambda device, dtype: float("nan"))
    found = list(findings(tmp_path / "not yet there"))
    parts = by_part(found)
    assert parts["host"] == ["fail"]
    assert parts["kernels"] == ["ok", "ok", "fail"]
    assert len(parts["disk"]) == 1
    assert all(bool(each.advice) == (each.status != "ok") for each in found)
    assert "rmsnorm_native" in next(each.advice for each in found if "norms" in each.text)


@pytest.mark.usefixtures("no_gpus")
def test_a_gpu_that_torch_cannot_find_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a run on a CPU without a word, because the build of torch does not fit the driver.
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert [each.status for each in doctor._torch()] == ["fail"]
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert [(each.part, each.status) for each in doctor._torch()] == [("torch", "ok"), ("compiler", "warn")]


@pytest.mark.parametrize(
    ("used_gib", "share", "status", "said"),
    [(0, 0.7, "ok", "TFLOP/s"), (0, 0.4, "warn", "40% of its peak"), (9, 0.7, "warn", "other processes use 9.0 GiB")],
)
def test_slow_and_used_gpus_are_told(
    used_gib: int, share: float, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches a GPU whose clock is limited, and memory that another process holds.
    total = 80 * doctor.GIB
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - used_gib * doctor.GIB, total))
    monkeypatch.setattr(doctor, "_product_flops", lambda device: share * 989.4e12)
    [found] = doctor._gpu(GPU)
    assert (found.part, found.status) == ("gpu 0", status)
    assert said in found.text


def test_gpus_that_cannot_reach_each_other_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda first, second: False)
    [found] = doctor._links([GPU, torch.device("cuda", 1)])
    assert (found.status, "cuda:1" in found.text) == ("warn", True)
    assert not list(doctor._links([GPU]))


def test_full_and_locked_disks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a first checkpoint that fails after hours.
    [locked] = doctor._disk(Path("/proc/nowhere"))
    assert locked.status == "fail"
    monkeypatch.setattr(doctor, "FREE_GIB", float("inf"))
    [full] = doctor._disk(tmp_path)
    assert (full.status, "train.output_dir" in full.advice) == ("warn", True)


def test_the_command_fails_if_a_run_would(capsys: pytest.CaptureFixture[str]) -> None:
    # Catches scripts that start a run on a machine that cannot hold its checkpoints.
    assert _doctor(Path("/proc/nowhere")) == FAILURE
    out = capsys.readouterr().out
    assert "xorl-core" in out
    assert "fail  disk" in out
