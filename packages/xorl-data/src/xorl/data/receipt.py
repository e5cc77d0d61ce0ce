"""Receipt: the counts of samples, documents and tokens from the sources to the bins, for the log and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

# The number of skipped rows whose errors are kept.
_NUM_PROBLEMS = 10


@dataclass(frozen=True)
class Counts:
    """Counts over one dataset. A sample is a row of the source; a document is a training sequence made from it.

    `untrained` samples have no trained token; `untrained_by_overflow` is the subset in which truncation or splitting
    removed the trained tokens. `all_trained` samples have labels, none of which is masked. `lost_tokens` were truncated
    or dropped because of length, `split_tokens` belong to samples that were split because of length, and
    `masked_tokens` were removed because their attention_mask is 0. In `misaligned` samples most labels differ from the
    token at the same position; in `shifted` samples, a subset, they equal the next token. `unwritten_reasoning` counts
    conversations whose reasoning the template omits entirely. `straddling_tokens` contain both trained and untrained
    text. `unended_turns` are trained chat turns without a special token at the end. `skipped` samples are unusable and
    were skipped, as the dataset allows (skip_bad_rows).

    `images` are those of all samples, with their tokens, patches and the bytes of their files; of these, `cut_images`
    were removed because of length. Images are `enlarged` or `reduced` when they are resized, `rotated` to be upright,
    and `transparent` ones are put on white.
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
    skipped: int = 0
    images: int = 0
    image_tokens: int = 0
    image_patches: int = 0
    image_bytes: int = 0
    cut_images: int = 0
    enlarged_images: int = 0
    reduced_images: int = 0
    rotated_images: int = 0
    transparent_images: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> Counts:
        """From the values that an earlier version may have written: what it did not count is 0."""
        return cls(**{f.name: int(values.get(f.name, 0)) for f in fields(cls)})

    def __str__(self) -> str:
        always = ("samples", "kept", "truncated", "dropped", "documents", "tokens", "trained_tokens")
        shown = (f.name for f in fields(self) if f.name in always or getattr(self, f.name))
        return " ".join(f"{name}={getattr(self, name)}" for name in shown)


@dataclass(frozen=True)
class Findings:
    """Findings in the rows of one dataset, apart from counts.

    `unused` names the columns and, as `messages[].name`, the message keys that do not affect the documents.
    `end_tokens` has the special tokens that end trained text, with which a model learns to stop, and how often each
    does. `problems` are the errors of the first skipped rows.
    """

    unused: tuple[str, ...] = ()
    end_tokens: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def __add__(self, other: Findings) -> Findings:
        if other == _NOTHING:
            return self
        tokens = dict(self.end_tokens)
        for token, number in other.end_tokens.items():
            tokens[token] = tokens.get(token, 0) + number
        unused = dict.fromkeys((*self.unused, *other.unused))
        return Findings(tuple(unused), tokens, (*self.problems, *other.problems)[:_NUM_PROBLEMS])

    @property
    def end_tokens_by_number(self) -> dict[str, int]:
        """The end tokens, most frequent first."""
        return dict(sorted(self.end_tokens.items(), key=lambda pair: -pair[1]))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Findings:
        return cls(tuple(values["unused"]), dict(values["end_tokens"]), tuple(values["problems"]))


_NOTHING = Findings()


@dataclass(frozen=True)
class DatasetReceipt:
    """The counts and findings of one dataset entry. `cached`: an earlier preparation was reused.

    `drawn` is the number of documents that an epoch draws, if a mixture does not use each document once.
    """

    name: str
    counts: Counts
    cached: bool = False
    drawn: int | None = None
    findings: Findings = field(default_factory=Findings)


@dataclass(frozen=True)
class Receipt:
    """The counts of all datasets; `with_bins` adds the bins after packing.

    `packed` has the known totals of the bins: documents, tokens and trained tokens. They differ from the sums of the
    counts if documents are held out or drawn more than once. `steps` has the bins per step, the steps per epoch, and
    the bins that each epoch drops; held-out data has none of these.
    """

    datasets: tuple[DatasetReceipt, ...]
    packed: Mapping[str, int] = field(default_factory=dict)
    num_bins: int | None = None
    fill: float | None = None
    plan_hash: str | None = None
    steps: Mapping[str, int] = field(default_factory=dict)

    @property
    def end_tokens(self) -> dict[str, int]:
        """The special tokens that end trained text in any dataset, and how often, most frequent first."""
        return sum((dataset.findings for dataset in self.datasets), Findings()).end_tokens_by_number

    @property
    def total(self) -> Counts:
        return sum((dataset.counts for dataset in self.datasets), Counts())

    def with_bins(self, *, num_bins: int, fill: float, plan_hash: str | None, packed: Mapping[str, int]) -> Receipt:
        """Adds the bins; `plan_hash` is None for held-out data."""
        return replace(self, num_bins=num_bins, fill=fill, plan_hash=plan_hash, packed=packed)

    def with_steps(self, *, bins_per_step: int, steps_per_epoch: int, left_out_bins: int) -> Receipt:
        """Adds the division of the bins into steps."""
        steps = {"bins_per_step": bins_per_step, "steps_per_epoch": steps_per_epoch, "left_out_bins": left_out_bins}
        return replace(self, steps=steps)

    def with_drawn(self, drawn: Sequence[int]) -> Receipt:
        """Adds the number of documents that an epoch draws from each dataset."""
        pairs = zip(self.datasets, drawn, strict=True)
        return replace(self, datasets=tuple(replace(dataset, drawn=num) for dataset, num in pairs))

    def lines(self) -> list[str]:
        """key=value lines: one per dataset, the total if there are several, and the bins."""
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
