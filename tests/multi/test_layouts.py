"""Every layout computes what one process computes, on packed rows of uneven documents: the table of support/layouts."""

from __future__ import annotations

from functools import partial

import pytest

from layouts import LAYOUTS, ONE_PROCESS, RUNS, run_in_layout, write_models
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
        cells[layout, run] = (
            LAYOUTS[layout].num_ranks,
            partial(run_in_layout, folder, RUNS[run], LAYOUTS[layout].train),
        )
    return launch(cells)


@pytest.mark.parametrize(("layout", "run"), [(name, run) for name, layout in LAYOUTS.items() for run in layout.runs])
def test_a_layout_equals_one_process(layout: str, run: str, found: Launches) -> None:
    # Catches keys that are missing or seen twice, positions and frequencies of a part in place of the row's, labels and
    # counts that are lost or doubled at the borders of parts, sums over the wrong ranks, gradients that are doubled or
    # divided over the ranks, tokens that get lost, norms of some experts, a router without gradients, and factors of
    # all experts whose gradients are summed over some ranks only.
    differences = compare(found(layout, run)[0], found("one process", run)[0])
    failed = {kind: one for kind, one in differences.items() if not one.is_within}
    assert not failed, failed
