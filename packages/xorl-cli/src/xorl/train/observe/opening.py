"""The first lines of a run: what it trains, on what, and how, in a few sentences; log level DEBUG has all the rest."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from xorl.config import Config
from xorl.config.local import TrainConfig
from xorl.core.parallel.fsdp import sharding_units
from xorl.data import DataPlan
from xorl.data.receipt import Receipt
from xorl.data.stream import Stream
from xorl.lora import adapters
from xorl.lora.quantized import num_parameters
from xorl.train.data import Plan, RunData
from xorl.train.model import attention_name, sketch_model
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


def log_opening(startup: Startup, start_step: int) -> None:
    """Log the first lines of a run, or of each part of a sweep that its members do not share."""
    config = startup.config
    lines = [_model(startup, config)]
    for name, run in startup.runs.items():
        lines.append(f"{_titled('Data', name)}: {_data(run.data, run.plan, config)}.")
        lines.append(f"{_titled('Steps', name)}: {_steps(run)}{_ranks(startup)}.")
        lines.append(f"{_titled('Optimizer', name)}: {_optimizer(run.config)}.")
    lines.append(f"Computation: {_computation(startup)}.")
    if startup.resumed is not None:
        lines.append(f"Resumed from {startup.resumed.path}, after step {start_step:,} of {startup.num_steps:,}.")
    lines.append(f"Output: {startup.output_dir}, with {_saves(config)}.")
    for line in lines:
        logger.info("%s", line)


def _titled(title: str, member: str) -> str:
    return f"{title} of {member}" if member else title


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
    if isinstance(data.train, Stream):
        size = data.train.num_bytes / 2**30
        line = f"{size:,.2f} GiB of {len(data.train.entries)} datasets, streamed into rows of up to {length:,} tokens"
    else:
        assert isinstance(plan, DataPlan), "plan_steps returns a DataPlan for packed documents"
        receipt = data.train.receipt(plan)
        packed = receipt.packed
        line = f"{_samples(receipt)}, {packed['tokens']:,} tokens, {packed['trained_tokens']:,} of them trained, in "
        line += f"{_rows(receipt)} of up to {length:,} tokens"
    if data.held_out is not None:
        receipt = data.held_out.receipt(None)
        line += f"; held out: {_samples(receipt)} in {_rows(receipt)}"
    return line


def _samples(receipt: Receipt) -> str:
    counts = receipt.total
    changed = [f"{number:,} {what}" for name, what in _CHANGED.items() if (number := getattr(counts, name))]
    return f"{counts.samples:,} samples ({', '.join(changed)})" * bool(changed) or f"{counts.samples:,} samples"


def _rows(receipt: Receipt) -> str:
    assert receipt.fill is not None, "the data is packed"
    return f"{receipt.num_bins:,} rows ({receipt.fill:.1%} full)"


def _steps(run: PreparedRun) -> str:
    plan = run.plan
    line = f"{plan.num_steps:,}"
    if isinstance(plan, DataPlan):
        line += f" ({plan.num_steps / plan.steps_per_epoch:.3g} epochs)"
    return f"{line} of {plan.bins_per_step:,} {'row' if plan.bins_per_step == 1 else 'rows'}"


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
    attention = attention_name(startup.architecture.config, config.model, train, startup.runtime.device)
    computed, stored = "bf16" if train.enable_mixed_precision else "fp32", train.param_dtype
    line = computed if computed == stored else f"{computed} over parameters in {stored}"
    if train.fp8 != "none":
        line += f", with {train.fp8} fp8 products"
    line += f", {attention} attention, {recomputed(train)}"
    return f"{line}, compiled" if train.enable_compile else line


def recomputed(train: TrainConfig) -> str:
    """What gradient checkpointing recomputes, in words."""
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
    points += [f"every {train.save_epochs:g} epochs"] if train.save_epochs else []
    exported = "" if not train.save_hf_weights else ", exported for transformers"
    exported = ", exported for PEFT" if exported and config.lora.save_lora_only else exported
    return f"a checkpoint {', '.join([*points, 'and at the end' if points else 'at the end'])}{exported}"
