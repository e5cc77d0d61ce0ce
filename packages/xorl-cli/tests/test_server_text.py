"""The text of a sample that arrives in parts."""

import pytest

from xorl.server.sample_text import TextStream, sample_text, until_stop


def decode(tokens):
    return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("plain", (), "plain"),
        ("grün, 東京", (), "grün, 東京"),
        ("say stop! now", ("stop!",), "say "),
        ("sto sto stop", ("stop!",), "sto sto stop"),
        ("a END b", ("b", "END"), "a "),
    ],
)
def test_parts_of_a_text_are_the_text_whatever_their_size(text, stops, wanted, size):
    """Catches half a character, a stop string that is shown, and text that is held back for ever."""
    stream, tokens, shown = TextStream(decode, stops), list(text.encode()), ""
    for start in range(0, len(tokens), size):
        part = stream.add(tokens[start : start + size], is_last=start + size >= len(tokens))
        assert "\ufffd" not in part
        shown += part
        assert wanted.startswith(shown)
    assert shown == wanted == until_stop(text, stops)[0]


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("text", "stops", "without", "whole"),
    [
        ("say stop!", ("stop!",), "say ", "say stop!"),
        ("say stop! now", ("stop!",), "say ", "say stop!"),
        ("the last byte is a token.", (), "the last byte is a token", "the last byte is a token."),
        ("ended by a token, not by END.", ("xEND",), "ended by a token, not by END", "ended by a token, not by END."),
    ],
)
@pytest.mark.parametrize("keeps_stop", [False, True])
def test_what_ends_a_sample_is_part_of_its_text_on_request(text, stops, without, whole, keeps_stop, size):
    """Catches include_stop_str_in_output without effect, and the text of a stop token in an answer."""
    wanted, tokens = whole if keeps_stop else without, list(text.encode())
    assert sample_text(decode, tokens, stops, is_stopped=True, keeps_stop=keeps_stop) == wanted
    stream, shown = TextStream(decode, stops, keeps_stop=keeps_stop), ""
    for start in range(0, len(tokens), size):
        is_last = start + size >= len(tokens)
        shown += stream.add(tokens[start : start + size], is_last=is_last, is_stopped=is_last)
    assert shown == wanted
