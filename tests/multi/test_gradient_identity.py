"""What every placement of parameters computes alike: policy losses, compilation, bf16, offloading, saved state.

test_layouts.py compares the gradients of other losses, however rows are split and layers are recomputed, and
test_optimizer_ranks.py the steps of optimizers.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from placement import assert_same, batches_of, num_ranks, placed, whole
from ranks import Launch, Launches
from tiny_models import hf_config
from xorl.ckpt import Checkpointer
from xorl.core.loss import LossFn, all_reduce_metrics, combine_metrics, cross_entropy, get_loss, read_metrics
from xorl.core.models import Decoder
from xorl.core.optim import MuonOptions, OptimizerName, build_optimizer, scale_and_clip_
from xorl.core.parallel.compile import CompileBackend
from xorl.core.parallel.offload import ActivationOffload
from xorl.train.engine import Engine

NUM_ROWS = 16
MODELS = {
    "dense": hf_config(tie_word_embeddings=True),
    # A dense layer, then experts, with a loss of the router.
    "experts": hf_config(
        "qwen3_moe", mlp_only_layers=[0], output_router_logits=True, router_aux_loss_coef=0.1, tie_word_embeddings=True
    ),
}
COMPILED = {"ddp-2": "operation", "zero3-2": "first layer"}
WITHOUT_UNITS = (("none", ()), ("layer", ()))
OFFLOADED = {
    "ddp-2": WITHOUT_UNITS,
    **dict.fromkeys(("zero3-2", "zero2-2", "offload-2"), (*WITHOUT_UNITS, ("none", ("mlp", "norm")))),
}
OPTIMIZERS: list[OptimizerName] = ["adamw", "sgd", "anyprecision_adamw", "muon"]
EVERY = [*((name, torch.bfloat16, None) for name in OPTIMIZERS), ("muon", torch.float32, None)]
# By layout and model, the optimizers with the dtypes of parameters, and what compiles layers.
CONTINUED = {
    ("none", "dense"): EVERY,
    ("zero3-2", "dense"): [*EVERY, ("adamw", torch.float32, "aot_eager")],
    ("zero3-2", "experts"): EVERY,
    ("offload-2", "dense"): [("adamw", torch.float32, None)],
}
# By the units and the backend that are refused: what the error says.
REFUSED = {
    (("embed_tokens",), None): "unit_modules: .*the weight of the model's tied head",
    (("DecoderTrunk",), None): "unit_modules: .*the weight of the model's tied head",
    (("GatedMLP", "norm"), "aot_eager"): "unit_modules: GatedMLP .*is inside a layer",
}


def engine_for(
    layout: str,
    model: str = "dense",
    recompute: str = "none",
    *,
    optimizer: OptimizerName = "sgd",
    dtype: torch.dtype = torch.float32,
    **policy: object,
) -> Engine:
    """fp32 parameters are computed with in fp32, bf16 ones in bf16; states are in the dtype of the parameters."""
    found = placed(MODELS[model], layout, recompute, dtype=dtype, **policy)
    assert isinstance(found.module, Decoder)
    updates = build_optimizer(
        optimizer,
        found.module.named_parameters(),
        lr=0.1,
        weight_decay=0.1,
        no_decay_modules=["norm"],
        state_dtype=dtype,
        muon=MuonOptions(
            found.module.layer_matrices(),
            lr=0.02,
            replicas=found.mesh.loss.group if layout.startswith("ddp") else None,
        ),
    )
    return Engine(found, updates, torch.device("cpu"), max_grad_norm=None, flops=sum)


def gradient_of(engine: Engine, num_bins: int, loss_fn: LossFn = cross_entropy) -> tuple[dict[str, Tensor], float]:
    """Whole gradients by parameter, and the loss, of a step in passes of so many bins, as every rank has them."""
    losses = engine.forward_backward(batches_of(engine, NUM_ROWS, num_bins), loss_fn)
    parameters = dict(engine.model.module.named_parameters())
    norm = scale_and_clip_(list(parameters.values()), losses.num_trained_tokens, None)
    gradients = {name: whole(parameter.grad).float() for name, parameter in parameters.items()}
    # Of gradients in half precision, that is before they are divided and rounded.
    is_half = any(parameter.grad.dtype == torch.bfloat16 for parameter in parameters.values())
    torch.testing.assert_close(norm, joined(gradients).norm(), rtol=1e-3 if is_half else 1e-5, atol=0)
    return gradients, float(losses.loss_sum / losses.num_trained_tokens)


def gradients(layout: str, sizes: Sequence[int], **options: object) -> list[tuple[dict[str, Tensor], float]]:
    return [gradient_of(engine_for(layout, **options), size) for size in sizes]


def joined(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def policy_steps(layout: str, sizes: Sequence[int]) -> list[tuple[dict[str, Tensor], float, dict[str, float]]]:
    """Whole gradients, loss and metrics of steps of a loss whose ratios are of whole documents."""
    loss_fn = get_loss("drgrpo", {"ratio_type": "sequence"})
    found = []
    for size in sizes:
        engine = engine_for(layout)
        outputs = [engine.forward(batch, loss_fn).metrics for batch in batches_of(engine, NUM_ROWS, size)]
        metrics = read_metrics(all_reduce_metrics(combine_metrics(outputs), engine.model.mesh.loss.group))
        found.append((*gradient_of(engine, size, loss_fn), metrics))
    return found


def compiled_gradients(layout: str, recompute: str) -> list[tuple[dict[str, Tensor], float, int]]:
    """(gradients, loss, number of compilations) of a step over packs of many lengths."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    engine = engine_for(layout, recompute=recompute, compile_backend=counter)
    # Only then does DistributedDataParallel lay its buckets out, and gradients into them.
    engine.forward_backward(batches_of(engine, NUM_ROWS, 1)[:1], cross_entropy)
    engine.zero_grad()
    return [(*gradient_of(engine, 1), counter.frame_count)]


