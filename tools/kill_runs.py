"""Kills runs at random moments, repeats the same command until they end, and compares them with an undisturbed run.

`python tools/kill_runs.py --kills 200 --record docs/records/checkpoints.md`. A run takes a checkpoint after every other
step and keeps three. One rank or all of them receive SIGKILL, either after a random time, or at a random file operation
of a save: before or after a file is created, written, synced, renamed or removed. Every run must end with the same
losses, gradient norms and tensors, to the bit. On two ranks, the survivors of a kill are killed a moment later, as a
launcher does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch._dynamo  # FSDP2 would import it in every forked rank

from xorl.ckpt import BackgroundWriter, read_manifest
from xorl.ckpt.files import HashedFile, hash_file
from xorl.config import load_config
from xorl.core import runtime
from xorl.train.run import run_training

NUM_STEPS = 10
GRACE_S, TIMEOUT_S = 2.0, 120.0
CONFIG = """
model: {{config_path: {folder}/model}}
data:
  datasets: [{{path: {folder}/train.jsonl}}]
  dataset_prepared_path: {folder}/prepared
  sample_packing_sequence_len: 64
  dataloader_num_workers: 0
  pad_to_multiple_of: 16
  val_set_size: 8
train:
  output_dir: {output}
  data_parallel_mode: {mode}
  gradient_accumulation_steps: {accumulation}
  max_steps: {steps}
  lr: 1e-2
  enable_mixed_precision: false
  enable_gradient_checkpointing: false
  eval_steps: 4
  save_steps: 2
  save_async: {save_async}
  keep_last: 2
  keep_best: 1
  save_hf_weights: false
  load_checkpoint_path: auto
  log_format: structured
  use_wandb: false
"""
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.02,
}


@dataclass(frozen=True)
class Layout:
    """How a run saves, and on how many ranks."""

    world_size: int
    save_async: bool

    @property
    def name(self) -> str:
        return f"{self.world_size} rank{'s' * (self.world_size > 1)}, {'async' if self.save_async else 'sync'}"


@dataclass(frozen=True)
class Kill:
    """When to kill, and whom: after `delay_s`, or at the n-th `operation` of a name; the rank `victim`, None: all."""

    victim: int | None
    delay_s: float | None = None
    operation: tuple[str, int] | None = None


@dataclass
class Report:
    """What happened: kills by layout and moment, and the runs whose results differ."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def num_kills(self) -> int:
        return sum(self.kills.values())


def prepare(folder: Path) -> None:
    """Write a model and rows of random tokens."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    generator = torch.Generator().manual_seed(3)
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(200):
            length = int(torch.randint(4, 40, (1,), generator=generator))
            ids = torch.randint(0, 64, (length,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": ids, "labels": [-100, *ids[1:]]}) + "\n")


def kill_runs(folder: Path, layouts: Sequence[Layout], num_kills: int, seed: int) -> Report:
    """Kill runs of all layouts in turn until `num_kills` were killed; every run is then continued to its end."""
    draw, report = random.Random(seed), Report()
    prepare(folder)
    expected: dict[int, dict[str, object]] = {}
    durations: dict[Layout, float] = {}
    operations: dict[Layout, list[Counter[str]]] = {}
    for layout in layouts:
        output = folder / f"straight_{layout.world_size}_{layout.save_async}"
        start = time.monotonic()
        _require_ended(_attempt(folder, output, layout, None), output)
        durations[layout] = time.monotonic() - start
        files = [output / f"operations_{rank}" for rank in range(layout.world_size)]
        operations[layout] = [Counter(file.read_text().splitlines()) for file in files]
        if expected.setdefault(layout.world_size, results(output)) != results(output):
            report.problems.append(f"{layout.name}: saving in the background changes the results")
    number = 0
    while report.num_kills < num_kills:
        layout = layouts[number % len(layouts)]
        output, number = folder / f"run_{number}", number + 1
        for _ in range(draw.randint(1, 4)):
            victim = draw.choice([None, *range(layout.world_size)])
            if draw.random() < 0.4:
                kill = Kill(victim, delay_s=draw.uniform(0.0, durations[layout]))
            else:
                done = operations[layout][victim or 0]
                phase = draw.choice(sorted({phase_of(name) for name in done}))
                name = draw.choice(sorted(name for name in done if phase_of(name) == phase))
                kill = Kill(victim, operation=(name, draw.randint(1, done[name])))
            was_killed, moment = _attempt(folder, output, layout, kill)
            if was_killed:
                report.kills[layout.name, phase_of(moment)] += 1
            print(f"{report.num_kills:4} {layout.name:14} {moment}", flush=True)
            if not was_killed:
                break
        _require_ended(_attempt(folder, output, layout, None), output)
        report.runs[layout.name] += 1
        if differing := _differing(results(output), expected[layout.world_size]):
            report.problems.append(f"{layout.name} ({output.name}): other {' and '.join(differing)}")
            print(report.problems[-1], flush=True)
        elif leftovers := [path.name for path in (output / "checkpoints").iterdir() if path.name.startswith(".")]:
            report.problems.append(f"{layout.name} ({output.name}): left behind {leftovers}")
        else:
            shutil.rmtree(output)
    return report


def results(output: Path) -> dict[str, object]:
    """The loss and the gradient norm of every step, evaluations, and the hashes of all files of the last checkpoint."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "eval_loss")
    last = output / "checkpoints" / f"global_step_{NUM_STEPS}"
    # .metadata has a random id.
    hashes = {name: hash_file(last / name) for name in read_manifest(last).files if name != ".metadata"}
    kept = sorted(path.name for path in (output / "checkpoints").glob("global_step_*"))
    metrics = [tuple(line.get(key) for key in keys) for line in lines]
    return {"metrics": metrics, "tensors and state": hashes, "checkpoints": kept}


