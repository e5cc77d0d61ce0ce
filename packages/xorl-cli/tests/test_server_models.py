"""Models and their checkpoints in the orchestrator: saved, released, deleted, and back when they are called."""

import asyncio
import json
import math
import time

import msgspec
import numpy as np

from asynchronous import in_a_loop, until
from counting_workers import folded
from orchestrated import MODEL, SESSION, forward_backward, options, over_http, running, serving, step, submit, workers
from refusals import assert_refused
from xorl.server import operations as ops
from xorl.server import queries
from xorl.server.datum import Array
from xorl.server.identifiers import CheckpointRef, checkpoint_folder
from xorl.server.messages import Ok, Rejected
from xorl.server.orchestrator.operation_properties import EVICTION
from xorl.server.orchestrator.registry import checkpoint_key
from xorl.server.status_queries import GetStatus


@in_a_loop
async def test_an_idle_model_is_saved_and_released_and_comes_back_when_it_is_called(tmp_path):
    """Catches weights or a gradient that are lost with the client's silence, and memory that is never given back."""
    async with serving(options(tmp_path, idle_session_timeout_s=3600.0)) as (client, counting):
        await client.begin()
        await client.do(forward_backward(2), 3)
        await client.answer(queries.FinishSession(SESSION, "success"))
        await until(lambda: MODEL not in counting.models)
        assert (await client.do(step(), 4)).metrics["weights"] == folded(folded(1, 1), 2)
        listed = await client.answer(queries.ListCheckpoints(MODEL))
        assert listed.checkpoints == []


@in_a_loop
async def test_creations_are_requests_like_others_to_a_service_that_is_full_or_has_no_workers(tmp_path):
    """Catches one client whose models fill the queue beyond its limit, or pile up where nobody makes them."""
    creates = [ops.CreateModel(f"m{index}", lora=ops.LoraSpec(rank=8, seed=0)) for index in range(4)]
    async with running(options(tmp_path, max_queued=3, worker_connection_timeout_s=1.0)) as client:
        kept = [await client.send(create, session=None) for create in creates[:3]]
        assert_refused(await client.ask(creates[3], session=None), 429, "3 requests are waiting")
        assert await client.send(creates[0], session=None) == kept[0], "a retry is not another request"
        await until(lambda: client.orchestrator.state.workers.absent_too_long)
        assert [(await client.result(request)).status for request in kept] == [503] * 3
        assert_refused(await client.ask(creates[3], session=None), 503, "workers have been away")


@in_a_loop
async def test_a_model_of_a_client_that_names_no_seed_begins_alike_each_time(tmp_path):
    """Catches a script that gives other numbers each time, by a client that cannot name a seed."""
    begun = []
    for seed in (1, 1, 2):
        chosen = options(tmp_path / str(len(begun)), seed=seed)
        chosen.folder.mkdir(parents=True)
        async with serving(chosen) as (client, counting):
            for name in ("default", "other", "default"):
                await client.do(ops.CreateModel(name, lora=ops.LoraSpec(rank=8)), session=None)
                begun.append(counting.models[name].weights)
                await client.do(ops.UnloadModel(name), 1)
    first, other, *_ = begun
    assert begun[:6] == [first, other, first] * 2
    assert len({first, other, *begun[6:8]}) == 4


@in_a_loop
async def test_a_model_without_a_session_counts_as_one(tmp_path):
    """Catches clients without sessions that have as many models as they like."""
    async with serving(options(tmp_path, max_sessions=2)) as (client, _):
        await client.create()
        alone = [ops.CreateModel(name, lora=ops.LoraSpec(rank=8, seed=0)) for name in ("one", "two")]
        assert isinstance(await client.do(alone[0], session=None), ops.ModelCreated)
        for ask in (submit(alone[1], session=None), queries.CreateSession("session-2")):
            assert_refused(await client.answer(ask), 429, "max_sessions: 2 are open")
        # What takes the place of another, or is within a session, is not one more.
        await client.do(forward_backward(1, model="one"), 1)
        assert isinstance(await client.do(alone[0], session=None), ops.ModelCreated)
        assert isinstance(
            await client.do(ops.CreateModel(f"{SESSION}:train:1", lora=ops.LoraSpec(rank=8))), ops.ModelCreated
        )
        await client.do(ops.UnloadModel("one"))
        assert isinstance(await client.do(alone[1], session=None), ops.ModelCreated)


