"""CheckpointList from which models are made again, and samplers of a model: what goes with what, and what says so."""

import asyncio
import math
import threading
import time

import pytest

from asynchronous import in_a_loop, until
from counting_workers import BROKEN, folded
from orchestrated import MODEL, SESSION, forward_backward, options, running, sampling, serving, step, training, workers
from refusals import assert_refused
from xorl.server import operations as ops
from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import Ok
from xorl.server.orchestrator import catalogue
from xorl.server.orchestrator.registry import checkpoint_key
from xorl.server.queries import DeleteCheckpoint, FinishSession, ListCheckpoints

OTHER = "session-1:train:1"
TRAINED = folded(1, 1)


def ref(name, model=MODEL):
    return CheckpointRef(model, "weights", name)


async def load(client, seq, name="kept", model=OTHER, of=MODEL):
    return await client.do(ops.LoadWeights(model, ref(name, of), optimizer=True), seq)


async def begun(client):
    """MODEL after one step, saved as `kept`; its next number is 4."""
    await client.begin()
    await client.do(ops.SaveWeights(MODEL, "kept"), 3)


@in_a_loop
async def test_a_checkpoint_that_a_model_has_loaded_or_begun_from_can_be_deleted_and_the_model_stays(tmp_path):
    """Catches a model that is lost with its workers, since what it would be made again from was deleted."""
    chosen, created = options(tmp_path), "session-1:train:2"
    async with running(chosen) as client:
        with workers(chosen):
            await begun(client)
            await client.create(OTHER)
            await load(client, 1)
            await client.do(ops.CreateModel(created, checkpoint=ref("kept"), with_optimizer=True))
        with workers(chosen):
            # One of them is not there and has to be made again before it is saved.
            await client.do(forward_backward(5, model=OTHER), 2)
            assert await client.answer(DeleteCheckpoint(ref("kept"))) == Ok()
        with workers(chosen):
            assert (await client.do(step(OTHER), 3)).metrics["weights"] == folded(TRAINED, 5)
            assert await client.weights_after(5, 1, created) == folded(TRAINED, 5)
            assert await client.weights_after(5, 4) == folded(TRAINED, 5)


@pytest.mark.parametrize("begins", [False, True], ids=["loads", "begins"])
@in_a_loop
async def test_a_model_keeps_its_weights_when_another_one_writes_over_what_it_was_made_from(chosen, begins):
    """Catches a model that silently becomes another one when its workers die, after `latest` was saved anew."""
    async with running(chosen) as client:
        with workers(chosen):
            await begun(client)
            if begins:
                await client.do(ops.CreateModel(OTHER, checkpoint=ref("kept"), with_optimizer=True))
            else:
                await client.create(OTHER)
                await load(client, 1)
            await client.do(forward_backward(2), 4)
            await client.do(step(), 5)
            assert not isinstance(await client.do(ops.SaveWeights(MODEL, "kept", overwrite=True), 6), ops.Failure)
        with workers(chosen):
            assert await client.weights_after(5, 1 if begins else 2, OTHER) == folded(TRAINED, 5)
            assert await client.weights_after(5, 7) == folded(folded(TRAINED, 2), 5)


@in_a_loop
async def test_a_model_that_writes_over_what_it_has_loaded_itself_is_saved_elsewhere_before(tmp_path):
    """Catches a tail that loads what was written by its own end."""
    async with serving(options(tmp_path)) as (client, counting):
        await begun(client)
        await client.do(ops.LoadWeights(MODEL, ref("kept"), optimizer=False), 4)
        model = client.orchestrator.state.registry.models[MODEL]
        assert list(model.loads.values()) == [ref("kept")]
        await client.do(forward_backward(2), 5)
        await client.do(step(), 6)
        saves = []
        run = counting._change
        counting._change = lambda operation, counted: (
            saves.append(getattr(operation, "name", None)),
            run(operation, counted),
        )[1]
        await client.do(ops.SaveWeights(MODEL, "kept", overwrite=True), 7)
        assert saves == ["recovery-0", "kept"]
        assert (model.boundary, model.loads) == (ref("kept"), {})


@in_a_loop
async def test_the_first_save_under_the_name_of_the_initial_checkpoint_replaces_it(tmp_path):
    """Catches loops that number their saves from 000000 and end at the first one, and a later save that is lost."""
    chosen = options(tmp_path, skip_initial_checkpoint=False)
    async with running(chosen) as client:
        with workers(chosen):
            await client.begin()
            registry = client.orchestrator.state.registry
            assert registry.models[MODEL].boundary == ref("000000")
            first = await client.do(ops.SaveWeights(MODEL, "000000", user_metadata={"by": "client"}), 3)
            assert not isinstance(first, ops.Failure), first
            assert registry.checkpoints[checkpoint_key(ref("000000"))].user_metadata == {"by": "client"}
            second = await client.do(ops.SaveWeights(MODEL, "000000"), 4)
            assert isinstance(second, ops.Failure)
            assert "already: choose another name" in second.message
        with workers(chosen):
            assert await client.weights_after(5, 5) == folded(TRAINED, 5)


@in_a_loop
async def test_two_models_that_write_over_what_the_other_has_loaded_do_not_wait_for_each_other(chosen):
    """Catches two saves that wait for each other for ever."""
    async with running(chosen) as client:
        with workers(chosen):
            await begun(client)
            await client.create(OTHER)
            await client.do(ops.SaveWeights(OTHER, "kept"), 1)
            await load(client, 2)
            await load(client, 4, model=MODEL, of=OTHER)
            both = [
                (ops.SaveWeights(OTHER, "kept", overwrite=True), 3),
                (ops.SaveWeights(MODEL, "kept", overwrite=True), 5),
            ]
            sent = [await client.send(save, seq) for save, seq in both]
            results = [await client.result(request) for request in sent]
            assert not any(isinstance(result, ops.Failure) for result in results)
        with workers(chosen):
            assert await client.weights_after(5, 4, OTHER) == folded(TRAINED, 5)
            assert await client.weights_after(5, 6) == folded(1, 5)


