"""The adapters of a placed model, written as PEFT's files: from shards, one tensor at a time, without the base."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from xorl.ckpt import (
    TEMPLATE_FILE,
    FileRecord,
    TensorGroup,
    TensorRecord,
    WeightRecipe,
    agreed,
    json_bytes,
    parameter_groups,
    this_rank,
    write_file,
    write_tensor_file,
)
from xorl.core.models.recipes import Part
from xorl.core.parallel import ParallelModel
from xorl.lora import Adapter, AdapterSpec, adapters, base_parameters
from xorl.lora.peft import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    AdapterConfig,
    FileTensor,
    adapter_tensors,
    config_of,
)


@dataclass(frozen=True)
class AdapterFiles:
    """What it takes to write adapters at any time: those of a model, or one of a bank.

    `config` says what they are, and `found` which; they may lie in the memory of a bank. `chat_template` is the one
    that they are trained with, if it is not that of their base.
    """

    model: ParallelModel
    config: AdapterConfig
    recipes: Mapping[str, WeightRecipe]
    found: Mapping[str, Adapter]
    chat_template: str | None

    @classmethod
    def of(
        cls,
        model: ParallelModel,
        spec: AdapterSpec,
        base: str | None,
        recipes: Mapping[str, WeightRecipe],
        found: Mapping[str, Adapter] | None = None,
        chat_template: str | None = None,
    ) -> AdapterFiles:
        """`spec` put the adapters there, on the base model `base`; `found` is one of a bank's."""
        found = adapters(model.module) if found is None else found
        turned = {
            recipe.source.removesuffix(".weight")
            for recipe in recipes.values()
            if isinstance(recipe, Part) and recipe.transposed
        }
        transposed = turned & found.keys()
        config = config_of(model.module, spec, base=base, transposed=transposed, found=found)
        return cls(model, config, recipes, found, chat_template)

    @torch.no_grad()
    def write(self, folder: Path) -> dict[str, FileRecord]:
        """Collective: write PEFT's two files, and the chat template if there is one, into an existing folder.

        Returns the records of what rank 0 wrote, on rank 0 alone. The bytes are the same on every number of ranks.
        """
        # What an evaluation left gathered is rounded to the compute dtype.
        self.model.drop_gathered()
        record = write_tensor_file(folder / WEIGHTS_FILE, self._groups())
        files: dict[str, FileRecord] = {}
        with agreed(f"write {folder / CONFIG_FILE}"):
            if this_rank() == 0:
                assert record is not None, "rank 0 wrote the tensors"
                files = {
                    WEIGHTS_FILE: record,
                    CONFIG_FILE: write_file(folder / CONFIG_FILE, json_bytes(self.config.to_json())),
                }
                if self.chat_template is not None:
                    files[TEMPLATE_FILE] = write_file(folder / TEMPLATE_FILE, self.chat_template.encode())
        return files

    def _groups(self) -> list[TensorGroup]:
        groups = [_group(key, tensor) for key, tensor in adapter_tensors(self.model.module, self.found).items()]
        whole = trained_whole(self.model.module)
        if whole:
            groups += [_with_prefix(group) for group in parameter_groups(whole, self.recipes, dtype=torch.float32)]
        return sorted(groups, key=lambda group: min(group.records))


def trained_whole(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the base that are trained beside the adapters, by their own names."""
    return {name: parameter for name, parameter in base_parameters(module).items() if parameter.requires_grad}


def _group(key: str, tensor: FileTensor) -> TensorGroup:
    def make() -> dict[str, Tensor]:
        return {key: tensor.make()}

    return TensorGroup({key: TensorRecord(tensor.shape, "float32")}, make)


def _with_prefix(group: TensorGroup) -> TensorGroup:
    def make(own: TensorGroup) -> dict[str, Tensor]:
        return {f"{PREFIX}{name}": tensor for name, tensor in own.make().items()}

    records = {f"{PREFIX}{name}": record for name, record in group.records.items()}
    return TensorGroup(records, functools.partial(make, group))
