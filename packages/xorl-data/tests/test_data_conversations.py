"""Conversations as users have them: odd files, tool calls in every spelling, and templates that want another one."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from xorl.data import DataError, DatasetEntry, prepare
from xorl.data.formats import load_tokenizer
from xorl.data.inspect import text_segments, trained_texts
from xorl.data.stream import StreamOptions, open_stream

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
RESULT = {"role": "tool", "content": "21", "tool_call_id": "1"}
HEAD, TAIL = "<|user|>Hi<|end|>\n<|assistant|>", "<|end|>\n<|tool|>21<|end|>\n<|assistant|>Hello<|end|>\n"
CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ WRITTEN }}{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WRITTEN = "c.function.name ~ (c.function.arguments | tojson)"


def calling(arguments):
    """A message that calls f; ... means without arguments."""
    function = {"name": "f"} if arguments is ... else {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}


def texts(path: Path, options, **entry):
    """(whole text, trained texts) of each document of a file."""
    documents = prepare([DatasetEntry(str(path), **entry)], options)
    tokenizer = load_tokenizer(options.tokenizer_folder)
    parts = [text_segments(*documents.document(index), tokenizer) for index in range(len(documents))]
    return [("".join(part.text for part in own), list(trained_texts(own))) for own in parts]


def chat(row, options, tmp_path, write_jsonl, written=WRITTEN, **entry):
    """The texts of one conversation under a template that writes tool calls as `written` says."""
    template = tmp_path / "calls.jinja"
    template.write_text(CALLS.replace("WRITTEN", written))
    row = row if isinstance(row, dict) else {"messages": row}
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    [found] = texts(path, options, type="chat", chat_template=str(template), **entry)
    return found


def test_lines_of_windows_and_marks_at_the_beginning_are_no_text(text_options, tmp_path):
    """Catches a carriage return that every document ends with, and a byte order mark that the first begins with."""
    path = tmp_path / "rows.txt"
    path.write_bytes(b"\xef\xbb\xbfOne.\r\n\r\nTwo.\r\nThree")
    assert [text for text, _ in texts(path, text_options, type="text")] == [
        "One.<|end|>",
        "Two.<|end|>",
        "Three<|end|>",
    ]


def test_half_a_character_and_bytes_that_are_none_are_named(text_options, tmp_path):
    """Catches a crash of the tokenizer, and an array's bad bytes without the element they stand in."""
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"text": "fine"}\n{"text": "cut \\ud83d"}\n')
    with pytest.raises(
        DataError, match=r"rows.jsonl, line 2: the text has half a character, the surrogate U\+D83D, after 'cut '"
    ):
        prepare([DatasetEntry(str(lines), type="text")], text_options)
    array = tmp_path / "rows.json"
    array.write_bytes(b'[{"text": "fine"}, {"text": "\xff"}]')
    with pytest.raises(DataError, match=r"rows.json, element 1 \(the first is 0\) is not UTF-8"):
        prepare([DatasetEntry(str(array), type="text")], text_options)


def test_a_system_column_is_the_system_message(text_options, tmp_path, write_jsonl):
    """Catches conversations that are trained without the system message that stands beside them."""
    row = {"system": "Be kind.", "messages": [USER, ASSISTANT]}
    expected = f"<|system|>Be kind.<|end|>\n{HEAD}Hello<|end|>\n"
    assert chat(row, text_options, tmp_path, write_jsonl)[0] == expected
    twice = {**row, "messages": [{"role": "system", "content": "Be kind."}, USER, ASSISTANT]}
    assert chat(twice, text_options, tmp_path, write_jsonl)[0] == expected
    assert chat({**row, "system": None}, text_options, tmp_path, write_jsonl)[0] == f"{HEAD}Hello<|end|>\n"
    with pytest.raises(DataError, match=r"line 1: message 0 is a system message, and column 'system' has another"):
        chat({**twice, "system": "Be brief."}, text_options, tmp_path, write_jsonl)
    with pytest.raises(DataError, match=r"line 1: column 'system' is int, want a string"):
        chat({**row, "system": 5}, text_options, tmp_path, write_jsonl)
    with pytest.raises(
        DataError, match=r"line 1: column 'prelude' \(column_names: system\) does not exist; the columns are: system,"
    ):
        chat(row, text_options, tmp_path, write_jsonl, column_names={"system": "prelude"})


