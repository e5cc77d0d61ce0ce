"""The parts around the training loop: save points, the metrics file, the observer, the interruption."""

import gc
import gzip
import json
import logging
import os
import shutil
import signal
import time
import weakref
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from full_disk import full_disk
from local_options import local_config
from xorl.ckpt import Checkpointer, CheckpointError
from xorl.ckpt.publish import set_aside_after
from xorl.cli.signals import raise_on_signal
from xorl.config import Config
from xorl.core.runtime import GarbageCollection, Runtime
from xorl.train import interrupt
from xorl.train.checkpoint_model import require_same_parts
from xorl.train.checkpoints import SavePoints
from xorl.train.engine import StepLosses, Update
from xorl.train.interrupt import Interruption
from xorl.train.observe.devices import PEAK_BF16_FLOPS
from xorl.train.observe.metrics_file import Metrics, MetricsFile
from xorl.train.observe.observer import DivergedError, Observer
from xorl.train.observe.profile import Profiler, build_profiler
from xorl.train.observe.progress import SAME_ON_ALL_RANKS, progress_sink, set_up_logging
from xorl.train.observe.timing import StepTimer
from xorl.train.output_dir import STARTED_FROM, open_output_dir, resume_from, start_of


@pytest.mark.parametrize(
    ("save_steps", "save_epochs", "expected"),
    [
        (0, 0, [10]),
        (3, 0, [3, 6, 9, 10]),
        (0, 1, [4, 8, 10]),
        (0, 0.5, [2, 4, 6, 8, 10]),
        (0, 0.25, list(range(1, 11))),
        (0, 0.4, [2, 4, 5, 7, 8, 10]),
        (5, 2, [5, 8, 10]),
    ],
)
def test_save_points(save_steps: int, save_epochs: float, expected: list[int]) -> None:
    # Catches fractions of an epoch that drift or fall on no step, and a last step that is not saved.
    due = SavePoints(num_steps=10, steps_per_epoch=4, save_steps=save_steps, save_epochs=save_epochs)
    assert [step for step in range(1, 11) if due(step)] == expected


