"""The first lines of a run: what it trains, on what, and how, in a few sentences; log level DEBUG has all the rest."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from xorl.config import Config
from xorl.config.local import TrainConfig
from xorl.core.models.flops import forward_costs
from xorl.core.parallel.fsdp import sharding_units
from xorl.core.parallel.schedule import idle_share
from xorl.data import DataPlan
from xorl.data.receipt import Receipt
from xorl.data.stream import Stream
from xorl.kernels.attention import ATTENTION
from xorl.kernels.recurrent import RECURRENCES
from xorl.lora import adapters
from xorl.lora.quantized import num_parameters
from xorl.train.data import Plan, RunData
from xorl.train.layer_kernels import attention_requests, compute_dtype, dispatch_name
from xorl.train.model import pipeline_stages, sketch_model
from xorl.train.startup import PreparedRun, Startup

logger = logging.getLogger(__name__)

# How samples did not become documents as they are: fields of `Counts`, and what the first lines call them.
_CHANGED = {
    "truncated": "cut to length",
    "split": "split",
    "dropped": "dropped because of their length",
    "empty": "empty",
    "skipped": "skipped",
}

# For each stage of a pipeline: with so many, stages wait little for each other.
MANY_MICRO_BATCHES = 8


def log_opening(startup: Startup, start_step: int) -> None:
    """Log the first lines of a run, or of a sweep: what differs between its members has a line for each kind."""
    if not startup.runtime.is_main:
        return
    config, runs = startup.config, startup.runs
    lines = [_model(startup, config)]
    lines += _by_member("Data", {name: _data(run.data, run.plan, config) for name, run in runs.items()})
    lines += _by_member("Steps", {name: _steps(run) + _ranks(startup) for name, run in runs.items()})
    lines += _by_member("Optimizer", {name: _optimizer(run.config) for name, run in runs.items()})
    lines.append(f"Computation: {_computation(startup)}.")
    if startup.mesh.dims.pp > 1:
        lines.append(f"Pipeline: {_pipeline(startup)}.")
    if startup.resumed is not None:
        lines.append(f"Resumed from {startup.resumed.path}, after step {start_step:,} of {startup.num_steps:,}.")
    lines.append(f"Output: {startup.output_dir}, with {_saves(config)}.")
    for line in lines:
        logger.info("%s", line)


def _by_member(title: str, texts: Mapping[str, str]) -> list[str]:
    """A line for each different text, with the names of the members that it is of; without names if it is of all."""
    members: dict[str, list[str]] = {}
    for name, text in texts.items():
        members.setdefault(text, []).append(name)
    if len(members) == 1:
        return [f"{title}: {text}." for text in members]
    return [f"{title} of {', '.join(names)}: {text}." for text, names in members.items()]


def _model(startup: Startup, config: Config) -> str:
    architecture, model = startup.architecture, config.model
    sketch = sketch_model(architecture, model, config.train, config.lora)
    found = adapters(sketch)
    added = {
        id(part): part.numel()
        for adapter in found.values()
        for part in (adapter.A, adapter.B, adapter.magnitude_offset)
        if part is not None
    }
    num_base, num_added = num_parameters(sketch) - sum(added.values()), sum(added.values())
    line = f"Model: {architecture.spec.architecture} with {num_base:,} parameters, "
    if model.model_path is None:
        line += f"random weights from seed {config.train.seed}"
    else:
        line += f"weights of {model.model_path}"
    if config.lora.enable_qlora:
        line += f", quantised to {config.lora.quant_format}"
    if model.basic_modules:
        units = [type(unit).__name__ for unit in sharding_units(sketch, model.basic_modules, [])]
        line += f", sharded apart (model.basic_modules): {_counted(units)}"
    if config.lora.sweep:
        return f"{line}; {len(startup.runs)} adapters are trained: {', '.join(startup.runs)}."
    trained = sum(parameter.numel() for parameter in sketch.parameters() if parameter.requires_grad)
    if not found:
        return f"{line}; {'all of them' if trained == num_base else f'{trained:,} of them'} are trained."
    names = _counted(name.rsplit(".", 1)[-1] for name in found)
    saved = f" and {trained - num_added:,} of the model's own" if trained > num_added else ""
    return f"{line}; {num_added:,} in adapters{saved} are trained, on {names}."


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in Counter(names).items())


def _data(data: RunData, plan: Plan, config: Config) -> str:
    length = config.data.sample_packing_sequence_len
    is_split = config.data.val_set_size is not None  # the receipts then count the samples of both parts
    if isinstance(data.train, Stream):
        size = data.train.num_bytes / 2**30
        entries = _numbered(len(data.train.entries), "dataset")
        line = f"{entries} of {size:,.2f} GiB, streamed into rows of up to {length:,} tokens"
    else:
        assert isinstance(plan, DataPlan), "plan_steps returns a DataPlan for packed documents"
        receipt = data.train.receipt(plan)
        packed = receipt.packed
        line = f"{_samples(receipt)}, "
        if is_split:
            line = f"{_samples(receipt)}; {_documents(receipt)} left to train on, "
        line += f"{packed['tokens']:,} tokens, {packed['trained_tokens']:,} of them trained, in "
        line += f"{_rows(receipt)} of up to {length:,} tokens"
    if data.held_out is not None:
        receipt = data.held_out.receipt(None)
        line += f"; held out: {_documents(receipt) if is_split else _samples(receipt)} in {_rows(receipt)}"
    return line


def _samples(receipt: Receipt) -> str:
    counts = receipt.total
    changed = [f"{number:,} {what}" for name, what in _CHANGED.items() if (number := getattr(counts, name))]
    return _numbered(counts.samples, "sample") + (f" ({', '.join(changed)})" if changed else "")


def _documents(receipt: Receipt) -> str:
    return _numbered(receipt.packed["documents"], "document")


def _rows(receipt: Receipt) -> str:
    assert receipt.num_bins is not None, "the data is packed"
    assert receipt.fill is not None, "the data is packed"
    return f"{_numbered(receipt.num_bins, 'row')} ({receipt.fill:.1%} full)"


def _numbered(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _steps(run: PreparedRun) -> str:
    plan = run.plan
    line = f"{plan.num_steps:,}"
    if isinstance(plan, DataPlan):
        epochs = f"{plan.num_steps / plan.steps_per_epoch:.3g}"
        line += " (1 epoch)" if epochs == "1" else f" ({epochs} epochs)"
    return f"{line} of {_numbered(plan.bins_per_step, 'row')}"


def _ranks(startup: Startup) -> str:
    dims, device = startup.mesh.dims, startup.runtime.device.type
    if dims.world_size == 1:
        return f" on one {device.upper()}"
    return f" on {dims.world_size} ranks ({device.upper()}; {startup.config.train.data_parallel_mode}, {dims.used})"


def _optimizer(config: Config) -> str:
    train = config.train
    line = f"{train.optimizer} with a learning rate of {train.lr:g}"
    if train.lr_warmup_ratio:
        line += f" after a warm-up of {train.lr_warmup_ratio:.3g} of the steps"
    if train.lr_decay_style != "constant":
        line += f", then {train.lr_decay_style} decay to {train.lr_min:g}"
    if train.weight_decay:
        line += f", and a weight decay of {train.weight_decay:g}"
    return line


def _computation(startup: Startup) -> str:
    config, train = startup.config, startup.config.train
    requests = attention_requests(startup.architecture.config, train, startup.runtime.device)
    backends = dict.fromkeys(ATTENTION.resolved_name(config.model.attn_implementation, each) for each in requests)
    computed, stored = "bf16" if train.enable_mixed_precision else "fp32", train.param_dtype
    line = computed if computed == stored else f"{computed} over parameters in {stored}"
    if train.fp8 != "none":
        line += f", with {train.fp8} fp8 products"
    if backends:
        line += f", {' and '.join(backends)} attention"
    recurrences = startup.architecture.config.recurrence_requests(startup.runtime.device.type, compute_dtype(train))
    chosen = [RECURRENCES.resolved_name(config.model.recurrence_implementation, each) for each in recurrences]
    if chosen:
        line += f", {' and '.join(dict.fromkeys(chosen))} recurrences"
    line += f", {_recomputed(train)}"
    if train.expert_parallel_size > 1:
        name = dispatch_name(startup.architecture.config, config.model, train.expert_parallel_size)
        line += f", tokens sent to experts by {name}"
    if train.enable_compile:
        line += ", compiled"
    return f"{line}, in CUDA graphs" if train.enable_cuda_graphs else line


def _pipeline(startup: Startup) -> str:
    """The layers of the stages, and how long these wait for each other."""
    config, train = startup.architecture.config, startup.config.train
    length = startup.config.data.sample_packing_sequence_len
    stages = pipeline_stages(startup.config, startup.architecture)
    layers, head = forward_costs(config, length)
    costs = [
        [sum(layers[index] for index in part) + head * stage.ends(number) for number, part in enumerate(stage.chunks)]
        for stage in stages
    ]
    recomputes = train.enable_gradient_checkpointing and train.recompute_policy == "module"

    def waiting(count: int) -> str:
        schedule = train.pipeline_parallel_schedule
        return f"{idle_share(schedule, costs, count, backward=3.0 if recomputes else 2.0):.0%}"

    shown = "; ".join(
        ", ".join(f"{part.start}-{part[-1]}" if len(part) > 1 else f"{part.start}" for part in stage.chunks)
        for stage in stages
    )
    count = train.gradient_accumulation_steps
    line = f"layers {shown} in {len(stages)} stages, which wait for each other {waiting(count)} of the time"
    if count < MANY_MICRO_BATCHES * len(stages):
        more = MANY_MICRO_BATCHES * len(stages)
        line += f" ({waiting(more)} with train.gradient_accumulation_steps: {more})"
    return line


def _recomputed(train: TrainConfig) -> str:
    """The recomputed parts of a layer, in words."""
    if not train.enable_gradient_checkpointing:
        return "nothing recomputed"
    if train.recompute_policy == "operation":
        what = "all but products and attention recomputed"
    elif train.recompute_modules is not None:
        what = f"{' and '.join(train.recompute_modules)} recomputed"
    else:
        what = "whole layers recomputed" if train.moe_checkpoint_method is None else "activations of experts recomputed"
    return what if train.recompute_num_layers is None else f"{what} in {train.recompute_num_layers} layers"


def _saves(config: Config) -> str:
    train = config.train
    points = [f"every {train.save_steps:,} steps"] if train.save_steps else []
    points += [f"every {train.save_epochs:g} epochs"] if train.save_epochs and not config.data.streaming else []
    line = f"a checkpoint {', '.join([*points, 'and at the end' if points else 'at the end'])}"
    if not train.save_hf_weights:
        return line
    exports_adapters = config.lora.save_lora_only or config.lora.sweep
    return f"{line}, exported as {'an adapter' if exports_adapters else 'a model for transformers'}"
