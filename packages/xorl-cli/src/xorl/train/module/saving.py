"""Checkpoints of a user-defined module: a single portable file, or a folder to which each rank writes its shard."""

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

from xorl.ckpt import Checkpointer, CheckpointError, OptimizerState, Stateful, read_manifest
from xorl.ckpt.files import sync_file
from xorl.ckpt.layout import is_complete
from xorl.ckpt.publish import prepare_root
from xorl.ckpt.ranks import fail_together, num_ranks, this_rank
from xorl.ckpt.regions import gather_whole
from xorl.ckpt.storage import compact
from xorl.core.parallel import copy_shard_
from xorl.core.runtime import rng_state, set_rng_state
from xorl.train.engine import ModelState


@dataclass(frozen=True)
class TrainerProgress:
    """Optimizer steps taken, and the number of rows of the current epoch that were read, over all ranks."""

    step: int = 0
    epoch: int = 0
    rows: int = 0


GroupScalars: TypeAlias = "Mapping[str, float]"


def group_scalars(optimizer: torch.optim.Optimizer) -> list[GroupScalars]:
    """The numeric entries of each parameter group of an optimizer, except lr, which the trainer sets."""
    return [
        {key: value for key, value in group.items() if isinstance(value, (int, float)) and key != "lr"}
        for group in optimizer.param_groups
    ]


