"""Builds a model from the model section of a configuration: architecture, placement on the ranks, and weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn

from xorl.ckpt import CheckpointError, SafetensorsSource, WeightSource, load_weights
from xorl.ckpt.reader import source_shapes
from xorl.config import Config
from xorl.config.local import LoraConfig, ModelConfig, TrainConfig
from xorl.core.mesh import Mesh
from xorl.core.models import Decoder, DecoderConfig
from xorl.core.models.router_losses import RouterLossOptions
from xorl.core.models.stages import Stage, stages_of
from xorl.core.nn import LayerKernels
from xorl.core.nn.moe import Router
from xorl.core.nn.roles import IN_FP32
from xorl.core.parallel import ParallelModel, ParallelPolicy, parallelize
from xorl.core.parallel.activations import Recompute
from xorl.core.parallel.apply import check_parallelizable
from xorl.kernels.quant.fp8 import fp8_refusal
from xorl.lora import adapters, init_adapters
from xorl.lora.quantized import num_parameters, quantized_rows
from xorl.train.adapters.folder import AdapterFolder, check_name, check_shapes, load_adapter
from xorl.train.adapters.inject import add_adapters, starting_adapter
from xorl.train.architecture import Architecture, folder_of
from xorl.train.base_weights import require_weights
from xorl.train.compose import composed_weights
from xorl.train.images import check_image_model, check_projectors_frozen, freeze_parts_
from xorl.train.layer_kernels import (
    check_dispatch,
    check_kernels,
    choose_layer_kernels,
    compute_dtype,
    require_dispatch,
)
from xorl.train.model_source import MODEL_PATH, starting_checkpoint
from xorl.train.parallel_sizes import check_experts, check_shared_matrices, check_stages, chunks_of
from xorl.train.quantization import (
    Quantization,
    base_targets,
    log_quantized,
    quantize_base,
    read_options,
    require_device,
)

logger = logging.getLogger(__name__)

# Options that only a mixture of experts has.
EXPERT_OPTIONS = (
    "model.moe_implementation",
    "model.router_fp32",
    "train.router_aux_loss_coef",
    "train.router_z_loss_coef",
    "train.router_correction_rate",
    "train.freeze_router",
    "train.moe_checkpoint_method",
    "train.expert_parallel_size",
)
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16})


@dataclass(frozen=True)
class KeptDtypes:
    """The dtypes in which parameters are stored: adapters are fp32, the frozen base may be in half precision."""

    trained: torch.dtype
    frozen: torch.dtype

    @classmethod
    def of(cls, train: TrainConfig, lora: LoraConfig) -> KeptDtypes:
        assert train.param_dtype is not None, "resolved by the configuration"
        dtype = DTYPES[train.param_dtype]
        return cls(torch.float32 if lora.enable_lora else dtype, dtype)


def stage_of(config: Config, architecture: Architecture, mesh: Mesh) -> Stage | None:
    """The part of the model that this rank of a pipeline has; None without a pipeline."""
    return pipeline_stages(config, architecture)[mesh.stage] if mesh.dims.pp > 1 else None


def pipeline_stages(config: Config, architecture: Architecture) -> list[Stage]:
    """The stages of the pipeline."""
    train, length = config.train, config.data.sample_packing_sequence_len
    return stages_of(architecture.config, train.pipeline_parallel_size, length, chunks_of(train))


def build_model(
    architecture: Architecture,
    model: ModelConfig,
    train: TrainConfig,
    lora: LoraConfig,
    mesh: Mesh,
    device: torch.device,
    fill_: Callable[[nn.Module], None] | None = None,
    *,
    stage: Stage | None = None,
    alone: bool = False,
) -> ParallelModel:
    """Build and parallelize the model and load its weights; collective if it is placed on several ranks.

    `fill_` sets the weights instead of loading them. `stage` is what a rank of a pipeline has; None: all. `alone`: each
    rank computes without the others, for a measurement, as if ranks that share its experts had the same tokens.
    Parameters are created on the meta device and sharded before they get memory, so no rank ever holds more than its
    part. With `train.init_device` cpu or cuda, each rank first fills the whole model on that device.
    """
    assert train.recompute_policy != "auto" or not train.enable_gradient_checkpointing, (
        "replaced by choose_recomputation"
    )
    _require_device(train, device)
    if train.fp8 != "none":
        emulated = " emulated=true (slower than bf16: a CPU has no fp8)" if device.type == "cpu" else ""
        logger.debug("fp8 recipe=%s device=%s%s", train.fp8, device, emulated)
    require_dispatch(architecture.config, model, train, device)
    kernels = choose_layer_kernels(architecture.config, model, train, device, mesh, alone=alone)
    with torch.device("meta"):
        module = architecture.spec.build(architecture.config, merge_qkv=model.merge_qkv, kernels=kernels)
    start, quantization = _adapt_(module, architecture, model, train, lora)
    if quantization is not None:
        require_device(quantization, device)
    if stage is not None:
        module.keep(stage)

    def fill(unfilled: nn.Module) -> None:
        assert unfilled is module
        if fill_ is None:
            _fill(module, architecture, model, train, start, quantization, device)
        else:
            fill_(module)

    is_filled = train.init_device in ("cpu", "cuda")
    if is_filled:
        module.to_empty(device=train.init_device)
        fill(module)
        module.to(device)
    policy, later = parallel_policy(model, train), None if is_filled else fill
    parallel = parallelize(module, mesh, policy, device=device, fill=later, alone=alone)
    if stage is None:
        return parallel
    return replace(parallel, sketch=_sketch(architecture, model, train, lora, LayerKernels()))


def check_model(
    architecture: Architecture, model: ModelConfig, train: TrainConfig, lora: LoraConfig, device: torch.device
) -> Decoder:
    """Build `sketch_model` and check everything about a run on `device` that needs no weights.

    Raises the errors that `build_model` would raise later. It allocates nothing on the device and imports no kernels,
    since the data is prepared afterwards by processes that fork.
    """
    sketch = sketch_model(architecture, model, train, lora)
    check_ranks(sketch, model, train, device.type)
    if (start := starting_adapter(lora, architecture.spec)) is not None:
        require_weights(start, MODEL_PATH, model.model_path, train.load_weights_mode)
    _require_device(train, device)
    if (quantization := read_options(lora, architecture.hf_config)) is not None:
        require_device(quantization, device)
    check_kernels(architecture.config, model, train, device)
    require_dispatch(architecture.config, model, train, device)
    return sketch


def check_ranks(sketch: Decoder, model: ModelConfig, train: TrainConfig, device_type: str) -> None:
    """Raise ValueError, naming the option, if ranks cannot share the model of which `sketch` is a sketch."""
    check_dispatch(sketch.config, model, train)
    check_parallelizable(sketch, parallel_policy(model, train), device_type)


def sketch_model(
    architecture: Architecture,
    model: ModelConfig,
    train: TrainConfig,
    lora: LoraConfig,
    *,
    kernels: LayerKernels | None = None,
) -> Decoder:
    """The model that `build_model` would build, but on the meta device and with plain kernels, unless others are given.

    It is whole or, if ranks share matrices or experts by `kernels`, what the first of them has.

    Its shapes are enough to check adapters, quantised weights and layer counts before data is prepared; ValueError
    names the option that does not fit the model.
    """
    check_options(architecture.config, model, train, lora)
    return _sketch(architecture, model, train, lora, kernels or LayerKernels())


def check_options(config: DecoderConfig, model: ModelConfig, train: TrainConfig, lora: LoraConfig) -> None:
    """Raise ValueError for options that do not fit the model's shape, as far as that shows without building it."""
    sections = {"model": model, "train": train}
    options: dict[str, tuple[object, object]] = {}
    for path in EXPERT_OPTIONS:
        section, name = path.split(".")
        options[path] = getattr(sections[section], name), type(sections[section]).model_fields[name].default
    check_experts(config, train, options)
    check_image_model(config, train, lora)
    check_shared_matrices(config, train)
    check_stages(config, train)
    num_layers = config.num_layers
    if train.recompute_num_layers is not None and train.recompute_num_layers > num_layers:
        raise ValueError(
            f"train.recompute_num_layers: {train.recompute_num_layers} exceeds the {num_layers} layers of the model; "
            "use fewer, or leave it out for all"
        )


