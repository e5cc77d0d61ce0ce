"""The page of `xorl report` in a browser without a screen."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from browser import BROWSER, NAMES, opened
from xorl.train.report.page import report_page
from xorl.train.report.read import read_runs

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser, one of {', '.join(NAMES)}")
MARKUP = "<img src=x onerror=alert(1)>"
POINT = """(() => {
  const svg = document.querySelector("svg"), { left, top, width, height } = svg.getBoundingClientRect();
  const options = { clientX: left + width * 472 / 480, clientY: top + height / 2, bubbles: true };
  svg.dispatchEvent(new PointerEvent("pointermove", options));
  return document.querySelector(".tip")?.innerText;
})()"""
# Contrast of the text and the page, and whether all colours of lines are known.
COLOURS = """(() => {
  const style = (selector) => getComputedStyle(document.querySelector(selector));
  return [style("body").color, style("body").backgroundColor, style("polyline").stroke, style("polygon").fill];
})()"""


def write_run(folder: Path, scale: float) -> Path:
    folder.mkdir()
    phases = {"forward_s": 0.1, "backward_s": 0.2, "comm_s": 0.0, "optimizer_s": 0.1, "idle_s": 0.1}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 51):
            values = {"loss": scale / step, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 9e5, "time_s": 0.5}
            file.write(json.dumps({"step": step, **values, **phases}) + "\n")
    options = {"train": {"lr": scale, "wandb_name": MARKUP * 8}}
    (folder / "run.json").write_text(json.dumps({"num_steps": 50, "options": options}))
    return folder


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_is_whole_without_a_network_and_says_what_is_under_the_pointer(tmp_path: Path, width: int) -> None:
    # Catches a script that fails, parts that are wider than the screen, and names that are run as markup.
    runs = read_runs([write_run(tmp_path / "first", 10.0), write_run(tmp_path / "second", 20.0)])
    file = tmp_path / "report.html"
    file.write_text(report_page(runs, datetime.now().astimezone()))
    with opened(file.as_uri(), tmp_path / "profile", width=width) as page:
        page.wait("document.readyState === 'complete' && document.querySelectorAll('figure').length > 5")
        assert page.evaluate("performance.getEntriesByType('resource').length") == 0
        assert page.evaluate("document.images.length + document.scripts.length") == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(POINT).split("\n") == ["step 50", "0.2 first", "0.4 second"]
        page.evaluate("document.querySelector('svg').dispatchEvent(new PointerEvent('pointerleave'))")
        assert page.evaluate("document.querySelector('.tip')") is None
        light = page.evaluate(COLOURS)
        features = [{"name": "prefers-color-scheme", "value": "dark"}]
        page._call("Emulation.setEmulatedMedia", features=features)
        dark = page.evaluate(COLOURS)
        assert all(one != other for one, other in zip(light, dark, strict=True))
        assert sum(map(int, dark[0][4:-1].split(","))) > 384 > sum(map(int, dark[1][4:-1].split(",")))
