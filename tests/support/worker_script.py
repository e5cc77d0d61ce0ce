"""`torchrun worker_script.py FOLDER cpu|cuda`: what clients' models give on these ranks, as JSON on rank 0's output.

In a process of its own, since a test that has forked ranks can have no GPU, and a GPU's process cannot be forked.
"""

import json
import sys
from pathlib import Path
from typing import Literal, cast

from tiny_models import hf_config
from worker_ranks import ask, datum, done, service_config, values, worker_of
from xorl.core import runtime
from xorl.server import operations as ops
from xorl.server.identifiers import CheckpointRef
from xorl.server.worker.worker import Worker

# Heads that a GPU's attention takes.
SHAPE = hf_config(
    hidden_size=128,
    intermediate_size=256,
    head_dim=64,
    max_position_embeddings=512,
    initializer_range=0.05,
    eos_token_id=63,
)
KINDS: dict[str, dict[str, object]] = {
    "full": {"optimizer": "anyprecision_adamw"},
    "lora": {"enable_lora": True, "lora_rank": 8, "lora_models_on_device": 4},
}
Found = dict[str, float | list[float]]


def run(folder: Path, kind: str, device_type: Literal["cpu", "cuda"]) -> Found:
    """Two steps of one model, saved in between and sampled from after; with adapters, beside another one."""
    on_gpu = device_type == "cuda"
    worker = worker_of(
        service_config(
            folder,
            shape=SHAPE,
            attn_implementation="auto" if on_gpu else "eager",
            enable_mixed_precision=on_gpu,
            enable_compile=on_gpu,
            output_dir=str(folder / kind),
            data_parallel_shard_size=runtime.world_size(),
            sample_packing_sequence_len=256,
            **KINDS[kind],
        ),
        device_type,
    )
    lora = ops.LoraSpec(seed=3) if kind == "lora" else None
    done(worker, ops.CreateModel("m", lora=lora))
    data = [datum(20 + 9 * index, index, weights=1.0) for index in range(7)]
    call = ops.ForwardBackward("m", data, "cross_entropy")
    first = loss(done(worker, call))
    update = done(worker, ops.OptimStep("m", 1e-3, eps=1e-3))
    assert isinstance(update, ops.OptimResult)
    done(worker, ops.SaveWeights("m", "a", overwrite=True))
    calls = [call]
    if lora is not None:
        done(worker, ops.CreateModel("other", lora=ops.LoraSpec(rank=4, seed=9)))
        calls.append(ops.ForwardBackward("other", data[::2], "cross_entropy"))
    second = ask(worker, *calls)
    done(worker, ops.OptimStep("m", 1e-3, eps=1e-3), ops.SaveWeightsForSampler("m", "s", sampler_id="s"))
    third = loss(done(worker, ops.ForwardBackward("m", data[:1], "cross_entropy", forward_only=True)))
    sampled = sample(worker, ops.CheckpointSampler(CheckpointRef("m", "sampler_weights", "s")))
    done(worker, ops.LoadWeights("m", CheckpointRef("m", "weights", "a"), optimizer=True), call)
    again = done(worker, ops.OptimStep("m", 1e-3, eps=1e-3))
    assert isinstance(again, ops.OptimResult)
    assert not any(isinstance(result, ops.Failure) for result in second)
    found: Found = {
        "first": first.metrics["loss:sum"],
        "norm": update.metrics["grad_norm"],
        "norm_after": again.metrics["grad_norm"],
        "second": loss(second[0]).metrics["loss:sum"],
        "third": third.metrics["loss:sum"],
    }
    if worker.base.runtime.is_main:
        assert first.fields["logprobs"]
        found["trained"] = values(third.fields["logprobs"][0])[:-1].tolist()
        found["sampled"] = sampled
    return found


def loss(result: object) -> ops.LossResult:
    assert isinstance(result, ops.LossResult), result
    return result


def sample(worker: Worker, source: ops.CheckpointSampler) -> list[float]:
    """The log-probabilities of the first datum's tokens; some are sampled behind them, too."""
    operation = ops.Sample(source, datum(20, 0).tokens, num_samples=3, max_tokens=8, seed=1, prompt_logprobs=True)
    (result,) = ask(worker, operation)
    assert isinstance(result, ops.SampleResult), result
    assert result.prompt_logprobs is not None
    return values(result.prompt_logprobs)[1:].tolist()


def main() -> None:
    folder, device_type = Path(sys.argv[1]), cast(Literal["cpu", "cuda"], sys.argv[2])
    found = {kind: run(folder, kind, device_type) for kind in KINDS}
    if runtime.global_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    runtime.shutdown()


if __name__ == "__main__":
    main()
