"""The model in Hugging Face's format, for every other tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from xorl.ckpt import WeightRecipe, export_hf
from xorl.core.parallel import ParallelModel
from xorl.lora import adapters, base_parameters, merged_rows


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
            _with_adapters_folded_in(self.model.module),
            self.recipes,
            folder,
            hf_config=self.hf_config,
            dtype=self.dtype,
            tokenizer_folder=self.tokenizer_folder,
        )


def _with_adapters_folded_in(module: nn.Module) -> dict[str, Tensor]:
    """The weights that `module` computes with, under the names of its own parameters; collective."""
    weights: dict[str, Tensor] = dict(base_parameters(module))
    for adapter in adapters(module).values():
        name, weight = f"{adapter.path}.weight", adapter.layer.weight
        if weights[name] is not weight:
            continue  # another adapter of the same layer came first
        rows = merged_rows(adapter.layer)
        if isinstance(weight, DTensor):
            shape, stride = weight.shape, weight.stride()
            rows = DTensor.from_local(rows, weight.device_mesh, weight.placements, shape=shape, stride=stride)
        weights[name] = rows
    return weights
