"""Sessions: searching them, and what is shown of clients that are gone."""

import time

from asynchronous import in_a_loop
from orchestrated import SESSION, forward_backward, options, over_http, running, serving
from xorl.server.identifiers import CheckpointRef
from xorl.server.operations import CreateModel, Failure, LoraSpec
from xorl.server.queries import CreateSession, FinishSession, GetSession, GetTrainingRun, ListTrainingRuns
from xorl.server.status_queries import GetStatus


@in_a_loop
async def test_sessions_are_found_by_name_metadata_and_status_page_by_page(tmp_path):
    """Catches a filter that is ignored, and a page that repeats or skips sessions."""
    async with running(options(tmp_path)) as client, over_http(client) as http:
        for number in range(5):
            metadata = {"run": str(number % 2)}
            name = f"Nightly {'math' if number % 2 else 'code'} run"
            await client.answer(CreateSession(f"s{number}", (), metadata, name))
        await client.answer(FinishSession("s1", "errored"))
        client.orchestrator.state.registry.sessions["s2"].last_active = time.time() - 3600

        async def found(**body):
            answer = await http.post("/api/v1/sessions/search", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        async def ids(**body):
            return [session["session_id"] for session in (await found(**body))["sessions"]]

        assert await ids() == ["s4", "s3", "s2", "s1", "s0"]
        assert await ids(session_id="s3") == ["s3"]
        assert await ids(display_name="MATH night") == ["s3", "s1"]
        assert await ids(display_name="math", session_id="s0") == ["s3", "s1", "s0"]
        assert await ids(user_metadata={"run": "0"}) == ["s4", "s2", "s0"]
        assert await ids(statuses=[{"type": "active"}]) == ["s4", "s3", "s0"]
        assert await ids(statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == ["s1"]
        assert await ids(statuses=[{"type": "client_finished", "reasons": ["success"]}, {"type": "failed"}]) == []
        pages, cursor = [], None
        while True:
            page = await found(limit=2, **({} if cursor is None else {"cursor": cursor}))
            pages.append([session["session_id"] for session in page["sessions"]])
            if (cursor := page["next_cursor"]) is None:
                break
        assert pages == [["s4", "s3"], ["s2", "s1"], ["s0"]]
        for refused in ({"project_ids": ["p"]}, {"owner": {"type": "user", "owner_urns": ["u"]}}, {"limit": 0}):
            assert (await http.post("/api/v1/sessions/search", json=refused)).status_code == 400


@in_a_loop
async def test_clients_that_are_gone_are_shown_as_such(tmp_path):
    """Catches a list of sessions in which those that run cannot be told from those whose clients died."""
    async with serving(options(tmp_path)) as (client, _):
        for name in ("running", "dead"):
            await client.answer(CreateSession(name))
        await client.do(CreateModel("alone", lora=LoraSpec(rank=8)), session=None)
        registry = client.orchestrator.state.registry
        registry.sessions["dead"].last_active -= 200
        status = await client.answer(GetStatus())
        assert {one.session_id: one.is_gone for one in status.sessions} == {
            "running": False,
            "dead": True,
            "alone": False,
        }
        registry.models["alone"].last_active -= 1000
        status = await client.answer(GetStatus())
        assert [one.session_id for one in status.sessions if one.is_gone] == ["dead", "alone"]


@in_a_loop
async def test_a_model_whose_creation_failed_is_no_training_run(tmp_path):
    """Catches a list of runs with one for each attempt that was refused, for example of a rank that is too high."""
    async with serving(options(tmp_path)) as (client, _):
        await client.create()
        failing = CreateModel(f"{SESSION}:train:1", checkpoint=CheckpointRef("nobody", "weights", "none"))
        assert isinstance(await client.do(failing), Failure)
        ask = client.answer
        assert [run.model_id for run in (await ask(ListTrainingRuns())).runs] == [f"{SESSION}:train:0"]
        assert (await ask(GetSession(SESSION))).model_ids == [f"{SESSION}:train:0"]
        assert (await ask(GetTrainingRun(failing.model_id))).status == 404
        await client.do(forward_backward(1), 1)
