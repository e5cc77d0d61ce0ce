"""Exports a placed model: in Hugging Face format with its adapters merged in, or the adapters alone."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from xorl.ckpt import CheckpointError, SafetensorsSource, WeightRecipe, export_hf
from xorl.ckpt.export import CARD_FILE, GENERATION_FILE, published
from xorl.ckpt.files import write_file
from xorl.ckpt.ranks import fail_together, this_rank
from xorl.core.models import ModelSpec
from xorl.core.parallel import ParallelModel
from xorl.lora.peft import WEIGHTS_FILE, AdapterConfig
from xorl.lora.prequantized import QUANTIZATION_KEY
from xorl.train.adapters.files import AdapterFiles
from xorl.train.adapters.folder import is_adapter
from xorl.train.architecture import Architecture
from xorl.train.export.card import MERGED_ADAPTER, adapter_facts, auto_class, model_card, reader_names
from xorl.train.export.hf_weights import ExportWeights
from xorl.train.export.rest import Rest

logger = logging.getLogger(__name__)

# The exported model is beside its checkpoint, which is never written into again.
EXPORT = "-export"


@dataclass(frozen=True)
class ModelExport:
    """Exports a model with its adapters merged in.

    Attributes:
        recipes: how native weights map to the names in the file.
        dtype: of the exported weights; None keeps each parameter's dtype, and uses fp32 for quantised weights.
        adapters: the model's adapters, or one of an adapter bank, to merge in; None for a model without adapters.
        rest: what is taken from the folder of the base weights.
    """

    model: ParallelModel
    recipes: Mapping[str, WeightRecipe]
    architecture: Architecture
    dtype: torch.dtype | None
    adapters: AdapterFiles | None
    rest: Rest

    @property
    def readers(self) -> str:
        """The program that opens the folder."""
        return f"transformers' {auto_class(self.architecture.spec)}.from_pretrained"

    def write(self, folder: Path) -> None:
        """Write safetensors, config and tokenizer files to a new `folder`; collective."""
        # Parameters that an evaluation left gathered are rounded to the compute dtype, or exist in fp8 only.
        self.model.drop_gathered()
        adapters = None if self.adapters is None else self.adapters.by_layer
        weights = ExportWeights(self.model, self.recipes, self.dtype, adapters)
        with self.rest.groups() as copied:
            export_hf(
                weights.params,
                self.recipes,
                folder,
                hf_config={key: value for key, value in self.architecture.hf_config.items() if key != QUANTIZATION_KEY},
                dtype=self.dtype,
                generation_config=self.architecture.generation,
                tokenizer_folder=self.architecture.tokenizer_folder,
                chat_template=self.architecture.chat_template,
                model_card=None if self.adapters is None else self._card(self.adapters.config),
                gather=weights.gather,
                rename=self.rest.in_file,
                arrange=self.rest.arrange,
                copied=copied,
                processor_files=self.architecture.processor_files(),
            )

    def _card(self, config: AdapterConfig) -> str:
        merged = {"adapter": MERGED_ADAPTER}
        facts = {**adapter_facts(config.spec), **merged}
        return model_card("Model", self.architecture.spec, base=config.base, facts=facts, verified=None)


@dataclass(frozen=True)
class AdapterExport:
    """Exports the adapters alone, in PEFT format."""

    files: AdapterFiles
    spec: ModelSpec

    @property
    def readers(self) -> str:
        """The names of the programs that read the folder."""
        return reader_names(self.files.readers)

    def write(self, folder: Path) -> None:
        """Write the adapter files and a README.md to a new `folder`; collective."""
        with published(folder) as temporary:
            self.files.write(temporary)
            config = self.files.config
            with fail_together(f"export to {folder}"):
                if this_rank() == 0:
                    card = model_card(
                        "Adapter",
                        self.spec,
                        base=config.base,
                        facts=adapter_facts(config.spec),
                        verified=None,
                        readers=self.files.readers,
                        own_generation=GENERATION_FILE in self.files.others,
                    )
                    write_file(temporary / CARD_FILE, card.encode())


def export_folder(checkpoint: Path) -> Path:
    """The folder of the model that a run exports at its end."""
    return checkpoint.with_name(f"{checkpoint.name}{EXPORT}")


def is_complete_export(folder: Path) -> bool:
    """Whether an exported model or adapter exists, with all its weight files."""
    try:
        options = {"single_file": WEIGHTS_FILE} if is_adapter(folder) else {}
        SafetensorsSource(folder, **options).close()
    except CheckpointError:
        return False
    return True


def export_once(
    exports: Mapping[Path, ModelExport | AdapterExport | None],
    is_current: Callable[[Path], bool],
    *,
    aside: str,
    why: str,
) -> None:
    """Write each export to its folder, unless it is there already. Collective.

    A folder that `is_current` does not accept is renamed first, so that no file is lost: its new name has `aside` in
    it, and a warning says `why`. Where the export is None, that is all.
    """
    with fail_together("set former exports aside"):
        for folder, export in exports.items() if this_rank() == 0 else ():
            if folder.exists() and not is_current(folder):
                former = Path(tempfile.mkdtemp(prefix=f"{folder.name}_{aside}_", dir=folder.parent))
                folder.rename(former)
                again = "" if export is None else " and exported again"
                logger.warning("export=%s %s; renamed to %s%s", folder, why, former, again)
    for folder, export in exports.items():
        if export is not None and not folder.exists():
            export.write(folder)
