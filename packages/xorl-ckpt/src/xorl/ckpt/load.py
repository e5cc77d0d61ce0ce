"""Loads model weights from a source into existing parameters, whole or sharded, in place.

    all_ranks   each rank reads only the rows of its own shards
    broadcast   rank 0 reads everything once and sends it; the others keep their own rows

Both modes process ranges of rows in buckets of bounded size, so no rank holds the whole model in addition to its
shards. Rows go to RowTargets: parameters that store them, or other objects that transform them.
"""

import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

import torch
import torch.distributed as dist
import xxhash

from xorl.ckpt.errors import CheckpointError, is_count, require
from xorl.ckpt.ranks import (
    broadcast_text,
    collective_device,
    fail_together,
    num_ranks,
    raise_together,
    require_same,
    this_rank,
)
from xorl.ckpt.reader import (
    WEIGHT_DTYPES,
    SameScalar,
    SameTensor,
    WeightRecipe,
    WeightSource,
    require_recipes,
    source_shapes,
)
from xorl.ckpt.regions import Piece, Stored, dtype_name, local_boxes
from xorl.ckpt.transfer import stream_buckets

logger = logging.getLogger(__name__)

LoadMode: TypeAlias = Literal["broadcast", "all_ranks"]

# Large enough for broadcasts and copies at full speed: a file of 1.6 GB in the page cache is loaded onto two H200 at 13
# GB/s with buckets of 10 MiB, and at 11 GB/s with 128 MiB. Small enough that malloc uses the memory of rows again; from
# 32 MiB on, glibc returns it to the system, and new pages cost as much as all copies together.
BUCKET_BYTES = 8 << 20
PROGRESS_S = 5.0
# Tensors in a bucket start at multiples of this many bytes, after a first byte that is 0 if rank 0 could read them.
_ALIGNMENT = 64


class RowTarget(Protocol):
    """Receives the rows of one parameter, in order.

    `shape` is the global shape of the parameter, as in its recipe; `ranges` are the ranges [first, last) of rows that
    this rank needs, in ascending order; `device` is where the rows are delivered. After the last rows every rank calls
    `finish`, in the order of the parameters, so `finish` may be collective.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ranges(self) -> Sequence[tuple[int, int]]: ...

    @property
    def device(self) -> torch.device: ...

    def put(self, start: int, rows: torch.Tensor) -> None:
        """Receive the next rows, which begin at row `start` and lie in one range, in the dtype of the source.

        The caller reuses the tensor's memory afterwards.
        """
        ...

    def finish(self) -> None: ...


class _ParameterTarget:
    """The RowTarget of a parameter: stores the rows, cast to its dtype."""

    def __init__(self, parameter: Stored) -> None:
        self._boxes = [(box, values) for box, values in local_boxes(parameter) if 0 not in box.sizes]
        self.shape = tuple(parameter.shape)
        self.ranges = [box.rows for box, _ in self._boxes]
        self.device = parameter.device

    def put(self, start: int, rows: torch.Tensor) -> None:
        box, values = next((box, values) for box, values in self._boxes if box.rows[0] <= start < box.rows[1])
        first = start - box.rows[0]
        # Casts on the device, where it is fast; the rows arrive in the file's dtype.
        values[first : first + len(rows)].copy_(box.cut_other_dims(rows))

    def finish(self) -> None:
        """Does nothing: `put` has stored the rows."""


@dataclass(frozen=True)
class LoadReport:
    """The result of a load. `bytes_read` counts this rank's reads; `ignored` names tensors that `ignore` matched."""

    num_tensors: int
    bytes_read: int
    seconds: float
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class _Chunk:
    """Rows [start, stop) of one parameter, in the dtype of the source, at `offset` in a bucket."""

    name: str
    start: int
    stop: int
    dtype: torch.dtype
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class _Bucket:
    chunks: tuple[_Chunk, ...]
    num_bytes: int


