"""From the model section of a configuration to a placed model with its weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from xorl.ckpt import (
    CheckpointError,
    CheckpointFailure,
    SafetensorsSource,
    WeightRecipe,
    WeightSource,
    load_weights,
    resolve_folder,
    source_shapes,
)
from xorl.config import LoraConfig, ModelConfig, TrainConfig
from xorl.core.mesh import Mesh
from xorl.core.models import Decoder, DecoderConfig, ModelSpec, spec_for
from xorl.core.nn import FusedKernel, choose_kernels
from xorl.core.parallel import ParallelModel, ParallelPolicy, Recompute, local_part, parallelize
from xorl.kernels.attention import AttentionRequest, resolve_attention
from xorl.kernels.quant import fp8_refusal
from xorl.lora import MODELOPT_FILE, adapters, init_adapters, num_parameters, quantized_rows, with_modelopt_file
from xorl.train.adapter_folder import AdapterFolder, check_name, check_shapes, load_adapter
from xorl.train.adapters import add_adapters, starting_adapter
from xorl.train.quantization import Quantization, base_targets, log_quantized, quantize_base, read_options

logger = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16})

# A model's folder without its weights.
CONFIG_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True)
class Architecture:
    """What is known of a model before any weight: its family, its shape and the Hugging Face configuration."""

    spec: ModelSpec
    config: DecoderConfig
    hf_config: Mapping[str, object]
    tokenizer_folder: Path | None

    def recipes(self, *, merge_qkv: bool) -> Mapping[str, WeightRecipe]:
        """How the parameters are named and laid out in Hugging Face's files."""
        return self.spec.recipes(self.config, merge_qkv=merge_qkv)


def read_architecture(config: ModelConfig) -> Architecture:
    """Find config.json by `model.config_path`, and put the entries of `model.foundation` in their places.

    Raises ValueError for a model that is not known, and for entries that change nothing.
    """
    path = config.config_path or config.model_path
    assert path is not None
    option = "model.config_path" if path != config.model_path else "model.model_path"
    folder = Path(path).parent if Path(path).is_file() else _folder(option, path, CONFIG_PATTERNS)
    file = Path(path) if Path(path).is_file() else folder / "config.json"
    tokenizer = folder
    if config.tokenizer_path not in (None, path):
        tokenizer = _folder("model.tokenizer_path", config.tokenizer_path, CONFIG_PATTERNS)
    architecture = _read_config(option, file, tokenizer)
    return _with_entries(architecture, config.foundation, file) if config.foundation else architecture


def architecture_at(option: str, path: str) -> Architecture:
    """That of the model whose folder or Hub id `option` gives. Raises ValueError for a model that is not known."""
    folder = _folder(option, path, CONFIG_PATTERNS)
    return _read_config(option, folder / "config.json", folder)


def _read_config(option: str, file: Path, tokenizer_folder: Path) -> Architecture:
    if not file.is_file():
        raise ValueError(f"{option}: {file.parent} holds no config.json")
    try:
        hf_config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: {file}:{error.lineno} is not JSON: {error.msg}") from error
    beside = file.parent / MODELOPT_FILE
    if beside.is_file():
        try:
            hf_config = with_modelopt_file(hf_config, json.loads(beside.read_text()))
        except ValueError as error:
            raise ValueError(f"{option}: {beside}: {error}") from error
    spec = spec_for(hf_config)
    return Architecture(spec, spec.config_from_hf(hf_config), hf_config, tokenizer_folder)


def _with_entries(architecture: Architecture, entries: Mapping[str, object], file: Path) -> Architecture:
    """The architecture of a config.json in which `entries` replace or join what `file` says."""
    hf_config = {**architecture.hf_config, **entries}
    try:
        spec = spec_for(hf_config)
        config = spec.config_from_hf(hf_config)
    except ValueError as error:
        raise ValueError(f"model.foundation: {error}") from error
    for name in entries.keys() - architecture.hf_config.keys():
        try:
            matters = spec.config_from_hf({key: value for key, value in hf_config.items() if key != name}) != config
        except ValueError:
            matters = True  # without it, it is no model
        if not matters:
            raise ValueError(
                f"model.foundation: {name} is no entry of {file}, and changes nothing that {spec.architecture} computes"
            )
    return replace(architecture, spec=spec, config=config, hf_config=hf_config)


