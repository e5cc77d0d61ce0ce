"""The storage that the service uses: measured, limited, and given back."""

import asyncio
import time

import msgspec
import pytest

from asynchronous import in_a_loop, until
from counting_workers import folded
from orchestrated import MODEL, SESSION, forward_backward, options, over_http, running, serving, step, submit, workers
from refusals import assert_refused
from xorl.server import operations as ops
from xorl.server import queries
from xorl.server.identifiers import CheckpointRef, checkpoint_folder
from xorl.server.messages import Ok
from xorl.server.orchestrator import catalogue
from xorl.server.status_queries import GetStatus, GetStorage

OTHER, CREATED = "session-1:train:1", "session-1:train:2"
TRAINED = folded(1, 1)


def ref(name, model=MODEL, kind="weights"):
    return CheckpointRef(model, kind, name)


def folders(chosen):
    """The checkpoints on disk."""
    return {f"{path.parent.name}/{path.name}".replace("~", ":") for path in chosen.folder.glob("*weights/*/*")}


async def prune(client):
    """What housekeeping does every 15 seconds, and the deletions that a save before it has begun."""
    housekeeping, keeping = client.orchestrator.housekeeping, client.orchestrator.state.keeping
    await until(lambda: housekeeping._expiring is None or housekeeping._expiring.done())
    async with keeping:  # a deletion that may have begun before the last save
        pass
    await housekeeping._prune(time.time())
    await housekeeping._expiring
    async with keeping:  # housekeeping leaves kept checkpoints to a deletion that is running
        pass


def fill(client, limit_bytes=10):
    """Make the storage full: no checkpoint may be added."""
    state = client.orchestrator.state
    state.options = msgspec.structs.replace(state.options, storage_limit_bytes=limit_bytes)


@in_a_loop
async def test_the_storage_that_is_used_is_known_by_kind(tmp_path):
    """Catches an operator who learns of hidden checkpoints and of the limit from the first save that fails."""
    chosen = options(tmp_path, storage_limit_bytes=10**7)
    async with serving(chosen) as (client, _):
        await client.begin()
        await client.do(ops.SaveWeights(MODEL, "a"), 3)
        await client.do(ops.SaveWeightsForSampler(MODEL, "a"), 4)
        await client.do(ops.SaveFullWeights(MODEL, "a"), 5)
        hidden = checkpoint_folder(chosen.folder, ref("recovery-0"))
        hidden.mkdir()
        (hidden / "state.json").write_bytes(bytes(1000))
        storage = await client.answer(GetStorage())
        found = {kind.kind: (kind.num_checkpoints, kind.size_bytes) for kind in storage.kinds}
        size = (hidden.parent / "a" / "state.json").stat().st_size
        assert {name: found[name] for name in ("training", "sampler", "external", "recovery")} == {
            "training": (1, size),
            "sampler": (1, size),
            "external": (1, size),
            "recovery": (1, 1000),
        }
        assert found["other"][1] > 4096, "the journal"
        assert storage.limit_bytes == 10**7
        status = await client.answer(GetStatus())
        assert status.storage == storage
        async with over_http(client) as http:
            metrics = (await http.get("/metrics")).text
            assert 'xorl_storage_bytes{kind="recovery"} 1000.0' in metrics
            assert "xorl_storage_limit_bytes 10000000.0" in metrics
            refused = await http.get("/api/v1/billing/usage/checkpoints/current", params={"project_id": "p"})
            assert (refused.status_code, "no projects" in refused.text) == (400, True)


