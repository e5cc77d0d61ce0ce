"""Converts text to tokens and back, and conversations to prompts; loads the served model's tokenizer on first use."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import Tokenizer

from xorl.server.api.responses import Refusal
from xorl.server.api.token_texts import TokenBytes
from xorl.server.api.tool_formats import PROBE, ToolFormat, format_of

if TYPE_CHECKING:
    from xorl.data.formats import TextTokenizer
    from xorl.data.formats.messages import Conversation
    from xorl.data.formats.template import ChatTemplate

logger = logging.getLogger(__name__)

Message = dict[str, object]

# Appended to a message to find its end in the rendered text. A Unicode noncharacter does not occur in real text.
_END = "\ufdd2"
# Those that every template shows, or for which another check is made.
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))


class ToolSupport(NamedTuple):
    """How a chat template renders tools.

    shows_tools, shows_results: whether the model sees definitions of tools, and the results of calls. calls: the format
    in which the template writes calls; None if it writes none, or uses an unknown format.
    """

    shows_tools: bool
    shows_results: bool
    calls: ToolFormat | None


class TextCoder:
    """Encodes and decodes with the tokenizer of the served model, whose name or folder the orchestrator reports."""

    def __init__(self) -> None:
        self._loaded: dict[str, Tokenizer | None] = {}
        self._token_bytes: dict[str, TokenBytes] = {}
        self._chat_tokenizers: dict[str, TextTokenizer] = {}
        self._tool_support: dict[str, ToolSupport] = {}
        self._loading = asyncio.Lock()

    async def encode(self, tokenizer: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, by default with special tokens added. Raises Refusal(400) without a tokenizer."""
        return (await self.require(tokenizer)).encode(text, add_special_tokens=add_special_tokens).ids

    async def decoder(self, tokenizer: str, *, skip_special_tokens: bool) -> Callable[[list[int]], str] | None:
        """A function from token ids to their text. None if there is no tokenizer."""
        coder = await self._tokenizer(tokenizer)
        return None if coder is None else partial(coder.decode, skip_special_tokens=skip_special_tokens)

    async def encode_chat(
        self,
        tokenizer: str,
        messages: Sequence[Message],
        variables: Mapping[str, object],
        *,
        tools: list[object] | None = None,
        asks_for_answer: bool,
        continues_last: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, rendered with the tokenizer's chat template and these variables.

        tools: those that the template shows to the model. asks_for_answer: end with the template's prompt for an
        answer. continues_last: end within the last message. Raises Refusal(400) without a tokenizer or a template, or
        if the template rejects messages or leaves one out.
        """
        coder = await self.require(tokenizer)
        chat_tokenizer = await self._chat_tokenizer(tokenizer)
        # The template writes its special tokens itself.
        render = _render_open if continues_last else _render
        text = await asyncio.to_thread(render, chat_tokenizer, messages, tools, variables, asks_for_answer)
        return coder.encode(text, add_special_tokens=False).ids

    async def tool_support(self, tokenizer: str) -> ToolSupport:
        """How the tokenizer's chat template renders tools. Raises Refusal(400) as `encode_chat` does."""
        chat_tokenizer = await self._chat_tokenizer(tokenizer)
        if tokenizer not in self._tool_support:
            self._tool_support[tokenizer] = await asyncio.to_thread(_tool_support, chat_tokenizer)
        return self._tool_support[tokenizer]

    async def _chat_tokenizer(self, name: str) -> TextTokenizer:
        async with self._loading:
            if name not in self._chat_tokenizers:
                self._chat_tokenizers[name] = await asyncio.to_thread(_load_chat_tokenizer, name)
            return self._chat_tokenizers[name]

    async def require(self, tokenizer: str) -> Tokenizer:
        """The tokenizer. Raises Refusal(400) if it cannot be loaded."""
        coder = await self._tokenizer(tokenizer)
        if coder is None:
            raise Refusal(400, f"the tokenizer {tokenizer}, which text needs, cannot be loaded: send token ids")
        return coder

    async def token_bytes(self, tokenizer: str) -> TokenBytes:
        """The bytes of the tokenizer's tokens. Raises as `require` does."""
        if tokenizer not in self._token_bytes:
            self._token_bytes[tokenizer] = TokenBytes(await self.require(tokenizer))
        return self._token_bytes[tokenizer]

    async def _tokenizer(self, name: str) -> Tokenizer | None:
        async with self._loading:
            if name not in self._loaded:
                self._loaded[name] = await asyncio.to_thread(_load, name)
            return self._loaded[name]


def _load(name: str) -> Tokenizer | None:
    file = Path(name) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
    except Exception:  # the library raises no narrower type
        logger.exception("event=no_tokenizer name=%s", name)
        return None


def _load_chat_tokenizer(name: str) -> TextTokenizer:
    # Loads torch and transformers, without which this process starts.
    from xorl.data.errors import DataError  # noqa: PLC0415
    from xorl.data.formats import load_tokenizer  # noqa: PLC0415

    try:
        return load_tokenizer(Path(name))
    except DataError as problem:
        raise Refusal(400, f"conversations need the model's tokenizer: {problem}") from None


def _render_open(
    tokenizer: TextTokenizer,
    messages: Sequence[Message],
    tools: list[object] | None,
    variables: Mapping[str, object],
    asks_for_answer: bool,
) -> str:
    """The text up to the end of the last message's content."""
    last = {**messages[-1], "content": f"{messages[-1]['content']}{_END}"}
    before, *after = _render(tokenizer, [*messages[:-1], last], tools, variables, asks_for_answer).split(_END)
    if len(after) != 1:
        problem = "the model's chat template does not show the last message once, as it is"
        raise Refusal(400, f"continue_final_message: {problem}", param="continue_final_message")
    return before


def _render(
    tokenizer: TextTokenizer,
    messages: Sequence[Message],
    tools: list[object] | None,
    variables: Mapping[str, object],
    asks_for_answer: bool,
) -> str:
    # As in `_load_chat_tokenizer`.
    from xorl.data.errors import DataError  # noqa: PLC0415
    from xorl.data.formats.messages import Conversation, api_variants  # noqa: PLC0415
    from xorl.data.formats.template import TemplateRefusal, load_template  # noqa: PLC0415

    if "default" not in tokenizer.templates and (tools is None or "tool_use" not in tokenizer.templates):
        advice = "start the service with the tokenizer of a chat model as tokenizer_path"
        problem = f"the tokenizer in {tokenizer.folder} has no default one"
        raise Refusal(400, f"conversations need a chat template, but {problem}: {advice}")
    try:
        template = load_template("tokenizer_path", None, tokenizer, with_tools=tools is not None, kwargs=variables)
    except DataError as problem:
        raise Refusal(400, f"conversations need a chat template: {problem}") from None
    unknown = sorted(variables.keys() - template.variables)
    if unknown:
        name = unknown[0] if unknown[0] == "reasoning_effort" else f"chat_template_kwargs.{unknown[0]}"
        raise Refusal(400, f"{name} is not a variable of the model's chat template: leave it out", param=name)
    if "developer" not in template.mentioned:
        # OpenAI's newer name of the role, which most templates would leave out.
        messages = [one | {"role": "system"} if one["role"] == "developer" else one for one in messages]
    conversation = Conversation(list(messages), tools, ())
    refusals: list[str] = []
    # In the order that training tries them.
    for variant in (conversation, *api_variants(conversation)):
        try:
            text = template.render(variant.messages, variant.tools, add_generation_prompt=asks_for_answer)
            lost = _lost_message(template, variant)
        except TemplateRefusal as problem:
            refusals.append(str(problem))
            continue
        if lost is not None:
            name, role = f"messages[{lost}].role", str(messages[lost]["role"])[:100]
            problem = f"is {role!r}, which the model's chat template leaves out: use system, user, assistant or tool"
            raise Refusal(400, f"{name} {problem}", param=name)
        return text
    raise Refusal(400, f"messages: the model's chat template refuses them: {refusals[0]}")


def _lost_message(template: ChatTemplate, conversation: Conversation) -> int | None:
    """The first message of an unusual role that the template leaves out. Raises TemplateRefusal."""
    messages = conversation.messages
    for index, message in enumerate(messages):
        if message["role"] not in _ROLES:
            marked = [*messages[:index], message | {"content": _END}, *messages[index + 1 :]]
            if _END not in template.render(marked, conversation.tools, add_generation_prompt=False):
                return index
    return None


def _tool_support(tokenizer: TextTokenizer) -> ToolSupport:
    question: Message = {"role": "user", "content": "question"}
    definition = {"name": PROBE.name, "description": "a probe", "parameters": {"type": "object", "properties": {}}}
    tools: list[object] = [{"type": "function", "function": definition}]

    def answer(call_id: str) -> Message:
        function = {"name": PROBE.name, "arguments": json.loads(PROBE.arguments)}
        call = {"id": call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def render(*messages: Message, asks: bool = False) -> str:
        try:
            return _render(tokenizer, messages, tools, {}, asks)
        except Refusal as refusal:
            raise ValueError(refusal.message) from None

    def render_answer(call_id: str) -> str:
        return render(question, answer(call_id)).removeprefix(render(question, asks=True))

    calls = format_of(render_answer)
    try:
        shows_tools = PROBE.name in render(question)
        call_id = "" if calls is None else calls.new_id(PROBE.name, 0)
        result: Message = {"role": "tool", "content": "probe_result", "name": PROBE.name, "tool_call_id": call_id}
        shows_results = calls is not None and "probe_result" in render(question, answer(call_id), result)
    except ValueError:
        return ToolSupport(False, False, calls)
    return ToolSupport(shows_tools, shows_results, calls)
