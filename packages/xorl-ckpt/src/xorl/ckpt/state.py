"""A training state as named tensors: its parts, and how a checkpoint differs from it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from xorl.ckpt.errors import CheckpointError, require
from xorl.ckpt.layout import TensorRecord
from xorl.ckpt.optimizer import OptimizerState
from xorl.ckpt.regions import Piece, Stored, is_dtensor

# How many tensors a message lists per problem: layers repeat, so a few names are enough.
_MAX_LISTED = 2


class Stateful(Protocol):
    """A part of a training state, for example a `torch.nn.Module`.

    `state_dict` must be flat and hold only tensors, DTensors or `Piece`s that share storage with the object: loading
    copies into them in place, and then passes them to `load_state_dict`. A plain tensor must be the same on every rank.
    Neither method may run a collective.
    """

    def state_dict(self) -> Mapping[str, Stored]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


def stateful_parts(
    state: Mapping[str, Stateful | torch.optim.Optimizer], saved: Collection[str] = ()
) -> dict[str, Stateful]:
    """The state with the state of each optimizer named by the parameters of the modules in it.

    `saved` are the names of the tensors that are to be loaded.
    """
    require("state", state, isinstance(state, Mapping), 'a mapping of names to parts, such as {"model": module}')
    for name, part in state.items():
        has_state = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        require(
            f"state: {name}",
            part,
            has_state,
            "an object with state_dict and load_state_dict; pass the module itself, and numbers in scalars",
        )
    modules = {name: part for name, part in state.items() if isinstance(part, torch.nn.Module)}
    return {
        name: OptimizerState(part, _named_parameters(name, part, modules, saved), with_groups=True)
        if isinstance(part, torch.optim.Optimizer)
        else part
        for name, part in state.items()
    }


def _named_parameters(
    part: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module], saved: Collection[str]
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters of the modules that an optimizer trains; the names tell the modules apart if there are several.

    They do not depend on modules that it does not train, such as an average of the weights. In older checkpoints, they
    did: what is `saved` then has the names of modules.
    """
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    owners = {
        name: module
        for name, module in modules.items()
        if any(parameter in trained for parameter in module.parameters())
    }
    named = {
        f"{name}.{path}": (path, parameter)
        for name, module in owners.items()
        for path, parameter in module.named_parameters()
    }
    with_state = {name.rpartition(".")[0] for name in saved}
    if len(owners) > 1 or any(f"{part}.{name}" in with_state for name in named):
        return [(name, parameter) for name, (_, parameter) in named.items()]
    return list(named.values())


def collect(
    state: Mapping[str, Stateful], saved: Mapping[str, TensorRecord] | None = None
) -> dict[str, dict[str, Stored]]:
    """The tensors of each part: to save, or to copy those into that are `saved`."""
    parts: dict[str, dict[str, Stored]] = {}
    for name, part in state.items():
        if not isinstance(name, str) or not name or "." in name:
            raise CheckpointError(
                f"state: {name!r} is not a valid name for a part of the state; use a non-empty name without dots"
            )
        parts[name] = {}
        if saved is not None and isinstance(part, OptimizerState):
            prefix = f"{name}."
            of_part = {key.removeprefix(prefix): saved[key] for key in saved if key.startswith(prefix)}
            held: Mapping[str, Stored] = part.tensors_to_load(of_part)
        else:
            held = part.state_dict()
        for key, value in held.items():
            if not isinstance(value, (torch.Tensor, Piece)):
                kind = type(value).__name__
                raise CheckpointError(
                    f"state: {name}.{key} is of type {kind}; only tensors can be saved. Numbers, and the state of a "
                    'scheduler, go to scalars: save(..., scalars={"scheduler": scheduler.state_dict()})'
                )
            tensor = value.tensor if isinstance(value, Piece) else value
            partial = is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)
            if tensor.layout != torch.strided or tensor.is_meta or partial:
                raise CheckpointError(
                    f"state: {name}.{key} is sparse, on the meta device or a partial sum; it cannot be saved"
                )
            parts[name][key] = value if isinstance(value, Piece) else value.detach()
    return parts


def flatten(parts: Mapping[str, Mapping[str, Stored]]) -> dict[str, Stored]:
    """Flatten to `{part}.{key}`, which is unambiguous because part names contain no dots."""
    return {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.items()}


def differences(tensors: Mapping[str, Stored], saved: Mapping[str, TensorRecord]) -> dict[str, list[str]]:
    """Differences between the tensors of a state and the saved ones, by kind; empty lists if nothing does."""
    missing = [name for name in tensors if name not in saved]
    changed: list[str] = []
    for name, tensor in tensors.items():
        expected, found = TensorRecord.of(tensor), saved.get(name)
        if found is not None and found != expected:
            changed.append(
                f"{name}: saved as {found.dtype}{list(found.shape)}, expected {expected.dtype}{list(expected.shape)}"
            )
    return {"missing from the checkpoint": missing, "with a different shape or dtype": changed}


def raise_other_model(
    path: Path, problems: Mapping[str, list[str]], unexpected: list[str], parts: Collection[str]
) -> None:
    """Raise CheckpointError if there are `differences`, or `unexpected` tensors, which no rank of the state holds."""
    listed = {**problems, "only in the checkpoint": unexpected}
    if not any(listed.values()):
        return
    lines = [f"{path} was saved by another model or training set-up; nothing was loaded"]
    for title, names in listed.items():
        if names:
            shown = names[:_MAX_LISTED]
            lines.append(f"  {title} ({len(names)}): {', '.join(shown)}{', ...' if len(names) > len(shown) else ''}")
    left_over = dict.fromkeys(name.partition(".")[0] for name in unexpected)
    if absent := [part for part in left_over if part not in parts]:
        lines.append(
            f"  The state has no {', '.join(absent)}: pass the saved parts, or leave them out with "
            f"skip_parts=({', '.join(map(repr, absent))},)"
        )
    lines.append(
        "Resume with the model, optimizer and options of the saved run, or start a new run from its exported weights."
    )
    raise CheckpointError("\n".join(lines))
