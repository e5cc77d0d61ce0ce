"""The orchestrator with workers that count: nothing is lost or done twice, whoever dies when."""

import asyncio
import contextlib
import hashlib
import secrets

import msgspec
import numpy as np

from counting_workers import BAD, CountingWorkers, folded
from xorl.server.arrays import Array, Datum
from xorl.server.channel import Limits
from xorl.server.messages import (
    Accepted,
    CreateModel,
    Failure,
    Finished,
    ForwardBackward,
    LoraSpec,
    OptimStep,
    Pending,
    Poll,
    Rejected,
    SaveWeights,
    Submit,
    Tombstone,
    Unknown,
    UnloadModel,
)
from xorl.server.names import CheckpointRef
from xorl.server.orchestrator import Orchestrator, OrchestratorOptions
from xorl.server.queries import CreateSession, DeleteCheckpoint, FinishSession, GetModel, GetStatus, ListCheckpoints

LIMITS = Limits(ping_every_s=0.1, lost_after_s=3.0)
SESSION = "session-1"
MODEL = "session-1:train:0"


def options(tmp_path, **changes):
    values = {
        "api_address": f"ipc://{tmp_path}/api",
        "worker_address": f"ipc://{tmp_path}/workers",
        "output_dir": str(tmp_path / "out"),
        "model_name": "tiny",
        "model_path": "/models/tiny",
        "tokenizer": "tiny",
        "arch": "qwen3",
        "vocab_size": 100,
        "enable_lora": True,
        "skip_initial_checkpoint": True,
        "worker_connection_timeout_s": 20.0,
    }
    return OrchestratorOptions(**(values | changes))


def tokens(*values):
    array = Array.of(np.array(values, dtype=np.int32))
    return [Datum(array, {"target_tokens": Array.of(np.array(values, dtype=np.int64))})]


def forward_backward(*values, model=MODEL, loss="cross_entropy", forward_only=False):
    return ForwardBackward(model, tokens(*values), loss, forward_only=forward_only)


def step(model=MODEL):
    return OptimStep(model, 1e-3)


def submit(operation, seq=None, *, session=SESSION):
    key = f"{operation.model_id}/{seq}" if seq is not None else None
    if isinstance(operation, CreateModel):
        key = f"create/{operation.model_id}"
    body_hash = hashlib.sha256(msgspec.msgpack.encode(operation)).digest()
    session = session if isinstance(operation, CreateModel) else None
    return Submit(secrets.token_hex(8), operation, "tinker", body_hash, key, seq, session)


class Client:
    """Speaks with an orchestrator in this loop, as the API does."""

    def __init__(self, orchestrator):
        self.orchestrator = orchestrator

    async def send(self, operation, seq=None, **extra):
        answer = await self.orchestrator.answer(submit(operation, seq, **extra))
        assert isinstance(answer, Accepted), answer
        return answer.request_id

    async def result(self, request_id, timeout_s=20.0):
        for _ in range(round(timeout_s / 0.5)):
            answer = await self.orchestrator.answer(Poll(request_id, 0.5))
            if isinstance(answer, Finished):
                return answer.result
            assert isinstance(answer, Pending), answer
        raise AssertionError(f"{request_id} hangs: {answer}")

    async def do(self, operation, seq=None, **extra):
        return await self.result(await self.send(operation, seq, **extra))

    async def create(self, model=MODEL, **lora):
        await self.orchestrator.answer(CreateSession(SESSION))
        return await self.do(CreateModel(model, lora=LoraSpec(rank=8, seed=0, **lora)))


@contextlib.asynccontextmanager
async def running(chosen):
    orchestrator = Orchestrator(chosen, limits=LIMITS)
    await orchestrator.start()
    try:
        yield Client(orchestrator)
    finally:
        await orchestrator.stop()


