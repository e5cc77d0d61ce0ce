"""The command line: what it answers, how fast it can, and which exit code an error leads to."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from local_options import local_config
from xorl.ckpt import CheckpointFailure
from xorl.cli.app import main
from xorl.cli.exit_codes import BAD_INPUT, FAILURE, Diverged, Terminated, exit_code_text
from xorl.cli.rank import RankEnvironment, run_alone
from xorl.cli.version import version_command
from xorl.config import ConfigError
from xorl.config.conflicts import check_world_size
from xorl.host.lock import FolderInUseError

SOUND = """\
model: {model_path: no-such-model}
data: {datasets: [{path: a.jsonl}]}
train: {output_dir: out}
"""
HEAVY = ("torch", "transformers", "datasets", "numpy", "wandb")


@dataclass
class Answer:
    code: int
    out: str
    err: str


@pytest.fixture
def xorl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Returns a function that runs a command line in this process, in a folder that holds a.yaml."""
    (tmp_path / "a.yaml").write_text(SOUND)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["xorl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Answer(int(ended.value.code or 0), *capsys.readouterr())

    return run


def modules_after(*arguments: str, folder: Path) -> tuple[int, set[str]]:
    """Runs a command line and returns its exit code and the modules that it loaded."""
    code = (
        "import atexit, json, sys; sys.argv[0] = 'xorl'\n"
        "atexit.register(lambda: json.dump(sorted(sys.modules), open('modules.json', 'w')))\n"
        "from xorl.cli.app import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, check=False)
    return result.returncode, set(json.loads((folder / "modules.json").read_text()))


@pytest.mark.parametrize(
    ("arguments", "code", "unloaded"),
    [
        (["--help"], 0, (*HEAVY, "pydantic", "rich", "ruamel.yaml")),
        (["trainn"], 2, HEAVY),
        (["config", "docs"], 0, HEAVY),
        (["config", "schema"], 0, HEAVY),
        (["config", "show", "a.yaml"], 0, HEAVY),
        (["train", "--help"], 0, HEAVY),
        (["train", "a.yaml", "--train.lrr", "1"], 2, HEAVY),
        (["train", "a.yaml", "--nproc-pernode", "1"], 2, HEAVY),
        (["serve", "--help"], 0, (*HEAVY, "fastapi", "zmq")),
        (["serve", "a.yaml"], 2, (*HEAVY, "fastapi", "zmq")),
    ],
)
def test_answers_do_not_wait_for_torch(
    tmp_path: Path, arguments: list[str], code: int, unloaded: tuple[str, ...]
) -> None:
    # Would catch an import that makes help and a misspelt key take seconds.
    (tmp_path / "a.yaml").write_text(SOUND)
    exit_code, modules = modules_after(*arguments, folder=tmp_path)
    assert exit_code == code
    assert sorted(modules & set(unloaded)) == []


def test_help_groups_the_commands(xorl) -> None:
    # Would catch a command that cannot be found.
    told = xorl("--help").out
    for part in ("Training:\n  train ", "Configuration:\n  config ", "About:\n  doctor ", "Exit codes: 0 done"):
        assert part in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainn"], "no such command: 'trainn'; did you mean train?"),
        (["config", "shoow"], "Did you mean 'show'?"),
        (["train"], "Missing argument 'CONFIG'"),
        (["train", "a.yaml", "--nproc-pernode", "2"], "--nproc-pernode; did you mean --nproc-per-node?"),
        (["train", "a.yaml", "--lr", "2"], "unknown flag --lr; did you mean the option --train.lr?"),
        (["train", "a.yaml", "--nnodes", "x"], "Invalid value for '--nnodes'"),
        (["train", "a.yaml", "--train.lr"], "the value is missing; write --train.lr VALUE"),
        (["train", "a.yaml", "train.lr=2"], "options start with two dashes: write --train.lr=2"),
        (["bench", "a.yaml", "--profile", "train.lr=2"], "options start with two dashes: write --train.lr=2"),
        (["bench", "a.yaml", "--against", "train.fp8=rowise"], "did you mean rowwise?"),
        (["bench", "a.yaml", "--train.enable_profiling", "true"], "train.enable_profiling: not available"),
        (["bench", "a.yaml", "--train.max_steps", "3"], "it follows from --warmup and --steps; remove the option"),
        (["bench", "a.yaml", "--train.save_epochs=1"], "in a benchmark nothing is saved, resumed or sent"),
        (["train", "b.yaml"], "did you mean a.yaml?"),
        (["serve", "a.yaml"], "the options of the service have no sections: write those of model"),
        (["serve", "a.yaml", "--lora-rank", "2"], "did you mean the option --server.lora_rank?"),
        (["serve", "a.yaml", "--port", "2"], "unknown flag --port; did you mean --api-port?"),
        (["serve", "a.yaml", "--api-key-file", "x"], "--api-key-file is for `xorl serve status`"),
        (["serve", "status", "--api-key-file", "x"], "--api-key-file: cannot read x"),
        (["serve", "status", "--api-port", "1"], "cannot reach a service at http://127.0.0.1:1"),
        (["config", "docs", "--service", "sed"], "no section or option sed; did you mean seed?"),
        (["config", "show", "a.yaml", "--train.init_device", "npu"], "npu is not supported"),
        (["config", "docs", "optimiser"], "did you mean train.optimizer?"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_says_what_to_change(xorl, arguments: list[str], message: str) -> None:
    # Would catch a traceback, or a hint that is missing where it is most needed.
    result = xorl(*arguments)
    assert result.code == BAD_INPUT
    assert message in " ".join(result.err.split())
    assert "Traceback" not in result.err


def test_traceback_flag_shows_where_an_input_was_refused(xorl) -> None:
    # Would catch a fault of ours that is told as bad input and cannot be found.
    result = xorl("train", "a.yaml", "--traceback", "--train.lrr", "1")
    assert result.code == BAD_INPUT
    assert "Traceback" in result.err
    assert "did you mean train.lr?" in result.err


@pytest.mark.parametrize("order", [["a.yaml", "--train.lr", "2e-5"], ["--train.lr=2e-5", "a.yaml"]])
def test_show_prints_values_and_origins(xorl, order: list[str]) -> None:
    # Would catch an override that is lost, or taken for the file.
    lines = [" ".join(line.split()) for line in xorl("config", "show", *order).out.splitlines()]
    assert "lr: 2e-05 # --train.lr" in lines
    assert "model_path: no-such-model # a.yaml:1" in lines
    assert "seed: 42 # default" in lines


def test_the_schema_is_json(xorl) -> None:
    # Would catch a schema that no editor can read.
    assert json.loads(xorl("config", "schema").out)["additionalProperties"] is False


def test_version_names_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    # Would catch a report of a fault that leaves out what it ran on.
    version_command()
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    packages = ["xorl-cli", "xorl-lora", "xorl-core", "xorl-kernels", "xorl-data", "xorl-ckpt"]
    assert names == [*packages, "torch", "python", "platform", "device"]


@pytest.mark.multi
def test_a_process_under_torchrun_joins(tmp_path: Path) -> None:
    # Would catch a rank that starts ranks of its own, and one that fails without saying so to torchrun.
    (tmp_path / "a.yaml").write_text(SOUND)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*torchrun, "-m", "xorl.cli.train", "a.yaml", "--train.data_parallel_mode=none"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=False,
    )
    assert result.returncode == FAILURE  # torchrun's own, whatever the ranks say
    assert "train.data_parallel_mode: none uses a single process, got 2 processes" in result.stderr
    assert "exitcode  : 2" in result.stderr
    assert "launching:" not in result.stderr


def test_a_number_of_ranks_that_does_not_fit_is_refused_before_they_start(xorl) -> None:
    # Would catch a job that fails on every rank with an error of torch's.
    result = xorl("train", "a.yaml", "--nproc_per_node=3", "--train.data_parallel_shard_size", "2")
    assert result.code == BAD_INPUT
    told = "train.data_parallel_shard_size: 3 processes cannot be arranged as train.data_parallel_shard_size 2"
    assert f"error: {told}" in result.err
    assert "launching:" not in result.err
    Path("b.yaml").write_text(SOUND.replace("train: {", "train: {data_parallel_shard_size: 2, "))
    assert f"error: b.yaml:3: {told}" in xorl("train", "b.yaml", "--nproc_per_node=3").err


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "a"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}, 0),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, None),
        ({"MASTER_ADDR": "a"}, None),
        ({}, None),
    ],
)
def test_a_rank_is_known_by_its_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: int | None
) -> None:
    # Would catch a process that takes a cluster's stray variable for a job, and waits for peers.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = RankEnvironment.read()
    assert (environment and environment.rank) == rank


