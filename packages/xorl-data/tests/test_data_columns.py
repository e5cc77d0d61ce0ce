"""Columns and message keys: those that are repeated, not used, or mask text, and what rows say beside the messages."""

import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from xorl.data import DataError, DatasetEntry, prepare
from xorl.data.formats import load_tokenizer
from xorl.data.inspect import text_segments, trained_texts
from xorl.data.stream import StreamOptions, check_first_samples, open_stream, read_sample

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
HEAD = "<|user|>Hi<|end|>\n<|assistant|>"


def texts(path, options, **entry):
    """(whole text, trained texts) of each document of a file."""
    documents = prepare([DatasetEntry(str(path), **entry)], options)
    tokenizer = load_tokenizer(options.tokenizer_folder)
    parts = [text_segments(*documents.document(index), tokenizer) for index in range(len(documents))]
    return [("".join(part.text for part in own), list(trained_texts(own))) for own in parts]


def stream_of(path, options, **entry):
    return open_stream(
        [DatasetEntry(str(path), **entry)],
        StreamOptions(bin_len=512, tokenizer_folder=options.tokenizer_folder),
        index_path=options.prepared_path / "streams",
    )


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
    elif kind == "feather":
        pa.feather.write_feather(table, path)
    elif kind == "arrow stream":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif kind == "parquet nested":
        struct = pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["answer", "answer"])
        plain = [pa.array(["q"]), pa.array(["a"])]
        table = pa.Table.from_arrays([*plain, struct], names=["question", "answer", "extra"])
        pa.parquet.write_table(table, path)
    else:
        pa.parquet.write_table(table, path)
    return path


KINDS = ("csv", "tsv", "json", "jsonl", "parquet", "parquet nested", "feather", "arrow", "arrow stream")


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_column_is_refused_in_every_format(text_options, tmp_path, kind):
    """Catches two columns of one name of which the last is trained, prepared or streamed."""
    path = write_repeated(kind, tmp_path)
    with pytest.raises(DataError, match=r"rows.*'(extra\.)?answer' twice"):
        prepare([DatasetEntry(str(path), type="prompt_completion")], text_options)
    with pytest.raises(DataError, match=r"rows.*'(extra\.)?answer' twice"):
        read_sample(stream_of(path, text_options, type="prompt_completion"), 1)


def test_a_repeated_column_of_token_rows_is_refused(text_options, tmp_path):
    """Catches keys of token rows that are repeated, which the fast path does not parse."""
    for key in ("input_ids", "labels", "other"):
        path = tmp_path / "rows.jsonl"
        path.write_text(f'{{"input_ids": [1, 2], "{key}": [1, 2], "{key}": [3, 4]}}\n')
        with pytest.raises(DataError, match=r"rows.jsonl, line 1 has the key '.*' twice"):
            prepare([DatasetEntry(str(path))], text_options)


def test_columns_without_names_may_be_repeated(text_options, tmp_path):
    """Catches CSV files whose lines end with commas, whose unnamed columns nobody can mean."""
    path = tmp_path / "rows.csv"
    path.write_text("question,answer,,\nq,a,,\n")
    assert texts(path, text_options, type="prompt_completion") == [("q\n\na<|end|>", ["a<|end|>"])]


def test_files_in_utf16_are_named(text_options, tmp_path):
    """Catches the CSV files of spreadsheets, and JSON lines, whose error speaks of columns or bytes."""
    for name, text in (("rows.csv", "text,b\nHi,c\n"), ("rows.jsonl", '{"text": "Hi"}\n'), ("rows.json", "[]")):
        path = tmp_path / name
        for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
            path.write_bytes(text.encode(encoding))
            with pytest.raises(DataError, match=rf"{name} is UTF-16 or UTF-32, want UTF-8; convert"):
                prepare([DatasetEntry(str(path), type="text")], text_options)


