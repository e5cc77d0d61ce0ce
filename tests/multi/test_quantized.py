"""Quantised base weights, also of experts: the same bytes, gradients and exports on every placement."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from expert_reads import counted_reads
from layouts import LAYOUTS, engine_for, run_config
from ranks import Launch, Launches
from table_of_runs import NO_OPTIONS, RECOMPUTE
from tiny_models import hf_config, write_config
from tiny_runs import run_values
from xorl.ckpt import CheckpointError, SafetensorsSource, load_weights
from xorl.ckpt.reader import source_shapes
from xorl.config import Config, config_from_mapping
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.kernels.quant.block_fp8 import quantize_block_fp8
from xorl.lora.merge import fold_
from xorl.lora.quantized import AdaptiveNoise, num_parameters, quantized_layers
from xorl.train import model as model_module
from xorl.train.engine import Engine
from xorl.train.export.hf_weights import ExportWeights
from xorl.train.export.saved import export_saved
from xorl.train.model_source import read_architecture
from xorl.train.run import run_training
from xorl.train.verify import Result, batches_of, compare, one_process, take_steps

MODELS = {
    # Blocks of 32 that two or three ranks do not share evenly, and that end beyond the last row.
    "dense": hf_config(hidden_size=64, intermediate_size=96, tie_word_embeddings=True),
    "experts": hf_config(
        "qwen3_moe", head_dim=32, intermediate_size=64, moe_intermediate_size=32, mlp_only_layers=[1], num_experts=8
    ),
}
TARGETS = {"dense": "all-linear", "experts": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
FORMATS = {"nf4": 16, "nvfp4": 16, "block_fp8": 32}
LAYOUTS = {"one": LAYOUTS["one rank"], "fsdp 3": replace(LAYOUTS["fsdp 2"], num_ranks=3), **LAYOUTS}
PLACED = [
    ("dense", "nf4", "fsdp 2"),
    *(("dense", "nvfp4", layout) for layout in ("ddp 2", "fsdp 3", "hsdp 2")),
    ("dense", "block_fp8", "fsdp 3"),
    *(("experts", "nf4", layout) for layout in ("ep 2", "ep 4")),
    *(("experts", "nvfp4", layout) for layout in ("ddp 2", "fsdp 2", "ep 2", "hsdp 2", "ep 2, fsdp 2")),
    *(("experts", "block_fp8", layout) for layout in ("fsdp 2", "ep 2, fsdp 2")),
]
MODES = ("all_ranks", "broadcast")
# What weights become when they are read: "plain" ones stay as they are, "stored" ones are in blocks of E4M3 already.
READ = [
    *(("dense", kind, "fsdp 3", mode) for kind, mode in product(("nvfp4", "block_fp8"), MODES)),
    *product(["experts"], ("plain", "nvfp4", "block_fp8", "stored"), ("ep 2", "fsdp 2"), MODES),
]


def config_of(folder: Path, model: str, kind: str, layout: str, mode: str | None = None, **train: object) -> Config:
    """With random weights, or those in the folder, read in a mode."""
    of_model = {} if mode is None else {"config_path": None, "model_path": str(folder / model)}
    loading = {} if mode is None else {"load_weights_mode": mode}
    quant_format = "block_fp8" if kind == "stored" else kind
    lora = {"enable_qlora": True, "quant_format": quant_format, "quant_group_size": FORMATS.get(quant_format)}
    lora = {**lora, "lora_rank": 4, "lora_target_modules": TARGETS[model.split()[0]]}
    options = {**LAYOUTS[layout].train, **RECOMPUTE, **loading, **train}
    config = run_config(folder, model, options, NO_OPTIONS if kind == "plain" else lora, of_model)
    return one_process(config) if layout == "one" else config


def held(engine: Engine) -> dict[str, Tensor]:
    """The whole base as it is stored."""
    named = engine.model.module.named_parameters()
    return {name: engine.model.shares.gather(name, one).clone() for name, one in named if ".adapter." not in name}


def stored(engine: Engine) -> dict[str, Tensor]:
    """The bytes of all quantised weights."""
    layers, whole = quantized_layers(engine.model.module).items(), held(engine)
    names = [f"{path}.{field}" for path, layer in layers for field in layer.stored]
    return {name: whole[name] for name in names if name in whole}


@dataclass(frozen=True)
class Found:
    """Stored bytes and the number of weights at the start; a step with noise; bytes and exports after a merge."""

    first: dict[str, Tensor]
    num_weights: int
    step: Result
    merged: dict[str, Tensor]
    exported: dict[str, Tensor]


def trained(config: Config) -> Found:
    engine = engine_for(config)
    architecture, module = read_architecture(config.model), engine.model.module
    first = stored(engine)
    AdaptiveNoise(module, alpha=0.5, seed=0).set_step(3)
    step = take_steps(engine, config, architecture, 8)
    engine.model.drop_gathered()
    fold_(module)
    recipes = architecture.recipes(merge_qkv=config.model.merge_qkv)
    weights = ExportWeights(engine.model, recipes, None, {})
    exported = {name: weights.gather(name).clone() for name in recipes if "proj" in name}
    return Found(first, num_parameters(module), step, stored(engine), exported)


def write_weights(folder: Path, model: str, *, is_quantised: bool = False) -> None:
    """A checkpoint in bf16 or in blocks of E4M3, under the names of transformers."""
    own = folder / (f"{model} stored" if is_quantised else model)
    of_files = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["mlp.gate", "lm_head"]}
    write_config(own, {**MODELS[model], **({"quantization_config": of_files} if is_quantised else {})})
    recipes = read_architecture(run_config(folder, own.name, {}).model).recipes(merge_qkv=True)
    generator = torch.Generator().manual_seed(0)
    shapes = source_shapes(recipes).items()
    tensors = {name: torch.randn(size, generator=generator).bfloat16() for name, size in shapes}
    for name in [one for one in tensors if one.endswith("_proj.weight")] if is_quantised else ():
        tensors[name], tensors[f"{name}_scale_inv"] = quantize_block_fp8(tensors[name], 32)
    save_file(tensors, own / "model.safetensors")


def read(config: Config) -> tuple[dict[str, Tensor], int]:
    """The whole base, read in chunks of a few rows, and the bytes of experts that this rank read."""
    with counted_reads() as sizes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "load_weights", partial(load_weights, bucket_bytes=1 << 12))
        engine = engine_for(config)
    return held(engine), sum(sizes)


def error_of_a_failed_read(config: Config, failing_rank: int) -> str:
    read, num_reads = SafetensorsSource.read, 0

    def fail(self: SafetensorsSource, *arguments) -> Tensor:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 8 and runtime.global_rank() == failing_rank:
            raise CheckpointError("the disk is gone")
        return read(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsSource, "read", fail)
        try:
            engine_for(config)
        except CheckpointError as error:
            return str(error)
    return "loaded"


@contextmanager
def graphs_run_by(backend: str | None) -> Iterator[None]:
    """In place of the compiler that generates code."""
    policy_of = model_module.parallel_policy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "parallel_policy", lambda *of: replace(policy_of(*of), compile_backend=backend))
        yield


def losses_of_bytes(config: Config, backend: str | None) -> list[float]:
    """Of two steps on one rank; checks what its first layer gathers."""
    with graphs_run_by(backend):
        engine = engine_for(config)
    first, *_ = batches = batches_of(0, 4, 64, config, engine.model.mesh)
    found = []
    for _ in range(2):
        sums = engine.forward_backward(batches, cross_entropy)
        engine.optim_step(0.05, divisor=sums.num_trained_tokens)
        found.append(float(engine.forward(first, cross_entropy).sum))
    layer = engine.model.module.layers[0]
    assert isinstance(layer, FSDPModule)
    layer.unshard()
    linear = layer.self_attn.qkv_proj
    assert (linear.weight.dtype, linear.weight_scale.dtype) == (torch.uint8, torch.float32)
    assert linear.weight.shape == (4, 32, 64)
    assert linear.dense_weight(torch.float32).isfinite().all()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    for model in MODELS:
        write_weights(folder, model)
    write_weights(folder, "experts", is_quantised=True)
    return folder


@pytest.fixture(scope="module")
def found(launch: Launch, folder: Path) -> Launches:
    """By what is computed, model, format and layout: the table of this module."""
    cells: dict[tuple, tuple[int, Callable[[], object]]] = {}
    for model, kind, placed in PLACED:
        for layout in ("one", placed):
            run = partial(trained, config_of(folder, model, kind, layout))
            cells["trained", model, kind, layout] = (LAYOUTS[layout].num_ranks, run)
    for model, kind, placed, mode in READ:
        name = f"{model} stored" if kind == "stored" else model
        for layout in ("one", placed):
            run = partial(read, config_of(folder, name, kind, layout, mode))
            cells["read", model, kind, layout, mode] = (LAYOUTS[layout].num_ranks, run)
    for mode in MODES:
        config = config_of(folder, "dense", "nvfp4", "fsdp 2", mode)
        cells["failed read", mode] = (2, partial(error_of_a_failed_read, config, int(mode == "all_ranks")))
    for backend in (None, "aot_eager"):  # eager would keep the model in memory
        config = config_of(folder, "dense", "block_fp8", "fsdp 1", enable_mixed_precision=True)
        cells["bytes", backend] = (1, partial(losses_of_bytes, config, backend))
    return launch(cells)


@pytest.mark.parametrize(("model", "kind", "layout"), PLACED)
def test_bytes_gradients_and_merges_do_not_depend_on_the_placement(
    model: str, kind: str, layout: str, found: Launches
) -> None:
    # Catches global scales of a shard, blocks that straddle shards, noise by the rank's own index, experts under the
    # number of others, bytes that mixed precision casts, padding of shards that is multiplied, and a merge of other
    # rows than the rank's own.
    [wanted] = found("trained", model, kind, "one")
    assert sum(".experts." in name for name in wanted.first) == (model == "experts") * (6 if kind == "nvfp4" else 4)
    measured = found("trained", model, kind, layout)
    for one in measured:
        assert one.num_weights == wanted.num_weights
        torch.testing.assert_close(one.first, wanted.first, rtol=0, atol=0)
    differences = compare(measured[0].step, wanted.step)
    assert all(one.is_within for one in differences.values()), differences
    for name, tensor in wanted.exported.items():
        # Weights that the merge leaves on the border of two codes may fall to either side.
        assert (measured[-1].exported[name] - tensor).norm() <= 1e-2 * tensor.norm(), name
    assert any(not torch.equal(wanted.merged[name], value) for name, value in wanted.first.items())


@pytest.mark.parametrize(("model", "kind", "layout", "mode"), READ)
def test_weights_are_read_and_quantised_alike_by_the_ranks_that_hold_them(
    model: str, kind: str, layout: str, mode: str, found: Launches
) -> None:
    # Catches rows of a neighbouring shard, chunks that are quantised before a matrix is whole, a broadcast in which
    # ranks meet in different collectives, and ranks that read all experts or those of a neighbour.
    [(wanted, num_bytes)] = found("read", model, kind, "one", mode)
    name = "model.layers.0.mlp.experts.gate_up_proj.weight" if model == "experts" else "model.layers.0.mlp.gate_up_proj"
    assert any(one.startswith(name) and (kind == "plain") != (of.dtype == torch.uint8) for one, of in wanted.items())
    for rank, (measured, own_bytes) in enumerate(found("read", model, kind, layout, mode)):
        torch.testing.assert_close(measured, wanted, rtol=0, atol=0)
        assert own_bytes == (num_bytes // 2 if mode == "all_ranks" else num_bytes * (rank == 0))


def test_stored_codes_are_kept(found: Launches, folder: Path) -> None:
    # Catches stored codes that are quantised again.
    [(measured, _)] = found("read", "experts", "stored", "one", "all_ranks")
    with SafetensorsSource(folder / "experts stored") as source:
        up = source.read("model.layers.0.mlp.experts.5.up_proj.weight").view(torch.uint8)
    codes = measured["model.layers.0.mlp.experts.gate_up_proj.weight"]
    assert torch.equal(codes.flatten(0, 1)[5 * 64 + 32 : 6 * 64], up)


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_cannot_read_fails_every_rank(mode: str, found: Launches) -> None:
    # Catches ranks that wait for ever in the collective of a weight that another never came to.
    for told in found("failed read", mode):
        assert "the disk is gone" in told


def test_weights_are_gathered_as_bytes_under_compiled_layers(found: Launches) -> None:
    # Catches bytes and fp32 scales that FSDP2's mixed precision casts to bf16, and graphs that keep gathered memory.
    assert found("bytes", "aot_eager") == found("bytes", None)


def test_exports_of_a_run_and_of_its_checkpoint_are_what_it_computes_with(tmp_path: Path, run_ranks) -> None:
    # Catches bytes that are exported as weights, rows of other shards, and a merge into the base as it was at first.
    write_config(tmp_path / "model", MODELS["dense"])
    ids = list(range(1, 40))
    rows = [json.dumps({"input_ids": ids, "labels": ids})] * 20
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    options = {"enable_gradient_checkpointing": False, "micro_batch_size": 1, "max_steps": 3}
    lora = {"quant_format": "block_fp8", "quant_group_size": 32, "lora_rank": 4, "merge_lora_interval": 2}
    lora = {"enable_qlora": True, **lora}
    values = run_values(tmp_path, tmp_path / "out", data={"pad_to_multiple_of": 16}, lora=lora, **options)
    loaded = config_from_mapping(values)
    assert run_ranks(lambda: run_training(loaded), 2) == [0, 0]
    exported = load_file(tmp_path / "out" / "checkpoints" / "global_step_3-export" / "model.safetensors")
    folder = export_saved(str(tmp_path / "out"), str(tmp_path / "merged"), merge=True, dtype=torch.float32)
    again = load_file(folder / "model.safetensors")
    torch.testing.assert_close(again, exported, rtol=1e-5, atol=1e-6)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
