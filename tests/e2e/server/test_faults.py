"""The table of faults: whoever dies, and whatever order calls come in, nothing is lost, done twice or half done.

One service serves all of it, in this order; each test leaves it working.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from caller import MODEL, NEAR, Caller, rounds
from service import Serve, Service


@pytest.fixture(scope="module")
def service(serve: Serve) -> Service:
    return serve(skip_initial_checkpoint=True, storage_limit="100MB")


@pytest.fixture(scope="module")
def plain(service: Service) -> list[float]:
    """What undisturbed rounds give; all adapters begin alike."""
    return rounds(Caller(service), 4)


def test_calls_that_arrive_out_of_order_or_twice_count_once_and_in_order(service: Service, plain: list[float]) -> None:
    # Catches a chunk that is trained on twice, and a step that overtakes the last chunk.
    caller = Caller(service)
    stepped = caller.step(3)
    second = caller.forward_backward(2, shift=5)
    first = caller.forward_backward(1)
    assert caller.forward_backward(1) == first
    assert caller.step(3) == stepped
    assert [caller.loss(first), caller.loss(second)] == pytest.approx(plain[:2], rel=NEAR)
    assert caller.result(stepped)["metrics"]["step"] == 1
    assert caller.loss(caller.forward_backward(4)) == pytest.approx(plain[2], rel=NEAR)
    other = caller.http.post("/api/v1/forward_backward", json=caller.body(4, shift=1))
    assert other.status_code == 400


def test_a_rejected_call_is_passed_over_and_one_that_fails_leaves_the_gradient_alone(
    service: Service, plain: list[float]
) -> None:
    # Catches a client that waits for ever behind its own mistake, and half a gradient.
    caller = Caller(service)
    first = caller.forward_backward(1)
    behind = caller.forward_backward(3, shift=5)
    refused = caller.http.post("/api/v1/forward_backward", json=caller.body(2) | {"forward_backward_input": {}})
    assert refused.status_code in (400, 422), refused.text
    failing = caller.body(4)
    failing["forward_backward_input"]["loss_fn"] = "importance_sampling"  # without what it needs
    failed = caller.http.post("/api/v1/forward_backward", json=failing)
    if failed.status_code == 200:
        assert "error" in caller.result(failed.json()["request_id"])
    assert [caller.loss(first), caller.loss(behind)] == pytest.approx(plain[:2], rel=NEAR)
    assert caller.result(caller.step(5))["metrics"]["step"] == 1
    assert caller.loss(caller.forward_backward(6)) == pytest.approx(plain[2], rel=NEAR)


def test_a_client_that_dies_leaves_the_others_alone(service: Service) -> None:
    # Catches a service that a client takes with it.
    code = f"""
        import tinker
        service = tinker.ServiceClient(base_url={service.url!r}, api_key={service.key!r})
        client = service.create_lora_training_client(base_model={MODEL!r}, rank=8)
        target = tinker.TensorData(data=list(range(2, 34)), dtype="int64", shape=[32])
        data = tinker.Datum(model_input=tinker.ModelInput.from_ints(list(range(1, 33))),
                            loss_fn_inputs={{"target_tokens": target}})
        print("ready", flush=True)
        while True:
            client.forward_backward([data] * 50, "cross_entropy")
            client.optim_step(tinker.AdamParams(learning_rate=1e-3))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    caller = Caller(service)
    assert caller.loss(caller.forward_backward(1)) > 0


def test_orchestrator_and_api_are_killed_with_calls_in_flight(service: Service, plain: list[float]) -> None:
    # Catches a request that is lost with the process that took it, and a gradient that is added again.
    caller = Caller(service)
    requests = []
    for index in range(2):
        requests += [caller.forward_backward(3 * index + 1), caller.forward_backward(3 * index + 2, shift=5)]
        stepped = caller.step(3 * index + 3)
    service.kill("orchestrator")
    # The API holds a call until there is an orchestrator again.
    requests.append(caller.forward_backward(7))
    service.kill("API")
    service.wait_ready()
    caller.connect()
    assert caller.forward_backward(7) == requests[-1]
    assert [caller.loss(request) for request in requests] == pytest.approx(plain[:5], rel=NEAR)
    assert caller.result(stepped)["metrics"]["step"] == 2


def test_workers_are_killed_in_forward_backward_and_the_client_sees_a_pause(
    service: Service, plain: list[float]
) -> None:
    # Catches a client that hangs or fails, a model that is lost with the workers, and half a gradient.
    caller = Caller(service)
    losses = rounds(caller, 2)
    long = caller.post("forward_backward", **caller.body(7, num=3000))["request_id"]
    time.sleep(0.3)
    with ThreadPoolExecutor() as pool:
        waiting: Future[dict] = pool.submit(caller.result, long, 120)
        service.kill("workers")
        assert waiting.result()["metrics"]["loss:sum"] == pytest.approx(3000 * plain[4], rel=NEAR)
    assert losses == pytest.approx(plain[:4], rel=NEAR)
    caller.result(caller.post("abort_gradient_epoch", model_id=caller.model_id, seq_id=8)["request_id"])
    first, second = caller.forward_backward(9), caller.forward_backward(10, shift=5)
    assert caller.result(caller.step(11))["metrics"]["step"] == 3
    again = caller.forward_backward(12)
    assert [caller.loss(first), caller.loss(second)] == pytest.approx(plain[4:6], rel=NEAR)
    assert caller.loss(again) == pytest.approx(plain[6], rel=NEAR)


