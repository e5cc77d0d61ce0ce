"""Long passes give way to the requests of others, and are computed once, whoever dies or is cancelled meanwhile."""

import contextlib
import shutil

import msgspec

from asynchronous import in_a_loop, until
from counting_workers import folded
from orchestrated import MODEL, forward_backward, options, running, serving, step, tokens, workers
from xorl.server.messages import CANCELLED, Cancel, Rejected
from xorl.server.operations import CreateModel, Failure, ForwardBackward, LoraSpec

OTHER = "session-1:train:1"


def long(model=MODEL, num_datums=40):
    """Its sum is the number of datums."""
    return ForwardBackward(model, tokens(1) * num_datums, "cross_entropy")


@in_a_loop
async def test_steps_of_others_run_between_the_micro_batches_of_a_long_pass(tmp_path):
    """Catches a request that holds the others up, one that they starve, and one that is computed or counted twice."""
    async with serving(options(tmp_path), datum_s=0.05) as (client, counting):
        await client.create()
        await client.create(OTHER)
        pending = await client.send(long(), 1)
        stepped = await client.send(step(), 2)
        await until(lambda: client.orchestrator.state.open[pending].is_running)
        seq = 1
        while pending in client.orchestrator.state.open:
            await client.do(forward_backward(3, model=OTHER), seq)
            assert (await client.do(step(OTHER), seq + 1)).metrics["step"] == (seq + 1) / 2
            seq += 2
        assert seq > 5
        assert (await client.result(pending)).metrics == {"loss:sum": 40.0}
        assert len((await client.result(pending)).fields["logprobs"]) == 40
        assert (await client.result(stepped)).metrics["weights"] == folded(1, 40)
        assert counting.ran.count(pending) == 1
        assert counting.suspended.count(pending) > 1
        totals = client.orchestrator.state.counters.totals
        assert totals["tokens_total"] == 40 + (seq - 1) / 2
        model = client.orchestrator.state.registry.models[MODEL]
        assert model.tail_s > 40 * 0.05, "a replay takes as long as all its turns"


@in_a_loop
async def test_two_long_passes_take_turns_and_a_pass_alone_is_not_suspended(tmp_path):
    """Catches a second long request that waits for the first, and turns that nobody needs."""
    async with serving(options(tmp_path), datum_s=0.02) as (client, counting):
        await client.create()
        await client.create(OTHER)
        await client.do(long(num_datums=20), 1)
        assert not counting.suspended
        first = await client.send(long(), 2)
        await until(lambda: client.orchestrator.state.open[first].is_running)
        second = await client.send(long(OTHER), 1)
        await client.result(second)
        await client.result(first)
        turns = counting.suspended
        assert min(turns.count(first), turns.count(second)) > 3


@in_a_loop
async def test_a_suspended_pass_is_cancelled_with_its_gradient(tmp_path):
    """Catches a cancelled pass that goes on, leaves half a gradient, or holds its model up."""
    async with serving(options(tmp_path), datum_s=0.05) as (client, counting):
        await client.create()
        await client.create(OTHER)
        await client.do(forward_backward(5), 1)
        pending = await client.send(long(num_datums=400), 2)
        stepped = await client.send(step(), 3)
        await until(lambda: client.orchestrator.state.open[pending].is_running)
        await client.do(forward_backward(3, model=OTHER), 1)
        await until(lambda: counting.suspended)
        outcome = await client.answer(Cancel(pending))
        assert outcome.status == "cancelled"
        assert await client.result(pending) == CANCELLED
        assert (await client.result(stepped)).metrics["weights"] == folded(1, 5)


@in_a_loop
async def test_a_suspended_pass_survives_workers_and_orchestrators_that_die(chosen):
    """Catches a pass that is resumed on workers that never began it, or begins again although they hold it."""
    async with running(chosen) as client:
        first_workers = contextlib.ExitStack()
        counting = first_workers.enter_context(workers(chosen, datum_s=0.05))
        await client.create()
        await client.create(OTHER)
        pending = await client.send(long(), 1)
        await until(lambda: client.orchestrator.state.open[pending].is_running)
        await client.do(forward_backward(3, model=OTHER), 1)
        await until(lambda: counting.suspended)
    async with running(chosen) as client:
        await until(lambda: client.orchestrator.state.open[pending].is_running)
        await client.do(forward_backward(4, model=OTHER), 2)
        num_turns = counting.suspended.count(pending)
        assert num_turns > 1
        assert pending not in counting.ran
        first_workers.close()
        with workers(chosen, datum_s=0.01) as others:
            assert (await client.result(pending)).metrics == {"loss:sum": 40.0}
            assert (await client.do(step(), 2)).metrics["weights"] == folded(1, 40)
            assert (await client.do(step(OTHER), 3)).metrics["weights"] == folded(1, 7)
            assert others.ran.count(pending) == 1


@in_a_loop
async def test_a_client_that_fills_its_share_of_the_queue_is_refused_and_others_are_not(tmp_path):
    """Catches a client whose requests, or whose bodies, leave no room in the queue for others."""
    body = len(msgspec.msgpack.encode(long()))
    for limits in ({"max_queued": 16}, {"max_queued_bytes": 16 * body}):
        chosen = options(tmp_path, max_client_share=0.25, **limits)
        async with running(chosen) as client:
            ids = []
            for model in ("a", "b"):
                ids.append(await client.send(CreateModel(model, lora=LoraSpec(rank=8, seed=0)), session=None))
                refused = None
                for seq in range(1, 9):
                    answer = await client.ask(long(model), seq)
                    if isinstance(answer, Rejected):
                        refused = answer
                        break
                    ids.append(answer.request_id)
                assert refused.status == 429
                assert "25% of max_queued_requests and of max_queued_mb" in refused.message
                assert 3 <= seq - 1 <= 5
            with workers(chosen):
                for request_id in ids:
                    await client.result(request_id)
                # What was refused is accepted once there is room.
                assert (await client.do(long("a"), seq)).metrics["loss:sum"] == 40
        shutil.rmtree(chosen.output_dir)


@in_a_loop
async def test_the_number_that_a_full_share_waits_for_is_accepted(tmp_path):
    """Catches a client whose calls overtake each other, and which is refused the very call that would let them run."""
    chosen = options(tmp_path, max_client_share=0.25, max_queued=16)
    async with running(chosen) as client:
        ids = [await client.send(CreateModel("a", lora=LoraSpec(rank=8, seed=0)), session=None)]
        seq = 2
        while not isinstance(answer := await client.ask(long("a"), seq), Rejected):
            ids.append(answer.request_id)
            seq += 1
        assert answer.status == 429
        ids.append(await client.send(long("a"), 1))
        with workers(chosen):
            for request_id in ids:
                assert not isinstance(await client.result(request_id), Failure)
