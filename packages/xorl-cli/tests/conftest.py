"""Fixtures of the command's, trainer's and service's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from xorl.core import runtime
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.runtime import Runtime


@pytest.fixture(scope="module")
def place() -> Iterator[Runtime]:
    """The only rank, on a CPU, for all tests of a module: leaving the process group collects all garbage first."""
    yield runtime.init("cpu")
    runtime.shutdown()


@pytest.fixture(scope="module")
def mesh(place: Runtime) -> Mesh:
    """The mesh of that rank, without data parallelism."""
    assert place.world_size == 1
    return Mesh(ParallelDims.resolve("none", 1), "cpu")


@pytest.fixture
def chosen(tmp_path: Path) -> object:
    """Options of an orchestrator whose output is in the test's folder."""
    from orchestrated import options  # noqa: PLC0415  (only tests of the service need it)

    return options(tmp_path)
