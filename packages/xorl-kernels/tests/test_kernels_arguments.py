"""Wrong arguments at public doors: each is refused and named."""

import inspect

import pytest
import torch
from torch._subclasses import FakeTensorMode

from xorl.kernels.attention import (
    AttentionRequest,
    DecodeLayout,
    KeyValueCache,
    MixedLayout,
    cached_attention,
    resolve_attention,
)
from xorl.kernels.experts import EXPERTS, ExpertsRequest
from xorl.kernels.experts.adapted import Factors
from xorl.kernels.experts.routing import top_experts
from xorl.kernels.fused import opaque, reference
from xorl.kernels.grouped_linear import TokenGroups, grouped_linear
from xorl.kernels.layout import SequenceLayout
from xorl.kernels.linear_ce import (
    linear_cross_entropy,
    linear_cross_entropy_scores,
    linear_cross_entropy_sum,
    wide_logits,
)
from xorl.kernels.low_rank import adapted_linear
from xorl.kernels.optim import adamw_
from xorl.kernels.quant import (
    GROUP_SIZES,
    QuantScheme,
    WeightNoise,
    adapted_quantized_linear,
    dequantized,
    fp8,
    quantized_linear,
)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("q", "k", "window", "message"),
    [
        ((60, 4, 8), (60, 2, 8), None, "must have the 48 tokens of the layout; got q .60"),
        ((48, 4, 8), (47, 2, 8), None, "the 48 tokens of the layout"),
        ((48, 4, 8), (48, 3, 8), None, "query heads must be a multiple .* q .48, 4, 8., k .48, 3, 8."),
        ((48, 4, 8), (48, 2, 6), None, r"q must be \[T, H, C\], k and v \[T, G, C\]"),
        ((48, 32), (48, 16), None, r"q must be \[T, H, C\]"),
        ((48, 4, 8), (48, 2, 8), 0, "window must be an integer of at least 1, or None"),
    ],
)
def test_attention_refuses_shapes_that_do_not_fit(backend, q, k, window, message) -> None:
    # Catches uninitialised memory, rows that are left out, and heads that read the keys of others.
    attention = resolve_attention(backend, AttentionRequest("cpu", torch.float32, 8))
    query, key = torch.randn(q), torch.randn(k)
    with pytest.raises(ValueError, match=message):
        attention(query, key, key, SequenceLayout.from_lengths([40, 8]), scale=1.0, window=window)


def test_attention_refuses_keys_in_another_dtype() -> None:
    # Catches a cast that nobody asked for.
    attention = resolve_attention("eager", AttentionRequest("cpu", torch.float32, 8))
    q, k = torch.randn(4, 2, 8), torch.randn(4, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"same dtype, of floating point; got torch.float32, torch.bfloat16"):
        attention(q, k, k, SequenceLayout.from_lengths([4]), scale=1.0, window=None)


def test_unknown_names_and_lengths_are_refused() -> None:
    # Catches another format than the one that was meant, and a crash that names nothing.
    with pytest.raises(ValueError, match="quant_format: 'nf5' is not one of 'nf4', 'nvfp4', 'block_fp8'"):
        QuantScheme("nf5", 64)
    for quant_format, group_size in (("nvfp4", 64), ("nf4", 24), ("nf4", 2048), ("block_fp8", 512)):
        with pytest.raises(ValueError, match=f"group_size: {group_size} is not a valid .* {quant_format}; use"):
            QuantScheme(quant_format, group_size)
    with pytest.raises(ValueError, match=r"at least one token, got lengths \(3, -1\)"):
        SequenceLayout.from_lengths([3, -1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layout": [40, 8]}, r"layout must be a SequenceLayout, such as .*; got the list \[40, 8\]"),
        ({"layout": torch.tensor([0, 40, 48])}, "layout must be a SequenceLayout"),
        ({"window": (3, 0)}, r"window must be an integer of at least 1, or None; got the tuple \(3, 0\)"),
        ({"scale": None}, r"scale must be a finite number above 0, .*; got None"),
        ({"scale": float("nan")}, "scale must be a finite number above 0, .*; got nan"),
        ({"dtype": torch.int32}, "of floating point; got torch.int32"),
    ],
)
def test_attention_refuses_other_types(given, message) -> None:
    # Catches integers that are truncated, and errors of torch that name no argument.
    x = torch.ones(48, 2, 8, dtype=given.pop("dtype", torch.float32))
    arguments = {"layout": SequenceLayout.from_lengths([40, 8]), "scale": 1.0, "window": None, **given}
    with pytest.raises(ValueError, match=message):
        resolve_attention("eager", AttentionRequest("cpu", torch.float32, 8))(x, x, x, **arguments)


