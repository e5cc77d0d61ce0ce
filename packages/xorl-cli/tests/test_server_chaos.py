"""Training while orchestrator and workers die at any moment: every call counts once, in its order."""

import asyncio
import random

import pytest

from asynchronous import in_a_loop
from counting_workers import CountingWorkers, folded
from orchestrated import LIMITS, SESSION, Client, forward_backward, options, step
from xorl.server.operations import AbortGradients, Failure, SaveWeights, UnloadModel
from xorl.server.orchestrator import Orchestrator
from xorl.server.orchestrator.operation_properties import EVICTION

MODELS = [f"{SESSION}:train:{index}" for index in range(3)]


class Expected:
    """What a model's weights must be after each of its calls, computed without any service."""

    def __init__(self):
        self.weights, self.gradient, self.seq = 1, 0, 0

    def call(self, kind, model, draw):
        """The next operation, and what a step's result must say."""
        self.seq += 1
        if kind == "step":
            self.weights, self.gradient = folded(self.weights, self.gradient), 0
            return step(model), self.weights
        if kind == "save":
            return SaveWeights(model, draw.choice(["a", "b"]), overwrite=True), None
        if kind == "abort":
            self.gradient = 0
            return AbortGradients(model), None
        value = draw.randrange(1000)
        self.gradient += value
        return forward_backward(value, model=model), None


async def chaos(chosen, seed):
    """Random calls and random deaths; returns nothing, and raises where a result is not what it must be."""
    draw = random.Random(seed)
    workers = CountingWorkers(chosen.worker_address, chosen.folder, delay_s=0.01)
    orchestrator = Orchestrator(chosen, limits=LIMITS)
    await orchestrator.start()
    expected = {model: Expected() for model in MODELS}
    client, sent = Client(orchestrator), []
    for model in MODELS:
        await client.create(model)
    for _ in range(45):
        kinds = ["fb", "fb", "step", "save", "abort", "release", "orchestrator", "workers", "results"]
        kind = draw.choices(kinds, weights=[8, 8, 8, 2, 1, 1, 1, 1, 2])[0]
        model = draw.choice(MODELS)
        if kind == "orchestrator":
            await orchestrator.stop()
            orchestrator = Orchestrator(chosen, limits=LIMITS)
            await orchestrator.start()
            client = Client(orchestrator)
        elif kind == "workers":
            workers.close()
            workers = CountingWorkers(chosen.worker_address, chosen.folder, delay_s=0.01)
        elif kind == "release":
            await orchestrator._admission.submit_internal(UnloadModel(model), EVICTION)
        elif kind == "results":
            await asyncio.sleep(draw.random() * 0.1)
        else:
            operation, weights = expected[model].call(kind, model, draw)
            for _ in range(draw.choice([1, 1, 2])):
                request_id = await client.send(operation, expected[model].seq)
            sent.append((request_id, weights))
    for model in MODELS:
        operation, weights = expected[model].call("step", model, draw)
        sent.append((await client.send(operation, expected[model].seq), weights))
    for request_id, weights in sent:
        result = await client.result(request_id)
        assert not isinstance(result, Failure), result
        assert weights is None or result.metrics["weights"] == weights
    await orchestrator.stop()
    workers.close()


@pytest.mark.parametrize("seed", range(2))
@in_a_loop
async def test_calls_count_once_whoever_dies_between_them(tmp_path, seed):
    """Catches, whatever the order of deaths: a gradient lost or added twice, a step taken twice, a save that mixes."""
    await chaos(options(tmp_path, worker_max_retries=100), seed)
