"""What the trainers of a user's own module read: a loader whose rows are shared out over the ranks, a place in its
order, and the forms that a batch may have. B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils import data as torch_data

from xorl.core.loss import IGNORE

Batch: TypeAlias = "Tensor | Sequence[Tensor] | Mapping[str, Tensor]"


class Rows(Protocol):
    """A data set with random access: a list, a tensor [N, S] and every map-style torch Dataset is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


class DataLoader(torch_data.DataLoader[Batch]):
    """torch's DataLoader with an order that depends on `seed` and the epoch alone, so that a run can be continued.

    distributed: each rank reads a part of its own, of `batch_size` rows a batch; it needs the process group. Rows are
    dealt one by one, so `batch_size` rows on each of n ranks are the n * `batch_size` rows that one process would read.
    A torch IterableDataset is dealt out row by row too, to ranks and then to workers: it must give all of them the same
    rows in the same order, or have a method `rows(first, stride)` that gives a part of them, as TextStream does. One
    that divides itself among its workers needs num_workers=0.

    shuffle: a new order each epoch; the default for data with random access, impossible for a stream. drop_last leaves
    out the rows at the end of an epoch that do not fill a batch on every rank; without it, only those that would give
    some ranks a row more than others. The rest is torch's.
    """

    def __init__(
        self,
        dataset: Rows | torch_data.IterableDataset,
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
            raise RuntimeError("DataLoader(distributed=True) needs the process group: call setup_distributed() first")
        rank, num_replicas = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
        self._seed = seed
        self._order: _Order | None = None
        if isinstance(dataset, torch_data.IterableDataset):
            if shuffle:
                raise ValueError("shuffle=True needs a data set with random access; shuffle inside the IterableDataset")
            dataset = _Share(dataset, rank, num_replicas)
        else:
            self._order = _Order(dataset, rank, num_replicas, shuffle=shuffle is not False, seed=seed)
        super().__init__(
            dataset,  # pyright: ignore[reportArgumentType]  (torch asks for a base class and uses the two methods)
            batch_size,
            sampler=self._order,
            num_workers=num_workers,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            # The seeds of the workers would otherwise be drawn from the stream that dropout draws from.
            generator=torch.Generator(),
        )

    def seek(self, epoch: int, batch: int = 0) -> bool:
        """Let the next iteration be that of `epoch`, from `batch` on; False if the caller must skip the batches."""
        assert self.generator is not None
        self.generator.manual_seed(self._seed + epoch)
        for part in (self.sampler, self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
        if self._order is None:
            return batch == 0
        assert self.batch_size is not None
        self._order.first = batch * self.batch_size
        return True


class _Order(torch_data.DistributedSampler):
    """This rank's rows, from the `first` on in the next iteration."""

    def __init__(self, rows: Rows, rank: int, num_replicas: int, *, shuffle: bool, seed: int) -> None:
        super().__init__(
            rows,  # pyright: ignore[reportArgumentType]  (it takes the length alone)
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


class _Share(torch_data.IterableDataset):
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
        # Such as TextStream, which need not make the rows of others.
        if hasattr(self._stream, "rows"):
            return self._stream.rows(first, stride)  # pyright: ignore[reportAttributeAccessIssue]
        return islice(iter(self._stream), first, None, stride)


def require_shares(loader: Iterable[Batch], num_ranks: int) -> None:
    """Raise ValueError unless `loader` divides its rows among `num_ranks` ranks.

    It says so by an attribute `num_replicas`, its own or that of its sampler, as torch's DistributedSampler has.
    """
    num_replicas = next((part.num_replicas for part in _parts(loader) if hasattr(part, "num_replicas")), 1)
    if num_replicas == num_ranks:
        return
    if num_replicas == 1:
        raise ValueError(
            f"loader: its rows are not divided among the ranks, and all {num_ranks} would train on the same ones; "
            "use xorl.train.DataLoader(..., distributed=True) or give a torch DataLoader a DistributedSampler"
        )
    raise ValueError(f"loader: its rows are divided among {num_replicas} ranks, and {num_ranks} train")


def batches_of_epoch(loader: Iterable[Batch], epoch: int, first: int) -> Iterator[Batch]:
    """The batches of `epoch` from the `first` on, this rank's alone.

    A loader that cannot seek is read up to there; global random numbers that this draws are given back.
    """
    skip = first
    if isinstance(loader, DataLoader):
        skip = 0 if loader.seek(epoch, first) else first
    else:
        for part in _parts(loader):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
    with torch.random.fork_rng(devices=[], enabled=first > 0):
        batches = iter(loader)
        for _ in islice(batches, skip):
            pass
    return batches


def rows_per_batch(loader: Iterable[Batch], num_ranks: int) -> int:
    """The rows that all ranks together read at a time; of a loader that does not tell its batch_size, the batches."""
    return (getattr(loader, "batch_size", None) or 1) * num_ranks


def has_order_of_its_own(loader: Iterable[Batch]) -> bool:
    """Whether the order is drawn anew in every process, so that no position in it means anything to the next one."""
    return any(isinstance(part, torch_data.RandomSampler) for part in _parts(loader))


def _parts(loader: Iterable[Batch]) -> list:
    """The loader and what torch's DataLoader may leave the order to."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [part for part in (loader, *inner, getattr(loader, "dataset", None)) if part is not None]


@dataclass(frozen=True)
class TokenBatch:
    """input_ids [B, S]; labels [B, S]: what each position should predict, -100 where nothing is trained; `extras` are
    keyword arguments of the model.
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
    """Accepts token ids [B, S] alone, (ids, labels), or a mapping with input_ids and perhaps labels.

    Labels that are given must be shifted already: labels[b, s] is the token after input_ids[b, s]. Labels that are not
    given are made from the ids; the last position of each row is not trained, nor one whose next token is padding by
    `attention_mask`. Raises ValueError for anything else.
    """
    ids, labels, extras = _parts_of(batch)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        what = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"loader: input_ids came as {what}, and integers [rows, positions] are wanted")
    if context_length is not None and ids.shape[1] > context_length:
        raise ValueError(f"loader: a row has {ids.shape[1]} positions, more than context_length {context_length}")
    if labels is None:
        labels = F.pad(ids[:, 1:].long(), (0, 1), value=IGNORE)
        if "attention_mask" in extras:
            labels = labels.masked_fill(F.pad(extras["attention_mask"][:, 1:], (0, 1)) == 0, IGNORE)
    elif labels.shape != ids.shape:
        raise ValueError(f"loader: labels are {list(labels.shape)} and input_ids {list(ids.shape)}; they must be alike")
    return TokenBatch(ids, labels.long(), extras)


def _parts_of(batch: Batch) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """(input_ids, labels if there are any, other entries of a mapping)."""
    if isinstance(batch, Tensor):
        return batch, None, {}
    if isinstance(batch, Mapping):
        extras = dict(batch)
        if "input_ids" not in extras:
            raise ValueError(f"loader: a batch has {sorted(extras)}, and input_ids is wanted (and labels, if not ids)")
        return extras.pop("input_ids"), extras.pop("labels", None), extras
    if len(batch) not in (1, 2):
        raise ValueError(f"loader: a batch has {len(batch)} parts, and ids or (ids, labels) is wanted")
    return batch[0], batch[1] if len(batch) == 2 else None, {}


def refuse_unshifted(batch: TokenBatch) -> None:
    """Raise ValueError for labels that repeat the ids: a model would learn to copy its input, at a loss near zero."""
    trained = batch.labels != IGNORE
    repeats = torch.equal(batch.labels[trained], batch.input_ids[trained].long())
    # Where every token of a row is the same one, labels that are shifted look no different.
    if repeats and bool((batch.input_ids[:, 1:] != batch.input_ids[:, :-1])[trained[:, 1:]].any()):
        raise ValueError(
            "loader: labels are the input_ids themselves, and each must be the token after: labels[:, :-1] = "
            "input_ids[:, 1:], the last one -100. Without labels this is done here"
        )
