"""Completes the prompts in a JSONL file with a saved model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from xorl.data.formats.messages import MESSAGE_COLUMNS, read_conversation
from xorl.data.formats.pictures import IMAGES
from xorl.server.sampler.request import GenerationResult
from xorl.server.sampler.saved import Prompts, SamplingOptions, SavedSampler

# The keys that a completed line has in addition.
GENERATED, FINISH_REASON = "generated", "finish_reason"
PROMPT = "prompt"
# How many invalid lines a message lists.
_MAX_LISTED = 5
ValueT = TypeVar("ValueT")
LineT = TypeVar("LineT")


@dataclass(frozen=True)
class PromptLine:
    """A line of a file: its place for messages, its content, and the token ids of its prompt."""

    place: str
    row: Mapping[str, object]
    prompt: tuple[int, ...]


def read_prompts(file: Path, prompts: Prompts, system: str | None) -> list[PromptLine]:
    """Read a file with a JSON object in each line: `messages`, or `prompt` with messages or a text.

    The model is to answer messages, and to continue a text as it is. `system` is added to conversations as the first
    message. Empty lines are skipped. Raises ValueError, naming the lines, if any is invalid.
    """
    try:
        # Not splitlines, which also splits at characters such as U+2028 that JSON strings may contain.
        texts = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt: {file} cannot be read: {error}") from error
    numbered = [(f"{file}:{number}", text) for number, text in enumerate(texts, start=1) if text.strip()]
    if not numbered:
        raise ValueError(f"--prompt: {file} has no lines")

    def read(line: tuple[str, str]) -> PromptLine:
        place, text = line
        row = _parse(text)
        return PromptLine(place, row, _prompt_of(row, prompts, system))

    return _each(numbered, lambda line: line[0], read)


def complete(
    lines: Sequence[PromptLine], sampler: SavedSampler, options: SamplingOptions, seed: int
) -> Iterator[Mapping[str, object]]:
    """Yield each line's row with GENERATED and FINISH_REASON (stop, or length), in order, as soon as it is complete.

    Line i has the seed `seed` + i. Raises ValueError, naming the lines, before sampling if prompts do not fit, and if
    the model computes NaN.
    """
    seeds = {line.place: seed + index for index, line in enumerate(lines)}
    requests = _each(
        lines, lambda line: line.place, lambda line: sampler.request(line.prompt, options, seeds[line.place])
    )
    queue = sampler.sampler
    ids = [queue.submit(request) for request in requests]
    finished: dict[int, GenerationResult] = {}
    for line, request, request_id in zip(lines, requests, ids, strict=True):
        while request_id not in finished:
            finished |= {result.request_id: result for result in queue.step()}
        try:
            answer = sampler.answer_of(request, finished.pop(request_id))
        except ValueError as error:
            raise ValueError(f"--prompt: {line.place}: {error}") from error
        yield {**line.row, GENERATED: answer.text, FINISH_REASON: answer.finish_reason}


def _each(lines: Sequence[LineT], place: Callable[[LineT], str], read: Callable[[LineT], ValueT]) -> list[ValueT]:
    """The values of all lines. Raises ValueError with the first invalid lines."""
    values: list[ValueT] = []
    problems: list[str] = []
    for line in lines:
        try:
            values.append(read(line))
        except ValueError as error:
            problems.append(f"{place(line)}: {error}")
    if problems:
        more = [f"... and {len(problems) - _MAX_LISTED} more lines"] * (len(problems) > _MAX_LISTED)
        raise ValueError("--prompt: " + "\n  ".join([*problems[:_MAX_LISTED], *more]))
    return values


def _parse(text: str) -> dict[str, object]:
    try:
        row: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, want a JSON object")
    if taken := [key for key in (GENERATED, FINISH_REASON) if key in row]:
        raise ValueError(f"has the key {taken[0]!r}, which is for what is generated; rename it")
    return row


def _prompt_of(row: dict[str, object], prompts: Prompts, system: str | None) -> tuple[int, ...]:
    prompt, others = row.get(PROMPT), [key for key in MESSAGE_COLUMNS if row.get(key) is not None]
    if prompt is None and not others:
        raise ValueError(f"has neither 'messages' nor {PROMPT!r}; its keys are: {', '.join(row) or 'none'}")
    if prompt is not None and others:
        raise ValueError(f"has both {PROMPT!r} and {others[0]!r}; remove one of them")
    if isinstance(prompt, str):
        if system is not None:
            raise ValueError(f"{PROMPT!r} is a text, which has no system message; use messages, or remove --system")
        if not prompt:
            raise ValueError(f"{PROMPT!r} is empty")
        return prompts.of_text(prompt)
    if prompt is not None and not isinstance(prompt, list):
        raise ValueError(f"{PROMPT!r} is {type(prompt).__name__}, want a text or a list of messages")
    if row.get(IMAGES):
        raise ValueError(f"{IMAGES!r}: the embedded sampler reads only text")
    # Next to a prompt, a completion is an answer to compare with.
    kept = {key: value for key, value in row.items() if key not in (PROMPT, "completion")}
    conversation = read_conversation(row if prompt is None else {**kept, "messages": prompt}, {}, is_prompt=True)
    messages = conversation.messages
    if system is not None:
        if messages[0]["role"] == "system":
            raise ValueError("has a system message of its own; remove it, or --system")
        conversation = replace(conversation, messages=[{"role": "system", "content": system}, *messages])
    return prompts.of_conversation(conversation)
