"""Where stores listen, and the store in a folder."""

import errno
import fcntl
import logging
import os
import socket
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from xorl.core.folder_store import FolderStore
from xorl.core.join import JoinError, listen_at, rendezvous, stay_on_loopback, store_client, store_server
from xorl.core.launched import store_in


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_store_listens_only_where_it_was_told(address: str) -> None:
    # Catches a store that other machines reach.
    with listen_at(address, 0) as listening:
        assert listening.getsockname()[0] in ("127.0.0.1", "::1")
    server = store_server(address, 0, timeout_s=5)
    server.set("a", "1")
    assert store_client(address, server.port, timeout_s=5).get("a") == b"1"


def test_an_address_of_another_host_is_refused() -> None:
    # Catches a store that listens everywhere, since it cannot listen where it was told.
    with pytest.raises(OSError, match="assign"):
        listen_at("203.0.113.1", 0)


def test_a_name_that_others_understand_otherwise_is_told(caplog: pytest.LogCaptureFixture) -> None:
    # Catches a job whose node 0 listens on 127.0.1.1, as Debian names hosts, and one that listens everywhere unsaid.
    name = socket.gethostname()
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        pytest.skip("this host's name cannot be resolved")
    with caplog.at_level(logging.WARNING), listen_at(name, 0) as listening:
        address = listening.getsockname()[0]
    is_everywhere = address in ("0.0.0.0", "::")
    assert is_everywhere == ("event=listens_everywhere" in caplog.text)
    assert is_everywhere or address in found


def test_ranks_without_a_launcher_meet_twice_and_only_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a second meeting in one process, as of a library and a run, that cannot listen where the first one does,
    # and a job of one host whose store other hosts reach.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "203.0.113.1"}
    for name, value in {**variables, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    for name in ("XORL_STORE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    assert len(rendezvous(0, 1).locations) == len(rendezvous(0, 1).locations) == 1


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "[::1]"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_address_that_is_another_host_on_each_host_is_refused_at_once(
    address: str, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches ranks of several hosts that wait for each other for half an hour, each at its own host."""
    variables = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address, "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("XORL_STORE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JoinError, match=f"MASTER_ADDR is {address.strip('[]')}, which is a different host on each"):
        rendezvous(int(rank), 2, arrive_s=1.0)


@pytest.mark.parametrize("interface", ["lo", "lo0"])
def test_ranks_of_one_host_stay_on_its_loopback_interface(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks on macOS, whose loopback interface has another name, that listen on all interfaces."""
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "en0"), (2, interface)])
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    stay_on_loopback()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (interface, f"={interface}")


def test_a_folder_whose_files_cannot_be_locked_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a raw error of torch's store on a network file system without locks."""
    assert store_in(tmp_path) == {"XORL_STORE": str(tmp_path / "store")}

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(ValueError, match=r"^TMPDIR: .*No locks available.*set TMPDIR to a folder on a local disk"):
        store_in(tmp_path)


def test_values_of_a_folder_replace_each_other(tmp_path: Path) -> None:
    # Catches a store that grows for as long as a job runs, and one whose readers see half a value.
    store, other = FolderStore(tmp_path / "watch"), FolderStore(tmp_path / "watch")
    assert not store.check(["xorl/at/0"])
    done = threading.Event()
    values = {letter * 5000 for letter in "abc"}

    def write() -> None:
        while not done.is_set():
            for value in values:
                other.set("xorl/at/0", value)

    writer = threading.Thread(target=write)
    writer.start()
    while not store.check(["xorl/at/0"]):
        pass
    seen = {store.get("xorl/at/0").decode() for _ in range(500)}
    done.set()
    writer.join()
    assert seen <= values
    assert os.listdir(tmp_path / "watch") == ["xorl%2Fat%2F0"]


def test_the_first_value_of_several_writers_stays(tmp_path: Path) -> None:
    # Catches a consequence that replaces the cause of a job's failure.
    stores = [FolderStore(tmp_path) for _ in range(8)]
    answers: list[bytes] = []
    writers = [
        threading.Thread(
            target=lambda number=number, store=store: answers.append(store.compare_set("k", "", str(number)))
        )
        for number, store in enumerate(stores)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(answers) == 8
    assert set(answers) == {stores[0].get("k")}
    assert stores[0].multi_get(["k", "k"]) == answers[:2]


def test_a_folder_that_is_gone_is_a_lost_store(tmp_path: Path) -> None:
    # Catches a watchdog that ends with an error of its own when the launcher has removed its folder.
    store = FolderStore(tmp_path / "watch")
    (tmp_path / "watch").rmdir()
    with pytest.raises(dist.DistStoreError, match="the job's store is gone"):
        store.set("k", "1")
