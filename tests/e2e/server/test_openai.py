"""The OpenAI-compatible calls with OpenAI's own client, on a model while it is trained and sampled with tinker's."""

import pytest

from child import in_child
from service import Service

openai = pytest.importorskip("openai")

MODEL = "xorl/quickstart"
PROMPT = [40, 41, 42, 43]


@pytest.fixture(scope="module")
def service(chat_service: Service) -> Service:
    return chat_service


@pytest.fixture(scope="module")
def tuned(service: Service) -> tuple[str, str, list[int], list[float]]:
    """(model, sampler's path, a sample of PROMPT with seed 7, its log-probabilities) of an adapter after a step."""

    def train() -> tuple[str, str, list[int], list[float]]:
        with service.tinker() as client:
            import torch  # noqa: PLC0415
            from tinker import types  # noqa: PLC0415

            training = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
            inputs = {"target_tokens": torch.arange(60, 100)}
            data = [types.Datum(model_input=types.ModelInput.from_ints(list(range(59, 99))), loss_fn_inputs=inputs)]
            training.forward_backward(data, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.05)).result()
            path = training.save_weights_for_sampler("tuned").result().path
            sampler = client.create_sampling_client(model_path=path)
            params = types.SamplingParams(max_tokens=30, seed=7)
            (sequence,) = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences
            return training.model_id, path, list(map(int, sequence.tokens)), list(map(float, sequence.logprobs))

    return in_child(train)


def test_the_models_that_can_be_named_are_listed(client, tuned) -> None:
    # Catches weights that were saved and cannot be asked, and names of the service's own.
    model_id, path, *_ = tuned
    names = [model.id for model in client.models.list()]
    assert names[0] == MODEL
    assert {model_id, path.replace("tinker://", "xorl://")} <= set(names)
    assert not [name for name in names if "unnamed" in name]
    assert client.models.retrieve(model_id).model_extra["parent"] == MODEL
    with pytest.raises(openai.NotFoundError, match="there is no 'nobody'"):
        client.completions.create(model="nobody", prompt="a")


def test_a_completion_is_the_sample_that_tinker_draws(client, tuned) -> None:
    # Catches other weights, other tokens, and log-probabilities of others than the tokens that are returned.
    model_id, path, tokens, logprobs = tuned
    for name in (model_id, path, path.replace("tinker://", "xorl://"), "tuned"):
        answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=30, seed=7, logprobs=2)
        (choice,) = answer.choices
        assert choice.model_extra["prompt_token_ids"] == PROMPT
        assert choice.model_extra["token_ids"] == tokens
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-5)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), len(tokens))
        for token, logprob, top in zip(
            choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
        ):
            assert top.get(token, logprob) == pytest.approx(logprob, abs=1e-5)
            assert max(top.values()) >= logprob - 1e-5
    base = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, seed=7)
    assert base.choices[0].model_extra["token_ids"] != tokens


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_is_the_same_answer_in_parts(client, tuned, n: int) -> None:
    # Catches parts that draw the same random numbers again, and text, tokens or numbers that a stream loses.
    model_id, *_ = tuned
    asked = {"model": model_id, "prompt": PROMPT, "max_tokens": 40, "seed": 11, "n": n, "logprobs": 1}
    whole = client.completions.create(**asked)
    texts, tokens, reasons, logprobs = [""] * n, [[] for _ in range(n)], [None] * n, [[] for _ in range(n)]
    counted, num_chunks = None, 0
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        counted = chunk.usage or counted
        for choice in chunk.choices:
            num_chunks += 1
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.model_extra["token_ids"]
            logprobs[choice.index] += choice.logprobs.token_logprobs
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert num_chunks >= 2 * n
    for index, choice in enumerate(whole.choices):
        assert tokens[index] == choice.model_extra["token_ids"]
        assert logprobs[index] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
        assert (texts[index], reasons[index]) == (choice.text, choice.finish_reason)
    assert counted.completion_tokens == whole.usage.completion_tokens


def test_a_conversation_is_rendered_with_the_models_template(client, service: Service, tuned) -> None:
    # Catches a prompt that training would not have, and an answer whose tokens are not those of its text.
    model_id, *_ = tuned
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    chat = {"model": model_id, "messages": messages, "max_completion_tokens": 12, "seed": 3}
    answer = client.chat.completions.create(
        **chat, logprobs=True, top_logprobs=2, extra_body={"chat_template_kwargs": {"mood": "!"}}
    )
    text = "<system>be</>\n<user>hi</>\n<assistant>!"
    same = client.completions.create(model=model_id, prompt=text, max_tokens=12, seed=3)
    assert answer.model_extra["prompt_token_ids"] == same.choices[0].model_extra["prompt_token_ids"]
    (choice,) = answer.choices
    assert choice.model_extra["token_ids"] == same.choices[0].model_extra["token_ids"]
    assert choice.message.content == same.choices[0].text
    assert len(choice.logprobs.content) == len(choice.model_extra["token_ids"])
    assert {len(one.top_logprobs) for one in choice.logprobs.content} == {2}
    streamed = client.chat.completions.create(**chat, stream=True, extra_body={"chat_template_kwargs": {"mood": "!"}})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == choice.message.content
    for refused in ({"extra_body": {"min_p": 0.5}}, {"extra_body": {"chat_template_kwargs": {"other": 1}}}):
        name = next(iter(refused.get("extra_body", refused)))
        with pytest.raises(openai.BadRequestError, match=name):
            client.chat.completions.create(**chat, **refused)