def _differing(found: dict[str, object], expected: dict[str, object]) -> list[str]:
    return [f"{part} {found[part]} instead of {expected[part]}" for part in expected if found[part] != expected[part]]


def _attempt(folder: Path, output: Path, layout: Layout, kill: Kill | None) -> tuple[bool, str]:
    """Run the command once; returns whether it was killed, and at which moment."""
    output.mkdir(exist_ok=True)
    moment = output / "moment"
    moment.unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    gc.freeze()
    ranks = [
        get_context("fork").Process(target=_rank, args=(folder, output, layout, rank, port, kill))
        for rank in range(layout.world_size)
    ]
    start = time.monotonic()
    for rank in ranks:
        rank.start()
    died_at: float | None = None
    while any(rank.is_alive() for rank in ranks):
        time.sleep(0.002)
        now = time.monotonic()
        if kill is not None and kill.delay_s is not None and now - start > kill.delay_s and died_at is None:
            _kill(ranks if kill.victim is None else [ranks[kill.victim]])
        if died_at is None and any(rank.exitcode not in (None, 0) for rank in ranks):
            died_at = now
        if died_at is not None and (kill is None or kill.victim is None or now - died_at > GRACE_S):
            _kill(ranks)
        if now - start > TIMEOUT_S:
            _kill(ranks)
            raise RuntimeError(f"{layout.name}: the run in {output} hangs after {kill}")
    was_killed = any(rank.exitcode == -signal.SIGKILL for rank in ranks)
    named = moment.read_text().splitlines()[0] if moment.exists() else "at a random time"
    return was_killed, named if was_killed else "ended"


def _kill(ranks: Sequence[BaseProcess]) -> None:
    for rank in ranks:
        if rank.is_alive():
            rank.kill()


def _require_ended(outcome: tuple[bool, str], output: Path) -> None:
    if outcome != (False, "ended") or not (output / "checkpoints" / f"global_step_{NUM_STEPS}").is_dir():
        raise RuntimeError(f"the run in {output} did not end:\n{(output / 'log').read_text()[-4000:]}")


