"""The fused kernels on a CPU: in Triton's interpreter, which has to be chosen before Triton is imported, and compiled.

The interpreter takes Python that the compiler does not.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("triton_interpreted.py")


NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform"
)
BF16, FP32, INT = "*bf16", "*fp32", "i32"
HEADS = {
    "NUM_HEADS": 32,
    "NUM_KV_HEADS": 8,
    "HEAD_DIM": 128,
    "HAS_NORM": True,
    "HAS_ROPE": True,
    "HALF_BLOCK": 64,
    "Q_BLOCK": 16,
    "K_BLOCK": 8,
}
ROWS = {"NUM_COLUMNS": 151_936, "IGNORED": -100, "HAS_WEIGHT": True, "WRITES_GRADIENT": True, "BLOCK": 4096}
# (module, function) -> types of the arguments that are not constants, constants. As for an 8B model in bf16.
KERNELS = {
    ("swiglu", "_forward"): ([BF16] * 2, {"WIDTH": 12_288, "BLOCK": 2048}),
    ("swiglu", "_backward"): ([BF16] * 3, {"WIDTH": 12_288, "BLOCK": 2048}),
    ("rms_norm", "_forward"): (
        [BF16, BF16, FP32, BF16, BF16, FP32, "fp32"],
        {"WIDTH": 4096, "HAS_RESIDUAL": True, "BLOCK": 4096},
    ),
    ("rms_norm", "_backward"): (
        [BF16, BF16, BF16, FP32, FP32, BF16, FP32, INT],
        {"WIDTH": 4096, "HAS_SUM": True, "ROWS": 32, "BLOCK": 4096},
    ),
    ("heads", "_forward"): ([*[BF16] * 4, FP32, FP32, BF16, BF16, INT, INT, "fp32"], HEADS),
    ("heads", "_backward"): ([*[BF16] * 4, FP32, FP32, *[BF16] * 4, FP32, *[INT] * 8, "fp32"], {**HEADS, "TOKENS": 32}),
    ("cross_entropy", "_cross_entropy_rows"): ([FP32, "*i64", FP32, FP32, "*i1", BF16, INT, INT], ROWS),
    ("cross_entropy", "_scale"): ([BF16, FP32, INT], {"BLOCKS": 640, "BLOCK": 4096}),
}


@NEEDS_TRITON
@pytest.mark.parametrize(("module", "function"), KERNELS)
def test_kernels_compile_for_hopper(module, function):
    """Catches what the interpreter runs and the compiler refuses."""
    import triton  # noqa: PLC0415 - not on every platform
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    kernel = getattr(importlib.import_module(f"xorl.kernels.fused.{module}"), function)
    types, constants = KERNELS[module, function]
    remaining = iter(types)
    signature = {name: "constexpr" if name in constants else next(remaining) for name in kernel.arg_names}
    assert not list(remaining)
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, constexprs=positions), target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"]


@NEEDS_TRITON
def test_kernels_match_their_twins_in_the_interpreter():
    """Catches a kernel whose mathematics or borders are wrong, without a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
