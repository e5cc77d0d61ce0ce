"""The service's workers with context parallelism: every layout answers and learns what one process does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

import xorl.core.loss.documents as documents_module
import xorl.server.worker.passes as passes_module
import xorl.train.bank_engine as bank_engine_module
from ranks import Launch, Launches
from tiny_models import hf_config
from worker_ranks import (
    LORA,
    ask,
    datum,
    done,
    gradients,
    of_all_stages,
    same,
    service_config,
    trained_values,
    values,
    worker_of,
)
from xorl.core.mesh import Mesh
from xorl.kernels.layout import ShardedLayout
from xorl.lora import AdapterBank
from xorl.server import operations as ops
from xorl.server.datum import Datum
from xorl.server.identifiers import CheckpointRef, checkpoint_folder
from xorl.server.worker.adapters import AdapterModels
from xorl.server.worker.selftest import self_test
from xorl.server.worker.worker import Worker

ULYSSES: dict[str, object] = {"ulysses_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "ulysses 2": (2, ULYSSES),
    "dp 2, ulysses 2": (4, {**ULYSSES, "data_parallel_shard_size": 2}),
    "dp 2, ulysses 2, ddp": (4, {**ULYSSES, "data_parallel_mode": "ddp", "data_parallel_replicate_size": 2}),
    "ring 2, ulysses 2": (4, {"ringattn_parallel_size": 2, **ULYSSES}),
    "tp 2": (2, {"tensor_parallel_size": 2}),
    "pp 2": (2, {"pipeline_parallel_size": 2, "enable_gradient_checkpointing": True}),
    "pp 2, dp 2": (4, {"pipeline_parallel_size": 2, "data_parallel_shard_size": 2}),
}
# The models of clients by kind; those of adapters share passes.
TENANTS: dict[str, dict[str, ops.LoraSpec | None]] = {
    "full": {"a": None},
    "lora": {"a": ops.LoraSpec(rank=3, seed=5), "b": ops.LoraSpec(rank=4, alpha=8.0, seed=6, train_unembed=False)},
    "experts": {"a": ops.LoraSpec(rank=3, seed=5), "b": ops.LoraSpec(rank=2, seed=6)},
}
# Documents of a call. They fill several rows of BIN_LEN tokens, padded to 128, so that most parts of two or four ranks
# have several documents, and most documents cross parts.
LENGTHS = (17, 59, 1, 90, 31, 45, 23)
BIN_LEN = 100
POLICY = {"logprobs": -3.0, "advantages": 1.5}
# (loss, its options, the inputs of a datum, numbers of targets)
CALLS: dict[str, tuple[str, dict[str, float | str | bool | None], dict[str, float], int]] = {
    "weighted": ("cross_entropy", {}, {"weights": 0.5}, 0),
    "several targets": ("cross_entropy", {}, {"weights": -0.5}, 3),
    "ppo": ("ppo", {}, POLICY, 0),
    "gspo": ("gspo", {"clip_low_threshold": 0.3, "clip_high_threshold": 3.0}, POLICY, 0),
    "gspo, masked": ("gspo", {}, {**POLICY, "sequence_ratio_mask": 1.0}, 0),
    "drgrpo": (
        "drgrpo",
        {"ratio_type": "sequence", "clip_low": 0.9, "clip_high": 9.0},
        {**POLICY, "ref_logprobs": -2.5},
        0,
    ),
}
# The layouts that differ most compute all calls, others only a few.
ALL, FEW = tuple(CALLS), ("weighted", "drgrpo")
WITH_ALL = ("ring 2, ulysses 2", "pp 2")
KINDS = {"tp 2": ("full",), **dict.fromkeys(("dp 2, ulysses 2", *WITH_ALL), TENANTS)}
# (layout, kind, calls).
TABLE = [
    (layout, kind, ALL if layout in WITH_ALL else FEW)
    for layout in LAYOUTS
    for kind in KINDS.get(layout, ("full", "lora"))
]


@dataclass
class Outcome:
    """Everything that clients and checkpoints see of a worker, by name."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: dict[str, list[NDArray[np.float32]]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def data_of(inputs: Mapping[str, float], num_targets: int, seed: int) -> list[Datum]:
    """Documents whose inputs differ by token; in some, the first tokens are not trained."""
    generator = np.random.default_rng(seed)
    data = []
    for index, length in enumerate(LENGTHS):
        shape = (length, num_targets) if num_targets else (length,)
        is_trained = (np.arange(length) >= index % 3).reshape(length, *[1] * bool(num_targets))
        noise = {key: 1 + 0.4 * generator.standard_normal(shape) for key in inputs}
        own = {key: value * noise[key] * is_trained for key, value in inputs.items()}
        data.append(datum(length, 31 * seed + index, num_targets, **own))
    return data


def summed_gradients(worker: Worker, model_id: str) -> dict[str, Tensor]:
    """The gradient that the next step takes, over all ranks; collective."""
    found = gradients(worker, model_id)
    for gradient in found.values() if isinstance(worker.models, AdapterModels) else ():
        dist.all_reduce(gradient, group=worker.base.mesh.loss.group)
    return of_all_stages(found, worker.base.mesh)


