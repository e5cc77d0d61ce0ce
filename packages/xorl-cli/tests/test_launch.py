"""Starting ranks: which and where, whose failure is told, which exit code is the job's, and what signals do."""

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ports import free_port
from xorl.cli.failures import failure_of, report
from xorl.cli.launch import LaunchFlags, launch, plan_launch
from xorl.host import ranks

TINY_RANK = str(Path(__file__).with_name("tiny_rank.py"))
TWO_RANKS = LaunchFlags(nproc_per_node=2)
# A launcher that waits for a rank to give up is killed by it only after 30 s; sooner means that nothing waited.
PROMPT_S = 28.0  # torch kills after 30 what does not end by itself


@pytest.mark.parametrize(
    ("flags", "num_gpus", "is_single_process", "line"),
    [
        (LaunchFlags(), 0, False, None),
        (LaunchFlags(), 1, False, None),
        (LaunchFlags(), 8, True, None),
        (LaunchFlags(), 8, False, "torchrun --nproc-per-node=8"),
        (LaunchFlags(nproc_per_node=1), 0, False, "torchrun --nproc-per-node=1"),
        (LaunchFlags(nproc_per_node=4), 0, False, "torchrun --nproc-per-node=4"),
        (LaunchFlags(nproc_per_node=2), 8, True, "torchrun --nproc-per-node=2"),
        (
            LaunchFlags(nnodes=2, node_rank=1, master_addr="10.0.0.1"),
            8,
            False,
            "torchrun --nproc-per-node=8 --nnodes=2 --node-rank=1 --master-addr=10.0.0.1 --master-port=29500",
        ),
        (
            LaunchFlags(nproc_per_node=2, master_port=29501),
            0,
            False,
            "torchrun --nproc-per-node=2 --nnodes=1 --node-rank=0 --master-addr=127.0.0.1 --master-port=29501",
        ),
        (
            LaunchFlags(nnodes=2, node_rank=1, rdzv_backend="static", rdzv_endpoint="[fd00::1]:1", rdzv_id="job"),
            1,
            False,
            "torchrun --nproc-per-node=1 --nnodes=2 --node-rank=1 --master-addr=fd00::1 --master-port=1",
        ),
    ],
)
def test_what_is_started_follows_flags_and_devices(
    flags: LaunchFlags, num_gpus: int, is_single_process: bool, line: str | None
) -> None:
    # Would catch a launcher where one process is enough, GPUs left idle, and a torchrun line that starts another job.
    plan = plan_launch(flags, num_gpus=num_gpus, is_single_process=is_single_process)
    assert (plan and plan.torchrun_line(["a b.yaml"])) == (line and f"{line} -m xorl.cli.train 'a b.yaml'")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (LaunchFlags(nproc_per_node=0), "must be at least 1"),
        (LaunchFlags(nproc_per_node=3), "has only 2 GPUs"),
        (LaunchFlags(nnodes=2, node_rank=0), "needs --master-addr"),
        (LaunchFlags(nnodes=2, master_addr="a"), "needs --node-rank"),
        (LaunchFlags(nnodes=2, master_addr="a", node_rank=2), "from 0 to 1"),
        (LaunchFlags(rdzv_backend="c10d"), "need --rdzv-endpoint"),
        (LaunchFlags(rdzv_endpoint="a:1", master_addr="a"), "do not pass both"),
        (LaunchFlags(rdzv_endpoint="a:1", rdzv_backend="static"), "needs --node-rank"),
        (LaunchFlags(rdzv_endpoint="a", rdzv_backend="static", node_rank=0), "expected HOST:PORT"),
        (
            LaunchFlags(nnodes=2, rdzv_endpoint="a:1", rdzv_id="job"),
            "runs the code that anyone writes to its port.*torchrun --nproc-per-node=2 --nnodes=2 --rdzv-backend=c10d "
            "--rdzv-endpoint=a:1 --rdzv-id=job -m",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: LaunchFlags, message: str) -> None:
    # Would catch nodes that wait for each other for ever.
    with pytest.raises(ValueError, match=message):
        plan_launch(flags, num_gpus=2, is_single_process=False)


