"""Muon (orthogonalised momentum) for matrices, sharded or not, and AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xorl.core.nn.share import Share
from xorl.core.optim.adamw import AdamW, StepControls, count_steps_, step_controls
from xorl.core.optim.decay import LocalRows
from xorl.core.optim.matrices import Exchange, Grid, Matrix, MatrixRange, logical_matrices, plan_rounds
from xorl.core.optim.newton_schulz import orthogonalise
from xorl.core.shards import is_dtensor, local
from xorl.kernels.arguments import check_choice, check_number, check_type
from xorl.kernels.optim import Noise, descend_, momentum_

AdjustLr = Literal["original", "match_rms_adamw"]

# The most elements in a rank's batch: 256 MiB in bf16. Newton-Schulz holds about four tensors of this size at a time.
BATCH_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class MuonOptions:
    """Options of Muon, in addition to those of all optimizers.

    Attributes:
        matrices: for each parameter that muon updates, by name, the rows of each matrix that it stacks, as a whole.
        lr: peak learning rate of these parameters.
        momentum, nesterov: decay of the gradients' moving average, and whether to use Nesterov momentum.
        num_steps: number of Newton-Schulz iterations.
        adjust_lr: how the learning rate depends on a matrix's shape.
        replicas: the group of ranks that hold the same parameters, except for experts that they divide, if the
            parameters are not DTensors.
        divided: for parameters that tensor parallelism divides, by name, what each of its ranks holds of them.
        shards: the ranks that together hold these; neighbours are of different tensor-parallel ranks.
        compute_dtype: dtype of the Newton-Schulz iterations; None means bf16 on a GPU and fp32 on a CPU.
    """

    matrices: Mapping[str, Sequence[int]]
    lr: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    num_steps: int = 5
    adjust_lr: AdjustLr = "original"
    replicas: dist.ProcessGroup | None = field(default=None, compare=False)
    divided: Mapping[str, Sequence[Share]] = field(default_factory=dict)
    shards: dist.ProcessGroup | None = field(default=None, compare=False)
    compute_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_choice("adjust_lr", self.adjust_lr, AdjustLr)
        if not isinstance(self.matrices, Mapping):
            raise ValueError(
                "matrices: must map names of parameters to the rows of their matrices, as layer_matrices() of this "
                f"package's models does, got {type(self.matrices).__name__}"
            )
        check_type("nesterov", self.nesterov, bool, "True")
        check_number("lr", self.lr)
        check_number("num_steps", self.num_steps, least=1)
        if not isinstance(self.num_steps, int):
            raise ValueError(f"num_steps: must be an integer, got {self.num_steps!r}")
        if self.compute_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(
                f"compute_dtype: must be torch.float32 or torch.bfloat16, or None, got {self.compute_dtype!r}"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum: must be at least 0 and below 1, got {self.momentum!r}")


def lr_ratio(adjust_lr: AdjustLr, rows: int, columns: int) -> float:
    """The factor on the learning rate of a matrix, as in torch.optim.Muon of torch 2.11.

    original: sqrt(max(1, rows / columns)), Keller Jordan's (https://kellerjordan.github.io/posts/muon/).
    match_rms_adamw: 0.2 sqrt(max(rows, columns)), which gives updates of about AdamW's RMS (Liu et al., 2025,
    arXiv:2502.16982, equation 4).
    """
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


class Muon(AdamW):
    """W = (1 - lr * decay) * W - lr * ratio * orthogonalise(momentum), for groups with `matrices`.

    This is torch.optim.Muon's update, applied separately to each matrix that a parameter stacks. Sharded parameters get
    the same update as whole ones: in rounds, each rank gathers the rows of the matrices that it owns, orthogonalises
    them in batches of one shape, and scatters the rows of the results. Replicas share this work. Groups without
    `matrices` use AdamW. Momentum is kept in `state_dtype`; bf16 values are rounded stochastically. A step is
    collective, even if `found_inf` makes it skip the update.
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
        """Update every parameter that has a gradient; the same ones must have one on every rank. Collective."""
        if closure is not None:
            raise ValueError("closure: closures are not supported; compute the gradients before the step")
        self.materialise()
        stacks: list[_MatrixStack] = []
        for group in self.param_groups:
            if "matrices" not in group:
                self._step_group(group)
                continue
            fields = (group[name] for name in ("params", "matrices", "divided", "keys", "local_rows", "shares"))
            stacks += [
                _MatrixStack(parameter, self.state[parameter], counts, shares, key, rows, group, _is_of_rank(share))
                for parameter, counts, shares, key, rows, share in zip(*fields, strict=True)
                if parameter.grad is not None
            ]
        # Each way of sharding has a grid of its own. The order is the same on every rank.
        by_grid: dict[tuple[DeviceMesh | None, bool, bool], list[_MatrixStack]] = {}
        for stack in stacks:
            mesh = stack.parameter.device_mesh if is_dtensor(stack.parameter) else None
            by_grid.setdefault((mesh, stack.is_divided, stack.is_of_rank), []).append(stack)
        for same_grid in by_grid.values():
            self._step_matrices(same_grid)

    def _new_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        if "matrices" not in group:
            return super()._new_state(parameter, group)
        return {
            "step": torch.zeros((), dtype=torch.int64, device=parameter.device),
            "momentum_buffer": torch.zeros_like(parameter, dtype=self._state_dtype),
        }

    def _step_matrices(self, stacks: Sequence[_MatrixStack]) -> None:
        device = local(stacks[0].parameter).device
        scaling = step_controls(self, device)
        count_steps_([stack.state for stack in stacks], scaling.skip)
        plan = self._plan(stacks)
        dtype = self._options.compute_dtype
        if dtype is None:
            dtype = torch.bfloat16 if plan.grid.device.type == "cuda" else torch.float32
        for exchange in plan.rounds:
            sizes = [exchange.size_of(each) for each in exchange.sent]
            pieces = torch.empty(sum(sizes), dtype=dtype, device=device)
            for each, piece in zip(exchange.sent, pieces.split(sizes), strict=True):
                self._momentum_(stacks[each.matrix.parameter], each.matrix, plan.grid, piece, scaling)
            for each in exchange.not_sent:
                self._momentum_(stacks[each.matrix.parameter], each.matrix, plan.grid, None, scaling)
            batch = exchange.collect(pieces.to(plan.grid.device))
            if batch is not None:
                batch = orthogonalise(batch, self._options.num_steps)
            updates = exchange.return_updates(batch, dtype).to(device)
            sizes = [exchange.size_of(each) for each in exchange.ranges]
            for each, update in zip(exchange.ranges, updates.split(sizes), strict=True):
                self._descend_(stacks[each.matrix.parameter], each, plan.grid, update, scaling.skip)

    def _plan(self, stacks: Sequence[_MatrixStack]) -> _Plan:
        keys = tuple(stack.key for stack in stacks)
        if keys not in self._plans:
            parameters = [stack.parameter for stack in stacks]
            shards = self._options.shards if stacks[0].is_divided else None
            grid = Grid.of(parameters[0], None if stacks[0].is_of_rank else self._options.replicas, shards)
            counts, shares = [stack.row_counts for stack in stacks], [stack.shares for stack in stacks]
            matrices = logical_matrices(parameters, counts, shares, grid)
            rounds = plan_rounds(matrices, grid.num_replicas, grid.num_shards, BATCH_ELEMENTS)
            self._plans[keys] = _Plan(grid, [Exchange(grid, batches) for batches in rounds])
        return self._plans[keys]

    def _momentum_(
        self, stack: _MatrixStack, matrix: Matrix, grid: Grid, update: Tensor | None, scaling: StepControls
    ) -> None:
        start, stop = matrix.rows_of(grid.shard)
        gradient = stack.parameter.grad
        assert gradient is not None
        shape = (stop - start, matrix.division.columns_of(grid.shard))
        update = None if update is None else update.view(shape)
        for part, _, noise in stack.parts(start, stop):
            momentum_(
                local(stack.state["momentum_buffer"])[part.start : part.stop],
                local(gradient)[part.start : part.stop].contiguous(),
                None if update is None else update[part.start - start : part.stop - start],
                momentum=self._options.momentum,
                nesterov=self._options.nesterov,
                grad_scale=scaling.grad_scale,
                skip=scaling.skip,
                noise=noise,
            )

    def _descend_(self, stack: _MatrixStack, matrices: MatrixRange, grid: Grid, update: Tensor, skip: Tensor) -> None:
        start, stop = matrices.matrix.rows_of(grid.shard)
        lr = stack.group["lr"]
        update = update.view(stop - start, matrices.matrix.division.columns_of(grid.shard))
        for part, decay, noise in stack.parts(start, stop):
            descend_(
                local(stack.parameter)[part.start : part.stop],
                update[part.start - start : part.stop - start],
                decay=lr * decay,
                rate=lr * lr_ratio(self._options.adjust_lr, *matrices.shape),
                grad_scale=None,
                skip=skip,
                noise=noise,
            )


def _is_of_rank(share: Share | None) -> bool:
    """Whether a parameter is experts that other ranks do not have."""
    return share is not None and "ep" in share.divided_over


@dataclass(frozen=True)
class _MatrixStack:
    """A parameter that stacks matrices along its rows, with its optimizer state and group."""

    parameter: Tensor
    state: dict[str, Tensor]
    row_counts: Sequence[int]
    shares: tuple[Share | None, ...]
    key: int
    local_rows: Sequence[LocalRows]
    group: Mapping[str, Any]
    is_of_rank: bool = False

    @property
    def is_divided(self) -> bool:
        """Whether tensor parallelism divides it."""
        return len(self.shares) > 1

    def parts(self, start: int, stop: int) -> Iterator[tuple[range, float, Noise]]:
        """Adjacent rows among [start, stop) of this rank, with their weight decay and random bits."""
        for own in self.local_rows:
            if part := range(max(own.rows.start, start), min(own.rows.stop, stop)):
                decay = self.group["weight_decay"] if own.decay is None else own.decay
                yield part, decay, own.noise(self.key, self.state["step"], part.start)


@dataclass(frozen=True)
class _Plan:
    grid: Grid
    rounds: Sequence[Exchange]