def offloaded_gradients(
    layout: str, cases: Sequence[tuple[str, Sequence[str]]]
) -> list[tuple[dict[str, Tensor], float]]:
    """Of steps that keep all activations elsewhere, by recomputation and units of sharding."""
    found = []
    for recompute, units in cases:
        engine = engine_for(layout, recompute=recompute, unit_modules=units)
        offload = ActivationOffload(torch.device("cpu"), limit_bytes=0.0, min_bytes=1)
        # `parallelize` would leave storages as small as these where they are.
        offload.install(list(engine.model.module.layers))
        found.append(gradient_of(engine, 4))
        assert offload.traffic_bytes > 0
    return found


def parameters_of(engine: Engine) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in engine.model.module.named_parameters()}


def skipped_step(layout: str, optimizer: OptimizerName) -> float:
    """How far a step with a gradient that is not finite moves the parameters."""
    engine = engine_for(layout, optimizer=optimizer)
    before = parameters_of(engine)
    losses = engine.forward_backward(batches_of(engine, NUM_ROWS, NUM_ROWS), cross_entropy)
    update = engine.optim_step(0.1, divisor=losses.num_trained_tokens * float("nan"))
    assert update.skipped
    after = parameters_of(engine)
    return max(float((after[name] - value).abs().max()) for name, value in before.items())


def steps_around_a_checkpoint(layout: str, model: str, folder: Path) -> list[tuple[dict, dict]]:
    """The parameters after two steps: straight on, and with a checkpoint in between that another engine continues."""

    def step(engine: Engine) -> None:
        losses = engine.forward_backward(batches_of(engine, NUM_ROWS, NUM_ROWS), cross_entropy)
        engine.optim_step(0.1, divisor=losses.num_trained_tokens)

    found = []
    for index, (optimizer, dtype, backend) in enumerate(CONTINUED[layout, model]):
        options = {"optimizer": optimizer, "dtype": dtype, "compile_backend": backend}
        engine, resumed = (engine_for(layout, model, **options) for _ in range(2))
        step(engine)
        checkpointer = Checkpointer(folder / f"{layout} {model} {index}")
        checkpoint = checkpointer.save(1, engine.state(), info={}, scalars={}, rng={})
        step(engine)
        checkpointer.load(checkpoint, resumed.state())
        step(resumed)
        found.append((parameters_of(engine), parameters_of(resumed)))
    return found


def refusal(units: Sequence[str], backend: CompileBackend | None) -> str:
    try:
        engine_for("zero3-1", unit_modules=units, compile_backend=backend)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """By layout and what is computed: the table of this module."""
    folder = tmp_path_factory.mktemp("checkpoints")
    cells = {}

    def add(layout: str, *key: object, compute: Callable[..., object], **options: object) -> None:
        cells[layout, *key] = (num_ranks(layout), partial(compute, layout, **options))

    add("none", "whole", compute=gradients, sizes=[NUM_ROWS])
    add("none", "policy", compute=policy_steps, sizes=[NUM_ROWS])
    for layout in ("ddp-2", "zero3-2", "offload-2"):
        add(layout, "policy", compute=policy_steps, sizes=[1, 4])
    for layout, recompute in COMPILED.items():
        add(layout, "compiled", compute=compiled_gradients, recompute=recompute)
    for layout in ("none", "ddp-2", "zero3-2", "hsdp-2x2"):
        add(layout, "bf16", compute=gradients, sizes=[1, 4], dtype=torch.bfloat16)
    for layout, cases in OFFLOADED.items():
        add(layout, "offloaded", compute=offloaded_gradients, cases=cases)
    for layout, optimizer in product(("zero3-2", "offload-2"), OPTIMIZERS):
        add(layout, "skipped", optimizer, compute=skipped_step, optimizer=optimizer)
    for layout, model in CONTINUED:
        add(layout, "continued", model, compute=steps_around_a_checkpoint, model=model, folder=folder)
    for units, backend in REFUSED:
        cells["refused", units] = (1, partial(refusal, units, backend))
    return launch(cells)


