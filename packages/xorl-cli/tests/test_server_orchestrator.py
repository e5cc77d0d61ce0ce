"""The orchestrator with workers that count: nothing is lost or done twice, whoever dies when."""

import asyncio
import contextlib
import json
import math
import sqlite3
import time

import msgspec
import numpy as np
import pytest

from asynchronous import in_a_loop, until
from counting_workers import BAD, folded
from engines import fake_engines
from orchestrated import MODEL, SESSION, forward_backward, options, over_http, running, serving, step, training, workers
from refusals import assert_refused
from xorl.server import operations as ops
from xorl.server.channel import ChannelKeys
from xorl.server.datum import Array
from xorl.server.endpoint_queries import AddEndpoint, SetSyncQuantization
from xorl.server.messages import Ok, Pending, Poll, Rejected, Tombstone, Unknown
from xorl.server.orchestrator import inference
from xorl.server.queries import CreateSamplingSession, CreateSession, GetModel
from xorl.server.status_queries import GetStatus


@in_a_loop
async def test_a_loop_of_training_with_chunks_that_arrive_out_of_order(tmp_path):
    """Catches a step that overtakes a chunk, a chunk that is lost, and a retry that runs again."""
    async with serving(options(tmp_path)) as (client, counting):
        await client.create()
        second = await client.send(forward_backward(3, 4), 2)
        again = await client.send(step(), 3)
        pending = await client.answer(Poll(second, 0.05))
        assert pending.reason == "request 1 of this model has not arrived"
        first = await client.send(forward_backward(1, 2), 1)
        assert await client.send(forward_backward(1, 2), 1) == first
        assert (await client.result(second)).metrics == {"loss:sum": 7.0}
        assert (await client.result(again)).metrics["weights"] == folded(1, 10)
        assert counting.ran.count(first) == 1
        assert_refused(await client.ask(forward_backward(9), 1), 400)
        late = await client.answer(Poll("nobody", 0.0))
        assert late == Unknown("nobody")


@in_a_loop
async def test_a_number_that_was_rejected_is_passed_over_and_one_that_never_comes_fails_what_waits(tmp_path):
    """Catches a model that hangs for ever behind a call that the API refused or the client never sent."""
    async with serving(options(tmp_path, gap_timeout_s=0.5)) as (client, _):
        await client.create()
        waiting = await client.send(forward_backward(5), 2)
        await client.answer(Tombstone(MODEL, 1))
        assert (await client.result(waiting)).metrics["loss:sum"] == 5
        behind = [await client.send(forward_backward(7), 4), await client.send(step(), 5)]
        shown = (await client.answer(GetStatus())).waiting
        assert [(call.request_id, call.reason) for call in shown] == [
            (behind[0], "request 3 of this model has not arrived")
        ]
        failures = [await client.result(request) for request in behind]
        assert all(isinstance(f, ops.Failure) and "request 3" in f.message for f in failures)
        assert (await client.do(step(), 6)).metrics["weights"] == folded(1, 5)


@in_a_loop
async def test_gaps_that_are_filled_or_whose_model_goes_while_another_is_given_up_are_none(tmp_path):
    """Catches housekeeping that fails what arrived in time, and one that ends for ever by a model that has gone."""
    filled, gone = "session-1:train:1", "gone"
    async with serving(options(tmp_path)) as (client, _):
        journal, housekeeping = client.orchestrator.state.journal, client.orchestrator.housekeeping
        create = ops.CreateModel(gone, lora=ops.LoraSpec(rank=8, seed=0))
        await client.create()
        await client.create(filled)
        await client.do(create, session=None)
        given_up, waiting, dropped = [
            await client.send(forward_backward(1, model=model), 2) for model in (MODEL, filled, gone)
        ]
        await housekeeping.tick(time.time())
        slow = journal._commit.write(lambda _: time.sleep(0.5))
        filling = asyncio.create_task(client.send(forward_backward(3, model=filled), 1))
        await asyncio.sleep(0.1)
        housekeeping._gaps = dict.fromkeys(housekeeping._gaps, -math.inf)
        ticking = asyncio.create_task(housekeeping.tick(time.time()))
        await asyncio.sleep(0.1)
        again = asyncio.create_task(client.send(create, session=None))
        await asyncio.gather(slow, filling, ticking, again)
        assert "request 1 of this model did not arrive" in (await client.result(given_up)).message
        assert (await client.result(waiting)).metrics["loss:sum"] == 1
        assert "was recreated" in (await client.result(dropped)).message
        await client.result(again.result())
        assert (await client.do(forward_backward(4, model=gone), 1)).metrics["loss:sum"] == 4