def started(mode: str, flags: LaunchFlags = TWO_RANKS) -> tuple[int, float]:
    """Launches tiny ranks in this folder and returns the job's exit code and its time in seconds."""
    plan = plan_launch(flags, num_gpus=0, is_single_process=False)
    start = time.monotonic()
    return launch(plan, [TINY_RANK, mode]), time.monotonic() - start


def launching(flags: dict[str, object], mode: str, set_up: str = "") -> list[str]:
    """The command of a process that launches tiny ranks."""
    code = (
        f"import sys; from xorl.cli import signals; from xorl.cli.launch import *; {set_up}"
        f"plan = plan_launch(LaunchFlags(**{flags}), num_gpus=0, is_single_process=False); "
        f"sys.exit(launch(plan, [{TINY_RANK!r}, {mode!r}]))"
    )
    return [sys.executable, "-c", code]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.multi
def test_ranks_meet_over_gloo() -> None:
    # Would catch ranks that are started without what they need to find each other.
    assert started("reduce_over_gloo")[0] == 0
    assert [Path(f"sum_{rank}").read_text() for rank in (0, 1)] == ["3 of 2 1"] * 2


@pytest.mark.multi
@pytest.mark.parametrize(
    ("mode", "code", "shown", "absent"),
    [
        (
            "fail_on_rank_1",
            1,
            ["rank 1 of 2 failed first, with exit code 1:", "Traceback", "RuntimeError: rank 1 lost its way"],
            ["rank 0"],
        ),
        ("fail_in_turn", 1, ["rank 1 of 2 failed first", "RuntimeError: the cause"], ["rank 0 of 2"]),
        ("refuse_input", 2, ["error: a.yaml: 1 problem\n\na.yaml:3: x\n     3 | x: 1\n"], ["Traceback"]),
        ("refuse_input_on_rank_1", 2, ["error: a.yaml: 1 problem", "(rank 1 of 2)"], ["Traceback", "rank 0"]),
        ("diverge", 3, ["error: step 5: loss nan"], ["Traceback"]),
        (
            "be_killed",
            137,
            ["rank 0 of 2 failed first, with exit code 137:", "SIGKILL, which the system sends"],
            ["rank 1 of 2"],
        ),
        ("hang_after_a_failure", 1, ["rank 1 of 2 failed first", "lost its way"], ["rank 0"]),
        (
            "fail_on_every_rank",
            1,
            ["error: the disk is full\n  rank 0: no space left\n"],
            ["Traceback", "failed later"],
        ),
        ("fail_in_a_library", 1, ["rank 1 of 2 failed first", "Traceback", "ValueError: invalid"], ["rank 0"]),
        ("end_without_a_word", 7, ["rank 0 of 2 failed first, with exit code 7:", "without a message"], []),
    ],
)
def test_the_first_failure_is_told_and_its_exit_code_is_the_jobs(
    capfd: pytest.CaptureFixture[str], mode: str, code: int, shown: list[str], absent: list[str]
) -> None:
    # Would catch interleaved tracebacks, a consequence told as the cause, an exit code of the launcher's own, and a
    # rank that waits for a dead peer until it is killed.
    exit_code, time_s = started(mode)
    told = capfd.readouterr().err
    positions = [told.find(part) for part in shown]
    assert exit_code == code
    assert -1 not in positions, told
    assert positions == sorted(positions), told
    assert [part for part in absent if part in told] == [], told
    assert told.count("a.yaml:3") <= 1
    assert told.startswith(shown[0]), told
    assert time_s < PROMPT_S


def signalled(mode: str, number: signal.Signals, times: int = 1) -> int:
    """Launches tiny ranks, sends a signal to the launcher, which is this process, once they are ready."""

    def send() -> None:
        while not all(Path(f"ready_{rank}").exists() for rank in (0, 1)):
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    sender = threading.Thread(target=send)
    sender.start()
    code, time_s = started(mode)
    sender.join()
    assert time_s < PROMPT_S
    return code


def test_a_signal_ends_a_launcher_that_waits_for_another_host() -> None:
    # Catches a launcher that torch keeps in native code, where Python runs no handlers.
    flags = {"nproc_per_node": 1, "nnodes": 2, "node_rank": 0, "master_addr": "127.0.0.1", "master_port": free_port()}
    with subprocess.Popen(launching(flags, "sleep", "signals.CLEAN_UP_S = 0.2; ")) as launcher:
        while not is_listening(flags["master_port"]):
            assert launcher.poll() is None
            time.sleep(0.05)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(PROMPT_S) == 143


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


