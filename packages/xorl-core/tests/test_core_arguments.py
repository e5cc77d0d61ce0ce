"""Wrong arguments at public doors: each is refused and named."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from xorl.core.loss import combine_metrics, get_loss, read_metrics
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.models import SPECS, spec_for, training_flops
from xorl.core.models.decoder_config import DecoderConfig, DenseConfig
from xorl.core.nn import NormConfig, RopeConfig
from xorl.core.nn.fp8 import convert_linears
from xorl.core.nn.kernels import choose_kernels
from xorl.core.nn.rotary import Rotary
from xorl.core.optim import MuonOptions, Schedule, build_optimizer, scale_and_clip_
from xorl.core.optim.clip import gradient_norms, gradient_scale
from xorl.core.parallel import ParallelPolicy, parallelize
from xorl.core.parallel.apply import check_parallelizable
from xorl.core.runtime import init
from xorl.core.shards import copy_shard_
from xorl.kernels.attention.sdpa import sdpa_attention
from xorl.kernels.layout import SequenceLayout


def optimizer(name: str, **options: object) -> object:
    return build_optimizer(name, nn.Linear(4, 4).named_parameters(), **{"lr": 0.1, "weight_decay": 0.0, **options})


def loss(targets: dict[str, torch.Tensor], name: str = "cross_entropy", **options: bool) -> object:
    return get_loss(name)(torch.ones(6, 4), torch.ones(8, 4), targets, **options)


def kernels(**options: object) -> object:
    defaults = {"device_type": "cpu", "dtype": torch.float32, "compiled": False, "native": (), "cast_bf16": False}
    return choose_kernels(sdpa_attention, **{**defaults, **options})


SIZES = {"vocab_size": 9, "max_position_embeddings": 8, "hidden_size": 8, "intermediate_size": 8}
LLAMA = SPECS["LlamaForCausalLM"].config_from_hf({**SIZES, "num_hidden_layers": 1, "num_attention_heads": 2})
GPT2 = SPECS["GPT2LMHeadModel"].config_from_hf(
    {"vocab_size": 9, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
)
MIXTRAL = SPECS["MixtralForCausalLM"].config_from_hf(
    {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
)
QWEN3 = SPECS["Qwen3ForCausalLM"].config_from_hf(
    {**SIZES, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
)
WEIGHT = nn.Parameter(torch.ones(2))
ROUTES = torch.tensor([0, 1]).expand(3, 2, 2)
METRICS = {"loss:sum": torch.ones(()), "valid_tokens:sum": torch.ones(())}


def replay(recorded: object, name: str = "MixtralForCausalLM", config: DecoderConfig = MIXTRAL) -> object:
    return SPECS[name].build(config)(torch.arange(3), SequenceLayout.from_lengths([3]), recorded=recorded)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimizer("adam"), "name: 'adam' is not one of 'adamw', 'sgd'"),
        (lambda: optimizer("muon"), "muon: the optimizer muon needs MuonOptions"),
        (lambda: MuonOptions({}, adjust_lr="rms"), "adjust_lr: 'rms' is not one of 'original'"),
        (lambda: ParallelPolicy(data_parallel_mode="fsdp"), "data_parallel_mode: 'fsdp' is not one of 'none', 'ddp'"),
        (lambda: ParallelPolicy(recompute="layers"), "recompute: 'layers' is not one of"),
        (lambda: ParallelPolicy(recompute=["attention"]), "recompute: 'attention' is not one of 'self_attn', 'mlp'"),
        (lambda: ParallelPolicy(fp8="rows"), "fp8: 'rows' is not one of"),
        (lambda: ParallelDims.resolve("fsdp", 2), "mode: 'fsdp' is not one of"),
        (lambda: ParallelDims(context_sharding="ring"), "context_sharding: 'ring' is not one of"),
        (lambda: Schedule(10, 0.1, style="cosin"), "style: 'cosin' is not one of 'constant', 'linear', 'cosine'"),
        (lambda: Schedule(0, 0.1), "num_steps must be an integer of at least 1; got the int 0"),
        (lambda: Schedule(10, 0.1, warmup_ratio=1.5), "warmup_ratio must be from 0 to 1"),
        (lambda: Schedule(10, 0.1)(0), "step must be at least 1"),
        (lambda: convert_linears(nn.ModuleList(), "rows"), "recipe: 'rows' is not one of"),
        (lambda: optimizer("adamw", lr="1e-3"), "lr: must be a number of at least 0, got '1e-3'"),
        (lambda: optimizer("adamw", lr=-1.0), "lr: must be a number of at least 0, got -1.0"),
        (lambda: optimizer("adamw", state_dtype="bfloat16"), "state_dtype: must be a torch.dtype"),
        (lambda: optimizer("adamw", no_decay_params="bias"), r"no_decay_params: must be a list of strings, got 'bias'"),
        (lambda: optimizer("adamw", no_decay_params=["nobias"]), "^no_decay_params: no parameter matches nobias"),
        (
            lambda: optimizer("muon", muon=MuonOptions({"foo": [4]})),
            "muon: matrices names 'foo', which is no parameter",
        ),
        (lambda: optimizer("muon", muon=MuonOptions({"bias": [4]})), "'bias', which has 1 dims instead of two"),
        (
            lambda: optimizer("muon", muon=MuonOptions({"weight": [2, 1]})),
            r"'weight' matrices of \[2, 1\] rows, which are 3 rows in all; the parameter has 4",
        ),
        (lambda: optimizer("muon", muon=MuonOptions({"weight": [5, -1]})), r"'weight' matrices of \[5, -1\] rows"),
        (
            lambda: build_optimizer("sgd", nn.Linear(4, 4).parameters(), lr=0.1, weight_decay=0.0),
            r"named_parameters: must be pairs .* pass model.named_parameters\(\)",
        ),
        (lambda: MuonOptions([("weight", [4])]), "matrices: must map names of parameters"),
        (lambda: MuonOptions({}, num_steps=0), "num_steps: must be a number of at least 1, got 0"),
        (lambda: MuonOptions({}, momentum=3.0), "momentum: must be at least 0 and below 1, got 3.0"),
        (lambda: Schedule(10, -1e-2), "peak: must be a number of at least 0, got -0.01"),
        (lambda: Schedule(10, 1e-2, 1.0, style="cosine"), "minimum 1 is above peak 0.01"),
        (lambda: ParallelPolicy(param_dtype="bf16"), "param_dtype must be a floating-point dtype, .* 'bf16'"),
        (lambda: ParallelPolicy(param_dtype=torch.int8), "param_dtype must be a floating-point dtype"),
        (lambda: ParallelPolicy(recompute_num_layers=-1), "recompute_num_layers: must be a number of at least 0"),
        (lambda: ParallelPolicy(compile_backend=True), "compile_backend: True is not one of 'inductor'"),
        (lambda: ParallelPolicy(collectives="gloo"), "collectives: 'gloo' is not one of 'auto', 'copy_engine', 'nccl'"),
        (
            lambda: check_parallelizable(Named(), ParallelPolicy(collectives="copy_engine"), "cpu"),
            "collectives: copy_engine is for GPUs, not for cpu devices; use auto",
        ),
        (lambda: ParallelPolicy(unit_modules="lm_head"), "unit_modules: must be a tuple of names, got the str"),
        (lambda: scale_and_clip_(iter(()), 1.0, 1.0), "parameters: there are none"),
        (lambda: ParallelPolicy(recompute=True), "recompute: True is not one of 'none'"),
        (lambda: scale_and_clip_([nn.Parameter(torch.ones(2))], 0, 1.0), "divisor: is 0"),
        (lambda: scale_and_clip_([nn.Parameter(torch.ones(2))], -8.0, 1.0), "divisor: must be a number of at least 0"),
        (lambda: scale_and_clip_(nn.Parameter(torch.ones(2)), 1.0, 1.0), "parameters: must be a list of tensors"),
        (lambda: scale_and_clip_([nn.Parameter(torch.ones(2))], 1.0, -1.0), "max_norm: must be a number of at least 0"),
        (lambda: init("gpu"), "device_type: 'gpu' is not one of"),
        (lambda: spec_for("meta-llama/Llama-3.1-8B"), "hf_config: must be the mapping of a config.json, got str"),
        (lambda: SPECS["LlamaForCausalLM"].build({}), "config: must be a DecoderConfig, .* got dict"),
        (
            lambda: loss({"labels": torch.arange(6)[None]}),
            r"labels must have one entry .* 6 tokens .* got shape \[1, 6\]",
        ),
        (lambda: loss({"label": torch.arange(6)}), "targets: there are no labels among label"),
        (
            lambda: loss({"labels": torch.arange(6), "weights": torch.ones(6, 1)}),
            r"weights must have shape \[6\], as labels; got \[6, 1\]",
        ),
        (
            lambda: loss({"logprobs": torch.ones(6), "advantages": torch.ones(6)}, "ppo"),
            "targets: there are no labels among logprobs, advantages",
        ),
        (lambda: gradient_scale(WEIGHT, 1.0, 1.0), "parameters: must be a list of tensors, got Parameter; pass a list"),
        (lambda: gradient_scale(iter([WEIGHT]), 1.0, 1.0), "parameters: must be a list of tensors, got list_iterator"),
        (lambda: gradient_scale([], 1.0, 1.0), "parameters: there are none"),
        (lambda: gradient_scale([WEIGHT], 0, 1.0), "divisor: is 0"),
        (lambda: gradient_scale([WEIGHT], 1.0, -1.0), "max_norm: must be a number of at least 0"),
        (lambda: gradient_norms([WEIGHT]), "sets: must be a list of lists of tensors"),
        (lambda: gradient_norms([[]]), "sets: there are no parameters"),
        (lambda: scale_and_clip_([("weight", WEIGHT)], 1.0, 1.0), "parameters: must be a list of tensors, got one of"),
        (
            lambda: build_optimizer("sgd", [("w", WEIGHT), ("w", WEIGHT)], lr=0.1, weight_decay=0.0),
            "named_parameters: 'w' is there twice",
        ),
        (lambda: optimizer("adamw", no_decay_params=iter(["bias"])), "no_decay_params: must be a list of strings, got"),
        (lambda: optimizer("adamw", no_decay_modules=[1]), r"no_decay_modules: must be a list of strings, got \[1\]"),
        (
            lambda: optimizer("anyprecision_adamw", state_dtype=torch.float16),
            "state_dtype: .* torch.float32 or torch.bfloat16, got torch.float16",
        ),
        (lambda: optimizer("muon", muon={"weight": [4]}), "muon: must be MuonOptions, got dict"),
        (lambda: optimizer("muon", lr=0.0, muon=MuonOptions({"weight": [4]})), "lr: is 0"),
        (lambda: MuonOptions({}, num_steps=2.5), "num_steps: must be an integer, got 2.5"),
        (lambda: MuonOptions({}, compute_dtype=torch.float16), "compute_dtype: must be torch.float32 or"),
        (lambda: convert_linears(nn.ModuleList(), "rowwise", exclude="o_proj"), "exclude: must be a list of names"),
        (lambda: convert_linears(nn.ModuleList(), "rowwise", exclude=["o_pro"]), "exclude: no module is named o_pro"),
        (lambda: check_parallelizable(Named(), ParallelPolicy(fp8="rowwise"), "cpu"), "fp8: rowwise, but no layer"),
        (lambda: kernels(device_type="cuda:0"), "device_type must be a device type, .* got 'cuda:0'"),
        (lambda: kernels(device_type="gpu"), "device_type must be a device type, .* got 'gpu'"),
        (lambda: kernels(dtype="bf16"), "dtype must be a dtype, such as torch.bfloat16; got the str 'bf16'"),
        (lambda: NormConfig("rmsnorm", 1e-6), "norm.kind: 'rmsnorm' is not one of 'rms', 'layer'"),
        (lambda: NormConfig("rms", 0.0), "norm.eps: is 0"),
        (lambda: replace(LLAMA, layers=()), "layers: there are none"),
        (lambda: DenseConfig("gate", 8, "silu", bias=False), "kind: 'gate' is not one of 'gated', 'plain'"),
        (lambda: DenseConfig("gated", 8, "sigmoid", bias=False), "activation: 'sigmoid' is not one of 'silu'"),
        (lambda: RopeConfig(theta=0.0), "theta: must be a number above 0, got 0.0"),
        (lambda: RopeConfig(theta=float("nan")), "theta: must be a number above 0, got nan"),
        (lambda: RopeConfig(kind="linear", factor=0.0), "factor: must be a number above 0, got 0.0"),
        (lambda: RopeConfig(kind="longrope", short_factors=(1.0,)).check_factors(4), "short_factors: longrope needs 2"),
        (lambda: RopeConfig(kind="llama3"), "kind: 'llama3' is not one of 'default'"),
        (lambda: Rotary(RopeConfig(), 7), "head_dim: channels rotate in pairs, so it must be even, got 7"),
        (lambda: Schedule(float("nan"), 0.1), "num_steps must be an integer of at least 1; got the float nan"),
        (lambda: Schedule(10.5, 0.1), "num_steps must be an integer of at least 1; got the float 10.5"),
        (lambda: Schedule(10, 0.1)(float("nan")), "step must be at least 1"),
        (lambda: ParallelDims(dp_shard=2.0), "parallel size dp_shard must be an integer of at least 1; got the float"),
        (lambda: ParallelDims.resolve("fsdp2", 2, pp=0), "pp must be an integer of at least 1; got the int 0"),
        (lambda: Mesh(ParallelDims(), "gpu"), "device_type must be a device type, .* got 'gpu'"),
        (lambda: ParallelPolicy(recompute="operation", reentrant_recompute=True), "reentrant_recompute: works for"),
        (lambda: copy_shard_(torch.ones(2), torch.ones(3)), r"full: must have the parameter's shape \[2\], got \[3\]"),
        (
            lambda: combine_metrics([METRICS, {**METRICS, "kl:mean": torch.ones(())}]),
            "parts: must be metrics of one loss, .*; only some have kl:mean",
        ),
        (lambda: combine_metrics([]), "parts: must be metrics of one loss, .*; there are none"),
        (lambda: read_metrics({"loss:sum": torch.ones(())}), "metrics: there is no valid_tokens:sum among loss:sum"),
        (
            lambda: read_metrics({**METRICS, "a:avg": torch.ones(())}),
            "metrics: 'a:avg' is not named by its reduction, .*: sum, mean, min, max",
        ),
        (lambda: combine_metrics([{"loss": torch.ones(())}]), "metrics: 'loss' is not named by its reduction"),
        (lambda: replay(ROUTES, "LlamaForCausalLM", LLAMA), "recorded: the model has no experts"),
        (lambda: replay(ROUTES[:, :1]), r"recorded: must be integers \[3, 2, 2\] .*, got torch.int64 \[3, 1, 2\]"),
        (lambda: replay(ROUTES.repeat(1, 2, 1)), r"recorded: must be .*, got torch.int64 \[3, 4, 2\]"),
        (lambda: replay(ROUTES[:2]), r"recorded: must be .*, got torch.int64 \[2, 2, 2\]"),
        (lambda: replay(ROUTES.float()), r"recorded: must be .*, got torch.float32 \[3, 2, 2\]"),
        (lambda: replay(ROUTES.tolist()), "recorded: must be integers .*, got list"),
        (lambda: replay(ROUTES + 3), "recorded: the experts of a token must all differ, from 0 to 3, or all be -1"),
        (lambda: replay(ROUTES - 1), "recorded: the experts of a token must all differ"),
        (lambda: replay(ROUTES * 0), "recorded: the experts of a token must all differ"),
        (lambda: training_flops(LLAMA, [3], num_frozen=10**9), "num_frozen: 1000000000 is not from 0 to"),
        (lambda: SPECS["LlamaForCausalLM"].build(LLAMA, merge_qkv="no"), "merge_qkv must be a bool, .* 'no'"),
        (lambda: MuonOptions({}, nesterov="no"), "nesterov must be a bool, .* 'no'"),
        (
            lambda: SPECS["LlamaForCausalLM"].build(LLAMA)(
                torch.arange(3, device="meta"), SequenceLayout.from_lengths([3])
            ),
            "input_ids: on meta, but the layout is on cpu",
        ),
        (
            lambda: build_optimizer("sgd", nn.Linear(2, 2, device="meta").named_parameters(), lr=1.0, weight_decay=0.0),
            "named_parameters: some are on the meta device; build the optimizer after `parallelize`",
        ),
        (lambda: ParallelPolicy(cpu_offload="no"), "cpu_offload must be a bool, such as False; got the str 'no'"),
        (lambda: ParallelPolicy(reshard_after_forward=1), "reshard_after_forward must be a bool"),
        (lambda: ParallelPolicy(forward_prefetch=None), "forward_prefetch must be a bool, .* got None"),
        (lambda: ParallelPolicy(recompute_experts="none"), "recompute_experts must be a bool"),
        (lambda: ParallelPolicy(reentrant_recompute="no"), "reentrant_recompute must be a bool"),
        (lambda: training_flops(LLAMA, [3, -1]), "length: a document cannot have -1 tokens"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call: Callable[[], object], message: str) -> None:
    # Catches SGD in place of AdamW, ranks that train apart, and a schedule of another shape.
    with pytest.raises(ValueError, match=message):
        call()


def test_ranks_do_not_train_apart_silently() -> None:
    # Catches the mode none on a mesh of two ranks, where no gradient is summed.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh, policy = Mesh(ParallelDims(dp_shard=2), "cpu"), ParallelPolicy(data_parallel_mode="none")
        with pytest.raises(ValueError, match="data_parallel_mode: none is for one rank, and the 2 ranks"):
            parallelize(Named(), mesh, policy, device="cpu")
        parallelize(Named(), mesh, policy, device="cpu", alone=True)
    finally:
        dist.destroy_process_group()


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


class Named(Foreign):
    @property
    def layers(self) -> nn.ModuleList:
        return self.blocks


def test_a_module_of_another_kind_is_placed_or_told_what_it_lacks() -> None:
    # Catches an AttributeError for a module that is not a decoder of this package.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        check_foreign_modules()
    finally:
        dist.destroy_process_group()


def check_foreign_modules() -> None:
    mesh = Mesh(ParallelDims(), "cpu")
    with pytest.raises(ValueError, match="name: no parameter of this mesh is divided along 'ep'"):
        mesh.axis("ep")
    with pytest.raises(ValueError, match=r"mesh: must be an xorl\.core\.mesh\.Mesh, got DeviceMesh"):
        parallelize(Named(), mesh.device_mesh, ParallelPolicy(), device="cpu")
    policy, cpu = ParallelPolicy(data_parallel_mode="none", recompute="layer"), torch.device("cpu")
    with pytest.raises(ValueError, match=r"model: Foreign has no `layers`, the nn.ModuleList"):
        parallelize(Foreign(), mesh, policy, device=cpu)
    with torch.device("meta"), pytest.raises(ValueError, match="fill: parameters are on the meta device"):
        parallelize(Named(), mesh, policy, device=cpu)
    with pytest.raises(ValueError, match="fill: would not be called, because no parameter is on the meta device"):
        parallelize(Named(), mesh, policy, device=cpu, fill=lambda module: None)
    with pytest.raises(ValueError, match=r"policy must be a ParallelPolicy, .* 'fsdp2'"):
        parallelize(Named(), mesh, "fsdp2", device=cpu)
    with pytest.raises(ValueError, match="device: is meta, but the mesh is one of cpu devices"):
        parallelize(Named(), mesh, policy, device="meta")
    module = Named()
    expected = module(x := torch.randn(3, 4))
    placed = parallelize(module, mesh, policy, device=cpu)
    torch.testing.assert_close(placed.forward(x), expected, rtol=0, atol=0)
    placed.forward(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    with pytest.raises(ValueError, match="model: this Named was parallelized before; build another one"):
        parallelize(module, mesh, policy, device=cpu)
