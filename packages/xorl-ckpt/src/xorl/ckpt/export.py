"""Writes a model, sharded or not, as a folder that transformers' `from_pretrained` can read.

Rank 0 holds one parameter in memory at a time. The folder appears under its final name once it is complete, or not at
all.
"""

import functools
import json
import logging
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from xorl.ckpt.errors import CheckpointError, require
from xorl.ckpt.files import sync_file, writing_to
from xorl.ckpt.layout import TensorRecord
from xorl.ckpt.ranks import fail_together, this_rank
from xorl.ckpt.reader import (
    INDEX_FILE,
    SINGLE_FILE,
    WEIGHT_DTYPES,
    SafetensorsSource,
    SameTensor,
    WeightRecipe,
    WeightSource,
    require_recipes,
    require_shapes,
    source_shapes,
)
from xorl.ckpt.regions import dtype_name, gather_whole
from xorl.ckpt.tensor_file import TensorGroup, write_tensor_file

logger = logging.getLogger(__name__)

# Patterns for the files of a transformers tokenizer or processor; other files in its folder are not copied.
_NAMED_TEMPLATES = "additional_chat_templates/*.jinja"  # all templates but the default one, such as tool_use
_PROCESSOR_TEMPLATE = "chat_template.json"  # processors prefer it to the template of the tokenizer
IMAGE_PROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
TOKENIZER_FILES = (
    _NAMED_TEMPLATES,
    "added_tokens.json",
    "chat_template.jinja",
    _PROCESSOR_TEMPLATE,
    "merges.txt",
    IMAGE_PROCESSOR_FILE,
    PROCESSOR_FILE,
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
)
_CONFIG_FILE, GENERATION_FILE, CARD_FILE = "config.json", "generation_config.json", "README.md"
TEMPLATE_FILE = "chat_template.jinja"  # transformers prefers it to the template in tokenizer_config.json
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
    recipes: Mapping[str, WeightRecipe] | None,
    folder: Path | str,
    *,
    hf_config: Mapping[str, object],
    dtype: torch.dtype | None = None,
    generation_config: Mapping[str, object] | None = None,
    tokenizer_folder: Path | str | None = None,
    chat_template: str | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    model_card: str | None = None,
    gather: Callable[[str], torch.Tensor] | None = None,
    rename: Callable[[str], str] = str,
    arrange: Callable[[Sequence[TensorGroup]], Sequence[TensorGroup]] = list,
    copied: Sequence[TensorGroup] = (),
    processor_files: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """Collective: write safetensors, their index, config.json and the tokenizer's files; returns the folder.

    Without recipes, the parameters are written under their own names. A `dtype` of None keeps each parameter's dtype;
    otherwise it is a floating-point dtype of at least 16 bits, and integers, flags and parameters whose recipes say so
    keep theirs.
    `hf_config` is written unchanged except for its dtype, which is set to that of the weights, and `generation_config`
    as generation_config.json. The tokenizer's files are copied from `tokenizer_folder`; `chat_template` replaces its
    template. Tied weights are not in `params`, so they are not written. `model_card` becomes README.md. For `gather`,
    see `parameter_groups`. `rename` takes the name of a tensor in the recipes and returns that in the files.
    `arrange` takes the tensors that recipes split parameters into, and returns those to write, such as stacks. `copied`
    are further tensors, on which config.json's dtype does not depend; nor does it on parameters that keep their dtype.
    `processor_files` replace files of the same names in `tokenizer_folder`.

    Raises CheckpointError, before anything is written, if the folder exists and is not empty or cannot be written to,
    or if `params` and `recipes` differ in names or (without `gather`) in shapes.
    """
    folder = Path(folder).expanduser().absolute()
    with fail_together(f"export to {folder}"):
        require("params", params, isinstance(params, Mapping), "a mapping of names to tensors, such as a state_dict")
        is_config = isinstance(hf_config, Mapping)
        require("hf_config", hf_config, is_config, "a mapping: the contents of a config.json, not its path")
        is_size = isinstance(max_shard_bytes, (int, float)) and max_shard_bytes >= 1
        require("max_shard_bytes", max_shard_bytes, is_size, "a number of bytes of at least 1")
        tokenizer = _existing_folder(tokenizer_folder)
        if recipes is None:
            recipes = {name: SameTensor(name, tuple(param.shape)) for name, param in params.items()}
        groups = parameter_groups(params, recipes, dtype=dtype, gather=gather)
        if missing := [name for name in recipes if name not in params]:
            raise CheckpointError(f"params: {', '.join(missing[:5])} are missing, though `recipes` has them")
    kept = [rename(name) for recipe in recipes.values() if recipe.keeps_dtype for name in recipe.sources]
    groups = [group.renamed(rename) for group in arrange(groups)]
    with published(folder) as temporary:
        write_model(
            temporary,
            groups,
            hf_config=hf_config,
            generation_config=generation_config,
            tokenizer_folder=tokenizer,
            chat_template=chat_template,
            max_shard_bytes=max_shard_bytes,
            model_card=model_card,
            copied=copied,
            kept=kept,
            processor_files=processor_files,
        )
    num_tensors = sum(len(group.records) for group in [*groups, *copied])
    logger.info("event=exported folder=%s tensors=%d copied=%d", folder, num_tensors, len(copied))
    return folder


