"""Quantised layers: what they compute and do not keep, which layers they replace, and merging back into them."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tiny_decoders import summed_loss
from tiny_models import hf_config
from xorl.core.models import SPECS, Decoder
from xorl.core.nn import Linear
from xorl.core.nn.tensor import TensorRanks
from xorl.kernels.layout import RankGroup
from xorl.kernels.quant import GROUP_SIZES, QuantScheme
from xorl.kernels.quant.block_fp8 import quantize_block_fp8
from xorl.lora import AdapterSpec, adapter_parameters, adapters, init_adapters, inject
from xorl.lora.linear import LowRank
from xorl.lora.merge import fold_, merged_rows
from xorl.lora.peft.layout import InMemoryTensors
from xorl.lora.prequantized import dequantized_source
from xorl.lora.quantize import quantizable_layers, quantize_, quantize_layers
from xorl.lora.quantized import (
    AdaptiveNoise,
    QuantizedLinear,
    dense_parameters,
    fits_ranks,
    num_parameters,
    quantized_layers,
    quantized_rows,
    read_rows,
    write_rows_,
)

FORMATS = ["nf4", "nvfp4", "block_fp8"]
CONFIG = hf_config(vocab_size=61, hidden_size=64, intermediate_size=192)
LENGTHS = [9, 1, 14, 5]
IDS = torch.randint(61, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def scheme_of(quant_format) -> QuantScheme:
    return QuantScheme(quant_format, GROUP_SIZES[quant_format])


def linear(num_in: int = 192, num_out: int = 130, *, bias: bool = True, seed: int = 0) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    layer = Linear(num_in, num_out, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return layer


def quantized(layer: Linear, quant_format, part_rows=()) -> QuantizedLinear:
    made = QuantizedLinear(layer, scheme_of(quant_format), part_rows)
    write_rows_(made, layer.weight.detach())
    return made


def decoder(quant_format=None, *, merge_qkv: bool = True, exclude=()) -> Decoder:
    """A model whose weights are functions of the seed, quantised as they are drawn."""
    spec = SPECS["Qwen3ForCausalLM"]
    with torch.device("meta"):
        model = spec.build(spec.config_from_hf(CONFIG), merge_qkv=merge_qkv)
    if quant_format is not None:
        quantize_layers(model, quantizable_layers(model, exclude, "exclude"), scheme_of(quant_format), "format")
    model.to_empty(device="cpu")
    model.init_weights(0, targets=quantized_rows(model))
    return model


def loss_of(model: Decoder) -> Tensor:
    return summed_loss(model, IDS, LENGTHS, IDS.roll(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quant_format", FORMATS)
def test_a_layer_computes_with_its_dequantised_weight_and_keeps_codes_alone(quant_format, dtype):
    # Catches a product with other values than `dense_weight`, a gradient through other ones, and a weight that is kept
    # for the backward pass in the dtype of x.
    plain = linear()
    layer = quantized(plain, quant_format)
    weight, bias = layer.dense_weight(dtype), plain.bias.detach().to(dtype)
    assert (weight.float() - plain.weight).norm() < 0.12 * plain.weight.norm()
    x = torch.randn(2, 7, 192, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda x: x):
        y = layer(x)
    assert torch.equal(y, (x.flatten(0, 1) @ weight.t()).view(2, 7, 130) + bias)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    y.backward(grad)
    assert torch.equal(x.grad, (grad.flatten(0, 1) @ weight).view(x.shape))
    assert max(tensor.numel() * tensor.element_size() for tensor in kept) <= layer.weight.numel()
    assert not any(parameter.requires_grad for name, parameter in layer.named_parameters() if name != "bias")


@pytest.mark.parametrize(("quant_format", "gib"), [("nf4", 5.958), ("nvfp4", 5.963), ("block_fp8", 8.790)])
def test_a_base_of_8_billion_parameters_takes_what_its_formats_say(quant_format, gib):
    # Catches scales in a wider dtype than they are stored in, and layers that stay unquantised.
    shape = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    spec = SPECS["Qwen3ForCausalLM"]
    with torch.device("meta"):
        model = spec.build(spec.config_from_hf({**CONFIG, **shape, **heads}), merge_qkv=True).bfloat16()
    quantize_layers(model, quantizable_layers(model, (), "exclude"), scheme_of(quant_format), "format")
    assert num_parameters(model) == 8_190_735_360, "half as many where two codes are a byte"
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in model.named_parameters()}
    assert sum(sizes.values()) / 2**30 == pytest.approx(gib, abs=1e-3)
    num_weights = sum(layer.out_features * layer.in_features for layer in quantized_layers(model).values())
    stored = sum(sizes.values()) - sum(sizes[name] for name, _ in dense_parameters(model))
    assert stored / num_weights <= (1.001 if quant_format == "block_fp8" else 0.57)


def test_stacked_matrices_have_their_own_global_scales():
    # Catches q, k and v quantised by the largest of all, which loses bits of the smaller ones.
    plain = linear(64, 48)
    with torch.no_grad():
        plain.weight[:16] *= 1000
    layer = quantized(plain, "nvfp4", (16, 32))
    alone = linear(64, 32)
    with torch.no_grad():
        alone.weight.copy_(plain.weight[16:])
    assert torch.equal(layer.dense_weight(torch.float32)[16:], quantized(alone, "nvfp4").dense_weight(torch.float32))


@pytest.mark.parametrize("quant_format", FORMATS)
def test_layers_compile_into_one_graph_that_keeps_no_weight(quant_format):
    # Catches a graph break, one compilation for each layer, and a compiler that keeps the dequantised weight.
    layers = [quantized(linear(64, 64, seed=seed), quant_format) for seed in range(2)]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for layer in layers:
        layer.noise, layer.noise_alpha = torch.tensor([len(graphs), 3, 0]), 0.5
        layer.train()
        wanted = layer(x)
        (wanted_grad,) = torch.autograd.grad(wanted.sum(), x)
        got = torch.compile(layer.forward, fullgraph=True, backend=backend)(x)
        assert torch.equal(got, wanted)
        assert torch.equal(torch.autograd.grad(got.sum(), x)[0], wanted_grad)
    assert len(graphs) == 1


@pytest.mark.parametrize("quant_format", FORMATS)
def test_a_decoder_trains_over_quantised_layers_as_over_their_dequantised_weights(quant_format):
    # Catches adapters that miss the quantised layers, initial values that depend on quantising, and other gradients.
    model, plain = decoder(quant_format), decoder()
    assert len(quantized_layers(model)) == 8
    for path, layer in quantized_layers(model).items():
        with torch.no_grad():
            weight = plain.get_submodule(path).weight
            assert (layer.dense_weight(torch.float32) - weight).norm() < 0.12 * weight.norm()
            weight.copy_(layer.dense_weight(torch.float32))
    for one in (model, plain):
        inject(one, AdapterSpec(rank=4, alpha=8.0))
        init_adapters(one, seed=0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in adapter_parameters(one).values():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
        loss_of(one).backward()
    assert torch.allclose(loss_of(model), loss_of(plain), rtol=1e-6)
    for name, parameter in adapter_parameters(plain).items():
        torch.testing.assert_close(adapter_parameters(model)[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quant_format", FORMATS)
def test_merging_back_loses_no_more_than_the_format_does(quant_format):
    # Catches a merge from rounded weights, scales that are kept though values have grown, and adapters folded twice.
    model = decoder(quant_format)
    inject(model, AdapterSpec(rank=4, alpha=8.0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    pairs: dict[str, list[LowRank]] = {}
    for adapter in adapters(model).values():
        pairs.setdefault(adapter.path, []).append(adapter.pair)
    wanted = {path: merged_rows(layer, pairs.get(path, [])) for path, layer in quantized_layers(model).items()}
    fold_(model)
    for path, layer in quantized_layers(model).items():
        plain = Linear(layer.in_features, layer.out_features, bias=False)
        with torch.no_grad():
            plain.weight.copy_(wanted[path])
        once = quantized(plain, quant_format, layer.part_rows)
        assert torch.equal(read_rows(layer), read_rows(once))


@pytest.mark.parametrize("quant_format", FORMATS)
def test_noise_is_the_same_in_both_passes_and_absent_in_evaluation(quant_format):
    # Catches a gradient of another weight than the output's, noise while evaluating, and noise that stays the same.
    layer = quantized(linear(bias=False), quant_format)
    model = nn.Sequential(layer)
    noise = AdaptiveNoise(model, alpha=1.0, seed=0)
    x = torch.eye(192).requires_grad_()
    seen = []
    for step in (1, 2, 1):
        noise.set_step(step)
        y = model.train()(x)
        weight = y.detach().t()
        (grad,) = torch.autograd.grad(y, x, torch.eye(192, 130))
        assert torch.equal(grad[:130], weight[:130])
        seen.append(weight)
    plain = layer.dense_weight(torch.float32)
    assert torch.equal(model.eval()(x).t(), plain)
    assert torch.equal(seen[0], seen[2])
    assert 0 < (seen[0] - plain).norm() < 0.25 * plain.norm()
    assert (seen[0] - seen[1]).norm() > 0.5 * (seen[0] - plain).norm()


def test_a_copy_and_a_state_dict_hold_all_of_it():
    # Catches a field that a checkpoint would leave out.
    model = decoder("nvfp4")
    other = decoder("nvfp4")
    for parameter in other.parameters():
        nn.init.zeros_(parameter) if parameter.is_floating_point() else parameter.zero_()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(loss_of(model), loss_of(other))
    stored = {name for name, _ in model.named_parameters()} - {name for name, _ in dense_parameters(model)}
    assert len(stored) == 8 * 3


@pytest.mark.parametrize(
    ("exclude", "merge_qkv", "left"),
    [
        ((), True, 8),
        (("lm_head", "o_proj"), True, 6),
        (("model.layers.1.mlp.down_proj",), True, 7),
        (("q_proj", "k_proj", "v_proj"), True, 6),
        (("qkv_proj",), True, 6),
        (("k_proj",), False, 10),
        (("model.layers.0.*", "embed_tokens"), True, 4),
        (("model.layers.0.self_attn",), True, 6),
    ],
)
def test_layers_are_left_out_by_name(exclude, merge_qkv, left):
    # Catches a name of a checkpoint that is not found in fused layers, or that leaves out more than it says.
    assert len(quantized_layers(decoder("nf4", exclude=exclude, merge_qkv=merge_qkv))) == left


@pytest.mark.parametrize("options", [{"targets": ("q_proj",)}, {"exclude": ("q_proj",)}])
def test_layers_that_share_a_matrix_are_quantised_together(options):
    # Catches layers that nobody named, or that were excluded by name, beside one in the same matrix.
    with pytest.raises(ValueError, match=r"shares one matrix with .*, which would be quantised too; name both"):
        quantize_(model := decoder(), scheme_of("nf4"), **options)
    assert not quantized_layers(model)


@pytest.mark.parametrize("alpha", [float("nan"), "0.1"])
def test_noise_that_is_no_number_is_refused(alpha):
    # Catches weights that all become NaN.
    with pytest.raises(ValueError, match="alpha must be a"):
        AdaptiveNoise(decoder("nf4"), alpha=alpha, seed=0)


def test_the_head_may_be_left_out_where_it_is_the_embedding():
    # Catches a configuration that suits a family and is refused for its small models, whose heads are tied.
    spec = SPECS["Qwen3ForCausalLM"]
    model = spec.build(spec.config_from_hf({**CONFIG, "tie_word_embeddings": True}), merge_qkv=True)
    assert len(quantizable_layers(model, ("lm_head",), "exclude")) == 8


@pytest.mark.parametrize(
    ("exclude", "told"), [(("c_attn",), "exclude: no module is named c_attn"), (("q_proj",), "merge_qkv")]
)
def test_names_that_cannot_be_left_out_are_refused(exclude, told):
    # Catches a misspelt name, and one of several matrices in one, that would change nothing.
    with pytest.raises(ValueError, match=told):
        decoder("nf4", exclude=exclude)


def test_shapes_that_do_not_fit_are_refused_before_anything_changes():
    # Catches groups that run over the ends of rows.
    spec = SPECS["Qwen3ForCausalLM"]
    model = spec.build(spec.config_from_hf({**CONFIG, "intermediate_size": 72}), merge_qkv=True)
    paths = quantizable_layers(model, (), "exclude")
    with pytest.raises(ValueError, match=r"group_size: 2 layers do not fit nf4: model.layers.0.mlp.down_proj"):
        quantize_layers(model, paths, QuantScheme("nf4", 64))
    assert not quantized_layers(model)


@pytest.mark.parametrize(
    ("quant_format", "counts", "num_ranks", "told"),
    [
        ("block_fp8", (128, 64), 2, None),
        ("block_fp8", (96,), 3, None),
        ("block_fp8", (128, 64), 4, "1 layers do not fit block_fp8: up .*4 ranks share it.*size that works is 2"),
        ("block_fp8", (96,), 2, "1 layers do not fit block_fp8: up .*2 ranks share it.*size that works is 1"),
        ("nf4", (128, 64), 4, "1 layers do not fit nf4: down .*rows of 48 weights.*size that works is 2"),
        ("nf4", (96,), 2, "1 layers do not fit nf4: down .*rows of 48 weights.*size that works is 1"),
    ],
)
def test_ranks_share_matrices_in_whole_groups(quant_format, counts, num_ranks, told):
    # Catches blocks of a rank that are parts of two blocks of the matrix, and advice that does not help.
    ranks = TensorRanks(RankGroup(0, num_ranks, ""))
    model = torch.nn.ModuleDict(
        {
            "down": Linear.row_parallel(sum(counts), 64, bias=False, ranks=ranks),
            "up": Linear.column_parallel(64, counts, bias=False, ranks=ranks),
        }
    )
    if quant_format == "block_fp8":
        del model["down"]
    scheme = QuantScheme(quant_format, 32)
    if told is None:
        quantize_layers(model, list(model), scheme)
        return
    with pytest.raises(ValueError, match=told):
        quantize_layers(model, list(model), scheme)


@pytest.mark.parametrize(("num_columns", "num_ranks", "works"), [(128, 4, 4), (128, 8, 4), (96, 2, 1)])
def test_ranks_share_columns_in_whole_blocks(num_columns, num_ranks, works):
    # Catches a last block of columns that only some ranks have.
    ranks = TensorRanks(RankGroup(0, num_ranks, ""))
    layer = Linear.row_parallel(num_columns, 64, bias=False, ranks=ranks)
    scheme = QuantScheme("block_fp8", 32)
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0 and fits_ranks(layer, scheme, size)]
    assert max(sizes) == works


def chain(seed: int, num_tokens: int) -> Tensor:
    """Tokens that each depend on the one before, by a table of the seed's: something to learn."""
    generator = torch.Generator().manual_seed(seed)
    odds = (2.5 * torch.randn(61, 61, generator=generator)).softmax(dim=1)
    ids = [0]
    for _ in range(num_tokens - 1):
        ids.append(int(torch.multinomial(odds[ids[-1]], 1, generator=generator)))
    return torch.tensor(ids)


