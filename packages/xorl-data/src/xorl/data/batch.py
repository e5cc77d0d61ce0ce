"""PackedBatch: one micro-batch of packed documents on one flat token axis, the interface between data and training.

Labels are shifted here, within each document, so no other code needs the document boundaries for it.
Shapes: T tokens (padding included), N documents (the padding document included).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from xorl.data.errors import DataError
from xorl.data.images.batch import NO_IMAGES, DocumentImages, Images, collate_images, coordinates_of
from xorl.data.images.settings import ImageSettings

# The label that PyTorch's losses ignore by default.
IGNORE = -100


@dataclass(frozen=True)
class Column:
    """The kind of a column: values that each token has beside its id and label.

    Attributes:
        receiver: what the column is passed to: the loss, among its targets, or the model, as an argument of this name.
        dtype: of the values.
        width: the shape of a token's values; () for a single one.
        fill: the value in padding, and where a document has none.
    """

    receiver: Literal["loss", "model"] = "loss"
    dtype: type[np.generic] = np.float32
    width: tuple[int, ...] = ()
    fill: float = 0

    def joined(self, parts: Sequence[np.ndarray | None], lengths: Sequence[int], num_tokens: int) -> Tensor:
        """[num_tokens, *width]: the values of consecutive documents of these lengths, filled up at the end.

        A part is None if its document has no values. If it has fewer per token than others, the last ones are filled.
        """
        values = np.full((num_tokens, *self.width), self.fill, dtype=self.dtype)
        for part, length, stop in zip(parts, lengths, accumulate(lengths), strict=True):
            if part is None:
                continue
            rows = part.reshape(length, -1) if len(self.width) == 1 else part
            values[(slice(stop - length, stop), *map(slice, rows.shape[1:]))] = rows
        return torch.from_numpy(values)


# The columns of every batch.
INPUT_IDS, LABELS = "input_ids", "labels"
_OF_EVERY_BATCH: Mapping[str, Column] = {
    INPUT_IDS: Column("model", np.int64),
    LABELS: Column("loss", np.int64, fill=IGNORE),
}
# A model input: the coordinates of tokens on three axes.
COORDINATES = "coordinates"
# A loss target: 1 for the prompt with the chosen answer, -1 for the prompt with the rejected answer, 0 for padding.
# A stored pair is one document, so that packing cannot separate its answers. Each becomes a document of the batch.
PREFERENCE = "preference"
# A loss target: the factor on the loss of each label.
WEIGHTS = "weights"
NO_COLUMNS: Mapping[str, Column] = {}


@dataclass(frozen=True)
class Document:
    """One document as training data. `labels` are not shifted, and are IGNORE where a token is not trained.

    `columns` have values for each token, by name. Those of WEIGHTS are for the token's own label, so they are not
    shifted either.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    images: DocumentImages = NO_IMAGES


@dataclass(frozen=True)
class PackedBatch:
    """`micro_batch_size` bins concatenated to one row and padded once; labels are already shifted.

    `labels[t]` is the token that position t predicts, IGNORE at a document's last position. The padding, if any, is the
    last document: its labels are IGNORE and `num_tokens` does not count it. For losses with several labels per token,
    labels and targets are [T, K].

    With the column PREFERENCE, the documents are pairs, each chosen answer right before the rejected one.

    `targets` and `inputs` are columns: values for each token, aligned with `input_ids` (not shifted). The loss receives
    the targets, and the model the inputs, as arguments of their names. `images` are those that tokens stand for; None
    in a run without images.
    """

    input_ids: Tensor  # [T] int64
    labels: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in each document
    cu_seqlens: Tensor  # [N+1] int32
    lengths: tuple[int, ...]  # N, on the host; sums to T
    num_tokens: int
    num_trained_tokens: int
    num_pairs: int = 0
    targets: Mapping[str, Tensor] = field(default_factory=dict)  # each [T, ..]
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # each [T, ..]
    images: Images | None = None

    @property
    def num_terms(self) -> int:
        """The number of terms in the mean of the loss: pairs if there are any, else trained tokens."""
        return self.num_pairs or self.num_trained_tokens

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """The lengths without the padding document."""
        return self.lengths if self.num_tokens == len(self.input_ids) else self.lengths[:-1]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedBatch:
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        return self._with_tensors(lambda tensor: tensor.pin_memory())

    @classmethod
    def join(cls, batches: Sequence[PackedBatch]) -> PackedBatch:
        """Concatenates at least one batch, all with the same columns. Only the last one's padding is not counted.

        Batches with images cannot be joined.
        """
        assert all(batch.images is None for batch in batches), "adapters of a bank are trained without images"
        starts = accumulate((len(batch.input_ids) for batch in batches), initial=0)
        boundaries = [batch.cu_seqlens[1:] + start for batch, start in zip(batches, starts, strict=False)]
        first = batches[0]
        return cls(
            input_ids=torch.cat([batch.input_ids for batch in batches]),
            labels=torch.cat([batch.labels for batch in batches]),
            positions=torch.cat([batch.positions for batch in batches]),
            cu_seqlens=torch.cat([first.cu_seqlens[:1], *boundaries]),
            lengths=tuple(length for batch in batches for length in batch.lengths),
            num_tokens=sum(len(batch.input_ids) for batch in batches[:-1]) + batches[-1].num_tokens,
            num_trained_tokens=sum(batch.num_trained_tokens for batch in batches),
            num_pairs=sum(batch.num_pairs for batch in batches),
            targets={name: torch.cat([batch.targets[name] for batch in batches]) for name in first.targets},
            inputs={name: torch.cat([batch.inputs[name] for batch in batches]) for name in first.inputs},
        )

    def _with_tensors(self, move: Callable[[Tensor], Tensor]) -> PackedBatch:
        return replace(
            self,
            input_ids=move(self.input_ids),
            labels=move(self.labels),
            positions=move(self.positions),
            cu_seqlens=move(self.cu_seqlens),
            targets={name: move(tensor) for name, tensor in self.targets.items()},
            inputs={name: move(tensor) for name, tensor in self.inputs.items()},
            images=None if self.images is None else self.images.with_tensors(move),
        )


def collate(
    documents: Sequence[Document],
    *,
    pad_to_multiple_of: int = 1,
    columns: Mapping[str, Column] = NO_COLUMNS,
    images: ImageSettings | None = None,
) -> PackedBatch:
    """Concatenates all documents in order to one row, padded at the end to a multiple of `pad_to_multiple_of`.

    The padding is a separate document. Without documents, returns a padding batch of `pad_to_multiple_of` tokens.
    Every batch has all `columns`. `images`: the settings of prepared images; None in a run without images.
    """
    documents = [part for document in documents for part in answers_of(document)]
    if pad_to_multiple_of < 1:
        raise ValueError(f"pad_to_multiple_of: {pad_to_multiple_of}, want at least 1")
    shifted = [_shifted(document) for document in documents]
    num_tokens = sum(len(document.input_ids) for document in documents)
    batch = pack_row(shifted, columns, -num_tokens % pad_to_multiple_of if documents else pad_to_multiple_of)
    return batch if images is None else _with_images(batch, documents, images)


def _shifted(document: Document) -> dict[str, np.ndarray]:
    """The columns of a document, with labels and their weights where the tokens before them are."""
    columns = {**document.columns, INPUT_IDS: document.input_ids}
    # The last position of a document has no label, because the next token belongs to another document.
    columns[LABELS] = np.append(document.labels[1:], IGNORE)
    if WEIGHTS in columns:
        columns[WEIGHTS] = np.append(columns[WEIGHTS][1:], np.float32(0))
    return columns


def answers_of(document: Document) -> Sequence[Document]:
    """The chosen and the rejected answer of a stored pair, each with its prompt; any other document as it is."""
    side = document.columns.get(PREFERENCE)
    if side is None:
        return (document,)
    cut = int(np.count_nonzero(side > 0))
    return tuple(
        Document(
            document.input_ids[part],
            document.labels[part],
            {name: values[part] for name, values in document.columns.items()},
        )
        for part in (slice(0, cut), slice(cut, None))
    )


def _with_images(batch: PackedBatch, documents: Sequence[Document], settings: ImageSettings) -> PackedBatch:
    """A batch of documents with their images. Raises DataError if an image's token is trained."""
    for document in documents:
        for image in document.images.stored:
            if (document.labels[image.start : image.stop] != IGNORE).any():
                raise DataError(f"{image.source.name}: tokens of the image have labels; want {IGNORE}, for none")
    lengths = [len(document.input_ids) for document in documents]
    images = collate_images([each.images for each in documents], lengths, len(batch.input_ids), settings)
    if not settings.has_axes:
        return replace(batch, images=images)
    parts = [coordinates_of(len(each.input_ids), each.images.stored, settings) for each in documents]
    coordinates = Column("model", np.int64, (3,)).joined(parts, lengths, len(batch.input_ids))
    return replace(batch, images=images, inputs={**batch.inputs, COORDINATES: coordinates})


def padding_batch(length: int, columns: Mapping[str, Column] = NO_COLUMNS) -> PackedBatch:
    """A batch of one padding document of `length` tokens, for a rank that has no bins in a short step."""
    if length < 1:
        raise ValueError(f"length: a padding batch needs at least one token, not {length}")
    return pack_row([], columns, length)


def pack_row(
    documents: Sequence[Mapping[str, np.ndarray]], columns: Mapping[str, Column], num_padding: int
) -> PackedBatch:
    """A row of documents given as columns: ids, labels that are already shifted, and any of `columns`; then padding."""
    columns = {**_OF_EVERY_BATCH, **columns}
    lengths = [len(document[INPUT_IDS]) for document in documents]
    num_tokens = sum(lengths)
    total = num_tokens + num_padding
    all_lengths = np.array([*lengths, num_padding] if num_padding else lengths, dtype=np.int64)
    ends = np.cumsum(all_lengths)
    positions = np.arange(total, dtype=np.int64) - np.repeat(ends - all_lengths, all_lengths)
    joined = {
        name: column.joined([document.get(name) for document in documents], lengths, total)
        for name, column in columns.items()
    }
    targets = {name: values for name, values in joined.items() if columns[name].receiver == "loss"}
    inputs = {name: values for name, values in joined.items() if columns[name].receiver == "model"}
    labels = targets.pop(LABELS)
    return PackedBatch(
        input_ids=inputs.pop(INPUT_IDS),
        labels=labels,
        positions=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        lengths=tuple(all_lengths.tolist()),
        num_tokens=num_tokens,
        num_trained_tokens=int(trained_tokens(labels, targets).sum()),
        num_pairs=len(documents) // 2 if PREFERENCE in targets else 0,
        targets=targets,
        inputs=inputs,
    )


def trained_tokens(labels: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    """[T] bool: the tokens that have a label, of a weight other than 0 if there are weights."""
    is_trained = labels != IGNORE
    if (weights := targets.get(WEIGHTS)) is not None:
        is_trained = is_trained & (weights != 0)
    return is_trained.view(len(labels), -1).any(dim=1)
