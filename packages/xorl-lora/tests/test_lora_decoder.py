"""Adapters on xorl's decoder: over fused weights, embeddings and the head, they are sums of whole weights."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from tiny_decoders import tiny_decoder, train_as_if_
from tiny_models import ARCHITECTURES, LATENT_EXPERTS, hf_config
from xorl.core.loss import cross_entropy
from xorl.core.models import SPECS, Decoder
from xorl.kernels.layout import SequenceLayout
from xorl.lora import AdapterSpec, adapter_parameters, adapters, init_adapters, inject, merge_
from xorl.lora.inject import base_parameters

VOCAB = 37
SIZES = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40}
CONFIGS = {
    **{architecture: hf_config(model_type, **SIZES) for model_type, architecture in ARCHITECTURES.items()},
    "LlamaForCausalLM": hf_config("llama", **SIZES, attention_bias=True, mlp_bias=True),
    "GPT2LMHeadModel": hf_config("gpt2", vocab_size=VOCAB, n_embd=24, tie_word_embeddings=False),
}
LAYOUT = SequenceLayout.from_lengths([9, 1, 14, 5])
IDS = torch.randint(VOCAB, (LAYOUT.num_tokens,), generator=torch.Generator().manual_seed(0))


def decoder(architecture: str = "Qwen3ForCausalLM", *, merge_qkv: bool = True) -> Decoder:
    model = tiny_decoder(CONFIGS[architecture], merge_qkv=merge_qkv)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    return model


def loss_of(model: Decoder, weights: dict[str, Tensor] | None = None) -> Tensor:
    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        return cross_entropy(hidden, head, {"labels": IDS.roll(-1)}).sum

    return functional_call(model, weights or {}, (IDS, LAYOUT), {"loss": loss})


def summed_weights(model: Decoder, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that the adapters amount to, written out: the plain twin."""
    weights = {name: parameter.detach() for name, parameter in base_parameters(model).items()}
    for name, adapter in adapters(model).items():
        change = adapter.scale * leaves[f"{name}.lora_B"] @ leaves[f"{name}.lora_A"]
        weight = weights[f"{adapter.path}.weight"]
        if adapter.is_embedding:
            weights[f"{adapter.path}.weight"] = weight + change.t()
            continue
        own = slice(adapter.pair.start, adapter.pair.stop)
        changed = weight[own] + change
        if f"{name}.lora_magnitude_offset" in leaves:
            magnitude = weight[own].norm(dim=1) + leaves[f"{name}.lora_magnitude_offset"]
            changed = changed * (magnitude / changed.norm(dim=1).detach())[:, None]
        weights[f"{adapter.path}.weight"] = torch.cat([weight[: own.start], changed, weight[own.stop :]])
    return weights


