"""Options of preparing, and what becomes of the rows of a test."""

from dataclasses import replace

import pytest

from data_files import write_as, write_tokenizer
from xorl.data import DatasetEntry, PrepareOptions, prepare
from xorl.data.formats import load_tokenizer
from xorl.data.inspect import text_segments, trained_texts
from xorl.data.stream import StreamOptions, open_stream


@pytest.fixture
def options(tmp_path):
    """Options that keep the source's order, with the cache in the test's folder."""
    in_order = {"shuffle_before_merging": False, "shuffle_merged": False}
    return PrepareOptions(bin_len=64, vocab_size=1000, prepared_path=tmp_path / "prepared", **in_order)


@pytest.fixture
def prepare_rows(tmp_path, options):
    """Returns a function that writes rows to a file, and prepares it with an entry's options."""

    def prepared(rows, options=options, *, file="jsonl", **entry):
        return prepare([DatasetEntry(str(write_as(file, tmp_path, rows)), **entry)], options)

    return prepared


@pytest.fixture
def write_template(tmp_path):
    """Returns a function that writes a chat template to own.jinja, and returns its path."""

    def written(template: str) -> str:
        path = tmp_path / "own.jinja"
        path.write_text(template)
        return str(path)

    return written


@pytest.fixture
def text_options(options, tmp_path):
    """Options for text formats: the tokenizer of bytes, and a bin that holds a conversation."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    return replace(options, bin_len=512, tokenizer_folder=folder)


@pytest.fixture
def texts(text_options, tmp_path):
    """Returns a function that prepares rows, or a file, and returns (whole text, trained texts) of each document."""

    def read(rows, options=text_options, *, file="jsonl", **entry):
        path = write_as(file, tmp_path, rows) if isinstance(rows, list) else rows
        documents = prepare([DatasetEntry(str(path), **entry)], options)
        tokenizer = load_tokenizer(options.tokenizer_folder)
        parts = [text_segments(*documents.document(index), tokenizer) for index in range(len(documents))]
        return [("".join(part.text for part in own), list(trained_texts(own))) for own in parts]

    return read


@pytest.fixture
def text_stream(text_options):
    """Returns a function that opens a stream of the texts of a file."""

    def opened(path, *, bin_len=512, shuffle=True, **entry):
        folder, index_path = text_options.tokenizer_folder, text_options.prepared_path / "streams"
        options = StreamOptions(bin_len, vocab_size=text_options.vocab_size, tokenizer_folder=folder, shuffle=shuffle)
        return open_stream([DatasetEntry(str(path), **entry)], options, index_path=index_path)

    return opened
