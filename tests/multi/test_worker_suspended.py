"""Passes and samples that give way to other work: what they compute is what they compute undisturbed."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from worker_ranks import ADAPTER, ask, datum, done, gradients, make, saved_by, values
from xorl.core import runtime
from xorl.server import operations as ops
from xorl.server.datum import Array
from xorl.server.messages import CANCELLED, Resume, Suspended, Work
from xorl.server.worker import adapters, full, interrupts
from xorl.server.worker.interrupts import Interrupts
from xorl.server.worker.worker import Worker

# Only rank 0 knows what waits.
BUSY = Interrupts(others_wait=lambda: runtime.global_rank() == 0)
EARLIER = ops.ForwardBackward("m", [datum(20, 99)], "cross_entropy")
# Several rows of 64 tokens on each of two ranks.
LONG = ops.ForwardBackward("m", [datum(30 + seed, seed, weights=0.5 + seed) for seed in range(12)], "cross_entropy")
FORWARD = ops.ForwardBackward("m", LONG.data, "cross_entropy", forward_only=True)


@pytest.fixture(autouse=True)
def every_opportunity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes and samples may give way at once."""
    monkeypatch.setattr(interrupts, "MIN_SLICE_S", 0.0)


def turns(
    worker: Worker, name: str, operation: ops.ForwardBackward | ops.Sample, between: Callable[[int], None]
) -> object:
    """The result of an operation that gives way at every opportunity, and how often it did; collective."""
    work, num_turns = Work([name], [operation], may_suspend=True), 0
    while True:
        (result,) = worker.run(work, BUSY)
        if not isinstance(result, Suspended):
            return result, num_turns
        assert 0 <= result.done < 1
        between(num_turns)
        num_turns += 1
        work = Work([name], [operation if isinstance(operation, ops.Sample) else Resume()], may_suspend=True)


def disturb(worker: Worker, kind: str) -> Callable[[int], None]:
    """Other models and samples; so many models that the suspended one has to leave the device."""

    def between(turn: int) -> None:
        if kind == "full":
            done(worker, ops.Sample(ops.BaseSampler(), datum(5).tokens, max_tokens=2))
            return
        other = f"other{turn % 4}"
        done(worker, ops.ForwardBackward(other, [datum(9, turn)], "cross_entropy"), ops.OptimStep(other, 1e-2))

    return between


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_pass_in_turns_computes_what_it_computes_at_once(kind: str, tmp_path: Path, run_ranks, monkeypatch) -> None:
    # Catches values, metrics, gradients or counts that depend on when a pass gave way or on what ran meanwhile.
    monkeypatch.setattr(full, "ROWS_PER_REDUCTION", 2)

    def run() -> list[tuple[object, object, dict[str, Tensor], dict[str, float]]]:
        found = []
        for is_disturbed in (False, True):
            options = {"data_parallel_shard_size": 2} if kind == "full" else {"data_parallel_replicate_size": 2}
            worker = make(tmp_path / str(is_disturbed), kind, **options)
            if kind == "lora":
                done(worker, *(ops.CreateModel(f"other{index}", lora=ADAPTER) for index in range(4)))
            done(worker, EARLIER)
            between = disturb(worker, kind)
            if is_disturbed:
                forward, num_forward = turns(worker, "f", FORWARD, between)
                result, num_turns = turns(worker, "x", LONG, between)
                assert min(num_forward, num_turns) >= 2, "it gave way between its rows"
            else:
                (forward,), (result,) = ask(worker, FORWARD, ids=["f"]), ask(worker, LONG, ids=["x"])
            grads = gradients(worker, "m")
            step = done(worker, ops.OptimStep("m", 1e-2))
            found.append((forward, result, grads, step.metrics))
        return found

    found = run_ranks(run, 2)
    for at_once, in_turns in found:
        torch.testing.assert_close(in_turns[2], at_once[2], rtol=0, atol=0)
        assert in_turns[3] == at_once[3]
    at_once, in_turns = found[0]
    for index in (0, 1):
        plain, other = cast(ops.LossResult, at_once[index]), cast(ops.LossResult, in_turns[index])
        assert plain.metrics == other.metrics
        assert plain.fields == other.fields
        assert [len(array.numpy()) for array in plain.fields["logprobs"]] == [30 + seed for seed in range(12)]


