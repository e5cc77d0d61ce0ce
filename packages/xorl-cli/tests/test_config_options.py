"""The list of options is frozen; their documentation, the JSON schema and `show` are complete."""

import json
import re
from pathlib import Path

import pytest

from xorl.cli import exit_codes
from xorl.config import Config, ServerConfig, load_config, load_server_config
from xorl.config.options import all_options, yaml_text
from xorl.config.show import documentation, json_schema, show

README = Path(__file__).resolve().parents[1] / "README.md"
EXAMPLES = Path(__file__).resolve().parents[3] / "configs"
SERVER_EXAMPLES = sorted(EXAMPLES.glob("server/*.yaml"))
LOCAL_EXAMPLES = sorted([*EXAMPLES.glob("local/*.yaml"), *EXAMPLES.glob("quickstart.yaml")])


@pytest.mark.parametrize(
    ("root", "file"), [(Config, "frozen_options.txt"), (ServerConfig, "frozen_server_options.txt")]
)
def test_the_list_of_options_is_frozen(root, file) -> None:
    # Would catch an option that is added, renamed, retyped or given another default without anyone deciding so. After
    # a decision, the lines below are what the file has to hold.
    listed = [
        f"{option.path}: {option.type} = {'(required)' if option.default is None else option.default}"
        for option in all_options(root).values()
    ]
    assert "\n".join(listed) == Path(__file__).with_name(file).read_text(encoding="utf-8").rstrip("\n")


@pytest.mark.parametrize(
    ("root", "option"),
    [
        pytest.param(root, option, id=path)
        for root in (Config, ServerConfig)
        for path, option in all_options(root).items()
    ],
)
def test_every_option_is_documented(root, option) -> None:
    # Would catch an option whose meaning is in nobody's words, or whose null means nothing that is said.
    assert option.description.endswith(".")
    assert option.group
    if option.type.endswith("or null"):
        assert "null" in option.description
    assert option.path in documentation(option.path, root)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (None, ["model.model_path:", "data.datasets[].path:", "train.lr:", "lora.aqn_alpha:", "# train: Optimizer"]),
        ("train", ["train.lr: number >= 0; default 5e-05", "# train: Seeding"]),
        ("data", ["data.datasets[].path: string; required", "data.val_set_size:"]),
        ("data.datasets", ["data.datasets: list of dataset entries (not empty); required"]),
        ("data.datasets.0.path", ["data.datasets[].path:"]),
        ("lr", ["train.lr:"]),
        ("train.init_device", ["Not supported: npu"]),
        ("trust_remote_code", ["Not supported: anything but the default"]),
    ],
)
def test_documentation_is_found_by_path_section_or_name(query: str | None, expected: list[str]) -> None:
    # Would catch an option that can be set and not looked up.
    text = documentation(query)
    assert [part for part in expected if part not in text] == []


@pytest.mark.parametrize(
    ("query", "meant"),
    [("optimiser", "train.optimizer"), ("train.lrr", "train.lr"), ("trainn", "train"), ("lro", "lr")],
)
def test_documentation_of_a_misspelt_option_suggests_one(query: str, meant: str) -> None:
    # Would catch a bare "not found".
    with pytest.raises(ValueError, match=f"no section or option {query}; did you mean .*{meant}"):
        documentation(query)


@pytest.mark.parametrize("root", [Config, ServerConfig])
def test_the_schema_describes_every_option(root) -> None:
    # Would catch an editor that completes options without their meaning, or lets a misspelt one pass.
    schema = json_schema(root)
    assert json.loads(json.dumps(schema)) == schema
    sections = [schema, *(each for each in schema["$defs"].values() if "properties" in each)]
    assert len(sections) >= 3
    for section in sections:
        assert section["additionalProperties"] is False
        for name, value in section["properties"].items():
            assert value.get("description"), name
            assert value.get("title") or name in ("model", "data", "train", "lora"), name


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("--train.data_parallel_mode", "ddp"),
        ("--train.wandb_name", '"$${X}: 5 #"', "--train.wandb_tags", '["1e5", "no", " a", ""]'),
    ],
)
def test_what_is_shown_loads_to_the_same(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    # Would catch `xorl config show` printing what cannot be read back, or what reads back otherwise.
    source = tmp_path / "a.yaml"
    source.write_text(
        "model: {model_path: m}\n"
        "data:\n  datasets: [{path: a, data_files: [b, c], ds_type: csv}, {path: d}]\n  val_set_size: 0.05\n"
        "train: {output_dir: 'o: p', lr: 1e-5, lr_min: 0, lr_decay_style: linear, recompute_modules: [mlp]}\n"
    )
    loaded = load_config(source, overrides)
    text = show(loaded)
    (tmp_path / "b.yaml").write_text(text)
    assert load_config(tmp_path / "b.yaml").config == loaded.config
    commented = [line.split("#")[-1].strip() for line in text.splitlines() if "  # " in line]
    shown_origins = [origin for path, origin in loaded.origins.items() if path != "data.datasets"]
    assert sorted(commented) == sorted(shown_origins)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a/b.c", "a/b.c"),
        ("1e5", '"1e5"'),
        (".5", '".5"'),
        ("true", '"true"'),
        ("no", "no"),
        ("", '""'),
        ("a: b", '"a: b"'),
        ("a ", '"a "'),
        ("é", '"é"'),
        ("${A}", '"$${A}"'),
        (None, "null"),
        (True, "true"),
        (1e-5, "1e-05"),
        (["a", 1], "[a, 1]"),
        ({"a": None}, "{a: null}"),
    ],
)
def test_yaml_text_quotes_what_would_be_read_otherwise(value: object, text: str) -> None:
    # Would catch a message or a file in which a string has become a number.
    assert yaml_text(value) == text


def test_there_are_examples() -> None:
    # Would catch a test below that looks into the wrong folder.
    assert min(len(LOCAL_EXAMPLES), len(SERVER_EXAMPLES)) >= 3


@pytest.mark.parametrize("path", [*LOCAL_EXAMPLES, *SERVER_EXAMPLES], ids=lambda path: path.name)
def test_the_examples_are_sound(path: Path) -> None:
    # Would catch an example that no longer runs, and one that does not say what it is.
    (load_server_config if path in SERVER_EXAMPLES else load_config)(path)
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_the_readme_is_sound(tmp_path: Path) -> None:
    # Would catch a README whose configuration no longer loads, or whose exit codes are not those of the code.
    text = README.read_text(encoding="utf-8")
    block = re.search(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert block
    (tmp_path / "a.yaml").write_text(block.group(1))
    load_config(tmp_path / "a.yaml")
    codes = re.findall(r"^\| (\d[\w +]*) \|", text, re.MULTILINE)
    assert codes == re.findall(r"^\| (\d[\w +]*) \|", exit_codes.__doc__ or "", re.MULTILINE)
