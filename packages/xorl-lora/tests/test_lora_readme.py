"""The README's example is the first thing a user runs."""

import re
from pathlib import Path


def test_first_example_of_the_readme_runs(capsys):
    """Catches a renamed function or argument that the README still shows."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    match = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert match is not None
    exec(compile(match.group(1), "README.md", "exec"), {})
    assert "'2.lora_B': [8, 4]" in capsys.readouterr().out
