"""`xorl bench`: measures the training speed of a configuration or a known model shape, and compares other trainers.

Ranks are started like those of `xorl train`. The configuration is validated before torch is imported.
"""

import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, get_args

import typer

from xorl.cli.arguments import OverridesCommand, expand_home, run_module
from xorl.cli.bench_config import Documents, SyntheticRun, fixed_overrides, shapes, write_config
from xorl.cli.launch import LaunchFlags, launch, plan_launch
from xorl.cli.rank import RankEnvironment, run_alone, run_rank
from xorl.cli.train import TracebackFlag, let_idle_threads_sleep, num_gpus
from xorl.config import LoadedConfig, load_config
from xorl.config.conflicts import check_world_size
from xorl.host.imports import import_torch

MODULE = "xorl.cli.bench"
DocumentsOption = Annotated[
    str, typer.Option(help="With --model: single (one document per bin) or packed (256 to 4096 tokens each).")
]
OutputOption = Annotated[
    Path | None, typer.Option(callback=expand_home, help="Folder for results. [outputs/bench/NAME_TIME]")
]
AgainstOption = Annotated[
    list[str] | None,
    typer.Option(metavar="OPTIONS", help='Also measure xorl with these options, such as "train.enable_compile=false".'),
]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Flags:
    """The flags that ranks get along with the configuration."""

    output: Path
    steps: int
    warmup: int
    rounds: int
    peers: str
    against: tuple[str, ...]
    profile: bool
    record: Path | None
    name: str
    command: str
    started_at: float

    @property
    def num_steps(self) -> int:
        """Number of steps per build."""
        return self.warmup + self.steps + self.profile

    def arguments(self) -> list[str]:
        """The flags as command-line arguments for a rank."""
        given: list[str] = []
        for field in fields(self):
            flag, value = f"--{field.name.replace('_', '-')}", getattr(self, field.name)
            if isinstance(value, bool):
                given += [flag] if value else []
            elif value is not None:
                values = value if isinstance(value, tuple) else (value,)
                given += [part for each in values for part in (flag, str(each))]
        return given


