"""Quantised base weights on several ranks: the same bytes and gradients for every placement, gathered as bytes."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from placement import assert_same, mesh_of, whole
from ranks import Launch, Launches
from tiny_models import hf_config, write_config
from tiny_runs import run_values
from xorl.ckpt import CheckpointError, SafetensorsSource, load_weights
from xorl.config import config_from_mapping
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.mesh import ParallelDims
from xorl.core.models import Decoder, spec_for
from xorl.core.optim import build_optimizer
from xorl.core.parallel import ParallelPolicy, parallelize
from xorl.data import PackedBatch
from xorl.data.batch import Document, collate
from xorl.kernels.quant import QuantScheme
from xorl.lora import AdapterSpec, adapter_parameters, init_adapters, inject
from xorl.lora.merge import fold_
from xorl.lora.quantize import quantizable_layers, quantize_layers
from xorl.lora.quantized import (
    AdaptiveNoise,
    dense_parameters,
    quantized_layers,
    quantized_rows,
)
from xorl.train.engine import Engine
from xorl.train.export.saved import export_saved
from xorl.train.run import run_training

CPU = torch.device("cpu")
HF_CONFIG = hf_config(hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
SCHEMES = {
    "nf4": QuantScheme("nf4", 32),
    "nvfp4": QuantScheme("nvfp4", 16),
    # Blocks that two or three ranks do not share evenly, and that end beyond the last row.
    "block_fp8": QuantScheme("block_fp8", 32),
}
LAYOUTS = {
    # name: (mode, ranks, shard size, replicate size)
    "none": ("none", 1, -1, -1),
    "ddp-2": ("ddp", 2, -1, -1),
    "fsdp2-1": ("fsdp2", 1, -1, -1),
    "fsdp2-2": ("fsdp2", 2, -1, -1),
    "fsdp2-3": ("fsdp2", 3, -1, -1),
    "hsdp-2x2": ("fsdp2", 4, 2, 2),
}
PLACED = [
    ("nf4", "fsdp2-2"),
    *(("nvfp4", layout) for layout in ("ddp-2", "fsdp2-3", "hsdp-2x2")),
    ("block_fp8", "fsdp2-3"),
]
READ = [("nvfp4", "all_ranks"), ("nvfp4", "broadcast"), ("block_fp8", "all_ranks")]


def batches() -> list[PackedBatch]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for index in range(12):  # what one, two, three and four ranks share evenly
        ids = [torch.randint(0, 64, (length,), generator=generator).numpy() for length in (3 + index % 5, 5)]
        made.append(collate([Document(each, each) for each in ids], pad_to_multiple_of=8))
    return made


def engine_for(
    layout: str,
    quant_format: str,
    *,
    weights: tuple[Path, str] | None = None,
    dtype: torch.dtype = torch.float32,
    compile_backend: str | None = None,
) -> Engine:
    """A model with adapters over quantised weights, drawn by a seed or read from (folder, mode)."""
    mode, world_size, shard_size, replicate_size = LAYOUTS[layout]
    mesh = mesh_of(ParallelDims.resolve(mode, world_size, shard_size=shard_size, replicate_size=replicate_size))
    spec = spec_for(HF_CONFIG)
    config = spec.config_from_hf(HF_CONFIG)
    with torch.device("meta"):
        model = spec.build(config, merge_qkv=True)
    model.compute_dtype = dtype
    quantize_layers(model, quantizable_layers(model, (), "exclude"), SCHEMES[quant_format], "format")
    inject(model, AdapterSpec(rank=4, alpha=8.0))

    def fill(module: torch.nn.Module) -> None:
        assert isinstance(module, Decoder)
        targets = quantized_rows(module)
        if weights is None:
            module.init_weights(0, device=CPU, targets=targets)
        else:
            dense = {name: p for name, p in dense_parameters(module) if ".adapter." not in name}
            recipes = spec.recipes(config, merge_qkv=True)
            source = SafetensorsSource(weights[0])
            load_weights({**dense, **targets}, recipes, source, mode=weights[1], bucket_bytes=1 << 12)
        init_adapters(module, seed=0)

    policy = ParallelPolicy(data_parallel_mode=mode, param_dtype=dtype, compile_backend=compile_backend)
    placed = parallelize(model, mesh, policy, device=CPU, fill=fill)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = build_optimizer("adamw", trained, lr=0.05, weight_decay=0.0)
    return Engine(placed, optimizer, CPU, max_grad_norm=None, flops=sum)


def write_weights(folder: Path) -> None:
    """A checkpoint in bf16 under Hugging Face's names."""
    spec = spec_for(HF_CONFIG)
    config = spec.config_from_hf(HF_CONFIG)
    model = spec.build(config, merge_qkv=True)
    model.init_weights(3)
    tensors: dict[str, Tensor] = {}
    recipes = spec.recipes(config, merge_qkv=True)
    for name, parameter in model.named_parameters():
        tensors |= recipes[name].split(parameter.detach().bfloat16())
    save_file(tensors, folder / "model.safetensors")


def own(engine: Engine) -> list[PackedBatch]:
    return batches()[engine.model.mesh.data.rank :: engine.model.mesh.data.size]


def stored(engine: Engine) -> dict[str, Tensor]:
    """The bytes of all quantised weights."""
    return {
        f"{path}.{name}": whole(getattr(layer, name))
        for path, layer in quantized_layers(engine.model.module).items()
        for name in layer.stored
        if getattr(layer, name) is not None
    }


