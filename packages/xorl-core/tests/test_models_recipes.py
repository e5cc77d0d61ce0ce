"""Recipes: checkpoint tensors become native parameters and come out again, bit for bit, whole or by rows."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from xorl.core.models import SPECS, DecoderConfig, ModelSpec
from xorl.core.models.recipes import WeightRecipe
from xorl.core.nn import LayerKernels
from xorl.kernels.attention.reference import eager_attention

SIZES: dict[str, object] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
CASES: list[tuple[str, dict[str, object]]] = [
    ("LlamaForCausalLM", SIZES),
    ("LlamaForCausalLM", {**SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("Qwen2ForCausalLM", SIZES),
    ("Qwen3ForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    ("Qwen3ForCausalLM", {**SIZES, "attention_bias": True}),
    ("GPT2LMHeadModel", {"vocab_size": 13, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    ("MixtralForCausalLM", {**SIZES, "num_local_experts": 3, "intermediate_size": 5}),
    ("Qwen3MoeForCausalLM", {**SIZES, **EXPERTS, "mlp_only_layers": [1]}),
]


class MemorySource:
    """Named tensors in memory, read as a checkpoint reader reads them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def dtype(self, name):
        return self.tensors[name].dtype

    def read(self, name, start=None, stop=None):
        return self.tensors[name][start:stop]


def make_parameters(spec: ModelSpec, config: DecoderConfig, *, merge_qkv: bool) -> dict[str, Tensor]:
    """Random native parameters."""
    decoder = spec.build(config, merge_qkv=merge_qkv, kernels=LayerKernels(attention=eager_attention))
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(p.shape, generator=generator) for name, p in decoder.named_parameters()}


