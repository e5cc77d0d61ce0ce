"""A local folder wins; what is not there is said plainly, and nothing hangs without a network."""

import pytest

from xorl.ckpt import CheckpointError, CheckpointFailure, resolve_folder


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_local_folder_wins(tmp_path, monkeypatch):
    # Catches a look-up on the Hub for a folder that is here, also when its name could be an id.
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("org/model") == tmp_path / "org" / "model"
    assert resolve_folder(tmp_path / "org") == tmp_path / "org"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        *((path, "there is no folder") for path in ("/no/such/folder", "./none", "../none", "~/none", "a/b/c", "")),
        (__file__, "is a file"),
        ("no spaces here", "neither a folder nor the id"),
    ],
)
def test_what_is_no_folder_is_not_asked_of_the_hub(path, message):
    # Catches "repository not found" for a mistyped path or one of a file, and a validation error of another library.
    with pytest.raises(CheckpointError, match=message):
        resolve_folder(path)


def test_without_a_network_the_way_out_is_said(tmp_path, monkeypatch):
    # Catches a connection traceback of forty lines.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointFailure, match="the Hub cannot be reached"):
        resolve_folder("some-organisation/some-model")
