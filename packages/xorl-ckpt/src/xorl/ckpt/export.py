"""Writes a model, whole or sharded, as the folder that transformers' `from_pretrained` reads.

Rank 0 holds one parameter in memory at a time. The folder is published atomically.
"""

import functools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from xorl.ckpt.errors import CheckpointError
from xorl.ckpt.files import sync_file
from xorl.ckpt.layout import TensorRecord
from xorl.ckpt.publish import published
from xorl.ckpt.ranks import agreed, this_rank
from xorl.ckpt.reader import INDEX_FILE, SINGLE_FILE, SafetensorsSource, WeightRecipe, WeightSource, source_shapes
from xorl.ckpt.regions import dtype_name, gather_whole
from xorl.ckpt.tensor_file import TensorGroup, write_tensor_file

logger = logging.getLogger(__name__)

# The files of a transformers tokenizer, as patterns; other files in its folder do not belong to the model.
_FURTHER_TEMPLATES = "additional_chat_templates/*.jinja"  # of other names than default, such as tool_use
TOKENIZER_FILES = (
    _FURTHER_TEMPLATES,
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
_CONFIG_FILE, CARD_FILE = "config.json", "README.md"
TEMPLATE_FILE = "chat_template.jinja"  # takes precedence over the template in tokenizer_config.json
MAX_SHARD_BYTES = 5e9


@dataclass(frozen=True)
class _Shard:
    """The contents of one file."""

    file: str
    groups: tuple[TensorGroup, ...]

    @property
    def records(self) -> dict[str, TensorRecord]:
        return {name: record for group in self.groups for name, record in group.records.items()}


@torch.no_grad()
def export_hf(
    params: Mapping[str, torch.Tensor],
    recipes: Mapping[str, WeightRecipe],
    folder: Path,
    *,
    hf_config: Mapping[str, object],
    dtype: torch.dtype | None = None,
    tokenizer_folder: Path | None = None,
    chat_template: str | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    model_card: str | None = None,
    whole: Callable[[str], torch.Tensor] | None = None,
) -> Path:
    """Collective: write safetensors, their index, config.json and the tokenizer's files; returns the folder.

    `dtype` None keeps each parameter's own dtype. `hf_config` is written unchanged except for its dtype, which is set
    to that of the weights. `chat_template` replaces the tokenizer's own. Tied weights are absent, as they are in
    `params`. `model_card` becomes README.md. `whole` is as in `parameter_groups`. Raises CheckpointError if the folder
    exists and is not empty: nothing is written into it.
    """
    with agreed(f"export to {folder}"):
        groups = parameter_groups(params, recipes, dtype=dtype, whole=whole)
    folder = Path(folder).absolute()
    with published(folder) as temporary:
        write_model(
            temporary,
            groups,
            hf_config=hf_config,
            tokenizer_folder=tokenizer_folder,
            chat_template=chat_template,
            max_shard_bytes=max_shard_bytes,
            model_card=model_card,
        )
    logger.info("event=exported folder=%s tensors=%d", folder, sum(len(group.records) for group in groups))
    return folder


@torch.no_grad()
def write_model(
    folder: Path,
    groups: Sequence[TensorGroup],
    *,
    hf_config: Mapping[str, object],
    tokenizer_folder: Path | None = None,
    chat_template: str | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    model_card: str | None = None,
) -> None:
    """Collective: write the files of `export_hf`, for tensors under their file names, into an existing folder."""
    shards = _plan(groups, max_shard_bytes)
    for shard in shards:
        write_tensor_file(folder / shard.file, shard.groups)
    with agreed(f"export to {folder}"):
        if this_rank() == 0:
            _write_rest(folder, shards, hf_config, tokenizer_folder, chat_template, model_card)
            _check(folder, shards)


def parameter_groups(
    params: Mapping[str, torch.Tensor],
    recipes: Mapping[str, WeightRecipe],
    *,
    dtype: torch.dtype | None = None,
    whole: Callable[[str], torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> list[TensorGroup]:
    """Parameters under their file names, in the order of the recipes; each is gathered only when it is written.

    `whole` returns the value of a parameter by its name, for example with an adapter merged into it; it may be
    collective. None gathers the parameter. The groups make tensors on `device` (None: the CPU), which may share memory
    with the results of `whole`. Raises CheckpointError for a parameter without a recipe.
    """
    unknown = [name for name in params if name not in recipes]
    if unknown or not params:
        raise CheckpointError(
            f"there is no recipe for {', '.join(unknown[:5]) or 'anything: no parameters were given'}"
        )

    def gathered(name: str) -> torch.Tensor:
        return gather_whole(params[name])

    groups: list[TensorGroup] = []
    for unit in _units(params, recipes):
        shapes = source_shapes({name: recipes[name] for name in unit})
        written = dtype_name(dtype or params[unit[0]].dtype)
        to = device or torch.device("cpu")
        make = functools.partial(_take_apart, unit, recipes, whole or gathered, getattr(torch, written), to)
        groups.append(TensorGroup({name: TensorRecord(shape, written) for name, shape in shapes.items()}, make))
    return groups


def source_groups(
    source: WeightSource,
    *,
    names: Sequence[str] | None = None,
    dtype_of: Callable[[str], torch.dtype] | None = None,
) -> list[TensorGroup]:
    """The tensors of a source under its names (all of them, or `names`), each read when it is written.

    They are cast to the dtype that `dtype_of` returns for a name; None keeps the source's dtype.
    """

    def read(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: source.read(name).to(dtype)} if this_rank() == 0 else {}

    groups: list[TensorGroup] = []
    for name in source.names() if names is None else names:
        dtype = (dtype_of or source.dtype)(name)
        record = TensorRecord(tuple(source.shape(name)), dtype_name(dtype))
        groups.append(TensorGroup({name: record}, functools.partial(read, name, dtype)))
    return groups


def _plan(groups: Sequence[TensorGroup], max_shard_bytes: float) -> list[_Shard]:
    """Which tensors go into which file."""
    files: list[list[TensorGroup]] = [[]]
    size = 0
    for group in groups:
        if files[-1] and size + group.num_bytes > max_shard_bytes:
            files.append([])
            size = 0
        files[-1].append(group)
        size += group.num_bytes
    if len(files) == 1:
        return [_Shard(SINGLE_FILE, tuple(files[0]))]
    return [
        _Shard(f"model-{index:05d}-of-{len(files):05d}.safetensors", tuple(held))
        for index, held in enumerate(files, start=1)
    ]


def _units(params: Mapping[str, torch.Tensor], recipes: Mapping[str, WeightRecipe]) -> list[list[str]]:
    """The parameters in the order of the recipes; those that share a source form one unit."""
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


def _take_apart(
    unit: Sequence[str],
    recipes: Mapping[str, WeightRecipe],
    whole: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Collective: every rank takes part in each gather; only rank 0 keeps the result."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name in unit:
        values = whole(name)
        if this_rank() == 0:
            for source, part in recipes[name].split(values.to(dtype)).items():
                parts.setdefault(source, []).append(part.to(device))
    join_dim = recipes[unit[0]].join_dim
    assert join_dim is not None or all(len(held) == 1 for held in parts.values()), f"{unit} share a source"
    return {name: held[0] if len(held) == 1 else torch.cat(held, join_dim or 0) for name, held in parts.items()}


def _write_rest(
    folder: Path,
    shards: Sequence[_Shard],
    hf_config: Mapping[str, object],
    tokenizer_folder: Path | None,
    chat_template: str | None,
    model_card: str | None,
) -> None:
    groups = [group for shard in shards for group in shard.groups]
    records = [record for group in groups for record in group.records.values()]
    dtypes = {record.dtype for record in records}
    config = {name: value for name, value in hf_config.items() if name != "torch_dtype"}
    if len(dtypes) == 1:
        # from_pretrained casts to the config's dtype.
        config["dtype"] = dtypes.pop()
    files: dict[str, bytes] = {_CONFIG_FILE: json_bytes(config)}
    if len(shards) > 1:
        totals = {
            "total_parameters": sum(math.prod(record.shape) for record in records),
            "total_size": sum(group.num_bytes for group in groups),
        }
        weight_map = {name: shard.file for shard in shards for name in sorted(shard.records)}
        files[INDEX_FILE] = json_bytes({"metadata": totals, "weight_map": weight_map})
    if model_card is not None:
        files[CARD_FILE] = model_card.encode()
    if tokenizer_folder is not None:
        patterns = [name for name in _COPIED_FILES if chat_template is None or name != _FURTHER_TEMPLATES]
        present = [file for pattern in patterns for file in tokenizer_folder.glob(pattern) if file.is_file()]
        files |= {str(file.relative_to(tokenizer_folder)): file.read_bytes() for file in present}
    if chat_template is not None:
        files[TEMPLATE_FILE] = chat_template.encode()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        sync_file(folder / name)


def _check(folder: Path, shards: Sequence[_Shard]) -> None:
    """Reads the written files back as a reader would."""
    with SafetensorsSource(folder) as source:
        wanted = {name: record.shape for shard in shards for name, record in shard.records.items()}
        assert {name: source.shape(name) for name in source.names()} == wanted, (
            f"{folder} does not hold what was exported"
        )


def json_bytes(content: Mapping[str, object]) -> bytes:
    """JSON in the style of model folders: sorted and indented."""
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
