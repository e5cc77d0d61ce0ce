"""The names from which OpenAI's API samples: the id of a model stands for its weights of now."""

import asyncio

import msgspec
import pytest

from asynchronous import in_a_loop, until
from orchestrated import MODEL, SESSION, forward_backward, options, sampling, serving, step, training
from refusals import assert_refused
from xorl.server.identifiers import CheckpointRef, checkpoint_folder
from xorl.server.messages import Rejected
from xorl.server.operations import Failure, SaveWeights, SaveWeightsForSampler
from xorl.server.queries import FindServedModel, FinishSession, ListCheckpoints, ListServedModels


async def found(client, *, saves=True):
    return await client.answer(FindServedModel(MODEL, saves))


def state_of(chosen, served):
    """(weights, steps) of the checkpoint that is sampled from."""
    return msgspec.json.decode(
        (checkpoint_folder(chosen.folder, served.sampler.checkpoint) / "state.json").read_bytes()
    )


async def samples(client, served):
    sample = sampling(served.sampler, max_tokens=1)
    return not isinstance(await client.do(sample), Failure)


@pytest.mark.parametrize("initial", [True, False], ids=["initial checkpoint", "nothing saved"])
@in_a_loop
async def test_the_id_of_a_model_stands_for_its_current_weights(tmp_path, initial):
    """Catches an answer from the initial weights of a model that has been trained since, without a sign."""
    chosen = options(tmp_path, skip_initial_checkpoint=not initial)
    async with training(chosen) as (client, counting):
        listed = await client.answer(ListServedModels())
        assert MODEL in [model.name for model in listed.models]
        assert not isinstance(await found(client, saves=False), Rejected)
        trained = counting.models[MODEL]
        first = await found(client)
        assert state_of(chosen, first) == [trained.weights, 1]
        assert await samples(client, first)
        num_ran = len(counting.ran)
        assert (await found(client)).sampler == first.sampler
        assert len(counting.ran) == num_ran, "the weights are saved already"
        await client.do(forward_backward(2), 3)
        await client.do(step(), 4)
        # Simultaneous calls, as of a harness, share one save.
        several = await asyncio.gather(*(found(client) for _ in range(8)))
        assert len({served.sampler for served in several}) == 1
        assert state_of(chosen, several[0]) == [trained.weights, 2]
        await client.do(SaveWeightsForSampler(MODEL, "own"), 5)
        assert (await found(client)).sampler.checkpoint.name == "own"
        hidden = (await client.answer(ListCheckpoints(MODEL))).checkpoints
        assert {one.checkpoint.name for one in hidden} == {"own", *(["000000"] if initial else [])}


@in_a_loop
async def test_a_model_that_was_released_is_sampled_from_without_being_restored(tmp_path):
    """Catches a harness that loads models onto the workers, or takes the base from who trains it."""
    chosen = options(tmp_path, enable_lora=False)
    async with training(chosen) as (client, counting):
        trained = counting.models[MODEL]
        await client.answer(FinishSession(SESSION, "success"))
        await until(lambda: client.orchestrator.state.registry.models[MODEL].state == "released")
        served = await found(client)
        assert state_of(chosen, served) == [trained.weights, 1]
        assert await samples(client, served)
        assert not counting.models


@in_a_loop
async def test_weights_that_cannot_be_saved_are_refused_and_the_older_ones_have_a_name(chosen):
    """Catches older weights that are sampled from in place of those that were asked for."""
    async with serving(chosen) as (client, _):
        await client.create()
        await client.do(SaveWeights(MODEL, "before"), 1)
        await client.do(forward_backward(1), 2)
        await client.do(step(), 3)
        client.orchestrator.state.options = msgspec.structs.replace(chosen, storage_limit_bytes=10)
        refused = await found(client)
        assert isinstance(refused, Rejected)
        assert_refused(refused, 507, "trained since its weights were saved", "StorageLimitError")
        uri = CheckpointRef(MODEL, "weights", "before").uri("xorl")
        older = await client.answer(FindServedModel(uri, saves=True))
        assert older.sampler.checkpoint.name == "before"