def _folder(option: str, path: str, patterns: Sequence[str] | None = None) -> Path:
    """What `option` names, from here or from the Hub; where that fails, the message begins with the option."""
    try:
        return resolve_folder(path) if patterns is None else resolve_folder(path, patterns=patterns)
    except (CheckpointError, CheckpointFailure) as error:
        raise type(error)(f"{option}: {error}") from error


@dataclass(frozen=True)
class KeptDtypes:
    """What parameters are kept in: beside adapters, which are fp32, frozen ones may be in half precision."""

    trained: torch.dtype
    frozen: torch.dtype

    @classmethod
    def of(cls, train: TrainConfig, lora: LoraConfig) -> KeptDtypes:
        assert train.param_dtype is not None, "resolved by the configuration"
        own = DTYPES[train.param_dtype]
        return cls(torch.float32 if lora.enable_lora else own, own)


def build_model(
    architecture: Architecture,
    model: ModelConfig,
    train: TrainConfig,
    lora: LoraConfig,
    mesh: Mesh,
    device: torch.device,
    fill_: Callable[[nn.Module], None] | None = None,
) -> ParallelModel:
    """Build, place and fill the model; collective where it is placed on several ranks. `fill_` replaces its weights.

    Parameters come into being on the meta device and are placed before they have memory, so that no rank ever holds
    more than its part; `train.init_device` cpu or cuda fills them first, whole, on that device.
    """
    config = architecture.config
    compute_dtype = torch.bfloat16 if train.enable_mixed_precision else torch.float32
    request = AttentionRequest(
        device_type=device.type,
        dtype=compute_dtype,
        head_dim=config.head_dim,
        window=next((window for window in config.windows if window is not None), None),
    )
    try:
        attention = resolve_attention(model.attn_implementation, request)
    except RuntimeError as error:
        raise ValueError(f"model.attn_implementation: {error}") from error
    native: dict[FusedKernel, bool] = {
        "rms_norm": model.rmsnorm_native,
        "rope": model.rope_native,
        "swiglu": model.activation_native,
    }
    kernels = choose_kernels(
        attention,
        device_type=device.type,
        dtype=compute_dtype,
        compiled=train.enable_compile,
        native={name for name, is_native in native.items() if is_native},
        cast_bf16=model.attention_cast_bf16,
    )
    with torch.device("meta"):
        module = architecture.spec.build(config, merge_qkv=model.merge_qkv, kernels=kernels)
    start = starting_adapter(lora)
    if start is not None:
        _check_adapter(start, architecture, model)
    add_adapters(module, lora, architecture.spec.adapter_targets)
    quantization = read_options(lora, architecture.hf_config, device)
    dtypes = KeptDtypes.of(train, lora)
    module.compute_dtype = compute_dtype
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtypes.trained if parameter.requires_grad else dtypes.frozen)
    if quantization is not None:
        quantize_base(module, quantization)

    def fill(unfilled: nn.Module) -> None:
        assert unfilled is module
        if fill_ is None:
            _fill(module, architecture, model, train, start, quantization, device)
            log_quantized(module)
        else:
            fill_(module)

    if train.init_device == "cuda" and device.type != "cuda":
        raise ValueError("train.init_device: cuda, but torch finds no GPU here; use auto, meta or cpu")
    if train.init_device in ("cpu", "cuda"):
        module.to_empty(device=train.init_device)
        fill(module)
        module.to(device)
    return parallelize(module, mesh, _policy(model, train, compute_dtype, device), device=device, fill=fill)


