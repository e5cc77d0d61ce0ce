"""The README's programs in Python, as a reader would run them."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from xorl.train import DataLoader, FSDPTrainer, Trainer

ROOT = Path(__file__).resolve().parents[2]
# How the output of the examples in READMEs begins.
PRINTED = {
    "xorl-data": r"5 .*\n6 .*\n7 .*\n",
    "xorl-lora": r"(?s).*'2\.lora_B': \[8, 4\]",
    "xorl-kernels": "".join(
        rf"torch\.Size\({shape}\)\n"
        for shape in (r"\[8, 4, 64\]", r"\[8\]\) torch\.Size\(\[100, 32\]", r"\[8, 4, 16\]", r"\[8, 32\]")
    ),
}


def programs(readme: Path = ROOT / "README.md", section: str = "\n## From Python\n") -> list[str]:
    """The programs in a README, from a section on."""
    text = readme.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text[text.index(section) :], re.DOTALL | re.MULTILINE)


def test_what_xorl_train_does_runs_as_a_program(tmp_path: Path) -> None:
    # Would catch a first program that fails, because of a function, an option or a file that is called otherwise now.
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    code = programs()[0].replace('"50"', '"3"')
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "outputs" / "quickstart" / "checkpoints" / "global_step_3").is_dir()


@pytest.mark.parametrize("package", sorted((ROOT / "packages").glob("*")), ids=lambda package: package.name)
def test_the_examples_of_each_package_run(package: Path, tmp_path: Path) -> None:
    # Would catch a function, an argument or a metric that is called otherwise now. CI runs them with the package alone
    # only after its requirements or imports have changed.
    examples = programs(package / "README.md", "#")
    assert examples
    code = "\n".join(f"exec({example!r}, {{'__name__': '__main__'}})" for example in examples)
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert re.match(PRINTED.get(package.name, ""), ended.stdout), ended.stdout


def test_the_trainers_take_what_is_shown() -> None:
    # Would catch an argument that was renamed. examples/train_fsdp.py, which a test runs, has a model to it.
    shown = {
        node.func.id: {keyword.arg for keyword in node.keywords}
        for node in ast.walk(ast.parse(programs()[1]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    takers = {"DataLoader": (DataLoader,), "FSDPTrainer": (FSDPTrainer, Trainer)}
    for name, classes in takers.items():
        assert shown[name] <= {parameter for taker in classes for parameter in inspect.signature(taker).parameters}
    calls = {node.attr for node in ast.walk(ast.parse(programs()[1])) if isinstance(node, ast.Attribute)}
    assert {"train", "save_checkpoint"} <= calls & set(dir(FSDPTrainer))
