"""Chat formats against stored ids and masks for each template family, and against transformers' own rendering."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from make_chat_golden import FAMILIES, FOLDER, conversations, encode, write_tokenizer
from xorl.data import DataError
from xorl.data.formats import ChatFormat
from xorl.data.formats.messages import read_conversation
from xorl.data.formats.template import load_template
from xorl.data.formats.turns import render_turns, special_pattern

EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_masks_are_those_that_were_looked_at(family: str, tmp_path: Path) -> None:
    # Catches a change of a mask by a token: a turn's end that is no longer trained, a header that is.
    tokenizer = write_tokenizer(family, tmp_path)
    made = {f"{family}/{name}": encode(row, tokenizer) for name, row in conversations().items()}
    assert made == {name: value for name, value in EXPECTED.items() if name.startswith(f"{family}/")}


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_apply_chat_template(family: str, tmp_path: Path) -> None:
    # Catches a sandbox, a filter or a way of tokenizing that differs from what serves the model later.
    tokenizer = write_tokenizer(family, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    compared = 0
    for row in conversations().values():
        made = encode(row, tokenizer)
        if "ids" in made:
            conversation = read_conversation(row, {})
            ids = theirs.apply_chat_template(conversation.messages, tools=conversation.tools, tokenize=True)[
                "input_ids"
            ]
            assert made["ids"] == ids
            compared += 1
    assert compared >= 4


def test_every_trained_turn_holds_its_message_and_ends_with_a_special_token() -> None:
    # Catches golden files that were written without looking: what they hold is checked against the conversations.
    for name, expected in EXPECTED.items():
        family, _, conversation = name.partition("/")
        turns = [m for m in conversations()[conversation]["messages"] if m["role"] == "assistant" and m.get("train", 1)]
        for number, (text, message) in enumerate(
            zip(expected.get("trained_text", []), turns, strict="ids" in expected)
        ):
            assert message["content"].strip() in text, name
            others = [turn["content"].strip() for turn in turns if turn is not message and turn["content"]]
            assert not any(other in text for other in others), name
            if family != "glm" or number < len(turns) - 1:
                assert text.endswith((">", "]")), name


WORDS = (
    "Yes.",
    "hello there",
    "\n",
    "  ",
    "<think>\nhm\n</think>\n\nok",
    "<|im_end|>",
    "</s>",
    "\u00e9",
    "x0x",
    "y1y",
    "",
)


def random_rows(num: int) -> list[dict[str, object]]:
    """Conversations with what templates and the rule treat otherwise: thoughts, blanks, special tokens, nothing."""
    choice = random.Random(0)
    rows: list[dict[str, object]] = []
    while len(rows) < num:
        messages: list[dict[str, object]] = [{"role": "system", "content": "Be short."}] * choice.randint(0, 1)
        for _ in range(choice.randint(1, 4)):
            said, answer = ("".join(choice.choices(WORDS, k=choice.randint(1, 4))) for _ in range(2))
            message: dict[str, object] = {"role": "assistant", "content": answer}
            if choice.random() < 0.3:
                message["reasoning_content"] = "".join(choice.choices(WORDS, k=2))
            if choice.random() < 0.2:
                message["train"] = choice.random() < 0.5
            messages += [{"role": "user", "content": said}, message]
        # Behind an answer that quotes an end token turns.py does not see the end that the template writes.
        if not any(str(message["content"]).rstrip().endswith((">",)) for message in messages):
            rows.append({"messages": messages})
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_of_one_shape_get_what_the_rule_gives_each(family: str, tmp_path: Path) -> None:
    # Catches a frame that is taken for a conversation which the template writes otherwise than the placeholders.
    form = ChatFormat(4096, "error", "limit", write_tokenizer(family, tmp_path))
    template = load_template("chat_template", None, form.tokenizer, with_tools=False)
    special = special_pattern(form.tokenizer.special_texts)
    compared = 0
    for row in random_rows(60):
        conversation = read_conversation(row, {})
        turns = [
            number
            for number, message in enumerate(conversation.messages)
            if message["role"] == "assistant" and conversation.trained[number] is not False
        ]
        try:
            wanted = render_turns(template, conversation, turns, special)
        except DataError as error:
            with pytest.raises(DataError, match=re.escape(str(error))):
                form.render(row)
        else:
            assert form.render(row) == wanted
            compared += 1
    assert compared > 5
