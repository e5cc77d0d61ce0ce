"""Recipes: how the tensors of a checkpoint make one native parameter, and how they are recovered from it bit for bit.

The protocols repeat what xorl.ckpt offers and expects, since this package does not import it.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

ROWS_AT_ONCE = 8192  # of an embedding: some 100 MB


class WeightSource(Protocol):
    """Where named tensors are read from, on the CPU."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """The tensor, or its rows [start, stop) along dim 0."""
        ...


class WeightRecipe(Protocol):
    """One native parameter of `shape`, made of the checkpoint tensors named in `sources`.

    Attributes:
        join_dim: None if the parameter holds its sources whole. Otherwise several parameters share one source: each
            holds a part of it, and the parts, in the order of the recipes, are joined along this dim.
    """

    @property
    def sources(self) -> tuple[str, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def join_dim(self) -> int | None: ...

    def read(self, source: WeightSource, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the native parameter."""
        ...

    def split(self, tensor: Tensor) -> Mapping[str, Tensor]:
        """The checkpoint tensors (or parts of them) that the whole native parameter holds."""
        ...


class RowTarget(Protocol):
    """Takes the rows of a parameter that keeps them in another form, such as quantised.

    Attributes:
        shape: of the whole parameter as recipes have it.
        rows: the range [first, last) of rows that this process takes; (0, 0) for none.
        device: where rows are taken.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def rows(self) -> tuple[int, int]: ...

    @property
    def device(self) -> torch.device: ...

    def put(self, start: int, rows: Tensor) -> None:
        """Take the next rows, which begin at row `start`. The caller may overwrite `rows` afterwards."""
        ...

    def finish(self) -> None:
        """Called after the last rows. Collective: every process calls it, even one that takes no rows."""
        ...


@dataclass(frozen=True)
class Rows:
    """One checkpoint tensor as it is, or several of them stacked along dim 0.

    Attributes:
        sources: names, in the order of their rows.
        row_counts: rows of each.
        row_shape: shape of one row, () for vectors.
    """

    sources: tuple[str, ...]
    row_counts: tuple[int, ...]
    row_shape: tuple[int, ...]
    join_dim: None = field(default=None, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.row_counts), *self.row_shape)

    def read(self, source: WeightSource, start: int, stop: int) -> Tensor:
        pieces = [
            source.read(name, max(start - first, 0), min(stop - first, num_rows))
            for name, first, num_rows in self._placed()
            if start < first + num_rows and stop > first
        ]
        if not pieces:
            return source.read(self.sources[0], 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        return {name: tensor[first : first + num_rows].contiguous() for name, first, num_rows in self._placed()}

    def _placed(self) -> Iterator[tuple[str, int, int]]:
        """(name, first row, rows) of each source."""
        first = 0
        for name, num_rows in zip(self.sources, self.row_counts, strict=True):
            yield name, first, num_rows
            first += num_rows


@dataclass(frozen=True)
class Part:
    """Output features [first, first + shape[0]) of one checkpoint tensor: rows, or columns of a matrix kept [in, out].

    A slice of columns cannot be read alone from a row-major file, so a matrix is read whole and cut.
    """

    source: str
    first: int
    shape: tuple[int, ...]
    transposed: bool
    shared: bool

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
class LogicalModule:
    """A module as the checkpoint names it. A native module holds the weight of one, or stacks those of several.

    Attributes:
        name: dotted, as in the checkpoint.
        num_rows: how many rows of the native weight are its own (for a vector: entries).
        is_whole: False if other native modules hold other rows of it.
    """

    name: str
    num_rows: int
    is_whole: bool


def logical_modules(recipes: Mapping[str, WeightRecipe]) -> dict[str, tuple[LogicalModule, ...]]:
    """For each native module that has a weight, the checkpoint's modules in it, in the order of their rows."""
    return {
        native.removesuffix(".weight"): tuple(
            LogicalModule(source.removesuffix(".weight"), num_rows, recipe.join_dim is None)
            for source, num_rows in zip(
                recipe.sources, recipe.row_counts if isinstance(recipe, Rows) else recipe.shape[:1], strict=True
            )
        )
        for native, recipe in recipes.items()
        if native.endswith(".weight")
    }


def matrix(source: str, shape: tuple[int, int]) -> Rows:
    """A native matrix that is a checkpoint tensor as it is."""
    return Rows((source,), (shape[0],), (shape[1],))


def vector(source: str, length: int) -> Rows:
    """A native vector that is a checkpoint tensor as it is."""
    return Rows((source,), (length,), ())


@dataclass(frozen=True)
class CheckpointNames:
    """How the names in a checkpoint may differ from those the recipes use.

    Attributes:
        prefix: the prefix of the recipes' names, which checkpoints of a model without its head leave out.
        embedding: name of the token embedding.
        head: name of the head's weight; in a checkpoint of a tied model it repeats the embedding.
        ignored: regular expression, searched in names, of tensors that are not parameters, such as old buffers.
    """

    prefix: str
    embedding: str
    head: str
    ignored: str


class CheckpointView:
    """A `WeightSource` over another, under the names that the recipes use.

    Raises ValueError for a head that is tied and differs from the embedding: one of the two would be lost.
    """

    def __init__(self, source: WeightSource, names: CheckpointNames, *, tied: bool) -> None:
        self._source = source
        ignored = re.compile(names.ignored)
        kept = [name for name in source.names() if not ignored.search(name) and not (tied and name == names.head)]
        bare = not any(name.startswith(names.prefix) for name in kept)
        self._actual: dict[str, str] = {
            names.prefix + name if bare and name != names.head else name: name for name in kept
        }
        if tied and names.head in source.names() and names.embedding in self._actual:
            self._require_same(names.head, self._actual[names.embedding])

    def _require_same(self, head: str, embedding: str) -> None:
        num_rows = self._source.shape(embedding)[0]
        if self._source.shape(head) == self._source.shape(embedding) and all(
            torch.equal(self._source.read(head, row, end).float(), self._source.read(embedding, row, end).float())
            for row in range(0, num_rows, ROWS_AT_ONCE)
            for end in [min(row + ROWS_AT_ONCE, num_rows)]
        ):
            return
        raise ValueError(
            f"{head} differs from {embedding}, and the model's config.json ties them (tie_word_embeddings: "
            "true); train them apart with model.foundation: {tie_word_embeddings: false}, or take the wrong one out"
        )

    def names(self) -> Collection[str]:
        return self._actual.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._actual[name])

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._actual[name])

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        return self._source.read(self._actual[name], start, stop)
