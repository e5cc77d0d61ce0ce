"""Grammars of answers: JSON of a schema, and tool calls. Only this file uses llguidance, which is an extra."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from xorl.server.operations import AnswerForm, JsonAnswer, ToolCalls
from xorl.server.sampler.edits import Matcher

try:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance.numpy import fill_next_token_bitmask
except ImportError as error:
    raise ImportError(
        "answers of a given format need llguidance, which is not installed: install xorl-cli[structured]"
    ) from error

# One line, as chat templates write JSON. If blanks were free, a model that has lost its way would write nothing else.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Compiling the grammar of a large schema takes up to a second.
_MAX_COMPILED = 64
# Keywords that combine the schema of an object with others, which may have further properties.
_COMBINING = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"))
_OPEN = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))
# What llguidance's errors say about the place in the grammar: before the problem, and in lines after it.
_IN_GRAMMAR = re.compile(
    r"^(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: |failed to parse \"%json\": )?"
    r"|\n\s*(?:\d+ \||at \S+:\d+).*",
    re.DOTALL,
)


class Grammars:
    """Makes matchers for the forms of answers.

    Args:
        tokenizer: of the model.
        vocab_size: of the model, which may be larger than the tokenizer's.
        ends: the model's end tokens. An answer ends with one of them, or with another token that its request names,
            and only where its grammar is complete.

    Raises ValueError if there are no end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        if not ends:
            raise ValueError("the model has no end token (eos_token_id), so an answer of a given format cannot end")
        copied = Tokenizer.from_str(tokenizer.to_str())
        copied.no_padding()
        copied.no_truncation()
        size = max(vocab_size, copied.get_vocab_size())
        self._tokenizer = LLTokenizer(copied.to_str(), n_vocab=size, eos_token=ends[0])
        self._ends = tuple(ends)
        self._num_words = -(-size // 32)
        self._added = {added.content: token for token, added in copied.get_added_tokens_decoder().items()}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._pieces = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "(?!)()")
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, form: AnswerForm, stops: Collection[int] = ()) -> Callable[[], Matcher]:
        """A function that makes a matcher for each sample. stops: further tokens that end a sample.

        Raises ValueError if a schema is not valid, or has keywords that are not supported.
        """
        grammar = f"start: {_json(form.schema, form.field)}" if isinstance(form, JsonAnswer) else self._tool_calls(form)
        compiled = self._compiled.pop(grammar, None) or self._compile(grammar)
        if compiled.is_error():
            raise ValueError(self._refusal(form) or _shown(compiled.get_error()))
        self._compiled[grammar] = compiled
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        ends = frozenset((*self._ends, *stops))
        return lambda: _Matcher(compiled.deep_copy(), self._num_words, ends)

    def _compile(self, grammar: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar, log_level=0)

    def _refusal(self, form: AnswerForm) -> str | None:
        """Why the first schema that cannot be followed cannot; None if all can."""
        schemas = [(each.schema, each.field) for each in ([form] if isinstance(form, JsonAnswer) else form.calls)]
        if isinstance(form, ToolCalls) and form.instead is not None:
            schemas.append((form.instead, form.instead_field))
        for schema, field in schemas:
            compiled = self._compile(f"start: {_json(schema, field)}")
            if compiled.is_error():
                return f"{field} cannot be followed: {_shown(compiled.get_error())}; change it or leave it out"
        return None

    def _tool_calls(self, form: ToolCalls) -> str:
        """A grammar in llguidance's dialect of Lark."""
        opening, begins = form.opening, [call.begin for call in form.calls]
        rules = [f"json_{i}: {_json(call.schema, call.field)}" for i, call in enumerate(form.calls)]
        rules += [
            f"call_{i}: {self._literal(call.begin)} json_{i} {self._literal(call.end)}"
            for i, call in enumerate(form.calls)
        ]
        trigger = form.trigger
        if trigger is None:
            instead = None if form.instead is None else _json(form.instead, form.instead_field)
            rules.append("start: calls" if instead is None else f"start: calls | json\njson: {instead}")
        elif trigger in self._added:
            # Any tokens, until the one with which calls begin.
            excluded = ",".join(map(str, (self._added[trigger], *self._ends)))
            rules += ["start: text* calls?", f"text: <[^{excluded}]>"]
        else:
            # The lexer ends the text with the first trigger, so the calls begin behind it.
            rules += ["start: TEXT | text calls", "TEXT: /(.|\\n)*/", f"text[lazy]: TEXT {json.dumps(trigger)}"]
            opening, begins = (
                (opening[len(trigger) :], begins) if opening else (opening, [begin[len(trigger) :] for begin in begins])
            )
        firsts = [
            f"{self._literal(begin)} json_{i} {self._literal(form.calls[i].end)}" for i, begin in enumerate(begins)
        ]
        more = "" if form.most == 1 else f"({self._literal(form.separator)} call)"
        more += "*" if form.most is None else f"{{0,{form.most - 1}}}" if more else ""
        rules += [
            f"first: {' | '.join(firsts)}",
            f"call: {' | '.join(f'call_{i}' for i in range(len(form.calls)))}",
            f"calls: {self._literal(opening)} first {more} {self._literal(form.closing)}",
        ]
        return "\n".join(rules)

    def _literal(self, text: str) -> str:
        """A text that a sample must have, with added tokens as such: only these, and no other tokens, spell them."""
        pieces = [piece for piece in self._pieces.split(text) if piece]
        return " ".join(
            f"<[{self._added[piece]}]>" if piece in self._added else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
        )


