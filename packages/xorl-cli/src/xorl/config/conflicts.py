"""Checks across options: conflicts, and parallel sizes that must fit the world size.

Each check yields the conflicts in a configuration whose values are all valid by themselves. Defaults never conflict.
"""

import math
from collections.abc import Callable, Iterator

from xorl.config.data_conflicts import DATA_CHECKS
from xorl.config.local import Config
from xorl.config.lora_conflicts import LORA_CHECKS, sweep_conflicts
from xorl.config.preference import preference_conflicts
from xorl.config.problems import Conflict
from xorl.config.requirements import local_default, unmet_requirements


def conflicts_in(config: Config) -> Iterator[Conflict]:
    """Yields every conflict of a configuration whose options without effect are at their defaults."""
    yield from unmet_requirements(config, local_default)
    for check in CHECKS:
        yield from check(config)


def _model_has_a_source(config: Config) -> Iterator[Conflict]:
    if config.model.model_path is None and config.model.config_path is None:
        yield Conflict(
            ("model.model_path", "model.config_path"),
            "both are null: set model_path to start from weights, or config_path to start from random weights",
        )


def _encoders_are_complete(config: Config) -> Iterator[Conflict]:
    encoder = config.model.encoders.get("image")
    if encoder is None:
        return
    if encoder.model_path is None and encoder.config_path is None:
        yield Conflict(
            ("model.encoders",),
            "model_path and config_path of image are both null: set model_path to start from weights, or config_path "
            "to start from random weights",
        )
    if config.lora.has_adapters:
        yield Conflict(
            ("model.encoders", "lora.enable_lora"),
            "adapters need a base in one folder, and the projector of a composition is new: train the projector first, "
            "with train.freeze_decoder: true, then set model.model_path to the exported folder and encoders to {}",
        )
    if config.train.load_weights_mode == "dcp":
        yield Conflict(
            ("model.encoders", "train.load_weights_mode"),
            "the checkpoint in model.model_path already has its encoder: leave encoders at {}",
        )


def _sharding_options_agree(config: Config) -> Iterator[Conflict]:
    train = config.train
    # If only one of the two is set, it determines the other.
    is_full_shard_set = "enable_full_shard" in train.model_fields_set
    if is_full_shard_set and train.reshard_after_forward not in (None, train.enable_full_shard):
        yield Conflict(
            ("train.reshard_after_forward", "train.enable_full_shard"),
            f"reshard_after_forward contradicts enable_full_shard, which is {str(train.enable_full_shard).lower()}: "
            "remove one of the two",
        )


def _corrections_are_trained(config: Config) -> Iterator[Conflict]:
    rate = "train.router_correction_rate"
    if config.train.router_correction_rate and config.train.freeze_router:
        yield Conflict(
            (rate, "train.freeze_router"), "freeze_router keeps routers as they are: set one of the two alone"
        )
    if config.train.router_correction_rate and config.lora.has_adapters:
        yield Conflict((rate, "lora.enable_lora"), "adapters leave the base as it is, and corrections belong to it")


def _rates_of_encoders_have_a_scale(config: Config) -> Iterator[Conflict]:
    train = config.train
    for name in ("encoder_lr", "projector_lr"):
        if getattr(train, name) and not train.lr:
            yield Conflict(
                (f"train.{name}", "train.lr"),
                f"{name} follows the schedule of lr, which is 0: set lr above 0, and freeze_decoder to true to "
                "train the encoder alone",
            )


def _degrees_fit_the_mode(config: Config) -> Iterator[Conflict]:
    train = config.train
    mode = train.data_parallel_mode
    if mode == "fsdp2":
        return
    meaning = {"none": "none does not divide rows or parameters", "ddp": "ddp does not shard"}[mode]
    sizes = {"data_parallel_shard_size": train.data_parallel_shard_size}
    if mode == "none":
        sizes["expert_parallel_size"] = train.expert_parallel_size
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


def _expert_parallelism_is_compatible(config: Config) -> Iterator[Conflict]:
    train, dispatch = config.train, config.model.ep_dispatch
    if train.expert_parallel_size == 1 or dispatch in ("auto", "allgather"):
        return
    if train.enable_compile:
        yield Conflict(
            ("train.enable_compile", "model.ep_dispatch"),
            f"with {dispatch}, how many tokens a rank gets is known only while a layer runs, so layers cannot be "
            "compiled: set enable_compile to false, or ep_dispatch to allgather",
        )
    if train.enable_gradient_checkpointing and train.recompute_policy == "auto":
        yield Conflict(
            ("train.recompute_policy", "model.ep_dispatch"),
            f"auto measures the layers on one GPU, but {dispatch} needs the others: set it to module or operation, or "
            "ep_dispatch to allgather",
        )