@pytest.mark.parametrize(
    ("architecture", "merge_qkv", "options"),
    [
        ("LlamaForCausalLM", True, {}),
        ("Qwen2ForCausalLM", False, {"use_rslora": True}),
        ("Qwen3ForCausalLM", True, {"targets": ("v_proj", "up_proj")}),
        ("Qwen3ForCausalLM", True, {"targets": ("q_proj", "v_proj", "gate_proj"), "use_dora": True}),
        ("LlamaForCausalLM", True, {"use_dora": True, "use_rslora": True}),
        ("Qwen3ForCausalLM", True, {"targets": ("qkv_proj",), "rank_pattern": {"k_proj": 5, "1.self_attn.v_proj": 2}}),
        ("Qwen3ForCausalLM", True, {"alpha_pattern": {r"layers\.\d+\.mlp\.up_proj": 3.0}}),
        ("Qwen3ForCausalLM", True, {"targets": ("embed_tokens", "lm_head", "down_proj")}),
        ("Qwen3ForCausalLM", True, {"targets": ("lm_head",), "use_dora": True}),
        ("GPT2LMHeadModel", True, {"targets": ("c_attn", "c_fc", "c_proj", "wte", "wpe")}),
    ],
)
def test_loss_and_gradients_are_those_of_the_summed_weights(architecture, merge_qkv, options):
    """Catches an adapter on the wrong rows of a fused weight, a wrong scale, and a norm that takes gradients."""
    model = decoder(architecture, merge_qkv=merge_qkv)
    inject(model, AdapterSpec(**{"rank": 3, "alpha": 4.0, **options}), seed=7)
    train_as_if_(adapter_parameters(model))
    trained = adapter_parameters(model)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in trained.items()}
    plain = decoder(architecture, merge_qkv=merge_qkv).requires_grad_(False)
    expected = loss_of(plain, summed_weights(model, leaves))
    loss = loss_of(model)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    loss.backward()
    expected.backward()
    for name, leaf in leaves.items():
        gradient = trained[name].grad
        assert (gradient - leaf.grad).norm() <= 2e-5 * leaf.grad.norm(), name
    assert not [name for name, value in base_parameters(model).items() if value.grad is not None]


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"targets": ("embed_tokens", "lm_head", "q_proj")}])
def test_a_merged_decoder_computes_the_same_without_adapters(options):
    """Catches a merge on other rows than the forward pass adapts, and one that forgets DoRA's norms."""
    model = decoder()
    inject(model, AdapterSpec(**{"rank": 3, **options}))
    train_as_if_(adapter_parameters(model))
    before = loss_of(model)
    merge_(model)
    torch.testing.assert_close(loss_of(model), before, rtol=1e-5, atol=0)
    assert model.state_dict().keys() == decoder().state_dict().keys()


# Linear layers that PEFT loads no adapter on.
REFUSED_BY_PEFT = {"NemotronHForCausalLM": "mixer.out_proj"}


@pytest.mark.parametrize("architecture", SPECS)
def test_default_targets_exist_under_the_names_of_checkpoints(architecture):
    """Catches a family whose default targets no layer has, and adapters under names that other tools do not know."""
    model = decoder(architecture)
    base_names = [name for name, _ in model.named_parameters()]
    targets = SPECS[architecture].default_targets(model.config)
    names = inject(model, AdapterSpec(rank=2, targets=targets))
    refused = REFUSED_BY_PEFT.get(architecture, "none")
    linear = [name for name in inject(decoder(architecture), AdapterSpec(rank=2)) if not name.endswith(refused)]
    # In mixtures of experts, the names of other projections are those of experts, too, and these are many.
    mixers = (".self_attn.", ".linear_attn.")
    assert set(names) == {name for name in linear if not model.config.has_experts or any(x in name for x in mixers)}
    assert {name.rpartition(".")[2] for name in names} == {target.rpartition(".")[2] for target in targets}
    prefix = SPECS[architecture].checkpoint_names.prefix
    assert all(name.startswith(prefix) for name in names)
    assert list(base_parameters(model)) == base_names
    assert len(adapters(model)) == len(names)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"targets": ("embed_tokens", "lm_head", "q_proj")}])
def test_fresh_adapters_change_no_output_and_depend_on_names_alone(options):
    """Catches values that other targets, fusion or the meta device shift, and a first step that begins elsewhere."""
    model, apart = decoder(), decoder(merge_qkv=False)
    before = loss_of(model)
    inject(model, AdapterSpec(rank=3, **options), seed=5)
    torch.testing.assert_close(loss_of(model), before, rtol=1e-6, atol=0)
    inject(apart, AdapterSpec(rank=3, targets=("q_proj",)), seed=5)
    with torch.device("meta"):
        spec = SPECS["Qwen3ForCausalLM"]
        late = spec.build(model.config)
        inject(late, AdapterSpec(rank=3, **options), seed=5)
    late.to_empty(device="cpu")
    init_adapters(late, seed=5)
    for name, value in adapter_parameters(model).items():
        assert torch.equal(value, adapter_parameters(late)[name]), name
        if name in adapter_parameters(apart) and not options.get("use_dora"):
            assert torch.equal(value, adapter_parameters(apart)[name]), name
    first, again = adapter_parameters(late)["model.layers.0.self_attn.q_proj.lora_A"].clone(), late
    init_adapters(again, seed=5, generation=1)
    assert not torch.equal(first, adapter_parameters(again)["model.layers.0.self_attn.q_proj.lora_A"])