@pytest.mark.parametrize(
    ("request_type", "arguments", "message"),
    [
        (
            AttentionRequest,
            ("cpu", "bfloat16", 128),
            "dtype must be a floating-point dtype, such as torch.bfloat16; got the",
        ),
        (AttentionRequest, ("cpu", torch.float32, "128"), "head_dim must be an integer of at least 1; got the str"),
        (AttentionRequest, (torch.device("cpu"), torch.float32, 8), "device_type must be a str"),
        (AttentionRequest, ("cpu", torch.float32, 8, 0), "window must be an integer of at least 1, or None; got"),
        (AttentionRequest, ("cuda:0", torch.float32, 8), "device_type must be a device type, .*; got 'cuda:0'"),
        (ExpertsRequest, ("gpu", torch.float32, 8, 8), "device_type must be a device type, .*; got 'gpu'"),
        (ExpertsRequest, ("cpu", torch.int64, 8, 8), "dtype must be a floating-point dtype"),
        (ExpertsRequest, ("cpu", torch.float32, 8, 0.5), "expert_width must be an integer"),
    ],
)
def test_requests_refuse_other_types(request_type, arguments, message) -> None:
    # Catches a refusal that compares a dtype with its name: "it computes in bfloat16, but the model in bfloat16".
    with pytest.raises(ValueError, match=message):
        request_type(*arguments)


def test_auto_refuses_a_device_that_is_not_there(monkeypatch) -> None:
    # Catches `auto` promising a backend on a machine without a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"no attention backend can run .*sdpa \(no CUDA device is visible\)"):
        resolve_attention("auto", AttentionRequest("cuda", torch.float32, 64))
    with pytest.raises(RuntimeError, match=r"no experts backend can run .*eager \(no CUDA device is visible\)"):
        EXPERTS.resolve("auto", ExpertsRequest("cuda", torch.bfloat16, 64, 64))


LOSSES = (linear_cross_entropy, linear_cross_entropy_scores, linear_cross_entropy_sum)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("labels", "device", "message"),
    [
        (torch.tensor([5, -1, -2, -101]), "cpu", "labels: -1 at token 1 is not in the vocabulary of 100; use -100"),
        (torch.tensor([5, -100, 100, 1]), "cpu", "labels: 100 at token 2 is not in the vocabulary of 100"),
        ([5, 1, 2, 3], "cpu", r"labels must be a Tensor, such as .*; got the list \[5, 1, 2, 3\]"),
        (torch.ones(4), "cpu", r"labels must have shape \[4\].* in int64; got .* torch.float32"),
        (torch.tensor([5, 1, 2, 3]), "meta", "must be on one device; got cpu, meta, cpu"),
    ],
)
def test_losses_refuse_labels_and_devices(loss, labels, device, message) -> None:
    # Catches labels that are trained as token 0, and a weight without values.
    with pytest.raises(ValueError, match=message):
        loss(torch.randn(4, 8), torch.randn(100, 8, device=device), labels)


