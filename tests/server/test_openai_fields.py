"""Which fields the OpenAI-compatible calls serve, ignore and refuse, and the errors that their clients recognize."""

import json
import re
import shutil
from pathlib import Path

import pytest

from answering_orchestrator import asked_at
from xorl.server.api.openai_bodies import ChatBody, CompletionBody
from xorl.server.api.openai_fields import IGNORED, MESSAGE_IGNORED, PART_IGNORED, UNSERVED, field_names

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ reasoning_effort | default('') }}{% endif %}"
)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "0123"}], "max_tokens": 3, "seed": 1}
TEXT = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "seed": 1}
# vLLM's own fields, which its documentation lists beside OpenAI's.
VLLM = set(
    """
    use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    allowed_token_ids bad_words logprob_token_ids thinking_token_budget watermarking add_special_tokens priority
    request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
    structured_outputs response_format
    """.split()  # noqa: SIM905  (a list of strings of this length is a page)
)
VLLM_CHAT = VLLM | {"echo", "add_generation_prompt", "continue_final_message", "documents", "chat_template"}
VLLM_CHAT |= {"chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "include_reasoning", "reasoning_effort"}
VLLM_CHAT |= {"return_prompt_text"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    outputs = tmp_path_factory.mktemp("outputs")
    tokenizer = outputs / "tokenizer"
    shutil.copytree(ROOT / "configs" / "quickstart", tokenizer)
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    with asked_at(outputs, "/v1", tokenizer=str(tokenizer)) as (client, orchestrator):
        orchestrator.vocab_size = 288
        yield client, orchestrator


def test_a_tokenizer_without_a_template_names_the_option_of_the_service(tmp_path):
    """Catches advice to give a Jinja file to an option that takes a tokenizer."""
    tokenizer = ROOT / "configs" / "quickstart"
    with asked_at(tmp_path, "/v1", tokenizer=str(tokenizer)) as (client, _):
        answer = client.post("/chat/completions", json=CHAT)
    assert f"the tokenizer in {tokenizer} has no default one" in answer.text
    assert "start the service with the tokenizer of a chat model as tokenizer_path" in answer.text


def error_of(answer):
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


CASES = [
    ("structured_outputs", {"json": {"type": "object"}}),
    ("guided_json", {"type": "object"}),
    ("chat_template", "{{ messages }}"),
    ("min_tokens", 5),
    ("bad_words", ["a"]),
    ("allowed_token_ids", [5]),
    ("documents", [{"text": "a"}]),
    ("function_call", {"name": "f"}),
    ("audio", {"voice": "a"}),
    ("functions", [{"name": "f"}]),
    ("min_p", 0.5),
    ("store", True),
    ("service_tier", "flex"),
    ("modalities", ["text", "audio"]),
    ("cache_salt", "a"),
]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[name for name, _ in CASES])
def test_a_field_that_would_change_an_answer_is_refused_by_name(service, name, value):
    """Catches an answer that a client takes for one of JSON, of a template, or without certain words."""
    client, orchestrator = service
    orchestrator.submits.clear()
    for path, body in (("chat/completions", CHAT), ("completions", TEXT)):
        error = error_of(client.post(path, json=body | {name: value}))
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert error["message"].startswith(name)
        assert re.search(r": \S.+", error["message"]), "what to do instead is missing"
    assert not orchestrator.submits


def test_fields_that_ask_for_nothing_are_accepted(service):
    """Catches a client that sends the defaults of its fields, or labels of a request, and is refused."""
    client, _ = service
    neutral = {name: rule.neutral[0] for name, rule in UNSERVED.items() if rule.neutral}
    neutral |= {"tools": [], "logit_bias": {}, "stop": None, "n": None, "structured_outputs": None, "max_tokens": 3}
    labels = dict.fromkeys(IGNORED, "label") | {"metadata": {"run": "one"}, "parallel_tool_calls": False}
    for path, body in (("chat/completions", CHAT), ("completions", TEXT)):
        plain, same = client.post(path, json=body).json(), client.post(path, json=body | neutral | labels).json()
        assert plain["choices"] == same["choices"]
    message = {"role": "user", "content": "0123", "tool_calls": None, "refusal": None, "annotations": []}
    part = {"type": "text", "text": "0123", "cache_control": {"type": "ephemeral"}}
    for changed in (message, message | {"content": [part]}):
        answer = client.post("chat/completions", json=CHAT | {"messages": [changed]})
        assert answer.json()["choices"] == client.post("chat/completions", json=CHAT).json()["choices"]


@pytest.mark.parametrize(
    ("path", "changes", "param", "code", "says"),
    [
        ("chat/completions", {"top_pp": 0.5}, "top_pp", "unknown_parameter", "did you mean top_p?"),
        ("completions", {"messages": []}, "messages", "unknown_parameter", "is not a field of this call"),
        ("completions", {"n": "two"}, "n", "invalid_type", "expected `int`, got `str`"),
        ("completions", {"n": 0}, "n", "invalid_value", "n must be 1 to 4096"),
        ("completions", {"logprobs": 5000}, "logprobs", "invalid_value", "0 to 1024"),
        ("completions", {"logit_bias": {"five": 1}}, "logit_bias", "invalid_value", "must map token ids to numbers"),
        ("completions", {"logit_bias": {"288": 1}}, "logit_bias", "invalid_value", "token 288"),
        (
            "completions",
            {"logit_bias": {"5": 101}},
            "logit_bias",
            "invalid_value",
            "-100 to 100 for each token, got 101.0 for token 5",
        ),
        ("chat/completions", {"presence_penalty": -2.5}, "presence_penalty", "invalid_value", "-2 to 2"),
        ("chat/completions", {"frequency_penalty": 3}, "frequency_penalty", "invalid_value", "-2 to 2"),
        ("completions", {"repetition_penalty": 0}, "repetition_penalty", "invalid_value", "above 0"),
        ("completions", {"prompt": None}, "prompt", "missing_required_parameter", "is missing"),
        ("completions", {"prompt": [5, 288]}, "prompt", "invalid_value", "token 288"),
        ("completions", {"best_of": 3}, "best_of", "unsupported_parameter", "choose"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs", "invalid_value", "0 or more"),
        ("completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value", "stream"),
        ("completions", {"stream": True, "return_routed_experts": True}, "return_routed_experts", "invalid_value", ""),
        ("completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value", "1 or more"),
        ("chat/completions", {"stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter", "not a field"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "invalid_value", "needs logprobs: true"),
        ("chat/completions", {"messages": []}, "messages", "invalid_value", "at least one"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "prefix": True}]},
            "messages[1].prefix",
            "unsupported_parameter",
            "continue_final_message",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "tool", "content": "4", "tool_call_id": "c"}]},
            "messages[0]",
            "unsupported_parameter",
            "describe tools in a message",
        ),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools",
            "unsupported_parameter",
            "the model's chat template does not show tools to the model: describe tools in a message",
        ),
        ("completions", {"tools": [{"type": "function"}]}, "tools", "unsupported_parameter", "/v1/chat/completions"),
        ("completions", {"response_format": {"type": "xml"}}, "response_format.type", "invalid_value", "json_object"),
        (
            "completions",
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_required_parameter",
            "missing",
        ),
        (
            "chat/completions",
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "ignore_eos",
            "invalid_value",
            "format of the answer",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            "messages[0].content[0]",
            "invalid_value",
            "type text",
        ),
        ("chat/completions", {"model": "gpt"}, "model", "model_not_found", "there is no 'gpt'"),
        (
            "chat/completions",
            {"chat_template_kwargs": {"mood": 1}},
            "chat_template_kwargs.mood",
            None,
            "not a variable",
        ),
    ],
)
def test_an_invalid_field_is_named_with_the_kind_of_its_error(service, path, changes, param, code, says):
    """Catches an error from which a client cannot tell what is wrong, and a misspelt field that is ignored."""
    client, _ = service
    error = error_of(client.post(path, json=(CHAT if "chat" in path else TEXT) | changes))
    assert (error["param"], error["code"]) == (param, code)
    assert says in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "changes", "tokens"),
    [
        ("completions", {"prompt": [5] * 200}, "203 tokens (200 in the prompt, 3 for the completion)"),
        ("completions", {"max_tokens": 127}, "130 tokens (3 in the prompt, 127 for the completion)"),
        ("chat/completions", {"messages": [{"role": "user", "content": "0" * 400}]}, "in the prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "0" * 400}], "max_tokens": None}, "prompt"),
    ],
)
def test_a_context_overflow_has_the_code_and_the_words_that_agents_look_for(service, path, changes, tokens, stream):
    """Catches an agent that never shortens its history: litellm and others look for these words and this code."""
    client, orchestrator = service
    orchestrator.submits.clear()
    body = (CHAT if "chat" in path else TEXT) | changes | {"stream": stream}
    error = error_of(client.post(path, json=body))
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 128 tokens. However, you requested ")
    assert tokens in error["message"]
    assert not orchestrator.submits
    fits = (CHAT if "chat" in path else TEXT) | {"stream": stream}
    assert client.post(path, json=fits).status_code == 200


