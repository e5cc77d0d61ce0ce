"""What is not built yet is refused by name, and nothing more than that."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from xorl.config import ConfigError, config_from_mapping
from xorl.config.document import read_document
from xorl.config.options import ENTRIES, all_options
from xorl.config.unsupported import UNSUPPORTED, UnsupportedValues, unsupported_values

# A refused value of each option whose row says "anything but the default", where it cannot be guessed from the type.
EXAMPLES: dict[str, object] = {"model.encoders": {"video": {"model_path": "a"}}}
# What else is needed so that a value is wrong for no other reason.
COMPANIONS: dict[str, dict[str, Any]] = {"lora.save_lora_only": {"lora": {"enable_lora": True}}}


def refused_examples() -> list[tuple[str, object]]:
    """Returns (option, value) for every value that the table refuses, or one where they are many."""
    examples: list[tuple[str, object]] = []
    for option in all_options().values():
        for row in unsupported_values(option.path):
            examples += [(option.path, value) for value in row.values or (example_of(option.path),)]
    return examples


def example_of(path: str) -> object:
    option = all_options()[path]
    if path in EXAMPLES:
        return EXAMPLES[path]
    if option.type == "true or false":
        return option.default == "false"
    return int(float(option.default)) + 1 if option.default not in (None, "null") else 2


def problems_with(path: str, value: object, companions: Any = COMPANIONS) -> list[tuple[str, str]]:
    """Loads a sound configuration with one option set, and returns (path, message) of what is wrong with it."""
    section, _, name = path.rpartition(".")
    entry: dict[str, object] = {"path": "a"}
    data: dict[str, dict[str, object]] = {
        "model": {"model_path": "m"},
        "data": {"datasets": [{"path": "a"}], "test_datasets": [entry]},
        "train": {"output_dir": "o"},
        "lora": {},
        "entry": entry,
    }
    for part, options in companions.get(path, {}).items():
        data[part] |= options
    data["entry" if section == ENTRIES else section][name] = value
    del data["entry"]
    try:
        config_from_mapping(data)
    except ConfigError as error:
        return [(problem.path, problem.message) for problem in error.problems]
    return []


@pytest.mark.parametrize(("path", "value"), refused_examples(), ids=lambda part: str(part)[:40])
def test_every_row_of_the_table_is_refused(path: str, value: object) -> None:
    # Would catch an option that is accepted and ignored.
    concrete = path.replace(ENTRIES, "data.test_datasets.0")
    found = [message for at, message in problems_with(path, value) if at == concrete]
    assert len(found) == 1, found
    row = next(row for row in unsupported_values(path))
    assert row.reason in found[0]
    assert row.instead in found[0]


@pytest.mark.parametrize("path", sorted({path for path, _ in refused_examples()}))
def test_the_default_of_a_refused_option_is_accepted(path: str) -> None:
    # Would catch a row that refuses every configuration which writes its defaults out.
    default = all_options()[path].default
    if default is not None:
        document = read_document(f"x: {default}", "")
        assert problems_with(path, document.root.find(["x"]).plain(), companions={}) == []


@pytest.mark.parametrize("row", UNSUPPORTED, ids=lambda row: row.option)
def test_every_row_names_an_option(row: UnsupportedValues) -> None:
    # Would catch a row that has lost its option, and with it a value that nobody refuses.
    assert [path for path in all_options() if row in unsupported_values(path)]
    choices = {
        choice for path in all_options() if row in unsupported_values(path) for choice in all_options()[path].choices
    }
    assert set(row.values) <= choices


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (
            "model.attn_implementation",
            ["auto", "eager", "sdpa", "native", *(f"flash_attention_{n}" for n in (2, 3, 4))],
        ),
        ("train.optimizer", ["adamw", "anyprecision_adamw", "sgd", "muon"]),
        ("train.ckpt_manager", ["dcp", "torch"]),
        ("train.init_device", ["auto", "cpu", "cuda", "meta"]),
        ("train.load_weights_mode", ["broadcast", "all_ranks", "auto", "safetensors", "dcp"]),
        ("train.data_parallel_mode", ["none", "ddp", "fsdp2"]),
        ("data.sample_packing_method", ["sequential", "multipack"]),
        (f"{ENTRIES}.path", ["a.jsonl", "org/name", "./a:b", "dummy", "s3://bucket/a", "https://a.example/b.json"]),
        (f"{ENTRIES}.overflow", ["truncate", "drop", "split", "error"]),
    ],
)
def test_what_is_built_is_accepted(path: str, values: list[str]) -> None:
    # Would catch a capability that exists and that nobody can reach.
    assert [value for value in values if problems_with(path, value)] == []


def test_a_refusal_says_what_works_instead() -> None:
    # Would catch a bare "not supported".
    message = problems_with("train.init_device", "npu")[0][1]
    assert message.startswith("npu is not supported: ")
    assert "use auto" in message
    assert "is not supported: the datasets library" in problems_with(f"{ENTRIES}.trust_remote_code", True)[0][1]


def test_every_option_is_either_read_by_training_or_refused() -> None:
    # Would catch an option that is documented, accepted, and has no effect whatever.
    package, resolution = importlib.util.find_spec("xorl.train"), importlib.util.find_spec("xorl.config.resolve")
    # An option that only gives another its default is read where that is filled in.
    files = [*Path(package.origin).parent.rglob("*.py"), Path(resolution.origin)]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    refused = {path for path in all_options() for row in unsupported_values(path) if not row.values and not row.matches}
    unread = {path for path, option in all_options().items() if not re.search(rf"\b{option.name}\b", source)}
    assert sorted(unread - refused) == []