@in_a_loop
async def test_a_checkpoint_that_its_model_needs_can_be_deleted_when_the_storage_is_full(tmp_path):
    """Catches a client that retries a DELETE for ever, since there is no room to save the model elsewhere.

    The case: a model is created, trained for a step, and its session closed; then 000000 is deleted.
    """
    chosen = options(tmp_path, skip_initial_checkpoint=False)
    async with running(chosen) as client:
        with workers(chosen):
            await client.begin()
            await until(lambda: not client.orchestrator.state.open)
            fill(client)
            await client.answer(queries.FinishSession(SESSION, "completed"))
            async with over_http(client) as http:
                url = f"/api/v1/training_runs/{MODEL}/checkpoints/weights/000000"
                assert (await http.delete(url)).status_code == 204
                assert (await http.delete(url)).status_code == 404
            assert (await client.answer(queries.ListCheckpoints(MODEL))).checkpoints == []
        # The workers have died, and the model is restored from what was deleted.
        with workers(chosen):
            assert await client.weights_after(5, 3) == folded(TRAINED, 5)
            fill(client, 10**9)
            await client.do(ops.SaveWeights(MODEL, "000000"), 5)
            await until(lambda: folders(chosen) == {f"{MODEL}/000000"})


@in_a_loop
async def test_overwriting_what_another_model_needs_is_refused_like_any_save_when_the_storage_is_full(tmp_path):
    """Catches an error that clients retry for ever, and that does not say what is full."""
    async with serving(options(tmp_path)) as (client, _):
        await client.begin()
        await client.do(ops.SaveWeights(MODEL, "a"), 3)
        await client.create(OTHER)
        await client.do(ops.LoadWeights(OTHER, ref("a"), optimizer=True), 1)
        fill(client, 10**9)
        # There is storage for the save itself, but not for the larger model that needs the old checkpoint.
        models = client.orchestrator.state.registry.models
        models[OTHER].checkpoint_bytes = {"weights": 10**12}
        refused = await client.do(ops.SaveWeights(MODEL, "a", overwrite=True), 4)
        assert (refused.category, refused.status) == ("user", 507)
        assert refused.message.startswith("StorageLimitError: ")
        assert f"model {OTHER} needs {ref('a').uri('xorl')} to be restored" in refused.message
        models[OTHER].checkpoint_bytes = {}
        assert not isinstance(await client.do(ops.SaveWeights(MODEL, "a", overwrite=True), 5), ops.Failure)


@in_a_loop
async def test_what_others_read_can_be_deleted_and_saved_anew_without_workers_and_storage(chosen):
    """Catches a model that is restored from another checkpoint than it was made from: a newer one of the same name."""
    async with running(chosen) as client:
        with workers(chosen):
            await client.begin()
            await client.do(ops.SaveWeights(MODEL, "kept"), 3)
            await client.create(OTHER)
            await client.do(ops.LoadWeights(OTHER, ref("kept"), optimizer=True), 1)
            await client.do(forward_backward(7, model=OTHER), 2)
            await client.do(ops.CreateModel(CREATED, checkpoint=ref("kept"), with_optimizer=True))
        fill(client)
        assert await client.answer(queries.DeleteCheckpoint(ref("kept"))) == Ok()
        fill(client, 10**9)
        with workers(chosen):
            await client.do(forward_backward(2), 4)
            await client.do(step(), 5)
            await client.do(ops.SaveWeights(MODEL, "kept"), 6)
            assert not isinstance(await client.do(step(OTHER), 3), ops.Failure)
            await client.do(ops.LoadWeights(OTHER, ref("kept"), optimizer=True), 4)
            loads = client.orchestrator.state.registry.models[OTHER].loads.values()
            assert len(set(loads)) == 2
        fill(client)
        assert await client.answer(queries.DeleteCheckpoint(ref("kept"))) == Ok()
    async with serving(chosen) as (client, _):
        assert await client.weights_after(5, 5, OTHER) == folded(folded(TRAINED, 2), 5)
        assert await client.weights_after(5, 1, CREATED) == folded(TRAINED, 5)
        assert await client.weights_after(5, 7) == folded(folded(TRAINED, 2), 5)
        for model, seq in ((OTHER, 7), (CREATED, 3), (MODEL, 9)):
            await client.do(ops.SaveWeights(model, "own"), seq)
        await prune(client)
        assert folders(chosen) == {f"{model}/own" for model in (OTHER, CREATED, MODEL)}


