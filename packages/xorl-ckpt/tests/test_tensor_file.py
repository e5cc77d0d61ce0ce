"""Files of tensors that are written as they come, and the parameters of a checkpoint read one at a time."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tiny_runs import Tensors
from xorl.ckpt import Checkpointer, CheckpointError, CheckpointFailure
from xorl.ckpt.export import published
from xorl.ckpt.files import write_file
from xorl.ckpt.layout import TensorRecord, verify
from xorl.ckpt.reader import SameTensor
from xorl.ckpt.saved_tensors import SavedParameters
from xorl.ckpt.tensor_file import TensorGroup, write_tensor_file

TENSORS = {
    "narrow": torch.arange(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    "eighth": torch.arange(5).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False]),
}


def groups_of(tensors):
    records = {name: TensorRecord.of(t) for name, t in tensors.items()}
    return [TensorGroup({name: records[name]}, lambda name=name: {name: tensors[name]}) for name in tensors]


def test_every_dtype_and_shape_is_read_as_it_was_written(tmp_path):
    # Catches a header that other readers refuse, and values of one dtype that begin where they cannot be viewed.
    record = write_tensor_file(tmp_path / "x.safetensors", groups_of(TENSORS))
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].float(), tensor.float()), name
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert record is not None
    assert record.size == (tmp_path / "x.safetensors").stat().st_size


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    # Catches an export of which a reader sees half, and one that is written over another.
    def fail():
        raise CheckpointFailure("no more")

    bad = TensorGroup({"y": TensorRecord((1,), "float32")}, fail)
    with pytest.raises(CheckpointFailure, match="no more"), published(tmp_path / "new") as temporary:
        write_tensor_file(temporary / "x.safetensors", [*groups_of(TENSORS), bad])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), published(tmp_path / "new") as temporary:
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with published(tmp_path / "new") as temporary:
        write_tensor_file(temporary / "x.safetensors", groups_of(TENSORS))
        assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.safetensors"]
    with pytest.raises(CheckpointError, match="never overwrites it"), published(tmp_path / "new"):
        pass


def test_parameters_of_a_checkpoint_are_read_one_at_a_time(manager, params, recipes, hf_tensors, tmp_path):
    # Catches parameters under another name or taken apart wrongly, where no model is there to load them into.
    path = Checkpointer(tmp_path / "root", manager=manager).save(1, {"model": Tensors(params)})
    saved = SavedParameters(path, "model", recipes)
    assert set(saved.names()) == hf_tensors.keys()
    for name, tensor in hf_tensors.items():
        assert saved.shape(name) == tuple(tensor.shape)
        assert saved.dtype(name) == tensor.dtype
        assert torch.equal(saved.read(name), tensor)
        assert torch.equal(saved.read(name, 1, 2), tensor[1:2])
    assert SavedParameters.holds(path, "model", params)
    with pytest.raises(CheckpointError, match="does not contain"):
        SavedParameters(path, "optimizer", recipes)
    narrow = {**recipes, "bias": SameTensor("b", (4,))}
    with pytest.raises(CheckpointError, match=r"recipes: the recipe of bias is for \[4\], but its shape is \[5\]"):
        SavedParameters(path, "model", narrow)


def test_files_of_the_callers_own_are_part_of_a_checkpoint(tmp_path):
    # Catches files beside the tensors that no hash covers.
    def write(folder):
        return {"note.json": write_file(folder / "note.json", json.dumps([1]).encode())}

    path = Checkpointer(tmp_path).save(1, {"model": Tensors(x=torch.ones(2))}, write_extra_files=write)
    verify(path)
    (path / "note.json").write_text("[2]")
    with pytest.raises(CheckpointError, match=r"note\.json"):
        verify(path)
