"""Expert parallelism that gathers all tokens on all ranks: it computes what one process and the exact exchange do."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from layouts import LAYOUTS, ONE_PROCESS, mesh_for, run_config, steps
from ranks import Launch, Launches
from table_of_runs import RECOMPUTE
from tiny_models import hf_config, write_config
from xorl.config.local import ModelConfig, TrainConfig
from xorl.core.nn import all_gather, moe
from xorl.core.nn import gathered_experts as gathered_module
from xorl.core.nn.all_gather import AllGather
from xorl.core.nn.dispatch import AllToAll
from xorl.core.nn.gathered_experts import gathered_experts
from xorl.core.parallel import ParallelPolicy
from xorl.kernels.experts.gates import SILU
from xorl.kernels.experts.grouped import experts
from xorl.kernels.experts.plan import RoutePlan
from xorl.kernels.layout import RankGroup
from xorl.train import model as model_module
from xorl.train.model_source import read_architecture
from xorl.train.recompute_choice import MicroBatch, measure_slice
from xorl.train.step_memory import held_bytes
from xorl.train.verify import Result, compare, one_process

ON_ONE_RANK, COMPILED = "all choices on one rank", "compiled"
PARTS = RoutePlan.parts
# The layouts' table has other runs that gather and exchange tokens.
COMPARED = [(ON_ONE_RANK, "alltoall"), (ON_ONE_RANK, "allgather"), (COMPILED, "allgather")]
# Each rank compiles for itself.
LAYOUT_OF = {ON_ONE_RANK: LAYOUTS["ep 4"], COMPILED: LAYOUTS["ep 2"]}
DOWN = "model.layers.0.mlp.experts.down_proj.weight"


def to_first_rank(scores: Tensor, count: int) -> Tensor:
    """In place of `top_experts`: all choices are experts of the first rank."""
    return torch.arange(count).expand(len(scores), count)


def uncompiled_policy(
    policy_of: Callable[[ModelConfig, TrainConfig], ParallelPolicy], model: ModelConfig, train: TrainConfig
) -> ParallelPolicy:
    """The policy that captures the graphs of compiled layers and runs them as they are."""
    policy = policy_of(model, train)
    return policy if policy.compile_backend is None else replace(policy, compile_backend="aot_eager")


def one_pass(plan: RoutePlan, count: int) -> Iterator[object]:
    """In place of `RoutePlan.parts`: nothing beyond the first pass."""
    return islice(PARTS(plan, count), 1)


def result(folder: Path, run: str, dispatch: str | None, fault: Callable[..., object] | None = None) -> Result:
    """The steps of a run on ranks that exchange tokens in this way, or in one process."""
    train = {**RECOMPUTE, "enable_compile": dispatch is not None} if run == COMPILED else {}
    layout = ONE_PROCESS if dispatch is None else LAYOUT_OF[run].train
    of_model = {} if dispatch is None else {"ep_dispatch": dispatch}
    config = run_config(folder, "model", {**layout, **train, "router_z_loss_coef": 0.1}, of_model=of_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "parallel_policy", partial(uncompiled_policy, model_module.parallel_policy))
        if run == ON_ONE_RANK:
            patch.setattr(moe, "top_experts", to_first_rank)
        if dispatch == "allgather":
            patch.setattr(AllToAll, "plan", None)  # nothing is exchanged
        if fault is not None:
            patch.setattr(RoutePlan, "parts", fault)
        return steps(one_process(config) if dispatch is None else config)


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """By run and dispatch."""
    folder = tmp_path_factory.mktemp("gathered")
    shape = hf_config("qwen3_moe", num_experts=8, moe_intermediate_size=48, output_router_logits=True)
    write_config(folder / "model", shape)
    cells: dict[tuple, tuple[int, Callable[[], object]]] = {}
    for run, dispatch in COMPARED:
        cells[run, None] = (1, partial(result, folder, run, None))
        cells[run, dispatch] = (LAYOUT_OF[run].num_ranks, partial(result, folder, run, dispatch))
    cells[ON_ONE_RANK, "one pass"] = (4, partial(result, folder, ON_ONE_RANK, "allgather", one_pass))
    return launch(cells)


def outside(found: Result, expected: Result) -> dict[str, object]:
    """The differences that are too large."""
    return {kind: one for kind, one in compare(found, expected).items() if not one.is_within}


@pytest.mark.parametrize(("run", "dispatch"), COMPARED)
def test_tokens_on_one_rank_and_in_graphs_give_what_one_process_computes(
    run: str, dispatch: str, found: Launches
) -> None:
    # Catches choices beyond the first pass that are dropped, tokens that another rank takes for its own, gradients that
    # one rank alone counts, a rank that waits for others because none of its experts was chosen, and gradients of such
    # experts that are missing instead of zero.
    [measured, *_], [expected] = found(run, dispatch), found(run, None)
    assert not outside(measured, expected)
    assert bool(expected.gradients[DOWN].chunk(4)[-1].any()) == (run != ON_ONE_RANK)


def test_choices_beyond_the_first_pass_show(found: Launches) -> None:
    # Catches a comparison that sees nothing: if one rank has all choices, half of them are beyond the first pass.
    assert outside(found(ON_ONE_RANK, "one pass")[0], found(ON_ONE_RANK, None)[0])


@pytest.mark.parametrize("is_even", [True, False])
def test_gathered_tokens_give_what_an_exchange_gives(is_even: bool, run_ranks) -> None:
    # Catches ranks with fewer tokens than others or with padding alone, padding that is computed or has a gradient, and
    # an expert of the next rank.
    size, num_experts, width = 4, 8, 6

    def both() -> list[list[Tensor]]:
        group = dist.group.WORLD
        assert group is not None
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(rank)
        num_tokens, num_real = [(7, 7), (1, 0), (12, 9), (3, 3)][rank]
        scores = torch.rand(num_tokens, num_experts, generator=generator)
        ids = scores.topk(3).indices if is_even else to_first_rank(scores, 2)
        x = torch.randn(num_tokens, width, generator=generator, requires_grad=True)
        weights = torch.rand(ids.shape, generator=generator, requires_grad=True)
        gate_up = torch.randn(num_experts // size, 2 * width, width, generator=generator, requires_grad=True)
        down = torch.randn(num_experts // size, width, width, generator=generator, requires_grad=True)
        grad = torch.randn(num_tokens, width, generator=generator)
        found = []
        for kind in (AllToAll, AllGather):
            dispatcher = kind(RankGroup(rank, size, group.group_name))
            plan = dispatcher.plan(ids, num_experts, torch.tensor(num_real), 12)
            got = dispatcher.dispatch(x, weights, plan)
            counts = {"num_rows": got.num_rows, "num_passes": got.num_passes}
            out = dispatcher.combine(experts(got.x, gate_up, down, got.weights, got.ids, **counts), plan)
            assert not out[num_real:].any()
            found.append([out, *torch.autograd.grad(out, (x, weights, gate_up, down), grad)])
        out = gathered_experts(x, weights, gate_up, down, dispatcher, plan, products="native", gate=SILU)
        found.append([out, *torch.autograd.grad(out, (x, weights, gate_up, down), grad)])
        return found

    for rank, (exchanged, *others) in enumerate(run_ranks(both, size)):
        for index, gathered in enumerate(others):
            for name, mine, theirs in zip(("out", "x", "weights", "gate_up", "down"), gathered, exchanged, strict=True):
                where = f"{('gathered', 'one operator')[index]}, {rank}, {name}"
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=f"{where}: {mine - theirs}")


def test_operators_of_gathered_tokens_are_registered_correctly() -> None:
    # Catches shapes that a compiler would trust and that are wrong, as with ranks of unequal numbers of tokens.
    x, weights, ids = torch.randn(5, 6), torch.rand(5, 2), torch.randint(8, (5, 2))
    of_experts = x, weights, ids, torch.randn(2, 8, 6), torch.randn(2, 6, 4), 3, 8, 1, 4
    for operator, first, last in (
        (gathered_module._gathered_experts, (), ()),
        (gathered_module._gathered_experts_backward, (torch.randn(5, 6),), (True,)),
        (gathered_module._gathered_experts_backward, (torch.randn(5, 6),), (False,)),
    ):
        given = *first, *of_experts, all_gather.ALONE, 0, "native", SILU, *last
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
    tests = ("test_schema", "test_faketensor")
    for operator, arguments in (
        (all_gather.gather_tokens, (x, weights, ids, 3, 8, 1, 4)),
        (all_gather.reduce_tokens, (torch.randn(32, 6), torch.rand(32, 2), 5, 4)),
        (all_gather.reduce_rows, (torch.randn(32, 6), 5, 4)),
        (all_gather.gather_rows, (torch.randn(5, 6), 3, 4)),
    ):
        torch.library.opcheck(operator, (*arguments, all_gather.ALONE), test_utils=tests)


class NoMeter:
    """Counts nothing."""

    def held(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def restart(self) -> None: ...


def test_a_rank_measures_its_layers_alone(run_ranks, tmp_path: Path) -> None:
    # Catches a measurement that waits for another rank, which may have run out of memory, and one with all experts.
    write_config(tmp_path / "model", hf_config("qwen3_moe", num_experts=8))

    def measured() -> tuple[int, float]:
        train = {**LAYOUTS["ep 4"].train, **RECOMPUTE, "recompute_policy": "auto"}
        config = run_config(tmp_path, "model", train, of_model={"ep_dispatch": "allgather"})
        architecture, device = read_architecture(config.model), torch.device("cpu")
        mesh = mesh_for(config)
        ratio = held_bytes(config, architecture, mesh.dims).gradient_ratio
        if mesh.loss.rank:
            return 2, ratio
        profile = measure_slice(config, "layer", architecture, 2, mesh, device, MicroBatch(48, 48), NoMeter())
        return len(profile.forward), ratio

    shape = read_architecture(run_config(tmp_path, "model", {}).model)
    numbers = {name: weight.numel() for name, weight in shape.spec.build(shape.config).named_parameters()}
    of_experts = sum(number for name, number in numbers.items() if ".experts." in name)
    total = sum(numbers.values())
    # A profile has a quarter of the experts' gradients, and a rank keeps a quarter of all.
    expected = total / (total - 3 / 4 * of_experts) / 4
    assert run_ranks(measured, 4) == [(2, pytest.approx(expected))] * 4