@pytest.mark.parametrize("fails", ["it dies", "the rename"])
@in_a_loop
async def test_an_orchestrator_that_dies_while_it_keeps_a_checkpoint_loses_no_model(tmp_path, monkeypatch, fails):
    """Catches a model whose record names a folder that is not there."""
    chosen, rename = options(tmp_path), catalogue.rename

    def broken(folder, checkpoint, new):
        if fails == "the rename":
            raise OSError("not permitted")

    with workers(chosen):
        async with running(chosen) as client:
            await client.begin()
            await client.do(ops.SaveWeights(MODEL, "kept"), 3)
            monkeypatch.setattr(catalogue, "rename", broken)
            answer = await client.answer(queries.DeleteCheckpoint(ref("kept")))
            assert (answer.status == 507) if fails == "the rename" else (answer == Ok())
    monkeypatch.setattr(catalogue, "rename", rename)
    async with serving(chosen) as (client, _):
        assert await client.weights_after(5, 4) == folded(TRAINED, 5)
        listed = (await client.answer(queries.ListCheckpoints(MODEL))).checkpoints
        assert [one.checkpoint for one in listed] == ([ref("kept")] if fails == "the rename" else [])
        assert len(folders(chosen)) == 1


@in_a_loop
async def test_clients_cannot_see_or_delete_what_recovery_needs(chosen):
    """Catches a deletion that is answered with success and after which another hidden checkpoint appears."""
    async with serving(chosen) as (client, counting):
        await client.begin()
        await client.answer(queries.FinishSession(SESSION, "success"))
        await until(lambda: not counting.models)
        assert folders(chosen) == {f"{MODEL}/recovery-0"}
        hidden = ref("recovery-0")
        for query in (queries.DeleteCheckpoint, queries.GetWeightsInfo):
            assert_refused(await client.answer(query(hidden)), 404)
        assert_refused(await client.answer(queries.SetCheckpointTtl(hidden, 1.0)), 404)
        for operation, seq in (
            (ops.LoadWeights(MODEL, hidden, optimizer=True), 3),
            (ops.CreateModel(OTHER, checkpoint=hidden), None),
        ):
            assert_refused(await client.ask(operation, seq), 404, "no checkpoint")
        assert folders(chosen) == {f"{MODEL}/recovery-0"}
        assert await client.weights_after(5, 4) == folded(TRAINED, 5), "waits for the call that was refused"


@in_a_loop
async def test_a_finished_session_gives_back_what_only_its_recovery_needs(tmp_path):
    """Catches two hidden sets of weights and optimizer state that stay for each run that ever ended."""
    chosen = options(tmp_path, skip_initial_checkpoint=False, finished_session_retention_s=3600.0)
    async with serving(chosen) as (client, counting):
        answer, registry = client.answer, client.orchestrator.state.registry
        await client.begin()
        await client.do(ops.SaveWeightsForSampler(MODEL, "final"), 3)
        await client.do(forward_backward(2), 4)
        await client.do(step(), 5)
        await answer(queries.FinishSession(SESSION, "success"))
        await until(lambda: not counting.models)
        assert folders(chosen) == {f"{MODEL}/{name}" for name in ("000000", "recovery-0", "final")}
        # A client that comes back in time goes on where it was, and its time begins again.
        assert await client.weights_after(5, 6) == folded(folded(TRAINED, 2), 5)
        registry.sessions[SESSION].last_active = time.time() - 3601
        await client.orchestrator.housekeeping.tick(time.time())
        assert registry.models[MODEL].exists
        registry.models[MODEL].last_active = time.time() - 3601
        await until(lambda: not registry.models[MODEL].exists)
        await prune(client)
        assert folders(chosen) == {f"{MODEL}/final"}
        assert not client.orchestrator.state.journal.tail(registry.models[MODEL].lane)
        assert_refused(await answer(submit(step(), 8)), 404, "session is finished")