def raise_from_xorl() -> None:
    check_world_size(local_config(data_parallel_mode="none"), 2)


def raise_from_library() -> None:
    json.loads("{")


def raising(error: BaseException) -> int:
    raise error


def raising_beside(interruption: type[KeyboardInterrupt], error: Exception) -> int:
    """As a library's lock that is released when a signal kept it from being taken."""
    try:
        raise interruption
    finally:
        raise error


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (raise_from_xorl, 2, "error: train.data_parallel_mode: none uses a single process"),
        (lambda: raising(ConfigError([], "a.yaml")), 2, "error: a.yaml: 0 problems"),
        (raise_from_library, 1, "Traceback"),
        (lambda: raising(RuntimeError("no")), 1, "RuntimeError: no"),
        (lambda: raising(Diverged("step 5: loss nan")), 3, "error: step 5: loss nan"),
        (lambda: raising(KeyboardInterrupt), 130, "interrupted by SIGINT"),
        (lambda: raising(FolderInUseError("o: another run")), 4, "error: o: another run"),
        (lambda: raising(Terminated(signal.SIGUSR1)), 138, "interrupted by SIGUSR1"),
        (lambda: raising(Terminated), 143, "interrupted by SIGTERM"),
        (lambda: raising_beside(Terminated, RuntimeError("no lock")), 143, "interrupted by SIGTERM"),
    ],
)
def test_an_error_leads_to_its_exit_code(capsys: pytest.CaptureFixture[str], error, code: int, shown: str) -> None:
    # Would catch a script that cannot tell a typing error from a crash, and a crash told without its traceback.
    assert run_alone(lambda: error() or 0, with_traceback=False) == code
    told = capsys.readouterr().err
    assert shown in told
    assert ("Traceback" in told) == (code == FAILURE)


