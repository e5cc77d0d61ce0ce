"""`xorl plan`: memory and speed of layouts from passes on the meta device, and layouts that a run accepts."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from live_bytes import LiveBytes
from local_options import local_config
from tiny_models import hf_config, write_config
from xorl.cli.plan import app
from xorl.config import load_config
from xorl.core.mesh import Mesh, ParallelDims
from xorl.core.nn import LayerKernels
from xorl.core.runtime import Runtime
from xorl.train.model import check_ranks, sketch_model
from xorl.train.model_source import read_architecture
from xorl.train.plan.estimate import Estimate, Estimator
from xorl.train.plan.passes import record_pass, representatives
from xorl.train.plan.plan import Plan, make_plan
from xorl.train.plan.rates import rates_of
from xorl.train.plan.text import as_text
from xorl.train.recompute_choice import MicroBatch, measure_slice
from xorl.train.startup import parallel_dims
from xorl.train.step_memory import pass_peak

SHAPE = hf_config(num_hidden_layers=4, hidden_size=256, intermediate_size=512, vocab_size=4096)
NUM_GPUS, ROW = 2, 512
RECOMPUTED: dict[str, dict[str, object]] = {
    "none": {"enable_gradient_checkpointing": False},
    "layer": {"enable_gradient_checkpointing": True},
}


def estimated(folder: Path, dims: ParallelDims | None = None, row: int = ROW, **train: object) -> Estimate:
    write_config(folder, SHAPE)
    lora, datasets = train.pop("lora", {}), [{"path": "unused", "type": train.pop("rows", "auto")}]
    options = {"param_dtype": "bf16", "enable_mixed_precision": True, "data_parallel_mode": "none", **train}
    options.setdefault("enable_gradient_checkpointing", False)
    config = local_config(folder, {"sample_packing_sequence_len": row, "datasets": datasets}, lora, **options)
    return Estimator(read_architecture(config.model), rates_of("h100"), row).estimate(config, dims or ParallelDims())


def computing_s(estimate: Estimate) -> float:
    """Seconds of the GPU; launches of such small layers take longer."""
    return estimate.step_s - estimate.seconds.get("host", 0.0)


@pytest.mark.parametrize("setting", list(RECOMPUTED))
def test_memory_is_what_the_measurement_of_auto_finds(setting: str, place: Runtime, tmp_path: Path) -> None:
    # Catches a pass on the meta device that keeps something else than the pass that `recompute_policy: auto` measures.
    write_config(tmp_path, SHAPE)
    lengths = {"sample_packing_sequence_len": 64, "pad_to_multiple_of": 16}
    config = local_config(tmp_path, lengths, {}, enable_mixed_precision=False, **RECOMPUTED[setting])
    architecture = read_architecture(config.model)
    mesh = Mesh(ParallelDims.resolve("fsdp2", 1), "cpu")
    with LiveBytes() as live:
        measured = measure_slice(config, setting, architecture, 4, mesh, place.device, MicroBatch(64, 64), live)
    _, planned = record_pass(architecture, config, ParallelDims(), [64], LayerKernels())
    assert [phase.kept for phase in planned.forward] == [phase.kept for phase in measured.forward]
    assert [phase.gradients for phase in planned.backward] == [phase.gradients for phase in measured.backward]
    expected = pass_peak([measured] * 4, 1.0)
    assert pass_peak([planned] * 4, 1.0) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("num_tokens", "launches"), [(64, (4, 4)), (8256, (8, 20))])
def test_experts_of_several_ranks_are_one_operator_and_a_graph_of_few_tokens(
    tmp_path: Path, num_tokens: int, launches: tuple[int, int]
) -> None:
    # Catches a plan that launches kernels of a graph one by one, or that leaves out what ranks send each other.
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    write_config(tmp_path, hf_config("qwen3_moe", **shape))
    axes = {"expert_parallel_size": 2, "data_parallel_mode": "fsdp2", "enable_compile": True}
    data = {"sample_packing_sequence_len": num_tokens}
    config = local_config(tmp_path, data, {}, **axes, enable_gradient_checkpointing=True)
    architecture = read_architecture(config.model)
    recorder, _ = record_pass(architecture, config, parallel_dims(config, 2), [num_tokens])
    found = {each.name: each for phase in recorder.phases for each in phase if each.kind == "experts"}
    assert tuple(each.launches for each in found.values()) == launches
    assert list(found) == ["gathered_experts", "gathered_experts_backward"]
    forward, backward = found.values()
    assert forward.ranks == backward.ranks == 2
    assert backward.ring_bytes == 2 * forward.ring_bytes > 0
    assert backward.flops == pytest.approx((2 + 2 / 3) * forward.flops)


def test_the_first_the_last_and_each_kind_of_layer_stand_for_all(tmp_path: Path) -> None:
    # Catches layers of another kind that are planned as if they were like their neighbours.
    shape = {"layer_types": ["full_attention", "sliding_attention"] * 4, "sliding_window": 8, "num_hidden_layers": 8}
    write_config(tmp_path, hf_config(**shape, use_sliding_window=True))
    layers = read_architecture(local_config(tmp_path, {}, {}).model).config.layers
    assert representatives(layers) == [0, 1, 2, 7]
    assert representatives(layers[:1]) == [0]


@pytest.mark.parametrize(
    "dims",
    [ParallelDims(), ParallelDims(dp_shard=4), ParallelDims(tp=2), ParallelDims(dp_shard=2, tp=2)],
    ids=lambda dims: dims.used or "one",
)
def test_what_ranks_keep_adds_up_to_the_model(dims: ParallelDims, tmp_path: Path) -> None:
    # Catches parameters that a layout counts twice, or forgets.
    mode = {"data_parallel_mode": "fsdp2"} if dims.dp_shard > 1 else {}
    whole, shared = estimated(tmp_path), estimated(tmp_path, dims, tensor_parallel_size=dims.tp, **mode)
    for part in ("parameters", "optimizer"):
        assert shared.memory[part] * dims.world_size == pytest.approx(whole.memory[part])


def test_a_pipeline_divides_the_model(tmp_path: Path) -> None:
    # Catches a stage that is planned with layers of others, and a pipeline in which nobody waits.
    options = {"gradient_accumulation_steps": 4, "optimizer": "anyprecision_adamw", "optimizer_dtype": "bf16"}
    whole = estimated(tmp_path, **options)
    staged = estimated(tmp_path, ParallelDims(pp=2), pipeline_parallel_size=2, **options)
    assert whole.memory["parameters"] / 2 <= staged.memory["parameters"] < 0.8 * whole.memory["parameters"]
    assert staged.seconds["pipeline"] > 0
    assert computing_s(staged) < computing_s(whole)


def test_more_tokens_take_longer_and_recomputation_trades_memory_for_time(tmp_path: Path) -> None:
    # Catches a term with the wrong sign.
    short, long = estimated(tmp_path), estimated(tmp_path, row=4 * ROW)
    assert computing_s(long) > computing_s(short)
    assert long.step_s >= short.step_s
    assert long.memory["activations"] > short.memory["activations"]
    recomputed = estimated(tmp_path, row=4 * ROW, enable_gradient_checkpointing=True)
    assert recomputed.memory["activations"] < long.memory["activations"]
    assert recomputed.seconds["products"] > long.seconds["products"]
    assert recomputed.peak <= recomputed.bound


def test_adapters_train_less_and_keep_no_states_of_the_base(tmp_path: Path) -> None:
    # Catches a frozen base with gradients or optimizer states.
    full, lora = estimated(tmp_path), estimated(tmp_path, lora={"enable_lora": True, "lora_rank": 4})
    assert lora.memory["optimizer"] < full.memory["optimizer"] / 5
    assert lora.seconds["optimizer"] < full.seconds["optimizer"]


def test_replicas_share_the_work_of_muon(tmp_path: Path) -> None:
    # Catches a plan in which each replica orthogonalises all matrices.
    alone, replicated = (
        estimated(tmp_path, dims, data_parallel_mode="ddp", optimizer="muon").seconds["optimizer"]
        - estimated(tmp_path, dims, data_parallel_mode="ddp", optimizer="anyprecision_adamw").seconds["optimizer"]
        for dims in (ParallelDims(), ParallelDims(dp_replicate=2))
    )
    assert replicated == pytest.approx(alone / 2)


@pytest.mark.parametrize(("dtype", "num_sums"), [("fp32", 1), ("bf16", 4)])
def test_replicas_sum_gradients_once_in_a_step_or_in_each_micro_batch(
    dtype: str, num_sums: int, tmp_path: Path
) -> None:
    # Catches an exchange of replicas that is counted for micro-batches after which there is none.
    train = {"data_parallel_mode": "ddp", "param_dtype": dtype}
    dims = ParallelDims(dp_replicate=2)
    one, four = (estimated(tmp_path, dims, gradient_accumulation_steps=count, **train) for count in (1, 4))
    assert four.seconds["fsdp"] == pytest.approx(num_sums * one.seconds["fsdp"])


def test_layers_in_graphs_take_less_of_the_host_and_memory_of_their_own(tmp_path: Path) -> None:
    # Catches kernels of graphs that a plan launches one by one, and a peak without the memory that graphs keep.
    options = {"enable_compile": True, "enable_gradient_checkpointing": True}
    launched, graphed = (estimated(tmp_path, enable_cuda_graphs=graphs, **options) for graphs in (False, True))
    assert graphed.seconds["host"] < 0.6 * launched.seconds["host"]
    assert computing_s(graphed) == pytest.approx(computing_s(launched))
    assert graphed.peak == pytest.approx(launched.peak + graphed.memory["graphs"])
    assert graphed.memory["graphs"] > 0


@pytest.mark.parametrize("shared", [{}, {"ulysses": 2}], ids=["rows of their own", "shared rows"])
def test_replicas_need_memory_to_add_up_bf16_gradients(shared: dict[str, int], tmp_path: Path) -> None:
    # Catches plans without the gradients that replicas receive, which those that share rows receive, too.
    alone, replicated = ParallelDims(**shared), ParallelDims.resolve("ddp", 2, **shared)

    def peak(dims: ParallelDims, dtype: str) -> float:
        return estimated(tmp_path, dims, row=64, data_parallel_mode="ddp", param_dtype=dtype).memory["activations"]

    assert peak(replicated, "fp32") == peak(alone, "fp32")
    assert peak(replicated, "bf16") > peak(alone, "bf16")


def test_preferences_with_the_base_as_reference_compute_it_too(tmp_path: Path) -> None:
    # Catches a second forward pass in each step that no plan knows of.
    lora = {"enable_lora": True, "lora_rank": 4}
    plain = estimated(tmp_path, lora=dict(lora))
    compared = estimated(tmp_path, lora=dict(lora), loss="dpo", rows="preference")
    assert compared.seconds["attention"] > plain.seconds["attention"]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    write_config(folder, SHAPE)
    sections = {
        "model": {"config_path": str(folder)},
        "data": {"datasets": [{"path": "dummy"}], "sample_packing_sequence_len": ROW},
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "fsdp2",
            "param_dtype": "bf16",
            "enable_gradient_checkpointing": True,
            "recompute_policy": "auto",
            "gradient_accumulation_steps": 4,
            "max_steps": 10,
        },
    }
    file = folder / "config.yaml"
    file.write_text(json.dumps(sections))
    return file


@pytest.fixture(scope="module")
def plan(config_file: Path) -> Plan:
    config = load_config(config_file).config
    return make_plan(config_file, (), config, read_architecture(config.model), rates_of("h100"), NUM_GPUS, ROW)


def test_every_layout_is_one_that_a_run_accepts_with_the_same_rows(plan: Plan) -> None:
    # Catches a proposal that `xorl train` refuses, and one that trains on another batch.
    own = plan.configured
    architecture = read_architecture(own.candidate.config.model)
    for row in plan.rows:
        config = row.candidate.config
        sketch = sketch_model(architecture, config.model, config.train, config.lora)
        check_ranks(sketch, config.model, config.train, "cuda")
        assert row.candidate.bins_per_step == own.candidate.bins_per_step == 4 * NUM_GPUS
        assert row.candidate.dims.world_size == NUM_GPUS
    used = {row.candidate.dims.used for row in plan.rows}
    assert used == {"dp_shard 2", "dp_replicate 2", "tp 2", "pp 2", "ulysses 2", "ring 2"}


def test_layouts_of_experts_do_not_look_alike(config_file: Path, tmp_path: Path) -> None:
    # Catches layouts that differ in nothing a run does, and options that a layout's line does not show.
    write_config(tmp_path, hf_config("qwen3_moe", num_experts=4, num_experts_per_tok=2))
    overrides = "--model.config_path", str(tmp_path)
    config = load_config(config_file, overrides).config
    architecture = read_architecture(config.model)
    made = make_plan(config_file, overrides, config, architecture, rates_of("h100"), NUM_GPUS, ROW)
    text = as_text(made, rates_of("h100"), NUM_GPUS, None, num_shown=len(made.rows))
    _, table, *_ = text.split("\n\n")
    lines = [re.split(r"  +", line[1:].strip())[0] for line in table.splitlines()]
    assert len(lines) == len(set(lines)) == 1 + len(made.rows)


def planned(config_file: Path, num_gpus: int, *overrides: str) -> Plan:
    given = ("--train.enable_compile=true", "--train.recompute_policy=module", *overrides)
    config = load_config(config_file, given).config
    return make_plan(config_file, given, config, read_architecture(config.model), rates_of("h100"), num_gpus, ROW)


@pytest.mark.parametrize(
    ("num_gpus", "sizes"),
    [
        (1, ("--train.data_parallel_mode=none",)),
        (2, ("--train.data_parallel_mode=ddp", "--train.ulysses_parallel_size=2")),
    ],
)
def test_graphs_are_proposed_where_the_host_decides(config_file: Path, num_gpus: int, sizes: tuple[str, ...]) -> None:
    # Catches a plan that ends at layouts whose GPUs wait for launches, and options that a run switches off.
    found = planned(config_file, num_gpus, *sizes)
    in_graphs = [row for row in found.rows if row.candidate.config.train.enable_cuda_graphs]
    assert found.rows[0] in in_graphs
    assert found.configured.candidate.dims.used in {row.candidate.dims.used for row in in_graphs}
    assert "recomputes layers, in CUDA graphs" in as_text(found, rates_of("h100"), num_gpus, None)
    configured = planned(config_file, num_gpus, *sizes, "--train.enable_cuda_graphs=true")
    assert configured.configured.tokens_per_s > found.configured.tokens_per_s
    excluded = planned(
        config_file, num_gpus, *sizes, "--train.enable_mixed_precision=false", "--train.param_dtype=fp32"
    )
    assert not any(row.candidate.config.train.enable_cuda_graphs for row in excluded.rows)
    for row in (*found.rows, *configured.rows, *excluded.rows):
        graphs = row.candidate.config.train.enable_cuda_graphs
        assert row.candidate.options.get("train.enable_cuda_graphs", graphs) == graphs


def test_the_fastest_that_fits_is_first_and_limits_are_shares(plan: Plan) -> None:
    # Catches a list in another order, and parts that are more than the whole.
    rates = [row.tokens_per_s for row in plan.rows if row.estimate.fits]
    assert rates == sorted(rates, reverse=True)
    assert all(0 < row.limit[1] <= 1 for row in plan.rows)


def test_the_command_prints_layouts_and_json(config_file: Path) -> None:
    # Catches a table without the configuration, and JSON that programs cannot read.
    shown = CliRunner().invoke(app, [str(config_file)])
    assert shown.exit_code == 0, shown.output
    for text in ("1 x NVIDIA H100", "* ", "tokens/s", "memory of a rank", "a step of"):
        assert text in shown.output
    printed = CliRunner().invoke(app, [str(config_file), "--gpus", "1", "--gpu", "h200", "--json", "--tokens", "1e9"])
    found = json.loads(printed.stdout)
    (own,) = [row for row in found["layouts"] if row["configured"]]
    assert found["gpu"] == "h200"
    assert own["run_s"] == pytest.approx(1e9 / own["tokens_per_s"])
    assert sum(own["memory"].values()) == pytest.approx(own["peak"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gpu", "abacus"], "known: h100, h200"),
        (["--gpus", "16"], "plan for one host"),
        (["--train.enable_cpu_offload", "true"], "plans do not cover parameters in host memory"),
    ],
)
def test_what_cannot_be_planned_is_refused(config_file: Path, arguments: list[str], text: str) -> None:
    # Catches numbers for what nothing is known about.
    result = CliRunner().invoke(app, [str(config_file), *arguments])
    assert result.exit_code == 2
    assert text in result.output


def test_a_configuration_that_cannot_run_on_so_many_gpus_says_so_and_shows_others(config_file: Path) -> None:
    # Catches a plan that silently changes the sizes that the configuration asks for.
    options = ["--train.tensor_parallel_size=2", "--train.recompute_policy=module"]
    result = CliRunner().invoke(app, [str(config_file), "--gpus", "3", *options])
    assert result.exit_code == 0, result.output
    assert "cannot run on 3 GPUs" in result.output
    assert "divides the 4 rows of a step" in result.output
    more = CliRunner().invoke(app, [str(config_file), "--gpus", "3", *options, "--train.gradient_accumulation_steps=3"])
    assert "fsdp 3" in more.output


def test_planning_leaves_torch_as_it_was(plan: Plan) -> None:
    # Catches a fake mode or hooks that outlive the plan.
    assert plan.rows
    assert type(torch.ones(2) + 1) is torch.Tensor
