"""`xorl export`: writes a checkpoint or an adapter as a folder for other tools; optionally merges and verifies it."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch

from xorl.ckpt import CheckpointFailure, WeightSource
from xorl.ckpt.export import CARD_FILE, json_bytes, published, source_groups, write_files, write_model
from xorl.ckpt.files import write_file
from xorl.ckpt.tensor_file import write_tensor_file
from xorl.core.models.stacks import ExpertStack
from xorl.lora.peft import CONFIG_FILE, WEIGHTS_FILE, AdapterConfig, in_form
from xorl.lora.peft.config import ExpertForm
from xorl.lora.peft.forms import Reader, readers_of
from xorl.lora.peft.layout import MadeTensors, expert_of
from xorl.train.adapters.files import header_of
from xorl.train.adapters.folder import AdapterFolder
from xorl.train.export.card import MERGED_ADAPTER, Figures, adapter_facts, model_card, texts_of
from xorl.train.export.rest import Rest
from xorl.train.export.source import SavedModel, open_saved
from xorl.train.export.verify import verify_adapter, verify_model

logger = logging.getLogger(__name__)


def export_saved(
    path: str,
    output: str | None,
    *,
    base: str | None = None,
    merge: bool = False,
    dtype: torch.dtype | None = None,
    verify: bool = False,
    form: ExpertForm | None = None,
) -> Path:
    """Export `path` to a new folder and return it. Runs in one process and holds one tensor in memory at a time.

    A checkpoint of a full model is written in Hugging Face format. An adapter, or a checkpoint with one, is written in
    PEFT format, or with `merge` as a full model: merged into the base in fp32 and rounded once to `dtype` (None: the
    base's stored dtype). `form` is that of adapters on experts; None keeps that of PATH. With `verify`, the folder only
    appears after transformers or PEFT has loaded it and its logits were compared.

    Raises ValueError for errors that the user can correct, VerificationError if the result is wrong.
    """
    if output is None and not Path(path).expanduser().is_dir():
        # The default is a folder beside PATH, which for a Hub id would be inside the Hub's cache.
        raise ValueError(f"PATH: {path} is not a local folder; to export a Hub id, name the new folder with --output")
    saved = open_saved(path, base, merge=merge)
    if merge and saved.adapter is None:
        raise ValueError(f"--merge: {saved.folder} has no adapter; remove --merge to export the model")
    as_adapter = saved.adapter is not None and not merge
    if form is not None and not as_adapter:
        raise ValueError("--moe-lora-format: only an exported adapter has a form; remove it, or --merge")
    suffix = "adapter" if as_adapter else "merged" if merge else "hf"
    folder = Path(output) if output else saved.folder.with_name(f"{saved.folder.name}-{suffix}")
    with published(folder) as temporary:
        figures, readers = None, None
        if as_adapter:
            narrowest, readers = _write_adapter(temporary, saved, dtype, form)
            if verify:
                figures = verify_adapter(temporary, saved, narrowest)
        else:
            narrowest = _write_model(temporary, saved, dtype)
            if verify:
                figures = verify_model(temporary, saved, narrowest)
        card = _card(folder.name, saved, narrowest, figures, readers)
        write_file(temporary / CARD_FILE, card.encode())
    if figures is not None:
        logger.info("verified: %s", ", ".join(f"{name}: {text}" for name, text in texts_of(figures).items()))
    logger.info("exported=%s", folder)
    return folder


def _write_adapter(
    folder: Path, saved: SavedModel, dtype: torch.dtype | None, form: ExpertForm | None
) -> tuple[torch.dtype, tuple[Reader, ...]]:
    """Write PEFT's two files, and the tokenizer and the chat template if they are not the base's.

    Returns the narrowest dtype in the files, and the programs that read them.
    """
    adapter, architecture = saved.adapter, saved.architecture
    assert adapter is not None, "the caller checked it"
    names_of_experts = architecture.spec.checkpoint_names.experts
    stack = None if names_of_experts is None else names_of_experts.stack
    config, source = _in_form(adapter, form, stack)
    names = sorted(source.names())
    dtype_of = None if dtype is None else lambda name: dtype
    groups = source_groups(source, dtype_of=dtype_of, names=names)
    write_tensor_file(folder / WEIGHTS_FILE, groups, header_of(adapter.base_fingerprint))
    config = replace(config, base=saved.base_path or adapter.base)
    has_experts = any(expert_of(name) for name in adapter.layout.modules)
    if not config.selection.is_plain or (config.selection.is_of_peft and not has_experts):
        # What selected the layers, such as a pattern or PEFT's rules for experts, is not written, so each is named.
        is_stacked = config.form == "peft"  # its experts are in target_parameters
        layers = sorted(name for name in adapter.layout.modules if not (is_stacked and expert_of(name)))
        config = replace(config, form_settings={**config.form_settings, "target_modules": layers})
    write_file(folder / CONFIG_FILE, json_bytes(config.to_json()))
    write_files(folder, architecture.files_beside_adapter())
    narrowest = min((dtype or source.dtype(name) for name in names), key=lambda each: each.itemsize)
    is_mixture = architecture.config.has_experts
    modules = adapter.layout.modules
    return narrowest, readers_of(config, modules, is_mixture=is_mixture, is_stacked=stack is not None)


def _in_form(
    adapter: AdapterFolder, form: ExpertForm | None, stack: ExpertStack | None
) -> tuple[AdapterConfig, WeightSource]:
    """The settings and the tensors to write; those of the file itself if its form is to be kept."""
    if form is None or form == adapter.layout.config.form:
        return adapter.layout.config, adapter.stored
    try:
        config, tensors = in_form(adapter.layout, adapter.source, form, stack)
    except ValueError as error:
        raise ValueError(f"--moe-lora-format: {str(error).removeprefix('form: ')}") from error
    dtype = reduce(torch.promote_types, {adapter.source.dtype(name) for name in adapter.source.names()})
    return config, MadeTensors(tensors, dtype)


def _write_model(folder: Path, saved: SavedModel, dtype: torch.dtype | None) -> torch.dtype:
    """Write a model for transformers; returns the narrowest dtype of its weights."""
    weights = saved.weights
    architecture = saved.architecture
    recipes = architecture.recipes(merge_qkv=True).values()
    kept = {name for recipe in recipes if recipe.keeps_dtype for name in recipe.sources}
    own = {name: saved.base.dtype(name) for name in weights.names()}
    stored = {name: found if dtype is None or name in kept else dtype for name, found in own.items()}
    try:
        rest = Rest.of(architecture)
        rest.require()
    except (ValueError, CheckpointFailure) as error:
        raise type(error)(f"PATH: {error}") from error
    with rest.groups() as copied:
        write_model(
            folder,
            rest.in_files(source_groups(weights, dtype_of=stored.__getitem__)),
            hf_config=architecture.hf_config,
            generation_config=architecture.generation,
            tokenizer_folder=architecture.tokenizer_folder,
            chat_template=architecture.chat_template,
            copied=copied,
            processor_files=architecture.processor_files(),
            kept=[rest.in_file(name) for name in kept],
        )
    return min(stored.values(), key=lambda each: each.itemsize)


def _card(
    title: str,
    saved: SavedModel,
    dtype: torch.dtype,
    figures: Figures | None,
    readers: tuple[Reader, ...] | None,
) -> str:
    facts: dict[str, str | int | float] = {
        "weights": str(dtype).removeprefix("torch."),
    }
    if saved.step is not None:
        facts["optimizer step"] = saved.step
    if saved.adapter is not None:
        layout = saved.adapter.layout
        facts |= {**adapter_facts(layout.config.spec), "adapted modules": len(layout.modules)}
        if saved.scheme is not None:
            facts["base while training"] = f"{saved.scheme.quant_format} in groups of {saved.scheme.group_size}"
        if readers is None:
            facts["adapter"] = MERGED_ADAPTER
    own = readers is not None and saved.architecture.own_generation
    return model_card(
        title,
        saved.architecture.spec,
        base=saved.base_path,
        facts=facts,
        verified=figures,
        readers=readers,
        own_generation=own,
    )