def test_modules_to_save_train_whole():
    """Catches a head that was asked for and stays frozen, and adapters that it costs."""
    model = decoder()
    inject(model, AdapterSpec(targets=("q_proj",), modules_to_save=("lm_head", "model.norm")))
    trained = {name for name, value in base_parameters(model).items() if value.requires_grad}
    assert trained == {"lm_head.weight", "model.norm.weight"}
    loss_of(model).backward()
    assert dict(model.named_parameters())["lm_head.weight"].grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("architecture", "merge_qkv", "options", "message"),
    [
        ("Qwen3ForCausalLM", True, {"targets": ("gate",)}, r"match no layer of Decoder; its layers are .*'gate_proj'"),
        ("GPT2LMHeadModel", False, {"targets": ("c_attn",)}, "set merge_qkv=True"),
        (
            "Qwen3ForCausalLM",
            True,
            {"targets": ("embed_tokens",), "use_dora": True},
            "use_dora supports only linear layers",
        ),
        ("Qwen3ForCausalLM", True, {"rank_pattern": {"qproj": 4}}, r"rank_pattern: 'qproj' does not match any"),
        ("Qwen3ForCausalLM", True, {"modules_to_save": ("k_proj",)}, "use an adapter instead"),
        (
            "Qwen3ForCausalLM",
            True,
            {"modules_to_save": ("head",)},
            r"'head' matches no module of Decoder; it has .*lm_head",
        ),
        ("Qwen3ForCausalLM", True, {"modules_to_save": ("o_proj",)}, "is also an adapter target"),
    ],
)
def test_what_does_not_fit_the_decoder_is_an_error_that_says_so(architecture, merge_qkv, options, message):
    """Catches an option that is ignored because nothing matches it."""
    model = decoder(architecture, merge_qkv=merge_qkv)
    with pytest.raises(ValueError, match=message):
        inject(model, AdapterSpec(**options))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_tied_embedding_takes_no_adapter():
    """Catches a merge that changes the head along with the embedding."""
    spec = SPECS["Qwen3ForCausalLM"]
    tied = spec.build(spec.config_from_hf(hf_config(tie_word_embeddings=True)))
    with pytest.raises(ValueError, match="or the head shares its weight"):
        inject(tied, AdapterSpec(targets=("embed_tokens",)))
    with pytest.raises(ValueError, match="lm_head is tied to the embedding"):
        inject(tied, AdapterSpec(targets=("q_proj",), modules_to_save=("lm_head",)))
    with pytest.raises(ValueError, match="shares its weight with the head"):
        inject(tied, AdapterSpec(modules_to_save=("embed_tokens",)))


def test_dropout_acts_on_the_adapters_in_training_alone():
    """Catches dropout that touches the frozen path, or goes on in evaluation."""
    model = decoder()
    inject(model, AdapterSpec(rank=3, dropout=0.5))
    train_as_if_(adapter_parameters(model))
    values = {mode: [loss_of(model.train(mode == "train")).item() for _ in range(2)] for mode in ("train", "eval")}
    assert values["train"][0] != values["train"][1]
    assert values["eval"][0] == values["eval"][1]
    inject(fresh := decoder(), AdapterSpec(rank=3, dropout=0.5))
    assert loss_of(fresh.train()) == loss_of(decoder())


def test_adapters_on_experts_without_a_gate_are_refused():
    """Catches adapters whose factors have rows for a gate that there is not."""
    model = tiny_decoder(hf_config("nemotron_h", **LATENT_EXPERTS))
    assert inject(model, AdapterSpec(rank=2, targets=("in_proj", "fc1_latent_proj", "shared_experts.up_proj")))
    model = tiny_decoder(hf_config("nemotron_h", **LATENT_EXPERTS))
    with pytest.raises(ValueError, match=r"^targets: model\.layers\.1\.mixer\.experts\.up_proj: .* such as in_proj$"):
        inject(model, AdapterSpec(rank=2, targets=("up_proj",)))
