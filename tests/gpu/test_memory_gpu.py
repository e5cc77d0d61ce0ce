"""Memory on a GPU: activations on the host, shards on the host, and an allocator that does not fall to pieces."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from image_models import IMAGE_MODELS
from local_options import local_config
from pictures import SETTINGS as PICTURES
from tiny_models import hf_config, write_config
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import Decoder, spec_for
from xorl.core.parallel.activations import Recompute, recompute_layers
from xorl.core.parallel.offload import ActivationOffload
from xorl.core.runtime import Runtime
from xorl.kernels.layout import SequenceLayout
from xorl.train.images import largest_input
from xorl.train.model import build_model
from xorl.train.model_source import read_architecture
from xorl.train.recompute_choice import SETTINGS, MicroBatch, measure
from xorl.train.step_memory import held_bytes, pass_peak

pytestmark = pytest.mark.gpu

HF_CONFIG = hf_config(
    vocab_size=512,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=65536,
    initializer_range=0.02,
)
# Heads of 72 channels, as in the encoders that models have.
SHAPE_WITH_IMAGES = {
    **IMAGE_MODELS["images"],
    "text_config": {
        **HF_CONFIG,
        "vocab_size": 32768,
        "head_dim": 64,
        "rope_parameters": {**IMAGE_MODELS["images"]["text_config"]["rope_parameters"], "mrope_section": [12, 10, 10]},
    },
    "vision_config": {
        **IMAGE_MODELS["images"]["vision_config"],
        "depth": 6,
        "hidden_size": 576,
        "num_heads": 8,
        "intermediate_size": 2152,
        "out_hidden_size": 1024,
        "patch_size": 16,
        "deepstack_visual_indexes": [1, 3, 5],
    },
}
NUM_TOKENS = 8192
INPUT_BYTES = NUM_TOKENS * 1024 * 2
TOOLS = Path(__file__).parents[2] / "tools"
HALF = "layer in half of them"


def model_with(recompute: Recompute, limit_bytes: float | None) -> tuple[Decoder, ActivationOffload | None]:
    device = torch.device("cuda", torch.cuda.current_device())
    spec = spec_for(HF_CONFIG)
    with device:
        model = spec.build(spec.config_from_hf(HF_CONFIG))
    model.init_weights(0)
    model.to(torch.bfloat16)
    model.compute_dtype = torch.bfloat16
    recompute_layers(model.layers, recompute, reentrant=False)
    if limit_bytes is None:
        return model, None
    offload = ActivationOffload(device, limit_bytes=limit_bytes)
    offload.install(list(model.layers))
    return model, offload


def step(model: Decoder, num_tokens: int = NUM_TOKENS) -> tuple[dict[str, Tensor], int]:
    """The gradients by name, and the memory that the forward pass keeps for the backward pass."""
    model.zero_grad()
    layout = SequenceLayout.from_lengths([num_tokens // 4, num_tokens - num_tokens // 4], "cuda")
    ids = torch.arange(num_tokens, device="cuda") % 512
    before = torch.cuda.memory_allocated()
    output = model(ids, layout, loss=lambda hidden, head: cross_entropy(hidden, head, {"labels": ids}))
    kept = torch.cuda.memory_allocated() - before
    output.sum.backward()
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}, kept


@pytest.mark.parametrize("recompute", ["none", "layer", ("mlp",)])
def test_offloading_changes_no_bit_and_saves_memory(recompute: Recompute, deterministic: None) -> None:
    # Catches memory that is used again while a copy still reads or writes it, and activations that stay after all.
    plain, _ = model_with(recompute, None)
    model, offload = model_with(recompute, 0.0)
    for num_tokens in (NUM_TOKENS, NUM_TOKENS // 2 + 128, NUM_TOKENS):
        expected, kept_plain = step(plain, num_tokens)
        gradients, kept = step(model, num_tokens)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
        assert kept < kept_plain
    assert offload.traffic_bytes > 0


def test_limit_is_what_stays_on_the_device() -> None:
    # Catches a limit in other units, or one that counts what has left already.
    kept, traffic = [], []
    for limit in (0, 4 * INPUT_BYTES, 1e12):
        model, offload = model_with("layer", limit)
        step(model)
        traffic.append(offload.traffic_bytes)
        kept.append(step(model)[1])
    assert traffic == [11 * INPUT_BYTES, 7 * INPUT_BYTES, 0]
    assert kept[0] < kept[1] < kept[2]


@pytest.fixture
def place() -> Iterator[Runtime]:
    yield runtime.init("cuda")
    runtime.shutdown()


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        *((setting, options) for setting in (*SETTINGS, HALF) for options in ({}, {"lora": {"enable_lora": True}})),
        *((setting, {"train": {"fp8": "tensorwise"}}) for setting in ("none", "operation")),
        *((setting, {"train": {"ce_mode": "eager"}}) for setting in ("none", "layer")),
        *((setting, {"shape": SHAPE_WITH_IMAGES}) for setting in ("none", "layer", HALF)),
        *(
            (setting, {"shape": SHAPE_WITH_IMAGES, "train": {"freeze_encoders": False}})
            for setting in ("none", "operation", "layer", HALF)
        ),
    ],
)
def test_the_peak_of_a_step_is_predicted(
    setting: str, options: dict[str, dict], place: Runtime, tmp_path: Path
) -> None:
    # Catches an estimate of recompute_policy: auto that counts memory that is never taken at the same time.
    write_config(tmp_path, options.get("shape", {**HF_CONFIG, "vocab_size": 32768}))
    train = {"data_parallel_mode": "none", **options.get("train", {})}
    config = local_config(tmp_path, {"sample_packing_sequence_len": NUM_TOKENS}, options.get("lora", {}), **train)
    architecture = read_architecture(config.model)
    batch = MicroBatch(NUM_TOKENS, NUM_TOKENS)
    if architecture.config.images is not None:
        architecture = replace(architecture, images=PICTURES)
        batch = replace(batch, grids=((64, 80), (48, 48), (80, 100)))
    mesh = Mesh(ParallelDims.resolve("none", 1), "cuda")
    num_layers = architecture.config.num_layers
    name = setting.split(" in ")[0]
    count = num_layers // 2 if setting == HALF else num_layers
    profile, whole = (measure(config, each, architecture, mesh, place.device, batch) for each in (name, "none"))
    held = held_bytes(config, architecture, mesh.dims)
    by_layer = [profile] * count + [whole] * (num_layers - count)
    expected = held.throughout + pass_peak(by_layer, held.gradient_ratio)
    settings = {**SETTINGS[name], "recompute_num_layers": None if count == num_layers else count}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train = config.train.model_copy(update=settings)
    model = build_model(architecture, config.model, train, config.lora, mesh, place.device)
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    layout, ids = batch.layout(place.device), torch.zeros(NUM_TOKENS, dtype=torch.int64, device=place.device)
    inputs = largest_input(model.module, layout, batch.grids)
    for _ in range(2):
        model.forward(ids, layout, loss=lambda h, w: cross_entropy(h, w, {"labels": ids}), **inputs).sum.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    measured = torch.cuda.max_memory_allocated() - before
    assert measured == pytest.approx(expected, rel=0.05)


def test_host_pages_are_reused_over_varying_packs() -> None:
    # Catches pinned memory that grows with every pack of another length.
    model, offload = model_with("none", 0.0)
    step(model)
    taken = offload.host_bytes
    for num_tokens in range(1024, NUM_TOKENS, 1536):
        step(model, num_tokens)
    assert offload.host_bytes == taken


def test_reserved_memory_stops_growing() -> None:
    # Catches segments that break up under packs of ever other lengths; tools/soak_memory.py does an hour of it.
    flags = ["--minutes", "1", "--hidden-size", "1024", "--num-layers", "8", "--num-tokens", "16384"]
    command = [sys.executable, str(TOOLS / "soak_memory.py"), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
