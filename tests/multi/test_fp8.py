"""Training in fp8: the same for every placement, and all that a run keeps of its weights is what it was."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from placement import RECOMPUTE, assert_same, num_ranks, placed, whole
from ranks import Launch, Launches
from tiny_models import hf_config
from xorl.core.loss import cross_entropy
from xorl.core.nn.fp8 import Fp8Linear
from xorl.core.optim import build_optimizer
from xorl.core.parallel import apply
from xorl.data import PackedBatch
from xorl.data.batch import Document, collate
from xorl.train.engine import Engine

KINDS = ("tensorwise", "rowwise")
PLACED = ("ddp-2", "zero3-1", "zero3-2", "zero3-3", "zero2-2", "hsdp-2x2")  # 3 divides no number of features
STEPPED = [
    *((layout, None) for layout in ("ddp-2", "zero3-2", "zero2-2", "hsdp-2x2")),
    ("zero3-2", torch.bfloat16),
]
MODELS = {
    "dense": hf_config("qwen2", tie_word_embeddings=True),
    "experts": hf_config("qwen3_moe", moe_intermediate_size=48, num_hidden_layers=2),
}
# By kind and model: layouts, what is recomputed and other options, for gradients that one process computes, too.
CASES: list[tuple[str, str, str, str, dict[str, object]]] = [
    *((fp8, "dense", layout, "none", {}) for fp8 in KINDS for layout in PLACED),
    *((fp8, "dense", "zero3-2", recompute, {}) for fp8 in KINDS for recompute in list(RECOMPUTE)[1:]),
    *((fp8, "dense", "zero3-2", "layer", {"unit_modules": ("mlp", "Linear")}) for fp8 in KINDS),
    ("tensorwise", "dense", "zero3-2", "layer", {"compile_backend": "aot_eager"}),
    ("rowwise", "experts", "ddp-2", "none", {}),
    ("rowwise", "experts", "zero3-2", "operation", {}),
    ("rowwise", "experts", "zero3-2", "layer", {}),
]


def engine_for(layout: str, fp8: str, model: str = "dense", recompute: str = "none", **options: object) -> Engine:
    found = placed(MODELS[model], layout, recompute, fp8=fp8, **options)
    optimizer = build_optimizer("adamw", found.module.named_parameters(), lr=0.05, weight_decay=0.1)
    return Engine(found, optimizer, torch.device("cpu"), max_grad_norm=None, flops=sum)


def in_dtype(dtype: torch.dtype | None) -> dict[str, object]:
    """The options that gather parameters and compute in a dtype."""
    return {"param_dtype": dtype, "compute_dtype": dtype}


def batches() -> list[PackedBatch]:
    """Micro-batches of uneven documents; scales are taken from one, so every split of the work keeps them whole."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(6):
        ids = [torch.randint(0, 64, (n,), generator=generator).numpy() for n in (3 + index, 5, 12 + index % 4)]
        made.append(collate([Document(each, each) for each in ids], pad_to_multiple_of=8))  # not a multiple of 16
    return made


def own(engine: Engine) -> list[PackedBatch]:
    return batches()[engine.model.mesh.data.rank :: engine.model.mesh.data.size]


def gradients(*placement: str, **options: object) -> dict[str, Tensor]:
    engine = engine_for(*placement, **options)
    engine.forward_backward(own(engine), cross_entropy)
    return {name: whole(p.grad) for name, p in engine.model.module.named_parameters()}


def gradients_without_experts() -> dict[str, Tensor]:
    """Of the mixture, with only its linear layers in fp8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply, "convert_experts", lambda *_: None)
        return gradients("none", "rowwise", "experts")


def dtypes_reduced(fp8: str) -> set[torch.dtype]:
    """Of the gradients that FSDP2 hands on to be added up over ranks."""
    seen: set[torch.dtype] = set()
    copy_in = collectives.foreach_reduce_scatter_copy_in

    def see(gradients: list[Tensor], *rest: object) -> None:
        seen.update(gradient.dtype for gradient in gradients)
        copy_in(gradients, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "foreach_reduce_scatter_copy_in", see)
        gradients("zero3-2", fp8, **in_dtype(torch.bfloat16))
    return seen


def steps(layout: str, fp8: str, dtype: torch.dtype | None) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters after two steps of several micro-batches, and losses before, between and after them."""
    engine, [held_out, *_] = engine_for(layout, fp8, **in_dtype(dtype)), batches()
    losses = []
    for _ in range(2):
        sums = engine.forward_backward(own(engine), cross_entropy)
        losses.append(float(engine.forward(held_out, cross_entropy).sum))
        engine.optim_step(0.05, divisor=sums.num_trained_tokens)
        losses.append(float(engine.forward(held_out, cross_entropy).sum))
    engine.model.drop_gathered()
    return {name: whole(p) for name, p in engine.model.module.named_parameters()}, losses


def check_gathered() -> None:
    """Asserts in each rank."""
    engine, plain = (engine_for("zero3-2", fp8) for fp8 in ("tensorwise", "none"))
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