def _tensor_parallelism_is_compatible(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.tensor_parallel_size == 1:
        return
    size = "train.tensor_parallel_size"
    for option in ("use_dora", "sweep"):
        if getattr(config.lora, option):
            yield Conflict((size, f"lora.{option}"), f"ranks cannot share matrices with {option} yet: use fsdp2 alone")
    if train.enable_gradient_checkpointing and train.recompute_policy == "auto":
        yield Conflict(
            (size, "train.recompute_policy"),
            "auto measures the layers on one GPU, but they need the others: set it to module or operation",
        )


def _pipeline_parallelism_is_compatible(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.pipeline_parallel_size == 1:
        return
    size = "train.pipeline_parallel_size"
    if train.data_parallel_mode == "ddp":
        yield Conflict(
            (size, "train.data_parallel_mode"),
            "ddp reduces gradients after one backward pass, not after those of a pipeline: set it to fsdp2, and "
            "data_parallel_shard_size to 1 for replicas alone",
        )
    if train.enable_activation_offload:
        yield Conflict(
            (size, "train.enable_activation_offload"),
            "offloading needs each backward pass right after its forward pass: set it to false",
        )
    if train.enable_gradient_checkpointing and train.recompute_policy == "auto":
        yield Conflict(
            (size, "train.recompute_policy"),
            "auto does not know how many micro-batches are in flight: set it to module or operation",
        )
    if config.lora.sweep:
        yield Conflict((size, "lora.sweep"), "a sweep cannot be trained in stages yet: use fsdp2 alone")


def _fp8_is_compatible(config: Config) -> Iterator[Conflict]:
    train = config.train
    if train.fp8 == "tensorwise" and train.data_parallel_mode == "fsdp2" and config.lora.use_dora:
        yield Conflict(
            ("lora.use_dora", "train.fp8"),
            "with fp8: tensorwise, fsdp2 gathers weights only in fp8, but use_dora needs their norms: set fp8 to "
            "rowwise, or data_parallel_mode to none or ddp",
        )
    if train.fp8 != "none" and config.model.moe_implementation is not None:
        yield Conflict(
            ("model.moe_implementation", "train.fp8"),
            "there is only one fp8 kernel for experts: leave moe_implementation out, or set fp8 to none",
        )
    if train.fp8 == "tensorwise" and train.enable_cpu_offload:
        yield Conflict(
            ("train.fp8", "train.enable_cpu_offload"),
            "tensorwise casts weights to fp8 where they are stored, which is too slow on a CPU: use rowwise, which "
            "casts the gathered weights, or set enable_cpu_offload to false",
        )


def _learning_rates_are_valid(config: Config) -> Iterator[Conflict]:
    train = config.train
    if "lr_min" in train.model_fields_set and train.lr_decay_style != "constant" and train.lr_min > train.lr:
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
    if "profile_end_step" in train.model_fields_set and train.profile_end_step <= train.profile_start_step:
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
    _expert_parallelism_is_compatible,
    _tensor_parallelism_is_compatible,
    _pipeline_parallelism_is_compatible,
    _fp8_is_compatible,
    _bf16_parameters_need_mixed_precision,
    *LORA_CHECKS,
)
CHECKS: tuple[Callable[[Config], Iterator[Conflict]], ...] = (
    *MODEL_CHECKS,
    *DATA_CHECKS,
    _corrections_are_trained,
    _encoders_are_complete,
    _rates_of_encoders_have_a_scale,
    _learning_rates_are_valid,
    _determinism_needs_launch_blocking,
    _profile_covers_steps,
    preference_conflicts,
    sweep_conflicts,
)


def check_world_size(config: Config, world_size: int) -> None:
    """Raises ValueError, starting with an option's path, if the world size does not fit the parallel sizes."""
    train = config.train
    started = f"{world_size} process{'' if world_size == 1 else 'es'}"
    model_sizes = {f"train.{name}": size for name, size in train.model_parallel_sizes.items()}
    size = math.prod(model_sizes.values())
    if train.data_parallel_mode == "none" and world_size != size:
        named = " x ".join(name for name, each in model_sizes.items() if each > 1)
        number = "a single process" if size == 1 else f"{size} processes, as many as {named}"
        raise ValueError(f"train.data_parallel_mode: none uses {number}, got {started}; set it to ddp or fsdp2")
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