CALLED = {
    "string": ([USER, calling('{"a": 1}'), RESULT, ASSISTANT], 'f{"a": 1}'),
    "object": ([USER, calling({"a": 1}), RESULT, ASSISTANT], 'f{"a": 1}'),
    "no arguments": ([USER, calling(...), RESULT, ASSISTANT], "f{}"),
    "null": ([USER, calling(None), RESULT, ASSISTANT], "f{}"),
    "empty string": ([USER, calling(""), RESULT, ASSISTANT], "f{}"),
    "of old": (
        [USER, {**ASSISTANT, "content": "", "function_call": {"name": "f", "arguments": "{}"}}, RESULT, ASSISTANT],
        "f{}",
    ),
    "sharegpt": (
        [USER, {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}, RESULT, ASSISTANT],
        'f{"a": 1}',
    ),
}
# Templates that take no other spelling: one joins the arguments as a string, one knows calls by content that is null.
SPELLINGS = (
    "c.function.name + c.function.arguments",
    "'' if m.content == '' else c.function.name + c.function.arguments",
)


@pytest.mark.parametrize("written", [WRITTEN, SPELLINGS[0]])
@pytest.mark.parametrize("name", CALLED)
def test_tool_calls_are_read_in_every_spelling(text_options, tmp_path, write_jsonl, name, written):
    """Catches a call that is lost, which teaches to say nothing, and a template of a known family that is refused."""
    messages, call = CALLED[name]
    expected = (f"{HEAD}{call}{TAIL}", [f"{call}<|end|>", "Hello<|end|>"])
    assert chat(messages, text_options, tmp_path, write_jsonl, written) == expected


def test_null_is_not_written_as_a_word(text_options, tmp_path, write_jsonl):
    """Catches a template that takes calls only beside null, and null that is written as None and trained."""
    messages = CALLED["object"][0]
    with pytest.raises(DataError, match=r"line 1: .*omits the tool call of message 1"):
        chat(messages, text_options, tmp_path, write_jsonl, SPELLINGS[1])
    template = CALLS.replace("WRITTEN", SPELLINGS[1]).replace("{{ m.content }}", "{{ m.content or '' }}")
    (tmp_path / "null.jinja").write_text(template)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": messages}])
    [(_, trained)] = texts(path, text_options, type="chat", chat_template=str(tmp_path / "null.jinja"))
    assert trained == ['f{"a": 1}<|end|>', "Hello<|end|>"]