def unused_in(path, options, caplog, **entry):
    """The columns and keys that are named as not used: in the log and the receipt, prepared and streamed."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        [receipt] = prepare([DatasetEntry(str(path), **entry)], options).receipt.datasets
    lines = [message for message in caplog.messages if "not used" in message]
    named = receipt.findings.unused
    expected = [f"{path}: columns and message keys that are not used: {', '.join(named)}"] if named else []
    assert lines == expected
    assert check_first_samples(stream_of(path, options, **entry), strict=False).findings[0].unused == named
    return sorted(named)


def write_rows(kind, folder, rows):
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        pa.feather.write_feather(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "feather"])
def test_columns_and_keys_that_are_not_used_are_named(text_options, tmp_path, caplog, kind):
    """Catches columns and message keys that are dropped without a word, and used ones that are called unused."""
    other = {"id": 5, "empty": None}
    messages = [{**USER, "name": "Ann"}, {**ASSISTANT, "source": "web"}]
    template = tmp_path / "names.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m['name'] if m.name }}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    chat = write_rows(kind, tmp_path, [{"messages": messages, **other}] * 3)
    found = unused_in(chat, text_options, caplog, type="chat")
    assert found == ["id", "messages[].name", "messages[].source"]
    found = unused_in(chat, text_options, caplog, type="chat", chat_template=str(template))
    assert found == ["id", "messages[].source"]
    prompt = {"prompt": "a", "completion": "b"}
    both = [{**prompt, "text": "c", "tag": None, **other}, {**prompt, "tag": "d"}]
    rows = write_rows(kind, tmp_path, both)
    assert unused_in(rows, text_options, caplog, type="prompt_completion") == ["id", "tag", "text"]
    rows = write_rows(kind, tmp_path, [{"text": "a", **other}])
    assert unused_in(rows, text_options, caplog, type="text") == ["id"]
    rows = write_rows(kind, tmp_path, [{"input_ids": [1, 2], "token_type_ids": [0, 0], "id": 5}])
    assert unused_in(rows, text_options, caplog) == ["id", "token_type_ids"]
    rows = write_rows(kind, tmp_path, [{"text": "a"}])
    assert unused_in(rows, text_options, caplog, type="text") == []


@pytest.mark.parametrize("key", ["train", "training", "trainable", "loss", "weight"])
def test_keys_that_exclude_a_message_are_honoured(text_options, tmp_path, key):
    """Catches an answer that is trained although its data excludes it, under the key of another trainer."""
    bad = {"role": "assistant", "content": "BAD"}
    for off, on in ((False, True), (0, 1)):
        messages = [USER, {**bad, key: off}, USER, {**ASSISTANT, key: on}]
        [(text, trained)] = texts(write_rows("jsonl", tmp_path, [{"messages": messages}]), text_options, type="chat")
        assert "BAD" in text
        assert trained == ["Hello<|end|>"]
        with pytest.raises(DataError, match=r"message 1 is not to be trained, but train_on: all trains every token"):
            texts(write_rows("jsonl", tmp_path, [{"messages": messages}]), text_options, type="chat", train_on="all")
    for value in (0.5, "false", "no", [1]):
        path = write_rows("jsonl", tmp_path, [{"messages": [USER, {**ASSISTANT, key: value}]}])
        with pytest.raises(DataError, match=rf"line 1: message 1: {key} must be true or false \(1 or 0\)"):
            texts(path, text_options, type="chat")


@pytest.mark.parametrize(
    "key", ["mask", "loss_mask", "train_detail", "loss_scale", "response_mask", "loss_masking_spans"]
)
def test_keys_that_xorl_does_not_have_are_refused_by_name(text_options, tmp_path, key):
    """Catches masks and weights of other trainers that are ignored, in a message or beside one, in every type."""
    path = write_rows("jsonl", tmp_path, [{"messages": [USER, {**ASSISTANT, key: 0}]}])
    with pytest.raises(DataError, match=rf"line 1: message 1 has the key '{key}', which masks messages or gives"):
        texts(path, text_options, type="chat")
    rows = {
        "chat": {"messages": [USER, ASSISTANT]},
        "prompt_completion": {"prompt": "a", "completion": "b"},
        "text": {"text": "a"},
        "tokenized": {"input_ids": [1, 2]},
    }
    for kind, row in rows.items():
        for file in ("jsonl", "parquet"):
            # A key that only a later row of JSON lines has; Parquet's rows all have the columns of the first one.
            path = write_rows(file, tmp_path, [row | ({key: None} if file == "parquet" else {}), {**row, key: [0, 1]}])
            with pytest.raises(DataError, match=rf"rows.*column '{key}' .*gives? them weights"):
                texts(path, text_options, type=kind)
            with pytest.raises(DataError, match=rf"column '{key}' .*gives? them weights"):
                read_sample(stream_of(path, text_options, type=kind), 2)
            left_out = texts(path, text_options, type=kind, ignore_columns=[key])
            assert left_out == texts(write_rows(file, tmp_path, [row, row]), text_options, type=kind)
            # Columns of nulls mask nothing.
            texts(write_rows(file, tmp_path, [{**row, key: None}]), text_options, type=kind)


def test_a_message_of_a_prompt_cannot_ask_to_be_trained(text_options, tmp_path):
    """Catches a key of an assistant message that is ignored because prompts are not trained."""
    row = {"prompt": [USER, {**ASSISTANT, "train": True}, USER], "completion": [ASSISTANT]}
    path = write_rows("jsonl", tmp_path, [row])
    with pytest.raises(DataError, match=r"line 1: message 1 is in column 'prompt', which is not trained, but its key"):
        texts(path, text_options, type="chat")
    row["prompt"][1]["train"] = False
    assert len(texts(write_rows("jsonl", tmp_path, [row]), text_options, type="chat")) == 1


def test_ignored_columns_do_not_choose_the_type(text_options, tmp_path):
    """Catches a column that is left out, and yet decides how the rows are read."""
    path = write_rows("jsonl", tmp_path, [{"text": "a", "input_ids": [1, 2], "loss": 0.5}])
    assert texts(path, text_options, type="auto", ignore_columns=["input_ids", "loss"])[0][0] == "a<|end|>"


def test_rows_may_say_that_they_are_trained_as_usual(text_options, tmp_path):
    """Catches a refusal of flags that change nothing, and rows that are trained although they exclude themselves."""
    row = {"messages": [USER, ASSISTANT]}
    for name, value in (("train", True), ("loss", 1), ("weight", 1.0), ("mask", "User")):
        path = write_rows("jsonl", tmp_path, [{**row, name: value}])
        assert texts(path, text_options, type="chat") == [(f"{HEAD}Hello<|end|>\n", ["Hello<|end|>"])]
    for name, value in (("train", False), ("weight", 0.5), ("mask", "Assistant")):
        path = write_rows("jsonl", tmp_path, [{**row, name: value}])
        with pytest.raises(DataError, match=rf"line 1: column '{name}' is {value!r}: it masks rows"):
            texts(path, text_options, type="chat")
    # A column that is named is data, whatever its name, and selected columns of ids leave others out.
    path = write_rows("jsonl", tmp_path, [{"mask": "a"}])
    assert texts(path, text_options, type="text", column_names={"text": "mask"})[0][0] == "a<|end|>"
    path = write_rows("jsonl", tmp_path, [{"input_ids": [1, 2], "loss_mask": [0, 1]}])
    prepare([DatasetEntry(str(path), columns=("input_ids",))], text_options)


def test_system_and_history_of_instruction_rows_are_used(text_options, tmp_path):
    """Catches prompts without their system message and earlier turns, in every file and under other names."""
    row = {"instruction": "and in winter?", "input": "", "output": "cold"}
    row |= {"system": "You are a weather bot", "history": [["weather in summer?", "hot"], ["in fall?", "wet"]]}
    prompt = "You are a weather bot\n\nweather in summer?\n\nhot\n\nin fall?\n\nwet\n\nand in winter?\n\n"
    expected = [(f"{prompt}cold<|end|>", ["cold<|end|>"])]
    for kind in ("jsonl", "parquet", "feather"):
        assert texts(write_rows(kind, tmp_path, [row]), text_options, type="prompt_completion") == expected
    as_text = {**row, "history": json.dumps(row["history"])}
    assert texts(write_rows("jsonl", tmp_path, [as_text]), text_options, type="auto") == expected
    names = {"system": "sys", "history": "past", "instruction": "do", "input": "input", "output": "output"}
    renamed = {names[name]: value for name, value in row.items()}
    for kind in ("jsonl", "parquet"):
        path = write_rows(kind, tmp_path, [renamed])
        assert texts(path, text_options, type="prompt_completion", column_names=names) == expected
    for empty in (None, [], ""):
        path = write_rows("jsonl", tmp_path, [{**row, "system": None, "history": empty}])
        assert texts(path, text_options, type="auto")[0][0] == "and in winter?\n\ncold<|end|>"
    for wrong in ([["a"]], ["a", "b"], "words", [["a", 1]]):
        path = write_rows("jsonl", tmp_path, [{**row, "history": wrong}])
        with pytest.raises(DataError, match=r"line 1: column 'history' contains .*, want a list of pairs"):
            texts(path, text_options, type="auto")
    with pytest.raises(DataError, match="line 1: column 'past' does not exist"):
        texts(write_rows("jsonl", tmp_path, [row]), text_options, type="auto", column_names={"history": "past"})


THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if enable_thinking is false %}QUIET{% endif %}"
)


def test_template_variables_of_a_row_are_used(text_options, tmp_path, caplog):
    """Catches rows that are all rendered with the variables of the dataset, and unknown variables."""
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING)
    rows = [
        {"messages": [USER, ASSISTANT], "chat_template_kwargs": each} for each in ({"enable_thinking": False}, None)
    ]
    entry = {"type": "chat", "chat_template": str(template)}
    for kind in ("jsonl", "parquet"):
        found = texts(write_rows(kind, tmp_path, rows), text_options, **entry)
        assert [text.endswith("QUIET") for text, _ in found] == [True, False]
        found = texts(tmp_path / f"rows.{kind}", text_options, **entry, chat_template_kwargs={"enable_thinking": True})
        assert [text.endswith("QUIET") for text, _ in found] == [True, False]
    rows[1]["chat_template_kwargs"] = '{"colour": "red"}'
    path = write_rows("jsonl", tmp_path, rows)
    assert unused_in(path, text_options, caplog, **entry) == ["chat_template_kwargs.colour"]
    rows[1]["chat_template_kwargs"] = [1]
    with pytest.raises(DataError, match="line 2: column 'chat_template_kwargs' is list, want an object"):
        texts(write_rows("jsonl", tmp_path, rows), text_options, **entry)


def test_two_conversations_or_two_reasonings_are_refused(text_options, tmp_path, caplog):
    """Catches the second of two columns or keys that mean the same, dropped without a word."""
    share = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Other"}]
    path = write_rows("jsonl", tmp_path, [{"messages": [USER, ASSISTANT], "conversations": share}])
    with pytest.raises(DataError, match="line 1: columns 'messages' and 'conversations' both have a conversation"):
        texts(path, text_options, type="chat")
    entry = {"type": "chat", "column_names": {"messages": "conversations"}}
    assert texts(path, text_options, **entry)[0][1] == ["Other<|end|>"]
    assert unused_in(path, text_options, caplog, **entry) == ["messages"]
    answer = {**ASSISTANT, "thinking": "a"}
    path = write_rows("jsonl", tmp_path, [{"messages": [USER, {**answer, "reasoning_content": "a"}]}])
    texts(path, text_options, type="chat")
    path = write_rows("jsonl", tmp_path, [{"messages": [USER, {**answer, "reasoning": "b"}]}])
    with pytest.raises(DataError, match="line 1: message 1 has different texts in thinking and reasoning"):
        texts(path, text_options, type="chat")


CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name ~ (c.function.arguments | tojson) }};{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_parallel_calls_of_sharegpt_are_read(text_options, tmp_path):
    """Catches a list of calls that is refused, in ShareGPT's role and in the older key of OpenAI."""
    template = tmp_path / "calls.jinja"
    template.write_text(CALLS)
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    entry = {"type": "chat", "chat_template": str(template)}
    for value in (calls, json.dumps(calls)):
        turns = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": value}]
        rows = [{"conversations": turns}, {"messages": [USER, {"role": "assistant", "function_call": value}]}]
        for _, trained in texts(write_rows("jsonl", tmp_path, rows), text_options, **entry):
            assert trained == ['f{"x": 1};g{};<|end|>']
    for wrong, shown in (([], "an empty list"), ([5], "int"), ("[1]", "int"), (7, "int")):
        turns = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": wrong}]
        with pytest.raises(DataError, match=f"message 1 contains {shown}, want a call or a list of calls"):
            texts(write_rows("jsonl", tmp_path, [{"conversations": turns}]), text_options, **entry)


