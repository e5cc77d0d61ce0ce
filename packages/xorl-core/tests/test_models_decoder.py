"""The decoder: documents in a pack are alone, dtypes follow the activations, initial values depend on names alone."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tiny_models import ARCHITECTURES, hf_config
from xorl.core.models import SPECS, Decoder
from xorl.core.nn import LayerKernels
from xorl.core.nn.roles import IN_FP32
from xorl.core.shards import Box
from xorl.kernels.attention import ATTENTION, AttentionRequest, resolve_attention
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy

VOCAB = 61
LENGTHS = [9, 1, 14, 5]
# Weights large enough that positions and neighbours matter.
SIZES = {"vocab_size": VOCAB, "initializer_range": 0.3}
HF_CONFIGS = {architecture: hf_config(model_type, **SIZES) for model_type, architecture in ARCHITECTURES.items()} | {
    "Qwen2ForCausalLM": hf_config("qwen2", **SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "Qwen3ForCausalLM": hf_config("qwen3", **SIZES, tie_word_embeddings=True),
    "MistralForCausalLM": hf_config("mistral", **SIZES, sliding_window=4),
    "Qwen3MoeForCausalLM": hf_config("qwen3_moe", **SIZES, mlp_only_layers=[1]),
    # Enough experts for each token that none has so few rows that the CPU multiplies them otherwise.
    "Glm4MoeLiteForCausalLM": hf_config("glm4_moe_lite", **SIZES, num_experts_per_tok=4),
}
BACKENDS = ATTENTION.runnable(AttentionRequest("cpu", torch.float32, head_dim=8))


def make_decoder(architecture: str, *, backend: str = "sdpa", merge_qkv: bool = True, **changes: object) -> Decoder:
    spec = SPECS[architecture]
    config = spec.config_from_hf({**HF_CONFIGS[architecture], **changes})
    request = next(iter(config.attention_requests("cpu", torch.float32).values()))
    attention = resolve_attention(backend if backend in ATTENTION.runnable(request) else "eager", request)
    decoder = spec.build(config, merge_qkv=merge_qkv, kernels=LayerKernels(attention=attention))
    decoder.init_weights(seed=1)
    return decoder


def make_ids(lengths: list[int]) -> torch.Tensor:
    return torch.randint(VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(0))


def trained(decoder: Decoder) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad}


def test_every_family_is_tested_here():
    """Catches a family added to the table without a row in these tests."""
    assert set(HF_CONFIGS) == set(SPECS)


@pytest.mark.parametrize("architecture", SPECS)
def test_packed_loss_and_gradient_are_the_sums_over_documents(architecture):
    """Catches positions that run on, masks that leak, and a loss that averages."""
    decoder, ids = make_decoder(architecture), make_ids(LENGTHS)
    labels = ids.roll(-1)

    def loss_of(ids, labels, lengths):
        layout = SequenceLayout.from_lengths(lengths)
        return decoder(ids, layout, lambda hidden, weight: linear_cross_entropy(hidden, weight, labels)[0].sum())

    packed = loss_of(ids, labels, LENGTHS)
    packed.backward()
    packed_gradients = [parameter.grad.clone() for parameter in trained(decoder).values()]
    decoder.zero_grad()
    alone = [loss_of(*parts, [len(parts[0])]) for parts in zip(ids.split(LENGTHS), labels.split(LENGTHS), strict=True)]
    torch.stack(alone).sum().backward()
    torch.testing.assert_close(packed, sum(alone), rtol=1e-6, atol=0)
    for gradient, parameter in zip(packed_gradients, trained(decoder).values(), strict=True):
        assert (gradient - parameter.grad).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", SPECS)
def test_changing_one_document_leaves_the_others_bitwise_alone(architecture, backend):
    """Catches any path, attention or other, by which one document of a pack reaches another."""
    decoder, ids = make_decoder(architecture, backend=backend), make_ids(LENGTHS)
    layout = SequenceLayout.from_lengths(LENGTHS)
    changed = slice(10, 24)  # the third document
    other = ids.clone()
    other[changed] = (other[changed] + 1) % VOCAB
    before, after = decoder(ids, layout), decoder(other, layout)
    assert not torch.equal(before[changed], after[changed])
    after[changed] = before[changed]
    assert torch.equal(before, after)


@pytest.mark.parametrize("architecture", SPECS)
def test_the_order_of_tokens_matters(architecture):
    """Catches a decoder without positions."""
    decoder, ids = make_decoder(architecture), make_ids([12])
    layout = SequenceLayout.from_lengths([12])
    swapped = ids.clone()
    swapped[[0, 5]] = ids[[5, 0]]
    assert ids[0] != ids[5]
    assert not torch.allclose(decoder(ids, layout)[-1], decoder(swapped, layout)[-1], atol=1e-4)


def test_a_window_in_every_layer_bounds_how_far_back_a_token_sees():
    """Catches a window that is configured and not passed to the kernel: two layers of 4 reach 6 tokens back."""
    decoder, ids = make_decoder("Qwen2ForCausalLM", max_window_layers=0), make_ids([12])
    layout = SequenceLayout.from_lengths([12])
    near, far = ids.clone(), ids.clone()
    near[5], far[4] = (ids[5] + 1) % VOCAB, (ids[4] + 1) % VOCAB
    last = decoder(ids, layout)[-1]
    assert torch.equal(decoder(far, layout)[-1], last)
    assert not torch.equal(decoder(near, layout)[-1], last)


@pytest.mark.parametrize("architecture", SPECS)
def test_compute_dtype_rules_whatever_dtype_the_parameters_have(architecture):
    """Catches a layer that computes in its parameters' dtype: fp32 and gathered bf16 weights must give one result."""
    decoder, ids = make_decoder(architecture), make_ids(LENGTHS)
    layout = SequenceLayout.from_lengths(LENGTHS)
    decoder.compute_dtype = torch.bfloat16
    from_wide = decoder(ids, layout)
    for name, role in decoder.parameter_roles().items():
        if role not in IN_FP32:
            parameter = decoder.get_parameter(name)
            parameter.data = parameter.data.bfloat16()
    from_half = decoder(ids, layout)
    assert from_wide.dtype == torch.bfloat16
    assert torch.equal(from_wide, from_half)


