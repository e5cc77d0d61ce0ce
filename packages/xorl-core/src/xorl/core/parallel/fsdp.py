"""Sharding with FSDP2: selection of units, dtypes of collectives, and gradients summed instead of averaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from xorl.core.nn.roles import DeclaresRoles, declared
from xorl.core.parallel.collectives import Collectives, transport
from xorl.core.parallel.copy_engine import CopyEngineAllGather, CopyEngineReduceScatter
from xorl.core.torch_private import FSDPParam, call_hooks_around, gather_in_place, owner, parameter_group


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    units: Sequence[nn.Module],
    *,
    param_dtype: torch.dtype | None,
    reshard_after_forward: bool,
    kept: Sequence[nn.Module] = (),
    meshes: Mapping[nn.Module, DeviceMesh] = MappingProxyType({}),
    cpu_offload: bool = False,
    collectives: Collectives = "auto",
) -> None:
    """Shard each of `units`, innermost first, and then the rest of `model` over `mesh`, in place.

    `kept` are units that stay gathered after the forward pass, because the backward pass starts with them; `meshes` are
    the meshes of units that are sharded over other ranks. Such a unit stays as it is if its mesh is this rank alone and
    there is nothing to cast: FSDP2 would copy its parameters and gradients several times. A unit's parameters are
    gathered together, in param_dtype (None: their own dtype), except those that stay in fp32. Gradients are summed, in
    fp32. cpu_offload keeps parameters, gradients and optimizer state in host memory. `collectives` selects how GPUs
    communicate.
    """
    own = [] if cpu_offload else [unit for unit, one in meshes.items() if one.size() == 1 and _fits(unit, param_dtype)]
    ignored = {parameter for unit in own for parameter in unit.parameters()}
    units = [unit for unit in units if unit not in own]
    used = dict.fromkeys(meshes.get(unit, mesh) for unit in (model, *units))
    by_copy_engines = [one for one in used if uses_copy_engines(one, collectives)]
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Memory can be pinned only if there is a GPU.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    uncast = kept_in_fp32(model)
    options = {"offload_policy": offload, "ignored_params": ignored}
    for unit in units:
        reshards = reshard_after_forward and unit not in kept
        own_policy = replace(policy, param_dtype=None) if unit in uncast else policy
        fully_shard(unit, mesh=meshes.get(unit, mesh), reshard_after_forward=reshards, mp_policy=own_policy, **options)
    # The root holds the embedding, which a tied head also reads.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # By default, FSDP2 divides by the number of ranks. Without force_sum it uses PREMUL_SUM, which gloo lacks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for one in by_copy_engines:
        sharded = [unit for unit in (*units, model) if meshes.get(unit, mesh) is one and unit not in uncast]
        _use_copy_engines(sharded, one.get_group(one.ndim - 1), param_dtype)


def kept_in_fp32(model: nn.Module) -> list[nn.Module]:
    """The modules whose trained parameters stay in fp32, as units of their own: FSDP2 reduces one dtype for each."""
    return [
        module
        for module in model.modules()
        if (declaring := declared(module, DeclaresRoles)) is not None and "recurrence" in declaring.roles.values()
    ]


def _fits(unit: nn.Module, dtype: torch.dtype | None) -> bool:
    """Whether FSDP2 would not cast any parameter of `unit` to `dtype`."""
    return dtype is None or all(parameter.dtype == dtype for parameter in unit.parameters())


def uses_copy_engines(mesh: DeviceMesh, collectives: Collectives) -> bool:
    """Whether parameters sharded over `mesh` are gathered and reduced by copy engines. Collective.

    Raises ValueError for "copy_engine" if copy engines cannot be used.
    """
    return mesh.device_type == "cuda" and transport(mesh.get_group(mesh.ndim - 1), collectives) == "copy_engine"


def _use_copy_engines(units: Sequence[nn.Module], group: dist.ProcessGroup, param_dtype: torch.dtype | None) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    all_gather = CopyEngineAllGather(group, device)
    # Gradients have the compute dtype. Without param_dtype, there may be several dtypes; NCCL then reduces.
    trained = {parameter.dtype for unit in units for parameter in unit.parameters() if parameter.requires_grad}
    dtypes = trained if param_dtype is None else {param_dtype}
    reduce_scatter = CopyEngineReduceScatter(group, device, dtypes.pop()) if len(dtypes) == 1 else None
    for unit in units:
        assert isinstance(unit, FSDPModule)
        unit.set_custom_all_gather(all_gather)
        gather_in_place(unit, all_gather.gather_into)
        if reduce_scatter is not None:
            unit.set_custom_reduce_scatter(reduce_scatter)


def gather_in_order(layers: Sequence[Sequence[nn.Module]], last: Sequence[nn.Module], *, ahead: bool) -> None:
    """Gather and free the parameters of each layer together with those of the modules inside it that are units.

    A compiled layer cannot contain the gather of a unit. Each of `layers` is a layer and modules in it, and `last` are
    the units after them. `ahead` gathers each while what is before it computes. In the backward pass FSDP2 does so by
    itself, but only for one unit, so groups of several are named there.
    """
    groups: list[list[FSDPModule]] = []
    for group in (*layers, *([unit] for unit in last)):
        groups.append([module for module in group if isinstance(module, FSDPModule)])
        for inner in groups[-1][1:]:
            call_hooks_around(inner, group[0])
    for group, following in pairwise(groups if ahead else []):
        group[0].set_modules_to_forward_prefetch(following)
        if len(group) > 1:
            for unit in following:
                unit.set_modules_to_backward_prefetch(group)


@contextmanager
def no_reshard_after_forward(model: nn.Module) -> Iterator[None]:
    """Context manager in which parameters stay gathered after a forward pass, so that later passes gather nothing.

    On exit they stay gathered, until the next forward or backward pass or `ParallelModel.drop_gathered` frees them.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    resharding = [unit for unit in units if _reshards_after_forward(unit)]
    for unit in resharding:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in resharding:
            unit.set_reshard_after_forward(True, recurse=False)


