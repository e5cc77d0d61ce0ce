"""The texts and bytes of single tokens. A token may be part of a character, so its bytes need not be valid text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

# Byte-level tokenizers spell each byte as a printable character: itself if it is one, otherwise one from 256 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_SPELLED = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}
# SentencePiece tokenizers have tokens for the bytes of characters that are not in their vocabulary.
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes of each token of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
        self._is_byte_level = b'"ByteLevel"' in decoder
        self._has_fallback = b'"ByteFallback"' in decoder
        self._added = tokenizer.get_added_tokens_decoder()

    def of(self, token: int) -> bytes:
        """The token's bytes; empty for an id that the tokenizer does not have."""
        if token in self._added:
            return self._added[token].content.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._is_byte_level and all(char in _SPELLED for char in piece):
            return bytes(_SPELLED[char] for char in piece)
        if self._has_fallback and (found := _FALLBACK.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        # Decoders strip the space at the beginning of a text, so the second of two has the token's whole text.
        once, twice = (self._tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        return (twice[len(once) :] if twice.startswith(once) else once).encode()

    def is_special(self, token: int) -> bool:
        """Whether the text of an answer may omit the token."""
        return token in self._added and self._added[token].special


class TokenTexts:
    """The texts of single tokens, which OpenAI's log-probabilities name instead of ids, and of whole samples.

    as_ids: name tokens `token_id:123`. skips_special: samples have no special tokens, except for those that occur in
    one of the texts `kept`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        token_bytes: TokenBytes,
        *,
        as_ids: bool = False,
        skips_special: bool = True,
        kept: Collection[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._bytes = token_bytes
        self._as_ids = as_ids
        self._skips_special = skips_special
        added = tokenizer.get_added_tokens_decoder().items() if kept else ()
        self._kept = frozenset(token for token, one in added if any(one.content in text for text in kept))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a sample."""
        if self._skips_special and self._kept:
            shown = [token for token in tokens if token in self._kept or not self._bytes.is_special(token)]
            return self._tokenizer.decode(shown, skip_special_tokens=False)
        return self._tokenizer.decode(list(tokens), skip_special_tokens=self._skips_special)

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes."""
        return self._bytes.of(token)

    def token(self, token: int, mark: str = "") -> str:
        r"""The name of a token: its text or, for a part of a character, `mark` and its bytes in the form \xd9."""
        if self._as_ids:
            return token_id_text(token)
        data = self._bytes.of(token)
        text = data.decode(errors="backslashreplace")
        return text if text.encode() == data else mark + text

    def shown_bytes(self, token: int) -> bytes:
        """The token's bytes in the text of a sample."""
        return b"" if self._skips_special and self._bytes.is_special(token) else self._bytes.of(token)


class Offsets:
    """The positions of a text's tokens, in characters; the text may grow."""

    def __init__(self, texts: TokenTexts, start: int = 0) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = start

    def add(self, tokens: Sequence[int]) -> list[int]:
        """The positions of the text's next tokens. A part of a character has the character's position."""
        found: list[int] = []
        for token in tokens:
            found.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(self._texts.shown_bytes(token)))
        return found


def token_id_text(token: int) -> str:
    """A token's name by its id."""
    return f"token_id:{token}"