@pytest.mark.parametrize("architecture", SPECS)
def test_half_precision_parameters_get_the_gradients_of_wide_ones(architecture):
    """Catches sums over tokens in half precision, in which a token that occurs often stops learning."""
    decoder = make_decoder(architecture).to(torch.bfloat16)  # so that both have the same values
    lengths = [50] * 40
    ids = make_ids(lengths) % 3
    layout = SequenceLayout.from_lengths(lengths)
    decoder.compute_dtype = torch.bfloat16
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        decoder.to(dtype).zero_grad()
        decoder(ids, layout, lambda h, w: linear_cross_entropy(h, w, ids.roll(-1))[0].sum()).backward()
        gradients.append([parameter.grad.float() for parameter in trained(decoder).values()])
    for name, got, wanted in zip(trained(decoder), *gradients, strict=True):
        assert (got - wanted).norm() <= 4e-3 * wanted.norm(), name


@pytest.mark.parametrize("architecture", SPECS)
@pytest.mark.parametrize("merge_qkv", [True, False])
def test_meta_construction_loses_nothing(architecture, merge_qkv):
    """Catches buffers (rotary frequencies) or parameters that stay uninitialised after `to_empty`."""
    decoder, ids = make_decoder(architecture, merge_qkv=merge_qkv), make_ids(LENGTHS)
    layout = SequenceLayout.from_lengths(LENGTHS)
    with torch.device("meta"):
        spec = SPECS[architecture]
        kernels = next(layer.self_attn.kernels for layer in decoder.layers if layer.self_attn is not None)
        late = spec.build(decoder.config, merge_qkv=merge_qkv, kernels=kernels)
    assert all(tensor.is_meta for tensor in (*late.parameters(), *late.buffers()))
    late.to_empty(device="cpu")
    late.init_weights(seed=1)
    assert torch.equal(decoder(ids, layout), late(ids, layout))


@pytest.mark.parametrize("architecture", SPECS)
def test_initial_values_depend_on_seed_name_and_shape_alone(architecture, monkeypatch):
    """Catches values that depend on the order of parameters, on global random state or on where a shard lies."""
    decoder = make_decoder(architecture)
    torch.manual_seed(12345)
    depth = "n_layer" if architecture == "GPT2LMHeadModel" else "num_hidden_layers"
    types = {"GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}}
    deeper = make_decoder(architecture, **{depth: 3}, **types.get(architecture, {}), vocab_size=VOCAB)
    names = dict(deeper.named_parameters())
    for name, parameter in decoder.named_parameters():
        scaled = decoder.config.scale_residual_init and name.endswith(("o_proj.weight", "down_proj.weight"))
        if not scaled and parameter.shape == names[name].shape:
            assert torch.equal(parameter, names[name]), name
    whole = {name: parameter.clone() for name, parameter in decoder.named_parameters()}
    for parameter in decoder.parameters():
        parameter.data.fill_(torch.nan)
    with monkeypatch.context() as patch:
        for module in ("models.decoder", "nn.share"):
            patch.setattr(f"xorl.core.{module}.local", lambda parameter: parameter[1:3])
        box = lambda parameter: Box((1,) + (0,) * (parameter.dim() - 1), tuple(parameter[1:3].shape))  # noqa: E731
        patch.setattr("xorl.core.nn.share.local_box", box)
        decoder.init_weights(seed=1)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter[1:3], whole[name][1:3]), name
        assert parameter[3:].isnan().all(), name
    decoder.init_weights(seed=2)
    assert not torch.equal(decoder.model.embed_tokens.weight, names["model.embed_tokens.weight"])


