"""Compilation: each decoder layer becomes one graph, shared by all layers alike and by packs of any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from xorl.core import runtime
from xorl.kernels.layout import SequenceLayout

CompileBackend = Literal["inductor", "aot_eager", "eager"] | Callable[..., object]
"""inductor generates code; the others run the captured graphs as they are, which is of use in tests; or one's own."""


def compile_layers(layers: Sequence[nn.Module], *, backend: CompileBackend, device_type: str) -> None:
    """Compile the forward function of every layer, in place, when it is first called.

    A layer is a single graph, or an error: nothing in it falls back to the interpreter. The numbers of tokens and
    documents are symbols, so there is one compilation for training and one for evaluation, whatever the packs, and
    layers that differ in their parameters alone share it. What was compiled is kept on disk for later processes.

    Raises ValueError where the compiler that inductor calls is missing, or compiled code cannot be kept.
    """
    require_compiler(backend, device_type)
    if backend == "inductor":
        # Inductor takes seconds to import, and runs that compile nothing need not have it.
        from torch._inductor import config as inductor  # noqa: PLC0415
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # noqa: PLC0415

        runtime.use_compile_cache(default_cache_dir())
        # Inductor picks among kernels by timing them, so two processes might not pick the same.
        inductor.deterministic = torch.are_deterministic_algorithms_enabled()
    # Buckets of replicated gradients need no seams in the graph of a layer, which is smaller than most of them.
    torch._dynamo.config.optimize_ddp = False
    # Compilations are counted by function, which all layers share. Two modes, and maybe all layers are different.
    limit = max(torch._dynamo.config.recompile_limit, 2 * len(layers))
    torch._dynamo.config.recompile_limit = limit
    for layer in layers:
        layer.forward = _varying(torch.compile(layer.forward, fullgraph=True, backend=backend))


def require_compiler(backend: CompileBackend, device_type: str) -> None:
    """Raise ValueError where this machine lacks the compiler that `backend` calls."""
    if backend == "inductor" and (missing := runtime.missing_compiler(device_type)) is not None:
        raise ValueError(f"train.enable_compile: {missing}; install it, or set the option to false")


def _varying(compiled: Callable[..., object]) -> Callable[..., object]:
    """`compiled`, told that the first dimension of its inputs varies: it would learn it by compiling twice."""

    def call(*inputs: object) -> object:
        for value in inputs:
            if isinstance(value, SequenceLayout):
                value.mark_dynamic()
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, Tensor):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*inputs)

    return call
