"""The file in which a service keeps how its GPUs communicate."""

import logging
from pathlib import Path

import pytest

from xorl.core.parallel import collectives
from xorl.core.parallel.collectives import choices, keep_choices
from xorl.train.transports import ChoicesFile


def test_workers_that_start_again_keep_the_choice_of_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches workers that measure again after a crash, and an empty record of a service on one GPU."""
    file = ChoicesFile(tmp_path / "service" / "fsdp_collectives.json")
    monkeypatch.setattr(collectives, "_chosen", {})
    file.keep()
    file.write()
    assert not (tmp_path / "service").exists()
    keep_choices({"0,1": "nccl"})  # stands for a measurement
    file.write()
    monkeypatch.setattr(collectives, "_chosen", {})
    restarted = ChoicesFile(tmp_path / "service" / "fsdp_collectives.json")
    restarted.keep()
    assert choices() == {"0,1": "nccl"}
    restarted.write()
    assert [path.name for path in (tmp_path / "service").iterdir()] == ["fsdp_collectives.json"]


@pytest.mark.parametrize("content", ["{", "[1]", '{"0,1": "gloo"}'])
def test_a_record_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    """Catches a damaged record that is ignored: the workers would measure again without a word."""
    path = tmp_path / "fsdp_collectives.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=str(path)):
        ChoicesFile(path).keep()


def test_a_record_that_cannot_be_written_does_not_stop_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches workers that end because the storage is full."""
    monkeypatch.setattr(collectives, "_chosen", {(0, 1): "nccl"})
    (tmp_path / "service").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="xorl.train.transports"):
        ChoicesFile(tmp_path / "service" / "fsdp_collectives.json").write()
    assert "set fsdp_collectives" in caplog.text
