"""Every family against transformers: logits, gradients, greedy decoding, rotary frequencies and files, from the same
random weights."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from xorl.ckpt import SafetensorsSource, export_hf, load_weights
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import SPECS, Decoder, spec_for
from xorl.core.models.decoder_config import ExpertsConfig
from xorl.core.models.recipes import WeightRecipe
from xorl.core.nn import LayerKernels, Rotary
from xorl.core.parallel import ParallelModel
from xorl.kernels.attention import AttentionRequest, resolve_attention
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy
from xorl.lora.peft import InMemoryTensors
from xorl.server.sampler import GenerationRequest, Sampler
from xorl.train.verify import cut_down

LOGIT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
VOCAB = 83
LENGTHS = [23, 1, 40, 9]
SIZES: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2_SIZES: dict[str, object] = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The trained length is shorter than the documents, so that scaling shows.
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


@dataclass(frozen=True)
class Case:
    """One row of the table: a family and what its config changes."""

    architecture: str
    label: str
    changes: Mapping[str, object] = field(default_factory=dict)

    def make_hf_model(self) -> transformers.PreTrainedModel:
        """The transformers model with random weights, biases and norms away from zero and one."""
        model_class = getattr(transformers, self.architecture)
        sizes = GPT2_SIZES if self.architecture == "GPT2LMHeadModel" else SIZES
        config = model_class.config_class(**{**sizes, **self.changes}, attn_implementation="eager")
        torch.manual_seed(0)
        model = model_class(config)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 0.15 if parameter.dim() > 1 else 0.1
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
        return model.eval()


MIXTURE = {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 28}
CASES = [
    Case("LlamaForCausalLM", "grouped heads"),
    Case("LlamaForCausalLM", "all heads, tied", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    Case("LlamaForCausalLM", "one kv head", {"num_key_value_heads": 1, "head_dim": 20}),
    Case("LlamaForCausalLM", "biases", {"attention_bias": True, "mlp_bias": True}),
    Case("LlamaForCausalLM", "llama3 rope", {"rope_parameters": LLAMA3}),
    Case("LlamaForCausalLM", "linear rope", {"rope_parameters": LINEAR}),
    Case("LlamaForCausalLM", "dynamic rope", {"rope_parameters": DYNAMIC, "max_position_embeddings": 16}),
    Case("LlamaForCausalLM", "yarn rope", {"rope_parameters": YARN}),
    Case("LlamaForCausalLM", "gelu", {"hidden_act": "gelu"}),
    Case("Qwen2ForCausalLM", "grouped heads"),
    Case("Qwen2ForCausalLM", "tied", {"tie_word_embeddings": True}),
    Case("Qwen2ForCausalLM", "yarn rope", {"rope_parameters": YARN}),
    Case("Qwen2ForCausalLM", "sliding window", WINDOW),
    Case("Qwen3ForCausalLM", "grouped heads", {"head_dim": 16}),
    Case("Qwen3ForCausalLM", "tied", {"head_dim": 24, "tie_word_embeddings": True}),
    Case("Qwen3ForCausalLM", "biases", {"head_dim": 12, "attention_bias": True}),
    Case("Qwen3ForCausalLM", "yarn rope", {"head_dim": 16, "rope_parameters": {**YARN, "truncate": False}}),
    Case("Qwen3ForCausalLM", "sliding window", {"head_dim": 16, **WINDOW}),
    Case("MistralForCausalLM", "grouped heads"),
    Case("MistralForCausalLM", "sliding window", {"sliding_window": 6}),
    Case("Qwen3MoeForCausalLM", "grouped heads", MIXTURE),
    Case("Qwen3MoeForCausalLM", "one expert, biases", {**MIXTURE, "num_experts_per_tok": 1, "attention_bias": True}),
    Case("Qwen3MoeForCausalLM", "all experts", {**MIXTURE, "num_experts_per_tok": 5, "norm_topk_prob": True}),
    Case("Qwen3MoeForCausalLM", "some dense", {**MIXTURE, "mlp_only_layers": [0], "norm_topk_prob": True}),
    Case("Qwen3MoeForCausalLM", "every second", {**MIXTURE, "decoder_sparse_step": 2}),
    Case("MixtralForCausalLM", "grouped heads", LOCAL),
    Case("MixtralForCausalLM", "sliding window", {**LOCAL, "sliding_window": 6}),
    Case("GPT2LMHeadModel", "tied"),
    Case("GPT2LMHeadModel", "untied, inner width", {"tie_word_embeddings": False, "n_inner": 56}),
    Case("GPT2LMHeadModel", "scaled by layer", {"scale_attn_by_inverse_layer_idx": True}),
    Case("GPT2LMHeadModel", "unscaled, gelu", {"scale_attn_weights": False, "activation_function": "gelu"}),
]
# An id of `make_rows`, whose row of the embedding gets a gradient in one family alone, and from the head if it is tied.
PADDING = {"pad_token_id": 22}
CASES += [
    Case("LlamaForCausalLM", "padding", PADDING),
    Case("Qwen2ForCausalLM", "padding, tied", {**PADDING, "tie_word_embeddings": True}),
    Case("Qwen3ForCausalLM", "padding", {"head_dim": 16, **PADDING}),
    Case("Qwen3ForCausalLM", "padding from the end", {"head_dim": 16, "pad_token_id": -1}),
    Case("MistralForCausalLM", "padding", PADDING),
    Case("Qwen3MoeForCausalLM", "padding", {**MIXTURE, **PADDING}),
    Case("MixtralForCausalLM", "padding", {**LOCAL, **PADDING}),
    Case("GPT2LMHeadModel", "padding", PADDING),
]
NO_PADDING = {"pad_token_id": None}
PATTERN = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
CASES += [
    Case("Olmo2ForCausalLM", "grouped heads"),
    Case("Olmo2ForCausalLM", "biases, tied", {"attention_bias": True, "tie_word_embeddings": True}),
    Case("SmolLM3ForCausalLM", "grouped heads", {**NO_PADDING, "no_rope_layers": [1, 0, 1]}),
    Case(
        "SmolLM3ForCausalLM",
        "interval, untied",
        {**NO_PADDING, "no_rope_layer_interval": 2, "tie_word_embeddings": False},
    ),
    Case("GraniteForCausalLM", "grouped heads", MULTIPLIERS),
    Case("GraniteForCausalLM", "tied, biases", {**MULTIPLIERS, "tie_word_embeddings": True, "attention_bias": True}),
    Case("SeedOssForCausalLM", "grouped heads", {"head_dim": 24}),
    Case("SeedOssForCausalLM", "output biases", {"head_dim": 12, "attention_bias": False, "attention_out_bias": True}),
    Case("ArceeForCausalLM", "grouped heads", {"head_dim": 12}),
    Case("ArceeForCausalLM", "biases", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    Case("Glm4ForCausalLM", "grouped heads", {**NO_PADDING, "head_dim": 16}),
    Case(
        "Glm4ForCausalLM",
        "a quarter rotates",
        {
            **NO_PADDING,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
            "attention_bias": False,
        },
    ),
    Case("Exaone4ForCausalLM", "sliding window", PATTERN),
    Case("Exaone4ForCausalLM", "grouped heads", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    Case("Ernie4_5ForCausalLM", "grouped heads", {"head_dim": 16}),
    Case("Ernie4_5ForCausalLM", "biases, untied", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}),
    Case("Cohere2ForCausalLM", "sliding window", {**PATTERN, "head_dim": 16, "logit_scale": 0.2}),
    Case("Cohere2ForCausalLM", "untied", {**PATTERN, "head_dim": 12, "tie_word_embeddings": False}),
    Case("Starcoder2ForCausalLM", "sliding window", {"sliding_window": 9}),
    Case("Starcoder2ForCausalLM", "no biases, untied", {"use_bias": False, "tie_word_embeddings": False}),
]
LONG = {"long_factor": [1.5, 2.0, 3.0], "short_factor": [1.0, 1.1, 1.2], "original_max_position_embeddings": 16}
BY_TYPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
}
GEMMA = {**PATTERN, "head_dim": 16, "query_pre_attn_scalar": 20, "rope_parameters": BY_TYPE}
GROWING = {**YARN, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0}
GROWING["llama_4_scaling_beta"] = 0.1
ALPHA = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e2}
CASES += [
    Case("Olmo3ForCausalLM", "sliding window", {**PATTERN, "rope_parameters": {**BY_TYPE, "full_attention": YARN}}),
    Case("Olmo3ForCausalLM", "one rotation", PATTERN),
    Case("Gemma3ForCausalLM", "sliding window", GEMMA),
    Case("Gemma3ForCausalLM", "untied, biases", {**GEMMA, "tie_word_embeddings": False, "attention_bias": True}),
    Case("Phi3ForCausalLM", "grouped heads", NO_PADDING),
    Case(
        "Phi3ForCausalLM",
        "longrope",
        {
            **NO_PADDING,
            "sliding_window": 7,
            "original_max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e3, "partial_rotary_factor": 0.5, **LONG},
        },
    ),
    Case("Ministral3ForCausalLM", "yarn rope", {"rope_parameters": GROWING, "head_dim": 12}),
    Case("Ministral3ForCausalLM", "sliding window", {"rope_parameters": GROWING, "head_dim": 16, "sliding_window": 6}),
    Case("HunYuanDenseV1ForCausalLM", "grouped heads", {"head_dim": 12}),
    Case("HunYuanDenseV1ForCausalLM", "alpha", {"head_dim": 16, "rope_parameters": ALPHA}),
]
# What a cache could get wrong: heads, windows, positions.
GENERATED = {"grouped heads", "one kv head", "dynamic rope", "yarn rope", "sliding window", "untied, inner width"}
IDS = [f"{case.architecture} {case.label}" for case in CASES]


def make_decoder(hf_config: Mapping[str, object], *, backend: str, merge_qkv: bool):
    """An uninitialised decoder for a config.json, and its recipes."""
    spec = spec_for(hf_config)
    config = spec.config_from_hf(hf_config)
    attention = resolve_attention(backend, AttentionRequest("cpu", torch.float32, config.attention.head_dim))
    return spec.build(config, merge_qkv=merge_qkv, kernels=LayerKernels(attention=attention)), spec.recipes(
        config, merge_qkv=merge_qkv
    )


def make_twin(model: transformers.PreTrainedModel, *, backend: str, merge_qkv: bool):
    """A decoder with the weights of a transformers model, and its recipes."""
    hf_config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    decoder, recipes = make_decoder(hf_config, backend=backend, merge_qkv=merge_qkv)
    source = spec_for(hf_config).checkpoint_view(decoder.config, InMemoryTensors(model.state_dict()))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(recipes[name].read(source, 0, parameter.shape[0]))
    return decoder, recipes


def to_hf(recipes: Mapping[str, WeightRecipe], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Native tensors (weights or gradients) under the names of transformers."""
    parts: dict[str, list[Tensor]] = {}
    for name, recipe in recipes.items():
        for source, tensor in recipe.split(tensors[name]).items():
            parts.setdefault(source, []).append(tensor)
    dims = {source: recipe.join_dim for recipe in recipes.values() for source in recipe.sources}
    return {source: torch.cat(tensors, dim=dims[source] or 0) for source, tensors in parts.items()}


