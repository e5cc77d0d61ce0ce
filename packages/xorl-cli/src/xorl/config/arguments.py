"""The options that set the arguments of the libraries: their errors name arguments, and the command's name options.

The libraries write `argument: what is wrong` and `argument=value`; here both become options as they are in a file.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from xorl.config.problems import ConfigError

OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        # xorl-data
        "bin_len": "data.sample_packing_sequence_len",
        "bins_per_step": "train.gradient_accumulation_steps x train.micro_batch_size x data-parallel ranks",
        "columns": "data.select_columns",
        "dataset_shard_idx": "data.dataset_shard_idx",
        "dataset_shard_num": "data.dataset_shard_num",
        "dp_size": "data-parallel size",
        "drop_last": "data.dataloader_drop_last",
        "entries": "data.datasets",
        "group_size": "lora.quant_group_size",
        "max_steps": "train.max_steps",
        "method": "data.sample_packing_method",
        "micro_batch_size": "train.micro_batch_size",
        "num_epochs": "train.num_train_epochs",
        "num_files": "data.num_dataset_shards_to_save",
        "num_proc": "data.dataset_num_proc",
        "prepared_path": "data.dataset_prepared_path",
        "repo_id": "data.push_dataset_to_hub",
        "skip_prepare": "data.skip_prepare_dataset",
        "tokenizer_folder": "model.tokenizer_path",
        "val_set_size": "data.val_set_size",
        # xorl-core
        "buffer_bytes": "model.deepep_buffer_size_gb",
        "compile_backend": "train.enable_compile",
        "cpu_offload": "train.enable_cpu_offload",
        "cuda_graphs": "train.enable_cuda_graphs",
        "data_parallel_mode": "train.data_parallel_mode",
        "ep": "train.expert_parallel_size",
        "fp8": "train.fp8",
        "mode": "train.data_parallel_mode",
        "no_decay_modules": "train.no_decay_modules",
        "no_decay_params": "train.no_decay_params",
        "pp": "train.pipeline_parallel_size",
        "replicate_size": "train.data_parallel_replicate_size",
        "shard_size": "train.data_parallel_shard_size",
        "tp": "train.tensor_parallel_size",
        "ulysses": "train.ulysses_parallel_size",
        "unit_modules": "model.basic_modules",
        "collectives": "train.fsdp_collectives",
        # xorl-lora
        "exclude": "lora.exclude_modules",
        "merge_qkv": "model.merge_qkv",
        "quant_format": "lora.quant_format",
    }
)
# What a caller writes instead of an option.
PHRASES: Mapping[str, str] = MappingProxyType(
    {
        # The field of an entry, which has the name of another argument in a file.
        "(column_names: ": "(columns: ",
        "].column_names: ": "].columns: ",
        "set column_names to": "set columns to",
        "call prepare() instead": "set data.streaming: false",
        "compile_backend=None": "train.enable_compile: false",
        "leave out refuse_launch_blocking()": "allow it with train.allow_cuda_launch_blocking: true",
        "num_epochs or max_steps of the plan": "train.num_train_epochs or train.max_steps",
        "name them in exclude": "list them in lora.exclude_modules",
        "tie_word_embeddings=False": "model.foundation: {tie_word_embeddings: false}",
        "the config.json": "the config.json (model.config_path)",
        "set images.root": "set data.image_root",
        "set it to null there": "set it to null in model.foundation",
    }
)
_VALUE = r"""(\[[^\]]*\]|"[^"]*"|[\w.-]*\w)"""
# These names mean an argument only where a message begins with them or gives them a value: they are words of the
# language, or fields of a dataset's entry as well.
_AMBIGUOUS = {name for name in OPTIONS if "_" not in name} | {"num_epochs"}
_WORDS = "|".join(sorted(_AMBIGUOUS, key=len, reverse=True))
_NAMES = "|".join(sorted(OPTIONS.keys() - _AMBIGUOUS, key=len, reverse=True))
_ARGUMENT = re.compile(
    rf"(?P<phrase>{'|'.join(map(re.escape, PHRASES))})"
    rf"|(?<![\w./-])(?P<set>{_NAMES}|{_WORDS})=(?P<value>{_VALUE})"
    rf"|^(?P<word>{_WORDS})(?=[:\[]| is )"
    rf"|(?<![\w./-])(?P<name>{_NAMES})(?![\w/-]|\.\w)"
)
_LITERALS = {"True": "true", "False": "false", "None": "null"}


def in_options(message: str) -> str:
    """Replaces the arguments that a library's message names by the options that set them, in YAML."""
    return _ARGUMENT.sub(_option, message)


def _option(found: re.Match[str]) -> str:
    if found["phrase"]:
        return PHRASES[found["phrase"]]
    if not found["set"]:
        return OPTIONS[found["word"] or found["name"]]
    value = found["value"].replace('"', "")
    return f"{OPTIONS[found['set']]}: {_LITERALS.get(value, value)}"


@contextmanager
def naming_options() -> Iterator[None]:
    """A context in which the messages of a library's ValueErrors and RuntimeErrors name options, not arguments."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if not isinstance(error, ConfigError) and len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (in_options(error.args[0]),)
        raise
