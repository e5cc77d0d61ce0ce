"""Which characters of a rendered conversation are trained: those that the model itself would write.

Three methods, in this order. (1) If the template marks {% generation %}, its blocks. (2) Prefixes: a turn begins where
the rendering of the messages before it, with the generation prompt, ends. It ends where the rendering up to and
including it ends. Both must be prefixes of the whole rendering. (3) Alignment, for templates that render an earlier
turn differently from the last one (without its reasoning, with another end token): the turn is rendered again with
other contents. The part of the whole rendering that changes depends on the turn, and the turn reaches from the
generation prompt before that part to the special token after it.

The result of each method is checked against the whole rendering; a conversation that passes no check is refused. With
(2) and (3) a turn ends with its last special token, and whitespace after it is not trained; if the template writes
none, the turn ends with the special token that begins the next message, since the model would stop there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from xorl.data.errors import DataError
from xorl.data.formats.messages import Conversation
from xorl.data.formats.template import ChatTemplate, Message, TemplateRefusal

Span = tuple[int, int]
# No text begins or ends like both of them.
_PROBES = ("x0x", "y1y")
# A message of this length does not occur in another one by chance.
_TELLING_CHARS = 24


@dataclass(frozen=True)
class Rendered:
    """A conversation's text and its trained characters; `num_unended` turns have no end token.

    `lacks_reasoning`: the conversation has reasoning, but the text contains none of it.
    """

    text: str
    spans: tuple[Span, ...]
    num_unended: int = 0
    lacks_reasoning: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class _Turn:
    """A turn's place in the whole rendering, and the method that found it."""

    start: int
    end: int
    ended: bool
    by_prefix: bool


def special_pattern(texts: frozenset[str]) -> re.Pattern[str]:
    """Matches special tokens in a text, longest first."""
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def render_turns(
    template: ChatTemplate, conversation: Conversation, turns: Sequence[int], special: re.Pattern[str]
) -> Rendered:
    """Renders the whole conversation and finds the assistant messages `turns` in it.

    DataError, without the row's place, if the template refuses the conversation, or if the turns cannot be located with
    certainty.
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
            found = _turn(template, conversation, whole, turn, special, by_prefix=by_prefix)
            start, end, ended = found.start, found.end, found.ended
            # A template that renders one earlier turn differently does so for all: no need to try the prefixes again.
            by_prefix = by_prefix and found.by_prefix
            _check_tool_calls(template, conversation, turn, whole[start:end])
            if spans and start < spans[-1][1]:
                raise DataError(f"message {turn} overlaps the trained message before it in the rendering")
            spans.append((start, end))
            num_unended += not ended
    except TemplateRefusal as error:
        raise DataError(f"{template.name} does not take the conversation: {error}") from error
    return Rendered(whole, tuple(spans), num_unended)


def render_all(template: ChatTemplate, conversation: Conversation) -> Rendered:
    """Renders a conversation, all of it trained. DataError, without the row's place, if the template refuses it."""
    messages, tools = conversation.messages, conversation.tools
    try:
        text = template.render(messages, tools)
        if any("tool_calls" in message for message in messages):
            others = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
            with suppress(TemplateRefusal):
                if template.render(others, tools) == text:
                    raise DataError(f"{template.name} leaves out the tool calls; use a template that knows tools")
    except TemplateRefusal as error:
        raise DataError(f"{template.name} does not take the conversation: {error}") from error
    return Rendered(text, ((0, len(text)),))


def _check_tool_calls(template: ChatTemplate, conversation: Conversation, turn: int, text: str) -> None:
    calls = conversation.messages[turn].get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        if call["function"]["name"] not in text:
            raise DataError(
                f"{template.name} leaves out the tool call of message {turn}: the model would learn to say nothing "
                "there. Use a template that knows tools, or take the conversation out"
            )