@in_a_loop
async def test_a_checkpoint_that_is_being_deleted_is_loaded_by_nobody(tmp_path, monkeypatch):
    """Catches a model that loads files while they are removed, and is lost with its workers."""
    chosen, delete, goes_on = options(tmp_path), catalogue.delete, threading.Event()

    def slowly(folder, checkpoint):
        return (checkpoint != ref("kept") or goes_on.wait(30)) and delete(folder, checkpoint)

    monkeypatch.setattr(catalogue, "delete", slowly)
    async with serving(chosen) as (client, _):
        await begun(client)
        await client.do(ops.SaveWeights(MODEL, "later"), 4)
        await client.create(OTHER)
        deleted = asyncio.create_task(client.answer(DeleteCheckpoint(ref("kept"))))
        await until(lambda: client.orchestrator.state.deleting or deleted.done())
        refused = await load(client, 1)
        created = await client.do(ops.CreateModel("session-1:train:2", checkpoint=ref("kept"), with_optimizer=True))
        goes_on.set()
        assert await deleted == Ok()
        for result in (refused, created):
            assert isinstance(result, ops.Failure)
            assert (result.status, result.message) == (404, f"{ref('kept').uri('xorl')} is being deleted")
        assert client.orchestrator.state.registry.models[OTHER].loads == {}
        assert client.orchestrator.state.deleting == set()


@in_a_loop
async def test_what_is_saved_in_place_of_a_checkpoint_whose_time_is_over_stays(tmp_path):
    """Catches a new checkpoint that is deleted for the old one of its name, which waited for a save of its model."""
    async with training(options(tmp_path), delay_s=0.5) as (client, _):
        await client.do(ops.SaveWeights(MODEL, "last", ttl_s=0.1), 3)
        await asyncio.sleep(0.2)
        requests = [await client.send(forward_backward(2), 4), await client.send(step(), 5)]
        requests.append(await client.send(ops.SaveWeights(MODEL, "last", overwrite=True), 6))
        client.orchestrator.housekeeping._pruned = -math.inf
        await client.orchestrator.housekeeping.tick(time.time())
        for request in requests:
            assert not isinstance(await client.result(request), ops.Failure)
        await client.orchestrator.housekeeping._expiring
        listed = await client.answer(ListCheckpoints(MODEL))
        assert [one.checkpoint for one in listed.checkpoints] == [ref("last")]


@in_a_loop
async def test_a_checkpoint_whose_reader_cannot_be_saved_is_not_written_over(tmp_path, monkeypatch):
    """Catches a save that goes on over the only copy of another model."""
    async with serving(options(tmp_path)) as (client, counting):
        await begun(client)
        await client.create(OTHER)
        await load(client, 1)
        save = counting._save
        full = ops.Failure("server", 507, "the disk is full")
        monkeypatch.setattr(
            counting, "_save", lambda at, *rest, **extra: full if at.model_id == OTHER else save(at, *rest, **extra)
        )
        refused = await client.do(ops.SaveWeights(MODEL, "kept", overwrite=True), 4)
        assert isinstance(refused, ops.Failure)
        assert (refused.status, OTHER in refused.message) == (507, True)
        model = client.orchestrator.state.registry.models[MODEL]
        assert not model.is_overwriting


@in_a_loop
async def test_a_model_that_the_workers_gave_up_is_made_again_as_it_was(chosen):
    """Catches a model that answers nothing any more, or has forgotten a gradient, since a load broke off half way."""
    with workers(chosen) as counting:
        async with running(chosen) as client:
            await client.begin()
            await client.do(ops.SaveWeights(MODEL, BROKEN), 3)
            await client.do(forward_backward(2), 4)
            assert (await load(client, 5, BROKEN, MODEL)).model_given_up
            assert not counting.models
            await client.do(forward_backward(3), 6)
            assert (await load(client, 7, BROKEN, MODEL)).model_given_up
        async with running(chosen) as client:
            after = await client.do(step(), 8)
            assert after.metrics["weights"] == folded(TRAINED, 5)


@pytest.mark.parametrize("ended_by", ["silence", "unloading", "another of its name"])
@in_a_loop
async def test_weights_that_ended_with_their_model_say_what_to_do(chosen, ended_by):
    """Catches unnamed weights that are kept for a client that is gone, and a refusal that names no remedy."""
    sampler = f"{SESSION}:sample:1"
    sample = sampling(ops.SessionSampler(sampler))
    with workers(chosen):
        async with running(chosen) as client:
            await client.create("m")
            await client.do(ops.SaveWeightsForSampler("m", None, sampler_id=sampler), 1)
            assert not isinstance(await client.do(sample), ops.Failure)
            match ended_by:
                case "silence":
                    await client.answer(FinishSession(SESSION, "success"))
                    await until(lambda: client.orchestrator.state.registry.models["m"].state == "released")
                case "unloading":
                    await client.do(ops.UnloadModel("m"), 2)
                case _:
                    await client.do(ops.CreateModel("m", lora=ops.LoraSpec(rank=8)), session=None)
            refused = await client.do(sample)
        async with running(chosen) as client:
            for failure in (refused, await client.do(sample)):
                assert_refused(failure, 404, "no longer kept", "Save its weights for sampling again")
