"""Training in fp8: the same for every placement, and all that a run keeps of its weights is what it was."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from placement import RECOMPUTE, assert_same, num_ranks, place, whole
from ranks import Launch, Launches
from tiny_models import hf_config
from xorl.core.loss import cross_entropy
from xorl.core.models import spec_for
from xorl.core.nn.fp8 import Fp8Linear
from xorl.core.optim import build_optimizer
from xorl.core.parallel import apply
from xorl.data import PackedBatch
from xorl.data.batch import Document, collate
from xorl.train.engine import Engine

NUM_BATCHES = 6
KINDS = ("tensorwise", "rowwise")
PLACED = ("ddp-2", "zero3-1", "zero3-2", "zero3-3", "zero2-2", "hsdp-2x2")  # 3 divides no number of features
STEPPED = [
    *((layout, None) for layout in ("ddp-2", "zero3-2", "zero2-2", "hsdp-2x2")),
    ("zero3-2", torch.bfloat16),
]
MIXED = [("ddp-2", "rowwise", "none"), ("zero3-2", "rowwise", "operation"), ("zero3-2", "rowwise", "layer")]
HF_CONFIG = hf_config("qwen2", tie_word_embeddings=True)
MIXTURE = hf_config("qwen3_moe", moe_intermediate_size=48, num_hidden_layers=2)


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
    hf: Mapping[str, object] = HF_CONFIG,
) -> Engine:
    spec = spec_for(hf)
    with torch.device("meta"):
        model = spec.build(spec.config_from_hf(hf), merge_qkv=True)
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


def gradients_without_experts() -> dict[str, Tensor]:
    """Of the mixture, with only its linear layers in fp8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply, "convert_experts", lambda *_: None)
        return gradients("none", "rowwise", "none", (), None, None, MIXTURE)


def dtypes_reduced(fp8: str) -> set[torch.dtype]:
    """Of the gradients that FSDP2 hands on to be added up over ranks."""
    seen: set[torch.dtype] = set()
    copy_in = collectives.foreach_reduce_scatter_copy_in

    def see(gradients: list[Tensor], *rest: object) -> None:
        seen.update(gradient.dtype for gradient in gradients)
        copy_in(gradients, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "foreach_reduce_scatter_copy_in", see)
        gradients("zero3-2", fp8, "none", (), torch.bfloat16)
    return seen


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


def check_gathered() -> None:
    """Asserts in each rank."""
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


def losses_around_a_restored_state() -> list[float]:
    engine = engine_for("zero3-2")
    batch = batches()[0]
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
        add("none", "gradients", fp8, compute=partial(gradients, "none", fp8))
        add("zero3-2", "dtypes", fp8, compute=partial(dtypes_reduced, fp8))
    for fp8 in KINDS:
        for layout in PLACED:
            add(layout, "gradients", fp8, compute=partial(gradients, layout, fp8))
        for recompute in list(RECOMPUTE)[1:]:
            add("zero3-2", "recomputed", fp8, recompute, compute=partial(gradients, "zero3-2", fp8, recompute))
        add("zero3-2", "units", fp8, compute=partial(gradients, "zero3-2", fp8, "layer", ("mlp", "Linear")))
    compiled = ("tensorwise", "layer", (), None, "aot_eager")
    add("zero3-2", "compiled", compute=partial(gradients, "zero3-2", *compiled))
    for layout, fp8, recompute in (("none", "none", "none"), ("none", "rowwise", "none"), *MIXED):
        options = (fp8, recompute, (), None, None, MIXTURE)
        add(layout, "mixture", fp8, recompute, compute=partial(gradients, layout, *options))
    add("none", "mixture", "without experts", compute=gradients_without_experts)
    for dtype in (None, torch.bfloat16):
        for fp8 in ("none", "tensorwise"):
            add("none", "steps", fp8, dtype, compute=partial(steps, "none", fp8, dtype))
    for layout, dtype in STEPPED:
        add(layout, "steps", "tensorwise", dtype, compute=partial(steps, layout, "tensorwise", dtype))
    add("zero3-2", "gathered", compute=check_gathered)
    add("zero3-2", "restored", compute=losses_around_a_restored_state)
    return launch(cells)


def assert_same_gradients(found: Launches, fp8: str, *key: object) -> None:
    """On every rank, as one process computes them."""
    [reference] = found("none", "gradients", fp8)
    for measured in found(*key):
        assert_same(reference, measured, limit=2e-6)


@pytest.mark.parametrize("layout", PLACED)
@pytest.mark.parametrize("fp8", KINDS)
def test_gradient_does_not_depend_on_the_placement(fp8: str, layout: str, found: Launches) -> None:
    # Catches a scale of one shard in place of the whole weight's, padding of shards that is multiplied, and a copy of
    # a weight that another rank's rows are missing from.
    [reference], [plain] = found("none", "gradients", fp8), found("none", "gradients", "none")
    name = "model.layers.0.mlp.gate_up_proj.weight"
    assert 0.01 < (reference[name] - plain[name]).norm() / plain[name].norm() < 0.4, "that is not fp8"
    assert_same_gradients(found, fp8, layout, "gradients", fp8)


@pytest.mark.parametrize(("layout", "fp8", "recompute"), MIXED)
def test_gradient_of_experts_does_not_depend_on_the_placement(
    layout: str, fp8: str, recompute: str, found: Launches
) -> None:
    # Catches experts that stay in the compute dtype, and a recomputed layer that rounds other values.
    [reference], [plain] = found("none", "mixture", fp8, "none"), found("none", "mixture", "none", "none")
    [without] = found("none", "mixture", "without experts")
    for projection in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{projection}.weight"
        for other in (plain, without):
            assert 0.01 < (reference[name] - other[name]).norm() / other[name].norm() < 0.4, "that is not fp8"
    for measured in found(layout, "mixture", fp8, recompute):
        assert_same(reference, measured)


@pytest.mark.parametrize("fp8", ["none", *KINDS])
def test_gradients_are_in_the_dtype_that_parameters_are_gathered_in(fp8: str, found: Launches) -> None:
    # Catches gradients that copy engines, which carry that dtype, would round.
    assert found("zero3-2", "dtypes", fp8) == [{torch.bfloat16}] * 2


@pytest.mark.parametrize("recompute", list(RECOMPUTE)[1:])
@pytest.mark.parametrize("fp8", KINDS)
def test_recomputation_does_not_change_the_gradient(fp8: str, recompute: str, found: Launches) -> None:
    # Catches a recomputed forward pass that multiplies by freed or newer weights.
    assert_same_gradients(found, fp8, "zero3-2", "recomputed", fp8, recompute)


@pytest.mark.parametrize("fp8", KINDS)
def test_further_units_of_sharding_do_not_change_the_gradient(fp8: str, found: Launches) -> None:
    # Catches a unit within a layer that multiplies by freed or newer weights.
    assert_same_gradients(found, fp8, "zero3-2", "units", fp8)


def test_compiled_layers_have_the_same_gradient(found: Launches) -> None:
    # Catches a graph that keeps the values of a gathered weight, or its copy in fp8, of the call that it was made in.
    assert_same_gradients(found, "tensorwise", "zero3-2", "compiled")


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