def test_a_suspended_pass_that_fails_or_is_cancelled_leaves_the_earlier_gradient(tmp_path: Path, run_ranks) -> None:
    # Catches half a call's gradient in the model's next step, ranks that part, and a pass that no one resumes, which
    # adds to the gradient of what its model does next.

    def run() -> list[object]:
        worker = make(tmp_path, "lora", data_parallel_replicate_size=2)
        done(worker, *(ops.CreateModel(f"other{index}", lora=ADAPTER) for index in range(4)), EARLIER)
        earlier = gradients(worker, "m")
        between = disturb(worker, "lora")

        def broken(turn: int) -> None:
            between(turn)
            if turn == 1 and runtime.global_rank() == 1:
                handles.append(worker.base.module.layers[1].register_full_backward_hook(_broken))

        handles: list[torch.utils.hooks.RemovableHandle] = []
        results = [turns(worker, "x", LONG, broken)[0]]
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(gradients(worker, "m"), earlier, rtol=0, atol=0)

        # Cancelled, but only rank 0 knows.
        (first,) = worker.run(Work(["y"], [LONG], may_suspend=True), BUSY)
        assert isinstance(first, Suspended)
        between(0)
        cancelled = Interrupts(cancelled={"y"} if runtime.global_rank() == 0 else (), others_wait=lambda: False)
        results += worker.run(Work(["y"], [Resume()], may_suspend=True), cancelled)
        torch.testing.assert_close(gradients(worker, "m"), earlier, rtol=0, atol=0)
        results += worker.run(Work(["y"], [Resume()], may_suspend=True))

        # Left behind.
        worker.run(Work(["z"], [LONG], may_suspend=True), BUSY)
        between(1)
        results += [done(worker, ops.OptimStep("m", 1e-2))]
        return results

    def alone() -> object:
        worker = make(tmp_path, "lora", data_parallel_replicate_size=2)
        return done(worker, EARLIER, ops.OptimStep("m", 1e-2))

    (failed, cancelled, lost, stepped), _ = run_ranks(run, 2)
    assert "a broken pass" in failed.message
    assert cancelled == CANCELLED
    assert isinstance(lost, ops.Failure)
    assert stepped == run_ranks(alone, 2)[0]


def test_a_suspended_pass_that_is_sent_again_with_others_begins_again(tmp_path: Path, run_ranks) -> None:
    # Catches a rank that ends because results are missing, and a gradient that is taken back after it was acknowledged:
    # an orchestrator that restarts does not know which passes were suspended.
    other = ops.ForwardBackward("other0", [datum(9, 1)], "cross_entropy")

    def run() -> list[dict[str, Tensor]]:
        found = []
        for is_suspended in (False, True):
            worker = make(tmp_path / str(is_suspended), "lora", data_parallel_replicate_size=2)
            done(worker, ops.CreateModel("other0", lora=ADAPTER), EARLIER)
            for name, operations in (("x", [LONG, other]), ("y", [other, LONG])):
                ids = [name if operation is LONG else f"beside {name}" for operation in operations]
                if is_suspended:
                    (first,) = worker.run(Work([name], [LONG], may_suspend=True), BUSY)
                    assert isinstance(first, Suspended)
                results = worker.run(Work(ids, operations))
                assert all(isinstance(result, ops.LossResult) for result in results)
                assert len(results) == 2
            done(worker, ops.OptimStep("other0", 1e-2))
            found.append(gradients(worker, "m"))
        return found

    for plain, again in run_ranks(run, 2):
        torch.testing.assert_close(again, plain, rtol=0, atol=0)


def _broken(module: nn.Module, given: tuple[Tensor, ...], taken: tuple[Tensor, ...]) -> None:
    raise OSError("a broken pass")


