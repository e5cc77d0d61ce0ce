"""Hugging Face folders are read by ranges of rows, and what is wrong with one is said by file and tensor."""

import json

import pytest
import torch
from safetensors.torch import save_file

from xorl.ckpt import CheckpointError, SafetensorsSource


@pytest.fixture
def indexed(tmp_path, hf_tensors):
    """The same tensors in two files with an index."""
    folder = tmp_path / "indexed"
    folder.mkdir()
    names = sorted(hf_tensors)
    weight_map = {}
    for number, part in enumerate((names[:3], names[3:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: hf_tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_a_fingerprint_is_of_the_tensors_and_not_of_the_files(tmp_path, indexed, hf_tensors):
    # Catches a base that counts as changed because it was divided otherwise, and one that changed without notice.
    def fingerprint(tensors):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with SafetensorsSource(tmp_path) as source:
            assert source.metadata == {"format": "pt"}
            return source.fingerprint()

    whole = fingerprint(hf_tensors)
    with SafetensorsSource(indexed) as source:
        assert source.fingerprint() == whole
    name, tensor = next(iter(hf_tensors.items()))
    others = [
        {**hf_tensors, name: tensor + 1},
        {**hf_tensors, name: tensor.float()},
        {**hf_tensors, name: tensor.reshape(-1)},
        {**hf_tensors, "added": torch.zeros(0)},
        {("renamed" if key == name else key): value for key, value in hf_tensors.items()},
    ]
    # Of a large tensor, its ends and its middle count.
    large = torch.zeros(100, 1000)
    others += [{"large": large.index_fill(0, torch.tensor([row]), 1)} for row in (0, 50, 99)] + [{"large": large}]
    assert len({whole, *map(fingerprint, others)}) == len(others) + 1


def test_one_file_and_many_read_the_same(tmp_path, indexed, hf_tensors):
    # Catches a wrong file for a name, and rows cut at the wrong place.
    save_file(hf_tensors, tmp_path / "model.safetensors")
    for folder in (tmp_path, indexed):
        with SafetensorsSource(folder) as source:
            assert set(source.names()) == set(hf_tensors)
            for name, tensor in hf_tensors.items():
                assert (source.shape(name), source.dtype(name)) == (tuple(tensor.shape), torch.bfloat16)
                assert torch.equal(source.read(name), tensor)
                assert torch.equal(source.read(name, 1, 3), tensor[1:3])
                assert torch.equal(source.read(name, 2, None), tensor[2:])
                assert source.read(name, 1, 1).shape == (0, *tensor.shape[1:])


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.uint8, torch.bool],
)
def test_dtypes_are_known(dtype, tmp_path):
    # Catches a dtype that is read as another.
    save_file({"x": torch.ones(3, 2).to(dtype)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.dtype("x") == dtype
    assert source.read("x", 1, 2).dtype == dtype


def test_missing_weights_say_what_is_there(tmp_path):
    # Catches a bare FileNotFoundError where the folder is a wrong one or holds pickles.
    with pytest.raises(CheckpointError, match="no such folder"):
        SafetensorsSource(tmp_path / "none")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin; pickled weights are not supported"):
        SafetensorsSource(tmp_path)


def test_index_that_is_wrong_names_the_file(indexed):
    # Catches an index whose file is gone, that is not one, or that leads out of the folder.
    index = indexed / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    (indexed / "model-00002-of-00002.safetensors").rename(indexed / "elsewhere")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing.*lists 4 tensors"):
        SafetensorsSource(indexed)
    (indexed / "elsewhere").rename(indexed / "model-00002-of-00002.safetensors")
    for text, message in (
        ("{", "cannot be used"),
        ("[]", "cannot be used"),
        ('{"weight_map": {"a": 1}}', "not a mapping"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not a file in the same folder"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=rf"index\.json.*{message}"):
            SafetensorsSource(indexed)
    good["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(good))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: tensor 'ghost' cannot be read"):
        SafetensorsSource(indexed).shape("ghost")


def test_truncated_file_is_named(indexed):
    # Catches a half downloaded file that fails without saying which.
    file = indexed / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors cannot be read as safetensors"):
        SafetensorsSource(indexed).read("b")


def test_unknown_tensor_names_the_folder(indexed):
    # Catches a KeyError with nothing but a name.
    with pytest.raises(CheckpointError, match="indexed contains no tensor 'nothing'"):
        SafetensorsSource(indexed).read("nothing")
