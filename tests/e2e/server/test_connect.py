"""Workers started by hand behind a tcp socket with keys, and an API that others can reach, behind a token."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from child import in_child
from ports import free_port
from service import QUICKSTART, ROOT, Service, launch


@pytest.fixture(scope="module")
def connected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("connected")
    options: dict[str, object] = {"worker_bind_address": f"tcp://0.0.0.0:{free_port()}"}
    service = launch(folder, QUICKSTART, ("--mode", "connect", "--api-host", "0.0.0.0"), options)
    config = ["--config", str(QUICKSTART), *service.arguments[service.arguments.index("0.0.0.0") + 1 :]]
    with (folder / "workers.log").open("wb") as log:
        workers = subprocess.Popen(
            [sys.executable, "-m", "xorl.server.ranks", "2", "-m", "xorl.server.worker", *config],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
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
        ([], {}, "answers 401; give the service's key with --api-key-file or XORL_API_KEY"),
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
        tokens = [5, 9, 13, 22]
        inputs = {"target_tokens": tokens, "weights": [1.0] * 4}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
        return model.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]

    assert in_child(train) > 0
    assert (connected.output_dir / "service" / "channel.keys").stat().st_mode & 0o077 == 0
