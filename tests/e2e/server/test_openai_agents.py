"""Tools, formats of answers, biases and penalties, with the public programs that ask for them.

The model has random weights, so an answer is of the format that was asked for only if the service keeps it to that.
"""

import json
import os
from typing import Literal

import pytest

from child import in_child
from service import Service

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

MODEL = "xorl/quickstart"
QUESTION = [{"role": "user", "content": "Is it warm?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
STOP = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}


def check_weather(arguments: str) -> None:
    given = json.loads(arguments)
    assert given.keys() == {"city", "unit"}
    assert len(given["city"]) <= 8
    assert given["unit"] in ("C", "F")


def test_required_tools_are_called_and_their_results_go_back(client) -> None:
    # Catches calls that only look like some, and a conversation that ends with the first result.
    asked = {"model": MODEL, "tools": [WEATHER, STOP], "max_tokens": 300}
    one = {"tool_choice": "required", "parallel_tool_calls": False}
    messages: list = list(QUESTION)
    for seed in range(2):
        (choice,) = client.chat.completions.create(**asked, **one, messages=messages, seed=seed).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert choice.message.content is None
        if call.function.name == "weather":
            check_weather(call.function.arguments)
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}]
    asked["max_tokens"] = 16
    final = client.chat.completions.create(**asked, messages=messages, tool_choice="none").choices[0]
    assert final.message.tool_calls is None
    assert final.finish_reason in ("stop", "length")


def test_a_named_function_is_called_in_a_stream_as_without_one(client) -> None:
    # Catches parts of a stream that follow the format anew, and deltas that the client cannot put together.
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = {"model": MODEL, "messages": QUESTION, "tools": [STOP, WEATHER], "tool_choice": choice, "seed": 5}
    whole = client.chat.completions.create(**asked, max_tokens=300).choices[0]
    (call,) = whole.message.tool_calls
    assert call.function.name == "weather"
    check_weather(call.function.arguments)
    with client.chat.completions.stream(**asked, max_tokens=300) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason
    assert final.message.tool_calls[0].function.arguments == call.function.arguments


class Weather(pydantic.BaseModel):
    """An answer with a schema of the client's own making."""

    city: str = pydantic.Field(max_length=6)
    degrees: list[int] = pydantic.Field(max_length=3)
    is_warm: bool


class Verdict(pydantic.BaseModel):
    """The same for inspect, which sends no limits of lengths."""

    is_warm: bool
    unit: Literal["C", "F"]


def test_an_answer_follows_the_schema_and_its_logprobs_are_the_models(client) -> None:
    # Catches log-probabilities of masked logits, which training would take for the policy's.
    asked = {"model": MODEL, "messages": QUESTION, "seed": 2, "max_tokens": 300}
    found = client.chat.completions.parse(**asked, response_format=Weather, n=3, logprobs=True).choices
    for choice in found:
        assert isinstance(choice.message.parsed, Weather)
        assert choice.finish_reason == "stop"
    (first, *_) = found
    prompt = client.chat.completions.create(**{**asked, "max_tokens": 1}).model_extra["prompt_token_ids"]
    tokens = first.model_extra["token_ids"]
    scored = client.completions.create(model=MODEL, prompt=[*prompt, *tokens], max_tokens=0, echo=True, logprobs=0)
    own = scored.choices[0].logprobs.token_logprobs[len(prompt) :]
    assert [one.logprob for one in first.logprobs.content] == pytest.approx(own, abs=1e-3)
    broken = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array", "contains": {"x": 1}}}}
    with pytest.raises(
        openai.BadRequestError, match=r"^Error code: 400.*response_format.json_schema.schema cannot be followed"
    ):
        client.chat.completions.create(**asked, response_format=broken)


def test_an_answer_may_be_json_or_a_call(client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PARAMETERS}}
    asked = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER], "max_tokens": 300, "parallel_tool_calls": False}
    answers = client.chat.completions.create(**asked, response_format=form, n=16, seed=0).choices
    calls = [choice.message.tool_calls[0].function.arguments for choice in answers if choice.message.tool_calls]
    texts = [choice.message.content for choice in answers if not choice.message.tool_calls]
    assert calls
    assert texts
    for found in (*calls, *texts):
        check_weather(found)


def test_biases_and_penalties_do_what_openai_says(client) -> None:
    # Catches a field that is accepted and lost between the processes, and a penalty that each part begins anew.
    asked = {"model": MODEL, "prompt": [40, 41, 42], "max_tokens": 40, "temperature": 0}

    def tokens(**changes: object) -> list[int]:
        return client.completions.create(**{**asked, **changes}).choices[0].model_extra["token_ids"]

    assert tokens(logit_bias={"77": 100}) == [77] * 40
    assert 77 not in tokens(logit_bias={"77": -100})
    for name, value in (("presence_penalty", 2), ("frequency_penalty", 2)):
        penalized = tokens(logit_bias={"77": 3, "78": 2.5}, **{name: value})
        assert penalized != tokens(logit_bias={"77": 3, "78": 2.5})
        chunks = client.completions.create(**asked, logit_bias={"77": 3, "78": 2.5}, **{name: value}, stream=True)
        assert [token for chunk in chunks for token in chunk.choices[0].model_extra["token_ids"]] == penalized
    assert tokens(extra_body={"repetition_penalty": 1.5}) != tokens()


