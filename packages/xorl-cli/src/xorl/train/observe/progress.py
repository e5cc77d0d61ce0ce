"""The console output of a run: progress as a bar or as lines, logging, and the phases of the start-up."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from tqdm import tqdm

from xorl.config.fields import LogLevel
from xorl.train.observe.observer import LogFormat, Metrics, Sink, key_values

logger = logging.getLogger(__name__)


# Metrics of a step that the console shows; metrics.jsonl has all of them.
SHOWN = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "peak_memory_gib")
SECONDS_BETWEEN_LINES = 10.0  # keeps log files short
SECONDS_BEFORE_NOTICE = 5.0  # of a phase of the start-up
# Modules whose warnings are about options, the model's folder or the data: all ranks give the same.
SAME_ON_ALL_RANKS = (
    "xorl.core.models.hf_config",
    "xorl.lora.peft.config",
    "xorl.train.build",
    "xorl.train.checkpoint_model",
    "xorl.train.checkpoints",
    "xorl.train.data",
    "xorl.train.images",
    "xorl.train.startup",
)


def progress_sink(log_format: LogFormat, num_steps: int, start_step: int) -> Sink:
    """The sink that shows the metrics on standard error: a progress bar on a terminal, lines elsewhere."""
    if log_format == "structured":
        return StructuredLines()
    return ProgressBar(num_steps, start_step) if sys.stderr.isatty() else ProgressLines(num_steps, start_step)


class ProgressBar:
    """A progress bar with loss, speed and remaining time; evaluations are logged as separate lines."""

    def __init__(self, num_steps: int, start_step: int) -> None:
        self._bar = tqdm(
            total=num_steps, initial=start_step, unit="step", dynamic_ncols=True, file=sys.stderr, mininterval=0.2
        )

    def write(self, metrics: Metrics) -> None:
        if "eval_loss" in metrics:
            _log_evaluation(metrics)
            return
        shown = {key: _cell(metrics[key]) for key in SHOWN if key != "grad_norm" and metrics.get(key) is not None}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        """Close the bar, leaving its last state on the screen."""
        self._bar.close()


class ProgressLines:
    """The progress bar for a file: a line for the first and the last step, and every few seconds in between."""

    def __init__(self, num_steps: int, start_step: int) -> None:
        self._num_steps, self._start_step = num_steps, start_step
        self._start, self._written = time.monotonic(), -math.inf

    def write(self, metrics: Metrics) -> None:
        if "eval_loss" in metrics:
            _log_evaluation(metrics)
            return
        step, now = metrics["step"], time.monotonic()
        assert isinstance(step, int)
        if now - self._written < SECONDS_BETWEEN_LINES and step != self._num_steps:
            return
        self._written = now
        left_s = (now - self._start) / max(1, step - self._start_step) * (self._num_steps - step)
        shown = " ".join(f"{key}={_cell(metrics[key])}" for key in SHOWN if metrics.get(key) is not None)
        logger.info("step %d/%d %s left=%s", step, self._num_steps, shown, timedelta(seconds=round(left_s)))

    def close(self) -> None: ...


class StructuredLines:
    """A line of key=value pairs for each step and evaluation."""

    def write(self, metrics: Metrics) -> None:
        is_step = "eval_loss" not in metrics
        logger.info(
            key_values(
                {
                    key: value
                    for key, value in metrics.items()
                    if value is not None and (not is_step or key in ("step", *SHOWN))
                }
            )
        )

    def close(self) -> None: ...


def _log_evaluation(metrics: Metrics) -> None:
    logger.info("evaluation %s", " ".join(f"{key}={_cell(value)}" for key, value in metrics.items()))


class _TqdmHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def set_up_logging(log_format: LogFormat, level: LogLevel, *, is_main: bool) -> None:
    """Log to standard error, one event per line. Other ranks log only errors and warnings of their own."""
    # tqdm's default lock is shared with forked processes: if one is killed while it holds the lock, all others hang.
    tqdm.set_lock(threading.RLock())
    handler = _TqdmHandler()
    line = "%(message)s" if log_format == "progress_bar" else "time=%(asctime)s level=%(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(line))
    root = logging.getLogger("xorl")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level if is_main or level == "ERROR" else logging.WARNING)
    for name in SAME_ON_ALL_RANKS:
        logging.getLogger(name).setLevel(logging.NOTSET if is_main else logging.ERROR)
    if not torch.cuda.is_available():
        # Where there is no GPU, the compiler warns that there is none.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


class Phases:
    """Follows the phases of the start-up: calls `on_start` with the name of each, and says which ones take long."""

    def __init__(self, on_start: Callable[[str], object] = lambda name: None) -> None:
        self._on_start = on_start
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, doing: str | None = None) -> Iterator[None]:
        """A phase. doing: what it does, for a line that is logged if it takes more than a few seconds.

        None starts no thread, for phases that fork and log their own progress.
        """
        logger.debug("phase=%s", name)
        self._on_start(name)
        slow = threading.Timer(SECONDS_BEFORE_NOTICE, logger.info, (f"{doing} ...",))
        slow.daemon = True
        if doing is not None:
            slow.start()
        start = time.perf_counter()
        try:
            yield
        finally:
            slow.cancel()
        self.seconds[name] = time.perf_counter() - start
        logger.debug("phase=%s done_s=%.2f", name, self.seconds[name])


def _cell(value: float | int | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
