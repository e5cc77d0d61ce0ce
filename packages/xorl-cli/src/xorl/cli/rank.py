"""Runs one rank of a job, and converts its errors to a record for the launcher and an exit code."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from xorl.cli.exit_codes import BY_SIGNAL, OK, error_text, exit_code_of, unwrap_interruption
from xorl.cli.failures import claim_report, peer_has_failed, record_error, record_interruption, record_pid, record_stop
from xorl.cli.signals import exit_if_stuck, raise_on_signal
from xorl.host.parent import die_with_parent
from xorl.host.processes import kill_stopped_descendants
from xorl.host.temporary import keep_folder


@dataclass(frozen=True)
class RankEnvironment:
    """The environment that torchrun or another launcher sets for a rank. Errors are written to `error_file`."""

    rank: int
    world_size: int
    error_file: Path | None

    @classmethod
    def read(cls) -> "RankEnvironment | None":
        """Returns None if this process was not started as a rank."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        started_by = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR")
        if not all(name in os.environ for name in names) or not any(name in os.environ for name in started_by):
            return None
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(file) if file else None)


def run_alone(run: Callable[[], int], *, with_traceback: bool) -> int:
    """Runs a single-rank job in this process, prints its error, if any, and returns the exit code."""
    try:
        with raise_on_signal() as is_handled, exit_if_stuck(is_handled):
            return run()
    except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001  (process boundary)
        error = unwrap_interruption(raised)
        print(error_text(error, with_traceback=with_traceback), file=sys.stderr)
        return exit_code_of(error)


def run_rank(run: Callable[[], int], environment: RankEnvironment, *, folder: Path | None, with_traceback: bool) -> int:
    """Runs one rank of a job and returns its exit code.

    Errors are recorded for the launcher, which prints the first one of the job, or printed here if the launcher does
    not read records. `folder` is the folder for notes to `xorl.cli.launch`; None under another launcher. A rank that
    stops cleanly on a signal writes a note there and exits with 0, because the launcher would treat any other code as
    a failure and kill the ranks that are still saving.
    """
    try:
        with (
            raise_on_signal() as is_handled,
            exit_if_stuck(is_handled, lambda: peer_has_failed(environment.error_file)),
        ):
            if folder is None:
                return run()
            with keep_folder(folder) as launcher:
                die_with_parent(launcher)
                record_pid(folder, environment.rank)
                code = run()
                if code <= BY_SIGNAL:
                    return code
                record_stop(folder, environment.rank, code)
                return OK
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (process boundary)
        return end_rank(unwrap_interruption(error), environment, folder, with_traceback=with_traceback)


def end_alone(error: BaseException, *, with_traceback: bool) -> NoReturn:
    """Ends the only process of a job from any thread, as `run_alone` would if it had raised `error`."""
    print(error_text(error, with_traceback=with_traceback), file=sys.stderr, flush=True)
    kill_stopped_descendants()
    os._exit(exit_code_of(error))


def end_rank(error: BaseException, environment: RankEnvironment, folder: Path | None, *, with_traceback: bool) -> int:
    """Records or prints the error of a rank; ends the process, from any thread, unless it was interrupted."""
    code, text = exit_code_of(error), error_text(error, with_traceback=with_traceback)
    if isinstance(error, KeyboardInterrupt):
        if environment.error_file is not None:
            record_interruption(environment.error_file)
        return code
    if environment.error_file is None:
        print(f"rank {environment.rank} of {environment.world_size}: {text}", file=sys.stderr)
    else:
        # torchrun reports a failure as its own traceback, with the record at the end.
        is_first = folder is None and claim_report(environment.error_file)
        record_error(environment.error_file, error, text=text if folder else f"\n\n{text}\n", code=code)
        if is_first:
            print(text, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    kill_stopped_descendants()
    # A normal interpreter exit may wait for the other ranks, which wait for this one in a collective.
    os._exit(code)