def test_responses_call_tools_and_continue_conversations(client) -> None:
    # Catches events that the client cannot put together, and a conversation that forgets its calls.
    asked = {"model": MODEL, "max_output_tokens": 300, "extra_body": {"seed": 3}}
    tool = {"type": "function", **WEATHER["function"]}
    first = client.responses.create(**asked, input="Is it warm?", tools=[tool], tool_choice="required")
    assert first.status == "completed"
    outputs = []
    for call in first.output:
        check_weather(call.arguments)
        outputs.append({"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"})
    form = {"format": {"type": "json_schema", "name": "answer", "schema": PARAMETERS}}
    with client.responses.stream(**asked, input=outputs, previous_response_id=first.id, text=form) as stream:
        final = stream.get_final_response()
    check_weather(final.output_text)
    assert final.usage.input_tokens > first.usage.input_tokens - 250
    typed = client.responses.parse(**asked, input="Is it warm?", text_format=Weather)
    assert isinstance(typed.output_parsed, Weather)


def test_litellms_tools_and_json_modes(chat_service: Service) -> None:
    # Catches fields that litellm adds, and answers that it does not take for calls or JSON.
    def run() -> None:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        import litellm  # noqa: PLC0415  (a dependency group that is not always there)

        asked = {"model": f"openai/{MODEL}", "api_base": f"{chat_service.url}/v1", "api_key": chat_service.key}
        asked |= {"messages": QUESTION, "max_tokens": 300, "seed": 4}
        tools = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
        answer = litellm.completion(**asked, **tools)
        (call,) = answer.choices[0].message.tool_calls
        check_weather(call.function.arguments)
        chunks = list(litellm.completion(**asked, **tools, stream=True))
        (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert streamed.function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
        more = {"messages": [*QUESTION, answer.choices[0].message, result], "max_tokens": 16}
        again = litellm.completion(**asked | more, tools=[WEATHER])
        assert again.choices[0].finish_reason in ("stop", "length", "tool_calls")
        typed = litellm.completion(**asked, response_format=Weather)
        Weather.model_validate_json(typed.choices[0].message.content)
        form = {"type": "json_object"}
        asked["max_tokens"] = 16
        free = litellm.completion(**asked, response_format=form, logit_bias={"94": 5}, presence_penalty=0.5)
        assert free.choices[0].message.content.lstrip().startswith("{")

    in_child(run)


def test_inspects_task_with_tools(chat_service: Service, tmp_path) -> None:
    # Catches a harness whose tools are never called, or whose loop does not end.
    def run() -> None:
        import inspect_ai  # noqa: PLC0415  (a dependency group that is not always there)
        from inspect_ai import dataset, scorer, solver, tool  # noqa: PLC0415
        from inspect_ai import model as models  # noqa: PLC0415
        from inspect_ai.util import json_schema  # noqa: PLC0415

        called: list[int] = []

        @tool.tool
        def add() -> tool.Tool:
            async def execute(x: int, y: bool) -> str:
                """Add two numbers.

                Args:
                    x: A number.
                    y: Whether to add one.
                """
                called.append(x)
                return str(x + y)

            return execute

        samples = [dataset.Sample(input="1 + 1?", target="2")]
        config = models.GenerateConfig(max_tokens=300, seed=1, parallel_tool_calls=False)
        for provider in ("openai", "openai-api/xorl"):
            model = models.get_model(
                f"{provider}/{MODEL}", base_url=f"{chat_service.url}/v1", api_key=chat_service.key, config=config
            )
            task = inspect_ai.Task(
                dataset=samples,
                solver=[solver.use_tools(add(), tool_choice="any"), solver.generate(tool_calls="single")],
                scorer=scorer.includes(),
            )
            (log,) = inspect_ai.eval(task, model=model, log_dir=str(tmp_path), display="none")
            assert log.status == "success", log.error
            messages = log.samples[0].messages
            assert [message.role for message in messages][:3] == ["user", "assistant", "tool"]
            assert messages[2].error is None
        assert len(called) == 2
        form = models.ResponseSchema(name="verdict", json_schema=json_schema(Verdict))
        task = inspect_ai.Task(
            dataset=samples, config=models.GenerateConfig(response_schema=form), scorer=scorer.includes()
        )
        (log,) = inspect_ai.eval(task, model=model, log_dir=str(tmp_path), display="none")
        assert log.status == "success", log.error
        Verdict.model_validate_json(log.samples[0].output.completion)

    in_child(run)
