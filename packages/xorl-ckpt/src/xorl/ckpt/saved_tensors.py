"""Reads the tensors of a checkpoint, unsharded and one at a time, for exports that build no training state."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch

from xorl.ckpt.errors import CheckpointError, require
from xorl.ckpt.files import share_of_files
from xorl.ckpt.layout import read_manifest, require_intact
from xorl.ckpt.metadata import read_metadata
from xorl.ckpt.ranks import fail_together, num_ranks, this_rank
from xorl.ckpt.reader import SameTensor, WeightRecipe, require_shapes, source_shapes
from xorl.ckpt.storage import read_gathered, read_shards

DenseParameter = Callable[[str, Callable[[str], torch.Tensor | None]], torch.Tensor | None]


class SavedParameters:
    """A `WeightSource` over the parameters of the model in a checkpoint, under the names that the recipes split into.

    Parameters are read in full, one at a time; the last one is cached, since several tensors may be parts of it.
    """

    def __init__(
        self,
        folder: Path | str,
        part: str,
        recipes: Mapping[str, WeightRecipe] | None,
        dense: DenseParameter | None = None,
    ) -> None:
        """`part` is the model's name in the checkpoint's state. Without recipes, these are all its tensors, under their
        own names. Raises CheckpointError if there is no such part, or if a parameter is not saved, or (without `dense`)
        is saved in another shape than its recipe's.

        `dense(name, read_saved)` computes a parameter that is saved in another form, such as quantised;
        `read_saved(name)` returns a saved tensor, or None if there is none of that name. If `dense` is None, parameters
        are read as they are saved.
        """
        folder = self._folder = Path(folder)
        self._part = part
        self._manifest = read_manifest(folder)
        if recipes is None:
            saved = self._manifest.tensors
            of_part = [(name.partition(".")[2], name) for name in saved if name.startswith(f"{part}.")]
            known = ", ".join(dict.fromkeys(name.partition(".")[0] for name in saved))
            require("part", part, bool(of_part), f"a part of {folder}, which has {known}")
            recipes = {name: SameTensor(name, saved[full_name].shape) for name, full_name in of_part}
        self._recipes = recipes
        missing = [name for name in recipes if f"{part}.{name}" not in self._manifest.tensors]
        if missing:
            raise CheckpointError(f"{folder} does not contain {', '.join(missing[:5])}")
        if dense is None:
            require_shapes({name: self._manifest.tensors[f"{part}.{name}"].shape for name in recipes}, recipes)
        self._params_of: dict[str, list[str]] = {}
        for name, recipe in recipes.items():
            for source in recipe.sources:
                self._params_of.setdefault(source, []).append(name)
        self._shapes = source_shapes(recipes)
        self._metadata = read_metadata(folder, self._manifest.files) if self._manifest.storage == "dcp" else None
        # Several threads read neighbouring rows; two parameters, as one ends while the next begins.
        self._cached: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._dense = dense

    @classmethod
    def holds(cls, folder: Path, part: str, names: Iterable[str]) -> bool:
        """Whether the checkpoint has all these parameters."""
        saved = read_manifest(folder).tensors
        return all(f"{part}.{name}" in saved for name in names)

    def verify(self) -> None:
        """Collective: check sizes and hashes of the checkpoint's files, split over the ranks.

        Raises CheckpointError, naming the damaged files, on every rank.
        """
        with fail_together(f"read {self._folder}"):
            files = self._manifest.files
            require_intact(self._folder, files, share_of_files(files, this_rank(), num_ranks()))

    def names(self) -> Collection[str]:
        return self._params_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        dtype = self._manifest.tensors[f"{self._part}.{self._params_of[name][0]}"].torch_dtype
        # Quantised weights are saved as bytes, which do not record the dtype of the weight.
        return dtype if dtype.is_floating_point or self._dense is None else torch.bfloat16

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        params = self._params_of[name]
        parts = [self._recipes[param].split(self._parameter(param))[name] for param in params]
        join_dim = self._recipes[params[0]].join_dim
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, join_dim or 0)
        return whole[start:stop] if whole.ndim else whole

    def _parameter(self, name: str) -> torch.Tensor:
        with self._lock:
            if name not in self._cached:
                values = self._read_saved(name) if self._dense is None else self._dense(name, self._read_saved)
                assert values is not None, "__init__ checked that all parameters are saved"
                for oldest in list(self._cached)[:-1]:
                    del self._cached[oldest]
                self._cached[name] = values
            return self._cached[name]

    def _read_saved(self, name: str) -> torch.Tensor | None:
        record = self._manifest.tensors.get(f"{self._part}.{name}")
        if record is None:
            return None
        values = torch.empty(record.shape, dtype=record.torch_dtype)
        wanted = {f"{self._part}.{name}": values}
        if self._metadata is None:
            read_gathered(wanted, self._folder)
        else:
            # In broadcast mode only rank 0 reads from here.
            read_shards(wanted, self._folder, self._metadata, collective=False)
        return values
