"""Checkpoints fetched whole: one tar, by a URL that needs its signature alone."""

import io
import tarfile
import time
from datetime import UTC, datetime, timedelta

import pytest

from answering_orchestrator import asked_at
from xorl.server.api import checkpoint_routes
from xorl.server.api.archive import Archive
from xorl.server.identifiers import CheckpointRef

FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"weights" * 300_000,
    "empty": b"",
    f"training_state/{'long-' * 30}/rank0.bin": bytes(512),
}
OVER = "over"
ARCHIVE = "/api/v1/training_runs/m:train:0/checkpoints/weights/one.2/archive"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    outputs = tmp_path_factory.mktemp("outputs")
    with asked_at(outputs) as (client, orchestrator):
        for checkpoint in ("one.2", OVER):
            orchestrator.saved(CheckpointRef("m:train:0", "weights", checkpoint))
        folder = outputs / "weights" / "m~train~0" / "one.2"
        for name, content in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        (outputs / "secret").write_bytes(b"secret")
        (folder / "link").symlink_to(outputs / "secret")
        yield client


def test_an_archive_holds_the_files_of_a_checkpoint_and_nothing_else(client):
    """Catches a tar that common tools do not read, lacks a file, follows a link, or differs from call to call."""
    answer = client.get(ARCHIVE)
    assert answer.status_code == 302
    # Clients of this call read the time in this very form.
    expires = datetime.strptime(answer.headers["expires"], "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC)
    assert timedelta(minutes=50) < expires - datetime.now(UTC) < timedelta(minutes=70)
    url = answer.headers["location"]
    fetched = client.get(url)
    assert fetched.headers["content-type"] == "application/x-tar"
    assert int(fetched.headers["content-length"]) == len(fetched.content)
    with tarfile.open(fileobj=io.BytesIO(fetched.content)) as tar:
        assert tar.getnames() == sorted(FILES)
        found = {member.name: tar.extractfile(member).read() for member in tar if member.isreg()}
    assert found == FILES
    assert client.get(url).content == fetched.content


def test_archives_are_refused_without_their_signature(client, monkeypatch):
    """Catches an archive for everybody, one that outlives its time, and one of another checkpoint by the same URL."""
    url = client.get(ARCHIVE).headers["location"]
    path, _, query = url.partition("?")
    refused = {
        path: 422,
        url.replace("signature=", "signature=0"): 403,
        url.replace("expires=", "expires=9"): 403,
        url.replace("one.2", "two"): 403,
        url.replace("weights", "sampler_weights"): 403,
        # What is signed is this path and no file of it.
        f"{path.removesuffix('.tar')}/adapter_config.json?{query}": 403,
        ARCHIVE.replace("one.2", "two"): 404,
        ARCHIVE.replace("one.2", "..%2f..%2fsecret"): 404,
        ARCHIVE.replace("/weights/", "/elsewhere/"): 400,
    }
    assert {asked: client.get(asked).status_code for asked in refused} == refused
    monkeypatch.setattr(checkpoint_routes, "_URL_LIFETIME_S", -1)
    assert client.get(client.get(ARCHIVE).headers["location"]).status_code == 410


def test_a_checkpoint_whose_time_is_over_is_not_fetched_any_more(client):
    """Catches URLs, given out before or after, of what is only not deleted yet."""
    place = ARCHIVE.replace("one.2", OVER).removesuffix("archive")
    urls = client.get(f"{place}external_weights_urls").json()["urls"]
    given = [client.get(f"{place}archive").headers["location"], *urls.values()]
    assert [client.get(url).status_code for url in given] == [200, 200]
    assert client.put(f"{place}ttl", json={"ttl_seconds": 1}).status_code == 204
    time.sleep(1.1)
    asked = [*given, f"{place}archive", f"{place}external_weights_urls"]
    assert [client.get(url).status_code for url in asked] == [404] * 4


def test_a_file_that_shrinks_while_it_is_sent_cuts_the_archive_short(tmp_path):
    """Catches an archive that looks whole and holds a file that is not."""
    (tmp_path / "a").write_bytes(bytes(2000))
    archive = Archive.of(tmp_path, ["a"])
    assert len(b"".join(archive)) == archive.num_bytes
    (tmp_path / "a").write_bytes(bytes(1000))
    with pytest.raises(RuntimeError, match="shorter"):
        list(archive)
