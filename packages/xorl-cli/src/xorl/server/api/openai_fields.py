"""Ignores or refuses fields of OpenAI's requests, and of vLLM's extensions, that this service does not serve.

`openai_bodies` has the fields that are served. All fields in neither module are refused as unknown.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Set
from typing import Any, NamedTuple, TypeVar

import msgspec

from xorl.server.api.responses import InvalidField

Body = TypeVar("Body", bound=msgspec.Struct)

IGNORED = frozenset(
    (
        *("user", "safety_identifier", "metadata", "session_id"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction"),
    )
)
"""Fields that cannot change an answer: labels, and hints for caches and speed."""


class Unserved(NamedTuple):
    """neutral: the values that request nothing, besides empty lists and objects. advice: what to do instead."""

    neutral: tuple[object, ...]
    advice: str


_LEAVE = "leave it out"
_TOOLS = "use tools and tool_choice of /v1/chat/completions"
_FORMAT = "use response_format"
_SAMPLING = "use temperature, top_k, top_p, logit_bias or penalties, or leave it out"
_TEXT = "the model reads and writes only text; leave it out"
_PROMPT = "write the prompt yourself, and send its text or token ids to /v1/completions"
_BEGIN = "to have the model continue the last message, set continue_final_message"


def alike(names: str, advice: str, *neutral: object) -> dict[str, Unserved]:
    """The rule for several fields; neutral: the values that request nothing."""
    return {name: Unserved(neutral, advice) for name in names.split()}


UNSERVED: Mapping[str, Unserved] = {
    **alike("tools functions", _TOOLS),
    **alike("tool_choice function_call", _TOOLS, "none", "auto"),
    **alike("parallel_tool_calls", _TOOLS, True, False),
    **alike("structured_outputs guided_json guided_regex guided_choice guided_grammar", _FORMAT),
    **alike("guided_decoding_backend guided_whitespace_pattern", _FORMAT),
    **alike("min_p min_tokens", _SAMPLING, 0),
    **alike("length_penalty", _SAMPLING, 1),
    **alike("use_beam_search watermarking", _SAMPLING, False),
    **alike("allowed_token_ids bad_words logprob_token_ids repetition_detection", _SAMPLING),
    **alike("thinking_token_budget", _SAMPLING, -1),
    **alike("modalities", _TEXT, ["text"]),
    **alike("audio media_io_kwargs mm_processor_kwargs prompt_embeds web_search_options moderation", _TEXT),
    **alike("chat_template documents", _PROMPT),
    **alike("echo add_special_tokens", _PROMPT, False),
    **alike("suffix", _PROMPT, ""),
    **alike("store", "answers are not stored; " + _LEAVE, False),
    **alike("service_tier", "all requests are equal; " + _LEAVE, "auto", "default"),
    **alike("priority", "all requests are equal; " + _LEAVE, 0),
    **alike("verbosity", "ask for the length in the prompt", "medium"),
    **alike("include_reasoning spaces_between_special_tokens return_mm_kwargs", _LEAVE, True),
    **alike("truncation_side", _LEAVE, "left"),
    **alike("routed_experts_prompt_start", _LEAVE, 0),
    **alike("return_token_offsets return_prompt_text", _LEAVE, False),
    **alike("cache_salt stream_interval kv_transfer_params ec_transfer_params vllm_xargs", _LEAVE),
}
"""Fields that would change an answer, or that request something the service cannot do."""

MESSAGE_IGNORED = frozenset(("annotations", "id", "provider_specific_fields", "cache_control"))
MESSAGE_UNSERVED: Mapping[str, Unserved] = {
    **alike("function_call", "use tool_calls"),
    **alike("audio", _TEXT),
    **alike("refusal", "send it as content", ""),
    **alike("prefix partial", _BEGIN, False),
}
PART_IGNORED = frozenset(("cache_control", "prompt_cache_breakpoint"))


def read_fields(given: Mapping[str, Any], kind: type[Body]) -> Body:
    """The body of a request. A null field counts as left out.

    Raises InvalidField for a field that is unknown, has the wrong type, or is not served.
    """
    return msgspec_of(served_fields(given, field_names(kind), IGNORED, UNSERVED), kind)


def field_names(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The names of a body's fields."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def served_fields(
    given: Mapping[str, Any],
    served: Set[str],
    ignored: Set[str],
    unserved: Mapping[str, Unserved],
    where: str = "",
) -> dict[str, Any]:
    """The fields that are served and not null. Raises InvalidField for others, unless their values request nothing."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or name in ignored:
            continue
        if name in served:
            found[name] = value
        elif name not in unserved:
            near = difflib.get_close_matches(name[:100], [*served, *ignored, *unserved], n=1)
            advice = f"did you mean {near[0]}?" if near else _LEAVE
            raise InvalidField(f"{where}{name[:100]}", f"is not a field of this call: {advice}", "unknown_parameter")
        elif value not in ([], {}, *unserved[name].neutral):
            raise _not_served(f"{where}{name}", unserved[name])
    return found


def msgspec_of(fields: Mapping[str, Any], kind: type[Body], where: str = "") -> Body:
    """Convert fields to a struct. Raises InvalidField for a missing field or one of the wrong type."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as problem:
        text = str(problem)
        if missing := re.match(r"Object missing required field `(\w+)`", text):
            raise InvalidField(f"{where}{missing[1]}", "is missing", "missing_required_parameter") from None
        reason, _, path = text.partition(" - at `$.")
        name = f"{where}{path.rstrip('`')}"
        raise InvalidField(name, f"has a wrong type: {reason[:1].lower()}{reason[1:]}", "invalid_type") from None


def _not_served(name: str, rule: Unserved) -> InvalidField:
    values = " or ".join(msgspec.json.encode(value).decode() for value in rule.neutral if value != "")
    other = f"may only be {values}" if values else "is not supported"
    return InvalidField(name, f"{other}: {rule.advice}", "unsupported_parameter")
