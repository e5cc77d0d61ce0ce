"""Saves a model's adapters as a folder in PEFT's format, and loads such a folder into a model."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from xorl.core.models.stacks import ExpertNames
from xorl.core.shards import copy_shard_, is_dtensor
from xorl.lora.arguments import check_instance
from xorl.lora.experts import ExpertLowRank
from xorl.lora.inject import Adapter, adapter_parameters, adapters, base_parameters, inject, remove_
from xorl.lora.merge import full_tensor
from xorl.lora.peft.config import CONFIG_FILE, AdapterConfig, ExpertForm, TaskType
from xorl.lora.peft.fit import missing
from xorl.lora.peft.layout import PREFIX, WEIGHTS_FILE, AdapterLayout, InMemoryTensors, ReplacedTensors, read_layout
from xorl.lora.peft.model import adapter_tensors, check_fit, config_of, load_adapters
from xorl.lora.peft.views import per_expert
from xorl.lora.spec import AdapterSpec
from xorl.lora.targets import modules_to_save, sites_of, whole_modules, without_wrappers


@torch.no_grad()
def save_adapter(
    model: nn.Module,
    spec: AdapterSpec,
    folder: Path | str,
    *,
    base: str | None = None,
    task_type: TaskType | None = "CAUSAL_LM",
    transposed: Collection[str] = (),
    found: Mapping[str, Adapter] | None = None,
    form: ExpertForm | None = None,
) -> None:
    """Write the adapters in `model`, and the modules that `spec` trains whole, as a folder that PEFT reads.

    Arguments are those of `config_of`; the weights of `transposed` modules are stored as [in, out]. On a sharded model
    it is collective, and rank 0 writes; parameters that an evaluation left gathered must be resharded before.

    Raises ValueError as `config_of` does, if the model's experts are divided among ranks, and if other parameters than
    those that `spec` names are trained.
    """
    config = config_of(model, spec, base=base, task_type=task_type, transposed=transposed, found=found, form=form)
    written = adapters(model) if found is None else found
    if any(isinstance(adapter.pair, ExpertLowRank) and adapter.pair.shares for adapter in written.values()):
        raise ValueError("model: its experts are divided among ranks; gather their adapters with adapter_tensors")
    saved = _saved_tensors(model, spec)
    saved_ids = {id(tensor) for tensor in saved.values()}
    for name, parameter in base_parameters(model).items() if found is None else ():
        if parameter.requires_grad and id(parameter) not in saved_ids:
            raise ValueError(f"spec: {name} is trained, but modules_to_save does not name its module")
    tensors: dict[str, Tensor] = {}
    for group in adapter_tensors(model, written, form=config.form):
        tensors |= {name: tensor.detach() for name, tensor in group.make().items()}
    for name, tensor in saved.items():
        whole = full_tensor(tensor.detach())
        is_transposed = name.rpartition(".")[0] in transposed and whole.dim() == 2
        tensors[f"{PREFIX}{name}"] = whole.t() if is_transposed else whole
    if any(is_dtensor(parameter) for parameter in model.parameters()) and dist.get_rank() != 0:
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Copies, because safetensors refuses tensors that share memory.
    copies = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(copies, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config.to_json(), indent=2) + "\n", encoding="utf-8")


def _saved_tensors(model: nn.Module, spec: AdapterSpec) -> dict[str, Tensor]:
    """The parameters and buffers of the modules that are trained whole, without adapters, by checkpoint name."""
    of_adapters = {id(parameter) for parameter in adapter_parameters(model).values()}
    return {
        f"{name}.{without_wrappers(leaf)}": tensor
        for name, module in modules_to_save(spec, model).items()
        for leaf, tensor in module.state_dict(keep_vars=True).items()
        if id(tensor) not in of_adapters
    }


@torch.no_grad()
def load_adapter(
    model: nn.Module,
    folder: Path | str,
    *,
    transposed: Collection[str] = (),
    expert_names: ExpertNames | None = None,
) -> AdapterSpec:
    """Load a folder in PEFT's format into `model`, whole or sharded: adapters and tensors of the base.

    A model without adapters gets those of the file by `inject` with the spec of the file; the base's weights must be
    loaded first. `transposed` is as for `save_adapter`, and `expert_names` as `names` for `per_expert`.

    Returns the spec of the file.

    Raises ValueError, before anything is changed, if the folder holds no adapter, or one that does not fit the model,
    or if the model has parameters on the meta device.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} has parameters on the meta device: give them memory first")
    folder = Path(folder)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"folder: {folder} holds no adapter in PEFT's format: it has no {name}")
    try:
        content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        check_instance(CONFIG_FILE, content, dict)
        config, source = per_expert(
            AdapterConfig.from_json(content), InMemoryTensors(load_file(folder / WEIGHTS_FILE)), expert_names
        )
        layout = read_layout(config, source)
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"folder: {folder}: {error}") from error
    replaced = ReplacedTensors(layout, source)
    targets = _base_tensors(model, layout)
    _check_complete(model, layout, folder)
    values: dict[str, Tensor] = {}
    for name, target in targets.items():
        values[name] = replaced.read(name)
        if name.rpartition(".")[0] in transposed and values[name].dim() == 2:
            values[name] = values[name].t()
        if values[name].is_floating_point() and not target.is_floating_point():
            raise ValueError(f"{name}: the file has this tensor, and the model has quantised it; exclude its layer")
        if values[name].shape != target.shape:
            raise ValueError(f"{name}: {list(values[name].shape)} in the file, {list(target.shape)} in the model")
    if adapters(model):
        check_fit(model, layout)
    else:
        _inject_fitting(model, layout)
    # Before the adapters: DoRA's magnitudes are relative to the base.
    for name, target in targets.items():
        copy_shard_(target, values[name])
    load_adapters(model, layout, source, base_loaded=True)
    return layout.spec


def _inject_fitting(model: nn.Module, layout: AdapterLayout) -> None:
    """Inject the spec of a file. If `inject` or `check_fit` raises ValueError, `model` is as it was."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inject(model, layout.spec)
    try:
        check_fit(model, layout)
    except ValueError:
        remove_(model)
        for parameter in trained:
            parameter.requires_grad_(True)
        raise


def _check_complete(model: nn.Module, layout: AdapterLayout, folder: Path) -> None:
    """Raise ValueError if the file lacks tensors of layers or modules of `model` that the configuration names."""
    layers = [name for site in sites_of(model).values() for name in site.members or (site.name,)]
    tensors = {
        f"{name}.{without_wrappers(leaf)}".removeprefix("."): None
        for name, module in whole_modules(model).items()
        for leaf in module.state_dict()
        if ".lora_" not in leaf
    }
    if problems := missing(layout, layers, tensors):
        raise ValueError(f"folder: {folder}: the adapter is incomplete: {'; '.join(problems[:3])}")


def _base_tensors(model: nn.Module, layout: AdapterLayout) -> dict[str, Tensor]:
    """The parameters and buffers of `model` that the file replaces, by their names in checkpoints."""
    found: dict[str, Tensor] = {}
    modules = whole_modules(model)
    for name in layout.replaced:
        owner, _, leaf = name.rpartition(".")
        tensor = modules[owner].state_dict(keep_vars=True).get(leaf) if owner in modules else None
        if tensor is None:
            raise ValueError(f"{name}: the file has this tensor, and {type(model).__name__} does not have it")
        found[name] = tensor
    return found