def trained(
    layout: str, quant_format: str, **options
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Bytes at the start, gradients of the second step, and bytes after merging."""
    engine = engine_for(layout, quant_format, **options)
    noise = AdaptiveNoise(engine.model.module, alpha=0.5, seed=0)
    first = stored(engine)
    for step in (1, 2):
        noise.set_step(step)
        sums = engine.forward_backward(own(engine), cross_entropy)
        gradients = {name: whole(p.grad) for name, p in adapter_parameters(engine.model.module).items()}
        engine.optim_step(0.05, divisor=sums.num_trained_tokens)
    engine.model.drop_gathered()
    fold_(engine.model.module)
    return first, gradients, stored(engine)


def read(layout: str, quant_format: str, mode: str, folder: Path) -> dict[str, Tensor]:
    return stored(engine_for(layout, quant_format, weights=(folder, mode)))


def error_of_a_failed_read(mode: str, folder: Path) -> str:
    read, num_reads = SafetensorsSource.read, 0

    def fail(self: SafetensorsSource, *arguments) -> Tensor:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 8 and runtime.global_rank() == (1 if mode == "all_ranks" else 0):
            raise CheckpointError("the disk is gone")
        return read(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsSource, "read", fail)
        try:
            engine_for("fsdp2-2", "nvfp4", weights=(folder, mode))
        except CheckpointError as error:
            return str(error)
    return "loaded"


def losses_of_bytes(backend: str | None) -> list[float]:
    """Of two steps on one rank; checks what its first layer gathers."""
    engine = engine_for("fsdp2-1", "block_fp8", dtype=torch.bfloat16, compile_backend=backend)
    found = []
    for _ in range(2):
        sums = engine.forward_backward(own(engine)[:2], cross_entropy)
        engine.optim_step(0.05, divisor=sums.num_trained_tokens)
        found.append(float(engine.forward(batches()[0], cross_entropy).sum))
    layer = engine.model.module.layers[0]
    assert isinstance(layer, FSDPModule)
    layer.unshard()
    linear = layer.self_attn.qkv_proj
    assert (linear.weight.dtype, linear.weight_scale.dtype) == (torch.uint8, torch.float32)
    assert linear.weight.shape == (4, 32, 64)
    assert linear.dense_weight(torch.float32).isfinite().all()
    return found


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """By layout and what is computed: the table of this module."""
    folder = tmp_path_factory.mktemp("weights")
    write_weights(folder)
    cells = {}
    for quant_format, layout in [*((quant_format, "none") for quant_format in SCHEMES), *PLACED]:
        cells[layout, "trained", quant_format] = (LAYOUTS[layout][1], partial(trained, layout, quant_format))
    for quant_format, mode in READ:
        cells["none", "read", quant_format] = (1, partial(read, "none", quant_format, "all_ranks", folder))
        cells["fsdp2-3", "read", quant_format, mode] = (3, partial(read, "fsdp2-3", quant_format, mode, folder))
    for mode in ("all_ranks", "broadcast"):
        cells["failed read", mode] = (2, partial(error_of_a_failed_read, mode, folder))
    for backend in (None, "eager"):
        cells["bytes", backend] = (1, partial(losses_of_bytes, backend))
    return launch(cells)


@pytest.mark.parametrize(("quant_format", "layout"), PLACED)
def test_bytes_gradients_and_merged_bytes_do_not_depend_on_the_placement(quant_format, layout, found: Launches) -> None:
    # Catches a global scale of one shard, blocks that straddle shards, noise that is another on each rank, padding of
    # shards that is multiplied, and a merge of other rows than the rank's own.
    [(first, gradients, merged)] = found("none", "trained", quant_format)
    for its_first, its_gradients, its_merged in found(layout, "trained", quant_format):
        assert all(torch.equal(its_first[name], value) for name, value in first.items())
        assert_same(gradients, its_gradients, limit=1e-4)
        # Weights that the merge leaves on the border of two codes may fall to either side.
        assert_same(merged, its_merged, limit=1e-2)
    assert any(not torch.equal(merged[name], value) for name, value in first.items())


@pytest.mark.parametrize(("quant_format", "mode"), READ)
def test_weights_from_a_checkpoint_are_quantised_alike_by_any_rank(quant_format, mode, found: Launches) -> None:
    # Catches rows of a neighbouring shard, chunks that are quantised before a matrix is whole, and a broadcast in which
    # ranks meet in different collectives.
    [reference] = found("none", "read", quant_format)
    assert reference["model.layers.1.self_attn.qkv_proj.weight"].any()
    for measured in found("fsdp2-3", "read", quant_format, mode):
        assert all(torch.equal(measured[name], value) for name, value in reference.items())


@pytest.mark.parametrize("mode", ["all_ranks", "broadcast"])
def test_a_rank_that_cannot_read_fails_every_rank(mode: str, found: Launches) -> None:
    # Catches ranks that wait for ever in the collective of a weight that another never came to.
    for told in found("failed read", mode):
        assert "the disk is gone" in told


def test_weights_are_gathered_as_bytes_under_compiled_layers(found: Launches) -> None:
    # Catches bytes and fp32 scales that FSDP2's mixed precision casts to bf16, and graphs that keep gathered memory.
    assert found("bytes", "eager") == found("bytes", None)


def test_exports_of_a_run_and_of_its_checkpoint_are_what_it_computes_with(tmp_path: Path, run_ranks) -> None:
    # Catches bytes that are exported as weights, rows of other shards, and a merge into the base as it was at first.
    write_config(tmp_path / "model", HF_CONFIG)
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
