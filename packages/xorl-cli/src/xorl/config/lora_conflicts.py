"""Conflicts between options of adapters, quantized bases and sweeps; other conflicts are in conflicts.py."""

import re
from collections.abc import Callable, Iterator

from xorl.config.data_conflicts import DATA_CHECKS
from xorl.config.local import Config
from xorl.config.problems import Conflict
from xorl.config.resolve import member_config

# What the files of an adapter determine.
KIND_OF_ADAPTER = (
    "lora.lora_rank",
    "lora.lora_alpha",
    "lora.lora_target_modules",
    "lora.use_rslora",
    "lora.use_dora",
    "lora.rank_pattern",
    "lora.alpha_pattern",
    "lora.modules_to_save",
    "lora.moe_shared_lora",
    "lora.moe_hybrid_shared_lora",
)


def _adapters_can_be_saved_and_placed(config: Config) -> Iterator[Conflict]:
    lora = config.lora
    if lora.save_lora_only and config.model.model_path is None:
        yield Conflict(
            ("lora.save_lora_only", "model.model_path"),
            "model_path is null, so the random weights of the base would not be saved anywhere: set save_lora_only to "
            "false",
        )
    if lora.save_lora_only and lora.merge_lora_interval:
        yield Conflict(
            ("lora.save_lora_only", "lora.merge_lora_interval"),
            "merging changes the base weights, so adapters saved alone would not match any base: set save_lora_only to "
            "false, or merge_lora_interval to 0",
        )
    if lora.lora_target_modules == []:
        yield Conflict(
            ("lora.lora_target_modules",),
            "the list is empty: list layers, or remove the option to use the targets of the architecture",
        )


def _experts_share_in_one_way(config: Config) -> Iterator[Conflict]:
    lora = config.lora
    if lora.moe_shared_lora and lora.moe_hybrid_shared_lora:
        yield Conflict(
            ("lora.moe_shared_lora", "lora.moe_hybrid_shared_lora"),
            "the first shares all factors of an adapter between experts, the second some of them: set one to false",
        )
    if lora.moe_lora_format == "sglang" and not lora.moe_hybrid_shared_lora and lora.adapter_path is None:
        yield Conflict(
            ("lora.moe_lora_format", "lora.moe_hybrid_shared_lora"),
            "SGLang's shared outer form only holds adapters whose outer factors are shared: set "
            "moe_hybrid_shared_lora to true, or moe_lora_format to per_expert, which SGLang reads too",
        )


def _adapter_only_output_needs_a_usable_base(config: Config) -> Iterator[Conflict]:
    options = {"save_lora_only": config.lora.save_lora_only, "sweep": bool(config.lora.sweep)}
    for name in (name for name, is_set in options.items() if is_set):
        if config.model.foundation:
            yield Conflict(
                ("model.foundation", f"lora.{name}"),
                f"{name} writes only adapters, which other tools apply to the base with its own config.json: edit a "
                "copy of that file and set model.config_path to its folder",
            )
        if config.train.load_weights_mode == "dcp":
            yield Conflict(
                ("train.load_weights_mode", f"lora.{name}"),
                f"{name} writes only adapters, and other tools cannot read a checkpoint as their base: convert it with "
                "`xorl export`, set model.model_path to the result, and load_weights_mode to broadcast",
            )


def _quantized_bases_exclude_fp8_and_offload(config: Config) -> Iterator[Conflict]:
    if not config.lora.enable_qlora:
        return
    if config.train.fp8 != "none":
        yield Conflict(
            ("train.fp8", "lora.enable_qlora"),
            "quantized layers compute with dequantized weights in the compute dtype: set train.fp8 to none",
        )
    if config.train.enable_cpu_offload:
        yield Conflict(
            ("train.enable_cpu_offload", "lora.enable_qlora"),
            "quantized weights are small and stay on the device: set enable_cpu_offload to false",
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
        is_minimum_set = "lr_min" in train.model_fields_set
        if is_minimum_set and train.lr_decay_style != "constant" and train.lr_min > run.train.lr:
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


LORA_CHECKS: tuple[Callable[[Config], Iterator[Conflict]], ...] = (
    _adapters_can_be_saved_and_placed,
    _experts_share_in_one_way,
    _adapter_only_output_needs_a_usable_base,
    _quantized_bases_exclude_fp8_and_offload,
)