@contextlib.contextmanager
def workers(chosen, **extra):
    counting = CountingWorkers(chosen.worker_address, chosen.folder, **extra)
    try:
        yield counting
    finally:
        counting.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_a_loop_of_training_with_chunks_that_arrive_out_of_order(tmp_path):
    """Catches a step that overtakes a chunk, a chunk that is lost, and a retry that runs again."""

    async def scenario():
        chosen = options(tmp_path)
        with workers(chosen) as counting:
            async with running(chosen) as client:
                await client.create()
                second = await client.send(forward_backward(3, 4), 2)
                again = await client.send(step(), 3)
                pending = await client.orchestrator.answer(Poll(second, 0.05))
                assert pending.reason == "request 1 of this model has not arrived"
                first = await client.send(forward_backward(1, 2), 1)
                assert await client.send(forward_backward(1, 2), 1) == first
                assert (await client.result(second)).metrics == {"loss:sum": 7.0}
                assert (await client.result(again)).metrics["weights"] == folded(1, 10)
                assert counting.ran.count(first) == 1
                wrong = await client.orchestrator.answer(submit(forward_backward(9), 1))
                assert isinstance(wrong, Rejected)
                assert wrong.status == 400
                late = await client.orchestrator.answer(Poll("nobody", 0.0))
                assert late == Unknown("nobody")

    run(scenario())


def test_a_number_that_was_rejected_is_passed_over_and_one_that_never_comes_fails_what_waits(tmp_path):
    """Catches a model that hangs for ever behind a call that the API refused or the client never sent."""

    async def scenario():
        chosen = options(tmp_path, gap_timeout_s=0.5)
        with workers(chosen):
            async with running(chosen) as client:
                await client.create()
                waiting = await client.send(forward_backward(5), 2)
                await client.orchestrator.answer(Tombstone(MODEL, 1))
                assert (await client.result(waiting)).metrics["loss:sum"] == 5
                behind = [await client.send(forward_backward(7), 4), await client.send(step(), 5)]
                failures = [await client.result(request) for request in behind]
                assert all(isinstance(f, Failure) and "request 3" in f.message for f in failures)
                assert (await client.do(step(), 6)).metrics["weights"] == folded(1, 5)

    run(scenario())


def test_the_orchestrator_dies_with_requests_in_flight_and_nothing_is_lost_or_done_twice(tmp_path):
    """Catches a result that dies with the process, and a gradient that is added again when it comes back."""

    async def scenario():
        chosen = options(tmp_path)
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

    run(scenario())


def test_workers_that_die_are_replaced_and_models_are_as_they_were(tmp_path):
    """Catches half a gradient, a step that is lost with the workers, and one that is taken twice."""

    async def scenario():
        chosen = options(tmp_path)
        async with running(chosen) as client:
            with workers(chosen, delay_s=0.2):
                await client.create()
                await client.do(forward_backward(1), 1)
                await client.do(step(), 2)
                await client.do(SaveWeights(MODEL, "kept"), 3)
                await client.do(forward_backward(2), 4)
                await client.do(step(), 5)
                await client.do(forward_backward(3), 6)
                flying = await client.send(forward_backward(4), 7)
                await asyncio.sleep(0.05)
            pending = await client.orchestrator.answer(Poll(flying, 0.0))
            assert isinstance(pending, Pending)
            with workers(chosen) as fresh:
                assert (await client.result(flying)).metrics["loss:sum"] == 4
                after = await client.do(step(), 8)
                assert after.metrics["weights"] == folded(folded(folded(1, 1), 2), 7)
                assert after.metrics["step"] == 3
            # Unload, create from "kept", two calls and a step again, and the two new requests.
            assert len(fresh.ran) == 7

    run(scenario())


def test_the_whole_service_starts_again_and_takes_up_models_and_requests(tmp_path):
    """Catches a journal that only serves the process that wrote it."""

    async def scenario():
        chosen = options(tmp_path)
        with workers(chosen):
            async with running(chosen) as client:
                await client.create()
                await client.do(forward_backward(1), 1)
                await client.do(step(), 2)
        async with running(chosen) as client:
            request = await client.send(forward_backward(2), 3)
        with workers(chosen):
            async with running(chosen) as client:
                await client.result(request)
                assert (await client.do(step(), 4)).metrics["weights"] == folded(folded(1, 1), 2)
                info = await client.orchestrator.answer(GetModel(MODEL))
                assert info.step == 2

    run(scenario())


