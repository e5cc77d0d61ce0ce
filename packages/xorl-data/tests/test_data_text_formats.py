"""Conversations, prompts and plain text: which tokens they become, which are trained, and which rows are refused."""

import gzip
import json
import pickle
import sys
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from jinja2 import Undefined
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer

from data_files import write_jsonl, write_tokenizer
from xorl.data import DataError, DatasetEntry, prepare
from xorl.data.chunks import LoadedChunk, table_chunks
from xorl.data.formats import load_tokenizer
from xorl.data.formats.spans import Rendered, tokenize
from xorl.data.formats.template import sandbox

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CHAT = {"messages": [USER, ASSISTANT, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Yes"}]}


TURN = "<|user|>Hi<|end|>\n<|assistant|>Hello<|end|>\n"
CHAT_TEXT = TURN + "<|user|>And?<|end|>\n<|assistant|>Yes<|end|>\n"
SHARE = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
AUTO, ANY_CHAT, PROMPT = ({"type": kind} for kind in ("auto", "chat", "prompt_completion"))
SAMPLES = {
    "chat": (CHAT, ANY_CHAT, (CHAT_TEXT, ["Hello<|end|>", "Yes<|end|>"])),
    "last turn": (CHAT, {"type": "chat", "train_on": "last_turn"}, (CHAT_TEXT, ["Yes<|end|>"])),
    "all": (CHAT, {"type": "chat", "train_on": "all"}, (CHAT_TEXT, [CHAT_TEXT.removeprefix("<|user|>")])),
    "recognised": (CHAT, AUTO, (CHAT_TEXT, ["Hello<|end|>", "Yes<|end|>"])),
    "sharegpt": (SHARE, AUTO, (TURN, ["Hello<|end|>"])),
    "system column": (
        {"talk": [USER, ASSISTANT], "sys": "Be kind."},
        {"type": "chat", "column_names": {"messages": "talk", "system": "sys"}},
        (f"<|system|>Be kind.<|end|>\n{TURN}", ["Hello<|end|>"]),
    ),
    "parts of text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ASSISTANT]},
        ANY_CHAT,
        (TURN, ["Hello<|end|>"]),
    ),
    "prompt": ({"prompt": "2+2=", "completion": "4"}, AUTO, ("2+2=4<|end|>", ["4<|end|>"])),
    "alpaca": ({"instruction": "Add", "input": "2 2", "output": "4"}, PROMPT, ("Add\n\n2 2\n\n4<|end|>", ["4<|end|>"])),
    "alpaca without input": (
        {"instruction": "Hi", "input": "", "output": "Ho"},
        AUTO,
        ("Hi\n\nHo<|end|>", ["Ho<|end|>"]),
    ),
    "named columns": (
        {"q": "Why?", "a": "So."},
        {"type": "prompt_completion", "column_names": {"question": "q", "answer": "a"}},
        ("Why?\n\nSo.<|end|>", ["So.<|end|>"]),
    ),
    "prompt trained": (
        {"prompt": "2+2=", "completion": "4"},
        {"type": "prompt_completion", "train_on": "all"},
        ("2+2=4<|end|>", ["+2=4<|end|>"]),
    ),
    "text": ({"text": "One."}, AUTO, ("One.<|end|>", ["ne.<|end|>"])),
    "text column": (
        {"body": "One."},
        {"type": "text", "column_names": {"text": "body"}},
        ("One.<|end|>", ["ne.<|end|>"]),
    ),
}


@pytest.mark.parametrize(("row", "entry", "expected"), SAMPLES.values(), ids=SAMPLES)
def test_a_row_becomes_text_of_which_the_answer_is_trained(texts, row, entry, expected):
    """Catches prompts that are trained, answers or ends that are not, and columns that are mistaken for others."""
    assert texts([row], **entry) == [expected]


def test_a_tokenizer_that_begins_texts_with_bos_gives_exactly_one(texts, text_options, tmp_path):
    """Catches two BOS tokens, one of the data or template and one of the tokenizer, and none at all."""
    options = replace(text_options, tokenizer_folder=write_tokenizer(tmp_path / "bos", adds_bos=True))
    rows = [{"text": "One."}, {"text": "<|begin|>Twice."}]
    found = texts(rows, options, type="text")
    assert [text for text, _ in found] == ["<|begin|>One.<|end|>", "<|begin|>Twice.<|end|>"]
    prompts = [{"prompt": "a", "completion": "b"}]
    assert texts(prompts, options, type="auto")[0][0] == "<|begin|>ab<|end|>"
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: the text begins with two <\|begin\|> \(BOS\) tokens"):
        texts([{"text": "<|begin|><|begin|>One."}], options, type="text")


def test_texts_begin_with_the_tokens_that_their_tokenizer_gives_them(text_options, tmp_path):
    """Catches the space that is lost where BOS is written into a text, before a tokenizer of Llama's kind reads it."""
    folder = write_tokenizer(tmp_path / "spaces", adds_bos=True, spaces_first=True)
    options, theirs = replace(text_options, tokenizer_folder=folder), AutoTokenizer.from_pretrained(folder)
    end = [theirs.eos_token_id]
    texts = ["One two.", " One", "<|user|>One", "\nOne", "\N{LOWER ONE EIGHTH BLOCK}One"]
    file = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    found = prepare([DatasetEntry(file, type="text")], options)
    assert [found.document(index)[0].tolist() for index in range(len(texts))] == [
        theirs(text).input_ids + end for text in texts
    ]
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "a", "completion": "b"}])
    [ids, labels] = prepare([DatasetEntry(file, type="prompt_completion")], options).document(0)
    assert ids.tolist() == theirs("ab").input_ids + end
    assert (labels != -100).tolist() == [False, False, False, True, True]  # BOS, space, a, b, EOS


