"""The README's loop, as a reader would run it."""

import re
import subprocess
import sys

import httpx
import pytest

from service import ROOT, Service


def test_the_loop_of_the_readme_learns_its_sentence(service: Service) -> None:
    # Would catch a first impression that fails, or that shows nothing learnt.
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^## Serve\n.*?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert block
    code = block.group(1).replace("http://127.0.0.1:5555", service.url)
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr + service.log
    losses = [float(loss) for loss in re.findall(r"loss +([\d.]+)", ended.stdout)]
    assert losses[-1] < losses[0] / 2, ended.stdout
    assert "xorl learns this sentence while you watch." in ended.stdout.splitlines()[-1], ended.stdout
    assert "xorl learns this sentence while you watch." not in ended.stdout.splitlines()[0]
    # And a status that does not know the losses of the model, or knows others: here those of each token.
    # The most recently active model is first; other tests on this service may have left theirs.
    model = httpx.get(f"{service.url}/status.json", trust_env=False).json()["models"][0]
    means = [loss * losses[0] / model["losses"][0] for loss in model["losses"]]
    assert means[::5] == pytest.approx(losses, abs=0.011)
    assert (model["num_steps"], model["learning_rate"]) == (21, 3e-3)