def _sketch(
    architecture: Architecture, model: ModelConfig, train: TrainConfig, lora: LoraConfig, kernels: LayerKernels
) -> Decoder:
    with torch.device("meta"):
        module = architecture.spec.build(architecture.config, merge_qkv=model.merge_qkv, kernels=kernels)
    _adapt_(module, architecture, model, train, lora)
    return module


def _adapt_(
    module: Decoder, architecture: Architecture, model: ModelConfig, train: TrainConfig, lora: LoraConfig
) -> tuple[AdapterFolder | None, Quantization | None]:
    """Set what a model on the meta device computes in, add adapters, set its dtypes and quantise its base.

    Returns the adapter to start from and the quantisation of the base; either may be None.
    """
    module.compute_dtype = compute_dtype(train)
    module.logits = module.logits._replace(fp32=model.lm_head_fp32, whole=train.ce_mode == "eager")
    _set_routers_(module, model, train)
    start = starting_adapter(lora, architecture.spec)
    if start is not None:
        _check_adapter(start, architecture, model)
    freeze_parts_(module, train, lora, has_images=architecture.images is not None)
    add_adapters(module, lora, architecture.spec)
    if train.freeze_router:
        _check_routers_frozen(module)
    check_projectors_frozen(module, train)
    quantization = read_options(lora, architecture.hf_config)
    dtypes, roles = KeptDtypes.of(train, lora), module.parameter_roles()
    for name, parameter in module.named_parameters():
        if roles[name] in IN_FP32:
            continue
        parameter.data = parameter.data.to(dtypes.trained if parameter.requires_grad else dtypes.frozen)
    if quantization is not None:
        quantize_base(module, quantization)
    return start, quantization


