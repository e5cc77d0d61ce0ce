"""What a command's exit code means, and which errors lead to which.

| code | meaning |
|---|---|
| 0 | done, or nothing was left to do |
| 1 | failed: a fault of xorl, a library or the machine; the traceback is printed where no message says it all |
| 2 | bad input: the configuration, the data, a checkpoint or the command line; the message says what to change |
| 3 | training diverged: the loss or the gradient is not finite |
| 130 | interrupted by SIGINT (Ctrl-C) |
| 143 | interrupted by SIGTERM |
| 128 + n | a rank was ended by signal n, such as 137 when the system took its memory back |
"""

import signal
import traceback
from types import TracebackType

OK = 0
FAILURE = 1
BAD_INPUT = 2
DIVERGED = 3
BY_SIGNAL = 128
INTERRUPTED = BY_SIGNAL + signal.SIGINT
TERMINATED = BY_SIGNAL + signal.SIGTERM

TOLD = "error: "  # before a message that says all

MEANINGS: dict[int, str] = {
    OK: "done",
    FAILURE: "failed",
    BAD_INPUT: "bad input",
    DIVERGED: "training diverged",
    INTERRUPTED: "interrupted by SIGINT",
    TERMINATED: "interrupted by SIGTERM",
}


class Diverged(RuntimeError):
    """Training went on to a loss or a gradient that is not finite."""


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: as Ctrl-C, it unwinds the stack so that what was open is closed."""


def code_of(error: BaseException) -> int:
    """Returns the exit code that an error leads to."""
    if isinstance(error, Terminated):
        return TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, Diverged):
        return DIVERGED
    return BAD_INPUT if is_bad_input(error) else FAILURE


def is_bad_input(error: BaseException) -> bool:
    """Says whether an error is about what the user gave: a ValueError of xorl's own kinds, or one that it raised.

    xorl raises ValueError for nothing else, so that one from a library is a fault like any other, to be shown whole.
    """
    modules = (type(error).__module__, _raised_in(error.__traceback__))
    return isinstance(error, ValueError) and any(module.split(".")[0] == "xorl" for module in modules)


def is_known_failure(error: BaseException) -> bool:
    """Says whether an error is a failure of the machine that xorl has recognised and put into words: a full disk."""
    return isinstance(error, RuntimeError) and type(error).__module__.split(".")[0] == "xorl"


def first_of(error: BaseException) -> BaseException:
    """Returns the interruption that an error came of, or the error.

    A signal may arrive in the middle of a library's own bookkeeping, which then fails on what it finds half done.
    """
    if code_of(error) != FAILURE or is_known_failure(error):
        return error
    raised: BaseException | None = error
    while raised is not None and not isinstance(raised, KeyboardInterrupt):
        raised = raised.__context__
    return raised or error


def text_of(error: BaseException, *, with_traceback: bool = False) -> str:
    """Returns what is printed of an error: its message where that says all, otherwise its traceback."""
    if isinstance(error, KeyboardInterrupt):
        return MEANINGS[code_of(error)]
    says_all = code_of(error) in (BAD_INPUT, DIVERGED) or is_known_failure(error)
    if says_all and not with_traceback:
        return f"{TOLD}{error}"
    return "".join(traceback.format_exception(error)).rstrip()


def meaning_of(code: int) -> str:
    """Returns an exit code in words; a negative one is a process that a signal ended."""
    number = -code if code < 0 else code - BY_SIGNAL
    if code in MEANINGS:
        return MEANINGS[code]
    return f"ended by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit code {code}"


def _raised_in(trace: TracebackType | None) -> str:
    """Returns the name of the module in which an error was raised."""
    name = ""
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return name
