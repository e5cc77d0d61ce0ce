"""What a user passes wrongly is an error that names the argument, and says what to do."""

import math
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch

from tiny_runs import Tensors
from xorl.ckpt import Checkpointer, CheckpointError, Retention, SafetensorsSource, export_hf, load_weights
from xorl.ckpt.export import parameter_groups, published, write_model
from xorl.ckpt.reader import SameTensor
from xorl.ckpt.regions import Piece
from xorl.ckpt.tensor_file import write_tensor_file

WEIGHTS = {"w": torch.zeros(2, 2)}
INTEGER_PIECE = Piece(WEIGHTS["w"].int(), WEIGHTS["w"].shape, [((0, 0), WEIGHTS["w"].shape)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 20.0}, "step: 20.0 is not an int of at least 0"),
        ({"step": True}, "step: True is not an int"),
        ({"step": "20"}, "step: '20' is not an int"),
        ({"step": -1}, "step: -1 is not an int"),
        ({"state": torch.nn.Linear(2, 2)}, "state: the Linear is not a mapping of names to parts"),
        ({"state": {"model": OrderedDict(WEIGHTS)}}, "state: model: the OrderedDict is not an object with"),
        ({"state": {"w": torch.zeros(2)}}, "state: w: the Tensor is not an object with state_dict"),
        ({"state": {}}, "state: the dict is not a mapping of names to one part or more"),
        ({"state": {"epoch": 3}}, "state: epoch: 3 is not an object with state_dict"),
        ({"state": {"a.b": Tensors()}}, "state: 'a.b' is not a valid name for a part of the state"),
        # Only an unrestricted unpickler could read these back.
        ({"state": {"model": Tensors(step=3)}}, "state: model.step is of type int"),
        ({"state": {"model": Tensors(w=WEIGHTS["w"].to("meta"))}}, "state: model.w is sparse, on the meta device"),
        ({"rng": torch.get_rng_state()}, "rng: the Tensor is not a mapping"),
        ({"info": [1]}, "info: the list is not a mapping"),
        ({"scalars": 1}, "scalars: 1 is not a mapping"),
        ({"name": "a/b"}, "name: 'a/b' is not the name of a folder"),
        ({"name": ".."}, "name: '..' is not the name"),
        ({"name": ".saving_1"}, "name: '.saving_1' is not the name"),
        ({"name": ""}, "name: '' is not the name"),
        ({"name": "latest"}, "name: 'latest' is not the name"),
        ({"scalars": {"milestones": {2: 1}}}, "scalars: the key 2 would come back as a string"),
        ({"info": {"path": object()}}, "info: must be JSON with finite numbers"),
        ({"info": {"loss": math.nan}}, "info: must be JSON with finite numbers"),
        ({"scalars": {"path": object()}}, "scalars: must be JSON with finite numbers"),
        ({"scalars": {"loss": math.nan}}, "scalars: must be JSON with finite numbers"),
        ({"background": True}, "background: True is not a BackgroundWriter"),
        ({"replaces": True}, "replaces: only a checkpoint with a name"),
        ({"name": "global_step_7"}, "name: 'global_step_7' is the name of another step than 1"),
        ({"on_published": 3}, "on_published: 3 is not a function"),
        ({"write_extra_files": 3}, "write_extra_files: 3 is not a function"),
    ],
)
def test_arguments_of_a_save_are_checked(arguments, message, tmp_path, make_state):
    # Catches a checkpoint that can never be found or loaded, and a mistake reported as a failure of the environment.
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}"):
        Checkpointer(tmp_path / "root").save(**{"step": 1, "state": make_state(), **arguments})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: Checkpointer(root, retention=3), "retention: 3 is not a Retention"),
        (lambda root: Checkpointer(root, manager="zip"), "'zip' is unknown; use one of dcp, torch"),
        (lambda _: Retention(last="3"), "last: '3' is not an int of at least 1"),
        (lambda _: Retention(last=0), "last: 0 is not an int of at least 1"),
        (lambda _: Retention(last=2, best=0), "best: 0 is not an int of at least 1"),
        (lambda _: Retention(last=2, best=1), "best: 1 is not possible without `losses`"),
        (lambda _: Retention(last=2, best=1, losses={1: 0.1}), "losses: the dict is not a function"),
    ],
)
def test_how_checkpoints_are_stored_and_kept_is_checked_at_once(make, message, tmp_path):
    # Catches an error that is raised only after a checkpoint was published.
    with pytest.raises(CheckpointError, match=message):
        make(tmp_path)