def _set_routers_(module: Decoder, model: ModelConfig, train: TrainConfig) -> None:
    """Apply the options of routers."""
    if module.routers is None:
        return
    balance_coef = train.router_aux_loss_coef
    if balance_coef is None:
        balance_coef = module.config.balance_coef
    module.routers.options = RouterLossOptions(balance_coef, train.router_z_loss_coef, train.router_correction_rate)
    for router in module.modules():
        if isinstance(router, Router):
            router.fp32 = model.router_fp32
            router.requires_grad_(not train.freeze_router)


def _check_routers_frozen(module: Decoder) -> None:
    for path, router in module.named_modules():
        if isinstance(router, Router) and any(parameter.requires_grad for parameter in router.parameters()):
            raise ValueError(
                f"lora.modules_to_save: names the router {path}, which train.freeze_router: true keeps as it is; leave "
                "it out, or set train.freeze_router to false"
            )


def _check_adapter(start: AdapterFolder, architecture: Architecture, model: ModelConfig) -> None:
    """Raise ValueError if the adapter to start from was made for another base."""
    option = "model.config_path" if model.model_path is None else MODEL_PATH
    recipes = architecture.recipes(merge_qkv=model.merge_qkv)
    shown = f"{model.model_path or model.config_path}, which {option} names"
    check_shapes(start, shown, source_shapes(recipes), tied=architecture.config.tie_word_embeddings)
    check_name(start, MODEL_PATH, model.model_path)


def _fill(
    module: Decoder,
    architecture: Architecture,
    model: ModelConfig,
    train: TrainConfig,
    start: AdapterFolder | None,
    quantization: Quantization | None,
    device: torch.device,
) -> None:
    """Initialise the parameters, sharded or whole.

    The base is loaded from `model.model_path`, or drawn from the seed; adapters are loaded from `start`, or drawn.
    """
    fill_base(module, architecture, model, train, quantization, device)
    if found := adapters(module):
        init_adapters(module, seed=train.seed)
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        logger.debug("adapters=%d trained_parameters=%d", len(found), trained)
    if start is not None:
        load_adapter(module, start, architecture.recipes(merge_qkv=model.merge_qkv))
        logger.debug("adapters_from=%s", start.folder)