@pytest.mark.parametrize(
    ("hidden", "weight", "message"),
    [
        (torch.randn(4, 8), torch.randn(9, 8, device="meta"), "hidden and weight must be on one device; got cpu, meta"),
        (torch.randn(4, 8), torch.randn(9, 7), r"expected hidden \[T, D\] and weight \[V, D\]"),
        (torch.ones(4, 8).int(), torch.randn(9, 8), "must be of floating point; got torch.int32"),
    ],
)
def test_logits_refuse_what_does_not_fit(hidden, weight, message) -> None:
    with pytest.raises(ValueError, match=message):
        wide_logits(hidden, weight)
    weight = torch.randn(9, 8, requires_grad=True)
    assert not wide_logits(torch.randn(4, 8), weight).requires_grad


def test_labels_without_values_are_not_read() -> None:
    # Catches a check that breaks an estimate with fake tensors.
    with FakeTensorMode():
        loss, _ = linear_cross_entropy(torch.randn(4, 8), torch.randn(10, 8), torch.ones(4, dtype=torch.int64))
    assert loss.shape == (4,)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([(5, 4)], r"weights in \[0, 3\) .*got \[\(5, 4\)\]"),
        ([(-1, 4)], r"weights in \[0, 3\)"),
        ([(1, -4)], "at least 0 tokens"),
        ([(1, 2.5)], "runs must be integers"),
    ],
)
def test_groups_refuse_weights_and_lengths_that_do_not_exist(runs, message) -> None:
    # Catches groups that end before they begin.
    with pytest.raises(ValueError, match=message):
        TokenGroups.of(runs, 3)


@pytest.mark.parametrize(
    ("x", "weight", "addend", "message"),
    [
        ((9, 4), (3, 5, 4), None, "groups are of 7 tokens, but x has 9"),
        ((6, 4), (3, 5, 4), None, "groups are of 7 tokens, but x has 6"),
        ((7, 4), (2, 5, 4), None, "groups are of 3 weights, but weight has 2"),
        ((7, 4), (3, 4, 5), None, r"x must be \[T, K\] and weight \[S, N, K\]"),
        ((7, 4), (3, 5, 4), (5,), r"addend must be \[7, 5\]"),
    ],
)
def test_grouped_products_refuse_other_tokens(x, weight, addend, message) -> None:
    # Catches uninitialised memory in the rows of tokens beyond the groups.
    groups = TokenGroups.of([(0, 4), (2, 3)], 3)
    with pytest.raises(ValueError, match=message):
        grouped_linear(torch.randn(x), torch.randn(weight), groups, None if addend is None else torch.randn(addend))
    for wrong in (groups._replace(order=groups.order * 0), groups._replace(ends=groups.ends.new_tensor([5, 4, 7]))):
        with pytest.raises(ValueError, match="groups must have ends in row order and each weight once"):
            grouped_linear(torch.randn(7, 4), torch.randn(3, 5, 4), wrong)
    with pytest.raises(ValueError, match="x, weight and groups must be on one device; got cpu, meta, cpu"):
        grouped_linear(torch.randn(7, 4), torch.randn(3, 5, 4, device="meta"), groups)


def factors(**changes) -> Factors:
    """Of three experts of 8 x 6, with ranks of 2."""
    shapes = (3, 2, 8), (3, 12, 2), (3, 2, 6), (3, 8, 2)
    return Factors(*map(torch.zeros, shapes))._replace(**changes)


