"""Tools and formats of answers in OpenAI's calls: how templates write calls, what is read, and what is refused."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from answering_orchestrator import asked_at
from make_chat_golden import FAMILIES, conversations, encode, write_tokenizer
from xorl.server.api.responses import InvalidField
from xorl.server.api.text import TextCoder
from xorl.server.api.tool_bodies import read_format, read_tools
from xorl.server.api.tool_formats import FORMATS, CallReader, ToolCall
from xorl.server.operations import JsonAnswer, ToolCalls

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": CITY}}
CALL = ToolCall("weather", '{"city": "Bern"}')
QUESTION = {"role": "user", "content": "Is it warm in Bern?"}
# Templates that write calls in a known format.
WRITE_CALLS = {"qwen3", "llama3", "mistral", "deepseek", "harmony", "glm", "kimi", "command"}
SHOW_TOOLS = {"qwen3", "mistral"}


def api_call(call: ToolCall = CALL, name: str = "call00001") -> dict[str, object]:
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def rendered(tokenizer, messages, **options):
    """The text of messages, by the API's own code."""
    coder = TextCoder()
    ids = asyncio.run(coder.encode_chat(str(tokenizer.folder), messages, {}, **options))
    return tokenizer.core.decode(ids, skip_special_tokens=False)


def template_call(name="weather", arguments=None):
    function = {"name": name, "arguments": {"city": "Bern"} if arguments is None else arguments}
    return {"id": "call00001", "type": "function", "function": function}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_of_calls_is_decided_from_the_template(family: str, tmp_path: Path) -> None:
    # Catches a template whose calls are read as text, and one that loses tools without a word.
    tokenizer = write_tokenizer(family, tmp_path)
    support = asyncio.run(TextCoder().tool_support(str(tmp_path)))
    assert (support.calls is not None) == (family in WRITE_CALLS)
    assert support.shows_tools == (family in SHOW_TOOLS)
    assert support.shows_results == (family in WRITE_CALLS)
    if support.calls is None:
        return
    answer = {"role": "assistant", "content": "", "tool_calls": [template_call()]}
    asked = rendered(tokenizer, [QUESTION], asks_for_answer=True)
    text = rendered(tokenizer, [QUESTION, answer], asks_for_answer=False).removeprefix(asked)
    for size in (1, 3, len(text)):
        reader = CallReader(support.calls, {"weather": CITY})
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        found = [reader.add(part, is_last=index == len(parts) - 1) for index, part in enumerate(parts)]
        assert [call for _, calls in found for call in calls] == [CALL]
        content = "".join(text for text, _ in found)
        assert "weather" not in content
        assert "Bern" not in content


