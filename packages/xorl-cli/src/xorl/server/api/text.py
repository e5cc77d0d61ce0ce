"""Converts text to tokens and back for /generate; loads the served model's tokenizer on first use."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from tokenizers import Tokenizer

from xorl.server.api.responses import Refusal

logger = logging.getLogger(__name__)


class TextCoder:
    """Encodes and decodes with the tokenizer of the served model, whose name or folder the orchestrator reports."""

    def __init__(self) -> None:
        self._loaded: dict[str, Tokenizer | None] = {}
        self._loading = asyncio.Lock()

    async def encode(self, tokenizer: str, text: str) -> list[int]:
        """Token ids of `text`, including the tokenizer's special tokens. Raises Refusal(501) without a tokenizer."""
        coder = await self._tokenizer(tokenizer)
        if coder is None:
            raise Refusal(501, f"the tokenizer {tokenizer}, which text needs, cannot be loaded: send input_ids")
        return coder.encode(text).ids

    async def decode(self, tokenizer: str, ids: list[int]) -> str | None:
        """The text of `ids` without special tokens. None if there is no tokenizer: clients may need only the ids."""
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
    except Exception:  # the library raises no narrower type
        logger.exception("event=no_tokenizer name=%s", name)
        return None
