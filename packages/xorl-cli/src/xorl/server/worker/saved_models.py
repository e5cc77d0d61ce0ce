"""Saves models to checkpoints in `{output_dir}/{kind}/{model}/{name}` and loads them, as local training does."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch

from xorl.ckpt import BackgroundWriter, Checkpointer, CheckpointError, CheckpointFailure, Stateful, read_manifest
from xorl.ckpt.layout import JSON, Manifest, TensorRecord, is_complete
from xorl.core.runtime import rng_state, set_rng_state
from xorl.lora.quantized import num_parameters
from xorl.server.collectives import all_or_none
from xorl.server.identifiers import CheckpointKind, CheckpointRef, checkpoint_folder
from xorl.server.operations import Saved
from xorl.server.worker.base import Base
from xorl.server.worker.models import SERVICE, Models, UnknownName
from xorl.train.adapters.files import adapters_writer
from xorl.train.export.folder import AdapterExport, ModelExport
from xorl.train.saves import sum_over_stages

logger = logging.getLogger(__name__)

# The overhead per tensor of a checkpoint, for names, shapes and headers in the tensor's file and in the index.
HEADER_BYTES = 2048
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class AlreadySaved(ValueError):
    """A checkpoint with this name exists."""


class PartiallyLoaded(RuntimeError):
    """A load failed partway: on at least one rank, the model is in neither its old nor the loaded state."""


@dataclass(frozen=True)
class PendingSave:
    """A checkpoint that is being written in the background."""

    ref: CheckpointRef
    folder: Path
    writing: Future[None]

    def when_done(self, answer: Callable[[Saved | Exception], None]) -> None:
        """Call `answer` in the thread that writes, once the checkpoint is complete or has failed."""

        def ended(writing: Future[None]) -> None:
            problem = writing.exception()
            if isinstance(problem, Exception):
                answer(problem)
            else:
                answer(_saved(self.ref, self.folder))

        self.writing.add_done_callback(ended)


class SavedModels:
    """The checkpoints of the service's models; every method is collective."""

    def __init__(self, base: Base, models: Models) -> None:
        self._base = base
        self._models = models
        self._background = BackgroundWriter()

    def before_change(self) -> None:
        """Let the copy of a save in the background end before any model changes; the host does not wait."""
        self._background.before_change()

    def finish(self) -> None:
        """Wait for the save in the background; its `PendingSave` reports how it ended."""
        with suppress(CheckpointError, CheckpointFailure):
            self._background.finish()

    def save(
        self,
        model_id: str,
        ref: CheckpointRef,
        *,
        operation_id: str,
        num_steps: int,
        with_optimizer: bool,
        replaces: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> Saved | PendingSave:
        """Write a checkpoint durably and publish it atomically. If the operation runs again, it returns the same one.

        With save_async, this returns a PendingSave once copying the model has started, unless `replaces`. Raises
        AlreadySaved if the name is taken, unless `replaces`.
        """
        self.finish()
        folder = self._folder(ref)
        described = self._models.describe(model_id)
        if is_complete(folder) and not replaces:
            if _service_info(read_manifest(folder)).get("operation") != operation_id:
                raise AlreadySaved(f"checkpoint {ref.name!r} of model {ref.model_id!r} already exists")
            return _saved(ref, folder)
        info: dict[str, JSON] = {
            "model": self._base.described,
            SERVICE: {
                **described,
                "model_id": model_id,
                "kind": ref.kind,
                "base": self._base.identity,
                "operation": operation_id,
                "user_metadata": dict(user_metadata or {}),
            },
        }
        background = self._background if self._base.local.train.save_async and not replaces else None
        files = self._models.adapter_files(model_id)
        start = time.perf_counter()
        Checkpointer(folder.parent, manager=self._base.local.train.ckpt_manager, root_option="output_dir").save(
            num_steps,
            self._models.state(model_id, with_optimizer=with_optimizer),
            info=info,
            scalars={"step": num_steps},
            rng=rng_state(self._base.device),
            write_extra_files=adapters_writer(files, in_background=background is not None),
            name=ref.name,
            replaces=replaces,
            background=background,
        )
        if background is not None:
            assert background.writing is not None, "it was just started"
            return PendingSave(ref, folder, background.writing)
        logger.info("event=saved model=%s path=%s save_s=%.2f", model_id, folder, time.perf_counter() - start)
        return _saved(ref, folder)

    def estimated_bytes(self, model_id: str) -> dict[CheckpointKind, int]:
        """The estimated size of a checkpoint of a model, by kind. Collective."""
        parts = self._models.state(model_id, with_optimizer=False).values()
        tensors = [TensorRecord.of(tensor) for part in parts for tensor in part.state_dict().values()]
        values = sum(tensor.num_bytes for tensor in tensors)
        # AdamW's two moments in fp32; other optimizers keep less.
        moments = 2 * sum(math.prod(tensor.shape) * torch.float32.itemsize + HEADER_BYTES for tensor in tensors)
        if self._models.adapter_files(model_id) is not None:
            values *= 2  # adapters are also written in PEFT's format
        values += len(tensors) * HEADER_BYTES
        # In bf16, the default dtype of exports.
        exported = torch.bfloat16.itemsize * num_parameters(self._base.model.whole)
        of_all = partial(sum_over_stages, stage=self._base.mesh.pp.rank)
        return {"weights": of_all(values + moments), "sampler_weights": of_all(values), "external_weights": exported}

    def describe(self, ref: CheckpointRef) -> Mapping[str, JSON]:
        """The description of the model in a checkpoint (see `Models.describe`).

        Raises UnknownName if the checkpoint does not exist, and ValueError for an adapter over a different base.
        """
        folder = self._folder(ref)
        if not is_complete(folder):
            raise UnknownName(f"model {ref.model_id!r} has no checkpoint {ref.kind}/{ref.name}")
        saved = _service_info(read_manifest(folder))
        self._check_base(ref, saved)
        return saved

    def load(self, model_id: str, ref: CheckpointRef, *, with_optimizer: bool) -> int:
        """Load a checkpoint into a model; returns the number of steps that its optimizer has taken.

        Raises UnknownName if the checkpoint does not exist and ValueError if it does not fit the model, both without
        any change. Raises PartiallyLoaded on every rank if any rank fails after it began to change the model.
        """
        has_optimizer = ref.kind == "weights"
        with all_or_none("reading the checkpoint's manifest"):
            _check_same(self._models.describe(model_id), self.describe(ref))
            if with_optimizer and not has_optimizer:
                raise ValueError(
                    f"checkpoint {ref.name!r} was saved for sampling and has no optimizer state: load one of weights/"
                )
        with all_or_none("checking the checkpoint"):
            state = self._models.state(model_id, with_optimizer=has_optimizer)
            copy = self._checkpointer(ref).prepare_load(self._folder(ref), state)
        try:
            with all_or_none("making room for the checkpoint"):
                self._models.before_loading(model_id)
            with all_or_none("copying the checkpoint"):
                loaded = copy()
                self._models.after_loading(model_id, keeps_optimizer=with_optimizer)
                if with_optimizer and loaded.rng is not None:
                    set_rng_state(loaded.rng, self._base.device)
        except Exception as problem:
            raise PartiallyLoaded(str(problem)) from problem
        return loaded.step if with_optimizer else 0

    def load_source(self, source: str, ref: CheckpointRef) -> None:
        """Load a checkpoint's weights into memory as `source`, to sample from."""

        def read(state: Mapping[str, Stateful]) -> None:
            self._checkpointer(ref).load(self._folder(ref), state, skip_parts=("optimizer",))

        self._models.load_source(source, self.describe(ref), read, has_optimizer=ref.kind == "weights")

    def export(self, model_id: str, ref: CheckpointRef, dtype: str, *, is_merged: bool) -> Saved:
        """Write the model in Hugging Face's format; an adapter is merged into the base, or else written in PEFT's."""
        folder = self._folder(ref)
        if folder.exists():
            raise AlreadySaved(f"export {ref.name!r} of model {ref.model_id!r} already exists")
        base = self._base
        files = self._models.adapter_files(model_id)
        if files is not None and not is_merged:
            AdapterExport(files, base.architecture.spec).write(folder)
        else:
            recipes = base.architecture.recipes(merge_qkv=base.local.model.merge_qkv)
            ModelExport(base.model, recipes, base.architecture, DTYPES[dtype], files, base.rest).write(folder)
        return _saved(ref, folder)

    def _check_base(self, ref: CheckpointRef, saved: Mapping[str, JSON]) -> None:
        theirs, ours = saved.get("base"), self._base.identity
        # Full weights do not depend on a base.
        if saved.get("lora") is None or not isinstance(theirs, Mapping):
            return
        differing = [
            f"{key} {value!r} (this service: {ours[key]!r})"
            for key, value in cast("Mapping[str, JSON]", theirs).items()
            if value != ours[key]
        ]
        if differing:
            raise ValueError(
                f"checkpoint {ref.name!r} of model {ref.model_id!r} is an adapter over another base: "
                f"{', '.join(differing)}. Start the service with that base or, if it is the same base under another "
                "name, set model_name to the old name (weights is the fingerprint of the values)"
            )

    def _folder(self, ref: CheckpointRef) -> Path:
        return checkpoint_folder(self._base.output_dir, ref)

    def _checkpointer(self, ref: CheckpointRef) -> Checkpointer:
        return Checkpointer(self._folder(ref).parent, root_option="output_dir")


def _service_info(manifest: Manifest) -> Mapping[str, JSON]:
    info = manifest.info.get(SERVICE)
    if not isinstance(info, Mapping):
        raise CheckpointError("the checkpoint was not saved by the service: clients can load only the service's own")
    return cast("Mapping[str, JSON]", info)


def _check_same(model: Mapping[str, JSON], saved: Mapping[str, JSON]) -> None:
    """Raise ValueError unless a checkpoint fits the model; the seeds of adapters may differ."""
    ours, theirs = model.get("lora"), saved.get("lora")
    if (ours is None) != (theirs is None):
        kinds = {True: "full weights", False: "an adapter"}
        raise ValueError(f"the checkpoint holds {kinds[theirs is None]}, but the model is {kinds[ours is None]}")
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        mine, other = (cast("Mapping[str, JSON]", lora["spec"]) for lora in (ours, theirs))
        differing = [key for key in mine if _plain(mine[key]) != _plain(other.get(key))]
        if differing:
            reasons = ", ".join(f"{key} {other.get(key)} (the model: {_plain(mine[key])})" for key in differing)
            raise ValueError(
                f"the checkpoint's adapter differs from the model's: {reasons}. Create a new model from the checkpoint"
            )


def _plain(value: JSON) -> JSON:
    """Tuples as lists, since JSON has no tuples."""
    return list(value) if isinstance(value, tuple) else value


def _saved(ref: CheckpointRef, folder: Path) -> Saved:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return Saved(ref, None, sum(file.stat().st_size for file in files), len(files))
