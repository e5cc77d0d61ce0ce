"""OLMo 3: norms after each block, and of all queries and keys; layers with a sliding window are not scaled (yarn)."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.rope_config import read_rope_of_type
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Olmo3ForCausalLM"
# Of layers with a sliding window, unless rope_parameters say otherwise.
SLIDING_THETA = 5e5


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json. `attention_bias` applies to all four projections."""
    hf = HFConfig(values, ARCHITECTURE, rms_norm_eps=1e-5, pad_token_id=1, sliding_window=4096, rope_theta=5e5)
    bias = hf.get("attention_bias", bool, False)
    length = hf.positive("max_position_embeddings")
    full = read_rope_of_type(hf, rotary_gated.FULL, hf.get("rope_theta", float), length, is_scaled=True)
    sliding = read_rope_of_type(hf, rotary_gated.SLIDING, SLIDING_THETA, length, is_scaled=False)
    windows = rotary_gated.read_patterned_windows(hf, "sliding_window_pattern", 4)
    config = rotary_gated.read_config(
        hf, rope=full, norms="post", qk_norm="whole", qkv_bias=bias, o_bias=bias, windows=windows
    )
    hf.finish()
    return config.with_ropes(full, sliding)


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="olmo3",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(rotary_gated.CHECKPOINT_NAMES, modules=rotary_gated.AFTER_BLOCKS),
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
