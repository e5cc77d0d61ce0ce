"""The channel between the service's processes: answers, losses, limits, keys, and what must not get in."""

import asyncio
import multiprocessing
import os
import pickle
import signal
from contextlib import ExitStack

import msgspec
import pytest
import zmq

import doubling_server
from asynchronous import in_a_loop
from doubling_server import ANSWERED, ASKED, QUICK, doubled
from sockets import ipc_address
from xorl.server import channel
from xorl.server.channel.wire import Header, encode_header
from xorl.server.messages import Ok, Tombstone
from xorl.server.operations import OptimResult, OptimStep, UnloadModel


@pytest.fixture
def address():
    with ipc_address("test") as address:
        yield address


class Served:
    """A server and a client of it in the running loop."""

    def __init__(self, address=None, *, server_keys=None, client_keys=None, limits=QUICK):
        self._stack = ExitStack()
        self.address = address or self._stack.enter_context(ipc_address("test"))
        self.server = channel.ChannelServer(self.address, ASKED, doubled, keys=server_keys, limits=limits)
        self._client_keys, self._limits = client_keys, limits

    async def __aenter__(self):
        self.bound = await self.server.bind()
        self.task = asyncio.create_task(self.server.serve())
        self.client = channel.ChannelClient(self.bound, ANSWERED, keys=self._client_keys, limits=self._limits)
        await self.client.start()
        return self

    async def __aexit__(self, *exc):
        await self.client.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self._stack.close()


@in_a_loop
async def test_many_requests_at_once_each_get_their_own_answer():
    """Catches answers given to the wrong request, and one slow request that holds up the others."""
    async with Served() as served:
        slow = asyncio.create_task(served.client.request(Tombstone("m", 1500), timeout_s=5))
        rates = [i / 8 for i in range(100)]
        answers = await asyncio.gather(*(served.client.request(OptimStep("m", r), timeout_s=5) for r in rates))
        assert [answer.metrics["doubled"] for answer in answers] == [2 * rate for rate in rates]
        assert not slow.done()
        assert await slow == Ok()


@in_a_loop
async def test_what_the_handler_raises_reaches_the_client_and_the_next_request_works():
    """Catches a server that dies of one bad request."""
    async with Served() as served:
        with pytest.raises(channel.ChannelError, match="no model gone"):
            await served.client.request(UnloadModel("gone"), timeout_s=5)
        with pytest.raises(TimeoutError):
            await served.client.request(Tombstone("m", 2000), timeout_s=0.1)
        assert await served.client.request(Tombstone("m", 0), timeout_s=5) == Ok()


def start_server(address):
    # A module of tests has no name that a process which is spawned could import it by.
    process = multiprocessing.get_context("spawn").Process(target=doubling_server.serve_forever, args=(address,))
    process.daemon = True
    process.start()
    return process


@in_a_loop
async def test_a_killed_server_is_noticed_at_once_and_its_successor_is_used(address):
    """Catches a client that waits for ever for an answer of a process that is dead, or never finds the next one."""
    first = start_server(address)
    client = channel.ChannelClient(address, ANSWERED, limits=QUICK)
    await client.start()
    await client.wait_connected(60)
    incarnation = client.incarnation
    waiting = asyncio.create_task(client.request(Tombstone("m", 60_000), timeout_s=60))
    await asyncio.sleep(0.2)
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(channel.PeerLost):
        await asyncio.wait_for(waiting, 5)
    second = start_server(address)
    answer = await client.request(OptimStep("m", 1.0), timeout_s=5, connect_timeout_s=60)
    assert answer == OptimResult({"doubled": 2.0})
    assert client.incarnation != incarnation
    await client.close()
    second.kill()


class Ran:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("address", [None, "tcp://127.0.0.1:*"])
def test_pickles_and_rubbish_are_refused_and_counted(tmp_path, address):
    """Catches anything that unpickles, and a server that dies of frames that are none of ours."""
    bomb = pickle.dumps(Ran(tmp_path / "ran"))
    deep = b"\x91" * 100_000 + b"\xc0"
    rubbish = [
        [bomb],
        [bomb, bomb],
        [bomb, bomb, bomb],
        [encode_header("request"), bomb],
        [encode_header("request"), deep],
        [deep, b""],
        [b""],
        [encode_header("request"), msgspec.msgpack.encode({"type": "Shutdown"})],
        [encode_header("request"), msgspec.msgpack.encode({"type": "OptimStep", "model_id": "m", "more": 1})],
        [encode_header("pong"), b""],
        [b"\x00" * (QUICK.message_bytes + 1), b""],
    ]

    async def run():
        async with Served(address) as served:
            await served.client.wait_connected(5)
            context = zmq.asyncio.Context()
            for frames in rubbish:
                raw = context.socket(zmq.DEALER)
                raw.connect(served.bound)
                await raw.send_multipart(frames)
            for _ in range(100):
                if served.server.num_refused >= len(rubbish) - 1:
                    break
                await asyncio.sleep(0.02)
            # The longest never arrives: ZMQ closes the connection.
            assert served.server.num_refused == len(rubbish) - 1
            assert await served.client.request(Tombstone("m", 0), timeout_s=5) == Ok()
            context.destroy(linger=0)

    asyncio.run(run())
    assert not (tmp_path / "ran").exists()


