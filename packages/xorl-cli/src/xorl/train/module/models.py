"""Models of the supported families for the trainers of this package, by folder or Hub id."""

from __future__ import annotations

import logging
from pathlib import Path

from xorl.ckpt import CheckpointError, SafetensorsSource, load_weights
from xorl.core.models import CausalLM
from xorl.train.architecture import CONFIG_PATTERNS, folder_of, read_config
from xorl.train.quantization import dense_source

logger = logging.getLogger(__name__)


def load_model(id_or_path: str | Path, *, from_scratch: bool = False, seed: int = 0) -> CausalLM:
    """The model of a Hugging Face folder or Hub repository, in fp32 on the CPU: ids [B, S] -> logits [B, S, V].

    from_scratch: only read config.json, and draw the weights from `seed`.
    Raises ValueError for a model that is missing, of an unknown family, or whose weights do not fit its config.json.
    """
    folder = folder_of("model", str(id_or_path), CONFIG_PATTERNS if from_scratch else None)
    architecture = read_config("model", folder / "config.json", folder)
    decoder = architecture.spec.build(architecture.config)
    if from_scratch:
        decoder.init_weights(seed)
        return CausalLM(decoder)
    try:
        source = architecture.spec.checkpoint_view(architecture.config, SafetensorsSource(folder))
        source = dense_source(source, architecture)
        recipes = architecture.recipes(merge_qkv=True)
        report = load_weights(dict(decoder.named_parameters()), recipes, source, mode="all_ranks")
    except (CheckpointError, ValueError) as error:
        raise type(error)(f"model: {error}") from error
    logger.info("weights=%s %s", folder, report)
    return CausalLM(decoder)
