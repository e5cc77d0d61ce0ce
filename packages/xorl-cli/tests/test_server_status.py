"""What the orchestrator tells an operator: which calls run, of whom, and which processes were restarted."""

import asyncio
import json
import time
from datetime import datetime

import numpy as np

from answering_orchestrator import served
from asynchronous import in_a_loop, until
from orchestrated import MODEL, SESSION, forward_backward, options, over_http, running, serving, workers
from xorl.cli.serve import status_text
from xorl.server import operations as ops
from xorl.server.datum import Array
from xorl.server.orchestrator.progress import ProgressLog
from xorl.server.orchestrator.state import Counters
from xorl.server.queries import CreateSession
from xorl.server.restarts import write_restarts
from xorl.server.status_queries import ErrorSeen, GetStatus, ProcessStatus


@in_a_loop
async def test_status_says_which_calls_run_of_whom_since_when(tmp_path):
    """Catches an operator who cannot tell whose call holds the workers, and for how long."""
    async with serving(options(tmp_path), delay_s=1.0) as (client, _):
        await client.create()
        before = time.time()
        request = await client.send(forward_backward(1), 1)
        while not (status := await client.answer(GetStatus())).running:
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
        status = await client.answer(GetStatus())
        assert (status.running, status.gauges["oldest_running_call_seconds"]) == ([], 0.0)


@in_a_loop
async def test_status_says_what_was_restarted_and_why(tmp_path):
    """Catches a service whose workers die every hour while its page looks as if nothing had happened."""
    file = tmp_path / "restarts.json"
    chosen = options(tmp_path, restarts_file=str(file))
    hung = ProcessStatus("workers", 1, 5.0, "rank 1 was stopped", hung_since=4.0)
    async with running(chosen) as client:
        write_restarts(file, [hung])
        assert (await client.answer(GetStatus())).processes == [hung]
        async with over_http(client) as http:
            (shown,) = (await http.get("/status.json")).json()["processes"]
            metrics = (await http.get("/metrics")).text
        assert (shown["num_restarts"], shown["hung_since"]) == (1, "1970-01-01T00:00:04+00:00")
        assert 'xorl_process_restarts_total{process="workers"} 1.0' in metrics
        assert 'xorl_process_hung{process="workers"} 1.0' in metrics
        with workers(chosen):
            await until(lambda: client.orchestrator.state.workers.is_ready)
        (again,) = (await client.answer(GetStatus())).processes
        assert (again.num_restarts, again.hung_since) == (1, None)


@in_a_loop
async def test_workers_that_somebody_else_starts_are_counted_too(chosen):
    """Catches workers under torchrun whose restarts nobody sees."""
    async with running(chosen) as client:
        for num_restarts in range(2):
            with workers(chosen):
                while (found := client.orchestrator.state.workers).num_restarts < num_restarts or not found.is_ready:
                    await asyncio.sleep(0.02)
                (status,) = (await client.answer(GetStatus())).processes
                assert (status.name, status.num_restarts) == ("workers", num_restarts)
                assert (status.last_restart is None) == (num_restarts == 0)


@in_a_loop
async def test_status_adds_up_the_running_calls_of_one_kind_and_client(tmp_path):
    """Catches a page that says 128 times the same word in place of what runs."""
    sample = ops.Sample(ops.BaseSampler(), Array.of(np.array([1], np.int32)), max_tokens=100)
    async with serving(options(tmp_path), token_s=0.01) as (client, _), over_http(client) as http:
        await client.create()
        before = time.time()
        samples = [await client.ask(sample, session=None) for _ in range(5)]
        while len(calls := (await http.get("/status.json")).json()["running"]) != 1 or calls[0]["num_calls"] < 4:
            assert time.time() < before + 20, calls
            await asyncio.sleep(0.01)
        assert (calls[0]["operation"], calls[0]["model_id"], calls[0]["session_id"]) == ("Sample", None, "samples")
        assert before - 1 <= datetime.fromisoformat(calls[0]["since"]).timestamp() <= time.time()
        for one in samples:
            await client.result(one.request_id)


