"""Ranks that share matrices, and stages of a pipeline: calls before a step, copies, counts, quantised weights, gathers.

test_layouts.py compares their first gradients with those of one process, test_read_and_exported.py their files.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from layouts import LAYOUTS, ONE_PROCESS, engine_for, run_config, weights_of, write_models, write_weights
from passes import forward_backward_of
from quantized_files import quantization_config, stored_tensors
from ranks import Launch, Launches
from table_of_runs import LORA, RUNS, Options, Run
from tiny_models import hf_config, write_config
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.shards import local
from xorl.data import PackedBatch
from xorl.kernels.quant import QuantScheme
from xorl.lora.prequantized import stored_parameters
from xorl.train.engine import Engine
from xorl.train.evaluate import evaluate
from xorl.train.verify import _draw, batches_of

TENSOR, PIPELINE = "tp 2, fsdp", "pp 2, none"
STEPPED = [
    *((TENSOR, name) for name in ("gpt2", "qwen3_moe", "llama, LoRA")),
    *((PIPELINE, name) for name in ("gpt2", "llama, LoRA")),
]
OPTIMIZERS = ("anyprecision_adamw", "sgd", "muon")
COPIED = [*product([TENSOR], ("gpt2", "qwen3_moe"), OPTIMIZERS), *((PIPELINE, "gpt2", name) for name in OPTIMIZERS)]
FP8 = ("tensorwise", "rowwise")
IN_BF16 = {"enable_mixed_precision": True, "param_dtype": "bf16"}
GATHERS: dict[str, Options] = {"default": {}, "reshard": {"reshard_after_forward": True}}
NUM_MICRO_BATCHES = 4
# Of a matrix that two ranks share, each has whole blocks of every format.
QUANTIZED = hf_config("qwen3", hidden_size=64, head_dim=32, intermediate_size=128)
SCHEMES = {name: QuantScheme(name, size) for name, size in {"block_fp8": 16, "nvfp4": 16, "nf4": 64}.items()}
# Folders of checkpoints that are quantised, or None for initial values.
QUANTIZED_CELLS = [(stored, name) for stored in (None, "stored") for name in SCHEMES] + [("nested", "nf4")]


class HeldOut:
    """A loader of some rows."""

    def __init__(self, batches: list[PackedBatch]) -> None:
        self._batches = batches

    def steps(self) -> Iterator[tuple[int, list[PackedBatch]]]:
        yield 0, self._batches


class Ended(NamedTuple):
    """losses, tokens, flops: of each step. copies: parameters of which other ranks may have all, too."""

    losses: list[float]
    tokens: list[float]
    flops: list[float]
    copies: dict[str, Tensor]


def options_of(layout: str | None) -> Options:
    return LAYOUTS[layout].train if layout else ONE_PROCESS


def batches_for(engine: Engine, config, step: int = 0, num_bins: int = 4) -> list[PackedBatch]:
    return batches_of(step, num_bins, engine.model.module.config.vocab_size, config, engine.model.mesh)


def steps(folder: Path, run: Run, layout: str | None, num_steps: int = 3) -> Ended:
    """Steps of two calls each."""
    config = run_config(folder, run.model, {**options_of(layout), **run.train}, run.lora)
    engine = engine_for(config)
    _draw(engine.model.module)
    ended = Ended([], [], [], {})
    for step in range(num_steps):
        batches = batches_for(engine, config, step)
        calls = [engine.forward_backward(half, cross_entropy) for half in (batches[:1], batches[1:])]
        divisor = calls[0].num_trained_tokens + calls[1].num_trained_tokens
        ended.losses.append(float((calls[0].loss_sum + calls[1].loss_sum) / divisor))
        ended.tokens.append(float(calls[0].num_tokens + calls[1].num_tokens))
        ended.flops.append(float(calls[0].flops + calls[1].flops))
        engine.optim_step(1e-2, divisor)
    shares, is_staged = engine.model.shares, engine.model.mesh.pp.size > 1
    for name, parameter in engine.model.module.named_parameters():
        if is_staged or (name in shares and shares[name].summed_over):
            ended.copies[name] = local(parameter).detach().clone()
    return ended


def gradients(folder: Path, layout: str | None) -> dict[str, Tensor]:
    """Of four micro-batches, with parameters and activations in bf16."""
    config = run_config(folder, "llama", {**options_of(layout), **IN_BF16})
    engine = engine_for(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xorl.train.verify.NUM_MICRO_BATCHES", NUM_MICRO_BATCHES // runtime.world_size())  # of each stage
        forward_backward_of(engine, config, num_bins=8)
    named = engine.model.module.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def evaluated(folder: Path, layout: str | None) -> dict[str, float]:
    config = run_config(folder, "gpt2", options_of(layout))
    engine = engine_for(config)
    _draw(engine.model.module)
    return evaluate(engine, HeldOut(batches_for(engine, config, num_bins=8)))


def gathers(folder: Path, train: Options) -> list[int]:
    """The number of gathers of parameters on this rank in each of three steps, on two stages."""
    config = run_config(folder, "gpt2, 4 layers", {**LAYOUTS["pp 2, fsdp 2"].train, **train})
    engine = engine_for(config)
    counts = []
    gather = dist.all_gather_into_tensor

    def counted(*args: object, **options: object) -> object:
        counts[-1] += 1
        return gather(*args, **options)  # pyright: ignore[reportArgumentType]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xorl.train.verify.NUM_MICRO_BATCHES", NUM_MICRO_BATCHES // 2)  # of each stage
        patch.setattr(dist, "all_gather_into_tensor", counted)
        for step in range(3):
            counts.append(0)
            batches = batches_for(engine, config, step, 8)
            assert len(batches) == NUM_MICRO_BATCHES
            engine.optim_step(1e-3, engine.forward_backward(batches, cross_entropy).num_trained_tokens)
    return counts


def write_quantized(folder: Path, stored: str, quant_format: str) -> None:
    """A checkpoint that is quantised as other tools do it."""
    name, scheme = f"{stored}/{quant_format}", SCHEMES[quant_format]
    write_config(folder / name, QUANTIZED)
    write_weights(folder, name)
    tensors: dict[str, Tensor] = {}
    for tensor, weight in load_file(folder / name / "model.safetensors").items():
        if tensor.endswith("_proj.weight"):
            module = tensor.removesuffix(".weight")
            # Scales that differ also after they are quantised.
            tensors |= stored_tensors(module, weight / 32, scheme, nested=stored == "nested")
        else:
            tensors[tensor] = weight
    save_file(tensors, folder / name / "model.safetensors")
    write_config(folder / name, {**QUANTIZED, "quantization_config": quantization_config(scheme)})


def quantized(folder: Path, stored: str | None, quant_format: str, layout: str | None) -> dict[str, Tensor]:
    """Codes and scales, and the weights that an export dequantises; of initial values or of a checkpoint."""
    size = SCHEMES[quant_format].group_size
    lora = {**LORA, "enable_qlora": True, "quant_format": quant_format, "quant_group_size": size}
    model = f"{stored}/{quant_format}" if stored else "drawn"
    # Each rank reads its own rows, or one reads all.
    train = {**options_of(layout), "load_weights_mode": "all_ranks" if stored == "nested" else "broadcast"}
    config = run_config(folder, model, train, lora, {"model_path": str(folder / model)} if stored else {})
    engine = engine_for(config)
    parameters, shares = stored_parameters(engine.model.module), engine.model.shares
    own = {name: shares.gather(name, parameter) for name, parameter in parameters.items()}
    return own | weights_of(engine, config)


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = write_models(tmp_path_factory.mktemp("models"))
    write_config(folder / "drawn", QUANTIZED)
    for stored, quant_format in QUANTIZED_CELLS:
        if stored:
            write_quantized(folder, stored, quant_format)
    cells: dict[tuple, tuple[int, Callable[[], object]]] = {}

    def add(*key: object, layout: str, compute: Callable[..., object]) -> None:
        """By key and layout, what the layout and one process compute."""
        cells[*key, layout] = (2, partial(compute, layout=layout))
        cells[*key, None] = (1, partial(compute, layout=None))

    for layout, name in STEPPED:
        add("losses", name, layout=layout, compute=partial(steps, folder, RUNS[name]))
    for recipe in FP8:
        run = Run("gpt2", {"fp8": recipe, "enable_mixed_precision": True})
        add("losses", recipe, layout=TENSOR, compute=partial(steps, folder, run))
    for cell in QUANTIZED_CELLS:
        add("quantized", *cell, layout=TENSOR, compute=partial(quantized, folder, *cell))
    add("bits", layout=PIPELINE, compute=partial(gradients, folder))
    add("evaluated", layout=PIPELINE, compute=partial(evaluated, folder))
    for layout, name, optimizer in COPIED:
        run = replace(RUNS[name], train={**IN_BF16, "optimizer": optimizer})
        cells["copies", layout, name, optimizer] = (2, partial(steps, folder, run, layout, 8))
    for name, train in GATHERS.items():
        cells["gathers", name] = (4, partial(gathers, folder, train))
    return launch(cells)


@pytest.mark.parametrize(("layout", "name"), STEPPED)
def test_several_calls_before_a_step(layout: str, name: str, found: Launches) -> None:
    # Catches a sum after each call, which counts the earlier calls once for every rank, or twice for a tied embedding,
    # a bias that every rank adds, a factor of an adapter that is not summed, a row of padding that its owner trains,
    # and tokens and FLOPs of a rank's share, of one stage, or of each.
    [expected] = found("losses", name, None)
    for rank in found("losses", name, layout):
        assert rank.losses == pytest.approx(expected.losses, rel=1e-5)
        assert (rank.tokens, rank.flops) == (expected.tokens, expected.flops)


@pytest.mark.parametrize("recipe", FP8)
def test_each_rank_multiplies_its_share_in_fp8(recipe: str, found: Launches) -> None:
    # Catches a bias that every rank adds, and shares that conversion to fp8 forgets.
    [expected], first, *_ = found("losses", recipe, None), *found("losses", recipe, TENSOR)
    assert first.losses == pytest.approx(expected.losses, rel=5e-3)
    assert first.flops == expected.flops


@pytest.mark.parametrize(("layout", "name", "optimizer"), COPIED)
def test_copies_stay_equal_to_the_bit(layout: str, name: str, optimizer: str, found: Launches) -> None:
    # Catches a norm, a router, a bias or a tied embedding whose gradient is not summed, and copies that are rounded
    # differently.
    first, second = (ended.copies for ended in found("copies", layout, name, optimizer))
    names = first.keys() & second.keys()
    assert names == ({"model.embed_tokens.weight"} if layout == PIPELINE else first.keys())
    assert names
    assert all(torch.equal(first[one], second[one]) for one in names)


@pytest.mark.parametrize(("stored", "quant_format"), QUANTIZED_CELLS)
def test_quantized_weights_are_those_of_one_process_to_the_bit(
    stored: str | None, quant_format: str, found: Launches
) -> None:
    # Catches scales of a rank's own blocks, a global scale of one rank's share, codes or scales that are read from the
    # first row or column on, and an export of one rank's blocks for all.
    cell = ("quantized", stored, quant_format)
    [expected], first, *_ = found(*cell, None), *found(*cell, TENSOR)
    assert first.keys() == expected.keys()
    assert sum(".weight_scale" in name for name in expected) == 2 * 4
    assert all(torch.equal(first[name], values) for name, values in expected.items())


def test_gradients_in_bf16_are_those_of_one_process_to_the_bit(found: Launches) -> None:
    # Catches a gradient that is divided, rounded on the way, or added up in bf16.
    [expected], stages = found("bits", None), found("bits", PIPELINE)
    measured = {name: gradient for stage in stages for name, gradient in stage.items()}
    assert measured.keys() == expected.keys()
    assert [name for name, gradient in measured.items() if not torch.equal(gradient, expected[name])] == []


def test_all_stages_know_the_evaluation(found: Launches) -> None:
    # Catches scores of one stage, divided by the tokens of another.
    [expected] = found("evaluated", None)
    for measured in found("evaluated", PIPELINE):
        assert measured == pytest.approx(expected, rel=1e-6)


def test_parameters_stay_gathered_in_a_step(found: Launches) -> None:
    # Catches units that are gathered again in every micro-batch of a pipeline by default, or never freed on request.
    for kept, freed in zip(found("gathers", "default"), found("gathers", "reshard"), strict=True):
        assert kept == [3] * 3
        assert all(count > 3 for count in freed)