def test_a_final_message_is_continued(service):
    """Catches a prompt that ends the message which the client has begun."""
    client, _ = service
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is "}]
    body = CHAT | {"messages": messages}
    answer = client.post("chat/completions", json=body | {"continue_final_message": True}).json()
    same = client.post("completions", json=TEXT | {"prompt": "<user>hi</><assistant>It is "}).json()
    assert answer["prompt_token_ids"] == same["choices"][0]["prompt_token_ids"]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert error_of(client.post("chat/completions", json=body | both))["param"] == "continue_final_message"
    effort = client.post("chat/completions", json=body | {"reasoning_effort": "low"}).json()["prompt_token_ids"]
    asked = client.post("chat/completions", json=body).json()["prompt_token_ids"]
    low = client.post("completions", json=TEXT | {"prompt": "low"}).json()["choices"][0]["prompt_token_ids"]
    assert effort == asked + low


def test_extensions_of_vllm_are_served(service):
    """Catches an extension that is accepted and does nothing."""
    client, _ = service

    def choice(**changes):
        answer = client.post("completions", json=TEXT | changes)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    assert choice(prompt=[9, 8, 7, 6, 5], truncate_prompt_tokens=2)["prompt_token_ids"] == [6, 5]
    assert not {"token_ids", "prompt_token_ids"} & choice(return_token_ids=False).keys()
    named = choice(logprobs=2, return_tokens_as_token_ids=True)
    assert named["logprobs"]["tokens"] == [f"token_id:{token}" for token in named["token_ids"]]
    assert [list(top) for top in named["logprobs"]["top_logprobs"]] == [
        [f"token_id:{token}", f"token_id:{token + 1}"] for token in named["token_ids"]
    ]
    scored = choice(prompt_logprobs=2)["prompt_logprobs"]
    assert scored[0] is None
    assert list(scored[1]) == ["6", "7"]
    assert scored[1]["6"]["logprob"] == pytest.approx(-6 / 64)
    assert (scored[1]["6"]["rank"], scored[1]["7"]["rank"]) == (1, 2)
    assert len(choice(prompt_logprobs=0)["prompt_logprobs"][1]) == 1
    routes = choice(return_routed_experts=True)["routed_experts"]
    assert routes["shape"] == [5, 3, 2]
    chat = client.post("chat/completions", json=CHAT | {"prompt_logprobs": 1, "request_id": "mine"}).json()
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    assert chat["id"] == "chatcmpl-mine"