def test_a_call_that_kills_the_workers_again_and_again_is_given_up(tmp_path):
    """Catches a service that one client's call keeps down for everybody."""

    async def scenario():
        chosen = options(tmp_path, worker_max_retries=2)
        async with running(chosen) as client:
            with workers(chosen):
                await client.create()
                await client.do(forward_backward(1), 1)
            request = await client.send(forward_backward(2), 2)
            for _ in range(3):
                with workers(chosen, delay_s=0.3) as counting:
                    while not any(counting.sizes[4:]):
                        await asyncio.sleep(0.02)
            with workers(chosen):
                failure = await client.result(request)
                assert isinstance(failure, Failure)
                assert "given up" in failure.message
                assert (await client.do(step(), 3)).metrics["weights"] == folded(1, 1)

    run(scenario())


def test_workers_that_stay_away_end_requests_with_an_error_and_lose_no_model(tmp_path):
    """Catches a future that hangs where no workers come back."""

    async def scenario():
        chosen = options(tmp_path, worker_connection_timeout_s=0.5)
        async with running(chosen) as client:
            with workers(chosen):
                await client.create()
                await client.do(forward_backward(1), 1)
            failure = await client.result(await client.send(forward_backward(2), 2))
            assert isinstance(failure, Failure)
            assert failure.status == 503
            refused = await client.orchestrator.answer(submit(step(), 3))
            assert isinstance(refused, Rejected)
            assert refused.status == 503
            with workers(chosen):
                while not client.orchestrator.state.workers.is_ready:
                    await asyncio.sleep(0.02)
                assert (await client.do(step(), 3)).metrics["weights"] == folded(1, 1)

    run(scenario())


def test_one_bad_call_in_a_mixed_pass_fails_alone(tmp_path):
    """Catches a client's fault that others have to pay for."""

    async def scenario():
        chosen = options(tmp_path)
        with workers(chosen, delay_s=0.1) as counting:
            async with running(chosen) as client:
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
                assert isinstance(await client.result(bad), Failure)
                assert (await client.result(good)).metrics["loss:sum"] == 1
                # One failed beside another; each was tried alone.
                assert (await client.do(step(models[0]), 3)).metrics["weights"] == folded(1, 0)

    run(scenario())


def test_an_idle_model_is_saved_and_released_and_comes_back_when_it_is_called(tmp_path):
    """Catches weights or a gradient that are lost with the client's silence, and memory that is never given back."""

    async def scenario():
        chosen = options(tmp_path, idle_session_timeout_s=3600.0)
        with workers(chosen) as counting:
            async with running(chosen) as client:
                await client.create()
                await client.do(forward_backward(1), 1)
                await client.do(step(), 2)
                await client.do(forward_backward(2), 3)
                await client.orchestrator.answer(FinishSession(SESSION, "success"))
                while MODEL in counting.models:
                    await asyncio.sleep(0.05)
                assert (await client.do(step(), 4)).metrics["weights"] == folded(folded(1, 1), 2)
                listed = await client.orchestrator.answer(ListCheckpoints(MODEL))
                assert listed.checkpoints == []

    run(scenario())


def test_saves_are_checked_before_anything_is_written(tmp_path):
    """Catches a checkpoint that is written over, and one that fills the disk beyond storage_limit."""

    async def scenario():
        chosen = options(tmp_path)
        with workers(chosen) as counting:
            async with running(chosen) as client:
                await client.create()
                saved = await client.do(SaveWeights(MODEL, "a", user_metadata={"note": "x"}), 1)
                assert saved.checkpoint == CheckpointRef(MODEL, "weights", "a")
                again = await client.do(SaveWeights(MODEL, "a"), 2)
                assert isinstance(again, Failure)
                assert again.status == 409
                ran = len(counting.ran)
                client.orchestrator.state.options = msgspec.structs.replace(chosen, storage_limit_bytes=10)
                full = await client.do(SaveWeights(MODEL, "b"), 3)
                assert full.status == 507
                assert "StorageLimitError" in full.message
                assert len(counting.ran) == ran
                listed = await client.orchestrator.answer(ListCheckpoints(MODEL))
                assert [c.user_metadata for c in listed.checkpoints] == [{"note": "x"}]
                kept = await client.orchestrator.answer(DeleteCheckpoint(saved.checkpoint))
                assert isinstance(kept, Rejected)
                await client.do(UnloadModel(MODEL), None)
                await client.orchestrator.answer(DeleteCheckpoint(saved.checkpoint))
                assert (await client.orchestrator.answer(ListCheckpoints(MODEL))).checkpoints == []
                gone = await client.orchestrator.answer(submit(step(), 4))
                assert gone.status == 404

    run(scenario())


