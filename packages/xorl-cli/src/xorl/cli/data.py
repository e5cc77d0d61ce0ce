"""`xorl data prepare|inspect|stats`: what training would read, without training. No GPU is needed.

Torch is imported by the commands, once the configuration has been checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xorl.cli.arguments import OverridesCommand, at_home
from xorl.cli.rank import run_alone
from xorl.cli.signals import import_torch
from xorl.cli.train import ConfigPath, TracebackFlag
from xorl.config import Config, load_config, member_config

if TYPE_CHECKING:
    import numpy as np

    from xorl.data import Stretch, TextTokenizer
    from xorl.data.stream import Stream
    from xorl.train.data import PackedDocuments, RunData

RESET, TRAINED, MASKED, SPECIAL, BORDER = "\033[0m", "\033[32m", "\033[90m", "\033[1m", "\033[36m"

# Text may hold what a terminal takes for a command.
_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Color(StrEnum):
    """When to colour: auto on a terminal."""

    auto = "auto"
    always = "always"
    never = "never"


DOCUMENTS = 10_000
HeldOutFlag = Annotated[bool, typer.Option("--held-out", help="Look at held-out data in place of training data.")]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Prepare data, and look at what will be trained on.",
)


@app.command(name="prepare", cls=OverridesCommand, short_help="Fill the cache, on a machine without a GPU.")
def prepare_command(ctx: typer.Context, config: ConfigPath, traceback: TracebackFlag = False) -> None:
    """Prepare the data of a configuration into data.dataset_prepared_path, and print what became of every sample.

    A run of the same configuration then starts with what is there.
    """
    _run(_prepare, config, ctx.obj, traceback)


@app.command(name="inspect", cls=OverridesCommand, short_help="Show samples, and what of them is trained.")
def inspect_command(
    ctx: typer.Context,
    config: ConfigPath,
    bin: Annotated[int, typer.Option(help="Bin to show, from 0.")] = 0,
    num: Annotated[int, typer.Option(min=1, help="Documents of it to show.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each document to show.")] = 1000,
    held_out: HeldOutFlag = False,
    color: Annotated[Color, typer.Option(help="When to colour.")] = Color.auto,
    traceback: TracebackFlag = False,
) -> None:
    """Show the documents of a packed bin as the model reads them, then the text of only what is trained.

    Of a stream (data.streaming) bins are numbered as they are trained on, and documents as they stand in the bin.
    Trained text is green, masked text grey, special tokens bold; without colour trained text stands in [[ and ]].
    """
    colored = color is Color.always or (color is Color.auto and sys.stdout.isatty())
    _run(lambda read: _inspect(read, bin, num, tokens, held_out, colored), config, ctx.obj, traceback)


@app.command(name="stats", cls=OverridesCommand, short_help="Lengths, masks, losses and duplicates.")
def stats_command(
    ctx: typer.Context,
    config: ConfigPath,
    html: Annotated[
        Path | None, typer.Option(callback=at_home, help="Where to write the page. [data_stats.html in output_dir]")
    ] = None,
    documents: Annotated[
        int | None, typer.Option(min=1, help=f"Documents of a stream to read, whole pieces of files. [{DOCUMENTS}]")
    ] = None,
    held_out: HeldOutFlag = False,
    traceback: TracebackFlag = False,
) -> None:
    """Print statistics of each dataset and of the bins, and write them as one HTML page with plots.

    Of a stream (data.streaming) they are of the first documents, in the order of training.
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
            "data.streaming: a stream is read while it is trained on, so there is nothing to prepare. Look at it with "
            "`xorl data inspect` and `xorl data stats`, or give --data.streaming false"
        )
    own = {f"{member.name} ": member_config(config, member) for member in config.lora.sweep} or {"": config}
    for member, run in own.items():
        data, _ = _prepared(run, judged=True)
        parts = {"train": _packed(data)} | ({} if data.held_out is None else {"held_out": data.held_out})
        for name, part in parts.items():
            for line in part.receipt().lines():
                print(f"{member}{name} {line}")
    print(f"prepared in {config.data.dataset_prepared_path}")


