"""Compilation of decoder layers: one graph per layer, shared by identical layers and by packs of any length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from xorl.core import runtime
from xorl.core.torch_private import configure_dynamo, configure_inductor
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.torch_private import maybe_mark_dynamic

CompileBackend = Literal["inductor", "aot_eager", "eager"] | Callable[..., object]
"""inductor generates code; eager and aot_eager run the captured graphs, for tests; or a custom backend."""


def compile_layers(layers: Sequence[nn.Module], *, backend: CompileBackend, device_type: str) -> None:
    """Compile the forward function of every layer, in place; compilation happens on the first call.

    Each layer must compile to a single graph; a graph break is an error. The numbers of tokens and documents are
    symbolic, so packs of any size share one compilation for training and one for evaluation. Layers that differ only in
    the values of their parameters share both. Compiled code is cached on disk for later processes.

    Raises ValueError if the compiler that inductor needs is missing, or if the cache folder is not writable.
    """
    require_compiler(backend, device_type)
    if backend == "inductor":
        runtime.use_compile_cache(configure_inductor(deterministic=torch.are_deterministic_algorithms_enabled()))
    configure_dynamo(len(layers))
    for layer in layers:
        layer.forward = _mark_dynamic(torch.compile(layer.forward, fullgraph=True, backend=backend))


def require_compiler(backend: CompileBackend, device_type: str) -> None:
    """Raise ValueError if the compiler that `backend` needs is not installed."""
    if backend == "inductor" and (missing := runtime.missing_compiler(device_type)) is not None:
        raise ValueError(f"compile_backend: {missing}; install it, or set compile_backend=None")


def _mark_dynamic(compiled: Callable[..., object]) -> Callable[..., object]:
    """`compiled` with the first dim of its inputs marked dynamic; otherwise the next length recompiles."""

    def call(*inputs: object) -> object:
        for value in inputs:
            if isinstance(value, SequenceLayout):
                value.mark_dynamic()
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, Tensor):
                    maybe_mark_dynamic(tensor, 0)
        return compiled(*inputs)

    return call
