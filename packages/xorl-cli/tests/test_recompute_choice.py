"""The probe behind recompute_policy: auto: what it measures, how it concludes, and that it leaves nothing behind."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from image_models import IMAGE_MODELS
from live_bytes import LiveBytes
from local_options import local_config
from pictures import SETTINGS as PICTURES
from tiny_models import hf_config, write_config
from xorl.config import Config
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.nn.fp8 import Fp8Linear
from xorl.core.optim import Fp32Accumulation
from xorl.core.parallel import ParallelModel
from xorl.core.parallel.copy_engine import WINDOW_BYTES
from xorl.core.runtime import Runtime
from xorl.train import step_memory
from xorl.train.architecture import Architecture
from xorl.train.images import largest_input
from xorl.train.model import KeptDtypes, build_model, sketch_model
from xorl.train.model_source import read_architecture
from xorl.train.recompute_choice import SETTINGS, Choice, MicroBatch, choose_layers, measure_slice, table

GIB = 2**30
SHAPE = hf_config(num_hidden_layers=4)
EXPERT_TARGETS = ["q_proj", "gate_proj", "up_proj", "down_proj"]
BF16 = {"param_dtype": "bf16", "enable_mixed_precision": True}


def config_with(
    folder: Path, *, lora: dict[str, object] | None = None, shape: dict[str, object] = SHAPE, **train: object
) -> Config:
    write_config(folder, shape)
    lengths = {"sample_packing_sequence_len": 60, "pad_to_multiple_of": 16}
    return local_config(folder, lengths, lora or {}, **{"enable_mixed_precision": False, **train})


def profile(*, head: float, layers: int = 5, kept: float = 3.0, gradients: float = 2.0) -> step_memory.PassProfile:
    """Layers that keep `kept` bytes each; their backward passes need one more, and make `gradients`."""
    phases = [
        step_memory.Phase(0.0, 0.0, 0.0),
        *[step_memory.Phase(kept, kept, 0.0)] * layers,
        step_memory.Phase(head, 0.0, 0.0),
        *[step_memory.Phase(gradients + 1.0, -kept, gradients)] * layers,
        step_memory.Phase(0.0, 0.0, 0.0),
    ]
    return step_memory.PassProfile.of(
        [value for phase in phases for value in (phase.peak, phase.kept, phase.gradients)]
    )


@pytest.mark.parametrize(
    ("kept", "gradients", "ratio", "expected"),
    [
        (3.0, 2.0, 1.0, 30 + 20.0),  # the activations of all layers, as the head computes
        (3.0, 4.0, 1.0, 27 + 5.0 * 0 + 20.0 + 3.0),
        (1.0, 9.0, 1.0, 9 * 9 + 1.0 + 10.0),  # in the first layer's backward pass, gradients of all others exist
        (1.0, 9.0, 0.0, 10 + 20.0),  # gradients that exist throughout are counted there
    ],
)
def test_gradients_grow_while_activations_are_freed(
    kept: float, gradients: float, ratio: float, expected: float
) -> None:
    # Catches the sum of all gradients and all activations, which never exist at the same time.
    measured = profile(head=20.0, kept=kept, gradients=gradients)
    assert step_memory.pass_peak([measured] * 10, ratio) == expected


WHOLE = profile(head=20.0, kept=3.0, gradients=0.0)
LAYER = profile(head=20.0, kept=0.5, gradients=0.0)


@pytest.mark.parametrize(
    ("setting", "measured", "whole", "usable", "num_layers", "needed"),
    [
        ("none", WHOLE, WHOLE, 200, None, 128.0),
        ("layer", LAYER, WHOLE, 98, 12, 98.0),
        ("layer", LAYER, WHOLE, 97, 13, 95.5),
        ("layer", LAYER, WHOLE, 37, None, 38.0),  # not even in all of them
        ("layer", LAYER, step_memory.PassProfile.out_of_memory(5), 100, None, 38.0),  # what keeping takes is not known
        ("layer and offload", LAYER, WHOLE, 100, None, 38.0),
    ],
)
def test_as_few_layers_as_it_takes(
    setting: str,
    measured: step_memory.PassProfile,
    whole: step_memory.PassProfile,
    usable: float,
    num_layers: int | None,
    needed: float,
) -> None:
    # Catches layers that are computed again though there is memory for them, and one too many that is kept.
    choice = choose_layers(setting, measured, whole, 36, step_memory.Held({"throughout": 0.0}, 1.0), usable)
    assert (choice.num_layers, choice.needed) == (num_layers, needed)
    assert choice.fits == (needed <= usable)


def test_table_names_what_is_taken() -> None:
    # Catches a decision that nobody can follow, and a run that fails later without having been told so.
    choices = [
        Choice("none", None, math.inf, 80 * GIB),
        Choice("operation", None, 90 * GIB, 80 * GIB),
        Choice("layer", 20, 70 * GIB, 80 * GIB),
    ]
    assert [choice.fits for choice in choices] == [False, False, True]
    text = table(choices)
    assert "setting='none' needed_gib=more usable_gib=80.0" in text
    assert text.endswith("recompute_policy=auto takes layer in 20 layers")
    assert "may not fit" in table(choices[:2])


@pytest.mark.parametrize("setting", [name for name in SETTINGS if "offload" not in name])
def test_probe_runs_on_the_largest_micro_batch_and_draws_nothing(setting: str, place: Runtime, tmp_path: Path) -> None:
    # Catches a slice that cannot be built from a model's configuration, and a probe that changes what is trained.
    # The second layer has an adapter of its own rank, and a slice of the model may not have that layer.
    lora = {"enable_lora": True, "rank_pattern": {"layers.1.mlp.down_proj": 3}}
    config = config_with(tmp_path, lora=lora, recompute_policy="auto", micro_batch_size=2)
    batch = MicroBatch.of(config, longest=50)
    assert batch == MicroBatch(128, 50)
    assert batch.layout(torch.device("cpu")).lengths == (50, 50, 28)
    before = torch.get_rng_state()
    mesh = Mesh(ParallelDims.resolve("fsdp2", 1), "cpu")
    for num_layers in (1, 2):
        architecture = read_architecture(config.model)
        with LiveBytes() as live:
            profile = measure_slice(config, setting, architecture, num_layers, mesh, place.device, batch, live)
        assert len(profile.forward) == num_layers
        assert profile.head.peak > 0
    assert torch.equal(torch.get_rng_state(), before)


def placed_bytes(config: Config, mesh: Mesh, *, by_copy_engines: bool = False) -> float:
    """What a rank holds besides activations once all gradients exist."""
    architecture = read_architecture(config.model)
    held = step_memory.held_bytes(config, architecture, mesh.dims, by_copy_engines=by_copy_engines)
    profiled = config.train.model_copy(update={"param_dtype": step_memory.profiled_param_dtype(config)})
    sketch = sketch_model(architecture, config.model, profiled, config.lora)
    num_trained = sum(parameter.numel() for parameter in sketch.parameters() if parameter.requires_grad)
    return held.throughout + held.gradient_ratio * num_trained * KeptDtypes.of(profiled, config.lora).trained.itemsize


@pytest.mark.parametrize(
    ("train", "low", "high"),
    [
        ({"data_parallel_mode": "none"}, 16, 16),
        ({"data_parallel_mode": "none", "optimizer": "sgd"}, 8, 8),
        ({"data_parallel_mode": "none", "gradient_accumulation_steps": 2}, 16, 16),
        ({"data_parallel_mode": "none", **BF16}, 8, 8),
        ({"data_parallel_mode": "none", **BF16, "gradient_accumulation_steps": 2}, 12, 12),
        ({}, 17, 40),
        ({"enable_cpu_offload": True}, 1, 24),
        ({"data_parallel_mode": "none", "lora": {"enable_lora": True, "lora_rank": 1}}, 4, 6),
    ],
)
def test_what_is_placed_is_counted(train: dict, low: float, high: float, place: Runtime, tmp_path: Path) -> None:
    # Catches optimizer state that is forgotten, and shards in host memory that are counted on the device.
    config = config_with(tmp_path, **train)
    architecture = read_architecture(config.model)
    with torch.device("meta"):
        model = architecture.spec.build(architecture.config)
    total = sum(parameter.numel() for parameter in model.parameters())
    per_parameter = placed_bytes(config, Mesh(ParallelDims.resolve("fsdp2", 1), "cpu")) / total
    assert low <= per_parameter <= high


def test_keys_of_a_ring_are_counted(tmp_path: Path) -> None:
    # Catches a choice that runs out of memory in a ring: the measured passes have no ring.
    config = config_with(tmp_path)
    architecture = read_architecture(config.model)
    attention = architecture.config.layers[0].attention
    row = 64 * attention.num_kv_heads * attention.head_dim  # elements of a row's keys
    for ring, ulysses, expected in ((1, 1, 0), (2, 1, row), (2, 2, row / 2)):
        sizes = {"ringattn_parallel_size": ring, "ulysses_parallel_size": ulysses, "enable_mixed_precision": False}
        shared = config.model_copy(update={"train": config.train.model_copy(update=sizes)})
        # Keys and values, twice, with their gradients.
        assert step_memory.ring_bytes(shared, architecture, 64 // (ring * ulysses)) == 2 * 2 * (4 + 4) * expected


def placed(config: Config, place: Runtime) -> tuple[ParallelModel, float]:
    """The model on this one rank, and the estimate of what is held besides activations."""
    mesh, architecture = Mesh(ParallelDims.resolve("fsdp2", 1), "cpu"), read_architecture(config.model)
    model = build_model(architecture, config.model, config.train, config.lora, mesh, place.device)
    return model, placed_bytes(config, mesh)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("dtypes", [{}, BF16])
def test_gradients_are_counted_as_they_are_held(
    dtypes: dict, num_micro_batches: int, place: Runtime, tmp_path: Path
) -> None:
    # Catches the fp32 sum of earlier micro-batches, or the newest gradient beside it, that is held and not counted.
    alone = {"data_parallel_mode": "none", "optimizer": "sgd"}
    config = config_with(tmp_path, gradient_accumulation_steps=num_micro_batches, **alone, **dtypes)
    model, estimate = placed(config, place)
    parameters = list(model.module.parameters())
    accumulation, batch = Fp32Accumulation(parameters), MicroBatch(16, 16)
    ids = torch.zeros(batch.num_tokens, dtype=torch.int64)
    loss_fn = partial(cross_entropy, targets={"labels": ids})
    with LiveBytes() as live:
        for _ in range(num_micro_batches):
            with accumulation.micro_batch():
                model.forward(ids, batch.layout(place.device), loss=loss_fn).sum.backward()
                held = live.held()
    assert sum(parameter.nbytes for parameter in parameters) + held == pytest.approx(estimate, rel=0.01)


BATCH = MicroBatch(192, 192)


def architecture_of(config: Config) -> Architecture:
    """With images in the data of a model that reads any."""
    architecture = read_architecture(config.model)
    return architecture if architecture.config.images is None else replace(architecture, images=PICTURES)


def batch_of(architecture: Architecture) -> MicroBatch:
    """The largest micro-batch; of a model that reads images, most of the row is of two."""
    return BATCH if architecture.images is None else replace(BATCH, grids=((16, 24), (12, 16)))


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3", {}),
        ("qwen3", {"gradient_accumulation_steps": 2}),
        ("qwen3", {**BF16, "gradient_accumulation_steps": 2}),
        ("qwen3", {"ce_mode": "eager"}),
        ("qwen3", {"lora": {"enable_lora": True, "lora_rank": 8}}),
        ("qwen3", {"lora": {"enable_lora": True, "enable_qlora": True, "lora_rank": 8}}),
        ("qwen3_moe", {"lora": {"enable_qlora": True, "lora_rank": 8, "lora_target_modules": EXPERT_TARGETS}}),
        ("qwen3_moe", {"fp8": "rowwise", "enable_mixed_precision": True}),
        ("deepseek_v3", {}),
        ("images", {"freeze_encoders": False}),
        ("images", {}),
        ("images", {"freeze_decoder": True}),
        ("images", {"lora": {"enable_lora": True, "lora_rank": 8}}),
    ],
    ids=[
        *("full", "accumulated", "bf16", "eager", "lora", "qlora", "qlora-experts", "fp8-experts", "latents"),
        *("encoder", "frozen-encoder", "projectors", "lora-beside-encoder"),
    ],
)
def profiled(
    request: pytest.FixtureRequest, mesh: Mesh, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Config, dict[str, step_memory.PassProfile]]:
    """A configuration, and what the probe measures by setting."""
    model_type, options = request.param
    shape = shape_of(model_type)
    folder = tmp_path_factory.mktemp(model_type)
    config = config_with(folder, shape=shape, data_parallel_mode="none", optimizer="sgd", **options)
    architecture, cpu, profiles = architecture_of(config), torch.device("cpu"), {}
    number = step_memory.num_measured(architecture.config)
    assert number < architecture.config.num_layers
    for setting in ("none", "operation", "layer"):
        with LiveBytes() as live:
            profiles[setting] = measure_slice(
                config, setting, architecture, number, mesh, cpu, batch_of(architecture), live
            )
    return config, profiles


def shape_of(model_type: str) -> dict[str, object]:
    """A config.json of nine layers, more than the probe measures."""
    if model_type == "images":
        shape = dict(IMAGE_MODELS["images"])
        return {**shape, "text_config": {**shape["text_config"], "num_hidden_layers": 9}}
    sizes = {} if model_type == "qwen3" else {"moe_intermediate_size": 32}
    return hf_config(model_type, num_hidden_layers=9, hidden_size=64, intermediate_size=128, **sizes)


@pytest.mark.parametrize(
    ("setting", "count"), [("none", None), ("operation", None), ("layer", None), ("layer", 5), ("operation", 5)]
)
def test_the_peak_of_a_step_is_predicted(
    profiled: tuple[Config, dict[str, step_memory.PassProfile]],
    setting: str,
    count: int | None,
    place: Runtime,
    mesh: Mesh,
) -> None:
    # Catches activations and gradients that are counted as if all existed at the same time, and a phase that is missed.
    config, profiles = profiled
    architecture = architecture_of(config)
    num_layers = architecture.config.num_layers
    chosen = config.train.model_copy(update={**SETTINGS[setting], "recompute_num_layers": count})
    num_recomputed = num_layers if count is None else count
    by_layer = [profiles[setting if index < num_recomputed else "none"] for index in range(num_layers)]
    held = step_memory.held_bytes(config, architecture, mesh.dims)
    expected = held.throughout + step_memory.pass_peak(by_layer, held.gradient_ratio)

    model = build_model(architecture, config.model, chosen, config.lora, mesh, place.device)
    parameters = list(model.module.parameters())
    accumulation = Fp32Accumulation([parameter for parameter in parameters if parameter.requires_grad])
    ids = torch.zeros(BATCH.num_tokens, dtype=torch.int64)
    loss_fn = partial(cross_entropy, targets={"labels": ids})
    with LiveBytes() as live:
        for _ in range(config.train.gradient_accumulation_steps):
            layout = BATCH.layout(place.device)
            inputs = largest_input(model.module, layout, batch_of(architecture).grids)
            with accumulation.micro_batch():
                model.forward(ids, layout, loss=loss_fn, **inputs).sum.backward()
    measured = sum(parameter.nbytes for parameter in parameters) + live.peak()
    assert measured == pytest.approx(expected, rel=0.02)


def test_replicas_of_shards_keep_the_sum_alone(tmp_path: Path) -> None:
    # Catches a gradient that is counted beside the fp32 sum which FSDP2 keeps until replicas exchange it.
    config = config_with(tmp_path, gradient_accumulation_steps=2, optimizer="sgd", **BF16)
    architecture = read_architecture(config.model)
    alone, replicated = (
        step_memory.kept_bytes(config, architecture, ParallelDims.resolve("fsdp2", world_size, shard_size=2))
        for world_size in (2, 4)
    )
    assert alone / replicated == (2 + 4 + 2) / (2 + 4)


def test_experts_that_replicas_divide_have_gradients_only_in_passes(tmp_path: Path) -> None:
    # Catches gradients of experts that are counted throughout a step, as those in the buckets of replicas are.
    shape, axes = hf_config("qwen3_moe", num_hidden_layers=4), {"data_parallel_mode": "ddp", "expert_parallel_size": 2}
    config, dims = config_with(tmp_path, shape=shape, **axes), ParallelDims.resolve("ddp", 2, ep=2)
    architecture = read_architecture(config.model)
    held = step_memory.held_bytes(config, architecture, dims)
    own = step_memory.sketch_of(config, architecture, dims=dims)
    nbytes = {name: parameter.nbytes for name, parameter in own.named_parameters()}
    experts = sum(number for name, number in nbytes.items() if ".experts." in name)
    assert held.parts["gradients"] == sum(nbytes.values()) - experts
    assert held.gradient_ratio * sum(nbytes.values()) == pytest.approx(experts)


def test_stages_and_ranks_that_share_matrices_keep_their_part(tmp_path: Path) -> None:
    # Catches a whole model that is counted for each rank of a pipeline: one that fits is refused.
    config = config_with(tmp_path, data_parallel_mode="none", optimizer="sgd", **BF16)
    architecture = read_architecture(config.model)
    whole = step_memory.kept_bytes(config, architecture, ParallelDims.resolve("none", 1))
    assert step_memory.kept_bytes(config, architecture, ParallelDims.resolve("none", 2, tp=2)) == whole / 2
    sketch = sketch_model(architecture, config.model, config.train, config.lora)
    bytes_of_layers = [4 * sum(p.numel() for p in layer.parameters()) for layer in sketch.layers]  # and a gradient
    staged = config_with(tmp_path, data_parallel_mode="none", optimizer="sgd", pipeline_parallel_size=2, **BF16)
    most = step_memory.kept_bytes(staged, architecture, ParallelDims.resolve("none", 2, pp=2))
    assert whole - sum(bytes_of_layers) < most < whole - min(bytes_of_layers)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("mode", ["none", "fsdp2"])
def test_copies_of_weights_in_fp8_are_counted(mode: str, recipe: str, place: Runtime, tmp_path: Path) -> None:
    # Catches copies that are kept beside the weights, or gathered in their place, and are taken for no bytes or more.
    options = {"data_parallel_mode": mode, "optimizer": "sgd", "enable_mixed_precision": True}
    _, without = placed(config_with(tmp_path, **options), place)
    model, estimate = placed(config_with(tmp_path, fp8=recipe, **options), place)
    linears = [module for module in model.module.modules() if isinstance(module, Fp8Linear)]
    copied = sum(linear.weight.numel() for linear in linears) if recipe == "tensorwise" else 0
    if mode == "none":
        assert sum(linear.weight_fp8.nbytes for linear in linears if linear.weight_fp8 is not None) == copied
    # Of the four layers, two are gathered at a time: half of the weights, in one byte each in place of two.
    assert estimate - without == (copied if mode == "none" else copied - copied / 2)


def test_gradients_travel_in_their_own_dtype_through_copy_engines(place: Runtime, tmp_path: Path) -> None:
    # Catches gradients that are counted in fp32, which is for NCCL, and windows that take memory unseen.
    config = config_with(tmp_path, enable_mixed_precision=True)
    architecture, mesh = read_architecture(config.model), Mesh(ParallelDims.resolve("fsdp2", 1), "cpu")
    model = architecture.spec.build(architecture.config)
    total, layers = (sum(p.numel() for p in module.parameters()) for module in (model, model.layers))
    by_nccl, by_copies = (placed_bytes(config, mesh, by_copy_engines=each) for each in (False, True))
    assert by_nccl - by_copies == 2 * (total - layers / 2) - WINDOW_BYTES


@pytest.mark.parametrize(("ce_mode", "is_whole"), [("eager", True), ("compiled", False)])
def test_probe_computes_logits_as_the_run_does(ce_mode: str, is_whole: bool, place: Runtime, tmp_path: Path) -> None:
    # Catches an estimate without the logits of all tokens, the largest tensor of a pass that keeps them.
    config = config_with(tmp_path, recompute_policy="auto", ce_mode=ce_mode)
    batch, architecture = MicroBatch(48, 48), read_architecture(config.model)
    shapes: set[torch.Size] = set()

    def note(saved: Tensor) -> Tensor:
        shapes.add(saved.shape)
        return saved

    mesh = Mesh(ParallelDims.resolve("fsdp2", 1), "cpu")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        measure_slice(config, "none", architecture, 1, mesh, place.device, batch, LiveBytes())
    assert ((batch.num_tokens, architecture.config.vocab_size) in shapes) == is_whole
