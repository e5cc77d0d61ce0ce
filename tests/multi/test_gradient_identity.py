"""One optimizer step is the same for every way of splitting its rows and placing its parameters."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from placement import LAYOUTS, RECOMPUTE, assert_same, num_ranks, place, whole
from ranks import Launch, Launches
from tiny_models import hf_config
from xorl.ckpt import Checkpointer
from xorl.core.loss import LossFn, all_reduce_metrics, combine_metrics, cross_entropy, get_loss, read_metrics
from xorl.core.models import Decoder, spec_for
from xorl.core.nn import LayerKernels
from xorl.core.optim import MuonOptions, OptimizerName, build_optimizer, scale_and_clip_
from xorl.core.parallel.compile import CompileBackend
from xorl.core.parallel.offload import ActivationOffload
from xorl.data import PackedBatch
from xorl.data.batch import Column, Document, collate
from xorl.kernels.attention import AttentionRequest, resolve_attention
from xorl.train.engine import Engine

NUM_ROWS = 16
# For losses of policy gradients: log-probabilities near those of 64 equal tokens, and advantages.
EXTRAS = ("logprobs", "advantages", "ref_logprobs")
OFFSETS = torch.tensor([[-4.2], [0.0], [-4.2]])
HF_CONFIG = hf_config(tie_word_embeddings=True)
# A dense layer, then experts, with a loss of the router.
EXPERTS_CONFIG = hf_config(
    "qwen3_moe", mlp_only_layers=[0], output_router_logits=True, router_aux_loss_coef=0.1, tie_word_embeddings=True
)
MODELS = {"dense": HF_CONFIG, "experts": EXPERTS_CONFIG, "untied": hf_config(tie_word_embeddings=False)}
SPLIT = [layout for layout in LAYOUTS if NUM_ROWS % num_ranks(layout) == 0]
PLACED = ["ddp-2", "zero3-2", "zero2-2", "hsdp-2x2", "offload-2"]
RECOMPUTED = [
    *((layout, "dense", list(RECOMPUTE)[1:]) for layout in ("none", "zero3-2", "zero2-2", "offload-2")),
    *(
        (*one, ["operation", "layer", "mlp"])
        for one in (("ddp-2", "dense"), ("ddp-2", "experts"), ("zero3-2", "experts"))
    ),
]
COMPILED = {"ddp-2": ["operation"], "zero3-2": ["operation", "first layer"]}
WITHOUT_UNITS = (("none", ()), ("layer", ()))
OFFLOADED = {
    "ddp-2": WITHOUT_UNITS,
    **dict.fromkeys(("zero3-2", "zero2-2", "offload-2"), (*WITHOUT_UNITS, ("none", ("mlp", "norm")))),
}
UNITS = ["mlp", "Attention", "norm", "Decoder"]
OPTIMIZERS: list[OptimizerName] = ["adamw", "sgd", "anyprecision_adamw", "muon"]
STEPPED: list[tuple[OptimizerName, str]] = [*((optimizer, "dense") for optimizer in OPTIMIZERS), ("muon", "experts")]
CONTINUED = [("none", "dense"), ("zero3-2", "dense"), ("zero3-2", "experts")]
SAVED = [("offload-2", None), ("zero3-2", "aot_eager")]
# By the units and the backend that are refused: what the error says.
REFUSED = {
    (("embed_tokens",), None): "unit_modules: .*the weight of the model's tied head",
    (("DecoderTrunk",), None): "unit_modules: .*the weight of the model's tied head",
    (("GatedMLP", "norm"), "aot_eager"): "unit_modules: GatedMLP .*is inside a layer",
}


def rows() -> list[list[Document]]:
    """16 bins of documents of unequal lengths, with unequal numbers of trained tokens."""
    generator = torch.Generator().manual_seed(7)
    bins = []
    for index in range(NUM_ROWS):
        documents = []
        for length in (3 + index, 5, 2 + index % 4):
            ids = torch.randint(0, 64, (length,), generator=generator)
            labels = torch.where(torch.rand(length, generator=generator) < index / NUM_ROWS, -100, ids)
            noise = torch.randn(len(EXTRAS), length, generator=torch.Generator().manual_seed(100 * index + length))
            extras = dict(zip(EXTRAS, (noise + OFFSETS).numpy(), strict=True))
            documents.append(Document(ids.numpy(), labels.numpy(), extras))
        bins.append(documents)
    return bins


def engine_for(
    layout: str,
    recompute: str = "none",
    units: Sequence[str] = (),
    param_dtype: torch.dtype = torch.float32,
    backend: CompileBackend | None = None,
    model_config: Mapping[str, object] = HF_CONFIG,
) -> Engine:
    """fp32 parameters are computed with in fp32, bf16 ones in bf16."""
    spec = spec_for(model_config)
    config = spec.config_from_hf(model_config)
    request = AttentionRequest(
        device_type="cpu", dtype=torch.float32, head_dim=config.layers[0].attention.head_dim, window=None
    )
    with torch.device("meta"):
        kernels = LayerKernels(attention=resolve_attention("sdpa", request))
        model = spec.build(config, merge_qkv=True, kernels=kernels).to(param_dtype)
    model.compute_dtype = param_dtype
    placed = place(model, layout, recompute, unit_modules=units, compile_backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Engine(placed, optimizer, torch.device("cpu"), max_grad_norm=None, flops=sum)


def step_gradient(
    layout: str,
    micro_batch_size: int,
    recompute: str = "none",
    units: Sequence[str] = (),
    param_dtype: torch.dtype = torch.float32,
    backend: CompileBackend | None = None,
    model_config: Mapping[str, object] = HF_CONFIG,
) -> tuple[dict[str, Tensor], float]:
    """Whole gradients by parameter, and the loss, of a step over all rows, as every rank ends up with them."""
    engine = engine_for(layout, recompute, units, param_dtype, backend, model_config)
    # Not of the first pass: only then does DistributedDataParallel lay its buckets out, and gradients into them.
    engine.forward_backward(batches_of(engine, micro_batch_size)[:1], cross_entropy)
    engine.zero_grad()
    return gradient_of(engine, micro_batch_size)


def batches_of(engine: Engine, micro_batch_size: int) -> Sequence[PackedBatch]:
    mesh = engine.model.mesh
    own = rows()[mesh.data.rank :: mesh.data.size]
    columns = dict.fromkeys(EXTRAS, Column())
    return [
        collate(list(chain.from_iterable(own[start : start + micro_batch_size])), pad_to_multiple_of=8, columns=columns)
        for start in range(0, len(own), micro_batch_size)
    ]


def gradient_of(
    engine: Engine, micro_batch_size: int, loss_fn: LossFn = cross_entropy
) -> tuple[dict[str, Tensor], float]:
    losses = engine.forward_backward(batches_of(engine, micro_batch_size), loss_fn)
    parameters = dict(engine.model.module.named_parameters())
    norm = scale_and_clip_(list(parameters.values()), losses.num_trained_tokens, None)
    gradients = {}
    for name, parameter in parameters.items():
        gradients[name] = whole(parameter.grad).float()
    # Of gradients in half precision, that is before they are divided and rounded.
    is_half = any(parameter.grad.dtype == torch.bfloat16 for parameter in parameters.values())
    torch.testing.assert_close(norm, joined(gradients).norm(), rtol=1e-3 if is_half else 1e-5, atol=0)
    return gradients, float(losses.loss_sum / losses.num_trained_tokens)


def step_gradients(
    layout: str, sizes: Sequence[int], model: str, recomputes: Sequence[str] = ("none",), **options
) -> list[tuple[dict[str, Tensor], float]]:
    """Of steps in micro-batches of these sizes, recomputed in these ways."""
    return [
        step_gradient(layout, size, recompute, model_config=MODELS[model], **options)
        for recompute in recomputes
        for size in sizes
    ]


def joined(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def policy_steps(layout: str, sizes: Sequence[int]) -> list[tuple[dict[str, Tensor], float, dict[str, float]]]:
    return [policy_step(layout, size) for size in sizes]


def policy_step(layout: str, micro_batch_size: int) -> tuple[dict[str, Tensor], float, dict[str, float]]:
    """Whole gradients, loss and metrics of one step of a loss whose ratios are of whole documents."""
    loss_fn = get_loss("drgrpo", {"ratio_type": "sequence"})
    engine = engine_for(layout)
    outputs = [engine.forward(batch, loss_fn).metrics for batch in batches_of(engine, micro_batch_size)]
    metrics = read_metrics(all_reduce_metrics(combine_metrics(outputs), engine.model.mesh.loss.group))
    return *gradient_of(engine, micro_batch_size, loss_fn), metrics


def compiled_step_gradients(layout: str, kinds: Sequence[str]) -> list[tuple[dict[str, Tensor], float, int]]:
    """(gradients, loss, number of compilations) of steps over packs of many lengths, one for each recomputation."""
    results = []
    for recompute in kinds:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        results.append((*step_gradient(layout, 1, recompute, backend=counter), counter.frame_count))
    return results


def offloaded_gradients(
    layout: str, cases: Sequence[tuple[str, Sequence[str]]]
) -> list[tuple[dict[str, Tensor], float]]:
    """Of steps that keep all activations elsewhere, by recomputation and units of sharding."""
    found = []
    for recompute, units in cases:
        engine = engine_for(layout, recompute, units)
        offload = ActivationOffload(torch.device("cpu"), limit_bytes=0.0, min_bytes=1)
        # `parallelize` would leave storages as small as these where they are.
        offload.install(list(engine.model.module.layers))
        found.append(gradient_of(engine, 4))
        assert offload.traffic_bytes > 0
    return found


def engine_with(
    layout: str,
    optimizer: OptimizerName,
    param_dtype: torch.dtype = torch.float32,
    backend: CompileBackend | None = None,
    model_config: Mapping[str, object] = HF_CONFIG,
) -> Engine:
    """States are in the dtype of the parameters."""
    engine = engine_for(layout, param_dtype=param_dtype, backend=backend, model_config=model_config)
    mesh, module = engine.model.mesh, engine.model.module
    assert isinstance(module, Decoder)
    replicas = mesh.loss.group if layout.startswith("ddp") else None
    engine.optimizer = build_optimizer(
        optimizer,
        module.named_parameters(),
        lr=0.1,
        weight_decay=0.1,
        no_decay_modules=["norm"],
        state_dtype=param_dtype,
        muon=MuonOptions(module.layer_matrices(), lr=0.02, replicas=replicas),
    )
    return engine


def batch_of(engine: Engine) -> PackedBatch:
    own = rows()[engine.model.mesh.data.rank :: engine.model.mesh.data.size]
    return collate(list(chain.from_iterable(own)), pad_to_multiple_of=8)


def parameters_of(engine: Engine) -> dict[str, Tensor]:
    named = engine.model.module.named_parameters()
    return {name: whole(parameter) for name, parameter in named}


def two_steps(layout: str, optimizer: OptimizerName, model: str) -> tuple[dict[str, Tensor], float]:
    """The parameters after two steps between which the loss is looked at, and the loss then."""
    engine = engine_with(layout, optimizer, model_config=MODELS[model])
    batch = batch_of(engine)
    for _ in range(2):
        losses = engine.forward_backward([batch], cross_entropy)
        engine.forward(batch, cross_entropy)
        engine.optim_step(0.1, divisor=losses.num_trained_tokens)
    loss = engine.forward(batch, cross_entropy).sum.detach()
    torch.distributed.all_reduce(loss)
    return parameters_of(engine), float(loss)


def skipped_step(layout: str, optimizer: OptimizerName) -> float:
    """How far a step with a gradient that is not finite moves the parameters."""
    engine = engine_with(layout, optimizer)
    before = parameters_of(engine)
    losses = engine.forward_backward([batch_of(engine)], cross_entropy)
    update = engine.optim_step(0.1, divisor=losses.num_trained_tokens * float("nan"))
    assert update.skipped
    after = parameters_of(engine)
    return max(float((after[name] - value).abs().max()) for name, value in before.items())


def steps_around_a_checkpoint(
    layout: str,
    folder: Path,
    optimizer: OptimizerName = "adamw",
    param_dtype: torch.dtype = torch.float32,
    backend: CompileBackend | None = None,
    model: str = "dense",
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters after two steps: straight on, and with a checkpoint in between that another engine continues."""

    def step(engine: Engine) -> None:
        losses = engine.forward_backward([batch_of(engine)], cross_entropy)
        engine.optim_step(0.1, divisor=losses.num_trained_tokens)

    engine, resumed = (engine_with(layout, optimizer, param_dtype, backend, MODELS[model]) for _ in range(2))
    step(engine)
    checkpointer = Checkpointer(folder)
    checkpoint = checkpointer.save(1, engine.state(), info={}, scalars={}, rng={})
    step(engine)
    checkpointer.load(checkpoint, resumed.state())
    step(resumed)
    return parameters_of(engine), parameters_of(resumed)


