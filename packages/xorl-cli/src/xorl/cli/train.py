"""`xorl train config.yaml`: starts the ranks, or runs as one under `torchrun ... -m xorl.cli.train config.yaml`.

The configuration is validated before torch is imported.
"""

import faulthandler
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from xorl.cli.arguments import OverridesCommand, run_module
from xorl.cli.exit_codes import Diverged
from xorl.cli.launch import LaunchFlags, launch, plan_launch
from xorl.cli.rank import RankEnvironment, end_alone, end_rank, run_alone, run_rank
from xorl.config import LoadedConfig, load_config
from xorl.config.conflicts import check_world_size
from xorl.host.imports import import_torch

MODULE = "xorl.cli.train"
EndProcess = Callable[[BaseException], object]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
TracebackFlag = Annotated[bool, typer.Option("--traceback", help="Also show the traceback of input errors.")]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(name="train", cls=OverridesCommand)
def train_command(
    ctx: typer.Context,
    config: ConfigPath,
    nproc_per_node: Annotated[int | None, typer.Option(help="Ranks on this machine. [one per GPU, else 1]")] = None,
    nnodes: Annotated[int | None, typer.Option(help="Number of machines in the job. [1]")] = None,
    node_rank: Annotated[int | None, typer.Option(help="Index of this machine, from 0.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Address of machine 0. [127.0.0.1]")] = None,
    master_port: Annotated[int | None, typer.Option(help="Port on machine 0. [29500]")] = None,
    rdzv_backend: Annotated[str | None, typer.Option(help="Only static: see --master-addr.")] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address and port of machine 0.")
    ] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="Job id, the same on all machines. [none]")] = None,
    traceback: TracebackFlag = False,
    rank_folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train a model from a configuration, on all GPUs of this machine or on its CPU.

    Any option of the configuration can be overridden: --train.lr 2e-5. `xorl config docs` lists them.
    """
    flags = LaunchFlags(
        nproc_per_node, nnodes, node_rank, master_addr, master_port, rdzv_backend, rdzv_endpoint, rdzv_id
    )
    overrides: tuple[str, ...] = tuple(ctx.obj)
    let_idle_threads_sleep()
    environment = RankEnvironment.read()
    if environment is None:
        end: EndProcess = partial(end_alone, with_traceback=traceback)
        code = run_alone(lambda: _start(config, overrides, flags, traceback, end), with_traceback=traceback)
    else:
        end = partial(end_rank, environment=environment, folder=rank_folder, with_traceback=traceback)
        code = run_rank(
            lambda: _run_as_rank(config, overrides, flags, environment.world_size, end),
            environment,
            folder=rank_folder,
            with_traceback=traceback,
        )
    raise typer.Exit(code)


def _start(path: Path, overrides: tuple[str, ...], flags: LaunchFlags, with_traceback: bool, end: EndProcess) -> int:
    """Launches the ranks, or runs a single one in this process."""
    loaded = load_config(path, overrides)
    if flags.nproc_per_node is not None:
        with loaded.citing():
            check_world_size(loaded.config, flags.nproc_per_node * (flags.nnodes or 1))
    is_single_process = loaded.config.train.data_parallel_mode == "none"
    plan = plan_launch(flags, num_gpus=num_gpus(), is_single_process=is_single_process)
    with loaded.citing():
        check_world_size(loaded.config, plan.world_size if plan else 1)
    if plan is None:
        return _train(loaded, end)
    arguments = [str(path), *overrides, *(["--traceback"] if with_traceback else [])]
    print(f"launching: {plan.torchrun_line(arguments)}", file=sys.stderr, flush=True)
    return launch(plan, ["-m", MODULE, *arguments])


def _run_as_rank(path: Path, overrides: tuple[str, ...], flags: LaunchFlags, world_size: int, end: EndProcess) -> int:
    """Runs as one rank of a job that another launcher started."""
    if flags.given():
        raise ValueError(
            f"{', '.join(flags.given())}: not allowed in a process that a launcher started as a rank; remove it"
        )
    loaded = load_config(path, overrides)
    with loaded.citing():
        check_world_size(loaded.config, world_size)
    return _train(loaded, end)


def let_idle_threads_sleep() -> None:
    """Configures OpenMP, before torch loads it, so that idle threads sleep instead of spinning.

    Spinning threads take cores from other processes: on two busy cores the quickstart takes five times as long. Ranks
    inherit the setting; the user's own value takes precedence.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def num_gpus() -> int:
    """Returns the number of visible GPUs. Imports torch."""
    import_torch()
    import torch  # noqa: PLC0415  (slow; after validation)

    return torch.cuda.device_count()


def _train(loaded: LoadedConfig, end: EndProcess) -> int:
    """Trains as one rank; `end` is for the thread of the watchdog. Imports torch."""
    import_torch()
    from xorl.train import DivergedError, run_training  # noqa: PLC0415

    faulthandler.enable()  # prints the Python stack if native code crashes
    try:
        with loaded.citing():
            return run_training(loaded, end)
    except DivergedError as error:
        raise Diverged(str(error)) from error


if __name__ == "__main__":
    run_module(app, MODULE)
