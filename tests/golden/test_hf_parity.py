"""Every family against transformers: logits, gradients, greedy decoding, rotary frequencies and files, from the same
random weights."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_cases import (
    CASES,
    GPT2_SIZES,
    IDS,
    LENGTHS,
    LINEAR,
    LLAMA3,
    LOCAL,
    MIXTURE,
    NO_PADDING,
    REQUIRED,
    SIZES,
    YARN,
    Case,
    gradients_of,
    known_to,
    make_decoder,
    make_rows,
    make_twin,
    renamed,
    state_of,
    to_hf,
)
from xorl.ckpt import SafetensorsSource, export_hf, load_weights
from xorl.ckpt.layout import TensorRecord
from xorl.ckpt.tensor_file import TensorGroup
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import SPECS, Decoder, spec_for
from xorl.core.models.decoder_config import ExpertsConfig
from xorl.core.models.stacks import ExpertNames
from xorl.core.nn import Rotary
from xorl.core.parallel import ParallelModel
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import linear_cross_entropy
from xorl.server.sampler import GenerationRequest, Sampler
from xorl.train.cut_down import cut_down
from xorl.train.export.rest import in_stacks

LOGIT_TOLERANCE = 1e-5
# In fp32, transformers' own logits are off by 1.2e-5, and its gradients of decays by 6e-4: see the test against fp64.
DELTA_NETS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
STATE_SPACES = ("NemotronHForCausalLM", "GraniteMoeHybridForCausalLM")
# Scores that are not scaled magnify rounding: in fp32, transformers' own logits are off by 1.1e-5.
LOGIT_TOLERANCE_OF = {"Gemma4ForCausalLM": 2e-5, **dict.fromkeys(DELTA_NETS, 3e-5)}
GRADIENT_TOLERANCE = 1e-4
GRADIENT_TOLERANCE_OF = dict.fromkeys(DELTA_NETS, 1e-3)
# What a cache could get wrong: heads, windows, positions.
GENERATED = {"grouped heads", "one kv head", "dynamic rope", "yarn rope", "sliding window", "untied, inner width"}
# And states.
GENERATED |= {"every fourth attends", "some attend", "each kind of layer"}


def as_in_model(model: transformers.PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors named as in a checkpoint under the names of the model's state, which stacks experts."""
    names = spec_for({"architectures": [type(model).__name__]}).checkpoint_names.experts
    found = renamed(tensors_as_in_files(tensors, names), in_files=False)
    for name, tensor in state_of(model).items():
        block = ".mixer." if ".mixer." in name else ".mlp."
        if name in found or block not in name or tensor.ndim == 0:  # what is not trained has no gradient
            continue
        assert names is not None
        layer, _, leaf = name.partition(block)
        if leaf.endswith("e_score_correction_bias"):
            if f"{layer}.{names.correction}" in found:  # it has no gradient
                found[name] = found.pop(f"{layer}.{names.correction}")
            continue
        if leaf == "gate.weight":
            found[name] = found.pop(f"{layer}.{names.router}.weight")
            continue
        parts = [names.down] if leaf == "experts.down_proj" else names.ups
        prefixes = [f"{layer}.{names.expert.format(index)}" for index in range(len(tensor))]
        found[name] = torch.stack(
            [torch.cat([found.pop(f"{prefix}.{part}.weight") for part in parts]) for prefix in prefixes]
        )
    return found


