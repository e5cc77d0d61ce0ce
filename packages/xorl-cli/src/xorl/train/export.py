"""The model in Hugging Face's format, for every other tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from xorl.ckpt import WeightRecipe, export_hf
from xorl.core.parallel import ParallelModel


@dataclass(frozen=True)
class ModelExport:
    """Everything that an export needs: the placed model, how its weights are named elsewhere, config and tokenizer."""

    model: ParallelModel
    recipes: Mapping[str, WeightRecipe]
    hf_config: Mapping[str, object]
    tokenizer_folder: Path | None
    dtype: torch.dtype | None

    def write(self, folder: Path) -> None:
        """Write safetensors, config and tokenizer files to a new `folder`; collective."""
        # What an evaluation left gathered is rounded to the compute dtype, or in fp8 and not in the parameter at all.
        self.model.drop_gathered()
        export_hf(
            dict(self.model.module.named_parameters()),
            self.recipes,
            folder,
            hf_config=self.hf_config,
            dtype=self.dtype,
            tokenizer_folder=self.tokenizer_folder,
        )
