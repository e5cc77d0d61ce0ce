"""The status page in a browser without a screen."""

import time

import pytest
from msgspec.structs import replace

from answering_orchestrator import served
from browser import BROWSER, NAMES, opened
from xorl.server.endpoint_queries import EndpointState
from xorl.server.operations import Endpoint
from xorl.server.queries import CreateSession
from xorl.server.status_queries import ErrorSeen, ModelStatus, ProcessStatus, RunningCall, SessionStatus

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser, one of {', '.join(NAMES)}")
TOKEN = "tml-the-token-of-the-page"
TIMES = "\N{MULTIPLICATION SIGN}"
SHOWN = "document.getElementById('page')?.hidden === false"
# Widths of elements that are wider than the screen, or so narrow that their words are cut into letters.
MISSHAPEN = """[...document.querySelectorAll("#page :not(svg, svg *)")].filter((element) => {
  const { left, right, width } = element.getBoundingClientRect();
  const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim().length > 3);
  return right > innerWidth + 1 || left < -1 || (text && width && width < 20);
}).map((element) => element.outerHTML.slice(0, 200))"""


def text_of(page, name):
    return " ".join(page.evaluate(f"document.getElementById('{name}').innerText").split())


def test_the_page_shows_the_service_and_runs_nothing_that_clients_have_named(tmp_path):
    """Catches a page that stays empty, and a model whose name is markup."""
    with served(tmp_path / "outputs") as (url, orchestrator):
        markup = "<img src=x onerror=alert(1)>"
        orchestrator.sessions[markup] = CreateSession(user_metadata={"user": markup})
        orchestrator.gone.add("dead")
        orchestrator.sessions["dead"] = CreateSession(display_name="of yesterday")
        orchestrator.models["m"] = None
        orchestrator.errors.append(ErrorSeen(time.time() - 130, "m", "OptimStep", "<script>alert(1)</script>"))
        with opened(url, tmp_path / "profile") as page:
            page.wait(SHOWN)
            assert (text_of(page, "model"), text_of(page, "state")) == ("tiny", "ready")
            tiles = {name: text_of(page, name) for name in ("tokens", "queue", "running", "workers", "used", "limit")}
            assert tiles == {
                "tokens": "1,235",
                "queue": "4",
                "running": "1",
                "workers": "2",
                "used": "1.2 MB",
                "limit": "of 1.5 MB",
            }
            assert text_of(page, "calls").startswith("forward_backward m ")
            assert text_of(page, "calls").endswith("create_model n: model m uses the base waits")
            assert text_of(page, "sessions").startswith(f"user {markup} {markup} 3 requests · began")
            assert "Loss 2.25 Step 3 Learning rate 1e-4 Last step" in text_of(page, "sessions")
            assert text_of(page, "departed") == "1 session whose client is gone"
            assert text_of(page, "memory") == "rank 0: 1.0 of 2.0 GiB"
            assert text_of(page, "processes") == "workers 1 restart 1 min ago: signal=SIGKILL"
            assert text_of(page, "storage").startswith(f"Training checkpoints {TIMES} 2 900 kB")
            assert text_of(page, "endpoints") == "none: the workers sample"
            assert text_of(page, "errors") == "optim_step m 2 min ago <script>alert(1)</script>"
            assert page.evaluate("document.querySelectorAll('img, #errors script').length") == 0
            # It follows the service, also when that has gone.
            orchestrator.models.clear()
            page.wait("!document.getElementById('sessions').innerText.includes('Loss')")
        with opened(url, tmp_path / "profile") as page:
            page.wait(SHOWN)
            orchestrator.ready = False
            page.wait("document.getElementById('state').innerText === 'starting'")


@pytest.mark.parametrize(("fragment", "state"), [(f"#{TOKEN}", "ready"), ("#tml-another-token-here", "the API token")])
def test_the_page_needs_the_token_and_takes_it_from_its_address(tmp_path, fragment, state):
    """Catches a page that shows a protected service to anybody, or to nobody, or keeps the token in its address."""
    with (
        served(tmp_path / "outputs", token=TOKEN) as (url, _),
        opened(f"{url}/{fragment}", tmp_path / "profile") as page,
    ):
        page.wait(f"document.getElementById('state')?.innerText.startsWith({state!r})")
        assert text_of(page, "model") == ("tiny" if state == "ready" else "xorl")
        assert page.evaluate("location.hash") == ""
        if state != "ready":
            page.evaluate(f"document.getElementById('token').value = {TOKEN!r}")
            page.evaluate("document.querySelector('#ask button').click()")
            page.wait(SHOWN)


def busy(status):
    """A status with everything that there can be, and long names."""
    now, name = time.time(), "a-run-of-a-client-without-a-session_with.a-name-that-goes-on-and-on-until-it-is-long"
    engine = Endpoint("gpu-host-with-a-long-name.cluster.example", 30000, 8)
    model = ModelStatus(name, None, "absent", 8, 123_456, 128, now, now, now, [5.0, None, *([2.5] * 98)], 1.0, 1e-4)
    owner = SessionStatus(
        "session-11f8b9e3230f21c5", [], 9, now, now, user_metadata={"project": name, "user": "u" * 60}
    )
    return replace(
        status,
        world_size=16,
        running=[RunningCall("r", "SaveWeightsForSampler", name, name, now - 90_000, 2, 65_536)],
        processes=[ProcessStatus("workers", 12, now, "rank 3 was stopped in a collective", hung_since=now - 60)],
        sessions=[SessionStatus(name, [name], 128, now, now), owner],
        models=[model],
        endpoints=[EndpointState(engine, "failed", "/update_weights_from_distributed: no answer within 120 s")],
        gpu_bytes_used=[2**36] * 16,
        gpu_bytes_total=[80 * 2**30] * 16,
        last_errors=[ErrorSeen(now, name, "SaveFullWeights", f"StorageLimitError: {'x' * 300}")],
    )


@pytest.mark.parametrize("width", [420, 800, 1280])
def test_the_page_fits_its_screen_whatever_clients_are_called(tmp_path, width):
    """Catches columns of single letters, and a page that one has to scroll sideways on a phone."""
    with served(tmp_path / "outputs") as (url, orchestrator):
        status_of = orchestrator.on_GetStatus

        async def on_status(query):
            return busy(await status_of(query))

        orchestrator.on_GetStatus = on_status
        with opened(url, tmp_path / "profile", width=width) as page:
            page.wait(SHOWN)
            assert page.evaluate("innerWidth") == width
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(MISSHAPEN) == []
            alerts = text_of(page, "alerts")
            assert "No progress in the workers for 1 min, a replacement is being started: rank 3 was stopped" in alerts
            assert "Inference server gpu-host-with-a-long-name.cluster.example:30000 is failed" in alerts
            assert text_of(page, "state") == "replacing the workers"
            assert f"save_weights_for_sampler {TIMES} 65,536" in text_of(page, "calls")
            assert page.evaluate("document.querySelectorAll('#sessions path:not(.area)').length") == 2
