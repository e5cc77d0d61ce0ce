"""Chooses the functions that the layers of a model compute with, from the options of a configuration."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial
from typing import Any, NoReturn

import torch

from xorl.config.local import ModelConfig, TrainConfig
from xorl.core.mesh import Axis, Mesh
from xorl.core.models import DecoderConfig
from xorl.core.models.decoder_config import ExpertsConfig
from xorl.core.nn import LayerKernels
from xorl.core.nn.all_gather import AllGather, sent_share
from xorl.core.nn.deepep import DeepEP, deepep_refusal
from xorl.core.nn.dispatch import AllToAll, Dispatcher
from xorl.core.nn.kernels import FusedKernel, choose_kernels
from xorl.core.nn.tensor import TensorRanks
from xorl.kernels.attention import ATTENTION, AttentionFn, AttentionRequest, PackedAttention, resolve_attention
from xorl.kernels.attention.sdpa import sdpa_attention
from xorl.kernels.experts import EXPERTS, ExpertsRequest, grouped
from xorl.kernels.layout import RankGroup
from xorl.kernels.recurrent import PLAIN_RECURRENCE, RECURRENCES, RecurrenceFns, resolve_recurrence
from xorl.kernels.registry import AUTO

logger = logging.getLogger(__name__)

# From this share of the pairs of a token and a rank on, sending all of them costs less than waiting for their number
# in every layer: at most twice as much is sent.
GATHERED_SHARE = 0.5

# Option names for error messages.
ATTENTION_OPTION = "model.attn_implementation"
EXPERTS_OPTION = "model.moe_implementation"
RECURRENCE_OPTION = "model.recurrence_implementation"


def choose_layer_kernels(
    config: DecoderConfig, model: ModelConfig, train: TrainConfig, device: torch.device, mesh: Mesh, *, alone: bool
) -> LayerKernels:
    """The functions that a model's layers compute with on `device`. Collective with deepep.

    alone: for a measurement in which each rank computes without the others.
    """
    attention = _attention_by_layer(config, model, train, device)
    experts = grouped.experts
    if config.has_experts and train.fp8 == "none":  # parallelize() sets those in fp8
        try:
            experts = EXPERTS.resolve(model.moe_implementation or AUTO, _experts_request(config, train, device))
        except RuntimeError as error:
            raise ValueError(f"{EXPERTS_OPTION}: {error}") from error
    kernels = _choose(model, train, device.type, next(iter(attention.values()), sdpa_attention))
    kernels = replace(
        kernels,
        experts=experts,
        recurrence=_recurrence(config, model, train, device),
        dispatcher=None if mesh.ep is None else _dispatcher(mesh.ep, config, model, alone=alone),
        tensor=TensorRanks(mesh.tp.ranks),
        attention_by_layer=attention,
    )
    if config.images is None:
        return kernels
    # The fastest that can compute the heads of the image encoder, which differ from those that users choose for.
    request = AttentionRequest(device.type, compute_dtype(train), config.images.head_dim, None, causal=False)
    return replace(kernels, image_attention=resolve_attention(AUTO, request))


def planned_layer_kernels(model: ModelConfig, train: TrainConfig, *, tp: int, ep: int) -> LayerKernels:
    """The kernels whose operators a model's layers would call on a GPU, for passes on the meta device.

    tp, ep: the numbers of ranks that share each matrix and the experts.
    """
    shared, attention = shared_kernels(tp=tp, ep=ep), planned_attention()
    # As all that a GPU has for experts, so that these are one operator together with their exchange.
    experts = partial(grouped.experts, products="native")
    kernels = replace(_choose(model, train, "cuda", attention), image_attention=attention, experts=experts)
    return replace(kernels, dispatcher=shared.dispatcher, tensor=shared.tensor)


def shared_kernels(*, tp: int, ep: int) -> LayerKernels:
    """Plain kernels with which a model has the first rank's part of matrices and experts that ranks share."""
    dispatcher = AllGather(RankGroup(0, ep, "ep")) if ep > 1 else None
    return LayerKernels(dispatcher=dispatcher, tensor=TensorRanks(RankGroup(0, tp, "tp")))


