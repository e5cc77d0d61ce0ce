"""The time a rank waits for others is communication, and not its own forward or backward pass."""

import logging
import time
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tiny_models import hf_config
from xorl.core import runtime
from xorl.core.loss import LossOutput, cross_entropy
from xorl.core.mesh import DataParallelMode, Mesh, ParallelDims
from xorl.core.models import Decoder, spec_for
from xorl.core.optim import build_optimizer
from xorl.core.parallel import ParallelPolicy, parallelize
from xorl.data.batch import Document, collate
from xorl.kernels.head import AnyHead
from xorl.kernels.layout import SequenceLayout
from xorl.train.engine import Engine
from xorl.train.observe import waits

HF_CONFIG = hf_config("gpt2", vocab_size=32, n_embd=16, n_head=2, n_positions=16)
LATE_S = 0.6


def warnings_about(seconds: Mapping[str, float]) -> list[str]:
    """What a run logs whose steps all have these seconds by phase."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    waits.logger.addHandler(handler)
    watch = waits.WaitWatch(torch.device("cpu"), is_sharded=True)
    for _ in range(2 * waits.EVERY_STEPS):
        watch.step(waits.StepWaits(sum(seconds.values()), seconds["comm"], lead=0.0))
    return messages


def seconds_by_phase(mode: DataParallelMode) -> tuple[dict[str, float], list[str]]:
    """Of one step in which rank 1 comes late out of its forward pass, and what is logged about such steps."""
    cpu = torch.device("cpu")
    spec = spec_for(HF_CONFIG)
    with torch.device("meta"):
        model = spec.build(spec.config_from_hf(HF_CONFIG))

    def fill(module: torch.nn.Module) -> None:
        assert isinstance(module, Decoder)
        module.init_weights(0)

    def slow_loss(hidden: Tensor, head: AnyHead, targets: Mapping[str, Tensor], _: SequenceLayout) -> LossOutput:
        time.sleep(LATE_S * runtime.global_rank())
        return cross_entropy(hidden, head, targets)

    policy = ParallelPolicy(data_parallel_mode=mode)
    placed = parallelize(model, Mesh(ParallelDims.resolve(mode, 2), "cpu"), policy, device=cpu, fill=fill)
    optimizer = build_optimizer("adamw", model.named_parameters(), lr=0.1, weight_decay=0.0)
    engine = Engine(placed, optimizer, cpu, max_grad_norm=1.0, flops=sum)
    ids = torch.arange(12, dtype=torch.int32).numpy()
    for _ in range(2):  # the first step sets FSDP2 up
        losses = engine.forward_backward([collate([Document(ids, ids, {})], pad_to_multiple_of=4)] * 2, slow_loss)
        engine.optim_step(0.1, losses.num_trained_tokens)
    seconds = dict(engine.timer.take().seconds(engine.timer.clock))
    return seconds, warnings_about(seconds)


@pytest.mark.parametrize("mode", ["fsdp2", "ddp"])
def test_waiting_for_a_late_rank_is_exposed_communication(mode: DataParallelMode, run_ranks) -> None:
    # Catches waits that are counted as computation, in which an imbalance between ranks cannot be seen.
    (prompt, warnings), (late, other_warnings) = run_ranks(lambda: seconds_by_phase(mode), 2)
    assert late["forward"] > 1.9 * LATE_S
    assert prompt["comm"] > 1.7 * LATE_S
    # Both also wait and compute as long as busy cores make them; of two times LATE_S, half may be lost in that.
    assert late["comm"] < prompt["comm"] - LATE_S
    assert prompt["forward"] + prompt["backward"] < late["forward"] + late["backward"] - LATE_S
    # Catches ranks that read the times at different steps, and a warning that is repeated or logged by every rank.
    assert [warning.split(" takes")[0] for warning in warnings] == ["rank 1"]
    assert other_warnings == []
