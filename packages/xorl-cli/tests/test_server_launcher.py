"""The launcher: what it refuses before anything starts, who is started again, and that nothing is left behind."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pydantic import Secret

from xorl.cli import exit_codes
from xorl.config import LoadedServerConfig, ServerConfig, server_config_from_mapping
from xorl.server import addresses, launcher
from xorl.server.channel import ChannelKeys
from xorl.server.launcher import check_model
from xorl.server.machine import check_machine
from xorl.server.supervise import ProcessFailed, Supervised

SLEEP = "import time; time.sleep(60)"


def loaded(tmp_path: Path, **options: Any) -> LoadedServerConfig:
    return server_config_from_mapping({"model_path": "m", "output_dir": str(tmp_path / "out")} | options)


def plan_of(config: ServerConfig, folder: Path, num_gpus: int = 0, **changes: Any) -> launcher.Plan:
    options = {"mode": "auto", "api_host": "127.0.0.1", "api_port": 5555, **changes}
    return launcher.make_plan(config, folder / "config.yaml", num_gpus, **options)


def toy(code: str, **options: Any) -> Supervised:
    return Supervised("API", [sys.executable, "-c", code], **options)


def look_until(process: Supervised, is_done, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_done():
        process.restart_if_dead()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_is_killed_is_started_again() -> None:
    # Would catch a service that is gone when its API or orchestrator is.
    process = toy(SLEEP)
    process.start()
    first = process.pid
    os.kill(first, signal.SIGKILL)
    look_until(process, lambda: process.num_restarts == 1 and process.pid is not None)
    assert process.pid != first
    assert (process.status.num_restarts, process.status.reason) == (1, "it ended with signal=SIGKILL")
    process.kill()
    assert process.pid is None


@pytest.mark.parametrize(
    ("code", "options", "wanted"),
    [
        ("import sys; sys.exit(2)", {}, "cannot start: see its message above"),
        ("import sys; sys.exit(1)", {"max_early_exits": 2}, "died 2 times, each within 10 s .* code=1"),
        ("import os; os.abort()", {"max_early_exits": 1}, "the last exit was signal=SIGABRT"),
    ],
)
def test_a_process_that_cannot_run_is_given_up(code: str, options: dict[str, Any], wanted: str) -> None:
    # Would catch a launcher that starts a broken process for ever, and shows its message a thousand times.
    process = toy(code, **options)
    process.start()
    with pytest.raises(ProcessFailed, match=wanted):
        look_until(process, lambda: False)


def test_ranks_end_with_the_first_that_failed(tmp_path: Path) -> None:
    # Would catch bad input of a worker that is taken for a crash, and started again and again.
    (tmp_path / "rank.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(2)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-m", "xorl.server.ranks", "2", str(tmp_path / "rank.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_a_child_ends_with_its_parent(seconds: float) -> None:
    # Would catch workers that go on holding GPUs when the launcher was killed, be it while they start.
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'xorl.server.process', 'timeit', '-s', 'import time', "
        "'time.sleep(60)'], start_new_session=True, env={**os.environ, 'XORL_PARENT': str(os.getpid())})\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    time.sleep(seconds)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 15
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("host", "port", "wanted"),
    [
        ("127.0.0.1", 0, "--api-port: a port must be from 1 to 65535"),
        ("192.0.2.1", 5555, "--api-host: this machine cannot listen on 192.0.2.1"),
        ("no such host", 5555, "--api-host: no such host is not a valid address"),
    ],
)
def test_a_place_to_listen_that_is_none_is_named(host: str, port: int, wanted: str) -> None:
    # Would catch a traceback of the web server, seconds after the start.
    with pytest.raises(ValueError, match=wanted):
        launcher.check_listening("--api", host, port)


def test_a_port_in_use_is_named() -> None:
    # Would catch a second service that starts its workers and then finds that it cannot listen.
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"worker_bind_address: port {port} of 127.0.0.1 is in use"):
            launcher.check_listening("worker_bind_address", "127.0.0.1", port)


def test_a_public_address_needs_a_key(tmp_path: Path) -> None:
    # Would catch a service that lets everybody in, and one whose key changes with each start.
    assert launcher.with_token(loaded(tmp_path), "127.0.0.1")[0].config.api_token is None
    first, file = launcher.with_token(loaded(tmp_path), "0.0.0.0")
    token = first.config.api_token.get_secret_value()
    assert token.startswith("tml-")
    assert len(token) > 40
    assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
    assert launcher.with_token(loaded(tmp_path), "::")[0].config.api_token == Secret(token)
    own = launcher.with_token(loaded(tmp_path, api_token="tml-0123456789ab"), "0.0.0.0")
    assert (own[0].config.api_token, own[1]) == (Secret("tml-0123456789ab"), None)


def test_one_service_has_an_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Would catch two services that write one journal, and a supervisor that takes the second one's end for bad input.
    folder = tmp_path / "out" / "service"
    folder.mkdir(parents=True)
    with launcher.lock_output_dir(folder) as lock:
        lock.write(f"{os.getpid()} http://127.0.0.1:5555\n")
        lock.flush()
        with pytest.raises(ValueError, match=r"output_dir: another service has locked .*http://127.0.0.1:5555"):
            launcher.lock_output_dir(folder)
        with monkeypatch.context() as patch:
            patch.setattr(launcher, "serve", lambda *_, **__: launcher.lock_output_dir(folder))
            assert launcher.main(["--config", "service.yaml"]) == exit_codes.FOLDER_IN_USE
    launcher.lock_output_dir(folder).close()


def test_an_output_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    # Would catch a traceback for a disk that is not mounted, or is another user's.
    (tmp_path / "file").touch()
    config = loaded(tmp_path).config.model_copy(update={"output_dir": str(tmp_path / "file")})
    with pytest.raises(ValueError, match=r"^output_dir: .*file/service.*choose another folder"):
        addresses.service_folder(config)


def test_the_processes_of_a_killed_launcher_are_waited_for(tmp_path: Path) -> None:
    # Would catch a service that is started again at once, and meets the last one's processes on its journal and port.
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with launcher.lock_output_dir(tmp_path) as lock:
        lock.write(f"{ended.pid} http://127.0.0.1:5555\n")
        lock.flush()
        child = toy("import time; time.sleep(1)", inherited_fds=(lock.fileno(),))
        child.start()
    launcher.lock_output_dir(tmp_path).close()
    assert child.pid is None


def test_the_plan_is_what_is_started(tmp_path: Path) -> None:
    # Would catch processes that are started with another configuration than the one that was checked.
    config = loaded(tmp_path, data_parallel_shard_size=2, worker_max_retries=1).config
    plan = plan_of(config, tmp_path)
    workers, orchestrator, api = plan.processes()
    assert ("2" in workers.command, workers.max_early_exits) == (True, 4)
    assert plan.workers_address == plan.workers_bind == f"ipc://{tmp_path}/workers"
    assert plan.keys_file is None
    # These are started again at the same address.
    assert "--workers-file" not in orchestrator.command
    assert plan.workers_address in orchestrator.command
    assert plan.orchestrator_address in api.command


@pytest.mark.parametrize(("size", "is_said"), [(2, True), (4, False), (-1, False)])
def test_gpus_that_stay_idle_are_told_of(tmp_path: Path, caplog, size: int, is_said: bool) -> None:
    # Would catch a service that takes one of eight GPUs, and says nothing.
    plan_of(loaded(tmp_path, data_parallel_shard_size=size).config, tmp_path, 4)
    assert ("event=gpus_idle workers=2 gpus=4" in caplog.text) == is_said


@pytest.mark.parametrize(
    ("options", "num_gpus", "wanted"),
    [
        ({"data_parallel_shard_size": 8}, 4, "^data_parallel_shard_size: .* is 8 workers, but this machine has 4 GPUs"),
        ({"engine_connect_host": "node0"}, 0, "engine_connect_host: with --mode auto the workers are on this host"),
    ],
)
def test_what_cannot_be_started_here_is_named(
    tmp_path: Path, options: dict[str, Any], num_gpus: int, wanted: str
) -> None:
    # Would catch workers that fail for a GPU each, minutes later.
    with pytest.raises(ValueError, match=wanted):
        plan_of(loaded(tmp_path, **options).config, tmp_path, num_gpus)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(None, "is neither a folder with a config.json"), ("{", "is not JSON"), ("{}", "has no model_type")],
)
def test_a_model_that_is_none_is_named_before_anything_starts(tmp_path: Path, text: str | None, wanted: str) -> None:
    # Would catch a launcher that starts workers again and again for a misspelt folder.
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    for option, options in {"config_path": {"config_path": str(tmp_path)}, "model_path": {}}.items():
        config = loaded(tmp_path, **({"model_path": str(tmp_path)} if option == "model_path" else options)).config
        with pytest.raises(ValueError, match=f"^{option}: .*{wanted}"):
            check_model(config)


@pytest.mark.parametrize(
    ("options", "num_gpus", "wanted"),
    [
        ({"attn_implementation": "native"}, 0, "attn_implementation: native needs a GPU, and this machine has none"),
        ({"attn_implementation": "flash_attention_3"}, 1, "flash_attn_3 is not installed: set attn_implementation to"),
        ({"load_checkpoint_path": "/nowhere"}, 0, "load_checkpoint_path: /nowhere is not a folder"),
        ({"model_path": "/nowhere"}, 0, "model_path: there is no folder '/nowhere'"),
        ({"config_path": "{folder}", "tokenizer_path": "./nowhere"}, 0, "tokenizer_path: there is no folder"),
        ({"model_path": "{folder}"}, 0, r"model_path: .* has no weights \(\*.safetensors\)"),
        ({"attn_implementation": "sdpa"}, 0, None),
    ],
)
def test_what_this_machine_lacks_is_named_before_anything_starts(
    tmp_path: Path, options: dict[str, str], num_gpus: int, wanted: str | None
) -> None:
    # Would catch a launcher that needs half a minute, and workers that load a model, to find that there is no GPU.
    named: dict[str, str | None] = {name: value.format(folder=tmp_path) for name, value in options.items()}
    if not named.keys() & {"model_path", "config_path"}:
        named |= {"model_path": None, "config_path": str(tmp_path)}
    config = loaded(tmp_path, **named).config
    refused = nullcontext() if wanted is None else pytest.raises(ValueError, match=wanted)
    with refused:
        check_machine(config, num_gpus)


def test_workers_beyond_this_machine_have_keys(tmp_path: Path) -> None:
    # Would catch a socket that takes work from anybody on the network.
    config = loaded(tmp_path).config
    address = addresses.bind_address(config, None)
    assert address == "tcp://0.0.0.0:5556"
    keys = addresses.channel_keys(config, address)
    assert keys is not None
    assert addresses.channel_keys(config, address) == keys
    assert addresses.channel_keys(config, "tcp://127.0.0.1:5556") is None
    assert addresses.channel_keys(config, "ipc:///tmp/x") is None
    file = tmp_path / "out" / "service" / "channel.keys"
    file.chmod(0o644)
    with pytest.raises(ValueError, match="other users can read it"):
        addresses.channel_keys(config, address)


def test_workers_are_found_by_what_they_publish(tmp_path: Path) -> None:
    # Would catch workers on several hosts that can only be reached by an option.
    config = loaded(tmp_path).config
    with pytest.raises(ValueError, match=r"engine_connect_host: null, and no worker has written .*workers.json"):
        addresses.connect_address(config, 0.1)
    addresses.publish(config, "tcp://0.0.0.0:5556")
    assert addresses.connect_address(config, 0.1) == (f"tcp://{socket.gethostname()}:5556", True)
    addresses.publish(config, "ipc:///tmp/x")
    assert addresses.connect_address(config, 0.1) == ("ipc:///tmp/x", False)
    named = loaded(tmp_path, engine_connect_host="node0").config
    assert addresses.connect_address(named, 0.1) == ("tcp://node0:5556", True)
    # Bound at all interfaces, it wants keys of whoever comes by the loopback one, too.
    for host, reached in (("10.0.0.1", "10.0.0.1"), ("0.0.0.0", "127.0.0.1")):
        named = loaded(tmp_path, worker_bind_address=f"tcp://{host}:7000").config
        assert addresses.connect_address(named, 0.1) == (f"tcp://{reached}:7000", True)
    assert addresses.with_reachable_host("ipc:///a", "host", always=True) == "ipc:///a"


def test_what_workers_publish_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    # Catches an orchestrator that ends by a file which is half there, or talks to another machine without keys.
    config = loaded(tmp_path).config
    file = addresses.workers_file(config)
    assert addresses.read_published(file) is None
    addresses.publish(config, "tcp://10.0.0.1:5556")
    assert addresses.read_published(file) == ("tcp://10.0.0.1:5556", ChannelKeys.load(file.with_name("channel.keys")))
    addresses.publish(config, "ipc:///tmp/x")
    assert addresses.read_published(file) == ("ipc:///tmp/x", None)
    for text in ("", "{", "{}", "7", '{"address": "tcp://10.0.0.1:5556", "has_keys": false}'):
        file.write_text(text)
        assert addresses.read_published(file) is None
    plan = plan_of(loaded(tmp_path, engine_connect_host="node0").config, tmp_path, mode="connect")
    # The option says where they are, whoever publishes what.
    assert plan.workers_file is None


def test_a_signal_stops_from_front_to_back() -> None:
    # Would catch an orchestrator that has no workers left to save with, or processes that outlive the launcher.
    order: list[str] = []

    class Recording(Supervised):
        def signal(self, number: signal.Signals) -> None:
            order.append(self.name)
            super().signal(number)

    processes = [Recording(name, [sys.executable, "-c", SLEEP]) for name in ("workers", "orchestrator", "API")]
    for process in processes:
        process.start()
    pids = [process.pid for process in processes]
    launcher.stop_all(processes, threading.Event())
    assert order == ["API", "orchestrator", "workers"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
