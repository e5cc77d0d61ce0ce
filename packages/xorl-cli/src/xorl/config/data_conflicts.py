"""Conflicts between options of the data section; other conflicts are in conflicts.py."""

from collections.abc import Callable, Iterator

from xorl.config.entries import DatasetEntryConfig
from xorl.config.local import Config
from xorl.config.problems import Conflict

# The allowed values of train_on and columns for each type of dataset entry.
FORMAT_TARGETS: dict[str, tuple[str, ...]] = {
    "tokenized": (),
    "chat": ("assistant", "last_turn", "all"),
    "prompt_completion": ("completion", "all"),
    "preference": ("completion",),
    "text": ("all",),
}
FORMAT_COLUMNS: dict[str, tuple[str, ...]] = {
    "tokenized": (),
    "chat": ("messages", "tools", "system", "images", "prompt", "completion"),
    "prompt_completion": (
        *("prompt", "completion", "instruction", "input", "output", "question", "answer"),
        *("system", "history"),
    ),
    "preference": ("prompt", "chosen", "rejected", "system", "tools"),
    "text": ("text",),
}


def _sources_are_complete(config: Config) -> Iterator[Conflict]:
    for path, entry in _entries(config):
        if entry.data_files is not None and entry.ds_type is None:
            yield Conflict(
                (f"{path}.data_files", f"{path}.ds_type"),
                "data_files needs ds_type: set it to the format of the files (json, csv, parquet, arrow or text)",
            )


def _options_match_the_type(config: Config) -> Iterator[Conflict]:
    for path, entry in _entries(config):
        if entry.type == "auto":
            if config.data.skip_prepare_dataset:
                yield Conflict(
                    (f"{path}.type", "data.skip_prepare_dataset"),
                    "auto inspects the data, which skip_prepare_dataset prevents: set the type explicitly",
                )
            continue
        allowed = {"train_on": FORMAT_TARGETS[entry.type], "columns": FORMAT_COLUMNS[entry.type]}
        given = {"train_on": [entry.train_on] if entry.train_on else [], "columns": list(entry.columns)}
        for name, values in given.items():
            wrong = next((value for value in values if value not in allowed[name]), None)
            if wrong is not None:
                hint = f"use {', '.join(allowed[name])}" if allowed[name] else f"this type has no {name}: remove it"
                message = f"{wrong} is not valid for type {entry.type}; {hint}"
                yield Conflict((f"{path}.{name}", f"{path}.type"), message)
        if entry.type == "preference" and entry.overflow in ("truncate", "split"):
            message = f"{entry.overflow} would separate the answers of a pair: set it to drop or error"
            yield Conflict((f"{path}.overflow", f"{path}.type"), message)


def _length_limits_agree(config: Config) -> Iterator[Conflict]:
    bin_length = config.data.sample_packing_sequence_len
    for path, entry in _entries(config):
        if entry.max_seq_len is not None and entry.max_seq_len > bin_length:
            yield Conflict(
                (f"{path}.max_seq_len", "data.sample_packing_sequence_len"),
                f"documents must fit into a bin, but max_seq_len ({entry.max_seq_len}) is above "
                f"sample_packing_sequence_len ({bin_length})",
            )


def _shard_options_are_complete(config: Config) -> Iterator[Conflict]:
    for path, entry in _entries(config):
        yield from _shard_option_is_complete(f"{path}.shards", entry.shards, f"{path}.shards_idx", entry.shards_idx)
        if entry.shards is not None and entry.preprocess_shards is not None:
            yield Conflict((f"{path}.preprocess_shards", f"{path}.shards"), "set shards or preprocess_shards, not both")
    data = config.data
    yield from _shard_option_is_complete(
        "data.dataset_shard_num", data.dataset_shard_num, "data.dataset_shard_idx", data.dataset_shard_idx
    )


def _shard_option_is_complete(
    number_path: str, number: int | None, index_path: str, index: int | None
) -> Iterator[Conflict]:
    number_name, index_name = number_path.rsplit(".", 1)[1], index_path.rsplit(".", 1)[1]
    if index is not None and number is None:
        yield Conflict((index_path, number_path), f"{index_name} needs {number_name}, the number of parts")
    elif number is not None and index is None:
        yield Conflict(
            (number_path, index_path), f"{number_name} needs {index_name}, the part to use (0 to {number - 1})"
        )
    elif number is not None and index is not None and index >= number:
        yield Conflict(
            (index_path, number_path), f"{index_name} is {index}, but {number_name} is {number}: use 0 to {number - 1}"
        )


def _streaming_options_agree(config: Config) -> Iterator[Conflict]:
    if not config.data.streaming:
        return
    if config.train.max_steps is None:
        yield Conflict(
            ("data.streaming", "train.max_steps"),
            "a stream has no known length: set train.max_steps",
        )
    for index, entry in enumerate(config.data.datasets):
        if entry.shards is not None:
            yield Conflict(
                (f"data.datasets.{index}.shards", "data.streaming"),
                "a stream is not split into parts: remove shards, or set data.streaming to false",
            )
        if entry.path == "dummy":
            yield Conflict(
                (f"data.datasets.{index}.path", "data.streaming"),
                "synthetic rows cannot be streamed: set data.streaming to false",
            )


def _mixture_weights_agree(config: Config) -> Iterator[Conflict]:
    for name in ("datasets", "test_datasets"):
        entries = getattr(config.data, name)
        weighted = [entry.weight is not None for entry in entries]
        for index, entry in enumerate(entries):
            path = f"data.{name}.{index}"
            if entry.weight is not None and entry.num_epochs is not None:
                yield Conflict((f"{path}.num_epochs", f"{path}.weight"), "set weight or num_epochs, not both")
            if any(weighted) and not weighted[index]:
                other = f"data.{name}.{weighted.index(True)}.weight"
                yield Conflict(
                    (f"{path}.weight", other), "weights are shares of all samples: set them on every entry, or on none"
                )


def _upload_options_agree(config: Config) -> Iterator[Conflict]:
    data = config.data
    if data.push_dataset_to_hub is not None and not data.hf_use_auth_token:
        yield Conflict(
            ("data.push_dataset_to_hub", "data.hf_use_auth_token"),
            "uploading needs hf_use_auth_token: true, and a stored token or HF_TOKEN",
        )


def _held_out_data_has_one_source(config: Config) -> Iterator[Conflict]:
    data = config.data
    if data.val_set_size is not None and data.test_datasets:
        yield Conflict(
            ("data.val_set_size", "data.test_datasets"),
            "set val_set_size or test_datasets, not both: held-out data has a single source",
        )


def _entries(config: Config) -> Iterator[tuple[str, DatasetEntryConfig]]:
    for name in ("datasets", "test_datasets"):
        for index, entry in enumerate(getattr(config.data, name)):
            yield f"data.{name}.{index}", entry


DATA_CHECKS: tuple[Callable[[Config], Iterator[Conflict]], ...] = (
    _sources_are_complete,
    _options_match_the_type,
    _length_limits_agree,
    _shard_options_are_complete,
    _streaming_options_agree,
    _mixture_weights_agree,
    _upload_options_agree,
    _held_out_data_has_one_source,
)
