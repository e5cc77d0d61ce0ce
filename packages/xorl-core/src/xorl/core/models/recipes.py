"""Recipes that convert checkpoint tensors to native parameters and back, bit for bit.

The protocols match those of xorl.ckpt, which this package does not import.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from xorl.core.models.stacks import IN_MEMORY, Cut, ExpertNames, cuts_of, is_stack

# Rows of an embedding that are compared at once: about 100 MB.
COMPARED_ROWS = 8192
# How many experts of stacks stay in memory; each may have tens of MB.
KEPT_EXPERTS = 8


class WeightSource(Protocol):
    """A source of named tensors, read on the CPU."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """The tensor, or its rows [start, stop) along dim 0."""
        ...


class WeightRecipe(Protocol):
    """The conversion of the checkpoint tensors named in `sources` to one native parameter of `shape`.

    Attributes:
        join_dim: None if the parameter contains all of its sources. Otherwise it contains a part of one source, and
            other parameters contain the rest; concatenating the parts along this dim, in the order of the recipes,
            gives the source.
        keeps_dtype: whether exports write the sources in the dtype of the parameter, whatever that of the others is.
    """

    @property
    def sources(self) -> tuple[str, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def join_dim(self) -> int | None: ...

    @property
    def keeps_dtype(self) -> bool: ...

    def read(self, source: WeightSource, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the native parameter."""
        ...

    def split(self, tensor: Tensor) -> Mapping[str, Tensor]:
        """The checkpoint tensors, or parts of them, that the whole native parameter contains."""
        ...


