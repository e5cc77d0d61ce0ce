"""Losses of pairs give what TRL's trainers give on the same rows: tools/make_preference_golden.py wrote the results."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from placement import mesh_of
from ranks import Launch, Launches
from xorl.ckpt.reader import source_shapes
from xorl.config import Config, config_from_mapping
from xorl.core.loss import score_answers
from xorl.core.loss.preference import BASELINE, REFERENCE
from xorl.core.mesh import ParallelDims
from xorl.data.batch import PREFERENCE, Column, Document, PackedBatch, collate
from xorl.train.build import build_engine
from xorl.train.engine import Engine
from xorl.train.model_source import read_architecture
from xorl.train.preference import preference_loss

FOLDER = Path(__file__).parent / "preference"
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-5


def write_model(folder: Path, seed: int) -> Path:
    """The model with weights by the formula of the tool."""
    folder.mkdir()
    (folder / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    recipes = read_architecture(config_of(folder, {}).model).recipes(merge_qkv=True)
    tensors = {}
    for name, shape in source_shapes(recipes).items():
        index = torch.arange(int(np.prod(shape)), dtype=torch.float64)
        values = torch.sin(index * 0.7 + seed + sum(map(ord, name)) % 97).view(shape)
        tensors[name] = (1 + 0.1 * values if "norm" in name else 0.3 * values).float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def config_of(folder: Path, train: dict[str, object]) -> Config:
    has_weights = (folder / "model.safetensors").exists()
    values = {
        "model": {"config_path": str(folder), "model_path": str(folder) if has_weights else None},
        "data": {"datasets": [{"path": "a", "type": "preference" if train else "tokenized"}]},
        "train": {
            "output_dir": str(folder / "out"),
            "data_parallel_mode": "none",
            "enable_mixed_precision": False,
            "enable_gradient_checkpointing": False,
            **train,
        },
    }
    return config_from_mapping(values).config


def engine_of(config: Config) -> Engine:
    mesh = mesh_of(ParallelDims.resolve("none", 1))
    return build_engine(config, read_architecture(config.model), mesh, torch.device("cpu"))


def batch_of(rows: list[dict[str, dict[str, list[int]]]]) -> PackedBatch:
    """The rows as one packed batch with padding."""
    documents = []
    for row in rows:
        sides = [row["chosen"], row["rejected"]]
        ids, labels = (np.concatenate([np.array(side[key]) for side in sides]) for key in ("ids", "labels"))
        side = np.repeat(np.float32([1, -1]), [len(each["ids"]) for each in sides])
        documents.append(Document(ids, labels, {PREFERENCE: side}))
    return collate(documents, pad_to_multiple_of=16, columns={PREFERENCE: Column()})


Measured = tuple[float, float, float, dict[str, torch.Tensor]]


def measure(folders: list[Path], name: str) -> Measured:
    """The divisor, the loss, the norm of the gradient, and the gradients that the file keeps."""
    expected = EXPECTED[name]
    config = config_of(folders[0], expected["options"])
    loss = preference_loss(config)
    assert loss is not None
    batch = batch_of(expected["rows"])
    if loss.needs_reference:
        scored = engine_of(config_of(folders[1], {})).forward(batch, score_answers)
        assert scored is not None
        assert scored.logprobs is not None
        batch = replace(batch, targets={**batch.targets, REFERENCE: scored.logprobs})
    if loss.needs_baseline:
        values = torch.full((len(batch.input_ids),), expected["baseline"], dtype=torch.float64)
        batch = replace(batch, targets={**batch.targets, BASELINE: values})
    engine = engine_of(config)
    losses = engine.forward_backward([batch], loss)
    divisor = float(losses.divisor)
    gradients = {
        name: parameter.grad.double() / divisor
        for name, parameter in engine.model.module.named_parameters()
        if parameter.grad is not None
    }
    norm = torch.stack([each.norm() for each in gradients.values()]).norm()
    kept = {name: gradients[name].flatten() for name in expected["gradients"]}
    return divisor, float(losses.loss_sum) / divisor, float(norm), kept


@pytest.fixture(scope="module")
def found(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """By loss, with the model that TRL trained and the one that it compared with."""
    folder = tmp_path_factory.mktemp("models")
    folders = [write_model(folder / str(seed), seed) for seed in (0, 1)]
    return launch({("loss", name): (1, partial(measure, folders, name)) for name in EXPECTED})


@pytest.mark.parametrize("name", EXPECTED)
def test_losses_and_gradients_are_those_of_trl(name: str, found: Launches) -> None:
    # Catches log-probabilities over other tokens, sums in place of means, a wrong divisor, pairs in the wrong order,
    # and documents of a pack that see each other.
    expected = EXPECTED[name]
    [(divisor, loss, norm, kept)] = found("loss", name)
    assert divisor == len(expected["rows"])
    assert loss == pytest.approx(expected["loss"], rel=TOLERANCE)
    assert norm == pytest.approx(expected["grad_norm"], rel=TOLERANCE)
    for parameter, values in expected["gradients"].items():
        wanted = torch.tensor(values, dtype=torch.float64)
        assert float((kept[parameter] - wanted).norm() / wanted.norm()) < TOLERANCE, parameter