def split_all(recipes: Mapping[str, WeightRecipe], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What an export does: split every parameter, join the parts of shared sources."""
    parts: dict[str, list[Tensor]] = {}
    join_dims: dict[str, int | None] = {}
    for name, recipe in recipes.items():
        for source, tensor in recipe.split(parameters[name]).items():
            parts.setdefault(source, []).append(tensor)
            join_dims[source] = recipe.join_dim
    joined = {}
    for source, tensors in parts.items():
        dim = join_dims[source]
        assert (dim is None) == (len(tensors) == 1), source
        joined[source] = tensors[0] if dim is None else torch.cat(tensors, dim=dim)
    return joined


@pytest.mark.parametrize("merge_qkv", [True, False])
@pytest.mark.parametrize(("architecture", "hf_config"), CASES)
def test_parameters_survive_the_round_trip_bit_for_bit(architecture, hf_config, merge_qkv):
    """Catches a recipe that loses, transposes, reorders or misnames anything, and a parameter without a recipe."""
    spec = SPECS[architecture]
    config = spec.config_from_hf(hf_config)
    parameters = make_parameters(spec, config, merge_qkv=merge_qkv)
    recipes = spec.recipes(config, merge_qkv=merge_qkv)
    assert {name: recipe.shape for name, recipe in recipes.items()} == {
        name: tuple(tensor.shape) for name, tensor in parameters.items()
    }
    source = MemorySource(split_all(recipes, parameters))
    assert set(source.names()) == {name for recipe in recipes.values() for name in recipe.sources}
    for name, recipe in recipes.items():
        assert torch.equal(recipe.read(source, 0, recipe.shape[0]), parameters[name]), name


@pytest.mark.parametrize("merge_qkv", [True, False])
@pytest.mark.parametrize(("architecture", "hf_config"), CASES)
def test_every_range_of_rows_is_those_rows(architecture, hf_config, merge_qkv):
    """Catches wrong rows at the seams of stacked tensors, which only some shard sizes would hit."""
    spec = SPECS[architecture]
    config = spec.config_from_hf(hf_config)
    parameters = make_parameters(spec, config, merge_qkv=merge_qkv)
    recipes = spec.recipes(config, merge_qkv=merge_qkv)
    source = MemorySource(split_all(recipes, parameters))
    for name, recipe in recipes.items():
        if "layers.1" in name:
            continue
        for start in range(recipe.shape[0] + 1):
            for stop in range(start, recipe.shape[0] + 1):
                assert torch.equal(recipe.read(source, start, stop), parameters[name][start:stop]), (name, start, stop)


@pytest.mark.parametrize(("architecture", "hf_config"), CASES)
def test_merged_and_separate_projections_make_the_same_checkpoint(architecture, hf_config):
    """Catches heads assigned to the wrong projection: the same checkpoint must serve both layouts."""
    spec = SPECS[architecture]
    config = spec.config_from_hf(hf_config)
    merged = spec.recipes(config, merge_qkv=True)
    separate = spec.recipes(config, merge_qkv=False)
    source = MemorySource(split_all(merged, make_parameters(spec, config, merge_qkv=True)))
    parameters = {name: recipe.read(source, 0, recipe.shape[0]) for name, recipe in separate.items()}
    again = split_all(separate, parameters)
    torch.testing.assert_close(again, source.tensors, rtol=0, atol=0)


@pytest.mark.parametrize(("architecture", "hf_config"), CASES)
def test_prefixes_buffers_and_a_tied_head_are_settled_by_the_view(architecture, hf_config):
    """Catches checkpoints of the bare trunk, with buffers of older releases, or with a copy of a tied head."""
    spec = SPECS[architecture]
    config = spec.config_from_hf(hf_config)
    recipes = spec.recipes(config, merge_qkv=True)
    wanted = split_all(recipes, make_parameters(spec, config, merge_qkv=True))
    prefix = spec.checkpoint_names.prefix
    buffers = {
        "model.rotary_emb.inv_freq": torch.zeros(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3),
        "transformer.h.0.attn.bias": torch.zeros(1, 1, 4, 4),
        "transformer.h.0.attn.masked_bias": torch.zeros(()),
    }
    buffers = {name: tensor for name, tensor in buffers.items() if name.startswith(prefix)}
    head = {"lm_head.weight": wanted[spec.checkpoint_names.embedding]} if config.tie_word_embeddings else {}
    for strip in (False, True):
        stored = {
            name.removeprefix(prefix) if strip else name: tensor
            for name, tensor in {**wanted, **buffers, **head}.items()
        }
        view = spec.checkpoint_view(config, MemorySource(stored))
        assert set(view.names()) == set(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(view.read(name), tensor)
            assert torch.equal(view.read(name, 1, 3), tensor[1:3])
            assert (view.shape(name), view.dtype(name)) == (tuple(tensor.shape), tensor.dtype)


@pytest.mark.parametrize(("architecture", "hf_config"), CASES)
def test_a_tied_head_that_differs_from_the_embedding_is_refused(architecture, hf_config):
    # Catches a head of its own that is dropped, where transformers would keep it: the model trained is another one.
    spec = SPECS[architecture]
    config = spec.config_from_hf({**hf_config, "tie_word_embeddings": True})
    embedding = torch.arange(13.0 * 8).view(13, 8)
    for head in (embedding + 1, embedding[:12]):
        source = MemorySource({spec.checkpoint_names.embedding: embedding, "lm_head.weight": head})
        with pytest.raises(ValueError, match=r"lm_head.weight differs from .*tie_word_embeddings"):
            spec.checkpoint_view(config, source)


def test_an_untied_head_is_not_hidden():
    """Catches an untied model whose head is silently left at its initial values."""
    spec = SPECS["LlamaForCausalLM"]
    source = MemorySource({"model.norm.weight": torch.zeros(8), "lm_head.weight": torch.zeros(13, 8)})
    assert set(spec.checkpoint_view(spec.config_from_hf(SIZES), source).names()) == source.tensors.keys()


@pytest.mark.parametrize("merge_qkv", [True, False])
@pytest.mark.parametrize(("architecture", "hf_config"), CASES)
def test_recipes_tell_shapes_on_the_meta_device(architecture, hf_config, merge_qkv):
    """Catches a recipe that needs data to say what it expects of a checkpoint."""
    spec = SPECS[architecture]
    config = spec.config_from_hf(hf_config)
    recipes = spec.recipes(config, merge_qkv=merge_qkv)
    wanted = split_all(recipes, make_parameters(spec, config, merge_qkv=merge_qkv))
    told = split_all(recipes, {name: torch.empty(recipe.shape, device="meta") for name, recipe in recipes.items()})
    assert {name: tensor.shape for name, tensor in told.items()} == {n: tensor.shape for n, tensor in wanted.items()}


@pytest.mark.parametrize("merge_qkv", [True, False])
@pytest.mark.parametrize(("architecture", "hf_config"), CASES)
def test_logical_matrices_are_those_that_checkpoints_keep_apart(architecture, hf_config, merge_qkv):
    # Catches an optimizer that takes stacked projections for one matrix, or cuts them at the wrong row; embeddings,
    # heads, norms, biases and routers are none of a layer's matrices.
    spec = SPECS[architecture]
    config = spec.config_from_hf({"architectures": [architecture], **hf_config})
    with torch.device("meta"):
        model = spec.build(config, merge_qkv=merge_qkv)
    expected = {}
    for name, recipe in spec.recipes(config, merge_qkv=merge_qkv).items():
        if name.startswith("model.layers.") and not name.endswith(".gate.weight") and len(recipe.shape) == 2:
            thirds = (recipe.shape[0] // 3,) * 3 if name.endswith("qkv_proj.weight") else (recipe.shape[0],)
            expected[name] = tuple(getattr(recipe, "row_counts", thirds))
    assert model.layer_matrices() == expected
