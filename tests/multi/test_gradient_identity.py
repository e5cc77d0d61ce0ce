"""One optimizer step is the same for every way of splitting its rows and placing its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from placement import LAYOUTS, RECOMPUTE, assert_same, num_ranks, place, whole
from tiny_models import hf_config
from xorl.ckpt import Checkpointer
from xorl.core.loss import LossFn, all_reduce_metrics, combine_metrics, cross_entropy, get_loss, read_metrics
from xorl.core.models import Decoder, spec_for
from xorl.core.nn import LayerKernels
from xorl.core.optim import MuonOptions, OptimizerName, build_optimizer, scale_and_clip_
from xorl.core.parallel.compile import CompileBackend
from xorl.core.parallel.offload import ActivationOffload
from xorl.data import PackedBatch
from xorl.data.batch import Document, collate
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
MODELS = {"dense": HF_CONFIG, "experts": EXPERTS_CONFIG}


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
    request = AttentionRequest(device_type="cpu", dtype=torch.float32, head_dim=config.attention.head_dim, window=None)
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
    return [
        collate(
            list(chain.from_iterable(own[start : start + micro_batch_size])), pad_to_multiple_of=8, extra_names=EXTRAS
        )
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


def joined(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@pytest.mark.multi
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if NUM_ROWS % num_ranks(layout) == 0])
def test_gradient_does_not_depend_on_the_split(layout: str, model: str, run_ranks) -> None:
    # Catches means of means: any division by ranks, micro-batches or per-batch token counts; and a norm of gradients
    # that misses shards, or counts replicas.
    world_size, options = num_ranks(layout), {"model_config": MODELS[model]}
    [(reference, reference_loss)] = run_ranks(lambda: step_gradient("none", NUM_ROWS, **options), 1)
    assert all(gradient.norm() > 0 for gradient in reference.values())
    sizes = [size for size in (1, 2, 4, 8, 16) if size * world_size <= NUM_ROWS]
    for by_size in run_ranks(lambda: [step_gradient(layout, size, **options) for size in sizes], world_size):
        for gradients, loss in by_size:
            assert_same(reference, gradients)
            assert loss == pytest.approx(reference_loss, rel=1e-6)


def policy_step(layout: str, micro_batch_size: int) -> tuple[dict[str, Tensor], float, dict[str, float]]:
    """Whole gradients, loss and metrics of one step of a loss whose ratios are of whole documents."""
    loss_fn = get_loss("drgrpo", {"ratio_type": "sequence"})
    engine = engine_for(layout)
    outputs = [engine.forward(batch, loss_fn).metrics for batch in batches_of(engine, micro_batch_size)]
    metrics = read_metrics(all_reduce_metrics(combine_metrics(outputs), engine.model.mesh.loss.group))
    return *gradient_of(engine, micro_batch_size, loss_fn), metrics


@pytest.mark.multi
@pytest.mark.parametrize("layout", ["ddp-2", "zero3-2", "offload-2"])
def test_gradient_and_metrics_of_a_policy_loss_do_not_depend_on_the_split(layout: str, run_ranks) -> None:
    # Catches a head whose logits are computed again from weights that are gone, and metrics averaged by rank.
    [(reference, reference_loss, reference_metrics)] = run_ranks(lambda: policy_step("none", NUM_ROWS), 1)
    assert reference_metrics["clip_fraction:mean"] > 0
    for by_size in run_ranks(lambda: [policy_step(layout, size) for size in (1, 4)], 2):
        for gradients, loss, metrics in by_size:
            assert_same(reference, gradients)
            assert loss == pytest.approx(reference_loss, rel=1e-5)
            assert metrics == pytest.approx(reference_metrics, rel=1e-5)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("layout", "model"),
    [(layout, "dense") for layout in ("none", "ddp-2", "zero3-2", "zero2-2", "offload-2")]
    + [(layout, "experts") for layout in ("ddp-2", "zero3-2")],
)
def test_recomputation_does_not_change_the_gradient(layout: str, model: str, run_ranks) -> None:
    # Catches a recomputed forward that runs without its gathered parameters, or twice in the gradient.
    is_partial = layout == "ddp-2" or model == "experts"
    kinds, options = (
        ["operation", "layer", "mlp"] if is_partial else list(RECOMPUTE)[1:],
        {"model_config": MODELS[model]},
    )
    [(reference, _)] = run_ranks(lambda: step_gradient("none", 4, **options), 1)
    for by_kind in run_ranks(lambda: [step_gradient(layout, 4, kind, **options) for kind in kinds], num_ranks(layout)):
        for gradients, _ in by_kind:
            assert_same(reference, gradients)


def compiled_step_gradients(layout: str, kinds: Sequence[str]) -> list[tuple[dict[str, Tensor], float, int]]:
    """(gradients, loss, number of compilations) of steps over packs of many lengths, one for each recomputation."""
    results = []
    for recompute in kinds:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        results.append((*step_gradient(layout, 1, recompute, backend=counter), counter.frame_count))
    return results


@pytest.mark.multi
@pytest.mark.parametrize(("layout", "kinds"), [("ddp-2", ["operation"]), ("zero3-2", ["operation", "first layer"])])
def test_compilation_does_not_change_the_gradient(layout: str, kinds: list[str], run_ranks) -> None:
    # Catches a graph that holds on to parameters which are gathered anew, one that is split at gradient buckets, and
    # one for each of the layers that are alike.
    [(reference, reference_loss)] = run_ranks(lambda: step_gradient("none", 4), 1)
    for results in run_ranks(lambda: compiled_step_gradients(layout, kinds), 2):
        for kind, (gradients, loss, num_compilations) in zip(kinds, results, strict=True):
            assert_same(reference, gradients)
            assert loss == pytest.approx(reference_loss, rel=1e-6)
            assert num_compilations == (2 if kind == "first layer" else 1)


@pytest.mark.multi
def test_gradient_of_bf16_parameters_does_not_depend_on_the_split(run_ranks) -> None:
    # Catches a placement that cannot take bf16 parameters, or loses more of their gradients than bf16 arithmetic does.
    half = torch.bfloat16
    [(exact, exact_loss)] = run_ranks(lambda: step_gradient("none", NUM_ROWS), 1)
    for layout in ("none", "ddp-2", "zero3-2", "hsdp-2x2"):
        results = run_ranks(
            lambda layout=layout: [step_gradient(layout, size, param_dtype=half) for size in (1, 4)],
            num_ranks(layout),
        )
        for by_size in results:
            for gradients, loss in by_size:
                # Norms of queries and keys have small gradients, of which bf16 activations leave the least.
                assert_same(exact, gradients, limit=1e-1)
                assert_same({"all": joined(exact)}, {"all": joined(gradients)}, limit=2e-2)
                assert loss == pytest.approx(exact_loss, rel=1e-3)


def offloaded_gradient(layout: str, recompute: str, units: Sequence[str]) -> dict[str, Tensor]:
    engine = engine_for(layout, recompute, units)
    offload = ActivationOffload(torch.device("cpu"), limit_bytes=0.0, min_bytes=1)
    # `parallelize` would leave storages as small as these where they are.
    offload.install(list(engine.model.module.layers))
    gradients, _ = gradient_of(engine, 4)
    assert offload.traffic_bytes > 0
    return gradients


@pytest.mark.multi
@pytest.mark.parametrize("layout", ["ddp-2", "zero3-2", "zero2-2", "offload-2"])
def test_offloading_activations_does_not_change_the_gradient(layout: str, run_ranks) -> None:
    # Catches gathered parameters, of a layer or of a unit within it, that are taken for activations and then freed.
    cases = [("none", ()), ("layer", ())] + ([] if layout == "ddp-2" else [("none", ("mlp", "norm"))])
    [(reference, _)] = run_ranks(lambda: step_gradient("none", 4), 1)
    for by_case in run_ranks(lambda: [offloaded_gradient(layout, *case) for case in cases], 2):
        for gradients in by_case:
            assert_same(reference, gradients)


@pytest.mark.multi
def test_further_units_of_sharding_do_not_change_the_gradient(run_ranks) -> None:
    # Catches units sharded from the outside in, which leaves the inner ones nothing.
    units = ["mlp", "Attention", "norm", "Decoder"]
    [(reference, _)] = run_ranks(lambda: step_gradient("none", 4), 1)
    for gradients, _ in run_ranks(lambda: step_gradient("zero3-2", 4, "none", units), 2):
        assert_same(reference, gradients)


@pytest.mark.multi
def test_head_of_its_own_does_not_change_the_gradient(run_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a head, which is a unit of sharding, whose weight is freed before its gradient is there.
    monkeypatch.setitem(HF_CONFIG, "tie_word_embeddings", False)
    [(reference, _)] = run_ranks(lambda: step_gradient("none", 4), 1)
    assert "lm_head.weight" in reference
    for layout in ("zero3-1", "zero3-2", "zero2-2", "offload-2"):
        for gradients, _ in run_ranks(lambda layout=layout: step_gradient(layout, 4, "layer"), num_ranks(layout)):
            assert_same(reference, gradients)


@pytest.mark.multi
@pytest.mark.parametrize("unit", ["embed_tokens", "DecoderTrunk"])
def test_unit_with_the_weight_of_the_head_is_refused(unit: str, run_ranks) -> None:
    # Catches an error from deep within torch about mixed tensors, when the loss reads the tied head.
    def error() -> str:
        with pytest.raises(ValueError, match="the weight of the model's tied head") as caught:
            engine_for("zero3-1", units=[unit])
        return str(caught.value)

    [message] = run_ranks(error, 1)
    assert message.startswith("unit_modules: ")


@pytest.mark.multi
def test_unit_within_a_compiled_layer_is_refused(run_ranks) -> None:
    # Catches an error from within torch about hooks of FSDP, at the first step.
    def error() -> str:
        with pytest.raises(ValueError, match="is inside a layer") as caught:
            engine_for("zero3-1", units=["GatedMLP", "norm"], backend="aot_eager")
        return str(caught.value)

    [message] = run_ranks(error, 1)
    assert message.startswith("unit_modules: GatedMLP ")


PLACED = ["ddp-2", "zero3-2", "zero2-2", "hsdp-2x2", "offload-2"]


OPTIMIZERS = ["adamw", "sgd", "anyprecision_adamw", "muon"]


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


@pytest.mark.multi
@pytest.mark.parametrize(
    ("optimizer", "model"), [*((optimizer, "dense") for optimizer in OPTIMIZERS), ("muon", "experts")]
)
def test_steps_do_not_depend_on_the_placement(optimizer: OptimizerName, model: str, run_ranks) -> None:
    # Catches an optimizer that cannot take shards, and a forward pass with gathered parameters of before the step.
    [(expected, expected_loss)] = run_ranks(lambda: two_steps("none", optimizer, model), 1)
    for layout in PLACED:
        for parameters, loss in run_ranks(lambda layout=layout: two_steps(layout, optimizer, model), num_ranks(layout)):
            # AdamW divides by the gradient's own size, so it magnifies what is lost in summation.
            assert_same(expected, parameters, limit=1e-3)
            assert loss == pytest.approx(expected_loss, rel=1e-5)


def skipped_step(layout: str, optimizer: OptimizerName) -> float:
    """How far a step with a gradient that is not finite moves the parameters."""
    engine = engine_with(layout, optimizer)
    before = parameters_of(engine)
    losses = engine.forward_backward([batch_of(engine)], cross_entropy)
    update = engine.optim_step(0.1, divisor=losses.num_trained_tokens * float("nan"))
    assert update.skipped
    after = parameters_of(engine)
    return max(float((after[name] - value).abs().max()) for name, value in before.items())


@pytest.mark.multi
@pytest.mark.parametrize("layout", ["zero3-2", "offload-2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradient_that_is_not_finite_moves_no_shard(layout: str, optimizer: OptimizerName, run_ranks) -> None:
    # Catches weights that are poisoned on the device before the host sees the loss.
    assert run_ranks(lambda: skipped_step(layout, optimizer), 2) == [0.0, 0.0]


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


@pytest.mark.multi
@pytest.mark.parametrize(("layout", "backend"), [("offload-2", None), ("zero3-2", "aot_eager")])
def test_state_is_saved_and_restored_to_the_bit(layout: str, backend: str | None, tmp_path: Path, run_ranks) -> None:
    # Catches state that is loaded into tensors which sharding, or a compiled graph, has replaced by others.
    for straight, resumed in run_ranks(lambda: steps_around_a_checkpoint(layout, tmp_path, backend=backend), 2):
        torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


@pytest.mark.multi
@pytest.mark.parametrize(("layout", "model"), [("none", "dense"), ("zero3-2", "dense"), ("zero3-2", "experts")])
def test_every_optimizer_continues_to_the_bit(layout: str, model: str, tmp_path: Path, run_ranks) -> None:
    # Catches state that is not saved, and random roundings that depend on more than the step.
    def every() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        kinds = [*((name, torch.bfloat16) for name in OPTIMIZERS), ("muon", torch.float32)]
        return [
            steps_around_a_checkpoint(layout, tmp_path / f"{name}_{dtype}", name, dtype, model=model)
            for name, dtype in kinds
        ]

    for results in run_ranks(every, num_ranks(layout)):
        for straight, resumed in results:
            torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