@in_a_loop
async def test_a_sample_that_no_context_holds_costs_its_client_nothing(tmp_path):
    """Catches a client that waits for all others since it once asked for more than there can be."""
    async with serving(options(tmp_path), max_context_length=32) as (client, _):
        await until(lambda: client.orchestrator.state.workers.max_context_length is not None)
        prompt = Array.of(np.array([1], dtype=np.int32))
        for most, status in ((10**12, 400), (33, 400), (32, None)):
            answer = await client.ask(ops.Sample(ops.BaseSampler(), prompt, max_tokens=most))
            assert getattr(answer, "status", None) == status, answer


def test_endpoints_are_watched_and_kept_after_a_disk_took_nothing(tmp_path, monkeypatch):
    """Catches endpoints that nobody asks any more how they are, and one that is forgotten by a restart."""
    monkeypatch.setattr(inference, "CHECK_EVERY_S", 0.05)

    @in_a_loop
    async def scenario(port):
        async with running(options(tmp_path)) as client:
            journal = client.orchestrator.state.journal
            await journal._commit.write(lambda connection: connection.execute("ALTER TABLE records RENAME TO away"))
            refused = await client.answer(AddEndpoint(ops.Endpoint("127.0.0.1", port)))
            assert isinstance(refused, Rejected)
            await asyncio.sleep(0.5)
            await journal._commit.write(lambda connection: connection.execute("ALTER TABLE away RENAME TO records"))
            for _ in range(100):
                if journal.records("endpoint"):
                    break
                await asyncio.sleep(0.05)
            assert len(journal.records("endpoint")) == 1

    with fake_engines([]) as (engine,):
        scenario(engine.port)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (lambda orchestrator: orchestrator.housekeeping, "_eviction_attempts"),
        (lambda orchestrator: orchestrator.runner, "_slots"),
        (lambda orchestrator: orchestrator.state.inference, "_unregistered"),
    ],
)
@in_a_loop
async def test_a_part_that_breaks_ends_the_loop(tmp_path, monkeypatch, caplog, part, name):
    """Catches a service that answers and does one of its works no more, of which only its log knows."""
    monkeypatch.setattr(inference, "CHECK_EVERY_S", 0.05)
    stopped = asyncio.Event()
    async with running(options(tmp_path)) as client:
        with monkeypatch.context() as patched:
            # A loop that is stopped in earnest leaves sockets open, for which the tests after this one would wait.
            patched.setattr(asyncio.get_running_loop(), "stop", stopped.set)
            await asyncio.sleep(0)
            setattr(part(client.orchestrator), name, None)
            client.orchestrator.state.wake.set()
            await asyncio.wait_for(stopped.wait(), 10)
    assert "event=orchestrator_broken" in caplog.text


@in_a_loop
async def test_the_orchestrator_dies_with_requests_in_flight_and_nothing_is_lost_or_done_twice(chosen):
    """Catches a result that dies with the process, and a gradient that is added again when it comes back."""
    with workers(chosen, delay_s=0.3) as counting:
        async with running(chosen) as client:
            await client.create()
            done = await client.send(forward_backward(1), 1)
            await client.result(done)
            flying = await client.send(forward_backward(2), 2)
            queued = [await client.send(forward_backward(3), 3), await client.send(step(), 4)]
            await asyncio.sleep(0.1)
        async with running(chosen) as client:
            assert await client.send(forward_backward(2), 2) == flying
            assert (await client.result(done)).metrics["loss:sum"] == 1
            assert (await client.result(flying)).metrics["loss:sum"] == 2
            assert (await client.result(queued[1])).metrics["weights"] == folded(1, 6)
            assert (await client.do(forward_backward(4), 5)).metrics["loss:sum"] == 4
    assert len(counting.ran) == len(set(counting.ran)) == 6


