"""The common configuration that every family's config.json is translated to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from xorl.core.models.image_config import ImageConfig
from xorl.core.nn import RopeConfig
from xorl.core.nn.attention import AttentionConfig
from xorl.core.nn.gated_delta_net import GatedDeltaConfig
from xorl.core.nn.layers import ACTIVATIONS, TRAINED_ACTIVATIONS
from xorl.core.nn.moe import RouterConfig
from xorl.core.nn.norms import NormConfig
from xorl.core.nn.short_conv import ShortConvConfig
from xorl.core.nn.state_space import StateSpaceConfig
from xorl.kernels.arguments import check_choice
from xorl.kernels.attention import AttentionRequest
from xorl.kernels.experts.gates import SILU, Gate
from xorl.kernels.recurrent import RecurrenceRequest

Recurrence = GatedDeltaConfig | ShortConvConfig | StateSpaceConfig
"""A mixer that keeps earlier tokens in a state of fixed size, which passes from token to token."""

Arrangement = Literal["pre", "post", "sandwich", "parallel"]
"""Where the norms of a layer stand: before attention and the feed-forward block, after them, or both; parallel: one
norm before both, which have the same input."""


@dataclass(frozen=True)
class DenseConfig:
    """A feed-forward block that all tokens use. kind: gated (two up projections), or plain (one)."""

    kind: Literal["gated", "plain"]
    width: int
    activation: str
    bias: bool

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, Literal["gated", "plain"])
        if self.width < 1:
            raise ValueError(f"the width of a feed-forward block must be at least 1, got {self.width}")
        known = [*ACTIVATIONS, *(TRAINED_ACTIVATIONS if self.kind == "plain" else ())]
        if self.activation not in known:
            raise ValueError(f"activation: {self.activation!r} is not one of {', '.join(map(repr, known))}")


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of feed-forward blocks.

    Attributes:
        num_experts, num_active: the numbers of experts in the layer, and of those that each token uses.
        width: the hidden width of one expert.
        router: how tokens choose experts.
        gate: the activation of an expert.
        bias: whether the matrices of experts have biases.
        shared: the block that computes every token beside the experts; None: there is none.
        shared_gate: multiply the output of `shared` by the sigmoid of a logit.
        latent: the width of what the experts compute on, between projections; None: they compute on the input.
        latent_bias: whether these projections have biases.
        own_norms: whether the experts have a norm of their input, and they and `shared` norms of their outputs.
    """

    num_experts: int
    num_active: int
    width: int
    router: RouterConfig
    gate: Gate = SILU
    bias: bool = False
    shared: DenseConfig | None = None
    shared_gate: bool = False
    own_norms: bool = False
    latent: int | None = None
    latent_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_active > self.num_experts:
            raise ValueError(f"{self.num_active} active experts, but the model has {self.num_experts} experts")
        if self.own_norms and self.shared is None:
            raise ValueError("own_norms: they are beside a shared block, and there is none")
        if self.router.num_groups == 1:
            return
        size, rest = divmod(self.num_experts, self.router.num_groups)
        if rest or size < 2:
            raise ValueError(
                f"{self.num_experts} experts cannot be divided into {self.router.num_groups} groups of equal size, at "
                "least 2"
            )
        if self.num_active > size * self.router.num_active_groups:
            raise ValueError(
                f"{self.num_active} active experts, but {self.router.num_active_groups} active groups have "
                f"{size * self.router.num_active_groups}"
            )


@dataclass(frozen=True)
class LayerConfig:
    """One layer of a decoder. output_scale: whether checkpoints have a factor on its output.

    mixer: the block that reads earlier tokens, attention or a recurrence; None: there is none.
    ffn: the feed-forward block; None: there is none, but a mixer.
    """

    mixer: AttentionConfig | Recurrence | None
    ffn: DenseConfig | ExpertsConfig | None
    norms: Arrangement = "pre"
    output_scale: bool = False

    def __post_init__(self) -> None:
        if self.mixer is None and self.ffn is None:
            raise ValueError("a layer has a mixer or a feed-forward block, or both; this one has neither")
        if (self.mixer is None or self.ffn is None) and self.norms != "pre":
            raise ValueError(f"norms: {self.norms}, but a layer of one block has its norm before it, which is 'pre'")

    @property
    def attention(self) -> AttentionConfig:
        """The mixer of a layer with attention."""
        assert isinstance(self.mixer, AttentionConfig), "this layer has a recurrence"
        return self.mixer


