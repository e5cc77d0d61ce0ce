"""The members of a sweep as separate runs: their configurations, and the conflicts of a sweep."""

import re
from collections.abc import Iterator

from xorl.config.data_conflicts import DATA_CHECKS
from xorl.config.entries import SweepMemberConfig
from xorl.config.local import Config
from xorl.config.problems import Conflict


def member_config(config: Config, member: SweepMemberConfig) -> Config:
    """The configuration with which a separate run would train a member of the sweep."""

    def given(*names: str) -> dict[str, object]:
        return {name: getattr(member, name) for name in names if getattr(member, name) is not None}

    lora = given("lora_rank", "lora_alpha", "lora_target_modules") | {"sweep": [], "sweep_members_per_pass": None}
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=given("datasets")),
            "train": config.train.model_copy(update=given("lr", "weight_decay", "seed")),
            "lora": config.lora.model_copy(update=lora),
        }
    )


def sweep_conflicts(config: Config) -> Iterator[Conflict]:
    """The conflicts among the members of a sweep, and with options of single values."""
    sweep, train = config.lora.sweep, config.train
    names = [member.name for member in sweep]
    for index, member in enumerate(sweep):
        place = f"lora.sweep.{index}"
        if member.name in names[:index]:
            yield Conflict((f"{place}.name",), f"there is a member {member.name} already: results have one folder each")
        own = member_config(config, member)
        if member.datasets == []:
            yield Conflict((f"{place}.datasets",), "the list is empty: leave it out to train on data.datasets")
        for conflict in (found for check in DATA_CHECKS for found in check(own) if member.datasets):
            paths = tuple(re.sub(r"^data\.datasets\b", f"{place}.datasets", path) for path in conflict.paths)
            if any(path.startswith(place) for path in paths):
                yield Conflict(paths, conflict.message)
        if train.lr_decay_style != "constant" and train.lr_min > own.train.lr:
            message = f"lr_min is {train.lr_min:g}, above this member's lr, which is {own.train.lr:g}"
            yield Conflict((f"{place}.lr", "train.lr_min"), message)
        if train.lr_start > own.train.lr:
            message = f"lr_start is {train.lr_start:g}, above this member's lr, which is {own.train.lr:g}"
            yield Conflict((f"{place}.lr", "train.lr_start"), message)
        if own.lora.lora_target_modules == [] and member.lora_target_modules is not None:
            yield Conflict((f"{place}.lora_target_modules",), "the list is empty: name layers, or leave the option out")
    if sweep and train.recompute_policy == "auto" and train.enable_gradient_checkpointing:
        yield Conflict(
            ("train.recompute_policy", "lora.sweep"),
            "auto measures the micro-batches of one run: choose module or operation",
        )
