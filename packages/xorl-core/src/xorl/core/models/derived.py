"""Recipes that follow from a decoder's modules and the names in a family's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from xorl.core.models.image_encoder import EncoderAttention, PatchLinear
from xorl.core.models.recipes import ENCODER, CheckpointNames, Constant, Flattened, Part, Rows, WeightRecipe, unchanged
from xorl.core.nn import Attention, GatedMLP
from xorl.core.nn.moe import ExpertLinear
from xorl.core.nn.roles import IN_FP32, DeclaresRoles, declared

# The layers that a native one stacks, in the order of their rows.
STACKED: Mapping[str, Sequence[str]] = MappingProxyType(
    {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
)


def recipes_of(model: nn.Module, names: CheckpointNames) -> dict[str, WeightRecipe]:
    """The recipe of each parameter of a decoder that has all layers and rows; it may be on the meta device."""
    table: dict[str, WeightRecipe] = {}
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}"
            if isinstance(module, ExpertLinear):
                table[name] = _expert_recipe(path, leaf, module, names)
                continue
            declaring = declared(module, DeclaresRoles)
            role = None if declaring is None else declaring.roles.get(leaf)
            if isinstance(module, PatchLinear) and leaf == "weight":
                table[name] = Flattened(f"{names.in_checkpoint(path)}.{leaf}", module.stored_shape)
            elif role == "correction":
                table[name] = _correction_recipe(path, len(parameter), names)
            elif role == "constant":
                table[name] = Constant(f"{names.in_checkpoint(path)}.{leaf}")
            elif role in IN_FP32:
                table[name] = replace(
                    unchanged(f"{names.in_checkpoint(path)}.{leaf}", (len(parameter),)), keeps_dtype=True
                )
            else:
                table[name] = _recipe(model, path, leaf, tuple(parameter.shape), names)
    return table


def _recipe(model: nn.Module, path: str, leaf: str, shape: tuple[int, ...], names: CheckpointNames) -> WeightRecipe:
    block, _, name = path.rpartition(".")
    of_block = model.get_submodule(block)
    is_encoder = path.startswith(ENCODER)
    for stack in () if is_encoder else names.stacked:
        if name in STACKED[stack]:
            earlier = STACKED[stack][: STACKED[stack].index(name)]
            first = sum(of_block.get_submodule(each).get_parameter("weight").shape[0] for each in earlier)
            source = f"{names.in_checkpoint(f'{block}.{stack}')}.{leaf}"
            return Part(source, first, shape, transposed=False, shared=True)
    if name in STACKED and not (names.names_encoder(path) if is_encoder else name in names.stacked):
        assert isinstance(of_block, (Attention, EncoderAttention, GatedMLP)), (
            f"{block}: does not say how it stacks {name}"
        )
        rows = of_block.stacked_rows[name]
        # Without a projection of values, the last one is missing.
        parts = STACKED[name][: len(rows)]
        sources = tuple(f"{names.in_checkpoint(f'{block}.{each}')}.{leaf}" for each in parts)
        return Rows(sources, tuple(rows), shape[1:])
    return unchanged(f"{names.in_checkpoint(path)}.{leaf}", shape)


def _expert_recipe(path: str, leaf: str, module: ExpertLinear, names: CheckpointNames) -> WeightRecipe:
    """Each expert has three matrices; the parameters stack all gates and ups, and all downs."""
    assert names.experts is not None, f"{path}: the family's names have no experts"
    block, _, name = path.partition(".mlp.experts.")
    layer = names.in_checkpoint(block)
    parts = (names.experts.down,) if name == "down_proj" else names.experts.ups
    sources = tuple(
        f"{layer}.{names.experts.expert.format(index)}.{part}.{leaf}"
        for index in range(module.num_experts)
        for part in parts
    )
    row_shape = (module.in_features,) if leaf == "weight" else ()
    return Rows(sources, (module.out_features // len(parts),) * len(sources), row_shape)


def _correction_recipe(path: str, num_experts: int, names: CheckpointNames) -> WeightRecipe:
    assert names.experts is not None, f"{path}: the family's names have no experts"
    layer = names.in_checkpoint(path.removesuffix(".mlp"))
    return Rows((f"{layer}.{names.experts.correction}",), (num_experts,), (), keeps_dtype=True)