@in_a_loop
async def test_versions_that_differ_are_told_to_both(monkeypatch):
    """Catches a half upgraded service that fails in some other way than saying so."""
    async with Served() as served:
        monkeypatch.setattr(
            "xorl.server.channel.client.encode_header",
            lambda kind, number=0: msgspec.msgpack.encode(Header(999, kind, number)),
        )
        client = channel.ChannelClient(served.bound, ANSWERED, limits=QUICK)
        await client.start()
        # The refusal is of the server's version, so this one believes it, and says the other's words.
        with pytest.raises(channel.PeerLost):
            await client.request(Tombstone("m", 0), timeout_s=5, connect_timeout_s=0.5)
        assert served.server.num_refused > 0
        await client.close()


@in_a_loop
async def test_a_server_of_another_version_is_named(monkeypatch):
    """Catches a client that takes a later server's silence for a lost one."""
    monkeypatch.setattr(
        "xorl.server.channel.server.encode_header",
        lambda kind, number, incarnation: msgspec.msgpack.encode(Header(999, kind, number, incarnation)),
    )
    async with Served() as served:
        with pytest.raises(channel.VersionMismatch, match="999"):
            await served.client.wait_connected(0.5)


@in_a_loop
async def test_a_message_beyond_the_limit_is_not_sent():
    """Catches a request that ZMQ would drop without a word."""
    async with Served() as served:
        with pytest.raises(channel.ChannelError, match="the limit is"):
            await served.client.request(UnloadModel("m" * 2**21), timeout_s=5)


@in_a_loop
async def test_more_requests_than_the_limit_are_refused():
    """Catches a flood that fills the memory."""
    async with Served(limits=channel.Limits(num_pending=2, ping_every_s=0.1)) as served:
        calls = [served.client.request(Tombstone("m", 300), timeout_s=5) for _ in range(4)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert sorted(type(answer).__name__ for answer in answers) == ["ChannelError"] * 2 + ["Ok"] * 2


@pytest.mark.parametrize("who", ["the right keys", "other keys", "no keys"])
@in_a_loop
async def test_only_who_has_the_keys_gets_in(who):
    """Catches a channel between machines that takes requests from anybody."""
    keys = channel.ChannelKeys.create()
    other = channel.ChannelKeys.create()
    given = {
        "the right keys": keys,
        "other keys": channel.ChannelKeys(keys.server_public, b"", other.client_public, other.client_secret),
        "no keys": None,
    }
    async with Served("tcp://127.0.0.1:*", server_keys=keys, client_keys=given[who]) as served:
        if who == "the right keys":
            assert await served.client.request(Tombstone("m", 0), timeout_s=5) == Ok()
        else:
            with pytest.raises(channel.PeerLost):
                await served.client.request(Tombstone("m", 0), timeout_s=5, connect_timeout_s=0.7)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5556", "tcp://*:5556", "tcp://10.0.0.1:5556", "tcp://[::]:1"])
def test_an_address_beyond_this_machine_needs_keys(address):
    """Catches a port that is open to the network without keys."""
    with pytest.raises(ValueError, match="keys"):
        channel.ChannelServer(address, ASKED, doubled)
    with pytest.raises(ValueError, match="keys"):
        channel.ChannelClient(address, ANSWERED)


def test_keys_are_kept_from_others(tmp_path):
    """Catches secret keys that other users may read."""
    path = tmp_path / "keys"
    keys = channel.ChannelKeys.create()
    keys.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert channel.ChannelKeys.load(path) == keys
    path.chmod(0o644)
    with pytest.raises(ValueError, match="other users can read"):
        channel.ChannelKeys.load(path)
    assert keys.server_secret.decode() not in repr(keys)


def test_a_program_that_computes_still_answers_pings(address):
    """Catches a worker that is taken for dead while it computes."""

    async def ask(address):
        client = channel.ChannelClient(address, ANSWERED, limits=QUICK)
        await client.start()
        answer = await client.request(OptimStep("m", 3.0), timeout_s=10)
        await client.close()
        return answer

    async def run():
        server = channel.BlockingServer(address, ASKED, limits=QUICK)
        asking = asyncio.create_task(ask(server.address))
        received = await asyncio.to_thread(server.receive, 5)
        # Longer than the silence after which a client gives a server up.
        await asyncio.sleep(2 * QUICK.lost_after_s)
        received.reply(OptimResult({"seen": received.message.learning_rate}))
        assert await asking == OptimResult({"seen": 3.0})
        assert server.receive(0.01) is None
        server.close()

    asyncio.run(run())
