"""Which characters of a rendered conversation are trained: those that the model itself would write.

The rule, in this order. (1) Where the template marks {% generation %}, its blocks. (2) Prefixes: a turn begins where
the messages before it, rendered with the generation prompt, end, and it ends where the rendering up to it ends; both
have to be beginnings of the whole rendering. (3) Alignment, for templates that write an earlier turn otherwise than
the last one (reasoning taken out, another end token): the turn is rendered with other contents; what changes in the
whole rendering is what depends on it, and the turn reaches from the generation prompt before that to the special
token after. Each way is checked against the whole rendering, and what passes none is refused. In the last two a turn
ends with its last special token, and whitespace after it is not trained; where the template writes none, it ends with
the special token that begins the next message, since that is where the model would stop.
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
# A message this long does not stand in another one by chance.
_TELLING_CHARS = 24


@dataclass(frozen=True)
class Rendered:
    """A conversation's text and the characters of it that are trained; `num_unended` turns have no end token.

    `lacks_reasoning`: the conversation has some, and the text none of it.
    """

    text: str
    spans: tuple[Span, ...]
    num_unended: int = 0
    lacks_reasoning: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class _Turn:
    """Where a turn is in the whole rendering, and how that was found."""

    start: int
    end: int
    ended: bool
    by_prefix: bool


def special_pattern(texts: frozenset[str]) -> re.Pattern[str]:
    """Finds special tokens in a text, the longest that fits."""
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def render_turns(
    template: ChatTemplate, conversation: Conversation, turns: Sequence[int], special: re.Pattern[str]
) -> Rendered:
    """Renders the whole conversation and finds the assistant messages `turns` in it.

    DataError, without the row's place, for a conversation that the template refuses, or in which the turns cannot be
    told for sure.
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
            # A template that writes one earlier turn otherwise writes all of them so: no need to ask again.
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
    """Renders the whole conversation, all of it trained. DataError, without the row's place, where it is refused."""
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
    """The third way. `before` is the rendering of the messages before the turn, with the generation prompt."""
    messages = conversation.messages
    first, last = _region(template, conversation, whole, turn)
    start = (
        len(before) if whole.startswith(before) else _start(template, conversation, whole, turn, before, first, special)
    )
    # An empty answer has its place right behind the generation prompt, or it has none.
    if first > last or first == last != start:
        raise DataError(f"{template.name} writes nothing of message {turn}, so that it cannot be trained")
    _check_alone(template, messages, turn, whole[start:last])
    # The other contents may have had another end token, of which the last characters are the same.
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
    """Where a turn begins whose message begins to matter at `first`: after the generation prompt before that."""
    bare = template.render(conversation.messages[:turn], conversation.tools)
    prompt = _generation_prompt(bare, before, special)
    if not prompt:
        # Spaces that the template writes before the content are the turn's, as they are by prefixes.
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
    """The characters of the whole rendering that depend on what a message says."""
    messages = conversation.messages
    first, last = len(whole), 0
    for probe in _PROBES:
        changed: list[Message] = [*messages[:turn], {"role": "assistant", "content": probe}, *messages[turn + 1 :]]
        try:
            other = template.render(changed, conversation.tools)
        except TemplateRefusal:
            # Where roles have to take turns, a call and its results are no turns, and words in their place are one.
            if "tool_calls" not in messages[turn]:
                raise
            return _region_of_call(template, conversation, whole, turn)
        if probe not in other:
            raise DataError(f"{template.name} leaves out message {turn}, so that it cannot be trained")
        same = _common_length(whole, other)
        same_end = _common_end(whole, other)
        first, last = min(first, same), max(last, len(whole) - same_end)
        # The probe itself differs at both ends: nothing of it is taken for what the renderings have in common.
        if other.startswith(probe, same) and other.endswith(probe, 0, len(other) - same_end):
            break
    return first, last


def _region_of_call(template: ChatTemplate, conversation: Conversation, whole: str, turn: int) -> Span:
    """The same for a call that words cannot replace: it is written as the last message, and that is looked for.

    It begins in the whole where words would that replace it and all that is said up to the next question.
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
    """Raises DataError where what another message says stands in a turn's text; a word may do so by chance."""
    own = json.dumps(messages[turn], ensure_ascii=False)
    for number, message in enumerate(messages):
        said = str(message["content"]).strip()
        if number == turn or len(said) < _TELLING_CHARS or said not in text:
            continue
        if json.dumps(said, ensure_ascii=False)[1:-1] not in own:
            raise DataError(f"{template.name} writes message {number} into message {turn}: they cannot be told apart")


def _generation_prompt(bare: str, before: str, special: re.Pattern[str]) -> str:
    """What a template adds when it asks for an answer; it may leave out an end that it writes otherwise."""
    common = _common_length(bare, before)
    inside = next((match for match in special.finditer(before) if match.start() < common < match.end()), None)
    return before[common if inside is None else inside.start() :]


def _end_of_words(text: str) -> int:
    return len(text.rstrip())


def _common_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_end(one: str, other: str) -> int:
    """How many characters two texts end with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[len(one) - middle : len(one) - low] == other[len(other) - middle : len(other) - low]:
            low = middle
        else:
            high = middle - 1
    return low
