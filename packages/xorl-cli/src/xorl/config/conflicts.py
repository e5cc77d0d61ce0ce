"""Conflicts between options, options that require others, and the parallel degrees that a world size must fit.

Each function yields the errors of a configuration whose single values are all valid. Defaults never conflict.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xorl.config.data_conflicts import DATA_CHECKS
from xorl.config.local import Config
from xorl.config.lora_conflicts import LORA_CHECKS
from xorl.config.problems import Conflict
from xorl.config.sweep import sweep_conflicts


@dataclass(frozen=True)
class Need:
    """Options that have no effect unless `holds`, which depends on `switch`; each is reported if not at its default."""

    options: tuple[str, ...]
    switch: str
    wanted: str
    holds: Callable[[Config], bool]


NEEDS: tuple[Need, ...] = (
    Need(
        (
            "model.basic_modules",
            "train.reshard_after_forward",
            "train.enable_full_shard",
            "train.enable_forward_prefetch",
            "train.enable_cpu_offload",
        ),
        "train.data_parallel_mode",
        "fsdp2",
        lambda config: config.train.data_parallel_mode == "fsdp2",
    ),
    Need(
        (
            "train.recompute_policy",
            "train.recompute_modules",
            "train.recompute_num_layers",
            "train.enable_reentrant",
        ),
        "train.enable_gradient_checkpointing",
        "true",
        lambda config: config.train.enable_gradient_checkpointing,
    ),
    Need(
        ("train.recompute_modules", "train.enable_reentrant"),
        "train.recompute_policy",
        "module",
        lambda config: config.train.recompute_policy == "module",
    ),
    Need(
        ("train.activation_gpu_limit",),
        "train.enable_activation_offload",
        "true",
        lambda config: config.train.enable_activation_offload,
    ),
    Need(
        ("model.lm_head_fp32",),
        "train.enable_mixed_precision",
        "true, since logits are fp32 without it",
        lambda config: config.train.enable_mixed_precision,
    ),
    Need(
        ("model.attention_cast_bf16",),
        "train.enable_mixed_precision",
        "false, since queries and keys are bf16 with it",
        lambda config: not config.train.enable_mixed_precision,
    ),
    Need(
        ("train.fp8",),
        "train.enable_mixed_precision",
        "true",
        lambda config: config.train.enable_mixed_precision,
    ),
    Need(
        ("train.lr_min", "train.lr_decay_ratio"),
        "train.lr_decay_style",
        "linear or cosine",
        lambda config: config.train.lr_decay_style != "constant",
    ),
    Need(
        ("train.optimizer_dtype",),
        "train.optimizer",
        "anyprecision_adamw or muon",
        lambda config: config.train.optimizer in ("anyprecision_adamw", "muon"),
    ),
    Need(
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
    # With an explicit weight_decay: 0 they wait for a run that sets it on the command line.
    Need(
        ("train.no_decay_modules", "train.no_decay_params"),
        "train.weight_decay",
        "above 0",
        lambda config: config.train.weight_decay > 0 or "weight_decay" in config.train.model_fields_set,
    ),
    Need(
        ("train.load_weights_mode",),
        "model.model_path",
        "set: random weights are read by nobody",
        lambda config: (
            config.model.model_path is not None or config.train.load_weights_mode not in ("all_ranks", "dcp")
        ),
    ),
    Need(("train.lr_start",), "train.lr_warmup_ratio", "above 0", lambda config: config.train.lr_warmup_ratio > 0),
    Need(
        ("data.sample_packing_group_size", "data.sample_packing_mp_start_method"),
        "data.sample_packing_method",
        "multipack",
        lambda config: config.data.sample_packing_method == "multipack",
    ),
    Need(
        ("data.eval_sample_packing", "train.eval_steps"),
        "data.val_set_size",
        "set, or data.test_datasets",
        lambda config: config.data.val_set_size is not None or bool(config.data.test_datasets),
    ),
    Need(
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
        "false: a stream is packed as it comes, and has no known length",
        lambda config: not config.data.streaming,
    ),
    Need(
        ("train.save_epochs",),
        "data.streaming",
        "false: a stream has no known length; save by train.save_steps",
        lambda config: not config.data.streaming or config.train.save_epochs == 0,
    ),
    Need(
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
    Need(
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
        "null: the adapter that it names says it",
        lambda config: config.lora.adapter_path is None,
    ),
    Need(
        ("lora.quant_format", "lora.quant_group_size", "lora.exclude_modules", "lora.enable_aqn"),
        "lora.enable_qlora",
        "true",
        lambda config: config.lora.enable_qlora,
    ),
    Need(("lora.aqn_alpha",), "lora.enable_aqn", "true", lambda config: config.lora.enable_aqn),
    Need(("lora.sweep_members_per_pass",), "lora.sweep", "a list of members", lambda config: bool(config.lora.sweep)),
    Need(
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
        "empty: the members of a sweep are plain adapters, trained by AdamW in fp32",
        lambda config: not config.lora.sweep,
    ),
    # With an explicit enable_profiling: false they wait for a run that sets it on the command line.
    Need(
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


def conflicts_in(config: Config) -> list[Conflict]:
    """Returns every conflict of a configuration."""
    return [conflict for check in CHECKS for conflict in check(config)]


def _model_is_named(config: Config) -> Iterator[Conflict]:
    if config.model.model_path is None and config.model.config_path is None:
        yield Conflict(
            ("model.model_path", "model.config_path"),
            "both are null: set model_path to start from weights, or config_path to start from random ones",
        )


def unmet_needs(config: Config, default_of: Callable[[str], object]) -> Iterator[Conflict]:
    """Yields a conflict for each option that is not at its default but has no effect."""
    for need in NEEDS:
        if need.holds(config):
            continue
        for path in need.options:
            section_name, name = path.split(".")
            if getattr(getattr(config, section_name), name) != default_of(path):
                message = f"{name} does nothing unless {need.switch} is {need.wanted}"
                yield Conflict((path, need.switch), message)


def _needs_are_met(config: Config) -> Iterator[Conflict]:
    def default_of(path: str) -> object:
        section, name = path.split(".")
        return type(getattr(config, section)).model_fields[name].default

    return unmet_needs(config, default_of)


def _sharding_options_agree(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.reshard_after_forward is not None and train.reshard_after_forward != train.enable_full_shard:
        wanted = str(train.reshard_after_forward).lower()
        yield Conflict(
            ("train.reshard_after_forward", "train.enable_full_shard"),
            f"enable_full_shard is {str(train.enable_full_shard).lower()}, which says the opposite: leave "
            f"reshard_after_forward out and set enable_full_shard to {wanted}",
        )


def _degrees_fit_the_mode(config: Config) -> Iterator[Conflict]:
    train = config.train
    mode = train.data_parallel_mode
    if mode == "fsdp2":
        return
    wanted = {"none": "none is one process", "ddp": "ddp does not shard"}[mode]
    sizes = {"data_parallel_shard_size": train.data_parallel_shard_size}
    if mode == "none":
        sizes["data_parallel_replicate_size"] = train.data_parallel_replicate_size
    for name, size in sizes.items():
        if size > 1:
            yield Conflict(
                (f"train.{name}", "train.data_parallel_mode"),
                f"data_parallel_mode {wanted}, so {name} cannot be {size}: set it to 1, or the mode to fsdp2",
            )


def _recomputation_fits_what_surrounds_it(config: Config) -> Iterator[Conflict]:
    train = config.train
    keeps_operations = train.enable_gradient_checkpointing and train.recompute_policy == "operation"
    if train.enable_activation_offload and keeps_operations and not train.enable_compile:
        yield Conflict(
            ("train.enable_activation_offload", "train.recompute_policy"),
            "torch keeps what recompute_policy: operation does not recompute where it cannot be offloaded: set "
            "enable_compile to true, recompute_policy to module, or enable_gradient_checkpointing to false",
        )
    for name in ("enable_activation_offload", "recompute_num_layers"):
        if getattr(train, name) and train.recompute_policy == "auto":
            yield Conflict(
                (f"train.{name}", "train.recompute_policy"),
                f"recompute_policy: auto decides on {name} as well: leave it out",
            )
    if train.enable_compile and train.enable_reentrant:
        yield Conflict(
            ("train.enable_reentrant", "train.enable_compile"),
            "the reentrant form of gradient checkpointing cannot be compiled: leave enable_reentrant at false",
        )


def _compiled_code_computes_what_is_asked(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.enable_compile and config.lora.lora_dropout and train.enable_gradient_checkpointing:
        yield Conflict(
            ("lora.lora_dropout", "train.enable_compile"),
            "torch cannot compile layers that are computed again and draw at random: set "
            "enable_gradient_checkpointing or enable_compile to false, or lora_dropout to 0",
        )


def _tensor_parallelism_splits_projections(config: Config) -> Iterator[Conflict]:
    if config.train.tensor_parallel_size > 1 and config.model.merge_qkv:
        yield Conflict(
            ("train.tensor_parallel_size", "model.merge_qkv"), "tensor parallelism needs model.merge_qkv: false"
        )


def _weights_in_fp8_are_read_by_products_alone(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.fp8 == "tensorwise" and train.data_parallel_mode == "fsdp2" and config.lora.use_dora:
        yield Conflict(
            ("lora.use_dora", "train.fp8"),
            "fsdp2 gathers the weights of fp8: tensorwise in fp8 alone, and use_dora takes their norms: set fp8 to "
            "rowwise, or data_parallel_mode to none or ddp",
        )


def _weights_in_fp8_are_on_the_device(config: Config) -> Iterator[Conflict]:
    if config.train.fp8 == "tensorwise" and config.train.enable_cpu_offload:
        yield Conflict(
            ("train.fp8", "train.enable_cpu_offload"),
            "tensorwise casts weights to fp8 where they are kept, and a CPU is too slow for that: use rowwise, which "
            "casts what was gathered, or leave enable_cpu_offload at false",
        )


def _rates_are_ordered(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.lr_decay_style != "constant" and train.lr_min > train.lr:
        yield Conflict(("train.lr_min", "train.lr"), f"lr_min is {train.lr_min:g}, above lr, which is {train.lr:g}")
    if train.lr_start > train.lr:
        yield Conflict(
            ("train.lr_start", "train.lr"), f"lr_start is {train.lr_start:g}, above lr, which is {train.lr:g}"
        )
    if train.lr_decay_style != "constant" and train.lr_warmup_ratio > train.lr_decay_ratio:
        yield Conflict(
            ("train.lr_decay_ratio", "train.lr_warmup_ratio"),
            f"lr_decay_ratio is {train.lr_decay_ratio:g}, so the decay would end before the warm-up does, at "
            f"lr_warmup_ratio {train.lr_warmup_ratio:g}",
        )


def _muon_has_a_schedule_to_follow(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.optimizer == "muon" and train.lr == 0:
        yield Conflict(
            ("train.lr", "train.optimizer"),
            "lr is 0, and under muon the learning rate of matrices is muon_lr times the schedule's share of lr: set lr "
            "above 0 (it is that of embeddings, norms and biases)",
        )


def _half_precision_is_computed_in(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.param_dtype == "bf16" and not train.enable_mixed_precision:
        yield Conflict(
            ("train.param_dtype", "train.enable_mixed_precision"),
            "param_dtype is bf16, and enable_mixed_precision: false computes in fp32, which bf16 parameters cannot "
            "hold: leave enable_mixed_precision at true, or param_dtype at fp32",
        )


def _determinism_may_block_launches(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.enable_full_determinism and not train.allow_cuda_launch_blocking:
        yield Conflict(
            ("train.enable_full_determinism", "train.allow_cuda_launch_blocking"),
            "enable_full_determinism needs allow_cuda_launch_blocking: true, since it is slow",
        )


def _the_profile_has_a_length(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.profile_end_step <= train.profile_start_step:
        yield Conflict(
            ("train.profile_end_step", "train.profile_start_step"),
            f"profile_end_step is {train.profile_end_step}; it has to come after profile_start_step, which is "
            f"{train.profile_start_step}",
        )


def _the_profile_begins_within_the_run(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.enable_profiling and train.max_steps is not None and train.profile_start_step > train.max_steps:
        yield Conflict(
            ("train.profile_start_step", "train.max_steps", "train.enable_profiling"),
            f"profile_start_step is {train.profile_start_step}, and max_steps ends the run at {train.max_steps}, so "
            "that nothing would be recorded: begin earlier, or set enable_profiling to false",
        )


# The checks of the model and its training, which local training and the service share.
MODEL_CHECKS: tuple[Callable[[Config], Iterator[Conflict]], ...] = (
    _model_is_named,
    _sharding_options_agree,
    _degrees_fit_the_mode,
    _recomputation_fits_what_surrounds_it,
    _tensor_parallelism_splits_projections,
    _compiled_code_computes_what_is_asked,
    _weights_in_fp8_are_read_by_products_alone,
    _weights_in_fp8_are_on_the_device,
    _half_precision_is_computed_in,
    *LORA_CHECKS,
)
CHECKS: tuple[Callable[[Config], Iterator[Conflict]], ...] = (
    _needs_are_met,
    *MODEL_CHECKS,
    *DATA_CHECKS,
    _rates_are_ordered,
    _muon_has_a_schedule_to_follow,
    _determinism_may_block_launches,
    _the_profile_has_a_length,
    _the_profile_begins_within_the_run,
    sweep_conflicts,
)


def check_world_size(config: Config, world_size: int) -> None:
    """Raises ValueError, beginning with an option, if this world size does not fit the parallel sizes."""
    train = config.train
    started = f"{world_size} process{'' if world_size == 1 else 'es'}"
    if train.data_parallel_mode == "none" and world_size > 1:
        raise ValueError(f"train.data_parallel_mode: none is one process, got {started}; set it to ddp or fsdp2")
    model_sizes = {
        "train.tensor_parallel_size": train.tensor_parallel_size,
        "train.pipeline_parallel_size": train.pipeline_parallel_size,
        "train.ulysses_parallel_size": train.ulysses_parallel_size,
        "train.ringattn_parallel_size": train.ringattn_parallel_size,
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
        wanted = f"a multiple of {fixed}" if is_open else f"{fixed}, or set a data-parallel size to -1 for the rest"
        raise ValueError(f"{next(iter(named))}: {started} cannot be arranged as {shown}: start {wanted}")