class RowTarget(Protocol):
    """Receives the rows of a parameter that is stored in another format, such as a quantised one.

    Attributes:
        shape: of the whole parameter, as in its recipe.
        ranges: the ranges [first, last) of rows that this process needs, in ascending order.
        device: the device on which rows are received.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ranges(self) -> Sequence[tuple[int, int]]: ...

    @property
    def device(self) -> torch.device: ...

    def put(self, start: int, rows: Tensor) -> None:
        """Receive the next rows, from row `start` on, of one range. The caller may overwrite `rows` afterwards."""
        ...

    def finish(self) -> None:
        """Called after the last rows. Collective: every process calls it, even if it needs no rows."""
        ...


@dataclass(frozen=True)
class Rows:
    """One unchanged checkpoint tensor, or several stacked along dim 0.

    Attributes:
        sources: names, in the order of their rows.
        row_counts: rows of each.
        row_shape: shape of one row, () for vectors.
    """

    sources: tuple[str, ...]
    row_counts: tuple[int, ...]
    row_shape: tuple[int, ...]
    keeps_dtype: bool = False
    join_dim: None = field(default=None, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.row_counts), *self.row_shape)

    def read(self, source: WeightSource, start: int, stop: int) -> Tensor:
        pieces = [
            source.read(name, max(start - first, 0), min(stop - first, num_rows))
            for name, first, num_rows in self._row_ranges()
            if start < first + num_rows and stop > first
        ]
        if not pieces:
            return source.read(self.sources[0], 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        return {name: tensor[first : first + num_rows].contiguous() for name, first, num_rows in self._row_ranges()}

    def _row_ranges(self) -> Iterator[tuple[str, int, int]]:
        """(name, first row, rows) of each source."""
        first = 0
        for name, num_rows in zip(self.sources, self.row_counts, strict=True):
            yield name, first, num_rows
            first += num_rows


@dataclass(frozen=True)
class Part:
    """Output features [first, first + shape[0]) of a checkpoint tensor: rows, or columns if stored as [in, out].

    A row-major file cannot be read by columns, so such a matrix is read whole and then sliced.
    """

    source: str
    first: int
    shape: tuple[int, ...]
    transposed: bool
    shared: bool
    keeps_dtype: bool = field(default=False, init=False)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def join_dim(self) -> int | None:
        if not self.shared:
            return None
        return 1 if self.transposed else 0

    def read(self, source: WeightSource, start: int, stop: int) -> Tensor:
        if self.transposed:
            return source.read(self.source)[:, self.first + start : self.first + stop].t().contiguous()
        return source.read(self.source, self.first + start, self.first + stop)

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        return {self.source: (tensor.t() if self.transposed else tensor).contiguous()}


@dataclass(frozen=True)
class Constant:
    """A 0-dimensional checkpoint tensor, which is a row of one value in the model."""

    source: str
    shape: tuple[int, ...] = field(default=(1,), init=False)
    join_dim: None = field(default=None, init=False)
    keeps_dtype: bool = field(default=False, init=False)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def read(self, source: WeightSource, start: int, stop: int) -> Tensor:
        return source.read(self.source).reshape(1)[start:stop]

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        return {self.source: tensor.reshape(())}


@dataclass(frozen=True)
class Flattened:
    """A checkpoint tensor of more than two dims as the matrix [rows, everything else].

    stored_shape: that of the checkpoint tensor.
    """

    source: str
    stored_shape: tuple[int, ...]
    join_dim: None = field(default=None, init=False)
    keeps_dtype: bool = field(default=False, init=False)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored_shape[0], math.prod(self.stored_shape[1:])

    def read(self, source: WeightSource, start: int, stop: int) -> Tensor:
        return source.read(self.source, start, stop).flatten(1)

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        return {self.source: tensor.reshape(self.stored_shape)}


@dataclass(frozen=True)
class LogicalModule:
    """A module under its name in the checkpoint. A native module contains the weight of one, or stacks several.

    Attributes:
        name: dotted, as in the checkpoint.
        num_rows: its number of rows in the native weight (for a vector: entries).
        is_whole: whether the native module contains all of its rows; if not, other native modules contain the rest.
    """

    name: str
    num_rows: int
    is_whole: bool


def stacked_tensors(recipes: Mapping[str, WeightRecipe]) -> dict[str, list[tuple[str, int]]]:
    """For each native parameter, its names in the checkpoint (one or several), each with its number of rows."""
    return {
        native: list(
            zip(recipe.sources, recipe.row_counts if isinstance(recipe, Rows) else recipe.shape[:1], strict=True)
        )
        for native, recipe in recipes.items()
    }


def logical_modules(recipes: Mapping[str, WeightRecipe]) -> dict[str, tuple[LogicalModule, ...]]:
    """For each native module with a weight, the checkpoint modules that it contains, in the order of their rows."""
    return {
        native.removesuffix(".weight"): tuple(
            LogicalModule(source.removesuffix(".weight"), num_rows, recipes[native].join_dim is None)
            for source, num_rows in tensors
        )
        for native, tensors in stacked_tensors(recipes).items()
        if native.endswith(".weight")
    }


def unchanged(source: str, shape: tuple[int, ...]) -> Rows:
    """The recipe of a parameter that is an unchanged checkpoint tensor."""
    return Rows((source,), shape[:1], shape[1:])


_NATIVE_PREFIX = "model."
# What the native names of the image encoder begin with.
ENCODER = "encoder."
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_OF_LAYER = re.compile(r"^(model\.layers\.\d+\.)(.*)$")

_ROUTER = re.compile(r"^(.*)\.mlp\.gate\.weight$")
_CORRECTION = re.compile(r"^(.*)\.mlp\.(?:gate\.)?e_score_correction_bias$")


@dataclass(frozen=True, eq=False)
class CheckpointNames:
    """How the names in a checkpoint may differ from those the recipes use.

    Attributes:
        prefix: the prefix of the recipes' names; checkpoints of a model without its head omit it.
        embedding: name of the token embedding.
        head: name of the head's weight; in a checkpoint of a tied model, a copy of the embedding.
        ignored: regular expression, matched anywhere in a name, for tensors that are not parameters, such as old
            buffers.
        experts: names of experts; None for families without them.
        modules: the names of modules that differ from the decoder's, in layers relative to these.
        stacked: the modules, such as qkv_proj, that stack the same matrices in checkpoints.
        unused: regular expression, matched at the start of names without `prefix`, for tensors that the model does not
            use but other programs do, such as those that predict further tokens; exports copy them. A group in it is
            the number of a layer, and only matches layers after the model's; a group named `block` is the number of a
            block of the image encoder.
        is_part: the model is a part of a composite one: tensors that are neither under `prefix` nor the head belong to
            other parts, and exports copy them.
        encoder: the names of the modules of the image encoder by their native ones, both with {} for the number of
            a block or tap; empty for families without one.
        spellings: other prefixes that names in checkpoints may have, and those of the recipes that they stand for.
            Exports keep the prefixes that were read.
    """

    prefix: str
    embedding: str
    head: str
    ignored: str
    experts: ExpertNames | None = None
    modules: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    stacked: tuple[str, ...] = ()
    unused: str | None = None
    is_part: bool = False
    encoder: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    spellings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def names_encoder(self, module: str) -> bool:
        """Whether checkpoints have this module of the encoder as it is, and not in parts."""
        return _NUMBER.sub("{}", module) in self.encoder

    @property
    def has_unused(self) -> bool:
        """Whether checkpoints may have tensors that the model does not use and exports copy."""
        return self.is_part or self.unused is not None

    def in_checkpoint(self, module: str) -> str:
        """The name of a module in checkpoints, from its name as of a decoder whose layers are `model.layers.N`."""
        if module.startswith(ENCODER):
            numbers = _NUMBER.findall(module)
            return self.encoder[_NUMBER.sub("{}", module)].format(*numbers)
        name = self._renamed(module)
        return self.prefix + name.removeprefix(_NATIVE_PREFIX) if name.startswith(_NATIVE_PREFIX) else name

    def _renamed(self, module: str) -> str:
        if (found := _OF_LAYER.match(module)) is None:
            return self.modules.get(module, module)
        if self.experts is not None and found[2] == "mlp.gate":
            return found[1] + self.experts.router
        return found[1] + self.modules.get(found[2], found[2])

    def is_unused(self, name: str, num_layers: int, num_blocks: int) -> bool:
        """Whether the tensor with this name, spelled as in recipes, is one that exports copy."""
        if self.is_part and not name.startswith((self.prefix, self.head.removesuffix("weight"))):
            return True
        found = None if self.unused is None else re.match(self.unused, name.removeprefix(self.prefix))
        if found is None:
            return False
        block = found.groupdict().get("block")
        if block is not None:
            return int(block) >= num_blocks
        return all(group is None or int(group) >= num_layers for group in found.groups())


class CheckpointView:
    """A view of a `WeightSource` under the recipes' names, in which each expert has tensors of its own.

    Raises ValueError if a tied head differs from the embedding, because one of the two would be lost, or if the
    checkpoint contains an expert twice.

    Attributes:
        unused: the tensors that the model does not use and exports copy, as `source` names them.
        experts: the names of experts, with the stacks that `source` has, even if other files of the family have none.
    """

    def __init__(
        self, source: WeightSource, names: CheckpointNames, *, tied: bool, num_layers: int, num_blocks: int = 0
    ) -> None:
        self._source = source
        used = {
            next((spelling for spelling in names.spellings if name.startswith(spelling)), None)
            for name in source.names()
        }
        self._spellings = {spelling: prefix for spelling, prefix in names.spellings.items() if spelling in used}
        spelled = {self._in_recipes(name): name for name in source.names()}
        unused = {name: actual for name, actual in spelled.items() if names.is_unused(name, num_layers, num_blocks)}
        self.unused = tuple(unused.values())
        ignored = re.compile(names.ignored)
        kept = [
            name
            for name in spelled
            if name not in unused and not ignored.search(name) and not (tied and name == names.head)
        ]
        lacks_prefix = not any(name.startswith(names.prefix) for name in kept)
        self._actual: dict[str, str] = {
            names.prefix + name if lacks_prefix and name != names.head else name: spelled[name] for name in kept
        }
        self.experts = names.experts
        self._cuts = {} if names.experts is None else self._cut_stacks(names.experts)
        if names.experts is not None and self._cuts and names.experts.is_in_memory:
            self.experts = replace(names.experts, stack=IN_MEMORY)

        def read_expert(stack: str, expert: int) -> Tensor:
            return source.read(stack, expert, expert + 1)[0]

        # The last ones are kept, because the tensors of an expert are read one after the other.
        self._expert = lru_cache(KEPT_EXPERTS)(read_expert)
        if tied and names.head in spelled and names.embedding in self._actual:
            self._require_same(spelled[names.head], self._actual[names.embedding])

    def in_source(self, name: str) -> str:
        """A name as in recipes with the prefix that the source has for it."""
        return _with_prefix(name, {prefix: spelling for spelling, prefix in self._spellings.items()})

    def _in_recipes(self, name: str) -> str:
        return _with_prefix(name, self._spellings)

    def _cut_stacks(self, names: ExpertNames) -> dict[str, tuple[str, Cut]]:
        """For each tensor of an expert in a stack: the stack, and what to cut out of it.

        Removes the stacks from the view, and renames what belongs to routers from the names of transformers 5.
        """
        cuts: dict[str, tuple[str, Cut]] = {}
        for name in list(self._actual):
            for pattern, own in ((_ROUTER, f"{names.router}.weight"), (_CORRECTION, names.correction)):
                if (found := pattern.match(name)) is not None:
                    self._actual[f"{found[1]}.{own}"] = self._actual.pop(name)
            if not is_stack(name, names):
                continue
            actual = self._actual.pop(name)
            for single, cut in cuts_of(name, self._source.shape(actual), names).items():
                if single in self._actual:
                    raise ValueError(
                        f"the checkpoint contains {single} twice: separately, and in {actual}; remove one of them"
                    )
                cuts[single] = actual, cut
        return cuts

    def _require_same(self, head: str, embedding: str) -> None:
        num_rows = self._source.shape(embedding)[0]
        if self._source.shape(head) == self._source.shape(embedding) and all(
            torch.equal(self._source.read(head, row, end).float(), self._source.read(embedding, row, end).float())
            for row in range(0, num_rows, COMPARED_ROWS)
            for end in [min(row + COMPARED_ROWS, num_rows)]
        ):
            return
        raise ValueError(
            f"{head} differs from {embedding}, but the model's config.json ties them (tie_word_embeddings: "
            "true); untie them with tie_word_embeddings=False, or remove the wrong one"
        )

    def names(self) -> Collection[str]:
        return [*self._actual, *self._cuts]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._cuts[name][1].shape if name in self._cuts else self._source.shape(self._actual[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._cuts[name][0] if name in self._cuts else self._actual[name])

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        if name not in self._cuts:
            return self._source.read(self._actual[name], start, stop)
        stack, cut = self._cuts[name]
        return cut.of(self._expert(stack, cut.expert))[start:stop].contiguous()


def _with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """The name with its prefix replaced, if it is one of the keys of `prefixes`."""
    for prefix, other in prefixes.items():
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name
