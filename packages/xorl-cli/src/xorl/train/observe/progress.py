"""The progress bar, logging that does not break it, and the phases of the start-up."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from xorl.train.observe.observer import LogFormat, Metrics

logger = logging.getLogger(__name__)


class ProgressBar:
    """A progress bar with loss, speed and remaining time; evaluations are logged as separate lines."""

    def __init__(self, num_steps: int, start_step: int) -> None:
        self._bar = tqdm(
            total=num_steps,
            initial=start_step,
            unit="step",
            dynamic_ncols=True,
            file=sys.stderr,
            mininterval=0.2 if sys.stderr.isatty() else 10.0,  # keeps log files short
        )

    def write(self, metrics: Metrics) -> None:
        if "eval_loss" in metrics:
            logger.info("evaluation %s", " ".join(f"{key}={_cell(value)}" for key, value in metrics.items()))
            return
        shown = {key: metrics[key] for key in ("loss", "lr", "tokens_per_s", "mfu", "peak_memory_gib")}
        self._bar.set_postfix({key: _cell(value) for key, value in shown.items() if value is not None}, refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        """Close the bar, leaving its last state on the screen."""
        self._bar.close()


class _TqdmHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def set_up_logging(log_format: LogFormat, *, is_main: bool) -> None:
    """Log to standard error, one event per line. Ranks other than the main one only log warnings and errors."""
    handler = _TqdmHandler()
    line = "%(message)s" if log_format == "progress_bar" else "time=%(asctime)s level=%(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(line))
    root = logging.getLogger("xorl")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(logging.INFO if is_main else logging.WARNING)


class Phases:
    """Logs the start and the duration of each start-up phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, detail: str = "") -> Iterator[None]:
        logger.info("phase=%s %s", name, detail)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        logger.info("phase=%s done_s=%.2f", name, self.seconds[name])


def _cell(value: float | int | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
