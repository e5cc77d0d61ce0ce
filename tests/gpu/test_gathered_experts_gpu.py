"""The experts of a layer with the tokens of all ranks, in CUDA graphs: they compute what the same kernels do alone.

The file is also the program that torchrun starts.
"""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core import runtime
from xorl.core.nn import gathered_experts as module
from xorl.core.nn.all_gather import AllGather, GatherPlan
from xorl.core.nn.gathered_experts import gathered_experts
from xorl.kernels.experts.gates import SILU
from xorl.kernels.layout import RankGroup

pytestmark = pytest.mark.gpu

NUM_EXPERTS, NUM_ACTIVE, WIDTH, EXPERT_WIDTH = 16, 4, 256, 128


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    """This process alone, with NCCL."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    assert dist.group.WORLD is not None
    yield RankGroup(0, 1, dist.group.WORLD.group_name)
    dist.destroy_process_group()


class Layer:
    """A rank's weights of one layer, and inputs that differ in each call."""

    def __init__(self, seed: int, num_ranks: int = 1) -> None:
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.gate_up = self.normal(NUM_EXPERTS // num_ranks, 2 * EXPERT_WIDTH, WIDTH) * 0.1
        self.down = self.normal(NUM_EXPERTS // num_ranks, WIDTH, EXPERT_WIDTH) * 0.1

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=self.generator).bfloat16()

    def call(self, dispatcher: AllGather, num_tokens: int) -> list[Tensor]:
        """The output and all gradients."""
        x, grad = self.normal(num_tokens, WIDTH), self.normal(num_tokens, WIDTH)
        scores = self.normal(num_tokens, NUM_EXPERTS).float().softmax(-1)
        weights, ids = scores.topk(NUM_ACTIVE)
        leaves = [each.detach().requires_grad_() for each in (x, weights, self.gate_up, self.down)]
        plan = dispatcher.plan(ids, NUM_EXPERTS, torch.tensor(num_tokens - 3, device="cuda"), num_tokens)
        assert isinstance(plan, GatherPlan)
        out = gathered_experts(*leaves, dispatcher, plan, products="native", gate=SILU)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def steps(ranks: RankGroup) -> tuple[list[list[Tensor]], AllGather]:
    """All results of two layers in steps of two sizes, between which the weights change."""
    dispatcher = AllGather(ranks)
    layers, found = [Layer(seed, ranks.size) for seed in (0, 1)], []
    for num_tokens in (256, 256, 384, 256, 384, 256, 384):
        found += [layer.call(dispatcher, num_tokens) for layer in layers]
        for layer in layers:
            layer.gate_up.mul_(1.1)
            layer.down.sub_(0.01)
    return found, dispatcher


def test_replayed_graphs_compute_the_same_bits(ranks: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a graph that reads weights or inputs of an earlier step, outputs that a later replay overwrites, and the
    # graph of another layer or size.
    found, dispatcher = steps(ranks)
    assert len(dispatcher.graphs) == 2 * 2 * 2  # forward and backward, of two layers, of two sizes
    monkeypatch.setattr(module, "MAX_GRAPH_TOKENS", 0)
    expected, plain = steps(ranks)
    assert len(plain.graphs) == 0
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for name, one, other in zip(("out", "x", "weights", "gate_up", "down"), mine, theirs, strict=True):
            assert torch.equal(one, other), f"call {index}: {name}"


def test_graphs_of_many_layers_take_the_memory_of_one(ranks: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches outputs and intermediate tensors that each graph keeps for itself, and graphs whose memory
    # `recompute_policy: auto` does not foresee.
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 1024)
    monkeypatch.setattr(sys.modules[__name__], "EXPERT_WIDTH", 512)

    def held(num_layers: int, num_tokens: int) -> int:
        dispatcher = AllGather(ranks)
        layers = [Layer(index) for index in range(num_layers)]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for _ in range(3):
            for layer in layers:
                layer.call(dispatcher, num_tokens)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    of_layer = 3 * NUM_EXPERTS * WIDTH * EXPERT_WIDTH * 2
    one = held(1, 4096)
    assert held(8, 4096) < one + 2 * of_layer
    gate_up = torch.empty(NUM_EXPERTS * 2 * EXPERT_WIDTH, WIDTH, dtype=torch.bfloat16, device="meta")
    down = torch.empty(NUM_EXPERTS * WIDTH, EXPERT_WIDTH, dtype=torch.bfloat16, device="meta")
    foreseen = module.graph_bytes(4096, NUM_ACTIVE, 1, gate_up, down)
    assert 0.5 * foreseen < one < 1.3 * foreseen


def test_graphs_end_with_their_layers(ranks: RankGroup) -> None:
    # Catches memory that the graphs of an earlier model hold.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        steps(ranks)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_ranks_end_while_graphs_exist() -> None:
    # Catches NCCL, which waits at the end of a group for the graphs that hold its collectives.
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, __file__], check=True, timeout=120)


def main() -> None:
    """Make graphs with NCCL's collectives in them, and end."""
    runtime.init()
    assert dist.group.WORLD is not None
    _, dispatcher = steps(RankGroup(dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name))
    assert len(dispatcher.graphs)
    runtime.shutdown()


if __name__ == "__main__":
    main()
