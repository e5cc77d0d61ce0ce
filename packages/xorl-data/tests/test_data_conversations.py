"""Conversations as users have them: odd files, tool calls in every spelling, and templates that want another one."""

import pytest

from data_files import write_jsonl
from xorl.data import DataError, DatasetEntry, prepare

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
ONE = [{"messages": [USER, ASSISTANT]}]
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


@pytest.fixture
def chat(texts, write_template):
    """Returns the texts of one conversation under a template that writes tool calls as `written` says."""

    def found(row, written=WRITTEN, **entry):
        row = row if isinstance(row, dict) else {"messages": row}
        [text] = texts([row], type="chat", chat_template=write_template(CALLS.replace("WRITTEN", written)), **entry)
        return text

    return found


@pytest.mark.parametrize("kind", ["text", "auto"])
def test_lines_of_windows_and_marks_at_the_beginning_are_no_text(texts, tmp_path, kind):
    """Catches lines read as token ids, a carriage return at their ends, and a byte order mark in the first one."""
    path = tmp_path / "rows.txt"
    path.write_bytes(b"\xef\xbb\xbfOne.\r\n\r\nTwo.\r\nThree")
    assert [text for text, _ in texts(path, type=kind)] == ["One.<|end|>", "Two.<|end|>", "Three<|end|>"]


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


def test_a_system_column_is_the_system_message(chat):
    """Catches conversations that are trained without the system message that stands beside them."""
    row = {"system": "Be kind.", "messages": [USER, ASSISTANT]}
    expected = f"<|system|>Be kind.<|end|>\n{HEAD}Hello<|end|>\n"
    assert chat(row)[0] == expected
    twice = {**row, "messages": [{"role": "system", "content": "Be kind."}, USER, ASSISTANT]}
    assert chat(twice)[0] == expected
    assert chat({**row, "system": None})[0] == f"{HEAD}Hello<|end|>\n"
    with pytest.raises(DataError, match=r"line 1: message 0 is a system message, and column 'system' has another"):
        chat({**twice, "system": "Be brief."})
    with pytest.raises(DataError, match=r"line 1: column 'system' is int, want a string"):
        chat({**row, "system": 5})
    with pytest.raises(
        DataError, match=r"line 1: column 'prelude' \(column_names: system\) does not exist; the columns are: system,"
    ):
        chat(row, column_names={"system": "prelude"})


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
@pytest.mark.parametrize(("messages", "call"), CALLED.values(), ids=CALLED)
def test_tool_calls_are_read_in_every_spelling(chat, messages, call, written):
    """Catches a call that is lost, which teaches to say nothing, and a template of a known family that is refused."""
    expected = (f"{HEAD}{call}{TAIL}", [f"{call}<|end|>", "Hello<|end|>"])
    assert chat(messages, written) == expected


def test_null_is_not_written_as_a_word(texts, write_template, chat):
    """Catches a template that takes calls only beside null, and null that is written as None and trained."""
    messages = CALLED["object"][0]
    with pytest.raises(DataError, match=r"line 1: .*omits the tool call of message 1"):
        chat(messages, SPELLINGS[1])
    template = write_template(
        CALLS.replace("WRITTEN", SPELLINGS[1]).replace("{{ m.content }}", "{{ m.content or '' }}")
    )
    [(_, trained)] = texts([{"messages": messages}], type="chat", chat_template=template)
    assert trained == ['f{"a": 1}<|end|>', "Hello<|end|>"]


BAD_CALLS = {
    "a list": (calling([1]), r"message 1: a tool call contains list, want an object"),
    "not JSON": (calling('{"a"'), r"message 1: a tool call contains arguments that are not JSON"),
    "both": (
        {**calling({}), "function_call": {"name": "f", "arguments": "{}"}},
        r"message 1 has both tool_calls and function_call",
    ),
}