HERMES, CODER, TAGS, LIST, ARGS, NAMED, FENCED, _, NUMBERED, _, CHANNEL, *_, PLAIN, _, _ = FORMATS
TWO = [CALL, ToolCall("add", '{"a": 2, "b": [1, {}]}')]
BERN, ADD = '{"name": "weather", "arguments": {"city": "Bern"}}', '{"arguments": {"a": 2, "b": [1, {}]}, "name": "add"}'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, f"Well.\n\n<tool_call>\n{BERN}\n</tool_call>\n<tool_call>{ADD}</tool_call>\n", "Well.", TWO),
        (HERMES, f"<tool_call>{BERN}", "", [CALL]),
        (HERMES, f"<tool_call>\n{BERN}\n</tool_call>\nDone.", "Done.", [CALL]),
        (HERMES, f"<tool_call>{BERN[:-1]}", f"<tool_call>{BERN[:-1]}", []),
        (HERMES, "a < b and <tool is <tool_cal", "a < b and <tool is <tool_cal", []),
        (HERMES, '<tool_call>{"name": "fly", "arguments": {}}', "", [ToolCall("fly", "{}")]),
        (HERMES, '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"}', "", [CALL]),
        (HERMES, f"<tool_call>{BERN}</tool_call><tool_call>oops", "<tool_call>oops", [CALL]),
        (
            CODER,
            "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n[1, {}]\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n"
            "</function>\n</tool_call>",
            "",
            TWO[::-1],
        ),
        (
            TAGS,
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call><tool_call>add\n"
            "<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n"
            "<arg_key>b</arg_key><arg_value>[1, {}]</arg_value></tool_call>",
            "",
            TWO,
        ),
        (LIST, f"[TOOL_CALLS] [{BERN}, {ADD}]", "", TWO),
        (LIST, f"[TOOL_CALLS][{BERN}]", "", [CALL]),
        (ARGS, '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}[TOOL_CALLS]add[ARGS]{"a": 2, "b": [1, {}]}', "", TWO),
        (NAMED, 'Hm. [TOOL_CALLS]weather{"city": "Bern"}', "Hm.", [CALL]),
        (
            FENCED,
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Bern"}\n```'  # noqa: RUF001
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
            "",
            [CALL],
        ),
        (
            NUMBERED,
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": '
            '"Bern"}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>'
            '{"a": 2, "b": [1, {}]}<|tool_call_end|><|tool_calls_section_end|>',
            "",
            TWO,
        ),
        (
            CHANNEL,
            '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>',
            "",
            [CALL],
        ),
        (PLAIN, '{"name": "weather", "parameters": {"city": "Bern"}}', "", [CALL]),
        (PLAIN, '<|python_tag|>{"name": "weather", "parameters": {"city": "Bern"}}', "", [CALL]),
        (PLAIN, '{"name": "Anna", "parameters": {}}', '{"name": "Anna", "parameters": {}}', []),
        (PLAIN, "It is {warm}.", "It is {warm}.", []),
        (HERMES, '<tool_call>{"name": [1], "arguments": {}}', '<tool_call>{"name": [1], "arguments": {}}', []),
        (
            CODER,
            "<tool_call>\n<function=weather>\n<parameter=city>\n  a\n    b\n</parameter>\n</function>\n</tool_call>",
            "",
            [ToolCall("weather", '{"city": "  a\\n    b"}')],
        ),
    ],
)
def test_calls_are_read_from_what_models_write(form, text: str, content: str, calls: list[ToolCall]) -> None:
    # Catches a call that ends up in the text, text that ends up nowhere, and a stream that reads otherwise.
    schemas = {"weather": CITY, "add": {"type": "object"}}
    for size in (1, 7, len(text)):
        reader = CallReader(form, schemas)
        parts = [text[start : start + size] for start in range(0, len(text), size)]
        found = [reader.add(part, is_last=index == len(parts) - 1) for index, part in enumerate(parts)]
        assert ("".join(text for text, _ in found), [call for _, made in found for call in made]) == (content, calls)
        assert reader.calls == calls


@pytest.mark.parametrize("form", [form for form in FORMATS if form.trigger])
def test_blanks_do_not_take_forever(form) -> None:
    # Catches patterns whose time grows with a power of the blanks that a model writes to the end of its context.
    blanks = "\n" * 20_000
    arguments = '{"city": "Bern"}' if form.tags is None else ""
    name = "weather" if form.has_objects else "weather" + form.middle.format(index=0)
    call = form.opening + form.begin + ('weather", "arguments": {}' if form.has_objects else name + arguments)
    for text in (form.trigger + blanks, call + blanks, call + form.end + blanks + form.separator + blanks):
        start = time.monotonic()
        CallReader(form, {"weather": CITY}).add(text, is_last=True)
        assert time.monotonic() - start < 5


def test_a_stream_does_not_hold_back_what_cannot_be_a_call() -> None:
    # Catches an answer that comes only when it is complete, because tools were given.
    reader = CallReader(HERMES, {"weather": CITY})
    assert reader.add("It is <b>warm", is_last=False)[0] == "It is <b>warm"
    assert reader.add(" <tool", is_last=False)[0] == ""
    assert reader.add("s>", is_last=False)[0] == " <tools>"
    assert reader.add(f"<tool_call>{BERN}", is_last=False) == ("", [CALL])