@cache
def planned_attention() -> PackedAttention:
    """Attention on the meta device, which computes nothing. Its operators have the shapes of those of any kernel."""

    def nothing(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a planned pass computes nothing")

    return PackedAttention("planned", nothing, nothing, caps_scores=True, takes_any_values=True)


def _choose(model: ModelConfig, train: TrainConfig, device_type: str, attention: AttentionFn) -> LayerKernels:
    native: dict[FusedKernel, bool] = {
        "rms_norm": model.rmsnorm_native,
        "rope": model.rope_native,
        "swiglu": model.activation_native,
    }
    return choose_kernels(
        attention,
        device_type=device_type,
        dtype=compute_dtype(train),
        compiled=train.enable_compile,
        native={name for name, is_native in native.items() if is_native},
        cast_bf16=model.attention_cast_bf16,
    )


def _attention_by_layer(
    config: DecoderConfig, model: ModelConfig, train: TrainConfig, device: torch.device
) -> dict[int, AttentionFn]:
    requests = config.attention_requests(device.type, compute_dtype(train))
    try:
        return {index: resolve_attention(model.attn_implementation, each) for index, each in requests.items()}
    except RuntimeError as error:
        raise ValueError(f"{ATTENTION_OPTION}: {error}") from error


def _recurrence(config: DecoderConfig, model: ModelConfig, train: TrainConfig, device: torch.device) -> RecurrenceFns:
    """The functions of all layers with a recurrence, whose heads have the same sizes."""
    functions = PLAIN_RECURRENCE
    try:
        for request in config.recurrence_requests(device.type, compute_dtype(train)):
            functions = resolve_recurrence(model.recurrence_implementation, request)
    except RuntimeError as error:
        raise ValueError(f"{RECURRENCE_OPTION}: {error}") from error
    return functions


def _dispatcher(axis: Axis, config: DecoderConfig, model: ModelConfig, *, alone: bool) -> Dispatcher[Any]:
    """Collective with deepep. alone: as for `choose_layer_kernels`."""
    name = dispatch_name(config, model, axis.size)
    if model.ep_dispatch == "auto" and not alone:
        share = sent_share(axis.size, num_active(config))
        logger.debug("ep_dispatch=auto chosen=%s pairs_sent=%.2f ranks=%d", name, share, axis.size)
    if name == "allgather":
        return AllGather(axis.ranks, alone=alone)
    assert not alone, "other exchanges need other ranks"
    if name == "alltoall":
        return AllToAll(axis.ranks)
    return DeepEP(
        axis,
        width=config.hidden_size,
        buffer_bytes=round(model.deepep_buffer_size_gb * 1e9),
        num_sms=model.deepep_num_sms,
        async_combine=model.deepep_async_combine,
    )


def dispatch_name(config: DecoderConfig, model: ModelConfig, num_ranks: int) -> str:
    """`model.ep_dispatch`, with auto replaced by the choice for `num_ranks` that share the experts."""
    if model.ep_dispatch != "auto":
        return model.ep_dispatch
    return "allgather" if sent_share(num_ranks, num_active(config)) >= GATHERED_SHARE else "alltoall"


def num_active(config: DecoderConfig) -> int:
    """The fewest experts of a layer that a token is sent to."""
    return min(layer.ffn.num_active for layer in config.layers if isinstance(layer.ffn, ExpertsConfig))


def require_dispatch(config: DecoderConfig, model: ModelConfig, train: TrainConfig, device: torch.device) -> None:
    """Raise ValueError if tokens cannot be sent to experts on this device in the way that is configured."""
    check_dispatch(config, model, train)
    if train.expert_parallel_size == 1 or model.ep_dispatch != "deepep":
        return
    if (refusal := deepep_refusal(device.type, compute_dtype(train))) is not None:
        raise ValueError(f"model.ep_dispatch: deepep cannot run here: {refusal}; or use auto")


def check_dispatch(config: DecoderConfig, model: ModelConfig, train: TrainConfig) -> None:
    """Raise ValueError for options that need another way of sending tokens to experts than the configured one."""
    num_ranks = train.expert_parallel_size
    if num_ranks == 1:
        return
    if model.ep_dispatch == "auto" and dispatch_name(config, model, num_ranks) == "alltoall":
        option = None
        if train.enable_compile:
            option = "train.enable_compile: true"
        elif train.enable_gradient_checkpointing and train.recompute_policy == "auto":
            option = "train.recompute_policy: auto"
        if option is not None:
            raise ValueError(
                f"{option}, but with {num_ranks} ranks and {num_active(config)} active experts model.ep_dispatch: "
                "auto chooses alltoall, which does not support it; change it, or set ep_dispatch to allgather"
            )


def check_kernels(config: DecoderConfig, model: ModelConfig, train: TrainConfig, device: torch.device) -> None:
    """Raise the errors of `choose_layer_kernels` that can be found without importing kernels."""
    if model.recurrence_implementation != AUTO and not config.recurrences:
        raise ValueError(
            f"{RECURRENCE_OPTION}: {model.recurrence_implementation}, but the model has no layers with a recurrence; "
            "leave it at auto"
        )
    option = ATTENTION_OPTION
    try:
        for request in attention_requests(config, train, device):
            ATTENTION.check(model.attn_implementation, request)
        option = RECURRENCE_OPTION
        for request in config.recurrence_requests(device.type, compute_dtype(train)):
            RECURRENCES.check(model.recurrence_implementation, request)
        option = EXPERTS_OPTION
        if config.has_experts:
            EXPERTS.check(model.moe_implementation or AUTO, _experts_request(config, train, device))
    except RuntimeError as error:
        raise ValueError(f"{option}: {error}") from error


def compute_dtype(train: TrainConfig) -> torch.dtype:
    """The dtype of activations."""
    return torch.bfloat16 if train.enable_mixed_precision else torch.float32


def attention_requests(config: DecoderConfig, train: TrainConfig, device: torch.device) -> list[AttentionRequest]:
    """The requests for attention, one for each kind of layer."""
    return list(dict.fromkeys(config.attention_requests(device.type, compute_dtype(train)).values()))


def _experts_request(config: DecoderConfig, train: TrainConfig, device: torch.device) -> ExpertsRequest:
    experts = next(layer.ffn for layer in config.layers if isinstance(layer.ffn, ExpertsConfig))
    return ExpertsRequest(device.type, compute_dtype(train), config.hidden_size, experts.width)
