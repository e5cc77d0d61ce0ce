"""Distributes work on whole matrices: gathers sharded matrices on the ranks that own them, and scatters the results.

The ranks form a grid of R replicas by S shards; each replica splits the rows of every parameter into S shards. Each
matrix has one owner among all R x S ranks. In each round, a rank processes at most one batch of matrices of one shape.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.optim.newton_schulz import orthogonalisation_flops
from xorl.core.shards import is_dtensor, local, local_box

Owner = tuple[int, int]

# A stack is large if it has at least this many matrices for each rank; keeping them in place then balances the work.
MIN_STACKED = 4


@dataclass(frozen=True)
class Matrix:
    """Rows [start, stop) of the parameter at index `parameter`, which has `num_rows` rows and `columns` columns."""

    parameter: int
    num_rows: int
    start: int
    stop: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.stop - self.start, self.columns)

    def shard(self, num_shards: int) -> int | None:
        """The shard that holds all rows of this matrix, if one does."""
        chunk = -(-self.num_rows // num_shards)
        first, last = self.start // chunk, (self.stop - 1) // chunk
        return first if first == last else None

    def rows_of(self, shard: int, num_shards: int) -> tuple[int, int]:
        """The rows of this matrix on a shard, as a range within the shard's rows of the parameter; (0, 0) if none."""
        chunk = -(-self.num_rows // num_shards)
        first, last = min(shard * chunk, self.num_rows), min((shard + 1) * chunk, self.num_rows)
        start, stop = max(self.start, first), min(self.stop, last)
        return (start - first, stop - first) if start < stop else (0, 0)


@dataclass(frozen=True)
class Run:
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
    def of(cls, parameter: Tensor, replicas: dist.ProcessGroup | None) -> Grid:
        """The grid of `parameter`; if it is not a DTensor, `replicas` is the group of ranks with the same values."""
        if not is_dtensor(parameter):
            num_replicas = 1 if replicas is None else replicas.size()
            replica = 0 if replicas is None else replicas.rank()
            return cls(None, replicas, 1, num_replicas, 0, replica, parameter.device)
        mesh = parameter.device_mesh
        *others, last = parameter.placements
        is_supported = last.is_shard(0) and (not others or [other.is_replicate() for other in others] == [True])
        assert is_supported, f"only rows may be sharded, not {parameter.placements}"
        is_gpu = mesh.device_type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device(mesh.device_type)
        *replica_axis, shard_axis = range(mesh.ndim)
        return cls(
            shards=mesh.get_group(shard_axis) if mesh.size(shard_axis) > 1 else None,
            replicas=mesh.get_group(replica_axis[0]) if replica_axis and mesh.size(replica_axis[0]) > 1 else None,
            num_shards=mesh.size(shard_axis),
            num_replicas=mesh.size(replica_axis[0]) if replica_axis else 1,
            shard=mesh.get_local_rank(shard_axis),
            replica=mesh.get_local_rank(replica_axis[0]) if replica_axis else 0,
            device=device,
        )


def logical_matrices(parameters: Sequence[Tensor], row_counts: Sequence[Sequence[int]], grid: Grid) -> list[Matrix]:
    """The matrices stacked along the rows of the parameters, in order."""
    matrices: list[Matrix] = []
    for index, (parameter, counts) in enumerate(zip(parameters, row_counts, strict=True)):
        num_rows, columns = parameter.shape
        assert sum(counts) == num_rows, f"row counts {counts} do not add up to {num_rows}"
        start = 0
        for count in counts:
            matrices.append(Matrix(index, num_rows, start, start + count, columns))
            start += count
        chunk = -(-num_rows // grid.num_shards)
        shard = local(parameter)
        assert shard.shape[0] == max(0, min(chunk, num_rows - grid.shard * chunk)), "not sharded like torch.chunk"
        assert shard.shape[0] == 0 or local_box(parameter).offset[0] == grid.shard * chunk, "not in rank order"
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
        shard = matrix.shard(num_shards)
        if shard is None or num_stacked[matrix.parameter] < MIN_STACKED * num_replicas * num_shards:
            others.append(matrix)
        else:
            rows_of_shard = -(-matrix.num_rows // num_shards)
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


def _joined(matrices: Sequence[Matrix]) -> list[Run]:
    """The matrices in order, as runs that are as long as possible."""
    runs: list[Run] = []
    for matrix in matrices:
        last = runs[-1] if runs else None
        if last is not None and (last.matrix.parameter, last.matrix.stop, last.shape) == (
            matrix.parameter,
            matrix.start,
            matrix.shape,
        ):
            runs[-1] = Run(replace(last.matrix, stop=matrix.stop), last.shape)
        else:
            runs.append(Run(matrix, matrix.shape))
    return runs


class Exchange:
    """The communication of one round. A piece is the part of a matrix that one shard holds, flattened.

    Every method is collective, and every rank must call it, even a rank without a batch or without any rows.

    Attributes:
        sent: the matrices owned by this replica, whose rows this rank sends to the owners, in order.
        not_sent: the matrices owned by other replicas, which send the same rows.
        runs: all matrices of the round, in the order of the pieces that `return_updates` returns.
    """

    def __init__(self, grid: Grid, batches: Mapping[Owner, Sequence[Matrix]]) -> None:
        self._grid = grid
        self._batch = batches[grid.replica, grid.shard]
        # In the order in which pieces are sent: by owning shard.
        self._by_replica = [
            [matrix for shard in range(grid.num_shards) for matrix in batches[replica, shard]]
            for replica in range(grid.num_replicas)
        ]
        self.sent = _joined(self._by_replica[grid.replica])
        others = (of_one for replica, of_one in enumerate(self._by_replica) if replica != grid.replica)
        self.not_sent = _joined([matrix for of_one in others for matrix in of_one])
        self.runs = [run for of_one in self._by_replica for run in _joined(of_one)]
        self._pieces_by_replica = [
            sum(self.piece_size(matrix) for matrix in of_replica) for of_replica in self._by_replica
        ]
        # Indexed by shard: the number of elements that this rank holds of that shard's batch.
        self._piece_sizes = [
            sum(self.piece_size(matrix) for matrix in batches[grid.replica, shard]) for shard in range(grid.num_shards)
        ]
        # Indexed by shard: the number of elements that the shard holds of this rank's batch.
        self._batch_sizes = [
            sum(self.piece_size(matrix, shard) for matrix in self._batch) for shard in range(grid.num_shards)
        ]

    def piece_size(self, matrix: Matrix, shard: int | None = None) -> int:
        """The number of elements of a matrix that `shard` holds; None means this rank's shard."""
        start, stop = matrix.rows_of(self._grid.shard if shard is None else shard, self._grid.num_shards)
        return (stop - start) * matrix.columns

    def collect(self, pieces: Tensor) -> Tensor | None:
        """Send this rank's concatenated pieces of `sent`, and return its batch [B, M, N]; None if it owns none."""
        received = self._all_to_all(pieces, sent_sizes=self._piece_sizes, received_sizes=self._batch_sizes)
        if not self._batch:
            return None
        rows, columns = self._batch[0].shape
        sizes = [self.piece_size(matrix, shard) for shard in range(self._grid.num_shards) for matrix in self._batch]
        parts = received.split(sizes)
        # Pieces arrive ordered by shard; order them by matrix.
        whole = [part for index in range(len(self._batch)) for part in parts[index :: len(self._batch)]]
        return (received if self._grid.num_shards == 1 else torch.cat(whole)).view(len(self._batch), rows, columns)

    def return_updates(self, batch: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Scatter the owners' batches, and return this rank's pieces of `matrices`, concatenated."""
        if batch is None:
            joined = torch.empty(0, dtype=dtype, device=self._grid.device)
        elif self._grid.num_shards == 1:
            joined = batch.view(-1)
        else:
            shards = range(self._grid.num_shards)
            parts = batch.view(-1).split([self.piece_size(matrix, shard) for matrix in self._batch for shard in shards])
            # Order the pieces by shard.
            joined = torch.cat([part for shard in shards for part in parts[shard :: self._grid.num_shards]])
        pieces = self._all_to_all(joined, sent_sizes=self._batch_sizes, received_sizes=self._piece_sizes)
        return self._from_replicas(pieces)

    def _all_to_all(self, sent: Tensor, *, sent_sizes: Sequence[int], received_sizes: Sequence[int]) -> Tensor:
        if self._grid.shards is None:
            return sent
        received = torch.empty(sum(received_sizes), dtype=sent.dtype, device=sent.device)
        dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), group=self._grid.shards)
        return received

    def _from_replicas(self, pieces: Tensor) -> Tensor:
        if self._grid.replicas is None:
            return pieces
        sizes = self._pieces_by_replica
        padded = torch.zeros(max(sizes), dtype=pieces.dtype, device=pieces.device)
        padded[: pieces.numel()].copy_(pieces)
        gathered = torch.empty(len(sizes) * max(sizes), dtype=pieces.dtype, device=pieces.device)
        dist.all_gather_into_tensor(gathered, padded, group=self._grid.replicas)
        return torch.cat([part[:size] for part, size in zip(gathered.chunk(len(sizes)), sizes, strict=True)])
