"""The status page in a browser without a screen."""

import html
import re
import shutil
import subprocess
import time

import pytest

from answering_orchestrator import served
from xorl.server.queries import CreateSession
from xorl.server.status_queries import ErrorSeen

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser, one of {', '.join(NAMES)}")
TOKEN = "tml-the-token-of-the-page"


def rendered(url, profile):
    """What the page has become after three polls, in text by the ids of its elements."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", f"--user-data-dir={profile}"]
    command = [BROWSER, *flags, "--dump-dom", url]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    body = shown.partition("<script>")[0]
    found = re.findall(r'<(\w+) [^>]*id="(\w+)"[^>]*>(.*?)</\1>', body, re.DOTALL)
    return {name: html.unescape(re.sub(r"<[^>]+>", " ", content)).split() for _, name, content in found}, body


def test_the_page_shows_the_service_and_runs_nothing_that_clients_have_named(tmp_path):
    """Catches a page that stays empty, and a model whose name is markup."""
    with served(tmp_path / "outputs") as (url, orchestrator):
        orchestrator.sessions["<img src=x onerror=alert(1)>"] = CreateSession()
        orchestrator.gone.add("dead")
        orchestrator.sessions["dead"] = CreateSession()
        orchestrator.errors.append(ErrorSeen(time.time() - 130, "m", "optim_step", "<script>alert(1)</script>"))
        shown, body = rendered(url, tmp_path / "profile")
    assert shown["model"] == ["tiny"]
    assert shown["state"] == ["ready"]
    assert shown["tokens"] == ["1,235"]
    assert (shown["queue"], shown["running"], shown["workers"]) == (["4"], ["1"], ["2"])
    assert shown["sessions"][:2] == ["<img", "src=x"]
    assert "client is gone" in " ".join(shown["sessions"])
    assert "rank 0: 1.0 of 2.0 GiB" in " ".join(shown["memory"])
    assert " ".join(shown["errors"]) == "2 min ago optim_step m <script>alert(1)</script>"
    assert "<img" not in body


@pytest.mark.parametrize(("fragment", "state"), [(f"#{TOKEN}", "ready"), ("#tml-another-token-here", "the API token")])
def test_the_page_needs_the_token_and_takes_it_from_its_address(tmp_path, fragment, state):
    """Catches a page that shows a protected service to anybody, or to nobody."""
    with served(tmp_path / "outputs", token=TOKEN) as (url, _):
        shown, _ = rendered(f"{url}/{fragment}", tmp_path / "profile")
    assert " ".join(shown["state"]).startswith(state)
    assert shown["model"] == (["tiny"] if state == "ready" else ["xorl"])