RANK_WITHOUT_LAUNCHER = """
import fcntl, os, signal, sys, time
from pathlib import Path
from xorl.host import parent as host_parent

class Rows:
    def __getitem__(self, index):
        time.sleep(60)

launcher, mode = int(sys.argv[1]), sys.argv[2]
fcntl.flock(alive := Path("alive").open("w"), fcntl.LOCK_EX)
if mode == "without_prctl":
    host_parent._kill_with_parent = lambda: False
if mode == "loads":
    from xorl.data.workers import iterate
    items = iterate(Rows(), num_workers=2, sampler=range(4), start_method="fork")
if mode == "slow":
    Path("started").touch()
    while os.getppid() == launcher:
        time.sleep(0.01)
host_parent.die_with_parent(launcher)
Path("started").touch()
if mode == "stuck":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as in torch, where no handler runs
time.sleep(60)
"""
DYING_LAUNCHER = """
import os, signal, subprocess, sys, time
from pathlib import Path
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]])
while not Path("started").exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


INTERRUPTED_IMPORT = """
import signal, sys
from xorl.cli.app import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.matrixlib":
            sys.meta_path.remove(self)
            signal.raise_signal(number)

number = signal.Signals[sys.argv.pop()]
sys.meta_path.insert(0, Finder())
main()
"""


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_that_torch_swallows_while_it_is_imported_is_heard(number: str, code: int, tmp_path: Path) -> None:
    # Catches a Ctrl-C that is lost, and a run that goes on with half of numpy until that fails.
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{config_path: {tmp_path}/none}}\ndata: {{datasets: [{{path: dummy}}]}}\n"
        f"train: {{output_dir: {tmp_path}, use_wandb: false}}\n"
    )
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, "train", str(config), number]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (code, f"interrupted by {number}")


@pytest.mark.parametrize("mode", ["loads", "slow", "stuck", "without_prctl"])
def test_a_rank_ends_with_its_launcher(mode: str, tmp_path: Path) -> None:
    # Catches ranks, and the workers of their loaders, that outlive a killed launcher and hold GPUs and output_dir: also
    # one that was still starting, and one that waits in torch.
    command = [sys.executable, "-c", DYING_LAUNCHER, RANK_WITHOUT_LAUNCHER, mode]
    assert subprocess.run(command, cwd=tmp_path, check=False, timeout=30).returncode == -signal.SIGKILL
    killed = time.monotonic()
    with (tmp_path / "alive").open() as alive:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            assert time.monotonic() < killed + 2.0
            time.sleep(0.01)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("mode", "number", "times", "code"),
    [
        ("sleep", signal.SIGTERM, 1, 143),
        ("sleep", signal.SIGINT, 1, 130),
        ("sleep", signal.SIGUSR1, 1, 138),
        ("wait_for_an_interrupted_peer", signal.SIGTERM, 1, 143),
        ("hear_nothing", signal.SIGTERM, 1, 143),  # as ranks that wait in torch for another host
        ("save_when_told", signal.SIGINT, 2, 130),
    ],
)
def test_a_signal_ends_the_ranks(
    capfd: pytest.CaptureFixture[str], mode: str, number: signal.Signals, times: int, code: int
) -> None:
    # Would catch a job that outlives its launcher, an interruption told as a failure, a second Ctrl-C that does
    # nothing, and a rank that waits for one that a signal ended, until it is killed and told as lacking memory.
    before = signal.getsignal(number)
    assert signalled(mode, number, times) == code
    assert signal.getsignal(number) is before
    told = capfd.readouterr().err
    assert "Traceback" not in told
    assert "SIGKILL" not in told
    assert times == 2 or f"interrupted by {number.name}" in told


@pytest.mark.multi
def test_a_rank_that_even_sigkill_does_not_end_is_left_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a launcher that waits for ever for a rank in state D, as of a lost disk, and workers never replaced."""
    monkeypatch.setattr(ranks, "END_S", 0.2)
    monkeypatch.setattr(ranks, "KILL_S", 0.4)
    with monkeypatch.context() as signals:
        # No test can put a process into state D: instead, no signal reaches this one.
        signals.setattr("os.killpg", lambda *_: None)
        begun = time.monotonic()
        with ranks.Ranks(["-c", "import time; time.sleep(60)"], ranks.Nodes(1), {}, tmp_path) as started_ranks:
            [process] = started_ranks._processes.values()
            with caplog.at_level(logging.ERROR, logger="xorl.host.ranks"):
                assert started_ranks.wait([signal.SIGTERM]) == []
        assert time.monotonic() - begun < 10
    process.kill()
    process.wait()
    assert caplog.text.count(f"event=rank_left rank=0 pid={process.pid}") == 1


