"""When a run saves, the contents of its checkpoints, and resuming from one."""

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

from xorl.ckpt import CheckpointError, SafetensorsSource, read_manifest
from xorl.ckpt.files import FileRecord, write_file
from xorl.ckpt.layout import JSON, Manifest
from xorl.ckpt.ranks import fail_together
from xorl.core.runtime import Runtime, rng_state, set_rng_state
from xorl.lora import AdapterSpec
from xorl.lora.peft import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig
from xorl.train.adapters.files import AdapterFiles, adapters_writer
from xorl.train.adapters.folder import is_adapter
from xorl.train.checkpoint_model import MODEL, OPTIONS, differing_options, require_same_base
from xorl.train.data import DataIdentity, StreamState
from xorl.train.engine import Engine
from xorl.train.export.folder import AdapterExport, ModelExport
from xorl.train.saves import Content, Saves

logger = logging.getLogger(__name__)

# The exported model is beside its checkpoint, which is never written into again.
EXPORT = "-export"


@dataclass(frozen=True)
class SavePoints:
    """The steps after which a run saves: every `save_steps`, every `save_epochs` epochs (0: never), and the last."""

    num_steps: int
    steps_per_epoch: int
    save_steps: int
    save_epochs: float

    def warn(self) -> None:
        """Log a warning if saves are only set by epochs, which a stream does not have."""
        by_steps = 0 < self.save_steps < self.num_steps
        if self.steps_per_epoch == 0 and self.save_epochs > 0 and self.num_steps > 1 and not by_steps:
            logger.warning(
                "train.save_epochs: a stream has no epochs, so this run only saves after its last step=%d; set "
                "train.save_steps to save earlier, or train.save_epochs: 0 to silence this warning",
                self.num_steps,
            )

    def __call__(self, step: int) -> bool:
        """Whether to save after `step` steps."""
        if step == self.num_steps or (self.save_steps and step % self.save_steps == 0):
            return True
        interval = self.save_epochs * self.steps_per_epoch
        return interval > 0 and math.floor(step / interval + 1e-9) > math.floor((step - 1) / interval + 1e-9)


# Written into output_dir by `xorl verify`.
CERTIFICATE = "certificate.json"


