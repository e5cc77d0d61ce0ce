"""An orchestrator in the test's own loop, workers that count, and a client that asks it as the API does."""

import contextlib
import hashlib
import secrets

import httpx
import msgspec
import numpy as np

from counting_workers import CountingWorkers
from xorl.server.api import ApiSettings, create_app
from xorl.server.channel import Limits
from xorl.server.datum import Array, Datum
from xorl.server.messages import Accepted, Finished, Pending, Poll, Submit
from xorl.server.operations import BaseSampler, CreateModel, ForwardBackward, LoraSpec, OptimStep, Sample
from xorl.server.orchestrator import Orchestrator, OrchestratorOptions
from xorl.server.queries import CreateSession

LIMITS = Limits(ping_every_s=0.1, lost_after_s=3.0)
SESSION = "session-1"
MODEL = "session-1:train:0"


def options(tmp_path, **changes):
    values = {
        "api_address": f"ipc://{tmp_path}/api",
        "worker_address": f"ipc://{tmp_path}/workers",
        "output_dir": str(tmp_path / "out"),
        "model_name": "tiny",
        "model_path": "/models/tiny",
        "tokenizer": "tiny",
        "arch": "qwen3",
        "vocab_size": 100,
        "enable_lora": True,
        "skip_initial_checkpoint": True,
        "worker_connection_timeout_s": 20.0,
    }
    return OrchestratorOptions(**(values | changes))


def tokens(*values):
    array = Array.of(np.array(values, dtype=np.int32))
    return [Datum(array, {"target_tokens": Array.of(np.array(values, dtype=np.int64))})]


def forward_backward(*values, model=MODEL, loss="cross_entropy", forward_only=False):
    return ForwardBackward(model, tokens(*values), loss, forward_only=forward_only)


def step(model=MODEL):
    return OptimStep(model, 1e-3)


def sampling(sampler=BaseSampler(), **options):  # noqa: B008 - not changed
    """A sample after a prompt of one token."""
    return Sample(sampler, Array.of(np.array([1], dtype=np.int32)), **options)


def submit(operation, seq=None, *, session=SESSION):
    key = f"{operation.model_id}/{seq}" if seq is not None else None
    if isinstance(operation, CreateModel):
        key = f"create/{operation.model_id}"
    body_hash = hashlib.sha256(msgspec.msgpack.encode(operation)).digest()
    session = session if isinstance(operation, CreateModel) else None
    return Submit(secrets.token_hex(8), operation, "tinker", body_hash, key, seq, session)


class Client:
    """Speaks with an orchestrator in this loop, as the API does."""

    def __init__(self, orchestrator):
        self.orchestrator = orchestrator

    async def answer(self, message):
        return await self.orchestrator.answer(message)

    async def ask(self, operation, seq=None, **extra):
        """The answer to a request, which may be refused."""
        return await self.answer(submit(operation, seq, **extra))

    async def send(self, operation, seq=None, **extra):
        answer = await self.ask(operation, seq, **extra)
        assert isinstance(answer, Accepted), answer
        return answer.request_id

    async def result(self, request_id, timeout_s=20.0):
        for _ in range(round(timeout_s / 0.5)):
            answer = await self.answer(Poll(request_id, 0.5))
            if isinstance(answer, Finished):
                return answer.result
            assert isinstance(answer, Pending), answer
        raise AssertionError(f"{request_id} hangs: {answer}")

    async def do(self, operation, seq=None, **extra):
        return await self.result(await self.send(operation, seq, **extra))

    async def create(self, model=MODEL, **lora):
        await self.answer(CreateSession(SESSION))
        return await self.do(CreateModel(model, lora=LoraSpec(rank=8, seed=0, **lora)))

    async def begin(self):
        """A model after one step of training: its weights are folded(1, 1), and its next number is 3."""
        await self.create()
        await self.do(forward_backward(1), 1)
        await self.do(step(), 2)

    async def weights_after(self, gradient, seq, model=MODEL):
        """A model's weights after a step with this gradient; both have a number, the first of them `seq`."""
        await self.do(forward_backward(gradient, model=model), seq)
        return (await self.do(step(model), seq + 1)).metrics["weights"]


@contextlib.asynccontextmanager
async def running(chosen):
    orchestrator = Orchestrator(chosen, limits=LIMITS)
    await orchestrator.start()
    try:
        yield Client(orchestrator)
    finally:
        await orchestrator.stop()


@contextlib.asynccontextmanager
async def over_http(client):
    """A client of HTTP before an API in this loop, which asks that client's orchestrator."""
    gate = create_app(ApiSettings(client.orchestrator.address))
    transport = httpx.ASGITransport(gate)
    async with (
        gate._app.router.lifespan_context(gate._app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
    ):
        yield http


@contextlib.contextmanager
def workers(chosen, **extra):
    counting = CountingWorkers(chosen.worker_address, chosen.folder, **extra)
    try:
        yield counting
    finally:
        counting.close()


@contextlib.asynccontextmanager
async def serving(chosen, **extra):
    """(client, workers) of an orchestrator that has workers."""
    with workers(chosen, **extra) as counting:
        async with running(chosen) as client:
            yield client, counting


@contextlib.asynccontextmanager
async def training(chosen, **extra):
    """(client, workers) of an orchestrator with a model that has done one step: see `Client.begin`."""
    async with serving(chosen, **extra) as (client, counting):
        await client.begin()
        yield client, counting