def test_losses_by_other_keys_than_steps_remove_nothing(tmp_path, make_state):
    # Catches a best checkpoint that is removed because its step is text, as in a file of JSON.
    checkpointer = Checkpointer(tmp_path, retention=Retention(last=1, best=1, losses=lambda: {"1": 0.1}))
    Checkpointer(tmp_path).save(1, make_state())
    with pytest.raises(CheckpointError, match="losses: '1' is not a step, which is an int"):
        checkpointer.save(2, make_state())
    assert [path.name for path in checkpointer.checkpoints()] == ["global_step_1"]
    assert Retention(last=1, best=1, losses=lambda: {np.int64(1): 0.1}).kept([1, 2]) == {1, 2}


def test_parts_to_skip_are_not_loaded_even_if_they_are_passed(tmp_path, make_state, assert_same):
    # Catches an optimizer that is overwritten although the caller leaves it out.
    checkpointer, state = Checkpointer(tmp_path), make_state(2)
    checkpointer.load(checkpointer.save(1, make_state(1)), state, skip_parts=("optimizer",))
    assert_same(state, {"model": make_state(1)["model"], "optimizer": make_state(2)["optimizer"]})


def test_messages_of_a_load_say_what_to_do(tmp_path, make_state, monkeypatch):
    # Catches an advice that is missing, or one that is wrong.
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(1, make_state())
    for given in ("auto", "final"):
        with pytest.raises(CheckpointError, match=rf"no folder .*{given}\. .* pass resolve\('{given}'\)"):
            checkpointer.load(given, make_state())
    with pytest.raises(CheckpointError, match="path: 1 is not the folder of a checkpoint"):
        checkpointer.load(1, make_state())
    model = {"model": make_state()["model"]}
    with pytest.raises(CheckpointError, match=r"has no optimizer: .* skip_parts=\('optimizer',\)"):
        checkpointer.load(path, model)
    with pytest.raises(CheckpointError, match="skip_parts: 'optimizer' is not a tuple"):
        checkpointer.load(path, model, skip_parts="optimizer")
    assert checkpointer.load(path, model, skip_parts=("optimizer",)).step == 1
    (path / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="holds DCP files, of another program or of a checkpoint that is inc"):
        checkpointer.load(path, make_state())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Checkpointer("~/x").root == tmp_path / "x"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hf_config": "config.json"}, "hf_config: 'config.json' is not a mapping"),
        ({"dtype": torch.int8}, "dtype: 'torch.int8' is not a floating-point"),
        ({"dtype": torch.float8_e4m3fn}, "dtype: 'torch.float8_e4m3fn' is not a floating-point .* of at least 16 bits"),
        ({"dtype": "bfloat16"}, "dtype: 'bfloat16' is not a floating-point"),
        ({"tokenizer_folder": "nope"}, "tokenizer_folder: 'nope' is not an existing folder"),
        ({"params": list(WEIGHTS.values())}, "params: the list is not a mapping"),
        ({"folder": "file/out"}, "folder: cannot write to .*file: Not a directory"),
        (
            {"recipes": {"w": SameTensor("w", (1, 2))}},
            r"recipes: the recipe of w is for \[1, 2\], but its shape is \[2, 2\]",
        ),
        (
            {"recipes": {"w": SameTensor("w", (1, 2))}, "gather": WEIGHTS.get},
            r"recipes: the recipe of w is for \[1, 2\], but its shape is \[2, 2\]",
        ),
        ({"max_shard_bytes": "5GB"}, "max_shard_bytes: '5GB' is not a number of bytes of at least 1"),
        ({"max_shard_bytes": 0}, "max_shard_bytes: 0 is not a number of bytes"),
        ({"gather": lambda name: WEIGHTS[name][:1]}, r"the recipe of w is for \[2, 2\], but its shape is \[1, 2\]"),
        ({"recipes": ["w"]}, "recipes: the list is not a mapping of names to recipes"),
        ({"recipes": {"w": (2, 2)}}, "recipes: w: the tuple is not a recipe, such as SameTensor"),
        (
            {"recipes": {name: SameTensor(name, (2, 2)) for name in "wv"}},
            "params: v are missing, though `recipes` has them",
        ),
    ],
)
def test_arguments_of_an_export_are_checked(tmp_path, monkeypatch, arguments, message) -> None:
    # Catches weights that are written as zeros, a tokenizer that is missing, and mistakes reported as failures.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    given = {"params": WEIGHTS, "recipes": None, "folder": "out", "hf_config": {}, **arguments}
    with pytest.raises(CheckpointError, match=message):
        export_hf(**given)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "folder"}, "source: 'folder' is not a WeightSource, such as SafetensorsSource"),
        ({"ignore": ["w"]}, "ignore: the list is not a function"),
        ({"bucket_bytes": 0}, "bucket_bytes: 0 is not an int of at least 1"),
        ({"params": [WEIGHTS["w"]]}, "params: the list is not a mapping"),
        ({"params": {"w": [1.0]}}, "params: w: the list is not a tensor, a Piece or a RowTarget"),
        ({"recipes": ["w"]}, "recipes: the list is not a mapping of names to recipes"),
        ({"recipes": "w"}, "recipes: 'w' is not a mapping of names to recipes"),
        ({"recipes": {"w": (2, 2)}}, "recipes: w: the tuple is not a recipe, such as SameTensor"),
        ({"params": {"w": INTEGER_PIECE}}, "params: w is int32, but the weights are float"),
        ({"params": {"w": WEIGHTS["w"].int()}}, "params: w is int32, but the weights are float32"),
        ({"params": {"w": WEIGHTS["w"].bool()}}, "params: w is bool, but the weights are float32"),
    ],
)
def test_arguments_of_a_load_are_checked(tmp_path, arguments, message) -> None:
    # Catches mistakes of the caller that are reported as failures of the environment, or accepted.
    source = SafetensorsSource(export_hf(WEIGHTS, None, tmp_path / "out", hf_config={}))
    with pytest.raises(CheckpointError, match=message):
        load_weights(**{"params": WEIGHTS, "recipes": None, "source": source, **arguments})
    with pytest.raises(CheckpointError, match=r"it is a file; pass its folder, with single_file='model\.safetensors'"):
        SafetensorsSource(tmp_path / "out" / "model.safetensors")


def test_paths_may_be_text_and_in_the_home(tmp_path, monkeypatch) -> None:
    # Catches "unsupported operand", a folder named ~, and a tokenizer that is left out because its folder is missing.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    groups = parameter_groups(WEIGHTS, {"w": SameTensor("w", (2, 2))})
    with published("~/x"):
        with pytest.raises(CheckpointError, match="tokenizer_folder: 'none' is not an existing folder"):
            write_model("~/.exporting_x", groups, hf_config={}, tokenizer_folder="none")
        write_model("~/.exporting_x", groups, hf_config={}, tokenizer_folder="~/tokenizer")
    names = sorted(path.name for path in (tmp_path / "x").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    write_tensor_file(str(tmp_path / "one.safetensors"), groups)
    assert (tmp_path / "one.safetensors").is_file()