def losses_around_a_restored_state() -> list[float]:
    engine, [batch, *_] = engine_for("zero3-2", "tensorwise"), batches()
    found = [float(engine.forward(batch, cross_entropy).sum)]
    state = {name: value.detach().clone() * 0.5 for name, value in engine.state()["model"].state_dict().items()}
    engine.state()["model"].load_state_dict(state)
    engine.model.module.reshard()  # not drop_gathered, so that only the versions tell
    found.append(float(engine.forward(batch, cross_entropy).sum))
    return found


@pytest.fixture(scope="module")
def found(launch: Launch) -> Launches:
    """By layout and what is computed: the table of this module."""
    cells = {}

    def add(layout: str, *key: object, compute: Callable[[], object]) -> None:
        cells[layout, *key] = (num_ranks(layout), compute)

    for fp8 in ("none", *KINDS):
        add("zero3-2", "dtypes", fp8, compute=partial(dtypes_reduced, fp8))
        for model in MODELS:
            add("none", "gradients", fp8, model, compute=partial(gradients, "none", fp8, model))
    for index, (fp8, model, layout, recompute, options) in enumerate(CASES):
        add(layout, "case", index, compute=partial(gradients, layout, fp8, model, recompute, **options))
    add("none", "without experts", compute=gradients_without_experts)
    for dtype in (None, torch.bfloat16):
        for fp8 in ("none", "tensorwise"):
            add("none", "steps", fp8, dtype, compute=partial(steps, "none", fp8, dtype))
    for layout, dtype in STEPPED:
        add(layout, "steps", "tensorwise", dtype, compute=partial(steps, layout, "tensorwise", dtype))
    add("zero3-2", "gathered", compute=check_gathered)
    add("zero3-2", "restored", compute=losses_around_a_restored_state)
    return launch(cells)


@pytest.mark.parametrize(
    ("index", "case"), list(enumerate(CASES)), ids=["-".join((*map(str, case[:4]), *case[4])) for case in CASES]
)
def test_gradient_does_not_depend_on_the_placement(index: int, case: tuple, found: Launches) -> None:
    # Catches a scale of one shard in place of the whole weight's, padding of shards that is multiplied, a copy of a
    # weight that another rank's rows are missing from, a recomputed pass or a unit within a layer that multiplies by
    # freed or newer weights, a graph that keeps the values of a gathered weight, or its copy in fp8, of the call that
    # it was made in, and experts that stay in the compute dtype.
    fp8, model, layout, *_ = case
    [reference], [plain] = found("none", "gradients", fp8, model), found("none", "gradients", "none", model)
    others = {"model.layers.0.mlp.gate_up_proj.weight": [plain]}
    if model == "experts":
        [without] = found("none", "without experts")
        experts = [f"model.layers.1.mlp.experts.{name}.weight" for name in ("gate_up_proj", "down_proj")]
        others = {name: [plain, without] for name in experts}
    for name, unlike in others.items():
        for other in unlike:
            assert 0.01 < (reference[name] - other[name]).norm() / other[name].norm() < 0.4, "that is not fp8"
    for measured in found(layout, "case", index):
        assert_same(reference, measured, limit=1e-6 if model == "experts" else 2e-6)


@pytest.mark.parametrize("fp8", ["none", *KINDS])
def test_gradients_are_in_the_dtype_that_parameters_are_gathered_in(fp8: str, found: Launches) -> None:
    # Catches gradients that copy engines, which carry that dtype, would round.
    assert found("zero3-2", "dtypes", fp8) == [{torch.bfloat16}] * 2


@pytest.mark.parametrize(("layout", "dtype"), STEPPED)
def test_steps_do_not_depend_on_the_placement(layout: str, dtype: torch.dtype | None, found: Launches) -> None:
    # Catches copies of weights from before an optimizer step, and a gradient of the gathered placeholder that is lost.
    [(parameters, losses)], [(_, plain)] = (found("none", "steps", fp8, dtype) for fp8 in ("tensorwise", "none"))
    assert losses == pytest.approx(plain, rel=0.1)
    assert losses[-1] < 0.8 * losses[0]
    for measured, its_losses in found(layout, "steps", "tensorwise", dtype):
        # bf16 rounds the gradients of each rank before they are summed, and AdamW divides by their own size.
        assert its_losses == pytest.approx(losses, rel=2e-2 if dtype else 1e-4)
        assert_same(parameters, measured, limit=0.2 if dtype else 1e-3)


def test_weights_are_gathered_as_bytes_and_kept_as_they_were(found: Launches) -> None:
    # Catches a gather in bf16, a gathered copy that is kept beside fp8's, and names or values that conversion changes.
    found("zero3-2", "gathered")


def test_parameters_written_to_without_an_optimizer_are_taken(found: Launches) -> None:
    # Catches a restored checkpoint that is trained with the copies of what was there before.
    for before, after in found("zero3-2", "restored"):
        assert abs(before - after) > 0.01 * before
