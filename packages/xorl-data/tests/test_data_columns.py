"""Columns and message keys: those that are repeated, not used, or mask text, and what rows say beside the messages."""

import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from data_files import write_as, write_table
from xorl.data import DataError, DatasetEntry, prepare
from xorl.data.stream import check_first_samples, read_sample

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
HEAD = "<|user|>Hi<|end|>\n<|assistant|>"


def write_repeated(kind, folder):
    """A file with the column answer twice, or with a struct that has a field twice."""
    path = folder / f"rows.{kind.partition(' ')[0]}"
    names = ["question", "answer", "answer"]
    table = pa.Table.from_arrays([pa.array(["q"]), pa.array(["first"]), pa.array(["second"])], names=names)
    if kind in ("csv", "tsv"):
        lines = [names, ["q", "first", "second"]]
        path.write_text("".join(("\t" if kind == "tsv" else ",").join(line) + "\n" for line in lines))
    elif kind in ("json", "jsonl"):
        row = '{"question": "q", "answer": "first", "answer": "second"}'
        path.write_text(f"[{row}]" if kind == "json" else f"{row}\n")
    elif kind == "parquet nested":
        struct = pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["answer", "answer"])
        plain = [pa.array(["q"]), pa.array(["a"])]
        table = pa.Table.from_arrays([*plain, struct], names=["question", "answer", "extra"])
        write_table("parquet", path, table)
    else:
        write_table(kind, path, table)
    return path


KINDS = ("csv", "tsv", "json", "jsonl", "parquet", "parquet nested", "feather", "arrow", "arrow stream")


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_column_is_refused_in_every_format(text_stream, text_options, tmp_path, kind):
    """Catches two columns of one name of which the last is trained, prepared or streamed."""
    path = write_repeated(kind, tmp_path)
    with pytest.raises(DataError, match=r"rows.*'(extra\.)?answer' twice"):
        prepare([DatasetEntry(path, type="prompt_completion")], text_options)
    with pytest.raises(DataError, match=r"rows.*'(extra\.)?answer' twice"):
        read_sample(text_stream(path, type="prompt_completion"), 1)


def test_a_repeated_column_of_token_rows_is_refused(text_options, tmp_path):
    """Catches keys of token rows that are repeated, which the fast path does not parse."""
    for key in ("input_ids", "labels", "other"):
        path = tmp_path / "rows.jsonl"
        path.write_text(f'{{"input_ids": [1, 2], "{key}": [1, 2], "{key}": [3, 4]}}\n')
        with pytest.raises(DataError, match=rf"rows.jsonl, line 1 has the key '{key}' twice in one object; remove one"):
            prepare([DatasetEntry(path)], text_options)


def test_columns_without_names_may_be_repeated(texts, tmp_path):
    """Catches CSV files whose lines end with commas, whose unnamed columns nobody can mean."""
    path = tmp_path / "rows.csv"
    path.write_text("question,answer,,\nq,a,,\n")
    assert texts(path, type="prompt_completion") == [("q\n\na<|end|>", ["a<|end|>"])]


def test_files_in_utf16_are_named(text_options, tmp_path):
    """Catches the CSV files of spreadsheets, and JSON lines, whose error speaks of columns or bytes."""
    for name, text in (("rows.csv", "text,b\nHi,c\n"), ("rows.jsonl", '{"text": "Hi"}\n'), ("rows.json", "[]")):
        path = tmp_path / name
        for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
            path.write_bytes(text.encode(encoding))
            with pytest.raises(DataError, match=rf"{name} is UTF-16 or UTF-32, want UTF-8; convert"):
                prepare([DatasetEntry(path, type="text")], text_options)