@in_a_loop
async def test_the_next_request_of_a_model_does_not_wait_for_the_disk_and_the_one_after_it_does(chosen):
    """Catches workers that idle while a result is written, and a model that runs further ahead than can be mended."""
    async with serving(chosen, delay_s=0.3) as (client, counting):
        await client.create()
        operations = [forward_backward(1), step(), forward_backward(2), step()]
        sent = [await client.send(operation, seq) for seq, operation in enumerate(operations, start=1)]
        with contextlib.closing(sqlite3.connect(chosen.journal_path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await asyncio.sleep(0.6)
            assert counting.ran[1:] == sent[:2]
            assert isinstance(await client.answer(Poll(sent[0], 0.0)), Pending)
        assert (await client.result(sent[3])).metrics["weights"] == folded(folded(1, 1), 2)
        assert counting.ran[1:] == sent
        # A save takes what is in the journal alone.
        await client.do(ops.SaveWeights(MODEL, "kept"), 5)
    async with serving(chosen) as (client, fresh):
        assert (await client.do(step(), 6)).metrics["step"] == 3
        assert len(fresh.ran) == 3


@in_a_loop
async def test_workers_that_die_are_replaced_and_models_are_as_they_were(chosen):
    """Catches half a gradient, a step that is lost with the workers, and one that is taken twice."""
    async with running(chosen) as client:
        with workers(chosen, delay_s=0.2):
            await client.begin()
            await client.do(ops.SaveWeights(MODEL, "kept"), 3)
            await client.do(forward_backward(2), 4)
            await client.do(step(), 5)
            await client.do(forward_backward(3), 6)
            flying = await client.send(forward_backward(4), 7)
            await asyncio.sleep(0.05)
        pending = await client.answer(Poll(flying, 0.0))
        assert isinstance(pending, Pending)
        with workers(chosen) as fresh:
            assert (await client.result(flying)).metrics["loss:sum"] == 4
            after = await client.do(step(), 8)
            assert after.metrics["weights"] == folded(folded(folded(1, 1), 2), 7)
            assert after.metrics["step"] == 3
        # Unload, create from "kept", two calls and a step again, and the two new requests.
        assert len(fresh.ran) == 7


@in_a_loop
async def test_the_whole_service_starts_again_and_takes_up_models_and_requests(chosen):
    """Catches a journal that only serves the process that wrote it."""
    async with training(chosen):
        pass
    async with running(chosen) as client:
        request = await client.send(forward_backward(2), 3)
    async with serving(chosen) as (client, _):
        await client.result(request)
        assert (await client.do(step(), 4)).metrics["weights"] == folded(folded(1, 1), 2)
        info = await client.answer(GetModel(MODEL))
        assert info.step == 2


@in_a_loop
async def test_the_form_in_which_weights_are_sent_is_kept_until_it_is_taken_back(tmp_path):
    """Catches an inference server in fp8 that is sent something else after a restart."""
    chosen, endpoints = options(tmp_path), (ops.Endpoint("127.0.0.1", 9),)
    for given in (ops.BlockFp8(("lm_head",)), None):
        async with serving(chosen) as (client, _):
            if given is not None:
                await client.begin()
            assert await client.answer(SetSyncQuantization(given)) == Ok()
        async with serving(chosen) as (client, _):
            state = client.orchestrator.state
            for asked in (None, ops.BlockFp8()):
                sync = ops.SyncWeights(MODEL, endpoints, quantization=asked)
                sent = state.inference.complete(sync, state.registry.models[MODEL], after_step=False)
                assert sent.quantization == (given if asked is None else asked)


@in_a_loop
async def test_a_call_that_kills_the_workers_again_and_again_is_given_up(tmp_path):
    """Catches a service that one client's call keeps down for everybody."""
    chosen = options(tmp_path, worker_max_retries=2)
    async with running(chosen) as client:
        with workers(chosen):
            await client.create()
            await client.do(forward_backward(1), 1)
        request = await client.send(forward_backward(2), 2)
        for _ in range(3):
            with workers(chosen, delay_s=0.3) as counting:
                await until(lambda: any(counting.sizes[4:]))
        with workers(chosen):
            failure = await client.result(request)
            assert isinstance(failure, ops.Failure)
            assert "given up" in failure.message
            assert (await client.do(step(), 3)).metrics["weights"] == folded(1, 1)


@in_a_loop
async def test_a_request_that_cannot_be_prepared_for_an_unforeseen_reason_ends_and_nothing_else_does(
    chosen, tmp_path, caplog
):
    """Catches a service that one request stops, now and at each next start."""
    async with training(chosen) as (client, _):
        folder = chosen.folder / "weights" / MODEL.replace(":", "~")
        folder.parent.mkdir()
        folder.symlink_to(tmp_path)
        assert_refused(await client.do(ops.SaveWeights(MODEL, "kept"), 3), 500, "ValueError: checkpoint weights/kept")
        assert any("not_prepared" in record.message and record.exc_info for record in caplog.records)
        assert await client.weights_after(2, 4) == folded(folded(1, 1), 2)
        # Its own checkpoints are looked for when it goes, where none can be.
        await client.do(ops.UnloadModel(MODEL), 6)
        await client.create("session-1:train:1")


@in_a_loop
async def test_a_sampler_that_was_forgotten_while_its_sample_waited_is_to_be_made_again(chosen):
    """Catches a service that stops for a sample whose sampler has gone meanwhile."""
    async with running(chosen) as client:
        await client.answer(CreateSamplingSession("gone", None, None, None))
        prompt = Array.of(np.array([1], dtype=np.int32))
        request = await client.send(ops.Sample(ops.SessionSampler("gone"), prompt))
        del client.orchestrator.state.registry.samplers["gone"]
        with workers(chosen):
            assert_refused(await client.result(request), 404, "create it again")
            await client.create()


@in_a_loop
async def test_workers_that_stay_away_end_requests_with_an_error_and_lose_no_model(tmp_path):
    """Catches a future that hangs where no workers come back."""
    chosen = options(tmp_path, worker_connection_timeout_s=1.5)
    async with running(chosen) as client:
        with workers(chosen):
            await client.create()
            await client.do(forward_backward(1), 1)
            await asyncio.sleep(1.6)
        state = client.orchestrator.state
        await until(lambda: not state.workers.is_connected)
        # They were there for longer than they may be away, which is not to be away for so long.
        assert not state.workers.absent_too_long
        assert_refused(await client.result(await client.send(forward_backward(2), 2)), 503)
        assert_refused(await client.ask(step(), 3), 503)
        with workers(chosen):
            await until(lambda: client.orchestrator.state.workers.is_ready)
            assert (await client.do(step(), 3)).metrics["weights"] == folded(1, 1)


@pytest.mark.parametrize("begun", [False, True], ids=["waiting", "running"])
@in_a_loop
async def test_a_model_whose_creation_fails_since_the_workers_are_gone_can_be_created_again(tmp_path, begun):
    """Catches a model that is `creating` for ever: not there, not to be made, and listed."""
    chosen = options(tmp_path, worker_connection_timeout_s=2.0)
    create = ops.CreateModel(MODEL, lora=ops.LoraSpec(rank=8, seed=0))
    async with running(chosen) as client:
        await client.answer(CreateSession(SESSION))
        with workers(chosen, delay_s=1.0) as counting:
            if begun:
                await client.create("session-1:train:1")
                await client.send(forward_backward(1, model="session-1:train:1"), 1)
                await until(lambda: counting.sizes[3:])
                first = await client.send(create)
        first = first if begun else await client.send(create)
        behind = await client.send(forward_backward(1), 1)
        failures = [await client.result(request) for request in (first, behind)]
        assert [failure.status for failure in failures] == [503, 503]
        status = await client.answer(GetStatus())
        assert MODEL not in status.sessions[0].models
        with workers(chosen):
            await until(lambda: client.orchestrator.state.workers.is_ready)
            assert_refused(await client.ask(forward_backward(1), 2), 404, "is failed")
            assert not isinstance(await client.do(create), ops.Failure)
            assert await client.weights_after(2, 1) == folded(1, 2)


@in_a_loop
async def test_workers_that_publish_another_address_are_found_there(tmp_path):
    """Catches an orchestrator that waits for ever where earlier workers were, with or without keys."""
    file = tmp_path / "workers.json"
    keys = ChannelKeys.create()
    keys.save(tmp_path / "channel.keys")

    def publish(address, *, has_keys=False):
        file.write_text(json.dumps({"address": address, "has_keys": has_keys}))

    # The file that it starts with is of workers that have ended.
    chosen = options(tmp_path, workers_file=str(file))
    publish(chosen.worker_address)
    async with running(chosen) as client:
        await asyncio.sleep(0.2)
        second = msgspec.structs.replace(chosen, worker_address=f"ipc://{tmp_path}/second")
        with workers(second):
            publish(second.worker_address)
            await client.begin()
        weights = folded(1, 1)
        third = msgspec.structs.replace(chosen, worker_address="tcp://127.0.0.1:*")
        with workers(third, keys=keys) as counting:
            request = await client.send(forward_backward(2), 3)
            await asyncio.sleep(0.2)
            publish(counting.address, has_keys=True)
            assert not isinstance(await client.result(request), ops.Failure)
            assert (await client.do(step(), 4)).metrics["weights"] == folded(weights, 2)
        publish("ipc:///nowhere")
        with workers(second):
            publish(second.worker_address)
            assert (await client.do(forward_backward(3), 5)).metrics["loss:sum"] == 3


@in_a_loop
async def test_one_bad_call_in_a_mixed_pass_fails_alone(tmp_path):
    """Catches a client's fault that others have to pay for."""
    async with serving(options(tmp_path), delay_s=0.1) as (client, counting):
        models = [f"session-1:train:{index}" for index in range(4)]
        for model in models:
            await client.create(model)
        counting.sizes.clear()
        requests = [await client.send(forward_backward(index, model=m), 1) for index, m in enumerate(models)]
        for index, request in enumerate(requests):
            assert (await client.result(request)).metrics["loss:sum"] == index
        assert max(counting.sizes) > 1
        bad = await client.send(forward_backward(1, model=models[0], loss=BAD), 2)
        good = await client.send(forward_backward(1, model=models[1]), 2)
        assert isinstance(await client.result(bad), ops.Failure)
        assert (await client.result(good)).metrics["loss:sum"] == 1
        # One failed beside another; each was tried alone.
        assert (await client.do(step(models[0]), 3)).metrics["weights"] == folded(1, 0)


async def posted(http, path, **body):
    """The id to poll of a call of the API."""
    answer = await http.post(f"/api/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["request_id"]


@in_a_loop
async def test_a_client_without_sessions_that_begins_anew_gets_a_new_model(tmp_path):
    """Catches a second run of a script that is told its numbers were used, or goes on with the first one's model, and
    a creation whose answer was lost that makes two models."""
    async with serving(options(tmp_path)) as (client, _), over_http(client) as http:
        create = {"base_model": "tiny", "lora_config": {"rank": 8, "seed": 0}}
        first = await posted(http, "create_model", **create)
        assert await posted(http, "create_model", **create) == first
        await client.result(first)
        assert await posted(http, "create_model", **create) == first, "the answer was lost, not the model"
        await client.do(forward_backward(1, model="default"), 1)
        behind = await client.send(step("default"), 5)
        second = await posted(http, "create_model", **create)
        assert second != first
        await client.result(second)
        assert isinstance(await client.result(behind), ops.Failure)
        assert (await client.do(step("default"), 1)).metrics["weights"] == folded(1, 0)


@in_a_loop
async def test_a_creation_that_differs_from_an_unused_model_or_follows_calls_without_numbers_is_no_retry(tmp_path):
    """Catches a script that is changed and started again, which is told its model was made with another body."""
    async with serving(options(tmp_path)) as (client, counting), over_http(client) as http:
        create = {"base_model": "tiny", "lora_config": {"rank": 8, "seed": 0}}
        ids = [await posted(http, "create_model", **create)]
        ids.append(await posted(http, "create_model", base_model="tiny", lora_config={"rank": 4}))
        for unnumbered in (forward_backward(1, model="default"), step("default"), ops.UnloadModel("default")):
            ids.append(await posted(http, "create_model", **create))
            assert await posted(http, "create_model", **create) == ids[-1]
            await client.result(ids[-1])
            await client.do(unnumbered)
        ids.append(await posted(http, "create_model", **create))
        await client.result(ids[-1])
        assert len(set(ids)) == len(ids)
        assert counting.models["default"].gradient == 0


@in_a_loop
async def test_status_counts_what_happened(tmp_path):
    """Catches a status page that shows nothing of the failures that users see."""
    async with serving(options(tmp_path)) as (client, _):
        await client.create()
        await client.do(forward_backward(1, 2, 3), 1)
        await client.do(forward_backward(1, loss=BAD), 2)
        status = await client.answer(GetStatus())
        assert status.ready
        assert status.world_size == 1
        assert status.counters["tokens_total"] == 3
        assert status.counters['failures_total{operation="ForwardBackward"}'] == 1
        assert [error.message for error in status.last_errors] == ["a bad loss"]
        assert status.sessions[0].models == [MODEL]