def as_in_model(model: transformers.PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors named as in a checkpoint under the names of the model's parameters, which stack experts."""
    names = spec_for({"architectures": [type(model).__name__]}).checkpoint_names.experts
    renamed = dict(tensors)
    for name in dict(model.named_parameters()):
        if name in renamed:
            continue
        assert names is not None
        layer, _, leaf = name.partition(".mlp.")
        if leaf == "gate.weight":
            renamed[name] = renamed.pop(f"{layer}.{names.router}.weight")
            continue
        parts = [names.down] if leaf == "experts.down_proj" else [names.gate, names.up]
        prefixes = [f"{layer}.{names.expert.format(index)}" for index in range(model.config.num_local_experts)]
        renamed[name] = torch.stack(
            [torch.cat([renamed.pop(f"{prefix}.{part}.weight") for part in parts]) for prefix in prefixes]
        )
    return renamed


def make_rows() -> tuple[Tensor, Tensor]:
    """Token ids and labels of one packed row; the last label of each document and a few others are ignored."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCAB, (sum(LENGTHS),), generator=generator)
    labels = torch.cat([torch.cat((row[1:], torch.tensor([-100]))) for row in ids.split(LENGTHS)])
    labels[5:9] = -100
    return ids, labels


@pytest.mark.parametrize(("backend", "merge_qkv"), [("sdpa", True), ("eager", False)])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_packed_rows_match_transformers_on_separate_rows(case: Case, backend: str, merge_qkv: bool):
    """Catches any difference in the mathematics of a family, forward or backward, and any leak inside a pack."""
    model = case.make_hf_model()
    decoder, recipes = make_twin(model, backend=backend, merge_qkv=merge_qkv)
    ids, labels = make_rows()
    wanted = []
    for row, row_labels in zip(ids.split(LENGTHS), labels.split(LENGTHS), strict=True):
        if "dynamic" in case.label:  # transformers keeps the frequencies of the longest row seen so far
            row_model = case.make_hf_model()
            row_model.load_state_dict(model.state_dict())
        else:
            row_model = model
        logits = row_model(row[None]).logits[0]
        F.cross_entropy(logits, row_labels, reduction="sum").backward()
        if row_model is not model:
            add_gradients(model, row_model)
        wanted.append(logits.detach())

    layout = SequenceLayout.from_lengths(LENGTHS)
    logits = decoder(ids, layout)
    assert (logits - torch.cat(wanted)).abs().max() <= LOGIT_TOLERANCE
    decoder(ids, layout, lambda hidden, weight: linear_cross_entropy(hidden, weight, labels)[0].sum()).backward()
    got = as_in_model(model, to_hf(recipes, {name: parameter.grad for name, parameter in decoder.named_parameters()}))
    for name, parameter in model.named_parameters():
        error = (got[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error <= GRADIENT_TOLERANCE, f"gradient of {name} is off by {error:.2e}"


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_the_balancing_loss_of_a_document_is_that_of_transformers(architecture: str) -> None:
    """Catches another formula, a softmax too many, and a loss that is added twice or not at all."""
    changes = MIXTURE if architecture == "Qwen3MoeForCausalLM" else LOCAL
    model = Case(
        architecture, "", {**changes, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    ).make_hf_model()
    decoder, recipes = make_twin(model, backend="sdpa", merge_qkv=True)
    assert decoder.config.balance_coef == 0.5
    row = make_rows()[0][:30]
    model(row[None], labels=row[None]).loss.backward()
    labels = torch.cat([row[1:], torch.tensor([-100])])
    layout = SequenceLayout.from_lengths([len(row)])
    layout.num_trained = torch.tensor([len(row) - 1])
    loss = decoder(row, layout, lambda hidden, weight: linear_cross_entropy(hidden, weight, labels)[0].sum())
    loss.backward()
    gradients = {name: parameter.grad / (len(row) - 1) for name, parameter in decoder.named_parameters()}
    got = as_in_model(model, to_hf(recipes, gradients))
    for name, parameter in model.named_parameters():
        error = (got[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error <= GRADIENT_TOLERANCE, f"gradient of {name} is off by {error:.2e}"


def add_gradients(model: transformers.PreTrainedModel, other: transformers.PreTrainedModel) -> None:
    for parameter, source in zip(model.parameters(), other.parameters(), strict=True):
        parameter.grad = source.grad if parameter.grad is None else parameter.grad + source.grad


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Mesh(ParallelDims.resolve("none", 1, shard_size=-1, replicate_size=-1), "cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.label in GENERATED], ids=lambda case: f"{case.architecture} {case.label}"
)
def test_greedy_decoding_matches_transformers_token_by_token(case: Case, mesh: Mesh):
    """Catches a cache of keys that is read or written at another place, in any family."""
    model = case.make_hf_model()
    model.generation_config.eos_token_id = None
    decoder, _ = make_twin(model, backend="sdpa", merge_qkv=True)
    # Dynamic frequencies change with the length, and keys in a cache would not: there are 16 positions without.
    num_tokens, lengths = (8, (3, 8)) if "dynamic" in case.label else (16, (17, 1, 40))
    ids, _ = make_rows()
    prompts = [ids[-length:] for length in lengths]
    requests = [GenerationRequest(tuple(row.tolist()), num_tokens, temperature=0) for row in prompts]
    sampler = Sampler(ParallelModel(decoder, decoder, mesh), device=torch.device("cpu"), cache_tokens=256)
    for prompt, result in zip(prompts, sampler.run(requests), strict=True):
        options = {"attention_mask": torch.ones_like(prompt)[None], "max_new_tokens": num_tokens, "pad_token_id": 0}
        wanted = model.generate(prompt[None], do_sample=False, **options)
        assert result.samples[0].tokens == tuple(wanted[0, len(prompt) :].tolist())


@pytest.mark.parametrize("merge_qkv", [True, False])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_weights_return_to_transformers_bit_for_bit(case: Case, merge_qkv: bool):
    """Catches a weight lost, transposed or misplaced on the way in or out."""
    model = case.make_hf_model()
    decoder, recipes = make_twin(model, backend="sdpa", merge_qkv=merge_qkv)
    back = to_hf(recipes, {name: parameter.detach() for name, parameter in decoder.named_parameters()})
    back = as_in_model(model, back)
    assert back.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(back[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("merge_qkv", [True, False])
@pytest.mark.parametrize("architecture", SPECS)
def test_folders_pass_to_and_fro_bit_for_bit(tmp_path: Path, architecture: str, merge_qkv: bool):
    """Catches files that transformers writes and we do not read, or the other way round."""
    case = next(case for case in CASES if case.architecture == architecture)
    model = case.make_hf_model()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    hf_config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    decoder, recipes = make_decoder(hf_config, backend="sdpa", merge_qkv=merge_qkv)
    spec = spec_for(hf_config)
    view = spec.checkpoint_view(decoder.config, SafetensorsSource(tmp_path / "theirs"))
    load_weights(dict(decoder.named_parameters()), recipes, view, mode="all_ranks")
    export_hf(
        dict(decoder.named_parameters()),
        recipes,
        tmp_path / "ours",
        hf_config={**hf_config, **spec.identity},
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(model)
    for (name, got), wanted in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(got, wanted), name
    ids, _ = make_rows()
    row = ids[: LENGTHS[0]]
    logits = decoder(row, SequenceLayout.from_lengths([len(row)]))
    assert (logits - again(row[None]).logits[0]).abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    "rope", [LINEAR, YARN, {**YARN, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.7}, LLAMA3]
)
def test_rotary_frequencies_are_those_of_transformers(rope: dict[str, object], head_dim: int):
    """Catches a slip in a scaling formula at sizes that matter, where small models would hide it."""
    keys = {**rope, "rope_theta": 5e5}
    if "original_max_position_embeddings" in keys:
        keys["original_max_position_embeddings"] = 8192
    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=keys)
    wanted, attention_factor = ROPE_INIT_FUNCTIONS[str(keys["rope_type"])](config, torch.device("cpu"))
    read = SPECS["LlamaForCausalLM"].config_from_hf(config.to_dict())
    [found] = read.ropes
    torch.testing.assert_close(Rotary(found, head_dim).inv_freq, wanted, rtol=1e-6, atol=0)
    assert found.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_the_decoder_starts_like_transformers():
    """Catches initial weights of another scale, per kind of parameter: training from scratch would differ."""
    for case in (CASES[0], Case("GPT2LMHeadModel", "wide", {"n_embd": 128, "n_layer": 2})):
        model_class = getattr(transformers, case.architecture)
        sizes = GPT2_SIZES if case.architecture == "GPT2LMHeadModel" else SIZES
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**{**sizes, **case.changes}))
        decoder, recipes = make_twin(model, backend="sdpa", merge_qkv=True)
        assert isinstance(decoder, Decoder)
        decoder.init_weights(seed=0)
        ours = to_hf(recipes, {name: parameter.detach() for name, parameter in decoder.named_parameters()})
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                assert ours[name].std().item() == pytest.approx(parameter.std().item(), rel=0.1), name
            else:
                assert torch.equal(ours[name], parameter), name


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": ...},
        {"num_key_value_heads": None},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": None},
    ],
)
@pytest.mark.parametrize("architecture", [name for name in SPECS if name != "GPT2LMHeadModel"])
def test_what_config_json_leaves_out_or_null_means_the_same_model(architecture, changes):
    """Catches a default of ours: absent and null can mean two models, and differ by family."""
    values = {**SIZES, "hidden_size": 64, "num_attention_heads": 64, "head_dim": 8, "num_hidden_layers": 2, **changes}
    values |= NO_PADDING  # some families have a padding id that is not in so small a vocabulary
    values = {key: value for key, value in values.items() if value is not ...}
    try:
        theirs = getattr(transformers, architecture).config_class(**values)
    except (StrictDataclassFieldValidationError, ZeroDivisionError) as error:
        pytest.skip(f"transformers refuses it for this family: {error}")
    ours = spec_for({"architectures": [architecture]}).config_from_hf(values)
    assert ours.attention.num_kv_heads == theirs.num_key_value_heads
    layer_types = getattr(theirs, "layer_types", None)
    has_window = getattr(theirs, "sliding_window", None) is not None
    windowed = [kind == "sliding_attention" for kind in layer_types] if layer_types else [has_window] * 2
    assert ours.windows == tuple(theirs.sliding_window if is_windowed else None for is_windowed in windowed)
    if ours.has_experts:
        width = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        sizes = theirs.num_local_experts, theirs.num_experts_per_tok, width
        assert ours.layers[-1].ffn == ExpertsConfig(*sizes, normalize=getattr(theirs, "norm_topk_prob", True))


@pytest.mark.parametrize("architecture", SPECS)
def test_a_config_of_the_size_of_real_models_is_read_and_cut_down_for_verification(architecture: str):
    """Catches a padding id or factors that `xorl verify` leaves as they are beside a narrow model."""
    hf_config = getattr(transformers, architecture).config_class().to_dict()
    if architecture == "Phi3ForCausalLM":
        factors = {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48}
        hf_config |= {"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", **factors}}
    spec = SPECS[architecture]
    assert spec.config_from_hf(hf_config).vocab_size > 10_000
    assert spec.config_from_hf({**hf_config, **cut_down(hf_config, 2, 2)}).vocab_size == 384
