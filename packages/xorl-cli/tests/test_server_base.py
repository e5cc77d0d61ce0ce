"""With full weights one model uses the base: the others wait for it, and say so."""

import asyncio
import time

import pytest

from asynchronous import in_a_loop
from counting_workers import folded
from orchestrated import MODEL, SESSION, forward_backward, options, running, serving, step, training, workers
from xorl.server.messages import Poll
from xorl.server.operations import CreateModel, Failure
from xorl.server.orchestrator import base_use
from xorl.server.queries import CreateSession, FinishSession, Heartbeat
from xorl.server.status_queries import GetStatus

SECOND, THIRD = "session-2:train:0", "session-3:train:0"


@pytest.fixture
def quick(monkeypatch):
    """Clients that count as gone after a second, and waits that end after three."""
    monkeypatch.setattr(base_use, "SILENCE_S", 1.0)
    monkeypatch.setattr(base_use, "MAX_WAIT_S", 3.0)
    monkeypatch.setattr(base_use, "POLL_S", 0.05)


async def ask_for_base(client, model=SECOND):
    """The request of a new client that wants to train."""
    session = model.partition(":")[0]
    await client.answer(CreateSession(session))
    return await client.send(CreateModel(model), session=session)


async def keep_alive(client, session=SESSION):
    while True:
        await client.answer(Heartbeat(session))
        await asyncio.sleep(0.2)


@in_a_loop
async def test_a_new_run_waits_until_the_client_before_it_is_gone_and_that_one_loses_nothing(tmp_path, quick):
    """Catches every second run of a researcher, whose scripts never close a session: it failed for two minutes."""
    async with training(options(tmp_path, enable_lora=False)) as (client, counting):
        created = await client.result(await ask_for_base(client))
        assert not isinstance(created, Failure), created
        assert list(counting.models) == [SECOND]
        # The guess was wrong: the first client calls again, waits in its turn, and is where it was.
        assert await client.weights_after(2, 3) == folded(folded(1, 1), 2)
        assert list(counting.models) == [MODEL]


@in_a_loop
async def test_two_who_wait_for_the_base_get_it_one_after_the_other(tmp_path, quick):
    """Catches a base that is given away while another model is being put on it: the second one was refused."""
    chosen = options(tmp_path, enable_lora=False)
    with workers(chosen, delay_s=0.5) as counting:
        async with running(chosen) as client:
            await client.begin()
            for request in [await ask_for_base(client, model) for model in (SECOND, THIRD)]:
                created = await client.result(request)
                assert not isinstance(created, Failure), created
            assert list(counting.models) == [THIRD]


@in_a_loop
async def test_who_waits_for_the_base_holds_nobody_up_and_is_told_what_for(tmp_path, quick):
    """Catches a waiting request that takes the workers' turns, and a client that waits for ever without a reason."""
    async with training(options(tmp_path, enable_lora=False)) as (client, counting):
        alive = asyncio.create_task(keep_alive(client))
        waiting = [await ask_for_base(client, model) for model in (SECOND, THIRD)]
        await asyncio.sleep(0.5)
        for request in waiting:
            pending = await client.answer(Poll(request, 0.0))
            assert (pending.queue_state, pending.position) == ("paused_capacity", None)
            assert pending.reason.startswith(f"model {MODEL} uses the base")
        status = await client.answer(GetStatus())
        assert [(call.operation, call.model_id) for call in status.waiting] == [
            ("CreateModel", SECOND),
            ("CreateModel", THIRD),
        ]
        assert status.running == []
        started = time.monotonic()
        assert await client.weights_after(2, 3) == folded(folded(1, 1), 2)
        assert time.monotonic() - started < 2.0, "it waits for who waits"
        for request in waiting:
            failure = await client.result(request)
            assert isinstance(failure, Failure)
            assert (failure.status, failure.category) == (409, "user")
            assert f"model {MODEL} uses the base and its client is still active after 3 s" in failure.message
        assert list(counting.models) == [MODEL]
        alive.cancel()


@in_a_loop
async def test_a_wait_for_the_base_survives_the_orchestrator_which_counts_no_silence_of_its_own(tmp_path, quick):
    """Catches a creation that is lost while it waits, and a client that is gone for who could not hear it."""
    chosen = options(tmp_path, enable_lora=False)
    with workers(chosen) as counting:
        async with running(chosen) as client:
            await client.begin()
            alive = asyncio.create_task(keep_alive(client))
            request = await ask_for_base(client)
            await asyncio.sleep(0.3)
            alive.cancel()
        await asyncio.sleep(1.5)
        async with running(chosen) as client:
            alive = asyncio.create_task(keep_alive(client))
            while not (await client.answer(GetStatus())).waiting:
                await asyncio.sleep(0.05)
            assert list(counting.models) == [MODEL]
            alive.cancel()
            assert not isinstance(await client.result(request), Failure)
            assert list(counting.models) == [SECOND]


@in_a_loop
async def test_full_weights_go_to_who_asks_as_soon_as_their_client_has_ended_its_session(tmp_path):
    """Catches runs one after the other of which all but the first are refused: before the clock has come, and after."""
    async with serving(options(tmp_path, enable_lora=False)) as (client, counting):
        answer = client.answer
        await client.begin()
        for session, following in ((SESSION, "session-2"), ("session-2", "session-3")):
            await answer(FinishSession(session, "success"))
            if following == "session-3":
                await client.orchestrator.housekeeping.tick(time.time())
            await answer(CreateSession(following))
            created = await client.do(CreateModel(f"{following}:train:0"), session=following)
            assert not isinstance(created, Failure), created
            assert list(counting.models) == [f"{following}:train:0"]
            await client.do(forward_backward(2, model=f"{following}:train:0"), 1)
            await client.do(step(f"{following}:train:0"), 2)
