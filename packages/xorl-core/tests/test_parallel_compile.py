"""Compiled layers: one graph, shared by equal layers, for packs of any length, with the gradients of plain ones."""

import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tiny_decoders import summed_loss, tiny_decoder
from tiny_models import hf_config
from xorl.core.models import Decoder
from xorl.core.nn.kernels import choose_kernels
from xorl.core.parallel.activations import Recompute, recompute_layers
from xorl.core.parallel.compile import CompileBackend, compile_layers
from xorl.core.parallel.offload import ActivationOffload
from xorl.kernels.attention.sdpa import sdpa_attention
from xorl.kernels.experts import rows

WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
FAMILIES = {
    # name: (config.json, how many layers differ from each other)
    "llama": (hf_config("llama", num_hidden_layers=3), 1),
    "qwen2": (hf_config("qwen2", num_hidden_layers=3), 1),
    "qwen3": (hf_config("qwen3", num_hidden_layers=3), 1),
    "qwen3-windows": (hf_config("qwen3", num_hidden_layers=3, **WINDOWS), 2),
    "gpt2": (hf_config("gpt2", n_layer=3), 1),
    "mixtral": (hf_config("mixtral", num_hidden_layers=3, **BALANCED), 1),
    "qwen3_moe": (hf_config("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[0], **BALANCED), 2),
    "deepseek_v3": (hf_config("deepseek_v3", num_hidden_layers=3, first_k_dense_replace=0), 1),
    "apertus": (hf_config("apertus", num_hidden_layers=3), 1),
    "qwen3_5_text": (hf_config("qwen3_5_text"), 2),
}
NUM_PACKS = 8


def model_of(hf_config: dict, recompute: Recompute, backend: CompileBackend | None) -> Decoder:
    kernels = choose_kernels(
        sdpa_attention, device_type="cpu", dtype=torch.float32, compiled=backend is not None, native=(), cast_bf16=False
    )
    model = tiny_decoder(hf_config, kernels=kernels)
    recompute_layers(model.layers, recompute, reentrant=False, compiled=backend is not None)
    if backend is not None:
        compile_layers(list(model.layers), backend=backend, device_type="cpu")
    return model


def packs() -> list[list[int]]:
    """Lengths of documents. The first pack is one document of as many tokens as the model is wide."""
    draw = random.Random(0)
    return [[32], *([draw.randint(1, 20) for _ in range(draw.randint(1, 6))] for _ in range(NUM_PACKS - 1))]


def loss_of(model: Decoder, lengths: list[int]) -> Tensor:
    return summed_loss(model, torch.arange(sum(lengths)) * 7 % 64, lengths)


def gradients_of(model: Decoder, lengths: list[int]) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, lengths).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        *((family, "none") for family in FAMILIES),
        *(("qwen3", kind) for kind in ("operation", "layer", ("mlp",))),
        ("qwen3_moe", "layer"),
    ],
)
def test_one_compilation_serves_all_packs_and_equal_layers(family: str, recompute: Recompute) -> None:
    # Catches a graph break (an error), a length that is compared with the first one, and a compilation for each layer.
    torch._dynamo.reset()
    hf_config, num_kinds = FAMILIES[family]
    counter = CompileCounterWithBackend("eager")
    plain, model = model_of(hf_config, recompute, None), model_of(hf_config, recompute, counter)
    for index, lengths in enumerate(packs()):
        torch.testing.assert_close(gradients_of(model, lengths), gradients_of(plain, lengths), rtol=1e-6, atol=1e-6)
        if index % 5 == 0:
            with torch.no_grad():
                torch.testing.assert_close(loss_of(model.eval(), lengths), loss_of(plain, lengths), rtol=1e-6, atol=0)
            model.train()
    assert counter.frame_count == 2 * num_kinds  # training and evaluation


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        *(("qwen3", kind) for kind in ("none", "operation", "layer")),
        *((family, kind) for family in ("mixtral", "apertus", "qwen3_5_text") for kind in ("operation", "layer")),
        ("deepseek_v3", "operation"),
    ],
)
def test_gradients_of_compiled_layers_are_those_of_plain_ones(family: str, recompute: Recompute) -> None:
    # Catches a backward graph that recomputes something else, or attention without a gradient in the graph.
    torch._dynamo.reset()
    hf_config, _ = FAMILIES[family]
    plain, model = model_of(hf_config, recompute, None), model_of(hf_config, recompute, "aot_eager")
    expected = [gradients_of(plain, lengths) for lengths in packs()[:4]]
    offload = ActivationOffload(torch.device("cpu"), limit_bytes=0.0, min_bytes=1)
    # All that a layer keeps when it is computed again as a whole is its input, in every family.
    for is_offloaded in (False,) if recompute == "layer" and family != "qwen3" else (False, True):
        if is_offloaded:
            offload.install(list(model.layers))
        for lengths, wanted in zip(packs(), expected, strict=False):
            torch.testing.assert_close(gradients_of(model, lengths), wanted, rtol=1e-6, atol=1e-6)
        assert (offload.traffic_bytes > 0) == is_offloaded


