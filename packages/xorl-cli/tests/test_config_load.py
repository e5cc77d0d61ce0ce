"""Reading a configuration: places, all problems at once, YAML 1.2, variables, overrides and strict types."""

import re
import textwrap
from pathlib import Path

import pytest

from xorl.config import ConfigError, LoadedConfig, config_from_mapping, load_config
from xorl.config.document import read_document

SOUND = """\
model:
  config_path: models/tiny
data:
  datasets:
    - path: a.jsonl
train:
  output_dir: outputs/a
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that writes config.yaml, by which name it is then cited."""
    monkeypatch.chdir(tmp_path)

    def write_text(text: str) -> Path:
        path = Path("config.yaml")
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write_text


def with_lines(section: str, *lines: str) -> str:
    """Returns the sound configuration with lines added below a section."""
    added = "".join(f"  {line}\n" for line in lines)
    return SOUND.replace(f"{section}:\n", f"{section}:\n{added}", 1)


def problems_of(path: Path, *overrides: str) -> list[tuple[str, str, str]]:
    """Returns (where, path, message) of each problem."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [(problem.origin.where, problem.path, problem.message) for problem in caught.value.problems]


def load(write, *lines: str, overrides: tuple[str, ...] = ()) -> LoadedConfig:
    return load_config(write(with_lines("train", *lines)), overrides)


def test_a_sound_configuration_is_read_with_its_origins(write) -> None:
    # Would catch values or origins that end up at another option.
    loaded = load(write, "lr: 1e-5", overrides=("--train.max_steps", "7"))
    train = loaded.config.train
    assert (train.lr, train.max_steps, train.output_dir, train.optimizer) == (1e-5, 7, "outputs/a", "adamw")
    origins = loaded.origins
    assert origins["train.lr"] == "config.yaml:7"
    assert origins["train.max_steps"] == "--train.max_steps"
    assert origins["data.datasets.0.path"] == "config.yaml:5"
    assert origins["data.datasets.0.type"] == "default"
    assert loaded.is_set("train.lr")
    assert not loaded.is_set("train.optimizer")


@pytest.mark.parametrize(
    ("section", "line", "path", "wanted"),
    [
        ("train", "lrr: 1", "train.lrr", ["unknown option", "did you mean train.lr?"]),
        ("train", "merge_qkv: false", "train.merge_qkv", ["merge_qkv belongs in section model: model.merge_qkv"]),
        ("model", "optimiser: sgd", "model.optimiser", ["did you mean train.optimizer (in section train)?"]),
        ("train", "learning_rate: 1", "train.learning_rate", ["did you mean train.lr"]),
        ("train", "epochs: 1", "train.epochs", ["did you mean train.num_train_epochs?"]),
        ("train", "num_epochs: 1", "train.num_epochs", ["did you mean train.num_train_epochs?"]),
        ("data", "num_epochs: 1", "data.num_epochs", ["belongs in the entries of data.datasets"]),
        ("data", "max_seq_len: 5", "data.max_seq_len", ["the entries of data.datasets: data.datasets[].max_seq_len"]),
        ("train", "zzzz: 1", "train.zzzz", ["unknown option", "xorl config docs train"]),
        ("train", 'micro_batch_size: "8"', "train.micro_batch_size", ["integer >= 1", '"8" (a string)', "write 8"]),
        ("train", "micro_batch_size: true", "train.micro_batch_size", ["integer >= 1", "got true"]),
        ("train", "micro_batch_size: 2.0", "train.micro_batch_size", ["integer >= 1", "got 2.0", "write 2"]),
        ("train", "micro_batch_size: null", "train.micro_batch_size", ["integer >= 1", "got null"]),
        ("train", "micro_batch_size: 0", "train.micro_batch_size", ["integer >= 1", "got 0"]),
        ("train", "lr: true", "train.lr", ["number >= 0", "got true"]),
        ("train", "lr: .nan", "train.lr", ["number >= 0", "got NaN"]),
        ("train", "lr: .inf", "train.lr", ["number >= 0"]),
        ("train", "lr: 1_000.5", "train.lr", ["number >= 0", "write 1000.5, without underscores"]),
        ("train", "max_steps: 1_000", "train.max_steps", ["write 1000, without underscores"]),
        ("train", "enable_reentrant: no", "train.enable_reentrant", ["no is a string in YAML 1.2; write false"]),
        ("train", "enable_reentrant: 1", "train.enable_reentrant", ["true or false", "got 1"]),
        ("train", "optimizer: adam", "train.optimizer", ["one of adamw", "did you mean adamw?"]),
        ("train", "wandb_name: 5", "train.wandb_name", ["string or null", 'add quotes: "5"']),
        ("train", "wandb_tags: a", "train.wandb_tags", ["list of strings or null", "write [a]"]),
        ("train", "wandb_tags: a, b", "train.wandb_tags", ["write [a, b]"]),
        ("train", "wandb_tags: [a, 5]", "train.wandb_tags.1", ["list of strings or null", 'add quotes: "5"']),
        ("train", "recompute_modules: [attn]", "train.recompute_modules.0", ["list of self_attn, mlp"]),
        ("train", "recompute_modules: [mlpp]", "train.recompute_modules.0", ["list of self_attn, mlp", "mean mlp?"]),
        ("train", "recompute_modules: []", "train.recompute_modules", ["not empty", "the value is empty"]),
        ("train", "lr_warmup_ratio: 1.5", "train.lr_warmup_ratio", ["number >= 0 and <= 1", "got 1.5"]),
        ("train", "muon_momentum: 1", "train.muon_momentum", ["number >= 0 and < 1"]),
        ("train", "data_parallel_shard_size: 0", "train.data_parallel_shard_size", ["-1 or integer >= 1", "got 0"]),
        ("train", "seed: -1", "train.seed", ["integer >= 0 and <= 4294967295"]),
        ("data", "val_set_size: 0", "data.val_set_size", ["integer >= 1 or number > 0 and < 1 or null"]),
        ("data", "val_set_size: 1.0", "data.val_set_size", ["integer >= 1 or number > 0 and < 1 or null"]),
        ("data", "test_datasets: [b.jsonl]", "data.test_datasets.0", ["a dataset entry", "write - path: b.jsonl"]),
        ("data", "test_datasets: [{path: b, data_files: 5}]", "data.test_datasets.0.data_files", ["string or list"]),
        ("data", "test_datasets: [{path: b, shrads: 5}]", "data.test_datasets.0.shrads", ["test_datasets.0.shards?"]),
        ("data", "test_datasets: [{split: b}]", "data.test_datasets.0.path", ["required option is missing"]),
        ("model", "deepep_num_sms: 21", "model.deepep_num_sms", ["a multiple of 2"]),
        ("model", "encoders: {smell: {model_path: a}}", "model.encoders.smell", ["mapping"]),
    ],
)  # fmt: skip
def test_a_wrong_value_is_cited_with_what_is_wanted(
    write, section: str, line: str, path: str, wanted: list[str]
) -> None:
    # Would catch a value that is converted silently, and a report that leaves the reader guessing.
    text = with_lines(section, line)
    number = text.splitlines().index(f"  {line}") + 1
    problems = problems_of(write(text))
    assert [(where, at) for where, at, _ in problems] == [(f"config.yaml:{number}", path)]
    assert [part for part in wanted if part not in problems[0][2]] == [], problems[0][2]


@pytest.mark.parametrize(
    ("text", "where", "path", "message"),
    [
        ("", "config.yaml:1", "data.datasets", "required option is missing"),
        ("train:\n  output_dir: a\n", "config.yaml:1", "data.datasets", "required option is missing"),
        ("data:\n  datasets: [{path: a}]\n\ntrain:\n  lr: 1\n", "config.yaml:4", "train.output_dir", "is missing"),
        ("data:\n  datasets: []\n", "config.yaml:2", "data.datasets", "the value is empty"),
        ("- a\n- b\n", "config.yaml:1", "", "expected a mapping with the sections model, data, train, lora"),
        ("moodel: {}\n", "config.yaml:1", "moodel", "did you mean model?"),
        ("lr: 5\n", "config.yaml:1", "lr", "lr belongs in section train: train.lr"),
        ("a: [1\nb: 2\n", "config.yaml:2", "", "invalid YAML"),
        ("train:\n\tlr: 1\n", "config.yaml:2", "", "with spaces, not tabs"),
        ("train: &a {lr: 1}\nlora: *b\n", "config.yaml:2", "lora", "*b is undefined"),
        ("train: {lr: 1}\n---\ntrain: {lr: 2}\n", "config.yaml:2", "", "a second YAML document"),
        ("train: {<<: {lr: 1}}\n", "config.yaml:1", "train", "merge keys (<<) are not supported"),
        ("train: {[a]: 1}\n", "config.yaml:1", "train", "a plain word, not a list"),
        ("train: {lr: !!float 1}\n", "config.yaml:1", "train.lr", "the tag tag:yaml.org,2002:float is not supported"),
        ("train: {wandb_tags: [${A}]}\n", "config.yaml:1", "", "put quotes around a variable"),
        (r'lora: {rank_pattern: {"a\.b": 8}}', "config.yaml:1", "", r"for a backslash, or use single quotes"),
        ("train: 5\n", "config.yaml:1", "train", "mapping"),
    ],
)  # fmt: skip
def test_a_wrong_shape_is_cited(write, text: str, where: str, path: str, message: str) -> None:
    # Would catch a file whose structure is misread, or reported without a place.
    problems = problems_of(write(text))
    assert [found for found in problems if found[:2] == (where, path) and message in found[2]], problems


def test_all_problems_are_reported_at_once(write) -> None:
    # Would catch a checker that stops at the first kind of problem, so that each run shows one more.
    path = write(
        """\
        model:
          model_path: a
          encoders: {video: {model_path: b}}
        data:
          datasets:
            - path: a.jsonl
              shards: 4
              shards_idx: 4
            - pth: b.jsonl
            - c.jsonl
          dataloader_num_workers: 0
          pad_to_multiple_of: 0
        train:
          lrr: 1e-5
          lr: 1e-5
          lr: 2e-5
          micro_batch_size: "8"
          wandb_project: ${XORL_TEST_UNSET}
          enable_profiling: true
          profile_start_step: 7
          profile_end_step: 7
        """
    )
    overrides = ("--model.foo=3", "--train.enable_compile", "--train.save_steps", "-4", "--train.use_wandb", "[")
    problems = problems_of(path, *overrides)
    assert [(where, at) for where, at, _ in problems] == [
        ("config.yaml:3", "model.encoders"),
        ("config.yaml:8", "data.datasets.0.shards_idx"),
        ("config.yaml:9", "data.datasets.1.pth"),
        ("config.yaml:10", "data.datasets.2"),
        ("config.yaml:12", "data.pad_to_multiple_of"),
        ("config.yaml:13", "train.output_dir"),
        ("config.yaml:14", "train.lrr"),
        ("config.yaml:16", "train.lr"),
        ("config.yaml:17", "train.micro_batch_size"),
        ("config.yaml:18", "train.wandb_project"),
        ("config.yaml:21", "train.profile_end_step"),
        ("--train.enable_compile", "train.enable_compile"),
        ("--train.use_wandb", "train.use_wandb"),
        ("--model.foo", "model.foo"),
        ("--train.save_steps", "train.save_steps"),
    ]


def test_the_report_shows_the_lines(write) -> None:
    # Would catch a report without the offending line, or without the other line of a pair.
    path = write(with_lines("train", "lr: 1e-5", "lr: 2e-5"))
    with pytest.raises(ConfigError) as caught:
        load_config(path, ("--train.max_steps", "no"))
    assert str(caught.value) == (
        "config.yaml: 2 problems\n\n"
        "config.yaml:8: train.lr\n"
        "     8 |   lr: 2e-5\n"
        "     7 |   lr: 1e-5\n"
        "       set twice, first at config.yaml:7; remove one of the two\n\n"
        "--train.max_steps\n"
        "       | --train.max_steps no\n"
        '       expected integer >= 1 or null, got "no" (a string)'
    )


def test_a_misspelt_option_is_not_reported_as_missing_too(write) -> None:
    # Would catch two reports for one mistake.
    assert [at for _, at, _ in problems_of(write(SOUND.replace("output_dir", "outptu_dir")))] == ["train.outptu_dir"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("0x1F", 31),
        ("0o17", 15),
        ("017", 17),
        ("-1", -1),
        ("1e-5", 1e-5),
        ("1.", 1.0),
        (".5", 0.5),
        ("+1E3", 1000.0),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("Yes", "Yes"),
        ("off", "off"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("nUll", "nUll"),
        ("tRue", "tRue"),
        ("'1e-5'", "1e-5"),
        ('"true"', "true"),
        ("!!str 5", "5"),
        ("|\n  a\n  b\n", "a\nb\n"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    # Would catch `lr: 1e-5` read as a string, `no` as false and 1:30 as ninety.
    document = read_document(f"x: {text}", "config.yaml")
    read = document.root.nearest(["x"]).value
    assert (type(read), read, document.problems) == (type(value), value, [])


def test_an_empty_section_has_its_defaults(write) -> None:
    # Would catch a section whose options are all commented out and which is then refused as null.
    assert load_config(write(SOUND + "lora:\n")).config.lora.lora_rank == 16


def test_anchors_are_copies(write) -> None:
    # Would catch an override of one dataset that changes the other, which stands for the same lines.
    text = SOUND.replace("    - path: a.jsonl\n", "    - &entry\n      path: a.jsonl\n      name: x\n    - *entry\n")
    data = load_config(write(text), ("--data.datasets.1.path", "b.jsonl")).config.data
    assert [(entry.path, entry.name) for entry in data.datasets] == [("a.jsonl", "x"), ("b.jsonl", "x")]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${XORL_TEST_A}", "alpha"),
        ("${XORL_TEST_A}/x/${XORL_TEST_A}", "alpha/x/alpha"),
        ("'${XORL_TEST_A}'", "alpha"),
        ("${XORL_TEST_UNSET:-b c}", "b c"),
        ("${XORL_TEST_EMPTY:-b}", "b"),
        ("$${XORL_TEST_A}", "${XORL_TEST_A}"),
        ("$HOME", "$HOME"),
    ],
)
def test_variables_are_substituted(write, monkeypatch: pytest.MonkeyPatch, text: str, value: str) -> None:
    # Would catch variables left as they stand, or replaced in text that only looks like one.
    monkeypatch.setenv("XORL_TEST_A", "alpha")
    monkeypatch.setenv("XORL_TEST_EMPTY", "")
    monkeypatch.delenv("XORL_TEST_UNSET", raising=False)
    assert load(write, f"wandb_name: {text}").config.train.wandb_name == value


def test_a_variable_can_hold_a_number(write, monkeypatch: pytest.MonkeyPatch) -> None:
    # Would catch `lr: ${LR}` refused as a string, and an origin that hides the variable.
    monkeypatch.setenv("XORL_TEST_LR", "1e-5")
    loaded = load(write, "lr: ${XORL_TEST_LR}")
    assert (loaded.config.train.lr, loaded.origins["train.lr"]) == (1e-5, "config.yaml:7, environment XORL_TEST_LR")


@pytest.mark.parametrize("text", ["${XORL_TEST_UNSET}", "${XORL_TEST_UNSET", "${1}", "${}", "a ${ b"])
def test_a_variable_that_cannot_be_substituted_is_cited(write, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    # Would catch a path that starts with nothing, since a variable was not set.
    monkeypatch.delenv("XORL_TEST_UNSET", raising=False)
    problems = problems_of(write(with_lines("train", f"wandb_name: {text}")))
    assert [(where, at) for where, at, _ in problems] == [("config.yaml:7", "train.wandb_name")]


@pytest.mark.parametrize(
    ("arguments", "section", "name", "value"),
    [
        (["--train.lr", "2e-5"], "train", "lr", 2e-5),
        (["--train.lr=2e-5"], "train", "lr", 2e-5),
        (["--train.lr", "1", "--train.lr", "2"], "train", "lr", 2.0),
        (["--train.data_parallel_shard_size", "-1"], "train", "data_parallel_shard_size", -1),
        (["--train.wandb_tags", "[a, b c]"], "train", "wandb_tags", ["a", "b c"]),
        (["--train.wandb_name", '"5"'], "train", "wandb_name", "5"),
        (["--train.wandb_name=a=b"], "train", "wandb_name", "a=b"),
        (["--train.wandb_name=--x"], "train", "wandb_name", "--x"),
        (["--train.max_steps", "null"], "train", "max_steps", None),
        (["--train.max_steps="], "train", "max_steps", None),
        (["--lora.lora_target_modules", "null"], "lora", "lora_target_modules", None),
    ],
)
def test_overrides_are_yaml(write, arguments: list[str], section: str, name: str, value: object) -> None:
    # Would catch an override read as text, an integer where a number is wanted, or a value taken for the next argument.
    loaded = load(write, overrides=tuple(arguments))
    found = getattr(getattr(loaded.config, section), name)
    assert (type(found), found) == (type(value), value)
    assert loaded.origins[f"{section}.{name}"] == f"--{section}.{name}"


def test_overrides_reach_into_lists(write) -> None:
    # Would catch an override of one dataset that replaces the list.
    overrides = ("--data.datasets.0.name", "x", "--data.datasets.1.path", "b.jsonl", "--data.datasets.1.split=train")
    loaded = load(write, overrides=overrides)
    entries = [(entry.path, entry.name, entry.split) for entry in loaded.config.data.datasets]
    assert entries == [("a.jsonl", "x", None), ("b.jsonl", None, "train")]
    assert loaded.origins["data.datasets.1.path"] == "--data.datasets.1.path"
    whole = load(write, overrides=("--data.datasets", "[{path: c.jsonl}]"))
    assert [entry.path for entry in whole.config.data.datasets] == ["c.jsonl"]


def test_a_tilde_means_the_home_folder_in_every_path(write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Would catch results in a folder named ~ beside the configuration, while files to read are looked for at home.
    monkeypatch.setenv("HOME", str(tmp_path))
    overrides = ["--train.output_dir=~/out", "--data.dataset_prepared_path=~/prepared", "--train.profile_trace_dir=~/t"]
    config = load_config(
        write(SOUND), [*overrides, "--train.enable_profiling=true", "--model.config_path=~/config.json"]
    ).config
    assert config.train.output_dir == f"{tmp_path}/out"
    assert config.data.dataset_prepared_path == f"{tmp_path}/prepared"
    assert config.train.profile_trace_dir == f"{tmp_path}/t"
    assert config.model.config_path == config.model.tokenizer_path == f"{tmp_path}/config.json"


def test_overrides_alone_can_fill_an_empty_file(write) -> None:
    # Would catch an override into a list that does not exist yet, made a mapping.
    overrides = ("--data.datasets.0.path", "a", "--train.output_dir", "o", "--model.model_path", "m")
    assert load_config(write(""), overrides).config.data.datasets[0].path == "a"


def test_an_override_is_not_blamed_for_what_is_missing_beside_it(write) -> None:
    # Would catch "--train.lr: output_dir is missing".
    problems = problems_of(write("model: {model_path: m}\n"), "--train.lr", "1", "--data.datasets.0.name", "x")
    assert [(where, at) for where, at, _ in problems] == [
        ("config.yaml:1", "train.output_dir"),
        ("--data.datasets.0.name", "data.datasets.0.path"),
    ]


@pytest.mark.parametrize(
    ("arguments", "where", "message"),
    [
        (["--train.enable_compile"], "--train.enable_compile", "write --train.enable_compile VALUE"),
        (["--train.enable_reentrant", "--train.lr", "1"], "--train.enable_reentrant", "the value is missing"),
        (["--train.lrr", "1"], "--train.lrr", "did you mean train.lr?"),
        (["--train.lr", "x"], "--train.lr", "number >= 0"),
        (["--train.lr", "[1"], "--train.lr", "invalid YAML"),
        (["--train.wandb_name", "a: b: c"], "--train.wandb_name", "put quotes inside the quotes"),
        (["--lora.rank_pattern", r'{"a\.b": 8}'], "--lora.rank_pattern", r"write \\ for a backslash"),
        (["--train.output_dir", r'"C:\users"'], "--train.output_dir", r"write \\ for a backslash"),
        (["--data.datasets.3.path", "x"], "--data.datasets.3.path", "use 0 to 1, where 1 appends an entry"),
        (["--data.datasets.x.path", "x"], "--data.datasets.x.path", "'x' is not a valid index of data.datasets"),
        (["--train.output_dir.x", "1"], "--train.output_dir.x", "'x' cannot be set in it"),
        (["--trainn.lr", "1"], "--trainn.lr", "did you mean train?"),
        (["train.lr", "1"], "train.lr", "expected an override: --section.field value"),
        (["--train.lr", "${XORL_TEST_UNSET}"], "--train.lr", "XORL_TEST_UNSET is not set"),
        (["--train.fp8", "rowwise", "--train.enable_mixed_precision=false"],
         "--train.fp8", "enable_mixed_precision is true"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_cited_by_its_name(write, arguments: list[str], where: str, message: str) -> None:
    # Would catch a mistake on the command line that is blamed on the file.
    problems = problems_of(write(SOUND), *arguments)
    assert [found for found in problems if found[0] == where and message in found[2]], problems


def test_a_python_mapping_is_checked_alike(tmp_path: Path) -> None:
    # Would catch a program's configuration that goes unchecked, refusals included.
    data = {
        "model": {"model_path": "m"},
        "data": {"datasets": [{"path": tmp_path / "a.jsonl"}]},
        "train": {"output_dir": tmp_path, "lr": 1},
    }
    loaded = config_from_mapping(data)
    assert loaded.config.train.output_dir == str(tmp_path)
    assert (loaded.path, loaded.origins["train.lr"]) == (None, "python")
    data["train"] |= {"init_device": "npu", "lrr": 1}
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(data)
    assert {problem.path for problem in caught.value.problems} == {"train.init_device", "train.lrr"}


def test_a_missing_file_is_named(write, tmp_path: Path) -> None:
    # Would catch a traceback for the most common mistake.
    write(SOUND)
    with pytest.raises(ConfigError, match=r"confiig\.yaml[\s\S]*No such file[\s\S]*did you mean config\.yaml\?"):
        load_config(Path("confiig.yaml"))
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


def test_a_file_that_is_not_text_is_named_with_its_line(write) -> None:
    # Would catch a decoding error without a place.
    path = write("")
    path.write_bytes(b"train:\n  lr: \xff\n")
    assert problems_of(path)[0][0] == "config.yaml:2"


def test_defaults_that_follow_others_are_filled_in(write, monkeypatch: pytest.MonkeyPatch) -> None:
    # Would catch a null that every consumer has to resolve for itself, each in its own way.
    monkeypatch.setenv("XORL_DATASET_NUM_PROC", "3")
    lines = ("enable_full_shard: false", 'load_checkpoint_path: ""', "load_weights_mode: auto")
    loaded = load(write, *lines, overrides=("--data.dataloader_num_workers", "0"))
    config, origins = loaded.config, loaded.origins
    assert config.model.tokenizer_path == "models/tiny"
    assert config.data.dataset_num_proc == 3
    assert config.data.dataloader_prefetch_factor is None
    assert config.train.reshard_after_forward is False
    assert config.train.load_checkpoint_path is None
    assert config.train.load_weights_mode == "broadcast"
    assert origins["data.dataset_num_proc"] == "environment XORL_DATASET_NUM_PROC"
    assert origins["model.tokenizer_path"] == "default, model.config_path"
    assert origins["train.reshard_after_forward"] == "default, train.enable_full_shard"
    assert not loaded.is_set("model.tokenizer_path")


def test_a_wrong_environment_variable_is_bad_input(write, monkeypatch: pytest.MonkeyPatch) -> None:
    # Would catch a crash deep in data preparation.
    monkeypatch.setenv("XORL_DATASET_NUM_PROC", "many")
    assert "XORL_DATASET_NUM_PROC must be an integer >= 1" in problems_of(write(SOUND))[0][2]


def test_a_configuration_does_not_change(write) -> None:
    # Would catch code that edits options after they were checked.
    with pytest.raises(ValueError, match="frozen"):
        load(write).config.train.lr = 1.0


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("train.lr: too high", "config.yaml:7: train.lr: too high"),
        ("train.lr / weight_decay: too high", "config.yaml:7: train.lr / weight_decay: too high"),
        ("data.datasets[0]: empty", "config.yaml:5: data.datasets[0]: empty"),
        ("data.datasets[0].path: not there", "config.yaml:5: data.datasets[0].path: not there"),
        ("data.datasets[0].split: no such", "data.datasets[0].split: no such"),
        ("train.max_steps: too many", "train.max_steps: too many"),
        ("train.optimizer: no", "train.optimizer: no"),
        ("the learning rate is too high", "the learning rate is too high"),
        ("data and model are of two kinds", "data and model are of two kinds"),
    ],
)
def test_what_is_found_later_has_its_place_in_the_file_too(message: str, told: str, write) -> None:
    # Catches a refusal whose line has to be searched for, and one that names a place where nothing was written.
    loaded = load(write, "lr: 1e-5", overrides=("--train.max_steps", "7"))
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"), loaded.citing():
        raise ValueError(message)
