"""A pass that fails on every rank leaves the gradient, and what computes it, as they were."""

import pytest
import torch
from torch import Tensor, nn

from placement import num_ranks, placed, whole
from tiny_models import hf_config
from xorl.core.loss import cross_entropy
from xorl.data import PackedBatch
from xorl.data.batch import Document, collate
from xorl.train.engine import Engine
from xorl.train.observe.timing import Phase

HF_CONFIG = hf_config("llama", num_hidden_layers=3)


def batch(seed: int) -> PackedBatch:
    ids = torch.randint(0, 64, (12 + seed,), generator=torch.Generator().manual_seed(seed)).numpy()
    return collate([Document(ids, ids)])


def engine_for(layout: str, param_dtype: torch.dtype, recompute: str) -> Engine:
    model = placed(HF_CONFIG, layout, recompute, dtype=param_dtype)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.0)
    return Engine(model, optimizer, torch.device("cpu"), max_grad_norm=None, flops=sum)


class Refusal(torch.autograd.Function):
    """Computes nothing, and fails in the pass that it is told to fail in."""

    @staticmethod
    def forward(ctx: object, x: Tensor, where: str) -> Tensor:
        if where == "forward":
            raise ValueError("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        raise ValueError("backward")


def fail(engine: Engine, where: str) -> None:
    """One good micro-batch, and one that fails in the middle layer, forward or backward."""
    with engine.gradients_kept():
        hooks, mark = [], engine.timer.mark

        def begin_to_fail(phase: Phase) -> None:
            mark(phase)
            if phase == "backward":
                layers = engine.model.module.layers
                assert isinstance(layers, nn.ModuleList)
                hooks.append(layers[1].register_forward_hook(lambda module, given, out: Refusal.apply(out, where)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.timer, "mark", begin_to_fail)
            try:
                engine.forward_backward([batch(3), batch(4)], cross_entropy)
            finally:
                hooks[0].remove()


@pytest.mark.parametrize(
    ("layout", "param_dtype", "recompute"),
    [
        ("none", torch.float32, "none"),
        ("zero3-2", torch.float32, "none"),
        ("zero3-2", torch.bfloat16, "layer"),
        ("zero2-2", torch.float32, "layer"),
        ("hsdp-2x2", torch.float32, "none"),
        ("ddp-2", torch.float32, "none"),
        ("ddp-2", torch.bfloat16, "layer"),
    ],
)
def test_gradients_and_later_passes_know_nothing_of_it(
    layout: str, param_dtype: torch.dtype, recompute: str, run_ranks
) -> None:
    # Catches half of a failed call in the next step, a model that gathers nothing, or waits, after a failure, and
    # gradients of an earlier call that each replica adds.
    def gradients(failures: bool) -> dict[str, Tensor]:
        engine = engine_for(layout, param_dtype, recompute)
        rank = engine.model.mesh.data.rank
        for number in range(2):
            for where in ("forward", "backward") if failures else ():
                with pytest.raises(ValueError, match=where):
                    fail(engine, where)
            if number == 0 and failures:
                assert all(parameter.grad is None for parameter in engine.model.module.parameters())
            engine.forward_backward([batch(rank + number), batch(5 + number)], cross_entropy)
        return {name: whole(p.grad) for name, p in engine.model.module.named_parameters()}

    def gradients_of_one_call() -> dict[str, Tensor]:
        engine = engine_for(layout, param_dtype, recompute)
        rank = engine.model.mesh.data.rank
        engine.forward_backward([batch(number) for number in (rank, 5, rank + 1, 6)], cross_entropy)
        return {name: whole(p.grad) for name, p in engine.model.module.named_parameters()}

    for wanted, got, at_once in run_ranks(
        lambda: (gradients(False), gradients(True), gradients_of_one_call()), num_ranks(layout)
    ):
        assert all(torch.equal(wanted[name], got[name]) for name in wanted)
        if param_dtype == torch.float32:
            torch.testing.assert_close(got, at_once, rtol=1e-4, atol=1e-4)
