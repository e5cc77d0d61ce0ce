"""Every option of a model shows: changed in its description, in what the model computes; changed in its config.json, in
the description.

So the comparison with transformers (`test_hf_parity.py`) fails for a model that ignores an option, and for a value that
is read and then forgotten.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from hf_cases import CASES, IDS, LENGTHS, Case, make_rows, make_twin
from xorl.core.models import SPECS, Decoder, nemotron_h
from xorl.core.models.decoder_config import Arrangement, DecoderConfig
from xorl.core.models.hf_config import is_inert
from xorl.core.nn import LayerKernels
from xorl.core.nn.layers import ACTIVATIONS
from xorl.core.nn.moe import RouterConfig, Scores
from xorl.kernels.attention import resolve_attention
from xorl.kernels.experts.gates import GELU_TANH, SILU
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy

# Relative; the comparison with transformers allows 1e-5. Two forms of GELU differ less than other options.
LEAST_CHANGE, LEAST_CHANGE_OF_GELU = 1e-3, 5e-5
# Options that only decide the shapes of weights, or of which other tests see the effect.
LEFT_OUT = {
    *("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "width", "num_experts"),
    *("initializer_range", "scale_residual_init"),  # of initial weights
    "balance_coef",  # of a loss
    "max_position_embeddings",  # a limit
}
# Changes that nothing shows: the probabilities of all experts sum to 1 anyway, and the last norm removes the factor on
# the output of the last layer, which differs from all others.
HIDDEN: dict[tuple[str, str], set[str]] = {
    ("Qwen3MoeForCausalLM", "all experts"): {"ffn.router.normalize=False"},
    ("Gemma4ForCausalLM", "experts, untied"): {"output_scale=False"},
}
# Of so few channel pairs, none lies between the bounds.
HIDDEN |= {
    (f"{name}ForCausalLM", "grouped heads"): {"mixer.rope.beta_fast=32.0"} for name in ("DeepseekV3", "Glm4MoeLite")
}


def outcome(config: DecoderConfig, weights: Mapping[str, Tensor], *, of_gradient: bool) -> Tensor:
    """The logits of the packed row, or the gradient of the embedding. Missing weights are 1 in norms, and else 0."""
    requests = config.attention_requests("cpu", torch.float32).items()
    attention = {index: resolve_attention("auto", each) for index, each in requests}
    with torch.device("meta"):
        decoder = Decoder(config, merge_qkv=True, kernels=LayerKernels(attention_by_layer=attention))
    values = {}
    for name, parameter in decoder.named_parameters():
        initial = 1 - config.norm.offset if name.endswith("norm.weight") else 0.0
        has_value = name in weights and weights[name].shape == parameter.shape
        values[name] = weights[name] if has_value else torch.full(parameter.shape, initial)
    ids, labels = make_rows()
    layout = SequenceLayout.from_lengths(LENGTHS)
    if not of_gradient:
        with torch.no_grad():
            return functional_call(decoder, values, (ids, layout))
    embedding = values["model.embed_tokens.weight"].clone().requires_grad_()
    values["model.embed_tokens.weight"] = embedding

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels)[0].sum()

    return torch.autograd.grad(functional_call(decoder, values, (ids, layout, loss)), embedding)[0]


def changed(owner: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each copy of a description, or of a part of one, with one option changed: the name of the change, the copy, and
    the innermost part, as it was, that has the option."""
    for field in fields(owner):
        own = getattr(owner, field.name)
        if field.name in LEFT_OUT:
            continue
        if field.name == "layers":
            yield from _changed_layers(owner)
            continue
        if is_dataclass(own):
            for name, other, part in changed(own):
                yield f"{field.name}.{name}", replace(owner, **{field.name: other}), part
        for other in others(owner, field.name, own):
            if other != own:
                yield f"{field.name}={other}", replace(owner, **{field.name: other}), owner


def _changed_layers(config: DecoderConfig) -> Iterator[tuple[str, DecoderConfig, Any]]:
    """All equal layers at once."""
    for kind in dict.fromkeys(config.layers):
        for name, other, part in changed(kind):
            layers = tuple(other if layer == kind else layer for layer in config.layers)
            yield name, replace(config, layers=layers), part


def others(owner: Any, name: str, own: Any) -> Iterable[Any]:
    """Values to try for a field. Options that are off stay off, unless the weights suffice for them."""
    match name:
        case "shared" if owner.own_norms:
            return ()  # there are no experts without it
        case "norms" if owner.mixer is None or owner.ffn is None:
            return ()  # they are refused
        case "norms":
            return get_args(Arrangement)
        case "kind":
            return {"rms": ("layer",), "layer": ("rms",), "gated": (), "plain": ()}.get(own, ("default",))
        case "activation":
            return [other for other in ACTIVATIONS if ACTIVATIONS[other] is not ACTIVATIONS.get(own)]
        case "scale":
            return (owner.head_dim**-0.5, 1.0)
        case "window" if own is not None:
            return (None, own - 1, own + 1)
        case "rope":
            return (None,)
        case "qk_norm" if owner.latent is not None:
            return ()  # they are refused together
        case "qk_norm":
            return (None, "head") if owner.norm_after_rope else (None, "head", "whole")
        case "norm_after_rope" if owner.qk_norm != "head" or owner.rope is None:
            return ()
        case "rotary_dim" if owner.kind == "longrope":
            return ()  # it is refused: longrope has a factor for each pair
        case "truncate" if owner.kind != "yarn":
            return ()
        case "tie_word_embeddings" | "normalize" | "truncate" | "norm_after_rope":
            return (not own,)
        case "scores":
            return get_args(Scores)
        case "gate":
            initial = (SILU,) if own == SILU else ()
            others = [own._replace(**{field: value}) for field, value in SILU._asdict().items()]
            return [GELU_TANH, *initial, *others]
        case "num_groups":
            return ()
        case "num_active_groups":
            return [other for other in (own + 1, owner.num_groups) if own < other <= owner.num_groups]
        case "eps" if isinstance(owner, RouterConfig):
            return (1.0,) if own and owner.normalize else ()
        case "eps" if own < 1e-5:
            return (own * 1e5,)
        case "eps" | "theta" | "beta" | "trained_length":
            return (own * 2,)
        case "num_active":
            return [other for other in (own - 1, own + 1) if 0 < other <= owner.num_experts]
        case "attention_factor":
            return (1.0, own**2)
        case "short_factors" | "long_factors":
            return ((1.0,) * len(own),)
    if isinstance(own, bool):
        return (False,)
    [default] = [field.default for field in fields(owner) if field.name == name]
    return () if default is MISSING else (default,)


