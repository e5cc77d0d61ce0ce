"""Errors of the libraries name arguments; within the command they name options, with the line in the file."""

from pathlib import Path

import pytest

from xorl.config import load_config
from xorl.config.arguments import OPTIONS, in_options, naming_options
from xorl.config.load import LOCAL
from xorl.config.options import all_options
from xorl.core.mesh import ParallelDims
from xorl.core.parallel import ParallelPolicy
from xorl.data import DatasetEntry, PrepareOptions, pack, prepare
from xorl.data.plan import DataPlan
from xorl.kernels.quant import QuantScheme


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("bin_len: 0, want at least 1", "data.sample_packing_sequence_len: 0, want at least 1"),
        ("set skip_prepare=False", "set data.skip_prepare_dataset: false"),
        ('ignore it with columns=["input_ids"]', "ignore it with data.select_columns: [input_ids]"),
        ('set fp8="none" here', "set train.fp8: none here"),
        ("mode: none runs one rank", "train.data_parallel_mode: none runs one rank"),
        ("the mode: of a file", "the mode: of a file"),
        ("entries[0].num_epochs: 0", "data.datasets[0].num_epochs: 0"),
        ("data.datasets[0]: set weight or num_epochs", "data.datasets[0]: set weight or num_epochs"),
        ("num_epochs: 0, want 1", "train.num_train_epochs: 0, want 1"),
        ("/data/bin_len/rows.jsonl of my-bin_len", "/data/bin_len/rows.jsonl of my-bin_len"),
        ("set compile_backend=None", "set train.enable_compile: false"),
        ("train.max_steps: 0", "train.max_steps: 0"),
        ("entries[0].column_names: 'q' is not valid", "data.datasets[0].columns: 'q' is not valid"),
        ("line 2: want text (set column_names to use others)", "line 2: want text (set columns to use others)"),
        ("column 'p' (column_names: system) does not exist", "column 'p' (columns: system) does not exist"),
    ],
)
def test_arguments_become_options_where_they_are_meant(message: str, expected: str) -> None:
    # Catches a file or a word of the language that is taken for an argument.
    assert in_options(message) == expected
    assert in_options(expected) == expected


def test_the_table_names_options_that_exist() -> None:
    # Catches an option that was renamed.
    known = all_options(LOCAL.root).keys()
    named = [word for text in OPTIONS.values() for word in text.split() if "." in word]
    assert not [option for option in named if option not in known and option != "data.datasets"]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: pack([1], bin_len=4, group_size=0), "^lora.quant_group_size|^data.sample_packing_group_size"),
        (lambda: QuantScheme("nf4", 24), "^lora.quant_group_size: 24 is not"),
        (lambda: prepare([], PrepareOptions(bin_len=4)), "^data.datasets is empty"),
        (
            lambda: prepare([DatasetEntry("dummy", type="x")], PrepareOptions(bin_len=4)),
            r"^data.datasets\[0\].type: 'x'",
        ),
        (
            lambda: DataPlan(3, 8, "data"),
            r"(?s)^train.gradient_accumulation_steps x train.micro_batch_size.*takes 8 bins.*lower "
            r"data.sample_packing_sequence_len.*set data.dataloader_drop_last: false$",
        ),
        (
            lambda: ParallelDims.resolve("ddp", 2, shard_size=2),
            "^train.data_parallel_shard_size: 2 needs train.data_parallel_mode: fsdp2, not ddp$",
        ),
        (lambda: ParallelPolicy(data_parallel_mode="ddp", cpu_offload=True), "^train.enable_cpu_offload: needs"),
    ],
)
def test_errors_of_libraries_name_options_within_the_command(call, expected) -> None:
    # Catches a message of the command that names an argument of a function that its user never called.
    with pytest.raises(ValueError, match=expected), naming_options():
        call()


def test_an_error_of_a_library_cites_the_line(tmp_path: Path) -> None:
    # Catches the loss of the line when a library names its argument.
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {model_path: m}\ndata:\n  datasets: [{path: d}]\n  val_set_size: 5\ntrain: {output_dir: o}\n"
    )
    with pytest.raises(ValueError, match=r"config.yaml:4: data.val_set_size: 5 of 2"), load_config(file).citing():
        raise ValueError("val_set_size: 5 of 2 documents cannot be held out")


def test_a_configuration_is_loaded_by_text_and_with_a_mapping_of_options(tmp_path: Path) -> None:
    # Catches a caller in Python who has to write a command line.
    file = tmp_path / "config.yaml"
    file.write_text("model: {model_path: m}\ndata: {datasets: [{path: d}]}\ntrain: {output_dir: o}\n")
    loaded = load_config(str(file), {"train.lr": 3e-4, "data.select_columns": ["input_ids"], "train.max_steps": None})
    assert loaded.config.train.lr == 3e-4
    assert list(loaded.config.data.select_columns or ()) == ["input_ids"]
    with pytest.raises(ValueError, match=r"train.lrr"):
        load_config(file, {"train.lrr": 1})
