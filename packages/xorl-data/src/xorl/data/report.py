"""Formats statistics as text lines or as one HTML page with plots."""

from __future__ import annotations

import html
from collections.abc import Sequence

from xorl.data.receipt import Receipt
from xorl.data.statistics import DatasetStatistics, Histogram

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222;background:#fff}"
    "table{border-collapse:collapse}td,th{padding:.15em 1em .15em 0;text-align:left;font-variant-numeric:tabular-nums}"
    "svg{display:block;margin:.5em 0 1.5em}rect{fill:#3b6ea5}text{font-size:11px;fill:#555}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}rect{fill:#7aa7d8}text{fill:#aaa}}"
)
_WIDTH, _HEIGHT = 640, 140


def text_report(statistics: Sequence[DatasetStatistics], receipt: Receipt, fill: Histogram) -> list[str]:
    """The report as lines for a terminal or a log."""
    lines: list[str] = []
    for dataset in statistics:
        lines += [f"dataset  {dataset.name}", *(f"  {name:<22} {value}" for name, value in _rows(dataset))]
        lines += ["  length in tokens", *_bars(dataset.lengths, "{:.0f}")]
        lines += ["  fraction of a document's tokens that is trained", *_bars(dataset.trained_fraction, "{:.0%}")]
    if receipt.num_bins is not None:
        lines.append(f"bins     {receipt.num_bins}, {receipt.fill:.2%} full")
        lines += _bars(fill, "{:.0%}")
    return lines


def html_report(title: str, statistics: Sequence[DatasetStatistics], receipt: Receipt, fill: Histogram) -> str:
    """The report as one self-contained page, without scripts or other files."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    for dataset in statistics:
        rows = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(v)}</td></tr>" for n, v in _rows(dataset))
        body += [
            f"<h2>{html.escape(dataset.name)}</h2><table>{rows}</table>",
            "<h3>Length in tokens</h3>",
            _plot(dataset.lengths, "{:.0f}", "documents by length in tokens"),
            "<h3>Fraction of a document's tokens that is trained</h3>",
            _plot(dataset.trained_fraction, "{:.0%}", "documents by trained fraction"),
        ]
    if receipt.num_bins is not None:
        body += [
            f"<h2>Bins</h2><p>{receipt.num_bins} bins, {receipt.fill:.2%} full</p>",
            _plot(fill, "{:.0%}", "bins by fill"),
        ]
    page = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{page}</title>'
        f"<style>{_STYLE}</style>{''.join(body)}</html>\n"
    )


def _rows(dataset: DatasetStatistics) -> list[tuple[str, str]]:
    counts = dataset.counts
    looked = f"of {dataset.num_examined:,} documents looked at"
    possible = max(1, counts.tokens - counts.documents)
    return [
        ("samples", f"{counts.samples:,} in, {counts.kept:,} kept"),
        ("truncated", f"{counts.truncated:,}"),
        ("dropped", f"{counts.dropped:,}"),
        ("split", f"{counts.split:,}"),
        ("empty", f"{counts.empty:,}"),
        ("skipped", f"{counts.skipped:,} that cannot be used"),
        ("nothing trained", f"{counts.untrained:,} samples"),
        ("everything trained", f"{counts.all_trained:,} samples that have labels"),
        ("labels out of place", f"{counts.misaligned:,} samples"),
        ("documents", f"{counts.documents:,}"),
        ("tokens", f"{counts.tokens:,}, {counts.lost_tokens:,} more lost to length"),
        ("trained tokens", f"{counts.trained_tokens:,} ({counts.trained_tokens / possible:.1%})"),
        ("straddling tokens", f"{counts.straddling_tokens:,}"),
        ("turns without an end", f"{counts.unended_turns:,}"),
        ("reasoning not written", f"{counts.unwritten_reasoning:,} samples"),
        ("length percentiles", ", ".join(f"{mark} %: {value:,}" for mark, value in dataset.percentiles.items())),
        ("begins with BOS", _fraction(dataset.begins_with_bos, looked)),
        ("begins with two BOS", _fraction(dataset.begins_with_two_bos, looked)),
        ("ends with EOS", _fraction(dataset.ends_with_eos, looked)),
        ("trains an EOS", _fraction(dataset.trains_eos, looked)),
        ("exact duplicates", f"{dataset.exact_duplicates:,} {looked}"),
        ("near duplicates", f"{dataset.near_duplicates:,} {looked}"),
    ]


def _fraction(value: float | None, looked: str) -> str:
    return "the tokenizer has none" if value is None else f"{value:.1%} {looked}"


def _bars(histogram: Histogram, fmt: str) -> list[str]:
    max_count = max(histogram.counts, default=0)
    lines = []
    for index, count in enumerate(histogram.counts):
        if count:
            label = _range(histogram, index, fmt, "-")
            lines.append(f"    {label:>15} {'#' * max(1, round(40 * count / max_count))} {count:,}")
    return lines


def _range(histogram: Histogram, index: int, fmt: str, between: str) -> str:
    """The values of a count, from its lower edge to its upper one, or to the last whole number before that."""
    low, high = histogram.edges[index : index + 2]
    if histogram.is_whole:
        high -= 1
    return fmt.format(low) if low == high else f"{fmt.format(low)}{between}{fmt.format(high)}"


def _plot(histogram: Histogram, fmt: str, label: str) -> str:
    counts = histogram.counts
    max_count, step = max([1, *counts]), _WIDTH / max(1, len(counts))
    bars = []
    for index, count in enumerate(counts):
        height = _HEIGHT * count / max_count
        bars.append(
            f'<rect x="{index * step:.1f}" y="{_HEIGHT - height:.1f}" width="{max(1, step - 1):.1f}" '
            f'height="{height:.1f}"><title>{_range(histogram, index, fmt, " to ")}: {count:,}</title></rect>'
        )
    marks = [
        f'<text x="{index * step:.1f}" y="{_HEIGHT + 14}">{fmt.format(histogram.edges[index])}</text>'
        for index in range(0, len(counts) + 1, max(1, len(counts) // 6))
    ]
    return (
        f'<svg role="img" aria-label="{label}, at most {max_count:,}" width="{_WIDTH + 40}" height="{_HEIGHT + 20}" '
        f'viewBox="0 0 {_WIDTH + 40} {_HEIGHT + 20}">{"".join(bars)}{"".join(marks)}</svg>'
    )