def _rank(folder: Path, output: Path, layout: Layout, rank: int, port: int, kill: Kill | None) -> None:
    log = os.open(output / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(layout.world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    config = output / f"config_{rank}.yaml"
    mode = "none" if layout.world_size == 1 else "fsdp2"
    text = CONFIG.format(
        folder=folder,
        output=output,
        mode=mode,
        accumulation=2 // layout.world_size,
        steps=NUM_STEPS,
        save_async=str(layout.save_async).lower(),
    )
    config.write_text(text)
    is_victim = kill is not None and (kill.victim == rank or (kill.victim is None and rank == 0))
    _watch_operations(output, rank, kill.operation if kill is not None and is_victim else None)
    code = 1
    try:
        runtime.init("cpu", timeout_s=60)
        code = run_training(load_config(config, []))
    except BaseException as error:  # noqa: BLE001 - the log shows it
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(code)


def _watch_operations(output: Path, rank: int, last: tuple[str, int] | None) -> None:
    """Kill this process at file operation `last`; without one, write the names of all to a file."""
    checkpoints, counts = str(output / "checkpoints"), Counter[str]()

    def happened(name: str) -> None:
        counts[name] += 1
        if last == (name, counts[name]):
            (output / "moment").write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)
        if last is None:
            with (output / f"operations_{rank}").open("a") as file:
                file.write(f"{name}\n")

    def watch(owner: object, attribute: str, describe: Callable[..., str | None]) -> None:
        original = getattr(owner, attribute)

        def watched(*args: object, **kwargs: object) -> object:
            name = describe(*args)
            if name is not None:
                happened(f"before {name}")
            result = original(*args, **kwargs)
            if name is not None:
                happened(f"after {name}")
            return result

        setattr(owner, attribute, watched)

    def in_checkpoints(verb: str) -> Callable[..., str | None]:
        return lambda path, *_: f"{verb} {_kind(Path(path))}" if str(path).startswith(checkpoints) else None

    watch(Path, "rename", in_checkpoints("renaming"))
    watch(Path, "replace", in_checkpoints("moving"))
    watch(Path, "mkdir", in_checkpoints("creating"))
    watch(Path, "unlink", in_checkpoints("removing"))
    watch(shutil, "rmtree", in_checkpoints("removing"))
    watch(HashedFile, "__init__", lambda _, path: f"creating {_kind(path)}")
    watch(HashedFile, "close", lambda file: f"syncing {_kind(Path(str(file._file.name)))}")
    watch(HashedFile, "write", lambda file, _: f"writing {_kind(Path(str(file._file.name)))}")
    watch(BackgroundWriter, "start", lambda *_: "the snapshot")


def phase_of(operation: str) -> str:
    """The part of a save to which a file operation belongs."""
    parts = {
        "time": "at a random time",
        "snapshot": "around the snapshot",
        "metadata.json": "the manifest",
        "renaming a save": "publishing",
        "pointer": "latest",
        "old checkpoint": "pruning",
        "renaming a checkpoint": "pruning",
        "owner": "the owner's file",
        "creating a save": "a new folder",
        "creating training_state": "a new folder",
        "creating checkpoints": "a new folder",
    }
    return next((phase for part, phase in parts.items() if part in operation), "tensors and state")


def _kind(path: Path) -> str:
    """What a path is, the same for all steps: a folder of a save, the pointer, a file of a checkpoint."""
    for prefix, kind in ((".saving_", "a save"), (".deleting_", "an old checkpoint"), ("global_step_", "a checkpoint")):
        if path.name.startswith(prefix):
            return {".latest": "the pointer", ".owner": "the owner"}.get(path.suffix, kind)
    return path.name


def main() -> int:
    """Parses the command line and returns 1 if any run differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="append the result to this file")
    options = parser.parse_args()
    layouts = [Layout(world_size, save_async) for world_size in (1, 2) for save_async in (False, True)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill_runs_") as folder:
        report = kill_runs(Path(folder), layouts, options.kills, options.seed)
    text = describe(report, layouts, options.seed, time.monotonic() - start)
    print(text)
    if options.record is not None:
        with options.record.open("a") as file:
            file.write(text)
    return 1 if report.problems else 0


def describe(report: Report, layouts: Sequence[Layout], seed: int, seconds: float) -> str:
    """The record of a session, as Markdown."""
    lines = [
        f"## {report.num_kills} kills, {time.strftime('%Y-%m-%d')}",
        "",
        f"    uv run tools/kill_runs.py --kills {report.num_kills} --seed {seed}",
        "",
        f"torch {torch.__version__}, {os.cpu_count()} CPU cores, {seconds / 60:.0f} minutes. "
        f"{len(report.problems)} runs differ from the run that was not killed{': ' * bool(report.problems)}"
        f"{'; '.join(report.problems)}.",
        "",
        f"| killed | {' | '.join(layout.name for layout in layouts)} |",
        f"|---|{'---|' * len(layouts)}",
        f"| runs | {' | '.join(str(report.runs[layout.name]) for layout in layouts)} |",
    ]
    for moment in sorted({moment for _, moment in report.kills}):
        lines.append(f"| {moment} | {' | '.join(str(report.kills[layout.name, moment]) for layout in layouts)} |")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