def test_parts_and_calls_have_no_masks_of_their_own(text_options, tmp_path, caplog):
    """Catches a part of an answer that is trained although its key excludes it, and keys of parts dropped silently."""
    template = tmp_path / "calls.jinja"
    template.write_text(CALLS)
    entry = {"type": "chat", "chat_template": str(template)}
    for key, value in (("train", False), ("weight", 0), ("weight", 0.5), ("loss_mask", 1)):
        part = {"type": "text", "text": "BAD", key: value}
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, key: value}
        for content in ({"content": [part, {"type": "text", "text": "ok"}]}, {"tool_calls": [call]}):
            path = write_rows("jsonl", tmp_path, [{"messages": [USER, {"role": "assistant", **content}]}])
            with pytest.raises(
                DataError, match=f"line 1: message 1: a part of its content or a tool call sets {key}: "
            ):
                texts(path, text_options, **entry)
    part = {"type": "text", "text": "ok", "train": True, "weight": None, "cache_control": "x"}
    function = {"name": "f", "arguments": {"x": 1}, "strict": True}
    answer = {"role": "assistant", "content": [part], "tool_calls": [{"id": "1", "function": function, "by": "me"}]}
    path = write_rows("jsonl", tmp_path, [{"messages": [USER, answer]}])
    assert unused_in(path, text_options, caplog, **entry) == [
        *("messages[].content[].cache_control", "messages[].content[].train"),
        *("messages[].tool_calls[].by", "messages[].tool_calls[].function.strict"),
    ]


