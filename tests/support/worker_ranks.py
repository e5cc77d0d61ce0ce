"""A service's workers in the ranks of a test: a tiny model, its configuration, and operations on it."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiny_models import hf_config
from xorl.config import ServerConfig, server_config_from_mapping
from xorl.core import runtime
from xorl.server.datum import Array, Datum
from xorl.server.identifiers import CheckpointRef
from xorl.server.messages import Operation, Result, Work
from xorl.server.operations import (
    CheckpointSampler,
    CreateModel,
    Failure,
    ForwardBackward,
    LoraSpec,
    OptimStep,
    SampleResult,
)
from xorl.server.worker.adapters import AdapterModels
from xorl.server.worker.base import build_base
from xorl.server.worker.full import WholeModel
from xorl.server.worker.worker import Worker
from xorl.train.verify import of_all_stages

VOCAB = 64
HF_CONFIG = hf_config(eos_token_id=63)
LORA = {"enable_lora": True, "lora_rank": 4, "lora_models_on_device": 3}
KINDS: dict[str, dict[str, object]] = {"full": {}, "lora": LORA}
ADAPTER = LoraSpec(rank=3, alpha=8.0, seed=5)


def service_config(folder: Path, *, shape: Mapping[str, object] = HF_CONFIG, **options: object) -> ServerConfig:
    """fp32, full weights; the model's folder has no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    # Every rank writes it, and another one may be reading.
    fresh = folder / f"config.json.{os.getpid()}"
    fresh.write_text(json.dumps(shape))
    fresh.replace(folder / "config.json")
    values = {
        "config_path": str(folder),
        "output_dir": str(folder / "outputs"),
        "attn_implementation": "eager",
        "enable_mixed_precision": False,
        "enable_gradient_checkpointing": False,
        "init_device": "auto",
        "sample_packing_sequence_len": 64,
        **options,
    }
    return server_config_from_mapping(values).config


def worker_of(config: ServerConfig, device_type: Literal["cpu", "cuda"] = "cpu") -> Worker:
    """This rank's; collective."""
    place = runtime.init(device_type)
    return Worker(build_base(config, place))


def ask(worker: Worker, *operations: Operation, ids: Sequence[str] = ()) -> list[Result]:
    """The results, on rank 0; collective."""
    return worker.run(Work(list(ids or map(str, range(len(operations)))), list(operations)))


def done(worker: Worker, *operations: Operation) -> Result:
    """The last result of operations one after the other, none of which may fail."""
    result: Result | None = None
    for operation in operations:
        (result,) = ask(worker, operation)
        assert not isinstance(result, Failure), result
    assert result is not None
    return result


def refusal_of(worker: Worker, operation: Operation, ids: Sequence[str] = ()) -> Failure:
    """Why an operation failed, as it must; collective."""
    (failure,) = ask(worker, operation, ids=ids)
    assert isinstance(failure, Failure), failure
    return failure


def make(folder: Path, kind: str, model_id: str = "m", **options: object) -> Worker:
    """A worker of a kind, with a model."""
    worker = worker_of(service_config(folder, **KINDS[kind], **options))
    done(worker, created(model_id, kind))
    return worker


def created(model_id: str, kind: str) -> CreateModel:
    """The operation that makes a model of a kind."""
    return CreateModel(model_id, lora=ADAPTER if kind == "lora" else None)


def saved_by(model_id: str, name: str) -> CheckpointSampler:
    """What samples from weights that a model was saved with for samplers."""
    return CheckpointSampler(CheckpointRef(model_id, "sampler_weights", name))


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether models have the same values."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def shards(num_ranks: int) -> dict[str, object]:
    """The option that shards a model over so many ranks."""
    return {"data_parallel_shard_size": num_ranks}


def gradients(worker: Worker, model_id: str) -> dict[str, Tensor]:
    """What waits for a step on this rank, copied."""
    if isinstance(worker.models, AdapterModels):
        return {name: grad.clone() for name, grad in worker.models.bank.gradients(model_id).items()}
    assert isinstance(worker.models, WholeModel)
    named, gather = worker.base.module.named_parameters(), worker.base.model.shares.gather_gradient
    return {name: gather(name, p).clone() for name, p in named if p.grad is not None}


def trained_values(worker: Worker, model_id: str) -> dict[str, Tensor]:
    """What a model has learnt, whole; collective."""
    if isinstance(worker.models, AdapterModels):
        snapshot = worker.models.bank.snapshot(model_id)
        own = {name: snapshot.tensors()[name] for name, _ in snapshot.names}
        return of_all_stages(own, worker.base.mesh)
    worker.base.model.drop_gathered()
    gather = worker.base.model.shares.gather
    own = {name: gather(name, value).clone() for name, value in worker.base.module.named_parameters()}
    return of_all_stages(own, worker.base.mesh)


def datum(length: int, seed: int = 0, num_targets: int = 0, **fields: object) -> Datum:
    """Random tokens; targets are the tokens that follow, or as many random ones as are asked for."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCAB - 1, length + 1)
    targets = generator.integers(0, VOCAB, (length, num_targets)) if num_targets else tokens[1:]
    arrays = {name: np.broadcast_to(np.asarray(value, np.float32), targets.shape) for name, value in fields.items()}
    return Datum(
        Array.of(tokens[:-1].astype(np.int32)),
        {"target_tokens": Array.of(targets.astype(np.int64)), **{n: Array.of(v.copy()) for n, v in arrays.items()}},
    )


def values(array: Array) -> NDArray[np.float32]:
    """Of a result."""
    return array.numpy().astype(np.float32)


def train(model_id: str, data: list[Datum], lr: float = 1e-2) -> list[Operation]:
    """A step of cross-entropy."""
    return [ForwardBackward(model_id, data, "cross_entropy"), OptimStep(model_id, lr)]


def assert_scored_as_trained(worker: Worker, prompt: Array, sampled: SampleResult) -> None:
    """The log-probabilities of samples of model m are those that training gives, with their routes if they have any.

    Collective; rank 0 compares.
    """
    for sequence in sampled.sequences:
        tokens = np.concatenate([prompt.numpy(), sequence.tokens.numpy()])
        routes = None
        if sampled.prompt_routed_experts is not None and sequence.routed_experts is not None:
            routes = Array.of(np.concatenate([sampled.prompt_routed_experts.numpy(), sequence.routed_experts.numpy()]))
        targets = {"target_tokens": Array.of(tokens[1:].astype(np.int64))}
        scored = Datum(Array.of(tokens[:-1]), targets, routes)
        loss = done(worker, ForwardBackward("m", [scored], "cross_entropy", forward_only=True))
        if worker.base.runtime.is_main:
            expected = values(loss.fields["logprobs"][0])[len(prompt.numpy()) - 1 :]
            np.testing.assert_allclose(values(sequence.logprobs), expected, atol=1e-4)