def tensors_as_in_files(tensors: Mapping[str, Tensor], names: ExpertNames | None) -> dict[str, Tensor]:
    """Tensors under the names of recipes, with those of experts in the stacks of their family, if it has any."""
    groups = [
        TensorGroup({name: TensorRecord.of(one)}, lambda name=name, one=one: {name: one})
        for name, one in tensors.items()
    ]
    return {name: tensor for group in in_stacks(groups, names) for name, tensor in group.make().items()}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_packed_rows_match_transformers_on_separate_rows(case: Case):
    """Catches any difference in the mathematics of a family, forward or backward, what a document gets from its
    neighbours or its place in a pack, and a weight lost, transposed or misplaced on the way in or out."""
    model = case.make_hf_model()
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
    for backend, merge_qkv in (("sdpa", True), ("eager", False)):
        decoder, recipes = make_twin(model, backend=backend, merge_qkv=merge_qkv)
        weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
        back, state = as_in_model(model, to_hf(recipes, weights)), state_of(model)
        assert back.keys() == state.keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in state.items())

        layout = SequenceLayout.from_lengths(LENGTHS)
        logits = decoder(ids, layout).detach()
        tolerance = LOGIT_TOLERANCE_OF.get(case.architecture, LOGIT_TOLERANCE)
        assert (logits - torch.cat(wanted)).abs().max() <= tolerance, backend
        with torch.no_grad():
            reverse = torch.cat(ids.split(LENGTHS)[::-1])
            found = decoder(reverse, SequenceLayout.from_lengths(LENGTHS[::-1])).split(LENGTHS[::-1])
        assert (torch.cat(found[::-1]) - logits).abs().max() <= LOGIT_TOLERANCE, backend
        decoder(ids, layout, lambda hidden, weight: linear_cross_entropy(hidden, weight, labels)[0].sum()).backward()
        got = as_in_model(model, to_hf(recipes, gradients_of(decoder)))
        for name, parameter in model.named_parameters():
            error = (got[name] - parameter.grad).norm() / parameter.grad.norm()
            tolerance = GRADIENT_TOLERANCE_OF.get(case.architecture, GRADIENT_TOLERANCE)
            assert error <= tolerance, f"{backend}: gradient of {name} is off by {error:.2e}"


# Of one token, shorter than the convolution, and longer than a chunk of the recurrence.
RECURRENT_LENGTHS = [2, 130, 1, 20]
RECURRENT = [case for case in CASES if case.architecture in (*DELTA_NETS, *STATE_SPACES)]


@pytest.mark.parametrize("case", RECURRENT, ids=lambda case: f"{case.architecture} {case.label}")
def test_recurrences_are_as_close_to_fp64_as_those_of_transformers(case: Case):
    """Catches states that lose digits, and what a document gets from the state or the taps of the one before."""
    model = case.make_hf_model()
    decoder, recipes = make_twin(model, backend="eager", merge_qkv=True)
    exact = make_twin(model, backend="eager", merge_qkv=True)[0].double()
    exact.compute_dtype = torch.float64
    ids = torch.randint(83, (sum(RECURRENT_LENGTHS),), generator=torch.Generator().manual_seed(3))
    labels = ids.roll(-1)
    layout = SequenceLayout.from_lengths(RECURRENT_LENGTHS)
    theirs = []
    for row, row_labels in zip(ids.split(RECURRENT_LENGTHS), labels.split(RECURRENT_LENGTHS), strict=True):
        logits = model(row[None]).logits[0]
        F.cross_entropy(logits, row_labels, reduction="sum").backward()
        theirs.append(logits.detach())
    by_model: list[tuple[Tensor, dict[str, Tensor]]] = []
    for each in (decoder, exact):
        logits = each(ids, layout)
        F.cross_entropy(logits, labels, reduction="sum").backward()
        by_model.append((logits.detach(), as_in_model(model, to_hf(recipes, gradients_of(each)))))
    (logits, gradients), (exact_logits, exact_gradients) = by_model
    assert (logits - exact_logits).abs().max() <= 2 * (torch.cat(theirs) - exact_logits).abs().max()
    for name, parameter in model.named_parameters():
        ours, of_theirs = (
            (each - exact_gradients[name]).norm() / exact_gradients[name].norm()
            for each in (gradients[name], parameter.grad)
        )
        # Below the floor, both are rounding of sums of a few numbers.
        assert ours <= max(2 * of_theirs, 5e-6), (
            f"gradient of {name} is off by {ours:.2e}, that of transformers by {of_theirs:.2e}"
        )
    with torch.no_grad():
        alone = [decoder(row, SequenceLayout.from_lengths([len(row)])) for row in ids.split(RECURRENT_LENGTHS)]
    assert (torch.cat(alone) - logits).abs().max() <= 1e-6 * logits.abs().max()


BALANCED = {"Qwen3MoeForCausalLM": MIXTURE, "MixtralForCausalLM": LOCAL}
BALANCED["MiniMaxM2ForCausalLM"] = {**LOCAL, "head_dim": 16}


