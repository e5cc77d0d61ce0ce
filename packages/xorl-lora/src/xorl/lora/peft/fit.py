"""Compares an adapter file with a base model: layers and shapes that do not fit, and tensors that are missing."""

from collections.abc import Iterable, Mapping, Sequence

from xorl.lora.peft.config import CONFIG_FILE
from xorl.lora.peft.forms import PARAMETERS
from xorl.lora.peft.layout import MEMBER, ROLES, AdapterLayout, expert_of
from xorl.lora.spec import matches_name

# The modules of experts in transformers 5, below their layer, of all families.
MODULES = ("mlp.experts", "experts")


def differences(layout: AdapterLayout, base_shapes: Mapping[str, Sequence[int]], *, tied: bool = False) -> list[str]:
    """List the mismatches between an adapter and a base model with tensors of these names and shapes.

    Includes the layers and tensors that the adapter's configuration names and its file lacks. `tied`: the head of the
    base uses the weight of its embedding.
    """
    problems = unnamed(layout)
    for module, adapted in layout.modules.items():
        shape = base_shapes.get(f"{module}.weight")
        wanted = (adapted.out_features, adapted.in_features)
        if adapted.kind == "embedding" or layout.config.fan_in_fan_out:
            wanted = wanted[::-1]
        if tied and (adapted.kind == "embedding" or matches_name(module, "lm_head")):
            problems.append(f"{module}: the base ties its head to its embedding, which cannot be adapted separately")
        elif shape is None:
            problems.append(f"{module}: the base does not have this layer")
        elif tuple(shape) != wanted:
            problems.append(f"{module}: the adapter is for a weight of {list(wanted)}, the base has {list(shape)}")
    for name, key in layout.replaced.items():
        shape = base_shapes.get(name)
        if shape is None and tied and matches_name(name, "lm_head.weight"):
            problems.append(f"{name}: the base ties its head to its embedding, so it has no weight of its own")
        elif shape is None:
            problems.append(f"{name}: the base does not have this tensor")
        elif tuple(shape) != layout.shapes[key]:
            problems.append(f"{name}: {list(layout.shapes[key])} in the adapter, {list(shape)} in the base")
    matrices = [name for name, shape in base_shapes.items() if len(shape) == 2 and name.endswith(".weight")]
    return problems + missing(layout, [name.removesuffix(".weight") for name in matrices], base_shapes)


def unnamed(layout: AdapterLayout) -> list[str]:
    """List the layers of an adapter's file that its configuration does not name, so that PEFT would ignore them."""
    selection = layout.config.selection
    # Experts have other names in PEFT, and are checked as parameters.
    layers = [name for name in layout.modules if not expert_of(name) and not selection.names(name)]
    layers = [name for name in layers if not any(matches_name(f"{name}.weight", one) for one in selection.parameters)]
    if not layers:
        return []
    targets = selection.targets
    shown = repr(targets) if isinstance(targets, str) else str(list(targets))
    leaves = ", ".join(sorted({f'"{name.rpartition(".")[2]}"' for name in layers}))
    is_expression = ", a regular expression for whole names," * isinstance(targets, str)
    return [
        f"{layers[0]}: the file has an adapter for this layer ({len(layers)} such layers in all), but target_modules "
        f"in {CONFIG_FILE} is {shown}{is_expression} and does not match it, so PEFT would ignore it: "
        f"list {leaves} there"
    ]


def missing(layout: AdapterLayout, layers: Iterable[str], tensors: Iterable[str]) -> list[str]:
    """List those of a base's layers and tensors that an adapter's configuration names but its file lacks.

    In files of PEFT, experts that are selected by the names of their layers only count as missing if the file has other
    experts: PEFT does not adapt them by these names if the base stacks them.
    """
    known = list(layers)
    selection = layout.config.selection
    has_experts = not selection.is_of_peft or any(expert_of(name) for name in layout.modules)
    named = [name for name in selection.of(known) if has_experts or not expert_of(name)]
    selected = dict.fromkeys([*named, *_of_parameters(selection.parameters, known)])
    absent = [name for name in selected if name not in layout.modules]
    problems = [f"{name}: {CONFIG_FILE} names this layer, but the file has no adapter for it" for name in absent]
    for name in tensors:
        owner = f".{name.rpartition('.')[0]}."
        # PEFT compares the ends of names, so `norm` is also `input_layernorm`.
        is_saved = any(f"{wanted}." in owner for wanted in layout.config.spec.modules_to_save)
        if is_saved and name not in layout.replaced:
            problems.append(f"{name}: modules_to_save in {CONFIG_FILE} names its module, but the file lacks it")
    return problems


def _of_parameters(parameters: Sequence[str], layers: Iterable[str]) -> list[str]:
    """The layers that belong to these parameters of transformers: experts, which it stacks, and routers."""
    selected: list[str] = []
    for name in layers:
        found, names = MEMBER.fullmatch(name), [f"{name}.weight"]
        if found is not None and found["leaf"] in ROLES:
            parameter = PARAMETERS[ROLES[found["leaf"]]]
            names = [f"{found['layer']}.{module}.{parameter}" for module in MODULES]
        if any(matches_name(one, wanted) for one in names for wanted in parameters):
            selected.append(name)
    return selected
