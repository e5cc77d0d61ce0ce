"""The rest of the folder that a model's weights came from: tensors that the model does not use, which exports copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from xorl.ckpt import CheckpointError, CheckpointFailure, SafetensorsSource, WeightSource, resolve_folder
from xorl.ckpt.export import source_groups
from xorl.ckpt.layout import TensorRecord
from xorl.ckpt.ranks import fail_together
from xorl.ckpt.tensor_file import TensorGroup
from xorl.core.models import ComposedWeights
from xorl.core.models.stacks import ExpertNames, stack_of, stacked, stacked_shape
from xorl.kernels.quant import QuantScheme
from xorl.lora.prequantized import EXTRA, dequantized_source, read_quantization
from xorl.train.architecture import Architecture


@dataclass(frozen=True)
class Rest:
    """The tensors that an export takes from the folder of the weights that training started from.

    Attributes:
        architecture: the name of the model's class, for messages.
        folder: what `unused` is copied from; None if there is nothing to copy.
        unused: the names of the tensors to copy.
        in_file: returns the name in the folder of a tensor that recipes name.
        is_missing: whether there are tensors to copy, but it is not known from where.
        experts: the names of experts, in stacks if the folder or the family has them; None: the model has no experts.
        scheme: of the quantised tensors among those to copy, which exports have in bf16; None: there are none.
        of_tower: whether the folder is that of the image encoder of a composition.
    """

    architecture: str
    folder: Path | None
    unused: tuple[str, ...]
    in_file: Callable[[str], str]
    is_missing: bool
    experts: ExpertNames | None
    scheme: QuantScheme | None = None
    of_tower: bool = False

    @classmethod
    def of(cls, architecture: Architecture) -> Rest:
        """Find the rest in the folder or Hub repository `architecture.origin`.

        Raises ValueError, CheckpointError or CheckpointFailure if it cannot be read or copied.
        """
        spec, origin, of_tower = architecture.spec, architecture.origin, architecture.encoder is not None
        if architecture.encoder is not None:
            origin = architecture.encoder.origin
        experts = spec.checkpoint_names.experts if architecture.config.has_experts else None
        if origin is None or not spec.checkpoint_names.has_unused:
            # Layers that only other programs use may be left out, but a model without its other parts does not load.
            return cls(spec.architecture, None, (), str, is_missing=spec.checkpoint_names.is_part, experts=experts)
        try:
            folder = resolve_folder(origin)
            with SafetensorsSource(folder) as source:
                view = spec.checkpoint_view(architecture.config, _tower_in(source) if of_tower else source)
        except (CheckpointError, CheckpointFailure) as error:
            raise type(error)(
                f"exports of a {spec.architecture} copy tensors from {origin}, which its weights came from: {error}"
            ) from error
        quantised = [name for name in view.unused if name.endswith(EXTRA)]
        stored = read_quantization(architecture.hf_config) if quantised else None
        scheme = None if stored is None or stored.scheme.quant_format != "block_fp8" else stored.scheme
        if quantised and scheme is None:
            raise ValueError(
                f"exports of a {spec.architecture} copy tensors from {origin}, but {quantised[0]} belongs to a "
                "quantised tensor, which cannot be copied; start from the model that is not quantised"
            )
        experts = None if experts is None else view.experts
        unused = tuple(name for name in view.unused if name not in quantised)
        return cls(spec.architecture, folder, unused, view.in_source, False, experts, scheme, of_tower)

    @property
    def stacks_experts(self) -> bool:
        """Whether files stack the tensors of experts."""
        return self.experts is not None and self.experts.stack is not None

    def arrange(self, groups: Sequence[TensorGroup]) -> list[TensorGroup]:
        """The tensors of files, by the names of recipes: those of experts are stacked, if the family's files do so."""
        return in_stacks(groups, self.experts)

    def in_files(self, groups: Sequence[TensorGroup]) -> list[TensorGroup]:
        """The tensors of files, by their names there."""
        return [group.renamed(self.in_file) for group in self.arrange(groups)]

    def require(self) -> None:
        """Raise ValueError if an export would lack tensors."""
        if self.is_missing:
            raise ValueError(
                f"the export of a {self.architecture} needs tensors that are not trained, such as those of its vision "
                "tower. Only the folder of a whole model has them: name it in model.model_path"
            )

    @contextmanager
    def groups(self) -> Iterator[list[TensorGroup]]:
        """Yields the tensors to copy; rank 0 reads each when it is written. Collective, and so is writing them."""
        self.require()
        if self.folder is None:
            yield []
            return
        with fail_together(f"copy tensors from {self.folder}"):
            source = SafetensorsSource(self.folder)
            dense: WeightSource = _tower_in(source) if self.of_tower else source
            if self.scheme is not None:
                shapes = {name: source.shape(name) for name in self.unused}
                dense = dequantized_source(source, self.scheme, shapes, torch.bfloat16)
            groups = source_groups(dense, names=self.unused)
        with source:
            yield [TensorGroup(group.records, partial(self._make, group)) for group in groups]

    def _make(self, group: TensorGroup) -> Mapping[str, Tensor]:
        with fail_together(f"copy tensors from {self.folder}"):
            return group.make()


def _tower_in(source: WeightSource) -> ComposedWeights:
    weights = ComposedWeights()
    weights.add_tower(source)
    return weights


def in_stacks(groups: Sequence[TensorGroup], experts: ExpertNames | None) -> list[TensorGroup]:
    """Tensors by the names of recipes, with those of experts in the stacks of their family, if it has any.

    groups: each has tensors of one stack, or of none.
    """
    if experts is None or experts.stack is None:
        return list(groups)
    members: dict[str, list[TensorGroup]] = {}
    for group in groups:
        names = {stack_of(name, experts) for name in group.records}
        first = names.pop() if names.isdisjoint(group.records) else next(iter(group.records))
        members.setdefault(first, []).append(group)
    return [_stack(name, found, experts) for name, found in members.items()]


def _stack(name: str, groups: Sequence[TensorGroup], experts: ExpertNames) -> TensorGroup:
    if name in groups[0].records:
        return groups[0]
    records = [record for group in groups for record in group.records.values()]
    shape = stacked_shape(records[0].shape, len(records), name, experts)

    def make() -> Mapping[str, Tensor]:
        tensors = {key: tensor for group in groups for key, tensor in group.make().items()}
        return {name: stacked(name, tensors, experts)} if tensors else {}  # none on ranks other than 0

    return TensorGroup({name: TensorRecord(shape, records[0].dtype)}, make)
