"""The model in Hugging Face's format, for every other tool: with its adapters folded in, or these alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from xorl.ckpt import CARD_FILE, WeightRecipe, agreed, export_hf, published, this_rank, write_file
from xorl.core.models import ModelSpec
from xorl.core.parallel import ParallelModel
from xorl.lora import adapters, base_parameters, merged_rows
from xorl.train.adapter_files import AdapterFiles
from xorl.train.model_card import adapter_facts, model_card


@dataclass(frozen=True)
class ModelExport:
    """Everything that an export needs: the placed model, how its weights are named elsewhere, config and tokenizer."""

    model: ParallelModel
    recipes: Mapping[str, WeightRecipe]
    hf_config: Mapping[str, object]
    tokenizer_folder: Path | None
    dtype: torch.dtype | None

    def write(self, folder: Path) -> None:
        """Write safetensors, config and tokenizer files to a new `folder`; collective. Adapters are folded in."""
        # What an evaluation left gathered is rounded to the compute dtype, or in fp8 and not in the parameter at all.
        self.model.drop_gathered()
        module = self.model.module
        weights = base_parameters(module)
        adapted = {f"{adapter.path}.weight": adapter.layer for adapter in adapters(module).values()}

        def whole(name: str) -> Tensor:
            weight: Tensor = weights[name]
            # Made when it is written, so that there is never more than one weight beside the model.
            values = merged_rows(adapted[name]) if name in adapted else weight.detach()
            if not isinstance(weight, DTensor):
                return values
            if not isinstance(values, DTensor):
                shape, stride = weight.shape, weight.stride()
                values = DTensor.from_local(values, weight.device_mesh, weight.placements, shape=shape, stride=stride)
            return values.full_tensor()

        export_hf(
            weights,
            self.recipes,
            folder,
            hf_config=self.hf_config,
            dtype=self.dtype,
            tokenizer_folder=self.tokenizer_folder,
            whole=whole,
        )


@dataclass(frozen=True)
class AdapterExport:
    """An export of the adapters alone."""

    files: AdapterFiles
    spec: ModelSpec

    def write(self, folder: Path) -> None:
        """Write PEFT's files and a README.md to a new `folder`; collective."""
        with published(folder) as temporary:
            self.files.write(temporary)
            config = self.files.config
            facts = {"architecture": self.spec.architecture, **adapter_facts(config.spec)}
            with agreed(f"export to {folder}"):
                if this_rank() == 0:
                    card = model_card("Adapter", base=config.base, is_adapter=True, facts=facts, verified=None)
                    write_file(temporary / CARD_FILE, card.encode())
