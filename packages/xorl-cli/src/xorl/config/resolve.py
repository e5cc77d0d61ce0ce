"""Fills in the defaults that depend on other options or on the machine, in a valid configuration."""

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from xorl.config.entries import SweepMemberConfig
from xorl.config.environment import check_wandb_mode, dataset_num_proc
from xorl.config.local import Config
from xorl.config.preference import WITH_REFERENCE, base_changes

GROUP_SIZES = {"nvfp4": 16, "block_fp8": 128, "nf4": 64}


class Default(NamedTuple):
    """A default to fill in. `xorl config show` displays `reason` unless it is empty."""

    path: str
    value: object
    reason: str


def resolve(config: Config) -> tuple[Config, dict[str, str]]:
    """Returns the configuration with dependent defaults filled in and ~ expanded, and the reason for each default.

    Raises ValueError if an environment variable has an invalid value.
    """
    config = _with_home_folder(config)
    defaults = [*_model_defaults(config), *_data_defaults(config), *_train_defaults(config), *_lora_defaults(config)]
    values = {default.path: default.value for default in defaults}
    return _with_values(config, values), {default.path: default.reason for default in defaults if default.reason}


def _with_values(config: Config, values: Mapping[str, object]) -> Config:
    changes: dict[str, dict[str, object]] = {"model": {}, "data": {}, "train": {}, "lora": {}}
    for path, value in values.items():
        section, option = path.split(".")
        changes[section][option] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=change) for name, change in changes.items()}
    )


def _with_home_folder(config: Config) -> Config:
    """Expands ~ at the start of paths, which no shell does in a file or after `--option=`.

    Options that may also hold Hub ids or URLs are expanded where they are read.
    """
    paths: dict[str, str | None] = {
        "model.config_path": config.model.config_path,
        "data.dataset_prepared_path": config.data.dataset_prepared_path,
        "train.output_dir": config.train.output_dir,
        "train.profile_trace_dir": config.train.profile_trace_dir,
    }
    expanded = {option: os.path.expanduser(path) for option, path in paths.items() if path and path.startswith("~")}
    return _with_values(config, expanded)


def _model_defaults(config: Config) -> Iterator[Default]:
    model = config.model
    # A checkpoint contains neither file; it records the model's config and the path of the tokenizer.
    folder = None if config.train.load_weights_mode == "dcp" else model.model_path
    config_path = model.config_path or folder
    if model.config_path is None and folder is not None:
        yield Default("model.config_path", folder, "default, model.model_path")
    if model.tokenizer_path is None and config_path is not None:
        yield Default("model.tokenizer_path", config_path, "default, model.config_path")


def _data_defaults(config: Config) -> Iterator[Default]:
    data = config.data
    if data.dataset_num_proc is None:
        yield Default("data.dataset_num_proc", *dataset_num_proc())
    if data.dataloader_num_workers == 0 and data.dataloader_prefetch_factor is not None:
        yield Default("data.dataloader_prefetch_factor", None, "default, data.dataloader_num_workers is 0")


def _train_defaults(config: Config) -> Iterator[Default]:
    train, lora = config.train, config.lora
    is_fsdp = train.data_parallel_mode == "fsdp2"
    if train.use_wandb:
        check_wandb_mode()
    if train.reshard_after_forward is not None:
        if train.reshard_after_forward != train.enable_full_shard:
            yield Default(
                "train.enable_full_shard", train.reshard_after_forward, "default, train.reshard_after_forward"
            )
    elif is_fsdp and train.pipeline_parallel_size > 1 and "enable_full_shard" not in train.model_fields_set:
        # Otherwise every pass of every micro-batch would gather.
        for option in ("enable_full_shard", "reshard_after_forward"):
            yield Default(f"train.{option}", False, "default, train.pipeline_parallel_size is above 1")
    elif is_fsdp:
        yield Default("train.reshard_after_forward", train.enable_full_shard, "default, train.enable_full_shard")
    if train.lr_decay_style != "constant" and train.lr_min > train.lr:
        yield Default("train.lr_min", train.lr, "default, train.lr")
    if train.enable_profiling and train.profile_end_step <= train.profile_start_step:
        yield Default("train.profile_end_step", train.profile_start_step + 1, "default, train.profile_start_step")
    if train.preference_reference is None and train.loss in WITH_REFERENCE:
        changed = base_changes(config)
        reason = "default, lora.enable_lora" if changed is None else f"default, {changed}"
        yield Default("train.preference_reference", "initial" if changed else "base", reason)
    if train.preference_beta is None and train.loss != "cross_entropy":
        yield Default("train.preference_beta", 2.0 if train.loss == "simpo" else 0.1, f"default, loss {train.loss}")
    if train.max_grad_norm == 0:
        yield Default("train.max_grad_norm", None, "")
    if train.param_dtype is None:
        dtype = "bf16" if lora.has_adapters and train.enable_mixed_precision else "fp32"
        yield Default("train.param_dtype", dtype, "default, lora.enable_lora" if lora.has_adapters else "")
    if train.load_checkpoint_path == "":
        yield Default("train.load_checkpoint_path", None, "")
    if train.load_weights_mode in ("auto", "safetensors"):
        yield Default("train.load_weights_mode", "broadcast", "")


def _lora_defaults(config: Config) -> Iterator[Default]:
    lora = config.lora
    if lora.enable_qlora and not lora.enable_lora:
        yield Default("lora.enable_lora", True, "default, lora.enable_qlora")
    if lora.enable_qlora and lora.quant_group_size is None:
        size = GROUP_SIZES[lora.quant_format]
        yield Default("lora.quant_group_size", size, f"default, lora.quant_format {lora.quant_format}")


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
