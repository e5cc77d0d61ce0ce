"""When a run saves, what goes into its checkpoints, and how a run continues from one."""

from __future__ import annotations

import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from xorl.ckpt import (
    JSON,
    Checkpointer,
    CheckpointError,
    CheckpointFailure,
    Manifest,
    SafetensorsSource,
    agreed,
    read_manifest,
)
from xorl.core.runtime import Runtime, rng_state, set_rng_state
from xorl.lora import AdapterSpec
from xorl.lora.peft import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig
from xorl.train.adapters.files import AdapterFiles
from xorl.train.adapters.folder import is_adapter
from xorl.train.checkpoint_model import MODEL
from xorl.train.data import DataIdentity, StreamState
from xorl.train.engine import Engine
from xorl.train.export.folder import AdapterExport, ModelExport
from xorl.train.recorded_options import OPTIONS, differing_options, require_same_base

logger = logging.getLogger(__name__)

# The folder within a checkpoint that holds the exported model.
EXPORT = "hf"


@dataclass(frozen=True)
class SavePoints:
    """The steps after which a run saves: each `save_steps`, each `save_epochs` epochs (0: never), and the last."""

    num_steps: int
    steps_per_epoch: int
    save_steps: int
    save_epochs: float

    def warn(self) -> None:
        """Say so where saves were asked for by epochs alone, and a stream, which has none, goes on to its last step."""
        by_steps = 0 < self.save_steps < self.num_steps
        if self.steps_per_epoch == 0 and self.save_epochs > 0 and self.num_steps > 1 and not by_steps:
            logger.warning(
                "train.save_epochs: a stream has no epochs, so that this run saves after its last step=%d alone; set "
                "train.save_steps to save before, or train.save_epochs: 0 to leave it at that",
                self.num_steps,
            )

    def __call__(self, step: int) -> bool:
        """Whether step `step`, counted from 1, is one of them."""
        if step == self.num_steps or (self.save_steps and step % self.save_steps == 0):
            return True
        interval = self.save_epochs * self.steps_per_epoch
        return interval > 0 and math.floor(step / interval + 1e-9) > math.floor((step - 1) / interval + 1e-9)


