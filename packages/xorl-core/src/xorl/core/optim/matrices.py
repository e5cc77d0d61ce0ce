"""Distributes work on whole matrices: gathers divided matrices on the ranks that own them, and scatters the results.

The ranks form a grid of R replicas by S shards. FSDP2 and tensor parallelism divide every parameter among the shards.
Each matrix has one owner among all R x S ranks. In each round, a rank processes at most one batch of matrices of one
shape.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, compress, groupby, pairwise, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.nn.share import Share
from xorl.core.optim.newton_schulz import orthogonalisation_flops
from xorl.core.shards import Box, is_dtensor, local, local_box
from xorl.kernels.torch_private import foreach_copy_

Owner = tuple[int, int]

# A stack is large if it has at least this many matrices for each rank; keeping them in place then balances the work.
MIN_STACKED = 4


@dataclass(frozen=True)
class Division:
    """How the shards of a grid divide a parameter.

    Shard i holds chunk i // T of what rank i % T of the T tensor-parallel ranks holds.

    Attributes:
        num_rows, columns: of the whole parameter.
        shares: what each tensor-parallel rank holds of it; (None,): all of it.
        num_chunks: the number of parts into which FSDP2 divides the rows of a share, like torch.chunk.
    """

    num_rows: int
    columns: int
    shares: tuple[Share | None, ...] = (None,)
    num_chunks: int = 1

    def rows_of(self, start: int, stop: int, shard: int) -> tuple[int, int]:
        """Which rows of a shard's tensor are among the rows [start, stop) of the parameter; (0, 0) if none."""
        first, last = self.chunk(shard)
        begin, end = (min(max(self._num_before(row, shard), first), last) - first for row in (start, stop))
        return (begin, end) if begin < end else (0, 0)

    def boxes(self, start: int, stop: int, shard: int) -> Iterator[Box]:
        """Where those rows lie in the matrix of the rows [start, stop), in the order of the shard's tensor."""
        begin, end = self.rows_of(start, stop, shard)
        begin, end = (row + self.chunk(shard)[0] for row in (begin, end))
        share = self.shares[shard % len(self.shares)] or Share(self.num_rows, ((0, self.num_rows),))
        for box in share.boxes(Box((begin, 0), (end - begin, self.columns_of(shard)))):
            yield Box((box.offset[0] - start, box.offset[1]), box.shape)

    def is_copy(self, start: int, stop: int, shard: int) -> bool:
        """Whether an earlier tensor-parallel rank holds the same of the rows [start, stop)."""
        if len(self.shares) == 1:
            return False
        first = shard - shard % len(self.shares)
        own = list(self.boxes(start, stop, shard))
        return any(own == list(self.boxes(start, stop, earlier)) for earlier in range(first, shard))

    def columns_of(self, shard: int) -> int:
        """The number of columns of a shard's tensor."""
        share = self.shares[shard % len(self.shares)]
        return self.columns if share is None else share.held((self.num_rows, self.columns))[1]

    def holder(self, start: int, stop: int) -> int | None:
        """The shard that holds all of the rows [start, stop), if one does; None if tensor parallelism divides them."""
        if len(self.shares) > 1:
            return None
        size = -(-self.num_rows // self.num_chunks)
        return start // size if start // size == (stop - 1) // size else None

    def _ranges(self, shard: int) -> tuple[tuple[int, int], ...]:
        share = self.shares[shard % len(self.shares)]
        return ((0, self.num_rows),) if share is None else share.rows

    def _num_before(self, row: int, shard: int) -> int:
        """How many rows before `row` are in the share of a shard's tensor-parallel rank."""
        return sum(max(0, min(row, stop) - start) for start, stop in self._ranges(shard))

    def chunk(self, shard: int) -> tuple[int, int]:
        """The rows [first, last) of that share that the shard holds."""
        num_rows = self._num_before(self.num_rows, shard)
        size = -(-num_rows // self.num_chunks)
        chunk = shard // len(self.shares)
        return min(chunk * size, num_rows), min((chunk + 1) * size, num_rows)


@dataclass(frozen=True)
class Matrix:
    """Rows [start, stop) of the parameter at index `parameter`."""

    parameter: int
    division: Division
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.stop - self.start, self.division.columns)

    def rows_of(self, shard: int) -> tuple[int, int]:
        """The rows of this matrix on a shard, as a range within the shard's rows of the parameter; (0, 0) if none."""
        return self.division.rows_of(self.start, self.stop, shard)

    def size_on(self, shard: int) -> int:
        """The number of elements of this matrix that a shard holds."""
        start, stop = self.rows_of(shard)
        return (stop - start) * self.division.columns_of(shard)

    def size_from(self, shard: int) -> int:
        """The number of elements of this matrix that a shard sends to its owner: none if they are copies."""
        return 0 if self.is_copy(shard) else self.size_on(shard)

    def is_copy(self, shard: int) -> bool:
        """Whether another shard sends to its owner what this one holds of this matrix."""
        return self.division.is_copy(self.start, self.stop, shard)


@dataclass(frozen=True)
class MatrixRange:
    """Adjacent matrices of the same shape, which one call updates; `matrix` covers the rows of all of them."""

    matrix: Matrix
    shape: tuple[int, int]


@dataclass(frozen=True)
class Grid:
    """This rank's coordinates in the grid of replicas and shards.

    Attributes:
        shards, replicas: the process groups along the two axes; None if the axis has size one.
        num_shards, num_replicas: their sizes.
        shard, replica: this rank's index along each axis.
        device: the device on which matrices are exchanged and processed.
    """

    shards: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    num_shards: int
    num_replicas: int
    shard: int
    replica: int
    device: torch.device

    @classmethod
    def of(cls, parameter: Tensor, replicas: dist.ProcessGroup | None, shards: dist.ProcessGroup | None) -> Grid:
        """The grid of `parameter`.

        Args:
            replicas: the ranks that hold the same, unless the parameter is a DTensor, whose mesh has them.
            shards: the ranks that together hold a parameter that tensor parallelism divides; None: FSDP2's.
        """
        device = parameter.device
        if is_dtensor(parameter):
            mesh = parameter.device_mesh
            *others, last = parameter.placements
            is_supported = last.is_shard(0) and (not others or [other.is_replicate() for other in others] == [True])
            assert is_supported, f"only rows may be sharded, not {parameter.placements}"
            is_gpu = mesh.device_type == "cuda"
            device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device(mesh.device_type)
            *replica_axis, shard_axis = range(mesh.ndim)
            replicas = mesh.get_group(replica_axis[0]) if replica_axis else None
            shards = shards or mesh.get_group(shard_axis)
        shards, replicas = (None if group is None or group.size() == 1 else group for group in (shards, replicas))
        return cls(
            shards=shards,
            replicas=replicas,
            num_shards=1 if shards is None else shards.size(),
            num_replicas=1 if replicas is None else replicas.size(),
            shard=0 if shards is None else shards.rank(),
            replica=0 if replicas is None else replicas.rank(),
            device=device,
        )


def logical_matrices(
    parameters: Sequence[Tensor],
    row_counts: Sequence[Sequence[int]],
    shares: Sequence[tuple[Share | None, ...]],
    grid: Grid,
) -> list[Matrix]:
    """The matrices stacked along the rows of the whole parameters, in order.

    Args:
        row_counts: the rows of each matrix, by parameter.
        shares: by parameter, what each tensor-parallel rank holds of it; (None,): all of it.
    """
    matrices: list[Matrix] = []
    for index, (parameter, counts, by_rank) in enumerate(zip(parameters, row_counts, shares, strict=True)):
        share = by_rank[grid.shard % len(by_rank)]
        num_rows, columns = parameter.shape if share is None else share.whole(parameter.shape)
        assert sum(counts) == num_rows, f"row counts {counts} do not add up to {num_rows}"
        division = Division(num_rows, columns, by_rank, grid.num_shards // len(by_rank))
        for start, stop in pairwise([0, *accumulate(counts)]):
            matrices.append(Matrix(index, division, start, stop))
        first, last = division.rows_of(0, num_rows, grid.shard)
        assert local(parameter).shape == (last - first, division.columns_of(grid.shard)), "not sharded like torch.chunk"
        in_order = last == first or local_box(parameter).offset[0] == division.chunk(grid.shard)[0]
        assert in_order, "not in rank order"
    return matrices


def plan_rounds(
    matrices: Sequence[Matrix], num_replicas: int, num_shards: int, batch_elements: int
) -> list[Mapping[Owner, Sequence[Matrix]]]:
    """Assign every matrix to an owner, balancing the work, and split each owner's matrices into batches, one per round.

    Matrices of large stacks (experts) stay on the shards that hold them, adjacent ones on the same replica, so only
    matrices that cross a boundary between shards are moved. The plan is the same on every rank. A batch of more than
    one matrix has at most `batch_elements` elements.
    """
    work: dict[Owner, int] = {(r, s): 0 for r in range(num_replicas) for s in range(num_shards)}
    owned: dict[Owner, list[Matrix]] = {owner: [] for owner in work}

    def give(owner: Owner, matrix: Matrix) -> None:
        owned[owner].append(matrix)
        work[owner] += orthogonalisation_flops(*matrix.shape, 1)

    num_stacked = Counter(matrix.parameter for matrix in matrices)
    others: list[Matrix] = []
    for matrix in matrices:
        shard = matrix.division.holder(matrix.start, matrix.stop)
        if shard is None or num_stacked[matrix.parameter] < MIN_STACKED * num_replicas * num_shards:
            others.append(matrix)
        else:
            rows_of_shard = -(-matrix.division.num_rows // num_shards)
            give((matrix.start % rows_of_shard * num_replicas // rows_of_shard, shard), matrix)
    load = [(amount, owner) for owner, amount in work.items()]
    heapq.heapify(load)
    for matrix in sorted(others, key=lambda matrix: (-orthogonalisation_flops(*matrix.shape, 1), matrix.shape)):
        _, owner = heapq.heappop(load)
        give(owner, matrix)
        heapq.heappush(load, (work[owner], owner))
    for of_owner in owned.values():
        of_owner.sort(key=lambda matrix: (-orthogonalisation_flops(*matrix.shape, 1), matrix.shape))
    batches = {owner: _split_into_batches(of_owner, batch_elements) for owner, of_owner in owned.items()}
    return [dict(zip(batches, row, strict=True)) for row in zip_longest(*batches.values(), fillvalue=())]


def _split_into_batches(matrices: Sequence[Matrix], batch_elements: int) -> list[Sequence[Matrix]]:
    """Split `matrices`, in which equal shapes are adjacent, into batches of a single shape each."""
    batches: list[Sequence[Matrix]] = []
    for (rows, columns), run in groupby(matrices, key=lambda matrix: matrix.shape):
        same_shape = list(run)
        size = max(1, batch_elements // (rows * columns))
        batches += [same_shape[start : start + size] for start in range(0, len(same_shape), size)]
    return batches


def _joined(matrices: Sequence[Matrix]) -> list[MatrixRange]:
    """The matrices in order, as ranges that are as long as possible."""
    ranges: list[MatrixRange] = []
    for matrix in matrices:
        last = ranges[-1] if ranges else None
        if last is not None and (last.matrix.parameter, last.matrix.stop, last.shape) == (
            matrix.parameter,
            matrix.start,
            matrix.shape,
        ):
            ranges[-1] = MatrixRange(replace(last.matrix, stop=matrix.stop), last.shape)
        else:
            ranges.append(MatrixRange(matrix, matrix.shape))
    return ranges


class Exchange:
    """The communication of one round. A piece is the part of a matrix that one shard holds, flattened.

    Every method is collective, and every rank must call it, even a rank without a batch or without any rows.

    Attributes:
        sent: the matrices of which this rank sends its pieces to the owners, which are of its replica, in order.
        not_sent: the others: other ranks with the same values send them.
        ranges: all matrices of the round, in the order of the pieces that `return_updates` returns.
    """

    def __init__(self, grid: Grid, batches: Mapping[Owner, Sequence[Matrix]]) -> None:
        self._grid = grid
        self._batch = batches[grid.replica, grid.shard]
        # In the order in which pieces are sent: by owning shard.
        by_replica = [
            [matrix for shard in range(grid.num_shards) for matrix in batches[replica, shard]]
            for replica in range(grid.num_replicas)
        ]
        is_sent = [
            [replica == grid.replica and not matrix.is_copy(grid.shard) for matrix in of_one]
            for replica, of_one in enumerate(by_replica)
        ]
        self.sent = _joined(list(compress(chain(*by_replica), chain(*is_sent))))
        self.not_sent = _joined(list(compress(chain(*by_replica), (not sent for sent in chain(*is_sent)))))
        self.ranges = [each for of_one in by_replica for each in _joined(of_one)]
        self._sizes_by_replica = [sum(matrix.size_on(grid.shard) for matrix in of_one) for of_one in by_replica]
        # Of this rank's pieces, by owning shard, and of the pieces of its batch, by the shard that holds them.
        owned = [batches[grid.replica, shard] for shard in range(grid.num_shards)]
        self._pieces_sent = [sum(matrix.size_from(grid.shard) for matrix in batch) for batch in owned]
        self._pieces_returned = [sum(matrix.size_on(grid.shard) for matrix in batch) for batch in owned]
        shards = range(grid.num_shards)
        self._batch_collected = [sum(matrix.size_from(shard) for matrix in self._batch) for shard in shards]
        self._batch_returned = [sum(matrix.size_on(shard) for matrix in self._batch) for shard in shards]

    def size_of(self, matrices: MatrixRange) -> int:
        """The number of elements that this rank holds of a range."""
        return matrices.matrix.size_on(self._grid.shard)

    def collect(self, pieces: Tensor) -> Tensor | None:
        """Send this rank's concatenated pieces of `sent`, and return its batch [B, M, N]; None if it owns none."""
        received = self._all_to_all(pieces, sent_sizes=self._pieces_sent, received_sizes=self._batch_collected)
        if not self._batch:
            return None
        shape = (len(self._batch), *self._batch[0].shape)
        if self._grid.num_shards == 1:
            return received.view(shape)
        batch = received.new_empty(shape)
        blocks = self._blocks(batch, with_copies=False)
        parts = received.split([block.numel() for block in blocks])
        foreach_copy_(blocks, [part.view(block.shape) for part, block in zip(parts, blocks, strict=True)])
        return batch

    def return_updates(self, batch: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Scatter the owners' batches, and return this rank's pieces of `ranges`, concatenated."""
        if batch is None:
            joined = torch.empty(0, dtype=dtype, device=self._grid.device)
        elif self._grid.num_shards == 1:
            joined = batch.view(-1)
        else:
            joined = torch.cat([block.flatten() for block in self._blocks(batch, with_copies=True)])
        pieces = self._all_to_all(joined, sent_sizes=self._batch_returned, received_sizes=self._pieces_returned)
        return self._from_replicas(pieces)

    def _blocks(self, batch: Tensor, *, with_copies: bool) -> list[Tensor]:
        """The views of this rank's batch [B, M, N] that each shard holds, by shard, in the order of its tensor."""
        return [
            box.cut(whole)
            for shard in range(self._grid.num_shards)
            for matrix, whole in zip(self._batch, batch.unbind(), strict=True)
            if with_copies or not matrix.is_copy(shard)
            for box in matrix.division.boxes(matrix.start, matrix.stop, shard)
        ]

    def _all_to_all(self, sent: Tensor, *, sent_sizes: Sequence[int], received_sizes: Sequence[int]) -> Tensor:
        if self._grid.shards is None:
            return sent
        received = torch.empty(sum(received_sizes), dtype=sent.dtype, device=sent.device)
        dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), group=self._grid.shards)
        return received

    def _from_replicas(self, pieces: Tensor) -> Tensor:
        if self._grid.replicas is None:
            return pieces
        sizes = self._sizes_by_replica
        padded = torch.zeros(max(sizes), dtype=pieces.dtype, device=pieces.device)
        padded[: pieces.numel()].copy_(pieces)
        gathered = torch.empty(len(sizes) * max(sizes), dtype=pieces.dtype, device=pieces.device)
        dist.all_gather_into_tensor(gathered, padded, group=self._grid.replicas)
        return torch.cat([part[:size] for part, size in zip(gathered.chunk(len(sizes)), sizes, strict=True)])
