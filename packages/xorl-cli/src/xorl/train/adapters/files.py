"""Writes the adapters of a parallelized model in PEFT's format: from shards, one tensor at a time, without the base."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from xorl.ckpt import WeightRecipe
from xorl.ckpt.export import json_bytes, parameter_groups
from xorl.ckpt.files import FileRecord, write_file
from xorl.ckpt.layout import TensorRecord
from xorl.ckpt.ranks import fail_together, this_rank
from xorl.ckpt.tensor_file import TensorGroup, write_tensor_file
from xorl.core.models import Decoder
from xorl.core.models.recipes import Part
from xorl.core.parallel import ParallelModel
from xorl.lora import Adapter, AdapterSpec, adapters
from xorl.lora.inject import base_parameters
from xorl.lora.merge import magnitude
from xorl.lora.peft import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig, adapter_tensors, config_of
from xorl.lora.peft.config import ExpertForm
from xorl.lora.peft.forms import Reader, readers_of
from xorl.lora.peft.layout import PREFIX, FileTensors
from xorl.train.adapters.folder import BASE_FINGERPRINT


@dataclass(frozen=True)
class AdapterFiles:
    """Writes the adapters of a model, or one adapter of a bank, at any time during training.

    `by_layer` holds the adapters by layer name, those of other stages of a pipeline without values. `others` are
    further files by name, such as the tokenizer used in training, if it is not the base's. `base_fingerprint` is that
    of the base weights; None does not record it.
    """

    model: ParallelModel
    config: AdapterConfig
    recipes: Mapping[str, WeightRecipe]
    by_layer: Mapping[str, Adapter]
    others: Mapping[str, bytes]
    base_fingerprint: str | None

    @classmethod
    def of(
        cls,
        model: ParallelModel,
        spec: AdapterSpec,
        base: str | None,
        recipes: Mapping[str, WeightRecipe],
        bank_adapters: Mapping[str, Adapter] | None = None,
        others: Mapping[str, bytes] = MappingProxyType({}),
        form: ExpertForm | None = None,
        base_fingerprint: str | None = None,
        is_part: bool = False,
    ) -> AdapterFiles:
        """The files of adapters made by `spec` on the base model `base`: those of `model`, or the ones of a bank.

        is_part: the model is a part of a composite one, whose other modules may have the same endings.
        Raises ValueError, which begins with `form`, if that form of adapters on experts cannot express them.
        """
        by_layer = bank_adapters
        if by_layer is None:
            held = adapters(model.module)
            by_layer = {name: held.get(name, adapter) for name, adapter in adapters(model.whole).items()}
        transposed = {
            recipe.source.removesuffix(".weight")
            for recipe in recipes.values()
            if isinstance(recipe, Part) and recipe.transposed
        }
        transposed &= by_layer.keys()
        config = config_of(model.whole, spec, base=base, transposed=transposed, found=by_layer, form=form)
        if is_part:
            names = tuple(sorted(name for adapter in by_layer.values() for name in adapter.members))
            config = replace(config, spec=replace(config.spec, targets=names))
        return cls(model, config, recipes, by_layer, others, base_fingerprint)

    @property
    def readers(self) -> tuple[Reader, ...]:
        """The programs that interpret the files correctly."""
        modules = [name for adapter in self.by_layer.values() for name in adapter.members]
        base = self.model.whole
        is_mixture = isinstance(base, Decoder) and base.config.has_experts
        is_stacked = isinstance(base, Decoder) and base.stack is not None
        return readers_of(self.config, modules, is_mixture=is_mixture, is_stacked=is_stacked)

    def write(self, folder: Path) -> dict[str, FileRecord]:
        """Write PEFT's two files and the others into an existing folder. Collective.

        Rank 0 writes, and returns the records of the files; other ranks return none. The bytes do not depend on the
        number of ranks.
        """
        return self._content(self._groups()).write(folder)

    def gathered(self) -> AdapterContent:
        """The files' content in host memory on rank 0, to be written while the adapters change. Collective."""
        return self._content([_made(group) for group in self._groups()])

    def _content(self, groups: Sequence[TensorGroup]) -> AdapterContent:
        return AdapterContent(groups, self.config, self.others, header_of(self.base_fingerprint))

    def _groups(self) -> list[TensorGroup]:
        # Parameters that an evaluation left gathered are rounded to the compute dtype.
        self.model.drop_gathered()
        shares, whole = self.model.shares, self.model.whole
        own = dict(self.model.module.named_parameters())
        names: dict[Tensor, str] = {parameter: name for name, parameter in own.items()}
        paths: dict[Tensor, str] = {
            factor: adapter.path for adapter in self.by_layer.values() for factor in (adapter.A, adapter.B)
        }

        def gather(factor: Tensor) -> Tensor:
            # Those of a bank are no parameters of the model.
            return shares.from_stage(paths[factor], lambda: shares.gather(names.get(factor, ""), factor))

        def named(name: str) -> Tensor:
            return shares.from_stage(name.rpartition(".")[0], lambda: shares.gather(name, own[name]))

        def magnitude_of(adapter: Adapter) -> Tensor:
            return shares.from_stage(adapter.path, lambda: magnitude(adapter))

        written = adapter_tensors(whole, self.by_layer, gather, self.config.form, magnitude_of)
        groups = [_group(tensors) for tensors in written]
        base = trained_base_parameters(whole)
        if base:
            trained = parameter_groups(base, self.recipes, dtype=torch.float32, gather=named)
            groups += [group.renamed(PREFIX.__add__) for group in trained]
        return sorted(groups, key=lambda group: min(group.records))


