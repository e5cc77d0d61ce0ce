"""Raw text for the trainers of a user's own module: a tokenizer by name, and endless rows of token ids. S positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor
from torch.utils.data import IterableDataset

from xorl.ckpt.hub import TOKENIZER_PATTERNS, resolve_folder
from xorl.data import DatasetEntry, FileType, collate
from xorl.data.formats import TextTokenizer
from xorl.data.formats import load_tokenizer as load_from_folder
from xorl.data.stream import Stream, StreamOptions, open_stream, stream_bins


def load_tokenizer(id_or_path: str | Path) -> TextTokenizer:
    """The tokenizer of a local folder, or of a repository of the Hub (org/name)."""
    return load_from_folder(resolve_folder(id_or_path, patterns=TOKENIZER_PATTERNS))


class TextStream(IterableDataset[dict[str, Tensor]]):
    """Endless rows of `context_length` tokens, made of documents while training runs; made to be given to `DataLoader`.

    path: a file, a folder, a URL (s3://, gs://, abfs://, https://) or the Hub's org/name, with name, split, data_files
    and ds_type as in the configuration; column: the one that holds the text. Documents end with EOS, longer ones are
    split, and a row is filled with whole ones, so its end may be padding. A row is input_ids [S] and labels [S]: the
    next token of the same document, -100 at its last token and in padding.

    The order depends on the data and `seed` alone. It never ends (epochs follow one another, each in another order), so
    `train` needs max_steps. Ranks and workers share the rows without reading each other's.
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
        columns = {} if column == "text" else {"text": column}
        entry = DatasetEntry(
            path,
            type="text",
            name=name,
            split=split,
            data_files=data_files,
            ds_type=ds_type,
            overflow="split",
            column_names=columns,
        )
        options = StreamOptions(context_length, tokenizer_folder=tokenizer.folder, seed=seed, shuffle=shuffle)
        self.stream: Stream = open_stream([entry], options, index_path=Path(cache_path) / "streams", option="dataset")
        self.context_length = context_length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.rows(0, 1)

    def rows(self, first: int, stride: int) -> Iterator[dict[str, Tensor]]:
        """Row `first` and every `stride`-th after it, without making those between where the stream's lanes allow."""
        for member in stream_bins(self.stream, first=first, stride=stride):
            batch = collate(member.documents, pad_to_multiple_of=self.context_length)
            yield {"input_ids": batch.input_ids, "labels": batch.labels}