@contextmanager
def published(folder: Path | str) -> Iterator[Path]:
    """Collective: yields a temporary sibling folder on every rank, and renames it to `folder` when the block ends.

    Only rank 0 creates and renames it. The block may run collectives; it must raise on every rank or on none. Raises
    CheckpointError, before anything is written, if the folder exists and is not empty. Leftovers of a killed process
    are removed when the same folder is published again.
    """
    folder = Path(folder).expanduser().absolute()
    # Named differently from unfinished saves, which a run's next save would remove from its checkpoint folder.
    temporary = folder.with_name(f".exporting_{folder.name}")
    with fail_together(f"export to {folder}"):
        if this_rank() == 0:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise CheckpointError(
                    f"{folder} already exists and is not empty; an export never overwrites it. Choose another folder."
                )
            shutil.rmtree(temporary, ignore_errors=True)
            with writing_to(folder.parent, "folder"):
                temporary.mkdir(parents=True)
    try:
        yield temporary
        with fail_together(f"export to {folder}"):
            if this_rank() == 0:
                sync_file(temporary)
                temporary.rename(folder)
                sync_file(folder.parent)
    except BaseException:  # also on Ctrl-C, since nothing else removes the temporary folder
        if this_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@torch.no_grad()
def write_model(
    folder: Path | str,
    groups: Sequence[TensorGroup],
    *,
    hf_config: Mapping[str, object],
    generation_config: Mapping[str, object] | None = None,
    tokenizer_folder: Path | str | None = None,
    chat_template: str | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    model_card: str | None = None,
    copied: Sequence[TensorGroup] = (),
    kept: Collection[str] = (),
    processor_files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Collective: write the files of `export_hf` into an existing folder; `groups` hold tensors by their file names.

    kept: the names of tensors on which config.json's dtype does not depend.

    Raises CheckpointError, before anything is written, if there is no `tokenizer_folder`.
    """
    folder = Path(folder).expanduser()
    with fail_together(f"export to {folder}"):
        tokenizer = _existing_folder(tokenizer_folder)
    shards = _plan([*groups, *copied], max_shard_bytes)
    for shard in shards:
        write_tensor_file(folder / shard.file, shard.groups)
    with fail_together(f"export to {folder}"):
        if this_rank() == 0:
            files = _config_files(shards, _with_dtype(hf_config, groups, kept), generation_config)
            if model_card is not None:
                files[CARD_FILE] = model_card.encode()
            write_files(folder, {**files, **tokenizer_files(tokenizer, chat_template), **processor_files})
            _check_readable(folder, shards)


def _existing_folder(tokenizer_folder: Path | str | None) -> Path | None:
    folder = None if tokenizer_folder is None else Path(tokenizer_folder).expanduser()
    is_found = folder is None or this_rank() != 0 or folder.is_dir()  # only rank 0 reads it
    require("tokenizer_folder", tokenizer_folder, is_found, "an existing folder")
    return folder


def parameter_groups(
    params: Mapping[str, torch.Tensor],
    recipes: Mapping[str, WeightRecipe],
    *,
    dtype: torch.dtype | None = None,
    gather: Callable[[str], torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> list[TensorGroup]:
    """Parameters by their file names, in the order of the recipes; each is gathered only when it is written.

    `gather` takes the name of a parameter and returns its full value on every rank, for example with an adapter merged
    into it. It may be collective; None gathers the parameter itself. The groups create tensors on `device` (None: the
    CPU), which may share memory with the results of `gather`. Raises CheckpointError for a parameter without a recipe
    or, without `gather`, of another shape than its recipe's, and for a `dtype` that is not floating-point of at least
    16 bits. The groups raise it if `gather` returns another shape than a recipe's.
    """
    is_wide = dtype is None or dtype in WEIGHT_DTYPES
    require("dtype", str(dtype), is_wide, "a floating-point torch.dtype of at least 16 bits")
    require_recipes(recipes)
    if not params:
        raise CheckpointError("there are no parameters to export")
    unknown = [name for name in params if name not in recipes]
    if unknown:
        raise CheckpointError(f"there is no recipe for {', '.join(unknown[:5])}")
    if gather is None:
        require_shapes({name: param.shape for name, param in params.items()}, recipes)

    def gather_param(name: str) -> torch.Tensor:
        return gather_whole(params[name])

    groups: list[TensorGroup] = []
    for unit in _units(params, recipes):
        shapes = source_shapes({name: recipes[name] for name in unit})
        own = params[unit[0]].dtype
        # What `gather` returns for bytes may be weights, such as those of a quantised parameter.
        is_cast = (own.is_floating_point or gather is not None) and not recipes[unit[0]].keeps_dtype
        written = dtype_name(dtype if dtype is not None and is_cast else own)
        to = device or torch.device("cpu")
        make = functools.partial(_split_unit, unit, recipes, gather or gather_param, getattr(torch, written), to)
        groups.append(TensorGroup({name: TensorRecord(shape, written) for name, shape in shapes.items()}, make))
    return groups


def source_groups(
    source: WeightSource,
    *,
    names: Sequence[str] | None = None,
    dtype_of: Callable[[str], torch.dtype] | None = None,
) -> list[TensorGroup]:
    """The tensors of a source (all of them, or only `names`); each is read only when it is written.

    `dtype_of` takes a name and returns the dtype to cast to; None keeps the source's dtype.
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
    """Assign the groups to files of at most `max_shard_bytes`; a larger group gets its own file."""
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
        _Shard(f"model-{index:05d}-of-{len(files):05d}.safetensors", tuple(members))
        for index, members in enumerate(files, start=1)
    ]


