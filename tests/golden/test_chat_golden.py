"""Chat formats against stored ids and masks for each template family, and against transformers' own rendering."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from make_chat_golden import FAMILIES, FOLDER, conversations, encode, write_tokenizer
from xorl.data.formats.messages import read_conversation

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