def test_repeated_keys_in_json_text_are_refused(text_options, tmp_path):
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
                texts(write_rows(kind, tmp_path, [row]), text_options, type="chat")


def test_a_message_before_the_last_turn_cannot_ask_to_be_trained(text_options, tmp_path):
    """Catches a key of an assistant message that train_on: last_turn overrides silently."""
    messages = [USER, {**ASSISTANT, "train": True}, USER, {"role": "assistant", "content": "Last"}]
    path = write_rows("jsonl", tmp_path, [{"messages": messages}])
    with pytest.raises(DataError, match=r"line 1: message 1 is to be trained, but train_on: last_turn excludes it"):
        texts(path, text_options, type="chat", train_on="last_turn")
    messages[1]["train"], messages[3]["train"] = False, True
    path = write_rows("jsonl", tmp_path, [{"messages": messages}])
    assert texts(path, text_options, type="chat", train_on="last_turn")[0][1] == ["Last<|end|>"]


def test_content_beside_from_is_refused(text_options, tmp_path):
    """Catches a message of two texts, of which one replaced the other."""
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "content": "c"}]
    with pytest.raises(DataError, match="line 1: message 1 has content beside from; write role and content, or from"):
        texts(write_rows("jsonl", tmp_path, [{"conversations": turns}]), text_options, type="chat")


