"""When a run or a sweep saves, the contents of its checkpoints, and resuming from one."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from xorl.ckpt import CheckpointError
from xorl.ckpt.checkpointer import LoadedCheckpoint
from xorl.ckpt.files import FileRecord, write_file
from xorl.ckpt.layout import JSON, Manifest
from xorl.ckpt.ranks import fail_together
from xorl.core.runtime import rng_state, set_rng_state
from xorl.lora import AdapterSpec
from xorl.lora.peft import CONFIG_FILE, AdapterConfig
from xorl.train.adapters.files import AdapterFiles, adapters_writer
from xorl.train.adapters.folder import is_adapter
from xorl.train.architecture import Architecture
from xorl.train.bank_engine import BankEngine
from xorl.train.checkpoint_model import (
    MODEL,
    OPTIONS,
    describe_model,
    differing_options,
    recorded_options,
    require_same_base,
    require_same_parts,
)
from xorl.train.data import DataIdentity, StreamState
from xorl.train.engine import Engine
from xorl.train.images import recorded_decoder, require_same_decoder
from xorl.train.quantization import scheme_of
from xorl.train.saves import Saves
from xorl.train.startup import Startup

logger = logging.getLogger(__name__)


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
    """The checkpoints of a run or a sweep under `{output_dir}/checkpoints`.

    Args:
        architecture: recorded as the model's.
        fingerprint: of the base weights, if there are adapters (see `base_weights.base_fingerprint`).
        adapters: returns what is written into each checkpoint in PEFT's format, by folder.
        stream: None if the data is prepared.

    Attributes:
        due: decides after which steps to save.
    """

    def __init__(
        self,
        startup: Startup,
        engine: Engine | BankEngine,
        architecture: Architecture,
        fingerprint: str | None,
        *,
        adapters: Callable[[], Mapping[str, AdapterFiles]] = dict,
        stream: StreamState | None = None,
    ) -> None:
        config, plan = startup.config, startup.longest.plan
        self.saves: Saves = startup.saves()
        self._startup, self._engine = startup, engine
        self._info: Mapping[str, JSON] = {
            MODEL: describe_model(config.model, architecture, scheme_of(engine.model.whole), fingerprint),
            OPTIONS: recorded_options(config),
            **recorded_decoder(architecture.images),
        }
        self._adapters = adapters
        self._stream = stream
        points = SavePoints(plan.num_steps, plan.steps_per_epoch, config.train.save_steps, config.train.save_epochs)
        points.warn()
        self.due: Callable[[int], bool] = points

    def prepare(self, start_step: int) -> None:
        """See `Saves.prepare`. Collective."""
        num_saves = sum(map(self.due, range(start_step + 1, self._startup.num_steps + 1)))
        self.saves.prepare(
            self._engine.state(trained_only=self._startup.config.lora.save_lora_only),
            num_saves,
            stage=self._startup.mesh.pp.rank,
        )

    def save(self, step: int, *, is_final: bool = False, scalars: Mapping[str, JSON] = MappingProxyType({})) -> None:
        """Save the state after `step` steps, and `scalars`; for errors and `is_final` see `Saves.save`. Collective."""
        self.saves.finish()  # its receipt has the state of the stream at that save
        self.saves.save(
            step,
            self._engine.state(trained_only=self._startup.config.lora.save_lora_only),
            info={**self._data(step), **self._info},
            scalars={"step": step, **scalars},
            rng=rng_state(self._startup.runtime.device),
            write_extra_files=self._extra_files(),
            on_published=self._write_receipt,
            is_final=is_final,
        )

    def _data(self, step: int) -> dict[str, JSON]:
        """The identity of the training data, which `startup.saved_data_of` reads. Collective."""
        data = {name: DataIdentity.of(run.plan) for name, run in self._startup.runs.items()}
        if self._startup.config.lora.sweep:
            return {"sweep": {name: asdict(identity) for name, identity in data.items()}}
        [identity] = data.values()
        # The stream is set on all ranks or on none: the configuration decides.
        streamed = {} if self._stream is None else self._stream.state()
        return {"data": {**asdict(identity), "position": step * identity.bins_per_step, **streamed}}

    def _write_receipt(self) -> None:
        if self._stream is not None and self._startup.runtime.is_main:
            self._stream.write_receipt()

    def _extra_files(self) -> Callable[[Path], dict[str, FileRecord]]:
        """Writes the adapters, and a copy of the certificate of `xorl verify`, if there are any. Collective."""
        in_background, is_main = self.saves.in_background, self._startup.runtime.is_main
        writers = {
            name: adapters_writer(files, in_background=in_background) for name, files in self._adapters().items()
        }
        certificate = self._startup.output_dir / CERTIFICATE

        def write(folder: Path) -> dict[str, FileRecord]:
            written: dict[str, FileRecord] = {}
            for name, write_adapter in writers.items():
                with fail_together(f"write {folder / name}"):
                    if is_main:
                        (folder / name).mkdir(parents=True, exist_ok=True)
                files = write_adapter(folder / name)
                written |= {str(Path(name, file)): record for file, record in files.items()}
            with fail_together(f"write {folder / CERTIFICATE}"):
                if is_main and certificate.is_file():
                    written[CERTIFICATE] = write_file(folder / CERTIFICATE, certificate.read_bytes())
            return written

        return write

    def resume(self) -> LoadedCheckpoint | None:
        """Load the checkpoint from which the job resumes, if any, and set later ones aside. Collective.

        Parameters that it lacks keep their values. Raises ValueError if its adapters were scaled differently or trained
        over a differently quantised base, if it trained other parts, or if images are decoded to other values here.
        """
        resumed = self._startup.resumed
        if resumed is None:
            return None
        require_same_decoder(resumed.path, resumed.manifest.info, self._info)
        require_same_parts(resumed.path, resumed.manifest.info, self._info)
        with self._startup.phases("resume", f"Loading {resumed.path}"):
            start = time.perf_counter()
            loaded = self._load(resumed.path, resumed.manifest)
            if loaded.rng is not None:
                set_rng_state(loaded.rng, self._startup.runtime.device)
            logger.debug("resumed=%s step=%d load_s=%.2f", resumed.path, loaded.step, time.perf_counter() - start)
            self.saves.last = resumed.path
            self.saves.go_back(loaded.step)
        return loaded

    def _load(self, path: Path, manifest: Manifest) -> LoadedCheckpoint:
        configs = {name: files.config for name, files in self._adapters().items()}
        for name, config in configs.items():
            if is_adapter(path / name):
                require_scale(path / name, config.spec)
        parameters = self._engine.model.module.named_parameters()
        frozen = next((name for name, weight in parameters if not weight.requires_grad), None)
        trained_only = frozen is not None and f"model.{frozen}" not in manifest.tensors
        if trained_only:
            require_same_base(path, manifest.info, self._info)
        differing = differing_options(path, manifest.info, self._info, configs.get(""))
        message = f"train.load_checkpoint_path: {path} was saved with {'; '.join(differing)}"
        try:
            loaded = self.saves.checkpointer.load(path, self._engine.state(trained_only=trained_only))
        except CheckpointError as error:
            what = f"{message}\n" if differing else "train.load_checkpoint_path: "
            raise CheckpointError(f"{what}{error}") from error
        if differing:
            logger.warning("%s", message)
        return loaded


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
