"""Every layout computes what one process computes, on packed rows of uneven documents: the table of support/layouts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest

from layouts import LAYOUTS, NUM_STEPS, NUM_STEPS_OF_MUON, alone, run_in_layout, write_models
from ranks import Launch, Launches
from table_of_runs import RUNS
from xorl.core.nn.ulysses import check_heads
from xorl.train.verify import compare


def alone_key(run: str) -> tuple[str, str]:
    """The key of what one process computes; it recomputes nothing, so several runs have the same."""
    model, train, lora = RUNS[run].model, RUNS[run].train, RUNS[run].lora
    kept = {name: value for name, value in train.items() if name not in RECOMPUTING and "recompute" not in name}
    return "one process", json.dumps([model, kept, dict(lora)], sort_keys=True)


RECOMPUTING = ("enable_gradient_checkpointing", "enable_reentrant", "moe_checkpoint_method")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """By layout and run, of those that were selected."""
    folder = write_models(tmp_path_factory.mktemp("models"))
    items = [item for item in request.session.items if item.path == request.path and "found" in item.fixturenames]
    cells = {}
    for layout, run in [(item.callspec.params["layout"], item.callspec.params["run"]) for item in items]:
        cells[alone_key(run)] = (1, partial(alone, folder, RUNS[run]))
        placed = LAYOUTS[layout]
        is_muon = RUNS[run].train.get("optimizer") == "muon"
        num_steps = NUM_STEPS if run == placed.runs[0] or is_muon else 1
        num_steps = NUM_STEPS_OF_MUON if run.endswith("Muon") else num_steps
        compute = partial(run_in_layout, folder, RUNS[run], placed, num_steps=num_steps)
        cells[layout, run] = (placed.num_ranks, compute)
    return launch(cells)


# Options of layouts that compute in another order than one process. The others only add up sums over other tokens, so
# they differ less.
DIVIDING = {f"{axis}_parallel_size" for axis in ("tensor", "pipeline", "expert", "ulysses", "ringattn")}
LIMIT_OF_DATA = 1e-6


@pytest.mark.parametrize(("layout", "run"), [(name, run) for name, layout in LAYOUTS.items() for run in layout.runs])
def test_a_layout_equals_one_process(layout: str, run: str, found: Launches) -> None:
    # Catches keys that are missing or seen twice, positions and frequencies of a part in place of the row's, labels and
    # counts that are lost or doubled at the borders of parts, sums over the wrong ranks, gradients that are doubled or
    # divided over the ranks, tokens that get lost, norms of some experts, a router without gradients, factors of all
    # experts whose gradients are summed over some ranks only, means of means (any division by ranks, micro-batches or
    # their tokens), a recomputed forward pass without its gathered parameters or twice in the gradient, a head that is
    # freed before its gradient is there, adapters sharded with other rows than their weights, and units that are
    # sharded from the outside in, which leaves the inner ones nothing. Of ranks that share rows: keys of another
    # document, sinks of other heads, sinks that a ring drops or adds for each rank, and caps that it drops.
    [measured, *_], [expected] = found(layout, run), found(*alone_key(run))
    differences = compare(measured, replace(expected, losses=expected.losses[: len(measured.losses)]))
    limit = math.inf if DIVIDING & LAYOUTS[layout].train.keys() else LIMIT_OF_DATA
    failed = {kind: one for kind, one in differences.items() if not one.is_within or one.error > limit}
    assert not failed, failed


def test_sizes_that_heads_cannot_be_shared_by_name_the_nearest_that_works() -> None:
    # Catches a run that fails in its first step.
    for num_ranks in (1, 2, 4, 8):
        check_heads(8, 4, num_ranks)
    with pytest.raises(ValueError, match=r"ulysses: 3 .* 8 heads with 4 .* works is 2"):
        check_heads(8, 4, 3)
