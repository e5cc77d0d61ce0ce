"""The Hub, against a server that speaks it: what was uploaded is read back and streamed, with the token alone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOKEN = "secret"  # what hub_server.py takes
# The Hub's library takes its address from the environment when it is imported: it is used in a process of its own.
USE = """
import json, sys
from itertools import islice
from pathlib import Path
from urllib.request import urlopen
import os
from xorl.data import DataError, DatasetEntry, PrepareOptions, prepare
from xorl.data.push import push_documents
from xorl.data.stream import StreamOptions, files, open_stream, stream_bins

folder = Path(sys.argv[1])
files.BLOCK_BYTES = 500

def options(name):
    return PrepareOptions(
        bin_len=64, prepared_path=folder / name, shuffle_before_merging=False, shuffle_merged=False, token=True
    )

def rows(documents):
    return [[part.tolist() for part in documents.document(index)] for index in range(len(documents))]

entry = DatasetEntry("org/name")
local = prepare([DatasetEntry(str(folder / "rows.jsonl"))], options("local"))
error = None
try:
    push_documents(local, "org/name", folder / "local", token=None, num_files=3)
except DataError as refused:
    error = str(refused)
os.environ["HF_TOKEN"] = sys.argv[2]
push_documents(local, "org/name", folder / "local", token=True, num_files=3)
read = prepare([entry], options("remote"))
asked = lambda: json.load(urlopen(os.environ["HF_ENDPOINT"] + "/requests"))
stream = open_stream([entry], StreamOptions(64), index_path=folder / "index", token=True)
before = asked()
bins = list(islice(stream_bins(stream, first=0, stride=1), 20))
streamed = sorted({int(d.input_ids[0]) for b in bins for d in b.documents})
found = {"same": rows(read) == rows(local), "streamed": streamed, "before": before, "after": asked()}
print(json.dumps({"error": error, **found}))
"""


@pytest.fixture
def address() -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("hub_server.py"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


def used(folder: Path, address: str) -> dict:
    """What came of an upload without a token, and of one with it, of reading and of streaming."""
    lines = [{"input_ids": [i, *range(10)], "labels": [-100, *range(10)]} for i in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"HF_ENDPOINT": address, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(folder), TOKEN], capture_output=True, text=True, env={**kept, **settings}
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_what_was_uploaded_is_read_back_and_streamed(address: str, tmp_path: Path) -> None:
    # Catches a mistake in how the Hub's library is called, a stream that lists its files for every block, and an upload
    # refused for want of a token that is told by a traceback of another library.
    found = used(tmp_path, address)
    assert "repo_id: the Hub rejects the upload to org/name" in found["error"]
    assert found["same"], found
    assert found["streamed"] == list(range(60))
    assert found["after"]["tree"] <= found["before"]["tree"] + 2
    assert found["after"]["resolve"] > found["before"]["resolve"]
