"""Workers started by hand behind a tcp socket with keys, and an API that others can reach, behind a token."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from child import in_child
from ports import free_port
from service import QUICKSTART, ROOT, Service, launch


def start_workers(service: Service, num_ranks: int) -> subprocess.Popen[bytes]:
    """Workers as an operator starts them, with the options of a service."""
    overrides = [part for part in service.arguments if part.startswith("--server.")]
    values = [service.arguments[service.arguments.index(part) + 1] for part in overrides]
    options = [part for pair in zip(overrides, values, strict=True) for part in pair]
    ranks = ("xorl.server.ranks", str(num_ranks), "-m", "xorl.server.worker", "--config", str(QUICKSTART))
    with service.log_file.with_name("workers.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *ranks, *options],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def datum(types: Any) -> Any:
    """One of the client's own."""
    tokens = [5, 9, 13, 22]
    inputs = {"target_tokens": tokens, "weights": [1.0] * 4}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


@pytest.fixture(scope="module")
def connected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("connected")
    options: dict[str, object] = {"worker_bind_address": f"tcp://0.0.0.0:{free_port()}"}
    service = launch(folder, QUICKSTART, ("--mode", "connect", "--api-host", "0.0.0.0"), options)
    workers = start_workers(service, 2)
    service.start()
    service.key = (service.output_dir / "service" / "api_token").read_text().strip()
    yield service
    service.stop()
    workers.terminate()
    workers.wait(60)


@pytest.mark.parametrize("key", [None, "tml-0123456789abcdef", "x"])
def test_nobody_gets_in_without_the_token(connected: Service, key: str | None) -> None:
    # Would catch an API on a public address that takes anybody's calls.
    headers = {} if key is None else {"X-API-Key": key}
    request = Request(f"{connected.url}/api/v1/client/config", b'{"sdk_version":"0"}', headers)
    with pytest.raises(HTTPError) as caught:
        build_opener(ProxyHandler({})).open(request, timeout=10)
    assert caught.value.code == 401
    assert connected.key not in connected.log


def test_status_takes_the_key_from_a_file_or_a_variable(connected: Service) -> None:
    # Would catch a key that an operator must write where everybody on the machine can read it.
    asked = [
        str(Path(sys.executable).with_name("xorl")),
        "serve",
        "status",
        "--api-port",
        connected.url.rpartition(":")[2],
    ]
    file = str(connected.output_dir / "service" / "api_token")
    for arguments, variables, told in (
        ([], {}, "returned status 401; pass the service's key with --api-key-file or XORL_API_KEY"),
        (["--api-key-file", file], {}, '"ready": true'),
        ([], {"TINKER_API_KEY": connected.key}, '"ready": true'),
    ):
        status = subprocess.run(
            [*asked, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"XORL_API_KEY": "", "TINKER_API_KEY": ""} | variables,
        )
        assert told in " ".join((status.stdout + status.stderr).split())


def test_a_client_with_the_token_trains(connected: Service) -> None:
    # Would catch channel keys that the two sides do not share, and a token that the client itself refuses.
    def train() -> float:
        from tinker import types  # noqa: PLC0415  (a dependency group that is not always there)

        model = connected.tinker().create_lora_training_client("xorl/quickstart", rank=4).result()
        return model.forward_backward([datum(types)], "cross_entropy").result().metrics["loss:sum"]

    assert in_child(train) > 0
    assert (connected.output_dir / "service" / "channel.keys").stat().st_mode & 0o077 == 0


def test_workers_that_are_started_again_are_found_and_hold_the_models(tmp_path: Path) -> None:
    # Catches a launcher that has to be restarted whenever the workers are, or when earlier ones left their address.
    service = launch(tmp_path, QUICKSTART, ("--mode", "connect"), {"data_parallel_replicate_size": 1})
    file = service.output_dir / "service" / "workers.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"address": f"ipc://{tmp_path}/gone", "has_keys": False}))
    first = start_workers(service, 1)
    service.start()
    folder = Path(json.loads(file.read_text())["address"].removeprefix("ipc://")).parent
    assert folder.is_dir()

    def again() -> subprocess.Popen[bytes]:
        first.wait(60)
        return start_workers(service, 1)

    def train() -> list[float]:
        from tinker import types  # noqa: PLC0415  (a dependency group that is not always there)

        model = service.tinker().create_lora_training_client("xorl/quickstart", rank=4).result()
        losses: list[float] = []
        for ends in (False, True, False):
            losses.append(model.forward_backward([datum(types)], "cross_entropy").result().metrics["loss:sum"])
            if ends:
                os.kill(first.pid, signal.SIGTERM)
            else:
                model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        return losses

    with ThreadPoolExecutor() as pool:
        restarted = pool.submit(again)
        before, after, later = in_child(train)
        second = restarted.result()
    service.wait_ready(60)
    assert before > after == pytest.approx(later, rel=1e-4)
    assert not folder.exists()
    service.stop()
    second.terminate()
    second.wait(60)
