"""Times loading a model's weights from the disk: xorl's ways, from_pretrained, and parallel reads of the same files.

    uv run tools/bench_base_weights.py --model FOLDER [--ranks 2] [--rounds 3] [--record docs/records/base_weights.md]

Each measurement runs in processes of its own, after the files have been dropped from the page cache (`cold`) or read
into it (`warm`). The weights stay in bf16. The seconds are those of `load_weights` on the slowest rank, and of the
whole call of from_pretrained, which may leave weights on a CPU mapped. CPU seconds are those of a rank. The host memory
is the growth of a rank's peak resident memory; on a CPU it includes the weights. A GPU is used if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BLOCK_BYTES = 16 << 20
READERS = (1, 2, 4, 8)
CACHES = ("cold", "warm")
# Returns the seconds, those of the CPU, and what must stay in memory until it is measured.
Load = Callable[[], tuple[float, float, object]]


def files_of(folder: Path) -> list[Path]:
    """The files that hold the weights."""
    return sorted(folder.glob("*.safetensors"))


def drop_from_cache(folder: Path) -> None:
    """Remove the files from the page cache, so that the next reads come from the disk."""
    for file in files_of(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)  # pages that are not written yet stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_in_parallel(folder: Path, num_threads: int) -> tuple[float, float, None]:
    """Read all files, each thread the next block, and drop what was read."""
    start, start_cpu = time.perf_counter(), time.process_time()
    blocks = ((file, offset) for file in files_of(folder) for offset in range(0, file.stat().st_size, BLOCK_BYTES))
    lock, descriptors = threading.Lock(), {file: os.open(file, os.O_RDONLY) for file in files_of(folder)}

    def read() -> None:
        buffer = bytearray(BLOCK_BYTES)
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            os.preadv(descriptors[block[0]], [buffer], block[1])

    threads = [threading.Thread(target=read) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start, time.process_time() - start_cpu, None


def load_with_xorl(folder: Path, mode: str) -> Load:
    """Build the model as a run with adapters does, and time the part that loads its base."""
    from xorl.ckpt.load import LoadReport  # noqa: PLC0415  (the reads need none of this)
    from xorl.config import config_from_mapping  # noqa: PLC0415
    from xorl.core import runtime  # noqa: PLC0415
    from xorl.core.mesh import Mesh  # noqa: PLC0415
    from xorl.train import model as xorl_model  # noqa: PLC0415
    from xorl.train.model_source import read_architecture  # noqa: PLC0415
    from xorl.train.startup import parallel_dims  # noqa: PLC0415

    place = runtime.init()
    config = config_from_mapping(
        {
            "model": {"model_path": str(folder)},
            "data": {"datasets": [{"path": "unused"}]},
            "train": {
                "output_dir": "unused",
                "load_weights_mode": mode,
                "data_parallel_mode": "fsdp2" if place.world_size > 1 else "none",
            },
            "lora": {"enable_lora": True},
        }
    ).config
    mesh = Mesh(parallel_dims(config, place.world_size), place.device.type)
    architecture = read_architecture(config.model)
    figures: list[tuple[float, float]] = []
    load_weights = xorl_model.load_weights

    def timed(*arguments: Any, **options: Any) -> LoadReport:  # noqa: ANN401
        start_cpu = time.process_time()
        report = load_weights(*arguments, **options)
        figures.append((report.seconds, time.process_time() - start_cpu))
        return report

    xorl_model.load_weights = timed

    def load() -> tuple[float, float, object]:
        model = xorl_model.build_model(architecture, config.model, config.train, config.lora, mesh, place.device)
        return *figures[0], model

    return load


def load_with_transformers(folder: Path) -> Load:
    """Load with from_pretrained."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def load() -> tuple[float, float, object]:
        start, start_cpu = time.perf_counter(), time.process_time()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=device)
        # Weights that are only mapped have not been loaded yet: read a byte of each page.
        for parameter in model.parameters():
            parameter.view(-1)[::2048].sum().item()
        return time.perf_counter() - start, time.process_time() - start_cpu, model

    return load


