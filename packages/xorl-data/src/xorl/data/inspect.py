"""Shows documents as segments of text, each marked as trained or not, and as a special token or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from xorl.data.arguments import checked
from xorl.data.batch import IGNORE
from xorl.data.errors import DataError
from xorl.data.formats import TextTokenizer
from xorl.data.images.table import StoredImage


@dataclass(frozen=True)
class TextSegment:
    """The text of consecutive tokens of the same kind. A `special` segment is one special token, or an image."""

    text: str
    trained: bool
    special: bool = False


@checked
def text_segments(
    ids: np.ndarray, labels: np.ndarray, tokenizer: TextTokenizer | None, images: Sequence[StoredImage] = ()
) -> list[TextSegment]:
    """A document [T] as text; without a tokenizer, as ids. An image is one segment, which describes it.

    `labels` are not shifted. The first token is never trained, since no token before it predicts it. Raises
    DataError for ids and labels of different shapes, and for others than integers.
    """
    for name, values in (("ids", ids), ("labels", labels)):
        if values.shape != (len(ids),) or values.dtype.kind not in "iu":
            raise DataError(f"{name}: {values.dtype} {list(values.shape)}, want integers [{len(ids)}], one a token")
    trained = labels != IGNORE
    if len(trained):
        trained[0] = False
    special = np.zeros(len(ids), dtype=bool) if tokenizer is None else np.isin(ids, tokenizer.special_ids)
    image_at = {image.start: image for image in images if image.start < len(ids)}
    within = np.zeros(len(ids), dtype=bool)  # an image, after its first token
    for start, image in image_at.items():
        special[start : image.stop] = True
        within[start + 1 : image.stop] = True
    # Each special token is a separate segment; other consecutive tokens of the same kind are joined.
    starts = np.flatnonzero(
        np.concatenate([[True], (trained[1:] != trained[:-1]) | special[1:] | special[:-1]]) & ~within
        if len(ids)
        else []
    )
    ends = [*starts[1:].tolist(), len(ids)]
    return [
        TextSegment(
            _described(image_at[start]) if start in image_at else _text(ids[start:end], tokenizer),
            bool(trained[start]),
            bool(special[start]),
        )
        for start, end in zip(starts.tolist(), ends, strict=False)
    ]


def trained_texts(parts: list[TextSegment]) -> Iterator[str]:
    """Yields the trained text, one string per run of trained segments."""
    text = ""
    for part in parts:
        if part.trained:
            text += part.text
        elif text:
            yield text
            text = ""
    if text:
        yield text


def _described(image: StoredImage) -> str:
    """Such as [image 640 x 480 pixels, 40 x 30 patches, 300 tokens: cat.jpg]."""
    return f"[image {image.size} pixels, {image.grid} patches, {image.num_tokens} tokens: {image.source.name}]"


def _text(ids: np.ndarray, tokenizer: TextTokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids.tolist())) + " "
    return tokenizer.core.decode(ids.tolist(), skip_special_tokens=False)