UNSTABLE = (
    "{% for message in messages %}{% if SKIP %}{{ '<|' + message.role + '|>' }}"
    "{% if loop.last and message.role == 'assistant' %}{{ '(thought)' }}{% endif %}"
    "{{ message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def test_an_empty_answer_trains_its_end_or_is_refused(texts, write_template):
    """Catches an answer of no words that is taken for one left out, and one left out for the answer before it."""
    turns = [USER, ASSISTANT, USER, {"role": "assistant", "content": ""}, USER, ASSISTANT]
    entry = {"type": "chat", "chat_template": write_template(UNSTABLE.replace("SKIP", "true"))}
    [(_, trained)] = texts([{"messages": turns}], **entry)
    assert trained == ["Hello<|end|>", "<|end|>", "(thought)Hello<|end|>"]
    write_template(UNSTABLE.replace("SKIP", "message.content"))
    with pytest.raises(DataError, match=r"line 1: .* omits message 3"):
        texts([{"messages": turns}], **entry)


def test_pad_that_equals_eos_leaves_the_end_trained(texts, text_options, tmp_path):
    """Catches masks made of `ids == pad`, after which a model never stops."""
    options = replace(text_options, tokenizer_folder=write_tokenizer(tmp_path / "pad", pad="<|end|>"))
    assert texts([CHAT], options, type="chat")[0][1] == ["Hello<|end|>", "Yes<|end|>"]


def test_a_template_is_a_file_or_a_name(texts, write_template):
    """Catches a template option that is read and not used."""
    template = write_template("{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}")
    found = texts([{"messages": [USER, ASSISTANT]}], type="chat", chat_template=template)
    # Without a generation prompt in the template, the header is not known to be one, and only the content is trained.
    assert found == [("[user]Hi<|end|>[assistant]Hello<|end|>", ["[assistant]Hello<|end|>"])]


CONVERSATIONS = {
    "order": ([ASSISTANT, USER], r"message 0 has role assistant at the start, want system or developer or user"),
    "two users": ([USER, USER, ASSISTANT], r"message 1 has role user after user, want assistant there"),
    "late system": ([USER, ASSISTANT, {"role": "system", "content": "x"}], r"message 2 has role system after assis"),
    "no answer": ([USER], r"no assistant message"),
    "empty": ([], r"the conversation is empty"),
    "not a list": ("Hi there", r"column 'messages' is a string that is not JSON"),
    "not messages": (["Hi"], r"message 0 is str, want an object"),
    "no role": ([{"content": "Hi"}], r"message 0 has no role, want one of system"),
    "unknown role": ([{"role": "narrator", "content": "Hi"}], r"message 0 has the role 'narrator'"),
    "number": ([USER, {"role": "assistant", "content": 5}], r"message 1: content is int, want a string"),
    "null": ([USER, {"role": "assistant", "content": None}], r"message 1: content is null, want a string"),
    "image": (
        [{"role": "user", "content": [{"type": "image_url"}]}, ASSISTANT],
        r"the conversation has images, which only a model",
    ),
    "audio": (
        [{"role": "user", "content": [{"type": "input_audio"}]}, ASSISTANT],
        r"message 0: content has a part that is of the type 'input_audio', which xorl does not support",
    ),
    "trained user": ([{**USER, "train": True}, ASSISTANT], r"message 0 of role user sets train, but only"),
}


ROWS = {
    **{name: ("chat", {"messages": messages}, message) for name, (messages, message) in CONVERSATIONS.items()},
    "no messages": (
        "chat",
        {"talk": []},
        "column 'messages' or 'conversations' does not exist; the columns are: talk",
    ),
    "no prompt": ("prompt_completion", {"prompt": "a"}, r"want the columns prompt and completion, or instruction"),
    "list": ("prompt_completion", {"prompt": [USER], "completion": "a"}, r"column 'prompt' is list.*type: chat"),
    "no completion": ("prompt_completion", {"prompt": "a", "completion": ""}, r"column 'completion' is empty"),
    "no text": ("text", {"body": "a"}, r"column 'text' does not exist, want a string; the columns are: body"),
    "no string": ("text", {"text": 5}, r"column 'text' is int, want a string"),
}


@pytest.mark.parametrize(("kind", "row", "message"), ROWS.values(), ids=ROWS)
def test_a_bad_row_of_text_is_named(text_options, tmp_path, kind, row, message):
    """Catches rows that are trained on although they mean nothing, and errors without the place of the row."""
    good = {"text": "a", "prompt": "a", "completion": "b", **CHAT}
    path = write_jsonl(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(DataError, match=message) as caught:
        prepare([DatasetEntry(path, type=kind)], text_options)
    assert str(caught.value).startswith(f"{path}, line 2: ")


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("rows.jsonl", "text", r"line 1 is a list, whose element 0 .* is str, want one object per line .*\(text\)$"),
        (
            "rows.jsonl.gz",
            "prompt_completion",
            r"line 1 is a list.*, want one object per line .*\(prompt, completion\)$",
        ),
        ("rows.json", "text", r"element 0 \(the first is 0\) is str, want an object with its columns \(text\)$"),
        ("rows.jsonl", "tokenized", r"line 1 is a list.*, want one object per line with input_ids; .* ds_type: text$"),
    ],
)
def test_lines_that_are_lists_are_told_what_their_type_wants(text_options, tmp_path, name, kind, said):
    """Catches lists of texts that are told how token ids are written, and not where they stand."""
    path = tmp_path / name
    content = b'["a", "b"]\n["c"]\n'
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match=said) as caught:
        prepare([DatasetEntry(path, type=kind)], text_options)
    assert str(caught.value).startswith(f"{path}, ")