def every_optimizer_around_a_checkpoint(layout: str, model: str, folder: Path) -> list[tuple[dict, dict]]:
    kinds = [*((name, torch.bfloat16) for name in OPTIMIZERS), ("muon", torch.float32)]
    return [
        steps_around_a_checkpoint(layout, folder / f"{name}_{dtype}", name, dtype, model=model) for name, dtype in kinds
    ]


def refusal(units: Sequence[str], backend: CompileBackend | None) -> str:
    try:
        engine_for("zero3-1", units=units, backend=backend)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """By layout and what is computed: the table of this module."""
    folder = tmp_path_factory.mktemp("checkpoints")
    half = torch.bfloat16
    cells = {}

    def add(layout: str, *key: object, compute: Callable[..., object], **options: object) -> None:
        cells[layout, *key] = (num_ranks(layout), partial(compute, layout, **options))

    for model in MODELS:
        add("none", "whole", model, compute=step_gradients, sizes=[NUM_ROWS], model=model)
    for layout, model in product(SPLIT, ("dense", "experts")):
        sizes = [1, NUM_ROWS // num_ranks(layout)]
        add(layout, "split", model, compute=step_gradients, sizes=sizes, model=model)
    add("none", "policy", compute=policy_steps, sizes=[NUM_ROWS])
    for layout in ("ddp-2", "zero3-2", "offload-2"):
        add(layout, "policy", compute=policy_steps, sizes=[1, 4])
    for layout, model, kinds in RECOMPUTED:
        add(layout, "recomputed", model, compute=step_gradients, sizes=[4], model=model, recomputes=kinds)
    for layout, kinds in COMPILED.items():
        add(layout, "compiled", compute=compiled_step_gradients, kinds=kinds)
    for layout in ("none", "ddp-2", "zero3-2", "hsdp-2x2"):
        add(layout, "bf16", compute=step_gradients, sizes=[1, 4], model="dense", param_dtype=half)
    for layout, cases in OFFLOADED.items():
        add(layout, "offloaded", compute=offloaded_gradients, cases=cases)
    add("zero3-2", "units", compute=step_gradients, sizes=[4], model="dense", units=UNITS)
    for layout in ("zero3-1", "zero3-2", "zero2-2", "offload-2"):
        add(layout, "untied", compute=step_gradients, sizes=[4], model="untied", recomputes=["layer"])
    for layout, (optimizer, model) in product(("none", *PLACED), STEPPED):
        add(layout, "steps", optimizer, model, compute=two_steps, optimizer=optimizer, model=model)
    for layout, optimizer in product(("zero3-2", "offload-2"), OPTIMIZERS):
        add(layout, "skipped", optimizer, compute=skipped_step, optimizer=optimizer)
    for layout, backend in SAVED:
        add(layout, "saved", compute=steps_around_a_checkpoint, folder=folder / layout, backend=backend)
    for layout, model in CONTINUED:
        own = folder / f"{layout} {model}"
        add(layout, "continued", model, compute=every_optimizer_around_a_checkpoint, model=model, folder=own)
    for units, backend in REFUSED:
        cells["refused", units] = (1, partial(refusal, units, backend))
    return launch(cells)


def assert_same_gradients(found: Launches, layout: str, *key: object, model: str = "dense") -> None:
    """On every rank, of all steps of a cell, as one process computes them; losses, too."""
    [(reference, reference_loss)] = found("none", "whole", model)[0]
    for steps in found(layout, *key):
        for gradients, loss, *_ in steps:
            assert_same(reference, gradients)
            assert loss == pytest.approx(reference_loss, rel=1e-6)


@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("layout", SPLIT)
def test_gradient_does_not_depend_on_the_split(layout: str, model: str, found: Launches) -> None:
    # Catches means of means: any division by ranks, micro-batches or per-batch token counts; and a norm of gradients
    # that misses shards, or counts replicas.
    [(reference, _)] = found("none", "whole", model)[0]
    assert all(gradient.norm() > 0 for gradient in reference.values())
    assert_same_gradients(found, layout, "split", model, model=model)


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


@pytest.mark.parametrize(("layout", "model"), [(layout, model) for layout, model, _ in RECOMPUTED])
def test_recomputation_does_not_change_the_gradient(layout: str, model: str, found: Launches) -> None:
    # Catches a recomputed forward that runs without its gathered parameters, or twice in the gradient.
    assert_same_gradients(found, layout, "recomputed", model, model=model)


@pytest.mark.parametrize(("layout", "kinds"), COMPILED.items())
def test_compilation_does_not_change_the_gradient(layout: str, kinds: list[str], found: Launches) -> None:
    # Catches a graph that holds on to parameters which are gathered anew, one that is split at gradient buckets, and
    # one for each of the layers that are alike.
    assert_same_gradients(found, layout, "compiled")
    for results in found(layout, "compiled"):
        assert [number for *_, number in results] == [2 if kind == "first layer" else 1 for kind in kinds]


@pytest.mark.parametrize("layout", ["none", "ddp-2", "zero3-2", "hsdp-2x2"])
def test_gradient_of_bf16_parameters_does_not_depend_on_the_split(layout: str, found: Launches) -> None:
    # Catches a placement that cannot take bf16 parameters, or loses more of their gradients than bf16 arithmetic does.
    [(exact, exact_loss)] = found("none", "whole", "dense")[0]
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


def test_further_units_of_sharding_do_not_change_the_gradient(found: Launches) -> None:
    # Catches units sharded from the outside in, which leaves the inner ones nothing.
    assert_same_gradients(found, "zero3-2", "units")


@pytest.mark.parametrize("layout", ["zero3-1", "zero3-2", "zero2-2", "offload-2"])
def test_head_of_its_own_does_not_change_the_gradient(layout: str, found: Launches) -> None:
    # Catches a head, which is a unit of sharding, whose weight is freed before its gradient is there.
    assert "lm_head.weight" in found("none", "whole", "untied")[0][0][0]
    assert_same_gradients(found, layout, "untied", model="untied")


@pytest.mark.parametrize(("units", "backend"), REFUSED)
def test_units_that_cannot_be_sharded_are_refused(units: tuple[str, ...], backend: str | None, found: Launches) -> None:
    # Catches an error from deep within torch about mixed tensors, when the loss reads the tied head, or about hooks of
    # FSDP within a compiled layer, at the first step.
    assert re.match(REFUSED[units, backend], found("refused", units)[0])


@pytest.mark.parametrize("layout", PLACED)
@pytest.mark.parametrize(("optimizer", "model"), STEPPED)
def test_steps_do_not_depend_on_the_placement(optimizer: str, model: str, layout: str, found: Launches) -> None:
    # Catches an optimizer that cannot take shards, and a forward pass with gathered parameters of before the step.
    [(expected, expected_loss)] = found("none", "steps", optimizer, model)
    for parameters, loss in found(layout, "steps", optimizer, model):
        # AdamW divides by the gradient's own size, so it magnifies what is lost in summation.
        assert_same(expected, parameters, limit=1e-3)
        assert loss == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.parametrize("layout", ["zero3-2", "offload-2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradient_that_is_not_finite_moves_no_shard(layout: str, optimizer: str, found: Launches) -> None:
    # Catches weights that are poisoned on the device before the host sees the loss.
    assert found(layout, "skipped", optimizer) == [0.0, 0.0]


@pytest.mark.parametrize("layout", [layout for layout, _ in SAVED])
def test_state_is_saved_and_restored_to_the_bit(layout: str, found: Launches) -> None:
    # Catches state that is loaded into tensors which sharding, or a compiled graph, has replaced by others.
    for straight, resumed in found(layout, "saved"):
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


@pytest.mark.parametrize(("layout", "model"), CONTINUED)
def test_every_optimizer_continues_to_the_bit(layout: str, model: str, found: Launches) -> None:
    # Catches state that is not saved, and random roundings that depend on more than the step.
    for results in found(layout, "continued", model):
        for straight, resumed in results:
            torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