@in_a_loop
async def test_the_number_of_a_sampling_session_is_used_once(tmp_path):
    """Catches a client that samples from the weights of another call, as which its own was taken."""
    async with serving(options(tmp_path)) as (client, _), over_http(client) as http:
        await client.create()
        for seq, name in enumerate(("one", "two"), start=1):
            await client.do(ops.SaveWeightsForSampler(MODEL, name), seq)
        await client.do(ops.SaveWeightsForSampler(MODEL, None, sampler_id=f"{SESSION}:sample:1"), 3)
        weights = [f"tinker://{MODEL}/sampler_weights/{name}" for name in ("one", "two")]
        for number, body, status in (
            (0, {"model_path": weights[0]}, 200),
            (0, {"model_path": weights[0]}, 200),
            (0, {"model_path": weights[1]}, 400),
            (0, {"base_model": "tiny"}, 400),
            (1, {"base_model": "tiny"}, 400),
            (2, {"base_model": "tiny"}, 200),
            (2, {"base_model": "/models/tiny"}, 200),
        ):
            asked = {"session_id": SESSION, "sampling_session_seq_id": number, **body}
            answer = await http.post("/api/v1/create_sampling_session", json=asked)
            assert answer.status_code == status, (asked, answer.text)
        sampler = await http.get(f"/api/v1/samplers/{SESSION}:sample:0")
        assert sampler.json()["model_path"] == weights[0]


@in_a_loop
async def test_the_first_words_of_a_service_of_full_weights_say_so(tmp_path):
    """Catches a client that believes in an adapter of its own where all share one model's weights."""
    whole = options(tmp_path, enable_lora=False)
    async with serving(whole) as (client, _), over_http(client) as http:
        welcome = (await http.post("/api/v1/create_session", json={"session_id": SESSION})).json()["info_message"]
        assert "full weights of tiny, one model at a time" in welcome
        assert "ignores the rank that a client requests" in welcome
        await client.do(ops.CreateModel(MODEL, lora=ops.LoraSpec(rank=8)))
        info = (await http.post("/api/v1/get_info", json={"model_id": MODEL})).json()
        assert (info["is_lora"], info["lora_rank"]) == (False, None)
    async with running(options(tmp_path / "adapters")) as client, over_http(client) as http:
        assert (await http.post("/api/v1/create_session", json={})).json()["info_message"] is None


@in_a_loop
async def test_saves_are_checked_before_anything_is_written(chosen):
    """Catches a checkpoint that is written over or goes beyond storage_limit, and a refusal that leaves a gap."""
    async with serving(chosen) as (client, counting):
        await client.create()
        saved = await client.do(ops.SaveWeights(MODEL, "a", user_metadata={"note": "x"}), 1)
        assert saved.checkpoint == CheckpointRef(MODEL, "weights", "a")
        assert_refused(await client.do(ops.SaveWeights(MODEL, "a"), 2), 409)
        ran = len(counting.ran)
        client.orchestrator.state.options = msgspec.structs.replace(chosen, storage_limit_bytes=10)
        full = await client.do(ops.SaveWeights(MODEL, "b"), 3)
        assert full.status == 507
        assert "StorageLimitError" in full.message
        assert len(counting.ran) == ran
        listed = await client.answer(queries.ListCheckpoints(MODEL))
        assert [c.user_metadata for c in listed.checkpoints] == [{"note": "x"}]
        client.orchestrator.state.options = chosen
        assert await client.answer(queries.DeleteCheckpoint(saved.checkpoint)) == Ok()
        assert (await client.answer(queries.ListCheckpoints(MODEL))).checkpoints == []
        reserved = await client.ask(ops.SaveWeights(MODEL, "recovery-0"), 4)
        assert reserved.status == 400
        assert (await client.do(step(), 5)).metrics["step"] == 1, "waits for the call that was refused"
        await client.do(ops.UnloadModel(MODEL), None)
        await until(lambda: not list(chosen.folder.glob("weights/*/*")))
        gone = await client.ask(step(), 6)
        assert gone.status == 404


@in_a_loop
async def test_a_folder_of_checkpoints_that_is_a_link_is_used_and_counted(chosen, tmp_path):
    """Catches an operator's larger disk that the service refuses, or that storage_limit does not see."""
    disk = tmp_path / "disk"
    disk.mkdir()
    chosen.folder.mkdir()
    (chosen.folder / "weights").symlink_to(disk)
    async with serving(chosen) as (client, _):
        await client.begin()
        saved = await client.do(ops.SaveWeights(MODEL, "kept"), 3)
        assert [path.name for path in disk.glob("*/*")] == ["kept"]
        (disk / "large").write_bytes(bytes(2**20))
        used = sum(path.stat().st_size for path in chosen.folder.rglob("*") if path.is_file())
        changed = msgspec.structs.replace(chosen, storage_limit_bytes=used + 2**19)
        client.orchestrator.state.options = changed
        assert (await client.do(ops.SaveWeights(MODEL, "more"), 4)).status == 507
        client.orchestrator.state.options = chosen
        assert await client.answer(queries.DeleteCheckpoint(saved.checkpoint)) == Ok()


