"""Bodies of /v1/responses as chat completions, their answers, and the conversations that later bodies continue."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from xorl.server.api.openai_bodies import CalledJson, ChatBody
from xorl.server.api.openai_fields import IGNORED, UNSERVED, Unserved, field_names, msgspec_of, rules_for, served_fields
from xorl.server.api.responses import JSON, InvalidField, Refusal

# The most that the process keeps of the conversations that clients may continue.
MAX_CONVERSATIONS = 1024
MAX_CONVERSATION_BYTES = 64 * 2**20
LOGPROBS = "message.output_text.logprobs"
_CHOICES = ("auto", "none", "required")
_ROLES = ("user", "assistant", "system", "developer")
# Fields of chat completions, as patterns, and what /v1/responses calls them.
_NAMES = (
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"^reasoning_effort"), "reasoning.effort"),
    (re.compile(r"^messages"), "input"),
)
Message = dict[str, Any]

_ITEM_IGNORED = frozenset(("id", "status", "phase"))
_PART_IGNORED = frozenset(("annotations", "logprobs", "prompt_cache_breakpoint"))
_RESPONSE_IGNORED = frozenset((*(IGNORED - {"metadata"}), "stream_options"))
_CHAT = "use /v1/chat/completions"
_RESPONSE_UNSERVED: Mapping[str, Unserved] = {
    **UNSERVED,
    **rules_for("background", "answers are made while the call waits; leave it out", False),
    **rules_for("truncation", "shorten the input yourself", "disabled"),
    **rules_for("conversation", "use previous_response_id, or send the whole conversation as input"),
    **rules_for("prompt", "write the instructions yourself"),
    **rules_for("max_tool_calls", "set parallel_tool_calls: false for at most one call"),
    **rules_for("context_management background_options image access_programs", "leave it out"),
    **rules_for("n stop max_tokens max_completion_tokens logprobs messages response_format", _CHAT),
}


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/responses. seed is an extension."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: int = 0
    include: list[str] = []
    metadata: dict[str, Any] = {}
    stream: bool = False
    seed: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ResponseBody:
        """The body of a request; raises InvalidField."""
        body = msgspec_of(served_fields(given, field_names(cls), _RESPONSE_IGNORED, _RESPONSE_UNSERVED), cls)
        # Clients ask for encrypted reasoning by default. This service's answers have none.
        if unknown := [name for name in body.include if name not in (LOGPROBS, "reasoning.encrypted_content")]:
            raise InvalidField("include", f"may only be {LOGPROBS}, got {unknown[0][:90]!r}", "unsupported_parameter")
        if body.max_output_tokens is not None and body.max_output_tokens < 1:
            raise InvalidField("max_output_tokens", f"must be 1 or more, got {body.max_output_tokens}")
        return body

    def chat(self, earlier: Sequence[Message]) -> ChatBody:
        """The chat completion that makes the answer; raises InvalidField. earlier: the conversation so far."""
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        text = served_fields(self.text, {"format"}, set(), rules_for("verbosity", "ask for it", "medium"), "text.")
        reasoning = served_fields(self.reasoning, {"effort"}, {"summary", "generate_summary"}, {}, "reasoning.")
        return ChatBody(
            model=self.model,
            messages=[*instructions, *earlier, *self.messages],
            tools=[_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)],
            tool_choice=_chat_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_chat_format(text.get("format")),
            reasoning_effort=reasoning.get("effort"),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=LOGPROBS in self.include or self.top_logprobs > 0,
            top_logprobs=self.top_logprobs,
            seed=self.seed,
            stream=self.stream,
        )

    @property
    def messages(self) -> list[Message]:
        """The input as messages of a chat; raises InvalidField."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input:
            raise InvalidField("input", "must have at least one item")
        found: list[Message] = []
        for index, item in enumerate(self.input):
            _add_item(found, item, f"input[{index}]")
        return found


@contextmanager
def in_terms_of_responses() -> Iterator[None]:
    """Name fields as /v1/responses does in refusals of the chat completion that makes an answer."""
    try:
        yield
    except Refusal as refusal:
        message, param = refusal.message, refusal.param
        for pattern, name in _NAMES:
            message, param = pattern.sub(name, message), None if param is None else pattern.sub(name, param)
        raise Refusal(refusal.status, message, code=refusal.code, param=param) from None