class Checkpoints:
    """A run's checkpoints under `{output_dir}/checkpoints`.

    Args:
        due: decides after which steps to save.
        model: the description of the model (see `checkpoint_model.describe_model`).
        options: see `checkpoint_model.recorded_options`.
        export: written at the end beside the last checkpoint; None exports nothing.
        adapters: written into each checkpoint in PEFT's format; None for a model without adapters.
        trained_only: leave out frozen parameters.
        stream: None if the data is prepared.
    """

    def __init__(
        self,
        saves: Saves,
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
        self.saves = saves
        self._engine = engine
        self._runtime = runtime
        self.final_export = export
        self._data = data
        self._info = {MODEL: model, OPTIONS: options}
        self._adapters = adapters
        self._trained_only = trained_only
        self._stream = stream
        self.due: Callable[[int], bool] = due
        self.exported: Path | None = None

    def prepare(self, start_step: int, num_steps: int) -> None:
        """See `Saves.prepare`. Collective."""
        num_saves = sum(map(self.due, range(start_step + 1, num_steps + 1)))
        self.saves.prepare(self._engine.state(trained_only=self._trained_only), num_saves)

    def save(self, step: int, *, is_final: bool = False) -> None:
        """Save the run after `step` steps; for errors and `is_final` see `Saves.save`. Collective."""
        self.saves.finish()  # its receipt has the state of the stream at that save
        data: dict[str, str | int | list[list[int]] | list[int]] = {
            **asdict(self._data),
            "position": step * self._data.bins_per_step,
        }
        # The stream is set on all ranks or on none: the configuration decides.
        if self._stream is not None:
            data |= self._stream.state()
        content = Content(
            state=self._engine.state(trained_only=self._trained_only),
            info={"data": data, **self._info},
            scalars={"step": step},
            rng=rng_state(self._runtime.device),
            write_extra_files=self._extra_files(),
            on_published=self._write_receipt,
        )
        self.saves.save(step, content, is_final=is_final)

    def _write_receipt(self) -> None:
        if self._stream is not None and self._runtime.is_main:
            self._stream.write_receipt()

    def _extra_files(self) -> Callable[[Path], dict[str, FileRecord]]:
        """Writes the adapters, and a copy of the certificate of `xorl verify`, if there are any. Collective."""
        write_adapters = adapters_writer(self._adapters, in_background=self.saves.in_background)
        certificate = self.saves.checkpointer.root.parent / CERTIFICATE

        def write(folder: Path) -> dict[str, FileRecord]:
            files = write_adapters(folder)
            with fail_together(f"write {folder / CERTIFICATE}"):
                if self._runtime.is_main and certificate.is_file():
                    files[CERTIFICATE] = write_file(folder / CERTIFICATE, certificate.read_bytes())
            return files

        return write

    def export(self) -> None:
        """Export the model beside the last checkpoint, if the run exports at all. Collective."""
        if self.final_export is None:
            return
        last = self.saves.last
        assert last is not None, "the last step is always saved"
        with fail_together("set a damaged export aside"):
            if self._runtime.is_main:
                _set_aside_damaged(last)
        self.exported = export_folder(last)
        if not self.exported.exists():
            self.final_export.write(self.exported)

    def restore(self, path: Path) -> int:
        """Load the checkpoint at `path` and return its step; parameters that it lacks keep their values. Collective.

        Raises ValueError if its adapters were scaled differently or trained over a differently quantised base.
        """
        start = time.perf_counter()
        if self._adapters is not None and is_adapter(path):
            require_scale(path, self._adapters.config.spec)
        frozen = [name for name, weight in self._engine.model.module.named_parameters() if not weight.requires_grad]
        manifest = read_manifest(path)
        trained_only = bool(frozen) and f"model.{frozen[0]}" not in manifest.tensors
        if trained_only:
            require_same_base(path, manifest.info, self._info)
        try:
            loaded = self.saves.checkpointer.load(path, self._engine.state(trained_only=trained_only))
        except CheckpointError as error:
            adapters = None if self._adapters is None else self._adapters.config
            differing = differing_options(path, manifest.info, self._info, adapters)
            if not differing:
                raise
            message = f"train.load_checkpoint_path: {path} was saved with {'; '.join(differing)}"
            raise CheckpointError(f"{message}\n{error}") from error
        if loaded.rng is not None:
            set_rng_state(loaded.rng, self._runtime.device)
        self.saves.last = path
        logger.debug("resumed=%s step=%d load_s=%.2f", path, loaded.step, time.perf_counter() - start)
        return loaded.step


def require_scale(path: Path, spec: AdapterSpec) -> None:
    """Raise ValueError unless a checkpoint's adapters have the scale of `spec`, which their shapes do not show."""
    saved = AdapterConfig.from_json(json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))).spec
    options = {"alpha": "lora_alpha", "use_rslora": "use_rslora", "alpha_pattern": "alpha_pattern"}
    for field, option in options.items():
        before, now = getattr(saved, field), getattr(spec, field)
        if before != now:
            raise ValueError(
                f"lora.{option}: {now}, but the adapters in {path}, where train.load_checkpoint_path resumes, were "
                f"trained with {before}; restore that value, or start a new run"
            )


def export_folder(checkpoint: Path) -> Path:
    """The folder of the model that a run exports at its end."""
    return checkpoint.with_name(f"{checkpoint.name}{EXPORT}")


def is_exported(checkpoint: Path) -> bool:
    """Whether the exported model or adapter of this checkpoint exists, with all its weight files."""
    folder = export_folder(checkpoint)
    try:
        source = (
            SafetensorsSource(folder, single_file=WEIGHTS_FILE) if is_adapter(folder) else SafetensorsSource(folder)
        )
        source.close()
    except CheckpointError:
        return False
    return True


def _set_aside_damaged(checkpoint: Path) -> None:
    """Rename the folder of an incomplete export, so that a new one can be written and no file is lost."""
    folder = export_folder(checkpoint)
    if folder.exists() and not is_exported(checkpoint):
        aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}_damaged_", dir=checkpoint.parent))
        folder.rename(aside)
        logger.warning("export=%s lacks weight files; renamed to %s and exported again", folder, aside)


def saved_data(manifest: Manifest) -> dict[str, DataIdentity]:
    """The training data recorded in a checkpoint: by member for a sweep, else under the name ""."""
    info = manifest.info
    saved = cast(Mapping[str, Mapping[str, str | int]], {"": info["data"]} if "data" in info else info.get("sweep", {}))
    return {
        name: DataIdentity(str(data["order"]), int(data["num_bins"]), int(data["bins_per_step"]))
        for name, data in saved.items()
    }


def saved_stream_state(manifest: Manifest) -> tuple[list[list[int]] | None, list[int] | None]:
    """The positions of the lanes and the counts of samples from `StreamState.state`; None for those not recorded."""
    data = cast(Mapping[str, JSON], manifest.info["data"])
    positions = cast("list[list[int]] | None", data.get("stream_positions"))
    return positions, cast("list[int] | None", data.get("stream_tally"))
