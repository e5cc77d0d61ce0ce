"""What the orchestrator tells an operator: which calls run, of whom, and which processes were restarted."""

import asyncio
import time

from asynchronous import in_a_loop
from orchestrated import MODEL, SESSION, forward_backward, options, over_http, running, serving, workers
from xorl.server.queries import GetStatus, ProcessStatus
from xorl.server.restarts import write_restarts


@in_a_loop
async def test_status_says_which_calls_run_of_whom_since_when(tmp_path):
    """Catches an operator who cannot tell whose call holds the workers, and for how long."""
    chosen = options(tmp_path)
    async with serving(chosen, delay_s=1.0) as (client, _):
        await client.create()
        before = time.time()
        request = await client.send(forward_backward(1), 1)
        while not (status := await client.orchestrator.answer(GetStatus())).running:
            await asyncio.sleep(0.02)
        (call,) = status.running
        assert (call.request_id, call.operation, call.model_id) == (request, "ForwardBackward", MODEL)
        assert (call.session_id, call.attempts) == (SESSION, 0)
        assert before <= call.since <= time.time()
        assert status.gauges["oldest_running_call_seconds"] > 0
        async with over_http(client) as http:
            (shown,) = (await http.get("/status.json")).json()["running"]
        assert (shown["request_id"], shown["since"][:2]) == (request, "20")
        await client.result(request)
        status = await client.orchestrator.answer(GetStatus())
        assert (status.running, status.gauges["oldest_running_call_seconds"]) == ([], 0.0)


@in_a_loop
async def test_status_says_what_was_restarted_and_why(tmp_path):
    """Catches a service whose workers die every hour while its page looks as if nothing had happened."""
    file = tmp_path / "restarts.json"
    chosen = options(tmp_path, restarts_file=str(file))
    hung = ProcessStatus("workers", 1, 5.0, "rank 1 was stopped", hung_since=4.0)
    async with running(chosen) as client:
        write_restarts(file, [hung])
        assert (await client.orchestrator.answer(GetStatus())).processes == [hung]
        async with over_http(client) as http:
            (shown,) = (await http.get("/status.json")).json()["processes"]
            metrics = (await http.get("/metrics")).text
        assert (shown["num_restarts"], shown["hung_since"]) == (1, "1970-01-01T00:00:04+00:00")
        assert 'xorl_process_restarts_total{process="workers"} 1.0' in metrics
        assert 'xorl_process_hung{process="workers"} 1.0' in metrics
        with workers(chosen):
            while not client.orchestrator.state.workers.is_ready:
                await asyncio.sleep(0.02)
        (again,) = (await client.orchestrator.answer(GetStatus())).processes
        assert (again.num_restarts, again.hung_since) == (1, None)


@in_a_loop
async def test_workers_that_somebody_else_starts_are_counted_too(tmp_path):
    """Catches workers under torchrun whose restarts nobody sees."""
    chosen = options(tmp_path)
    async with running(chosen) as client:
        for num_restarts in range(2):
            with workers(chosen):
                while (found := client.orchestrator.state.workers).num_restarts < num_restarts or not found.is_ready:
                    await asyncio.sleep(0.02)
                (status,) = (await client.orchestrator.answer(GetStatus())).processes
                assert (status.name, status.num_restarts) == ("workers", num_restarts)
                assert (status.last_restart is None) == (num_restarts == 0)
