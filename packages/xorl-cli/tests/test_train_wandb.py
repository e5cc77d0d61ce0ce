"""Metrics in Weights & Biases: what is logged, when it goes online, and which run a resumed one continues."""

from pathlib import Path

import pytest

from child import in_child
from xorl.train.observe.wandb_log import RUN_ID, WandbSink, credentials_are_missing


def test_wandb_is_told_every_so_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches an interval that is not kept, and one that swallows evaluations.
    told: list[tuple[int, dict[str, object]]] = []
    asked: dict[str, object] = {}

    class Listener:
        id = "made-up"

        def log(self, values: dict[str, object], step: int) -> None:
            told.append((step, values))

        def finish(self) -> None:
            pass

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("wandb.init", lambda **options: asked.update(options) or Listener())
    options = {"project": "p", "name": "n", "tags": ["a"], "config": {"seed": 1}}
    sink = WandbSink(**options, log_interval=3, folder=tmp_path, start_step=0, went_back=False, repeats=False)
    for step in range(1, 8):
        sink.write({"step": step, "loss": 0.5, "mfu": None})
    sink.write({"step": 7, "eval_loss": 0.25})
    sink.close()
    assert told == [(3, {"step": 3, "loss": 0.5}), (6, {"step": 6, "loss": 0.5}), (7, {"step": 7, "eval_loss": 0.25})]
    assert {name: asked[name] for name in options} == options


@pytest.mark.parametrize(
    ("environment", "would_ask"),
    [
        ({}, True),
        ({"WANDB_MODE": "online"}, True),
        ({"WANDB_MODE": "offline"}, False),
        ({"WANDB_MODE": "disabled"}, False),
        ({"WANDB_API_KEY": "0" * 40}, False),
        ({"WANDB_BASE_URL": "https://wandb.example:8080"}, False),
    ],
)
def test_wandb_is_not_asked_to_go_online_without_a_key(
    environment: dict[str, str], would_ask: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches a prompt that a run on a cluster waits at, and a server of one's own whose key is not found.
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine wandb.example login user password " + "0" * 40 + "\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert credentials_are_missing() is would_ask


def test_a_resumed_run_goes_on_with_its_run_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a loss curve that falls to pieces at each restart, a new run that is drawn over the one before, and values
    # of steps after going back, of which wandb shows the old ones.
    monkeypatch.setenv("WANDB_MODE", "offline")

    def logged(start_step: int, *, went_back: bool = False, repeats: bool = False, lr: float = 0.1) -> str:
        config = {"train": {"lr": lr, "load_checkpoint_path": str(start_step)}}
        options = {"project": "p", "name": None, "tags": None, "log_interval": 1, "config": config}
        sink = WandbSink(**options, folder=tmp_path, start_step=start_step, went_back=went_back, repeats=repeats)
        sink.write({"step": start_step + 1, "loss": 0.5})
        sink.close()
        return (tmp_path / RUN_ID).read_text().split()[0]

    # In processes of their own, since wandb reads its variables once and leaves threads behind.
    first, again, new = in_child(lambda: [logged(start_step) for start_step in (0, 1, 0)])
    assert again == first != new
    back = in_child(lambda: logged(4, went_back=True))
    assert back not in (first, new)
    assert in_child(lambda: [logged(5), logged(5, repeats=True), logged(5, lr=0.2)]) == [back] * 3
    changed = in_child(lambda: logged(5, repeats=True, lr=0.3))
    assert changed not in (first, new, back)
    written = b"".join(file.read_bytes() for file in (tmp_path / "wandb").glob(f"*/run-{back}.wandb"))
    assert b"continued_from" in written
    assert new.encode() in written
    monkeypatch.setenv("WANDB_RUN_ID", "own")
    assert in_child(lambda: logged(1)) == "own"
    # offline-run-{time}-{id}, and a number for a second one within a second
    runs = [run.name.split("-")[3] for run in sorted((tmp_path / "wandb").glob("offline-run-*"))]
    assert set(runs) == {first, new, back, changed, "own"}