def is_gathered(units: Sequence[FSDPModule]) -> bool:
    """Whether the parameters of all units are currently gathered."""
    groups = map(parameter_group, units)
    return all(group is None or group.is_unsharded for group in groups)


def _reshards_after_forward(unit: FSDPModule) -> bool:
    group = parameter_group(unit)
    return group is not None and group.post_forward_mesh_info is not None


def sharded_parameters(model: nn.Module) -> dict[tuple[nn.Module, str], FSDPParam]:
    """FSDP2's record of each sharded parameter, by the module that owns it and its name there."""
    groups = (parameter_group(unit) for unit in model.modules())
    return {owner(parameter): parameter for group in groups if group is not None for parameter in group.fsdp_params}


def sharding_units(model: nn.Module, names: Sequence[str], always: Sequence[nn.Module]) -> list[nn.Module]:
    """`always`, and the modules whose class or last path component is in `names`, innermost first.

    A class name includes its subclasses, so Linear also selects layers with quantised weights or fp8. Parameters are
    gathered around a module's forward function, so modules without one are skipped, such as a part of an adapter that
    is named like the layer it adapts. `model` itself is not included. Raises ValueError for a name that matches no
    module, or only modules without a forward function.
    """
    found: list[tuple[int, nn.Module]] = []
    named: dict[str, list[nn.Module]] = {name: [] for name in names}
    for path, module in model.named_modules():
        classes = {kind.__name__ for kind in type(module).__mro__ if issubclass(kind, nn.Module)} - {"Module"}
        matching_names = (classes | {path.rpartition(".")[2]}) & set(names)
        for name in matching_names:
            named[name].append(module)
        if path and ((matching_names and _has_forward(module)) or module in always):
            found.append((path.count("."), module))
    if unmatched := sorted(name for name, modules in named.items() if not modules):
        known = sorted({type(module).__name__ for module in model.modules() if any(True for _ in module.parameters())})
        raise ValueError(f"unit_modules: no module is named {', '.join(unmatched)}; the model has {', '.join(known)}")
    for modules in named.values():
        if not any(map(_has_forward, modules)):
            raise ValueError(
                f"unit_modules: {type(modules[0]).__name__} has no forward function, so it cannot be "
                "a separate unit: leave it out"
            )
    return [module for _, module in sorted(found, key=lambda item: -item[0])]


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
