"""What the orchestrator does beside requests, and what workers do whose answer nobody waits for any more."""

import asyncio
import math
import time

from asynchronous import in_a_loop, until
from counting_workers import folded
from orchestrated import MODEL, forward_backward, options, running, serving, step, training, workers
from refusals import assert_refused
from xorl.server.identifiers import CheckpointRef, checkpoint_folder
from xorl.server.operations import Failure, SaveWeights
from xorl.server.orchestrator import catalogue


@in_a_loop
async def test_what_the_workers_do_for_a_request_that_was_given_up_is_not_in_its_model(chosen, tmp_path):
    """Catches a gradient of a call of which the client was told that it did not run."""
    with workers(chosen, delay_s=0.5) as counting:
        async with running(chosen) as client:
            await client.begin()
            given_up = await client.send(forward_backward(2), 3)
            await asyncio.sleep(0.3)
        elsewhere = options(tmp_path, worker_address=f"ipc://{tmp_path}/nobody", worker_connection_timeout_s=0.1)
        async with running(elsewhere) as client:
            assert_refused(await client.result(given_up), 503, "did not run")
        assert counting.models[MODEL].gradient == 2
        async with running(chosen) as client:
            assert await client.weights_after(3, 4) == folded(folded(1, 1), 3)


@in_a_loop
async def test_a_service_whose_workers_are_gone_stops_at_once_and_goes_on_where_it_was(chosen):
    """Catches a service that waits for workers once for each model when it stops, and fails what the next one can run.

    Nobody starts workers again while the service stops.
    """
    async with running(chosen) as client:
        with workers(chosen, delay_s=1.0):
            await client.begin()
            await client.create("another")
            request = await client.send(forward_backward(2), 3)
            await until(lambda: client.orchestrator.state.open[request].is_running)
        await asyncio.wait_for(client.orchestrator.runner.save_models(), 10.0)
    async with serving(chosen) as (client, _):
        assert not isinstance(await client.result(request), Failure)
        assert (await client.do(step(), 4)).metrics["weights"] == folded(folded(1, 1), 2)


@in_a_loop
async def test_a_checkpoint_that_cannot_be_removed_keeps_no_other_one(tmp_path, monkeypatch, caplog):
    """Catches a disk that fills since the first checkpoint whose time is over cannot be removed, and nobody knows."""
    chosen, delete = options(tmp_path), catalogue.delete

    def refused(folder, checkpoint):
        if checkpoint.name == "first":
            raise PermissionError("the folder is another user's")
        return delete(folder, checkpoint)

    monkeypatch.setattr(catalogue, "delete", refused)
    async with training(chosen) as (client, _):
        for seq, name in ((3, "first"), (4, "second"), (5, "last")):
            assert not isinstance(await client.do(SaveWeights(MODEL, name, ttl_s=None), seq), Failure)
        for record in client.orchestrator.state.registry.checkpoints.values():
            record.expires = 1.0 if record.checkpoint.name != "last" else None
        client.orchestrator.housekeeping._pruned = -math.inf
        second = checkpoint_folder(chosen.folder, CheckpointRef(MODEL, "weights", "second"))
        await until(lambda: not second.exists())
    assert "another user's" in caplog.text


@in_a_loop
async def test_a_service_that_looks_for_its_workers_no_more_ends(tmp_path, monkeypatch, caplog):
    """Catches a service that says for ever that its workers are being started."""
    stopped = asyncio.Event()
    async with serving(options(tmp_path)) as (client, _):
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.get_running_loop(), "stop", stopped.set)
            await client.create()
            client.orchestrator.state.workers._last_health_check = None
            await asyncio.wait_for(stopped.wait(), 5)
    assert "event=orchestrator_broken" in caplog.text


@in_a_loop
async def test_a_clock_that_is_set_gives_up_no_request(tmp_path):
    """Catches requests that fail since the machine's clock was set forward while one before them was on its way."""
    async with serving(options(tmp_path)) as (client, _):
        housekeeping = client.orchestrator.housekeeping
        await client.create()
        request = await client.send(forward_backward(1), 2)
        await housekeeping.tick(time.time())
        await housekeeping.tick(time.time() + 86400.0)
        await client.do(forward_backward(2), 1)
        assert (await client.result(request)).metrics["loss:sum"] == 1