@pytest.mark.parametrize("name", ["eager", "native"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ids": torch.tensor([[0, -1]] * 5)}, r"ids must be in \[0, 3\), or 3 for a choice .*; got -1 to 0"),
        ({"ids": torch.tensor([[0, 4]] * 5)}, r"ids must be in \[0, 3\).*got 0 to 4"),
        ({"ids": torch.zeros(5, 2)}, r"ids must be \[5, 2\] in int64; got \[5, 2\] in torch.float32"),
        (
            {"ids": torch.rand(5, 2), "weights": torch.zeros(5, 2, dtype=torch.int64)},
            r"weights must be \[5, K\] in torch.float32; got \[5, 2\] in torch.int64",
        ),
        ({"weights": torch.rand(4, 2), "ids": torch.zeros(4, 2, dtype=torch.int64)}, r"weights must be \[5, K\]"),
        ({"ids": torch.zeros(5, 1, dtype=torch.int64)}, r"ids must be \[5, 2\]"),
        ({"x": torch.randn(5, 9)}, r"x must be \[T, D\], .*; got \[5, 9\], \[3, 12, 8\], \[3, 8, 6\] in torch.float32"),
        ({"down": torch.randn(3, 6, 8)}, r"gate_up \[E, 2F, D\] and down \[E, D, F\]"),
        ({"down": torch.randn(2, 8, 6)}, r"gate_up \[E, 2F, D\] and down \[E, D, F\]"),
        ({"gate_up": torch.randn(12, 8)}, r"gate_up \[E, 2F, D\]"),
        ({"gate_up": torch.randn(3, 12, 8).bfloat16()}, "in one dtype .* in torch.bfloat16, torch.float32"),
        ({"down": torch.randn(3, 8, 6, device="meta")}, "must be on one device; got cpu, cpu, meta"),
        ({"num_real": torch.ones(8)}, r"num_real must be a 0-d integer tensor; got \[8\] in torch.float32"),
        ({"num_real": torch.tensor(-1)}, "num_real must be from 0 to the 5 tokens; got -1"),
        ({"num_rows": 4}, "num_rows must be at least 5, the choices with an expert; got 4"),
        ({"num_rows": 3, "num_real": torch.tensor(4)}, "num_rows must be at least 4"),
        ({"factors": factors(kept=0.0)}, "factors.kept must be a probability above 0; got 0.0"),
        ({"factors": factors(num_slots=0)}, "factors.num_slots must be an integer of at least 1"),
        (
            {"factors": factors(down_b=torch.zeros(1, 1, 2))},
            r"factors.down_b must be \[3 or 1, 8, 2\] in torch.float32",
        ),
        ({"factors": factors(up_a=torch.zeros(2, 2, 8))}, r"factors.up_a must be \[3 or 1, 2, 8\]"),
        ({"factors": factors(x=torch.zeros(4, 8))}, r"factors.x must be \[5, 8\]"),
        (
            {"factors": factors(x=torch.zeros(5, 8, device="meta"))},
            "factors.down_b and factors.x must be on one device",
        ),
    ],
)
def test_experts_refuse_what_does_not_fit(name, given, message) -> None:
    # Catches implementations that compute different things for the same wrong input.
    arguments = {
        "x": torch.randn(5, 8),
        "gate_up": torch.randn(3, 12, 8),
        "down": torch.randn(3, 8, 6),
        "weights": torch.rand(5, 2),
        "ids": torch.tensor([[0, 3]] * 5),
    }
    experts = EXPERTS.resolve(name, ExpertsRequest("cpu", torch.float32, 8, 6))
    assert experts(**arguments).shape == (5, 8)
    with pytest.raises(ValueError, match=message):
        experts(**(arguments | given))


CACHE = KeyValueCache(
    num_layers=1,
    num_blocks=4,
    block_size=2,
    num_kv_heads=1,
    head_dim=8,
    dtype=torch.float32,
    device=torch.device("cpu"),
)


@pytest.mark.parametrize(
    ("tables", "new", "totals", "message"),
    [
        ([[0, -1]], [1], [3], r"tables: sequence 0 has blocks outside \[0, 4\): \[0, -1\]"),
        ([[0, 4]], [1], [3], r"blocks outside \[0, 4\)"),
        ([[0, 1], [2]], [1, 1], [3, 3], "tables: the 1 blocks of sequence 1 have room for 2 tokens, not for 3"),
        ([[0]], [2], [1], "new: 2 tokens of sequence 0 are new, which must be 1 to its 1 tokens"),
        ([[0, 0]], [1], [3], r"tables: sequence 0 has a block twice: \[0, 0\]"),
        ([[0.9, 1.9]], [1], [3], "tables must be integers; got"),
        ([[0]], [1, 1], [1], "must be of the same sequences, at least one; got 1, 2 and 1"),
    ],
)
def test_cached_layouts_refuse_blocks_and_tokens_that_do_not_fit(tables, new, totals, message) -> None:
    # Catches blocks of other sequences that are overwritten.
    with pytest.raises(ValueError, match=message):
        MixedLayout(CACHE, tables, new, totals, "cpu")


