"""Weights that clients save for sampling without a name: they outlive processes, and are deleted once unused."""

import time

import pytest

from asynchronous import in_a_loop
from counting_workers import BROKEN
from orchestrated import MODEL, SESSION, options, running, sampling, serving, workers
from refusals import assert_refused
from xorl.server import operations as ops
from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import Rejected
from xorl.server.orchestrator.operation_properties import EVICTION
from xorl.server.queries import CreateSamplingSession, ListCheckpoints

FIRST, SECOND, THIRD = (f"{SESSION}:sample:{number}" for number in range(3))


async def save(client, sampler, seq):
    saved = await client.do(ops.SaveWeightsForSampler(MODEL, None, sampler_id=sampler), seq)
    assert saved.sampler_id == sampler
    return saved.checkpoint


async def sample(client, sampler):
    return await client.do(sampling(ops.SessionSampler(sampler)))


def names(chosen):
    folder = chosen.folder / "sampler_weights" / MODEL.replace(":", "~")
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.parametrize("event", ["a restart of all", "new workers", "a load that fails", "an idle client"])
@in_a_loop
async def test_weights_without_a_name_outlive_what_took_their_model(chosen, event):
    """Catches a loop of reinforcement learning that ends with a process of the service: its steps save such weights."""
    async with running(chosen) as client:
        with workers(chosen) as counting:
            await client.create()
            await client.do(ops.SaveWeights(MODEL, BROKEN), 1)
            await save(client, FIRST, 2)
            if event == "a load that fails":
                broken = CheckpointRef(MODEL, "weights", BROKEN)
                assert (await client.do(ops.LoadWeights(MODEL, broken, optimizer=True), 3)).model_given_up
            if event == "an idle client":
                await client.result(
                    await client.orchestrator._admission.submit_internal(ops.UnloadModel(MODEL), EVICTION)
                )
                assert not counting.models
            if event in ("a load that fails", "an idle client"):
                assert not isinstance(await sample(client, FIRST), ops.Failure)
        if event == "new workers":
            with workers(chosen):
                assert not isinstance(await sample(client, FIRST), ops.Failure)
    if event == "a restart of all":
        async with serving(chosen) as (client, _):
            assert not isinstance(await sample(client, FIRST), ops.Failure)


@in_a_loop
async def test_the_weights_last_used_are_kept_and_the_others_deleted(tmp_path, monkeypatch):
    """Catches a disk that fills up with a set of weights for each step, and a reference that is deleted while used."""
    monkeypatch.setattr("xorl.server.orchestrator.apply_result.NUM_ADAPTERS", 2)
    async with serving(options(tmp_path)) as (client, _):
        await client.create()
        reference = await save(client, FIRST, 1)
        await save(client, SECOND, 2)
        assert not isinstance(await sample(client, FIRST), ops.Failure)
        newest = await save(client, THIRD, 3)
        assert_refused(await sample(client, SECOND), 404, "no longer kept")
        for sampler in (FIRST, THIRD):
            assert not isinstance(await sample(client, sampler), ops.Failure)
        housekeeping, chosen = client.orchestrator.housekeeping, client.orchestrator.state.options
        await housekeeping._prune(time.time())
        await housekeeping._expiring
        assert names(chosen) == {reference.name, newest.name}


@in_a_loop
async def test_weights_without_a_name_are_hidden_and_their_names_reserved(chosen):
    """Catches the service's own names in lists of checkpoints, and a client's checkpoint that expires as if unnamed."""
    async with serving(chosen) as (client, _):
        await client.create()
        kept = await save(client, FIRST, 1)
        listed = await client.answer(ListCheckpoints(MODEL))
        assert listed.checkpoints == []
        refused = await client.ask(ops.SaveWeightsForSampler(MODEL, kept.name), 2)
        assert isinstance(refused, Rejected)
        assert "reserved" in refused.message
        assert not isinstance(await sample(client, FIRST), ops.Failure)
    # Without the journal, no sampling session is left that could use them.
    for file in (chosen.folder / "service").iterdir():
        file.unlink()
    async with running(chosen):
        assert names(chosen) == set()


@in_a_loop
async def test_exports_are_neither_loaded_nor_sampled_from(chosen):
    """Catches a sampling session of an export, whose every sample fails since it "does not exist"."""
    async with serving(chosen) as (client, _):
        await client.create()
        export = (await client.do(ops.SaveFullWeights(MODEL, "out"), 1)).checkpoint
        refused = await client.answer(CreateSamplingSession(None, SESSION, None, export))
        assert_refused(refused, 400, "is an export for other tools: use a checkpoint of weights or sampler_weights")
        assert_refused(await client.do(sampling(ops.CheckpointSampler(export))), 400, "is an export")
        assert_refused(await client.do(ops.LoadWeights(MODEL, export, optimizer=False), 2), 400, "is an export")
