"""`xorl verify config.yaml`: compares the layout of a configuration with one process, in fp32."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from xorl.cli.arguments import OverridesCommand, run_module
from xorl.cli.launch import LaunchFlags, launch, plan_launch
from xorl.cli.rank import RankEnvironment, run_alone, run_rank
from xorl.cli.train import ConfigPath, TracebackFlag, let_idle_threads_sleep, num_gpus
from xorl.config import load_config
from xorl.config.conflicts import check_world_size
from xorl.host.imports import import_torch
from xorl.host.temporary import temporary_folder

MODULE = "xorl.cli.verify"
DIFFERENT = 1
# Bins for each rank, so that every rank accumulates micro-batches.
BINS_PER_RANK = 4
# What is measured beside the layout of the configuration: one process, or (by its name) one axis of the layout alone.
LAYOUT, ONE_PROCESS = "layout", "one process"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(name="verify", cls=OverridesCommand)
def verify_command(
    ctx: typer.Context,
    config: ConfigPath,
    nproc_per_node: Annotated[int | None, typer.Option(help="Ranks on this machine. [one per GPU, else 1]")] = None,
    full: Annotated[bool, typer.Option("--full", help="Compare the whole model, not a small one of its kind.")] = False,
    traceback: TracebackFlag = False,
    rank_folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    result: Annotated[Path | None, typer.Option(hidden=True)] = None,
    variant: Annotated[str, typer.Option(hidden=True)] = LAYOUT,
    num_bins: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Verify that the layout of a configuration computes what one process computes.

    Both take three steps in fp32 from the same random weights, on the same batches. Prints the largest relative error
    of the losses, the gradient norm and all gradients, and writes certificate.json into train.output_dir. The exit code
    is 1 if they differ. If layers are recomputed, their dropout is compared with that of a run without recomputation.
    """
    overrides: tuple[str, ...] = tuple(ctx.obj)
    let_idle_threads_sleep()
    environment = RankEnvironment.read()
    job = _Job(config, overrides, num_bins, is_full=full, with_traceback=traceback)
    if environment is None:
        code = run_alone(lambda: _start(job, nproc_per_node), with_traceback=traceback)
    else:
        assert result is not None, "ranks are started with a folder"
        folder = result
        code = run_rank(lambda: job.measure(variant, folder), environment, folder=rank_folder, with_traceback=traceback)
    raise typer.Exit(code)


@dataclass(frozen=True)
class _Job:
    path: Path
    overrides: tuple[str, ...]
    num_bins: int
    is_full: bool
    with_traceback: bool

    def measure(self, variant: str, folder: Path) -> int:
        """Take the steps of this process's part of a variant. Imports torch."""
        loaded = load_config(self.path, self.overrides)
        import_torch()
        from xorl.core.runtime import world_size  # noqa: PLC0415
        from xorl.train import verify  # noqa: PLC0415

        with loaded.citing():
            verification = verify.Verification.of(loaded.config, is_full=self.is_full)
            config = verification.config
            if variant == ONE_PROCESS:
                config = verify.one_process(config)
            elif variant != LAYOUT:
                config = verify.one_axis(config, variant, world_size())
            verify.measure(config, folder, self.num_bins, verification.dropout if variant == LAYOUT else 0.0)
        return 0

    def run(self, variant: str, folder: Path, nproc: int) -> int:
        """Measure a variant on `nproc` ranks, in this process if it is one; returns an exit code."""
        plan = None if nproc == 1 else plan_launch(LaunchFlags(nproc), num_gpus=num_gpus(), is_single_process=False)
        if plan is None:
            return self.measure(variant, folder)
        flags = ["--result", str(folder), "--variant", variant, "--num-bins", str(self.num_bins)]
        flags += ["--full"] * self.is_full + ["--traceback"] * self.with_traceback
        arguments = [str(self.path), *self.overrides, *flags]
        print(f"launching: {plan.torchrun_line(arguments, module=MODULE)}", file=sys.stderr, flush=True)
        return launch(plan, ["-m", MODULE, *arguments])


def _start(job: _Job, nproc_per_node: int | None) -> int:
    loaded = load_config(job.path, job.overrides)
    is_single_process = loaded.config.train.data_parallel_mode == "none"
    plan = plan_launch(LaunchFlags(nproc_per_node), num_gpus=num_gpus(), is_single_process=is_single_process)
    nproc = plan.world_size if plan else 1
    with loaded.citing():
        check_world_size(loaded.config, nproc)
    job = _Job(job.path, job.overrides, BINS_PER_RANK * nproc, job.is_full, job.with_traceback)
    with temporary_folder() as (folder, _):
        if code := job.run(LAYOUT, folder / LAYOUT, nproc) or job.run(ONE_PROCESS, folder / ONE_PROCESS, 1):
            return code
        from xorl.train import verify  # noqa: PLC0415
        from xorl.train.checkpoints import CERTIFICATE  # noqa: PLC0415

        layout, whole = (verify.Result.read(folder / variant) for variant in (LAYOUT, ONE_PROCESS))
        verification = verify.Verification.of(loaded.config, is_full=job.is_full)
        differences = verify.compare(layout, whole)
        differing_axes: list[str] = []
        if not verify.is_equal(differences) and len(layout.sizes) > 1:
            for axis, size in layout.sizes.items():
                if code := job.run(axis, folder / axis, size):
                    return code
                if not verify.is_equal(verify.compare(verify.Result.read(folder / axis), whole)):
                    differing_axes.append(axis)
        if verification.dropout:
            dropped = (verify.Result.read(folder / LAYOUT / name) for name in (verify.RECOMPUTED, verify.KEPT))
            differences["recomputed dropout"] = verify.compare_dropout(*dropped)
    report = verify.Report(verification, layout, differences, differing_axes)
    print(report.text())
    file = Path(loaded.config.train.output_dir) / CERTIFICATE
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(report.certificate(nproc), indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)
    passed = verify.is_equal(differences)
    print(f"\n{'equal within what is allowed' if passed else 'they differ'}; certificate={file}")
    return 0 if passed else DIFFERENT


if __name__ == "__main__":
    run_module(app, MODULE)
