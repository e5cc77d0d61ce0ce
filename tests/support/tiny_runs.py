"""Tiny runs of `xorl train`: their rows, their configuration, and named tensors in place of what they save."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen

import torch
from torch import Tensor

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart"
BARE = {"enable_gradient_checkpointing": False, "save_hf_weights": False}


class Tensors(dict):
    """Named tensors as a part of a training state."""

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        assert state_dict.keys() == self.keys()


def write_rows(path: Path, num_rows: int) -> None:
    """Rows of random tokens and of very different lengths, whose first token is not trained."""
    generator = torch.Generator().manual_seed(3)
    with path.open("w") as file:
        for _ in range(num_rows):
            length = int(torch.randint(4, 40, (1,), generator=generator))
            ids = torch.randint(0, 64, (length,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": ids, "labels": [-100, *ids[1:]]}) + "\n")


def write_pairs(path: Path, num_rows: int) -> None:
    """Sums with a right and a wrong answer."""
    with path.open("w") as file:
        for index in range(num_rows):
            answers = {"chosen": str(index + 7), "rejected": "no" * (1 + index % 3)}
            file.write(json.dumps({"prompt": f"{index} + 7 =", **answers}) + "\n")


def write_counting_rows(path: Path, num_rows: int, *, step: int = 1, vocab_size: int = 50) -> None:
    """Rows in which each token is the one before plus `step`: a model learns them in a few steps."""
    with path.open("w") as file:
        for index in range(num_rows):
            ids = [(index + step * offset) % vocab_size for offset in range(6 + index % 7)]
            file.write(json.dumps({"input_ids": ids}) + "\n")


def metrics_of(output: Path) -> list[dict[str, float]]:
    """The records that a run has written so far."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def last_step(output: Path) -> int:
    """The newest step that a run has written in full, or 0."""
    metrics = output / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0


def wait_for_step(output: Path, step: int, *processes: Popen[str], limit_s: float = 200.0) -> None:
    """Return once a run has taken a step; fails where one of its processes ends before."""
    deadline = time.monotonic() + limit_s
    while last_step(output) < step:
        for process in processes:
            assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run_values(
    folder: Path,
    output: Path,
    *,
    model: Mapping[str, object] | None = None,
    data: Mapping[str, object] | None = None,
    lora: Mapping[str, object] | None = None,
    **train: object,
) -> dict[str, dict[str, object]]:
    """The options of a run in fp32; by default of the model in `folder`/model, on the rows in `folder`/train.jsonl."""
    return {
        "model": dict(model or {"config_path": str(folder / "model")}),
        "data": {
            "datasets": [{"path": str(folder / "train.jsonl")}],
            "dataset_prepared_path": str(folder / "prepared"),
            "sample_packing_sequence_len": 64,
            "dataloader_num_workers": 0,
            "pad_to_multiple_of": 8,
            **(data or {}),
        },
        "train": {
            "output_dir": str(output),
            "lr": 0.01,
            "enable_mixed_precision": False,
            "log_format": "structured",
            "use_wandb": False,
            **train,
        },
        "lora": dict(lora or {}),
    }


def write_run(path: Path, folder: Path, output: Path, **options: object) -> Path:
    """The file, which has the options of a run that recomputes and exports nothing."""
    path.write_text(json.dumps(run_values(folder, output, **{**BARE, **options})))
    return path


def write_quickstart_run(folder: Path, *, data: Mapping[str, object] | None = None, **train: object) -> Path:
    """`folder`/config.yaml, of a run of the quickstart's model on its held-out rows, with its output beside it."""
    path = folder / "config.yaml"
    rows = {"datasets": [{"path": str(QUICKSTART / "heldout.jsonl")}], "select_columns": ["input_ids", "labels"]}
    sizes = {"sample_packing_sequence_len": 128, "dataloader_num_workers": 1}
    model = {"config_path": str(QUICKSTART)}
    values = run_values(folder, folder / "output", model=model, data={**rows, **sizes, **(data or {})}, **train)
    path.write_text(json.dumps(values))
    return path