@pytest.mark.parametrize("architecture", BALANCED)
def test_the_balancing_loss_of_a_document_is_that_of_transformers(architecture: str) -> None:
    """Catches another formula, a softmax too many, and a loss that is added twice or not at all."""
    coefs = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = Case(architecture, "", {**BALANCED[architecture], **coefs}).make_hf_model()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()  # transformers counts the choices that would be made without it
    decoder, recipes = make_twin(model, backend="sdpa", merge_qkv=True)
    assert decoder.config.balance_coef == 0.5
    row = make_rows()[0][:30]
    model(row[None], labels=row[None]).loss.backward()
    labels = torch.cat([row[1:], torch.tensor([-100])])
    layout = SequenceLayout.from_lengths([len(row)])
    layout.num_trained = torch.tensor([len(row) - 1])
    loss = decoder(row, layout, lambda hidden, weight: linear_cross_entropy(hidden, weight, labels)[0].sum())
    loss.backward()
    gradients = {name: gradient / (len(row) - 1) for name, gradient in gradients_of(decoder).items()}
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
    # The first sample goes past a block of 16, and all go past windows. Dynamic frequencies change with the length, and
    # keys in a cache would not: there are 16 positions without.
    num_tokens, lengths = 8, (3, 8) if "dynamic" in case.label else (15, 1, 40)
    ids, _ = make_rows()
    prompts = [ids[-length:] for length in lengths]
    requests = [GenerationRequest(tuple(row.tolist()), num_tokens, temperature=0) for row in prompts]
    sampler = Sampler(ParallelModel(decoder, decoder, mesh), device=torch.device("cpu"), cache_tokens=256)
    for prompt, result in zip(prompts, sampler.run(requests), strict=True):
        options = {"attention_mask": torch.ones_like(prompt)[None], "max_new_tokens": num_tokens, "pad_token_id": 0}
        # With a cache, transformers forgets the bound of step sizes.
        options["use_cache"] = case.architecture not in STATE_SPACES
        wanted = model.generate(prompt[None], do_sample=False, **options)
        assert result.samples[0].tokens == tuple(wanted[0, len(prompt) :].tolist())


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
        hf_config=hf_config,
        arrange=partial(in_stacks, experts=spec.checkpoint_names.experts),
    )
    theirs, ours = (SafetensorsSource(tmp_path / name) for name in ("theirs", "ours"))
    in_theirs = {name: view.in_source(name) for name in ours.names()}
    assert set(in_theirs.values()) == set(theirs.names())
    assert all(torch.equal(ours.read(name), theirs.read(other)) for name, other in in_theirs.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(model)
    for name, wanted in state_of(model).items():
        assert torch.equal(state_of(again)[name], wanted), name
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
    [found] = {each.rope for each in read.attentions}
    torch.testing.assert_close(Rotary(found, head_dim).inv_freq, wanted, rtol=1e-6, atol=0)
    assert found.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_the_decoder_starts_like_transformers():
    """Catches initial weights of another scale, per kind of parameter: training from scratch would differ."""
    wide = Case("GPT2LMHeadModel", "wide", {"n_embd": 128, "n_layer": 2})
    for case in (CASES[0], wide, Case("ApertusForCausalLM", "")):
        model_class = getattr(transformers, case.architecture)
        sizes = GPT2_SIZES if case.architecture == "GPT2LMHeadModel" else SIZES
        torch.manual_seed(0)
        model = model_class(model_class.config_class(**{**known_to(model_class.config_class, sizes), **case.changes}))
        decoder, recipes = make_twin(model, backend="sdpa", merge_qkv=True)
        assert isinstance(decoder, Decoder)
        decoder.init_weights(seed=0)
        ours = to_hf(recipes, {name: parameter.detach() for name, parameter in decoder.named_parameters()})
        for name, tensor in state_of(model).items():
            if tensor.dim() > 1:
                assert ours[name].std().item() == pytest.approx(tensor.std().item(), rel=0.1), name
            else:
                torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": ...},
        {"num_key_value_heads": None},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": None},
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5, "num_hidden_layers": 13},
    ],
)
# Those have no heads of keys, or as many as of queries.
@pytest.mark.parametrize(
    "architecture", [name for name in SPECS if not name.startswith(("GPT2", "Deepseek", "Glm4MoeLite"))]
)
def test_what_config_json_leaves_out_or_null_means_the_same_model(architecture, changes):
    """Catches a default of ours: absent and null can mean two models, and differ by family."""
    values = {**SIZES, "hidden_size": 64, "num_attention_heads": 64, "head_dim": 8, "num_hidden_layers": 2, **changes}
    values |= NO_PADDING  # some families have a padding id that is not in so small a vocabulary
    config_class = getattr(transformers, architecture).config_class
    values = {key: value for key, value in known_to(config_class, values).items() if value is not ...}
    values |= {"head_dim": 8, **REQUIRED.get(architecture, {})}
    try:
        theirs = config_class(**values)
    except (StrictDataclassFieldValidationError, ZeroDivisionError) as error:
        pytest.skip(f"transformers refuses it for this family: {error}")
    if theirs.num_key_value_heads is None:
        pytest.skip("transformers cannot build such a model of this family")
    ours = spec_for({"architectures": [architecture]}).config_from_hf(values)
    if ours.attentions:
        assert ours.attentions[0].num_kv_heads == theirs.num_key_value_heads
    layer_types = getattr(theirs, "layer_types", None)
    has_window = hasattr(type(theirs), "sliding_window") and theirs.sliding_window is not None
    without = ("linear_attention", "mlp", "moe")
    windowed = [kind == "sliding_attention" for kind in layer_types or () if kind not in without]
    windowed = windowed if layer_types else [has_window] * ours.num_layers
    assert ours.windows == tuple(theirs.sliding_window if is_windowed else None for is_windowed in windowed)
    if hasattr(theirs, "no_rope_layers"):
        assert [layer.attention.rope is not None for layer in ours.layers] == [bool(x) for x in theirs.no_rope_layers]
    if ours.has_experts:
        width = getattr(theirs, "moe_intermediate_size", None) or theirs.intermediate_size
        num_experts = getattr(theirs, "num_experts", None) or theirs.num_local_experts
        sizes = num_experts, theirs.num_experts_per_tok, width, getattr(theirs, "norm_topk_prob", True)
        ffn = ours.layers[-1].ffn
        assert isinstance(ffn, ExpertsConfig)
        assert (ffn.num_experts, ffn.num_active, ffn.width, ffn.router.normalize) == sizes