def test_a_full_disk_refuses_what_is_written_and_nothing_else(service: Service) -> None:
    # Catches a save that fills the disk, and a service that ends with it.
    caller = Caller(service)
    ballast = service.output_dir / "ballast"
    with ballast.open("wb") as file:
        file.truncate(100 * 10**6)
    try:
        saved = caller.post("save_weights", model_id=caller.model_id, seq_id=1, path="full")
        failure = caller.result(saved["request_id"])
        assert failure["error"].startswith("StorageLimitError: ")
        assert failure["category"] == "user"
        assert caller.loss(caller.forward_backward(2)) > 0
    finally:
        ballast.unlink()
    saved = caller.post("save_weights", model_id=caller.model_id, seq_id=3, path="full")
    assert caller.result(saved["request_id"])["path"].endswith("/weights/full")


POLICY_LOOP = """
    import sys
    import tinker
    import torch
    from tinker import types

    service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
    training = service.create_lora_training_client(sys.argv[3], rank=4, seed=2)
    prompt = types.ModelInput.from_ints([40, 41])
    previous = None
    for step in range(int(sys.argv[4])):
        sampler = training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=8, seed=100 * step, stop=[])
        drawn = [list(one.tokens) for one in sampler.sample(prompt, 8, params).result().sequences]
        futures = [sampler.sample(prompt, 8, params) for _ in range(4)]
        print("sampling", flush=True)
        sys.stdin.readline()
        samples = [future.result().sequences for future in [*futures, sampler.sample(prompt, 8, params)]]
        assert all([list(one.tokens) for one in again] == drawn for again in samples), "these are other weights"
        if previous is not None:
            # What asynchronous loops do: the weights before are sampled again.
            again = previous[0].sample(prompt, 8, previous[1]).result().sequences
            assert [list(one.tokens) for one in again] == previous[2], "these are other weights"
        previous = sampler, params, drawn
        data = []
        for one in samples[0]:
            tokens = [40, 41, *map(int, one.tokens)]
            inputs = {
                "target_tokens": torch.tensor(tokens[1:]),
                "logprobs": torch.tensor([0.0, *one.logprobs]),
                "advantages": torch.tensor([0.0, *(float(token % 2) - 0.5 for token in one.tokens)]),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        trained = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(types.AdamParams(learning_rate=0.02)).result()
        # Each ratio is one, so the samples are of the weights that are trained.
        total = sum(float(datum.loss_fn_inputs["advantages"].to_torch().sum()) for datum in data)
        assert abs(trained.result().metrics["loss:sum"] + total) < 0.02
        assert stepped.metrics["optimizer_step"] == step + 1
        print("stepped", flush=True)
"""
VICTIMS = ("a worker", "orchestrator", "API")


class PolicyLoop:
    """A loop of reinforcement learning in a process of its own, with the SDK as it is; waits in each step."""

    def __init__(self, service: Service, num_steps: int) -> None:
        arguments = [service.url, service.key, MODEL, str(num_steps)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(POLICY_LOOP), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, line: str) -> None:
        assert self.process.stdout is not None
        said = self.process.stdout.readline().strip()
        assert said == line, said + (self.process.communicate()[1] if not said else "")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module")
def policy_loop(service: Service) -> Iterator[PolicyLoop]:
    loop = PolicyLoop(service, len(VICTIMS) + 1)
    yield loop
    loop.process.kill()
    loop.process.wait()


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_loop_of_reinforcement_learning_goes_on_whoever_is_killed(
    service: Service, policy_loop: PolicyLoop, victim: str
) -> None:
    # Catches sampler weights without a name that are gone with a process: the loop then ends at its next sample.
    policy_loop.wait_for("sampling")
    if victim == "a worker":
        os.kill(service.worker_pids()[-1], signal.SIGKILL)
    else:
        service.kill(victim)
    policy_loop.go_on()
    policy_loop.wait_for("stepped")


def test_everything_is_killed_at_once_and_begins_again_where_it_was(
    service: Service, policy_loop: PolicyLoop, plain: list[float]
) -> None:
    # Catches a journal that needs an orderly stop: what was acknowledged outlives a machine that loses its power.
    policy_loop.wait_for("sampling")
    caller = Caller(service)
    losses = rounds(caller, 2)
    long = caller.post("forward_backward", **caller.body(7, num=2000))["request_id"]
    behind = caller.forward_backward(8, shift=5)
    kill_everything(service)
    service.start()
    policy_loop.go_on()
    caller.connect()
    assert caller.loss(long) == pytest.approx(2000 * plain[4], rel=NEAR)
    assert [*losses, plain[4], caller.loss(behind)] == pytest.approx(plain[:6], rel=NEAR)
    assert caller.result(caller.step(9))["metrics"]["step"] == 3
    policy_loop.wait_for("stepped")


def kill_everything(service: Service) -> None:
    assert service.process is not None
    workers, others = service.worker_pids(), [service.pids(name)[-1] for name in ("orchestrator", "API")]
    for pid in (service.process.pid, *others, *workers):
        os.kill(pid, signal.SIGKILL)
    service.process.wait()
