"""Text to tokens and back for the one call that speaks text; loads the served model's tokenizer when first asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tokenizers import Tokenizer

from xorl.server.api.refusal import Refusal


class TextCoder:
    """The tokenizer of the served model, by the name or folder that the orchestrator says."""

    def __init__(self) -> None:
        self._loaded: tuple[str, Tokenizer] | None = None
        self._loading = asyncio.Lock()

    async def encode(self, tokenizer: str, text: str) -> list[int]:
        """Token ids of `text`, with what the tokenizer puts around it."""
        return (await self._tokenizer(tokenizer)).encode(text).ids

    async def decode(self, tokenizer: str, ids: list[int]) -> str:
        """The text of `ids`, without special tokens."""
        return (await self._tokenizer(tokenizer)).decode(ids)

    async def _tokenizer(self, name: str) -> Tokenizer:
        async with self._loading:
            if self._loaded is None or self._loaded[0] != name:
                self._loaded = (name, await asyncio.to_thread(_load, name))
            return self._loaded[1]


def _load(name: str) -> Tokenizer:
    file = Path(name) / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
    except Exception as problem:  # noqa: BLE001  # the library raises nothing narrower
        raise Refusal(501, f"text needs the tokenizer {name}, which cannot be loaded ({problem}): send ids") from None
