"""`serve`: starts real services, which end with the module; `service`: the quickstart's, which modules share.

The clients are the public ones, from the dependency group `clients`; where it is not installed, these tests are
skipped and say so.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from service import QUICKSTART, Serve, Service, launch

HERE = Path(__file__).parent
CLIENTS = ("openai", "tinker", "xorl_client")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in CLIENTS if importlib.util.find_spec(name) is None]
    for item in items:
        if missing and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs the public clients: uv sync --group clients"))


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """(config file, further launcher arguments, **options of the service) -> a Service; all are stopped at the end."""
    started: list[Service] = []

    def start(config: Path = QUICKSTART, *arguments: str, **options: object) -> Service:
        service = launch(tmp_path_factory.mktemp("service"), config, arguments, options)
        started.append(service)
        service.start()
        return service

    yield start
    for service in started:
        if service.process is not None and service.process.poll() is None:
            service.stop()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The quickstart's service: adapters over a tiny model in fp32, two CPU ranks, loopback, no key.

    Modules share it; one that needs another, or does worse to it than to stop and start it, has a fixture of its own.
    """
    service = launch(tmp_path_factory.mktemp("shared_service"), QUICKSTART, (), {})
    service.start()
    yield service
    if service.process is not None and service.process.poll() is None:
        service.stop()