def test_a_failure_that_is_put_into_words_is_told_without_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    # Would catch forty lines of libraries around "the disk is full", a machine's fault told as the user's, and a save
    # that failed after a signal and is told as done.
    full = CheckpointFailure("the disk is full")
    for run in (lambda: raising(full), lambda: raising_beside(Terminated, full)):
        assert run_alone(run, with_traceback=False) == FAILURE
        assert capsys.readouterr().err == "error: the disk is full\n"


def test_the_traceback_of_a_diverged_run_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    # Would catch a flag that works for one kind of error alone.
    assert run_alone(lambda: raising(Diverged("loss nan")), with_traceback=True) == 3
    assert "Traceback" in capsys.readouterr().err


def test_a_single_process_takes_sigterm_as_an_interruption(capsys: pytest.CaptureFixture[str]) -> None:
    # Would catch files left open, and an exit code that says nothing of the signal.
    before = signal.getsignal(signal.SIGTERM)
    closed: list[bool] = []

    def run() -> int:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            time.sleep(30)
        finally:
            closed.append(True)
        return 0

    assert run_alone(run, with_traceback=False) == 143
    assert closed == [True]
    assert signal.getsignal(signal.SIGTERM) is before
    assert "interrupted by SIGTERM" in capsys.readouterr().err


def test_exit_codes_are_told_in_words() -> None:
    # Would catch a number that has to be looked up.
    told = [exit_code_text(code) for code in (0, 2, 143, 137, -9, 7)]
    assert told == [
        "done",
        "bad input",
        "interrupted by SIGTERM",
        "ended by SIGKILL",
        "ended by SIGKILL",
        "exit code 7",
    ]