@pytest.mark.parametrize(
    ("q", "k", "scale", "message"),
    [
        ((8, 2, 8), (5, 1, 8), 1.0, "q, k and v must have the 5 tokens of the layout"),
        ((5, 2, 8), (1, 1, 8), 1.0, "q, k and v must have the 5 tokens of the layout"),
        ((5, 2, 8), (5, 1, 1), 1.0, r"q must be \[T, H, C\]"),
        ((5, 2, 8), (5, 1, 8), float("nan"), "scale must be a finite number above 0"),
    ],
)
def test_cached_attention_refuses_what_does_not_fit(q, k, scale, message) -> None:
    # Catches rows that are never written, and keys of one token that are taken for those of all.
    layout = MixedLayout(CACHE, [[0, 1, 2]], [5], [5], "cpu")
    with pytest.raises(ValueError, match=message):
        cached_attention(torch.randn(q), torch.randn(k), torch.randn(k), layout, scale=scale, window=None)


@pytest.mark.parametrize("changes", [{"block_size": 0}, {"dtype": torch.int64}, {"num_blocks": 2.5}])
def test_a_cache_of_another_kind_is_refused(changes) -> None:
    # Catches keys that are rounded to integers.
    sizes = {"num_layers": 1, "num_blocks": 4, "block_size": 2, "num_kv_heads": 1, "head_dim": 8}
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be "):
        KeyValueCache(**{**sizes, "dtype": torch.float32, "device": torch.device("cpu"), **changes})