def _check_adapter(start: AdapterFolder, architecture: Architecture, model: ModelConfig) -> None:
    """Raise ValueError where the adapter to go on from is for another base."""
    option = "model.config_path" if model.model_path is None else "model.model_path"
    recipes = architecture.recipes(merge_qkv=model.merge_qkv)
    check_shapes(start, option, str(model.model_path or model.config_path), source_shapes(recipes))
    if model.model_path is not None:
        check_name(start, option, model.model_path)


def _fill(
    module: Decoder,
    architecture: Architecture,
    model: ModelConfig,
    train: TrainConfig,
    start: AdapterFolder | None,
    quantization: Quantization | None,
    device: torch.device,
) -> None:
    """Give the parameters, sharded or whole, their first values.

    Those of the base are from `model.model_path`, or drawn by the seed; those of adapters from `start`, or drawn.
    """
    fill_base(module, architecture, model, train, quantization, device)
    if found := adapters(module):
        init_adapters(module, seed=train.seed)
        trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        logger.info("adapters=%d trained_parameters=%d", len(found), trained)
    if start is not None:
        load_adapter(module, start, architecture.recipes(merge_qkv=model.merge_qkv))
        logger.info("adapters_from=%s", start.folder)


def fill_base(
    module: Decoder,
    architecture: Architecture,
    model: ModelConfig,
    train: TrainConfig,
    quantization: Quantization | None,
    device: torch.device,
    source: WeightSource | None = None,
) -> None:
    """Give the base's parameters, sharded or whole, the values that they begin with, or those of `source`; collective.

    `source` has them under the names of transformers.
    """
    if model.model_path is None and source is None:
        targets = quantized_rows(module)
        module.init_weights(train.seed, local_part=local_part, device=device, targets=targets)
        logger.info("weights=random seed=%d parameters=%d", train.seed, num_parameters(module))
        return
    assert train.load_weights_mode in ("broadcast", "all_ranks"), "the other names are resolved or refused before"
    if source is None:
        assert model.model_path is not None
        files = SafetensorsSource(_folder("model.model_path", model.model_path))
        source = architecture.spec.checkpoint_view(architecture.config, files)
    recipes = architecture.recipes(merge_qkv=model.merge_qkv)
    report = load_weights(*base_targets(module, recipes, source, quantization), mode=train.load_weights_mode)
    logger.info("weights=%s mode=%s %s", model.model_path, train.load_weights_mode, report)


def _policy(model: ModelConfig, train: TrainConfig, compute_dtype: torch.dtype, device: torch.device) -> ParallelPolicy:
    for option in ("enable_cpu_offload", "enable_activation_offload"):
        if device.type == "cpu" and getattr(train, option):
            raise ValueError(
                f"train.{option}: the model trains on the CPU, so all is in host memory already; leave it at false"
            )
    if train.fp8 != "none":
        if (refusal := fp8_refusal(device)) is not None:
            raise ValueError(f"train.fp8: {train.fp8} cannot run here: {refusal}; use none")
        emulated = " emulated=true (slower than bf16: a CPU has no fp8)" if device.type == "cpu" else ""
        logger.info("fp8 recipe=%s device=%s%s", train.fp8, device, emulated)
    return ParallelPolicy(
        data_parallel_mode=train.data_parallel_mode,
        fp8=train.fp8,
        param_dtype=compute_dtype,
        reshard_after_forward=train.enable_full_shard,
        forward_prefetch=train.enable_forward_prefetch,
        unit_modules=model.basic_modules,
        cpu_offload=train.enable_cpu_offload,
        recompute=_recompute(train),
        reentrant_recompute=train.enable_reentrant,
        compile_backend="inductor" if train.enable_compile else None,
        activation_offload_limit=train.activation_gpu_limit * 1e9 if train.enable_activation_offload else None,
    )


def _recompute(train: TrainConfig) -> Recompute:
    if not train.enable_gradient_checkpointing:
        return "none"
    assert train.recompute_policy != "auto", "decided before the model is built"
    if train.recompute_policy == "operation":
        return "operation"
    return "layer" if train.recompute_modules is None else tuple(train.recompute_modules)
