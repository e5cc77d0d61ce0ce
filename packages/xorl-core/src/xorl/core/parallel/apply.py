"""parallelize(): everything that is done to a model before it trains, in the one order that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from xorl.core.mesh import DataParallelMode, Mesh
from xorl.core.nn.fp8 import Fp8Recipe, convert_linears, fp8_linears
from xorl.core.parallel.activations import Recompute, recompute_layers
from xorl.core.parallel.compile import CompileBackend, compile_layers, require_compiler
from xorl.core.parallel.ddp import replicate
from xorl.core.parallel.fp8 import Fp8Weights
from xorl.core.parallel.fsdp import (
    abandon_pass,
    is_gathered,
    keeping_gathered,
    prefetch_forward,
    shard,
    sharding_units,
    within_gathered,
)
from xorl.core.parallel.offload import ActivationOffload
from xorl.core.parallel.stored import gather_as_stored, sharding_of_bytes


@dataclass(frozen=True)
class ParallelPolicy:
    """What to do to a model. The defaults shard it and change nothing else.

    Attributes:
        fp8: how the linear layers inside the decoder's layers multiply.
        param_dtype: the dtype in which sharded parameters are gathered (None: their own). Gradients are always reduced
            in fp32.
        reshard_after_forward: free gathered parameters between forward and backward pass (ZeRO-3), or keep them
            (ZeRO-2).
        forward_prefetch: gather each unit's parameters while the unit before it computes.
        unit_modules: class names, or last parts of module paths, of further modules to shard as units of their own.
        cpu_offload: keep sharded parameters, gradients and optimizer state in host memory. Parameters are gathered on
            the device to compute.
        recompute, recompute_num_layers: what the first so many layers (None: all) compute again in the backward pass.
        reentrant_recompute: use torch's older form of recomputation.
        compile_backend: compile every layer with it; None compiles nothing.
        activation_offload_limit: move what layers save for the backward pass to host memory, except for the last so
            many bytes of it; None moves nothing.
    """

    data_parallel_mode: DataParallelMode = "fsdp2"
    fp8: Fp8Recipe | Literal["none"] = "none"
    param_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    forward_prefetch: bool = True
    unit_modules: Sequence[str] = ()
    cpu_offload: bool = False
    recompute: Recompute = "none"
    recompute_num_layers: int | None = None
    reentrant_recompute: bool = False
    compile_backend: CompileBackend | None = None
    activation_offload_limit: float | None = None

    def __post_init__(self) -> None:
        if self.cpu_offload and self.data_parallel_mode != "fsdp2":
            raise ValueError(
                f"train.enable_cpu_offload: parameters are moved by their sharding, and train.data_parallel_mode is "
                f"{self.data_parallel_mode}: use fsdp2, which also works in one process"
            )


@dataclass(frozen=True)
class ParallelModel:
    """A placed model: `module` owns the parameters under their own names, `forward` is what to call."""

    module: nn.Module
    forward: nn.Module
    mesh: Mesh
    fp8_weights: Fp8Weights | None = None

    def train(self, mode: bool = True) -> None:
        """Put every module into training mode, or into evaluation mode; as nn.Module has it."""
        # There are a thousand modules: visiting them takes milliseconds, in which an idle device would wait.
        if self.module.training != mode:
            self.module.train(mode)

    @contextmanager
    def accumulation(self, *, is_last: bool) -> Iterator[None]:
        """Around the forward and backward pass of one micro-batch: replicas exchange gradients only at the last one.

        DDP with parameters in half precision exchanges them at every micro-batch: it exchanges in the parameters'
        dtype, in which the sum over several micro-batches must not be kept.
        """
        forward = self.forward
        if isinstance(forward, FSDPModule):
            forward.set_requires_all_reduce(is_last)
        replicated = isinstance(forward, DistributedDataParallel)
        with forward.no_sync() if replicated and not is_last and not self._in_half_precision else nullcontext():
            yield

    @contextmanager
    def generation(self, *, keep_gathered: bool) -> Iterator[None]:
        """Around forward passes for generation: in evaluation mode, without gradients, and with uncompiled layers.

        So the shapes of generation compile nothing, and what was compiled for training is kept. keep_gathered leaves
        sharded parameters gathered from pass to pass, until training or `drop_gathered` frees them.
        """
        self.train(False)
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            keeping_gathered(self.module) if keep_gathered else nullcontext(),
        ):
            yield

    @cached_property
    def _units(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]

    @property
    def is_sharded(self) -> bool:
        """Whether forward passes gather parameters."""
        return bool(self._units)

    @property
    def is_gathered(self) -> bool:
        """Whether the next forward pass gathers nothing: no parameter is sharded, or all are gathered still."""
        return is_gathered(self._units)

    def recordable(self) -> AbstractContextManager[None]:
        """Around a forward pass of a gathered model, in `generation`, that a CUDA graph may record."""
        return within_gathered(self.forward) if isinstance(self.forward, FSDPModule) else nullcontext()

    @property
    def _in_half_precision(self) -> bool:
        return any(
            parameter.dtype != torch.float32 for parameter in self.module.parameters() if parameter.requires_grad
        )

    def recover(self) -> None:
        """Clean up after a pass that failed on every rank, so that the next pass can run."""
        if isinstance(self.forward, DistributedDataParallel):
            # Otherwise it would wait for gradients that never came.
            self.forward.reducer._reset_state()
        abandon_pass(self.module)
        if self.fp8_weights is not None:
            self.fp8_weights.invalidate()

    def drop_gathered(self) -> None:
        """Free gathered copies of sharded parameters, which a forward pass without a backward pass may leave behind.

        Call it when the parameters have changed: the next forward pass would compute with the old values.
        """
        if self.fp8_weights is not None:
            self.fp8_weights.invalidate()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    policy: ParallelPolicy,
    *,
    device: torch.device,
    fill: Callable[[nn.Module], None],
) -> ParallelModel:
    """Change `model` in place for its part of `mesh` and return it with what to call.

    The order is: linear layers into fp8, recomputation inside the layers, then their compilation, which takes both into
    the graph, then offloading of what compiled layers still save, which no graph can hold, then sharding or replication
    around them, so that a recomputed forward runs within the unit whose parameters are gathered. A model on the meta
    device gets memory on `device` once it is known which part of it this rank holds, and `fill` then gives the
    parameters their values; a replica is filled before it is replicated. `model.layers` are the units of recomputation
    and of sharding, and `model.lm_head` is another one, unless it is None: then the loss reads `model.head_weight`,
    which is the embedding's.

    Raises ValueError, before anything is changed, where `require_possible` does.
    """
    require_possible(model, policy, device.type)
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    if policy.fp8 != "none":
        convert_linears(layers, policy.fp8)
    compiled = policy.compile_backend is not None
    recompute_layers(
        layers,
        policy.recompute,
        num_layers=policy.recompute_num_layers,
        reentrant=policy.reentrant_recompute,
        compiled=compiled,
    )
    if policy.compile_backend is not None:
        compile_layers(list(layers), backend=policy.compile_backend, device_type=device.type)
    if policy.activation_offload_limit is not None:
        ActivationOffload(device, limit_bytes=policy.activation_offload_limit).install(list(layers))
    if policy.data_parallel_mode == "fsdp2":
        last = [model.lm_head] if isinstance(model.lm_head, nn.Module) else []
        units = sharding_units(model, policy.unit_modules, [*layers, *last])
        with sharding_of_bytes():
            shard(
                model,
                mesh.fsdp,
                units,
                kept=last,
                param_dtype=policy.param_dtype,
                reshard_after_forward=policy.reshard_after_forward,
                cpu_offload=policy.cpu_offload,
            )
        if policy.forward_prefetch:
            prefetch_forward([*layers, *last])
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu" if policy.cpu_offload else device)
        fill(model)
    gather_as_stored(model)
    fp8_weights = Fp8Weights(model) if policy.fp8 == "tensorwise" else None
    # Where nothing is trained there are no gradients to exchange, and DDP takes no such model.
    is_replica = policy.data_parallel_mode == "ddp" and any(weight.requires_grad for weight in model.parameters())
    forward = replicate(model, mesh) if is_replica else model
    return ParallelModel(model, forward, mesh, fp8_weights)


def require_possible(model: nn.Module, policy: ParallelPolicy, device_type: str) -> None:
    """Raise ValueError that names the option for what `parallelize` cannot do to a model of this shape, or here.

    Changes nothing and needs no memory, no device and no other rank: to be asked of a model on the meta device.
    """
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    if policy.fp8 != "none":
        fp8_linears(layers)
    if policy.compile_backend is not None:
        require_compiler(policy.compile_backend, device_type)
    if policy.data_parallel_mode != "fsdp2":
        return
    units = sharding_units(model, policy.unit_modules, list(layers))
    if isinstance(model.lm_head, nn.Module):
        _keep_head_whole(model.lm_head, units)
    else:
        _keep_tied_head_at_root(model, units)
    if policy.compile_backend is not None:
        _keep_compiled_whole(layers, units)


def _keep_head_whole(head: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise ValueError for a unit within the head, which reads the parameters of its adapters by itself."""
    inner = {module for module in head.modules() if module is not head}
    if within := sorted({type(unit).__name__ for unit in units if unit in inner}):
        raise ValueError(
            f"model.basic_modules: {', '.join(within)} stands beside the model's head too, which is a unit with all "
            "that is in it: leave it out, or adapt no lm_head"
        )


def _keep_compiled_whole(layers: nn.ModuleList, units: Sequence[nn.Module]) -> None:
    """Raise ValueError for a unit within a layer: what gathers its parameters does not fit into the layer's graph."""
    inner = {module for layer in layers for module in layer.modules() if module is not layer}
    if within := sorted({type(unit).__name__ for unit in units if unit in inner}):
        raise ValueError(
            f"model.basic_modules: {', '.join(within)} lies within a layer, and train.enable_compile makes one graph "
            "of each layer: leave it out, or set train.enable_compile: false"
        )


def _keep_tied_head_at_root(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Raise ValueError for a unit with the weight that a tied head reads, which it would free before that."""
    if isinstance(model.lm_head, nn.Module):
        return
    head_weight = model.head_weight
    for unit in units:
        if any(parameter is head_weight for parameter in unit.parameters()):
            raise ValueError(
                f"model.basic_modules: {type(unit).__name__} has the weight of the model's head (in a tied model, the "
                "embedding's), which is used outside of that module too: leave it out"
            )