def test_text_that_is_not_utf8_is_named(text_options, tmp_path):
    """Catches replacement characters that are trained on."""
    path = tmp_path / "rows.txt"
    path.write_bytes(b"good\n\xff\xfe\n")
    with pytest.raises(DataError, match=rf"{path}, line 2 is not UTF-8"):
        prepare([DatasetEntry(path, type="text")], text_options)


TEMPLATES = {
    "syntax": ("a\n{% for %}", r"own.jinja, line 2: the chat template has a syntax error"),
    "raises": ("{{ raise_exception('not today') }}", r"line 1: .*own.jinja rejects the conversation: not today"),
    "fails": ("{{ messages[0].content / 2 }}", r"line 1: .*own.jinja rejects the conversation: TypeError"),
    "escapes": ("{{ messages.__class__.__mro__ }}", r"line 1: .*own.jinja rejects the conversation: access to"),
    "drops": ("{{ messages[0].content }}<|end|>", r"line 1: .*own.jinja omits message 1"),
    "unstable": (
        "{% if add_generation_prompt %}!{% else %}?{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
        r"line 1: .*own.jinja is not stable: its generation prompt .*'!Hi'.*write \{% generation %\} before .* "
        r"chat_template",
    ),
}


@pytest.mark.parametrize(("source", "message"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_that_cannot_be_used_is_refused(prepare_rows, write_template, text_options, source, message):
    """Catches a mask that is guessed where the template does not tell, and a traceback of the template engine."""
    with pytest.raises(DataError, match=message):
        prepare_rows([{"messages": [USER, ASSISTANT]}], text_options, type="chat", chat_template=write_template(source))


def test_what_a_tokenizer_lacks_is_said(prepare_rows, text_options, tmp_path):
    """Catches an error of transformers in place of what to set."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"model_type": "qwen3"}')
    write_tokenizer(tmp_path / "bare", template=None)
    for name, kind, message in (
        ("bare", "chat", r"bare has no chat template. Set .*\[0\].chat_template"),
        ("none", "chat", r"none is not a folder \(looked at .*set a folder with"),
        ("empty", "chat", "empty has no tokenizer that can be loaded"),
        ("weights", "auto", "weights has no tokenizer; set"),
        (None, "chat", "needs a tokenizer"),
    ):
        options = replace(text_options, tokenizer_folder=name and tmp_path / name)
        with pytest.raises(DataError, match=f"tokenizer_folder: .*{message}"):
            prepare_rows([CHAT], options, type=kind)
    said = "chat_template: no.jinja is not a file .*the tokenizer's templates are: default"
    with pytest.raises(DataError, match=said):
        prepare_rows([CHAT], text_options, type="chat", chat_template="no.jinja")


ENTRIES = {
    "train_on": ({"type": "text", "train_on": "assistant"}, r"\[0\].train_on: assistant is not valid for type text"),
    "columns": (
        {"type": "chat", "column_names": {"text": "a"}},
        r"\[0\].column_names: 'text' is not valid for type chat",
    ),
    "template": ({"type": "text", "chat_template": "a"}, r"\[0\].chat_template: type text has no template"),
    "shapes": (
        {"type": "prompt_completion", "column_names": {"prompt": "a", "answer": "b"}},
        r"\[0\].column_names: prompt, answer do not belong together",
    ),
    "unknown columns": ({"type": "auto"}, r"\[0\].type: auto: .*the columns a are not known"),
}


@pytest.mark.parametrize(("entry", "message"), ENTRIES.values(), ids=ENTRIES)
def test_options_that_a_type_does_not_have_are_refused(prepare_rows, text_options, entry, message):
    """Catches an option that is accepted and ignored."""
    with pytest.raises(DataError, match=message):
        prepare_rows([{"a": "b"}], text_options, **entry)


def test_everything_that_decides_the_tokens_is_part_of_the_key(prepare_rows, write_template, text_options, tmp_path):
    """Catches a cache that trains on yesterday's tokens, template or mask."""
    template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"

    def is_cached(folder: Path = text_options.tokenizer_folder, **entry: str) -> bool:
        options = replace(text_options, tokenizer_folder=folder)
        return prepare_rows([CHAT] * 3, options, type="chat", **entry).receipt.datasets[0].cached

    assert not is_cached()
    assert is_cached()
    assert is_cached(write_tokenizer(tmp_path / "elsewhere"))
    assert not is_cached(train_on="last_turn")
    assert not is_cached(chat_template=write_template(template))
    assert not is_cached(chat_template=write_template(template + " "))
    assert not is_cached(write_tokenizer(tmp_path / "other", eos="<|begin|>"))
    assert not is_cached(write_tokenizer(tmp_path / "more", template=template))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_processes_give_what_one_gives(prepare_rows, text_options, tmp_path, monkeypatch, kind):
    """Catches a format or a chunk that cannot travel to another process, or is another there."""
    monkeypatch.setattr(sys.modules["xorl.data.prepare"], "_PARALLEL_TEXT_BYTES", 0)
    monkeypatch.setattr(sys.modules["xorl.data.readers"], "CHUNK_BYTES", 2000)
    rows = [CHAT, {"messages": CHAT["messages"][:2]}] * 40
    prepared = []
    for num_proc in (1, 2):
        options = replace(text_options, num_proc=num_proc, prepared_path=tmp_path / str(num_proc))
        prepared.append(prepare_rows(rows, options, file=kind, type="chat"))
    assert len(prepared[0]) == 80
    for index in range(80):
        assert all((a == b).all() for a, b in zip(*(p.document(index) for p in prepared), strict=True))


def test_columns_that_are_not_named_are_read_too(texts, write_template):
    """Catches an optional column (input, tools) that a reader of columns leaves out once others are named."""
    rows, names = [{"task": "Add", "input": "2 2", "output": "4", "other": 1}], {"instruction": "task"}
    [(text, _)] = texts(rows, file="parquet", type="prompt_completion", column_names=names)
    assert text == "Add\n\n2 2\n\n4<|end|>"
    template = write_template(
        "{{ (tools | length) if tools else 'no' }} tools{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    )
    rows, names = [{"talk": [USER, ASSISTANT], "tools": '[{"name": "f"}]', "other": 1}], {"messages": "talk"}
    [(text, _)] = texts(rows, file="parquet", type="chat", column_names=names, chat_template=template)
    assert text.startswith("1 tools")


def test_a_slice_of_a_table_travels_without_the_rest():
    """Catches preparation that sends the whole dataset to a process with every chunk."""
    table = pa.table({"text": ["word " * 1000] * 1000})
    chunks = list(table_chunks(table, "rows"))
    small = LoadedChunk("rows", "row", 5, 0, table.slice(5, 1))
    assert len(pickle.dumps(small)) < 10_000
    assert copy(small).rows() == small.rows()
    assert copy(chunks[0]).num_rows() == chunks[0].num_rows()


def test_a_token_on_the_border_is_trained_and_counted(prepare_rows, texts, text_options):
    """Catches an answer whose first token is lost because it begins with the template's last characters."""
    config = json.loads((text_options.tokenizer_folder / "tokenizer.json").read_text())
    config["model"]["merges"] = [["x", "y"]]
    config["model"]["vocab"]["xy"] = 300
    (text_options.tokenizer_folder / "tokenizer.json").write_text(json.dumps(config))
    rows = [{"prompt": "abx", "completion": "yz"}]
    assert texts(rows, type="auto") == [("abxyz<|end|>", ["xyz<|end|>"])]
    assert prepare_rows(rows, text_options, type="auto").receipt.total.straddling_tokens == 1


TOKENIZERS = {
    "plain": {},
    "changes letters": {"normalizer": {"type": "NFC"}},
    "puts a space at the beginning": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
    "takes the space before special tokens": {},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_lengths_of_tokens_place_them_as_offsets_do(text_options, name):
    """Catches a mask that is off where a character has several bytes, or where the tokenizer changes the text."""
    path = text_options.tokenizer_folder / "tokenizer.json"
    config = json.loads(path.read_text())
    config["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    for number, pair in enumerate([("l", "l"), ("h", "e"), ("\u0120", "w"), ("\u00c3", "\u00a9")]):
        config["model"]["merges"].append(list(pair))
        config["model"]["vocab"]["".join(pair)] = 300 + number
    config["pre_tokenizer"] |= TOKENIZERS[name].get("pre_tokenizer", {})
    config["normalizer"] = TOKENIZERS[name].get("normalizer")
    for token in config["added_tokens"]:
        token["lstrip"] = name == "takes the space before special tokens"
    path.write_text(json.dumps(config))
    tokenizer = load_tokenizer(text_options.tokenizer_folder)
    by_offsets = replace(tokenizer)
    vars(by_offsets)["bytes_of"] = None  # what it is for a tokenizer that does not work on bytes
    content = "hello \u00e9\u00e9 w\u00f6rld, \U0001f600 e\u0301 <|end|>\n  hell"
    texts = [Rendered(content, ((a, b),)) for a in range(len(content)) for b in range(a + 1, len(content) + 1)]
    texts += [Rendered(content, None), Rendered("", ()), Rendered(content, ((0, 3), (7, 9)))]
    chunk = LoadedChunk("rows", "row", 0, 0, [])
    found, wanted = (tokenize(texts, each, chunk) for each in (tokenizer, by_offsets))
    assert (tokenizer.bytes_of is not None) == (name in ("plain", "changes letters"))
    np.testing.assert_array_equal(found.input_ids, wanted.input_ids)
    np.testing.assert_array_equal(found.labels, wanted.labels)
    assert found.counts == wanted.counts
    assert found.counts.straddling_tokens
    # Catches a token that is lost because it begins or ends outside the span: he|ll.
    for each in (tokenizer, by_offsets):
        cut = tokenize([Rendered("hell", ((1, 3),))], each, chunk)
        assert cut.labels[-2:].tolist() == cut.input_ids[-2:].tolist()
        assert cut.counts.straddling_tokens == 2


def test_the_sandbox_lets_templates_see_what_jinjas_own_does():
    """Catches a short way through the sandbox that lets a template change a message, or reach what Python hides."""
    theirs, ours = ImmutableSandboxedEnvironment(), sandbox()
    for thing in ("text", ["item"], {"role": "user", "items": "a column of that name"}):
        for name in (*dir(thing), "role", "items", "absent"):
            wanted, found = theirs.getattr(thing, name), ours.getattr(thing, name)
            assert type(found) is type(wanted), name
            assert isinstance(wanted, Undefined | str) or getattr(found, "__name__", 0) == getattr(
                wanted, "__name__", 1
            )
            with suppress(SecurityError):
                str(wanted)
                continue
            with pytest.raises(SecurityError):
                str(found)
