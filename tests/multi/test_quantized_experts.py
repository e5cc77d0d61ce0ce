"""QLoRA over experts on several ranks: the same bytes, gradients and exports for every placement."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from expert_reads import counted_reads
from layouts import mesh_for
from local_options import local_config
from ranks import Launch, Launches
from tiny_models import hf_config, write_config
from xorl.ckpt import SafetensorsSource
from xorl.ckpt.reader import source_shapes
from xorl.config import Config
from xorl.core import runtime
from xorl.kernels.quant.block_fp8 import quantize_block_fp8
from xorl.lora.merge import fold_
from xorl.lora.quantized import AdaptiveNoise, num_parameters, quantized_layers
from xorl.train.build import build_engine
from xorl.train.export.hf_weights import ExportWeights
from xorl.train.model_source import read_architecture
from xorl.train.verify import Result, compare, one_process, take_steps

SHAPE = hf_config(
    "qwen3_moe", head_dim=32, intermediate_size=64, moe_intermediate_size=32, mlp_only_layers=[1], num_experts=8
)
FORMATS = {"nf4": 16, "nvfp4": 16, "block_fp8": 32}
ONE = {"data_parallel_mode": "none"}
FSDP = {"data_parallel_mode": "fsdp2"}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "one": (1, ONE),
    "ddp 2": (2, {"data_parallel_mode": "ddp"}),
    "fsdp 2": (2, FSDP),
    "ep 2": (2, {**FSDP, "expert_parallel_size": 2}),
    "hsdp 2x2": (4, {**FSDP, "data_parallel_replicate_size": 2}),
    "ep 2, fsdp 2": (4, {**FSDP, "expert_parallel_size": 2}),
    "ep 4": (4, {**FSDP, "expert_parallel_size": 4}),
}
PLACED = [
    *(("nf4", layout) for layout in ("ep 2", "ep 4")),
    *(("nvfp4", layout) for layout in ("ddp 2", "fsdp 2", "ep 2", "hsdp 2x2", "ep 2, fsdp 2")),
    *(("block_fp8", layout) for layout in ("fsdp 2", "ep 2, fsdp 2")),
]
# What weights are quantised to when they are read; "stored" are in blocks of E4M3 already.
READ = ("nvfp4", "block_fp8", "stored")
TARGETS = ["q_proj", "gate_proj", "up_proj", "down_proj"]


def config_of(folder: Path, quant_format: str, train: dict[str, object], *, mode: str | None = None) -> Config:
    """With random weights, or those in the folder, read in a mode."""
    model = {"config_path": str(folder)} if mode is None else {"model_path": str(folder)}
    loading = {} if mode is None else {"load_weights_mode": mode}
    lora = {"enable_qlora": True, "quant_format": quant_format, "quant_group_size": FORMATS[quant_format]}
    lora |= {"lora_rank": 4, "lora_target_modules": TARGETS}
    options = {"output_dir": str(folder / "out"), "enable_mixed_precision": False, **loading, **train}
    return local_config(model, lora=lora, **options)


@dataclass(frozen=True)
class Found:
    """Stored bytes and the number of weights at the start; a step with noise; bytes and exports after a merge."""

    first: dict[str, Tensor]
    num_weights: int
    step: Result
    merged: dict[str, Tensor]
    exported: dict[str, Tensor]


def run(config: Config) -> Found:
    if config.train.data_parallel_mode == "none":
        config = one_process(config)
    runtime.seed_everything(0)
    architecture = read_architecture(config.model)
    mesh = mesh_for(config)
    engine = build_engine(config, architecture, mesh, torch.device("cpu"))
    module = engine.model.module

    def stored() -> dict[str, Tensor]:
        names = [f"{path}.{field}" for path, layer in quantized_layers(module).items() for field in layer.stored]
        held = dict(module.named_parameters())
        return {name: engine.model.shares.gather(name, held[name]).clone() for name in names if name in held}

    first = stored()
    AdaptiveNoise(module, alpha=0.5, seed=0).set_step(3)
    step = take_steps(engine, config, architecture, 8)
    engine.model.drop_gathered()
    fold_(module)
    recipes = architecture.recipes(merge_qkv=config.model.merge_qkv)
    weights = ExportWeights(engine.model, recipes, None, {})
    exported = {name: weights.gather(name).clone() for name in recipes if ".experts." in name}
    return Found(first, num_parameters(module), step, stored(), exported)


def write_weights(folder: Path, *, is_quantised: bool) -> Path:
    """A checkpoint in bf16 or in blocks of E4M3, under the names of transformers."""
    stored = {"quant_method": "fp8", "weight_block_size": [32, 32], "modules_to_not_convert": ["mlp.gate", "lm_head"]}
    write_config(folder, {**SHAPE, **({"quantization_config": stored} if is_quantised else {})})
    architecture = read_architecture(config_of(folder, "nf4", ONE).model)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(size, generator=generator).bfloat16()
        for name, size in source_shapes(architecture.recipes(merge_qkv=True)).items()
    }
    for name in [one for one in tensors if one.endswith("_proj.weight")] if is_quantised else ():
        tensors[name], tensors[f"{name}_scale_inv"] = quantize_block_fp8(tensors[name], 32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, kind: str, train: dict[str, object], mode: str) -> tuple[dict[str, Tensor], float]:
    """The whole base as this rank holds it after reading, and the share of the files that the rank read."""
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    config = config_of(folder, "block_fp8" if kind == "stored" else kind, train, mode=mode)
    config = one_process(config) if train == ONE else config
    with counted_reads() as sizes:
        engine = build_engine(config, read_architecture(config.model), mesh_for(config), torch.device("cpu"))
    model = engine.model
    held = {name: model.shares.gather(name, one) for name, one in model.module.named_parameters()}
    return {name: one for name, one in held.items() if ".adapter." not in name}, sum(sizes) / total


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a model, and of weights by what is read."""
    made = {kind: write_weights(tmp_path_factory.mktemp(kind), is_quantised=kind == "stored") for kind in READ}
    return {"model": write_config(tmp_path_factory.mktemp("model"), SHAPE), **made}