def test_every_field_of_the_public_requests_is_known(service):
    """Catches a field of a new release of OpenAI's client, or of vLLM, of which nobody decided what becomes of it."""
    known = IGNORED | UNSERVED.keys()
    for kind, extensions in ((CompletionBody, VLLM), (ChatBody, VLLM_CHAT)):
        assert not extensions - known - field_names(kind)
        of_one_call = {"echo", "add_special_tokens", "tools", "tool_choice", "parallel_tool_calls"}
        assert not (field_names(kind) & known) - of_one_call
    openai = pytest.importorskip("openai")
    chat = openai.types.chat.completion_create_params.CompletionCreateParamsBase
    text = openai.types.completion_create_params.CompletionCreateParamsBase
    assert not chat.__annotations__.keys() - known - field_names(ChatBody)
    assert not text.__annotations__.keys() - known - field_names(CompletionBody)


def test_the_protocol_lists_what_is_served_and_what_is_ignored():
    """Catches a field whose fate is only in the code: what is ignored is a contract."""
    section = (ROOT / "docs" / "protocol.md").read_text().partition("### OpenAI's API")[2].partition("\n## ")[0]
    ignored = section.partition("are ignored by contract")[2].partition("All others are")[0]
    listed = set(re.findall(r"`(\w+)`", ignored))
    assert listed == IGNORED | MESSAGE_IGNORED | PART_IGNORED | {"include_obfuscation", "stream_options"}
    served_names = set(re.findall(r"`(\w+)`", section.partition("are ignored by contract")[0]))
    assert not (field_names(ChatBody) | field_names(CompletionBody)) - served_names
