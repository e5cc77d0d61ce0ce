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


def rules_for(names: str, advice: str, *neutral: object) -> dict[str, Unserved]:
    """The same rule for several fields. neutral: the values that request nothing."""
    return {name: Unserved(neutral, advice) for name in names.split()}


UNSERVED: Mapping[str, Unserved] = {
    **rules_for("tools functions", _TOOLS),
    **rules_for("tool_choice function_call", _TOOLS, "none", "auto"),
    **rules_for("parallel_tool_calls", _TOOLS, True, False),
    **rules_for("structured_outputs guided_json guided_regex guided_choice guided_grammar", _FORMAT),
    **rules_for("guided_decoding_backend guided_whitespace_pattern", _FORMAT),
    **rules_for("min_p min_tokens", _SAMPLING, 0),
    **rules_for("length_penalty", _SAMPLING, 1),
    **rules_for("use_beam_search watermarking", _SAMPLING, False),
    **rules_for("allowed_token_ids bad_words logprob_token_ids repetition_detection", _SAMPLING),
    **rules_for("thinking_token_budget", _SAMPLING, -1),
    **rules_for("modalities", _TEXT, ["text"]),
    **rules_for("audio media_io_kwargs mm_processor_kwargs prompt_embeds web_search_options moderation", _TEXT),
    **rules_for("chat_template documents", _PROMPT),
    **rules_for("echo add_special_tokens", _PROMPT, False),
    **rules_for("suffix", _PROMPT, ""),
    **rules_for("store", "answers are not stored; " + _LEAVE, False),
    **rules_for("service_tier", "all requests are equal; " + _LEAVE, "auto", "default"),
    **rules_for("priority", "all requests are equal; " + _LEAVE, 0),
    **rules_for("verbosity", "ask for the length in the prompt", "medium"),
    **rules_for("include_reasoning spaces_between_special_tokens return_mm_kwargs", _LEAVE, True),
    **rules_for("truncation_side", _LEAVE, "left"),
    **rules_for("routed_experts_prompt_start", _LEAVE, 0),
    **rules_for("return_token_offsets return_prompt_text", _LEAVE, False),
    **rules_for("cache_salt stream_interval kv_transfer_params ec_transfer_params vllm_xargs", _LEAVE),
}
"""Fields that would change an answer, or that request something the service cannot do."""

MESSAGE_IGNORED = frozenset(("annotations", "id", "provider_specific_fields", "cache_control"))
MESSAGE_UNSERVED: Mapping[str, Unserved] = {
    **rules_for("function_call", "use tool_calls"),
    **rules_for("audio", _TEXT),
    **rules_for("refusal", "send it as content", ""),
    **rules_for("prefix partial", _BEGIN, False),
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
        reason, _, path = str(problem).partition(" - at `$.")
        name = f"{where}{path.rstrip('`')}"
        if field := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", reason):
            name = f"{name}.{field[2]}" if path else f"{name}{field[2]}"
            if field[1] == "missing required":
                raise InvalidField(name, "is missing", "missing_required_parameter") from None
            raise InvalidField(name, f"is not a field of this call: {_LEAVE}", "unknown_parameter") from None
        raise InvalidField(name, f"has a wrong type: {reason[:1].lower()}{reason[1:]}", "invalid_type") from None


def _not_served(name: str, rule: Unserved) -> InvalidField:
    values = " or ".join(msgspec.json.encode(value).decode() for value in rule.neutral if value != "")
    other = f"may only be {values}" if values else "is not supported"
    return InvalidField(name, f"{other}: {rule.advice}", "unsupported_parameter")