class Conversations:
    """The newest conversations that a `previous_response_id` can continue, in memory."""

    def __init__(self, max_number: int = MAX_CONVERSATIONS, max_bytes: int = MAX_CONVERSATION_BYTES) -> None:
        self._max_number = max_number
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    def add(self, response_id: str, messages: Sequence[Message]) -> None:
        """Keep the messages up to and including an answer. Drops the oldest conversations beyond the limits."""
        self._kept[response_id] = msgspec.json.encode(messages)
        self._num_bytes += len(self._kept[response_id])
        while len(self._kept) > self._max_number or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept.popitem(last=False)[1])

    def get(self, response_id: str) -> list[Message]:
        """The messages of a conversation; raises Refusal."""
        if response_id not in self._kept:
            problem = (
                f"there is no response {response_id[:100]!r}: the service keeps the newest {self._max_number}, without "
                "those made with store: false, until it restarts; send the whole conversation as input"
            )
            name = "previous_response_id"
            raise Refusal(400, f"{name}: {problem}", code="previous_response_not_found", param=name)
        return msgspec.json.decode(self._kept[response_id])


@dataclass
class OutputItem:
    """An item of an answer as it grows: a message or a function call. content: its text, or the call's arguments."""

    id: str
    content: str = ""
    name: str = ""
    call_id: str = ""
    logprobs: list[JSON] = field(default_factory=list)

    @property
    def is_call(self) -> bool:
        return bool(self.call_id)

    @property
    def part(self) -> dict[str, JSON]:
        """The content of a message."""
        return {"type": "output_text", "text": self.content, "annotations": [], "logprobs": self.logprobs}

    def json(self, status: str) -> dict[str, JSON]:
        """The item; without content while it is in progress."""
        is_empty = status == "in_progress"
        if self.is_call:
            called = {"call_id": self.call_id, "name": self.name, "arguments": "" if is_empty else self.content}
            return {"type": "function_call", "id": self.id, "status": status, **called}
        content: list[JSON] = [] if is_empty else [self.part]
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


def answer_message(items: Sequence[OutputItem]) -> Message:
    """The answer as a message of a chat."""
    calls = [
        {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.content}}
        for item in items
        if item.is_call
    ]
    text = "".join(item.content for item in items if not item.is_call)
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def _add_item(messages: list[Message], item: dict[str, Any], where: str) -> None:
    """Add an item of the input; a function call joins the calls and the text of the message before it."""
    kind = item.get("type", "message")
    known = {"message": {"role", "content"}, "function_call": {"call_id", "name", "arguments"}}
    known["function_call_output"] = {"call_id", "output"}
    if kind not in known:
        problem = f"is {kind!r}, but may only be {', '.join(known)}: leave it out"
        raise InvalidField(f"{where}.type", problem, "unsupported_parameter")
    found = served_fields(item, known[kind] | {"type"}, _ITEM_IGNORED, {}, f"{where}.")
    if missing := [name for name in sorted(known[kind]) if name not in found]:
        raise InvalidField(f"{where}.{missing[0]}", "is missing", "missing_required_parameter")
    if kind == "message":
        if found["role"] not in _ROLES:
            raise InvalidField(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
        messages.append({"role": found["role"], "content": _text(found["content"], f"{where}.content")})
    elif kind == "function_call_output":
        output = _text(found["output"], f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": found["call_id"], "content": output})
    else:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": found["name"], "arguments": found["arguments"]}
        msgspec_of(function, CalledJson, f"{where}.").for_template(where)  # so that errors name fields of the item
        call = {"id": found["call_id"], "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(where, "must be a text or a list of parts", "invalid_type")
    texts: list[str] = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        is_text = isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text")
        known = served_fields(part, {"type", "text"}, _PART_IGNORED, {}, f"{place}.") if is_text else {}
        if not isinstance(known.get("text"), str):
            raise InvalidField(place, "must be of type input_text or output_text, others are not supported")
        texts.append(known["text"])
    return "".join(texts)


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidField(f"{where}.type", "must be function, others are not supported", "unsupported_parameter")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _chat_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice not in _CHOICES:
        problem = f'must be {", ".join(_CHOICES)} or {{"type": "function", "name": ...}}'
        raise InvalidField("tool_choice", problem, "unsupported_parameter")
    return choice


def _chat_format(given: object) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidField("text.format", "must be an object", "invalid_type")
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
