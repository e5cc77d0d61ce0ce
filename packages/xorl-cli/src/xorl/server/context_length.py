"""The limit on the length of a prompt plus its sample, and the error for requests that exceed it."""

from __future__ import annotations

POSITIONS = "is the number of the model's positions"
"""The usual reason for the limit, as the rest of a relative clause."""


class ContextOverflow(ValueError):
    """A prompt and max_tokens that do not fit. Clients shorten the prompt if they see the code or the first words."""

    code = "context_length_exceeded"

    def __init__(self, num_prompt: int, max_tokens: int, limit: int, limited_by: str) -> None:
        reason = "" if limited_by == POSITIONS else f", which {limited_by}"
        super().__init__(
            f"This model's maximum context length is {limit} tokens{reason}. However, you requested "
            f"{num_prompt + max_tokens} tokens ({num_prompt} in the prompt, {max_tokens} for the completion). "
            "Please reduce the length of the prompt or max_tokens."
        )


def check_context(num_prompt: int, max_tokens: int, limit: int, limited_by: str = POSITIONS) -> None:
    """Raise ContextOverflow unless the tokens fit. The last token of a sample is never an input, so it needs no room.

    limited_by: the reason for the limit, as the rest of a relative clause.
    """
    if num_prompt + max(max_tokens - 1, 0) > limit:
        raise ContextOverflow(num_prompt, max_tokens, limit, limited_by)