@dataclass(frozen=True)
class DecoderConfig:
    """The architecture of a decoder, independent of how and on which devices it is trained.

    Attributes:
        layers: one entry for each layer.
        learned_positions: whether positions are rows of a table of max_position_embeddings rows.
        initializer_range: standard deviation of initial weights.
        scale_residual_init: divide initial weights of projections into the residual stream by sqrt(2 * num_layers).
        balance_coef: the weight of the routers' load-balancing loss that config.json sets; training may override it.
        padding_idx: the id whose row of the embedding gets no gradient from the embedding, or None. A tied head still
            trains that row.
        embed_scale: the factor on embeddings, rounded to the dtype of the activations.
        residual_scale: the factor on the outputs of attention and feed-forward blocks.
        logit_scale: the factor on logits.
        logit_softcap: logits become logit_softcap * tanh(logits / logit_softcap), in fp32; None: no cap.
        images: the image encoder; None: the model reads text alone.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    learned_positions: bool
    norm: NormConfig
    tie_word_embeddings: bool
    initializer_range: float
    scale_residual_init: bool
    balance_coef: float = 0.0
    padding_idx: int | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    images: ImageConfig | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers: there are none; a decoder has at least one")
        if self.images is not None and len(self.images.taps) > self.num_layers:
            raise ValueError(f"{len(self.images.taps)} taps of images, but the decoder has {self.num_layers} layers")

    def with_layers(self, change: Callable[[int, LayerConfig], LayerConfig]) -> DecoderConfig:
        """This configuration with `change(index, layer)` for each layer."""
        return replace(self, layers=tuple(change(index, layer) for index, layer in enumerate(self.layers)))

    def with_ropes(self, full: RopeConfig | None, sliding: RopeConfig | None) -> DecoderConfig:
        """This configuration with one rotation in layers without a window, and another in layers with one."""

        def change(_: int, layer: LayerConfig) -> LayerConfig:
            if not isinstance(layer.mixer, AttentionConfig):
                return layer
            rope = full if layer.attention.window is None else sliding
            return replace(layer, mixer=replace(layer.attention, rope=rope))

        return self.with_layers(change)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The attention of each layer that has one."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionConfig))

    @property
    def recurrences(self) -> tuple[Recurrence, ...]:
        """The recurrence of each layer that has one."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(mixer for mixer in mixers if mixer is not None and not isinstance(mixer, AttentionConfig))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer with attention, how many tokens a token attends to; None for all earlier ones."""
        return tuple(attention.window for attention in self.attentions)

    def attention_requests(self, device_type: str, dtype: torch.dtype) -> dict[int, AttentionRequest]:
        """The request of each layer with attention to a backend, by layer, if it computes in `dtype`."""
        return {
            index: AttentionRequest(
                device_type,
                dtype,
                max(each.head_dim, each.v_head_dim),
                each.window,
                softcap=each.softcap,
                sinks=each.sinks,
            )
            for index, each in enumerate(layer.mixer for layer in self.layers)
            if isinstance(each, AttentionConfig)
        }

    def recurrence_requests(self, device_type: str, dtype: torch.dtype) -> list[RecurrenceRequest]:
        """The requests of recurrent layers to a backend, if they compute in `dtype`; each request once."""
        return list(dict.fromkeys(_request_of(each, device_type, dtype) for each in self.recurrences))

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(isinstance(layer.ffn, ExpertsConfig) for layer in self.layers)


def _request_of(recurrence: Recurrence, device_type: str, dtype: torch.dtype) -> RecurrenceRequest:
    if isinstance(recurrence, GatedDeltaConfig):
        return RecurrenceRequest(device_type, dtype, heads=(recurrence.key_dim, recurrence.value_dim))
    if isinstance(recurrence, StateSpaceConfig):
        return RecurrenceRequest(device_type, dtype, states=(recurrence.head_dim, recurrence.state_dim))
    return RecurrenceRequest(device_type, dtype)
