"""Config keys and names shared by families with rotary positions, RMS norms and a gated feed-forward block."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

from xorl.core.models.decoder_config import Arrangement, DecoderConfig, DenseConfig, ExpertsConfig, LayerConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.recipes import CheckpointNames
from xorl.core.models.rope_config import ROPE_TYPES, read_rope
from xorl.core.models.stacks import ExpertNames
from xorl.core.nn import AttentionConfig, NormConfig, RopeConfig
from xorl.core.nn.rotary import RopeKind

ADAPTER_TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_MAX_WINDOW_LAYERS = 28
# The names of norms after a block, for families that have them there instead of before.
AFTER_BLOCKS: Mapping[str, str] = MappingProxyType(
    {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
)
# The names of norms around blocks.
AROUND_BLOCKS: Mapping[str, str] = MappingProxyType(
    {**AFTER_BLOCKS, "post_attention_layernorm": "pre_feedforward_layernorm"}
)
BANDED_ROPE_TYPES: Mapping[str, RopeKind] = MappingProxyType({**ROPE_TYPES, "llama3": "banded"})
EXPERT_NAMES = ExpertNames("mlp.gate", "mlp.experts.{}", "gate_proj", "up_proj", "down_proj")
CHECKPOINT_NAMES = CheckpointNames(
    prefix="model.",
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    ignored=r"\brotary_emb\.",
    experts=EXPERT_NAMES,
)
# Files with layers after the model's, for multi-token prediction, which are not used.
NAMES_WITH_MTP_LAYERS = replace(CHECKPOINT_NAMES, unused=r"layers\.(\d+)\.")


def read_config(
    hf: HFConfig,
    *,
    rope: RopeConfig | None = None,
    rope_types: Mapping[str, RopeKind] = ROPE_TYPES,
    partial_rope: bool = False,
    interleaved_rope: bool = False,
    norms: Arrangement = "pre",
    qk_norm: Literal["head", "whole"] | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    windows: tuple[int | None, ...] | None = None,
    ffns: Sequence[DenseConfig | ExpertsConfig] | None = None,
    balance_coef: float = 0.0,
    norm: NormConfig | None = None,
) -> DecoderConfig:
    """Translate the keys that these families share; the arguments are what differs between them.

    rope: None means that of rope_parameters.
    windows, ffns: of each layer; None means no window, and a gated block of intermediate_size.
    norm: None means RMS norms with rms_norm_eps.
    """
    num_layers = hf.positive("num_hidden_layers")
    num_heads = hf.positive("num_attention_heads")
    hidden_size = hf.positive("hidden_size")
    head_dim = hf.positive("head_dim", hidden_size // num_heads)
    max_position_embeddings = hf.positive("max_position_embeddings")
    hf.warn_about_dropout()
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=hf.positive("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=None,
        rope=rope
        or read_rope(
            hf,
            max_position_embeddings,
            rope_types,
            partial_of=head_dim if partial_rope else None,
            interleaved=interleaved_rope,
        ),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
    )
    if ffns is None:
        ffns = [read_dense(hf, bias=mlp_bias)] * num_layers
    return DecoderConfig(
        vocab_size=hf.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(
            LayerConfig(replace(attention, window=window), ffn, norms)
            for window, ffn in zip(windows or (None,) * num_layers, ffns, strict=True)
        ),
        max_position_embeddings=max_position_embeddings,
        learned_positions=False,
        norm=norm or NormConfig("rms", hf.get("rms_norm_eps", float, 1e-6)),
        tie_word_embeddings=hf.get("tie_word_embeddings", bool, False),
        initializer_range=hf.get("initializer_range", float, 0.02),
        scale_residual_init=False,
        balance_coef=balance_coef,
        padding_idx=_read_padding(hf),
    )


def _read_padding(hf: HFConfig) -> int | None:
    """The row of pad_token_id in the embedding. Negative ids count from the end, as in transformers."""
    if not hf.has("pad_token_id"):
        return None
    vocab_size, pad = hf.positive("vocab_size"), hf.get("pad_token_id", int)
    if not -vocab_size <= pad < vocab_size:
        raise ValueError(f"{hf.architecture}: pad_token_id: {pad} is not within vocab_size: {vocab_size}")
    return pad % vocab_size


def read_dense(
    hf: HFConfig, *, bias: bool = False, activation_key: str = "hidden_act", activation: str = "silu"
) -> DenseConfig:
    """The gated block of `intermediate_size`, whose activation is `activation` if the key is missing."""
    return DenseConfig("gated", hf.positive("intermediate_size"), hf.activation(activation_key, activation), bias)


def read_uniform_windows(hf: HFConfig) -> tuple[int | None, ...]:
    """One `sliding_window` for all layers; null means none."""
    window = hf.positive("sliding_window") if hf.has("sliding_window") else None
    return (window,) * hf.positive("num_hidden_layers")


def read_windows(hf: HFConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer, as `read_enabled_windows`; by default from `max_window_layers` on."""
    first = hf.get("max_window_layers", int, DEFAULT_MAX_WINDOW_LAYERS)
    return read_enabled_windows(hf, [index >= first for index in range(hf.positive("num_hidden_layers"))])


def read_enabled_windows(hf: HFConfig, has_window: Sequence[bool]) -> tuple[int | None, ...]:
    """The sliding window of each layer, from `layer_types`, or else for the layers that `has_window` says.

    Windows need `use_sliding_window`; a null `sliding_window` disables them.
    """
    is_set, is_used = hf.has("sliding_window"), hf.get("use_sliding_window", bool, False)
    enabled = is_set and is_used
    pattern = [SLIDING if enabled and each else FULL for each in has_window]
    return windows_of(hf, pattern, allowed=[FULL, SLIDING] if enabled else [FULL])


def read_patterned_windows(hf: HFConfig, period_key: str, period: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, from `layer_types`; else, each `period`-th layer has none.

    period_key: the key that may change the period. A null `sliding_window` disables windows.
    """
    has_windows = hf.has("sliding_window")
    if hf.has(period_key) and has_windows and not hf.has("layer_types"):
        period = hf.positive(period_key)
    num_layers = hf.positive("num_hidden_layers")
    pattern = [SLIDING if has_windows and (index + 1) % period else FULL for index in range(num_layers)]
    return windows_of(hf, pattern)


def windows_of(
    hf: HFConfig, pattern: Sequence[str], allowed: Sequence[str] = (FULL, SLIDING)
) -> tuple[int | None, ...]:
    """The window of each layer by its entry in `layer_types`, or in `pattern` if there are none."""
    layer_types = read_layer_types(hf, pattern, allowed)
    window = hf.positive("sliding_window") if SLIDING in layer_types else None
    return tuple(window if layer_type == SLIDING else None for layer_type in layer_types)


def read_layer_types(
    hf: HFConfig, pattern: Sequence[str], allowed: Sequence[str], key: str = "layer_types"
) -> Sequence[str]:
    """The kind of each layer: its entry in the list `key` or, if config.json has none, in `pattern`."""
    types = hf.items(key, str) if hf.has(key) else pattern
    for each in types:
        hf.expect(key, each, allowed)
    hf.expect(f"number of {key}", len(types), [len(pattern)])
    return types
