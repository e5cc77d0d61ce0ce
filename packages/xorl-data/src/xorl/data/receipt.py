"""Receipt: what became of every sample between its source and the bins, counted, printable and JSON-ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace


@dataclass(frozen=True)
class Counts:
    """Counts over one dataset. A sample is a row of the source; a document is what training sees.

    `untrained` samples reach training without a single trained token; `untrained_by_overflow` is the part of them that
    had one before truncation or splitting took it. `all_trained` samples have labels and mask none of them.
    `lost_tokens` were cut off or dropped for length, `split_tokens` are those of samples that were split for it, and
    `masked_tokens` were left out because their attention_mask is 0. In `misaligned` samples most labels are not the
    token at their own place; in the `shifted` ones of them they are the token after it. `unwritten_reasoning` counts
    conversations that have reasoning of which the template writes nothing.
    `straddling_tokens` belong to trained and untrained text at once; `unended_turns` are trained turns of a chat whose
    end no special token marks.
    """

    samples: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    empty: int = 0
    untrained: int = 0
    untrained_by_overflow: int = 0
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    masked_tokens: int = 0
    lost_tokens: int = 0
    all_trained: int = 0
    straddling_tokens: int = 0
    unended_turns: int = 0
    split_tokens: int = 0
    misaligned: int = 0
    shifted: int = 0
    unwritten_reasoning: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> Counts:
        return cls(**{f.name: int(values[f.name]) for f in fields(cls)})

    def __str__(self) -> str:
        always = ("samples", "kept", "truncated", "dropped", "documents", "tokens", "trained_tokens")
        shown = (f.name for f in fields(self) if f.name in always or getattr(self, f.name))
        return " ".join(f"{name}={getattr(self, name)}" for name in shown)


@dataclass(frozen=True)
class DatasetReceipt:
    """The counts of one dataset entry; `cached` tells whether an earlier preparation was reused.

    `drawn` documents of it an epoch takes, where a mixture takes another number than there are.
    """

    name: str
    counts: Counts
    cached: bool = False
    drawn: int | None = None


@dataclass(frozen=True)
class Receipt:
    """The counts of all datasets, completed by `with_bins` once the documents are packed and planned.

    `packed` tells what the bins hold, documents, tokens and trained tokens by name as far as they are known: where a
    part is held out, or drawn more than once, it is not what the counts add up to. `steps` tells how many bins a step
    takes, how many steps an epoch, and how many bins are left out of each; held-out data has none.
    """

    datasets: tuple[DatasetReceipt, ...]
    packed: Mapping[str, int] = field(default_factory=dict)
    num_bins: int | None = None
    fill: float | None = None
    plan_hash: str | None = None
    steps: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> Counts:
        return sum((dataset.counts for dataset in self.datasets), Counts())

    def with_bins(self, *, num_bins: int, fill: float, plan_hash: str | None, packed: Mapping[str, int]) -> Receipt:
        """Completes it; held-out data has no plan."""
        return replace(self, num_bins=num_bins, fill=fill, plan_hash=plan_hash, packed=packed)

    def with_steps(self, *, bins_per_step: int, steps_per_epoch: int, left_out_bins: int) -> Receipt:
        """Tells how the bins are cut into steps."""
        steps = {"bins_per_step": bins_per_step, "steps_per_epoch": steps_per_epoch, "left_out_bins": left_out_bins}
        return replace(self, steps=steps)

    def with_drawn(self, drawn: Sequence[int]) -> Receipt:
        """Tells of each dataset how many documents an epoch takes."""
        pairs = zip(self.datasets, drawn, strict=True)
        return replace(self, datasets=tuple(replace(dataset, drawn=num) for dataset, num in pairs))

    def lines(self) -> list[str]:
        """One line a dataset, then the total where there are several, then the bins: key=value."""
        lines = [
            f"dataset={d.name} {d.counts} cached={str(d.cached).lower()}"
            + ("" if d.drawn is None else f" drawn={d.drawn}")
            for d in self.datasets
        ]
        if len(self.datasets) > 1:
            lines.append(f"dataset=total {self.total}")
        if self.num_bins is not None:
            plan = "" if self.plan_hash is None else f" plan={self.plan_hash}"
            held = "".join(f" {name}={number}" for name, number in self.packed.items())
            steps = "".join(f" {name}={number}" for name, number in self.steps.items())
            lines.append(f"bins={self.num_bins}{held} fill={self.fill:.2%}{steps}{plan}")
        return lines

    def as_dict(self) -> dict[str, object]:
        return {
            "datasets": [asdict(dataset) for dataset in self.datasets],
            "total": asdict(self.total),
            "packed": dict(self.packed),
            "num_bins": self.num_bins,
            "fill": self.fill,
            "plan_hash": self.plan_hash,
            "steps": dict(self.steps),
        }