def outcome(worker: Worker, kind: str, calls: Sequence[str], num_steps: int = 2) -> Outcome:
    """Train each tenant for a step of these calls and one of a few, with results of all kinds; collective."""
    found, tenants = Outcome(), TENANTS[kind]

    def record(name: str, result: object) -> None:
        assert isinstance(result, ops.LossResult | ops.OptimResult), result
        found.metrics[name] = dict(result.metrics)
        if isinstance(result, ops.LossResult):
            for key, arrays in result.fields.items():
                found.tokens[f"{name}: {key}"] = [values(array) for array in arrays]

    for model_id, lora in tenants.items():
        done(worker, ops.CreateModel(model_id, lora=lora))
    for step, own in enumerate((calls, FEW)[:num_steps]):
        for number, call in enumerate(own):
            loss_fn, options, inputs, num_targets = CALLS[call]
            asked = [
                ops.ForwardBackward(
                    model_id, data_of(inputs, num_targets, 10 * step + number + index), loss_fn, options
                )
                for index, model_id in enumerate(tenants)
            ]
            # The second model has other documents, so that rows mix both; in the second step, some ranks have none.
            rest = slice(0, 1) if step else slice(2, None)
            asked[1:] = [ops.ForwardBackward(one.model_id, one.data[rest], loss_fn, options) for one in asked[1:]]
            evaluated = [
                ops.ForwardBackward(one.model_id, one.data, loss_fn, options, forward_only=True) for one in asked
            ]
            # The adapters of the first step compute what the base does.
            evaluation = [("evaluation", evaluated)] if step else []
            for of, operations in (*evaluation, ("pass", asked)):
                for model_id, result in zip(tenants, ask(worker, *operations), strict=True):
                    record(f"{of} {step} {call} {model_id}", result)
        for model_id in tenants:
            gradients = summed_gradients(worker, model_id)
            found.tensors |= {f"gradient {step} {model_id} {name}": value for name, value in gradients.items()}
            update = done(
                worker, ops.OptimStep(model_id, 1e-2, eps=1e-2, weight_decay=0.1, grad_clip_norm=0.5 - 0.2 * step)
            )
            record(f"step {step} {model_id}", update)
            learnt = trained_values(worker, model_id)
            found.tensors |= {f"weights {step} {model_id} {name}": value for name, value in learnt.items()}
    return found


def continue_and_sample(worker: Worker, found: Outcome) -> None:
    """Add what model a computes from a snapshot, and check that it goes on to the bit from a checkpoint; collective."""
    done(worker, ops.SaveWeights("a", "kept"), ops.SaveWeightsForSampler("a", "s", sampler_id="s"))
    saved = CheckpointRef("a", "sampler_weights", "s")
    for file in checkpoint_folder(worker.base.output_dir, saved).glob("adapter_model.safetensors"):
        found.tensors |= {f"file {name}": tensor for name, tensor in load_file(file).items()}
    if worker.base.mesh.dims.pp == 1:  # the workers of a pipeline do not sample
        operation = ops.Sample(
            ops.CheckpointSampler(saved), datum(20, 0).tokens, num_samples=4, max_tokens=6, seed=1, prompt_logprobs=True
        )
        sampled = done(worker, operation)
        assert sampled.prompt_logprobs is not None
        found.tokens["sampled"] = [
            values(sampled.prompt_logprobs)[1:],
            *(values(one.tokens) for one in sampled.sequences),
        ]
    data = [datum(length, length) for length in LENGTHS]
    step = [ops.ForwardBackward("a", data, "cross_entropy"), ops.OptimStep("a", 1e-3, eps=1e-2)]
    done(worker, *step)
    learnt = trained_values(worker, "a")
    done(worker, ops.LoadWeights("a", CheckpointRef("a", "weights", "kept"), optimizer=True), *step)
    again = trained_values(worker, "a")
    assert same(again, learnt)
    found.tensors |= {f"continued {name}": value for name, value in learnt.items()}


def differences(measured: Outcome, expected: Outcome) -> list[str]:
    """What differs, by more than rounding."""
    found = []
    for name, metrics in measured.metrics.items():
        if metrics != pytest.approx(expected.metrics[name], rel=1e-5, abs=1e-6):
            found.append(f"{name}: {metrics} instead of {expected.metrics[name]}")
    for name, others in measured.tokens.items():
        arrays = expected.tokens[name]
        same_shapes = [one.shape for one in others] == [one.shape for one in arrays]
        if not (same_shapes and all(np.allclose(*pair, 1e-5, 1e-5) for pair in zip(others, arrays, strict=True))):
            found.append(name)
    for name, other in measured.tensors.items():
        tensor = expected.tensors[name]
        error = float((other - tensor).norm() / tensor.norm().clamp(min=1e-3))
        if not error < 3e-5:
            found.append(f"{name} differs by {error:.2e}")
    return found