BAD_CALLS = {
    "a list": (calling([1]), r"message 1: a tool call contains list, want an object"),
    "not JSON": (calling('{"a"'), r"message 1: a tool call contains arguments that are not JSON"),
    "both": (
        {**calling({}), "function_call": {"name": "f", "arguments": "{}"}},
        r"message 1 has both tool_calls and function_call",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_is_named(text_options, tmp_path, write_jsonl, name):
    """Catches arguments that mean nothing and are written all the same."""
    message, words = BAD_CALLS[name]
    with pytest.raises(DataError, match=rf"line 1: {words}"):
        chat([USER, message, RESULT, ASSISTANT], text_options, tmp_path, write_jsonl)


def test_a_call_that_is_left_out_stops_training_on_everything_too(text_options, tmp_path, write_jsonl):
    """Catches train_on: all with a template that knows no tools: an empty answer would be trained."""
    with pytest.raises(DataError, match=r"line 1: .*omits the tool calls"):
        chat(CALLED["object"][0], text_options, tmp_path, write_jsonl, "''", train_on="all")


def test_fields_that_other_rows_have_are_no_arguments(text_options, tmp_path):
    """Catches the nulls that Parquet puts into every call for the arguments of all others."""
    template = tmp_path / "calls.jinja"
    template.write_text(CALLS.replace("WRITTEN", WRITTEN))
    rows = [{"messages": [USER, calling(arguments), RESULT, ASSISTANT]} for arguments in ({"a": 1}, {"b": {"c": [2]}})]
    keys = {key: None for row in rows for message in row["messages"] for key in message}
    whole = [{"messages": [{**keys, **message} for message in row["messages"]]} for row in rows]
    pyarrow.parquet.write_table(pa.Table.from_pylist(whole), tmp_path / "rows.parquet")
    found = texts(tmp_path / "rows.parquet", text_options, type="chat", chat_template=str(template))
    assert [trained[0] for _, trained in found] == ['f{"a": 1}<|end|>', 'f{"b": {"c": [2]}}<|end|>']
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    assert texts(tmp_path / "rows.jsonl", text_options, type="chat", chat_template=str(template)) == found


def test_reasoning_that_is_not_written_is_counted(text_options, tmp_path, write_jsonl, caplog):
    """Catches a reasoning model that is trained without its reasoning, since the template knows none."""
    rows = [{"messages": [USER, {**ASSISTANT, "thinking": "Well."}]}, {"messages": [USER, ASSISTANT]}]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert prepare([DatasetEntry(path, type="chat")], text_options).receipt.total.unwritten_reasoning == 1
    assert "unwritten_reasoning=1" in caplog.text
    template = CALLS.replace("WRITTEN", "''").replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    (tmp_path / "thinks.jinja").write_text(template)
    thinks = DatasetEntry(path, type="chat", chat_template=str(tmp_path / "thinks.jinja"))
    assert prepare([thinks], text_options).receipt.total.unwritten_reasoning == 0


VARIABLES = (
    "{% if thinks is defined and thinks %}T{% endif %}{% if date is not defined %}"
    "{% set date = strftime_now('%d %b %Y') %}{% endif %}{{ date }} "
)


def test_variables_of_a_template_are_given_by_name(text_options, tmp_path, write_jsonl):
    """Catches a variable that is accepted and ignored, and a cache that forgets it."""
    (tmp_path / "own.jinja").write_text(VARIABLES + CALLS.replace("WRITTEN", WRITTEN))
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [USER, ASSISTANT]}])

    def head(**kwargs):
        entry = {"type": "chat", "chat_template": str(tmp_path / "own.jinja"), "chat_template_kwargs": kwargs}
        return texts(path, text_options, **entry)[0][0].partition(" <|user|>")[0]

    assert head(thinks=True, date="today") == "Ttoday"
    assert head(thinks=False, date="today") == "today"
    assert head(strftime_now="2024-07-26") == "26 Jul 2024"
    with pytest.raises(
        DataError, match=r"chat_template_kwargs: enable is not a variable of .*own.jinja; it uses: date, "
    ):
        head(enable=True)
    with pytest.raises(DataError, match=r"strftime_now: tomorrow, want a date such as"):
        head(strftime_now="tomorrow")
    with pytest.raises(DataError, match=r"chat_template_kwargs: type text has no template"):
        texts(path, text_options, type="text", chat_template_kwargs={"date": "today"})


def test_a_template_that_writes_the_day_is_said_to_and_not_streamed(text_options, tmp_path, write_jsonl, caplog):
    """Catches a stream that is another one when it is resumed tomorrow."""
    (tmp_path / "own.jinja").write_text(VARIABLES + CALLS.replace("WRITTEN", WRITTEN))
    path = str(write_jsonl(tmp_path / "rows.jsonl", [{"messages": [USER, ASSISTANT]}]))
    options = StreamOptions(64, tokenizer_folder=text_options.tokenizer_folder)
    today = DatasetEntry(path, type="chat", chat_template=str(tmp_path / "own.jinja"))
    prepare([today], text_options)
    assert "the chat template writes the current date" in caplog.text
    with pytest.raises(
        DataError, match=r"entries\[0\].chat_template: the template writes the current date.*strftime_now: 2026"
    ):
        open_stream([today], options, index_path=tmp_path)
    caplog.clear()
    for kwargs in ({"date": "today"}, {"strftime_now": "2026-01-31"}):
        dated = replace(today, chat_template_kwargs=kwargs)
        prepare([dated], text_options)
        open_stream([dated], options, index_path=tmp_path)
    assert "writes the day" not in caplog.text


# As DeepSeek-R1 writes conversations: the generation prompt opens the reasoning, which finished turns do not have.
OPENS_REASONING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


