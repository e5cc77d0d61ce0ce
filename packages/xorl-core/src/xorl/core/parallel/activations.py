"""Recomputation: which parts of a layer run again in the backward pass instead of keeping their activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

RecomputeModule = Literal["self_attn", "mlp"]


def checkpoint_layers(layers: nn.ModuleList, modules: Sequence[RecomputeModule], *, reentrant: bool) -> None:
    """Recompute every layer whole, or only its submodules named in `modules`; changes the layers in place.

    The forward function is replaced rather than the module wrapped, so parameters keep their names and hooks of the
    module stay outside of what is recomputed.
    """
    for layer in layers:
        for module in [layer.get_submodule(name) for name in modules] or [layer]:
            module.forward = _recomputed(module.forward, reentrant)


def _recomputed(forward: Callable[..., object], reentrant: bool) -> Callable[..., object]:
    # Nothing in a layer draws random numbers, so there is no generator state to save for the second forward.
    return partial(checkpoint, forward, use_reentrant=reentrant, preserve_rng_state=False)