@pytest.fixture
def unused_in(text_options, text_stream, tmp_path, caplog):
    """Returns the columns and keys that are named as not used: in the log and the receipt, prepared and streamed."""

    def found(rows, *, file="jsonl", **entry):
        path = write_as(file, tmp_path, rows) if isinstance(rows, list) else rows
        caplog.clear()
        with caplog.at_level(logging.INFO):
            [receipt] = prepare([DatasetEntry(path, **entry)], text_options).receipt.datasets
        lines = [message for message in caplog.messages if "not used" in message]
        named = receipt.findings.unused
        expected = [f"{path}: columns and message keys that are not used: {', '.join(named)}"] if named else []
        assert lines == expected
        assert check_first_samples(text_stream(path, **entry), strict=False).findings[0].unused == named
        return sorted(named)

    return found


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "feather"])
def test_columns_and_keys_that_are_not_used_are_named(unused_in, write_template, tmp_path, kind):
    """Catches columns and message keys that are dropped without a word, and used ones that are called unused."""
    other = {"id": 5, "empty": None}
    messages = [{**USER, "name": "Ann"}, {**ASSISTANT, "source": "web"}]
    template = write_template(
        "{% for m in messages %}<|{{ m.role }}|>{{ m['name'] if m.name }}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat = write_as(kind, tmp_path, [{"messages": messages, **other}] * 3)
    found = unused_in(chat, type="chat")
    assert found == ["id", "messages[].name", "messages[].source"]
    found = unused_in(chat, type="chat", chat_template=template)
    assert found == ["id", "messages[].source"]
    with_tools = write_as(kind, tmp_path, [{"messages": [USER, ASSISTANT], "tools": [{"name": "f"}]}] * 3)
    assert unused_in(with_tools, type="chat", chat_template=template) == ["tools"]
    template = write_template("{{ tools | length if tools }}" + Path(template).read_text())
    assert unused_in(with_tools, type="chat", chat_template=template) == []
    prompt = {"prompt": "a", "completion": "b"}
    both = [{**prompt, "text": "c", "tag": None, **other}, {**prompt, "tag": "d"}]
    assert unused_in(both, file=kind, type="prompt_completion") == ["id", "tag", "text"]
    assert unused_in([{"text": "a", **other}], file=kind, type="text") == ["id"]
    assert unused_in([{"input_ids": [1, 2], "token_type_ids": [0, 0], "id": 5}], file=kind) == ["id", "token_type_ids"]
    assert unused_in([{"text": "a"}], file=kind, type="text") == []


@pytest.mark.parametrize("key", ["train", "training", "trainable", "loss", "weight"])
def test_keys_that_exclude_a_message_are_honoured(texts, key):
    """Catches an answer that is trained although its data excludes it, under the key of another trainer."""
    bad = {"role": "assistant", "content": "BAD"}
    for off, on in ((False, True), (0, 1)):
        messages = [USER, {**bad, key: off}, USER, {**ASSISTANT, key: on}]
        [(text, trained)] = texts([{"messages": messages}], type="chat")
        assert "BAD" in text
        assert trained == ["Hello<|end|>"]
        with pytest.raises(DataError, match=r"message 1 is not to be trained, but train_on: all trains every token"):
            texts([{"messages": messages}], type="chat", train_on="all")
    for value in (0.5, "false", "no", [1]):
        with pytest.raises(DataError, match=rf"line 1: message 1: {key} must be true or false \(1 or 0\)"):
            texts([{"messages": [USER, {**ASSISTANT, key: value}]}], type="chat")


@pytest.mark.parametrize(
    "key", ["mask", "loss_mask", "train_detail", "loss_scale", "response_mask", "loss_masking_spans"]
)
def test_keys_that_xorl_does_not_have_are_refused_by_name(texts, text_stream, tmp_path, key):
    """Catches masks and weights of other trainers that are ignored, in a message or beside one, in every type."""
    with pytest.raises(DataError, match=rf"line 1: message 1 has the key '{key}', which masks messages or gives"):
        texts([{"messages": [USER, {**ASSISTANT, key: 0}]}], type="chat")
    rows = {
        "chat": {"messages": [USER, ASSISTANT]},
        "prompt_completion": {"prompt": "a", "completion": "b"},
        "text": {"text": "a"},
        "tokenized": {"input_ids": [1, 2]},
    }
    for kind, row in rows.items():
        for file in ("jsonl", "parquet"):
            # A key that only a later row of JSON lines has; Parquet's rows all have the columns of the first one.
            path = write_as(file, tmp_path, [row | ({key: None} if file == "parquet" else {}), {**row, key: [0, 1]}])
            with pytest.raises(DataError, match=rf"rows.*column '{key}' .*gives? them weights"):
                texts(path, type=kind)
            with pytest.raises(DataError, match=rf"column '{key}' .*gives? them weights"):
                read_sample(text_stream(path, type=kind), 2)
            left_out = texts(path, type=kind, ignore_columns=[key])
            assert left_out == texts([row, row], file=file, type=kind)
            # Columns of nulls mask nothing.
            texts([{**row, key: None}], file=file, type=kind)


def test_a_message_of_a_prompt_cannot_ask_to_be_trained(texts):
    """Catches a key of an assistant message that is ignored because prompts are not trained."""
    row = {"prompt": [USER, {**ASSISTANT, "train": True}, USER], "completion": [ASSISTANT]}
    with pytest.raises(DataError, match=r"line 1: message 1 is in column 'prompt', which is not trained, but its key"):
        texts([row], type="chat")
    row["prompt"][1]["train"] = False
    assert len(texts([row], type="chat")) == 1


def test_ignored_columns_do_not_choose_the_type(texts):
    """Catches a column that is left out, and yet decides how the rows are read."""
    [(text, _)] = texts(
        [{"text": "a", "input_ids": [1, 2], "loss": 0.5}], type="auto", ignore_columns=["input_ids", "loss"]
    )
    assert text == "a<|end|>"


def test_rows_may_say_that_they_are_trained_as_usual(prepare_rows, texts, text_options):
    """Catches a refusal of flags that change nothing, and rows that are trained although they exclude themselves."""
    row = {"messages": [USER, ASSISTANT]}
    for name, value in (("train", True), ("loss", 1), ("weight", 1.0), ("mask", "User")):
        assert texts([{**row, name: value}], type="chat") == [(f"{HEAD}Hello<|end|>\n", ["Hello<|end|>"])]
    for name, value in (("train", False), ("weight", 0.5), ("mask", "Assistant")):
        with pytest.raises(DataError, match=rf"line 1: column '{name}' is {value!r}: it masks rows"):
            texts([{**row, name: value}], type="chat")
    # A column that is named is data, whatever its name, and selected columns of ids leave others out.
    assert texts([{"mask": "a"}], type="text", column_names={"text": "mask"})[0][0] == "a<|end|>"
    prepare_rows([{"input_ids": [1, 2], "loss_mask": [0, 1]}], text_options, columns=("input_ids",))


def test_system_and_history_of_instruction_rows_are_used(texts):
    """Catches prompts without their system message and earlier turns, in every file and under other names."""
    row = {"instruction": "and in winter?", "input": "", "output": "cold"}
    row |= {"system": "You are a weather bot", "history": [["weather in summer?", "hot"], ["in fall?", "wet"]]}
    prompt = "You are a weather bot\n\nweather in summer?\n\nhot\n\nin fall?\n\nwet\n\nand in winter?\n\n"
    expected = [(f"{prompt}cold<|end|>", ["cold<|end|>"])]
    for kind in ("jsonl", "parquet", "feather"):
        assert texts([row], file=kind, type="prompt_completion") == expected
    as_text = {**row, "history": json.dumps(row["history"])}
    assert texts([as_text], type="auto") == expected
    names = {"system": "sys", "history": "past", "instruction": "do", "input": "input", "output": "output"}
    renamed = {names[name]: value for name, value in row.items()}
    for kind in ("jsonl", "parquet"):
        assert texts([renamed], file=kind, type="prompt_completion", column_names=names) == expected
    for empty in (None, [], ""):
        assert texts([{**row, "system": None, "history": empty}], type="auto")[0][0] == "and in winter?\n\ncold<|end|>"
    for wrong in ([["a"]], ["a", "b"], "words", [["a", 1]]):
        with pytest.raises(DataError, match=r"line 1: column 'history' contains .*, want a list of pairs"):
            texts([{**row, "history": wrong}], type="auto")
    with pytest.raises(DataError, match="line 1: column 'past' does not exist"):
        texts([row], type="auto", column_names={"history": "past"})


THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if enable_thinking is false %}QUIET{% endif %}"
)


