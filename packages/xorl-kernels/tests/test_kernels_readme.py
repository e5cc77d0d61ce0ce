"""The README's examples are the first thing a user runs."""

import re
from pathlib import Path

from xorl.kernels.attention import ATTENTION

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
OUTPUTS = [
    "torch.Size([8, 4, 64])",
    "torch.Size([8]) torch.Size([100, 32])",
    "torch.Size([8, 4, 16])",
    "torch.Size([8, 32])",
]


def test_examples_of_the_readme_run(capsys, monkeypatch):
    """Catches a renamed function or argument that the README still shows."""
    monkeypatch.setattr(ATTENTION, "_backends", dict(ATTENTION._backends))
    examples = BLOCK.findall((Path(__file__).parents[1] / "README.md").read_text())
    for example in examples:
        exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == OUTPUTS
