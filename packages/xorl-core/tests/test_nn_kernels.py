"""Which functions a decoder layer computes with."""

import importlib.util
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from xorl.core.nn import RopeConfig
from xorl.core.nn.kernels import FUSED_KERNELS, LayerKernels, choose_kernels
from xorl.kernels.attention.reference import eager_attention
from xorl.kernels.fused import HeadNorms, HeadShape, RopeTables, reference

CASES = Path(__file__).with_name("decoder_interpreted.py")
PLAIN = LayerKernels(eager_attention)
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform"
)


def choose(device_type="cuda", dtype=torch.bfloat16, compiled=False, native=(), cast_bf16=False):
    return choose_kernels(
        eager_attention, device_type=device_type, dtype=dtype, compiled=compiled, native=native, cast_bf16=cast_bf16
    )


@NEEDS_TRITON
def test_decoders_with_fused_kernels_in_the_interpreter():
    """Catches kernels that are right alone and wrong together, without a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.parametrize("where", [{"device_type": "cpu"}, {"dtype": torch.float64}, {"native": FUSED_KERNELS}])
def test_plain_forms_where_no_kernel_runs_or_none_is_wanted(where):
    """Catches a kernel of Triton on a CPU, fp64 that is computed in fp32, and a native option without effect."""
    assert choose(**where) == PLAIN


@NEEDS_TRITON
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_take_the_fused_kernels_where_they_run(caplog, compiled):
    """Catches plain forms in the place of faster kernels, compiled or not, and a choice that is not told."""
    caplog.set_level(logging.DEBUG)
    everything = choose(compiled=compiled)
    assert all(f"{name}=fused" in caplog.text for name in FUSED_KERNELS)
    assert everything.swiglu != PLAIN.swiglu
    assert everything.add_rms_norm != PLAIN.add_rms_norm
    assert everything.split_heads != PLAIN.split_heads


def test_what_was_chosen_is_logged(caplog):
    """Catches a silent fall-back."""
    caplog.set_level(logging.DEBUG)
    choose(device_type="cpu")
    assert "rms_norm=plain rope=plain swiglu=plain" in caplog.text
    assert "not on cpu" in caplog.text


TABLES = torch.full((5, 2), 0.6), torch.full((5, 2), 0.8)


def operators_of(kernels: LayerKernels, rope: RopeTables = TABLES) -> set[str]:
    """Operators of xorl that a compiled layer would call for its norms, heads and activation."""
    shape = HeadShape(2, 1, 4)
    found: set[str] = set()

    def collect(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        found.update(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("xorl."))
        return graph

    @torch.compile(fullgraph=True, backend=collect)
    def layer(x: torch.Tensor) -> list[torch.Tensor]:
        weight = x.new_ones(4)
        summed, normed = kernels.add_rms_norm(x, x, x.new_ones(16), 1e-6)
        q, k, v = kernels.split_heads((normed,), shape, HeadNorms(weight, weight, 1e-6), rope)
        return [summed, q, k, v, kernels.swiglu(normed)]

    torch._dynamo.reset()
    layer(torch.ones(5, 16))
    return found


def test_compilers_look_into_no_native_form():
    """Catches roundings that a compiler leaves out, and forms that nobody asked to keep."""

    def of(**choice):
        return operators_of(choose(device_type="cpu", dtype=torch.float32, compiled=True, **choice))

    assert of() == set()
    assert of(native=["rms_norm"]) == {"xorl.opaque_add.default", "xorl.opaque_rms_norm.default"}
    assert of(native=["rope"]) == {"xorl.opaque_rope.default"}
    assert of(native=["swiglu"]) == {"xorl.opaque_swiglu.default"}
    assert of(cast_bf16=True) == {"xorl.opaque_round_to_bf16.default"}


@pytest.mark.parametrize("rope", [RopeConfig(rotary_dim=2), RopeConfig(interleaved=True)])
def test_choices_hold_for_every_kind_of_rotation(rope: RopeConfig):
    """Catches a rotation of a part of each head, or of neighbouring channels, that ignores what was chosen."""
    table = (torch.full((5, (rope.rotary_dim or 4) // 2), 0.6),) * 2

    def operators(**choice) -> set[str]:
        kernels = choose(device_type="cpu", dtype=torch.float32, compiled=True, **choice)
        return operators_of(replace(kernels, split_heads=kernels.split_heads_of(rope)), table)

    assert operators() == set()
    assert operators(native=["rope"]) == {"xorl.opaque_rope.default"}
    assert "xorl.opaque_rms_norm.default" in operators(native=["rms_norm"])
    assert operators(cast_bf16=True) == {"xorl.opaque_round_to_bf16.default"}


def test_casting_rounds_queries_and_keys_after_the_rotation():
    """Catches a cast before the norm or the rotation, one of the values too, and one that has no effect."""
    shape = HeadShape(2, 1, 4)
    generator = torch.Generator().manual_seed(0)
    qkv, q_weight, k_weight = (torch.randn(*size, generator=generator) for size in ((5, 16), (4,), (4,)))
    arguments = ((qkv,), shape, HeadNorms(q_weight, k_weight, 1e-6), (torch.full((5, 2), 0.6), torch.full((5, 2), 0.8)))
    q, k, v = reference.split_heads(*arguments)
    cast = choose(device_type="cpu", dtype=torch.float32, cast_bf16=True).split_heads(*arguments)
    for got, wanted in zip(cast, (q.bfloat16().float(), k.bfloat16().float(), v), strict=True):
        assert torch.equal(got, wanted)
    assert not torch.equal(cast[0], q)
