"""Cancelled requests: what has not begun ends and is skipped, also after a restart, and the answer says what became."""

import asyncio

from asynchronous import in_a_loop, until
from counting_workers import folded
from orchestrated import MODEL, forward_backward, options, over_http, running, sampling, step, workers
from xorl.server.messages import CANCELLED, Cancel, CancelOutcome, Unknown
from xorl.server.operations import CreateModel, Failure, LoraSpec


async def cancel(client, request_id):
    answer = await client.answer(Cancel(request_id))
    assert isinstance(answer, CancelOutcome), answer
    return answer.status


@in_a_loop
async def test_what_has_not_begun_is_cancelled_and_skipped_and_what_follows_runs(chosen):
    """Catches a cancelled call that is computed all the same, a model that waits for its number, also after a restart
    of the orchestrator, and a retry of the number that runs it."""
    async with running(chosen) as client:
        # No workers yet, so nothing begins.
        creation = await client.send(CreateModel(MODEL, lora=LoraSpec(rank=8, seed=0)), session=None)
        calls = [(forward_backward(5), 1), (forward_backward(7), 2), (forward_backward(9), 3)]
        first, second, third = [await client.send(call, seq) for call, seq in calls]
        assert await cancel(client, second) == "cancelled"
        assert await client.result(second) == CANCELLED
        assert await cancel(client, second) == "cancelled"
        assert await client.answer(Cancel("nobody")) == Unknown("nobody")
        assert await client.send(forward_backward(7), 2) == second, "a retry finds the cancelled request"
        # The head of the queue is cancelled as well, as soon as its model's creation is out of the way.
        unnumbered = await client.send(forward_backward(100))
        assert await cancel(client, unnumbered) == "cancelled"
    async with running(chosen) as client:
        assert await cancel(client, first) == "cancelled"
        stepped = await client.send(step(), 4)
        with workers(chosen) as counting:
            assert (await client.result(third)).metrics["loss:sum"] == 9
            assert (await client.result(stepped)).metrics["weights"] == folded(1, 9)
            assert await client.send(forward_backward(7), 2) == second
            assert await cancel(client, stepped) == "finished"
            assert await cancel(client, creation) == "finished"
            assert not {first, second, unnumbered} & set(counting.ran)
            status = client.orchestrator.state.counters.totals
            assert status['cancelled_total{operation="ForwardBackward"}'] == 1


@in_a_loop
async def test_simultaneous_cancellations_of_a_queued_call_get_one_answer(tmp_path):
    """Catches a client that is told its step runs, while the same call of another thread has cancelled it."""
    async with running(options(tmp_path)) as client:
        # No workers, so nothing begins.
        await client.send(CreateModel(MODEL, lora=LoraSpec(rank=8, seed=0)), session=None)
        sample = sampling(max_tokens=4)
        for queued in (
            await client.send(forward_backward(5), 1),
            await client.send(step(), 2),
            await client.send(sample, session=None),
        ):
            answers = await asyncio.gather(*(cancel(client, queued) for _ in range(3)))
            assert answers == ["cancelled"] * 3
            assert await client.result(queued) == CANCELLED


@in_a_loop
async def test_a_running_call_is_not_lost_with_the_orchestrator_after_a_later_one_was_cancelled(chosen):
    """Catches a record of the next number that passes over one that still runs: after a crash it would not be run."""
    with workers(chosen, delay_s=1.0) as counting:
        async with running(chosen) as client:
            await client.create()
            first = await client.send(forward_backward(3), 1)
            await until(lambda: client.orchestrator.state.open[first].begun_by)
            second, third = await client.send(forward_backward(4), 2), await client.send(forward_backward(5), 3)
            assert await cancel(client, third) == "cancelled"
            assert client.orchestrator.state.registry.models[MODEL].next_seq == 1
        async with running(chosen) as client:
            assert (await client.result(first)).metrics["loss:sum"] == 3
            assert (await client.result(second)).metrics["loss:sum"] == 4
            assert await client.result(third) == CANCELLED
            assert (await client.do(step(), 4)).metrics["weights"] == folded(1, 3 + 4)
            assert third not in counting.ran


@in_a_loop
async def test_the_answer_says_what_runs_on_and_what_is_unknown(chosen):
    """Catches an API that says yes to everything: a call that cannot be stopped, and an id that there is not."""
    with workers(chosen, delay_s=1.0, token_s=0.1) as counting:
        async with running(chosen) as client, over_http(client) as http:
            await client.create()
            running_call = await client.send(forward_backward(3), 1)
            await until(lambda: client.orchestrator.state.open[running_call].begun_by)
            waiting = await client.send(forward_backward(4), 2)
            sample = sampling(max_tokens=4)
            queued = await client.send(sample, session=None)

            async def status_of(request_id):
                answer = await http.post("/api/v1/cancel_future", json={"request_id": request_id})
                return answer.status_code, answer.json().get("status")

            assert await status_of(waiting) == (200, "cancelled")
            assert await status_of(queued) == (200, "cancelled")
            # Its only micro-batch cannot be ended any more.
            assert await status_of(running_call) == (200, "finished")
            assert await status_of("nobody") == (404, None)
            polled = await http.post("/api/v1/retrieve_future", json={"request_id": waiting})
            assert polled.json() == {"error": CANCELLED.message, "category": "user", "status": 410}
            assert (await client.result(running_call)).metrics["loss:sum"] == 3
            assert waiting not in counting.ran
            assert (await client.do(step(), 3)).metrics["weights"] == folded(1, 3)


@in_a_loop
async def test_a_cancelled_creation_leaves_no_model(chosen):
    """Catches a model that waits for ever for a creation that was taken back."""
    async with running(chosen) as client:
        creation = await client.send(CreateModel(MODEL, lora=LoraSpec(rank=8, seed=0)), session=None)
        behind = await client.send(forward_backward(1), 1)
        assert await cancel(client, creation) == "cancelled"
        assert isinstance(await client.result(behind), Failure)
        again = await client.send(CreateModel(MODEL, lora=LoraSpec(rank=8, seed=0)), session=None)
        with workers(chosen):
            await client.result(again)
            assert (await client.do(forward_backward(2), 1)).metrics["loss:sum"] == 2
