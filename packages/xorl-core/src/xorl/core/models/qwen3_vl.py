"""Qwen3-VL (dense): images of any size, features of three blocks added to early layers, rotation by three axes."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from xorl.core.models import rotary_gated
from xorl.core.models.composite import TEXT_CONFIG, text_values
from xorl.core.models.decoder_config import DecoderConfig
from xorl.core.models.hf_config import HFConfig
from xorl.core.models.image_config import ImageConfig
from xorl.core.models.rope_config import nested_rope, read_rope
from xorl.core.models.spec import ModelSpec

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
DEFAULT_TAPS = (8, 16, 24)
# How many channel pairs rotate by time, height and width.
DEFAULT_SECTIONS = (24, 20, 20)
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "encoder.patches": "model.visual.patch_embed.proj",
        "encoder.positions": "model.visual.pos_embed",
        "encoder.blocks.{}.norm1": "model.visual.blocks.{}.norm1",
        "encoder.blocks.{}.norm2": "model.visual.blocks.{}.norm2",
        "encoder.blocks.{}.attention.qkv_proj": "model.visual.blocks.{}.attn.qkv",
        "encoder.blocks.{}.attention.out": "model.visual.blocks.{}.attn.proj",
        "encoder.blocks.{}.mlp.up_proj": "model.visual.blocks.{}.mlp.linear_fc1",
        "encoder.blocks.{}.mlp.down_proj": "model.visual.blocks.{}.mlp.linear_fc2",
        "encoder.projector.norm": "model.visual.merger.norm",
        "encoder.projector.up": "model.visual.merger.linear_fc1",
        "encoder.projector.down": "model.visual.merger.linear_fc2",
        "encoder.taps.{}.norm": "model.visual.deepstack_merger_list.{}.norm",
        "encoder.taps.{}.up": "model.visual.deepstack_merger_list.{}.linear_fc1",
        "encoder.taps.{}.down": "model.visual.deepstack_merger_list.{}.linear_fc2",
    }
)


def config_from_hf(values: Mapping[str, object]) -> DecoderConfig:
    """Read config.json: text_config is that of the text model, vision_config that of the encoder."""
    hf = HFConfig(values, ARCHITECTURE, image_token_id=151655)
    for key in (TEXT_CONFIG, "tie_word_embeddings"):
        hf.has(key)
    config = _read_text(text_values(values))
    config = replace(config, images=_read_images(hf, config.hidden_size))
    hf.finish()
    return config


def _read_text(values: Mapping[str, object]) -> DecoderConfig:
    hf = HFConfig(values, f"{ARCHITECTURE}: {TEXT_CONFIG}", num_key_value_heads=32, head_dim=128)
    bias = hf.get("attention_bias", bool, False)
    rope = read_rope(hf, hf.positive("max_position_embeddings"), read=("mrope_section", "mrope_interleaved"))
    scaling = nested_rope(hf)
    scaling.expect("mrope_interleaved", scaling.get("mrope_interleaved", bool, True), [True])
    sections = tuple(scaling.items("mrope_section", int)) if scaling.has("mrope_section") else DEFAULT_SECTIONS
    axes = _axes(sections, hf.positive("head_dim"))
    if rope.kind in ("dynamic", "longrope"):
        raise ValueError(f"{hf.architecture}: a rotation by axes cannot depend on the length, as {rope.kind} does")
    config = rotary_gated.read_config(hf, rope=replace(rope, axes=axes), qk_norm="head", qkv_bias=bias, o_bias=bias)
    hf.finish()
    return config


def _axes(sections: tuple[int, ...], head_dim: int) -> tuple[int, ...]:
    """The axis of each channel pair: time, height, width in turn, as long as each section lasts, and then time."""
    if len(sections) != 3 or sum(sections) != head_dim // 2:
        raise ValueError(
            f"{ARCHITECTURE}: mrope_section: {list(sections)} must be three numbers with the sum {head_dim // 2}, half "
            "of head_dim"
        )
    pairs = range(head_dim // 2)
    return tuple(axis if axis and pair < 3 * sections[axis] else 0 for pair in pairs for axis in [pair % 3])


def _read_images(hf: HFConfig, out_width: int) -> ImageConfig:
    vision = hf.nested("vision_config")
    key = "deepstack_visual_indexes"
    taps = tuple(vision.items(key, int)) if vision.has(key) else DEFAULT_TAPS
    num_positions = vision.positive("num_position_embeddings", 2304)
    side = round(num_positions**0.5)
    if side * side != num_positions:
        raise ValueError(f"{vision.architecture}: num_position_embeddings: {num_positions} is not a square")
    vision.expect("in_channels", vision.positive("in_channels", 3), [3])
    vision.expect("out_hidden_size", vision.positive("out_hidden_size", 3584), [out_width])
    rope = vision.nested("rope_parameters")
    rope.expect("rope_type", rope.get("rope_type", str, "axial"), ["axial"])
    images = ImageConfig(
        placeholder=hf.get("image_token_id", int),
        patch_size=vision.positive("patch_size", 16),
        frames=vision.positive("temporal_patch_size", 2),
        merge_size=vision.positive("spatial_merge_size", 2),
        width=vision.positive("hidden_size", 1152),
        num_heads=vision.positive("num_heads", 16),
        mlp_width=vision.positive("intermediate_size", 4304),
        activation=vision.activation("hidden_act", "gelu_pytorch_tanh"),
        num_blocks=vision.positive("depth", 27),
        side=side,
        rope_theta=rope.get("rope_theta", float, 10000.0),
        out_width=out_width,
        taps=taps,
        eps=1e-6,
    )
    vision.get("initializer_range", float, 0.02)
    rope.refuse_unread()
    vision.finish()
    return images


SPEC = ModelSpec(
    architecture=ARCHITECTURE,
    model_type="qwen3_vl",
    config_from_hf=config_from_hf,
    checkpoint_names=replace(
        rotary_gated.CHECKPOINT_NAMES,
        prefix="model.language_model.",
        embedding="model.language_model.embed_tokens.weight",
        encoder=NAMES,
    ),
    adapter_targets=rotary_gated.ADAPTER_TARGETS,
)
