"""Whether ranks can share a model as the parallel sizes of a configuration ask."""

from __future__ import annotations

import math
from collections.abc import Mapping

from xorl.config.local import TrainConfig
from xorl.config.options import yaml_text
from xorl.core.models import DecoderConfig
from xorl.core.models.decoder_config import ExpertsConfig
from xorl.core.models.stages import layers_needed
from xorl.core.nn.ulysses import check_heads
from xorl.kernels.layout import RankGroup
from xorl.kernels.vocabulary import Vocabulary


def check_shared_matrices(config: DecoderConfig, train: TrainConfig) -> None:
    """Raise ValueError unless ranks can share the model's heads and matrices as `train` asks."""
    num_ranks = train.tensor_parallel_size
    if num_ranks > 1:
        _check_tensor_ranks(config, train)
    for num_heads, num_kv_heads in dict.fromkeys((each.num_heads, each.num_kv_heads) for each in config.attentions):
        check_heads(num_heads // num_ranks, max(1, num_kv_heads // num_ranks), train.ulysses_parallel_size)
    if config.recurrences:
        _check_recurrences(config, train)


def _check_recurrences(config: DecoderConfig, train: TrainConfig) -> None:
    """Raise ValueError unless ranks that share a row can share the heads of recurrences."""
    num_heads = math.gcd(*(each.num_row_parts for each in config.recurrences)) // train.tensor_parallel_size
    works = [size for size in range(1, num_heads + 1) if num_heads % size == 0]
    # No more than the heads of attention, if there are fewer.
    works = [size for size in works if all(each.num_heads % size == 0 for each in config.attentions)]
    if train.ringattn_parallel_size > 1:
        raise ValueError(
            f"train.ringattn_parallel_size: {train.ringattn_parallel_size}, but layers with a recurrence cannot be "
            "computed in a ring: set it to 1, and share rows by their heads instead, with "
            f"train.ulysses_parallel_size: {_listed(set(works), ' or ')}"
        )
    if train.ulysses_parallel_size not in works:
        nearest = min(works, key=lambda size: (abs(size - train.ulysses_parallel_size), size))
        raise ValueError(
            f"ulysses: {train.ulysses_parallel_size} ranks cannot share the {num_heads} heads or channels of "
            f"recurrences; the nearest size that works is {nearest}"
        )


def _check_tensor_ranks(config: DecoderConfig, train: TrainConfig) -> None:
    num_ranks = train.tensor_parallel_size
    option = f"train.tensor_parallel_size: {num_ranks}"
    ffns = [layer.ffn.shared if isinstance(layer.ffn, ExpertsConfig) else layer.ffn for layer in config.layers]
    widths = {ffn.width for ffn in ffns if ffn is not None}
    heads = {each.num_heads for each in config.attentions}
    kv_heads = {each.num_kv_heads for each in config.attentions}
    recurrent = {each.num_parts for each in config.recurrences}
    shared = math.gcd(*heads, *widths, *recurrent)
    works = [
        size
        for size in range(1, shared + 1)
        if shared % size == 0 and all(count % size == 0 or size % count == 0 for count in kv_heads)
    ]
    if num_ranks not in works:
        shown = f", {_listed(recurrent)} key heads, groups or channels of recurrences" if recurrent else ""
        shown += f" and feed-forward widths of {_listed(widths)}" if widths else ""
        raise ValueError(
            f"{option} ranks cannot share {_listed(heads)} query heads, "
            f"{_listed(kv_heads)} key/value heads{shown} equally; the nearest "
            f"size that works is {min(works, key=lambda size: (abs(size - num_ranks), size))}"
        )
    if not Vocabulary(config.vocab_size, RankGroup(num_ranks - 1, num_ranks, "")).held:
        raise ValueError(f"{option} ranks cannot share a vocabulary of {config.vocab_size} tokens; use fewer")
    if config.has_experts and train.data_parallel_mode != "fsdp2":
        raise ValueError(
            f"{option} ranks do not share the matrices of experts, which FSDP2 shards over them instead: set "
            f"train.data_parallel_mode to fsdp2, not {train.data_parallel_mode}"
        )


def _listed(numbers: set[int], separator: str = ", ") -> str:
    return separator.join(map(str, sorted(numbers)))


def check_stages(config: DecoderConfig, train: TrainConfig) -> None:
    """Raise ValueError unless the model has a layer for each stage of a pipeline."""
    num_stages, num_chunks = train.pipeline_parallel_size, chunks_of(train)
    wanted = layers_needed(config, num_stages * num_chunks)
    if num_stages > 1 and wanted > config.num_layers:
        spare = layers_needed(config, 1) - 1
        works = max((config.num_layers - spare) // num_chunks, 1)
        needed = f", {num_chunks} for each stage with train.pipeline_parallel_schedule: Interleaved1F1B"
        raise ValueError(
            f"train.pipeline_parallel_size: {num_stages} stages need at least {wanted} layers"
            f"{needed if num_chunks > 1 else ''}, but the model has {config.num_layers}; the nearest size that works "
            f"is {works}"
        )


def chunks_of(train: TrainConfig) -> int:
    """The number of separate parts of the model that a stage of a pipeline has."""
    return 2 if train.pipeline_parallel_schedule == "Interleaved1F1B" else 1


def check_experts(config: DecoderConfig, train: TrainConfig, options: Mapping[str, tuple[object, object]]) -> None:
    """Raise ValueError for options that do not fit the model's experts, or a model without any.

    options: the options that only a mixture of experts has, as (value, default).
    """
    if not config.has_experts:
        for option, (value, default) in options.items():
            if value != default:
                raise ValueError(
                    f"{option}: {yaml_text(value)}, but the model has no experts; leave it at {yaml_text(default)}"
                )
        return
    mixtures = [layer.ffn for layer in config.layers if isinstance(layer.ffn, ExpertsConfig)]
    if train.router_correction_rate and not any(mixture.router.corrected for mixture in mixtures):
        raise ValueError(
            f"train.router_correction_rate: {train.router_correction_rate:g}, but the model's routers have no "
            "corrections; leave it at 0.0, and use train.router_aux_loss_coef to even out the load of experts"
        )
    num_experts = min(mixture.num_experts for mixture in mixtures)
    if num_experts % (num_ranks := train.expert_parallel_size):
        works = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
        nearest = min(works, key=lambda size: (abs(size - num_ranks), size))
        advice = f"the nearest size that works is {nearest}"
        if train.data_parallel_mode == "ddp":
            advice = f"under ddp all ranks share them, so start {nearest}, or set train.data_parallel_mode to fsdp2"
        raise ValueError(
            f"train.expert_parallel_size: {num_ranks} ranks cannot share {num_experts} experts equally; {advice}"
        )
    if train.enable_gradient_checkpointing and train.enable_reentrant:
        raise ValueError(
            "train.enable_reentrant: true, but reentrant recomputation cannot keep the routes of tokens, so that a "
            "recomputed layer might choose other experts; set it to false"
        )
