"""Writes the model in Hugging Face's format for other tools: with its adapters merged in, or these alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from xorl.ckpt import CARD_FILE, WeightRecipe, agreed, export_hf, published, this_rank, write_file
from xorl.core.models import ModelSpec
from xorl.core.parallel import ParallelModel
from xorl.lora import QUANTIZATION_KEY
from xorl.lora.peft import AdapterConfig
from xorl.train.adapters.files import AdapterFiles
from xorl.train.architecture import Architecture
from xorl.train.export.card import adapter_facts, model_card
from xorl.train.export.hf_weights import WholeWeights


@dataclass(frozen=True)
class ModelExport:
    """Everything that an export needs: the placed model, how its weights are named elsewhere, and what it is.

    Attributes:
        dtype: that of the weights; None keeps what the parameters have, and fp32 for quantised ones.
        adapters: those of the model, or one of a bank, that are folded in; None where there are none.
    """

    model: ParallelModel
    recipes: Mapping[str, WeightRecipe]
    architecture: Architecture
    dtype: torch.dtype | None
    adapters: AdapterFiles | None

    def write(self, folder: Path) -> None:
        """Write safetensors, config and tokenizer files to a new `folder`; collective. Adapters are folded in."""
        # What an evaluation left gathered is rounded to the compute dtype, or in fp8 and not in the parameter at all.
        self.model.drop_gathered()
        found = None if self.adapters is None else self.adapters.found
        weights = WholeWeights(self.model.module, self.recipes, self.dtype, found)
        export_hf(
            weights.params,
            self.recipes,
            folder,
            hf_config={key: value for key, value in self.architecture.hf_config.items() if key != QUANTIZATION_KEY},
            dtype=self.dtype,
            tokenizer_folder=self.architecture.tokenizer_folder,
            chat_template=self.architecture.chat_template,
            model_card=None if self.adapters is None else self._card(self.adapters.config),
            whole=weights.whole,
        )

    def _card(self, config: AdapterConfig) -> str:
        folded = {"adapter": "folded in, in fp32, and rounded once"}
        facts = {"architecture": self.architecture.spec.architecture, **adapter_facts(config.spec), **folded}
        return model_card("Model", base=config.base, is_adapter=False, facts=facts, verified=None)


@dataclass(frozen=True)
class AdapterExport:
    """An export of the adapters alone."""

    files: AdapterFiles
    spec: ModelSpec

    def write(self, folder: Path) -> None:
        """Write the adapters' files and a README.md to a new `folder`; collective."""
        with published(folder) as temporary:
            self.files.write(temporary)
            config = self.files.config
            facts = {"architecture": self.spec.architecture, **adapter_facts(config.spec)}
            with agreed(f"export to {folder}"):
                if this_rank() == 0:
                    card = model_card("Adapter", base=config.base, is_adapter=True, facts=facts, verified=None)
                    write_file(temporary / CARD_FILE, card.encode())