@pytest.mark.parametrize(
    ("steps_per_epoch", "save_steps", "save_epochs", "expected"),
    [(0, 0, 1.0, True), (0, 10, 1.0, True), (0, 3, 1.0, False), (0, 0, 0.0, False), (4, 0, 1.0, False)],
)
def test_a_stream_that_waits_for_epochs_to_save_is_told(
    steps_per_epoch: int, save_steps: int, save_epochs: float, expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a stream that saves nothing for days, by default, without a line that says so."""
    SavePoints(10, steps_per_epoch, save_steps, save_epochs).warn()
    assert ("train.save_epochs" in caplog.text) is expected


def test_metrics_file_is_cut_back_to_the_step_resumed_from(tmp_path: Path) -> None:
    # Catches two lines for a step that was trained, lost and trained again, and a torn last line.
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": step / 10}) for step in range(1, 6)]
    path.write_text("\n".join(lines) + '\n{"step": 6, "lo')
    file = MetricsFile(path, resume_step=3)
    file.write({"step": 4, "loss": float("nan")})
    file.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[-1]["loss"] == "nan"


def test_metrics_of_a_former_run_are_not_those_of_one_that_starts_afresh(tmp_path: Path) -> None:
    # Catches two evaluations before the first step, one of them of a run that died before it saved.
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "eval_loss": 3.0}\n{"step": 1, "loss": 3.0}\n')
    MetricsFile(path, resume_step=0).close()
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("steps_done", "trace"), [(0, ["rank0_steps_3-4"]), (2, ["rank0_steps_3-4"]), (3, ["rank0_step_4"]), (4, [])]
)
def test_profile_of_a_resumed_run(steps_done: int, trace: list[str], tmp_path: Path) -> None:
    # Catches a run that resumes right before the span, or within it, and records nothing.
    profiler = Profiler(enabled=True, start_step=3, end_step=5, trace_dir=tmp_path, rank=0, steps_done=steps_done)
    with profiler:
        for step in range(steps_done + 1, 8):
            torch.ones(2).sum()
            profiler.step(step)
    assert [path.name.split(".")[0] for path in tmp_path.iterdir()] == trace


def test_a_profile_that_the_run_does_not_come_to_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Catches a run of one short epoch that leaves no trace, and no word why.
    span = {"profile_start_step": 5, "profile_end_step": 6, "profile_trace_dir": str(tmp_path)}
    config = local_config(output_dir=str(tmp_path), enable_profiling=True, **span)
    place = Runtime(0, 0, 1, torch.device("cpu"))
    build_profiler(config.train, place, start_step=0, num_steps=5)
    assert caplog.text == ""
    build_profiler(config.train, place, start_step=0, num_steps=4)
    assert "train.profile_start_step: 5, but the run ends at step=4: nothing will be recorded" in caplog.text


def profiled(tmp_path: Path, folder: Path) -> Config:
    """A configuration that records step 1 into `folder`."""
    return local_config(output_dir=str(tmp_path), enable_profiling=True, profile_trace_dir=str(folder))


def test_a_folder_of_traces_that_cannot_be_is_refused_before_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Catches a run that ends with a traceback where its recording does, hours later, and loses what it trained; and
    # one whose data is prepared for hours before it is refused.
    (tmp_path / "file").write_text("")
    config = profiled(tmp_path, tmp_path / "file" / "traces")
    with pytest.raises(ValueError, match=r"^train.profile_trace_dir: cannot write to .*file/traces"):
        open_output_dir(config.train)
    # A rank that records nothing needs no folder.
    monkeypatch.setenv("RANK", "1")
    open_output_dir(config.train)


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Catches steps that are lost for a trace of them: on a full disk, or where its folder has gone.
    place = Runtime(0, 0, 1, torch.device("cpu"))
    profiler = build_profiler(profiled(tmp_path, tmp_path / "traces").train, place, start_step=0, num_steps=5)
    (tmp_path / "traces").write_text("")
    with profiler:
        torch.ones(2).sum()
        profiler.step(1)
        profiler.step(2)
    assert "cannot be written" in caplog.text
    assert "training continues" in caplog.text


@pytest.mark.parametrize(
    ("option", "trace"),
    [("record_shapes", '"Input Dims"'), ("profile_memory", '"[memory]"'), ("with_stack", '"cat": "python_function"')],
)
def test_a_trace_holds_what_was_asked_for(option: str, trace: str, tmp_path: Path) -> None:
    # Catches an option of the profile that is accepted and lost on the way to torch.
    for is_on in (True, False):
        options = {"record_shapes": False, "profile_memory": False, "with_stack": False, option: is_on}
        folder = tmp_path / str(is_on)
        with Profiler(enabled=True, start_step=1, end_step=2, trace_dir=folder, rank=0, **options) as profiler:
            torch.ones(2, 3).mm(torch.ones(3, 4))
            profiler.step(1)
        [file] = folder.iterdir()
        assert (trace in gzip.decompress(file.read_bytes()).decode()) is is_on


def test_garbage_is_collected_when_it_is_due_and_not_before() -> None:
    # Catches an interval that is off, and a run that leaves Python without a collector.
    class Circle:
        def __init__(self) -> None:
            self.itself = self

    with GarbageCollection(gc_steps=3, empty_cache_steps=0) as garbage:
        assert not gc.isenabled()
        for step in (1, 2, 3):
            left = weakref.ref(Circle())
            garbage.step(step)
            assert (left() is None) is (step == 3)
    assert gc.isenabled()
    with GarbageCollection(gc_steps=0, empty_cache_steps=0):
        assert gc.isenabled()


META = torch.device("meta")  # reported one step late, as a GPU is


class Recorder:
    def __init__(self) -> None:
        self.records: list[Metrics] = []

    def write(self, metrics: Metrics) -> None:
        self.records.append(metrics)

    def close(self) -> None:
        pass


def step_of(loss_sum: float, norm: float = 1.0, skipped: float = 0.0) -> tuple[StepLosses, Update]:
    losses = StepLosses(*(torch.tensor(value, dtype=torch.float64) for value in (loss_sum, 4.0, 4.0, 8.0, 1e6)))
    return losses, Update(torch.tensor(norm), torch.tensor(skipped))


def test_observer_reports_a_device_one_step_late_with_all_fields() -> None:
    # Catches a step that is lost, or a field of metrics.jsonl that is missing or divided by the wrong count.
    recorder = Recorder()
    observer = Observer(META, 1, [recorder], StepTimer(META))
    observer.step(1, *step_of(8.0), lr=0.1)
    assert recorder.records == []
    observer.step(2, *step_of(6.0), lr=0.2)
    observer.flush()
    assert [(record["step"], record["loss"], record["lr"]) for record in recorder.records] == [
        (1, 2.0, 0.1),
        (2, 1.5, 0.2),
    ]
    counts = "step loss grad_norm lr num_tokens num_trained_tokens tokens_per_s mfu peak_memory_gib"
    seconds = "time_s forward_s backward_s comm_s optimizer_s idle_s data_s checkpoint_s"
    assert list(recorder.records[0]) == f"{counts} {seconds}".split()
    assert recorder.records[0]["num_tokens"] == 8
    assert recorder.records[0]["num_trained_tokens"] == 4


def test_observer_takes_pauses_and_waits_for_data_out_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a checkpoint or an evaluation that slows the next step down on paper, and data that is waited for unseen.
    now = 0.0

    def pass_(seconds: float) -> None:
        nonlocal now
        now += seconds

    def late() -> Iterator[int]:
        for index in range(3):
            pass_(2)
            yield index

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    recorder = Recorder()
    cpu = torch.device("cpu")
    observer = Observer(cpu, 1, [recorder], StepTimer(cpu))
    observer.start()
    for index in observer.fetched(late()):
        observer.timer.start()
        pass_(1)
        observer.timer.mark("forward")
        observer.step(index + 1, *step_of(1.0), lr=0.1)
        if index == 0:
            with observer.checkpoint():
                pass_(20)
        if index == 1:
            with observer.pause():
                pass_(40)
    parts = ("time_s", "data_s", "idle_s", "forward_s", "checkpoint_s")
    assert [[record[part] for part in parts] for record in recorder.records] == [
        [3, 2, 2, 1, 0],
        [3, 2, 2, 1, 20],  # a checkpoint is told with the step after it
        [3, 2, 2, 1, 0],
    ]


@pytest.mark.parametrize(("loss", "norm", "skipped"), [(float("nan"), 1.0, 0.0), (1.0, float("inf"), 1.0)])
def test_observer_stops_a_run_that_diverged(loss: float, norm: float, skipped: float) -> None:
    # Catches NaN that is logged as zero while training goes on.
    recorder = Recorder()
    observer = Observer(META, 1, [recorder], StepTimer(META))
    observer.step(7, *step_of(loss, norm, skipped), lr=0.1)
    with pytest.raises(DivergedError, match="step 7"):
        observer.flush()
    assert recorder.records[0]["step"] == 7


@pytest.mark.usefixtures("place")
def test_first_signal_is_agreed_on_one_step_later_and_a_later_one_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a signal that ranks see at different steps, a run that cannot be stopped at all, and one that is stopped
    # unsaved since the launcher told it what it had been told itself.
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with Interruption() as interruption:
            assert interruption.agreed_signal() == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert interruption.agreed_signal() == 0
            assert interruption.agreed_signal() == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == []
            monkeypatch.setattr(interrupt, "REPEATED_S", 0.0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == [signal.SIGTERM]
        with Interruption(is_out_of_time=lambda: True) as interruption:
            assert [interruption.agreed_signal() for _ in range(2)] == [0, interrupt.OUT_OF_TIME]
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.usefixtures("place")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_was_lost_still_stops_the_run() -> None:
    # Catches a run that goes on because the signal came while a loader's worker was forked: Python discards what
    # callbacks raise.
    class Dropped:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):
                pass

    with raise_on_signal():
        Dropped()
        with Interruption() as interruption:
            assert [interruption.agreed_signal() for _ in range(2)] == [0, signal.SIGTERM]
    with Interruption() as interruption:
        assert [interruption.agreed_signal() for _ in range(2)] == [0, 0]


def test_devices_are_told_apart_by_their_whole_name() -> None:
    # Catches "H20" in "H200", which would make the utilisation seven times too high.
    assert PEAK_BF16_FLOPS["NVIDIA H200"] > 6 * PEAK_BF16_FLOPS["NVIDIA H20"]


# The limit on the size of files also holds for the one that pytest may capture stderr in.
@pytest.mark.usefixtures("capsys")
def test_metrics_that_cannot_be_written_do_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Catches hours of training lost to a full disk under a log, and half a line before those that follow.
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    with full_disk(30):
        for step in (1, 2, 3):
            file.write({"step": step, "loss": 0.5})
    file.write({"step": 4, "loss": 0.5})
    file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4]
    assert [record.getMessage().count("metrics.jsonl") for record in caplog.records] == [1, 1]
    assert "lacks 2 lines" in caplog.text


def test_any_checkpoint_can_be_named_and_the_command_repeated(tmp_path: Path) -> None:
    # Catches a user who is sent from one error to the next, and a repeated command that goes back a second time.
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(step, {"model": torch.nn.Linear(1, 1)})
    assert resume_from(checkpointer, "auto") == tmp_path / "global_step_3"
    first = tmp_path / "global_step_1"
    for option in ("global_step_1", str(first)):
        assert resume_from(checkpointer, option) == first
        assert start_of(tmp_path, option, first) == str(first)
    with pytest.raises(ValueError, match="already holds checkpoints, the latest global_step_3"):
        resume_from(checkpointer, None)
    set_aside_after(tmp_path, 1, first)
    again = Checkpointer(tmp_path)
    again.save(2, {"model": torch.nn.Linear(1, 1)}, info={STARTED_FROM: str(first)})
    for option in ("global_step_1", str(first), "auto"):
        assert resume_from(again, option) == tmp_path / "global_step_2"
        assert start_of(tmp_path, option, tmp_path / "global_step_2") == str(first)
    shutil.rmtree(first)  # as keep_last does
    assert resume_from(again, "global_step_1") == tmp_path / "global_step_2"
    with pytest.raises(ValueError, match=r"train\.load_checkpoint_path: global_step_3 does not exist"):
        resume_from(again, "global_step_3")


def test_a_damaged_newest_checkpoint_is_named_with_the_way_back(tmp_path: Path) -> None:
    # Catches a run that silently starts before it, and an advice that is refused in turn.
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, {"model": torch.nn.Linear(1, 1)})
    (tmp_path / "global_step_2" / "metadata.json").unlink()
    with pytest.raises(ValueError, match=r"go back with --train\.load_checkpoint_path global_step_1"):
        resume_from(checkpointer, "auto")
    assert resume_from(checkpointer, "global_step_1") == tmp_path / "global_step_1"


def test_progress_in_a_file_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    # Catches a bar of carriage returns in a log file, and one line for each of a million steps.
    set_up_logging("progress_bar", "INFO", is_main=True)
    sink = progress_sink("progress_bar", num_steps=30, start_step=0)
    for step in range(1, 31):
        sink.write({"step": step, "loss": 2.0, "lr": 1e-3, "mfu": None, "time_s": 0.5})
    sink.write({"step": 30, "eval_loss": 1.5})
    sink.close()
    written = capsys.readouterr().err
    assert "\r" not in written
    first, last, evaluation = written.splitlines()
    assert first.startswith("step 1/30 loss=2 lr=0.001 left=")
    assert last.startswith("step 30/30 loss=2 lr=0.001 left=0:00:00")
    assert evaluation == "evaluation step=30 eval_loss=1.5"


def test_what_all_ranks_warn_of_is_told_by_the_main_one(capsys: pytest.CaptureFixture[str]) -> None:
    # Catches a warning about an option in as many copies as there are ranks, and one that only another rank can give.
    told = {}
    for is_main in (False, True):
        set_up_logging("progress_bar", "INFO", is_main=is_main)
        for name in (*SAME_ON_ALL_RANKS, "xorl.data.stream.lane"):
            assert find_spec(name) is not None
            logging.getLogger(name).warning(name)
        told[is_main] = capsys.readouterr().err.splitlines()
    assert told == {False: ["xorl.data.stream.lane"], True: [*SAME_ON_ALL_RANKS, "xorl.data.stream.lane"]}


def test_structured_lines_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    # Catches a line with every metric, in which nobody finds the loss.
    set_up_logging("structured", "INFO", is_main=True)
    timings = {f"{phase}_s": 0.1 for phase in ("time", "forward", "backward", "comm", "optimizer", "idle", "data")}
    progress_sink("structured", 9, 0).write(
        {"step": 3, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "num_tokens": 5, "mfu": None, **timings}
    )
    assert capsys.readouterr().err.strip().endswith(" level=INFO step=3 loss=2 grad_norm=1 lr=0.001")


def test_a_step_is_divided_by_the_terms_of_its_loss() -> None:
    """Catches a learning rate that depends on prompts or lengths, and an update from a loss that is not finite."""
    step = StepLosses.of(torch.tensor([6.0, 3.0, 8.0, 10.0, 1.0]))
    assert step.divisor == 3
    assert StepLosses.of(torch.tensor([0.0, 0.0, 8.0, 10.0, 1.0])).divisor == 1
    assert StepLosses.of(torch.tensor([torch.inf, 3.0, 8.0, 10.0, 1.0])).divisor.isnan()


@pytest.mark.parametrize("option", ["freeze_router", "freeze_encoders", "freeze_projectors", "freeze_decoder"])
def test_a_resume_trains_the_same_parts(option: str, tmp_path: Path) -> None:
    # Catches a part that is no longer trained, with an optimizer whose state does not show it.
    infos = [{"options": {f"train.{option}": value, "train.lr": 1}} for value in (False, True)]
    require_same_parts(tmp_path, infos[0], infos[0])
    require_same_parts(tmp_path, {}, infos[0])  # saved by an earlier version
    with pytest.raises(CheckpointError, match=rf"was saved with train\.{option}: false, now true: restore the option"):
        require_same_parts(tmp_path, *infos)
