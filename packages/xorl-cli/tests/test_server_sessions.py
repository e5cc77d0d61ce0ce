"""Sessions: searching them, and what is shown of clients that are gone."""

import time

from asynchronous import in_a_loop
from orchestrated import options, over_http, running
from xorl.server.queries import CreateSession, FinishSession


@in_a_loop
async def test_sessions_are_found_by_name_metadata_and_status_page_by_page(tmp_path):
    """Catches a filter that is ignored, and a page that repeats or skips sessions."""
    async with running(options(tmp_path)) as client, over_http(client) as http:
        for number in range(5):
            metadata = {"run": str(number % 2)}
            name = f"Nightly {'math' if number % 2 else 'code'} run"
            await client.orchestrator.answer(CreateSession(f"s{number}", (), metadata, name))
        await client.orchestrator.answer(FinishSession("s1", "errored"))
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
