"""Measures packing, loading and memory: `uv run tools/bench_loading.py [packing] [loader] [stream] [memory]`.

The results are only printed; docs/records/data.md records them together with the machine.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet

from xorl.data import DataPlan, DatasetEntry, PrepareOptions, StepLoader, pack, prepare
from xorl.data.stream import StreamLoader, StreamOptions, StreamPlan, open_stream

BIN_LEN = 8192


def main() -> None:
    """Runs the named measurements, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*MEASUREMENTS, []], help="measurements [all]")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the memory measurement")
    options = parser.parse_args()
    for name in options.names or MEASUREMENTS:
        with tempfile.TemporaryDirectory() as folder:
            MEASUREMENTS[name](Path(folder), options.rows)


def chat_lengths(num: int) -> np.ndarray:
    """Lengths of conversations in tokens, [num] int64: lognormal with a median of 400, truncated to the bin."""
    lengths = np.random.default_rng(0).lognormal(np.log(400), 1.0, num)
    return np.clip(lengths, 1, BIN_LEN).astype(np.int64)


def packing(_folder: Path, _rows: int) -> None:
    """Measures the time to pack a million lengths, and the fill of the bins."""
    lengths = chat_lengths(1_000_000)
    for method in ("multipack", "sequential"):
        start = time.perf_counter()
        bins = pack(lengths, bin_len=BIN_LEN, method=method)
        took = time.perf_counter() - start
        print(f"packing method={method} documents={len(lengths)} fill={bins.fill:.4%} s={took:.2f}")


def loader(folder: Path, _rows: int) -> None:
    """Measures the tokens per second that one process loads from prepared documents."""
    documents = prepare([DatasetEntry(str(_tokenized(folder, 40_000)))], _options(folder))
    bins = pack(documents.lengths, bin_len=BIN_LEN, method="multipack")
    steps = StepLoader(documents, bins, DataPlan.over(documents, bins, bins_per_step=4), micro_batch_size=1).steps()
    _report("loader", (batch.num_tokens for _, batches in steps for batch in batches))


def stream(folder: Path, _rows: int) -> None:
    """Measures the same for a stream of tokenized rows, which also parses and packs."""
    opened = open_stream([DatasetEntry(str(_tokenized(folder, 40_000)))], StreamOptions(BIN_LEN), index_path=folder)
    plan = StreamPlan.over(opened, bins_per_step=4, max_steps=400)
    steps = StreamLoader(opened, plan, micro_batch_size=1).steps()
    counts = [(batch.num_tokens, len(batch.input_ids)) for _, batches in islice(steps, 400) for batch in batches]
    print(f"stream fill={sum(tokens for tokens, _ in counts) / (len(counts) * BIN_LEN):.4%} lanes={plan.num_lanes}")
    steps = StreamLoader(opened, plan, micro_batch_size=1).steps()
    _report("stream", (batch.num_tokens for _, batches in islice(steps, 400) for batch in batches))


def memory(folder: Path, rows: int) -> None:
    """Measures the memory for preparing, holding and reading many short rows."""
    path = folder / "rows.parquet"
    rng = np.random.default_rng(0)
    schema = pa.schema([("input_ids", pa.list_(pa.int32()))])
    with pa_parquet.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, 100_000):
            lengths = rng.integers(8, 57, min(100_000, rows - first))
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            ids = rng.integers(0, 50_000, offsets[-1], dtype=np.int32)
            writer.write_table(pa.table([pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))], schema=schema))
    print(f"memory rows={rows} source_mib={path.stat().st_size >> 20} before_mib={_anonymous_mib():.0f}")
    start = time.perf_counter()
    documents = prepare([DatasetEntry(str(path))], _options(folder))
    tokens_mib = int(documents.lengths.sum()) * 4 >> 20
    print(f"memory prepared tokens_mib={tokens_mib} s={time.perf_counter() - start:.0f} {_now()}")
    bins = pack(documents.lengths, bin_len=BIN_LEN)
    print(f"memory packed bins={len(bins)} {_now()}")
    plan = DataPlan.over(documents, bins, bins_per_step=8)
    steps = StepLoader(documents, bins, plan, micro_batch_size=1).steps()
    for part in range(4):
        num = sum(batch.num_tokens for _, batches in islice(steps, plan.num_steps // 4) for batch in batches)
        print(f"memory read part={part} tokens={num} {_now()}")


def _tokenized(folder: Path, num: int) -> Path:
    path = folder / "rows.jsonl"
    rng = np.random.default_rng(1)
    with path.open("w") as file:
        for length in chat_lengths(num):
            file.write(json.dumps({"input_ids": rng.integers(0, 50_000, length).tolist()}) + "\n")
    return path


def _options(folder: Path) -> PrepareOptions:
    return PrepareOptions(bin_len=BIN_LEN, prepared_path=folder / "prepared", shuffle_before_merging=False)


def _report(name: str, counts: Iterable[int]) -> None:
    start, cpu = time.perf_counter(), time.process_time()
    num = sum(counts)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"{name} tokens={num} million_per_s={num / wall / 1e6:.2f} million_per_cpu_s={num / cpu / 1e6:.2f}")


def _now() -> str:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"anonymous_mib={_anonymous_mib():.0f} peak_rss_mib={peak:.0f}"


def _anonymous_mib() -> float:
    """Memory of this process that is not backed by a file and cannot be reclaimed, in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


MEASUREMENTS = {"packing": packing, "loader": loader, "stream": stream, "memory": memory}

if __name__ == "__main__":
    main()
