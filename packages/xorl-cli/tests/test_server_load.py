"""Many clients at once: every request ends once, retried and reordered or not, and nothing stays behind in memory.

`tools/bench_service.py` does the same with ten thousand requests over HTTP.
"""

import asyncio
import gc
import random
import secrets
import time
import tracemalloc

import numpy as np

from counting_workers import CountingWorkers, folded
from xorl.server.channel import Limits
from xorl.server.datum import Array, Datum
from xorl.server.messages import Accepted, Finished, Poll, Submit
from xorl.server.operations import CreateModel, ForwardBackward, LoraSpec, OptimStep
from xorl.server.orchestrator import Orchestrator
from xorl.server.orchestrator.journal import Retention

NUM_CLIENTS = 32
ROUNDS = 4  # of three calls and a step; before and after the orchestrator is started again
DATA = [Datum(Array.of(np.array([1, 2, 3], dtype=np.int32)), {})]


async def client(orchestrator, name, start, draw):
    """Rounds of calls, which are sent in any order and now and then twice; returns the weights after each step."""

    async def send(operation, seq):
        submit = Submit(secrets.token_hex(8), operation, "xorl", b"same", f"{name}/{seq}", seq)
        ids = {(await orchestrator.answer(submit)).request_id for _ in range(1 + (draw.random() < 0.1))}
        assert len(ids) == 1
        return ids.pop()

    async def result(request_id):
        while not isinstance(answer := await orchestrator.answer(Poll(request_id, 5.0)), Finished):
            pass
        return answer.result

    weights, seq = [], start
    for _ in range(ROUNDS):
        calls = [(ForwardBackward(name, DATA, "cross_entropy"), seq + index) for index in range(3)]
        calls.append((OptimStep(name, 1e-3), seq + 3))
        draw.shuffle(calls)
        ids = {number: await send(operation, number) for operation, number in calls}
        results = {number: await result(request_id) for number, request_id in ids.items()}
        assert all(results[seq + index].metrics["loss:sum"] == 6 for index in range(3))
        weights.append(results[seq + 3].metrics["weights"])
        seq += 4
    return weights


async def phase(chosen, start):
    """All clients, in one life of the orchestrator; returns what each has seen, and the bytes that were left."""
    orchestrator = Orchestrator(chosen, limits=Limits())
    await orchestrator.start()
    names = [f"client-{index}" for index in range(NUM_CLIENTS)]
    if start == 1:
        for name in names:
            create = CreateModel(name, lora=LoraSpec(seed=0))
            assert isinstance(await orchestrator.answer(Submit(name, create, "xorl", b"")), Accepted)
    clients = [client(orchestrator, name, start, random.Random(name)) for name in names]
    weights = await asyncio.gather(*clients)
    state = orchestrator.state
    assert not state.open
    assert len(state.scheduler) == 0
    await state.journal.prune(time.time() + 1, Retention(0.0, 0.0, 0, 0), {})
    size = state.journal.size_bytes()
    await orchestrator.stop()
    return weights, size


def test_nothing_is_lost_or_doubled_and_memory_stays_flat(chosen):
    """Catches a request that is lost between processes, one that runs twice, and a table that only grows."""
    workers = CountingWorkers(chosen.worker_address, chosen.folder)
    tracemalloc.start()
    try:
        first, size = asyncio.run(phase(chosen, 1))
        workers.ran.clear()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        second, later_size = asyncio.run(phase(chosen, 4 * ROUNDS + 1))
        ran = len(workers.ran), len(set(workers.ran))
        workers.ran.clear()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        workers.close()
    expected = [1]
    for _ in range(2 * ROUNDS):
        expected.append(folded(expected[-1], 18))
    for one, other in zip(first, second, strict=True):
        assert one + other == expected[1:]
    assert ran == (4 * ROUNDS * NUM_CLIENTS, 4 * ROUNDS * NUM_CLIENTS)
    assert grown < 400_000
    # The tail of each model is kept; the rest is used again.
    assert later_size < 2.5 * size