@in_a_loop
async def test_status_says_whose_models_there_are_and_how_far_they_are(chosen):
    """Catches an operator who sees a name, but not who trains, since when, at which step, and if it still runs."""
    async with running(chosen) as client, over_http(client) as http:
        user = {"user": "ada", "run": "7"}
        await client.answer(CreateSession(SESSION, user_metadata=user, display_name="first try"))
        with workers(chosen):
            await client.begin()
            await client.do(
                ops.CreateModel("alone", lora=ops.LoraSpec(rank=4), user_metadata={"of": "bob"}), session=None
            )
            status = (await http.get("/status.json")).json()
        alone, mine = status["models"]
        assert (mine["model_id"], mine["session_id"], mine["state"]) == (MODEL, SESSION, "ready")
        assert (mine["num_steps"], mine["lora_rank"], mine["num_requests"]) == (1, 8, 0)
        assert (mine["losses"], mine["learning_rate"]) == ([None], 1e-3)
        assert mine["created"] <= mine["last_step"] <= alone["created"]
        assert (alone["session_id"], alone["losses"], alone["last_step"]) == (None, [], None)
        session = next(one for one in status["sessions"] if one["session_id"] == SESSION)
        assert (session["display_name"], session["user_metadata"]) == ("first try", user)
        assert next(one for one in status["sessions"] if one["session_id"] == "alone")["user_metadata"] == {"of": "bob"}
        with workers(chosen):
            while (health := client.orchestrator.state.workers).num_restarts < 1 or not health.is_ready:
                await asyncio.sleep(0.02)
            states = [model["state"] for model in (await http.get("/status.json")).json()["models"]]
            assert states == ["absent", "absent"]


def test_a_loss_of_a_step_is_the_mean_over_the_tokens_of_its_passes():
    """Catches a curve of sums that jumps with the size of the batch, and one of passes that trained nothing."""
    log, pass_ = ProgressLog(), ops.ForwardBackward("m", [], "cross_entropy")

    def loss(total, num_trained):
        return ops.LossResult("", {}, {"loss:sum": total, "valid_tokens:sum": num_trained})

    def step(grad_norm=0.5):
        log.note("m", ops.OptimStep("m", 1e-3), ops.OptimResult({"grad_norm": grad_norm}))

    log.note("m", pass_, loss(6.0, 2.0))
    log.note("m", pass_, loss(3.0, 1.0))
    log.note("m", ops.ForwardBackward("m", [], "cross_entropy", forward_only=True), loss(100.0, 1.0))
    step()
    assert (list(log.of("m").losses), log.of("m").grad_norm, log.of("m").learning_rate) == ([3.0], 0.5, 1e-3)
    log.note("m", pass_, loss(100.0, 1.0))
    log.note("m", ops.AbortGradients("m"), ops.GradientsAborted("m", 1))
    log.note("m", pass_, loss(float("nan"), 1.0))
    step(float("inf"))
    step()
    log.note("m", pass_, loss(1.0, 2.0))
    step()
    assert list(log.of("m").losses) == [3.0, None, None, 0.5]
    for _ in range(200):
        step()
    assert len(log.of("m").losses) == 100
    log.keep({"other"})
    assert (list(log.of("m").losses), log.of("m").last_step) == ([], None)


def test_the_throughput_of_the_last_ten_minutes_is_kept_in_intervals(monkeypatch):
    """Catches a history that grows without end, or one whose newest interval is not over."""
    counters, now = Counters(), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    counters.count_tokens(500)
    now = 1011.0
    counters.count_tokens(10)
    assert counters.token_rates() == [0.0] * 59 + [50.0]
    now = 2000.0
    assert (counters.token_rates(), len(counters._intervals)) == ([0.0] * 60, 0)


def test_the_command_line_shows_a_history_in_one_line(tmp_path):
    """Catches a status of which a hundred numbers fill the terminal, one a line, and text that is changed with them."""
    message = "it has [\n 1,  2] and {}"
    with served(tmp_path) as (url, orchestrator):
        orchestrator.models["m"] = None
        orchestrator.errors.append(ErrorSeen(time.time(), "m", "OptimStep", message))
        shown = status_text(url, None)
    assert '"losses": [ 3.5, null, 2.25 ],' in shown
    assert '"token_rates": [ 0.0, 100.0, 1234.5 ],' in shown
    assert json.loads(shown)["last_errors"][0]["message"] == message
