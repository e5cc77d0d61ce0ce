"""Scores all pairs with the initial model of a run, once before the first step, and caches the scores."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from xorl.ckpt.layout import MANIFEST
from xorl.ckpt.ranks import fail_together
from xorl.config import Config
from xorl.core.models.hf_config import is_inert
from xorl.data import DataPlan
from xorl.data.batch import PackedBatch
from xorl.data.hashing import JSON, digest, hash_files
from xorl.data.pairs import ScoredPairs, crossed, document_sums
from xorl.lora.peft import CONFIG_FILE, WEIGHTS_FILE
from xorl.train.adapters.inject import starting_adapter
from xorl.train.architecture import Architecture
from xorl.train.base_weights import base_fingerprint
from xorl.train.data import PackedDocuments, build_loader
from xorl.train.model_source import MODEL_PATH
from xorl.train.preference import Preference

logger = logging.getLogger(__name__)

# In data.dataset_prepared_path. Change the version when the same model would score other values.
_FOLDER = "references"
_VERSION = 1


def with_references(
    part: PackedDocuments, preference: Preference, config: Config, architecture: Architecture
) -> PackedDocuments:
    """Pairs with the scores of the initial model, which `preference.engine` must still hold. Collective.

    Reads the scores from the cache if rank 0 finds them there. Its key covers the pairs, the weights, and the options
    that change what the model computes.
    """
    engine = preference.engine
    num_pairs, folder = len(part.documents), Path(config.data.dataset_prepared_path) / _FOLDER
    is_main, path = dist.get_rank() == 0, folder
    found = torch.zeros(1 + 3 * num_pairs, dtype=torch.float64, device=engine.device)
    with fail_together("read the scores of the reference model"):
        if is_main:
            # In another bin, an answer has other neighbours, which only `crossed` combines.
            bins = part.bins.digest if preference.loss.needs_baseline else None
            key = digest("reference", _VERSION, part.documents.fingerprint, bins, _identity(config, architecture))
            path = folder / f"{key}.npy"
            if path.is_file():
                found[0] = 1
                found[1:] = torch.from_numpy(np.load(path, allow_pickle=False).reshape(-1))
    dist.broadcast(found, 0)
    if found[0]:
        logger.info("reference model: %d pairs were scored before, in %s", num_pairs, path)
        return replace(part, scored=ScoredPairs(part.documents, found[1:].view(-1, 3).cpu().numpy()))
    logger.info("reference model: scoring %d pairs", num_pairs)
    scores = _score(part, preference, config, architecture)
    with fail_together("keep the scores of the reference model"):
        if is_main:
            _write(path, scores)
    return replace(part, scored=ScoredPairs(part.documents, scores))


@torch.no_grad()
def _score(part: PackedDocuments, preference: Preference, config: Config, architecture: Architecture) -> np.ndarray:
    """[N, 3], as in `ScoredPairs`. Every rank needs them, and has scored some."""
    engine, mesh = preference.engine, preference.engine.model.mesh
    plan = DataPlan.one_pass(part.documents, part.bins, bins_per_step=config.train.micro_batch_size * mesh.data.size)
    loader = build_loader(config, part, plan, mesh, architecture)
    scores = torch.zeros(len(part.documents), 3, dtype=torch.float64, device=engine.device)

    def of_documents(batch: PackedBatch) -> torch.Tensor:
        return document_sums(preference.score(batch), batch)

    for step, batches in loader.steps():
        for batch, bins in zip(batches, loader.bins_of_micro_batches(step), strict=True):
            members = np.concatenate([part.bins.documents(index) for index in bins]) if len(bins) else np.empty(0, int)
            sums = of_documents(batch)[: 2 * batch.num_pairs]
            index = torch.from_numpy(members).to(engine.device)
            scores[index, :2] = sums.view(-1, 2)
            if preference.loss.needs_baseline:
                of_crossed = of_documents(crossed(batch, preference.pad_to_multiple_of))
                if batch.num_pairs > 1:
                    scores[index, 2] = of_crossed[: batch.num_pairs]
    dist.all_reduce(scores, group=mesh.data.group)
    return scores.cpu().numpy()


def _write(path: Path, scores: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".tmp-{os.getpid()}.npy")
    np.save(temporary, scores, allow_pickle=False)
    temporary.replace(path)


def _identity(config: Config, architecture: Architecture) -> JSON:
    """Everything that determines the initial model and how it computes."""
    model, train, lora = config.model, config.train, config.lora
    weights: JSON = train.seed
    if model.model_path is not None:
        manifest = Path(model.model_path) / MANIFEST
        is_checkpoint = train.load_weights_mode == "dcp"
        weights = hash_files([manifest])[0] if is_checkpoint else base_fingerprint(MODEL_PATH, model.model_path)
    adapter = starting_adapter(lora, architecture.spec)
    hf_config = {key: value for key, value in architecture.hf_config.items() if not is_inert(key)}
    return {
        "model": model.model_dump(),
        "hf_config": cast(JSON, hf_config),
        "weights": weights,
        "lora": lora.model_dump() if lora.enable_lora else None,
        "adapter": None
        if adapter is None
        else hash_files([adapter.folder / each for each in (CONFIG_FILE, WEIGHTS_FILE)]),
        "train": {name: getattr(train, name) for name in ("enable_mixed_precision", "param_dtype", "fp8", "loss")},
    }
