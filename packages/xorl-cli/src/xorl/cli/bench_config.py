"""The configuration of `xorl bench --model`: a model shape from `shapes/` with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

Documents = Literal["single", "packed"]
SHAPES = resources.files("xorl.cli") / "shapes"
# Lengths of packed documents, in tokens.
SHORTEST, LONGEST = 256, 4096
# A run that reads more tokens than this reads them repeatedly.
MAX_TOKENS = 1 << 24


@dataclass(frozen=True)
class SyntheticRun:
    """A benchmark without a configuration file.

    tokens_per_step: over all ranks; None: one micro-batch for all ranks that read the same data.
    num_sharing: the ranks that read the same data.
    """

    model: str
    seq: int
    documents: Documents
    micro_batch_size: int
    tokens_per_step: int | None
    num_ranks: int
    num_steps: int
    on_gpu: bool
    num_sharing: int = 1

    @property
    def accumulation(self) -> int:
        """Micro-batches per rank and step. Raises ValueError if they do not divide tokens_per_step."""
        num_readers = max(self.num_ranks // self.num_sharing, 1)
        tokens = self.seq * self.micro_batch_size * num_readers
        if self.tokens_per_step is None:
            return 1
        if self.tokens_per_step % tokens or self.tokens_per_step < 1:
            raise ValueError(
                f"--tokens-per-step {self.tokens_per_step} is not a multiple of {tokens}, the tokens of a micro-batch "
                f"on each rank (--seq {self.seq} x --micro-batch-size {self.micro_batch_size} x {num_readers} ranks)"
            )
        return self.tokens_per_step // tokens


def shapes() -> tuple[str, ...]:
    """The valid values of --model."""
    return tuple(sorted(file.name.removesuffix(".json") for file in SHAPES.iterdir() if file.name.endswith(".json")))


def write_config(run: SyntheticRun, folder: Path) -> Path:
    """Write `config.yaml` and the files that it refers to into `folder`.

    The run needs no network, tokenizer or weights. Raises ValueError for an unknown model.
    """
    if run.model not in shapes():
        raise ValueError(
            f"--model {run.model}: expected one of {', '.join(shapes())}; for other models, pass a configuration file"
        )
    shape = json.loads((SHAPES / f"{run.model}.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    model_folder = folder / "model"
    model_folder.mkdir(exist_ok=True)
    (model_folder / "config.json").write_text(json.dumps(shape, indent=2) + "\n")
    dataset: dict[str, object] = {"path": "dummy"}
    if run.documents == "packed":
        dataset = {"path": str(_write_random_documents(run, shape["vocab_size"], folder)), "type": "tokenized"}
    path = folder / "config.yaml"
    # JSON is YAML.
    path.write_text(json.dumps(_config_of(run, model_folder, dataset, folder), indent=2) + "\n")
    return path


def _config_of(run: SyntheticRun, model: Path, dataset: Mapping[str, object], folder: Path) -> dict[str, object]:
    return {
        "model": {"config_path": str(model)},
        "data": {
            "datasets": [dataset],
            "sample_packing_sequence_len": run.seq,
            "dataset_prepared_path": str(folder / "prepared"),
            "dataset_num_proc": 1,
            "dataloader_num_workers": 2 if run.on_gpu else 0,
        },
        "train": {
            "output_dir": str(folder),
            # Sharding over a single process would only copy every parameter twice per step.
            "data_parallel_mode": "fsdp2" if run.num_ranks > 1 else "none",
            "micro_batch_size": run.micro_batch_size,
            "gradient_accumulation_steps": run.accumulation,
            "optimizer": "adamw",
            "lr": 1e-5,
            "max_grad_norm": 1.0,
            "enable_mixed_precision": True,
            "param_dtype": "bf16",
            "enable_gradient_checkpointing": False,
            "enable_compile": run.on_gpu,
            "save_epochs": 0,
            "log_format": "structured",
        },
    }


def fixed_overrides(num_steps: int) -> Sequence[str]:
    """The overrides that every benchmark sets, regardless of the configuration."""
    return (
        "--train.save_epochs=0",
        "--train.save_hf_weights=false",
        "--train.use_wandb=false",
        "--train.load_checkpoint_path=null",
        f"--train.max_steps={num_steps}",
    )


def _write_random_documents(run: SyntheticRun, vocab_size: int, folder: Path) -> Path:
    """Writes documents of random ids and uniformly random lengths: enough for all steps, up to about MAX_TOKENS."""
    # These are slow to import and not needed with a configuration file.
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    longest = min(LONGEST, run.seq)
    if longest <= SHORTEST:
        raise ValueError(
            f"--seq {run.seq}: too short for --documents packed, whose documents have at least {SHORTEST} tokens"
        )
    generator = np.random.default_rng(0)
    bins = run.num_steps * run.accumulation * run.micro_batch_size * run.num_ranks
    # Packing leaves some room in each bin, so these tokens fill at least as many bins as needed.
    num_tokens = min(run.seq * bins, MAX_TOKENS) + 2 * run.seq
    lengths = generator.integers(SHORTEST, longest + 1, size=2 * num_tokens // (SHORTEST + longest) + 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = generator.integers(0, vocab_size, size=int(offsets[-1]), dtype=np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))})
    path = folder / "documents.parquet"
    parquet.write_table(table, path)
    return path