def _by_blocks(
    template: ChatTemplate, conversation: Conversation, turns: Sequence[int], special: re.Pattern[str]
) -> Rendered:
    text, blocks = template.render_marked(conversation.messages, conversation.tools)
    speakers = [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if len(turns) == len(speakers):
        chosen = blocks
    elif len(blocks) == len(speakers):
        chosen = [block for block, speaker in zip(blocks, speakers, strict=True) if speaker in turns]
    else:
        raise DataError(
            f"{template.name} marks {len(blocks)} generation blocks for {len(speakers)} assistant messages, so that "
            "single messages cannot be told apart; train on all of them"
        )
    if turns and not chosen:
        raise DataError(f"{template.name} marks nothing of the conversation as generated")
    for turn in turns:
        _check_tool_calls(template, conversation, turn, "".join(text[a:b] for a, b in chosen))
    return Rendered(text, tuple(chosen), sum(not _is_ended(text[a:b], special) for a, b in chosen))


def _turn(
    template: ChatTemplate,
    conversation: Conversation,
    whole: str,
    turn: int,
    special: re.Pattern[str],
    *,
    by_prefix: bool,
) -> _Turn:
    messages, tools = conversation.messages, conversation.tools
    before = template.render(messages[:turn], tools, add_generation_prompt=True)
    is_last = turn == len(messages) - 1
    if (by_prefix or is_last) and whole.startswith(before):
        after = whole if is_last else template.render(messages[: turn + 1], tools)
        if len(after) > len(before) and whole.startswith(after):
            return _ended(whole, len(before), len(after), special)
    return _aligned(template, conversation, whole, turn, before, special)


def _ended(whole: str, start: int, end: int, special: re.Pattern[str]) -> _Turn:
    stripped = whole[start:end].rstrip()
    if _is_ended(stripped, special):
        return _Turn(start, start + len(stripped), ended=True, by_prefix=True)
    following = special.match(whole, end)
    return _Turn(start, following.end() if following else end, ended=following is not None, by_prefix=True)


def _is_ended(text: str, special: re.Pattern[str]) -> bool:
    text = text.rstrip()
    return any(match.end() == len(text) for match in special.finditer(text))


def _aligned(
    template: ChatTemplate, conversation: Conversation, whole: str, turn: int, before: str, special: re.Pattern[str]
) -> _Turn:
    """Method (3). `before` is the rendering of the messages before the turn, with the generation prompt."""
    messages = conversation.messages
    first, last = _region(template, conversation, whole, turn)
    start = (
        len(before) if whole.startswith(before) else _start(template, conversation, whole, turn, before, first, special)
    )
    # An empty answer lies directly after the generation prompt, or nowhere.
    if first > last or first == last != start:
        raise DataError(f"{template.name} writes nothing of message {turn}, so that it cannot be trained")
    _check_alone(template, messages, turn, whole[start:last])
    # The other contents may have another end token whose last characters are the same.
    inside = next((match for match in special.finditer(whole, start) if match.start() < last < match.end()), None)
    if inside is not None:
        return _Turn(start, inside.end(), ended=True, by_prefix=False)
    if _is_ended(whole[start:last], special):
        return _Turn(start, last, ended=True, by_prefix=False)
    gap = len(whole[last:]) - len(whole[last:].lstrip())
    following = special.match(whole, last + gap)
    return _Turn(start, following.end() if following else last, ended=following is not None, by_prefix=False)


def _start(
    template: ChatTemplate,
    conversation: Conversation,
    whole: str,
    turn: int,
    before: str,
    first: int,
    special: re.Pattern[str],
) -> int:
    """The beginning of a turn whose message first matters at `first`: after the generation prompt before that."""
    bare = template.render(conversation.messages[:turn], conversation.tools)
    prompt = _generation_prompt(bare, before, special)
    if not prompt:
        # Spaces that the template writes before the content belong to the turn, as with prefixes.
        return max(_end_of_words(whole[:first]) + len(bare) - _end_of_words(bare), 0)
    found = whole.rfind(prompt, 0, first)
    if found < 0:
        raise DataError(
            f"{template.name} is not stable: what it writes before message {turn} when asked for an answer does not "
            f"stand before it in the whole conversation (generation prompt {prompt[-60:]!r}). Mark what is generated "
            "with {% generation %} in a copy of the template, or use train_on: last_turn or all"
        )
    return found + len(prompt)


def _region(template: ChatTemplate, conversation: Conversation, whole: str, turn: int) -> Span:
    """The characters of the whole rendering that depend on a message's content."""
    messages = conversation.messages
    first, last = len(whole), 0
    for probe in _PROBES:
        changed: list[Message] = [*messages[:turn], {"role": "assistant", "content": probe}, *messages[turn + 1 :]]
        try:
            other = template.render(changed, conversation.tools)
        except TemplateRefusal:
            # If roles must alternate, a call and its results do not count as turns, but text in their place counts as
            # one.
            if "tool_calls" not in messages[turn]:
                raise
            return _region_of_call(template, conversation, whole, turn)
        if probe not in other:
            raise DataError(f"{template.name} leaves out message {turn}, so that it cannot be trained")
        same = _common_length(whole, other)
        same_end = _common_end(whole, other)
        first, last = min(first, same), max(last, len(whole) - same_end)
        # If the probe differs from the message at both ends, none of it was counted as common: no need for another.
        if other.startswith(probe, same) and other.endswith(probe, 0, len(other) - same_end):
            break
    return first, last


def _region_of_call(template: ChatTemplate, conversation: Conversation, whole: str, turn: int) -> Span:
    """The same for a call that text cannot replace: renders it as the last message and searches for that rendering.

    It begins in the whole where a text would begin that replaces the call and everything up to the next question.
    """
    messages, tools = conversation.messages, conversation.tools
    after = template.render(messages[: turn + 1], tools)
    question = next((n for n in range(turn, len(messages)) if messages[n]["role"] == "user"), len(messages))
    own, first = len(after), len(whole)
    for probe in _PROBES:
        said: list[Message] = [*messages[:turn], {"role": "assistant", "content": probe}]
        own = min(own, _common_length(after, template.render(said, tools)))
        first = min(first, _common_length(whole, template.render([*said, *messages[question:]], tools)))
    if own == len(after) or not whole.startswith(after[own:], first):
        raise DataError(f"{template.name} writes the call of message {turn} otherwise where more follows it")
    return first, first + len(after) - own


def _check_alone(template: ChatTemplate, messages: Sequence[Message], turn: int, text: str) -> None:
    """Raises DataError if a turn's text contains another message's text; a single word may do so by chance."""
    own = json.dumps(messages[turn], ensure_ascii=False)
    for number, message in enumerate(messages):
        said = str(message["content"]).strip()
        if number == turn or len(said) < _TELLING_CHARS or said not in text:
            continue
        if json.dumps(said, ensure_ascii=False)[1:-1] not in own:
            raise DataError(f"{template.name} writes message {number} into message {turn}: they cannot be told apart")


def _generation_prompt(bare: str, before: str, special: re.Pattern[str]) -> str:
    """The text that a template adds to ask for an answer; it may lack an end that the template writes differently."""
    common = _common_length(bare, before)
    inside = next((match for match in special.finditer(before) if match.start() < common < match.end()), None)
    return before[common if inside is None else inside.start() :]


def _end_of_words(text: str) -> int:
    return len(text.rstrip())


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


def _common_end(one: str, other: str) -> int:
    """The length of the common suffix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[len(one) - middle : len(one) - low] == other[len(other) - middle : len(other) - low]:
            low = middle
        else:
            high = middle - 1
    return low
