"""Wrong arguments of public functions: each is refused and named."""

import inspect
from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode

from xorl.kernels.attention import (
    AttentionRequest,
    AttentionSpec,
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

CPU = AttentionRequest("cpu", torch.float32, 8)
LAYOUT = SequenceLayout.from_lengths([40, 8])
IDS = torch.zeros(5, 2, dtype=torch.int64)
GROUPS = TokenGroups.of([(0, 4), (2, 3)], 3)
CACHE = KeyValueCache(layers=[(1, 8)], num_blocks=4, block_size=2, dtype=torch.float32, device=torch.device("cpu"))
NF4 = QuantScheme("nf4", 64)
X = torch.randn(3, 2, 8)
HEADS = reference.HeadShape(2, 1, 8)
STORED, ONE = NF4.quantize(torch.randn(8, 64)), NF4.quantize(torch.randn(1, 64))
ROWS, DOWN = torch.randn(3, 64), torch.randn(2, 64)


def attend(q=(48, 2, 8), k=(48, 2, 8), backend="eager", dtype=torch.float32, key_dtype=None, **given):
    query, key = torch.ones(q, dtype=dtype), torch.ones(k, dtype=key_dtype or dtype)
    layout, sinks = given.pop("layout", LAYOUT), given.pop("sinks", None)
    spec = AttentionSpec(**{"scale": 1.0, **given})
    resolve_attention(backend, CPU)(query, key, key, layout, spec, sinks)


def attend_cached(q=(5, 2, 8), k=(5, 1, 8), scale=1.0, layout=None):
    layout = layout or MixedLayout(CACHE, [[0, 1, 2]], [5], [5], "cpu")
    cached_attention(torch.randn(q), torch.randn(k), torch.randn(k), layout, AttentionSpec(scale))


def cache(**changes):
    sizes = {"layers": [(1, 8)], "num_blocks": 4, "block_size": 2}
    KeyValueCache(**{**sizes, "dtype": torch.float32, "device": torch.device("cpu"), **changes})


def grouped(x=(7, 4), weight=(3, 5, 4), addend=None, groups=GROUPS, device="cpu"):
    sums = None if addend is None else torch.randn(addend)
    grouped_linear(torch.randn(x), torch.randn(weight, device=device), groups, sums)


def factors(**changes) -> Factors:
    """Of three experts of 8 x 6, with ranks of 2."""
    shapes = (3, 2, 8), (3, 12, 2), (3, 2, 6), (3, 8, 2)
    return Factors(*map(torch.zeros, shapes))._replace(**changes)


def compute_experts(name, **given):
    """Of valid arguments first: what is refused is the change."""
    arguments = {
        "x": torch.randn(5, 8),
        "gate_up": torch.randn(3, 12, 8),
        "down": torch.randn(3, 8, 6),
        "weights": torch.rand(5, 2),
        "ids": torch.tensor([[0, 3]] * 5),
    }
    experts = EXPERTS.resolve(name, ExpertsRequest("cpu", torch.float32, 8, 6))
    assert experts(**arguments).shape == (5, 8)
    experts(**(arguments | given))


def lose(loss, labels, device):
    loss(torch.randn(4, 8), torch.randn(100, 8, device=device), labels)


def product(**changes) -> torch.Tensor:
    operands = {"a": torch.zeros(2, 16).to(fp8.E4M3), "b": torch.zeros(4, 16).to(fp8.E4M3)}
    scales = {"descale_a": torch.ones(()), "descale_b": torch.ones(())}
    return fp8.scaled_mm(**(operands | scales | changes), out_dtype=torch.float32, fast_accumulation=False)


def step(**changes):
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    numbers = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    rest = {"steps": [torch.ones(())], **numbers, "grad_scale": None, "skip": torch.zeros(()), "noises": None}
    adamw_(**({name: [torch.zeros(3)] for name in names} | rest | changes))


def dequantized_otherwise(quant_format: str, num_rows: int, **fields: torch.Tensor) -> torch.Tensor:
    scheme = QuantScheme(quant_format, GROUP_SIZES[quant_format])
    global_scale = torch.ones(4) if quant_format == "nvfp4" else None
    weight = scheme.quantize(torch.randn(4, 128), global_scale)
    return scheme.dequantize(weight._replace(**fields), num_rows, torch.float32)


# By what would happen without them: calls, and what their errors say.
REFUSED = {
    "uninitialised memory, rows that are left out, and heads that read the keys of others": [
        (partial(attend, q, k, backend, window=window), message)
        for backend in ("eager", "sdpa")
        for q, k, window, message in (
            ((60, 4, 8), (60, 2, 8), None, "must have the 48 tokens of the layout; got q .60"),
            ((48, 4, 8), (47, 2, 8), None, "the 48 tokens of the layout"),
            ((48, 4, 8), (48, 3, 8), None, "query heads must be a multiple .* q .48, 4, 8., k .48, 3, 8."),
            ((48, 4, 8), (48, 2, 6), None, r"q must be \[T, H, C\], k \[T, G, C\] and v"),
            ((48, 32), (48, 16), None, r"q must be \[T, H, C\]"),
            ((48, 4, 8), (48, 2, 8), 0, "window must be an integer of at least 1, or None"),
        )
    ],
    "a cast that nobody asked for": [
        (lambda: attend(causal=False, window=2), "causal: False does not go with window=2"),
        (lambda: attend(causal=None), "causal must be a bool"),
        (lambda: attend(key_dtype=torch.bfloat16), "same dtype, of floating point; got torch.float32, torch.bfloat16"),
    ],
    "integers that are truncated, and errors of torch that name no argument": [
        (lambda: attend(layout=[40, 8]), r"layout must be a SequenceLayout, such as .*; got the list \[40, 8\]"),
        (lambda: attend(layout=torch.tensor([0, 40, 48])), "layout must be a SequenceLayout"),
        (lambda: attend(window=(3, 0)), r"window must be an integer of at least 1, or None; got the tuple \(3, 0\)"),
        (lambda: attend(scale=None), r"scale must be a finite number above 0, .*; got None"),
        (lambda: attend(scale=float("nan")), "scale must be a finite number above 0, .*; got nan"),
        (lambda: attend(softcap=0.0), r"softcap must be a finite number above 0, .*; got 0.0"),
        (lambda: attend(softcap=5.0, backend="sdpa"), "softcap: attention backend 'sdpa' does not cap scores"),
        (lambda: attend(sinks=torch.zeros(3)), r"sinks must be \[2\], one number per head; got \[3\] in torch.float32"),
        (lambda: attend(dtype=torch.int32), "of floating point; got torch.int32"),
    ],
    "a refusal that compares a dtype with its name: it computes in bfloat16, but the model in bfloat16": [
        (
            lambda: AttentionRequest("cpu", "bfloat16", 128),
            "dtype must be a floating-point dtype, such as torch.bfloat16; got the",
        ),
        (
            lambda: AttentionRequest("cpu", torch.float32, "128"),
            "head_dim must be an integer of at least 1; got the str",
        ),
        (lambda: AttentionRequest(torch.device("cpu"), torch.float32, 8), "device_type must be a str"),
        (lambda: AttentionRequest("cpu", torch.float32, 8, 0), "window must be an integer of at least 1, or None; got"),
        (lambda: AttentionRequest("cuda:0", torch.float32, 8), "device_type must be a device type, .*; got 'cuda:0'"),
        (lambda: ExpertsRequest("gpu", torch.float32, 8, 8), "device_type must be a device type, .*; got 'gpu'"),
        (lambda: ExpertsRequest("cpu", torch.int64, 8, 8), "dtype must be a floating-point dtype"),
        (lambda: ExpertsRequest("cpu", torch.float32, 8, 0.5), "expert_width must be an integer"),
    ],
    "groups that end before they begin": [
        (lambda: TokenGroups.of([(5, 4)], 3), r"weights in \[0, 3\) .*got \[\(5, 4\)\]"),
        (lambda: TokenGroups.of([(-1, 4)], 3), r"weights in \[0, 3\)"),
        (lambda: TokenGroups.of([(1, -4)], 3), "at least 0 tokens"),
        (lambda: TokenGroups.of([(1, 2.5)], 3), "runs must be integers"),
    ],
    "uninitialised memory in the rows of tokens beyond the groups": [
        (lambda: grouped((9, 4), (3, 5, 4)), "groups are of 7 tokens, but x has 9"),
        (lambda: grouped((6, 4), (3, 5, 4)), "groups are of 7 tokens, but x has 6"),
        (lambda: grouped((7, 4), (2, 5, 4)), "groups are of 3 weights, but weight has 2"),
        (lambda: grouped((7, 4), (3, 4, 5)), r"x must be \[T, K\] and weight \[S, N, K\]"),
        (lambda: grouped((7, 4), (3, 5, 4), (5,)), r"addend must be \[7, 5\]"),
        (
            lambda: grouped(groups=GROUPS._replace(order=GROUPS.order * 0)),
            "groups must have ends in row order and each weight once",
        ),
        (
            lambda: grouped(groups=GROUPS._replace(ends=GROUPS.ends.new_tensor([5, 4, 7]))),
            "groups must have ends in row order and each weight once",
        ),
        (lambda: grouped(device="meta"), "x, weight and groups must be on one device; got cpu, meta, cpu"),
    ],
    "blocks of other sequences that are overwritten": [
        (
            lambda: MixedLayout(CACHE, [[0, -1]], [1], [3], "cpu"),
            r"tables: sequence 0 has blocks outside \[0, 4\): \[0, -1\]",
        ),
        (lambda: MixedLayout(CACHE, [[0, 4]], [1], [3], "cpu"), r"blocks outside \[0, 4\)"),
        (
            lambda: MixedLayout(CACHE, [[0, 1], [2]], [1, 1], [3, 3], "cpu"),
            "tables: the 1 blocks of sequence 1 have room for 2 tokens, not for 3",
        ),
        (
            lambda: MixedLayout(CACHE, [[0]], [2], [1], "cpu"),
            "new: 2 tokens of sequence 0 are new, which must be 1 to its 1 tokens",
        ),
        (lambda: MixedLayout(CACHE, [[0, 0]], [1], [3], "cpu"), r"tables: sequence 0 has a block twice: \[0, 0\]"),
        (lambda: MixedLayout(CACHE, [[0.9, 1.9]], [1], [3], "cpu"), "tables must be integers; got"),
        (
            lambda: MixedLayout(CACHE, [[0]], [1, 1], [1], "cpu"),
            "must be of the same sequences, at least one; got 1, 2 and 1",
        ),
    ],
    "rows that are never written, keys of one token that are taken for those of all, and a missing attribute": [
        (lambda: attend_cached((8, 2, 8), (5, 1, 8)), "q, k and v must have the 5 tokens of the layout"),
        (lambda: attend_cached((5, 2, 8), (1, 1, 8)), "q, k and v must have the 5 tokens of the layout"),
        (lambda: attend_cached((5, 2, 8), (5, 1, 1)), r"q must be \[T, H, C\]"),
        (lambda: attend_cached((5, 2, 8), (5, 1, 8), float("nan")), "scale must be a finite number above 0"),
        (
            lambda: attend_cached(layout=SequenceLayout.from_lengths([5])),
            "layout must be a CachedLayout, such as a MixedLayout or DecodeLayout; got",
        ),
    ],
    "keys that are rounded to integers": [
        (lambda: cache(block_size=0), "block_size must be "),
        (lambda: cache(layers=[]), "number of layers must be "),
        (lambda: cache(layers=[(1, 0)]), "layers: head_dim must be "),
        (lambda: cache(dtype=torch.int64), "dtype must be "),
        (lambda: cache(num_blocks=2.5), "num_blocks must be "),
    ],
    "rows beyond the weight, which are read out of bounds or left out": [
        (lambda: quantized_linear(ROWS, *STORED, "nf4", 64, 16), "those of 16 rows in nf4"),
        (lambda: dequantized(*STORED, "nf4", 64, 16, torch.float32), "those of 16 rows in nf4"),
        (
            lambda: adapted_quantized_linear(ROWS, DOWN, torch.randn(16, 2), *STORED, "nf4", 64, 16),
            "those of 16 rows in nf4",
        ),
    ],
    "an empty result of tensors without values, and a product that is broadcast over the outputs": [
        (lambda: quantized_linear(ROWS.to("meta"), *STORED, "nf4", 64, 8), "x and codes must be on one device"),
        (lambda: NF4.check_stored(STORED._replace(scales=STORED.scales.to("meta")), 8), "must be on one device"),
        (lambda: adapted_quantized_linear(ROWS, DOWN, torch.randn(8, 2), *ONE, "nf4", 64, 1), r"up \[1, R\]"),
        (lambda: adapted_linear(ROWS, torch.randn(1, 64), None, DOWN, torch.randn(8, 2)), r"up \[1, R\]"),
        (
            lambda: adapted_linear(ROWS, torch.randn(8, 64), torch.randn(1), DOWN, torch.randn(8, 2)),
            r"bias must be \[8\]",
        ),
    ],
    "broadcasting, and heads of another model": [
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
    "a step of infinite length, and one that every value of a tensor scales on its own": [
        (lambda: step(betas=(0.9, 1.0)), r"betas\[1\]: must be below 1, got 1.0"),
        (lambda: step(lr=float("inf")), "lr: must be a number of at least 0, got inf"),
        (lambda: step(weight_decay=-0.1), "weight_decay: must be a number of at least 0"),
        (lambda: step(grad_scale=torch.ones(2)), r"grad_scale must be a 0-dim fp32 tensor on cpu; got \[2\]"),
        (
            lambda: step(skip=torch.zeros((), dtype=torch.int64)),
            "skip must be a 0-dim fp32 tensor on cpu; .* torch.int64",
        ),
        (lambda: step(skip=0.0), "skip must be a Tensor"),
        (lambda: step(grads=[torch.zeros(2)]), r"grads\[0\] must have 3 elements on cpu, as params; it has 2"),
        (lambda: step(exp_avgs=[]), "all lists must have the same length; got 1 params, 1 grads, 0 exp_avgs"),
        (lambda: step(params=[torch.zeros(3).half()]), r"params\[0\] must be fp32 or bf16; got torch.float16"),
        (lambda: step(grads=[torch.zeros(6)[::2]]), r"grads\[0\] must be contiguous"),
    ],
    "rows that were never stored, and a global scale that the format would not apply": [
        (lambda: dequantized_otherwise("nf4", 8), "those of 8 rows in nf4"),
        (lambda: dequantized_otherwise("nf4", 3), "those of 3 rows in nf4"),
        (lambda: dequantized_otherwise("block_fp8", 129), "those of 129 rows in block_fp8"),
        (lambda: dequantized_otherwise("nvfp4", 4, global_scale=None), "those of 4 rows in nvfp4"),
        (lambda: dequantized_otherwise("nf4", 4, global_scale=torch.ones(4)), "those of 4 rows in nf4"),
        (lambda: dequantized_otherwise("nf4", 4, scales=torch.ones(4, 1)), "those of 4 rows in nf4"),
        (lambda: NF4.quantize(torch.randn(4, 64), torch.ones(4)), "global_scale: nf4 has none; leave it out"),
        (
            lambda: QuantScheme("nvfp4", 16).quantize(torch.randn(4, 64), torch.ones(())),
            r"global_scale: nvfp4 needs one, fp32 \[4\]; got torch.float32 \[\]",
        ),
        (
            lambda: dequantized(*NF4.quantize(torch.randn(4, 64)), "nf4", 64, 4, torch.int8),
            "dtype must be a floating-point dtype",
        ),
        (
            lambda: quantized_linear(torch.randn(3, 32), *NF4.quantize(torch.randn(4, 64)), "nf4", 64, 4),
            r"x must be \[T, 64\], of floating point; got torch.float32 \[3, 32\]",
        ),
        (lambda: QuantScheme("nf4", "64"), "group_size must be an integer of at least 1; got the str '64'"),
        (lambda: WeightNoise(float("nan"), torch.zeros(3, dtype=torch.int64)), "alpha: must be a number of at least 0"),
        (lambda: WeightNoise(0.1, torch.zeros(3)), r"state must be torch.int64 \[3\].*got torch.float32 \[3\]"),
        (lambda: NF4.quantize(torch.randn(4, 60)), "weight: rows of 60 weights cannot be divided"),
        (lambda: NF4.quantize(torch.randn(64)), r"weight: must be a matrix .* got .* \[64\]"),
        (lambda: NF4.quantize(torch.ones(4, 64).int()), "weight: must be a matrix of floating-point"),
    ],
    "another format than the one that was meant, and a crash that names nothing": [
        (lambda: QuantScheme("nf5", 64), "quant_format: 'nf5' is not one of 'nf4', 'nvfp4', 'block_fp8'"),
        (lambda: QuantScheme("nvfp4", 64), "group_size: 64 is not a valid .* nvfp4; use"),
        (lambda: QuantScheme("nf4", 24), "group_size: 24 is not a valid .* nf4; use"),
        (lambda: QuantScheme("nf4", 2048), "group_size: 2048 is not a valid .* nf4; use"),
        (lambda: QuantScheme("block_fp8", 512), "group_size: 512 is not a valid .* block_fp8; use"),
        (lambda: SequenceLayout.from_lengths([3, -1]), r"at least one token, got lengths \(3, -1\)"),
    ],
    "operands on two devices, or of other shapes, and products of integers": [
        (
            lambda: wide_logits(torch.randn(4, 8), torch.randn(9, 8, device="meta")),
            "hidden and weight must be on one device; got cpu, meta",
        ),
        (lambda: wide_logits(torch.randn(4, 8), torch.randn(9, 7)), r"expected hidden \[T, D\] and weight \[V, D\]"),
        (lambda: wide_logits(torch.ones(4, 8).int(), torch.randn(9, 8)), "must be of floating point; got torch.int32"),
    ],
    "labels that are trained as token 0, and a weight without values": [
        (partial(lose, loss, labels, device), message)
        for loss in (linear_cross_entropy, linear_cross_entropy_scores, linear_cross_entropy_sum)
        for labels, device, message in (
            (torch.tensor([5, -1, -2, -101]), "cpu", "labels: -1 at token 1 is not in the vocabulary of 100; use -100"),
            (torch.tensor([5, -100, 100, 1]), "cpu", "labels: 100 at token 2 is not in the vocabulary of 100"),
            ([5, 1, 2, 3], "cpu", r"labels must be a Tensor, such as .*; got the list \[5, 1, 2, 3\]"),
            (torch.ones(4), "cpu", r"labels must have shape \[4\].* in int64; got .* torch.float32"),
            (torch.tensor([5, 1, 2, 3]), "meta", "must be on one device; got cpu, meta, cpu"),
        )
    ],
    "implementations that compute different things for the same wrong input": [
        (partial(compute_experts, name, **given), message)
        for name in ("eager", "native")
        for given, message in (
            ({"ids": torch.tensor([[0, -1]] * 5)}, r"ids must be in \[0, 3\), or 3 for a choice .*; got -1 to 0"),
            ({"ids": torch.tensor([[0, 4]] * 5)}, r"ids must be in \[0, 3\).*got 0 to 4"),
            ({"ids": torch.zeros(5, 2)}, r"ids must be \[5, 2\] in int64; got \[5, 2\] in torch.float32"),
            (
                {"ids": torch.rand(5, 2), "weights": torch.zeros(5, 2, dtype=torch.int64)},
                r"weights must be \[5, K\] in torch.float32; got \[5, 2\] in torch.int64",
            ),
            ({"weights": torch.rand(4, 2), "ids": torch.zeros(4, 2, dtype=torch.int64)}, r"weights must be \[5, K\]"),
            ({"ids": torch.zeros(5, 1, dtype=torch.int64)}, r"ids must be \[5, 2\]"),
            (
                {"x": torch.randn(5, 9)},
                r"x must be \[T, D\], .*; got \[5, 9\], \[3, 12, 8\], \[3, 8, 6\] in torch.float32",
            ),
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
        )
    ],
}


@pytest.mark.parametrize(
    ("call", "message"),
    [pytest.param(*row, id=f"{why}-{number}") for why, calls in REFUSED.items() for number, row in enumerate(calls)],
)
def test_wrong_arguments_are_refused_by_name(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_auto_refuses_a_device_that_is_not_there(monkeypatch) -> None:
    # Catches `auto` promising a backend on a machine without a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"no attention backend can run .*sdpa \(no CUDA device is visible\)"):
        resolve_attention("auto", AttentionRequest("cuda", torch.float32, 64))
    with pytest.raises(RuntimeError, match=r"no experts backend can run .*eager \(no CUDA device is visible\)"):
        EXPERTS.resolve("auto", ExpertsRequest("cuda", torch.bfloat16, 64, 64))


def test_a_layout_of_fixed_tables_is_refused_without_a_gpu() -> None:
    # Catches an error of Triton without a GPU.
    with pytest.raises(RuntimeError, match=r"DecodeLayout cannot run here: .*, not on cpu; use a MixedLayout"):
        DecodeLayout(CACHE, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


def test_labels_without_values_are_not_read() -> None:
    # Catches a check that breaks an estimate with fake tensors, and logits that keep what only a gradient needs.
    with FakeTensorMode():
        loss, _ = linear_cross_entropy(torch.randn(4, 8), torch.randn(10, 8), torch.ones(4, dtype=torch.int64))
    assert loss.shape == (4,)
    assert not wide_logits(torch.randn(4, 8), torch.randn(9, 8, requires_grad=True)).requires_grad


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
