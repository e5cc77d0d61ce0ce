"""Makes a model small enough to verify a layout with: the entries of its config.json, cut down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

# Upper limits for a model that is cut down, by key of config.json. The widths suit all groups of quantisation.
CUT: Mapping[str, int] = MappingProxyType(
    {
        "num_hidden_layers": 4,
        "n_layer": 4,
        "hidden_size": 128,
        "n_embd": 128,
        "intermediate_size": 384,
        "n_inner": 384,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "num_attention_heads": 8,
        "n_head": 8,
        "head_dim": 32,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "qk_head_dim": 64,
        "v_head_dim": 32,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "mamba_num_heads": 16,
        "n_groups": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 32,
        "mamba_n_heads": 16,
        "mamba_d_state": 32,
        "shared_intermediate_size": 128,
        "vocab_size": 384,
        "num_experts": 16,
        "num_local_experts": 16,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "top_k_experts": 4,
        "first_k_dense_replace": 1,
        "rotary_dim": 16,
        "sliding_window": 24,
    }
)


# Keys with a kind for each layer, whatever the number of layers in other keys is.
_KINDS_OF_LAYERS = ("layers_block_type", "hybrid_override_pattern")


def cut_down(hf_config: Mapping[str, object], min_heads: int, num_parts: int, min_layers: int = 0) -> dict[str, object]:
    """The entries of a config.json with few layers and narrow widths; heads keep their ratio to key/value heads.

    min_heads, min_layers: the fewest heads and layers. num_parts: it divides the number of key/value heads.
    """
    found: dict[str, object] = {}
    heads, kv_heads = hf_config.get("num_attention_heads"), hf_config.get("num_key_value_heads")
    ratio = heads // kv_heads if isinstance(heads, int) and isinstance(kv_heads, int) else 1
    num_heads = -(-max(CUT["num_attention_heads"], min_heads) // (num_parts * ratio)) * num_parts * ratio
    num_layers = max(CUT["num_hidden_layers"], min_layers)
    cut = {
        **CUT,
        **dict.fromkeys(("num_attention_heads", "n_head"), num_heads),
        **dict.fromkeys(("num_hidden_layers", "n_layer"), num_layers),
    }
    if hf_config.get("head_dim") is None:
        # Then a head's width is that of the model divided by the heads; channels rotate in pairs.
        cut["hidden_size"] = -(-CUT["hidden_size"] // (2 * num_heads)) * 2 * num_heads
    for name, most in cut.items():
        value = hf_config.get(name)
        if isinstance(value, int) and value > most:
            found[name] = most
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        if isinstance(heads, int) and isinstance(count := hf_config.get(name), int):
            found[name] = max(min(heads, num_heads) // (heads // count), 1)
    key_heads, value_heads = hf_config.get("linear_num_key_heads"), hf_config.get("linear_num_value_heads")
    if isinstance(key_heads, int) and isinstance(value_heads, int):
        found["linear_num_value_heads"] = min(key_heads, CUT["linear_num_key_heads"]) * (value_heads // key_heads)
    if "mamba_d_head" in hf_config:
        found["mamba_d_head"] = "auto"
    if "num_hidden_layers" in found:
        if isinstance(by_layer := hf_config.get("per_layer_config"), Mapping):
            found["per_layer_config"] = {key: value for key, value in by_layer.items() if int(key) < num_layers}
        for name, value in hf_config.items():
            if isinstance(value, list) and len(value) == hf_config["num_hidden_layers"]:
                found[name] = value[:num_layers]
    for name in _KINDS_OF_LAYERS:
        kinds = hf_config.get(name)
        if isinstance(kinds, (list, str)) and len(kinds) > num_layers:
            found[name] = _some_of_each(kinds, num_layers)
    if "vocab_size" in found:
        pad = hf_config.get("pad_token_id")
        found["pad_token_id"] = pad % CUT["vocab_size"] if isinstance(pad, int) else None
    return found | _cut_factors({**hf_config, **found})


def _some_of_each(kinds: Sequence[str], num_layers: int) -> Sequence[str]:
    """The first layers, the last of which are replaced by kinds that only occur later."""
    missing = [kind for kind in dict.fromkeys(kinds) if kind not in kinds[:num_layers]][:num_layers]
    kept = [*kinds[: num_layers - len(missing)], *missing]
    return "".join(kept) if isinstance(kinds, str) else kept


# Rotary parameters with an entry for each channel pair: a factor, or the axis that it rotates by.
_BY_PAIR = ("long_factor", "mrope_section")


def _cut_factors(hf_config: Mapping[str, object]) -> dict[str, object]:
    """Rotary parameters for as many channel pairs as the heads of a config.json have."""
    found: dict[str, object] = {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = hf_config.get(key)
        if not isinstance(rope, Mapping) or not any(isinstance(rope.get(each), list) for each in _BY_PAIR):
            continue
        width, heads = cast(int, hf_config["hidden_size"]), cast(int, hf_config["num_attention_heads"])
        head_dim = cast("int | None", hf_config.get("head_dim")) or width // heads
        fraction = cast(float, rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0)))
        num_pairs = int(head_dim * fraction) // 2
        of_pairs = {name: rope[name][:num_pairs] for name in ("short_factor", "long_factor") if name in rope}
        if isinstance(sections := rope.get("mrope_section"), list):
            later = [section * num_pairs // sum(sections) for section in sections[1:]]
            of_pairs["mrope_section"] = [num_pairs - sum(later), *later]
        found[key] = {**rope, **of_pairs}
    return found
