"""Samples of a worker: how long they may be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from worker_ranks import ask, service_config, worker_of
from xorl.config import ConfigError
from xorl.server.arrays import Array
from xorl.server.messages import BaseSampler, Failure, Sample, SampleResult
from xorl.server.sampler.sampler import BLOCK_SIZE

ADAPTERS = {"enable_lora": True, "lora_rank": 4}


def tokens(length: int) -> Array:
    """A prompt."""
    return Array.of(np.arange(1, length + 1, dtype=np.int32) % 60)


@pytest.mark.multi
def test_a_sample_without_a_limit_takes_the_room_that_there_is(tmp_path: Path, run_ranks) -> None:
    """Catches a limit of the service's own making that its sampler refuses, and an empty place behind a full prompt."""
    with pytest.raises(ConfigError, match="sampler_cache_tokens"):
        service_config(tmp_path, sampler_cache_tokens=BLOCK_SIZE - 1)

    def run() -> None:
        for cache_tokens, limit in ((BLOCK_SIZE, BLOCK_SIZE), (100, 96), (1024, 128)):
            worker = worker_of(service_config(tmp_path, sampler_cache_tokens=cache_tokens, **ADAPTERS))
            for length in (4, limit):
                (result,) = ask(worker, Sample(BaseSampler(), tokens(length), ignore_end=True))
                assert isinstance(result, SampleResult), result
                assert len(result.sequences[0].tokens.numpy()) == limit + 1 - length
            (refused,) = ask(worker, Sample(BaseSampler(), tokens(limit + 1)))
            assert isinstance(refused, Failure)
            assert (refused.status, f"more than the {limit}" in refused.message) == (400, True)

    run_ranks(run, 1)
