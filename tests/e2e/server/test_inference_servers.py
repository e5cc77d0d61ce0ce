"""Inference servers beside a real service, driven by the public clients: registered, sent weights to, sampled from."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from child import in_child
from engines import FakeEngine, continued, fake_engines
from service import Serve, Service

RULE = "default"  # the stand-in's version of the weights that it was started with
TOKENS = [5, 6, 7, 8]


def datum(client: Any) -> Any:
    """A sequence that the next tokens of can be learned."""
    inputs = {"target_tokens": client.types.TensorData(data=[6, 7, 8, 9], dtype="int64", shape=[4])}
    return client.types.Datum(model_input=client.types.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)


@pytest.fixture(scope="module")
def service(serve: Serve) -> Service:
    return serve(skip_initial_checkpoint=True)


@pytest.fixture
def with_client(service: Service) -> Callable[..., None]:
    """Call a function with (module, the other client's training client of model "default") in a child process."""

    def call(function: Callable[[Any, Any], None]) -> None:
        def whole() -> None:
            import xorl_client  # noqa: PLC0415  (a dependency group that is not always there)

            training = service.xorl().create_lora_training_client(base_model="xorl/quickstart", rank=4)
            function(xorl_client, training)

        in_child(whole)

    return call


def listed(service: Service) -> list[dict[str, Any]]:
    reply = httpx.get(f"{service.url}/list_inference_endpoints", headers={"X-API-Key": service.key}, trust_env=False)
    return reply.json()["endpoints"]


def remove(service: Service, engine: FakeEngine) -> None:
    service.post("remove_inference_endpoint", host="127.0.0.1", port=engine.port)


def step(client: Any, training: Any) -> None:
    training.forward_backward([datum(client)], "cross_entropy").result()
    training.optim_step(client.types.AdamParams(learning_rate=1e-2)).result()


def generated(service: Service, seed: int) -> list[int]:
    """By the service's own /generate, from the base."""
    params = {"max_new_tokens": 4, "temperature": 1.0, "sampling_seed": seed}
    return service.post("generate", input_ids=TOKENS, sampling_params=params, return_logprob=True)["output_ids"]


def test_a_client_adds_an_endpoint_and_sends_its_model_there(service: Service, with_client: Callable) -> None:
    # Catches calls of the client that are not understood, and weights that are not those of the client's model.
    with fake_engines([]) as (engine,):

        def drive(client: Any, training: Any) -> None:
            step(client, training)
            added = training.add_inference_endpoint("127.0.0.1", engine.port, world_size=1).result()
            assert (added.success, added.weights_synced, added.endpoint.port) == (True, False, engine.port), added
            assert added.endpoint.server_info.tp_size == 1
            assert [e.port for e in training.list_inference_endpoints().result().endpoints] == [engine.port]
            assert len(training.connect_inference_endpoint().result().connected_endpoints) == 1
            for _ in range(2):
                step(client, training)
                sent = training.sync_inference_weights(master_port=0, buffer_size_mb=1).result()
                assert sent.success, sent
                assert sent.total_bytes > 0
                assert [(e.port, e.success) for e in sent.endpoints_synced] == [(engine.port, True)]
            assert training.sync_weights_to_inference().result().success
            assert training.disconnect_inference_endpoint().result().success
            assert training.remove_inference_endpoint("127.0.0.1", engine.port).result().success
            assert training.list_inference_endpoints().result().count == 0
            training.unload().result()

        with_client(drive)
        seen = engine.seen()
    assert seen["calls"].count("/continue_generation") == seen["calls"].count("/flush_cache") == 3
    assert not seen["is_paused"]
    assert not seen["groups"]
    names = set(seen["tensors"])
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert all(tensor["dtype"] == "float32" for tensor in seen["tensors"].values())
    assert not [name for name in names if "lora" in name or "qkv" in name or "gate_up" in name]
    assert seen["version"].startswith("default#")


def test_samples_come_from_an_endpoint_while_it_holds_the_weights(service: Service, with_client: Callable) -> None:
    # Catches samples of the base that an endpoint makes with a client's merged weights, and adapters that it never got.
    own = generated(service, seed=1)
    with fake_engines([]) as (engine,):
        assert service.post("add_inference_endpoint", host="127.0.0.1", port=engine.port)["success"]
        assert generated(service, seed=1) == continued(TOKENS, RULE, 4, seed=1) != own

        def drive(client: Any, training: Any) -> None:
            step(client, training)
            params = client.types.SamplingParams(max_tokens=3, temperature=1.0)
            prompt = client.types.ModelInput.from_ints(TOKENS)
            # By the service, and by asking the server itself.
            for name, url in (("s1", service.url), ("s2", f"http://127.0.0.1:{engine.port}")):
                sampler = training.save_weights_and_get_sampling_client(name, inference_base_url=url)
                result = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
                assert result.sequences[0].tokens == continued(TOKENS, RULE, 3)
            assert training.sync_inference_weights(master_port=0).result().success
            training.unload().result()

        with_client(drive)
        asked = [request.get("lora_path") for request in engine.seen()["requests"]]
        assert asked[0] is None
        assert asked[1][0].startswith("default-")
        assert asked[2] == "s2"
        assert generated(service, seed=1) == own, "the workers sample what no endpoint holds"
        remove(service, engine)


def test_training_outlives_an_endpoint_that_dies_in_mid_sync(service: Service, with_client: Callable) -> None:
    # Catches a sync that hangs, training that ends with a receiver, and an endpoint that is used with mixed weights.
    with fake_engines(["--die-after-bucket", "0"], ["--refuse-bucket", "1"], []) as engines:

        def drive(client: Any, training: Any) -> None:
            for engine in engines:
                assert training.add_inference_endpoint("127.0.0.1", engine.port).result().success
            training.forward_backward([datum(client)], "cross_entropy").result()
            sent = training.sync_inference_weights(master_port=0, buffer_size_mb=1).result()
            assert not sent.success
            assert [e.success for e in sent.endpoints_synced] == [False, False, True], sent
            training.optim_step(client.types.AdamParams(learning_rate=1e-2)).result()
            step(client, training)
            training.unload().result()

        with_client(drive)
        assert [endpoint["state"] for endpoint in listed(service)] == ["failed", "failed", "healthy"]
        assert engines[1].seen()["is_paused"]
        assert not engines[2].seen()["is_paused"]
        for engine in engines:
            remove(service, engine)


def test_weights_follow_each_step_where_that_was_asked_for(service: Service, with_client: Callable) -> None:
    # Catches an endpoint that is added with sync_weights and holds old weights from then on.
    with fake_engines([]) as (engine,):

        def drive(client: Any, training: Any) -> None:
            added = training.add_inference_endpoint(
                "127.0.0.1", engine.port, sync_weights=True, master_port=0, buffer_size_mb=64
            ).result()
            assert (added.success, added.weights_synced) == (True, True), added
            for _ in range(2):
                step(client, training)
            # Behind the sync, which is behind the step.
            training.forward([datum(client)], "cross_entropy").result()
            training.unload().result()

        with_client(drive)
        seen = engine.seen()
        remove(service, engine)
    assert 2 <= seen["calls"].count("/continue_generation") <= 3
    assert seen["version"].startswith("default#")
    assert seen["version"].split("-")[1] == "2", "the newest weights are there"