def test_stop_strings_end_an_answer_and_are_not_part_of_its_text(client, tuned) -> None:
    # Catches a stop string that two parts of a stream share, and one that a client has to cut off itself.
    model_id, *_ = tuned
    asked = {"model": model_id, "prompt": PROMPT, "max_tokens": 40, "seed": 5}
    whole = client.completions.create(**asked).choices[0].text
    # Printable characters around the border of the first part, which has 8 tokens.
    stop = next(whole[i : i + 2] for i in range(7, len(whole) - 2) if whole[i : i + 2].isascii())
    stopped = client.completions.create(**asked, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(stop)], "stop")
    chunks = list(client.completions.create(**asked, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text
    assert chunks[-1].choices[0].finish_reason == "stop"
    tokens = [token for chunk in chunks for token in chunk.choices[0].model_extra["token_ids"]]
    assert tokens == stopped.model_extra["token_ids"]


def test_a_harness_scores_texts_by_echoing_them(client, tuned) -> None:
    # Catches log-probabilities of a prompt that are shifted: evaluation harnesses rank answers by them.
    model_id, *_ = tuned
    prompts = [[40, 41, 42], [50, 51]]
    scored = client.completions.create(model=model_id, prompt=prompts, max_tokens=0, echo=True, logprobs=1)
    assert [choice.index for choice in scored.choices] == [0, 1]
    for prompt, choice in zip(prompts, scored.choices, strict=True):
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.token_logprobs) == len(prompt)
        continued = client.completions.create(
            model=model_id, prompt=prompt[:1], max_tokens=1, temperature=0, logprobs=288
        )
        top = continued.choices[0].logprobs.top_logprobs[0]
        assert choice.logprobs.token_logprobs[1] == pytest.approx(top[choice.logprobs.tokens[1]], abs=1e-4)


def test_fields_of_other_servers_do_what_they_do_there(client, tuned) -> None:
    # Catches bytes, ids, stops and scores that are right only with an orchestrator that a test made up.
    model_id, *_ = tuned
    asked = {"model": model_id, "prompt": PROMPT, "max_tokens": 24, "seed": 5, "logprobs": 288}
    (whole,) = client.completions.create(**asked).choices
    tokens = whole.model_extra["token_ids"]
    # All ids of the model at each position, some of them without a text in the tokenizer.
    assert {len(top) for top in whole.logprobs.top_logprobs} == {288}
    assert whole.logprobs.text_offset[0] == 0
    assert whole.logprobs.text_offset[-1] <= len(whole.text)
    named = client.completions.create(**asked, extra_body={"return_tokens_as_token_ids": True}).choices[0]
    assert named.logprobs.tokens == [f"token_id:{token}" for token in tokens]
    stop = {"stop_token_ids": [tokens[6]]}
    first = tokens.index(tokens[6]) + 1
    for keeps_stop in (False, True):
        extra = {**stop, "include_stop_str_in_output": keeps_stop}
        stopped = client.completions.create(**asked, extra_body=extra).choices[0]
        streamed = list(client.completions.create(**asked, extra_body=extra, stream=True))
        assert stopped.model_extra["token_ids"] == tokens[:first]
        assert (len(stopped.logprobs.tokens), stopped.finish_reason) == (first, "stop")
        shown = client.completions.create(
            model=model_id, prompt=tokens[: first if keeps_stop else first - 1], max_tokens=1, echo=True, logprobs=0
        )
        assert shown.choices[0].text.startswith(stopped.text)
        assert "".join(chunk.choices[0].text for chunk in streamed) == stopped.text
    scored = client.completions.create(**asked, extra_body={"prompt_logprobs": 1}).choices[0].model_extra
    echoed = client.completions.create(**{**asked, "logprobs": 1}, echo=True).choices[0].logprobs
    own = [at[str(token)]["logprob"] for token, at in zip(PROMPT[1:], scored["prompt_logprobs"][1:], strict=True)]
    assert own == pytest.approx(echoed.token_logprobs[1 : len(PROMPT)], abs=1e-5)
    chat = {"model": model_id, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "seed": 1}
    said = client.chat.completions.create(**chat, logprobs=True, extra_body={"ignore_eos": True}).choices[0]
    data = b"".join(bytes(one.bytes) for one in said.logprobs.content if not one.token.startswith("<|"))
    assert data.decode(errors="replace") == said.message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_has_the_code_of_a_context_overflow(client, tuned, stream: bool) -> None:
    # Catches an agent that cannot tell that it has to shorten its history.
    model_id, *_ = tuned
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 1024 tokens") as caught:
        client.completions.create(model=model_id, prompt="word " * 4000, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nobody", prompt="a", stream=stream)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
