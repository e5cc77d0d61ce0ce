"""Options that only matter beside another option.

An option whose requirement is not met has no effect: it is reset to its default and reported, so that one file can
carry the options of several kinds of runs. It is an error only if the run would then not be what the option asks for.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xorl.config.entries import DatasetEntryConfig
from xorl.config.fields import Section
from xorl.config.graphs import GRAPH_REQUIREMENTS
from xorl.config.local import Config
from xorl.config.lora_conflicts import KIND_OF_ADAPTER
from xorl.config.options import ENTRIES, entries_of
from xorl.config.preference import PREFERENCE_REQUIREMENTS
from xorl.config.problems import Conflict
from xorl.config.requirement import EntryRequirement, Requirement


@dataclass(frozen=True)
class WithoutEffect:
    """An option that was set and has no effect. `value` is what was set; `condition` says when it would matter."""

    path: str
    value: object
    condition: str


# Later rows see the values that earlier rows have reset.
REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        (
            "model.basic_modules",
            "train.reshard_after_forward",
            "train.enable_full_shard",
            "train.enable_forward_prefetch",
            "train.fsdp_collectives",
            "train.enable_cpu_offload",
            "train.cp_fsdp_mode",
            "train.ep_outside",
        ),
        "train.data_parallel_mode",
        "fsdp2",
        lambda config: config.train.data_parallel_mode == "fsdp2",
    ),
    Requirement(
        ("train.encoder_lr",), "train.freeze_encoders", "false", lambda config: not config.train.freeze_encoders
    ),
    Requirement(
        ("train.projector_lr",),
        "train.freeze_projectors",
        "false (without adapters)",
        lambda config: not config.train.freeze_projectors and not config.lora.has_adapters,
    ),
    Requirement(
        ("train.pipeline_parallel_schedule", "train.pp_variable_seq_lengths"),
        "train.pipeline_parallel_size",
        "2 or more",
        lambda config: config.train.pipeline_parallel_size > 1,
    ),
    Requirement(
        ("train.cp_fsdp_mode",),
        "train.ulysses_parallel_size",
        "2 or more (or train.ringattn_parallel_size)",
        lambda config: config.train.context_parallel_size > 1,
    ),
    Requirement(
        ("train.ep_outside", "model.ep_dispatch"),
        "train.expert_parallel_size",
        "2 or more",
        lambda config: config.train.expert_parallel_size > 1,
    ),
    Requirement(
        ("model.deepep_buffer_size_gb", "model.deepep_num_sms", "model.deepep_async_combine"),
        "model.ep_dispatch",
        "deepep",
        lambda config: config.model.ep_dispatch == "deepep",
    ),
    Requirement(
        (
            "train.recompute_policy",
            "train.recompute_modules",
            "train.recompute_num_layers",
            "train.enable_reentrant",
            "train.moe_checkpoint_method",
        ),
        "train.enable_gradient_checkpointing",
        "true",
        lambda config: config.train.enable_gradient_checkpointing,
    ),
    Requirement(
        ("train.recompute_modules", "train.enable_reentrant"),
        "train.recompute_policy",
        "module",
        lambda config: config.train.recompute_policy == "module",
    ),
    Requirement(
        ("train.enable_activation_offload", "train.recompute_num_layers"),
        "train.recompute_policy",
        "module or operation (auto chooses it)",
        lambda config: config.train.recompute_policy != "auto",
    ),
    Requirement(
        ("train.moe_checkpoint_method",),
        "train.recompute_policy",
        "module or operation (auto chooses for all parts of a layer)",
        lambda config: config.train.recompute_policy != "auto",
    ),
    Requirement(
        ("train.moe_checkpoint_method",),
        "train.recompute_modules",
        "null or [self_attn] (mlp recomputes experts as a whole)",
        lambda config: "mlp" not in (config.train.recompute_modules or ()),
    ),
    *GRAPH_REQUIREMENTS,
    Requirement(
        ("train.activation_gpu_limit",),
        "train.enable_activation_offload",
        "true",
        lambda config: config.train.enable_activation_offload,
    ),
    Requirement(
        ("model.lm_head_fp32",),
        "train.enable_mixed_precision",
        "true (without it, logits are always fp32)",
        lambda config: config.train.enable_mixed_precision,
    ),
    Requirement(
        ("model.attention_cast_bf16",),
        "train.enable_mixed_precision",
        "false (with it, queries and keys are bf16 already)",
        lambda config: not config.train.enable_mixed_precision,
    ),
    Requirement(
        ("train.fp8",),
        "train.enable_mixed_precision",
        "true",
        lambda config: config.train.enable_mixed_precision,
        is_error=True,
    ),
    Requirement(
        ("train.lr_min", "train.lr_decay_ratio"),
        "train.lr_decay_style",
        "linear or cosine",
        lambda config: config.train.lr_decay_style != "constant",
    ),
    Requirement(
        ("train.lr_start",), "train.lr_warmup_ratio", "above 0", lambda config: config.train.lr_warmup_ratio > 0
    ),
    Requirement(
        ("train.optimizer_dtype",),
        "train.optimizer",
        "anyprecision_adamw or muon",
        lambda config: config.train.optimizer in ("anyprecision_adamw", "muon"),
    ),
    Requirement(
        (
            "train.muon_lr",
            "train.muon_momentum",
            "train.muon_nesterov",
            "train.muon_ns_steps",
            "train.muon_adjust_lr_fn",
        ),
        "train.optimizer",
        "muon",
        lambda config: config.train.optimizer == "muon",
    ),
    Requirement(
        ("train.no_decay_modules", "train.no_decay_params"),
        "train.weight_decay",
        "above 0",
        lambda config: config.train.weight_decay > 0,
    ),
    Requirement(
        ("train.load_weights_mode",),
        "model.model_path",
        "set (random weights are not read)",
        lambda config: config.model.model_path is not None or config.train.load_weights_mode != "all_ranks",
    ),
    Requirement(
        ("train.load_weights_mode",),
        "model.model_path",
        "set to a checkpoint",
        lambda config: config.model.model_path is not None or config.train.load_weights_mode != "dcp",
        is_error=True,
    ),
    Requirement(
        (
            "train.profile_start_step",
            "train.profile_end_step",
            "train.profile_trace_dir",
            "train.profile_record_shapes",
            "train.profile_profile_memory",
            "train.profile_with_stack",
            "train.profile_rank0_only",
        ),
        "train.enable_profiling",
        "true",
        lambda config: config.train.enable_profiling,
    ),
    Requirement(
        ("train.wandb_project", "train.wandb_name", "train.wandb_tags", "train.wandb_log_interval"),
        "train.use_wandb",
        "true",
        lambda config: config.train.use_wandb,
    ),
    Requirement(
        (
            "data.num_dataset_shards_to_save",
            "data.skip_prepare_dataset",
            "data.shuffle_before_merging_datasets",
            "data.sample_packing_method",
            "data.sample_packing_sequentially",
            "data.dataloader_drop_last",
            "train.num_train_epochs",
        ),
        "data.streaming",
        "false (a stream has no known length and is packed as it is read)",
        lambda config: not config.data.streaming,
    ),
    Requirement(
        ("train.save_epochs",),
        "data.streaming",
        "false (a stream has no known length; use train.save_steps)",
        # 0 has an effect: it silences the warning of a stream that is only saved at its end.
        lambda config: not config.data.streaming or config.train.save_epochs == 0,
    ),
    Requirement(
        ("data.sample_packing_group_size", "data.sample_packing_mp_start_method"),
        "data.sample_packing_method",
        "multipack",
        lambda config: config.data.sample_packing_method == "multipack",
    ),
    Requirement(
        ("data.eval_sample_packing", "train.eval_steps"),
        "data.val_set_size",
        "set, or data.test_datasets",
        lambda config: config.data.val_set_size is not None or bool(config.data.test_datasets),
    ),
    Requirement(
        ("data.dataloader_prefetch_factor",),
        "data.dataloader_num_workers",
        "above 0",
        lambda config: config.data.dataloader_num_workers > 0,
    ),
    Requirement(
        ("data.num_dataset_shards_to_save",),
        "data.skip_prepare_dataset",
        "false",
        lambda config: not config.data.skip_prepare_dataset,
    ),
    Requirement(
        ("data.select_columns",),
        "data.datasets[].type",
        "tokenized or auto in some entry (other types use the columns of their entry)",
        lambda config: any(entry.type in ("tokenized", "auto") for _, entry in dataset_entries(config)),
    ),
    Requirement(
        ("data.hf_use_auth_token",),
        "data.datasets[].path",
        "a Hub id (org/name), or data.push_dataset_to_hub is set",
        lambda config: (
            config.data.push_dataset_to_hub is not None
            or any(re.fullmatch(r"[\w.-]+/[\w.-]+", entry.path) for _, entry in dataset_entries(config))
        ),
    ),
    Requirement(
        ("train.keep_best",),
        "data.val_set_size",
        "set, or data.test_datasets",
        lambda config: config.data.val_set_size is not None or bool(config.data.test_datasets),
    ),
    Requirement(
        ("train.keep_every", "train.keep_best"),
        "train.keep_last",
        "set (null keeps all checkpoints)",
        lambda config: config.train.keep_last is not None,
    ),
    Requirement(
        ("train.on_nonfinite", "train.keep_best"),
        "lora.sweep",
        "empty: each member has a best step of its own, and stops alone if a step is not finite",
        lambda config: not config.lora.sweep,
        is_error=True,
    ),
    Requirement(
        ("data.val_set_size", "data.dataset_shard_num", "data.push_dataset_to_hub"),
        "data.streaming",
        "false: a stream has no known length and is packed as it is read",
        lambda config: not config.data.streaming,
        is_error=True,
    ),
    Requirement(
        (
            *KIND_OF_ADAPTER,
            "lora.lora_dropout",
            "lora.moe_lora_format",
            "lora.merge_lora_interval",
            "lora.adapter_path",
            "lora.save_lora_only",
            "lora.sweep",
        ),
        "lora.enable_lora",
        "true",
        lambda config: config.lora.has_adapters,
    ),
    Requirement(
        KIND_OF_ADAPTER,
        "lora.adapter_path",
        "null (the files of the adapter determine it)",
        lambda config: config.lora.adapter_path is None,
    ),
    Requirement(
        ("lora.reset_optimizer_on_merge",),
        "lora.merge_lora_interval",
        "above 0",
        lambda config: config.lora.merge_lora_interval > 0,
    ),
    Requirement(
        ("lora.quant_format", "lora.quant_group_size", "lora.exclude_modules", "lora.enable_aqn"),
        "lora.enable_qlora",
        "true",
        lambda config: config.lora.enable_qlora,
    ),
    *PREFERENCE_REQUIREMENTS,
    Requirement(("lora.aqn_alpha",), "lora.enable_aqn", "true", lambda config: config.lora.enable_aqn),
    Requirement(
        ("lora.sweep_members_per_pass",), "lora.sweep", "a list of members", lambda config: bool(config.lora.sweep)
    ),
    Requirement(
        ("train.no_decay_modules", "train.no_decay_params", "train.enable_reentrant", "lora.save_lora_only"),
        "lora.sweep",
        "empty (a sweep only saves adapters, decays all their weights and recomputes without reentrance)",
        lambda config: not config.lora.sweep,
    ),
    Requirement(
        (
            "data.streaming",
            "data.push_dataset_to_hub",
            "data.skip_prepare_dataset",
            "train.optimizer",
            "train.param_dtype",
            "train.enable_cpu_offload",
            "lora.lora_dropout",
            "lora.use_dora",
            "lora.modules_to_save",
            "lora.adapter_path",
            "lora.merge_lora_interval",
            "lora.enable_aqn",
        ),
        "lora.sweep",
        "empty: the members of a sweep are plain adapters trained by AdamW in fp32",
        lambda config: not config.lora.sweep,
        is_error=True,
    ),
)

ENTRY_REQUIREMENTS: tuple[EntryRequirement, ...] = (
    EntryRequirement(
        (
            "type",
            "name",
            "split",
            "revision",
            "data_files",
            "ds_type",
            "shards",
            "shards_idx",
            "preprocess_shards",
            "chat_template",
            "chat_template_kwargs",
            "train_on",
            "columns",
            "skip_bad_rows",
            "ignore_columns",
        ),
        "path",
        "a dataset (the rows of dummy are synthetic token ids)",
        lambda _, entry: entry.path != "dummy",
    ),
    EntryRequirement(
        ("chat_template", "chat_template_kwargs"),
        "type",
        "chat or preference",
        lambda _, entry: entry.type in ("chat", "preference", "auto"),
    ),
    EntryRequirement(
        ("overflow_limit",), "overflow", "truncate, drop or split", lambda _, entry: entry.overflow != "error"
    ),
    EntryRequirement(
        ("preprocess_shards",),
        "data.streaming",
        "false (a stream is not prepared)",
        lambda config, _: not config.data.streaming,
    ),
)


def dataset_entries(config: Config) -> Iterator[tuple[str, DatasetEntryConfig]]:
    """Yields (path, entry) for each dataset of training, evaluation and the members of a sweep."""
    for path, entry in entries_of(config, ENTRIES):
        assert isinstance(entry, DatasetEntryConfig)
        yield path, entry


def without_effect(config: Config, default_of: Callable[[str], object]) -> tuple[Config, list[WithoutEffect]]:
    """Returns the configuration with every option that has no effect at its default, and the list of these options.

    `default_of` returns the default of an option outside dataset entries, by its path.
    """
    found: list[WithoutEffect] = []
    for requirement in (row for row in REQUIREMENTS if not row.is_error):
        if requirement.is_met(config):
            continue
        for path in requirement.options:
            value, default = value_at(config, path), default_of(path)
            if value != default:
                found.append(WithoutEffect(path, value, requirement.condition))
                config = with_value(config, path, default)
    for row in ENTRY_REQUIREMENTS:
        for entry_path, entry in dataset_entries(config):
            for name in row.options:
                value, default = getattr(entry, name), entry_default(name)
                if value != default and not row.is_met(config, entry):
                    found.append(WithoutEffect(f"{entry_path}.{name}", value, row.condition))
                    config = with_value(config, f"{entry_path}.{name}", default)
    return config, found


def unmet_requirements(config: Config, default_of: Callable[[str], object]) -> Iterator[Conflict]:
    """Yields a conflict for each option that is not at its default and cannot be ignored."""
    for requirement in (row for row in REQUIREMENTS if row.is_error):
        if requirement.is_met(config):
            continue
        for path in requirement.options:
            if value_at(config, path) != default_of(path):
                message = f"{path.rpartition('.')[2]} has no effect {requirement.condition}"
                yield Conflict((path, requirement.switch), message)


def local_default(path: str) -> object:
    """Returns the default of an option of local training outside dataset entries."""
    section, name = path.split(".")
    kind = Config.model_fields[section].annotation
    assert isinstance(kind, type)
    assert issubclass(kind, Section)
    return kind.model_fields[name].default


def entry_default(name: str) -> object:
    """Returns the default of an option of dataset entries."""
    return DatasetEntryConfig.model_fields[name].default


def value_at(config: Config, path: str) -> object:
    """Returns the value of an option outside lists."""
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def with_value(config: Config, path: str, value: object) -> Config:
    """Returns a copy with another value of the option at `path`, which may be in an entry of a list."""

    def changed(owner: object, parts: list[str]) -> object:
        if not parts:
            return value
        name, *rest = parts
        if isinstance(owner, list):
            return [changed(item, rest) if str(index) == name else item for index, item in enumerate(owner)]
        assert isinstance(owner, Section)
        return owner.model_copy(update={name: changed(getattr(owner, name), rest)})

    result = changed(config, path.split("."))
    assert isinstance(result, Config)
    return result
