"""The texts and bytes of single tokens, for tokenizers of bytes and of sentences."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from xorl.server.api.openai_answers import chat_logprobs, completion_logprobs, prompt_logprobs
from xorl.server.api.token_texts import Offsets, TokenBytes, TokenTexts

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart" / "tokenizer.json"
TEXT = "Grün 東京 \ufffd 🦀!"


def sentences():
    """A tokenizer like Llama 2's: words with a leading mark, and bytes of all other characters."""
    words = ["<s>", "▁the", "the", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def texts(tokenizer, **options):
    return TokenTexts(tokenizer, TokenBytes(tokenizer), **options)


def test_the_bytes_of_a_texts_tokens_are_the_texts_bytes():
    """Catches bytes that are missing, or are those of a vocabulary's spelling, where a token is part of a character."""
    tokenizer = Tokenizer.from_file(str(QUICKSTART))
    names = texts(tokenizer)
    tokens = tokenizer.encode(TEXT).ids
    assert b"".join(map(names.bytes_of, tokens)) == TEXT.encode()
    single = next(token for token in tokens if names.bytes_of(token) == b"\xe6")
    assert names.token(single) == "\\xe6"
    assert names.token(single, "bytes:") == "bytes:\\xe6"
    assert texts(tokenizer, as_ids=True).token(single) == f"token_id:{single}"
    assert (names.token(0), names.token(9999)) == ("<|endoftext|>", "")


def test_the_space_before_a_word_and_the_bytes_of_others_are_kept():
    """Catches tokens of a sentence tokenizer that lose their space, or show the name of a byte instead of it."""
    names = texts(sentences())
    word = [names.token(token) for token in (1, 2, 3)]
    assert word == [" the", "the", " "]
    assert names.bytes_of(4 + 0xD9) == b"\xd9"
    assert names.token(4 + ord("a")) == "a"
    assert names.token(0) == "<s>"


def test_offsets_are_positions_in_the_text():
    """Catches offsets that count the spelling of bytes, or special tokens that the text does not have."""
    tokenizer = Tokenizer.from_file(str(QUICKSTART))
    tokens = [0, *tokenizer.encode(TEXT).ids, 0]
    for skips_special in (True, False):
        names = texts(tokenizer, skips_special=skips_special)
        text, parts = names.decode(tokens), Offsets(names)
        offsets = parts.add(tokens[:7]) + parts.add(tokens[7:])
        assert offsets[-1] == len(text) - (0 if skips_special else len("<|endoftext|>"))
        for offset, token in zip(offsets, tokens, strict=True):
            shown = names.shown_bytes(token)
            if shown.decode(errors="ignore"):
                assert text[offset:].startswith(shown.decode())


def test_likely_tokens_of_one_text_are_all_there():
    """Catches an id that another id with the same text, here ids that no tokenizer has, replaces in an object."""
    names = texts(Tokenizer.from_file(str(QUICKSTART)))
    row = (5, -9.0, [(285, -1.0), (286, -2.0), (6, -3.0), (150, -4.0)])
    (top,) = completion_logprobs([row], names, Offsets(names))["top_logprobs"]
    assert list(top.values()) == [-1.0, -2.0, -3.0, -4.0, -9.0]
    assert list(top)[:2] == ["", "token_id:286"]
    (token,) = chat_logprobs([(150, -4.0, row[2])], names)["content"]
    assert (token["token"], token["bytes"]) == ("\\xd8", [0xD8])
    assert [one["token_id"] for one in token["top_logprobs"]] == [285, 286, 6, 150]
    scored = prompt_logprobs([(5, None, None), row], names)
    assert scored[0] is None
    assert list(scored[1]) == ["5", "285", "286", "6", "150"]
    assert [one["rank"] for one in scored[1].values()] == [None, 1, 2, 3, 4]


@pytest.mark.parametrize("tokens", [[], [0]])
def test_a_text_without_tokens_has_no_offsets(tokens):
    """Catches a first offset that is not 0."""
    names = texts(sentences())
    assert Offsets(names).add(tokens) == [0] * len(tokens)
