"""Adapters into a module, and their parameters out of it and back, under plain names."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from xorl.lora.linear import LoRALinear
from xorl.lora.spec import AdapterSpec

# What torch.compile, activation checkpointing and FSDP put into the names of the modules that they wrap.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def inject(model: nn.Module, spec: AdapterSpec, *, seed: int = 0) -> tuple[str, ...]:
    """Put an adapter on each layer that `spec` names, in place, and freeze every other parameter of `model`.

    The outputs do not change. An adapter's initial values depend only on the seed, its name and its shape: not on the
    device, the other adapters or torch's global generator.

    Returns:
        The names of the adapted layers.

    Raises ValueError, before anything is changed, if a target does not fit or `model` already has adapters.
    """
    if adapted_linears(model):
        raise ValueError(f"{type(model).__name__} already has adapters; fold them in with merge_(model) first")
    names = spec.resolve(model)
    model.requires_grad_(False)
    for name in names:
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        generator = torch.Generator("cpu").manual_seed(_seed_of(seed, _plain(name), (spec.rank, base.in_features)))
        adapted = LoRALinear(base, rank=spec.rank, alpha=spec.alpha, generator=generator)
        model.set_submodule(name, adapted)
    return names


def adapted_linears(model: nn.Module) -> dict[str, LoRALinear]:
    """The adapted layers of `model` by full name, in the order of the modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What trains: `{layer}.lora_A` and `{layer}.lora_B` of every adapted layer, the same names however it is wrapped.

    DistributedDataParallel prefixes a name that any model may have, `module`: pass its `.module`.
    """
    return {
        f"{_plain(name)}.{leaf}": parameter
        for name, module in adapted_linears(model).items()
        for leaf, parameter in (("lora_A", module.lora_A), ("lora_B", module.lora_B))
    }


def adapter_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The values of `adapter_parameters`, detached and not copied. The scale is not among them: it is the spec's."""
    return {name: parameter.detach() for name, parameter in adapter_parameters(model).items()}


def load_adapter_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state` into the adapters of `model`.

    Raises ValueError, before anything is copied, unless names and shapes are exactly those of `adapter_parameters`.
    """
    parameters = adapter_parameters(model)
    problems = [f"{name} is missing" for name in parameters.keys() - state.keys()]
    problems += [f"{name} is not in the model" for name in state.keys() - parameters.keys()]
    problems += [
        f"{name} has shape {list(state[name].shape)}, the model wants {list(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in state and state[name].shape != parameter.shape
    ]
    if problems:
        raise ValueError(f"the adapters do not fit ({len(problems)} problems): {'; '.join(sorted(problems)[:5])}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _seed_of(seed: int, name: str, shape: tuple[int, ...]) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{shape}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
