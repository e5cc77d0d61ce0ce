"""The service's HTTP side before an orchestrator that computes its answers."""

import pytest

from answering_orchestrator import asked_at


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    outputs = tmp_path_factory.mktemp("outputs")
    with asked_at(outputs, poll_s=0.2, body_bytes=100_000) as service:
        yield service


@pytest.fixture
def client(service):
    return service[0]


@pytest.fixture
def orchestrator(service):
    orchestrator = service[1]
    orchestrator.submits.clear()
    orchestrator.tombstones.clear()
    orchestrator.keys.clear()
    return orchestrator
