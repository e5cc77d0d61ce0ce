"""Data for training a user-defined module: a resumable loader sharded over the ranks, and the accepted batch formats.

B: rows, S: positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils import data as torch_data

from xorl.core.loss import IGNORE

Batch: TypeAlias = "Tensor | Sequence[Tensor] | Mapping[str, Tensor]"

# How many characters of the sizes of rows a message shows.
_MAX_SHOWN = 200


class MapDataset(Protocol):
    """A dataset with random access: a list, a tensor [N, S] or any map-style torch Dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class DataLoader(torch_data.DataLoader[Batch]):
    """torch's DataLoader with an order that depends only on `seed` and the epoch, so that runs can be resumed.

    distributed: shard the rows over the ranks, with `batch_size` rows per rank and batch; needs a process group. Rows
    are assigned round-robin, so n ranks together read the n * `batch_size` rows that one process would read at a time.
    An IterableDataset is sharded over ranks and workers in the same way. It must yield the same rows in the same order
    everywhere, or have a method `rows(first, stride)` that yields only a shard, as TextStream does. A dataset that
    shards itself over its workers needs num_workers=0.

    shuffle: a new order each epoch; the default for map-style datasets, not possible for an IterableDataset.
    drop_last: drop the rows at the end of an epoch that do not fill a batch on every rank. If False, only drop those
    that would give some ranks one row more than others. The other options are torch's.
    """

    def __init__(
        self,
        dataset: MapDataset | torch_data.IterableDataset,
        batch_size: int = 1,
        num_workers: int = 0,
        *,
        distributed: bool = False,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = True,
        collate_fn: Callable[[list], Batch] | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        if distributed and not dist.is_initialized():
            raise RuntimeError("DataLoader(distributed=True) needs a process group; call setup_distributed() first")
        rank, num_replicas = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self._seed = seed
        self._sampler: _ResumableSampler | None = None
        if isinstance(dataset, torch_data.IterableDataset):
            if shuffle:
                raise ValueError("shuffle=True needs a dataset with random access; shuffle inside the IterableDataset")
            dataset = _StreamShard(dataset, rank, num_replicas)
        else:
            self._sampler = _ResumableSampler(dataset, rank, num_replicas, shuffle=shuffle is not False, seed=seed)
        super().__init__(
            dataset,  # pyright: ignore[reportArgumentType]  (torch only uses the two methods of the protocol)
            batch_size,
            sampler=self._sampler,
            num_workers=num_workers,
            drop_last=drop_last,
            collate_fn=_stacked if collate_fn is None else collate_fn,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            # By default, worker seeds are drawn from the global generator, which would change dropout.
            generator=torch.Generator(),
        )

    def seek(self, epoch: int, batch: int = 0) -> bool:
        """Start the next iteration at `batch` of `epoch`; returns False if the caller must skip the earlier batches."""
        assert self.generator is not None
        self.generator.manual_seed(self._seed + epoch)
        for part in (self.sampler, self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
        if self._sampler is None:
            return batch == 0
        assert self.batch_size is not None
        self._sampler.first = batch * self.batch_size
        return True


def _stacked(rows: list) -> Batch:
    """Stack rows as torch does. Raises ValueError for rows of different lengths, and rows that are lists of numbers."""
    first = rows[0]
    if isinstance(first, (list, tuple)) and not any(isinstance(part, (Tensor, np.ndarray)) for part in first):
        raise ValueError(
            f"loader: a row is a {type(first).__name__} of {type(first[0]).__name__ if first else 'nothing'}, want a "
            "tensor of token ids, (ids, labels) or a mapping with input_ids: convert it with torch.tensor(row)"
        )
    try:
        return torch_data.default_collate(rows)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        sizes = ", ".join(dict.fromkeys(map(_sizes, rows)))
        raise ValueError(
            f"loader: these rows cannot be stacked to a batch: {sizes[:_MAX_SHOWN]}. Cut or pad all rows to one "
            "length, or set collate_fn to a function that pads those of a batch (labels with -100)"
        ) from error


def _sizes(row: object) -> str:
    """The shapes of the parts of a row."""
    if isinstance(row, Mapping):
        return "{" + ", ".join(f"{name}: {_sizes(part)}" for name, part in row.items()) + "}"
    if isinstance(row, (list, tuple)) and row and isinstance(row[0], (Tensor, np.ndarray)):
        return f"({', '.join(map(_sizes, row))})"
    if isinstance(row, (Tensor, np.ndarray)):
        return str(list(row.shape))
    return f"{len(row)} values" if isinstance(row, (list, tuple)) else type(row).__name__


class _ResumableSampler(torch_data.DistributedSampler):
    """This rank's row indices; the next iteration skips those before `first`."""

    def __init__(self, dataset: MapDataset, rank: int, num_replicas: int, *, shuffle: bool, seed: int) -> None:
        super().__init__(
            dataset,  # pyright: ignore[reportArgumentType]  (the sampler only uses its length)
            num_replicas,
            rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=True,
        )
        self.first = 0

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        return islice(super().__iter__(), first, None)


class _StreamShard(torch_data.IterableDataset):
    """Every n-th row of a stream, for this rank and worker."""

    def __init__(self, stream: torch_data.IterableDataset, rank: int, num_replicas: int) -> None:
        self._stream = stream
        self._rank = rank
        self.num_replicas = num_replicas

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]

    def __iter__(self) -> Iterator[object]:
        worker = torch_data.get_worker_info()
        index, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        first, stride = index * self.num_replicas + self._rank, num_workers * self.num_replicas
        # Such as TextStream, which does not produce the rows of other shards.
        if hasattr(self._stream, "rows"):
            return self._stream.rows(first, stride)  # pyright: ignore[reportAttributeAccessIssue]
        return islice(iter(self._stream), first, None, stride)


def require_sharding(loader: Iterable[Batch], num_ranks: int) -> None:
    """Raise ValueError unless `loader` shards its rows over `num_ranks` ranks.

    This is read from the attribute `num_replicas` of the loader or its sampler, as in torch's DistributedSampler.
    """
    num_replicas = next((part.num_replicas for part in _components(loader) if hasattr(part, "num_replicas")), 1)
    if num_replicas == num_ranks:
        return
    if num_replicas == 1:
        raise ValueError(
            f"loader: the rows are not sharded, so all {num_ranks} ranks would train on the same ones; use "
            "xorl.train.DataLoader(..., distributed=True) or a torch DataLoader with a DistributedSampler"
        )
    raise ValueError(f"loader: the rows are sharded over {num_replicas} ranks, but {num_ranks} ranks train")


def batches_of_epoch(loader: Iterable[Batch], epoch: int, first: int) -> Iterator[Batch]:
    """This rank's batches of `epoch`, starting at batch `first`.

    If the loader cannot seek, the earlier batches are read and dropped, and the global random state is restored.
    """
    skip = first
    if isinstance(loader, DataLoader):
        skip = 0 if loader.seek(epoch, first) else first
    else:
        for part in _components(loader):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
    with torch.random.fork_rng(devices=[], enabled=first > 0):
        batches = iter(loader)
        for _ in islice(batches, skip):
            pass
    return batches


def rows_per_batch(loader: Iterable[Batch], num_ranks: int) -> int:
    """The number of rows in a batch over all ranks. Without `batch_size`, a batch counts as one row."""
    return (getattr(loader, "batch_size", None) or 1) * num_ranks


def has_random_order(loader: Iterable[Batch]) -> bool:
    """Whether the order differs in every process, so that a saved position cannot be resumed."""
    return any(isinstance(part, torch_data.RandomSampler) for part in _components(loader))


def _components(loader: Iterable[Batch]) -> list:
    """The loader, its samplers and its dataset: all objects that may define the order of a torch DataLoader."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [part for part in (loader, *inner, getattr(loader, "dataset", None)) if part is not None]


@dataclass(frozen=True)
class TokenBatch:
    """input_ids [B, S]; labels [B, S]: the target of each position, or -100 if it is not trained; extras: additional
    keyword arguments for the model.
    """

    input_ids: Tensor
    labels: Tensor
    extras: Mapping[str, Tensor]

    def to(self, device: torch.device) -> TokenBatch:
        return TokenBatch(
            self.input_ids.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            {name: tensor.to(device, non_blocking=True) for name, tensor in self.extras.items()},
        )


def read_batch(batch: Batch, context_length: int | None) -> TokenBatch:
    """Convert token ids [B, S], a tuple (ids, labels), or a mapping with input_ids and optional labels.

    Given labels must already be shifted: labels[b, s] is the token after input_ids[b, s]. Without labels, they are
    derived from the ids; the last position of each row is not trained, and neither are positions whose next token is
    padding according to `attention_mask`. The last id of a row of `context_length` + 1 ids without labels is only a
    label. Raises ValueError for anything else.
    """
    ids, labels, extras = _split_batch(batch)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"loader: input_ids must be integers of shape [rows, positions], got {got}")
    num_labels = 0 if labels is not None else 1
    if context_length is not None and ids.shape[1] > context_length + num_labels:
        limit = f"context_length {context_length}" + " and the label of the last position" * num_labels
        raise ValueError(f"loader: a row has {ids.shape[1]} token ids, more than {limit}")
    if labels is None:
        labels = F.pad(ids[:, 1:].long(), (0, 1), value=IGNORE)
        if "attention_mask" in extras:
            labels = labels.masked_fill(F.pad(extras["attention_mask"][:, 1:], (0, 1)) == 0, IGNORE)
        if ids.shape[1] - 1 == context_length:
            shape = ids.shape
            ids, labels = ids[:, :-1], labels[:, :-1]
            extras = {name: tensor[:, :-1] if tensor.shape[:2] == shape else tensor for name, tensor in extras.items()}
    elif labels.shape != ids.shape:
        raise ValueError(f"loader: labels {list(labels.shape)} and input_ids {list(ids.shape)} differ in shape")
    return TokenBatch(ids, labels.long(), extras)


def _split_batch(batch: Batch) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Returns (input_ids, labels or None, the other entries of a mapping)."""
    if isinstance(batch, Tensor):
        return batch, None, {}
    if isinstance(batch, Mapping):
        extras = dict(batch)
        if "input_ids" not in extras:
            raise ValueError(f"loader: a batch must have input_ids, and optionally labels; it has {sorted(extras)}")
        return extras.pop("input_ids"), extras.pop("labels", None), extras
    if len(batch) not in (1, 2):
        raise ValueError(f"loader: a batch must be ids or (ids, labels), but it has {len(batch)} parts")
    return batch[0], batch[1] if len(batch) == 2 else None, {}


def reject_unshifted_labels(batch: TokenBatch) -> None:
    """Raise ValueError if labels equal the ids: the model would learn to copy its input, with a loss near zero."""
    trained = batch.labels != IGNORE
    repeats = torch.equal(batch.labels[trained], batch.input_ids[trained].long())
    # In a row that repeats one token, shifted labels look the same, so such rows prove nothing.
    if repeats and bool((batch.input_ids[:, 1:] != batch.input_ids[:, :-1])[trained[:, 1:]].any()):
        raise ValueError(
            "loader: labels equal input_ids, but each label must be the token after: labels[:, :-1] = "
            "input_ids[:, 1:] and labels[:, -1] = -100; omit labels to have them derived from input_ids"
        )