def test_template_variables_of_a_row_are_used(unused_in, texts, write_template, tmp_path):
    """Catches rows that are all rendered with the variables of the dataset, and unknown variables."""
    rows = [
        {"messages": [USER, ASSISTANT], "chat_template_kwargs": each} for each in ({"enable_thinking": False}, None)
    ]
    entry = {"type": "chat", "chat_template": write_template(THINKING)}
    for kind in ("jsonl", "parquet"):
        found = texts(rows, file=kind, **entry)
        assert [text.endswith("QUIET") for text, _ in found] == [True, False]
        found = texts(tmp_path / f"rows.{kind}", **entry, chat_template_kwargs={"enable_thinking": True})
        assert [text.endswith("QUIET") for text, _ in found] == [True, False]
    rows[1]["chat_template_kwargs"] = '{"colour": "red"}'
    assert unused_in(rows, **entry) == ["chat_template_kwargs.colour"]
    rows[1]["chat_template_kwargs"] = [1]
    with pytest.raises(DataError, match="line 2: column 'chat_template_kwargs' is list, want an object"):
        texts(rows, **entry)


def test_two_conversations_or_two_reasonings_are_refused(unused_in, texts, tmp_path):
    """Catches the second of two columns or keys that mean the same, dropped without a word."""
    share = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Other"}]
    path = write_as("jsonl", tmp_path, [{"messages": [USER, ASSISTANT], "conversations": share}])
    with pytest.raises(DataError, match="line 1: columns 'messages' and 'conversations' both have a conversation"):
        texts(path, type="chat")
    entry = {"type": "chat", "column_names": {"messages": "conversations"}}
    assert texts(path, **entry)[0][1] == ["Other<|end|>"]
    assert unused_in(path, **entry) == ["messages"]
    answer = {**ASSISTANT, "thinking": "a"}
    texts([{"messages": [USER, {**answer, "reasoning_content": "a"}]}], type="chat")
    with pytest.raises(DataError, match="line 1: message 1 has different texts in thinking and reasoning"):
        texts([{"messages": [USER, {**answer, "reasoning": "b"}]}], type="chat")


CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name ~ (c.function.arguments | tojson) }};{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_parallel_calls_of_sharegpt_are_read(texts, write_template):
    """Catches a list of calls that is refused, in ShareGPT's role and in the older key of OpenAI."""
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    entry = {"type": "chat", "chat_template": write_template(CALLS)}
    for value in (calls, json.dumps(calls)):
        turns = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": value}]
        rows = [{"conversations": turns}, {"messages": [USER, {"role": "assistant", "function_call": value}]}]
        for _, trained in texts(rows, **entry):
            assert trained == ['f{"x": 1};g{};<|end|>']
    for wrong, shown in (([], "an empty list"), ([5], "int"), ("[1]", "int"), (7, "int")):
        turns = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": wrong}]
        with pytest.raises(DataError, match=f"message 1 contains {shown}, want a call or a list of calls"):
            texts([{"conversations": turns}], **entry)


def test_parts_and_calls_have_no_masks_of_their_own(unused_in, texts, write_template):
    """Catches a part of an answer that is trained although its key excludes it, and keys of parts dropped silently."""
    entry = {"type": "chat", "chat_template": write_template(CALLS)}
    for key, value in (("train", False), ("weight", 0), ("weight", 0.5), ("loss_mask", 1)):
        part = {"type": "text", "text": "BAD", key: value}
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, key: value}
        for content in ({"content": [part, {"type": "text", "text": "ok"}]}, {"tool_calls": [call]}):
            with pytest.raises(
                DataError, match=f"line 1: message 1: a part of its content or a tool call sets {key}: "
            ):
                texts([{"messages": [USER, {"role": "assistant", **content}]}], **entry)
    part = {"type": "text", "text": "ok", "train": True, "weight": None, "cache_control": "x"}
    function = {"name": "f", "arguments": {"x": 1}, "strict": True}
    answer = {"role": "assistant", "content": [part], "tool_calls": [{"id": "1", "function": function, "by": "me"}]}
    assert unused_in([{"messages": [USER, answer]}], **entry) == [
        *("messages[].content[].cache_control", "messages[].content[].train"),
        *("messages[].tool_calls[].by", "messages[].tool_calls[].function.strict"),
    ]


def test_repeated_keys_in_json_text_are_refused(texts):
    """Catches the last of two values being read from JSON that a column or a call holds as text."""
    twice = '{"name": "f", "name": "g", "arguments": {}}'
    whole = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "content": "c"}]'
    arguments = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1, "x": 2}'}}]}
    call = [{"from": "human", "value": "a"}, {"from": "function_call", "value": twice}]
    for row, key in (
        ({"messages": whole}, "content"),
        ({"messages": [USER, arguments]}, "x"),
        ({"conversations": call}, "name"),
        ({"messages": [USER, ASSISTANT], "tools": f"[{twice}]"}, "name"),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": '{"x": 1, "x": 2}'}, "x"),
    ):
        for kind in ("jsonl", "parquet"):
            with pytest.raises(DataError, match=f"has the key '{key}' twice in one object"):
                texts([row], file=kind, type="chat")


