"""Compares the loss curves of runs with that of the first: `uv run tools/compare_runs.py outputs/bf16 outputs/fp8 ...`.

Reads `metrics.jsonl` of each run and prints Markdown: the mean losses over windows of steps (single batches are too
noisy), their differences from the first run, and the held-out losses. Runs are only comparable if they saw the same
batches; different numbers of trained tokens are an error.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """The metrics of a run, by step."""

    name: str
    losses: Mapping[int, float]
    num_trained_tokens: Mapping[int, int]
    eval_losses: Mapping[int, float]

    @classmethod
    def read(cls, folder: Path) -> "Curve":
        """Reads a run from its folder. Raises OSError if there is none."""
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        trained = [record for record in records if "loss" in record]
        return cls(
            folder.name,
            {record["step"]: record["loss"] for record in trained},
            {record["step"]: record["num_trained_tokens"] for record in trained},
            {record["step"]: record["eval_loss"] for record in records if "eval_loss" in record},
        )

    def window(self, first: int, last: int) -> float:
        """The mean loss per token over the steps first to last."""
        steps = range(first, last + 1)
        tokens = [self.num_trained_tokens[step] for step in steps]
        return sum(self.losses[step] * count for step, count in zip(steps, tokens, strict=True)) / sum(tokens)


def table(curves: Sequence[Curve], num_windows: int) -> list[str]:
    """Returns lines of Markdown. Raises ValueError for runs that cannot be compared."""
    reference = curves[0]
    for curve in curves[1:]:
        if dict(curve.num_trained_tokens) != dict(reference.num_trained_tokens):
            raise ValueError(f"{curve.name} and {reference.name} did not train on the same batches")
    last = max(reference.losses)
    borders = [last * index // num_windows for index in range(num_windows + 1)]
    rows = []
    for first, end in pairwise(borders):
        means = [curve.window(first + 1, end) for curve in curves]
        rows.append((f"steps {first + 1}-{end}", means))
    rows += [
        (f"held out, after step {step}", [curve.eval_losses[step] for curve in curves])
        for step in sorted(reference.eval_losses)
        if all(step in curve.eval_losses for curve in curves)
    ]
    names = [reference.name, *(f"{curve.name} | relative to {reference.name}" for curve in curves[1:])]
    lines = [f"| loss, nats a token | {' | '.join(names)} |", "|---" * (2 * len(curves)) + "|"]
    for label, means in rows:
        cells = [f"{means[0]:.4f}"]
        for mean in means[1:]:
            cells += [f"{mean:.4f}", f"{100 * (mean / means[0] - 1):+.2f} %"]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Parses the command line and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="output folders; the first is the reference")
    parser.add_argument("--windows", type=int, default=10, help="number of windows")
    options = parser.parse_args()
    try:
        print("\n".join(table([Curve.read(folder) for folder in options.runs], options.windows)))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
