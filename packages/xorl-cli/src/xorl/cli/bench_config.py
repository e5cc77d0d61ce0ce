"""The configuration that a benchmark runs where no file gives it: a shape of `shapes/` with random weights."""

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
# Made-up tokens beyond these are read again.
MAX_TOKENS = 1 << 24
# What a benchmark leaves out of a run, whatever the file says.
LEFT_OUT = (
    "--train.save_epochs=0",
    "--train.save_hf_weights=false",
    "--train.use_wandb=false",
    "--train.load_checkpoint_path=null",
)


@dataclass(frozen=True)
class Work:
    """What is measured where no configuration file says it. tokens_per_step None: one micro-batch a rank."""

    model: str
    seq: int
    documents: Documents
    micro_batch_size: int
    tokens_per_step: int | None
    num_ranks: int
    num_steps: int
    on_gpu: bool

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in a step. Raises ValueError where tokens_per_step is no multiple of one."""
        tokens = self.seq * self.micro_batch_size * self.num_ranks
        if self.tokens_per_step is None:
            return 1
        if self.tokens_per_step % tokens or self.tokens_per_step < 1:
            raise ValueError(
                f"--tokens-per-step {self.tokens_per_step} is no multiple of {tokens}, the tokens of a micro-batch on "
                f"each rank (--seq {self.seq} x --micro-batch-size {self.micro_batch_size} x {self.num_ranks} ranks)"
            )
        return self.tokens_per_step // tokens


def shapes() -> tuple[str, ...]:
    """The names that --model takes."""
    return tuple(sorted(file.name.removesuffix(".json") for file in SHAPES.iterdir() if file.name.endswith(".json")))


def write_config(work: Work, folder: Path) -> Path:
    """Write `config.yaml`, and what it names, to `folder`: a run that needs no network, tokenizer or weights.

    Raises ValueError for a model that is not known.
    """
    if work.model not in shapes():
        raise ValueError(f"--model {work.model}: want one of {', '.join(shapes())}, or a configuration file")
    shape = json.loads((SHAPES / f"{work.model}.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    model_folder = folder / "model"
    model_folder.mkdir(exist_ok=True)
    (model_folder / "config.json").write_text(json.dumps(shape, indent=2) + "\n")
    dataset: dict[str, object] = {"path": "dummy"}
    if work.documents == "packed":
        dataset = {"path": str(_write_documents(work, shape["vocab_size"], folder)), "type": "tokenized"}
    path = folder / "config.yaml"
    # JSON is YAML.
    path.write_text(json.dumps(_mapping(work, model_folder, dataset, folder), indent=2) + "\n")
    return path


def _mapping(work: Work, model: Path, dataset: Mapping[str, object], folder: Path) -> dict[str, object]:
    return {
        "model": {"config_path": str(model)},
        "data": {
            "datasets": [dataset],
            "sample_packing_sequence_len": work.seq,
            "dataset_prepared_path": str(folder / "prepared"),
            "dataset_num_proc": 1,
            "dataloader_num_workers": 2 if work.on_gpu else 0,
        },
        "train": {
            "output_dir": str(folder),
            # One process has nothing to shard, and sharding it would copy every parameter twice a step.
            "data_parallel_mode": "fsdp2" if work.num_ranks > 1 else "none",
            "micro_batch_size": work.micro_batch_size,
            "gradient_accumulation_steps": work.accumulation,
            "optimizer": "adamw",
            "lr": 1e-5,
            "max_grad_norm": 1.0,
            "enable_mixed_precision": True,
            "param_dtype": "bf16",
            "enable_gradient_checkpointing": False,
            "enable_compile": work.on_gpu,
            "save_epochs": 0,
            "log_format": "structured",
        },
    }


def forced(num_steps: int) -> Sequence[str]:
    """The options that a benchmark sets whatever the file says, as overrides."""
    return (*LEFT_OUT, f"--train.max_steps={num_steps}")


def _write_documents(work: Work, vocab_size: int, folder: Path) -> Path:
    """Random ids in documents of uniformly drawn lengths, enough for every step unless that is very much."""
    # Both take a moment to import, and a configuration file needs neither.
    import numpy as np  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    longest = min(LONGEST, work.seq)
    if longest <= SHORTEST:
        raise ValueError(f"--documents packed has documents of {SHORTEST} tokens and more: --seq {work.seq} is too few")
    generator = np.random.default_rng(0)
    bins = work.num_steps * work.accumulation * work.micro_batch_size * work.num_ranks
    # Packing leaves some room in each bin, so that as many tokens as the bins hold fill a few more bins than needed.
    num_tokens = min(work.seq * bins, MAX_TOKENS) + 2 * work.seq
    lengths = generator.integers(SHORTEST, longest + 1, size=2 * num_tokens // (SHORTEST + longest) + 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = generator.integers(0, vocab_size, size=int(offsets[-1]), dtype=np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))})
    path = folder / "documents.parquet"
    parquet.write_table(table, path)
    return path
