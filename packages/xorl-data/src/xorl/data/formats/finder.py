"""Finds the trained turns of a conversation in time that is linear in its number of turns.

turns.py locates a turn with renderings of all messages before it, so locating every turn that way is quadratic. A long
conversation is therefore cut into windows of two consecutive answers and the messages between them. Each window is
rendered by itself, and turns.py (or shapes.py) finds its two turns. The text from the start of the first turn to the
start of the second is then compared with the rendering of the whole conversation. If it is the same there, the first
turn ends, and the second starts, at the same place as in the window. The first and the last turn, and turns whose text
differs, are located in the whole rendering. If the result contradicts the windows, every turn is located there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from xorl.data.errors import DataError
from xorl.data.formats.messages import Conversation
from xorl.data.formats.shapes import ShapeCache
from xorl.data.formats.spans import Rendered, Span
from xorl.data.formats.template import ChatTemplate, Message, TemplateRefusal
from xorl.data.formats.turns import Turn, check_tool_calls, is_ended, locate_turn, render_turns

# In conversations with at most this many answers, every turn is located without windows.
_FEW_ANSWERS = 6
# Longer conversations rarely share their shape with another conversation.
_MAX_SHAPE = 64
# Stands for the messages before a window, and for user messages after it.
_OTHER: Message = {"role": "user", "content": "x0x"}


class _ContradictionError(Exception):
    """A turn is not where the preceding windows place it."""


@dataclass(frozen=True)
class _Window:
    """The text from the start of an answer to the start of the next one; the answer is `text[:end]`."""

    text: str
    end: int


class TurnFinder:
    """Finds the turns of conversations with one template."""

    def __init__(self, template: ChatTemplate, special: re.Pattern[str]) -> None:
        self.template = template
        self._special = special
        self._shapes = ShapeCache(template, self._find)

    def render(self, conversation: Conversation, turns: Sequence[int]) -> Rendered:
        """Returns the same result as turns.render_turns, and raises the same DataErrors, but faster."""
        is_text = all(isinstance(message["content"], str) for message in conversation.messages)
        if is_text and conversation.tools is None and len(conversation.messages) <= _MAX_SHAPE:
            return self._shapes.render(conversation, turns)
        return self._find(conversation, turns)

    def _find(self, conversation: Conversation, turns: Sequence[int]) -> Rendered:
        answers = [n for n, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if len(answers) <= _FEW_ANSWERS or len(turns) < 2 or self.template.marks_generation:
            return render_turns(self.template, conversation, turns, self._special)
        try:
            return self._render_long(conversation, turns, [n for n in answers if turns[0] <= n <= turns[-1]])
        except TemplateRefusal as error:
            raise DataError(f"{self.template.name} rejects the conversation: {error}") from error
        except _ContradictionError:
            return render_turns(self.template, conversation, turns, self._special)

    def _render_long(self, conversation: Conversation, turns: Sequence[int], answers: Sequence[int]) -> Rendered:
        whole = self.template.render(conversation.messages, conversation.tools)
        wanted = frozenset(turns)
        spans: list[Span] = []
        num_unended = 0
        for answer, turn in self._turns(conversation, whole, answers, wanted):
            if answer in wanted:
                check_tool_calls(self.template, conversation, answer, whole[turn.start : turn.end])
                if spans and turn.start < spans[-1][1]:
                    raise DataError(f"message {answer} overlaps the trained message before it in the rendering")
                spans.append((turn.start, turn.end))
                num_unended += not turn.ended
        return Rendered(whole, tuple(spans), num_unended)

    def _turns(
        self, conversation: Conversation, whole: str, answers: Sequence[int], wanted: frozenset[int]
    ) -> Iterator[tuple[int, Turn]]:
        """Yields the turns of `answers`, at least those in `wanted`."""
        windows = _Windows(conversation, self.render)
        start: int | None = None  # of the next answer, if known from the windows before it
        by_prefix = True
        for answer, following in zip(answers, [*answers[1:], None], strict=True):
            window = None if start is None else windows.matching(whole, start, answer, following)
            if start is not None and window is not None:
                end = start + window.end
                turn = Turn(start, end, is_ended(whole[start:end], self._special), by_prefix=by_prefix)
            elif answer not in wanted:
                start = None
                continue
            else:
                turn = locate_turn(self.template, conversation, whole, answer, self._special, by_prefix=by_prefix)
                # A template that renders one earlier turn differently does so for all, so prefixes would fail again.
                by_prefix = by_prefix and turn.by_prefix
                if start is not None and turn.start != start:
                    raise _ContradictionError
                window = windows.matching(whole, turn.start, answer, following) if start is None else None
                if window is not None and turn.end != turn.start + window.end:
                    raise _ContradictionError
            yield answer, turn
            start = None if window is None else turn.start + len(window.text)


class _Windows:
    """The windows of one conversation. `render` finds turns in the conversation of a window."""

    def __init__(self, conversation: Conversation, render: Callable[[Conversation, Sequence[int]], Rendered]) -> None:
        self._messages = conversation.messages
        self._render = render
        self._last_user = max((n for n, message in enumerate(self._messages) if message["role"] == "user"), default=-1)
        # Most templates write tools only before the first message, so windows are first rendered without them.
        self._choices = [None] if conversation.tools is None else [None, conversation.tools]

    def matching(self, whole: str, start: int, answer: int, following: int | None) -> _Window | None:
        """The window from `answer` to the answer `following`; None unless its text is in `whole` at `start`."""
        while following is not None:
            window = self._window(answer, following, self._choices[0])
            if window is not None and whole.startswith(window.text, start):
                return window
            if len(self._choices) == 1:
                return None
            del self._choices[0]
        return None

    def _window(self, answer: int, following: int, tools: list[object] | None) -> _Window | None:
        # Templates may render messages before the last user message differently.
        after = [_OTHER] if self._last_user > following else []
        messages = [_OTHER, *self._messages[answer : following + 1], *after]
        try:
            found = self._render(Conversation(messages, tools, ()), (1, 1 + following - answer))
        except DataError:
            return None
        assert found.spans is not None, "turns were asked for"
        (start, end), (next_start, _) = found.spans
        return _Window(found.text[start:next_start], end - start)
