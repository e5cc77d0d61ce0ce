"""Muon: momentum whose matrices are orthogonalised, on whole and on sharded parameters; AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.optim.adamw import AdamW, Controls, controls, count_steps_
from xorl.core.optim.local import local
from xorl.core.optim.matrices import Exchange, Grid, Matrix, Owner, logical_matrices, plan_rounds
from xorl.core.optim.newton_schulz import orthogonalise
from xorl.kernels.optim import Noise, descend_, momentum_

AdjustLr = Literal["original", "match_rms_adamw"]

# Elements of a rank's batch: 256 MiB in bf16, of which Newton-Schulz holds about four at a time.
BATCH_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class MuonOptions:
    """What muon needs beyond what all optimizers take.

    Attributes:
        matrices: for each parameter that muon updates, the rows of the matrices that it stacks.
        lr: peak learning rate of these.
        momentum, nesterov, num_steps: of the moving average of gradients, and of the Newton-Schulz iterations.
        adjust_lr: how the learning rate depends on a matrix's shape.
        replicas: ranks that hold the same parameters, where these are not DTensors.
        compute_dtype: of the Newton-Schulz iterations; None means bf16 on a GPU and fp32 on a CPU.
    """

    matrices: Mapping[str, Sequence[int]]
    lr: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    num_steps: int = 5
    adjust_lr: AdjustLr = "original"
    replicas: dist.ProcessGroup | None = field(default=None, compare=False)
    compute_dtype: torch.dtype | None = None


def lr_ratio(adjust_lr: AdjustLr, rows: int, columns: int) -> float:
    """What the learning rate of a matrix is multiplied by, as torch.optim.Muon of torch 2.11 defines it.

    original: sqrt(max(1, rows / columns)), Keller Jordan's (https://kellerjordan.github.io/posts/muon/).
    match_rms_adamw: 0.2 sqrt(max(rows, columns)), which makes updates as large as AdamW's usually are (Liu et al.,
    2025, arXiv:2502.16982, equation 4).
    """
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


class Muon(AdamW):
    """W = (1 - lr decay) W - lr ratio orthogonalise(momentum of the gradient), for groups with `matrices`.

    That is torch.optim.Muon's update, for each matrix that a parameter stacks on its own. Sharded parameters get the
    update that whole ones would: in rounds, each rank is sent the rows of its share of the matrices, orthogonalises
    them in batches of one shape, and sends the rows of the results back. Replicas share the matrices as well. Groups
    without `matrices` are AdamW's. Momentum is kept in `state_dtype`; what is kept in bf16 is rounded
    stochastically. A step is collective, and `found_inf` only changes what is written.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        options: MuonOptions,
        *,
        state_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(params, lr, state_dtype=state_dtype)
        self._options = options
        self._plans: dict[tuple[int, ...], _Plan] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient; collective. The same ones have a gradient on every rank."""
        assert closure is None, "the gradient is there before the step"
        self.materialise()
        places: list[_Place] = []
        for group in self.param_groups:
            if "matrices" not in group:
                self._step_group(group)
                continue
            rows = zip(group["params"], group["matrices"], group["keys"], group["firsts"], strict=True)
            places += [
                _Place(parameter, self.state[parameter], counts, key, first, group)
                for parameter, counts, key, first in rows
                if parameter.grad is not None
            ]
        if places:
            self._step_matrices(places)

    def _new_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        if "matrices" not in group:
            return super()._new_state(parameter, group)
        return {
            "step": torch.zeros((), dtype=torch.int64, device=parameter.device),
            "momentum_buffer": torch.zeros_like(parameter, dtype=self._state_dtype),
        }

    def _step_matrices(self, places: Sequence[_Place]) -> None:
        device = local(places[0].parameter).device
        told = controls(self, device)
        count_steps_([place.state for place in places], told.skip)
        plan = self._plan(places)
        dtype = self._options.compute_dtype
        if dtype is None:
            dtype = torch.bfloat16 if plan.grid.device.type == "cuda" else torch.float32
        for batches in plan.rounds:
            exchange = Exchange(plan.grid, batches)
            sizes = [exchange.piece(matrix) for matrix in exchange.sent]
            pieces = torch.empty(sum(sizes), dtype=dtype, device=device)
            for matrix, piece in zip(exchange.sent, pieces.split(sizes), strict=True):
                self._momentum_(places[matrix.parameter], matrix, plan.grid, piece, told)
            for matrix in exchange.kept:
                self._momentum_(places[matrix.parameter], matrix, plan.grid, None, told)
            batch = exchange.collect(pieces.to(plan.grid.device))
            if batch is not None:
                batch = orthogonalise(batch, self._options.num_steps)
            updates = exchange.bring_back(batch, dtype).to(device)
            sizes = [exchange.piece(matrix) for matrix in exchange.everything]
            for matrix, update in zip(exchange.everything, updates.split(sizes), strict=True):
                self._descend_(places[matrix.parameter], matrix, plan.grid, update, told.skip)

    def _plan(self, places: Sequence[_Place]) -> _Plan:
        wanted = tuple(place.key for place in places)
        if wanted not in self._plans:
            parameters = [place.parameter for place in places]
            grid = Grid.of(parameters[0], self._options.replicas)
            matrices = logical_matrices(parameters, [place.row_counts for place in places], grid)
            rounds = plan_rounds(matrices, grid.num_replicas, grid.num_shards, BATCH_ELEMENTS)
            self._plans[wanted] = _Plan(grid, rounds)
        return self._plans[wanted]

    def _momentum_(self, place: _Place, matrix: Matrix, grid: Grid, update: Tensor | None, told: Controls) -> None:
        start, stop = matrix.rows_of(grid.shard, grid.num_shards)
        if start == stop:
            return
        gradient = place.parameter.grad
        assert gradient is not None
        momentum_(
            local(place.state["momentum_buffer"])[start:stop],
            local(gradient)[start:stop].contiguous(),
            update,
            momentum=self._options.momentum,
            nesterov=self._options.nesterov,
            grad_scale=told.grad_scale,
            skip=told.skip,
            noise=place.noise(start),
        )

    def _descend_(self, place: _Place, matrix: Matrix, grid: Grid, update: Tensor, skip: Tensor) -> None:
        start, stop = matrix.rows_of(grid.shard, grid.num_shards)
        if start == stop:
            return
        lr = place.group["lr"]
        descend_(
            local(place.parameter)[start:stop],
            update,
            decay=lr * place.group["weight_decay"],
            rate=lr * lr_ratio(self._options.adjust_lr, *matrix.shape),
            grad_scale=None,
            skip=skip,
            noise=place.noise(start),
        )


@dataclass(frozen=True)
class _Place:
    """A parameter with its state and its group."""

    parameter: Tensor
    state: dict[str, Tensor]
    row_counts: Sequence[int]
    key: int
    first: int
    group: Mapping[str, Any]

    def noise(self, row: int) -> Noise:
        """The random bits of this rank's rows from `row` on."""
        return Noise(self.key, self.first + row * self.parameter.shape[1], self.state["step"])


@dataclass(frozen=True)
class _Plan:
    grid: Grid
    rounds: Sequence[Mapping[Owner, Sequence[Matrix]]]
