"""Weights that are sent to inference servers: the bytes that arrive, and what is left behind where one fails."""

import time
import weakref
from collections.abc import Callable, Mapping

import pytest
import torch

from engines import FakeEngine, described, fake_engines
from placement import num_ranks, placed, whole
from tiny_models import hf_config
from xorl.ckpt.layout import TensorRecord
from xorl.ckpt.tensor_file import TensorGroup
from xorl.core.models import spec_for
from xorl.core.parallel import ParallelModel
from xorl.train.export.hf_weights import hf_groups
from xorl.train.sync import ReceiverAddress, SyncOptions, SyncOutcome, Timeouts, WeightSender

HF_CONFIG = hf_config(vocab_size=67)
SPEC = spec_for(HF_CONFIG)
CONFIG = SPEC.config_from_hf(HF_CONFIG)
RECIPES = SPEC.recipes(CONFIG, merge_qkv=True)
TIMEOUTS = Timeouts(connect_s=5, group_s=30, bucket_s=5, control_s=10, flush_s=0.1)
# Small enough that there are several buckets, and that the embedding is larger than one.
OPTIONS = SyncOptions(bucket_bytes=8000, weight_version="7", timeouts=TIMEOUTS)
NUM_BUCKETS = 7


def expected(model: ParallelModel, dtype: torch.dtype) -> dict[str, dict[str, object]]:
    """What a server should hold: the parameters as the recipes take them apart."""
    found: dict[str, dict[str, object]] = {}
    for native, parameter in model.module.named_parameters():
        found |= described(RECIPES[native].split(whole(parameter).to(dtype)))
    return found


def addresses(engines: list[FakeEngine], ranks: int = 1) -> list[ReceiverAddress]:
    return [ReceiverAddress("127.0.0.1", engine.port, ranks) for engine in engines]


def sync(model: ParallelModel, to: list[ReceiverAddress], options: SyncOptions = OPTIONS) -> SyncOutcome | None:
    groups = hf_groups(model, RECIPES, dtype=torch.bfloat16, device=torch.device("cpu"))
    return WeightSender(torch.device("cpu")).send(groups, to, options)


@pytest.mark.parametrize("layout", ["none", "zero3-2", "hsdp-2x2"])
def test_servers_get_the_bytes_of_the_weights(layout: str, run_ranks: Callable) -> None:
    # Catches shards sent as wholes, fused weights sent as such, other names, a wrong order, and lost gradients.
    with fake_engines(["--ranks", "2"], ["--ranks", "2"]) as engines:

        def run() -> tuple[dict, SyncOutcome | None, bool]:
            model = placed(HF_CONFIG, layout)
            for parameter in model.module.parameters():
                parameter.grad = torch.ones_like(parameter)
            outcome = sync(model, addresses(engines, ranks=2))
            kept = all(bool((whole(p.grad) == 1).all()) for p in model.module.parameters())
            return expected(model, torch.bfloat16), outcome, kept

        (wanted, outcome, _), *others = run_ranks(run, num_ranks(layout))
        assert outcome is not None
        assert outcome.success, outcome
        assert all(other[1] is None for other in others)
        assert all(kept for *_, kept in [(wanted, outcome, True), *others])
        for engine in engines:
            seen = engine.seen()
            assert seen["tensors"] == wanted
            assert seen["version"] == "7"
            assert len(seen["order"]) == len(wanted)
            assert len(seen["buckets"]) == outcome.num_buckets == NUM_BUCKETS
            assert sum(seen["buckets"]) == outcome.num_bytes
            assert not seen["is_paused"]
            assert not seen["groups"]
            updates = ["/update_weights_from_distributed"] * outcome.num_buckets
            assert seen["calls"] == [
                "/init_weights_update_group",
                "/pause_generation",
                *updates,
                "/flush_cache",
                "/continue_generation",
                "/destroy_weights_update_group",
            ]


def test_a_part_of_the_model_is_in_memory_at_a_time(run_ranks: Callable) -> None:
    # Catches weights that are all made before the first is sent, or that stay until the last is.
    alive: list[weakref.ref] = []
    most = []

    def group(name: str) -> TensorGroup:
        def make() -> dict[str, torch.Tensor]:
            most.append(sum(each() is not None for each in alive))
            tensor = torch.ones(1000)
            alive.append(weakref.ref(tensor))
            return {name: tensor}

        return TensorGroup({name: TensorRecord((1000,), "float32")}, make)

    with fake_engines([]) as (engine,):

        def run() -> tuple[SyncOutcome | None, list[int]]:
            groups = [group(f"w{index}") for index in range(12)]
            return WeightSender(torch.device("cpu")).send(groups, addresses([engine]), OPTIONS), most

        [(outcome, held)] = run_ranks(run, 1)
        assert outcome is not None
        assert (outcome.success, outcome.num_buckets) == (True, 6)
        assert held == [0] * 12


