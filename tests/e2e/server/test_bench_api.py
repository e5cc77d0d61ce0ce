"""The tool that times training through the service sends what the service takes."""

import asyncio
import itertools

import bench_api


def test_a_loop_that_sends_ahead_is_timed(service):
    """Catches a tool that fails for the first time on the GPU that was rented for it."""
    rows = [list(range(1, 17)), list(range(20, 30))]
    timed = asyncio.run(bench_api.train(service.url, "xorl/quickstart", rows, 4))
    assert len(timed.done) == len(timed.acknowledged_s) == 4
    assert all(earlier < later for earlier, later in itertools.pairwise(timed.done))
    table = bench_api.table({"lora": {"local training": [8.0], "service": [7.0, 6.0]}}, {"lora": timed.acknowledged_s})
    assert "| lora | service | 6 | 0.812 |" in table
