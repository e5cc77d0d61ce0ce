"""The exit codes of the commands, and the mapping of errors to them.

| code | meaning |
|---|---|
| 0 | success, or nothing left to do |
| 1 | failure of xorl, a library or the machine; the traceback is printed unless a message explains it |
| 2 | invalid configuration, data, checkpoint or command line; the message says what to change |
| 3 | training diverged: the loss or the gradient is not finite |
| 4 | another run or service writes to the output_dir |
| 5 | the run stalled: no rank made progress; the message has the stacks of all ranks |
| 130 | interrupted by SIGINT (Ctrl-C); the same command continues |
| 138 | interrupted by SIGUSR1; the same command continues |
| 142 | stopped before train.max_time; the same command continues |
| 143 | interrupted by SIGTERM; the same command continues |
| 128 + n | a rank was terminated by signal n, such as 137 if the system ran out of memory |
"""

import signal
import traceback
from types import TracebackType

from xorl.host.failures import StalledError
from xorl.host.lock import FolderInUseError

OK = 0
FAILURE = 1
BAD_INPUT = 2
DIVERGED = 3
FOLDER_IN_USE = 4
STALLED = 5
BY_SIGNAL = 128
INTERRUPTED = BY_SIGNAL + signal.SIGINT
TERMINATED = BY_SIGNAL + signal.SIGTERM

ERROR_PREFIX = "error: "  # precedes a message that is printed without its traceback

EXPLAINED = (BAD_INPUT, DIVERGED, FOLDER_IN_USE, STALLED)  # by the error's message

DESCRIPTIONS: dict[int, str] = {
    OK: "done",
    FAILURE: "failed",
    BAD_INPUT: "bad input",
    DIVERGED: "training diverged",
    FOLDER_IN_USE: "another run or service writes to the output_dir",
    STALLED: "the run stalled",
    INTERRUPTED: "interrupted by SIGINT",
    BY_SIGNAL + signal.SIGUSR1: "interrupted by SIGUSR1",
    BY_SIGNAL + signal.SIGALRM: "stopped before train.max_time",
    TERMINATED: "interrupted by SIGTERM",
}


class Diverged(RuntimeError):
    """The loss or the gradient is not finite."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGUSR1 was received. Like Ctrl-C, it unwinds the stack so that resources are released."""

    def __init__(self, signal_number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.signal_number = signal_number


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code for an error."""
    if isinstance(error, Terminated):
        return BY_SIGNAL + error.signal_number
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, Diverged):
        return DIVERGED
    if isinstance(error, FolderInUseError):
        return FOLDER_IN_USE
    if isinstance(error, StalledError):
        return STALLED
    return BAD_INPUT if is_bad_input(error) else FAILURE


def is_bad_input(error: BaseException) -> bool:
    """Whether an error is about the user's input: a ValueError that xorl defines or raises.

    xorl raises ValueError for nothing else. A ValueError from a library is a failure, shown with its traceback.
    """
    modules = (type(error).__module__, _raised_in(error.__traceback__))
    return isinstance(error, ValueError) and any(module.split(".")[0] == "xorl" for module in modules)


def is_known_failure(error: BaseException) -> bool:
    """Whether an error is a machine failure with a message from xorl that explains it, such as a full disk."""
    return isinstance(error, RuntimeError) and type(error).__module__.split(".")[0] == "xorl"


def unwrap_interruption(error: BaseException) -> BaseException:
    """Returns the interruption that caused an error, or the error itself.

    A signal may interrupt a library in the middle of an update, which then fails on its inconsistent state.
    """
    if exit_code_of(error) != FAILURE or is_known_failure(error):
        return error
    raised: BaseException | None = error
    while raised is not None and not isinstance(raised, KeyboardInterrupt):
        raised = raised.__context__
    return raised or error


def error_text(error: BaseException, *, with_traceback: bool = False) -> str:
    """Returns the text to print for an error: its message if that explains it, otherwise its traceback."""
    if isinstance(error, KeyboardInterrupt):
        return DESCRIPTIONS[exit_code_of(error)]
    is_explained = exit_code_of(error) in EXPLAINED or is_known_failure(error)
    if is_explained and not with_traceback:
        return f"{ERROR_PREFIX}{error}"
    return "".join(traceback.format_exception(error)).rstrip()


def exit_code_text(code: int) -> str:
    """Describes an exit code. A negative code means that a signal terminated the process."""
    number = -code if code < 0 else code - BY_SIGNAL
    if code in DESCRIPTIONS:
        return DESCRIPTIONS[code]
    return f"ended by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"


def _raised_in(trace: TracebackType | None) -> str:
    """Returns the name of the module in which an error was raised."""
    name = ""
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return name
