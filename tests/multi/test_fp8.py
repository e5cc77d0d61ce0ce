"""Training in fp8: the same for every placement, and all that a run keeps of its weights is what it was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from placement import RECOMPUTE, assert_same, num_ranks, place, whole
from tiny_models import hf_config
from xorl.core.loss import cross_entropy
from xorl.core.models import spec_for
from xorl.core.nn.fp8 import Fp8Linear
from xorl.core.optim import build_optimizer
from xorl.data import PackedBatch
from xorl.data.batch import Document, collate
from xorl.train.engine import Engine

pytestmark = pytest.mark.multi

NUM_BATCHES = 6
HF_CONFIG = hf_config("qwen2", tie_word_embeddings=True)


def batches() -> list[PackedBatch]:
    """Micro-batches of uneven documents; scales are taken from one, so every split of the work keeps them whole."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(NUM_BATCHES):
        documents = []
        for length in (3 + index, 5, 12 + index % 4):
            ids = torch.randint(0, 64, (length,), generator=generator)
            documents.append(Document(ids.numpy(), ids.numpy()))
        made.append(collate(documents, pad_to_multiple_of=8))  # not a multiple of 16
    return made


def engine_for(
    layout: str,
    fp8: str = "tensorwise",
    recompute: str = "none",
    units: Sequence[str] = (),
    param_dtype: torch.dtype | None = None,
    compile_backend: str | None = None,
) -> Engine:
    spec = spec_for(HF_CONFIG)
    with torch.device("meta"):
        model = spec.build(spec.config_from_hf(HF_CONFIG), merge_qkv=True)
    model.compute_dtype = param_dtype or torch.float32
    policy = {"fp8": fp8, "param_dtype": param_dtype, "unit_modules": units, "compile_backend": compile_backend}
    placed = place(model, layout, recompute, **policy)
    optimizer = build_optimizer("adamw", model.named_parameters(), lr=0.05, weight_decay=0.1)
    return Engine(placed, optimizer, torch.device("cpu"), max_grad_norm=None, flops=sum)


def own(engine: Engine) -> list[PackedBatch]:
    return batches()[engine.model.mesh.data.rank :: engine.model.mesh.data.size]


def gradients(layout: str, *options) -> dict[str, Tensor]:
    engine = engine_for(layout, *options)
    engine.forward_backward(own(engine), cross_entropy)
    return {name: whole(p.grad) for name, p in engine.model.module.named_parameters()}


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
def test_gradient_does_not_depend_on_the_placement(fp8: str, run_ranks) -> None:
    # Catches a scale of one shard in place of the whole weight's, padding of shards that is multiplied, and a copy of
    # a weight that another rank's rows are missing from.
    [reference] = run_ranks(lambda: gradients("none", fp8), 1)
    [plain] = run_ranks(lambda: gradients("none", "none"), 1)
    name = "model.layers.0.mlp.gate_up_proj.weight"
    assert 0.01 < (reference[name] - plain[name]).norm() / plain[name].norm() < 0.4, "that is not fp8"
    for layout in ("ddp-2", "zero3-1", "zero3-2", "zero3-3", "zero2-2", "hsdp-2x2"):  # 3 divides no number of features
        for measured in run_ranks(lambda layout=layout: gradients(layout, fp8), num_ranks(layout)):
            assert_same(reference, measured, limit=2e-6)


def dtypes_reduced(fp8: str) -> set[torch.dtype]:
    """Of the gradients that FSDP2 hands on to be added up over ranks."""
    seen: set[torch.dtype] = set()
    copy_in = collectives.foreach_reduce_scatter_copy_in

    def see(gradients: list[Tensor], *rest: object) -> None:
        seen.update(gradient.dtype for gradient in gradients)
        copy_in(gradients, *rest)

    collectives.foreach_reduce_scatter_copy_in = see
    gradients("zero3-2", fp8, "none", (), torch.bfloat16)
    return seen


@pytest.mark.parametrize("fp8", ["none", "tensorwise", "rowwise"])
def test_gradients_are_in_the_dtype_that_parameters_are_gathered_in(fp8: str, run_ranks) -> None:
    # Catches gradients that copy engines, which carry that dtype, would round.
    assert run_ranks(lambda: dtypes_reduced(fp8), 2) == [{torch.bfloat16}] * 2


@pytest.mark.parametrize("fp8", ["tensorwise", "rowwise"])
def test_recomputation_and_units_do_not_change_the_gradient(fp8: str, run_ranks) -> None:
    # Catches a recomputed forward pass that multiplies by freed or newer weights.
    [reference] = run_ranks(lambda: gradients("zero3-1", fp8), 1)
    options = [(fp8, recompute) for recompute in RECOMPUTE if recompute != "none"] + [(fp8, "layer", ("mlp", "Linear"))]
    for measured in run_ranks(lambda: [gradients("zero3-2", *option) for option in options], 2):
        for option in measured:
            assert_same(reference, option, limit=2e-6)


