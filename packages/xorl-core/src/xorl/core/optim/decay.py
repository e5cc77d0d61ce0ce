"""Selects, by name, the tensors and the rows of stacked parameters that have no weight decay."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from xorl.core.nn.share import Share, pieces
from xorl.core.shards import Box, local
from xorl.kernels.optim import Noise

# For a parameter that stacks tensors of a checkpoint along its rows: their names and their numbers of rows.
Stacked = Mapping[str, Sequence[tuple[str, int]]]


class RowDecay(NamedTuple):
    """The weight decay of rows [start, stop) of a whole parameter."""

    start: int
    stop: int
    decay: float


class LocalRows(NamedTuple):
    """Rows of this rank's shard of a parameter that are adjacent in the whole parameter, too.

    Attributes:
        rows: of the shard.
        first: the row-major index of their first element in the whole parameter.
        columns: the number of elements of a row of the shard, and of the whole parameter.
        decay: their weight decay; None: that of their group.
    """

    rows: range
    first: int
    columns: tuple[int, int]
    decay: float | None

    def noise(self, key: int, step: Tensor, row: int | None = None) -> Noise:
        """The random bits of these rows, or of those from `row` of the shard on."""
        width, stride = self.columns
        first = self.first if row is None else self.first + (row - self.rows.start) * stride
        return Noise(key, first, step) if width == stride else Noise(key, first, step, width, stride)


def tensor_names(paths: Iterable[str], stacked: Stacked) -> list[str]:
    """The names of parameters; a stacked parameter's name is replaced by the names of its tensors."""
    return [name for path in paths for name in ([part for part, _ in stacked[path]] if path in stacked else [path])]


def undecayed(names: Collection[str], no_decay_modules: Sequence[str], no_decay_params: Sequence[str]) -> set[str]:
    """The tensors among `names` without weight decay.

    `no_decay_modules` are compared with the paths of their modules, `no_decay_params` with the last parts of their
    names. An entry selects the names in which some part ends with the entry: `norm` selects `input_layernorm`, and
    `gate` selects a router named `gate`, but not `gate_proj`. If no part of any name ends with an entry, the entry
    selects every name that contains it.
    """
    modules = {name: name.rpartition(".")[0] for name in names}
    leaves = {name: name.rpartition(".")[2] for name in names}
    return {
        name
        for entries, texts in ((no_decay_modules, modules), (no_decay_params, leaves))
        for entry in entries
        for name in _selected(entry, texts)
    }


def _selected(entry: str, texts: Mapping[str, str]) -> list[str]:
    """The keys of the texts that an entry selects."""
    at_end = re.compile(re.escape(entry) + r"(?=\.|$)")
    return [name for name, text in texts.items() if at_end.search(text)] or [
        name for name, text in texts.items() if entry in text
    ]


def row_decays(parts: Sequence[tuple[str, int]], free: Collection[str], decay: float) -> tuple[RowDecay, ...]:
    """The decay of the rows of a whole parameter that stacks tensors: their names and numbers of rows.

    `free` are the names of tensors without decay. Returns one entry if all rows have the same decay.
    """
    found: list[RowDecay] = []
    start = 0
    for name, count in parts:
        own = 0.0 if name in free else decay
        if found and found[-1].decay == own:
            found[-1] = found[-1]._replace(stop=start + count)
        else:
            found.append(RowDecay(start, start + count, own))
        start += count
    return tuple(found)


def local_rows(parameter: Tensor, share: Share | None, decays: Sequence[RowDecay]) -> list[LocalRows]:
    """This rank's rows of a parameter, of which the module holds `share`, in order. `decays`: empty for one decay."""
    whole = tuple(parameter.shape) if share is None else share.whole(parameter.shape)
    columns = math.prod(parameter.shape[1:]), math.prod(whole[1:])
    found: list[LocalRows] = []
    taken = 0
    for box, values in pieces(parameter, share):
        start = box.offset[0] if box.offset else 0
        num_rows = _num_rows(values)
        for row in decays or (RowDecay(start, start + num_rows, 0.0),):
            begin, end = max(row.start, start), min(row.stop, start + num_rows)
            if begin < end:
                rows = range(taken + begin - start, taken + end - start)
                first = Box((begin, *box.offset[1:])[: len(whole)], box.shape).first_of(whole)
                found.append(LocalRows(rows, first, columns, row.decay if decays else None))
        taken += num_rows
    return found


def note_local_rows_(groups: Iterable[dict[str, Any]]) -> None:
    """Give each of an optimizer's groups the `local_rows` of its parameters.

    They follow from its `shares`, one for each parameter, and `row_decays`, which it may lack.
    """
    for group in groups:
        shares = group.get("shares", [None] * len(group["params"]))
        group["local_rows"] = [
            local_rows(parameter, share, group.get("row_decays", ()))
            for parameter, share in zip(group["params"], shares, strict=True)
        ]


def by_decay(group: Mapping[str, Any], indices: Iterable[int]) -> dict[float, list[tuple[int, LocalRows]]]:
    """This rank's rows of the parameters of a group that `indices` select, each with its index, by weight decay."""
    found: dict[float, list[tuple[int, LocalRows]]] = {}
    for index in indices:
        for rows in group["local_rows"][index]:
            found.setdefault(group["weight_decay"] if rows.decay is None else rows.decay, []).append((index, rows))
    return found


def rows_of(tensor: Tensor, rows: range) -> Tensor:
    """These rows of this rank's shard of a tensor; a 0-dimensional tensor has one row."""
    shard = local(tensor)
    return shard if len(rows) == _num_rows(shard) else shard[rows.start : rows.stop]


def _num_rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def require_no_decay_matches(
    names: Iterable[str], no_decay_modules: Sequence[str], no_decay_params: Sequence[str]
) -> None:
    """Raise ValueError for an entry that selects none of the tensors `names`; see `undecayed`."""
    known = list(names)
    if unmatched := unmatched_no_decay(known, no_decay_modules, no_decay_params):
        option, parts = next(iter(unmatched.items()))
        paths = [name.split(".") for name in known]
        ends = {path[-1] if option == "no_decay_params" else path[-2] for path in paths if len(path) > 1}
        raise ValueError(f"{option}: no parameter matches {', '.join(parts)}; the model has {', '.join(sorted(ends))}")


def unmatched_no_decay(
    names: Iterable[str], no_decay_modules: Sequence[str], no_decay_params: Sequence[str]
) -> dict[str, list[str]]:
    """The entries that select none of the tensors `names`, by option; options without such entries are left out.

    Raises ValueError for options that are not lists of strings.
    """
    known, unmatched = list(names), {}
    for option, given in (("no_decay_modules", no_decay_modules), ("no_decay_params", no_decay_params)):
        if isinstance(given, str):
            raise ValueError(f"{option}: must be a list of strings, got {given!r}; write [{given!r}]")
        if not isinstance(given, list | tuple) or not all(isinstance(part, str) for part in given):
            raise ValueError(f"{option}: must be a list of strings, got {given!r}")
        alone = {"no_decay_modules": (), "no_decay_params": ()}
        unmatched[option] = sorted(entry for entry in given if not undecayed(known, **{**alone, option: (entry,)}))
    return {option: parts for option, parts in unmatched.items() if parts}
