"""Work of a phase of a pass: seconds of a GPU and of exchanges, and operations that the host launches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from xorl.train.plan.operations import Operation
from xorl.train.plan.passes import Cost
from xorl.train.plan.rates import Rates

# Scans of recurrences, which multiply small matrices; from the layer of docs/records/training.md.
RECURRENT_FLOPS_PER_S = 60e12
# The share of torch's elementwise operations that compiled code launches; the others are fused.
FUSED_SHARE = 0.25
# Extra host time to launch an exchange, in launches of other operations; from the short rows that two GPUs share in
# docs/records/layouts.md.
EXCHANGE_LAUNCHES = 1.5
PRODUCT_NAMES = {torch.float32: "fp32", torch.float64: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}
OF_EXPERTS = ("gather_tokens", "gather_rows", "reduce_rows", "reduce_tokens")


class Work(NamedTuple):
    """Seconds of a GPU by what it computes, seconds of its exchanges, and operations that the host launches."""

    computing: dict[str, float]
    exchanging: float
    launches: float

    @property
    def gpu_s(self) -> float:
        return sum(self.computing.values()) + self.exchanging


def work_of(cost: Cost, rates: Rates, sent: float, *, compiled: bool) -> Work:
    """The work of a phase. sent: the share of the pairs of a token and a rank that an exchange of experts sends."""
    computing: dict[str, float] = {}
    exchanging, launches = 0.0, 0.0
    for operation in cost.operations:
        launches += FUSED_SHARE if compiled and operation.is_plain else operation.launches
        if operation.collective is not None:
            launches += EXCHANGE_LAUNCHES
            num_bytes = operation.num_bytes * (sent if operation.name in OF_EXPERTS else 1.0)
            exchanging += rates.links.seconds(operation.collective, operation.ranks, num_bytes)
            continue
        computing[operation.kind] = computing.get(operation.kind, 0.0) + compute_s(operation, rates)
        exchanging += rates.links.seconds("all_gather", operation.ranks, operation.ring_bytes)
    return Work(computing, exchanging, launches)


def compute_s(operation: Operation, rates: Rates) -> float:
    """Seconds of an operation on the GPU: of its products, or to read and write its tensors, whichever is longer."""
    moving = rates.memory_s(operation.num_bytes)
    computing = 0.0
    match operation.kind:
        case "products":
            computing = sum(
                each.number * rates.product_s(each.m, each.n, each.k, PRODUCT_NAMES.get(each.dtype, "fp8"))
                for each in operation.products
            )
        case "attention":
            computing = rates.attention_s(
                operation.flops, operation.channels, operation.scale, backward=operation.is_backward
            )
        case "experts":
            computing = rates.experts_s(operation.flops, operation.scale, backward=operation.is_backward)
        case "recurrences":
            computing = operation.flops / RECURRENT_FLOPS_PER_S
        case _:
            pass
    return max(computing, moving)
