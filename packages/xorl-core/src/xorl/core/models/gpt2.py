"""GPT-2: learned positions, layer norms, biases everywhere, plain feed-forward with GELU, tied head.

Its checkpoints store matrices as [in, out], and queries, keys and values in one matrix. Native matrices are [out, in],
as in every family, so the recipes transpose them.
"""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models.causal_lm import CausalLM
from xorl.core.models.decoder_config import DecoderConfig, DenseConfig, LayerConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.recipes import CheckpointNames, Part, WeightRecipe, unchanged
from xorl.core.models.spec import ModelSpec
from xorl.core.nn import AttentionConfig, NormConfig

ARCHITECTURE = "GPT2LMHeadModel"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `reorder_and_upcast_attn` (fp32 scores) is ignored: all attention backends use fp32 scores."""
    hf = HFConfig(values, ARCHITECTURE)
    hf.refuse("quantization_config", "the weights are quantised; train from the unquantised model")
    hf.refuse("add_cross_attention", "there is no encoder to attend to")
    hf.get("reorder_and_upcast_attn", bool, False)
    hidden_size, num_heads, num_layers = hf.positive("n_embd"), hf.positive("n_head"), hf.positive("n_layer")
    if hidden_size % num_heads:
        raise ValueError(f"{ARCHITECTURE}: n_embd: {hidden_size} must be a multiple of n_head: {num_heads}")
    hf.warn_about_dropout()
    scales = _read_scales(hf, hidden_size // num_heads, num_layers)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        scale=scales[0],
        window=None,
        rope=None,
        qk_norm=None,
        qkv_bias=True,
        o_bias=True,
    )
    activation = hf.activation("activation_function", "gelu_new")
    ffn = DenseConfig("plain", hf.positive("n_inner", 4 * hidden_size), activation, bias=True)
    config = DecoderConfig(
        vocab_size=hf.positive("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(LayerConfig(replace(attention, scale=scale), ffn) for scale in scales),
        max_position_embeddings=hf.positive("n_positions"),
        learned_positions=True,
        norm=NormConfig("layer", hf.get("layer_norm_epsilon", float, 1e-5), bias=True),
        tie_word_embeddings=hf.get("tie_word_embeddings", bool, True),
        initializer_range=hf.get("initializer_range", float, 0.02),
        scale_residual_init=True,
    )
    hf.finish(inert=[key for key in values if key.startswith("summary_")])
    return config


def recipes(config: DecoderConfig, merge_qkv: bool) -> dict[str, WeightRecipe]:
    """Recipes under native names, in the order of the decoder's parameters."""
    width, ffn = config.hidden_size, _ffn(config)
    table: dict[str, WeightRecipe] = {
        "model.embed_tokens.weight": unchanged("transformer.wte.weight", (config.vocab_size, width)),
        "model.embed_positions.weight": unchanged("transformer.wpe.weight", (config.max_position_embeddings, width)),
    }
    for index in range(config.num_layers):
        native, hf = f"model.layers.{index}", f"transformer.h.{index}"
        table |= _norm(f"{native}.input_layernorm", f"{hf}.ln_1", width)
        if merge_qkv:
            table |= _linear(f"{native}.self_attn.qkv_proj", f"{hf}.attn.c_attn", 3 * width, width)
        else:
            for third, name in enumerate(("q_proj", "k_proj", "v_proj")):
                source = f"{hf}.attn.c_attn"
                table |= _linear(f"{native}.self_attn.{name}", source, width, width, third * width, shared=True)
        table |= _linear(f"{native}.self_attn.o_proj", f"{hf}.attn.c_proj", width, width)
        table |= _norm(f"{native}.post_attention_layernorm", f"{hf}.ln_2", width)
        table |= _linear(f"{native}.mlp.up_proj", f"{hf}.mlp.c_fc", ffn.width, width)
        table |= _linear(f"{native}.mlp.down_proj", f"{hf}.mlp.c_proj", width, ffn.width)
    table |= _norm("model.norm", "transformer.ln_f", width)
    if not config.tie_word_embeddings:
        table["lm_head.weight"] = unchanged("lm_head.weight", (config.vocab_size, width))
    return table


def _ffn(config: DecoderConfig) -> DenseConfig:
    ffn = config.layers[0].ffn
    assert isinstance(ffn, DenseConfig)
    return ffn


def _read_scales(hf: HFConfig, head_dim: int, num_layers: int) -> tuple[float, ...]:
    scale = head_dim**-0.5 if hf.get("scale_attn_weights", bool, True) else 1.0
    by_depth = hf.get("scale_attn_by_inverse_layer_idx", bool, False)
    return tuple(scale / (index + 1) if by_depth else scale for index in range(num_layers))


def _norm(native: str, hf: str, width: int) -> dict[str, WeightRecipe]:
    return {f"{native}.{leaf}": unchanged(f"{hf}.{leaf}", (width,)) for leaf in ("weight", "bias")}


def _linear(
    native: str, hf: str, num_out: int, num_in: int, first: int = 0, *, shared: bool = False
) -> dict[str, WeightRecipe]:
    """Output features [first, first + num_out) of a linear layer whose weight is stored as [in, out]."""
    return {
        f"{native}.weight": Part(f"{hf}.weight", first, (num_out, num_in), transposed=True, shared=shared),
        f"{native}.bias": Part(f"{hf}.bias", first, (num_out,), transposed=False, shared=shared),
    }


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="gpt2",
    config_from_hf=config_from_hf,
    make_recipes=recipes,
    checkpoint_names=CheckpointNames(
        prefix="transformer.",
        embedding="transformer.wte.weight",
        head="lm_head.weight",
        ignored=r"\.attn\.(bias|masked_bias)$",
    ),
    adapter_targets=("c_attn", "c_proj", "c_fc"),
)


class GPT2(CausalLM):
    """GPT-2 with random weights; by default the smallest, of 124 million parameters.

    vocab_size: rows of the embedding, which is also the head. context_length: learned positions, so the longest row.
    width: of the residual stream; it must be a multiple of num_heads. seed: of the weights.
    """

    def __init__(
        self,
        vocab_size: int = 50257,
        *,
        context_length: int = 1024,
        width: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        seed: int = 0,
    ) -> None:
        sizes = {"vocab_size": vocab_size, "n_positions": context_length, "n_embd": width}
        config = config_from_hf({**sizes, "n_layer": num_layers, "n_head": num_heads})
        decoder = SPEC.build(config)
        decoder.init_weights(seed)
        super().__init__(decoder)