@in_a_loop
async def test_no_save_goes_beyond_storage_limit_the_first_one_and_the_services_own_neither(tmp_path):
    """Catches a first save of unknown size, an idle model and a stop that fill a disk beyond what was set."""
    chosen = options(tmp_path, storage_limit_bytes=10**9)
    kinds = {"weights": 10**9, "sampler_weights": 10**9, "external_weights": 10**9}
    async with serving(chosen, checkpoint_bytes=kinds) as (client, counting):
        await client.begin()
        for seq, save in enumerate((ops.SaveWeights, ops.SaveWeightsForSampler, ops.SaveFullWeights), start=3):
            assert (await client.do(save(MODEL, "first"), seq)).status == 507
        await client.do(forward_backward(2), 6)
        model = client.orchestrator.state.registry.models[MODEL]
        released = await client.orchestrator._admission.submit_internal(ops.UnloadModel(MODEL), EVICTION)
        assert (await client.result(released)).status == 507
        assert (model.state, list(counting.models)) == ("ready", [MODEL])
        await client.orchestrator.runner.save_models()
        assert not list(chosen.folder.glob("*weights/*/*"))
        num_ran = len(counting.ran)
    async with serving(chosen) as (client, fresh):
        assert (await client.do(step(), 7)).metrics["weights"] == folded(folded(1, 1), 2)
    # Its creation, the steps and the gradients again, after the unloading of nothing.
    assert len(fresh.ran) == num_ran + 2


@in_a_loop
async def test_an_export_in_fp32_is_expected_to_take_twice_what_one_in_bf16_does(tmp_path):
    """Catches an export beyond storage_limit, and one that is refused since the last had wider numbers."""
    kinds = {"external_weights": 6 * 10**8}
    async with serving(options(tmp_path, storage_limit_bytes=10**9), checkpoint_bytes=kinds) as (client, _):
        await client.begin()
        model = client.orchestrator.state.registry.models[MODEL]
        assert (await client.do(ops.SaveFullWeights(MODEL, "wide", dtype="float32"), 3)).status == 507
        assert isinstance(await client.do(ops.SaveFullWeights(MODEL, "narrow"), 4), ops.Saved)
        size = model.checkpoint_bytes["external_weights"]
        assert isinstance(await client.do(ops.SaveFullWeights(MODEL, "wide", dtype="float32"), 5), ops.Saved)
        assert 0 < model.checkpoint_bytes["external_weights"] == size // 2


@in_a_loop
async def test_an_adapter_alone_is_not_expected_to_take_what_a_whole_model_does(tmp_path):
    """Catches an adapter of megabytes that is refused, and a whole model beyond storage_limit after it."""
    kinds = {"external_weights": 2 * 10**9, "sampler_weights": 10**6}
    async with serving(options(tmp_path, storage_limit_bytes=10**9), checkpoint_bytes=kinds) as (client, _):
        await client.begin()
        assert isinstance(await client.do(ops.SaveFullWeights(MODEL, "adapter", is_merged=False), 3), ops.Saved)
        assert (await client.do(ops.SaveFullWeights(MODEL, "whole"), 4)).status == 507


@in_a_loop
async def test_a_disk_that_takes_nothing_refuses_requests_and_keeps_results_until_it_does(tmp_path, monkeypatch):
    """Catches a request that is accepted and not kept, a result that is dropped, and a refused number waited for."""
    monkeypatch.setattr("xorl.server.orchestrator.housekeeping.UNSAVED_RETRY_S", 0.1)
    async with serving(options(tmp_path), delay_s=0.3) as (client, counting):
        await client.create()
        flying = await client.send(forward_backward(1), 1)
        await asyncio.sleep(0.1)
        commit = client.orchestrator.state.journal._commit
        await commit.write(lambda connection: connection.execute("PRAGMA max_page_count = 1"))
        assert_refused(await client.ask(forward_backward(*range(20_000)), 2), 507)
        await commit.write(lambda connection: connection.execute("PRAGMA max_page_count = 1000000"))
        assert (await client.result(flying)).metrics["loss:sum"] == 1
        assert (await client.do(step(), 2)).metrics["weights"] == folded(1, 1)
        assert counting.ran.count(flying) == 1
        # A client that does not repeat the refused request, as tinker's, goes on with the next number.
        await commit.write(lambda connection: connection.execute("PRAGMA max_page_count = 1"))
        assert_refused(await client.ask(forward_backward(*range(20_000)), 3), 507)
        assert "cannot be saved" in (await client.answer(GetStatus())).last_errors[0].message
        await commit.write(lambda connection: connection.execute("PRAGMA max_page_count = 1000000"))
        assert (await client.do(forward_backward(5), 4)).metrics["loss:sum"] == 5


