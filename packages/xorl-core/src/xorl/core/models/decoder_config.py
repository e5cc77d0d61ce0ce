"""The common configuration that every family's config.json is translated to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from xorl.core.nn import RopeConfig
from xorl.core.nn.layers import ACTIVATIONS
from xorl.kernels.arguments import check_choice, check_number


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of one layer.

    Attributes:
        scale: the factor on attention scores.
        window: how many tokens a token attends to, itself included; None for all earlier ones.
        qk_norm: whether queries and keys are normalised per head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"the number of attention heads ({self.num_heads}) must be a multiple of "
                f"the number of key/value heads ({self.num_kv_heads})"
            )

    @property
    def q_rows(self) -> int:
        """Output features of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Output features of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class DenseConfig:
    """A feed-forward block that all tokens use. kind: gated (two up projections), or plain (one)."""

    kind: Literal["gated", "plain"]
    width: int
    activation: str
    bias: bool

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, Literal["gated", "plain"])
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: {self.activation!r} is not one of {', '.join(map(repr, ACTIVATIONS))}")


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of gated feed-forward blocks.

    Attributes:
        num_experts, num_active: the numbers of experts in the layer, and of those that each token uses.
        width: the hidden width of one expert.
        normalize: divide the probabilities of a token's experts by their sum.
    """

    num_experts: int
    num_active: int
    width: int
    normalize: bool

    def __post_init__(self) -> None:
        if self.num_active > self.num_experts:
            raise ValueError(f"{self.num_active} active experts, but the model has {self.num_experts} experts")


@dataclass(frozen=True)
class LayerConfig:
    """One layer of a decoder."""

    attention: AttentionConfig
    ffn: DenseConfig | ExpertsConfig


@dataclass(frozen=True)
class DecoderConfig:
    """The architecture of a decoder, independent of how and on which devices it is trained.

    Attributes:
        layers: one entry for each layer.
        rope: the rotary embedding; None for learned positions (a table of max_position_embeddings rows).
        norm: rms, or layer (with bias).
        initializer_range: standard deviation of initial weights.
        scale_residual_init: divide initial weights of projections into the residual stream by sqrt(2 * num_layers).
        balance_coef: the weight of the routers' load-balancing loss that config.json sets; training may override it.
        padding_idx: the id whose row of the embedding gets no gradient from the embedding, or None. A tied head still
            trains that row.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    rope: RopeConfig | None
    norm: Literal["rms", "layer"]
    norm_eps: float
    tie_word_embeddings: bool
    initializer_range: float
    scale_residual_init: bool
    balance_coef: float = 0.0
    padding_idx: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers: there are none; a decoder has at least one")
        check_choice("norm", self.norm, Literal["rms", "layer"])
        check_number("norm_eps", self.norm_eps)
        if not self.norm_eps:
            raise ValueError("norm_eps: is 0, so that a norm might divide by 0; use one above 0, such as 1e-6")
        if self.rope is not None and self.attention.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.attention.head_dim}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionConfig:
        """The attention of the first layer. Other layers may differ only in `scale` and `window`."""
        return self.layers[0].attention

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, how many tokens a token attends to; None for all earlier ones."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(isinstance(layer.ffn, ExpertsConfig) for layer in self.layers)
