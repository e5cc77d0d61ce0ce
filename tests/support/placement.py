"""Tiny models placed on ranks in the ways that tests compare, and the comparison."""

import os
from collections.abc import Mapping
from functools import cache
from itertools import chain

import torch
import torch._inductor.lowering  # compilation would import it in each rank
from torch import Tensor
from torch.distributed.tensor import DTensor

from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import Decoder, spec_for
from xorl.core.parallel import ParallelModel, ParallelPolicy, parallelize
from xorl.data import PackedBatch
from xorl.data.batch import Column, Document, collate
from xorl.train.engine import Engine

LAYOUTS = {
    # name: (mode, ranks, shard size, replicate size, reshard after forward)
    "none": ("none", 1, -1, -1, True),
    "ddp-2": ("ddp", 2, -1, -1, True),
    "zero3-1": ("fsdp2", 1, -1, -1, True),
    "zero3-2": ("fsdp2", 2, -1, -1, True),
    "zero3-3": ("fsdp2", 3, -1, -1, True),
    "zero2-2": ("fsdp2", 2, -1, -1, False),
    "hsdp-2x2": ("fsdp2", 4, 2, 2, True),
    "offload-2": ("fsdp2", 2, -1, -1, True),
}
RECOMPUTE = {
    # name: (what, reentrant, number of layers)
    "none": ("none", False, None),
    "operation": ("operation", False, None),
    "layer": ("layer", False, None),
    "first layer": ("layer", False, 1),
    "reentrant": ("layer", True, None),
    "mlp": (("mlp",), False, None),
}
# For losses of policy gradients: log-probabilities near those of 64 equal tokens, and advantages.
EXTRAS = ("logprobs", "advantages", "ref_logprobs")
OFFSETS = torch.tensor([[-4.2], [0.0], [-4.2]])


def num_ranks(layout: str) -> int:
    return LAYOUTS[layout][1]


def placed(
    hf_config: Mapping[str, object],
    layout: str,
    recompute: str = "none",
    *,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    **policy: object,
) -> ParallelModel:
    """The decoder of such a config.json, with parameters in a dtype, placed on this job's ranks and filled from seed 0.

    policy: the rest of the policy.
    """
    spec = spec_for(hf_config)
    with torch.device("meta"):
        model = spec.build(spec.config_from_hf(hf_config), merge_qkv=True).to(dtype)
    model.compute_dtype = compute_dtype or dtype
    mode, world_size, shard_size, replicate_size, reshard = LAYOUTS[layout]
    dims = ParallelDims.resolve(mode, world_size, shard_size=shard_size, replicate_size=replicate_size)
    parts, reentrant, num_layers = RECOMPUTE[recompute]

    def fill(module: torch.nn.Module) -> None:
        assert isinstance(module, Decoder)
        module.init_weights(0, device=torch.device("cpu"))

    whole_policy = ParallelPolicy(
        data_parallel_mode=mode,
        reshard_after_forward=reshard,
        cpu_offload=layout == "offload-2",
        recompute=parts,
        recompute_num_layers=num_layers,
        reentrant_recompute=reentrant,
        **policy,
    )
    return parallelize(model, mesh_of(dims), whole_policy, device=torch.device("cpu"), fill=fill)


def batches_of(engine: Engine, num_bins: int, num_together: int) -> list[PackedBatch]:
    """This rank's passes of a step over bins of documents of unequal lengths, with unequal numbers of trained tokens.

    num_together: of the bins in a pass.
    """
    generator = torch.Generator().manual_seed(7)
    bins = []
    for index in range(num_bins):
        documents = []
        for length in (3 + index, 5, 2 + index % 4):
            ids = torch.randint(0, 64, (length,), generator=generator)
            labels = torch.where(torch.rand(length, generator=generator) < index / num_bins, -100, ids)
            noise = torch.randn(len(EXTRAS), length, generator=torch.Generator().manual_seed(100 * index + length))
            extras = dict(zip(EXTRAS, (noise + OFFSETS).numpy(), strict=True))
            documents.append(Document(ids.numpy(), labels.numpy(), extras))
        bins.append(documents)
    mesh, columns = engine.model.mesh, dict.fromkeys(EXTRAS, Column())
    own = bins[mesh.data.rank :: mesh.data.size]
    return [
        collate(list(chain.from_iterable(own[start : start + num_together])), pad_to_multiple_of=8, columns=columns)
        for start in range(0, len(own), num_together)
    ]


def mesh_of(dims: ParallelDims) -> Mesh:
    """The mesh of this process for such sizes; collective at first. Each has groups, whose connections add up."""
    return _mesh(dims, os.getpid())


@cache
def _mesh(dims: ParallelDims, pid: int) -> Mesh:
    return Mesh(dims, "cpu")


def whole(tensor: Tensor | None) -> Tensor:
    """A copy of all of a tensor; collective where it is sharded."""
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assert_same(reference: Mapping[str, Tensor], measured: Mapping[str, Tensor], limit: float = 1e-6) -> None:
    """Fail where a tensor's difference exceeds `limit` of its norm."""
    assert set(reference) == set(measured)
    for name, tensor in reference.items():
        difference = (measured[name].float() - tensor.float()).norm() / tensor.float().norm()
        assert difference <= limit, f"{name} differs by {difference:.2e}"