def train(model: Decoder, parameters: Sequence[nn.Parameter], ids: Tensor, num_steps: int, lr: float) -> float:
    """The mean loss of the last tenth of the steps."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    losses = []
    for step in range(num_steps):
        row = ids[step * 128 : step * 128 + 129]

        optimizer.zero_grad()
        value = summed_loss(model, row[:-1], [128], row[1:]) / 128
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return sum(losses[-num_steps // 10 :]) / len(losses[-num_steps // 10 :])


def test_every_format_learns_as_well_as_adapters_on_the_base_itself():
    # Catches errors of a format that adapters do not make up for.
    # docs/records/quantisation.md has 300 steps of a larger model.
    base = decoder()
    train(base, list(base.parameters()), chain(1, 100 * 128 + 1), 100, lr=1e-2)
    ids = chain(2, 60 * 128 + 1)
    results = {}
    for quant_format in (None, *FORMATS):
        model = decoder(quant_format)
        trained = dict(base.named_parameters())
        targets = quantized_rows(model)
        with torch.no_grad():
            for name, target in targets.items():
                target.put(0, trained[name].detach())
                target.finish()
            for name, parameter in dense_parameters(model):
                parameter.copy_(trained[name])
        inject(model, AdapterSpec(rank=8, alpha=16.0))
        results[quant_format] = train(model, list(adapter_parameters(model).values()), ids, 60, lr=1e-2)
    assert results[None] < 3.4, "adapters learn nothing here that could be lost"
    for quant_format in FORMATS:
        assert abs(results[quant_format] / results[None] - 1) <= 0.02, results


@pytest.mark.parametrize(("start", "stop"), [(0, 128), (100, 260), (130, 140), (299, 300)])
def test_rows_read_from_a_quantised_checkpoint_are_those_of_the_whole_weight(start: int, stop: int) -> None:
    """Catches ranks that read other rows than theirs, where these begin within a block."""
    codes, scales = quantize_block_fp8(linear(192, 300).weight.detach(), 128)
    tensors = InMemoryTensors({"m.weight": codes, "m.weight_scale_inv": scales})
    source = dequantized_source(tensors, scheme_of("block_fp8"), {"m.weight": (300, 192)}, torch.float32)
    assert torch.equal(source.read("m.weight", start, stop), source.read("m.weight")[start:stop])