@pytest.mark.parametrize("architecture", SPECS)
def test_a_config_of_the_size_of_real_models_is_read_and_cut_down_for_verification(architecture: str):
    """Catches a padding id or factors that `xorl verify` leaves as they are beside a narrow model."""
    hf_config = getattr(transformers, architecture).config_class(**REQUIRED.get(architecture, {})).to_dict()
    if architecture == "Phi3ForCausalLM":
        factors = {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48}
        hf_config |= {"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", **factors}}
    spec = SPECS[architecture]
    assert spec.config_from_hf(hf_config).vocab_size > 10_000
    assert spec.config_from_hf({**hf_config, **cut_down(hf_config, 2, 2)}).vocab_size == 384


@pytest.mark.parametrize(
    "architecture", [*SPECS, *sorted({name for spec in SPECS.values() for name in spec.composites})]
)
def test_every_key_of_a_configuration_class_is_known(architecture: str, tmp_path: Path):
    """Catches a key that transformers computes with and no family reads, whatever its default, and a config.json of
    transformers that is refused."""
    required = REQUIRED.get(architecture, {})
    config = getattr(transformers, architecture).config_class(architectures=[architecture], **required)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    spec = spec_for(saved)
    spec.config_from_hf(saved)
    spec.config_from_hf({**config.to_dict(), "architectures": [architecture]})
    text = saved.get("text_config", saved)
    unknown = []
    for key in text.keys() - {"model_type", "architectures"}:
        changed = {**text, key: 7.5}
        try:
            spec.config_from_hf({**saved, "text_config": changed} if text is not saved else changed)
        except ValueError as error:
            unknown += [key] * ("may change what it computes" in str(error))
    assert unknown == []