@in_a_loop
async def test_a_service_that_is_stopped_saves_its_models_and_runs_nothing_again(chosen):
    """Catches an orderly stop after which a day of training is run again."""
    async with serving(chosen) as (client, _):
        await client.begin()
        await client.do(forward_backward(2), 3)
        await client.orchestrator.runner.save_models()
    async with serving(chosen) as (client, fresh):
        assert (await client.do(step(), 4)).metrics["weights"] == folded(folded(1, 1), 2)
    # Unload, create from what was saved, the gradient that was left, and the new step.
    assert len(fresh.ran) == 4


@in_a_loop
async def test_a_checkpoint_whose_time_is_over_goes_and_its_model_stays(chosen):
    """Catches a disk that fills with what was to be deleted, and a model that is deleted with it."""
    async with serving(chosen) as (client, _):
        await client.begin()
        await client.do(ops.SaveWeights(MODEL, "short", ttl_s=0.1), 3)
        await asyncio.sleep(0.2)
        client.orchestrator.housekeeping._pruned = -math.inf
        folder = checkpoint_folder(chosen.folder, CheckpointRef(MODEL, "weights", "short"))
        await until(lambda: not folder.exists())
    async with serving(chosen) as (client, _):
        assert await client.weights_after(2, 4) == folded(folded(1, 1), 2)


@in_a_loop
async def test_a_checkpoint_whose_time_is_over_is_gone_for_clients_before_its_files_are(chosen):
    """Catches a ttl that takes effect when somebody comes to clean up."""
    async with serving(chosen) as (client, _):
        await client.begin()
        ask, samplers = client.answer, "sampler_weights"
        trained, sampled = CheckpointRef(MODEL, "weights", "short"), CheckpointRef(MODEL, samplers, "short")
        await client.do(ops.SaveWeights(MODEL, "short", ttl_s=0.1), 3)
        await client.do(ops.SaveWeightsForSampler(MODEL, "short", ttl_s=0.1), 4)
        client.orchestrator.housekeeping._pruned = math.inf
        await asyncio.sleep(0.2)
        assert (await ask(queries.ListCheckpoints(MODEL))).checkpoints == []
        assert isinstance(await ask(queries.GetWeightsInfo(trained)), Rejected)
        assert isinstance(await ask(queries.SetCheckpointTtl(trained, 100.0)), Rejected)
        assert isinstance(await ask(queries.CreateSamplingSession("a:sample:0", None, None, sampled)), Rejected)
        prompt = Array.of(np.arange(3, dtype=np.int32))
        for number, operation in enumerate(
            (
                ops.LoadWeights(MODEL, trained, optimizer=True),
                ops.Sample(ops.CheckpointSampler(sampled), prompt, max_tokens=1),
                ops.Sample(ops.NamedSampler("short"), prompt, max_tokens=1),
            )
        ):
            assert_refused(await client.do(operation, 5 if number == 0 else None), 404)
        assert all(checkpoint_folder(chosen.folder, ref).exists() for ref in (trained, sampled))


@in_a_loop
async def test_a_session_that_nobody_has_used_for_months_goes_with_its_samplers(chosen):
    """Catches records of samplers that are kept for ever, one for each step of each loop that ever ran."""
    async with serving(chosen) as (client, _):
        ask, state = client.answer, client.orchestrator.state
        for session in ("old", "new"):
            await ask(queries.CreateSession(session))
            await ask(queries.CreateSamplingSession(f"{session}:sample:0", session, None, None))
        state.registry.sessions["old"].last_active = 0.0
        await client.orchestrator.housekeeping.tick(time.time())
    async with serving(chosen) as (client, _):
        registry = client.orchestrator.state.registry
        assert (registry.sessions.keys(), registry.samplers.keys()) == ({"new"}, {"new:sample:0"})


