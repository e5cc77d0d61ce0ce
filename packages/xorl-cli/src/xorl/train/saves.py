"""Saves checkpoints for a run or a sweep, in the foreground or background, and decides what a failed save does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from xorl.ckpt import BackgroundWriter, Checkpointer, CheckpointError, CheckpointFailure, Stateful
from xorl.ckpt.files import FileRecord
from xorl.ckpt.layout import JSON, TensorRecord
from xorl.ckpt.publish import require_space, set_aside_after, size_text
from xorl.ckpt.ranks import all_gather_text, fail_together, this_rank

logger = logging.getLogger(__name__)


# Before the first save, it is expected to be as fast as a slow disk on the network.
ASSUMED_BYTES_PER_S = 200e6


def sum_over_stages(number: int, stage: int) -> int:
    """The sum over a pipeline's stages of `number`, which all ranks of a stage must agree on. Collective."""
    of_stages = dict(text.split() for text in all_gather_text(f"{stage} {number}"))
    return sum(map(int, of_stages.values()))


class Saves:
    """The saves of a run, one at a time. `last` is the newest complete checkpoint.

    `longest_s` is how long the slowest save so far took or, before the first one, how long it is expected to take.

    Args:
        in_background: return from `save` once the state is being copied, and write it in a thread.
        stops_on_failure: raise if a save fails; otherwise only log it, unless it is the last one.
        info: recorded in every checkpoint, beside that of its save.
    """

    def __init__(
        self, checkpointer: Checkpointer, *, in_background: bool, stops_on_failure: bool, info: Mapping[str, JSON]
    ) -> None:
        self.checkpointer = checkpointer
        self._info = info
        self._background = BackgroundWriter() if in_background else None
        self._stops_on_failure = stops_on_failure
        self._step = 0
        self.last: Path | None = None
        self.longest_s = 0.0

    def save(
        self,
        step: int,
        state: Mapping[str, Stateful],
        *,
        info: Mapping[str, JSON],
        scalars: Mapping[str, JSON],
        rng: Mapping[str, Tensor],
        write_extra_files: Callable[[Path], Mapping[str, FileRecord]],
        on_published: Callable[[], object],
        is_final: bool,
    ) -> None:
        """Save the state after `step` steps, after the previous save has ended; see `Checkpointer.save`. Collective.

        Raises CheckpointError or CheckpointFailure if this or the previous save fails and failures stop the run; a
        final save always raises.
        """
        self.finish()
        self._step = step
        start = time.perf_counter()

        def published(path: Path) -> None:
            seconds = time.perf_counter() - start
            self.longest_s = seconds if self.last is None else max(self.longest_s, seconds)
            self.last = path
            logger.info("checkpoint=%s step=%d save_s=%.2f", path, step, seconds)
            on_published()

        with self._failures(is_final=is_final):
            self.checkpointer.save(
                step,
                state,
                info={**info, **self._info},
                scalars=scalars,
                rng=rng,
                write_extra_files=write_extra_files,
                background=self._background,
                on_published=published,
            )
        if is_final:
            self.finish(is_final=True)

    def prepare(self, state: Mapping[str, Stateful], num_saves: int, *, stage: int) -> None:
        """Before the first step, check the space on the disk and reserve host memory for copies. Collective.

        `stage` is this rank's in a pipeline, of which `state` has the part.
        Raises CheckpointFailure if not even one checkpoint fits; warns if not all will.
        """
        if not num_saves:
            return
        root = self.checkpointer.root
        tensors = {f"{name}.{key}": value for name, part in state.items() for key, value in part.state_dict().items()}
        num_bytes = sum_over_stages(sum(TensorRecord.of(tensor).num_bytes for tensor in tensors.values()), stage)
        self.longest_s = num_bytes / ASSUMED_BYTES_PER_S
        with fail_together("check the disk"):
            if this_rank() == 0:
                free = require_space(root.parent, num_bytes)
                if not self.checkpointer.removes_old and free < num_saves * num_bytes:
                    logger.warning(
                        "train.keep_last: the run saves %d checkpoints of %s, but only %s are free; set it to remove "
                        "old ones",
                        num_saves,
                        size_text(num_bytes),
                        size_text(free),
                    )
        if self._background is not None:
            self._background.reserve(tensors)

    def go_back(self, step: int) -> None:
        """Set aside the checkpoints that are later than `last`, which was saved after `step` steps. Collective."""
        root = self.checkpointer.root
        with fail_together("set later checkpoints aside"):
            aside = set_aside_after(root, step, self.last) if this_rank() == 0 and root.is_dir() else None
            if aside is not None:
                logger.warning(
                    "went back to step=%d: later checkpoints are now in %s, and metrics.jsonl ends at this step",
                    step,
                    aside,
                )

    @property
    def in_background(self) -> bool:
        return self._background is not None

    def has_failed(self) -> bool:
        """Whether a save in the background has failed; call `finish` on all ranks once any of them knows."""
        return self._background is not None and self._background.has_failed

    def before_change(self) -> None:
        """Call before the state changes: a copy to host memory ends first. The host does not wait."""
        if self._background is not None:
            self._background.before_change()

    def finish(self, *, is_final: bool = False) -> None:
        """Wait until the save in the background has ended; its failure is handled as in `save`. Collective."""
        if self._background is not None:
            with self._failures(is_final=is_final):
                self._background.finish()

    @contextmanager
    def flushed(self) -> Iterator[None]:
        """When the block ends, wait for the save in the background and return its memory.

        A save that is being written is also completed if the block raises, but not on a second signal.
        """
        try:
            yield
        except Exception:
            try:
                self.finish()
            except Exception as error:  # noqa: BLE001  (the first error is the one to report)
                logger.error("%s", error)
            raise
        self.finish(is_final=True)
        if self._background is not None:
            self._background.close()

    @contextmanager
    def _failures(self, *, is_final: bool) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, CheckpointFailure) as error:
            advice = "This run has no checkpoint yet. Fix the cause and restart"
            if self.last is not None:
                advice = f"{self.last} is complete. Fix the cause and continue with --train.load_checkpoint_path auto"
            message = f"step {self._step}: {error}"
            if self._stops_on_failure or is_final:
                raise type(error)(f"{message}\n{advice}") from error
            logger.error("%s\nTraining continues without this checkpoint (train.on_save_failure)", message)
