"""The private parts of torch that xorl-core uses; any release of torch may change them.

They are FSDP2's state, DDP's buckets, process groups, the compiler's settings, and where a shard begins. A test
ensures that no other file of this package names a private part of torch. Holds for torch 2.11 to 2.15:
`tools/check_torch.py` runs the tests on the oldest and the newest. Operators are in the file of this name in
xorl.kernels.

Importing this file imports FSDP2, which takes a second, so modules that also work without sharding import it inside
functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "AllGather",
    "FSDPParam",
    "FSDPParamGroup",
    "FixedBuckets",
    "ReduceScatter",
    "allow_integer_parameters",
    "call_hooks_around",
    "configure_dynamo",
    "configure_inductor",
    "flattened",
    "gather_event",
    "gather_in_place",
    "gloo_group",
    "is_traceable_wrapper_subclass",
    "leave_out_of_replicas",
    "local_shape_and_offset",
    "nccl_options",
    "num_collectives",
    "owner",
    "parameter_group",
    "process_groups",
    "record_wait_for_reductions",
    "reduction_event",
    "replace_method",
    "reset_reducer",
    "reset_units",
    "set_allocator_settings",
    "set_gather_hooks",
    "set_group_timeout",
    "set_unsharded",
    "sharded_values",
    "shares_storage",
    "symmetric_memory",
    "without_streams",
]

# FSDP2. A module that `fully_shard` was called on is a unit; it has a group of parameters if any are its own.


def parameter_group(module: nn.Module | FSDPModule) -> FSDPParamGroup | None:
    """FSDP2's record of the parameters that are gathered together for `module`; None if it is no unit or has none."""
    return module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None


def owner(parameter: FSDPParam) -> tuple[nn.Module, str]:
    """The module that a sharded parameter belongs to, and its name there."""
    return parameter._module_info.module, parameter._module_info.param_name


def sharded_values(parameter: FSDPParam) -> Tensor:
    """This rank's shard of a parameter, padded with zeros to the length that all ranks have; flat."""
    return parameter._sharded_param_data


def set_gather_hooks(
    parameter: FSDPParam, before: Callable[..., tuple[tuple[Tensor, ...], None]], after: Callable[..., object]
) -> None:
    """Let `before` return the tensors that FSDP2 gathers for a parameter, and `after` take what was gathered.

    FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` of the local tensor of a sharded parameter. Both are
    set on this one plain tensor, so optimizers and checkpoints are not affected; a tensor subclass would have to
    implement all of their operations.
    """
    tensor = cast(DTensor, parameter.sharded_param)._local_tensor
    # The parameter owns the hooks, which may refer to it. It also has a view of the tensor, which holds the tensor in
    # C++: if the tensor owned them, Python's garbage collector would never find the cycle, and so free no model.
    parameter.gather_hooks = before, after  # pyright: ignore[reportAttributeAccessIssue]
    tensor.fsdp_pre_all_gather = weakref.proxy(before)  # pyright: ignore[reportAttributeAccessIssue]
    tensor.fsdp_post_all_gather = weakref.proxy(after)  # pyright: ignore[reportAttributeAccessIssue]
    parameter._init_extensions()


def set_unsharded(parameter: FSDPParam, placeholder: Tensor) -> None:
    """Make `placeholder`, expanded to the parameter's whole shape, what its module sees while it is gathered."""
    whole = placeholder.expand(parameter._orig_size)
    parameter._unsharded_param = nn.Parameter(whole, requires_grad=parameter.sharded_param.requires_grad)


@contextmanager
def allow_integer_parameters() -> Iterator[None]:
    """Context manager in which `fully_shard` accepts frozen integer parameters.

    FSDP2 creates each sharded parameter with requires_grad=True, which integers do not support, and only then copies
    the flag of the original. This replaces nn.Parameter in FSDP2's module by a function that checks the dtype.
    """

    # From 2.12 on, FSDP2 also passes requires_grad.
    def make_parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())

    _fsdp_param.nn = SimpleNamespace(Parameter=make_parameter, Module=nn.Module)
    try:
        yield
    finally:
        _fsdp_param.nn = nn


def call_hooks_around(unit: FSDPModule, outer: nn.Module) -> None:
    """Gather and free the parameters of `unit`, a module inside `outer`, around the forward function of `outer`.

    The hooks of `outer` itself stay around those of the unit.
    """
    state = unit._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = outer.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
    state._post_forward_hook_handle = outer.register_forward_hook(state._post_forward, prepend=True)


