"""Selects, by name, the tensors and the rows of stacked parameters that have no weight decay."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from xorl.core.shards import flat_offset, local

# For a parameter that stacks tensors of a checkpoint along its rows: their names and their numbers of rows.
Stacked = Mapping[str, Sequence[tuple[str, int]]]


class RowDecay(NamedTuple):
    """The weight decay of rows [start, stop) of a parameter."""

    start: int
    stop: int
    decay: float


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


def row_decays(
    parts: Sequence[tuple[str, int]], free: Collection[str], decay: float, *, first: int, num_rows: int
) -> tuple[RowDecay, ...]:
    """The decay of a stacked parameter's rows, of which this rank has `num_rows` starting at `first`.

    `free` are the names of tensors without decay. Rows are counted from `first`. Returns one entry if all rows have the
    same decay.
    """
    found: list[RowDecay] = []
    start = -first
    for name, count in parts:
        begin, end = max(start, 0), min(start + count, num_rows)
        start += count
        if begin >= end:
            continue
        own = 0.0 if name in free else decay
        if found and found[-1].decay == own:
            found[-1] = found[-1]._replace(stop=end)
        else:
            found.append(RowDecay(begin, end, own))
    return tuple(found)


def local_ranges(group: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[float, list[tuple[int, range]]]:
    """For each weight decay, this rank's rows that have it, as (index of the parameter, rows of its shard).

    `group` is an optimizer's parameter group; `parameters` are some of its parameters.
    """
    if not group.get("row_decays"):
        return {group["weight_decay"]: [(index, range(_num_rows(local(one)))) for index, one in enumerate(parameters)]}
    ranges: dict[float, list[tuple[int, range]]] = {}
    for index, parameter in enumerate(parameters):
        first = flat_offset(parameter) // max(1, math.prod(parameter.shape[1:]))
        num_rows = _num_rows(local(parameter))
        for start, stop, decay in group["row_decays"]:
            if rows := range(max(start - first, 0), min(stop - first, num_rows)):
                ranges.setdefault(decay, []).append((index, rows))
    return ranges


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