def test_a_message_before_the_last_turn_cannot_ask_to_be_trained(texts):
    """Catches a key of an assistant message that train_on: last_turn overrides silently."""
    messages = [USER, {**ASSISTANT, "train": True}, USER, {"role": "assistant", "content": "Last"}]
    with pytest.raises(DataError, match=r"line 1: message 1 is to be trained, but train_on: last_turn excludes it"):
        texts([{"messages": messages}], type="chat", train_on="last_turn")
    messages[1]["train"], messages[3]["train"] = False, True
    assert texts([{"messages": messages}], type="chat", train_on="last_turn")[0][1] == ["Last<|end|>"]


def test_content_beside_from_is_refused(texts):
    """Catches a message of two texts, of which one replaced the other."""
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "content": "c"}]
    with pytest.raises(DataError, match="line 1: message 1 has content beside from; write role and content, or from"):
        texts([{"conversations": turns}], type="chat")


@pytest.mark.parametrize("kind", ["chat", "auto", "prompt_completion"])
def test_messages_in_prompt_and_completion_are_one_conversation(texts, tmp_path, kind):
    """Catches TRL's conversational rows that are refused, or trained on the answers of the prompt."""
    early = [USER, {"role": "assistant", "content": "Old"}, USER]
    row = {"prompt": early, "completion": [ASSISTANT], "system": "Be kind."}
    body = "<|user|>Hi<|end|>\n<|assistant|>Old<|end|>\n<|user|>Hi<|end|>\n<|assistant|>Hello<|end|>\n"
    whole = f"<|system|>Be kind.<|end|>\n{body}"
    for file in ("jsonl", "parquet"):
        path = write_as(file, tmp_path, [row])
        assert texts(path, type=kind) == [(whole, ["Hello<|end|>"])]
        everything = texts(path, type=kind, train_on="all")
        assert everything == [(whole, [whole.removeprefix("<|system|>")])]
        # CSV files, and some others, hold messages as JSON.
        as_json = {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
        assert texts([as_json], file=file, type=kind) == [(whole, ["Hello<|end|>"])]
        names = {"prompt": "p", "completion": "c"}
        renamed_row = {names.get(name, name): value for name, value in row.items()}
        if kind != "auto":
            assert texts([renamed_row], file=file, type=kind, column_names=names) == [(whole, ["Hello<|end|>"])]
    if kind == "prompt_completion":
        # Text that only looks like messages remains text.
        for text in ("[1]", "[]", "[x", '[{"a": "b"}]'):
            found = texts([{"prompt": text, "completion": text}], type=kind)
            assert found == [(f"{text}{text}<|end|>", [f"{text}<|end|>"])]
        [(_, trained)] = texts([renamed_row], file="parquet", type=kind, train_on="completion", column_names=names)
        assert trained == ["Hello<|end|>"]
    with pytest.raises(DataError, match="line 1: message 1 has role user after user"):
        texts([{"prompt": [USER], "completion": [USER]}], type=kind)


ENDS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '<|pad|> \n' if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_the_tokens_that_end_trained_text_are_in_the_receipt(
    prepare_rows, write_template, text_stream, text_options, tmp_path
):
    """Catches an end token of a template that nobody can add to the tokens that stop generation."""
    rows = [{"messages": [USER, ASSISTANT, USER, ASSISTANT]}] * 3
    path = write_as("jsonl", tmp_path, rows)
    template = write_template(ENDS)
    expected = {"assistant": {"<|pad|>": 6}, "all": {"<|pad|>": 3}, "last_turn": {"<|pad|>": 3}}
    for train_on, tokens in expected.items():
        entry = {"type": "chat", "chat_template": template, "train_on": train_on}
        for _ in range(2):  # prepared, and loaded
            assert prepare_rows(rows, text_options, **entry).receipt.end_tokens == tokens
        assert check_first_samples(text_stream(path, **entry)).findings[0].end_tokens == tokens
    prompts = prepare_rows([{"prompt": "a", "completion": "b"}], text_options, type="auto")
    assert prompts.receipt.end_tokens == {"<|end|>": 1}
    assert prepare_rows([{"input_ids": np.arange(5).tolist()}], text_options).receipt.end_tokens == {}