@torch.no_grad()
def load_weights(
    params: Mapping[str, Stored | RowTarget],
    recipes: Mapping[str, WeightRecipe] | None,
    source: WeightSource | None,
    *,
    mode: LoadMode = "all_ranks",
    ignore: Callable[[str], bool] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> LoadReport:
    """Collective: fill every parameter by its recipe, cast to the parameter's dtype, and pass RowTargets their rows.

    Without recipes, the source holds the parameters under their own names, and they may be 0-dim. Recipes must be the
    same on every rank and may include parameters that this rank does not have. In broadcast mode only rank 0 needs a
    `source`. Raises CheckpointError on every rank, before anything is written, if an argument is invalid, if names or
    shapes differ, if no recipe uses a tensor of the source and `ignore(name)` is false, or if a floating-point
    parameter would be read from integers or fp8 values, or one of integers or flags from floating-point values.
    """
    started = time.monotonic()
    broadcasting = mode == "broadcast" and num_ranks() > 1
    if this_rank() != 0 and broadcasting:
        source = None
    dtypes: dict[str, torch.dtype] = {}
    ignored: tuple[str, ...] = ()
    with fail_together("load the weights"):
        if mode not in get_args(LoadMode):
            raise CheckpointError(f"mode: {mode!r} is unknown; use one of {', '.join(get_args(LoadMode))}")
        require("params", params, isinstance(params, Mapping), "a mapping of names to parameters")
        for name, param in params.items():
            is_target = isinstance(param, (torch.Tensor, Piece)) or hasattr(param, "put")
            require(f"params: {name}", param, is_target, "a tensor, a Piece or a RowTarget")
        is_source = source is None or all(hasattr(source, name) for name in ("names", "shape", "dtype", "read"))
        require("source", source, is_source, "a WeightSource, such as SafetensorsSource(folder)")
        require("ignore", ignore, ignore is None or callable(ignore), "a function of a tensor's name, such as a lambda")
        require("bucket_bytes", bucket_bytes, is_count(bucket_bytes, 1), "an int of at least 1")
        if recipes is None:
            params, recipes = _by_their_names(params)
        require_recipes(recipes)
        _check_parameters(params, recipes)
        if source is not None:
            wanted = recipes if broadcasting else {name: recipes[name] for name in params}
            ignored = _check_source(wanted, recipes, source, ignore)
            _check_dtypes(params, recipes, source)
            dtypes = {name: _stored_dtype(recipe, source) for name, recipe in wanted.items()}
        elif this_rank() == 0 or not broadcasting:
            raise CheckpointError(f"source: None with mode={mode!r}: rank {this_rank()} was given no weights to read")
    targets = {
        name: _ParameterTarget(param) if isinstance(param, (torch.Tensor, Piece)) else param
        for name, param in params.items()
    }
    if broadcasting:
        buckets = _broadcast(targets, recipes, source, dtypes, bucket_bytes)
    else:
        assert source is not None
        ranges = {name: target.ranges for name, target in targets.items()}
        buckets = _pack(ranges, recipes, dtypes, bucket_bytes)
        with fail_together("load the weights"):
            unfinished = _UnfinishedTargets(targets)
            try:
                progress = _Progress(buckets)
                for bucket, data in zip(buckets, _read(buckets, recipes, source, _device_of(targets)), strict=True):
                    _put_local_rows(bucket, data, targets, recipes, unfinished)
                    progress.add(bucket)
            finally:
                # Even if this rank failed to read: `finish` may be collective, and the other ranks wait in it.
                unfinished.finish_before(None)
    num_bytes = 0 if source is None else sum(chunk.num_bytes for bucket in buckets for chunk in bucket.chunks)
    report = LoadReport(len(params), num_bytes, time.monotonic() - started, ignored)
    logger.debug(
        "event=weights_loaded mode=%s tensors=%d bytes_read=%d gib_per_s=%.2f",
        mode,
        report.num_tensors,
        report.bytes_read,
        report.bytes_read / 2**30 / max(report.seconds, 1e-9),
    )
    return report


def _by_their_names(
    params: Mapping[str, Stored | RowTarget],
) -> tuple[dict[str, Stored | RowTarget], dict[str, WeightRecipe]]:
    """The parameters, 0-dim ones as views of one row, and recipes that read them under their own names."""
    rows = {
        name: param.detach().view(1) if isinstance(param, torch.Tensor) and param.ndim == 0 else param
        for name, param in params.items()
    }
    recipes: dict[str, WeightRecipe] = {
        name: SameTensor(name, tuple(param.shape)) if tuple(params[name].shape) else SameScalar(name)
        for name, param in rows.items()
    }
    return rows, recipes


def _check_parameters(params: Mapping[str, Stored | RowTarget], recipes: Mapping[str, WeightRecipe]) -> None:
    problems: list[str] = []
    for name, param in params.items():
        if name not in recipes:
            problems.append(f"{name}: no recipe builds this parameter")
        elif tuple(param.shape) != tuple(recipes[name].shape):
            problems.append(
                f"{name}: its shape is {list(param.shape)}, but its recipe builds {list(recipes[name].shape)}"
            )
        elif isinstance(param, (torch.Tensor, Piece)) and (param.device.type == "meta" or param.ndim == 0):
            problems.append(f"{name}: it is on the meta device or 0-dimensional; parameters need storage and rows")
    if problems:
        raise CheckpointError("the model's parameters cannot be loaded\n  " + _list_first(problems, "\n  "))


def _check_source(
    wanted: Mapping[str, WeightRecipe],
    recipes: Mapping[str, WeightRecipe],
    source: WeightSource,
    ignore: Callable[[str], bool] | None,
) -> tuple[str, ...]:
    """Check names and shapes of the source against the recipes; returns the ignored names."""
    present = set(source.names())
    needed = dict.fromkeys(name for recipe in wanted.values() for name in recipe.sources)
    missing = [name for name in needed if name not in present]
    misshapen = [
        f"{name}: {list(source.shape(name))} in the file, {list(shape)} in the model"
        for name, shape in source_shapes(recipes).items()
        if name in needed and name in present and tuple(source.shape(name)) != shape
    ]
    used = {name for recipe in recipes.values() for name in recipe.sources}
    ignored = tuple(sorted(name for name in present - used if ignore is not None and ignore(name)))
    unused = sorted(present - used - set(ignored))
    if not (missing or misshapen or unused):
        return ignored
    lines = ["the weights do not belong to the configured model; nothing was loaded"]
    for title, names in (
        ("missing", missing),
        ("with a different shape", misshapen),
        ("that no parameter uses", unused),
    ):
        if names:
            lines.append(f"tensors {title} ({len(names)}): {_list_first(names, ', ')}")
    lines.append(f"the weights contain {len(present)} tensors: {_list_first(sorted(present), ', ')}")
    raise CheckpointError("\n  ".join(lines))


def _stored_dtype(recipe: WeightRecipe, source: WeightSource) -> torch.dtype:
    return functools.reduce(torch.promote_types, {source.dtype(name) for name in recipe.sources})


def _check_dtypes(
    params: Mapping[str, Stored | RowTarget], recipes: Mapping[str, WeightRecipe], source: WeightSource
) -> None:
    """Raise if values would be lost, or if parameters would be read from quantised codes of unknown scale."""
    for name, param in params.items():
        if isinstance(param, (torch.Tensor, Piece)) and not (param.dtype.is_floating_point or param.dtype.is_complex):
            found = _stored_dtype(recipes[name], source)
            if found.is_floating_point:
                to = dtype_name(param.dtype)
                raise CheckpointError(
                    f"params: {name} is {to}, but the weights are {dtype_name(found)}; nothing was loaded"
                )
    plain = [
        name
        for name, param in params.items()
        if isinstance(param, (torch.Tensor, Piece)) and param.dtype.is_floating_point
    ]
    stored = {name: source.dtype(name) for parameter in plain for name in recipes[parameter].sources}
    codes = [f"{name} ({dtype_name(dtype)})" for name, dtype in stored.items() if dtype not in WEIGHT_DTYPES]
    if codes:
        raise CheckpointError(
            "the weights seem to be quantised, but config.json has no quantization_config; nothing was loaded. Use the "
            f"unquantised model. Tensors of integers or fp8 ({len(codes)}): {_list_first(codes, ', ')}"
        )


def _pack(
    ranges: Mapping[str, Sequence[tuple[int, int]]],
    recipes: Mapping[str, WeightRecipe],
    dtypes: Mapping[str, torch.dtype],
    bucket_bytes: int,
) -> list[_Bucket]:
    """Cut ranges of rows into chunks, and pack the chunks into buckets, in order."""
    buckets: list[_Bucket] = []
    chunks: list[_Chunk] = []
    end = _ALIGNMENT
    for name, of_parameter in ranges.items():
        dtype = dtypes[name]
        row_bytes = math.prod(recipes[name].shape[1:]) * dtype.itemsize
        rows_per_chunk = max(1, bucket_bytes // max(row_bytes, 1))
        starts = [(start, last) for first, last in of_parameter for start in range(first, last, rows_per_chunk)]
        for start, last in starts:
            stop = min(start + rows_per_chunk, last)
            num_bytes = (stop - start) * row_bytes
            if chunks and end + num_bytes > bucket_bytes + _ALIGNMENT:
                buckets.append(_Bucket(tuple(chunks), end))
                chunks, end = [], _ALIGNMENT
            chunks.append(_Chunk(name, start, stop, dtype, end, num_bytes))
            end = -(-(end + num_bytes) // _ALIGNMENT) * _ALIGNMENT
    return [*buckets, _Bucket(tuple(chunks), end)] if chunks else buckets


def _read(
    buckets: Sequence[_Bucket], recipes: Mapping[str, WeightRecipe], source: WeightSource, device: torch.device
) -> Iterator[torch.Tensor]:
    def fill(index: int, data: torch.Tensor) -> None:
        data[0] = 0
        for chunk in buckets[index].chunks:
            rows = recipes[chunk.name].read(source, chunk.start, chunk.stop)
            target = _rows(chunk, data, recipes)
            if rows.shape != target.shape:
                raise CheckpointError(
                    f"{chunk.name}: its recipe read rows of shape {list(rows.shape)}, expected {list(target.shape)}"
                )
            target.copy_(rows)

    return stream_buckets([bucket.num_bytes for bucket in buckets], fill, device)


def _broadcast(
    targets: Mapping[str, RowTarget],
    recipes: Mapping[str, WeightRecipe],
    source: WeightSource | None,
    dtypes: Mapping[str, torch.dtype],
    bucket_bytes: int,
) -> list[_Bucket]:
    """Collective: rank 0 reads every bucket from `source` and broadcasts it; `source` is None on the other ranks."""
    listed = repr([(name, tuple(recipe.shape)) for name, recipe in recipes.items()])
    require_same(
        xxhash.xxh3_128(listed.encode()).hexdigest(),
        "the ranks have different recipes; in broadcast mode every rank needs the recipes of the whole model",
    )
    stored = broadcast_text(" ".join(dtype_name(dtypes[name]) for name in dtypes)).split()
    dtypes = {name: getattr(torch, dtype) for name, dtype in zip(recipes, stored, strict=True)}
    buckets = _pack({name: [(0, recipe.shape[0])] for name, recipe in recipes.items()}, recipes, dtypes, bucket_bytes)
    device = collective_device(_device_of(targets))
    read_buckets = None if source is None else _read(buckets, recipes, source, device)
    received = torch.empty(
        0 if read_buckets else max(bucket.num_bytes for bucket in buckets), dtype=torch.uint8, device=device
    )
    error: Exception | None = None
    unfinished = _UnfinishedTargets({name: targets[name] for name in recipes if name in targets})
    progress = _Progress(buckets)
    for bucket in buckets:
        try:
            data = received[: bucket.num_bytes] if read_buckets is None else next(read_buckets)
        except Exception as caught:  # noqa: BLE001  (the others wait for this bucket; they get one marked as failed)
            error, data = caught, torch.ones(bucket.num_bytes, dtype=torch.uint8, device=device)
        dist.broadcast(data, src=0)
        if int(data[0].item()) != 0:
            break
        _put_local_rows(bucket, data, targets, recipes, unfinished)
        progress.add(bucket)
    else:
        unfinished.finish_before(None)
    raise_together("load the weights", error)
    return buckets


class _Progress:
    """Logs how much of the weights is loaded, how fast, and how long the rest takes, every few seconds."""

    def __init__(self, buckets: Sequence[_Bucket]) -> None:
        self._total = sum(bucket.num_bytes for bucket in buckets)
        self._done = 0
        self._start = self._logged = time.monotonic()

    def add(self, bucket: _Bucket) -> None:
        self._done += bucket.num_bytes
        now = time.monotonic()
        if now - self._logged < PROGRESS_S:
            return
        self._logged = now
        rate = self._done / (now - self._start)
        logger.info(
            "event=weights_loading gib=%.2f of=%.2f gib_per_s=%.2f left_s=%.0f",
            self._done / 2**30,
            self._total / 2**30,
            rate / 2**30,
            (self._total - self._done) / rate,
        )


class _UnfinishedTargets:
    """The targets that still wait for rows, in the order of the parameters."""

    def __init__(self, targets: Mapping[str, RowTarget]) -> None:
        self._targets = list(targets.items())

    def finish_before(self, name: str | None) -> None:
        """Finish the targets before `name`, whose rows come next; None finishes all."""
        while self._targets and self._targets[0][0] != name:
            self._targets.pop(0)[1].finish()


def _put_local_rows(
    bucket: _Bucket,
    data: torch.Tensor,
    targets: Mapping[str, RowTarget],
    recipes: Mapping[str, WeightRecipe],
    unfinished: _UnfinishedTargets,
) -> None:
    for chunk in bucket.chunks:
        if chunk.name not in targets:
            continue
        unfinished.finish_before(chunk.name)
        target = targets[chunk.name]
        for first, last in target.ranges:
            start, stop = max(chunk.start, first), min(chunk.stop, last)
            if start < stop:
                target.put(start, _rows(chunk, data, recipes)[start - chunk.start : stop - chunk.start])


def _rows(chunk: _Chunk, data: torch.Tensor, recipes: Mapping[str, WeightRecipe]) -> torch.Tensor:
    piece = data[chunk.offset : chunk.offset + chunk.num_bytes].view(chunk.dtype)
    return piece.view(chunk.stop - chunk.start, *recipes[chunk.name].shape[1:])


def _device_of(targets: Mapping[str, RowTarget]) -> torch.device:
    return next((target.device for target in targets.values()), torch.device("cpu"))


def _list_first(items: Collection[str], separator: str) -> str:
    shown = list(items)[:5]
    return separator.join(shown) + (f"{separator}..." if len(items) > len(shown) else "")