def test_layouts_of_another_kind_are_refused() -> None:
    # Catches an error of a missing attribute, and one of Triton without a GPU.
    x = torch.randn(3, 1, 8)
    with pytest.raises(ValueError, match="layout must be a CachedLayout, such as a MixedLayout or DecodeLayout; got"):
        cached_attention(x, x, x, SequenceLayout.from_lengths([3]), scale=1.0, window=None)
    with pytest.raises(RuntimeError, match=r"DecodeLayout cannot run here: .*, not on cpu; use a MixedLayout"):
        DecodeLayout(CACHE, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


def test_quantised_products_refuse_the_fields_of_another_weight() -> None:
    # Catches rows beyond the weight, which are read out of bounds or left out.
    weight = QuantScheme("nf4", 64).quantize(torch.randn(8, 64))
    x, wanted = torch.randn(3, 64), "those of 16 rows in nf4"
    for call in (
        lambda: quantized_linear(x, *weight, "nf4", 64, 16),
        lambda: dequantized(*weight, "nf4", 64, 16, torch.float32),
        lambda: adapted_quantized_linear(x, torch.randn(2, 64), torch.randn(16, 2), *weight, "nf4", 64, 16),
    ):
        with pytest.raises(ValueError, match=wanted):
            call()


def test_quantised_products_refuse_other_devices_and_ranks() -> None:
    # Catches an empty result of tensors without values, and a product that is broadcast over the outputs.
    scheme = QuantScheme("nf4", 64)
    stored, one = scheme.quantize(torch.randn(8, 64)), scheme.quantize(torch.randn(1, 64))
    x, down = torch.randn(3, 64), torch.randn(2, 64)
    for call, message in (
        (lambda: quantized_linear(x.to("meta"), *stored, "nf4", 64, 8), "x and codes must be on one device"),
        (lambda: scheme.check_stored(stored._replace(scales=stored.scales.to("meta")), 8), "must be on one device"),
        (lambda: adapted_quantized_linear(x, down, torch.randn(8, 2), *one, "nf4", 64, 1), r"up \[1, R\]"),
        (lambda: adapted_linear(x, torch.randn(1, 64), None, down, torch.randn(8, 2)), r"up \[1, R\]"),
        (lambda: adapted_linear(x, torch.randn(8, 64), torch.randn(1), down, torch.randn(8, 2)), r"bias must be \[8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


X = torch.randn(3, 2, 8)
HEADS = reference.HeadShape(2, 1, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reference.rms_norm(X, torch.ones(4), 1e-6), r"weight \[D\], .* got \[3, 2, 8\] .* and \[4\]"),
        (lambda: reference.add_rms_norm(X, X[:1], torch.ones(8), 1e-6), r"residual must be \[3, 2, 8\] in .*, as x"),
        (lambda: reference.rms_norm(X, torch.ones(8), float("nan")), "eps: must be a number of at least 0"),
        (lambda: opaque.rms_norm(X, torch.ones(4), 1e-6), r"weight \[D\]"),
        (lambda: opaque.add(X, X[:1]), r"y must be \[3, 2, 8\]"),
        (lambda: opaque.apply_rope(X, (torch.ones(1, 4), torch.ones(1, 4))), r"rope must be .* \[3, 4\] in fp32"),
        (lambda: reference.swiglu(torch.randn(3, 3)), r"gate_up must be \[..., 2F\]"),
        (lambda: reference.split_heads((torch.randn(3, 16),) * 3, HEADS, None, None), r"the widths \[16, 8, 8\]"),
        (lambda: reference.split_heads((torch.randn(3, 24),), HEADS, None, None), r"one tensor \[T, 32\]"),
        (lambda: fp8.cast_rowwise(torch.randn(8), fp8.E4M3), r"x must be \[R, C\]"),
        (lambda: fp8.cast_rowwise(torch.randn(2, 8), torch.float16), "dtype must be torch.float8_e4m3fn or"),
        (
            lambda: fp8.cast_tensorwise(torch.randn(2, 8), torch.ones(2), fp8.E4M3),
            r"amax must be \[\] in fp32; got \[2\]",
        ),
        (lambda: fp8.transpose(torch.randn(2, 8)), r"q must be \[R, C\] in fp8"),
        (lambda: product(descale_a=torch.ones(1)), r"descale_a and descale_b must be \[\] each, or \[2\] and \[4\]"),
        (lambda: product(b=torch.zeros(4, 16).to(fp8.E5M2), a=torch.zeros(2, 16).to(fp8.E5M2)), "not both in E5M2"),
        (lambda: product(b=torch.zeros(4, 8).to(fp8.E4M3)), r"a must be \[M, K\] and b \[N, K\]"),
    ],
)
def test_plain_twins_and_casts_refuse_what_does_not_fit(call, message) -> None:
    # Catches broadcasting, and heads of another model.
    with pytest.raises(ValueError, match=message):
        call()


def product(**changes) -> torch.Tensor:
    operands = {"a": torch.zeros(2, 16).to(fp8.E4M3), "b": torch.zeros(4, 16).to(fp8.E4M3)}
    scales = {"descale_a": torch.ones(()), "descale_b": torch.ones(())}
    return fp8.scaled_mm(**(operands | scales | changes), out_dtype=torch.float32, fast_accumulation=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"betas": (0.9, 1.0)}, r"betas\[1\]: must be below 1, got 1.0"),
        ({"lr": float("inf")}, "lr: must be a number of at least 0, got inf"),
        ({"weight_decay": -0.1}, "weight_decay: must be a number of at least 0"),
        ({"grad_scale": torch.ones(2)}, r"grad_scale must be a 0-dim fp32 tensor on cpu; got \[2\]"),
        ({"skip": torch.zeros((), dtype=torch.int64)}, "skip must be a 0-dim fp32 tensor on cpu; .* torch.int64"),
        ({"skip": 0.0}, "skip must be a Tensor"),
        ({"grads": [torch.zeros(2)]}, r"grads\[0\] must have 3 elements on cpu, as params; it has 2"),
        ({"exp_avgs": []}, "all lists must have the same length; got 1 params, 1 grads, 0 exp_avgs"),
        ({"params": [torch.zeros(3).half()]}, r"params\[0\] must be fp32 or bf16; got torch.float16"),
        ({"grads": [torch.zeros(6)[::2]]}, r"grads\[0\] must be contiguous"),
    ],
)
def test_optimizers_refuse_what_does_not_fit(changes, message) -> None:
    # Catches a step of infinite length, and one that every value of a tensor scales on its own.
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    arguments = {name: [torch.zeros(3)] for name in names} | {
        "steps": [torch.ones(())],
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "grad_scale": None,
        "skip": torch.zeros(()),
        "noises": None,
    }
    with pytest.raises(ValueError, match=message):
        adamw_(**(arguments | changes))