@app.command(name="bench", cls=OverridesCommand)
def bench_command(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file of a run, or --model.")] = None,
    model: Annotated[str | None, typer.Option(help=f"Known shape with random weights: {', '.join(shapes())}.")] = None,
    seq: Annotated[int, typer.Option(help="With --model: tokens per bin.")] = 8192,
    documents: DocumentsOption = "single",
    micro_batch_size: Annotated[int, typer.Option(help="With --model: bins per micro-batch.")] = 1,
    tokens_per_step: Annotated[
        int | None, typer.Option(help="With --model: tokens per step over all ranks. [one micro-batch per rank]")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps per build.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Warm-up steps before them.")] = 5,
    rounds: Annotated[int | None, typer.Option(min=1, help="Builds of each, alternating. [3 to compare, or 1]")] = None,
    peers: Annotated[
        str, typer.Option(help="Comma-separated trainers: transformers[-liger][-fa4][-compile][-autocast][-grouped].")
    ] = "",
    against: AgainstOption = None,
    output: OutputOption = None,
    record: Annotated[Path | None, typer.Option(callback=expand_home, help="Markdown file to append to.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Profile one more step: its kernels and gaps.")] = False,
    nproc_per_node: Annotated[int | None, typer.Option(help="Ranks on this machine. [one per GPU, else 1]")] = None,
    traceback: TracebackFlag = False,
    name: Annotated[str, typer.Option(hidden=True)] = "",
    command: Annotated[str, typer.Option(hidden=True)] = "",
    started_at: Annotated[float | None, typer.Option(hidden=True)] = None,
    rank_folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train for some steps and report tokens/s, MFU, memory, the time of each phase, and the startup time.

    Results are printed and written to bench.json and bench.md. Nothing is saved, exported or evaluated. Options of the
    configuration can be overridden: --train.enable_compile true.
    """
    overrides: tuple[str, ...] = tuple(ctx.obj)
    let_idle_threads_sleep()
    environment = RankEnvironment.read()

    def flags_for(name: str) -> Flags:
        folder = output or Path("outputs") / "bench" / f"{name}_{time.strftime('%Y%m%d_%H%M%S')}"
        typed = command or shlex.join(["xorl", "bench", *_typed_arguments()])
        start_time = _process_start() if started_at is None else started_at
        others = tuple(against or ())
        num_rounds = rounds or (3 if peers or others else 1)
        return Flags(folder, steps, warmup, num_rounds, peers, others, profile, record, name, typed, start_time)

    def start() -> int:
        if (config is None) == (model is None):
            raise ValueError("expected either a configuration file or --model SHAPE")
        if documents not in get_args(Documents):
            raise ValueError(f"--documents {documents}: expected one of {', '.join(get_args(Documents))}")
        if config is not None:
            return _start(config, overrides, flags_for(config.stem), nproc_per_node, with_traceback=traceback)
        assert model is not None
        flags = flags_for(f"{model}_{seq}_{documents}")
        gpus = num_gpus()
        run = SyntheticRun(
            model=model,
            seq=seq,
            documents="packed" if documents == "packed" else "single",
            micro_batch_size=micro_batch_size,
            tokens_per_step=tokens_per_step,
            num_ranks=nproc_per_node or max(gpus, 1),
            num_steps=flags.num_steps,
            on_gpu=gpus > 0,
        )
        return _start(_write(run, overrides, flags), overrides, flags, nproc_per_node, with_traceback=traceback)

    if environment is None:
        code = run_alone(start, with_traceback=traceback)
    else:
        assert config is not None, "ranks are started with a configuration file"
        path, flags = config, flags_for(name)
        code = run_rank(
            lambda: _bench(path, overrides, flags),
            environment,
            folder=rank_folder,
            with_traceback=traceback,
        )
    raise typer.Exit(code)


def _write(run: SyntheticRun, overrides: tuple[str, ...], flags: Flags) -> Path:
    """Writes the configuration of a run; the overrides say how many ranks read the same data."""
    without_data = replace(run, documents="single", tokens_per_step=None)
    train = _load(write_config(without_data, flags.output), overrides, flags)[""].config.train
    num_sharing = math.prod(train.model_parallel_sizes.values())
    return write_config(replace(run, num_sharing=num_sharing), flags.output)


def _start(
    path: Path, overrides: tuple[str, ...], flags: Flags, nproc_per_node: int | None, *, with_traceback: bool
) -> int:
    """Launches the ranks, or runs a single one in this process."""
    loaded = _load(path, overrides, flags)[""]
    is_single_process = loaded.config.train.data_parallel_mode == "none"
    # A single rank needs no launcher, even if --nproc-per-node 1 was given.
    nproc = None if nproc_per_node == 1 and (is_single_process or num_gpus() < 2) else nproc_per_node
    plan = plan_launch(LaunchFlags(nproc), num_gpus=num_gpus(), is_single_process=is_single_process)
    with loaded.citing():
        check_world_size(loaded.config, plan.world_size if plan else 1)
    if plan is None:
        return _bench(path, overrides, flags)
    arguments = [str(path), *overrides, *flags.arguments(), *(["--traceback"] if with_traceback else [])]
    print(f"launching: {plan.torchrun_line(arguments, module=MODULE)}", file=sys.stderr, flush=True)
    return launch(plan, ["-m", MODULE, *arguments])


def _load(path: Path, overrides: tuple[str, ...], flags: Flags) -> dict[str, LoadedConfig]:
    """Returns the configuration to measure under the key "", and the --against ones under their options."""
    fixed = fixed_overrides(flags.num_steps)
    _refuse_others(overrides, fixed)
    given = (*overrides, *fixed)
    others = {text: [f"--{option}" for option in text.split()] for text in ("", *flags.against)}
    configs = {text: load_config(path, (*given, *options)) for text, options in others.items()}
    for loaded in configs.values():
        if loaded.config.train.enable_profiling:
            with loaded.citing():
                raise ValueError(
                    "train.enable_profiling: not available in a benchmark; set it to false and use --profile"
                )
    return configs


def _refuse_others(overrides: tuple[str, ...], fixed: Sequence[str]) -> None:
    """Raise ValueError for an override that gives an option another value than every benchmark does."""
    names = {override.partition("=")[0] for override in fixed}
    for argument, following in zip(overrides, (*overrides[1:], ""), strict=False):
        name, _, value = argument.partition("=")
        if name in names and f"{name}={value or following}" not in fixed:
            why = "nothing is saved, resumed or sent to wandb"
            if name == "--train.max_steps":
                why = "it follows from --warmup and --steps"
            raise ValueError(f"{name}: in a benchmark {why}; remove the option")


def _bench(path: Path, overrides: tuple[str, ...], flags: Flags) -> int:
    """Runs the benchmark as one rank. Imports torch."""
    configs = _load(path, overrides, flags)
    loaded = configs.pop("")
    import_torch()
    from xorl.train.bench.runner import BenchOptions, run_bench  # noqa: PLC0415

    options = BenchOptions(
        name=flags.name,
        command=flags.command,
        folder=flags.output,
        steps=flags.steps,
        warmup=flags.warmup,
        rounds=flags.rounds,
        peers=list(dict.fromkeys(peer for peer in flags.peers.split(",") if peer)),
        profile=flags.profile,
        started_at=flags.started_at,
        append_to=flags.record,
    )
    return run_bench(loaded, options, configs)


def _typed_arguments() -> list[str]:
    """The arguments after the name of the command."""
    return sys.argv[2:] if sys.argv[1:2] == ["bench"] else sys.argv[1:]


def _process_start() -> float:
    """The start time of this process, in seconds since the epoch; the current time if there is no /proc."""
    stat, uptime = Path("/proc/self/stat"), Path("/proc/uptime")
    if not stat.exists():
        return time.time()
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    age_s = float(uptime.read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


if __name__ == "__main__":
    run_module(app, MODULE)