@pytest.mark.parametrize("kind", ["chat", "auto", "prompt_completion"])
def test_messages_in_prompt_and_completion_are_one_conversation(text_options, tmp_path, kind):
    """Catches TRL's conversational rows that are refused, or trained on the answers of the prompt."""
    early = [USER, {"role": "assistant", "content": "Old"}, USER]
    row = {"prompt": early, "completion": [ASSISTANT], "system": "Be kind."}
    body = "<|user|>Hi<|end|>\n<|assistant|>Old<|end|>\n<|user|>Hi<|end|>\n<|assistant|>Hello<|end|>\n"
    whole = f"<|system|>Be kind.<|end|>\n{body}"
    for file in ("jsonl", "parquet"):
        path = write_rows(file, tmp_path, [row])
        assert texts(path, text_options, type=kind) == [(whole, ["Hello<|end|>"])]
        everything = texts(path, text_options, type=kind, train_on="all")
        assert everything == [(whole, [whole.removeprefix("<|system|>")])]
        # CSV files, and some others, hold messages as JSON.
        as_json = {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
        assert texts(write_rows(file, tmp_path, [as_json]), text_options, type=kind) == [(whole, ["Hello<|end|>"])]
        names = {"prompt": "p", "completion": "c"}
        renamed_row = {names.get(name, name): value for name, value in row.items()}
        renamed = write_rows(file, tmp_path, [renamed_row])
        if kind != "auto":
            assert texts(renamed, text_options, type=kind, column_names=names) == [(whole, ["Hello<|end|>"])]
    if kind == "prompt_completion":
        # Text that only looks like messages remains text.
        for text in ("[1]", "[]", "[x", '[{"a": "b"}]'):
            found = texts(
                write_rows("jsonl", tmp_path, [{"prompt": text, "completion": text}]), text_options, type=kind
            )
            assert found == [(f"{text}{text}<|end|>", [f"{text}<|end|>"])]
        path = write_rows("parquet", tmp_path, [renamed_row])
        assert texts(path, text_options, type=kind, train_on="completion", column_names=names)[0][1] == ["Hello<|end|>"]
    with pytest.raises(DataError, match="line 1: message 1 has role user after user"):
        texts(write_rows("jsonl", tmp_path, [{"prompt": [USER], "completion": [USER]}]), text_options, type=kind)


def test_the_tokens_that_end_trained_text_are_in_the_receipt(text_options, tmp_path):
    """Catches an end token of a template that nobody can add to the tokens that stop generation."""
    rows = [{"messages": [USER, ASSISTANT, USER, ASSISTANT]}] * 3
    path = write_rows("jsonl", tmp_path, rows)
    template = tmp_path / "end.jinja"
    template.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '<|pad|> \n' if m.role == 'assistant' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    expected = {"assistant": {"<|pad|>": 6}, "all": {"<|pad|>": 3}, "last_turn": {"<|pad|>": 3}}
    for train_on, tokens in expected.items():
        entry = {"type": "chat", "chat_template": str(template), "train_on": train_on}
        for _ in range(2):  # prepared, and loaded
            assert prepare([DatasetEntry(str(path), **entry)], text_options).receipt.end_tokens == tokens
        stream = check_first_samples(stream_of(path, text_options, **entry))
        assert stream.findings[0].end_tokens == tokens
    prompts = write_rows("jsonl", tmp_path, [{"prompt": "a", "completion": "b"}])
    assert prepare([DatasetEntry(str(prompts), type="auto")], text_options).receipt.end_tokens == {"<|end|>": 1}
    ids = write_rows("jsonl", tmp_path, [{"input_ids": np.arange(5).tolist()}])
    assert prepare([DatasetEntry(str(ids))], text_options).receipt.end_tokens == {}
