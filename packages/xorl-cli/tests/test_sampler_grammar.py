"""Answers of a model with random weights, which are of the given format all the same."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sampling import HF_CONFIG, make_sampler, place
from xorl.core.parallel import ParallelModel
from xorl.server.operations import CallTag, JsonAnswer, ToolCalls
from xorl.server.sampler import EditRules, GenerationRequest, GenerationResult

pytest.importorskip("llguidance")

from xorl.server.sampler.grammar import Grammars

CITY = json.dumps(
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "size": {"enum": ["small", "large"]},
            "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
        },
        "required": ["city", "size", "counts"],
    }
)
FLAG = '{"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}'
CALLS = tuple(
    CallTag(f'<call>\n{{"name": "{name}", "arguments": ', schema, "}\n</call>")
    for name, schema in (("weather", CITY), ("flag", FLAG))
)


def make_tokenizer() -> Tokenizer:
    """Bytes, the end of an answer, special tokens of calls, one of which the tokenizer does not call special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<end>", "<other>", "[CALLS]")])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<call>", "</call>")])
    return tokenizer


TOKENIZER = make_tokenizer()
END, OTHER, CALL = map(TOKENIZER.token_to_id, ("<end>", "<other>", "<call>"))
# More than the tokenizer has, as in many models.
VOCAB = TOKENIZER.get_vocab_size() + 7


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> ParallelModel:
    request.getfixturevalue("place")
    return place({**HF_CONFIG, "vocab_size": VOCAB, "max_position_embeddings": 1024})


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB, [END])


def run(model: ParallelModel, grammars: Grammars, form: object, num: int = 6, **options: object) -> GenerationResult:
    bias = options.pop("bias", {})
    edits = EditRules(bias=bias, grammar=grammars.matcher(form))
    request = GenerationRequest(
        (5, 6, 7), 400, num_samples=num, edits=edits, stop=((END,),), **{"temperature": 1.0, **options}
    )
    sampler = make_sampler(model, cache_tokens=8192)
    return sampler.run([request])[0]


def texts(result: GenerationResult) -> list[str]:
    """The texts of samples that have ended."""
    for sample in result.samples:
        assert (sample.finish_reason, sample.tokens[-1]) == ("stop", END)
        assert np.isfinite(sample.logprobs).all()
    assert result.problem is None
    return [TOKENIZER.decode(list(sample.tokens[:-1]), skip_special_tokens=False) for sample in result.samples]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0, "num": 1}, {"top_k": 2}, {"top_p": 0.3}])
def test_answers_are_json_of_the_schema(model: ParallelModel, grammars: Grammars, options: dict[str, object]) -> None:
    # Catches masks that are a word or a row off, an end within the JSON, and cuts that leave only forbidden tokens.
    found = texts(run(model, grammars, JsonAnswer(CITY), **options))
    for text in found:
        answer = json.loads(text)
        assert list(answer) == ["city", "size", "counts"]
        assert len(answer["city"]) <= 6
        assert answer["size"] in ("small", "large")
        assert all(0 <= count <= 99 for count in answer["counts"])
        assert len(answer["counts"]) <= 2
    assert options.get("num") or len(set(found)) > 1


def test_required_calls_are_calls_of_the_functions(model: ParallelModel, grammars: Grammars) -> None:
    # Catches markers that are spelt with other tokens than the model was trained with, and arguments of another tool.
    result = run(model, grammars, ToolCalls(CALLS, separator="\n", most=2), num=12)
    names = []
    for text, sample in zip(texts(result), result.samples, strict=True):
        calls = [json.loads(part.partition("</call>")[0]) for part in text.split("<call>")[1:]]
        assert 1 <= len(calls) <= 2
        assert sample.tokens.count(CALL) == len(calls)
        for call in calls:
            names.append(call["name"])
            assert set(call["arguments"]) == ({"city", "size", "counts"} if call["name"] == "weather" else {"on"})
    assert set(names) == {"weather", "flag"}


def test_calls_in_a_list_and_an_answer_instead_of_calls(model: ParallelModel, grammars: Grammars) -> None:
    tags = tuple(CallTag(call.begin.removeprefix("<call>\n"), call.schema, "}") for call in CALLS)
    form = ToolCalls(tags, opening="[CALLS] [", separator=", ", closing="]", most=3, instead=FLAG)
    found = texts(run(model, grammars, form, num=16, bias={TOKENIZER.encode("{").ids[0]: 1.5}))
    lists = [json.loads(text.removeprefix("[CALLS] ")) for text in found if text.startswith("[CALLS] ")]
    others = [json.loads(text) for text in found if not text.startswith("[CALLS] ")]
    assert lists
    assert others
    assert all(call["name"] in ("weather", "flag") for calls in lists for call in calls)
    assert all(list(other) == ["on"] for other in others)


