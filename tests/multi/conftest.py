"""Marks the tests of this folder, gives shared launches their time, and runs tests with the marker `ranks` in ranks."""

from functools import partial
from inspect import signature
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function) or Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.multi)
        # The first test that needs a number of ranks waits for all that they compute.
        if "launch" in item.fixturenames:
            item.add_marker(pytest.mark.timeout(900))
        if item.get_closest_marker("ranks"):
            item.fixturenames.append("run_ranks")


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs the whole test in each of its ranks, if it says how many."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in signature(pyfuncitem.obj).parameters}
    pyfuncitem.funcargs["run_ranks"](partial(pyfuncitem.obj, **arguments), *marker.args)
    return True
