"""Wrong arguments at public doors: each is refused and named."""

from collections.abc import Callable

import pytest
from torch import nn

from xorl.core.mesh import ParallelDims
from xorl.core.nn.fp8 import convert_linears
from xorl.core.optim import MuonOptions, Schedule, build_optimizer
from xorl.core.parallel import ParallelPolicy


def optimizer(name: str, **options: object) -> object:
    return build_optimizer(name, nn.Linear(4, 4).named_parameters(), lr=0.1, weight_decay=0.0, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimizer("adam"), "name: 'adam' is not one of 'adamw', 'sgd'"),
        (lambda: optimizer("muon"), "muon: the optimizer muon needs MuonOptions"),
        (lambda: MuonOptions({}, adjust_lr="rms"), "adjust_lr: 'rms' is not one of 'original'"),
        (lambda: ParallelPolicy(data_parallel_mode="fsdp"), "data_parallel_mode: 'fsdp' is not one of 'none', 'ddp'"),
        (lambda: ParallelPolicy(recompute="layers"), "recompute: 'layers' is not one of"),
        (lambda: ParallelPolicy(recompute=["attention"]), "recompute: 'attention' is not one of 'self_attn', 'mlp'"),
        (lambda: ParallelPolicy(fp8="rows"), "fp8: 'rows' is not one of"),
        (lambda: ParallelDims.resolve("fsdp", 2), "mode: 'fsdp' is not one of"),
        (lambda: ParallelDims(context_sharding="ring"), "context_sharding: 'ring' is not one of"),
        (lambda: Schedule(10, 0.1, style="cosin"), "style: 'cosin' is not one of 'constant', 'linear', 'cosine'"),
        (lambda: Schedule(0, 0.1), "num_steps must be at least 1"),
        (lambda: Schedule(10, 0.1, warmup_ratio=1.5), "warmup_ratio must be from 0 to 1"),
        (lambda: Schedule(10, 0.1)(0), "step must be at least 1"),
        (lambda: convert_linears(nn.ModuleList(), "rows"), "recipe: 'rows' is not one of"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call: Callable[[], object], message: str) -> None:
    # Catches SGD in place of AdamW, ranks that train apart, and a schedule of another shape.
    with pytest.raises(ValueError, match=message):
        call()
