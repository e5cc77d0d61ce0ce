"""Finds the trained characters of a rendered conversation: those that the model itself would generate.

There are three methods, tried in this order. (1) Blocks: if the template marks {% generation %}, its blocks. (2)
Prefixes: if the whole rendering begins with that of the messages before the turn, with the generation prompt, and with
that of the messages up to and including the turn, the turn is the text between the ends of the two. (3) Alignment,
for templates that render earlier turns differently from the last one (without reasoning, or with another end token):
the conversation is rendered again with other contents for the turn, and the part that changes belongs to the turn. The
turn extends from the generation prompt before that part, or what it begins with, to the special token after it.

The result of each method is checked against the whole rendering. If all checks fail, the conversation is rejected. With
(2) and (3) a turn ends with its last special token, and whitespace after it is not trained. If the template writes no
special token, the turn ends with the special token that starts the next message, because the model would stop there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from xorl.data.errors import DataError
from xorl.data.formats.messages import Conversation
from xorl.data.formats.parts import text_in
from xorl.data.formats.spans import Rendered, Span
from xorl.data.formats.template import ChatTemplate, Message, TemplateRefusal

# Texts that replace a turn. Any other text differs from at least one of them at its start, and at its end.
_PROBES = ("x0x", "y1y")
# Added to messages to see where a template writes them: a Unicode noncharacter, which does not occur in text.
_TRACER = "\ufdd2"
# A message of at least this length does not occur in another one by chance.
_MIN_UNIQUE_CHARS = 24


@dataclass(frozen=True)
class Turn:
    """The characters of a turn in the whole rendering, and whether method (2) found it."""

    start: int
    end: int
    ended: bool
    by_prefix: bool


def special_pattern(texts: frozenset[str]) -> re.Pattern[str]:
    """A pattern that matches special tokens in a text, longest first."""
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def render_turns(
    template: ChatTemplate, conversation: Conversation, turns: Sequence[int], special: re.Pattern[str]
) -> Rendered:
    """Renders the whole conversation and finds the assistant messages `turns` in it.

    Raises DataError, without the location of the row, if the template rejects the conversation, or if the turns cannot
    be located with certainty.
    """
    messages, tools = conversation.messages, conversation.tools
    try:
        if template.marks_generation:
            return _by_blocks(template, conversation, turns, special)
        whole = template.render(messages, tools)
        spans: list[Span] = []
        num_unended = 0
        by_prefix = True
        for turn in turns:
            found = locate_turn(template, conversation, whole, turn, special, by_prefix=by_prefix)
            start, end, ended = found.start, found.end, found.ended
            # A template that renders one earlier turn differently does so for all, so prefixes would fail again.
            by_prefix = by_prefix and found.by_prefix
            check_tool_calls(template, conversation, turn, whole[start:end])
            if spans and start < spans[-1][1]:
                raise DataError(f"message {turn} overlaps the trained message before it in the rendering")
            spans.append((start, end))
            num_unended += not ended
    except TemplateRefusal as error:
        raise DataError(f"{template.name} rejects the conversation: {error}") from error
    return Rendered(whole, tuple(spans), num_unended)


def render_all(template: ChatTemplate, conversation: Conversation) -> Rendered:
    """Renders a conversation in which every character is trained. Raises DataError if the template rejects it."""
    messages, tools = conversation.messages, conversation.tools
    try:
        text = template.render(messages, tools)
        if any("tool_calls" in message for message in messages):
            others = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
            with suppress(TemplateRefusal):
                if template.render(others, tools) == text:
                    raise DataError(f"{template.name} omits the tool calls; use a template that supports tools")
    except TemplateRefusal as error:
        raise DataError(f"{template.name} rejects the conversation: {error}") from error
    return Rendered(text, None)


def check_tool_calls(template: ChatTemplate, conversation: Conversation, turn: int, text: str) -> None:
    """Raises DataError if the text of a turn lacks a tool call of its message."""
    calls = conversation.messages[turn].get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        if call["function"]["name"] not in text:
            raise DataError(
                f"{template.name} omits the tool call of message {turn}, so the model would learn to write nothing; "
                "use a template that supports tools, or remove the conversation"
            )


def _by_blocks(
    template: ChatTemplate, conversation: Conversation, turns: Sequence[int], special: re.Pattern[str]
) -> Rendered:
    text, blocks = template.render_marked(conversation.messages, conversation.tools)
    answers = [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    _check_blocks(template, conversation, len(answers), [text[a:b] for a, b in blocks])
    wanted = frozenset(turns)
    if len(turns) == len(answers):
        chosen = blocks
    elif len(blocks) == len(answers):
        chosen = [block for block, answer in zip(blocks, answers, strict=True) if answer in wanted]
    else:
        raise DataError(
            f"{template.name} marks {len(blocks)} generation blocks for {len(answers)} assistant messages, so they "
            "cannot be matched to single messages; train on all assistant messages"
        )
    if turns and not chosen:
        raise DataError(f"{template.name} has no generation block for the conversation")
    marked = "".join(text[a:b] for a, b in chosen)
    for turn in turns:
        check_tool_calls(template, conversation, turn, marked)
    return Rendered(text, tuple(chosen), sum(not is_ended(text[a:b], special) for a, b in chosen))


def _check_blocks(template: ChatTemplate, conversation: Conversation, num_answers: int, blocks: Sequence[str]) -> None:
    """Raises DataError if the generation blocks contain messages that are not the assistant's.

    An answer may also quote another message. The template is therefore rendered again with tracers in the other
    messages: first in all of them, then one by one.
    """
    messages = conversation.messages
    marked = [
        _traced(message) if message["role"] != "assistant" and text_in(message["content"]).strip() else message
        for message in messages
    ]
    with suppress(TemplateRefusal):
        text, spans = template.render_marked(marked, conversation.tools)
        if not any(_TRACER in text[start:stop] for start, stop in spans):
            return
    for number, message in enumerate(messages):
        if message is marked[number] or not any(text_in(message["content"]).strip() in block for block in blocks):
            continue
        text, spans = template.render_marked(
            [*messages[:number], marked[number], *messages[number + 1 :]], conversation.tools
        )
        if any(_TRACER in text[start:stop] for start, stop in spans):
            raise DataError(
                f"{template.name} marks {len(blocks)} generation blocks for {num_answers} assistant messages, and "
                f"they contain message {number}, whose role is {message['role']}; write {{% generation %}} and "
                "{% endgeneration %} only around what the template renders for assistant messages"
            )


def _traced(message: Message) -> Message:
    content = message["content"]
    traced = [*content, {"type": "text", "text": _TRACER}] if isinstance(content, list) else f"{content}{_TRACER}"
    return {**message, "content": traced}


def locate_turn(
    template: ChatTemplate,
    conversation: Conversation,
    whole: str,
    turn: int,
    special: re.Pattern[str],
    *,
    by_prefix: bool,
) -> Turn:
    """Finds one turn in the whole rendering, with method (2) if `by_prefix`, and otherwise with method (3).

    Raises DataError if it cannot be found with certainty, TemplateRefusal if the template rejects a rendering.
    """
    messages, tools = conversation.messages, conversation.tools
    before = template.render(messages[:turn], tools, add_generation_prompt=True)
    is_last = turn == len(messages) - 1
    if (by_prefix or is_last) and whole.startswith(before):
        after = whole if is_last else template.render(messages[: turn + 1], tools)
        if len(after) > len(before) and whole.startswith(after):
            return _with_end_token(whole, len(before), len(after), special)
    return _locate_by_alignment(template, conversation, whole, turn, before, special)


def _with_end_token(whole: str, start: int, end: int, special: re.Pattern[str]) -> Turn:
    stripped = whole[start:end].rstrip()
    if is_ended(stripped, special):
        return Turn(start, start + len(stripped), ended=True, by_prefix=True)
    following = special.match(whole, end)
    return Turn(start, following.end() if following else end, ended=following is not None, by_prefix=True)


def is_ended(text: str, special: re.Pattern[str]) -> bool:
    """Whether a text ends with a special token, apart from whitespace."""
    text = text.rstrip()
    return any(match.end() == len(text) for match in special.finditer(text))


def _locate_by_alignment(
    template: ChatTemplate, conversation: Conversation, whole: str, turn: int, before: str, special: re.Pattern[str]
) -> Turn:
    """Method (3). `before` is the rendering of the messages before the turn, with the generation prompt."""
    messages = conversation.messages
    first, last = _affected_region(template, conversation, whole, turn)
    start = (
        len(before)
        if whole.startswith(before)
        else _turn_start(template, conversation, whole, turn, before, first, special)
    )
    # An empty answer is directly after the generation prompt, or is not in the text at all.
    if first > last or first == last != start:
        raise DataError(f"{template.name} omits message {turn}, so it cannot be trained")
    _check_no_other_message(template, messages, turn, whole[start:last])
    # With other contents, the template may write another end token with the same last characters.
    inside = next((match for match in special.finditer(whole, start) if match.start() < last < match.end()), None)
    if inside is not None:
        return Turn(start, inside.end(), ended=True, by_prefix=False)
    if is_ended(whole[start:last], special):
        return Turn(start, last, ended=True, by_prefix=False)
    gap = len(whole[last:]) - len(whole[last:].lstrip())
    following = special.match(whole, last + gap)
    return Turn(start, following.end() if following else last, ended=following is not None, by_prefix=False)


def _turn_start(
    template: ChatTemplate,
    conversation: Conversation,
    whole: str,
    turn: int,
    before: str,
    first: int,
    special: re.Pattern[str],
) -> int:
    """The start of a turn: the end of the generation prompt before `first`, the first character that it affects."""
    unprompted = template.render(conversation.messages[:turn], conversation.tools)
    prompt = _generation_prompt(unprompted, before, special)
    if not prompt:
        # Spaces that the template writes before the content belong to the turn, as with prefixes.
        return len(whole[:first].rstrip()) + len(unprompted) - len(unprompted.rstrip())
    found = whole.rfind(prompt, 0, first)
    if found >= 0:
        return found + len(prompt)
    # The prompt may open a part that the template leaves out of finished turns, such as the model's reasoning. What
    # follows the prompt's special tokens then depends on this message alone, from its first character on.
    openings = (prompt[: match.end()] for match in special.finditer(prompt))
    if any(whole.endswith(opening, 0, first) for opening in openings):
        return first
    raise DataError(
        f"{template.name} is not stable: its generation prompt for message {turn}, {prompt[-60:]!r}, is not before "
        "that message in the whole conversation, so the text that the model would generate is unknown. Save the "
        "template as a file, write {% generation %} before and {% endgeneration %} after what it renders for the "
        "content of assistant messages, up to their end token, and set chat_template to that file"
    )


def _affected_region(template: ChatTemplate, conversation: Conversation, whole: str, turn: int) -> Span:
    """The range of the whole rendering that depends on the content of message `turn`."""
    messages = conversation.messages
    first, last = len(whole), 0
    for probe in _PROBES:
        changed: list[Message] = [*messages[:turn], {"role": "assistant", "content": probe}, *messages[turn + 1 :]]
        try:
            other = template.render(changed, conversation.tools)
        except TemplateRefusal:
            # Templates that check that roles alternate ignore calls and their results, but not text in their place.
            if "tool_calls" not in messages[turn]:
                raise
            return _affected_region_of_call(template, conversation, whole, turn)
        if probe not in other:
            raise DataError(f"{template.name} omits message {turn}, so it cannot be trained")
        same = _common_length(whole, other)
        same_end = _common_length(whole[::-1], other[::-1])
        first, last = min(first, same), max(last, len(whole) - same_end)
        # If the probe differs from the message at both ends, the region is exact and needs no other probe.
        if other.startswith(probe, same) and other.endswith(probe, 0, len(other) - same_end):
            break
    return first, last


def _affected_region_of_call(template: ChatTemplate, conversation: Conversation, whole: str, turn: int) -> Span:
    """Does the same for a tool call that the template does not let plain text replace.

    Renders the call as the last message, and locates its text in the whole rendering. The start is where the rendering
    changes if a text replaces the call and everything up to the next user message.
    """
    messages, tools = conversation.messages, conversation.tools
    after = template.render(messages[: turn + 1], tools)
    question = next((n for n in range(turn, len(messages)) if messages[n]["role"] == "user"), len(messages))
    start, first = len(after), len(whole)
    for probe in _PROBES:
        replaced: list[Message] = [*messages[:turn], {"role": "assistant", "content": probe}]
        start = min(start, _common_length(after, template.render(replaced, tools)))
        first = min(first, _common_length(whole, template.render([*replaced, *messages[question:]], tools)))
    if start == len(after) or not whole.startswith(after[start:], first):
        raise DataError(f"{template.name} writes the call of message {turn} differently if other messages follow")
    return first, first + len(after) - start


def _check_no_other_message(template: ChatTemplate, messages: Sequence[Message], turn: int, text: str) -> None:
    """Raises DataError if the text of a turn contains another message; short messages may occur in it by chance."""
    turn_json = json.dumps(messages[turn], ensure_ascii=False)
    for number, message in enumerate(messages):
        content = text_in(message["content"]).strip()
        if number == turn or len(content) < _MIN_UNIQUE_CHARS or content not in text:
            continue
        if json.dumps(content, ensure_ascii=False)[1:-1] not in turn_json:
            raise DataError(f"{template.name} writes message {number} into message {turn}, so neither can be located")


def _generation_prompt(unprompted: str, before: str, special: re.Pattern[str]) -> str:
    """The text that the template adds for add_generation_prompt, from the first difference or special token on."""
    common = _common_length(unprompted, before)
    inside = next((match for match in special.finditer(before) if match.start() < common < match.end()), None)
    return before[common if inside is None else inside.start() :]


def _common_length(one: str, other: str) -> int:
    """The length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
