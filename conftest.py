"""What every test of the workspace shares: small thread pools, no network, and no GPU test without a GPU."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# Tests are tiny and several run at once; threads would only fight, and sum in other orders than the tolerances were set
# for. Read by torch when it is first imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A job in the background of a script ignores Ctrl-C, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# It would look at all modules again and again while tests are collected, which takes as long as importing them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    import torch  # noqa: PLC0415  (a run without GPU tests does not pay for torch)

    if not torch.cuda.is_available():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA GPU here"))


@pytest.fixture(autouse=True, scope="module")
def _little_for_the_garbage_collector() -> None:
    """Hides what is there before the module: libraries, tests, caches of compilers.

    A run collects garbage several times, and looking at all of this would take a second each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Takes back what a command sets up that a test runs in its own process: handlers that outlive the test's files."""
    logger = logging.getLogger("xorl")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:] = handlers
    logger.propagate = propagate
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def _interfaces_of_a_module() -> Iterator[None]:
    """For what the fixtures of a module run."""
    with _interfaces_as_they_were():
        yield


@pytest.fixture(autouse=True)
def _interfaces_of_a_test() -> Iterator[None]:
    """For what a test runs in its own process."""
    with _interfaces_as_they_were():
        yield


@contextmanager
def _interfaces_as_they_were() -> Iterator[None]:
    """Takes back the loopback interface that ranks of one host choose: processes of later tests would inherit it."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
