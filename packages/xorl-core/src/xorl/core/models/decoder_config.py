"""The common configuration that every family's config.json is translated to."""

from dataclasses import dataclass
from typing import Literal

from xorl.core.nn import RopeConfig
from xorl.core.nn.layers import ACTIVATIONS


@dataclass(frozen=True)
class DecoderConfig:
    """The architecture of a decoder, independent of how and on which devices it is trained.

    Attributes:
        windows: for each layer, how many tokens a token attends to, itself included; None for all earlier ones.
        attention_scales: for each layer, the factor on attention scores.
        rope: the rotary embedding; None for learned positions (a table of max_position_embeddings rows).
        norm: rms, or layer (with bias).
        mlp: gated (two up projections), or plain (one).
        qk_norm: whether queries and keys are normalised per head.
        initializer_range: standard deviation of initial weights.
        scale_residual_init: initialise projections into the residual stream smaller by sqrt(2 * num_layers).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    attention_scales: tuple[float, ...]
    rope: RopeConfig | None
    norm: Literal["rms", "layer"]
    norm_eps: float
    mlp: Literal["gated", "plain"]
    activation: str
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    initializer_range: float
    scale_residual_init: bool

    def __post_init__(self) -> None:
        assert len(self.windows) == len(self.attention_scales) == self.num_layers
        assert self.activation in ACTIVATIONS
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"the number of attention heads ({self.num_heads}) must be a multiple of "
                f"the number of key/value heads ({self.num_kv_heads})"
            )
        if self.rope is not None and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.head_dim}")

    @property
    def q_rows(self) -> int:
        """Output features of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Output features of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim
