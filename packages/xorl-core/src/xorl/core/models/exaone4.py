"""EXAONE 4: norms after each block and of each head; with sliding windows, only layers that have one rotate."""

from collections.abc import Mapping
from dataclasses import replace

from xorl.core.models import rotary_gated
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Exaone4ForCausalLM"


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json."""
    hf = HFConfig(values, ARCHITECTURE, num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096)
    windows = rotary_gated.read_patterned_windows(hf, "sliding_window_pattern", 4)
    config = rotary_gated.read_config(
        hf,
        rope_types=rotary_gated.BANDED_ROPE_TYPES,
        norms="post",
        qk_norm="head",
        windows=windows,
    )
    hf.finish()
    return config.with_ropes(full=None, sliding=config.layers[0].attention.rope) if hf.has("sliding_window") else config


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="exaone4",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(rotary_gated.CHECKPOINT_NAMES, modules=rotary_gated.AFTER_BLOCKS),
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