def outcome_of(
    folder: Path, options: Mapping[str, object], kind: str, calls: Sequence[str], num_steps: int = 2
) -> Outcome:
    """What a worker makes of these calls; collective. Its rows have padding, and fewer tokens than a call has."""
    own = folder / kind
    # As many heads for keys as two of the ranks.
    shape = hf_config("qwen3_moe" if kind == "experts" else "qwen3", eos_token_id=63)
    extra = {**({} if kind == "full" else LORA), **options, "output_dir": str(own)}
    worker = worker_of(service_config(own, shape=shape, sample_packing_sequence_len=BIN_LEN, **extra))
    found = outcome(worker, kind, calls, num_steps)
    if calls == ALL:
        continue_and_sample(worker, found)
        done(worker, *(ops.UnloadModel(model_id) for model_id in TENANTS[kind]))
        self_test(worker)
    return found


def faulty(folder: Path, fault: str) -> Outcome:
    """What ranks that share rows make of a few calls with one of FAULTS."""
    with pytest.MonkeyPatch.context() as patch:
        plant, num_steps, _ = FAULTS[fault]
        plant(patch)
        return outcome_of(folder, ULYSSES, "lora", FEW, num_steps)


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """By layout, kind and calls, and by fault."""
    folder = tmp_path_factory.mktemp("workers")
    cells = {}
    for index, (layout, kind, calls) in enumerate(TABLE):
        num_ranks, options = LAYOUTS[layout]
        alone = partial(outcome_of, folder / f"alone_{len(calls)}", {"data_parallel_mode": "none"}, kind, calls)
        cells["one process", kind, calls] = (1, alone)
        cells[layout, kind, calls] = (num_ranks, partial(outcome_of, folder / str(index), options, kind, calls))
    for fault in FAULTS:
        cells["fault", fault] = (2, partial(faulty, folder / fault, fault))
    return launch(cells)


@pytest.mark.parametrize(("layout", "kind", "calls"), TABLE, ids=[f"{layout}-{kind}" for layout, kind, _ in TABLE])
def test_layouts_answer_and_learn_what_one_process_does(
    layout: str, kind: str, calls: Sequence[str], found: Launches
) -> None:
    # Catches rows that ranks read twice or not at all, losses, counts and norms summed over the wrong ranks, values per
    # token that are lost, repeated or in the order of ranks, means of a part of a document, adapters that get the
    # tokens of others, and replicas that sum the gradients of earlier calls again.
    [measured, *_], [expected] = found(layout, kind, calls), found("one process", kind, calls)
    assert measured.metrics.keys() == expected.metrics.keys()
    assert measured.tokens.keys() | {"sampled"} == expected.tokens.keys() | {"sampled"}
    assert measured.tensors.keys() == expected.tensors.keys()
    failed = differences(measured, expected)
    assert not failed, "\n".join(failed)


def metrics_over_the_data_axis(patch: pytest.MonkeyPatch) -> None:
    # If all ranks share rows, each is alone on the data axis.
    patch.setattr(passes_module, "all_reduce_metrics", lambda metrics, _: metrics)


def gradients_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    create = AdapterBank.__init__
    patch.setattr(
        AdapterBank, "__init__", lambda self, *args, **options: create(self, *args, **{**options, "group": None})
    )


def means_of_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(documents_module, "all_reduce", lambda value, _: value)


def gradients_of_means_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    summed = documents_module._SumOverParts
    patch.setattr(summed, "backward", staticmethod(lambda ctx, grad: (grad, None)))


def parts_in_reverse(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShardedLayout, "join", lambda self, parts: torch.cat(list(parts)[::-1]))


def adapters_in_wrong_places(patch: pytest.MonkeyPatch) -> None:
    def first(sizes: Sequence[int], mesh: Mesh) -> list[int]:
        left, found = sum(sizes) // mesh.context.size, []
        for size in sizes:
            found.append(min(size, left))
            left -= found[-1]
        return found

    patch.setattr(bank_engine_module, "sizes_in_part", first)


# A fault, the number of steps that show it, and the names of what it changes.
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], int, Sequence[str]]] = {
    "metrics over the data axis": (metrics_over_the_data_axis, 1, ("pass 0 weighted", "step 0")),
    "gradients of one rank": (gradients_of_one_rank, 1, ("step 0", "weights 0")),
    "means of parts": (means_of_parts, 1, ("pass 0 drgrpo", "gradient 0")),
    "gradients of means of one rank": (gradients_of_means_of_one_rank, 1, ("gradient 0",)),
    "parts in reverse": (parts_in_reverse, 1, ("pass 0 weighted a: logprobs",)),
    "adapters in wrong places": (adapters_in_wrong_places, 2, ("gradient 0", "evaluation 1 weighted")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_ranks_that_share_rows_are_found(fault: str, found: Launches) -> None:
    # Catches comparisons that see nothing.
    failed = differences(found("fault", fault)[0], found("one process", "lora", FEW)[0])
    assert all(any(one.startswith(shown) for one in failed) for shown in FAULTS[fault][2]), failed
