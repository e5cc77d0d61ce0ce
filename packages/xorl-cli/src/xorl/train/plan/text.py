"""A plan as text for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from xorl.train.plan.layouts import argument
from xorl.train.plan.plan import Plan, Row
from xorl.train.plan.rates import GIB, Rates

# What takes time or memory, in words.
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "products": "matrix products",
        "elements": "norms, activations, loss",
        "exchanges": "exchanges between ranks",
        "fsdp": "gathers and reductions",
        "host": "launches by the host",
        "accumulation": "adding up gradients",
        "pipeline": "waits for other stages",
        "optimizer": "optimizer",
    }
)
SHOWN = 12
SECONDS_PER_HOUR = 3600


def as_text(plan: Plan, rates: Rates, num_gpus: int, num_tokens: float | None, *, num_shown: int = SHOWN) -> str:
    """The plan in lines: a table, then the time and memory of the configuration and of the best layout.

    num_tokens: of the run; None: not known.
    """
    lines = [f"{num_gpus} x {rates.device}; nothing was measured on them: times come from rates of the card"]
    lines += [f"the configuration cannot run on {num_gpus} GPUs: {plan.refusal}"] * (plan.refusal is not None)
    if not plan.rows:
        rows = f"the {plan.bins_per_step} rows of a step among {num_gpus} GPUs"
        change = "change train.gradient_accumulation_steps, or --gpus"
        return "\n".join([*lines, f"no layout near it divides {rows}: {change}"])
    fitting = sum(row.estimate.fits for row in plan.rows)
    shown = [*plan.rows[:num_shown], *(row for row in plan.rows[num_shown:] if row.is_configured)]
    lines += ["", *_table([_cells(row, num_tokens) for row in shown], num_tokens), ""]
    if len(plan.rows) > len(shown):
        lines.append(f"{len(plan.rows) - len(shown)} more layouts (--all); {len(plan.rows) - fitting} do not fit")
    lines.append("* the configuration; peak and usable memory of a GPU in GiB")
    best, own = plan.rows[0], plan.configured
    chosen = {"configuration": own} if own is not None else {}
    if best is not own:
        chosen["best"] = best
    for name, row in chosen.items():
        lines += ["", f"{name}: {_layout(row)}", *_parts(row)]
    if best is not own and best.estimate.fits:
        lines += ["", "options of the best:", f"  {_arguments(best, plan)}"]
    return "\n".join(lines)


def as_json(plan: Plan, rates: Rates, num_gpus: int, num_tokens: float | None) -> dict[str, object]:
    """All of the plan: seconds, bytes, options."""
    return {
        "gpu": rates.card,
        "device": rates.device,
        "gpus": num_gpus,
        "rates": dict(rates.records),
        "tokens": num_tokens,
        "refusal": plan.refusal,
        "layouts": [
            {
                "configured": row.is_configured,
                "fits": row.estimate.fits,
                "options": dict(row.candidate.options),
                "tokens_per_step": row.tokens_per_step,
                "tokens_per_s": row.tokens_per_s,
                "run_s": None if num_tokens is None else num_tokens / row.tokens_per_s,
                "step_s": row.estimate.step_s,
                "seconds": dict(row.estimate.seconds),
                "memory": dict(row.estimate.memory),
                "peak": row.estimate.peak,
                "usable": row.estimate.usable,
                "limit": {"what": row.limit[0], "share": row.limit[1]},
            }
            for row in plan.rows
        ],
    }


def _cells(row: Row, num_tokens: float | None) -> list[str]:
    what, share = row.limit
    estimate = row.estimate
    time = "" if num_tokens is None else duration(num_tokens / row.tokens_per_s)
    return [
        "*" if row.is_configured else "",
        _layout(row),
        f"{row.tokens_per_s:,.0f}" if estimate.fits else "does not fit",
        time if estimate.fits else "",
        f"{estimate.peak / GIB:.1f} of {estimate.usable / GIB:.1f}",
        f"{WORDS.get(what, what)} {share:.0%}",
    ]


def _table(rows: Sequence[Sequence[str]], num_tokens: float | None) -> list[str]:
    titles = ["", "layout", "tokens/s", "run" if num_tokens is not None else "", "peak", "limited by"]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [titles, *rows]
    ]


def _layout(row: Row) -> str:
    """The sizes of the axes, whether parameters stay gathered, the micro-batches and what is recomputed."""
    dims, train = row.candidate.dims, row.candidate.config.train
    names = {"dp_shard": "fsdp", "dp_replicate": "replicas"}
    axes = {"dp_replicate": dims.dp_replicate, "dp_shard": dims.dp_shard, "ring": dims.ring, "ulysses": dims.ulysses}
    axes |= {"tp": dims.tp, "pp": dims.pp, "ep": dims.ep}
    sizes = [f"{names.get(axis, axis)} {size}" for axis, size in axes.items() if size > 1]
    parts = [" x ".join(sizes) or "one GPU"]
    if train.data_parallel_mode == "fsdp2" and not train.enable_full_shard:
        parts.append("parameters kept gathered")
    count = train.gradient_accumulation_steps
    parts.append(f"{count} {'micro-batch' if count == 1 else 'micro-batches'} of {train.micro_batch_size}")
    if train.enable_gradient_checkpointing:
        what = "operations" if train.recompute_policy == "operation" else "layers"
        what = " and ".join(train.recompute_modules) if train.recompute_modules is not None else what
        layers = train.recompute_num_layers
        parts.append(f"recomputes {what}" + ("" if layers is None else f" in {layers}"))
    if train.enable_cuda_graphs:
        parts.append("in CUDA graphs")
    return ", ".join(parts)


def _parts(row: Row) -> list[str]:
    """Where the time of a step and the memory of a rank go."""
    estimate = row.estimate
    times = sorted(estimate.seconds.items(), key=lambda item: -item[1])
    step = ", ".join(f"{WORDS.get(name, name)} {1000 * value:,.0f}" for name, value in times)
    parts = sorted(estimate.memory.items(), key=lambda item: -item[1])
    memory = ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts)
    return [
        f"  a step of {row.tokens_per_step:,} tokens, ms: {1000 * estimate.step_s:,.0f} = {step}",
        f"  memory of a rank, GiB: {estimate.peak / GIB:.1f} = {memory}",
    ]


def _arguments(row: Row, plan: Plan) -> str:
    """The options by which the layout differs from the configuration, as arguments of a command."""
    shown = (
        argument(name, value)
        for name, value in row.candidate.options.items()
        if plan.config_value(name) != row.candidate.value(name)
    )
    return " ".join(shown)


def duration(seconds: float) -> str:
    """Hours and minutes, or days."""
    hours = seconds / SECONDS_PER_HOUR
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{seconds / 60:.0f} min"