@contextmanager
def without_streams(root: FSDPModule) -> Iterator[None]:
    """Context manager for a forward pass with all parameters gathered, in which FSDP2 uses no streams of its own.

    A CUDA graph cannot capture work on those streams. FSDP2 queues it only in the root unit, so treat the root as an
    inner unit.
    """
    state = root._get_fsdp_state()
    state._state_ctx.iter_forward_root = state
    try:
        yield
    finally:
        state._state_ctx.iter_forward_root = None


def reset_units(model: nn.Module) -> None:
    """Reset every unit after a forward or backward pass that raised.

    Gradients that the pass has already accumulated in sharded parameters are kept.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        state = unit._get_fsdp_state()
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        context, communication = state._state_ctx, state._comm_ctx
        context.iter_forward_root, context.post_backward_final_callback_queued = None, False
        communication.post_forward_order.clear()
        communication.all_gather_state = communication.reduce_scatter_state = None
        if (group := state._fsdp_param_group) is None:
            continue
        group._training_state = TrainingState.IDLE
        # Wait for prefetched gathers and drop them.
        group.finalize_backward()
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter.unsharded_param.grad = None
        group.reshard()


def gather_in_place(
    unit: FSDPModule, gather_into: Callable[[Sequence[Tensor]], Callable[[Sequence[Tensor]], None]]
) -> None:
    """Gather the parameters of `unit` straight into their own memory, not into a buffer from which FSDP2 copies them.

    Args:
        unit: FSDP2 gathers its parameters as usual if one has hooks (`set_gather_hooks`) or is kept on the host.
        gather_into: given the memory of all gathered parameters, each [ranks x n], returns a function that is called
            with this rank's shards, each flat [n] and padded, and fills the memory with those of all ranks.
    """
    group = parameter_group(unit)
    if group is None:
        return
    device = torch.get_device_module(group.device)
    unshard, wait_for_unshard = group.unshard, group.wait_for_unshard
    gather: Callable[[Sequence[Tensor]], None] | None = None
    pending: AllGatherResult | None = None

    def memory(parameter: FSDPParam) -> Tensor:
        numel, dtype = parameter._sharded_param_data.numel(), parameter.param_dtype or parameter.orig_dtype
        parameter.init_all_gather_outputs([numel], [dtype], group._all_gather_process_group.size(), group.device)
        parameter.alloc_all_gather_outputs()
        return parameter.all_gather_outputs[0]

    def unshard_in_place(async_op: bool = False) -> None:
        nonlocal gather, pending
        if async_op or not all(_is_gathered_as_it_is(parameter) for parameter in group.fsdp_params):
            unshard(async_op)
            return
        is_skipped = not group.unshard_in_backward and group._training_state == TrainingState.PRE_BACKWARD
        if group._all_gather_result is not None or group.is_unsharded or is_skipped:
            return
        _, stream = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        # This memory may have belonged to units that are freed but that the current stream is still reading.
        stream.wait_stream(device.current_stream())
        with torch.no_grad(), device.stream(stream):
            wholes = [memory(parameter) for parameter in group.fsdp_params]
            gather = gather or gather_into(wholes)
            with torch.autograd._unsafe_preserve_version_counter((*wholes,)):
                gather([parameter._sharded_param_data for parameter in group.fsdp_params])
            pending = AllGatherResult(wholes[0], stream.record_event(), None, [], [], [])
        group._all_gather_result = pending

    def wait_in_place() -> None:
        nonlocal pending
        if pending is None or pending is not group._all_gather_result:
            wait_for_unshard()
            return
        device.current_stream().wait_event(pending.all_gather_event)
        for parameter in group.fsdp_params:
            parameter.init_unsharded_param()
        group._to_unsharded()
        group._all_gather_result = pending = None

    replace_method(group, "unshard", unshard_in_place)
    replace_method(group, "wait_for_unshard", wait_in_place)


def _is_gathered_as_it_is(parameter: FSDPParam) -> bool:
    """Whether the gathered parameter is simply the ranks' shards, which are on their devices, one after the other."""
    has_hooks = hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
    is_sharded = parameter.sharded_state != ShardedState.SHARDED_POST_FORWARD
    return is_sharded and not has_hooks and not parameter.offload_to_cpu and parameter.fsdp_placement.dim == 0


def gather_event(group: FSDPParamGroup) -> torch.Event | None:
    """The event that `wait_for_unshard` is going to wait for."""
    gathered = group._all_gather_result
    return None if gathered is None else gathered.all_gather_event


