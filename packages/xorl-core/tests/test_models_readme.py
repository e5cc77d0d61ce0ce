"""The README's examples are the first thing a user runs."""

import re
from pathlib import Path


def run_example(word):
    """The names that the first example with this word defines."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    names = {}
    example = next(text for text in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if word in text)
    exec(compile(example, "README.md", "exec"), names)
    return names


def test_first_example_of_the_readme_runs():
    """Catches a renamed function or argument that the README still shows."""
    model = run_example("model")["model"]
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_example_of_losses_runs(capsys):
    """Catches a renamed loss, option or metric that the README still shows."""
    assert run_example("read_metrics")["hidden"].grad.isfinite().all()
    assert "tensor" in capsys.readouterr().out