@dataclass(frozen=True)
class ModuleState:
    """The state of a placed module and its optimizer. Saving and loading are collective.

    initial_scalars: the `group_scalars` of the newly created optimizer. Scalars that have changed since are saved,
    because some optimizers count steps or adapt their learning rate in them.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    initial_scalars: Sequence[GroupScalars]
    _checkpointers: dict[Path, Checkpointer] = field(default_factory=dict)

    def save_file(self, path: Path, progress: TrainerProgress) -> Path:
        """Gather everything on rank 0, one tensor at a time, and replace `path` atomically.

        The file is a plain dict: model and optimizer (name -> tensor), step, epoch, rows, rng (a dict per rank) and
        groups (the changed scalars of each parameter group).
        """
        model = self._gather(self.module.state_dict(keep_vars=True))
        optimizer = self._gather(self._optimizer_state().state_dict() if self.optimizer.state else {})
        rng = self._gather_rng()
        with fail_together(f"write {path}"):
            if this_rank() == 0:
                if path.is_dir():
                    raise CheckpointError(
                        f"path: {path} is a folder, but FULL_STATE_DICT writes a file; give a file name"
                    )
                prepare_root(path.parent, "path")
                content = {"model": model, "optimizer": optimizer, "rng": rng, "groups": self._changed_scalars()}
                _write_atomically(path, {**content, **asdict(progress)})
        return path

    def load_file(self, path: Path) -> TrainerProgress:
        """Copy this rank's part from a file written by `save_file`. The file is mapped, so only that part is read.

        Only tensors and numbers are unpickled. Raises CheckpointError if the file is from another model.
        """
        with fail_together(f"load {path}"):
            saved = _read(path)
            model = self.module.state_dict(keep_vars=True)
            self._check_matches(path, model, saved["model"])
            self._init_optimizer_state(saved["optimizer"])
            optimizer = self._optimizer_state().state_dict() if self.optimizer.state else {}
            self._check_matches(path, optimizer, saved["optimizer"])
            for targets, values in ((model, saved["model"]), (optimizer, saved["optimizer"])):
                for name, target in targets.items():
                    copy_shard_(target, values[name])
            if optimizer:
                self._optimizer_state().load_state_dict(optimizer)
            self._set_scalars(saved.get("groups", []))
            if len(saved["rng"]) == num_ranks():
                set_rng_state({name: state.clone() for name, state in saved["rng"][this_rank()].items()}, self.device)
            return TrainerProgress(saved["step"], saved["epoch"], saved["rows"])

    def save_shards(self, path: Path, progress: TrainerProgress) -> Path:
        """Write `{path}/global_step_{step}`, each rank its own shard; a no-op if this step was just loaded from it."""
        scalars = {"epoch": progress.epoch, "rows": progress.rows, "groups": self._changed_scalars()}
        checkpointer = self._checkpointer(path)
        return checkpointer.save(progress.step, self._stateful(), scalars=scalars, rng=rng_state(self.device))

    def load_shards(self, path: Path) -> TrainerProgress:
        """Load a checkpoint of `save_shards`, or the latest one under `path`, written by any number of ranks."""
        checkpointer = self._checkpointer(path.parent if is_complete(path) else path)
        folder = path if is_complete(path) else checkpointer.resolve("auto")
        with fail_together(f"load {folder}"):
            names = read_manifest(folder).tensors
            self._init_optimizer_state(
                [name.removeprefix("optimizer.") for name in names if name.startswith("optimizer.")]
            )
        loaded = checkpointer.load(folder, self._stateful())
        epoch, rows = loaded.scalars.get("epoch"), loaded.scalars.get("rows")
        if not isinstance(epoch, int) or not isinstance(rows, int):
            raise CheckpointError(
                f"{folder} was not written by save_checkpoint of a trainer: epoch and rows are missing"
            )
        self._set_scalars(cast("Sequence[GroupScalars]", loaded.scalars.get("groups", [])))
        if loaded.rng is not None:
            set_rng_state(loaded.rng, self.device)
        return TrainerProgress(loaded.step, epoch, rows)

    def _changed_scalars(self) -> list[dict[str, float | str]]:
        """The scalars of each group that differ from their initial values. Infinity and NaN become text for JSON."""
        return [
            {
                # Convert NumPy floats, which weights_only loading would reject.
                key: str(value) if not math.isfinite(value) else float(value) if isinstance(value, float) else value
                for key, value in current.items()
                if key not in initial or initial[key] != value
            }
            for initial, current in zip(self.initial_scalars, group_scalars(self.optimizer), strict=True)
        ]

    def _set_scalars(self, saved: Sequence[Mapping[str, float | str]]) -> None:
        """Reset every group to its initial scalars, then apply the saved ones."""
        groups = self.optimizer.param_groups
        currents = group_scalars(self.optimizer)
        for group, current, initial, changed in zip(groups, currents, self.initial_scalars, saved, strict=False):
            for key in current.keys() - initial.keys():
                del group[key]
            group.update(initial)
            group.update({key: float(value) if isinstance(value, str) else value for key, value in changed.items()})

    def _checkpointer(self, root: Path) -> Checkpointer:
        """The cached Checkpointer of a folder; it does not save the last saved or loaded step again."""
        return self._checkpointers.setdefault(Path(os.path.abspath(root)), Checkpointer(root, root_option="path"))

    def _stateful(self) -> dict[str, Stateful]:
        # Before the first step the optimizer has no state, and creating it would take a step.
        stateful: dict[str, Stateful] = {"model": ModelState(self.module)}
        return {**stateful, "optimizer": self._optimizer_state()} if self.optimizer.state else stateful

    def _optimizer_state(self) -> OptimizerState:
        return OptimizerState(self.optimizer, self.module.named_parameters())

    def _init_optimizer_state(self, saved_names: Mapping[str, Tensor] | list[str]) -> None:
        """Create the optimizer state to load into; parameters that had no gradient when saving get none."""
        with_state = {name.rpartition(".")[0] for name in saved_names}
        if with_state:
            self._optimizer_state().state_dict()
        for name, parameter in self.module.named_parameters():
            if name not in with_state:
                self.optimizer.state.pop(parameter, None)

    @torch.no_grad()
    def _gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather full tensors to host memory on rank 0; returns {} on the others. Collective."""
        whole: dict[str, Tensor] = {}
        by_identity: dict[int, Tensor] = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(f"model: {name} is a {type(tensor).__name__}, but only tensors can be saved")
            if id(tensor) not in by_identity:  # tied weights are gathered and written once
                # Gather offloaded shards through the device, which has the faster links.
                full = gather_whole(tensor.to(self.device)) if isinstance(tensor, DTensor) else tensor.detach()
                by_identity[id(tensor)] = compact(full) if this_rank() == 0 else full.new_empty(0)
            whole[name] = by_identity[id(tensor)]
        return whole if this_rank() == 0 else {}

    def _gather_rng(self) -> list[dict[str, Tensor]]:
        local = rng_state(self.device)
        if num_ranks() == 1:
            return [local]
        ranks: list[dict[str, Tensor]] = [{} for _ in range(num_ranks())]
        for name, state in local.items():
            states = [torch.empty_like(state, device=self.device) for _ in ranks]
            dist.all_gather(states, state.to(self.device))
            for rank, received in zip(ranks, states, strict=True):
                rank[name] = received.cpu()
        return ranks

    def _check_matches(self, path: Path, expected: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        problems = [f"{name} is missing" for name in expected if name not in saved]
        problems += [f"{name} is only in the file" for name in saved if name not in expected]
        problems += [
            f"{name} is {list(saved[name].shape)} in the file, {list(tensor.shape)} here"
            for name, tensor in expected.items()
            if name in saved and saved[name].shape != tensor.shape
        ]
        if problems:
            more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
            shown = "\n  ".join(problems[:5])
            raise CheckpointError(f"{path} is of another model or optimizer; nothing was loaded\n  {shown}{more}")


def _write_atomically(path: Path, content: Mapping[str, object]) -> None:
    """Replace `path`; a crash leaves either the old or the new file, never a partial one."""
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
        raise CheckpointError(f"path: no checkpoint at {path}") from None
    except (pickle.UnpicklingError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as a file of tensors and numbers: {error}") from error
    expected = {"model": dict, "optimizer": dict, "rng": list, "step": int, "epoch": int, "rows": int}
    if not isinstance(saved, dict) or any(not isinstance(saved.get(key), kind) for key, kind in expected.items()):
        raise CheckpointError(
            f"{path} was not written by save_checkpoint: it must have the entries {', '.join(expected)}"
        )
    return saved