def test_conversations_with_calls_are_rendered_as_in_training(tmp_path: Path) -> None:
    # Catches a prompt of the service that the model has not seen in training.
    row = conversations()["tools"]
    for family in ("qwen3", "mistral"):
        tokenizer = write_tokenizer(family, tmp_path / family)
        trained = encode(row, tokenizer)["ids"]
        messages = [
            message | {"tool_calls": [template_call(**json_function(call)) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in row["messages"]
        ]
        coder = TextCoder()
        folder = str(tokenizer.folder)
        ids = asyncio.run(coder.encode_chat(folder, messages, {}, tools=row["tools"], asks_for_answer=False))
        assert ids == trained


def json_function(call):
    return {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    tokenizer = write_tokenizer("qwen3", tmp_path_factory.mktemp("qwen3"))
    outputs = tmp_path_factory.mktemp("outputs")
    with asked_at(outputs, "/v1", tokenizer=str(tokenizer.folder)) as (client, orchestrator):
        orchestrator.vocab_size, orchestrator.context_length = 438, 4096

        def ask(says: str = "Hello<|im_end|>", **body):
            orchestrator.submits.clear()
            orchestrator.says = tokenizer.core.encode(says, add_special_tokens=False).ids
            answer = client.post("chat/completions", json={"model": "tiny", "messages": [QUESTION], **body})
            return answer, [submit.operation for submit in orchestrator.submits]

        yield ask


def test_an_answer_with_calls_has_them_and_goes_back_into_the_conversation(service) -> None:
    # Catches calls without an id, a reason that agents do not know, and a result that the model never sees.
    says = f"Let me see.\n<tool_call>\n{BERN}\n</tool_call><|im_end|>"
    answer, (sample,) = service(says, tools=[WEATHER])
    (choice,) = answer.json()["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "Let me see.")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert len(call["id"]) == 9
    assert sample.form is None
    result = {"role": "tool", "tool_call_id": call["id"], "content": "20 degrees"}
    again, (sample,) = service("Yes<|im_end|>", tools=[WEATHER], messages=[QUESTION, message, result])
    assert again.json()["choices"][0]["message"]["content"] == "Yes"
    assert "tool_calls" not in again.json()["choices"][0]["message"]
    # No content beside calls is null, as in OpenAI's answers.
    bare, _ = service(says.partition("\n")[2], tools=[WEATHER])
    assert bare.json()["choices"][0]["message"]["content"] is None
    # Without tools, nothing is a call.
    text, _ = service(says)
    assert "<tool_call>" in text.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_markers_that_are_special_tokens_are_read_and_others_are_not_shown(family: str, tmp_path: Path) -> None:
    # Catches calls whose marker is decoded to nothing.
    tokenizer = write_tokenizer(family, tmp_path)
    says = {
        "mistral": f"[TOOL_CALLS] [{BERN}]</s>",
        "qwen3": f"<|im_start|><tool_call>\n{BERN}\n</tool_call><|im_end|>",
    }
    with asked_at(tmp_path, "/v1", tokenizer=str(tokenizer.folder)) as (client, orchestrator):
        orchestrator.vocab_size, orchestrator.context_length = 438, 4096
        orchestrator.says = tokenizer.core.encode(says[family], add_special_tokens=False).ids
        body = {"model": "tiny", "messages": [QUESTION], "tools": [WEATHER]}
        answer = client.post("chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}


def test_calls_are_streamed(service) -> None:
    # Catches deltas that clients cannot put together.
    says = f"Let me see.\n<tool_call>\n{BERN}\n</tool_call>\n<tool_call>\n{BERN}\n</tool_call><|im_end|>"
    answer, _ = service(says, tools=[WEATHER], stream=True)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(choice["delta"]["content"] for choice in choices) == "Let me see."
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"]["arguments"] for call in calls] == ['{"city": "Bern"}'] * 2
    assert len({call["id"] for call in calls}) == 2
    assert [choice["finish_reason"] for choice in choices][-1] == "tool_calls"


ADD_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": CITY, "strict": True}}


@pytest.mark.parametrize(
    ("body", "names", "trigger", "most"),
    [
        ({"tool_choice": "required"}, ["weather", "add"], None, None),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "add"], None, 1),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, ["add"], None, 1),
        ({"parallel_tool_calls": False}, ["weather", "add"], "<tool_call>", 1),
        ({"response_format": ANSWER}, ["weather", "add"], None, None),
    ],
)
def test_a_choice_of_tools_becomes_a_form_of_the_answer(service, body, names, trigger, most) -> None:
    # Catches a choice that is accepted and does nothing.
    _, (sample,) = service(tools=[WEATHER, ADD_TOOL], **body)
    form = sample.form
    assert isinstance(form, ToolCalls)
    assert [call.begin for call in form.calls] == [f'<tool_call>\n{{"name": "{one}", "arguments": ' for one in names]
    assert {json.loads(call.schema)["type"] for call in form.calls} == {"object"}
    assert {call.end for call in form.calls} == {"}\n</tool_call>"}
    assert (form.trigger, form.most, form.separator) == (trigger, most, "\n")
    assert (form.instead is None) == ("response_format" not in body)


def test_formats_and_strict_functions_become_a_form_of_the_answer(service) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    _, (sample,) = service(tools=[strict])
    assert sample.form.trigger == "<tool_call>"
    _, (sample,) = service(response_format=ANSWER)
    assert isinstance(sample.form, JsonAnswer)
    assert json.loads(sample.form.schema) == CITY
    _, (sample,) = service(response_format={"type": "json_object"})
    assert json.loads(sample.form.schema) == {"type": "object"}
    for nothing in ({}, {"tools": [WEATHER]}, {"tools": [strict], "tool_choice": "none"}):
        _, (sample,) = service(response_format={"type": "text"}, **nothing)
        assert sample.form is None


def test_with_no_choice_of_tools_the_model_is_not_shown_any(service) -> None:
    plain, _ = service()
    none, _ = service(tools=[WEATHER], tool_choice="none")
    shown, _ = service(tools=[WEATHER])
    prompts = [answer.json()["usage"]["prompt_tokens"] for answer in (plain, none, shown)]
    assert prompts[0] == prompts[1] < prompts[2]


@pytest.mark.parametrize(
    ("tools", "choice", "param", "says"),
    [
        ([{"type": "custom", "custom": {"name": "f"}}], None, "tools[0].type", "must be function"),
        ([{"type": "function"}], None, "tools[0].function", "is missing"),
        ([{"type": "function", "function": {}}], None, "tools[0].function.name", "is missing"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
            "required",
            "tools[0].function.parameters",
            "type object",
        ),
        ([WEATHER, WEATHER], None, "tools[1].function.name", "also the name of an earlier tool"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools[0].function.name", "letters"),
        (
            [{"type": "function", "function": {"name": "f", "schema": {}}}],
            None,
            "tools[0].function.schema",
            "not a field",
        ),
        ([WEATHER], "any", "tool_choice", "must be auto, none, required"),
        ([], "required", "tool_choice", "needs tools"),
        (
            [WEATHER],
            {"type": "function", "function": {"name": "g"}},
            "tool_choice",
            "one of the functions in tools: weather",
        ),
        ([WEATHER], {"type": "allowed_tools", "allowed_tools": {}}, "tool_choice", "must be auto, none, required"),
    ],
)
def test_tools_that_make_no_sense_are_refused_by_name(tools, choice, param: str, says: str) -> None:
    with pytest.raises(InvalidField, match=says) as caught:
        read_tools(tools, choice, None)
    assert caught.value.name == param


@pytest.mark.parametrize("form", [TAGS, PLAIN])
def test_a_strict_choice_that_the_template_does_not_allow_is_refused(form) -> None:
    # Catches a promise of strict calls that nobody keeps.
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    tools = read_tools([ADD_TOOL, strict], None, None) if form is PLAIN else read_tools([WEATHER], "required", None)
    with pytest.raises(InvalidField) as caught:
        tools.form(form, None)
    assert caught.value.name == ("tools[1].function.strict" if form is PLAIN else "tool_choice")
    assert read_format({"type": "text"}) is None


def test_messages_with_calls_are_refused_where_they_would_be_lost(service) -> None:
    call = api_call()
    broken = call | {"function": {"name": "weather", "arguments": "{"}}
    for message, param in (
        (
            {"role": "assistant", "content": None, "tool_calls": [broken]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "user", "content": "x", "tool_calls": [call]}, "messages[1].tool_calls"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[1].role"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[1].function_call"),
    ):
        answer, _ = service(messages=[QUESTION, message])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
