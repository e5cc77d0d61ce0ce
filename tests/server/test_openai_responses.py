"""/v1/responses: inputs, answers, streams, and conversations that are continued."""

import json

import pytest

from answering_orchestrator import served
from make_chat_golden import write_tokenizer
from xorl.server.api.openai_responses import Conversations, ResponseBody
from xorl.server.api.responses import InvalidField, Refusal
from xorl.server.operations import JsonAnswer, ToolCalls

openai = pytest.importorskip("openai")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    tokenizer = write_tokenizer("qwen3", tmp_path_factory.mktemp("qwen3"))
    http = openai.DefaultHttpxClient(trust_env=False)
    with (
        served(tmp_path_factory.mktemp("outputs"), tokenizer=str(tokenizer.folder)) as (url, orchestrator),
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", http_client=http, max_retries=0) as client,
    ):
        orchestrator.vocab_size, orchestrator.context_length = 438, 4096

        def ask(says: str = "Hello<|im_end|>", **body):
            """The answer, the operation, and the text of its prompt; a stream is returned as it is."""
            orchestrator.submits.clear()
            orchestrator.says = tokenizer.core.encode(says, add_special_tokens=False).ids
            answer = client.responses.create(**{"model": "tiny", "input": "Is it warm?", **body})
            if body.get("stream"):
                return answer
            operation = orchestrator.submits[0].operation
            prompt = tokenizer.core.decode(operation.prompt.numpy().tolist(), skip_special_tokens=False)
            return answer, operation, prompt

        yield ask


def test_an_input_becomes_a_conversation(service) -> None:
    # Catches instructions, parts and roles that are lost on the way to the template.
    answer, operation, prompt = service(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": "hi"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "yes", "annotations": []}],
            },
            {"role": "user", "content": [{"type": "input_text", "text": "so?"}]},
        ],
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        metadata={"run": "one"},
    )
    assert answer.output_text == "Hello"
    assert (answer.status, answer.usage.output_tokens, answer.metadata) == (
        "completed",
        2 + 0,
        {"run": "one"},
    ) or answer
    assert (operation.max_tokens, operation.temperature, operation.top_p) == (7, 0.5, 0.9)
    for text in ("Be brief.", "hi", "yes", "so?"):
        assert text in prompt
    assert prompt.index("Be brief.") < prompt.index("hi") < prompt.index("yes") < prompt.index("so?")
    _, _, developer = service(input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    _, _, system = service(input=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert developer == system


def test_calls_are_items_and_their_outputs_go_back(service) -> None:
    # Catches a call that a client cannot answer, and a second call that is lost.
    answer, operation, prompt = service(f"Let me see.\n{CALL}\n{CALL}<|im_end|>", tools=[WEATHER])
    assert "weather" in prompt
    assert operation.form is None
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    assert answer.output_text == "Let me see."
    calls = answer.output[1:]
    assert {call.name for call in calls} == {"weather"}
    assert json.loads(calls[0].arguments) == {"city": "Bern"}
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "20 C"} for call in calls]
    history = [{"role": "user", "content": "Is it warm?"}, *[item.to_dict() for item in answer.output], *outputs]
    _, _, sent = service(input=history, tools=[WEATHER])
    _, _, continued = service(input=outputs, tools=[WEATHER], previous_response_id=answer.id)
    assert sent == continued
    assert sent.count("20 C") == 2
    assert sent.count("<tool_call>") == 2


def test_choices_and_formats_become_forms(service) -> None:
    strict = WEATHER | {"strict": True}
    named = {"type": "function", "name": "weather"}
    for body, trigger in (
        ({"tools": [WEATHER], "tool_choice": "required"}, None),
        ({"tools": [WEATHER], "tool_choice": named}, None),
        ({"tools": [strict]}, "<tool_call>"),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, "<tool_call>"),
    ):
        _, operation, _ = service(**body)
        assert isinstance(operation.form, ToolCalls)
        assert operation.form.trigger == trigger
    form = {"type": "json_schema", "name": "answer", "schema": CITY, "strict": True}
    _, operation, _ = service(text={"format": form})
    assert isinstance(operation.form, JsonAnswer)
    assert json.loads(operation.form.schema) == CITY
    _, operation, _ = service(text={"format": {"type": "text"}}, tools=[strict], tool_choice="none")
    assert operation.form is None


def test_events_of_a_stream_make_up_the_answer(service) -> None:
    # Catches events in an order that clients do not understand, and an item that is never closed.
    events = list(service(f"Let me see.\n{CALL}\n{CALL}<|im_end|>", tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith(".delta")]
    message = ["output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *message, *call, *call, "completed"]
    final = events[-1].response
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text == "Let me see."
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert arguments == [item.arguments for item in final.output[1:]] == ['{"city": "Bern"}'] * 2
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in final.output]
    cut = list(service("Hello there<|im_end|>", max_output_tokens=2, stream=True))[-1]
    assert (cut.type, cut.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
    empty = list(service("<|im_end|>", stream=True))[-1].response
    assert [item.type for item in empty.output] == ["message"]


def test_log_probabilities_are_those_of_the_answer(service) -> None:
    answer, _, _ = service(include=["message.output_text.logprobs"], top_logprobs=0)
    (part,) = answer.output[0].content
    assert [one.logprob for one in part.logprobs] == [-0.5] * answer.usage.output_tokens
    plain, _, _ = service()
    assert plain.output[0].content[0].logprobs == []


def test_conversations_are_bounded_and_a_lost_one_says_what_to_do(service) -> None:
    # Catches memory that grows with every answer, and an answer to half of a conversation.
    kept = Conversations(max_number=2, max_bytes=100)
    for name in ("a", "b", "c"):
        kept.add(name, [{"role": "user", "content": name}])
    assert kept.get("c") == [{"role": "user", "content": "c"}]
    with pytest.raises(Refusal, match="send the whole conversation as input"):
        kept.get("a")
    kept.add("long", [{"role": "user", "content": "x" * 90}])
    for name in ("b", "c"):
        with pytest.raises(Refusal):
            kept.get(name)
    answer, _, _ = service(store=False)
    for missing in (answer.id, "resp_of_nobody"):
        with pytest.raises(openai.BadRequestError, match="store: false") as caught:
            service(previous_response_id=missing)
        assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": "a", "mood": 1}]}, "input[0].mood"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]}, "input[0].arguments"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER | {"mood": 1}]}, "tools[0].mood"),
        ({"tool_choice": "sometimes", "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "hosted"}, "tools": [WEATHER]}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
    ],
)
def test_what_is_not_served_is_refused_by_name(service, body, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        service(**body)
    assert caught.value.param == param


def test_every_field_of_openais_requests_is_known() -> None:
    # Catches a field of a new release of which nobody decided what becomes of it.
    codes: set[str] = set()
    fields = openai.types.responses.response_create_params.ResponseCreateParamsBase.__annotations__
    for name in fields - ResponseBody.__annotations__.keys():
        try:
            ResponseBody.of({"model": "m", "input": "x", name: "unlikely"})
        except InvalidField as problem:
            codes.add(problem.code)
    assert codes == {"unsupported_parameter"}


def test_errors_have_a_status_also_in_streams(service) -> None:
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError):
            service(model="nobody", stream=stream)
    with pytest.raises(openai.BadRequestError) as caught:
        service(input="word " * 9000)
    assert caught.value.code == "context_length_exceeded"
