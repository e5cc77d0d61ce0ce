"""Text to tokens and back for the one call that speaks text; loads the served model's tokenizer when first asked."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from tokenizers import Tokenizer

from xorl.server.api.refusal import Refusal

logger = logging.getLogger(__name__)


class TextCoder:
    """The tokenizer of the served model, by the name or folder that the orchestrator says; None where there is none."""

    def __init__(self) -> None:
        self._loaded: dict[str, Tokenizer | None] = {}
        self._loading = asyncio.Lock()

    async def encode(self, tokenizer: str, text: str) -> list[int]:
        """Token ids of `text`, with what the tokenizer puts around it; Refusal(501) without a tokenizer."""
        coder = await self._tokenizer(tokenizer)
        if coder is None:
            raise Refusal(501, f"text needs the tokenizer {tokenizer}, which cannot be loaded: send input_ids")
        return coder.encode(text).ids

    async def decode(self, tokenizer: str, ids: list[int]) -> str | None:
        """The text of `ids`, without special tokens; None without a tokenizer, for clients that speak ids alone."""
        coder = await self._tokenizer(tokenizer)
        return None if coder is None else coder.decode(ids)

    async def _tokenizer(self, name: str) -> Tokenizer | None:
        async with self._loading:
            if name not in self._loaded:
                self._loaded[name] = await asyncio.to_thread(_load, name)
            return self._loaded[name]


def _load(name: str) -> Tokenizer | None:
    file = Path(name) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
    except Exception:  # the library raises nothing narrower
        logger.exception("event=no_tokenizer name=%s", name)
        return None
