"""The API before an orchestrator that goes and comes: clients see a pause, and polls end when clients expect it."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from answering_orchestrator import SLOW_LOSS, STUCK_LOSS, AnsweringOrchestrator, json_datum, served
from sockets import ipc_address
from xorl.server.api import ApiSettings, create_app
from xorl.server.channel import ChannelServer
from xorl.server.queries import Request

STEP = {"model_id": "m", "seq_id": 1}
DATUM = json_datum([1])


def in_front_of(orchestrator, scenario, **settings):
    """Call scenario(client, start, stop) in the loop that the API runs in; nothing listens until `start`."""

    async def run():
        with ipc_address("orchestrator") as address:
            running = []

            async def start():
                server = ChannelServer(address, Request, orchestrator.answer)
                await server.bind()
                running.append(asyncio.create_task(server.serve()))

            async def stop():
                running.pop().cancel()
                await asyncio.sleep(0.05)

            gate = create_app(ApiSettings(address, **settings))
            async with (
                gate._app.router.lifespan_context(gate._app),
                httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://localhost") as client,
            ):
                await scenario(client, start, stop)

    asyncio.run(run())


def test_a_call_waits_for_the_orchestrator_and_is_told_to_come_back(tmp_path):
    """Catches a restart that a client sees as an error, and a request that hangs where nobody comes."""

    async def scenario(client, start, stop):
        began = time.monotonic()
        assert (await client.post("/api/v1/optim_step", json=STEP)).status_code == 503
        assert 0.8 < time.monotonic() - began < 30
        assert (await client.get("/api/v1/healthz")).status_code == 503
        assert (await client.get("/metrics")).text.endswith("xorl_orchestrator_up 0\n")
        waiting = asyncio.create_task(client.post("/api/v1/optim_step", json=STEP))
        await asyncio.sleep(0.1)
        await start()
        assert (await waiting).status_code == 200
        assert (await client.get("/api/v1/healthz")).json() == {"status": "ok"}

    in_front_of(AnsweringOrchestrator(tmp_path), scenario, patience_s=1.0)


def test_a_poll_goes_on_at_the_next_orchestrator_and_ends_in_time(tmp_path):
    """Catches a result that is lost with the process that was asked for it, and a poll that never ends or too soon."""
    body = {"model_id": "m", "seq_id": 1, "forward_backward_input": {"loss_fn": SLOW_LOSS, "data": [DATUM]}}

    async def scenario(client, start, stop):
        await start()
        request = (await client.post("/api/v1/forward_backward", json=body)).json()
        polling = asyncio.create_task(client.post("/api/v1/retrieve_future", json=request))
        await asyncio.sleep(0.1)
        await stop()
        await start()
        assert (await polling).json()["metrics"]["loss:sum"] == 3 / 64

        await stop()
        began = time.monotonic()
        told = await client.post("/api/v1/retrieve_future", json=request, headers={"x-sdk-version": "0"})
        assert 2 < time.monotonic() - began < 30
        assert (told.status_code, told.json()["queue_state"]) == (408, "paused_capacity")

    in_front_of(AnsweringOrchestrator(tmp_path), scenario, poll_s=2.1)


def test_what_is_open_when_the_service_is_stopped_is_to_be_sent_again(tmp_path):
    """Catches a 500 to whoever waits then, after which some clients give up, and a traceback for each in the log."""
    forward = {"loss_fn": STUCK_LOSS, "data": [DATUM]}
    with ThreadPoolExecutor() as pool:
        with served(tmp_path) as (url, _), httpx.Client(base_url=url, trust_env=False, timeout=20) as http:
            body = {"model_id": "m", "seq_id": 1, "forward_backward_input": forward}
            request = http.post("/api/v1/forward_backward", json=body).json()
            waiting = pool.submit(httpx.post, f"{url}/api/v1/retrieve_future", json=request, timeout=20)
            time.sleep(0.3)
        answer = waiting.result()
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
    assert "retry the request" in answer.json()["detail"]
