"""The configurations of a sweep's members as separate runs, and the conflicts within a sweep."""

import re
from collections.abc import Iterator

from xorl.config.data_conflicts import DATA_CHECKS
from xorl.config.entries import SweepMemberConfig
from xorl.config.local import Config
from xorl.config.problems import Conflict


def member_config(config: Config, member: SweepMemberConfig) -> Config:
    """Returns the configuration of a separate run that would train a member of the sweep."""

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
    """Yields conflicts between the members of a sweep, and between members and other options."""
    sweep, train = config.lora.sweep, config.train
    names = [member.name for member in sweep]
    for index, member in enumerate(sweep):
        path = f"lora.sweep.{index}"
        if member.name in names[:index]:
            message = f"there is already a member {member.name}: choose another name, since it names the results folder"
            yield Conflict((f"{path}.name",), message)
        run = member_config(config, member)
        if member.datasets == []:
            yield Conflict((f"{path}.datasets",), "the list is empty: remove it to train on data.datasets")
        for conflict in (found for check in DATA_CHECKS for found in check(run) if member.datasets):
            paths = tuple(re.sub(r"^data\.datasets\b", f"{path}.datasets", other) for other in conflict.paths)
            if any(other.startswith(path) for other in paths):
                yield Conflict(paths, conflict.message)
        if train.lr_decay_style != "constant" and train.lr_min > run.train.lr:
            message = f"lr_min ({train.lr_min:g}) is above the lr of this member ({run.train.lr:g})"
            yield Conflict((f"{path}.lr", "train.lr_min"), message)
        if train.lr_start > run.train.lr:
            message = f"lr_start ({train.lr_start:g}) is above the lr of this member ({run.train.lr:g})"
            yield Conflict((f"{path}.lr", "train.lr_start"), message)
        if run.lora.lora_target_modules == [] and member.lora_target_modules is not None:
            yield Conflict((f"{path}.lora_target_modules",), "the list is empty: list layers, or remove the option")
    if sweep and train.recompute_policy == "auto" and train.enable_gradient_checkpointing:
        yield Conflict(
            ("train.recompute_policy", "lora.sweep"),
            "auto only supports a single run: choose module or operation",
        )
