"""Checks across options: conflicts, options that need others, and parallel sizes that must fit the world size.

Each check yields the conflicts in a configuration whose values are all valid by themselves. Defaults never conflict.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xorl.config.data_conflicts import DATA_CHECKS
from xorl.config.local import Config
from xorl.config.lora_conflicts import LORA_CHECKS, sweep_conflicts
from xorl.config.problems import Conflict


@dataclass(frozen=True)
class Requirement:
    """Options that have no effect unless `is_met`; each one that is not at its default is reported.

    `switch` is the option that `is_met` depends on, and `wanted` describes its required value.
    """

    options: tuple[str, ...]
    switch: str
    wanted: str
    is_met: Callable[[Config], bool]


REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        (
            "model.basic_modules",
            "train.reshard_after_forward",
            "train.enable_full_shard",
            "train.enable_forward_prefetch",
            "train.enable_cpu_offload",
            "train.cp_fsdp_mode",
        ),
        "train.data_parallel_mode",
        "fsdp2",
        lambda config: config.train.data_parallel_mode == "fsdp2",
    ),
    Requirement(
        ("train.cp_fsdp_mode",),
        "train.ulysses_parallel_size",
        "2 or more (or train.ringattn_parallel_size)",
        lambda config: config.train.context_parallel_size > 1,
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
    ),
    Requirement(
        ("train.lr_min", "train.lr_decay_ratio"),
        "train.lr_decay_style",
        "linear or cosine",
        lambda config: config.train.lr_decay_style != "constant",
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
    # Allowed with an explicit weight_decay: 0, so that a command line can still override it.
    Requirement(
        ("train.no_decay_modules", "train.no_decay_params"),
        "train.weight_decay",
        "above 0",
        lambda config: config.train.weight_decay > 0 or "weight_decay" in config.train.model_fields_set,
    ),
    Requirement(
        ("train.load_weights_mode",),
        "model.model_path",
        "set (random weights are not read)",
        lambda config: (
            config.model.model_path is not None or config.train.load_weights_mode not in ("all_ranks", "dcp")
        ),
    ),
    Requirement(
        ("train.lr_start",), "train.lr_warmup_ratio", "above 0", lambda config: config.train.lr_warmup_ratio > 0
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
        (
            "data.val_set_size",
            "data.dataset_shard_num",
            "data.num_dataset_shards_to_save",
            "data.push_dataset_to_hub",
            "data.skip_prepare_dataset",
            "data.shuffle_before_merging_datasets",
            "data.sample_packing_method",
            "data.sample_packing_sequentially",
            "data.dataloader_drop_last",
            "train.num_train_epochs",
        ),
        "data.streaming",
        "false: a stream has no known length and is packed as it is read",
        lambda config: not config.data.streaming,
    ),
    Requirement(
        ("train.keep_best",),
        "data.val_set_size",
        "set, or data.test_datasets",
        lambda config: config.data.val_set_size is not None or bool(config.data.test_datasets),
    ),
    Requirement(
        ("train.on_nonfinite",),
        "lora.sweep",
        "empty: a member whose step is not finite stops, and the others continue",
        lambda config: not config.lora.sweep,
    ),
    Requirement(
        ("train.keep_best",),
        "lora.sweep",
        "empty: each member has a best step of its own",
        lambda config: not config.lora.sweep,
    ),
    Requirement(
        ("train.keep_every", "train.keep_best"),
        "train.keep_last",
        "set (null keeps all checkpoints)",
        lambda config: config.train.keep_last is not None,
    ),
    Requirement(
        ("train.save_epochs",),
        "data.streaming",
        "false: a stream has no known length; use train.save_steps",
        lambda config: not config.data.streaming or config.train.save_epochs == 0,
    ),
    Requirement(
        (
            "lora.lora_rank",
            "lora.lora_alpha",
            "lora.lora_target_modules",
            "lora.lora_dropout",
            "lora.use_rslora",
            "lora.use_dora",
            "lora.rank_pattern",
            "lora.alpha_pattern",
            "lora.modules_to_save",
            "lora.merge_lora_interval",
            "lora.adapter_path",
            "lora.sweep",
        ),
        "lora.enable_lora",
        "true",
        lambda config: config.lora.enable_lora or config.lora.enable_qlora,
    ),
    Requirement(
        (
            "lora.lora_rank",
            "lora.lora_alpha",
            "lora.lora_target_modules",
            "lora.use_rslora",
            "lora.use_dora",
            "lora.rank_pattern",
            "lora.alpha_pattern",
            "lora.modules_to_save",
        ),
        "lora.adapter_path",
        "null: the files of the adapter determine it",
        lambda config: config.lora.adapter_path is None,
    ),
    Requirement(
        ("lora.quant_format", "lora.quant_group_size", "lora.exclude_modules", "lora.enable_aqn"),
        "lora.enable_qlora",
        "true",
        lambda config: config.lora.enable_qlora,
    ),
    Requirement(("lora.aqn_alpha",), "lora.enable_aqn", "true", lambda config: config.lora.enable_aqn),
    Requirement(
        ("lora.sweep_members_per_pass",), "lora.sweep", "a list of members", lambda config: bool(config.lora.sweep)
    ),
    Requirement(
        (
            "data.streaming",
            "data.push_dataset_to_hub",
            "data.skip_prepare_dataset",
            "train.optimizer",
            "train.no_decay_modules",
            "train.no_decay_params",
            "train.param_dtype",
            "train.enable_cpu_offload",
            "train.enable_reentrant",
            "lora.lora_dropout",
            "lora.use_dora",
            "lora.modules_to_save",
            "lora.adapter_path",
            "lora.save_lora_only",
            "lora.merge_lora_interval",
            "lora.enable_aqn",
        ),
        "lora.sweep",
        "empty: the members of a sweep are plain adapters trained by AdamW in fp32",
        lambda config: not config.lora.sweep,
    ),
    # Allowed with an explicit enable_profiling: false, so that a command line can still override it.
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
        lambda config: "enable_profiling" in config.train.model_fields_set,
    ),
)


def conflicts_in(config: Config) -> Iterator[Conflict]:
    """Yields every conflict of a configuration."""

    def default_of(path: str) -> object:
        section, name = path.split(".")
        return type(getattr(config, section)).model_fields[name].default

    yield from unmet_requirements(config, default_of)
    for check in CHECKS:
        yield from check(config)


def _model_has_a_source(config: Config) -> Iterator[Conflict]:
    if config.model.model_path is None and config.model.config_path is None:
        yield Conflict(
            ("model.model_path", "model.config_path"),
            "both are null: set model_path to start from weights, or config_path to start from random weights",
        )


def unmet_requirements(config: Config, default_of: Callable[[str], object]) -> Iterator[Conflict]:
    """Yields a conflict for each option that has no effect but is not at its default."""
    for requirement in REQUIREMENTS:
        if requirement.is_met(config):
            continue
        for path in requirement.options:
            section_name, name = path.split(".")
            if getattr(getattr(config, section_name), name) != default_of(path):
                message = f"{name} has no effect unless {requirement.switch} is {requirement.wanted}"
                yield Conflict((path, requirement.switch), message)


def _sharding_options_agree(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.reshard_after_forward is not None and train.reshard_after_forward != train.enable_full_shard:
        wanted = str(train.reshard_after_forward).lower()
        yield Conflict(
            ("train.reshard_after_forward", "train.enable_full_shard"),
            f"reshard_after_forward contradicts enable_full_shard, which is {str(train.enable_full_shard).lower()}: "
            f"remove reshard_after_forward and set enable_full_shard to {wanted}",
        )


def _degrees_fit_the_mode(config: Config) -> Iterator[Conflict]:
    train = config.train
    mode = train.data_parallel_mode
    if mode == "fsdp2":
        return
    meaning = {"none": "none uses a single process", "ddp": "ddp does not shard"}[mode]
    sizes = {"data_parallel_shard_size": train.data_parallel_shard_size}
    if mode == "none":
        sizes["data_parallel_replicate_size"] = train.data_parallel_replicate_size
        sizes["ulysses_parallel_size"] = train.ulysses_parallel_size
        sizes["ringattn_parallel_size"] = train.ringattn_parallel_size
    for name, size in sizes.items():
        if size > 1:
            yield Conflict(
                (f"train.{name}", "train.data_parallel_mode"),
                f"data_parallel_mode: {meaning}, so {name} cannot be {size}: set it to 1, or the mode to fsdp2",
            )


def _recomputation_is_compatible(config: Config) -> Iterator[Conflict]:
    train = config.train
    keeps_operations = train.enable_gradient_checkpointing and train.recompute_policy == "operation"
    if train.enable_activation_offload and keeps_operations and not train.enable_compile:
        yield Conflict(
            ("train.enable_activation_offload", "train.recompute_policy"),
            "the outputs that recompute_policy: operation keeps cannot be offloaded without compilation: set "
            "enable_compile to true, recompute_policy to module, or enable_gradient_checkpointing to false",
        )
    for name in ("enable_activation_offload", "recompute_num_layers"):
        if getattr(train, name) and train.recompute_policy == "auto":
            yield Conflict(
                (f"train.{name}", "train.recompute_policy"),
                f"recompute_policy: auto chooses {name} itself: remove it",
            )
    if train.enable_compile and train.enable_reentrant:
        yield Conflict(
            ("train.enable_reentrant", "train.enable_compile"),
            "reentrant gradient checkpointing cannot be compiled: set enable_reentrant to false",
        )
    if train.enable_compile and config.lora.lora_dropout and train.enable_gradient_checkpointing:
        yield Conflict(
            ("lora.lora_dropout", "train.enable_compile"),
            "torch cannot compile recomputed layers that draw random numbers: set enable_gradient_checkpointing or "
            "enable_compile to false, or lora_dropout to 0",
        )


def _tensor_parallelism_needs_separate_qkv(config: Config) -> Iterator[Conflict]:
    if config.train.tensor_parallel_size > 1 and config.model.merge_qkv:
        yield Conflict(
            ("train.tensor_parallel_size", "model.merge_qkv"), "tensor parallelism needs model.merge_qkv: false"
        )


def _fp8_is_compatible(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.fp8 == "tensorwise" and train.data_parallel_mode == "fsdp2" and config.lora.use_dora:
        yield Conflict(
            ("lora.use_dora", "train.fp8"),
            "with fp8: tensorwise, fsdp2 gathers weights only in fp8, but use_dora needs their norms: set fp8 to "
            "rowwise, or data_parallel_mode to none or ddp",
        )
    if train.fp8 == "tensorwise" and train.enable_cpu_offload:
        yield Conflict(
            ("train.fp8", "train.enable_cpu_offload"),
            "tensorwise casts weights to fp8 where they are stored, which is too slow on a CPU: use rowwise, which "
            "casts the gathered weights, or set enable_cpu_offload to false",
        )


def _learning_rates_are_valid(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.lr_decay_style != "constant" and train.lr_min > train.lr:
        yield Conflict(("train.lr_min", "train.lr"), f"lr_min ({train.lr_min:g}) is above lr ({train.lr:g})")
    if train.lr_start > train.lr:
        yield Conflict(("train.lr_start", "train.lr"), f"lr_start ({train.lr_start:g}) is above lr ({train.lr:g})")
    if train.lr_decay_style != "constant" and train.lr_warmup_ratio > train.lr_decay_ratio:
        yield Conflict(
            ("train.lr_decay_ratio", "train.lr_warmup_ratio"),
            f"with lr_decay_ratio {train.lr_decay_ratio:g}, the decay would end before the warm-up, which ends at "
            f"lr_warmup_ratio {train.lr_warmup_ratio:g}",
        )
    if train.optimizer == "muon" and train.lr == 0:
        yield Conflict(
            ("train.lr", "train.optimizer"),
            "lr is 0, and muon scales muon_lr by the current fraction of lr: set lr above 0 (it is also the learning "
            "rate of embeddings, norms and biases)",
        )


def _bf16_parameters_need_mixed_precision(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.param_dtype == "bf16" and not train.enable_mixed_precision:
        yield Conflict(
            ("train.param_dtype", "train.enable_mixed_precision"),
            "enable_mixed_precision: false computes in fp32, which needs fp32 parameters: set enable_mixed_precision "
            "to true, or param_dtype to fp32",
        )


def _determinism_needs_launch_blocking(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.enable_full_determinism and not train.allow_cuda_launch_blocking:
        yield Conflict(
            ("train.enable_full_determinism", "train.allow_cuda_launch_blocking"),
            "enable_full_determinism is slow and needs allow_cuda_launch_blocking: true",
        )


def _profile_covers_steps(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.profile_end_step <= train.profile_start_step:
        yield Conflict(
            ("train.profile_end_step", "train.profile_start_step"),
            f"profile_end_step ({train.profile_end_step}) must be greater than profile_start_step "
            f"({train.profile_start_step})",
        )
    if train.enable_profiling and train.max_steps is not None and train.profile_start_step > train.max_steps:
        yield Conflict(
            ("train.profile_start_step", "train.max_steps", "train.enable_profiling"),
            f"profile_start_step is {train.profile_start_step}, but max_steps ends the run at {train.max_steps}, so "
            "nothing would be recorded: start earlier, or set enable_profiling to false",
        )


# Checks of the model and its training, shared by local training and the service.
MODEL_CHECKS: tuple[Callable[[Config], Iterator[Conflict]], ...] = (
    _model_has_a_source,
    _sharding_options_agree,
    _degrees_fit_the_mode,
    _recomputation_is_compatible,
    _tensor_parallelism_needs_separate_qkv,
    _fp8_is_compatible,
    _bf16_parameters_need_mixed_precision,
    *LORA_CHECKS,
)
CHECKS: tuple[Callable[[Config], Iterator[Conflict]], ...] = (
    *MODEL_CHECKS,
    *DATA_CHECKS,
    _learning_rates_are_valid,
    _determinism_needs_launch_blocking,
    _profile_covers_steps,
    sweep_conflicts,
)


def check_world_size(config: Config, world_size: int) -> None:
    """Raises ValueError, starting with an option's path, if the world size does not fit the parallel sizes."""
    train = config.train
    started = f"{world_size} process{'' if world_size == 1 else 'es'}"
    if train.data_parallel_mode == "none" and world_size > 1:
        raise ValueError(f"train.data_parallel_mode: none uses a single process, got {started}; set it to ddp or fsdp2")
    model_sizes = {
        f"train.{name}_parallel_size": getattr(train, f"{name}_parallel_size")
        for name in ("tensor", "pipeline", "ulysses", "ringattn")
    }
    data_sizes = {
        "train.data_parallel_replicate_size": train.data_parallel_replicate_size,
        "train.data_parallel_shard_size": 1 if train.data_parallel_mode == "ddp" else train.data_parallel_shard_size,
    }
    sizes = model_sizes | data_sizes
    fixed = math.prod(max(size, 1) for size in sizes.values())
    is_open = -1 in sizes.values()
    if world_size % fixed if is_open else world_size != fixed:
        named = {name: size for name, size in sizes.items() if size > 1} or data_sizes
        shown = " x ".join(f"{name} {size}" for name, size in named.items())
        wanted = f"a multiple of {fixed}" if is_open else f"{fixed}, or set a data-parallel size to -1"
        raise ValueError(f"{next(iter(named))}: {started} cannot be arranged as {shown}: start {wanted}")
