"""A table of the capabilities that are not built yet, by the options that need them.

An option is never accepted and ignored. To add a capability, delete its row here, and nothing else: the schema already
knows every value, so that users read why a value is refused and what works instead, not a type error.
"""

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from xorl.config.local import Config
from xorl.config.options import ENTRIES, Option, all_options, entries_of, yaml_text


@dataclass(frozen=True)
class Refusal:
    """Refused values of an option.

    `option` is a path, `data.datasets[].x` for every dataset entry, or a pattern with `*`. `values` are the refused
    ones; empty means all but the default. For values that are no closed set, `matches` decides instead of `values`, and
    `shown` describes it in words. `for_good` marks capabilities that are not planned.
    """

    option: str
    reason: str
    instead: str
    values: tuple[object, ...] = ()
    matches: Callable[[object], bool] | None = None
    shown: str = ""
    for_good: bool = False

    def refuses(self, value: object, default: object) -> bool:
        """Whether a value of an option with this default is refused."""
        if self.matches is not None:
            return self.matches(value)
        return value in self.values if self.values else value != default

    def message(self, value: object) -> str:
        """The error message."""
        state = "is refused" if self.for_good else "is not available yet"
        return f"{yaml_text(value)} {state}: {self.reason}\n{self.instead}"

    def summary(self) -> str:
        """The text in the documentation."""
        values = self.shown or ", ".join(map(yaml_text, self.values)) or "anything but the default"
        return f"{'Refused' if self.for_good else 'Not available yet'}: {values} ({self.reason})"


ONE_RANK = "models are not split over ranks yet; the data is"
ONE_RANK_INSTEAD = "leave it at 1: train.data_parallel_mode fsdp2 shards a model that one GPU cannot hold"

REFUSALS: tuple[Refusal, ...] = (
    Refusal("model.moe_implementation", "mixture-of-experts models are not built", "leave it at null"),
    Refusal("model.ep_dispatch", "expert parallelism is not built", "leave it at alltoall"),
    Refusal("model.deepep_*", "expert parallelism is not built", "leave it out"),
    Refusal("model.encoders", "models of other modalities are not built", "leave it at {}", for_good=True),
    Refusal(
        f"{ENTRIES}.trust_remote_code",
        "loading scripts no longer exist: the datasets library runs none",
        "use a dataset of plain files (parquet, json, csv), and leave it at false",
        for_good=True,
    ),
    Refusal("train.tensor_parallel_size", ONE_RANK, ONE_RANK_INSTEAD),
    Refusal("train.pipeline_parallel_size", ONE_RANK, ONE_RANK_INSTEAD),
    Refusal("train.pipeline_parallel_schedule", "pipeline parallelism is not built", "leave it at 1F1B"),
    Refusal("train.pp_variable_seq_lengths", "pipeline parallelism is not built", "leave it at true"),
    Refusal("train.expert_parallel_size", ONE_RANK, ONE_RANK_INSTEAD),
    Refusal("train.ulysses_parallel_size", ONE_RANK, ONE_RANK_INSTEAD),
    Refusal("train.ringattn_parallel_size", ONE_RANK, ONE_RANK_INSTEAD),
    Refusal("train.cp_fsdp_mode", "context parallelism is not built", "leave it at all"),
    Refusal("train.ep_outside", "expert parallelism is not built", "leave it at false"),
    Refusal("train.moe_checkpoint_method", "mixture-of-experts models are not built", "leave it at null"),
    Refusal(
        "train.init_device",
        "xorl runs on CUDA GPUs and on CPUs; there is no such device",
        "use auto",
        values=("npu",),
        for_good=True,
    ),
    Refusal("train.save_async", "saving in the background is not built", "leave it at false"),
)


@cache
def refusals_of(option: str) -> tuple[Refusal, ...]:
    """Returns the rows of the table for an option, given by its documented name."""
    return tuple(row for row in REFUSALS if row.option == option or fnmatch.fnmatchcase(option, row.option))


def refused_in(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (path, message) for every refused value of a configuration."""
    for option in all_options().values():
        for row in refusals_of(option.path):
            for path, value, default in _values(config, option):
                if row.refuses(value, default):
                    yield path, row.message(value)


def _values(config: Config, option: Option) -> Iterator[tuple[str, object, object]]:
    """Yields (path, value, default) of an option: once, or for each entry of a list."""
    for path, section in entries_of(config, option.section):
        default = type(section).model_fields[option.name].default
        yield f"{path}.{option.name}", getattr(section, option.name), default