def test_hosts_that_are_none_fail_alone(run_ranks: Callable) -> None:
    # Catches a rank that raises for an address, while the others wait for it.
    with fake_engines([]) as (engine,):
        to = [*addresses([engine]), ReceiverAddress("no host", 1), ReceiverAddress("127.0.0.1", 99_999)]
        (outcome, _) = run_ranks(lambda: sync(placed(HF_CONFIG, "zero3-2"), to), 2)
        assert [each.success for each in outcome.receivers] == [True, False, False], outcome
        assert [each.weights for each in outcome.receivers] == ["new", "old", "old"]
        assert "set master_address" in outcome.receivers[1].message


FAILURES: Mapping[str, tuple[list[str], str, str, bool]] = {
    # fault: (arguments, weights it is left with, part of the message, whether it goes on)
    "dies before a bucket": (["--die-at-bucket", "2"], "mixed", "receiving weights: /update_weights", False),
    "dies after a bucket": (["--die-after-bucket", "2"], "mixed", "receiving weights: /update_weights", False),
    "dies at the last": (
        ["--die-after-bucket", str(NUM_BUCKETS - 1)],
        "mixed",
        "receiving weights: /update_weights",
        False,
    ),
    "hangs": (["--hang-at-bucket", "2"], "mixed", "no answer within 5 s", False),
    "refuses a bucket": (["--refuse-bucket", "1"], "mixed", "bucket 1 was told to fail", False),
    "does not pause": (["--refuse", "/pause_generation"], "old", "pausing: /pause_generation: HTTP 400", True),
    "does not join": (["--refuse", "/init_weights_update_group"], "old", "joining the group: /init", True),
    "does not flush": (["--flush-fails"], "new", "flushing the cache, after all new weights were loaded", True),
}


@pytest.mark.parametrize("fault", FAILURES)
def test_one_server_fails_and_the_other_goes_on(fault: str, run_ranks: Callable) -> None:
    # Catches a rank that waits for the dead, a server that serves half-new weights, and one failure that is everyone's.
    arguments, weights, message, goes_on = FAILURES[fault]
    with fake_engines(arguments, []) as engines:

        def run() -> tuple[dict, SyncOutcome | None, float]:
            model = placed(HF_CONFIG, "zero3-2")
            start = time.monotonic()
            outcome = sync(model, addresses(engines))
            return expected(model, torch.bfloat16), outcome, time.monotonic() - start

        (wanted, outcome, seconds), (_, _, other_seconds) = run_ranks(run, 2)
        assert outcome is not None
        failed, sound = outcome.receivers
        assert (failed.weights, failed.success, sound.success, sound.weights) == (weights, False, True, "new"), outcome
        assert message in failed.message
        assert max(seconds, other_seconds) < TIMEOUTS.group_s, "a time-out of the server at most"
        seen = engines[1].seen()
        assert seen["tensors"] == wanted
        assert (seen["is_paused"], seen["version"]) == (False, "7")
        if "dies" not in fault:
            seen = engines[0].seen()
            assert ("/continue_generation" in seen["calls"]) == (goes_on and fault != "does not join")
            assert seen["is_paused"] == (weights == "mixed")
            assert seen["version"] == ("7" if weights == "new" else "default")
            assert not seen["groups"]


def test_a_whole_sync_mends_what_a_broken_one_left(run_ranks: Callable) -> None:
    # Catches groups, ports and names that a failed sync leaves taken.
    with fake_engines(["--refuse-bucket", "1"], []) as engines:
        options = SyncOptions(bucket_bytes=8000, weight_version="8", timeouts=TIMEOUTS)

        def run() -> tuple[list[SyncOutcome | None], dict]:
            model, sender = placed(HF_CONFIG, "zero3-2"), WeightSender(torch.device("cpu"))
            outcomes = []
            for to in (addresses(engines), addresses(engines[:1])):
                groups = hf_groups(model, RECIPES, dtype=torch.bfloat16, device=torch.device("cpu"))
                outcomes.append(sender.send(groups, to, options))
            return outcomes, expected(model, torch.bfloat16)

        ([first, second], wanted), _ = run_ranks(run, 2)
        assert [each.weights for each in first.receivers] == ["mixed", "new"]
        assert second.success
        seen = engines[0].seen()
        assert (seen["is_paused"], seen["version"]) == (False, "8")
        assert seen["tensors"] == wanted