@in_a_loop
async def test_checkpoints_that_the_journal_does_not_know_are_what_their_manifests_say(chosen):
    """Catches adapters that clients see as full weights, and names that are not found, after a journal was moved."""
    ref, damaged = (CheckpointRef(model, "sampler_weights", "kept") for model in ("old", "hurt"))
    service = {
        "base": {"name": "tiny"},
        "lora": {"spec": {"rank": 5, "alpha": 7.0}, "seed": 3, "parts": ["attn", "mlp"]},
        "user_metadata": {"run": "x"},
    }
    for checkpoint, manifest in ((ref, {"step": 12, "info": {"service": service}}), (damaged, {"step": 1})):
        folder = chosen.folder / checkpoint.kind / checkpoint.model_id / checkpoint.name
        folder.mkdir(parents=True)
        (folder / "metadata.json").write_text(json.dumps(manifest))
    for _ in range(2):  # found once, and known from then on
        async with serving(chosen) as (client, _):
            info = await client.answer(queries.GetWeightsInfo(ref))
            assert (info.lora, info.step) == (ops.LoraSpec(5, 7.0, 3, train_unembed=False), 12)
            runs = (await client.answer(queries.ListTrainingRuns())).runs
            assert {run.model_id: run.lora_rank for run in runs} == {"old": 5, "hurt": None}
            assert client.orchestrator.state.registry.checkpoints.keys() == {checkpoint_key(ref)}


@in_a_loop
async def test_a_model_over_another_base_is_not_made_again(chosen):
    """Catches an adapter that comes back over other weights because the service was started with them."""
    async with serving(chosen) as (client, _):
        await client.answer(queries.CreateSession(SESSION))
        await client.do(ops.CreateModel(MODEL, base_model="tiny", lora=ops.LoraSpec(rank=8)))
        await client.do(forward_backward(1), 1)
    async with serving(msgspec.structs.replace(chosen, model_name="other", model_path="/models/other")) as (client, _):
        assert_refused(await client.do(step(), 2), 409, "'tiny'")
    async with serving(msgspec.structs.replace(chosen, lora_rank=4)) as (client, counting):
        await client.do(step(), 3)
        assert counting.created[-1].lora.rank == 8


@in_a_loop
async def test_a_model_of_a_checkpoint_is_the_checkpoint_s_adapter(tmp_path):
    """Catches an adapter of attention alone that is made again with all parts, or is said to have them."""
    chosen, other = options(tmp_path), "session-1:train:1"
    parts = {"train_mlp": False, "train_unembed": False, "target_modules": ("q_proj",)}
    async with running(chosen) as client:
        with workers(chosen):
            await client.create(**parts)
            await client.do(ops.SaveWeights(MODEL, "kept"), 1)
            await client.do(
                ops.CreateModel(other, checkpoint=CheckpointRef(MODEL, "weights", "kept"), with_optimizer=True)
            )
            await client.do(forward_backward(1, model=other), 1)
        with workers(chosen) as fresh:
            assert isinstance(await client.do(step(other), 2), ops.OptimResult)
            assert [(one.checkpoint.name, one.lora) for one in fresh.created] == [("kept", None)]
            await client.do(ops.SaveWeights(other, "own"), 3)
        info = await client.answer(queries.GetWeightsInfo(CheckpointRef(other, "weights", "own")))
        assert info.lora == ops.LoraSpec(8, 16.0, 0, **parts)


@in_a_loop
async def test_a_long_tail_is_cut_by_a_save_of_the_services_own(chosen, monkeypatch):
    """Catches a journal that keeps a day of data, and a recovery that takes as long as the training did."""
    monkeypatch.setattr("xorl.server.orchestrator.runner.MAX_TAIL_BYTES", 200)
    async with serving(chosen) as (client, _):
        await client.create()
        for index in range(6):
            await client.do(forward_backward(index), 2 * index + 1)
            await client.do(step(), 2 * index + 2)
        model = client.orchestrator.state.registry.models[MODEL]
        await until(lambda: not client.orchestrator.state.open)
        assert model.num_recoveries > 1
        assert len(client.orchestrator.state.journal.tail(model.lane)) < 6
        await until(lambda: len(list(chosen.folder.glob("weights/*/*"))) == 1)
    async with serving(chosen) as (client, _):
        after = await client.do(step(), 13)
    expected = 1
    for gradient in (*range(6), 0):
        expected = folded(expected, gradient)
    assert after.metrics["weights"] == expected


@in_a_loop
async def test_a_model_that_is_replaced_while_it_is_being_created_makes_way(tmp_path):
    """Catches a new model that fails because the workers had just created the one it replaces."""
    async with serving(options(tmp_path), create_s=0.2) as (client, counting):
        first = ops.CreateModel("default", lora=ops.LoraSpec(rank=8, seed=0))
        await client.send(first, session=None)
        await until(lambda: counting.created)
        second = await client.send(ops.CreateModel("default", lora=ops.LoraSpec(rank=4, seed=1)), session=None)
        assert isinstance(await client.result(second), ops.ModelCreated)
        assert counting.models["default"].weights == 2
