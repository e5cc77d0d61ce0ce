"""What the stages of a pipeline have in common: gradients to the bit, copies, files, counts, gathers, random numbers.

test_layouts.py compares their first gradients with those of one process.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from layouts import engine_for, run_config, weights_of, write_models, write_weights
from ranks import Launch, Launches
from table_of_runs import LORA, Options
from xorl.config import Config
from xorl.core import runtime
from xorl.core.loss import cross_entropy
from xorl.core.shards import local
from xorl.data import PackedBatch
from xorl.train.engine import Engine
from xorl.train.evaluate import evaluate
from xorl.train.verify import _draw, batches_of

MODELS: dict[str, Options] = {"gpt2": {}, "llama": LORA}
OPTIMIZERS = ("anyprecision_adamw", "muon")
IN_BF16 = {"enable_mixed_precision": True, "param_dtype": "bf16"}


NUM_MICRO_BATCHES = 4


class HeldOut:
    """A loader of some rows."""

    def __init__(self, batches: list[PackedBatch]) -> None:
        self._batches = batches

    def steps(self) -> Iterator[tuple[int, list[PackedBatch]]]:
        yield 0, self._batches


class Ended(NamedTuple):
    """losses, tokens, flops: of each step. tensors: this stage's parameters, or their gradients."""

    losses: list[float]
    tokens: list[float]
    flops: list[float]
    tensors: dict[str, Tensor]


def engine_of(config: Config) -> Engine:
    """An engine that has a stage, if there are several ranks."""
    return engine_for(config, data_parallel_mode="none", pipeline_parallel_size=runtime.world_size())


def steps(folder: Path, model: str, num_steps: int, train: Options) -> Ended:
    """Steps of two calls each."""
    config = run_config(folder, model, train, MODELS[model])
    engine = engine_of(config)
    _draw(engine.model.module)
    losses, tokens, flops = [], [], []
    for step in range(num_steps):
        batches = batches_of(step, 4, engine.model.module.config.vocab_size, config, engine.model.mesh)
        calls = [engine.forward_backward(half, cross_entropy) for half in (batches[:1], batches[1:])]
        divisor = calls[0].num_trained_tokens + calls[1].num_trained_tokens
        losses.append(float((calls[0].loss_sum + calls[1].loss_sum) / divisor))
        tokens.append(float(calls[0].num_tokens + calls[1].num_tokens))
        flops.append(float(calls[0].flops + calls[1].flops))
        engine.optim_step(1e-2, divisor)
    return Ended(losses, tokens, flops, {name: local(p).detach() for name, p in engine.model.module.named_parameters()})