class _Matcher:
    """Follows one sample (`Matcher`)."""

    def __init__(self, matcher: LLMatcher, num_words: int, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._ends = ends

    @property
    def problem(self) -> str | None:
        return _shown(self._matcher.get_error()) if self._matcher.is_error() else None

    def add(self, token: int) -> None:
        # The sample ends with it.
        if token not in self._ends:
            self._matcher.consume_token(token)

    def allowed(self) -> NDArray[np.int32]:
        words = np.zeros((1, self._num_words), np.int32)
        fill_next_token_bitmask(self._matcher, words)
        if self._matcher.is_accepting():
            bits = words.view(np.uint32)[0]
            for token in self._ends:
                bits[token // 32] |= np.uint32(1 << token % 32)
        return words[0]


def _json(schema: str, field: str) -> str:
    """The grammar of the JSON that a schema allows. Raises ValueError if it is not a schema."""
    try:
        found = json.loads(schema)
        if found is True:
            found = {}
        if not isinstance(found, dict):
            raise ValueError(f"{field} must be an object, got {schema[:40]}")
        return "%json " + json.dumps({**_closed_object(found), "x-guidance": _LAYOUT})
    except json.JSONDecodeError as error:
        raise ValueError(f"{field} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{field} is nested too deeply; make it flatter, or leave it out") from None


def _closed(schema: object) -> object:
    """The schema, with no further properties in objects that list some and do not say whether there may be others.

    JSON Schema allows any then, but those who list properties mean these, and inference servers read it so.
    """
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    return _closed_object(schema) if isinstance(schema, dict) else schema


def _closed_object(schema: dict[str, object]) -> dict[str, object]:
    closed: dict[str, object] = {
        key: {name: _closed(each) for name, each in value.items()}
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict)
        else value
        if key in ("const", "enum", "default", "examples", "allOf")
        else _closed(value)
        for key, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict) and not schema.keys() & (_COMBINING | _OPEN):
        closed["additionalProperties"] = False
    return closed


def _shown(problem: str) -> str:
    """An error of llguidance on one line, without its place in the grammar, which clients do not see."""
    return " ".join(_IN_GRAMMAR.sub("", problem).split())[:300]
