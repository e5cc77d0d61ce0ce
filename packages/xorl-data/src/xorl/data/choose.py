"""Which Format an entry of the configuration has: its options, checked, become the object that reads its rows."""

from __future__ import annotations

from xorl.data.formats import Format, TokenizedFormat
from xorl.data.sources import DatasetEntry


def choose_format(entry: DatasetEntry, *, bin_len: int, vocab_size: int | None, option: str) -> Format:
    """The format of `entry`, which stands at `option` in the configuration; `bin_len` is the longest document."""
    explicit = entry.max_seq_len is not None
    return TokenizedFormat(
        limit=entry.max_seq_len if entry.max_seq_len is not None else bin_len,
        overflow=entry.overflow,
        limit_option=f"{option}.max_seq_len" if explicit else "data.sample_packing_sequence_len",
        columns=entry.columns,
        vocab_size=vocab_size,
    )
