"""Saves a sweep: checkpoints with all members, and the adapter of each in PEFT's format."""

from __future__ import annotations

import filecmp
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from torch import Tensor

from xorl.ckpt import read_manifest
from xorl.ckpt.files import FileRecord
from xorl.ckpt.layout import JSON
from xorl.ckpt.ranks import fail_together, this_rank
from xorl.core.models import ModelSpec
from xorl.core.runtime import Runtime, rng_state, set_rng_state
from xorl.lora import AdapterBank
from xorl.lora.peft import WEIGHTS_FILE
from xorl.lora.snapshot import AdapterSnapshot
from xorl.train.adapters.files import AdapterFiles, adapters_writer
from xorl.train.adapters.folder import is_adapter
from xorl.train.checkpoint_model import MODEL, OPTIONS, require_same_base
from xorl.train.checkpoints import SavePoints, require_scale
from xorl.train.data import DataIdentity
from xorl.train.export.folder import AdapterExport
from xorl.train.output_dir import MEMBERS
from xorl.train.saves import Content, Saves

logger = logging.getLogger(__name__)

# The folder of a member's exported adapter, and the folder of all adapters in a checkpoint.
ADAPTER, ADAPTERS = "adapter", "adapters"


class BankState:
    """The adapters of a bank and their optimizers as `{adapter}/{tensor}`, for checkpoints; without the base."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank

    def state_dict(self) -> dict[str, Tensor]:
        """Copies on the host; a load fills them and passes them to `load_state_dict`."""
        return {
            f"{name}/{key}": tensor
            for name in self._bank.names
            for key, tensor in self._bank.snapshot(name).tensors().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore every adapter from `state`."""
        for name in self._bank.names:
            snapshot = self._bank.snapshot(name)
            tensors = {key: state[f"{name}/{key}"] for key in snapshot.tensors()}
            self._bank.restore(name, AdapterSnapshot.of_tensors(snapshot.spec, snapshot.names, tensors))


class SweepSaving:
    """The checkpoints of a sweep under `{output_dir}/checkpoints`, and its adapters under `{output_dir}/sweep`.

    Args:
        due: decides after which steps to save.
        data: identifies the training data of each member.
        model: the description of the model (see `checkpoint_model.describe_model`).
        options: see `checkpoint_model.recorded_options`.
        files: returns the files of one member's adapter.
        exports: write the adapters at the end.
    """

    def __init__(
        self,
        saves: Saves,
        bank: AdapterBank,
        runtime: Runtime,
        *,
        due: SavePoints,
        data: Mapping[str, DataIdentity],
        model: Mapping[str, JSON],
        options: Mapping[str, JSON],
        files: Callable[[str], AdapterFiles],
        spec: ModelSpec,
        output_dir: Path,
        exports: bool,
    ) -> None:
        self.saves = saves
        self._bank = bank
        self._runtime = runtime
        self._data = data
        self._info = {MODEL: model, OPTIONS: options}
        self._files = files
        self._spec = spec
        self._output_dir = output_dir
        self._exports = exports
        self.due: Callable[[int], bool] = due

    def prepare(self, start_step: int, num_steps: int) -> None:
        """See `Saves.prepare`. Collective."""
        num_saves = sum(map(self.due, range(start_step + 1, num_steps + 1)))
        self.saves.prepare({"adapters": BankState(self._bank)}, num_saves)

    def save(self, step: int, *, diverged: Sequence[str], is_final: bool = False) -> None:
        """Save every member after `step` steps; for errors and `is_final` see `Saves.save`. Collective."""
        content = Content(
            state={"adapters": BankState(self._bank)},
            info={"sweep": {name: asdict(data) for name, data in self._data.items()}, **self._info},
            scalars={"step": step, "diverged": list(diverged)},
            rng=rng_state(self._runtime.device),
            write_extra_files=self._adapters_writer(),
        )
        self.saves.save(step, content, is_final=is_final)

    def restore(self, path: Path) -> tuple[int, list[str]]:
        """Load the checkpoint at `path`; returns its step and the members that had diverged. Collective.

        Raises ValueError if its adapters were scaled differently or trained over a differently quantised base.
        """
        require_same_base(path, read_manifest(path).info, self._info)
        for name in self._bank.names:
            if is_adapter(folder := path / ADAPTERS / name):
                require_scale(folder, self._files(name).config.spec)
        loaded = self.saves.checkpointer.load(path, {"adapters": BankState(self._bank)})
        if loaded.rng is not None:
            set_rng_state(loaded.rng, self._runtime.device)
        self.saves.last = path
        logger.debug("resumed=%s step=%d", path, loaded.step)
        return loaded.step, list(cast(Sequence[str], loaded.scalars["diverged"]))

    def export(self, names: Sequence[str]) -> None:
        """Export the adapters of these members that are not exported yet. Collective."""
        if not self._exports:
            return
        last = self.saves.last
        assert last is not None, "the last step is always saved"
        with fail_together("set former adapters aside"):
            if this_rank() == 0:
                for name in self._bank.names:
                    _set_aside_outdated(self._output_dir, name, last)
        for name in names:
            if not (folder := member_adapter(self._output_dir, name)).exists():
                AdapterExport(self._files(name), self._spec).write(folder)

    def _adapters_writer(self) -> Callable[[Path], dict[str, FileRecord]]:
        in_background = self.saves.in_background
        writers = {name: adapters_writer(self._files(name), in_background=in_background) for name in self._bank.names}

        def write(folder: Path) -> dict[str, FileRecord]:
            written: dict[str, FileRecord] = {}
            for name, write_adapter in writers.items():
                subfolder = folder / ADAPTERS / name
                with fail_together(f"write {subfolder}"):
                    if this_rank() == 0:
                        subfolder.mkdir(parents=True)
                files = write_adapter(subfolder)
                written |= {f"{ADAPTERS}/{name}/{file}": record for file, record in files.items()}
            return written

        return write


def member_adapter(output_dir: Path, name: str) -> Path:
    """The folder to which a member's adapter is exported."""
    return output_dir / MEMBERS / name / ADAPTER


def is_exported(output_dir: Path, name: str, checkpoint: Path) -> bool:
    """Whether a member's adapter is exported with the values of this checkpoint."""
    exported = member_adapter(output_dir, name) / WEIGHTS_FILE
    saved = checkpoint / ADAPTERS / name / WEIGHTS_FILE
    return exported.is_file() and saved.is_file() and filecmp.cmp(exported, saved, shallow=False)


def _set_aside_outdated(output_dir: Path, name: str, checkpoint: Path) -> None:
    """Rename the folder of another checkpoint's adapter, so that a new one can be written and no file is lost."""
    folder = member_adapter(output_dir, name)
    if folder.exists() and not is_exported(output_dir, name, checkpoint):
        aside = Path(tempfile.mkdtemp(prefix=f"{ADAPTER}_former_", dir=folder.parent))
        folder.rename(aside)
        logger.warning("adapter=%s is not from %s; renamed to %s and exported again", folder, checkpoint, aside)
