"""Where stores listen, and the store in a folder."""

from __future__ import annotations

import logging
import os
import socket
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from xorl.core.folder_store import FolderStore
from xorl.core.join import listen_at, meet, store_client, store_server


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
    assert len(meet(0, 1).places) == len(meet(0, 1).places) == 1


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
