"""Options of a service's workers that change what a step is divided by, how rows are filled, and what is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker_ranks import datum, done, service_config, worker_of
from xorl.server.messages import CreateModel, ForwardBackward, LoraSpec, LossResult, OptimResult, OptimStep
from xorl.server.worker.selftest import self_test


@pytest.mark.multi
def test_a_mean_over_tokens_is_a_sum_over_their_number(tmp_path: Path, run_ranks) -> None:
    # Catches options that nothing reads, a mean of means, and a self-test that leaves something behind.
    data = [[datum(5, 0), datum(9, 1)], [datum(12, 2)]]
    changed = {"grad_normalization": "token_mean", "enable_packing": False, "log_gradient_norms": False}

    def step(**options: object) -> tuple[float, dict[str, float]]:
        worker = worker_of(service_config(tmp_path, enable_lora=True, lora_rank=4, **options))
        if options:
            self_test(worker)
        done(worker, CreateModel("m", lora=LoraSpec(rank=3, seed=5)))
        losses = [done(worker, ForwardBackward("m", call, "cross_entropy")) for call in data]
        update = done(worker, OptimStep("m", 1e-2))
        assert isinstance(update, OptimResult)
        return sum(one.metrics["loss:sum"] for one in losses if isinstance(one, LossResult)), update.metrics

    def run() -> None:
        loss, plain = step()
        unpacked, divided = step(**changed)
        assert unpacked == pytest.approx(loss, rel=1e-5)
        assert divided["grad_norm"] == pytest.approx(plain["grad_norm"] / (5 + 9 + 12), rel=1e-5)
        assert divided["step"] == 1
        assert [any("/" in name for name in found) for found in (plain, divided)] == [True, False]

    run_ranks(run, 1)