@pytest.mark.parametrize("train_on", ["assistant", "last_turn"])
def test_a_prompt_that_opens_the_reasoning_leaves_the_mask_provable(text_options, tmp_path, write_jsonl, train_on):
    """Catches a template that is refused, with the advice to use what is in use, although its answers stand out."""
    (tmp_path / "r1.jinja").write_text(OPENS_REASONING)
    other = {"role": "assistant", "content": "Again, hello"}
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [USER, ASSISTANT, USER, other]}])
    found = texts(path, text_options, type="chat", chat_template=str(tmp_path / "r1.jinja"), train_on=train_on)
    trained = ["Hello<|end|>", "Again, hello<|end|>"]
    assert found == [
        (
            "<|user|>Hi<|assistant|>Hello<|end|><|user|>Hi<|assistant|>Again, hello<|end|>",
            trained if train_on == "assistant" else trained[-1:],
        )
    ]


def test_a_copy_with_generation_blocks_trains_what_an_unstable_template_does_not(text_options, tmp_path, write_jsonl):
    """Catches a refusal whose advice does not work."""
    unstable = (
        "{% if add_generation_prompt %}!{% else %}?{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}BEFORE{{ m.content }}<|end|>AFTER"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [USER, ASSISTANT]}])
    template = tmp_path / "copy.jinja"
    template.write_text(unstable.replace("BEFORE", "").replace("AFTER", ""))
    with pytest.raises(DataError, match=r"is not stable.* write \{% generation %\} before and \{% endgeneration %\}"):
        texts(path, text_options, type="chat", chat_template=str(template))
    template.write_text(unstable.replace("BEFORE", "{% generation %}").replace("AFTER", "{% endgeneration %}"))
    found = texts(path, text_options, type="chat", chat_template=str(template))
    assert found == [("?HiHello<|end|>", ["Hello<|end|>"])]


ROLE = "<|{{ m.role }}|>"
BLOCK = "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
OWN_BLOCK = "{% if m.role == 'assistant' %}" + BLOCK + "{% else %}{{ m.content }}{% endif %}"
COVERING = {
    "every message": (f"{{% for m in messages %}}{ROLE}{BLOCK}{{% endfor %}}", 4),
    "everything": (
        f"{{% generation %}}{{% for m in messages %}}{ROLE}{{{{ m.content }}}}{{% endfor %}}{{% endgeneration %}}",
        1,
    ),
    "the user's": (
        f"{{% for m in messages %}}{ROLE}{OWN_BLOCK}{{% endfor %}}".replace("== 'assistant'", "== 'user'"),
        2,
    ),
}


@pytest.mark.parametrize("train_on", [None, "assistant", "last_turn"])
@pytest.mark.parametrize("name", COVERING)
def test_generation_blocks_around_other_messages_are_refused(text_options, tmp_path, write_jsonl, name, train_on):
    """Catches the user's text that is trained because the template marks it, as many blocks as answers included."""
    source, num_blocks = COVERING[name]
    (tmp_path / "own.jinja").write_text(source)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [USER, ASSISTANT, USER, ASSISTANT]}])
    message = (
        rf"line 1: .*own.jinja marks {num_blocks} generation blocks for 2 assistant messages.* message 0, .* user;"
    )
    with pytest.raises(DataError, match=message):
        texts(path, text_options, type="chat", chat_template=str(tmp_path / "own.jinja"), train_on=train_on)


def test_an_answer_that_repeats_the_question_or_has_two_blocks_is_trained(text_options, tmp_path, write_jsonl):
    """Catches a refusal of correct blocks: of an answer that quotes the user, and of a template with several each."""
    (tmp_path / "own.jinja").write_text("{% for m in messages %}" + ROLE + OWN_BLOCK + "{% endfor %}")
    quoting = [USER, {**ASSISTANT, "content": "Hi, you said Hi"}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": quoting}])
    [(_, trained)] = texts(path, text_options, type="chat", chat_template=str(tmp_path / "own.jinja"))
    assert trained == ["Hi, you said Hi<|end|>"]
    twice = OWN_BLOCK.replace("<|end|>", "{% endgeneration %}{% generation %}<|end|>")
    (tmp_path / "two.jinja").write_text("{% for m in messages %}" + ROLE + twice + "{% endfor %}")
    [(_, trained)] = texts(path, text_options, type="chat", chat_template=str(tmp_path / "two.jinja"))
    assert "".join(trained) == "Hi, you said Hi<|end|>"