def reduction_event(group: FSDPParamGroup) -> torch.Event | None:
    """The event that `post_backward` is going to wait for before it queues any work."""
    reduction = group.comm_ctx.reduce_scatter_state
    is_trained = any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params)
    return reduction.event if is_trained and group.reduce_grads and reduction is not None else None


def record_wait_for_reductions(group: FSDPParamGroup, recorded: Callable[[Callable[[], None]], None]) -> None:
    """Let `recorded` call the wait for the group's reductions at the end of a backward pass, where there is one."""
    wait = group._wait_for_post_backward

    def wait_recorded() -> None:
        if group._post_reduce_event is not None or group._all_reduce_state is not None:
            recorded(wait)

    replace_method(group, "_wait_for_post_backward", wait_recorded)


def replace_method(group: FSDPParamGroup, name: str, method: Callable[..., None]) -> None:
    """Replace a method that FSDP2 looks up on the instance, so that an attribute of the instance overrides it."""
    assert hasattr(group, name), f"FSDP2 of torch {torch.__version__} has no {name}"
    setattr(group, name, method)


# DDP


class FixedBuckets(DistributedDataParallel):
    """A replica whose buckets are built once, in the reverse order of the parameters.

    torch would rebuild them after the first backward pass. The layout determines the order in which gradients are
    summed over ranks, so after a rebuild, a resumed run would round differently.
    """

    def __init__(self, module: nn.Module, **options: object) -> None:
        super().__init__(module, **options)  # pyright: ignore[reportArgumentType]
        self.reducer._push_all_rebuilt_params()
        self._has_rebuilt_buckets = self.reducer._rebuild_buckets()
        assert self._has_rebuilt_buckets, "torch rebuilds buckets only once"

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, is_sparse = super()._build_params_for_reducer()
        return parameters[::-1], is_sparse[::-1]


def leave_out_of_replicas(model: nn.Module, parameters: set[nn.Parameter]) -> None:
    """Let a replica of `model` that is made next neither broadcast these parameters nor sum their gradients."""
    names = [name for name, parameter in model.named_parameters() if parameter in parameters]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def reset_reducer(replica: DistributedDataParallel) -> None:
    """Stop waiting for the gradients of a backward pass that failed."""
    replica.reducer._reset_state()


# Process groups


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Limit the operations of a process group that exists."""
    # Public from torch 2.15 on.
    set_timeout = getattr(dist.distributed_c10d, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def num_collectives(group: dist.ProcessGroup) -> int:
    """The number of collectives that this rank has begun in a group."""
    return group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]


def gloo_group(store: dist.Store, rank: int, size: int, address: str, timeout: timedelta) -> dist.ProcessGroupGloo:
    """A group that is not in torch's table of groups, and whose sockets listen at `address`. Collective."""
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl_options(name: str, timeout: timedelta) -> dist.ProcessGroupNCCL.Options:
    """The options of an NCCL process group that is made without torch's registry of groups."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name = dist.distributed_c10d.GroupName(name)
    return options


# The compiler, whose import takes seconds


def configure_dynamo(num_layers: int) -> None:
    """Prepare to compile this many layers, whose graphs are not split at the borders of DDP's buckets."""
    # Most buckets are larger than a layer.
    torch._dynamo.config.optimize_ddp = False
    # The limit applies to the function that all layers share. If all differ, each compiles for training and evaluation,
    # with and without recorded experts.
    limit = max(torch._dynamo.config.recompile_limit, 4 * num_layers)
    torch._dynamo.config.recompile_limit = limit


def configure_inductor(*, deterministic: bool) -> str:
    """Let inductor select kernels in a reproducible way if asked; returns the default folder of its cache."""
    from torch._inductor import config as inductor  # noqa: PLC0415 - see above
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # noqa: PLC0415 - see above

    # It selects kernels by timing them, so two processes might select different ones.
    inductor.deterministic = deterministic
    return default_cache_dir()


# Memory


def set_allocator_settings(settings: str) -> None:
    """Change the settings of the device allocator, as PYTORCH_ALLOC_CONF gives them."""
    torch._C._accelerator_setAllocatorSettings(settings)


def shares_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of one storage, which may be empty at the moment."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one axis called `name`, with the ranks in the same order. Collective when new."""
    return mesh._flatten(name)


def local_shape_and_offset(tensor: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """The shape of this rank's shard, and the index of its first element in the whole."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
