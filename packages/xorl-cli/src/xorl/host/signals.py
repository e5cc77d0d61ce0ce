"""The signals that ask a run to stop."""

import signal

# Schedulers send SIGTERM, or SIGUSR1 some time before they take the machine; Ctrl-C sends SIGINT.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A repeated signal counts only this much later: schedulers often signal both the ranks and their launcher, which
# forwards it to the ranks.
REPEATED_S = 3.0
# Signals this close together are one: terminals, `timeout` and uv signal a process and then its process group.
DUPLICATE_S = 1.0

_raised: list[int] = []


def forget_raised() -> None:
    """Forget the recorded signals."""
    _raised.clear()


def note_raised(number: int) -> None:
    """Record a signal whose handler is about to raise."""
    _raised.append(number)


def raised_signal() -> int:
    """The first signal whose handler has raised, or 0.

    If the process still runs, the exception was lost: Python discards exceptions in callbacks such as those around a
    fork.
    """
    return _raised[0] if _raised else 0
