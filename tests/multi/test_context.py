"""Context parallelism: every layout computes what one process computes, on packed rows of uneven documents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny_models import hf_config, write_config
from xorl.config import Config, config_from_mapping
from xorl.core import runtime
from xorl.core.loss import LossOutput, cross_entropy
from xorl.core.mesh import Mesh
from xorl.core.nn.ulysses import check_heads
from xorl.kernels.attention import ring
from xorl.kernels.layout import SequenceLayout
from xorl.train.build import build_engine
from xorl.train.model_source import read_architecture
from xorl.train.startup import parallel_dims
from xorl.train.verify import Result, batches_of, compare, one_process, take_steps

pytestmark = pytest.mark.multi
NUM_BINS = 8

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, dict[str, object]] = {
    "llama": hf_config("llama", max_position_embeddings=20, rope_parameters=DYNAMIC),
    "qwen3": hf_config("qwen3", num_attention_heads=8, num_key_value_heads=2),
    "mistral": hf_config("mistral", sliding_window=5),
    "gpt2": hf_config("gpt2"),
    "qwen3_moe": hf_config("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.1),
}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "ulysses 2": (2, {"data_parallel_mode": "fsdp2", "ulysses_parallel_size": 2}),
    "ulysses 2, none": (2, {"data_parallel_mode": "fsdp2", "ulysses_parallel_size": 2, "cp_fsdp_mode": "none"}),
    "ulysses 2, ddp": (2, {"data_parallel_mode": "ddp", "ulysses_parallel_size": 2}),
    "ulysses 4": (4, {"data_parallel_mode": "fsdp2", "ulysses_parallel_size": 4}),
    "dp 2, ulysses 2": (4, {"data_parallel_mode": "fsdp2", "ulysses_parallel_size": 2}),
    "dp 2, ulysses 2, none": (
        4,
        {"data_parallel_mode": "fsdp2", "ulysses_parallel_size": 2, "cp_fsdp_mode": "none"},
    ),
    "dp 2, ulysses 2, ddp": (4, {"data_parallel_mode": "ddp", "ulysses_parallel_size": 2}),
    "hsdp 2, ulysses 2": (
        4,
        {"data_parallel_mode": "fsdp2", "data_parallel_replicate_size": 2, "ulysses_parallel_size": 2},
    ),
}
RING_2 = {"data_parallel_mode": "fsdp2", "ringattn_parallel_size": 2}
LAYOUTS |= {
    "ring 2": (2, RING_2),
    "ring 2, none": (2, {**RING_2, "cp_fsdp_mode": "none"}),
    "ring 4": (4, {**RING_2, "ringattn_parallel_size": 4}),
    "dp 2, ring 2": (4, RING_2),
    "dp 2, ring 2, ddp": (4, {**RING_2, "data_parallel_mode": "ddp"}),
    "ring 2, ulysses 2": (4, {**RING_2, "ulysses_parallel_size": 2}),
    "ring 2, ulysses 2, ulysses_only": (4, {**RING_2, "ulysses_parallel_size": 2, "cp_fsdp_mode": "ulysses_only"}),
    "ring 2, ulysses 2, ring_only": (4, {**RING_2, "ulysses_parallel_size": 2, "cp_fsdp_mode": "ring_only"}),
}
LORA = {"enable_lora": True, "lora_rank": 4, "lora_target_modules": "all-linear"}
RECOMPUTE = {"enable_gradient_checkpointing": True, "recompute_policy": "operation"}
# By name: (model, options of train, options of lora).
RUNS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "llama": ("llama", {}, {}),
    "llama, LoRA": ("llama", {}, LORA),
    "qwen3": ("qwen3", {}, {}),
    "qwen3, LoRA": ("qwen3", {"optimizer": "muon"}, LORA),
    "qwen3, DoRA": ("qwen3", {}, {**LORA, "use_dora": True}),
    "qwen3, QLoRA": ("qwen3", {}, {**LORA, "enable_qlora": True, "quant_format": "nf4", "quant_group_size": 16}),
    "qwen3, Muon": ("qwen3", {"optimizer": "muon", **RECOMPUTE}, {}),
    "mistral": ("mistral", {}, {}),
    "gpt2": ("gpt2", {"enable_gradient_checkpointing": True}, {}),
    "qwen3_moe": ("qwen3_moe", {"router_z_loss_coef": 0.1}, {}),
    "qwen3_moe, recomputed": ("qwen3_moe", {**RECOMPUTE, "moe_checkpoint_method": "moe_act"}, {}),
}


# All layouts compute these runs; WITH_ALL_RUNS compute the others, too.
BASIC_RUNS = ("llama, LoRA", "qwen3", "qwen3_moe")
WITH_ALL_RUNS = ("ulysses 2", "ring 2", "dp 2, ulysses 2", "ring 2, ulysses 2")


def run_config(folder: Path, model: str, train: dict[str, object], lora: dict[str, object]) -> Config:
    values = {
        "model": {"config_path": str(folder / model)},
        "data": {"datasets": [{"path": "a"}]},
        "train": {"output_dir": str(folder / "out"), "enable_mixed_precision": False, **train},
        "lora": lora,
    }
    return config_from_mapping(values).config


def steps(config: Config, mesh: Mesh) -> Result:
    # One ring exchanges the heads in several parts, as large models do.
    with pytest.MonkeyPatch.context() as patch:
        if mesh.dims.ring == mesh.dims.world_size == 2:
            patch.setattr(ring, "MIN_PART_ELEMENTS", 1)
        return plain_steps(config, mesh)


def plain_steps(config: Config, mesh: Mesh) -> Result:
    runtime.seed_everything(0)
    architecture = read_architecture(config.model)
    engine = build_engine(config, architecture, mesh, torch.device("cpu"))
    return take_steps(engine, config, architecture, NUM_BINS)


@pytest.mark.parametrize("world_size", [2, 4])
def test_layouts_equal_one_process(run_ranks, tmp_path: Path, world_size: int) -> None:
    # Catches keys that are missing or seen twice, positions and frequencies of a part in place of the row's, labels and
    # counts that are lost or doubled at the borders of parts, and sums over the wrong ranks.
    for name, shape in MODELS.items():
        write_config(tmp_path / name, shape)

    def config_of(name: str, layout: dict[str, object]) -> Config:
        model, train, lora = RUNS[name]
        return run_config(tmp_path, model, {**layout, **train}, lora)

    def results(options: dict[str, object], names: Iterable[str]) -> dict[str, Result]:
        configs = {name: config_of(name, options) for name in names}
        if options["data_parallel_mode"] == "none":
            configs = {name: one_process(config) for name, config in configs.items()}
        # One mesh for all, because each has groups of its own, whose connections add up.
        mesh = Mesh(parallel_dims(next(iter(configs.values())), runtime.world_size()), "cpu")
        return {name: steps(config, mesh) for name, config in configs.items()}

    [whole] = run_ranks(lambda: results({"data_parallel_mode": "none"}, RUNS), 1)
    layouts = {layout: options for layout, (num_ranks, options) in LAYOUTS.items() if num_ranks == world_size}
    found = run_ranks(
        lambda: {
            layout: results(options, RUNS if layout in WITH_ALL_RUNS else BASIC_RUNS)
            for layout, options in layouts.items()
        },
        world_size,
    )[0]
    failed = []
    for layout, by_name in found.items():
        for name, result in by_name.items():
            differences = compare(result, whole[name])
            failed += [(name, layout, kind, one) for kind, one in differences.items() if not one.is_within]
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_document_does_not_change_the_others(run_ranks, tmp_path: Path, world_size: int) -> None:
    # Catches keys of another document, which a loss over all tokens may hide.
    models = ("llama", "mistral", "qwen3_moe")
    for name in models:
        write_config(tmp_path / name, MODELS[name])
    names = {2: ("ulysses 2", "ring 2"), 4: ("ulysses 4", "ring 4", "dp 2, ring 2", "ring 2, ulysses 2")}[world_size]

    def outputs(model: str, options: dict[str, object], mesh: Mesh) -> list[tuple[Tensor, Tensor]]:
        """The final hidden states of this rank's tokens and the documents of these, for each changed document."""
        config = run_config(tmp_path, model, options, {})
        architecture = read_architecture(config.model)
        engine = build_engine(config, architecture, mesh, torch.device("cpu"))
        [batch, *_] = batches_of(0, NUM_BINS, architecture.config.vocab_size, config, mesh)
        document = torch.arange(len(batch.lengths)).repeat_interleave(batch.cu_seqlens.diff())
        found: list[tuple[Tensor, Tensor]] = []

        def keep(hidden: Tensor, weight: Tensor, targets: dict[str, Tensor], _: SequenceLayout) -> LossOutput:
            found.append((hidden, targets["document"]))
            return cross_entropy(hidden, weight, targets)

        for changed in range(-1, 5):  # -1 changes nothing; all ranks have as many passes
            ids = torch.where(document == changed, batch.input_ids + 1, batch.input_ids)
            given = replace(batch, input_ids=ids % architecture.config.vocab_size, extras={"document": document})
            with torch.no_grad():
                engine.forward(given, keep)
        return found

    def largest_changes() -> dict[tuple[str, str], tuple[float, float]]:
        """For each layout and model, the largest relative changes of other documents and of the changed one."""
        changes = {}
        for layout in names:
            options = LAYOUTS[layout][1]
            mesh = Mesh(parallel_dims(run_config(tmp_path, "llama", options, {}), world_size), "cpu")
            for model in models:
                (before, document), *after = outputs(model, options, mesh)
                moved = [((hidden - before).norm(dim=-1) / before.norm(dim=-1), document) for hidden, _ in after]
                others = [
                    rows[of != changed].max() for changed, (rows, of) in enumerate(moved) if (of != changed).any()
                ]
                own = [rows[of == changed].max() for changed, (rows, of) in enumerate(moved) if (of == changed).any()]
                changes[layout, model] = float(max(others)), float(min(own, default=torch.ones(())))
        return changes

    for changes in run_ranks(largest_changes, world_size):
        for (layout, model), (others, own) in changes.items():
            assert others <= (1e-6 if "moe" in model else 0.0), (layout, model)
            assert own > 0, (layout, model)


def test_sizes_that_heads_cannot_be_shared_by_name_the_nearest_that_works() -> None:
    # Catches a run that fails in its first step.
    for num_ranks in (1, 2, 4, 8):
        check_heads(8, 4, num_ranks)
    with pytest.raises(ValueError, match=r"ulysses: 3 .* 8 heads with 4 .* works is 2"):
        check_heads(8, 4, 3)
