"""A model, whole or sharded, as the folder that transformers' `from_pretrained` reads.

One shard of the output is in memory at a time, on rank 0. The folder appears at once or not at all.
"""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from xorl.ckpt.errors import CheckpointError
from xorl.ckpt.files import sync_file
from xorl.ckpt.ranks import agreed, this_rank
from xorl.ckpt.reader import INDEX_FILE, SINGLE_FILE, SafetensorsSource, WeightRecipe, source_shapes
from xorl.ckpt.regions import dtype_name, gather_whole

logger = logging.getLogger(__name__)

# What a tokenizer of transformers is made of; anything else in its folder is not the model's.
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_COPIED_FILES = (*TOKENIZER_FILES, "generation_config.json")
_CONFIG_FILE, _CARD_FILE = "config.json", "README.md"


@dataclass(frozen=True)
class _Shard:
    """The parameters whose tensors go into one file."""

    file: str
    params: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]


@torch.no_grad()
def export_hf(
    params: Mapping[str, torch.Tensor],
    recipes: Mapping[str, WeightRecipe],
    folder: Path,
    *,
    hf_config: Mapping[str, object],
    dtype: torch.dtype | None = None,
    tokenizer_folder: Path | None = None,
    max_shard_bytes: float = 5e9,
    model_card: str | None = None,
) -> Path:
    """Collective: write safetensors, their index, config.json and the tokenizer's files; returns the folder.

    `dtype` None keeps each parameter's own. `hf_config` is written as it is, except for its dtype, which becomes that
    of the weights. Tied weights are absent, as they are in `params`. `model_card` becomes README.md. Raises
    CheckpointError if the folder exists and is not empty: nothing is written into it.
    """
    folder = Path(folder).absolute()
    temporary = folder.with_name(f".saving_{folder.name}")
    with agreed(f"export to {folder}"):
        shards = _plan(params, recipes, dtype, max_shard_bytes)
        if this_rank() == 0:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise CheckpointError(
                    f"{folder} exists already; an export is never written into it. Choose another folder."
                )
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    try:
        for shard in shards:
            tensors = _gather(shard, params, recipes, dtype)
            with agreed(f"export to {folder}"):
                if this_rank() == 0:
                    _write_shard(temporary / shard.file, shard, tensors)
            del tensors
        with agreed(f"export to {folder}"):
            if this_rank() == 0:
                _write_rest(temporary, shards, params, hf_config, dtype, tokenizer_folder, model_card)
                _check(temporary, shards)
                sync_file(temporary)
                temporary.rename(folder)
                sync_file(folder.parent)
    except Exception:
        if this_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    logger.info("event=exported folder=%s tensors=%d", folder, sum(len(shard.shapes) for shard in shards))
    return folder


def _plan(
    params: Mapping[str, torch.Tensor],
    recipes: Mapping[str, WeightRecipe],
    dtype: torch.dtype | None,
    max_shard_bytes: float,
) -> list[_Shard]:
    """Which parameters go into which file: all are known before the first is gathered, and so are the names."""
    unknown = [name for name in params if name not in recipes]
    if unknown or not params:
        raise CheckpointError(
            f"there is no recipe for {', '.join(unknown[:5]) or 'anything: no parameters were given'}"
        )
    groups: list[list[str]] = [[]]
    size = 0
    for unit in _units(params, recipes):
        num_bytes = sum(params[name].numel() * (dtype or params[name].dtype).itemsize for name in unit)
        if groups[-1] and size + num_bytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1] += unit
        size += num_bytes
    shards: list[_Shard] = []
    for index, group in enumerate(groups, start=1):
        file = SINGLE_FILE if len(groups) == 1 else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        shards.append(_Shard(file, tuple(group), source_shapes({name: recipes[name] for name in group})))
    return shards


def _units(params: Mapping[str, torch.Tensor], recipes: Mapping[str, WeightRecipe]) -> list[list[str]]:
    """The parameters in the order of the recipes; those that share a source belong together."""
    units: list[list[str]] = []
    sharing: dict[str, list[str]] = {}
    for name, recipe in recipes.items():
        if name not in params:
            continue
        unit = sharing.get(recipe.sources[0]) if recipe.join_dim is not None else None
        if unit is None:
            unit = []
            units.append(unit)
            if recipe.join_dim is not None:
                sharing[recipe.sources[0]] = unit
        unit.append(name)
    return units


def _gather(
    shard: _Shard, params: Mapping[str, torch.Tensor], recipes: Mapping[str, WeightRecipe], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Collective: every rank takes part in each gather; rank 0 alone keeps what it gives."""
    tensors: dict[str, torch.Tensor] = {}
    for name in shard.params:
        whole = gather_whole(params[name])
        if this_rank() != 0:
            continue
        for source, part in recipes[name].split(whole.to(dtype or whole.dtype)).items():
            if source in tensors:
                join_dim = recipes[name].join_dim
                assert join_dim is not None, f"{source} is made of more than one parameter"
                tensors[source] = torch.cat([tensors[source], part.cpu()], join_dim)
            else:
                # Cloned: safetensors refuses tensors that share storage, as the parts of a merged parameter do.
                tensors[source] = part.cpu().clone(memory_format=torch.contiguous_format)
    return tensors


def _write_shard(path: Path, shard: _Shard, tensors: Mapping[str, torch.Tensor]) -> None:
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == dict(shard.shapes)
    save_file(dict(tensors), path, metadata={"format": "pt"})
    sync_file(path)


def _write_rest(
    folder: Path,
    shards: Sequence[_Shard],
    params: Mapping[str, torch.Tensor],
    hf_config: Mapping[str, object],
    dtype: torch.dtype | None,
    tokenizer_folder: Path | None,
    model_card: str | None,
) -> None:
    dtypes = {dtype or param.dtype for param in params.values()}
    config = {name: value for name, value in hf_config.items() if name != "torch_dtype"}
    if len(dtypes) == 1:
        # from_pretrained casts to what the config says.
        config["dtype"] = dtype_name(dtypes.pop())
    files: dict[str, bytes] = {_CONFIG_FILE: _json(config)}
    if len(shards) > 1:
        num_bytes = sum(param.numel() * (dtype or param.dtype).itemsize for param in params.values())
        num_parameters = sum(param.numel() for param in params.values())
        files[INDEX_FILE] = _json(
            {
                "metadata": {"total_parameters": num_parameters, "total_size": num_bytes},
                "weight_map": {name: shard.file for shard in shards for name in sorted(shard.shapes)},
            }
        )
    if model_card is not None:
        files[_CARD_FILE] = model_card.encode()
    if tokenizer_folder is not None:
        present = (name for name in _COPIED_FILES if (tokenizer_folder / name).is_file())
        files |= {name: (tokenizer_folder / name).read_bytes() for name in present}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        sync_file(folder / name)


def _check(folder: Path, shards: Sequence[_Shard]) -> None:
    """What was written is read again as a reader would find it."""
    with SafetensorsSource(folder) as source:
        wanted = {name: shape for shard in shards for name, shape in shard.shapes.items()}
        assert {name: source.shape(name) for name in source.names()} == wanted, (
            f"{folder} does not hold what was exported"
        )


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