def test_samples_in_turns_are_those_at_once_and_training_runs_between_them(tmp_path: Path, run_ranks) -> None:
    # Catches samples that are lost, drawn twice or from other weights when training or other samples come between, ones
    # that hold the sampler's memory after they were cancelled, and a call that others wait for.

    def run() -> list[object]:
        worker = make(tmp_path, "lora", data_parallel_replicate_size=2)
        saved = [done(worker, ops.SaveWeightsForSampler("m", name)) for name in ("a", "b")]
        assert len(saved) == 2
        prompt = Array.of(np.array([3, 1, 4], np.int32))
        sources = [saved_by("m", name) for name in ("a", "b")]
        many, few = (
            ops.Sample(source, prompt, num_samples=n, max_tokens=length, seed=5, ignore_end=True, prompt_logprobs=True)
            for source, n, length in zip(sources, (9, 2), (20, 4), strict=True)
        )
        plain = [ask(worker, one, ids=[name])[0] for name, one in (("p", many), ("q", few))]
        beside: list[object] = []

        def between(turn: int) -> None:
            done(worker, ops.ForwardBackward("m", [datum(9, turn)], "cross_entropy"), ops.OptimStep("m", 1e-2))
            if turn == 2:
                beside.extend(worker.run(Work(["few"], [few])))
            if turn == 3:
                (started,) = worker.run(Work(["gone"], [many], may_suspend=True), BUSY)
                assert isinstance(started, Suspended)
            if turn == 4:
                ids = {"gone"} if runtime.global_rank() == 0 else set[str]()
                (rest,) = worker.run(Work(["many"], [many], may_suspend=True), Interrupts(ids, BUSY.others_wait))
                assert isinstance(rest, Suspended)
                assert "gone" not in worker.sampling._running

        in_turns, num_turns = turns(worker, "many", many, between)
        assert num_turns > 4
        # Its weights are replaced while it waits: it begins again, with the new ones.
        (begun,) = worker.run(Work(["again"], [few], may_suspend=True), BUSY)
        assert isinstance(begun, Suspended)
        worker.sampling.checkpoint_saved(sources[1].checkpoint)
        again = worker.run(Work(["again"], [few], may_suspend=True))
        assert not worker.sampling._running
        assert not worker.sampling._found
        return [*plain, in_turns, *beside, *again]

    many, few, in_turns, beside, again = run_ranks(run, 2)[0]
    for plain, other in ((many, in_turns), (few, beside), (few, again)):
        assert isinstance(plain, ops.SampleResult)
        assert isinstance(other, ops.SampleResult)
        for one, two in zip(plain.sequences, other.sequences, strict=True):
            assert one.tokens == two.tokens
            np.testing.assert_allclose(values(one.logprobs), values(two.logprobs), atol=1e-5)


def test_suspended_samples_of_any_number_of_adapters_end(tmp_path: Path, run_ranks, monkeypatch) -> None:
    """Catches samples that begin again in each of their turns, since the turns of others dropped their adapters."""
    monkeypatch.setattr(adapters, "NUM_SOURCES", 2)
    names, num_tokens = [f"w{index}" for index in range(5)], 6

    def run() -> int:
        worker = make(tmp_path, "lora")
        for name in names:
            done(worker, ops.SaveWeightsForSampler("m", name))
        waiting = {
            name: ops.Sample(saved_by("m", name), datum(3).tokens, max_tokens=num_tokens, ignore_end=True)
            for name in names
        }
        for _ in range(2 * num_tokens):
            for name, sample in list(waiting.items()):
                (result,) = worker.run(Work([name], [sample], may_suspend=True), BUSY)
                if not isinstance(result, Suspended):
                    assert isinstance(result, ops.SampleResult)
                    del waiting[name]
        assert not waiting
        return sum(worker.models.has_source(f"xorl://m/sampler_weights/{name}") for name in names)

    assert run_ranks(run, 1) == [2]