def _units(params: Mapping[str, torch.Tensor], recipes: Mapping[str, WeightRecipe]) -> list[list[str]]:
    """The parameters in the order of the recipes, as units: parameters that share a source form one unit."""
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


def _split_unit(
    unit: Sequence[str],
    recipes: Mapping[str, WeightRecipe],
    gather: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Collective: all ranks join each gather; only rank 0 splits the results and returns tensors."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name in unit:
        values = gather(name)
        require_shapes({name: values.shape}, recipes)
        if this_rank() == 0:
            for source, part in recipes[name].split(values.to(dtype)).items():
                parts.setdefault(source, []).append(part.to(device))
    join_dim = recipes[unit[0]].join_dim
    assert join_dim is not None or all(len(shared) == 1 for shared in parts.values()), f"{unit} share a source"
    return {name: shared[0] if len(shared) == 1 else torch.cat(shared, join_dim or 0) for name, shared in parts.items()}


def _with_dtype(
    hf_config: Mapping[str, object], groups: Sequence[TensorGroup], kept: Collection[str]
) -> Mapping[str, object]:
    """The config.json with the dtype of the weights, if they have one: from_pretrained casts them to it."""
    records = [record for group in groups for name, record in group.records.items() if name not in kept]
    dtypes = {record.dtype for record in records if record.torch_dtype.is_floating_point}
    config = {name: value for name, value in hf_config.items() if name != "torch_dtype"}
    return config | ({"dtype": dtypes.pop()} if len(dtypes) == 1 else {})


def _config_files(
    shards: Sequence[_Shard], hf_config: Mapping[str, object], generation_config: Mapping[str, object] | None
) -> dict[str, bytes]:
    files: dict[str, bytes] = {_CONFIG_FILE: json_bytes(hf_config)}
    if generation_config:
        files[GENERATION_FILE] = json_bytes(generation_config)
    if len(shards) > 1:
        records = [record for shard in shards for record in shard.records.values()]
        totals = {
            "total_parameters": sum(math.prod(record.shape) for record in records),
            "total_size": sum(record.num_bytes for record in records),
        }
        weight_map = {name: shard.file for shard in shards for name in sorted(shard.records)}
        files[INDEX_FILE] = json_bytes({"metadata": totals, "weight_map": weight_map})
    return files


def tokenizer_files(tokenizer_folder: Path | None, chat_template: str | None) -> dict[str, bytes]:
    """Return the contents of a tokenizer's files by file name; `chat_template` replaces its template."""
    files: dict[str, bytes] = {}
    if tokenizer_folder is not None:
        replaced = () if chat_template is None else (_NAMED_TEMPLATES, _PROCESSOR_TEMPLATE)
        patterns = [name for name in TOKENIZER_FILES if name not in replaced]
        present = [file for pattern in patterns for file in tokenizer_folder.glob(pattern) if file.is_file()]
        files = {str(file.relative_to(tokenizer_folder)): file.read_bytes() for file in present}
    if chat_template is not None:
        files[TEMPLATE_FILE] = chat_template.encode()
        if PROCESSOR_FILE in files and "chat_template" in (processor := json.loads(files[PROCESSOR_FILE])):
            del processor["chat_template"]
            files[PROCESSOR_FILE] = json_bytes(processor)
    return files


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files of an export, given by name, and flush them to disk."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        sync_file(folder / name)


def _check_readable(folder: Path, shards: Sequence[_Shard]) -> None:
    """Open the written files as a user would, and compare names and shapes."""
    with SafetensorsSource(folder) as source:
        wanted = {name: record.shape for shard in shards for name, record in shard.records.items()}
        assert {name: source.shape(name) for name in source.names()} == wanted, (
            f"the files in {folder} differ from the exported tensors"
        )


def json_bytes(content: Mapping[str, object]) -> bytes:
    """JSON formatted as in Hugging Face folders: sorted and indented."""
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