def test_a_signal_lets_every_rank_save() -> None:
    # Would catch a launcher that kills a rank which still saves, since another one was done before it.
    assert signalled("save_when_told", signal.SIGTERM) == 143
    assert Path("saved").read_text() == "1"


@pytest.mark.multi
def test_two_launchers_make_one_job() -> None:
    # Would catch flags of several nodes that are accepted and lost on the way to torch.
    flags = {"nproc_per_node": 1, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port()}
    node_1 = subprocess.Popen(launching({**flags, "node_rank": 1}, "tell_place"))
    assert started("tell_place", LaunchFlags(**flags, node_rank=0))[0] == 0
    assert node_1.wait(60) == 0
    assert [Path(f"rank_{rank}").read_text() for rank in (0, 1)] == ["0 of 2"] * 2


def test_a_port_that_is_taken_is_told_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    # Catches hosts that wait ten minutes for each other, since node 0 cannot listen.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert started("tell_place", LaunchFlags(nproc_per_node=1, master_port=port))[0] == 1
    assert capfd.readouterr().err.startswith(f"error: node 0 cannot listen at 127.0.0.1:{port} ([Errno 98]")


@pytest.mark.multi
def test_hosts_with_different_flags_refuse_each_other() -> None:
    # Catches hosts whose ranks would have the same numbers, or wait for ranks that nobody starts.
    flags = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port()}
    command = launching({**flags, "nproc_per_node": 2, "node_rank": 1}, "tell_place")
    node_1 = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with pytest.raises(ValueError, match=r"--nproc-per-node: 1 on node 0 .*, but 2 on node 1 .*; all hosts need"):
        started("tell_place", LaunchFlags(**flags, nproc_per_node=1, node_rank=0))
    assert "--nproc-per-node: 2 on node 1" in node_1.communicate(timeout=60)[1]
    assert not Path("rank_0").exists()


def record_at(seconds: float, text: str) -> dict[str, object]:
    extra = {"py_callstack": f"Traceback\n{text}", "timestamp": str(int(seconds))}
    return {"message": {"message": text, "extraInfo": extra, "xorl": {"time_ns": int(seconds * 1e9)}}}


@pytest.mark.parametrize(
    ("failures", "first", "code"),
    [
        # (rank, exit code, record, second in which the launcher saw it)
        ([(0, 1, record_at(10.2, "b"), 10), (1, 1, record_at(10.1, "a"), 10)], 1, 1),
        ([(0, -15, None, 10), (1, 1, record_at(10.1, "a"), 10)], 1, 1),
        ([(0, 143, None, 10), (1, 1, record_at(10.1, "a"), 10)], 1, 1),
        ([(0, -9, None, 10), (1, 1, record_at(10.1, "a"), 10)], 0, 137),
        ([(0, -9, None, 40), (1, 1, record_at(10.1, "a"), 10)], 1, 1),
        ([(0, -11, None, 10), (1, -15, None, 10)], 0, 139),
        ([(0, -15, None, 10), (1, -15, None, 10)], 0, 143),
    ],
)
def test_the_cause_is_told_from_its_consequences(failures, first: int, code: int) -> None:
    # Would catch a rank that the launcher itself ended, or that missed a dead peer, told as the cause.
    text, exit_code = report([failure_of(*failure) for failure in failures], world_size=2)
    assert exit_code == code
    assert text.startswith(f"rank {first} of 2 failed first") or code == 143


def test_records_of_torch_itself_are_read() -> None:
    # Would catch a rank whose error was recorded by torch's own decorator, told without its traceback.
    record = {"message": {"message": "E: a", "extraInfo": {"py_callstack": "Traceback a", "timestamp": "10"}}}
    assert report([failure_of(0, 1, record, 10)], world_size=1)[0].endswith("Traceback a")
