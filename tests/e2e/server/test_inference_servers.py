"""Inference servers beside a real service, driven by the public clients: registered, sent weights to, sampled from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from child import in_child
from engines import FakeEngine, fake_engines
from service import Serve, Service

RULE = "default"  # the stand-in's version of the weights that it was started with
TOKENS = [5, 6, 7, 8]


def datum(client: Any) -> Any:
    """A sequence that the next tokens of can be learned."""
    inputs = {"target_tokens": client.types.TensorData(data=[6, 7, 8, 9], dtype="int64", shape=[4])}
    return client.types.Datum(model_input=client.types.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)


def continued(prompt: list[int], version: str, length: int, seed: int = 0) -> list[int]:
    """What the stand-in samples: see fake_sglang.py."""
    first = sum(prompt) + seed + len(version)
    return [(first + index) % 50 for index in range(length)]


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


def post(service: Service, path: str, body: dict[str, Any]) -> httpx.Response:
    url = f"{service.url}{path}"
    return httpx.post(url, json=body, headers={"X-API-Key": service.key}, timeout=120, trust_env=False)


def remove(service: Service, engine: FakeEngine) -> None:
    assert post(service, "/remove_inference_endpoint", {"host": "127.0.0.1", "port": engine.port}).status_code == 200


def step(client: Any, training: Any) -> None:
    training.forward_backward([datum(client)], "cross_entropy").result()
    training.optim_step(client.types.AdamParams(learning_rate=1e-2)).result()


def generated(service: Service, seed: int) -> list[int]:
    """By the service's own /generate, from the base."""
    params = {"max_new_tokens": 4, "temperature": 1.0, "sampling_seed": seed}
    reply = post(service, "/generate", {"input_ids": TOKENS, "sampling_params": params, "return_logprob": True})
    assert reply.status_code == 200, reply.text
    return reply.json()["output_ids"]


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
        added = post(service, "/add_inference_endpoint", {"host": "127.0.0.1", "port": engine.port})
        assert added.json()["success"], added.text
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


WHOLE = """\
config_path: configs/quickstart/config.json
tokenizer_path: configs/quickstart
model_name: xorl/quickstart
data_parallel_shard_size: 2
enable_mixed_precision: false
enable_gradient_checkpointing: false
skip_initial_checkpoint: true
sample_packing_sequence_len: 1024
sampler_cache_tokens: 16384
output_dir: unused
"""


def test_full_weights_are_sampled_where_they_were_sent(serve: Serve, tmp_path: Path) -> None:
    # Catches shards that are sent as wholes, and samples of a step that the endpoint does not hold.
    (tmp_path / "config.yaml").write_text(WHOLE)
    service = serve(tmp_path / "config.yaml")
    with fake_engines([]) as (engine,):
        added = post(service, "/add_inference_endpoint", {"host": "127.0.0.1", "port": engine.port})
        assert added.json()["success"], added.text

        def drive() -> tuple[list[int], list[int], list[int]]:
            import tinker  # noqa: PLC0415  (a dependency group that is not always there)

            with tinker.ServiceClient(base_url=service.url, api_key=service.key) as client:
                training = client.create_lora_training_client(base_model="xorl/quickstart", rank=8)
                target = tinker.TensorData(data=[6, 7, 8, 9], dtype="int64", shape=[4])
                prompt = tinker.ModelInput.from_ints(TOKENS)
                data = tinker.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": target})
                params = tinker.SamplingParams(max_tokens=3, temperature=1.0, seed=4)

                def sampled() -> list[int]:
                    sampler = training.save_weights_and_get_sampling_client()
                    return list(sampler.sample(prompt, 1, params).result().sequences[0].tokens)

                def step() -> None:
                    training.forward_backward([data], "cross_entropy").result()
                    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()

                step()
                model_id = training.get_info().model_id
                body = {"model_id": model_id, "buffer_size_mb": 1}
                before = sampled()
                sent = post(service, "/sync_inference_weights", body)
                assert sent.json()["success"], sent.text
                at_endpoint = sampled()
                step()
                after = sampled()
                form = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["down_proj"]}
                assert post(service, "/api/v1/set_sync_quantization", {"quantization": form}).status_code == 200
                assert post(service, "/sync_inference_weights", body).json()["success"]
                return before, at_endpoint, after

        before, at_endpoint, after = in_child(drive)
        seen = engine.seen()
        assert at_endpoint == continued(TOKENS, seen["version"], 3, seed=4)
        assert len(seen["requests"]) == 1, "the others are of weights that the endpoint did not hold"
        assert len(before) == len(after) == 3
        assert [tensor["shape"][0] for name, tensor in seen["tensors"].items() if "embed" in name] == [288]
        scales = {name.removesuffix("_scale_inv") for name in seen["tensors"] if name.endswith("_scale_inv")}
        assert scales == {name for name, one in seen["tensors"].items() if one["dtype"] == "float8_e4m3fn"}
        modules = {name.split(".")[-2].removesuffix("_proj") for name in scales}
        assert modules == {"q", "k", "v", "o", "gate", "up"}