@in_a_loop
async def test_the_initial_checkpoint_outlives_a_model_that_is_unloaded_for_a_while_only(tmp_path):
    """Catches a checkpoint that no client saved, and that stays for ever."""
    chosen = options(tmp_path, skip_initial_checkpoint=False)
    async with serving(chosen) as (client, _):
        await client.begin()
        await client.do(ops.UnloadModel(MODEL), 3)
        (listed,) = (await client.answer(queries.ListCheckpoints(MODEL))).checkpoints
        assert listed.expires - time.time() == pytest.approx(chosen.finished_session_retention_s, abs=60)
        await client.create(OTHER)
        await until(lambda: not client.orchestrator.state.open)
        await client.do(ops.SaveWeights(OTHER, "000000"), 1)
        await client.do(ops.UnloadModel(OTHER), 2)
        (listed,) = (await client.answer(queries.ListCheckpoints(OTHER))).checkpoints
        assert listed.expires is None, "the client saved this one"


@in_a_loop
async def test_finished_sessions_give_back_their_storage_as_soon_as_a_save_needs_it(tmp_path):
    """Catches saves of all clients that fail since the runs before them have filled the storage with hidden files."""
    size = 10**6
    kinds = {"weights": size, "sampler_weights": size, "external_weights": size}
    chosen = options(tmp_path, storage_limit_bytes=10**9)
    async with serving(chosen, checkpoint_bytes=kinds) as (client, counting):
        answer, registry = client.answer, client.orchestrator.state.registry
        lived, ended = [], []
        for number in range(4):
            session = f"run-{number}"
            await answer(queries.CreateSession(session))
            model = f"{session}:train:0"
            await client.do(ops.CreateModel(model, lora=ops.LoraSpec(rank=8, seed=0)), session=session)
            await client.do(forward_backward(1, model=model), 1)
            await client.do(step(model), 2)
            if number < 3:
                await answer(queries.FinishSession(session, "success"))
            (ended if number < 3 else lived).append(model)
        await until(lambda: list(counting.models) == ["run-3:train:0"])
        for model in ended:
            (checkpoint_folder(chosen.folder, ref("recovery-0", model)) / "optimizer").write_bytes(bytes(size))
        (live,) = lived
        used = sum(path.stat().st_size for path in chosen.folder.rglob("*") if path.is_file())
        # Ending all of them would not make room for this save, so none is ended.
        fill(client, used - 3 * size)
        assert (await client.do(ops.SaveWeights(live, "a"), 3)).status == 507
        assert all(registry.models[model].exists for model in ended)
        fill(client, used + size // 2)
        assert not isinstance(await client.do(ops.SaveWeights(live, "a"), 4), ops.Failure)
        assert [registry.models[model].exists for model in ended] == [False, True, True], "the oldest is enough"
        assert await client.weights_after(5, 3, ended[1]) == folded(TRAINED, 5)
        assert await client.weights_after(5, 5, live) == folded(TRAINED, 5)


@in_a_loop
async def test_a_save_in_place_of_an_expired_checkpoint_does_not_wait_for_itself_when_the_storage_is_full(tmp_path):
    """Catches a save that frees storage by deleting what it is about to replace, and waits for its own lock."""
    chosen, size = options(tmp_path), 10**6
    async with serving(chosen) as (client, _):
        await client.begin()
        await client.do(ops.SaveWeights(MODEL, "last", ttl_s=0.1), 3)
        await client.do(ops.SaveWeightsForSampler(MODEL, "old", ttl_s=0.1), 4)
        client.orchestrator.housekeeping._pruned = float("inf")
        old = checkpoint_folder(chosen.folder, ref("old", kind="sampler_weights"))
        (old / "large").write_bytes(bytes(size))
        await asyncio.sleep(0.2)
        used = sum(path.stat().st_size for path in chosen.folder.rglob("*") if path.is_file())
        fill(client, used - size // 2)
        saved = await client.do(ops.SaveWeights(MODEL, "last", overwrite=True), 5)
        assert not isinstance(saved, ops.Failure), saved
        assert not old.exists()
        listed = (await client.answer(queries.ListCheckpoints(MODEL))).checkpoints
        assert [one.checkpoint for one in listed] == [ref("last")]
