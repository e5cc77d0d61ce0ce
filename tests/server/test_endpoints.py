"""Registered inference servers: what is asked of them, which are used, and samples that come from them."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from asynchronous import in_a_loop
from engines import fake_engines
from xorl.server.datum import Array
from xorl.server.endpoints import EndpointRegistry, EngineError, sample_from_endpoint
from xorl.server.endpoints.sglang import sglang_request
from xorl.server.endpoints.vllm import vllm_request, vllm_result
from xorl.server.operations import (
    BaseSampler,
    CallTag,
    Endpoint,
    EndpointSynced,
    JsonAnswer,
    Sample,
    SyncResult,
    ToolCalls,
)

PROMPT = Array.of(np.array([3, 4], dtype=np.int32))

# Tokens that the model has positions for.
CONTEXT = 10


@pytest.fixture
def registry() -> EndpointRegistry:
    return EndpointRegistry(httpx.AsyncClient(trust_env=False))


@in_a_loop
async def test_a_server_is_asked_what_it_is_before_it_is_used(registry) -> None:
    # Catches a registration without a probe, a wrong number of ranks, and endpoints that are not alike.
    with fake_engines(["--ranks", "2"], []) as (two, one):
        state = await registry.add(Endpoint("127.0.0.1", two.port, sync_weights=True))
        assert (state.state, state.endpoint.world_size, state.server_info["kind"]) == ("healthy", 2, "sglang")
        with pytest.raises(EngineError, match=r"tp_size: .* has 1, and .* 2; all endpoints of a service must agree"):
            await registry.add(Endpoint("127.0.0.1", one.port))
        with pytest.raises(EngineError, match=r"/health: ConnectError"):
            await registry.add(Endpoint("127.0.0.1", 9))
        await registry.add(Endpoint("127.0.0.1", two.port))
        assert len(registry.states) == 1
        assert [e.port for e in registry.receivers()] == [two.port]
        assert not registry.receivers(after_step=True)
        assert registry.remove("127.0.0.1", two.port)
        assert not registry.remove("127.0.0.1", two.port)


@in_a_loop
async def test_a_call_sends_weights_to_all_and_a_step_to_those_that_were_added_for_it(registry) -> None:
    # Catches one client's sync that reaches nobody, since it adds endpoints without sync_weights, and steps that send
    # weights where they are not wanted.
    with fake_engines([], []) as (called, followed):
        await registry.add(Endpoint("127.0.0.1", called.port))
        await registry.add(Endpoint("127.0.0.1", followed.port, sync_weights=True))
        assert [e.port for e in registry.receivers()] == [called.port, followed.port]
        assert [e.port for e in registry.receivers(after_step=True)] == [followed.port]


def synced(port: int, weights: str, version: str) -> SyncResult:
    success = weights == "new"
    return SyncResult(success, "", [EndpointSynced("127.0.0.1", port, success, weights)], weight_version=version)


@in_a_loop
async def test_mixed_weights_are_sampled_by_no_one(registry) -> None:
    # Catches an endpoint that is used again because it answers, though it holds parts of two versions.
    with fake_engines([]) as (engine,):
        port = engine.port
        await registry.add(Endpoint("127.0.0.1", port))
        assert registry.next_for_sampling(None) is not None
        registry.note_sync(synced(port, "new", "m@1"))
        assert registry.next_for_sampling(None) is None
        assert registry.next_for_sampling("m@1") is not None
        registry.note_sync(synced(port, "mixed", "m@2"))
        for states in (await registry.check(), await registry.connect(), registry.disconnect(), await registry.check()):
            assert [state.state for state in states] == ["failed"]
        state = await registry.add(Endpoint("127.0.0.1", port))
        assert state.state == "failed"
        assert (
            registry.next_for_sampling("m@1")
            is registry.next_for_sampling("m@2")
            is registry.next_for_sampling(None)
            is None
        )
        assert registry.receivers(), "a whole sync mends it"
        registry.note_sync(synced(port, "new", "m@3"))
        assert registry.next_for_sampling("m@3") is not None


@in_a_loop
async def test_an_endpoint_that_is_gone_or_disconnected_is_not_used(registry) -> None:
    # Catches samples that wait for a server that no one wants to be asked, or that does not answer.
    with fake_engines([]) as (engine,):
        await registry.add(Endpoint("127.0.0.1", engine.port))
        assert [state.state for state in registry.disconnect()] == ["disconnected"]
        assert registry.next_for_sampling(None) is None
        assert [state.state for state in await registry.connect()] == ["healthy"]
        registry.note_unreachable(Endpoint("127.0.0.1", engine.port), "no answer")
        assert registry.next_for_sampling(None) is None
        assert [state.state for state in await registry.check()] == ["healthy"]


def sample(**options: object) -> Sample:
    return Sample(BaseSampler(), PROMPT, **{"max_tokens": 3, **options})


@in_a_loop
async def test_samples_come_from_an_endpoint_as_they_were_asked_for(registry, tmp_path: Path) -> None:
    # Catches lost options of a request, seeds that all samples share, and log-probabilities at the wrong places.
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")

    with fake_engines([]) as (engine,):
        await registry.add(Endpoint("127.0.0.1", engine.port))
        result = await sample_from_endpoint(
            registry,
            sample(
                num_samples=2,
                seed=5,
                stop_ids=(21,),
                top_k=7,
                temperature=0.5,
                prompt_logprobs=True,
                topk_prompt_logprobs=2,
                topk_sample_logprobs=1,
            ),
            context_length=CONTEXT,
            version=None,
            adapter=("m-1", adapter),
        )
        assert result is not None
        # The stand-in's rule: the sum of the prompt, the seed and the length of the version "default", counted on.
        assert [list(each.tokens.numpy()) for each in result.sequences] == [[19, 20, 21], [20, 21]]
        assert [each.stop_reason for each in result.sequences] == ["stop", "stop"]
        assert list(result.sequences[0].logprobs.numpy()) == [-0.5, -1.5, -2.5]
        assert result.prompt_logprobs is not None
        np.testing.assert_array_equal(result.prompt_logprobs.numpy(), np.array([np.nan, -0.25], np.float32))
        assert result.topk_prompt_logprobs is not None
        assert result.topk_prompt_logprobs.token_ids.shape == (1, 2)
        assert result.sequences[1].top_logprobs is not None
        assert result.sequences[1].top_logprobs.token_ids.shape == (2, 1)
        longest = await sample_from_endpoint(registry, sample(max_tokens=None), context_length=CONTEXT, version=None)
        assert longest is not None
        assert (longest.sequences[0].tokens.shape, longest.sequences[0].stop_reason) == ((8,), "length")
        target = Array.of(np.zeros((1, 1), dtype=np.int64))
        assert (
            await sample_from_endpoint(
                registry, sample(target_prompt_tokens=target), context_length=CONTEXT, version=None
            )
            is None
        )
        assert await sample_from_endpoint(registry, sample(), context_length=CONTEXT, version="m@9") is None, (
            "no endpoint holds these weights"
        )
        with pytest.raises(EngineError, match="missing"):
            await sample_from_endpoint(
                registry, sample(), context_length=CONTEXT, version=None, adapter=("m-2", tmp_path / "missing")
            )
        first, second = engine.seen()["requests"]
        assert first["lora_path"] == ["m-1", "m-1"]
        assert [params["sampling_seed"] for params in first["sampling_params"]] == [5, 6]
        assert {params["top_k"] for params in first["sampling_params"]} == {7}
        assert "lora_path" not in second
        assert second["sampling_params"][0]["top_k"] == -1


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_sampled"),
    [(9, None, 1), (9, 1, 1), (10, None, None), (10, 1, None), (8, 3, None), (12, None, None)],
)
@in_a_loop
async def test_what_fills_the_context_is_the_workers(
    registry, length: int, max_tokens: int | None, num_sampled: int | None
) -> None:
    # Catches prompts that an engine refuses, or samples that it cuts short in silence, where workers do what is asked.
    with fake_engines([]) as (engine,):
        await registry.add(Endpoint("127.0.0.1", engine.port))
        prompt = Array.of(np.arange(length, dtype=np.int32))
        result = await sample_from_endpoint(
            registry, Sample(BaseSampler(), prompt, max_tokens=max_tokens), context_length=CONTEXT, version=None
        )
        assert (None if result is None else len(result.sequences[0].tokens.numpy())) == num_sampled


@in_a_loop
async def test_another_endpoint_takes_over_from_one_that_died(registry) -> None:
    # Catches a sample that fails, or waits, because one of several servers is gone.
    with fake_engines([], []) as engines:
        for engine in engines:
            await registry.add(Endpoint("127.0.0.1", engine.port))
        engines[0].kill()
        assert all(
            [
                await sample_from_endpoint(registry, sample(), context_length=CONTEXT, version=None) is not None
                for _ in range(4)
            ]
        )
        assert [state.state for state in registry.states] == ["unreachable", "healthy"]
        engines[1].kill()
        assert await sample_from_endpoint(registry, sample(), context_length=CONTEXT, version=None) is None, (
            "then it is the workers'"
        )


@in_a_loop
async def test_a_server_that_was_started_anew_is_not_taken_for_the_one_before(registry) -> None:
    # Catches samples of the first weights that pass for those of the version that the endpoint was sent.
    with fake_engines([]) as (engine,):
        await registry.add(Endpoint("127.0.0.1", engine.port))
        registry.note_sync(synced(engine.port, "new", "m@1"))
        assert await sample_from_endpoint(registry, sample(), context_length=CONTEXT, version="m@1") is None
        assert registry.states[0].weight_version == "default"
        assert registry.next_for_sampling(None) is None
        state = await registry.add(Endpoint("127.0.0.1", engine.port))
        assert state.weight_version is None
        assert await sample_from_endpoint(registry, sample(), context_length=CONTEXT, version=None) is not None


CITY = '{"type":"object","properties":{"city":{"type":"string"}}}'
TAGS = (CallTag('<call>{"name": "weather", "arguments": ', CITY, "}</call>"),)


def test_forms_biases_and_penalties_are_forwarded() -> None:
    # Catches an answer of a server that is any text, where the workers would have kept it to a form.
    edits = {"logit_bias": ((5, 1.5),), "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1}
    sent = {**edits, "logit_bias": {"5": 1.5}}
    asked = sample(num_samples=1, form=JsonAnswer(CITY), **edits)
    (params,) = sglang_request(asked, [3, 4], 3, None)["sampling_params"]
    assert params.items() >= sent.items()
    assert params["json_schema"] == CITY
    body = vllm_request(asked, [3, 4], 3, "base")
    assert body.items() >= sent.items()
    assert body["response_format"]["json_schema"]["schema"] == json.loads(CITY)
    plain = vllm_request(sample(num_samples=1), [3, 4], 3, "base")
    assert not plain.keys() & {*edits, "response_format"}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        (ToolCalls(TAGS, separator="\n"), "tags_with_separator"),
        (ToolCalls(TAGS, opening="[", closing="]"), "sequence"),
        (ToolCalls(TAGS, trigger="<call>", most=1), "triggered_tags"),
        (ToolCalls(TAGS, opening="<calls>", closing="</calls>", trigger="<calls>"), "triggered_tags"),
        (ToolCalls(TAGS, instead=CITY), "or"),
    ],
)
def test_tool_calls_are_forwarded_as_a_structural_tag(form: ToolCalls, kind: str) -> None:
    # Catches calls that a server is free to write otherwise, and a tag that its trigger does not begin.
    asked = sample(num_samples=1, form=form)
    tag = vllm_request(asked, [3, 4], 3, "base")["response_format"]
    (params,) = sglang_request(asked, [3, 4], 3, None)["sampling_params"]
    assert json.loads(params["structural_tag"]) == tag
    assert (tag["type"], tag["format"]["type"]) == ("structural_tag", kind)
    text = json.dumps(tag)
    assert text.count('"begin": "<call>') == 1
    assert json.dumps(json.loads(CITY)) in text
    if kind == "triggered_tags":
        (trigger,) = tag["format"]["triggers"]
        assert all(one["begin"].startswith(trigger) for one in tag["format"]["tags"])
        assert tag["format"]["stop_after_first"]


def test_vllm_is_asked_and_understood_by_token_ids() -> None:
    # Catches text in the place of tokens, and likely tokens that are not in the order of their probability.
    asked = sample(num_samples=1, topk_sample_logprobs=2, prompt_logprobs=True, seed=1)
    body = vllm_request(asked, [3, 4], 3, "base")
    assert (body["prompt"], body["n"], body["seed"], body["logprobs"], body["top_k"]) == ([3, 4], 1, 1, 2, -1)
    logprobs = {
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"token_id:9": -2.0, "token_id:7": -0.5}, {"token_id:8": -1.0}],
    }
    choice = {
        "index": 0,
        "token_ids": [7, 8],
        "finish_reason": "length",
        "logprobs": logprobs,
        "prompt_logprobs": [None, {"4": {"logprob": -3.0}}],
    }
    result = vllm_result(asked, [3, 4], {"choices": [choice]})
    assert list(result.sequences[0].tokens.numpy()) == [7, 8]
    top = result.sequences[0].top_logprobs
    assert top is not None
    assert top.token_ids.numpy().tolist() == [[7, 9], [8, 0]]
    assert result.prompt_logprobs is not None
    np.testing.assert_array_equal(result.prompt_logprobs.numpy(), np.array([np.nan, -3.0], np.float32))
    with pytest.raises(EngineError, match="unexpected format of the answer"):
        vllm_result(asked, [3, 4], {"choices": [{"text": "a"}]})
