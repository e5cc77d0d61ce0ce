"""StepLoader: the micro-batches of each optimizer step for one data-parallel rank, starting at any step.

Workers are stateless: they receive the bins of a micro-batch and return the batch. The order depends only on the plan,
not on the number of workers or on restarts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from xorl.data.arguments import checked
from xorl.data.batch import Column, Document, PackedBatch, collate
from xorl.data.errors import DataError
from xorl.data.images.batch import NO_IMAGES, load_images
from xorl.data.images.settings import ImageSettings
from xorl.data.images.table import StoredImage
from xorl.data.packing import Bins, StartMethod
from xorl.data.plan import (
    PAIR_COST,
    DataPlan,
    bin_costs,
    check_bins,
    check_loading,
    check_start,
    fingerprint_of,
    split_step,
)
from xorl.data.workers import iterate


class Documents(Protocol):
    """The part of PreparedDocuments that the loader needs."""

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def extra_names(self) -> tuple[str, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]: ...

    def extras(self, index: int) -> dict[str, np.ndarray]: ...

    def images(self, index: int) -> Sequence[StoredImage]: ...

    def image_patches(self) -> np.ndarray | None: ...


class StepLoader:
    """The micro-batches of rank `dp_rank` of `dp_size`, step by step.

    Every rank gets the same number of micro-batches in a step; if a short step has too few bins, some are padding
    batches. Micro-batches at the same index have similar costs on all ranks; `pair_cost` weighs attention against the
    rest (see bin_costs). `pin_memory` requires CUDA and is ignored without it, `prefetch_factor` requires workers.
    `images`: of a model with an image encoder, the settings with which `documents` were prepared. Every batch then has
    images. `image_cost`: what it costs to encode an image, in tokens of the decoder: for each patch, and for each pair
    of patches.

    Raises ValueError unless `documents`, `bins` and `plan` were made from each other. Iterating raises DataError for an
    image that has changed, or that cannot be decoded.
    """

    @checked
    def __init__(
        self,
        documents: Documents,
        bins: Bins,
        plan: DataPlan,
        *,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        pad_to_multiple_of: int = 1,
        num_workers: int = 0,
        prefetch_factor: int | None = 2,
        pin_memory: bool = False,
        worker_start_method: StartMethod | None = None,
        pair_cost: float = PAIR_COST,
        images: ImageSettings | None = None,
        image_cost: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        check_bins(documents.lengths, bins)
        if plan.num_bins != len(bins):
            raise ValueError(f"plan: it is for {plan.num_bins} bins, but there are {len(bins)}")
        if plan.fingerprint != fingerprint_of(documents, bins):
            raise ValueError(
                "plan: it belongs to other documents, or to other bins of them; use DataPlan.over(documents, bins)"
            )
        check_loading(dp_rank, dp_size, micro_batch_size, pad_to_multiple_of, num_workers, prefetch_factor)
        self._plan = plan
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        patches = None if images is None else documents.image_patches()
        more = None if patches is None else patches @ np.array(image_cost)
        self._costs = bin_costs(documents.lengths, bins, pair_cost, more)
        self._batches = _MicroBatches(documents, bins, pad_to_multiple_of, images)
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor or 2
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._start_method: StartMethod | None = worker_start_method

    @property
    def num_steps(self) -> int:
        return self._plan.num_steps

    @checked
    def steps(self, start: int = 0) -> Iterator[tuple[int, list[PackedBatch]]]:
        """Yields (step, its micro-batches), beginning with step `start`, without reading the steps before it."""
        check_start(start, self.num_steps)
        batches = iterate(
            self._batches,
            sampler=_Sampler(self, start),
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch_factor,
            pin_memory=self._pin_memory,
            start_method=self._start_method,
        )
        for step in range(start, self.num_steps):
            yield step, [next(batches) for _ in range(self.num_micro_batches(step))]

    def num_micro_batches(self, step: int) -> int:
        """The number of micro-batches per rank in `step`."""
        return -(-len(self._plan.bins_of_step(step)) // (self._dp_size * self._micro_batch_size))

    def bins_of_micro_batches(self, step: int) -> list[np.ndarray]:
        """The bins of each of this rank's micro-batches in `step`; a padding batch has none."""
        bins = self._plan.bins_of_step(step)
        split = split_step(self._costs[bins], dp_size=self._dp_size, micro_batch_size=self._micro_batch_size)
        return [bins[indices[indices >= 0]] for indices in split[self._dp_rank]]


class _Sampler:
    """Yields the bins of each micro-batch in step order."""

    def __init__(self, loader: StepLoader, start: int) -> None:
        self._loader = loader
        self._start = start

    def __iter__(self) -> Iterator[np.ndarray]:
        for step in range(self._start, self._loader.num_steps):
            yield from self._loader.bins_of_micro_batches(step)


class _MicroBatches(Dataset[PackedBatch]):
    """Collates bins to a batch, in the workers."""

    def __init__(self, documents: Documents, bins: Bins, pad_to_multiple_of: int, images: ImageSettings | None) -> None:
        self._documents = documents
        self._bins = bins
        self._pad_to_multiple_of = pad_to_multiple_of
        self._columns = {name: Column() for name in documents.extra_names}
        self._images = images

    def __getitem__(self, bins: np.ndarray) -> PackedBatch:
        members = [index for bin_index in bins for index in self._bins.documents(bin_index)]
        rows = [self._document(index) for index in members]
        columns, images = self._columns, self._images
        return collate(rows, pad_to_multiple_of=self._pad_to_multiple_of, columns=columns, images=images)

    def _document(self, index: int) -> Document:
        documents, images = self._documents, NO_IMAGES
        if self._images is not None:
            try:
                images = load_images(documents.images(index), self._images)
            except DataError as error:
                raise DataError(f"document {index}: {error}") from error
        return Document(*documents.document(index), documents.extras(index), images)