@dataclass(frozen=True)
class AdapterContent:
    """The content of adapter files: the tensors, which may be gathered while they are written, and the rest."""

    groups: Sequence[TensorGroup]
    config: AdapterConfig
    others: Mapping[str, bytes]
    header: Mapping[str, str]

    @torch.no_grad()
    def write(self, folder: Path) -> dict[str, FileRecord]:
        """See `AdapterFiles.write`."""
        record = write_tensor_file(folder / WEIGHTS_FILE, self.groups, self.header)
        files: dict[str, FileRecord] = {}
        with fail_together(f"write {folder / CONFIG_FILE}"):
            if this_rank() == 0:
                assert record is not None, "rank 0 wrote the tensors"
                files = {
                    WEIGHTS_FILE: record,
                    CONFIG_FILE: write_file(folder / CONFIG_FILE, json_bytes(self.config.to_json())),
                }
                for name, content in self.others.items():
                    (folder / name).parent.mkdir(exist_ok=True)
                    files[name] = write_file(folder / name, content)
        return files


def header_of(base_fingerprint: str | None) -> dict[str, str]:
    """The header of the file with an adapter's tensors."""
    return {} if base_fingerprint is None else {BASE_FINGERPRINT: base_fingerprint}


@torch.no_grad()
def _made(group: TensorGroup) -> TensorGroup:
    """The group with copies of its tensors on rank 0. Collective."""
    tensors = group.make()
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()} if this_rank() == 0 else {}
    return TensorGroup(group.records, lambda: copies)


def adapters_writer(adapters: AdapterFiles | None, *, in_background: bool) -> Callable[[Path], dict[str, FileRecord]]:
    """Writes the adapters, if any, into a folder. Collective, and so is the function that it returns.

    In the background, no rank may gather shards over the groups that train, so this gathers them first.
    """
    if adapters is None:
        return lambda _: {}
    return adapters.gathered().write if in_background else adapters.write


def trained_base_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the base that are trained beside the adapters, by name."""
    return {name: parameter for name, parameter in base_parameters(module).items() if parameter.requires_grad}


def _group(tensors: FileTensors) -> TensorGroup:
    return TensorGroup({key: TensorRecord(shape, "float32") for key, shape in tensors.shapes.items()}, tensors.make)
