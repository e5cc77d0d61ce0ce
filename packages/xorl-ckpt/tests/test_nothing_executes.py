"""A checkpoint from elsewhere is data: loading it runs nothing, whatever it holds."""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp

from tiny_runs import Tensors
from xorl.ckpt import Checkpointer, CheckpointError, read_manifest
from xorl.ckpt.files import hash_file
from xorl.ckpt.layout import Manifest
from xorl.ckpt.metadata import read_metadata


class Bomb:
    """Creates a file where it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def reseal(folder: Path, **changes: object) -> None:
    """Make the manifest agree with the files, as one who crafts a checkpoint would."""
    manifest = read_manifest(folder)
    files = {name: hash_file(folder / name) for name in manifest.files if (folder / name).exists()}
    (folder / "metadata.json").write_text(replace(manifest, files=files, **changes).to_json())


@pytest.fixture
def folder(tmp_path, make_state):
    return Checkpointer(tmp_path / "checkpoints").save(1, make_state(1))


@pytest.fixture
def refused(make_state) -> Callable[[Path, str], None]:
    def check(folder: Path, match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            Checkpointer(folder.parent).load(folder, make_state(2))

    return check


def true_metadata(folder: Path) -> dcp.Metadata:
    with (folder / ".metadata").open("rb") as stream:
        return pickle.load(stream)  # noqa: S301  (written by this test)


def test_our_own_metadata_is_read_as_torch_reads_it(folder):
    # Catches a torch that writes its metadata in other classes, and a reader that loses a field.
    expected = true_metadata(folder)
    found = read_metadata(folder, read_manifest(folder).files)
    assert found.storage_data == expected.storage_data
    assert found.state_dict_metadata == expected.state_dict_metadata


def test_payload_in_metadata_does_not_run(folder, tmp_path, refused):
    # Catches DCP's own reader, which unpickles `.metadata` without restriction.
    target = tmp_path / "executed"
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(target)))
    reseal(folder)
    refused(folder, r"\.metadata cannot be used: .*posix\.mkdir")
    assert not target.exists()
    true_reader = dcp_files.FileSystemReader(folder)
    with pytest.raises(AttributeError):
        true_reader.read_metadata()
    assert target.exists(), "the payload is a real one"


def test_metadata_cannot_reach_into_allowed_classes(folder):
    # Catches a pickle that alters torch's own classes or functions through the names it may use.
    crafted = [
        b"\x80\x04c" + dcp.__name__.encode() + b"\nMetadata\n(N}\x8c\x07version\x8c\x01xs\x86b.",
        b"\x80\x04ctorch.serialization\n_get_layout\n}\x8c\x05cache}sb.",
        b"\x80\x04ctorch.serialization\n_get_layout.__globals__\n.",
        b"\x80\x04ctorch\nload\n.",
        b"\x80\x04ctorch\nhub.load\n.",
    ]
    version, cache = dcp.Metadata.version, torch.serialization._get_layout.cache
    for content in crafted:
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be used"):
            read_metadata(folder, read_manifest(folder).files)
    assert (dcp.Metadata.version, torch.serialization._get_layout.cache) == (version, cache)


@pytest.mark.parametrize(
    ("is_bytes", "told"), [(True, "BytesStorageMetadata"), (False, "could not read .*global_step_1")]
)
def test_payload_in_a_shard_does_not_run(folder, tmp_path, refused, is_bytes, told):
    # Catches the second door, by which DCP unpickles what its metadata calls bytes without restriction, and tensors
    # that are read without `weights_only`.
    target = tmp_path / "executed"
    torch.save(Bomb(target), folder / "__0_0.distcp")
    metadata = true_metadata(folder)
    if is_bytes:
        metadata.state_dict_metadata["model.experts"] = dcp.BytesStorageMetadata()
    else:
        size = (folder / "__0_0.distcp").stat().st_size
        for index in metadata.storage_data:
            metadata.storage_data[index] = dcp_files._StorageInfo("__0_0.distcp", 0, size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(folder)
    refused(folder, told)
    assert not target.exists()


def test_payload_in_a_gathered_file_does_not_run(tmp_path, make_state, refused):
    # Catches the same in the other kind of checkpoint, and a dict that holds more than tensors.
    folder = Checkpointer(tmp_path / "checkpoints", manager="torch").save(1, make_state(1))
    target = tmp_path / "executed"
    for content in (Bomb(target), {"model.experts": Bomb(target)}, {"model.experts": "text"}, [1]):
        torch.save(content, folder / "state.pt")
        reseal(folder)
        refused(folder, r"state\.pt cannot be used")
    assert not target.exists()


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", "../latest"), "not a file of"),
        (lambda m: setattr(next(iter(m.storage_data.values())), "transform_descriptors", ["zip"]), "not supported"),
        (lambda m: m.state_dict_metadata["model.experts"].chunks.clear(), "hold 0 of 24 values"),
        (lambda m: setattr(m.state_dict_metadata["model.experts"], "size", torch.Size([2])), "hold 24 of 2 values"),
        (lambda m: setattr(m, "storage_data", None), "expected a dict"),
    ],
)
def test_metadata_that_does_not_add_up_is_refused(alter, message, folder, refused):
    # Catches reads outside the folder, and tensors that would be loaded in part.
    metadata = true_metadata(folder)
    alter(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(folder)
    refused(folder, message)


def test_manifest_cannot_name_files_elsewhere(folder):
    # Catches a crafted manifest, hash and all, that has files outside its folder read.
    manifest = read_manifest(folder)
    for name in ("../latest", "/tmp/x", "a/../../b", ""):
        crafted = replace(manifest, files={name: next(iter(manifest.files.values()))})
        with pytest.raises(ValueError, match="not inside the checkpoint"):
            Manifest.from_json(crafted.to_json())


def test_shape_in_the_manifest_alone_does_not_pass(folder, make_state):
    # Catches a crafted manifest that promises what the shards do not hold.
    tensors = dict(read_manifest(folder).tensors)
    state = make_state(2)
    state["model"]["experts"] = torch.zeros(3, 2, 5)
    tensors["model.experts"] = replace(tensors["model.experts"], shape=(3, 2, 5))
    reseal(folder, tensors=tensors)
    with pytest.raises(CheckpointError, match="could not read"):
        Checkpointer(folder.parent).load(folder, {name: Tensors(part) for name, part in state.items()})
