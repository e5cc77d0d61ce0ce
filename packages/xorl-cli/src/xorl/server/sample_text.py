"""The text of samples: up to their end, and as it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """The text of a growing sample, up to where further tokens could change it.

    decode: the text of token ids. keeps_stop: see `sample_text`.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._decode = decode
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._tokens: list[int] = []
        self._num_sent = 0

    def add(self, tokens: Sequence[int], *, is_last: bool, is_stopped: bool = False) -> str:
        """Add tokens; returns the new text. is_stopped: the last token is a stop token or completes a stop string."""
        self._tokens += tokens
        text = sample_text(self._decode, self._tokens, self._stops, is_stopped=is_stopped, keeps_stop=self._keeps_stop)
        if not is_last and not is_stopped:
            # The bytes of a character may be in several tokens, and a stop string may have begun.
            text = text.rstrip("\ufffd")
            text = text[: len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)]
        new = text[self._num_sent :]
        self._num_sent += len(new)
        return new


def sample_text(
    decode: Callable[[list[int]], str], tokens: list[int], stops: Sequence[str], *, is_stopped: bool, keeps_stop: bool
) -> str:
    """The text of a sample: without the stop string or the token that ended it, unless `keeps_stop`."""
    text, has_stop = until_stop(decode(tokens), stops, keeps_stop=keeps_stop)
    return decode(tokens[:-1]) if is_stopped and not has_stop and not keeps_stop else text


def until_stop(text: str, stops: Sequence[str], *, keeps_stop: bool = False) -> tuple[str, bool]:
    """The text before the first stop string, or including it, and whether there is one."""
    found = [(position + len(stop), position) for stop in stops if (position := text.find(stop)) >= 0]
    if not found:
        return text, False
    end, position = min(found)
    return text[: end if keeps_stop else position], True


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)