def test_compiled_layers_have_the_same_gradient(run_ranks) -> None:
    # Catches a graph that keeps the values of a gathered weight, or its copy in fp8, of the call that it was made in.
    [reference] = run_ranks(lambda: gradients("none", "tensorwise"), 1)
    options = ("tensorwise", "layer", (), None, "aot_eager")
    for measured in run_ranks(lambda: gradients("zero3-2", *options), 2):
        assert_same(reference, measured, limit=2e-6)


def steps(layout: str, fp8: str, dtype: torch.dtype | None) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters after two steps of several micro-batches, and losses before, between and after them."""
    engine = engine_for(layout, fp8, "none", (), dtype)
    held_out = batches()[0]
    losses = []
    for _ in range(2):
        sums = engine.forward_backward(own(engine), cross_entropy)
        losses.append(float(engine.forward(held_out, cross_entropy).sum))
        engine.optim_step(0.05, divisor=sums.num_trained_tokens)
        losses.append(float(engine.forward(held_out, cross_entropy).sum))
    engine.model.drop_gathered()
    return {name: whole(p) for name, p in engine.model.module.named_parameters()}, losses


@pytest.mark.parametrize(
    ("dtype", "layouts"),
    [(None, ("ddp-2", "zero3-2", "zero2-2", "hsdp-2x2")), (torch.bfloat16, ("zero3-2",))],
    ids=["fp32", "bf16"],
)
def test_steps_do_not_depend_on_the_placement(dtype: torch.dtype | None, layouts: Sequence[str], run_ranks) -> None:
    # Catches copies of weights from before an optimizer step, and a gradient of the gathered placeholder that is lost.
    [(parameters, losses)] = run_ranks(lambda: steps("none", "tensorwise", dtype), 1)
    [(_, plain)] = run_ranks(lambda: steps("none", "none", dtype), 1)
    assert losses == pytest.approx(plain, rel=0.1)
    assert losses[-1] < 0.8 * losses[0]
    for layout in layouts:
        placed = run_ranks(lambda layout=layout: steps(layout, "tensorwise", dtype), num_ranks(layout))
        for measured, its_losses in placed:
            # bf16 rounds the gradients of each rank before they are summed, and AdamW divides by their own size.
            assert its_losses == pytest.approx(losses, rel=2e-2 if dtype else 1e-4)
            assert_same(parameters, measured, limit=0.2 if dtype else 1e-3)


def test_weights_are_gathered_as_bytes_and_kept_as_they_were(run_ranks) -> None:
    # Catches a gather in bf16, a gathered copy that is kept beside fp8's, and names or values that conversion changes.
    def check() -> None:
        engine, plain = engine_for("zero3-2"), engine_for("zero3-2", "none")
        state, wanted = engine.state()["model"].state_dict(), plain.state()["model"].state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(whole(state[name]), whole(value)) for name, value in wanted.items())
        assert engine.state()["optimizer"].state_dict().keys() == plain.state()["optimizer"].state_dict().keys()
        engine.forward_backward(own(engine), cross_entropy)
        layer = engine.model.module.layers[0]
        assert isinstance(layer, FSDPModule)
        layer.unshard()
        linear = layer.mlp.down_proj
        assert isinstance(linear, Fp8Linear)
        assert linear.weight.untyped_storage().nbytes() == 4, "one value of fp32 stands for the gathered weight"
        assert linear.weight_fp8.untyped_storage().nbytes() == linear.weight.numel()
        layer.reshard()
        assert linear.weight_fp8.untyped_storage().nbytes() == 0
        assert type(linear.weight.to_local()) is Tensor

    run_ranks(check, 2)


def test_parameters_written_to_without_an_optimizer_are_taken(run_ranks) -> None:
    # Catches a restored checkpoint that is trained with the copies of what was there before.
    def losses() -> list[float]:
        engine = engine_for("zero3-2")
        batch = batches()[0]
        found = [float(engine.forward(batch, cross_entropy).sum)]
        state = {name: value.detach().clone() * 0.5 for name, value in engine.state()["model"].state_dict().items()}
        engine.state()["model"].load_state_dict(state)
        engine.model.module.reshard()  # not drop_gathered, so that only the versions tell
        found.append(float(engine.forward(batch, cross_entropy).sum))
        return found

    for before, after in run_ranks(losses, 2):
        assert abs(before - after) > 0.01 * before
