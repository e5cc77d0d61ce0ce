"""Config keys and names shared by families with rotary positions, RMS norms and a gated feed-forward block."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from xorl.core.models.decoder_config import DecoderConfig, DenseConfig, ExpertsConfig, LayerConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.recipes import CheckpointNames, ExpertNames
from xorl.core.models.rope_config import ROPE_TYPES, read_rope
from xorl.core.nn import AttentionConfig, NormConfig
from xorl.core.nn.layers import SWIGLU_ACTIVATIONS
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
# Defaults of the families with sliding windows, for keys missing in their config.json.
DEFAULT_WINDOW = 4096
DEFAULT_NUM_KV_HEADS = 32
DEFAULT_MAX_WINDOW_LAYERS = 28
DEFAULT_BALANCE_COEF = 0.001
EXPERT_NAMES = ExpertNames("mlp.gate", "mlp.experts.{}", "gate_proj", "up_proj", "down_proj")
CHECKPOINT_NAMES = CheckpointNames(
    prefix="model.",
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    ignored=r"\brotary_emb\.",
    experts=EXPERT_NAMES,
)


def read_config(
    hf: HFConfig,
    *,
    rope_types: Mapping[str, RopeKind] = ROPE_TYPES,
    partial_rope: bool = False,
    interleaved_rope: bool = False,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    windows: tuple[int | None, ...] | None = None,
    ffns: Sequence[DenseConfig | ExpertsConfig] | None = None,
    balance_coef: float = 0.0,
    default_head_dim: int | None = None,
    default_num_kv_heads: int | None = None,
    default_norm_eps: float = 1e-6,
) -> DecoderConfig:
    """Translate the keys that these families share; the arguments are what differs between them.

    windows, ffns: of each layer; None means no window, and a gated block of intermediate_size.
    default_num_kv_heads: used if num_key_value_heads is missing. If the key is null or there is no default, it is the
        number of attention heads.
    """
    num_layers = hf.positive("num_hidden_layers")
    num_heads = hf.positive("num_attention_heads")
    hidden_size = hf.positive("hidden_size")
    head_dim = hf.positive("head_dim", default_head_dim or hidden_size // num_heads)
    uses_default = default_num_kv_heads is not None and not hf.contains("num_key_value_heads")
    max_position_embeddings = hf.positive("max_position_embeddings")
    hf.warn_about_dropout()
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=hf.positive("num_key_value_heads", default_num_kv_heads if uses_default else num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=None,
        rope=read_rope(
            hf,
            max_position_embeddings,
            rope_types,
            partial_of=head_dim if partial_rope else None,
            interleaved=interleaved_rope,
        ),
        qk_norm="head" if qk_norm else None,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
    )
    if ffns is None:
        ffns = [read_dense(hf, bias=mlp_bias)] * num_layers
    return DecoderConfig(
        vocab_size=hf.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(
            LayerConfig(replace(attention, window=window), ffn)
            for window, ffn in zip(windows or (None,) * num_layers, ffns, strict=True)
        ),
        max_position_embeddings=max_position_embeddings,
        learned_positions=False,
        norm=NormConfig("rms", hf.get("rms_norm_eps", float, default_norm_eps)),
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


def read_dense(hf: HFConfig, *, bias: bool) -> DenseConfig:
    """The gated block of `intermediate_size`."""
    return DenseConfig("gated", hf.positive("intermediate_size"), hf.activation("hidden_act", "silu"), bias)


def read_experts(hf: HFConfig, width_key: str, defaults: ExpertsConfig) -> ExpertsConfig:
    """A mixture of experts. Its experts are SwiGLU blocks: the kernels have no other activation.

    The number of experts is `num_experts`, or `num_local_experts`, which transformers 5 writes for all families.
    Missing keys are taken from `defaults`, and so is `normalize`, which is not read.
    """
    hf.expect("hidden_act", hf.get("hidden_act", str, "silu"), SWIGLU_ACTIVATIONS)
    num_experts_key = "num_experts" if hf.has("num_experts") else "num_local_experts"
    num_experts = hf.positive(num_experts_key, defaults.num_experts)
    num_active = hf.positive("num_experts_per_tok", defaults.num_active)
    if num_active > num_experts:
        raise ValueError(
            f"{hf.architecture}: num_experts_per_tok: {num_active} exceeds {num_experts_key}: {num_experts}"
        )
    return ExpertsConfig(num_experts, num_active, hf.positive(width_key, defaults.width), defaults.normalize)


def read_balance_coef(hf: HFConfig) -> float:
    """`router_aux_loss_coef` if `output_router_logits` is set: without it, transformers adds no router loss."""
    coef = hf.get("router_aux_loss_coef", float, DEFAULT_BALANCE_COEF)
    return coef if hf.get("output_router_logits", bool, False) else 0.0


def read_uniform_windows(hf: HFConfig, default: int | None) -> tuple[int | None, ...]:
    """One `sliding_window` for all layers; null means none, and `default` is used if the key is missing."""
    is_set = hf.has("sliding_window") or (default is not None and not hf.contains("sliding_window"))
    return (hf.positive("sliding_window", default) if is_set else None,) * hf.positive("num_hidden_layers")


def read_windows(hf: HFConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer, from `layer_types`, or for all layers from `max_window_layers` on.

    A null `sliding_window` disables windows; a missing one is DEFAULT_WINDOW.
    """
    num_layers = hf.positive("num_hidden_layers")
    is_null = hf.contains("sliding_window") and not hf.has("sliding_window")
    enabled = hf.get("use_sliding_window", bool, False) and not is_null
    window = hf.positive("sliding_window", DEFAULT_WINDOW)
    first = hf.get("max_window_layers", int, DEFAULT_MAX_WINDOW_LAYERS)
    if hf.has("layer_types"):
        layer_types = hf.strings("layer_types")
    else:
        layer_types = [SLIDING if enabled and index >= first else FULL for index in range(num_layers)]
    for layer_type in layer_types:
        hf.expect("layer_types", layer_type, [FULL, SLIDING] if enabled else [FULL])
    hf.expect("number of layer_types", len(layer_types), [num_layers])
    return tuple(window if layer_type == SLIDING else None for layer_type in layer_types)
