"""Raw text for training a user-defined module: a tokenizer, and an endless stream of token rows. S: positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor
from torch.utils.data import IterableDataset

from xorl.ckpt.hub import TOKENIZER_PATTERNS, resolve_folder
from xorl.data import DatasetEntry
from xorl.data.batch import collate
from xorl.data.formats import TextTokenizer
from xorl.data.formats import load_tokenizer as load_from_folder
from xorl.data.readers import FileType
from xorl.data.stream import Stream, StreamOptions, open_stream, stream_bins


def load_tokenizer(id_or_path: str | Path) -> TextTokenizer:
    """Load the tokenizer of a local folder or of a Hub repository (org/name)."""
    return load_from_folder(resolve_folder(id_or_path, patterns=TOKENIZER_PATTERNS))


class TextStream(IterableDataset[dict[str, Tensor]]):
    """An endless stream of rows of `context_length` tokens, packed from documents on the fly, for `DataLoader`.

    path: a file, a folder, a URL (s3://, gs://, abfs://, https://) or a Hub dataset org/name, with name, split,
    data_files and ds_type as in the configuration. column: the column with the text.

    Documents end with EOS. Documents longer than a row are split; otherwise rows hold whole documents, so a row may end
    in padding. A row is input_ids [S] and labels [S]: the next token of the same document, or -100 at its last token
    and in padding.

    The order depends only on the data and `seed`. The stream repeats the data in a new order each epoch and never ends,
    so `train` needs max_steps. Each rank and worker reads only its own rows.
    """

    def __init__(
        self,
        path: str,
        tokenizer: TextTokenizer,
        context_length: int,
        *,
        name: str | None = None,
        split: str | None = None,
        data_files: str | Sequence[str] | None = None,
        ds_type: FileType | None = None,
        column: str = "text",
        seed: int = 0,
        shuffle: bool = True,
        cache_path: str | Path = "last_prepared_dataset",
    ) -> None:
        entry = DatasetEntry(
            path,
            type="text",
            name=name,
            split=split,
            data_files=data_files,
            ds_type=ds_type,
            overflow="split",
            column_names={} if column == "text" else {"text": column},
        )
        options = StreamOptions(context_length, tokenizer_folder=tokenizer.folder, seed=seed, shuffle=shuffle)
        self.stream: Stream = open_stream([entry], options, index_path=Path(cache_path) / "streams", option="dataset")
        self.context_length = context_length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.rows(0, 1)

    def rows(self, first: int, stride: int) -> Iterator[dict[str, Tensor]]:
        """Yield row `first` and every `stride`-th row after it, skipping the others unread if possible."""
        for member in stream_bins(self.stream, first=first, stride=stride):
            batch = collate(member.documents, pad_to_multiple_of=self.context_length)
            yield {"input_ids": batch.input_ids, "labels": batch.labels}