def _inspect(config: Config, index: int, num: int, max_tokens: int, held_out: bool, colored: bool) -> None:
    import_torch()
    from xorl.data import stretches, trained_texts  # noqa: PLC0415  (imports torch)

    data, tokenizer = _prepared(config)
    title, documents = _bin(_part(data, held_out), index)
    num_tokens = sum(len(ids) for _, ids, _ in documents)
    trained = sum(_num_trained(labels) for _, _, labels in documents)
    bin_len = config.data.sample_packing_sequence_len
    print(f"{title}: {len(documents)} documents, {num_tokens} of {bin_len} tokens, {trained} trained")
    shown: list[list[Stretch]] = []
    for number, ids, labels in documents[:num]:
        count = _num_trained(labels)
        print(_paint(f"---- document {number}: {len(ids)} tokens, {count} trained", BORDER, colored))
        parts = stretches(ids[:max_tokens], labels[:max_tokens], tokenizer)
        print("".join(_shown(stretch, colored) for stretch in parts).replace("]][[", ""))
        if len(ids) > max_tokens:
            print(_paint(f"... {len(ids) - max_tokens} tokens more (--tokens)", BORDER, colored))
        shown.append(parts)
    print(_paint("---- only what is trained", BORDER, colored))
    for (number, _, _), parts in zip(documents, shown, strict=False):
        for text in trained_texts(parts):
            print(f"document {number}: {text!r}")


def _bin(part: PackedDocuments | Stream, index: int) -> tuple[str, list[tuple[int, np.ndarray, np.ndarray]]]:
    """What a bin is called, and (number, ids, labels) of its documents."""
    from xorl.data.stream import Stream, stream_bins  # noqa: PLC0415

    if isinstance(part, Stream):
        if index < 0:
            raise ValueError(f"--bin: {index}, want 0 or more")
        members = next(stream_bins(part, first=index, stride=1)).documents
        return f"bin {index} of the stream", [(n, m.input_ids, m.labels) for n, m in enumerate(members)]
    if not 0 <= index < len(part.bins):
        raise ValueError(f"--bin: {index}, want 0 to {len(part.bins) - 1}: there are {len(part.bins)} bins")
    numbers = part.bins.documents(index).tolist()
    return f"bin {index} of {len(part.bins)}", [(number, *part.documents.document(number)) for number in numbers]


def _num_trained(labels: np.ndarray) -> int:
    """Of a document; the first token has nothing before it that could predict it."""
    from xorl.data import IGNORE  # noqa: PLC0415

    return int((labels[1:] != IGNORE).sum())


def _shown(stretch: Stretch, colored: bool) -> str:
    text = stretch.text.translate(_CONTROLS)
    if colored:
        style = (SPECIAL if stretch.special else "") + (TRAINED if stretch.trained else MASKED)
        # A colour would not go on beyond the end of a line everywhere.
        return "\n".join(f"{style}{line}{RESET}" for line in text.split("\n"))
    return f"[[{text}]]" if stretch.trained else text


def _paint(text: str, style: str, colored: bool) -> str:
    return f"{style}{text}{RESET}" if colored else text


def _stats(config: Config, page: Path | None, num_documents: int | None, held_out: bool) -> None:
    import_torch()
    from xorl.data import dataset_statistics, fill_histogram, html_report, text_report  # noqa: PLC0415
    from xorl.data.stream import Stream, read_sample  # noqa: PLC0415

    data, tokenizer = _prepared(config)
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
        raise ValueError("--documents: prepared data is counted whole; leave it out, or set data.streaming")
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
        raise ValueError(f"--html: {page} cannot be written: {error.strerror}") from error
    print(f"page     {page}")


def _part(data: RunData, held_out: bool) -> PackedDocuments | Stream:
    if not held_out:
        return data.train
    if data.held_out is None:
        raise ValueError("--held-out: nothing is held out; set data.test_datasets or data.val_set_size")
    return data.held_out


def _packed(data: RunData) -> PackedDocuments:
    from xorl.train.data import PackedDocuments  # noqa: PLC0415

    assert isinstance(data.train, PackedDocuments), "a stream is refused before"
    return data.train


def _prepared(config: Config, *, judged: bool = False) -> tuple[RunData, TextTokenizer | None]:
    """The data of a run, and the tokenizer to show it with (None where there is none and none is needed).

    Data that would stop a run can be looked at: only what is `judged` stops at it.
    """
    import_torch()
    from xorl.data import DataError, load_tokenizer  # noqa: PLC0415  (imports torch)
    from xorl.train.data import prepare_data  # noqa: PLC0415
    from xorl.train.model import read_architecture  # noqa: PLC0415
    from xorl.train.observe.progress import set_up_logging  # noqa: PLC0415

    set_up_logging(config.train.log_format, is_main=True)
    architecture = read_architecture(config.model, config.train.load_weights_mode)
    folder = architecture.tokenizer_folder
    data = prepare_data(config, architecture.config.vocab_size, folder, architecture.hf_config, judged=judged)
    try:
        return data, None if folder is None else load_tokenizer(folder)
    except DataError:
        # Rows of token ids need none: they are shown as numbers.
        return data, None