def fill_base(
    module: Decoder,
    architecture: Architecture,
    model: ModelConfig,
    train: TrainConfig,
    quantization: Quantization | None,
    device: torch.device,
    source: WeightSource | None = None,
) -> None:
    """Initialise the parameters of the base, sharded or whole. Collective.

    `source`, with the weight names of transformers, replaces `model.model_path`.
    """
    if model.model_path is None and source is None and architecture.encoder is None:
        targets = quantized_rows(module)
        module.init_weights(train.seed, device=device, targets=targets)
        logger.debug("weights=random seed=%d parameters=%d", train.seed, num_parameters(module))
        log_quantized(module, None if quantization is None else quantization.from_plain_weights())
        return
    assert train.load_weights_mode not in ("auto", "safetensors"), "resolved by the configuration"
    option = f"{MODEL_PATH}: " if source is None else ""
    recipes, drawn = architecture.recipes(merge_qkv=model.merge_qkv), frozenset[str]()
    if source is None and train.load_weights_mode == "dcp":
        source = starting_checkpoint(model).weights()
    if source is not None:  # a checkpoint of xorl, whatever the config.json says of the original
        quantization = None if quantization is None else quantization.from_plain_weights()
    elif architecture.encoder is not None:
        source, names = composed_weights(architecture, model.model_path, recipes)
        drawn, option = frozenset(names), f"{MODEL_PATH} or model.encoders: "
        module.init_weights(train.seed, device=device, only=drawn)
        if len(drawn) == len(recipes):
            return
    else:
        assert model.model_path is not None
        folder = folder_of(MODEL_PATH, model.model_path)
        try:
            source = architecture.spec.checkpoint_view(architecture.config, SafetensorsSource(folder))
        except ValueError as error:
            raise ValueError(f"{MODEL_PATH}: {error}") from error
    # The parameters of a checkpoint can only be read whole, so one rank reads and broadcasts them.
    mode = "broadcast" if train.load_weights_mode == "dcp" else train.load_weights_mode
    try:
        targets, recipes, source = base_targets(module, recipes, source, quantization)
        targets = {name: target for name, target in targets.items() if name not in drawn}
        recipes = {name: recipe for name, recipe in recipes.items() if name not in drawn}
        report = load_weights(targets, recipes, source, mode=mode)
    except CheckpointError as error:
        raise CheckpointError(f"{option}{error}") from error
    logger.debug("weights=%s mode=%s %s", model.model_path, train.load_weights_mode, report)
    log_quantized(module, quantization)


def _require_device(train: TrainConfig, device: torch.device) -> None:
    """Raise ValueError for options that `device` does not support."""
    if train.init_device == "cuda" and device.type != "cuda":
        raise ValueError("train.init_device: cuda, but torch finds no GPU here; use auto, meta or cpu")
    for option in ("enable_cpu_offload", "enable_activation_offload"):
        if device.type == "cpu" and getattr(train, option):
            raise ValueError(
                f"train.{option}: the model trains on the CPU, so everything is in host memory already; set it to false"
            )
    if train.enable_cuda_graphs and device.type != "cuda":
        raise ValueError("train.enable_cuda_graphs: the model trains on the CPU; set it to false")
    if train.fp8 != "none" and (refusal := fp8_refusal(device)) is not None:
        raise ValueError(f"train.fp8: {train.fp8} cannot run here: {refusal}; use none")


def parallel_policy(model: ModelConfig, train: TrainConfig) -> ParallelPolicy:
    """How the options place and change a model."""
    return ParallelPolicy(
        data_parallel_mode=train.data_parallel_mode,
        fp8=train.fp8,
        param_dtype=compute_dtype(train),
        reshard_after_forward=train.enable_full_shard,
        forward_prefetch=train.enable_forward_prefetch,
        collectives=train.fsdp_collectives,
        unit_modules=model.basic_modules,
        cpu_offload=train.enable_cpu_offload,
        recompute=_recompute(train),
        recompute_experts=train.enable_gradient_checkpointing and train.moe_checkpoint_method == "moe_act",
        recompute_num_layers=train.recompute_num_layers,
        reentrant_recompute=train.enable_reentrant,
        compile_backend="inductor" if train.enable_compile else None,
        activation_offload_limit=train.activation_gpu_limit * 1e9 if train.enable_activation_offload else None,
        cuda_graphs=train.enable_cuda_graphs,
    )


def _recompute(train: TrainConfig) -> Recompute:
    if not train.enable_gradient_checkpointing or train.recompute_policy == "auto":
        return "none"  # auto is resolved before the model is built; until then, checks assume no recomputation
    if train.recompute_policy == "operation":
        return "operation"
    if train.recompute_modules is not None:
        return tuple(train.recompute_modules)
    return "layer" if train.moe_checkpoint_method is None else "none"
