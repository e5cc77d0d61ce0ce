"""Wrong arguments at public doors: each is refused and named."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.nn.fp8 import convert_linears
from xorl.core.optim import MuonOptions, Schedule, build_optimizer
from xorl.core.parallel import ParallelPolicy, parallelize


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


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


class Named(Foreign):
    @property
    def layers(self) -> nn.ModuleList:
        return self.blocks


def test_a_module_of_another_kind_is_placed_or_told_what_it_lacks() -> None:
    # Catches an AttributeError for a module that is not a decoder of this package.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check_foreign_modules()
    finally:
        dist.destroy_process_group()


def check_foreign_modules() -> None:
    mesh = Mesh(ParallelDims(), "cpu")
    policy, cpu = ParallelPolicy(data_parallel_mode="none", recompute="layer"), torch.device("cpu")
    with pytest.raises(ValueError, match=r"model: Foreign has no `layers`, the nn.ModuleList"):
        parallelize(Foreign(), mesh, policy, device=cpu)
    with torch.device("meta"), pytest.raises(ValueError, match="fill: parameters are on the meta device"):
        parallelize(Named(), mesh, policy, device=cpu)
    module = Named()
    expected = module(x := torch.randn(3, 4))
    placed = parallelize(module, mesh, policy, device=cpu)
    torch.testing.assert_close(placed.forward(x), expected, rtol=0, atol=0)
    placed.forward(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