def gradients(folder: Path) -> dict[str, Tensor]:
    """Of four micro-batches, with parameters and activations in bf16."""
    config = run_config(folder, "llama", IN_BF16)
    engine = engine_of(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xorl.train.verify.NUM_MICRO_BATCHES", 4 // runtime.world_size())  # of each stage
        batches = batches_of(0, 8, engine.model.module.config.vocab_size, config, engine.model.mesh)
    engine.forward_backward(batches, cross_entropy)
    named = engine.model.module.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def evaluated(folder: Path) -> dict[str, float]:
    config = run_config(folder, "gpt2", {})
    engine = engine_of(config)
    _draw(engine.model.module)
    batches = batches_of(0, 8, engine.model.module.config.vocab_size, config, engine.model.mesh)
    return evaluate(engine, HeldOut(batches))


def exported(folder: Path, lora: Options) -> dict[str, Tensor]:
    """The model as others read it, with adapters merged in; on rank 0."""
    config = run_config(folder, "llama", {}, lora)
    engine = engine_of(config)
    _draw(engine.model.module)
    return weights_of(engine, config)


def loaded(folder: Path) -> dict[str, Tensor]:
    """This stage's parameters of a model that is read from files."""
    config = run_config(folder, "llama", {}, of_model={"model_path": str(folder / "llama")})
    return {name: parameter.detach() for name, parameter in engine_of(config).model.module.named_parameters()}


def gathers(folder: Path, train: Options) -> list[int]:
    """The number of gathers of parameters on this rank in each of three steps, on two stages."""
    config = run_config(folder, "gpt2, 4 layers", {"data_parallel_mode": "fsdp2", "pipeline_parallel_size": 2, **train})
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
            batches = batches_of(step, 8, engine.model.module.config.vocab_size, config, engine.model.mesh)
            assert len(batches) == NUM_MICRO_BATCHES
            losses = engine.forward_backward(batches, cross_entropy)
            engine.optim_step(1e-3, losses.num_trained_tokens)
    return counts


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = write_models(tmp_path_factory.mktemp("models"))
    write_weights(folder, "llama")
    cells = {}
    for size in (1, 2):
        cells |= {("losses", model, size): (size, partial(steps, folder, model, 3, {})) for model in MODELS}
        cells |= {
            ("exported", name, size): (size, partial(exported, folder, lora))
            for name, lora in {"base": {}, "adapters": LORA}.items()
        }
        cells |= {("loaded", size): (size, partial(loaded, folder)), ("bits", size): (size, partial(gradients, folder))}
        cells["evaluated", size] = size, partial(evaluated, folder)
    cells |= {
        ("copies", optimizer): (2, partial(steps, folder, "gpt2", 20, {**IN_BF16, "optimizer": optimizer}))
        for optimizer in OPTIMIZERS
    }
    cells |= {
        ("gathers", name): (4, partial(gathers, folder, train))
        for name, train in {"default": {}, "reshard": {"reshard_after_forward": True}}.items()
    }
    return launch(cells)


@pytest.mark.parametrize("model", MODELS)
def test_several_calls_before_a_step(model: str, found: Launches) -> None:
    # Catches gradients of a tied embedding that are summed after each call, which counts the earlier ones twice, and
    # tokens and FLOPs of one stage, or of each.
    [expected], stages = found("losses", model, 1), found("losses", model, 2)
    for stage in stages:
        assert stage.losses == pytest.approx(expected.losses, rel=1e-5)
        assert (stage.tokens, stage.flops) == (expected.tokens, expected.flops)


def test_gradients_in_bf16_are_those_of_one_process_to_the_bit(found: Launches) -> None:
    # Catches a gradient that is divided, rounded on the way, or added up in bf16.
    [expected], stages = found("bits", 1), found("bits", 2)
    measured = {name: gradient for stage in stages for name, gradient in stage.items()}
    assert measured.keys() == expected.keys()
    assert [name for name, gradient in measured.items() if not torch.equal(gradient, expected[name])] == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_tied_embedding_stays_the_same_on_both_stages(optimizer: str, found: Launches) -> None:
    # Catches copies that get different gradients, or round them by different random numbers.
    last, first = (stage.tensors for stage in found("copies", optimizer))
    assert last.keys() & first.keys() == {"model.embed_tokens.weight"}
    assert torch.equal(*(stage["model.embed_tokens.weight"] for stage in (last, first)))


@pytest.mark.parametrize("name", ["base", "adapters"])
def test_others_read_what_all_stages_have(name: str, found: Launches) -> None:
    # Catches a file of one stage's tensors.
    [expected], [measured, _] = found("exported", name, 1), found("exported", name, 2)
    torch.testing.assert_close(measured, expected, rtol=0, atol=0)


def test_a_stage_reads_its_own_layers(found: Launches) -> None:
    # Catches layers under the numbers that they have within a stage.
    [expected], stages = found("loaded", 1), found("loaded", 2)
    measured = {name: tensor for stage in stages for name, tensor in stage.items()}
    torch.testing.assert_close(measured, expected, rtol=0, atol=0)


def test_all_stages_know_the_evaluation(found: Launches) -> None:
    # Catches scores of one stage, divided by the tokens of another.
    [expected] = found("evaluated", 1)
    for measured in found("evaluated", 2):
        assert measured == pytest.approx(expected, rel=1e-6)


def test_parameters_stay_gathered_in_a_step(found: Launches) -> None:
    # Catches units that are gathered again in every micro-batch of a pipeline by default, or never freed on request.
    for kept, freed in zip(found("gathers", "default"), found("gathers", "reshard"), strict=True):
        assert kept == [3] * 3
        assert all(count > 3 for count in freed)