@pytest.mark.parametrize("recompute", ["operation", "layer"])
def test_recomputed_layers_compile_without_reminders(recompute: Recompute, caplog: pytest.LogCaptureFixture) -> None:
    # Catches torch's reminder to look for operations in place, which no user can act on.
    torch._dynamo.reset()
    torch._logging.warning_once.cache_clear()
    hf_config, _ = FAMILIES["llama"]
    gradients_of(model_of(hf_config, recompute, "aot_eager"), [5, 9])
    logging.getLogger("torch._higher_order_ops.wrap").warning("another warning")
    heard = [record.getMessage() for record in caplog.records if record.name.startswith("torch._higher_order_ops")]
    assert heard == ["another warning"]


SMALL_LAYER = """
import torch
from torch import nn
from torch._dynamo.utils import counters
from xorl.core.parallel.compile import compile_layers

# Products alone, which call a library: a kernel of their own would cost half a minute of the C++ compiler.
layers = [nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)]
plain = [layer.forward for layer in layers]
compile_layers(layers, backend="inductor", device_type="cpu")
for num_tokens in (5, 9):
    hidden = torch.randn(num_tokens, 8, requires_grad=True)
    torch.testing.assert_close(layers[1](layers[0](hidden)), plain[1](plain[0](hidden)))
    layers[1](layers[0](hidden)).sum().backward()
found = counters["inductor"]
print(found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], counters["stats"]["unique_graphs"])
"""


def run_small_layer(**environment: str) -> subprocess.CompletedProcess[str]:
    # The variable spares torch a few trial compilations, which find out what the processor can do.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHINDUCTOR", "TRITON"))}
    command = [sys.executable, "-c", SMALL_LAYER]
    everything = {**inherited, "TORCHINDUCTOR_VEC_ISA_OK": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=everything)


def test_what_was_compiled_is_found_by_the_next_process(tmp_path: Path) -> None:
    # Catches a cache that lies where it is lost with a restart, or one that a version or a process has for itself.
    for expected in ("0 2 1", "2 0 1"):
        result = run_small_layer(XDG_CACHE_HOME=str(tmp_path))
        assert result.stdout.strip() == expected, result.stdout + result.stderr[-4000:]
    [versions] = (tmp_path / "xorl" / "compiled").iterdir()
    assert torch.__version__ in versions.name


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a failure deep within code generation, minutes after the start.
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"compile_backend: .* no-such-compiler was not found; install it"):
        compile_layers([torch.nn.Linear(2, 2)], backend="inductor", device_type="cpu")


def test_compiled_layers_keep_no_product_of_the_two_branches() -> None:
    # Catches 3 of the 17 tensors of the model's width that a layer would keep, which one cheap kernel makes again.
    torch._dynamo.reset()
    config = FAMILIES["llama"][0]
    model = model_of(config, "none", "aot_eager")
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape[-1] if tensor.dim() else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, [20])
    width, num_layers = config["intermediate_size"], config["num_hidden_layers"]
    assert kept.count(2 * width) == num_layers
    assert kept.count(width) == num_layers, "the weight of down_proj alone"


def test_compiled_layers_recompute_no_output_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a recomputed layer that computes, and sends to other ranks, what nobody reads.
    weighted: list[Tensor] = []
    combine = rows.combine

    def counted(y: Tensor, weights: Tensor | None, *others: Tensor) -> Tensor:
        weighted.extend([] if weights is None else [weights])
        return combine(y, weights, *others)

    monkeypatch.setattr(rows, "combine", counted)
    family, _ = FAMILIES["mixtral"]
    gradients_of(model_of(family, "layer", "aot_eager"), [5, 3])
    assert len(weighted) == 3, "one sum for each layer"
