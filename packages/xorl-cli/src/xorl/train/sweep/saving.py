"""What a sweep saves: checkpoints of all members, and each adapter for other tools."""

from __future__ import annotations

import filecmp
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from torch import Tensor

from xorl.ckpt import (
    JSON,
    Checkpointer,
    CheckpointFailure,
    FileRecord,
    Manifest,
    agreed,
    read_manifest,
    this_rank,
)
from xorl.core.models import ModelSpec
from xorl.core.runtime import Runtime, rng_state, set_rng_state
from xorl.lora import AdapterBank, AdapterSnapshot
from xorl.lora.peft import WEIGHTS_FILE
from xorl.train.adapters.files import AdapterFiles
from xorl.train.adapters.folder import is_adapter
from xorl.train.checkpoint_model import MODEL
from xorl.train.checkpoints import SavePoints, require_scale
from xorl.train.data import DataIdentity
from xorl.train.export.folder import AdapterExport
from xorl.train.recorded_options import OPTIONS, require_same_base

logger = logging.getLogger(__name__)

# Folders in output_dir, with one for each member, and in it; and the one of adapters in a checkpoint.
MEMBERS, ADAPTER, ADAPTERS = "sweep", "adapter", "adapters"


class BankState:
    """Every adapter of a bank with its optimizer, for checkpoints: `{adapter}/{tensor}`. The base is not in it."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank

    def state_dict(self) -> dict[str, Tensor]:
        """Copies on the host; a load fills them and hands them to `load_state_dict`."""
        return {
            f"{name}/{key}": tensor
            for name in self._bank.names
            for key, tensor in self._bank.snapshot(name).tensors().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Let every adapter be what `state` says."""
        for name in self._bank.names:
            held = self._bank.snapshot(name)
            own = {key: state[f"{name}/{key}"] for key in held.tensors()}
            self._bank.restore(name, AdapterSnapshot.of_tensors(held.spec, held.names, own))


class SweepSaving:
    """The checkpoints of a sweep under `{output_dir}/checkpoints`, and its adapters under `{output_dir}/sweep`.

    Args:
        data: of each member, which documents it is trained on.
        model: what checkpoints say of the model (see `checkpoint_model.describe_model`).
        options: what they say of the configuration (see `recorded_options`).
        files: writes one member's adapter as PEFT reads it.
        exports: whether adapters are written at the end.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
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
        self._checkpointer = checkpointer
        self._bank = bank
        self._runtime = runtime
        self._data = data
        self._noted = {MODEL: model, OPTIONS: options}
        self._files = files
        self._spec = spec
        self._output_dir = output_dir
        self._exports = exports
        self.due: Callable[[int], bool] = due
        self.last: Path | None = None

    def save(self, step: int, *, diverged: Sequence[str]) -> None:
        """Save every member after `step` steps. Collective."""
        start = time.perf_counter()
        try:
            self.last = self._checkpointer.save(
                step,
                {"adapters": BankState(self._bank)},
                info={"sweep": {name: asdict(data) for name, data in self._data.items()}, **self._noted},
                scalars={"step": step, "diverged": list(diverged)},
                rng=rng_state(self._runtime.device),
                write_further=self._write_adapters,
            )
        except CheckpointFailure as error:
            way_on = "Mend the cause and continue with --train.load_checkpoint_path auto"
            raise CheckpointFailure(f"step {step}: {error}\n{way_on}") from error
        logger.info("checkpoint=%s step=%d save_s=%.2f", self.last, step, time.perf_counter() - start)

    def restore(self, path: Path) -> tuple[int, list[str]]:
        """Load the checkpoint at `path`; returns its step and the members that had diverged. Collective.

        Raises ValueError if its adapters were scaled differently, or stood on a base that was quantised otherwise.
        """
        require_same_base(path, read_manifest(path).info, self._noted)
        for name in self._bank.names:
            if is_adapter(own := path / ADAPTERS / name):
                require_scale(own, self._files(name).config.spec)
        loaded = self._checkpointer.load(path, {"adapters": BankState(self._bank)})
        if loaded.rng is not None:
            set_rng_state(loaded.rng, self._runtime.device)
        self.last = path
        logger.info("resumed=%s step=%d", path, loaded.step)
        return loaded.step, list(cast(Sequence[str], loaded.scalars["diverged"]))

    def export(self, names: Sequence[str]) -> None:
        """Write the adapters of these members for other tools, those that are not there yet. Collective."""
        if not self._exports:
            return
        assert self.last is not None, "the last step is always saved"
        with agreed("set former adapters aside"):
            if this_rank() == 0:
                for name in self._bank.names:
                    _set_aside_former(self._output_dir, name, self.last)
        for name in names:
            if not (folder := member_adapter(self._output_dir, name)).exists():
                AdapterExport(self._files(name), self._spec).write(folder)

    def _write_adapters(self, folder: Path) -> dict[str, FileRecord]:
        written: dict[str, FileRecord] = {}
        for name in self._bank.names:
            own = folder / ADAPTERS / name
            with agreed(f"write {own}"):
                if this_rank() == 0:
                    own.mkdir(parents=True)
            files = self._files(name).write(own)
            written |= {f"{ADAPTERS}/{name}/{file}": record for file, record in files.items()}
        return written


def member_adapter(output_dir: Path, name: str) -> Path:
    """Where a member's adapter is written at the end."""
    return output_dir / MEMBERS / name / ADAPTER


def is_exported(output_dir: Path, name: str, checkpoint: Path) -> bool:
    """Whether a member's adapter is there as this checkpoint has it, and not as an earlier one did."""
    own, saved = (folder / WEIGHTS_FILE for folder in (member_adapter(output_dir, name), checkpoint / ADAPTERS / name))
    return own.is_file() and saved.is_file() and filecmp.cmp(own, saved, shallow=False)


def _set_aside_former(output_dir: Path, name: str, checkpoint: Path) -> None:
    """Move an adapter that is not this checkpoint's out of the way: nothing is written into it, and no file is lost."""
    folder = member_adapter(output_dir, name)
    if folder.exists() and not is_exported(output_dir, name, checkpoint):
        aside = Path(tempfile.mkdtemp(prefix=f"{ADAPTER}_former_", dir=folder.parent))
        folder.rename(aside)
        logger.warning("adapter=%s was not that of %s; it is now %s and is made again", folder, checkpoint, aside)


def saved_members(manifest: Manifest) -> dict[str, DataIdentity]:
    """The members of the sweep that saved a checkpoint, and the data of each; empty if it was no sweep."""
    saved = cast(Mapping[str, Mapping[str, str | int]], manifest.info.get("sweep", {}))
    return {
        name: DataIdentity(str(data["order"]), int(data["num_bins"]), int(data["bins_per_step"]))
        for name, data in saved.items()
    }