@pytest.fixture(scope="module")
def found(launch: Launch, folders: dict[str, Path]) -> Launches:
    """By layout and what is computed: the table of this module."""
    cells = {}
    for quant_format, layout in [*((quant_format, "one") for quant_format in FORMATS), *PLACED]:
        num_ranks, train = LAYOUTS[layout]
        config = config_of(folders["model"], quant_format, train)
        cells[layout, "trained", quant_format] = (num_ranks, partial(run, config))
    for kind, layout, mode in product(READ, ("one", "ep 2", "fsdp 2"), ("all_ranks", "broadcast")):
        num_ranks, train = LAYOUTS[layout]
        cells[layout, "read", kind, mode] = (num_ranks, partial(load, folders[kind], kind, train, mode))
    return launch(cells)


@pytest.mark.parametrize(("quant_format", "layout"), PLACED)
def test_bytes_gradients_and_merges_do_not_depend_on_the_placement(
    quant_format: str, layout: str, found: Launches
) -> None:
    # Catches global scales of a shard, noise by the rank's own index, experts under another one's number, bytes that
    # mixed precision casts, and a merge of other rows than the rank's own.
    [wanted] = found("one", "trained", quant_format)
    assert sum(".experts." in name for name in wanted.first) == (6 if quant_format == "nvfp4" else 4)
    measured = found(layout, "trained", quant_format)
    for one in measured:
        assert one.num_weights == wanted.num_weights
        torch.testing.assert_close(one.first, wanted.first, rtol=0, atol=0)
    differences = compare(measured[0].step, wanted.step)
    assert all(one.is_within for one in differences.values()), differences
    for name, tensor in wanted.exported.items():
        # Weights that the merge leaves on the border of two codes may fall to either side.
        assert (measured[-1].exported[name] - tensor).norm() <= 1e-2 * tensor.norm(), name
    assert any(not torch.equal(wanted.merged[name], value) for name, value in wanted.first.items())


@pytest.mark.parametrize("mode", ["all_ranks", "broadcast"])
@pytest.mark.parametrize("layout", ["ep 2", "fsdp 2"])
@pytest.mark.parametrize("kind", READ)
def test_each_rank_reads_and_quantises_its_own_experts(kind: str, layout: str, mode: str, found: Launches) -> None:
    # Catches ranks that read all experts, and those of a neighbour.
    [(wanted, share)] = found("one", "read", kind, mode)
    assert wanted["model.layers.0.mlp.experts.gate_up_proj.weight"].dtype == torch.uint8
    for rank, (held, part) in enumerate(found(layout, "read", kind, mode)):
        torch.testing.assert_close(held, wanted, rtol=0, atol=0)
        assert part == pytest.approx((share / 2) if mode == "all_ranks" else share * (rank == 0))


def test_stored_codes_are_kept(found: Launches, folders: dict[str, Path]) -> None:
    # Catches stored codes that are quantised again.
    [(held, _)] = found("one", "read", "stored", "all_ranks")
    with SafetensorsSource(folders["stored"]) as source:
        up = source.read("model.layers.0.mlp.experts.5.up_proj.weight").view(torch.uint8)
    codes = held["model.layers.0.mlp.experts.gate_up_proj.weight"]
    assert torch.equal(codes.flatten(0, 1)[5 * 64 + 32 : 6 * 64], up)