# Changes that showed in a case: its architecture, the name of the change, and the part that has the option. A further
# case of the architecture that has the very same part does not have to show it again.
SHOWN: set[tuple[str, str, str]] = set()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_option_of_a_description_shows(case: Case) -> None:
    # Catches an option that no case of the comparison with transformers would miss.
    decoder, _ = make_twin(case.make_hf_model(), backend="sdpa", merge_qkv=True)
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    expected = {of_gradient: outcome(decoder.config, weights, of_gradient=of_gradient) for of_gradient in (False, True)}
    hidden, known = set(), set()
    for name, config, part in changed(decoder.config):
        key = case.architecture, name, repr(part)
        if key in SHOWN:
            known.add(name)
            continue
        of_gradient = name.startswith("padding_idx")
        found = outcome(config, weights, of_gradient=of_gradient)
        change = (found - expected[of_gradient]).abs().max() / expected[of_gradient].abs().max()
        if change < (LEAST_CHANGE_OF_GELU if "=gelu" in name else LEAST_CHANGE):
            hidden.add(name)
        else:
            SHOWN.add(key)
    assert hidden == HIDDEN.get((case.architecture, case.label), set()) - (known - hidden)


# Keys that are read and change nothing, and why.
WITHOUT_EFFECT = {
    "GPT2LMHeadModel": {"reorder_and_upcast_attn", "pad_token_id"},  # scores are in fp32; the row of padding is trained
    # transformers ignores these, too.
    "Gemma3ForCausalLM": {"attn_logit_softcapping", "_sliding_window_pattern"},
    "Gemma4ForCausalLM": {"use_double_wide_mlp", "vocab_size_per_layer_input"},
    "HunYuanDenseV1ForCausalLM": {"rope_parameters.factor"},  # alpha takes its place
    # The CausalLM of these has no loss of routers; layers that predict further tokens are not trained.
    "Glm4MoeForCausalLM": {"output_router_logits", "num_nextn_predict_layers"},
    "DeepseekV3ForCausalLM": {"output_router_logits", "num_nextn_predict_layers"},
    "Dots1ForCausalLM": {"output_router_logits"},
    "Glm4MoeLiteForCausalLM": {"output_router_logits"},
    "SolarOpenForCausalLM": {"output_router_logits"},
    "GraniteMoeHybridForCausalLM": {"mamba_chunk_size"},
    "NemotronHForCausalLM": {"pad_token_id", "n_shared_experts", *nemotron_h.INERT}
    - {"time_step_rank", "rms_norm_eps", "mtp_hybrid_override_pattern", "num_hidden_layers"},  # no longer saved
}
# Without the keys that take precedence over others, and with those that others need.
CLEARED = {"layer_types": None, "no_rope_layers": None, "output_router_logits": True}
CLEARED |= {"use_sliding_window": True, "sliding_window": 6}


def changed_values(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each copy of a mapping with one value changed, at any depth, and the path of its key."""
    for key, own in values.items():
        if isinstance(own, Mapping):
            for path, other in changed_values(own):
                yield f"{key}.{path}", {**values, key: other}
            continue
        for other in others_of_json(own):
            yield key, {**values, key: other}


def others_of_json(own: Any) -> list[Any]:
    match own:
        case bool():
            return [not own]
        case int():
            return [own + 1, 0]
        case float():
            return [own * 1.5 + 0.25, 0.0]
        case str():
            return [own + "?"]
        case [first, *rest]:
            return [[other, *rest] for other in others_of_json(first)]
        case _:
            return [6]


@pytest.mark.parametrize("architecture", SPECS)
def test_every_key_that_is_read_changes_the_description(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    # Catches a key that a family reads, so that nobody is warned of it, and then forgets.
    spec = SPECS[architecture]
    seen, unseen = set(), set()
    for case in CASES:
        if case.architecture != architecture:
            continue
        saved = json.loads(case.hf_config().to_json_string(use_diff=False))
        saved = {key: value for key, value in saved.items() if key == "pad_token_id" or not is_inert(key)}
        is_patterned = saved.get("sliding_window_pattern") != 0
        cleared = saved | {key: value for key, value in CLEARED.items() if key in saved}
        for values in (saved, cleared) if is_patterned else (saved,):
            expected = spec.config_from_hf(values)
            for path, other in changed_values(values):
                caplog.clear()
                try:
                    is_seen = spec.config_from_hf(other) != expected or path in caplog.text
                except ValueError:
                    is_seen = True
                (seen if is_seen else unseen).add(path)
    unseen = {path for path in unseen - seen if not path.startswith("summary_")}
    assert unseen == WITHOUT_EFFECT.get(architecture, set())
