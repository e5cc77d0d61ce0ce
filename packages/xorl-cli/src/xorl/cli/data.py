"""`xorl data prepare|inspect|stats`: prepares and shows the data that training would read. No GPU is needed.

The commands import torch once the configuration has been validated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xorl.cli.arguments import OverridesCommand, expand_home
from xorl.cli.rank import run_alone
from xorl.cli.train import ConfigPath, TracebackFlag
from xorl.config import Config, load_config
from xorl.config.resolve import member_config
from xorl.host.imports import import_torch

if TYPE_CHECKING:
    import numpy as np

    from xorl.data.formats import TextTokenizer
    from xorl.data.images.table import StoredImage
    from xorl.data.inspect import TextSegment
    from xorl.data.stream import Stream
    from xorl.train.data import PackedDocuments, RunData

RESET, TRAINED, MASKED, SPECIAL, BORDER = "\033[0m", "\033[32m", "\033[90m", "\033[1m", "\033[36m"

# Escapes control characters, which a terminal could interpret as commands.
_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Color(StrEnum):
    """When to use colors; auto means on a terminal."""

    auto = "auto"
    always = "always"
    never = "never"


DOCUMENTS = 10_000
HeldOutFlag = Annotated[bool, typer.Option("--held-out", help="Use held-out data instead of training data.")]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Prepare and inspect training data.",
)


@app.command(name="prepare", cls=OverridesCommand, short_help="Prepare the data, without a GPU.")
def prepare_command(ctx: typer.Context, config: ConfigPath, traceback: TracebackFlag = False) -> None:
    """Prepare the data of a configuration in data.dataset_prepared_path, and print what happened to every sample.

    A run with the same configuration then uses the prepared data.
    """
    _run(_prepare, config, ctx.obj, traceback)


@app.command(name="inspect", cls=OverridesCommand, short_help="Show samples, and which tokens are trained on.")
def inspect_command(
    ctx: typer.Context,
    config: ConfigPath,
    bin: Annotated[int, typer.Option(help="Bin to show, from 0.")] = 0,
    num: Annotated[int, typer.Option(min=1, help="Documents of the bin to show.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each document to show.")] = 1000,
    held_out: HeldOutFlag = False,
    color: Annotated[Color, typer.Option(help="When to use colors.")] = Color.auto,
    traceback: TracebackFlag = False,
) -> None:
    """Show the documents of a packed bin as the model reads them, then only the text that is trained on.

    For a stream (data.streaming), bins are numbered in training order and documents by their order in the bin. Trained
    text is green, masked text grey and special tokens bold; without colors, trained text is enclosed in [[ and ]].
    """
    colored = color is Color.always or (color is Color.auto and sys.stdout.isatty())
    _run(lambda read: _inspect(read, bin, num, tokens, held_out, colored), config, ctx.obj, traceback)


@app.command(name="stats", cls=OverridesCommand, short_help="Show lengths, masks, lost samples and duplicates.")
def stats_command(
    ctx: typer.Context,
    config: ConfigPath,
    html: Annotated[
        Path | None, typer.Option(callback=expand_home, help="HTML file to write. [data_stats.html in output_dir]")
    ] = None,
    documents: Annotated[
        int | None, typer.Option(min=1, help=f"Documents of a stream to read, in whole chunks of files. [{DOCUMENTS}]")
    ] = None,
    held_out: HeldOutFlag = False,
    traceback: TracebackFlag = False,
) -> None:
    """Print statistics of each dataset and of the bins, and write them as an HTML page with plots.

    For a stream (data.streaming), they cover the first documents in training order.
    """
    _run(lambda read: _stats(read, html, documents, held_out), config, ctx.obj, traceback)


def _run(command: Callable[[Config], None], path: Path, overrides: Sequence[str], with_traceback: bool) -> None:
    def run() -> int:
        loaded = load_config(path, overrides)
        with loaded.citing():
            command(loaded.config)
        return 0

    raise typer.Exit(run_alone(run, with_traceback=with_traceback))


def _prepare(config: Config) -> None:
    if config.data.streaming:
        raise ValueError(
            "data.streaming: a stream is read during training, so there is nothing to prepare. Inspect it with "
            "`xorl data inspect` and `xorl data stats`, or set --data.streaming false"
        )
    import_torch()
    from xorl.train.data import PackedDocuments  # noqa: PLC0415  (imports torch)

    runs = {f"{member.name} ": member_config(config, member) for member in config.lora.sweep} or {"": config}
    for member, run in runs.items():
        data, _ = _load_data(run, strict=True)
        assert isinstance(data.train, PackedDocuments), "streams were rejected above"
        parts = {"train": data.train} | ({} if data.held_out is None else {"held_out": data.held_out})
        for name, part in parts.items():
            for line in part.receipt().lines():
                print(f"{member}{name} {line}")
    print(f"prepared in {config.data.dataset_prepared_path}")


def _inspect(config: Config, index: int, num: int, max_tokens: int, held_out: bool, colored: bool) -> None:
    import_torch()
    from xorl.data.inspect import text_segments, trained_texts  # noqa: PLC0415  (imports torch)

    data, tokenizer = _load_data(config)
    title, documents = _read_bin(_part(data, held_out), index)
    num_tokens = sum(len(ids) for _, ids, _, _ in documents)
    trained = sum(_num_trained(labels) for _, _, labels, _ in documents)
    bin_len = config.data.sample_packing_sequence_len
    print(f"{title}: {len(documents)} documents, {num_tokens} of {bin_len} tokens, {trained} trained")
    shown: list[list[TextSegment]] = []
    for number, ids, labels, images in documents[:num]:
        count = _num_trained(labels)
        print(_paint(f"---- document {number}: {len(ids)} tokens, {count} trained", BORDER, colored))
        parts = text_segments(ids[:max_tokens], labels[:max_tokens], tokenizer, images)
        print("".join(_display_text(segment, colored) for segment in parts).replace("]][[", ""))
        if len(ids) > max_tokens:
            print(_paint(f"... {len(ids) - max_tokens} tokens more (--tokens)", BORDER, colored))
        shown.append(parts)
    print(_paint("---- only what is trained", BORDER, colored))
    for (number, *_), parts in zip(documents, shown, strict=False):
        for text in trained_texts(parts):
            print(f"document {number}: {text!r}")


def _read_bin(
    part: PackedDocuments | Stream, index: int
) -> tuple[str, list[tuple[int, np.ndarray, np.ndarray, Sequence[StoredImage]]]]:
    """Returns the title of a bin, and (number, ids, labels, images) for each of its documents."""
    from xorl.data.stream import Stream, stream_bins  # noqa: PLC0415

    if isinstance(part, Stream):
        if index < 0:
            raise ValueError(f"--bin {index}: must be 0 or greater")
        members = next(stream_bins(part, first=index, stride=1)).documents
        return f"bin {index} of the stream", [(n, m.input_ids, m.labels, ()) for n, m in enumerate(members)]
    if not 0 <= index < len(part.bins):
        raise ValueError(f"--bin {index}: there are {len(part.bins)} bins; use 0 to {len(part.bins) - 1}")
    numbers = part.bins.documents(index).tolist()
    documents = part.documents
    return f"bin {index} of {len(part.bins)}", [
        (number, *documents.document(number), documents.images(number)) for number in numbers
    ]


def _num_trained(labels: np.ndarray) -> int:
    """The number of trained tokens of a document. The first token is never trained, since nothing predicts it."""
    from xorl.data.batch import IGNORE  # noqa: PLC0415

    return int((labels[1:] != IGNORE).sum())


def _display_text(segment: TextSegment, colored: bool) -> str:
    text = segment.text.translate(_CONTROLS)
    if colored:
        style = (SPECIAL if segment.special else "") + (TRAINED if segment.trained else MASKED)
        # Some terminals and pagers reset colors at the end of a line.
        return "\n".join(f"{style}{line}{RESET}" for line in text.split("\n"))
    return f"[[{text}]]" if segment.trained else text


def _paint(text: str, style: str, colored: bool) -> str:
    return f"{style}{text}{RESET}" if colored else text


def _stats(config: Config, page: Path | None, num_documents: int | None, held_out: bool) -> None:
    import_torch()
    from xorl.data.report import html_report, text_report  # noqa: PLC0415
    from xorl.data.statistics import dataset_statistics, fill_histogram  # noqa: PLC0415
    from xorl.data.stream import Stream, read_sample  # noqa: PLC0415

    data, tokenizer = _load_data(config)
    part = _part(data, held_out)
    title = f"Data of {config.train.output_dir}"
    if isinstance(part, Stream):
        documents = read_sample(part, num_documents or DOCUMENTS)
        receipt, fills = documents.receipt, documents.fills
        extent = "all of them" if documents.is_all else "of more (--documents)"
        read = f"the first {len(documents):,} documents, {extent}, and the first {len(fills):,} bins"
        print(f"stream   {read}")
        title += f": {read}"
    elif num_documents is not None:
        raise ValueError(
            "--documents: only for streams (data.streaming); statistics of prepared data always cover all documents"
        )
    else:
        documents, bins = part.documents, part.bins
        receipt = part.receipt()
        fills = bins.fills(documents.lengths)
    statistics = dataset_statistics(documents, tokenizer)
    fill = fill_histogram(fills)
    for line in text_report(statistics, receipt, fill):
        print(line)
    page = page or Path(config.train.output_dir) / "data_stats.html"
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(html_report(title, statistics, receipt, fill), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--html: cannot write {page}: {error.strerror}") from error
    print(f"page     {page}")


def _part(data: RunData, held_out: bool) -> PackedDocuments | Stream:
    if not held_out:
        return data.train
    if data.held_out is None:
        raise ValueError("--held-out: there is no held-out data; set data.test_datasets or data.val_set_size")
    return data.held_out


def _load_data(config: Config, *, strict: bool = False) -> tuple[RunData, TextTokenizer | None]:
    """Returns the data of a run, and the tokenizer to show it with, or None if there is none.

    Unless `strict`, data that would stop a run is only reported, so that it can be inspected.
    """
    import_torch()
    from xorl.data import DataError  # noqa: PLC0415  (imports torch)
    from xorl.data.formats import load_tokenizer  # noqa: PLC0415  (imports torch)
    from xorl.train.data import prepare_data  # noqa: PLC0415
    from xorl.train.images import image_settings  # noqa: PLC0415
    from xorl.train.model_source import read_architecture  # noqa: PLC0415
    from xorl.train.observe.progress import set_up_logging  # noqa: PLC0415

    set_up_logging(config.train.log_format, config.train.log_level, is_main=True)
    architecture = read_architecture(config.model, config.train.load_weights_mode, config.lora.adapter_path)
    folder = architecture.tokenizer_folder
    data = prepare_data(
        config,
        architecture.config.vocab_size,
        folder,
        architecture.special_tokens,
        images=image_settings(architecture, config.data),
        strict=strict,
    )
    try:
        return data, None if folder is None else load_tokenizer(folder)
    except DataError:
        # Rows of token ids do not need a tokenizer; they are shown as numbers.
        return data, None