def measure(name: str, folder: Path) -> None:
    """Run one measurement in this process and print it as JSON; ranks other than 0 only take part."""
    kind, _, argument = name.partition(":")
    loads = {
        "read": lambda: lambda: read_in_parallel(folder, int(argument)),
        "xorl": lambda: load_with_xorl(folder, argument),
        "transformers": lambda: load_with_transformers(folder),
    }
    load = loads[kind]()
    before = peak_rss_gib()
    seconds, cpu_seconds, kept = load()
    figures = [seconds, cpu_seconds, peak_rss_gib() - before]
    if kind == "xorl":
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        slowest = torch.tensor(figures)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        figures = slowest.tolist()
    del kept
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(figures))


def peak_rss_gib() -> float:
    """The most memory that this process has had so far."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 2**20


def run(name: str, folder: Path, num_ranks: int) -> tuple[float, float, float]:
    """Measure in new processes; returns the seconds, the seconds of the CPU, and the GiB of host memory."""
    launcher = [sys.executable]
    if num_ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*launcher, __file__, "--model", str(folder), "--measure", name]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{name} failed:\n{result.stderr}")
    seconds, cpu_seconds, gib = json.loads(result.stdout.splitlines()[-1])
    return seconds, cpu_seconds, gib


def table(folder: Path, num_ranks: int, rounds: int) -> list[str]:
    """Measure all ways of loading in turns; returns the lines of a Markdown table."""
    total = sum(file.stat().st_size for file in files_of(folder))
    cases = [(f"parallel reads, {count} threads", f"read:{count}", 1) for count in READERS]
    cases += [("from_pretrained", "transformers", 1), ("xorl, 1 rank", "xorl:broadcast", 1)]
    if num_ranks > 1:
        cases += [
            (f"xorl, {num_ranks} ranks, {mode}", f"xorl:{mode}", num_ranks) for mode in ("broadcast", "all_ranks")
        ]
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for _ in range(rounds):  # in turns, so that all meet the same state of the machine
        for label, name, ranks in cases:
            for cache in CACHES:
                if cache == "cold":
                    drop_from_cache(folder)
                else:
                    read_in_parallel(folder, 1)
                found.setdefault((label, cache), []).append(run(name, folder, ranks))
                print(label, cache, found[label, cache][-1], file=sys.stderr, flush=True)
    lines = ["| load | cold, GB/s | warm, GB/s | CPU seconds | host memory, GiB |", "|---|---|---|---|---|"]
    for label, _, _ in cases:
        rates = [total / 1e9 / statistics.median(seconds for seconds, _, _ in found[label, cache]) for cache in CACHES]
        all_runs = [figures for cache in CACHES for figures in found[label, cache]]
        cpu_s, gib = statistics.median(cpu for _, cpu, _ in all_runs), max(gib for _, _, gib in all_runs)
        lines.append(f"| {label} | {rates[0]:.2f} | {rates[1]:.2f} | {cpu_s:.2f} | {gib:.2f} |")
    return [f"{total / 1e9:.2f} GB in {len(files_of(folder))} files, medians of {rounds} rounds.", "", *lines]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and append it to a record."""
    parser = argparse.ArgumentParser(description="Time loading the weights of a model.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        measure(options.measure, options.model)
        return
    lines = table(options.model, options.ranks, options.rounds)
    text = "\n".join(lines)
    print(text)
    if options.record:
        import torch  # noqa: PLC0415  (only for the names)
        import transformers  # noqa: PLC0415

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
        versions = (
            f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
        )
        command = f"uv run tools/bench_base_weights.py --model FOLDER --ranks {options.ranks} --rounds {options.rounds}"
        with options.record.open("a", encoding="utf-8") as file:
            file.write(f"\n## {device}, {datetime.now(UTC):%Y-%m-%d}\n\n    {command}\n\n{versions}. {text}\n")


if __name__ == "__main__":
    main()