def test_a_client_without_sessions_that_begins_anew_gets_a_new_model(tmp_path):
    """Catches a second run of a script that is told its numbers were used, or goes on with the first one's model."""

    async def scenario():
        chosen = options(tmp_path)
        with workers(chosen):
            async with running(chosen) as client:
                create = CreateModel("default", lora=LoraSpec(rank=8, seed=0))
                first = await client.send(create, session=None)
                assert await client.send(create, session=None) == first
                await client.result(first)
                await client.do(forward_backward(1, model="default"), 1)
                behind = await client.send(step("default"), 5)
                second = await client.send(create, session=None)
                assert second != first
                await client.result(second)
                assert isinstance(await client.result(behind), Failure)
                assert (await client.do(step("default"), 1)).metrics["weights"] == folded(1, 0)

    run(scenario())


def test_a_disk_that_takes_nothing_refuses_requests_and_keeps_results_until_it_does(tmp_path):
    """Catches a request that is accepted and not kept, and a result that is dropped for want of room."""

    async def scenario():
        chosen = options(tmp_path)
        with workers(chosen, delay_s=0.3) as counting:
            async with running(chosen) as client:
                await client.create()
                flying = await client.send(forward_backward(1), 1)
                await asyncio.sleep(0.1)
                commit = client.orchestrator.state.journal._commit
                await commit.write(lambda connection: connection.execute("PRAGMA max_page_count = 1"))
                refused = await client.orchestrator.answer(submit(forward_backward(*range(20_000)), 2))
                assert isinstance(refused, Rejected)
                assert refused.status == 507
                await commit.write(lambda connection: connection.execute("PRAGMA max_page_count = 1000000"))
                assert (await client.result(flying)).metrics["loss:sum"] == 1
                assert (await client.do(step(), 2)).metrics["weights"] == folded(1, 1)
                assert counting.ran.count(flying) == 1

    run(scenario())


def test_status_counts_what_happened(tmp_path):
    """Catches a status page that shows nothing of the failures that users see."""

    async def scenario():
        chosen = options(tmp_path)
        with workers(chosen):
            async with running(chosen) as client:
                await client.create()
                await client.do(forward_backward(1, 2, 3), 1)
                await client.do(forward_backward(1, loss=BAD), 2)
                status = await client.orchestrator.answer(GetStatus())
                assert status.ready
                assert status.world_size == 1
                assert status.counters["tokens_total"] == 3
                assert status.counters['failures_total{operation="ForwardBackward"}'] == 1
                assert [error.message for error in status.last_errors] == ["a bad loss"]
                assert status.sessions[0].models == [MODEL]

    run(scenario())


def test_a_service_that_is_stopped_saves_its_models_and_runs_nothing_again(tmp_path):
    """Catches an orderly stop after which a day of training is run again."""

    async def scenario():
        chosen = options(tmp_path)
        with workers(chosen):
            async with running(chosen) as client:
                await client.create()
                await client.do(forward_backward(1), 1)
                await client.do(step(), 2)
                await client.do(forward_backward(2), 3)
                await client.orchestrator.save_models()
        with workers(chosen) as fresh:
            async with running(chosen) as client:
                assert (await client.do(step(), 4)).metrics["weights"] == folded(folded(1, 1), 2)
        # Unload, create from what was saved, the gradient that was left, and the new step.
        assert len(fresh.ran) == 4

    run(scenario())
