"""The text of a sample that arrives in parts."""

import pytest

from xorl.server.api.text import TextStream, until_stop


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
