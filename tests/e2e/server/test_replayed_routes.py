"""A service over a mixture of experts: routes of samples go back into training, through a public client and REST."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from child import in_a_child
from service import ROOT, Serve, Service
from tiny_models import hf_config, write_config

PROMPT = [5, 6, 7, 8]


# By family: changes of its tiny model; the number of layers with experts, of experts in one, and of those of a token.
FAMILIES: dict[str, tuple[dict[str, object], tuple[int, int, int]]] = {
    "qwen3_moe": ({"mlp_only_layers": [1]}, (2, 4, 2)),
    "gpt_oss": ({}, (3, 4, 2)),
    "glm4_moe_lite": ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, (2, 8, 3)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def service(serve: Serve, tmp_path_factory: pytest.TempPathFactory, family: str) -> Service:
    shape = json.loads((ROOT / "configs" / "quickstart" / "config.json").read_text())
    names = ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id", "max_position_embeddings")
    shape = hf_config(
        family, num_hidden_layers=3, **FAMILIES[family][0], **{name: shape[name] for name in names if name in shape}
    )
    folder: Path = write_config(tmp_path_factory.mktemp("mixture"), shape)
    # Routes are gathered from two ranks in one family.
    return serve(config_path=folder, data_parallel_replicate_size=2 if family == "qwen3_moe" else 1)


@in_a_child
def test_routes_of_samples_replay_through_the_client_that_has_the_field(service: Service, family: str) -> None:
    # Catches a record that the client's form loses on either way, and one that is not used.
    import xorl_client  # noqa: PLC0415  (a dependency group that is not always there)

    types = xorl_client.types
    training = service.xorl().create_lora_training_client(base_model="xorl/quickstart", model_id="replays")
    sampled = training.save_weights_for_sampler("s").result()
    sampler = service.xorl().create_sampling_client(model_path=sampled.path, base_url=service.url)
    params = types.SamplingParams(max_tokens=12, temperature=1.0, return_routed_experts=True)
    answer = sampler.sample(types.ModelInput.from_ints(PROMPT), num_samples=1, sampling_params=params).result()
    tokens = PROMPT + list(answer.sequences[0].tokens)
    record = answer.meta_info["routed_experts"]

    def logprobs(routed_experts: object, *, trains: bool) -> tuple[np.ndarray, float]:
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:]},
            routed_experts=routed_experts,
        )
        call = training.forward_backward if trains else training.forward
        result = call([datum], "causallm_loss").result()
        return np.array(result.loss_fn_outputs[0]["logprobs"].tolist()), result.metrics["loss:sum"]

    for trains in (False, True):
        free, replayed = logprobs(None, trains=trains), logprobs(record, trains=trains)
        assert replayed[1] == free[1]
        np.testing.assert_allclose(replayed[0][len(PROMPT) - 1 :], answer.sequences[0].logprobs, atol=1e-4)
    num_layers, num_experts, num_active = FAMILIES[family][1]
    shape = len(tokens) - 2, num_layers, num_experts
    values = np.random.default_rng(0).random(shape).argsort(-1)[..., :num_active]
    assert abs(logprobs(values.tolist(), trains=True)[1] - free[1]) > 1e-4
    stepped = training.optim_step(types.AdamParams(learning_rate=0.0)).result()
    assert 0 < stepped.metrics["router_changed_routes"] < 1
    with pytest.raises(Exception, match="has an expert twice in layer 0"):
        logprobs(np.ones_like(values).tolist(), trains=True)


def test_routes_of_a_completion_have_a_row_for_each_computed_token(service: Service, family: str) -> None:
    """Catches a completion that promises routes and loses those of its prompt, or of one of its choices."""
    body = {"model": "xorl/quickstart", "prompt": PROMPT, "max_tokens": 5, "n": 2, "return_routed_experts": True}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
    for choice in answer.json()["choices"]:
        num_tokens = len(PROMPT) + len(choice["token_ids"])
        assert choice["routed_experts"]["shape"] == [num_tokens - 1, 3, FAMILIES[family][1][2]]


@in_a_child
def test_routes_of_the_trainer_replay_through_the_other_client_and_rest(service: Service, family: str) -> None:
    # Catches routes that the binary format of the other client loses.
    from tinker import types  # noqa: PLC0415  (a dependency group that is not always there)

    training = service.tinker().create_lora_training_client(base_model="xorl/quickstart", rank=4).result()
    tokens = np.random.default_rng(1).integers(3, 60, 30)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:].astype(np.int64)},
    )
    options = {"return_routed_experts": 1.0}
    found = training.forward([datum], "cross_entropy", loss_fn_config=options).result()
    record = found.loss_fn_outputs[0]["routed_experts"]
    num_layers, _, num_active = FAMILIES[family][1]
    routes = np.array(record.tolist()).reshape(29, 3, num_active).astype(int)
    assert sum(routes[:, layer].any() for layer in range(3)) == num_layers

    def loss(record: np.ndarray) -> float:
        body = {
            "model_id": training.model_id,
            "forward_input": {
                "data": [
                    {
                        "model_input": {"input_ids": tokens[:-1].tolist()},
                        "loss_fn_inputs": {
                            "target_tokens": {"data": tokens[1:].tolist(), "dtype": "int64", "shape": [29]}
                        },
                        "routed_experts": record.tolist(),
                    }
                ],
                "loss_fn": "cross_entropy",
            },
        }
        with httpx.Client(base_url=f"{service.url}/api/v1", timeout=60, trust_env=False) as client:
            sent = client.post("/forward", json=body).raise_for_status().json()
            while True:
                answer = client.post("/retrieve_future", json={"request_id": sent["request_id"]})
                if "metrics" in answer.json():
                    return answer.json()["metrics"]["loss:sum"]
                assert answer.json().get("type") == "try_again", answer.text

    assert loss(routes) == found.metrics["loss:sum"]
    assert abs(loss(np.roll(routes, 1, axis=0)) - found.metrics["loss:sum"]) > 1e-4
