"""Checkpoints of a user's own module: one portable file, or a folder of shards that each rank writes its own of."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xorl.ckpt import Checkpointer, CheckpointError, Stateful, read_manifest
from xorl.ckpt.files import sync_file
from xorl.ckpt.gathered import compact
from xorl.ckpt.layout import is_complete, prepare_root
from xorl.ckpt.ranks import agreed, num_ranks, this_rank
from xorl.ckpt.regions import gather_whole
from xorl.core.optim import OptimizerState
from xorl.core.parallel import copy_shard_
from xorl.core.runtime import rng_state, set_rng_state
from xorl.train.engine import ModelState


@dataclass(frozen=True)
class Progress:
    """How far a run is: optimizer steps taken, and the rows of the epoch that all ranks together have read."""

    step: int = 0
    epoch: int = 0
    rows: int = 0


GroupNumbers: TypeAlias = "Mapping[str, float]"


def group_numbers(optimizer: torch.optim.Optimizer) -> list[GroupNumbers]:
    """The numbers in each of an optimizer's groups, but for the learning rate, which the trainer sets."""
    return [
        {key: value for key, value in group.items() if isinstance(value, (int, float)) and key != "lr"}
        for group in optimizer.param_groups
    ]


@dataclass(frozen=True)
class ModuleState:
    """A placed module and its optimizer. Saving and loading are collective.

    given: the numbers in the optimizer's groups as it was made, see `group_numbers`. Those that have changed since are
    part of the state: some optimizers count steps there, or adapt their learning rate.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    given: Sequence[GroupNumbers]
    _checkpointers: dict[Path, Checkpointer] = field(default_factory=dict)

    def save_file(self, path: Path, progress: Progress) -> Path:
        """Gather everything on rank 0, one tensor after the other, and put it in place of `path` at once.

        The file is a plain dict: model and optimizer (name -> tensor), step, epoch, rows, rng, a dict per rank, and
        groups, the numbers that changed in each of the optimizer's groups.
        """
        model = self._gather(self.module.state_dict(keep_vars=True))
        optimizer = self._gather(self._optimizer_state().state_dict() if self.optimizer.state else {})
        rng = self._gather_rng()
        with agreed(f"write {path}"):
            if this_rank() == 0:
                if path.is_dir():
                    raise CheckpointError(f"path: {path} is a folder, and FULL_STATE_DICT writes a file")
                prepare_root(path.parent, "path")
                content = {"model": model, "optimizer": optimizer, "rng": rng, "groups": self._changed_numbers()}
                _replace(path, {**content, **asdict(progress)})
        return path

    def load_file(self, path: Path) -> Progress:
        """Copy each rank's part out of a file of `save_file`; the file is mapped, so only that part is read.

        Nothing is unpickled but tensors and numbers. Raises CheckpointError for a file of another model.
        """
        with agreed(f"load {path}"):
            saved = _read(path)
            model = self.module.state_dict(keep_vars=True)
            self._require_same(path, model, saved["model"])
            self._materialise(saved["optimizer"])
            optimizer = self._optimizer_state().state_dict() if self.optimizer.state else {}
            self._require_same(path, optimizer, saved["optimizer"])
            for targets, values in ((model, saved["model"]), (optimizer, saved["optimizer"])):
                for name, target in targets.items():
                    copy_shard_(target, values[name])
            if optimizer:
                self._optimizer_state().load_state_dict(optimizer)
            self._set_numbers(saved.get("groups", []))
            if len(saved["rng"]) == num_ranks():
                set_rng_state({name: state.clone() for name, state in saved["rng"][this_rank()].items()}, self.device)
            return Progress(saved["step"], saved["epoch"], saved["rows"])

    def save_shards(self, path: Path, progress: Progress) -> Path:
        """Publish `{path}/global_step_{step}`, to which each rank writes what it holds; nothing if it was loaded."""
        scalars = {"epoch": progress.epoch, "rows": progress.rows, "groups": self._changed_numbers()}
        checkpointer = self._checkpointer(path)
        return checkpointer.save(progress.step, self._parts(), scalars=scalars, rng=rng_state(self.device))

    def load_shards(self, path: Path) -> Progress:
        """Copy a checkpoint of `save_shards` in, however many ranks wrote it; of several under `path`, the latest."""
        checkpointer = self._checkpointer(path.parent if is_complete(path) else path)
        folder = path if is_complete(path) else checkpointer.resolve("auto")
        with agreed(f"load {folder}"):
            names = read_manifest(folder).tensors
            self._materialise([name.removeprefix("optimizer.") for name in names if name.startswith("optimizer.")])
        loaded = checkpointer.load(folder, self._parts())
        epoch, rows = loaded.scalars.get("epoch"), loaded.scalars.get("rows")
        if not isinstance(epoch, int) or not isinstance(rows, int):
            raise CheckpointError(f"{folder} was not saved by a trainer of a module, which notes epoch and rows")
        self._set_numbers(cast("Sequence[GroupNumbers]", loaded.scalars.get("groups", [])))
        if loaded.rng is not None:
            set_rng_state(loaded.rng, self.device)
        return Progress(loaded.step, epoch, rows)

    def _changed_numbers(self) -> list[dict[str, float | str]]:
        """What is no longer as given in each group; JSON has no infinity and no NaN, which are text."""
        return [
            {
                # float: NumPy's are floats that no file of tensors may hold.
                key: str(value) if not math.isfinite(value) else float(value) if isinstance(value, float) else value
                for key, value in now.items()
                if key not in given or given[key] != value
            }
            for given, now in zip(self.given, group_numbers(self.optimizer), strict=True)
        ]

    def _set_numbers(self, saved: Sequence[Mapping[str, float | str]]) -> None:
        now = group_numbers(self.optimizer)
        for group, later, given, numbers in zip(self.optimizer.param_groups, now, self.given, saved, strict=False):
            for key in later.keys() - given.keys():
                del group[key]
            group.update(given)
            group.update({key: float(value) if isinstance(value, str) else value for key, value in numbers.items()})

    def _checkpointer(self, root: Path) -> Checkpointer:
        """One for each folder: it knows what it saved or loaded last, and need not save that again."""
        return self._checkpointers.setdefault(Path(os.path.abspath(root)), Checkpointer(root, root_option="path"))

    def _parts(self) -> dict[str, Stateful]:
        # Before the first step there is no state of the optimizer, and to make one would be a step.
        parts: dict[str, Stateful] = {"model": ModelState(self.module)}
        return {**parts, "optimizer": self._optimizer_state()} if self.optimizer.state else parts

    def _optimizer_state(self) -> OptimizerState:
        return OptimizerState(self.optimizer, self.module.named_parameters())

    def _materialise(self, saved_names: Mapping[str, Tensor] | list[str]) -> None:
        """Give the optimizer the state that is about to be loaded: none for parameters that had no gradient yet."""
        having_state = {name.rpartition(".")[0] for name in saved_names}
        if having_state:
            self._optimizer_state().state_dict()
        for name, parameter in self.module.named_parameters():
            if name not in having_state:
                self.optimizer.state.pop(parameter, None)

    @torch.no_grad()
    def _gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collective: whole tensors in host memory on rank 0, nothing on the others."""
        whole: dict[str, Tensor] = {}
        by_identity: dict[int, Tensor] = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(f"model: {name} is of type {type(tensor).__name__}; only tensors are saved")
            if id(tensor) not in by_identity:  # tied weights are gathered and written once
                # Offloaded shards are gathered over the device, whose links are the fast ones.
                full = gather_whole(tensor.to(self.device)) if isinstance(tensor, DTensor) else tensor.detach()
                by_identity[id(tensor)] = compact(full) if this_rank() == 0 else full.new_empty(0)
            whole[name] = by_identity[id(tensor)]
        return whole if this_rank() == 0 else {}

    def _gather_rng(self) -> list[dict[str, Tensor]]:
        own = rng_state(self.device)
        if num_ranks() == 1:
            return [own]
        ranks: list[dict[str, Tensor]] = [{} for _ in range(num_ranks())]
        for name, state in own.items():
            states = [torch.empty_like(state, device=self.device) for _ in ranks]
            dist.all_gather(states, state.to(self.device))
            for rank, received in zip(ranks, states, strict=True):
                rank[name] = received.cpu()
        return ranks

    def _require_same(self, path: Path, wanted: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        problems = [f"{name} is missing" for name in wanted if name not in saved]
        problems += [f"{name} is in the file alone" for name in saved if name not in wanted]
        problems += [
            f"{name} is {list(saved[name].shape)} in the file, {list(tensor.shape)} here"
            for name, tensor in wanted.items()
            if name in saved and saved[name].shape != tensor.shape
        ]
        if problems:
            more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
            told = "\n  ".join(problems[:5])
            raise CheckpointError(f"{path} is of another model or optimizer; nothing was loaded\n  {told}{more}")


def _replace(path: Path, content: Mapping[str, object]) -> None:
    """A crash leaves the former file or this one, never half of it."""
    temporary = path.with_name(f".{path.name}.saving")
    with temporary.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_file(path.parent)


def _read(path: Path) -> dict:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(f"path: there is no checkpoint at {path}") from None
    except (pickle.UnpicklingError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as tensors and numbers: {error}") from error
    wanted = {"model": dict, "optimizer": dict, "rng": list, "step": int, "epoch": int, "rows": int}
    if not isinstance(saved, dict) or any(not isinstance(saved.get(key), kind) for key, kind in wanted.items()):
        raise CheckpointError(f"{path} was not written by save_checkpoint: it needs {', '.join(wanted)}")
    return saved
