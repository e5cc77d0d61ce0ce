"""Layers in CUDA graphs on ranks that share work: the same steps, to the bit, as with layers that are launched."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulated_graphs import EmulatedMemory, backend, device_attention
from layouts import EP, TP, ULYSSES, engine_for, mesh_for, run_config
from ranks import Launch, Launches
from table_of_runs import RECOMPUTE
from tiny_models import hf_config, write_config
from xorl.core.loss import cross_entropy
from xorl.core.parallel import apply, graphed
from xorl.core.parallel.graphed import LayerGraphs
from xorl.data.batch import Document, collate
from xorl.train import layer_kernels
from xorl.train import model as model_module

EXPERTS = hf_config("qwen3_moe", num_hidden_layers=2, num_experts=8, moe_intermediate_size=48, router_aux_loss_coef=0.1)
CASES = {
    # name: (model, layout, how many times each rank captures one of its two layers)
    "ddp": ("qwen3", {"data_parallel_mode": "ddp"}, (2, 4)),
    "experts of replicas": ("qwen3_moe", {"data_parallel_mode": "ddp", **EP}, (4, 4)),
    "ulysses": ("qwen3_moe", {"data_parallel_mode": "ddp", **ULYSSES}, (2, 2)),
    "tensor": ("qwen3_moe", {"data_parallel_mode": "none", **TP}, (2, 2)),
}
# Of the two rows of a step, by the rank that reads them: those of the first rank round to the same sizes.
LENGTHS = [([9, 11, 4], [9, 12, 3]), ([3, 3, 3, 3, 3, 9], [17, 1, 1, 1, 4])]
NUM_STEPS = 4


def steps(folder: Path, case: str, enable_cuda_graphs: bool) -> tuple[list[Tensor], int]:
    """Losses and norms of steps of two micro-batches, parameters after them, and how many layers were captured."""
    torch._dynamo.reset()
    name, layout, _ = CASES[case]
    options = {**layout, **RECOMPUTE, "enable_mixed_precision": True, "enable_compile": True, "lr": 0.01}
    options["enable_cuda_graphs"] = enable_cuda_graphs
    config = run_config(folder, name, options, of_model={"ep_dispatch": "allgather"} if "experts" in case else {})
    policy_of, made = model_module.parallel_policy, []

    def graphs() -> LayerGraphs:
        made.append(LayerGraphs())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "_require_device", lambda *_: None)
        patch.setattr(
            model_module, "parallel_policy", lambda *given: replace(policy_of(*given), compile_backend=backend())
        )
        patch.setattr(layer_kernels, "resolve_attention", lambda *_: device_attention)
        patch.setattr(graphed, "GraphMemory", EmulatedMemory)
        patch.setattr(apply, "LayerGraphs", graphs)
        engine = engine_for(config)
        reader = mesh_for(config).data.rank
        generator = torch.Generator().manual_seed(reader)
        found: list[Tensor] = []
        for _ in range(NUM_STEPS):
            rows = [torch.randint(64, (24,), generator=generator).split(lengths) for lengths in LENGTHS[reader]]
            batches = [
                collate([Document(ids.numpy(), ids.numpy()) for ids in row], pad_to_multiple_of=8) for row in rows
            ]
            losses = engine.forward_backward(batches, cross_entropy)
            update = engine.optim_step(0.01, losses.divisor)
            found += [losses.loss_sum, update.grad_norm]
    return found + [each.detach().clone() for each in engine.model.module.parameters()], sum(map(len, made))


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """By case, and whether layers are in graphs."""
    folder = tmp_path_factory.mktemp("graphed")
    write_config(folder / "qwen3", hf_config(num_hidden_layers=2))
    write_config(folder / "qwen3_moe", EXPERTS)
    return launch({(case, on): (2, partial(steps, folder, case, on)) for case in CASES for on in (False, True)})


@pytest.mark.parametrize("case", CASES)
def test_steps_in_graphs_are_those_of_layers_that_are_launched(case: str, found: Launches) -> None:
    # Catches a collective that one rank captures when another one launches it, gradients that DDP does not see, sums of
    # an earlier micro-batch, and the lengths of another rank's part of a row.
    for (graphs, captured), (plain, _), expected in zip(
        found(case, True), found(case, False), CASES[case][2], strict=True
    ):
        assert captured == expected
        torch.testing.assert_close(graphs, plain, rtol=0, atol=0)