@pytest.mark.parametrize("trigger", ["<call>", "Do: "])
def test_text_may_come_before_calls_that_then_are_whole(model: ParallelModel, grammars: Grammars, trigger: str) -> None:
    # Catches strict functions whose calls are free once they have begun, and text that is not free.
    tags = tuple(CallTag(call.begin.replace("<call>\n", trigger), call.schema, "}") for call in CALLS)
    form = ToolCalls(tags, separator="\n", trigger=trigger, most=1)
    matcher = grammars.matcher(form)()
    for token in TOKENIZER.encode("Any text. ").ids:
        matcher.add(token)
    assert matcher.problem is None
    allowed = np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little"))
    assert END in allowed
    assert len(allowed) > 150
    if trigger == "<call>":
        assert OTHER in allowed
        found = texts(run(model, grammars, form, bias={CALL: 5.0, END: -100.0}))
    else:
        for token in TOKENIZER.encode('Do: {"name": "').ids:
            matcher.add(token)
        allowed = np.flatnonzero(np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little"))
        assert {TOKENIZER.id_to_token(int(token)) for token in allowed} == {"w", "f"}
        return
    for text in found:
        *_, call = text.partition(trigger)
        assert json.loads(call)["name"] in ("weather", "flag")


def test_other_stops_end_an_answer_only_where_it_is_complete(model: ParallelModel, grammars: Grammars) -> None:
    matcher = grammars.matcher(JsonAnswer(FLAG), [OTHER])()
    for token in TOKENIZER.encode('{"on": true').ids:
        assert not matcher.allowed()[OTHER // 32] >> OTHER % 32 & 1
        matcher.add(token)
    matcher.add(TOKENIZER.encode("}").ids[0])
    assert matcher.allowed()[OTHER // 32] >> OTHER % 32 & 1
    matcher.add(OTHER)
    assert matcher.problem is None


def test_objects_that_list_properties_have_no_others_unless_they_say_so(grammars: Grammars) -> None:
    # Catches arguments that no function has, which JSON Schema allows by default.
    def allows(schema: dict[str, object], answer: object) -> bool:
        matcher = grammars.matcher(JsonAnswer(json.dumps(schema)))()
        for token in TOKENIZER.encode(json.dumps(answer)).ids:
            if not matcher.allowed()[token // 32] >> token % 32 & 1:
                return False
            matcher.add(token)
        return bool(matcher.allowed()[END // 32] >> END % 32 & 1)

    listed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert allows(listed, {"a": 1})
    assert not allows(listed, {"a": 1, "b": 2})
    assert allows({**listed, "additionalProperties": True}, {"a": 1, "b": 2})
    nested = {"type": "array", "items": {"$ref": "#/$defs/one"}, "$defs": {"one": listed}}
    assert allows(nested, [{"a": 1}])
    assert not allows(nested, [{"b": 1}])
    both = {"allOf": [listed, {"type": "object", "properties": {"b": {"type": "integer"}}}]}
    assert allows(both, {"a": 1, "b": 2})
    assert allows({"type": "object"}, {"any": [1, "x", None]})
    assert not allows({"type": "object"}, [1])


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "must be an object"),
        ('{"type": "thing"}', "^response_format cannot be followed: Invalid type: thing; change it"),
        ('{"type": "string", "pattern": "("}', "regex parse error: .*unclosed group"),
        ('{"type": "array", "unevaluatedItems": false}', "unevaluatedItems"),
        ('{"items": ' * 130 + "true" + "}" * 130, "^response_format cannot be followed: recursion limit"),
        ('{"anyOf": [' * 400 + "true" + "]}" * 400, "^response_format is nested too deeply"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(grammars: Grammars, schema: str, says: str) -> None:
    # Catches a keyword that is ignored, with which answers are not what the client asked for.
    with pytest.raises(ValueError, match=says):
        grammars.matcher(JsonAnswer(schema, "response_format"))


def test_the_schema_of_several_that_cannot_be_followed_is_named(grammars: Grammars) -> None:
    bad = CallTag('{"name": "b", "arguments": ', '{"not": {}}', "}", "tools[2].function.parameters")
    for form in (ToolCalls((*CALLS, bad)), ToolCalls(CALLS, instead=bad.schema, instead_field=bad.field)):
        with pytest.raises(ValueError, match=r"^tools\[2\].function.parameters cannot be followed: .*not"):
            grammars.matcher(form)


def test_a_model_without_an_end_token_is_refused() -> None:
    with pytest.raises(ValueError, match="no end token"):
        Grammars(TOKENIZER, VOCAB, [])
