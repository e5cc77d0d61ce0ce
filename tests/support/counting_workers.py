"""Workers that count where others compute: they speak the service's protocol, and what was done twice or not shows.

A model's state is a number. An optimizer step folds the gradient into it so that order and number of calls matter;
checkpoints are files with it. Started as a process, or as `CountingWorkers` in a thread.
"""

import argparse
import json
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from xorl.server import operations as ops
from xorl.server.channel import BlockingServer, ChannelKeys, Limits
from xorl.server.datum import Array
from xorl.server.identifiers import CheckpointKind, CheckpointRef, checkpoint_folder
from xorl.server.messages import CANCELLED, Cancel, Done, Health, HealthResult, Ok, Resume, Suspended, Work

MODULUS = 2**31 - 1
NUM_REMEMBERED = 64
POISON = "poison"  # a loss of this name ends the process
BAD = "bad"  # a loss of this name fails
BROKEN = "broken"  # a checkpoint of this name is loaded half, but into a new model


def folded(weights: int, gradient: int) -> int:
    """The state after a step."""
    return (weights * 31 + gradient) % MODULUS


@dataclass
class Counted:
    """A model."""

    weights: int = 1
    gradient: int = 0
    steps: int = 0


@dataclass
class CountingWorkers:
    """Answers at `address` from a thread until `close`.

    delay_s: of each forward_backward. datum_s: of each datum of one; between two, it gives way to other work.
    create_s: of each creation. token_s: of each token of a sample, until it is cancelled. published_s: from when a
    checkpoint is there until that is said. checkpoint_bytes: what it says of each new model. ran: the ids of all
    operations that were run, in their order. suspended: the ids of passes, each time that they gave way.
    """

    address: str
    output_dir: Path
    delay_s: float = 0.0
    create_s: float = 0.0
    datum_s: float = 0.0
    token_s: float = 0.0
    published_s: float = 0.0
    max_context_length: int = 4096
    checkpoint_bytes: dict[CheckpointKind, int] = field(default_factory=dict)
    keys: ChannelKeys | None = None
    models: dict[str, Counted] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    created: list[ops.CreateModel] = field(default_factory=list)
    suspended: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._remembered: OrderedDict[str, object] = OrderedDict()
        self._cancelled: set[str] = set()
        self._begun: dict[str, tuple[ops.ForwardBackward, int]] = {}
        self._server: BlockingServer[Work | Cancel] = BlockingServer(
            self.address,
            Work | Cancel,
            keys=self.keys,
            limits=Limits(message_bytes=2**30, ping_every_s=0.2, lost_after_s=3.0),
            intercept=self._aside,
        )
        self.address = self._server.address
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Be gone."""
        self._stopping.set()
        self._server.close()
        self._thread.join()

    def _aside(self, message: Work | Cancel) -> Ok | None:
        if isinstance(message, Work):
            return None
        self._cancelled.add(message.request_id)
        return Ok()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            received = self._server.receive(timeout_s=0.05)
            if received is not None:
                received.reply(self._work(received.message))

    def _work(self, work: Work) -> Done:
        self.sizes.append(len(work.ids))
        new = [op for name, op in zip(work.ids, work.operations, strict=True) if name not in self._remembered]
        if self.delay_s and any(isinstance(operation, ops.ForwardBackward) for operation in new):
            time.sleep(self.delay_s)
        # As in a mixed pass: one bad call fails all of them, and changes nothing.
        bad = any(isinstance(op, ops.ForwardBackward) and op.loss_fn == BAD for op in new)
        results = [
            self._result(name, operation, fails=bad and len(work.ids) > 1, may_suspend=work.may_suspend)
            for name, operation in zip(work.ids, work.operations, strict=True)
        ]
        return Done(work.ids, results)

    def _result(self, name: str, operation: object, *, fails: bool, may_suspend: bool) -> object:
        if name in self._remembered:
            return self._remembered[name]
        if fails:
            return ops.Failure("user", 400, "a call beside it is bad")
        if self.datum_s and isinstance(operation, ops.ForwardBackward | Resume):
            result = self._pass(name, operation, may_suspend=may_suspend)
        else:
            result = self._run(name, operation)
        if isinstance(result, Suspended):
            self.suspended.append(name)
            return result
        if not isinstance(operation, Health):
            self.ran.append(name)
        if not isinstance(result, ops.Failure):
            self._remembered[name] = result
            while len(self._remembered) > NUM_REMEMBERED:
                self._remembered.popitem(last=False)
        return result

    def _run(self, name: str, operation: object) -> object:
        match operation:
            case Health():
                return HealthResult(1, [], [], self.max_context_length)
            case ops.CreateModel():
                self.created.append(operation)
                time.sleep(self.create_s)
                return self._create(operation)
            case ops.Sample(sampler=ops.CheckpointSampler(ref)) if not checkpoint_folder(self.output_dir, ref).is_dir():
                return ops.Failure("user", 404, f"no checkpoint {ref}")
            case ops.Sample():
                ends = time.monotonic() + self.token_s * (operation.max_tokens or 1)
                while time.monotonic() < ends and not self._stopping.is_set():
                    if name in self._cancelled:
                        return CANCELLED
                    time.sleep(0.01)
                tokens = Array.of(np.arange(operation.max_tokens or 1, dtype=np.int32))
                logprobs = Array.of(np.zeros(tokens.shape, dtype=np.float32))
                return ops.SampleResult([ops.SampledSequence(tokens, logprobs, "length")] * operation.num_samples)
        model = self.models.get(operation.model_id)
        if model is None:
            return ops.Failure("user", 404, f"no model {operation.model_id}")
        return self._change(operation, model)

    def _pass(self, name: str, operation: ops.ForwardBackward | Resume, *, may_suspend: bool) -> object:
        whole, num_done = self._begun.pop(name, (operation, 0))
        assert isinstance(whole, ops.ForwardBackward), "only what was suspended can be resumed"
        while num_done < len(whole.data):
            time.sleep(self.datum_s)
            num_done += 1
            if name in self._cancelled:
                return CANCELLED
            if may_suspend and num_done < len(whole.data) and self._server.has_waiting:
                self._begun[name] = (whole, num_done)
                return Suspended(num_done / len(whole.data))
        return self._run(name, whole)

    def _change(self, operation: object, model: Counted) -> object:
        match operation:
            case ops.ForwardBackward():
                return self._forward_backward(operation, model)
            case ops.OptimStep():
                model.weights = folded(model.weights, model.gradient)
                model.gradient, model.steps = 0, model.steps + 1
                return ops.OptimResult({"step": model.steps, "weights": model.weights})
            case ops.AbortGradients():
                model.gradient = 0
                return ops.GradientsAborted(operation.model_id, model.steps)
            case ops.UnloadModel():
                del self.models[operation.model_id]
                return ops.Unloaded(operation.model_id)
            case ops.SaveWeights():
                ref = CheckpointRef(operation.model_id, "weights", operation.name)
                return self._save(ref, model, overwrite=operation.overwrite)
            case ops.SaveWeightsForSampler():
                assert operation.name is not None
                ref = CheckpointRef(operation.model_id, "sampler_weights", operation.name)
                return self._save(ref, model, overwrite=False)
            case ops.SaveFullWeights():
                ref = CheckpointRef(operation.model_id, "external_weights", operation.name)
                return self._save(ref, model, overwrite=False)
            case ops.LoadWeights() if operation.checkpoint.name == BROKEN:
                del self.models[operation.model_id]
                return ops.Failure("server", 500, "half of it was loaded", model_given_up=True)
            case ops.LoadWeights():
                self.models[operation.model_id] = self._load(operation.checkpoint)
                return ops.Loaded(operation.model_id, operation.checkpoint, self.models[operation.model_id].steps)
        raise NotImplementedError(type(operation).__name__)

    def _create(self, operation: ops.CreateModel) -> object:
        if operation.model_id in self.models:
            return ops.Failure("user", 409, "there is such a model")
        model = Counted(weights=1 if operation.lora is None else 1 + (operation.lora.seed or 0) % 1000)
        if operation.checkpoint is not None:
            if not checkpoint_folder(self.output_dir, operation.checkpoint).is_dir():
                return ops.Failure("user", 404, f"no checkpoint {operation.checkpoint}")
            model = self._load(operation.checkpoint)
        self.models[operation.model_id] = model
        return ops.ModelCreated(operation.model_id, 8, 16.0, model.steps, self.checkpoint_bytes)

    def _forward_backward(self, operation: ops.ForwardBackward, model: Counted) -> object:
        if operation.loss_fn == BAD:
            return ops.Failure("user", 400, "a bad loss")
        if operation.loss_fn == POISON:
            os._exit(1)
        total = sum(int(datum.tokens.numpy().sum()) for datum in operation.data)
        if not operation.forward_only:
            model.gradient += total
        logprobs = [Array.of(np.zeros(datum.tokens.shape, dtype=np.float32)) for datum in operation.data]
        return ops.LossResult("CrossEntropyLossReturn", {"logprobs": logprobs}, {"loss:sum": float(total)})

    def _save(self, ref: CheckpointRef, model: Counted, *, overwrite: bool) -> object:
        folder = checkpoint_folder(self.output_dir, ref)
        if folder.exists() and not overwrite:
            return ops.Failure("user", 409, "exists")
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / ".state"
        fresh.write_text(json.dumps([model.weights, model.steps]))
        fresh.replace(folder / "state.json")
        size = (folder / "state.json").stat().st_size
        time.sleep(self.published_s)
        return ops.Saved(ref, size_bytes=size, num_files=1)

    def _load(self, ref: CheckpointRef) -> Counted:
        weights, steps = json.loads((checkpoint_folder(self.output_dir, ref) / "state.json").read_text())
        return Counted(weights, 0, steps)


def main() -> None:
    """`python counting_workers.py ADDRESS OUTPUT_DIR [--delay SECONDS]`: until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--delay", type=float, default=0.0)
    flags = parser.parse_args()
    CountingWorkers(flags.address, flags.output_dir, flags.delay)
    threading.Event().wait()


if __name__ == "__main__":
    main()