class Checkpoints:
    """A run's checkpoints under `{output_dir}/checkpoints`.

    Args:
        model: what they say of the model (see `checkpoint_model.describe_model`).
        options: what they say of the configuration (see `recorded_options`).
        adapters: written into each of them; None where there are none.
        trained_only: whether frozen parameters are left out.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        engine: Engine,
        runtime: Runtime,
        *,
        due: SavePoints,
        data: DataIdentity,
        model: Mapping[str, JSON],
        options: Mapping[str, JSON],
        export: ModelExport | AdapterExport | None,
        adapters: AdapterFiles | None = None,
        trained_only: bool = False,
        stream: StreamState | None = None,
    ) -> None:
        self._checkpointer = checkpointer
        self._engine = engine
        self._runtime = runtime
        self._export = export
        self._data = data
        self._noted = {MODEL: model, OPTIONS: options}
        self._adapters = adapters
        self._trained_only = trained_only
        self._stream = stream
        self.due: Callable[[int], bool] = due
        self.last: Path | None = None
        self.exported: Path | None = None

    def save(self, step: int) -> None:
        """Save the run after `step` steps. Collective."""
        start = time.perf_counter()
        place: dict[str, str | int | list[list[int]] | list[int]] = {
            **asdict(self._data),
            "position": step * self._data.bins_per_step,
        }
        # Set on all ranks or on none: the configuration decides.
        if self._stream is not None:
            place |= self._stream.place()
        try:
            self.last = self._checkpointer.save(
                step,
                self._engine.state(trained_only=self._trained_only),
                info={"data": place, **self._noted},
                scalars={"step": step},
                rng=rng_state(self._runtime.device),
                write_further=None if self._adapters is None else self._adapters.write,
            )
        except CheckpointFailure as error:
            raise CheckpointFailure(f"step {step}: {error}\n{self._way_on()}") from error
        logger.info("checkpoint=%s step=%d save_s=%.2f", self.last, step, time.perf_counter() - start)
        if self._stream is not None and self._runtime.is_main:
            self._stream.write_receipt()

    def export(self) -> None:
        """Write the model for other tools beside the last checkpoint, if the run exports at all. Collective."""
        if self._export is None:
            return
        assert self.last is not None, "the last step is always saved"
        with agreed("set a damaged export aside"):
            if self._runtime.is_main:
                _set_aside_damaged(self.last)
        self.exported = self.last / EXPORT
        if not self.exported.exists():
            self._export.write(self.exported)

    def _way_on(self) -> str:
        if self.last is None:
            return "This run has no checkpoint yet. Mend the cause and start it again"
        return f"{self.last} is whole. Mend the cause and continue with --train.load_checkpoint_path auto"

    def restore(self, path: Path) -> int:
        """Load the checkpoint at `path` and return its step; parameters that are not in it stay. Collective.

        Raises ValueError if its adapters were scaled differently, or stood on a base that was quantised otherwise.
        """
        start = time.perf_counter()
        if self._adapters is not None and is_adapter(path):
            require_scale(path, self._adapters.config.spec)
        frozen = [name for name, weight in self._engine.model.module.named_parameters() if not weight.requires_grad]
        manifest = read_manifest(path)
        trained_only = bool(frozen) and f"model.{frozen[0]}" not in manifest.tensors
        if trained_only:
            require_same_base(path, manifest.info, self._noted)
        try:
            loaded = self._checkpointer.load(path, self._engine.state(trained_only=trained_only))
        except CheckpointError as error:
            others = self._other_options(path)
            if not others:
                raise
            told = f"train.load_checkpoint_path: {path} was saved with {'; '.join(others)}"
            raise CheckpointError(f"{told}\n{error}") from error
        if loaded.rng is not None:
            set_rng_state(loaded.rng, self._runtime.device)
        self.last = path
        logger.info("resumed=%s step=%d load_s=%.2f", path, loaded.step, time.perf_counter() - start)
        return loaded.step

    def _other_options(self, path: Path) -> list[str]:
        adapters = None if self._adapters is None else self._adapters.config
        return differing_options(path, read_manifest(path).info, self._noted, adapters)


def require_scale(path: Path, spec: AdapterSpec) -> None:
    """Raise ValueError unless the adapters of a checkpoint are scaled as these are: no shape tells."""
    saved = AdapterConfig.from_json(json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))).spec
    options = {"alpha": "lora_alpha", "use_rslora": "use_rslora", "alpha_pattern": "alpha_pattern"}
    for field, option in options.items():
        before, now = getattr(saved, field), getattr(spec, field)
        if before != now:
            raise ValueError(
                f"lora.{option}: {now}, and the adapters of {path}, from which train.load_checkpoint_path goes on, "
                f"were trained with {before}: set it back, or begin a new run"
            )


def is_exported(checkpoint: Path) -> bool:
    """Whether the model for other tools, or the adapter, is in this checkpoint with all files of its weights."""
    folder = checkpoint / EXPORT
    try:
        source = (
            SafetensorsSource(folder, single_file=WEIGHTS_FILE) if is_adapter(folder) else SafetensorsSource(folder)
        )
        source.close()
    except CheckpointError:
        return False
    return True


def _set_aside_damaged(checkpoint: Path) -> None:
    """Move an export that is not whole out of the way: nothing is written into one, nor is any file lost."""
    folder = checkpoint / EXPORT
    if folder.exists() and not is_exported(checkpoint):
        aside = Path(tempfile.mkdtemp(prefix=f"{EXPORT}_damaged_", dir=checkpoint))
        folder.rename(aside)
        logger.warning("export=%s has lost files of its weights; it is now %s and is made again", folder, aside)


def saved_data(manifest: Manifest) -> DataIdentity:
    """The data that the run of a checkpoint was trained on. Raises CheckpointError for a checkpoint of a sweep."""
    if "data" not in manifest.info:
        raise CheckpointError(
            "train.load_checkpoint_path: the checkpoint is of a sweep; continue it with the members of its lora.sweep"
        )
    saved = cast(dict[str, str | int], manifest.info["data"])
    return DataIdentity(str(saved["order"]), int(saved["num_bins"]), int(saved["bins_per_step"]))


def saved_stream_positions(manifest: Manifest) -> list[list[int]] | None:
    """Where the lanes of a stream stood in a checkpoint; None where it was trained on prepared data."""
    return cast(dict[str, list[list[int]]], manifest.info["data"]).get("stream_positions")


def saved_stream_tally(manifest: Manifest) -> list[int] | None:
    """What had been counted of a stream in a checkpoint; None where nothing was."""
    return cast(dict[str, list[int]], manifest.info["data"]).get("stream_tally")