def assert_same_gradients(found: Launches, layout: str, *key: object) -> None:
    """On every rank, of all steps of a cell, as one process computes them; losses, too."""
    [(reference, reference_loss)] = found("none", "whole")[0]
    for steps in found(layout, *key):
        for gradients, loss, *_ in steps:
            assert_same(reference, gradients)
            assert loss == pytest.approx(reference_loss, rel=1e-6)


@pytest.mark.parametrize("layout", ["ddp-2", "zero3-2", "offload-2"])
def test_gradient_and_metrics_of_a_policy_loss_do_not_depend_on_the_split(layout: str, found: Launches) -> None:
    # Catches a head whose logits are computed again from weights that are gone, and metrics averaged by rank.
    [(reference, reference_loss, reference_metrics)] = found("none", "policy")[0]
    assert reference_metrics["clip_fraction:mean"] > 0
    for by_size in found(layout, "policy"):
        for gradients, loss, metrics in by_size:
            assert_same(reference, gradients)
            assert loss == pytest.approx(reference_loss, rel=1e-5)
            assert metrics == pytest.approx(reference_metrics, rel=1e-5)


@pytest.mark.parametrize(("layout", "recompute"), COMPILED.items())
def test_compilation_does_not_change_the_gradient(layout: str, recompute: str, found: Launches) -> None:
    # Catches a graph that holds on to parameters which are gathered anew, one that is split at gradient buckets, and
    # one for each of the layers that are alike.
    assert_same_gradients(found, layout, "compiled")
    for [(*_, number)] in found(layout, "compiled"):
        assert number == (2 if recompute == "first layer" else 1)


@pytest.mark.parametrize("layout", ["none", "ddp-2", "zero3-2", "hsdp-2x2"])
def test_gradient_of_bf16_parameters_does_not_depend_on_the_split(layout: str, found: Launches) -> None:
    # Catches a placement that cannot take bf16 parameters, or loses more of their gradients than bf16 arithmetic does.
    [(exact, exact_loss)] = found("none", "whole")[0]
    for by_size in found(layout, "bf16"):
        for gradients, loss in by_size:
            # Norms of queries and keys have small gradients, of which bf16 activations leave the least.
            assert_same(exact, gradients, limit=1e-1)
            assert_same({"all": joined(exact)}, {"all": joined(gradients)}, limit=2e-2)
            assert loss == pytest.approx(exact_loss, rel=1e-3)


@pytest.mark.parametrize("layout", OFFLOADED)
def test_offloading_activations_does_not_change_the_gradient(layout: str, found: Launches) -> None:
    # Catches gathered parameters, of a layer or of a unit within it, that are taken for activations and then freed.
    assert_same_gradients(found, layout, "offloaded")


@pytest.mark.parametrize(("units", "backend"), REFUSED)
def test_units_that_cannot_be_sharded_are_refused(units: tuple[str, ...], backend: str | None, found: Launches) -> None:
    # Catches an error from deep within torch about mixed tensors, when the loss reads the tied head, or about hooks of
    # FSDP within a compiled layer, at the first step.
    assert re.match(REFUSED[units, backend], found("refused", units)[0])


@pytest.mark.parametrize("layout", ["zero3-2", "offload-2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradient_that_is_not_finite_moves_no_shard(layout: str, optimizer: str, found: Launches) -> None:
    # Catches weights that are poisoned on the device before the host sees the loss.
    assert found(layout, "skipped", optimizer) == [0.0, 0.0]


@pytest.mark.parametrize(("layout", "model"), CONTINUED)
def test_every_optimizer_continues_to_the_bit(layout: str, model: str, found: Launches) -> None:
    # Catches state that is not saved or that is loaded into tensors which sharding or a compiled graph has replaced,
    # and random roundings that depend on more than the step.
    for results in found(layout, "continued", model):
        for straight, resumed in results:
            torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
