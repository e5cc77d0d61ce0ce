"""What ranks that share matrices have in common: after steps, in files that they read and write, in what they count.

test_layouts.py compares their first gradients with those of one process.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from layouts import engine_for, run_config, weights_of, write_models, write_weights
from quantized_files import quantization_config, stored_tensors
from ranks import Launch, Launches
from table_of_runs import LORA, Options
from tiny_models import hf_config, write_config
from xorl.config import Config
from xorl.core.loss import cross_entropy
from xorl.core.shards import local
from xorl.kernels.quant import QuantScheme
from xorl.lora.prequantized import stored_parameters
from xorl.train.engine import Engine
from xorl.train.verify import _draw, batches_of

MODELS: dict[str, Options] = {"gpt2": {}, "qwen3_moe": {}, "llama": LORA}
COPIED = ("gpt2", "qwen3_moe")
OPTIMIZERS = ("anyprecision_adamw", "sgd", "muon")
FP8 = ("tensorwise", "rowwise")
LOADING = ("broadcast", "all_ranks")
IN_BF16 = {"enable_mixed_precision": True, "param_dtype": "bf16"}
# Of a matrix that two ranks share, each has whole blocks of every format.
QUANTIZED = hf_config("qwen3", hidden_size=64, head_dim=32, intermediate_size=128)
SCHEMES = {name: QuantScheme(name, size) for name, size in {"block_fp8": 16, "nvfp4": 16, "nf4": 64}.items()}
# Folders of checkpoints that are quantised, or None for initial values.
QUANTIZED_CELLS = [(stored, name) for stored in (None, "stored") for name in SCHEMES] + [("nested", "nf4")]
TARGETS = {**LORA, "lora_target_modules": ["q_proj", "v_proj", "down_proj", "embed_tokens"]}


class Ended(NamedTuple):
    """losses, flops: of each step. copies: parameters of which every rank has all."""

    losses: list[float]
    flops: list[float]
    copies: dict[str, Tensor]


def engine_of(config: Config, num_ranks: int) -> Engine:
    return engine_for(config, data_parallel_mode="fsdp2", tensor_parallel_size=num_ranks)


def steps(folder: Path, model: str, num_ranks: int, num_steps: int, train: Options) -> Ended:
    """Steps of two calls each."""
    config = run_config(folder, model, train, MODELS[model])
    engine = engine_of(config, num_ranks)
    _draw(engine.model.module)
    losses, flops = [], []
    for step in range(num_steps):
        batches = batches_of(step, 4, engine.model.module.config.vocab_size, config, engine.model.mesh)
        calls = [engine.forward_backward(half, cross_entropy) for half in (batches[:1], batches[1:])]
        divisor = calls[0].num_trained_tokens + calls[1].num_trained_tokens
        losses.append(float((calls[0].loss_sum + calls[1].loss_sum) / divisor))
        flops.append(float(calls[0].flops + calls[1].flops))
        engine.optim_step(1e-2, divisor)
    shares = engine.model.shares
    copies = {
        name: local(parameter).detach().clone()
        for name, parameter in engine.model.module.named_parameters()
        if name in shares and shares[name].summed_over
    }
    return Ended(losses, flops, copies)


def exported(folder: Path, lora: Options, num_ranks: int, **model: object) -> dict[str, Tensor]:
    """The model as others read it, with adapters merged in; on rank 0."""
    config = run_config(folder, "llama", {}, lora, model)
    engine = engine_of(config, num_ranks)
    _draw(engine.model.module)
    return weights_of(engine, config)


def loaded(folder: Path, mode: str, num_ranks: int) -> dict[str, Tensor]:
    """The parameters of a model that is read from files."""
    config = run_config(folder, "llama", {"load_weights_mode": mode}, of_model={"model_path": str(folder / "llama")})
    model = engine_of(config, num_ranks).model
    return {name: model.shares.gather(name, parameter) for name, parameter in model.module.named_parameters()}


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


def quantized(folder: Path, stored: str | None, quant_format: str, num_ranks: int) -> dict[str, Tensor]:
    """Codes and scales, and the weights that an export dequantises; of initial values or of a checkpoint."""
    size = SCHEMES[quant_format].group_size
    lora = {**LORA, "enable_qlora": True, "quant_format": quant_format, "quant_group_size": size}
    model = f"{stored}/{quant_format}" if stored else "drawn"
    # Each rank reads its own rows, or one reads all.
    train = {"load_weights_mode": "all_ranks" if stored == "nested" else "broadcast"}
    config = run_config(folder, model, train, lora, {"model_path": str(folder / model)} if stored else {})
    engine = engine_of(config, num_ranks)
    parameters, shares = stored_parameters(engine.model.module), engine.model.shares
    own = {name: shares.gather(name, parameter) for name, parameter in parameters.items()}
    return own | weights_of(engine, config)


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = write_models(tmp_path_factory.mktemp("models"))
    write_weights(folder, "llama")
    write_config(folder / "drawn", QUANTIZED)
    for stored, quant_format in QUANTIZED_CELLS:
        if stored:
            write_quantized(folder, stored, quant_format)
    cells = {}
    for size in (1, 2):
        cells |= {("losses", model, size): (size, partial(steps, folder, model, size, 3, {})) for model in MODELS}
        cells |= {
            ("exported", name, size): (size, partial(exported, folder, lora, size))
            for name, lora in {"base": {}, "adapters": TARGETS}.items()
        }
        cells |= {("loaded", mode, size): (size, partial(loaded, folder, mode, size)) for mode in LOADING}
        cells |= {
            ("quantized", *cell, size): (size, partial(quantized, folder, *cell, size)) for cell in QUANTIZED_CELLS
        }
        for recipe in FP8:
            run = partial(steps, folder, "gpt2", size, 3, {"fp8": recipe, "enable_mixed_precision": True})
            cells["fp8", recipe, size] = (size, run)
    cells |= {
        ("copies", model, optimizer): (2, partial(steps, folder, model, 2, 8, {**IN_BF16, "optimizer": optimizer}))
        for model in COPIED
        for optimizer in OPTIMIZERS
    }
    return launch(cells)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_several_calls_are_summed_once_over_the_ranks(model: str, found: Launches) -> None:
    # Catches a sum after each call, which counts the earlier calls once for every rank, a bias that every rank adds, a
    # factor of an adapter that is not summed, a row of padding that its owner trains, and FLOPs of a rank's share.
    [expected], first, *_ = found("losses", model, 1), *found("losses", model, 2)
    assert first.losses == pytest.approx(expected.losses, rel=1e-5)
    assert first.flops == expected.flops


@pytest.mark.parametrize("recipe", FP8)
def test_each_rank_multiplies_its_share_in_fp8(recipe: str, found: Launches) -> None:
    # Catches a bias that every rank adds, and shares that conversion to fp8 forgets.
    [expected], first, *_ = found("fp8", recipe, 1), *found("fp8", recipe, 2)
    assert first.losses == pytest.approx(expected.losses, rel=5e-3)
    assert first.flops == expected.flops


@pytest.mark.parametrize("model", COPIED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_copies_stay_equal_to_the_bit(model: str, optimizer: str, found: Launches) -> None:
    # Catches a norm, a router or a bias whose gradient is not summed, and copies that are rounded differently.
    first, second = (ended.copies for ended in found("copies", model, optimizer))
    assert first
    assert all(torch.equal(values, second[name]) for name, values in first.items())


@pytest.mark.parametrize("name", ["base", "adapters"])
def test_exports_are_those_of_one_process(name: str, found: Launches) -> None:
    # Catches columns of other ranks, a merge into these, and initial values that follow a rank's own indices.
    [expected], first, *_ = found("exported", name, 1), *found("exported", name, 2)
    assert first.keys() == expected.keys()
    for tensor, values in expected.items():
        torch.testing.assert_close(first[tensor], values, rtol=1e-6, atol=1e-6, msg=tensor)


@pytest.mark.parametrize("mode", LOADING)
def test_weights_are_read_into_the_ranks_that_hold_them(mode: str, found: Launches) -> None:
    # Catches rows of a stacked matrix, or columns, that are read from the first on.
    [expected], first, *_ = found("loaded", mode, 1), *found("loaded", mode, 2)
    assert first.keys() == expected.keys()
    assert expected["model.embed_tokens.weight"].std() > 0.5, "as in the file, unlike initial values"
    assert all(torch.equal(first[tensor], values) for tensor, values in expected.items())


@pytest.mark.parametrize(("stored", "quant_format"), QUANTIZED_CELLS)
def test_quantized_weights_are_those_of_one_process_to_the_bit(
    stored: str | None, quant_format: str, found: Launches
) -> None:
    # Catches scales of a rank's own blocks, a global scale of one rank's share, codes or scales that are read from the
    # first row or column on, and an export of one rank's blocks for all.
    cell = ("quantized", stored, quant_format)
    [expected], first, *_ = found(*cell, 1), *found(*cell, 2)
    assert first.keys() == expected.keys()
    assert sum(".weight_scale" in name for name in expected) == 2 * 4
    assert all(torch.equal(first[name], values) for name, values in expected.items())