@pytest.mark.parametrize(("message", "words"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_bad_call_is_named(chat, message, words):
    """Catches arguments that mean nothing and are written all the same."""
    with pytest.raises(DataError, match=rf"line 1: {words}"):
        chat([USER, message, RESULT, ASSISTANT])


def test_a_call_that_is_left_out_stops_training_on_everything_too(chat):
    """Catches train_on: all with a template that knows no tools: an empty answer would be trained."""
    with pytest.raises(DataError, match=r"line 1: .*omits the tool calls"):
        chat(CALLED["object"][0], "''", train_on="all")


def test_fields_that_other_rows_have_are_no_arguments(texts, write_template):
    """Catches the nulls that Parquet puts into every call for the arguments of all others."""
    template = write_template(CALLS.replace("WRITTEN", WRITTEN))
    rows = [{"messages": [USER, calling(arguments), RESULT, ASSISTANT]} for arguments in ({"a": 1}, {"b": {"c": [2]}})]
    keys = {key: None for row in rows for message in row["messages"] for key in message}
    whole = [{"messages": [{**keys, **message} for message in row["messages"]]} for row in rows]
    found = texts(whole, file="parquet", type="chat", chat_template=template)
    assert [trained[0] for _, trained in found] == ['f{"a": 1}<|end|>', 'f{"b": {"c": [2]}}<|end|>']
    assert texts(rows, type="chat", chat_template=template) == found


def test_reasoning_that_is_not_written_is_counted(prepare_rows, write_template, text_options, caplog):
    """Catches a reasoning model that is trained without its reasoning, since the template knows none."""
    rows = [{"messages": [USER, {**ASSISTANT, "thinking": "Well."}]}, {"messages": [USER, ASSISTANT]}]
    assert prepare_rows(rows, text_options, type="chat").receipt.total.unwritten_reasoning == 1
    assert "unwritten_reasoning=1" in caplog.text
    template = CALLS.replace("WRITTEN", "''").replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    thinks = prepare_rows(rows, text_options, type="chat", chat_template=write_template(template))
    assert thinks.receipt.total.unwritten_reasoning == 0


VARIABLES = (
    "{% if thinks is defined and thinks %}T{% endif %}{% if date is not defined %}"
    "{% set date = strftime_now('%d %b %Y') %}{% endif %}{{ date }} "
)


def test_variables_of_a_template_are_given_by_name(texts, write_template):
    """Catches a variable that is accepted and ignored, and a cache that forgets it."""
    template = write_template(VARIABLES + CALLS.replace("WRITTEN", WRITTEN))

    def head(**kwargs):
        entry = {"type": "chat", "chat_template": template, "chat_template_kwargs": kwargs}
        return texts(ONE, **entry)[0][0].partition(" <|user|>")[0]

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
        texts(ONE, type="text", chat_template_kwargs={"date": "today"})


def test_a_template_that_writes_the_day_is_said_to_and_not_streamed(
    texts, text_stream, write_template, tmp_path, caplog
):
    """Catches a stream that is another one when it is resumed tomorrow."""
    template = write_template(VARIABLES + CALLS.replace("WRITTEN", WRITTEN))
    path, entry = write_jsonl(tmp_path / "rows.jsonl", ONE), {"type": "chat", "chat_template": template}
    texts(path, **entry)
    assert "the chat template writes the current date" in caplog.text
    with pytest.raises(
        DataError, match=r"entries\[0\].chat_template: the template writes the current date.*strftime_now: 2026"
    ):
        text_stream(path, **entry)
    caplog.clear()
    for kwargs in ({"date": "today"}, {"strftime_now": "2026-01-31"}):
        texts(path, **entry, chat_template_kwargs=kwargs)
        text_stream(path, **entry, chat_template_kwargs=kwargs)
    assert "writes the current date" not in caplog.text


# As DeepSeek-R1 writes conversations: the generation prompt opens the reasoning, which finished turns do not have.
OPENS_REASONING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


@pytest.mark.parametrize("train_on", ["assistant", "last_turn"])
def test_a_prompt_that_opens_the_reasoning_leaves_the_mask_provable(texts, write_template, train_on):
    """Catches a template that is refused, with the advice to use what is in use, although its answers stand out."""
    template = write_template(OPENS_REASONING)
    other = {"role": "assistant", "content": "Again, hello"}
    found = texts(
        [{"messages": [USER, ASSISTANT, USER, other]}], type="chat", chat_template=template, train_on=train_on
    )
    trained = ["Hello<|end|>", "Again, hello<|end|>"]
    assert found == [
        (
            "<|user|>Hi<|assistant|>Hello<|end|><|user|>Hi<|assistant|>Again, hello<|end|>",
            trained if train_on == "assistant" else trained[-1:],
        )
    ]


def test_a_copy_with_generation_blocks_trains_what_an_unstable_template_does_not(write_template, texts):
    """Catches a refusal whose advice does not work."""
    unstable = (
        "{% if add_generation_prompt %}!{% else %}?{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}BEFORE{{ m.content }}<|end|>AFTER"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    entry = {"type": "chat", "chat_template": write_template(unstable.replace("BEFORE", "").replace("AFTER", ""))}
    with pytest.raises(DataError, match=r"is not stable.* write \{% generation %\} before and \{% endgeneration %\}"):
        texts(ONE, **entry)
    write_template(unstable.replace("BEFORE", "{% generation %}").replace("AFTER", "{% endgeneration %}"))
    assert texts(ONE, **entry) == [("?HiHello<|end|>", ["Hello<|end|>"])]


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
@pytest.mark.parametrize(("source", "num_blocks"), COVERING.values(), ids=COVERING)
def test_generation_blocks_around_other_messages_are_refused(texts, write_template, source, num_blocks, train_on):
    """Catches the user's text that is trained because the template marks it, as many blocks as answers included."""
    rows = [{"messages": [USER, ASSISTANT, USER, ASSISTANT]}]
    said = rf"line 1: .*own.jinja marks {num_blocks} generation blocks for 2 assistant messages.* message 0, .* user;"
    with pytest.raises(DataError, match=said):
        texts(rows, type="chat", chat_template=write_template(source), train_on=train_on)


def test_an_answer_that_repeats_the_question_or_has_two_blocks_is_trained(texts, write_template):
    """Catches a refusal of correct blocks: of an answer that quotes the user, and of a template with several each."""
    quoting = [{"messages": [USER, {**ASSISTANT, "content": "Hi, you said Hi"}]}]
    twice = OWN_BLOCK.replace("<|end|>", "{% endgeneration %}{% generation %}<|end|>")
    for block in (OWN_BLOCK, twice):
        template = write_template("{% for m in messages %}" + ROLE + block + "{% endfor %}")
        [(_, trained)] = texts(quoting, type="chat", chat_template=template)
        assert "".join(trained) == "Hi, you said Hi<|end|>"