def dequantized_otherwise(quant_format: str, num_rows: int, **fields: torch.Tensor) -> torch.Tensor:
    scheme = QuantScheme(quant_format, GROUP_SIZES[quant_format])
    global_scale = torch.ones(4) if quant_format == "nvfp4" else None
    weight = scheme.quantize(torch.randn(4, 128), global_scale)
    return scheme.dequantize(weight._replace(**fields), num_rows, torch.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dequantized_otherwise("nf4", 8), "those of 8 rows in nf4"),
        (lambda: dequantized_otherwise("nf4", 3), "those of 3 rows in nf4"),
        (lambda: dequantized_otherwise("block_fp8", 129), "those of 129 rows in block_fp8"),
        (lambda: dequantized_otherwise("nvfp4", 4, global_scale=None), "those of 4 rows in nvfp4"),
        (lambda: dequantized_otherwise("nf4", 4, global_scale=torch.ones(4)), "those of 4 rows in nf4"),
        (lambda: dequantized_otherwise("nf4", 4, scales=torch.ones(4, 1)), "those of 4 rows in nf4"),
        (
            lambda: QuantScheme("nf4", 64).quantize(torch.randn(4, 64), torch.ones(4)),
            "global_scale: nf4 has none; leave it out",
        ),
        (
            lambda: QuantScheme("nvfp4", 16).quantize(torch.randn(4, 64), torch.ones(())),
            r"global_scale: nvfp4 needs one, fp32 \[4\]; got torch.float32 \[\]",
        ),
        (
            lambda: dequantized(*QuantScheme("nf4", 64).quantize(torch.randn(4, 64)), "nf4", 64, 4, torch.int8),
            "dtype must be a floating-point dtype",
        ),
        (
            lambda: quantized_linear(
                torch.randn(3, 32), *QuantScheme("nf4", 64).quantize(torch.randn(4, 64)), "nf4", 64, 4
            ),
            r"x must be \[T, 64\], of floating point; got torch.float32 \[3, 32\]",
        ),
        (lambda: QuantScheme("nf4", "64"), "group_size must be an integer of at least 1; got the str '64'"),
        (lambda: WeightNoise(float("nan"), torch.zeros(3, dtype=torch.int64)), "alpha: must be a number of at least 0"),
        (lambda: WeightNoise(0.1, torch.zeros(3)), r"state must be torch.int64 \[3\].*got torch.float32 \[3\]"),
        (lambda: QuantScheme("nf4", 64).quantize(torch.randn(4, 60)), "weight: rows of 60 weights cannot be divided"),
        (lambda: QuantScheme("nf4", 64).quantize(torch.randn(64)), r"weight: must be a matrix .* got .* \[64\]"),
        (
            lambda: QuantScheme("nf4", 64).quantize(torch.ones(4, 64).int()),
            "weight: must be a matrix of floating-point",
        ),
    ],
)
def test_weights_are_quantised_and_read_back_in_their_own_shape(call, message) -> None:
    # Catches rows that were never stored, and a global scale that the format would not apply.
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "function",
    [
        quantized_linear,
        dequantized,
        top_experts,
        *(fp8.amax, fp8.cast_tensorwise, fp8.cast_axiswise, fp8.transpose),
        *(opaque.add, opaque.rms_norm, opaque.rope, opaque.swiglu, opaque.round_to_bf16),
    ],
)
def test_public_operators_are_functions_with_help(function) -> None:
    # Catches an operator object, whose help shows torch's class.
    assert inspect.isfunction(function)
    assert function.__doc__
    assert "args" not in inspect.signature(function).parameters
