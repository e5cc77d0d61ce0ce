"""Every layout computes what one process computes, on packed rows of uneven documents: the table of support/layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from layouts import LAYOUTS, NUM_STEPS, NUM_STEPS_OF_MUON, ONE_PROCESS, RUNS, run_in_layout, write_models
from ranks import Launch, Launches
from xorl.train.verify import compare


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """By layout and run, of those that were selected."""
    folder = write_models(tmp_path_factory.mktemp("models"))
    own = [item.callspec.params for item in request.session.items if item.path == request.path]
    cells = {}
    for layout, run in [(params["layout"], params["run"]) for params in own]:
        cells["one process", run] = (1, partial(run_in_layout, folder, RUNS[run], ONE_PROCESS))
        placed = LAYOUTS[layout]
        is_muon = RUNS[run].train.get("optimizer") == "muon"
        num_steps = NUM_STEPS if run == placed.runs[0] or is_muon else 1
        num_steps = NUM_STEPS_OF_MUON if run.endswith("Muon") else num_steps
        compute = partial(run_in_layout, folder, RUNS[run], placed.train, num_steps=num_steps)
        cells[layout, run] = (placed.num_ranks, compute)
    return launch(cells)


@pytest.mark.parametrize(("layout", "run"), [(name, run) for name, layout in LAYOUTS.items() for run in layout.runs])
def test_a_layout_equals_one_process(layout: str, run: str, found: Launches) -> None:
    # Catches keys that are missing or seen twice, positions and frequencies of a part in place of the row's, labels and
    # counts that are lost or doubled at the borders of parts, sums over the wrong ranks, gradients that are doubled or
    # divided over the ranks, tokens that get lost, norms of some experts, a router without gradients, and factors of
    # all experts whose gradients are summed over some ranks only.
    [measured, *_], [expected] = found(layout, run), found("one process", run)
    differences = compare(measured, replace(expected, losses=expected.losses[: len(measured.losses)]))
    failed = {kind: one for kind, one in differences.items() if not one.is_within}
    assert not failed, failed
