"""Snapshots of the adapters of a bank with their optimizer state, and the store of those that are not on the device."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from xorl.lora.arguments import check_integer
from xorl.lora.spec import AdapterSpec

logger = logging.getLogger(__name__)

# The kinds of data per value of an adapter, which are also suffixes of tensor names; the values themselves have none.
# Gradients are only kept while a step is pending.
VALUE, EXP_AVG, EXP_AVG_SQ, GRAD = "", "exp_avg", "exp_avg_sq", "grad"
STATES = (EXP_AVG, EXP_AVG_SQ)
STEP = "step"

NamedShapes = Sequence[tuple[str, tuple[int, ...]]]
"""(name, shape) of the tensors of an adapter, in order."""


@dataclass(frozen=True)
class AdapterSnapshot:
    """A copy of an adapter, in fp32 on the CPU.

    Attributes:
        spec: the adapter's spec.
        step: the number of optimizer steps taken.
        names: `{layer}.lora_A` and `{layer}.lora_B` of each adapted layer, with their shapes.
        values: by kind, all tensors of that kind, flattened and concatenated.
    """

    spec: AdapterSpec
    step: int
    names: NamedShapes
    values: Mapping[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """Views by name: `{layer}.lora_A`, `{layer}.lora_A.exp_avg` and so on, and `step` (0-dim, int64)."""
        sizes = [prod(shape) for _, shape in self.names]
        found = {
            f"{name}.{kind}" if kind else name: part.view(shape)
            for kind, flat in self.values.items()
            for (name, shape), part in zip(self.names, flat.split(sizes), strict=True)
        }
        return {**found, STEP: torch.tensor(self.step)}

    @classmethod
    def of_tensors(cls, spec: AdapterSpec, names: NamedShapes, tensors: Mapping[str, Tensor]) -> AdapterSnapshot:
        """Build a snapshot from a result of `tensors()`. Raises ValueError if names or shapes do not match `names`."""
        shapes = dict(names)
        kinds = [VALUE, *STATES]
        if names and f"{names[0][0]}.{GRAD}" in tensors:
            kinds.append(GRAD)
        wanted = {f"{name}.{kind}" if kind else name: shapes[name] for kind in kinds for name in shapes} | {STEP: ()}
        problems = [f"{name} is missing" for name in wanted.keys() - tensors.keys()]
        problems += [f"{name} is unknown" for name in tensors.keys() - wanted.keys()]
        problems += [
            f"{name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
            for name, shape in wanted.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ]
        if problems:
            raise ValueError(f"the adapter does not fit ({len(problems)} problems): {'; '.join(sorted(problems)[:5])}")
        values = {
            kind: torch.cat([tensors[f"{name}.{kind}" if kind else name].reshape(-1) for name in shapes])
            for kind in kinds
        }
        return cls(spec, int(tensors[STEP]), names, values)

    def write(self, path: Path) -> None:
        """Write a safetensors file, durably and atomically."""
        header = {"spec": json.dumps(asdict(self.spec)), "names": json.dumps([*self.names])}
        content = save({name: tensor.contiguous() for name, tensor in self.tensors().items()}, metadata=header)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> AdapterSnapshot:
        """Read a file that `write` wrote. Raises ValueError, naming the file, if it is not one."""
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if not {"spec", "names"} <= header.keys():
                    raise ValueError(
                        "its header does not describe one; if it is PEFT's file, load its folder into a model with "
                        "xorl.lora.peft.load_adapter"
                    )
                stored = file.keys()  # the file itself is not iterable
                tensors = {name: file.get_tensor(name) for name in stored}
            names = [(str(name), tuple(map(int, shape))) for name, shape in json.loads(header["names"])]
            return cls.of_tensors(_spec(json.loads(header["spec"])), names, tensors)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not an adapter saved by a bank: {error}") from error


class SnapshotStore:
    """Snapshots by name, in host memory. Above a limit, the one stored first moves to disk.

    Args:
        host_limit: how many to keep in host memory; None for all.
        folder: the folder of the files, which no other store may use. A file is removed with its snapshot.
    """

    def __init__(self, *, host_limit: int | None, folder: Path | None) -> None:
        if host_limit is not None:
            check_integer("host_limit", host_limit, at_least=0)
        if host_limit is not None and folder is None:
            raise ValueError(
                f"host_limit is {host_limit}, but there is no folder for the adapters above it: pass folder"
            )
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ValueError(f"folder must be a folder, but {folder} is a file")
        self._host_limit = host_limit
        self._folder = folder
        self._in_memory: OrderedDict[str, AdapterSnapshot] = OrderedDict()
        self._on_disk: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._in_memory or name in self._on_disk

    def put(self, name: str, snapshot: AdapterSnapshot) -> None:
        """Store a snapshot, and move the oldest ones to disk if there are too many."""
        assert name not in self, f"{name} is already stored"
        self._in_memory[name] = snapshot
        while self._host_limit is not None and len(self._in_memory) > self._host_limit:
            oldest = next(iter(self._in_memory))
            path = self._path(oldest)
            path.parent.mkdir(parents=True, exist_ok=True)
            # If writing fails, the snapshot stays in memory and the error is raised.
            self._in_memory[oldest].write(path)
            del self._in_memory[oldest]
            self._on_disk.add(oldest)
            logger.debug("event=adapter_to_disk name=%s path=%s", oldest, path)

    def get(self, name: str) -> AdapterSnapshot:
        """A stored snapshot. Raises RuntimeError if its file is missing or damaged."""
        if name in self._in_memory:
            return self._in_memory[name]
        try:
            return AdapterSnapshot.read(self._path(name))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"adapter {name}: its file on disk cannot be read: {error}") from error

    def drop(self, name: str) -> None:
        """Remove a snapshot, if it is stored."""
        self._in_memory.pop(name, None)
        if name in self._on_disk:
            self._on_disk.remove(name)
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        assert self._folder is not None, "checked in __init__"
        # Hashed, because names may contain any characters.
        return self._folder / f"{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}.safetensors"


def _spec(content: Mapping[str, Any]) -> AdapterSpec:
    """Rebuild a spec from JSON, whose lists stand for tuples."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    return AdapterSpec(**fields)


def bounds_of(names: NamedShapes) -> list[tuple[int, int]]:
    """The (start, stop) of each of these tensors in their flat concatenation."""
    ends = [*accumulate(prod(shape) for _, shape in names)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
