"""The tokenizer of text formats: its Rust core, special tokens and chat templates, loaded once per process.

transformers loads the files, because it supports every layout; encoding uses only the core.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from xorl.data.errors import DataError
from xorl.data.hashing import digest

_OPTION = "tokenizer_folder"
# Byte-level vocabularies write bytes as characters: printable Latin-1 as itself, other bytes from U+0100 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with the data that chat templates need. Pickled as the path of its folder; compared by content.

    `special` are the named special tokens (bos_token, eos_token, ...), `special_texts` the texts of all special tokens,
    `templates` the chat templates by name. `adds_bos`: the tokenizer itself adds BOS to a text. `spaces_first`: it also
    puts a space before a text, but not if the text itself begins with BOS.
    """

    folder: Path
    content: str  # hash of everything below
    core: Tokenizer
    special: Mapping[str, object]
    special_texts: frozenset[str]
    templates: Mapping[str, str]
    adds_bos: bool
    spaces_first: bool = False

    @property
    def bos_id(self) -> int | None:
        return self.id_of("bos_token")

    @property
    def eos_id(self) -> int | None:
        return self.id_of("eos_token")

    @cached_property
    def special_ids(self) -> list[int]:
        return [number for text in self.special_texts if (number := self.core.token_to_id(text)) is not None]

    @cached_property
    def bytes_of(self) -> list[bytes] | None:
        """The bytes of each id, b"" if unknown. None if the bytes of the tokens do not add up to the text."""
        found = [b""] * (max(self.core.get_vocab(with_added_tokens=True).values()) + 1)
        for token, number in self.core.get_vocab(with_added_tokens=False).items():
            with suppress(KeyError):
                found[number] = bytes([_BYTE_OF_CHAR[char] for char in token])
        for number, added in self.core.get_added_tokens_decoder().items():
            found[number] = added.content.encode()
        # Detects tokenizers that add a space at the beginning, or remove spaces next to special tokens.
        text = " ".join(["An Example,\n  of\ttext é", *self.special_texts, ""])
        ids = self.core.encode(text, add_special_tokens=False).ids
        return found if b"".join(found[number] for number in ids) == text.encode() else None

    @cached_property
    def num_bytes_of(self) -> np.ndarray:
        """The number of bytes of each id, [V] int64."""
        return np.array([len(each) for each in self.bytes_of or ()], dtype=np.int64)

    def is_space(self, token_id: int) -> bool:
        """Whether a token consists only of whitespace."""
        return not self.core.decode([token_id], skip_special_tokens=False).strip()

    @property
    def eos_text(self) -> str:
        return str(self.special.get("eos_token") or "")

    def begin_of(self, text: str) -> str:
        """What to write before `text`, so that without special tokens it is tokenized as it is alone, with them.

        That is BOS, if the tokenizer itself adds it and the text does not begin with it, and a space if `spaces_first`.
        """
        bos = str(self.special.get("bos_token") or "")
        if not self.adds_bos or text.startswith(bos):
            return ""
        has_own = text.startswith((" ", "\N{LOWER ONE EIGHTH BLOCK}", *self.special_texts))
        return f"{bos} " if self.spaces_first and not has_own else bos

    def end_of(self, text: str) -> str:
        """The suffix for `text`: EOS, unless it already ends with it."""
        return "" if self.eos_text and text.endswith(self.eos_text) else self.eos_text

    def id_of(self, name: str) -> int | None:
        """The id of a named special token; None if the tokenizer does not have it."""
        text = self.special.get(name)
        return self.core.token_to_id(text) if isinstance(text, str) else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextTokenizer) and other.content == self.content

    def __hash__(self) -> int:
        return hash(self.content)

    def __reduce__(self) -> tuple[object, tuple[Path, str]]:
        return _load_same, (self.folder, self.content)


def load_tokenizer(folder: Path | str) -> TextTokenizer:
    """Loads the tokenizer in `folder`, which may also be the id of a repository in the local cache of the Hub.

    Raises DataError if there is no usable one.
    """
    folder = Path(folder)
    # Each process encodes in one thread; dataset_num_proc sets the number of processes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Importing transformers takes seconds, and only text formats need it.
    from transformers import AutoTokenizer  # noqa: PLC0415

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the library may raise anything on a tokenizer's files
        if not folder.is_dir():
            raise DataError(
                f"{_OPTION}: {folder} is not a folder (looked at {folder.absolute()}), nor the id of a repository in "
                "the local cache of the Hub; set a folder with a tokenizer.json"
            ) from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{_OPTION}: {folder} has no tokenizer that can be loaded: {reason}") from error
    core = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(core, Tokenizer):
        raise DataError(
            f"{_OPTION}: the tokenizer in {folder} is not a fast tokenizer, which is required to locate each token in "
            "the text; set a folder with a tokenizer.json"
        )
    core = Tokenizer.from_str(core.to_str())
    core.no_truncation()
    core.no_padding()
    templates = loaded.chat_template or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    special = dict(loaded.special_tokens_map)
    added = loaded.added_tokens_decoder.values()
    named = sorted((name, str(text)) for name, text in special.items())
    special_texts = frozenset(str(token) for token in added if token.special)
    if core.get_vocab().keys() <= special_texts:
        # For some families transformers builds a tokenizer without any files, which encodes every text to no tokens.
        raise DataError(f"{_OPTION}: {folder} has no tokenizer; set a folder with a tokenizer.json")
    with_special = core.encode("a").ids
    bos = loaded.bos_token_id
    adds_bos = bos is not None and with_special[:1] == [bos]
    spaces_first = adds_bos and _spaces_first(core, str(loaded.bos_token), with_special)
    tokenizer = TextTokenizer(
        folder=folder,
        # Other tokenizers keep their hash, so the data prepared with them stays valid.
        content=digest(core.to_str(), named, sorted(templates.items()), *(["spaces_first"] if spaces_first else [])),
        core=core,
        special=special,
        special_texts=special_texts,
        templates=templates,
        adds_bos=adds_bos,
        spaces_first=spaces_first,
    )
    return _LOADED.setdefault(tokenizer.content, tokenizer)


def _spaces_first(core: Tokenizer, bos: str, expected: list[int]) -> bool:
    """Whether "a" needs a space between it and a BOS in the text to get the `expected` ids."""
    plain, spaced = (core.encode(f"{bos}{space}a", add_special_tokens=False).ids for space in ("", " "))
    return expected[: len(plain)] != plain and expected[: len(spaced)] == spaced


_LOADED: dict[str, TextTokenizer] = {}


def _load_same(folder: Path, content: str) -> TextTokenizer:
    """Unpickles a tokenizer: reuses the loaded one with this content, which a forked process inherits."""
    tokenizer = _LOADED.get(content) or load_tokenizer(folder)
    if tokenizer.content != content:
        raise DataError(f"{_OPTION}: the tokenizer in {folder} changed while data was prepared; start again")
    return tokenizer