@pytest.mark.parametrize("architecture", SPECS)
def test_initial_values_have_the_scale_the_config_asks_for(architecture):
    """Catches norms that start at zero, biases that start at noise, residual projections that are not scaled, and
    scalars that are drawn."""
    width = "n_embd" if architecture == "GPT2LMHeadModel" else "hidden_size"
    decoder = make_decoder(architecture, **{width: 64})
    for name, parameter in decoder.named_parameters():
        path, _, leaf = name.rpartition(".")
        stated = getattr(decoder.get_submodule(path), "initial_values", {})
        if leaf in stated:
            if isinstance(stated[leaf], float):
                assert (parameter == torch.tensor(stated[leaf])).all(), name
        elif name.endswith(("bias", "correction")):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1 - decoder.config.norm.offset).all(), name
        else:
            scaled = decoder.config.scale_residual_init and name.endswith(("o_proj.weight", "down_proj.weight"))
            tolerance = 0.1 if parameter.numel() > 64 else 0.3  # few values
            assert parameter.std().item() == pytest.approx(0.3 / 2 if scaled else 0.3, rel=tolerance), name


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("architecture", SPECS)
def test_each_half_of_a_layer_can_be_recomputed_alone(architecture, reentrant):
    """Catches halves of a layer that hand state to each other, which recomputing one of them would lose."""
    decoder, ids = make_decoder(architecture), make_ids(LENGTHS)
    layout = SequenceLayout.from_lengths(LENGTHS)
    decoder(ids, layout).square().mean().backward()
    plain = [parameter.grad.clone() for parameter in trained(decoder).values()]
    for half in ("self_attn", "mlp"):
        decoder.zero_grad()
        for layer in decoder.layers:
            module = layer.mlp if half == "mlp" else layer.self_attn or layer.linear_attn
            if module is not None:
                module.forward = _recomputed(module.forward, reentrant)
        decoder(ids, layout).square().mean().backward()
        for gradient, parameter in zip(plain, trained(decoder).values(), strict=True):
            assert torch.equal(gradient, parameter.grad)


def _recomputed(forward, reentrant):
    return lambda *args: checkpoint(forward, *args, use_reentrant=reentrant)


@pytest.mark.parametrize(("first_trained", "kept"), [(0, [True, True, True]), (1, [False, True, True])])
def test_layers_before_the_first_one_that_is_trained_keep_nothing_for_a_gradient(first_trained, kept):
    """Catches frozen layers that are differentiated, and a first layer that is another to what recomputes layers."""
    decoder, ids = make_decoder("LlamaForCausalLM", num_hidden_layers=3), make_ids(LENGTHS)
    decoder.requires_grad_(False)
    decoder.model.layers[first_trained:].requires_grad_(True)
    needed = []
    for layer in decoder.model.layers:
        layer.register_forward_pre_hook(lambda _, inputs: needed.append(inputs[0].requires_grad))
        layer.register_forward_hook(lambda _, __, output: needed.append(output.requires_grad))
    decoder(ids, SequenceLayout.from_lengths(LENGTHS))
    assert needed[1::2] == kept
    assert needed[0] == (first_trained == 0)


def test_the_head_is_the_embedding_when_tied_and_absent_from_the_parameters():
    """Catches a tied head stored, exported or optimised twice."""
    tied, untied = make_decoder("Qwen3ForCausalLM"), make_decoder("Qwen3ForCausalLM", tie_word_embeddings=False)
    assert tied.head_weight is tied.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())
    assert untied.head_weight is dict(untied.named_parameters())["lm_head.weight"]


def test_input_that_does_not_fit_is_refused():
    """Catches rows whose layout describes other tokens, and documents beyond the learned positions."""
    decoder = make_decoder("GPT2LMHeadModel", n_positions=64)
    with pytest.raises(ValueError, match=r"one packed row of the layout's 5 tokens, got shape \[4\]"):
        decoder(make_ids([4]), SequenceLayout.from_lengths([5]))
    with pytest.raises(ValueError, match=r"one packed row of the layout's 4 tokens, got shape \[1, 4\]"):
        decoder(make_ids([4])[None], SequenceLayout.from_lengths([4]))
    with pytest.raises(ValueError, match="65 tokens exceeds the model's 64 learned positions"):
        decoder(make_ids([65]), SequenceLayout.from_lengths([65]))


def test_the_factor_on_embeddings_is_rounded_to_their_dtype() -> None:
    """Catches a factor in fp32, with which embeddings in bf16 are not those that the model was trained with."""
    decoder, ids = make_decoder("Gemma3ForCausalLM"), make_ids(LENGTHS)
    trunk = decoder.model
    factor = torch.tensor(32**0.5, dtype=torch.bfloat16)
    expected = trunk.embed_tokens.weight.detach()[ids].bfloat16() * factor
    seen = []
    trunk.layers[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    decoder.compute_dtype = torch.bfloat16
    decoder(ids, SequenceLayout.from_lengths(LENGTHS))
    assert torch.equal(seen[0], expected)


def test_factors_on_layers_are_not_trained():
    """Catches constants of a checkpoint that an optimizer changes."""
    decoder = make_decoder("Gemma4ForCausalLM")
    fixed = {name for name, parameter in decoder.named_parameters() if not parameter.requires_grad}
    assert fixed == {f"model.layers.{index}.layer_scalar" for index in range(decoder.config.num_layers)}
