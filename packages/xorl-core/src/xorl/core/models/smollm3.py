"""SmolLM3: grouped-query attention; some layers do not rotate queries and keys, and may have a sliding window."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig, LayerConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "SmolLM3ForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `no_rope_layers` has a 1 for each layer that rotates, and a 0 for each that does not."""
    hf = HFConfig(
        values, ARCHITECTURE, num_key_value_heads=4, rope_theta=2e6, pad_token_id=128004, tie_word_embeddings=True
    )
    bias = hf.get("attention_bias", bool, False)
    num_layers, interval = hf.positive("num_hidden_layers"), hf.positive("no_rope_layer_interval", 4)
    rotates = hf.items("no_rope_layers", int) or [(index + 1) % interval for index in range(num_layers)]
    hf.expect("number of no_rope_layers", len(rotates), [num_layers])
    config = rotary_gated.read_config(
        hf,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.get("mlp_bias", bool, False),
        windows=rotary_gated.read_enabled_windows(hf, [not each for each in rotates]),
    )
    hf.finish(inert=["max_window_layers"])

    def change(index: int, layer: LayerConfig) -> LayerConfig:
        return layer if rotates[index] else replace(layer, mixer=replace(layer.attention, rope=None))

    return config.with_layers(change)


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="smollm3",
    config_from_hf=config_from_hf,
    checkpoint_names=rotary_gated.CHECKPOINT_NAMES,
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
