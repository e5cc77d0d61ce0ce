"""Each distribution is complete: a README that opens with a short example, a type marker per part, and tests."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
NAMES = ("xorl-kernels", "xorl-data", "xorl-ckpt", "xorl-core", "xorl-lora", "xorl-cli")
MAX_EXAMPLE_LINES = 7
PARTS = ("xorl.kernels.attention", "xorl.core.models", "xorl.data", "xorl.ckpt", "xorl.lora")
SLOW = ("torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp", "huggingface_hub", "PIL")

# Torch alone is imported once; each part is imported in a fork of that process.
IMPORTS = f"""\
import importlib, os, sys, torch
for part in {PARTS}:
    if not (child := os.fork()):
        importlib.import_module(part)
        print(f"{{part}}: {{[name for name in {SLOW} if name in sys.modules]}}", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, part
"""


def test_the_distributions_are_those_that_are_checked() -> None:
    # Would catch a seventh distribution that nothing below looks at.
    assert {folder.name for folder in PACKAGES.iterdir() if (folder / "pyproject.toml").exists()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_readme_opens_with_a_short_example(name: str) -> None:
    # Would catch a README whose first example has grown past a glance. tools/check_isolated.py runs it.
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (PACKAGES / name / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    examples = [code for language, code in blocks if language == "python"]
    assert examples, "no ```python block"
    lines = [line for line in examples[0].splitlines() if line.strip()]
    assert 1 <= len(lines) <= MAX_EXAMPLE_LINES


def test_imports_leave_out_what_is_needed_later() -> None:
    # Would catch an import that takes a second more than torch alone, for features that most programs never use.
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{part}: []" for part in PARTS]


@pytest.mark.parametrize("name", NAMES)
def test_a_distribution_says_its_version_and_changes(name: str) -> None:
    # Would catch a distribution that cannot be published or whose version a user cannot ask for.
    project = tomllib.loads((PACKAGES / name / "pyproject.toml").read_text())["project"]
    assert import_module(name.replace("-", ".")).__version__ == project["version"]
    assert f"## {project['version']}\n" in (PACKAGES / name / "CHANGELOG.md").read_text()
    assert project["keywords"]
    assert "Typing :: Typed" in project["classifiers"]
    assert not [one for one in project["dependencies"] if re.match(r"(torch|xorl-\w+)==", one)]


@pytest.mark.parametrize("name", NAMES)
def test_every_part_is_typed_and_tested(name: str) -> None:
    # Would catch a part whose types a user's checker ignores, or a distribution that is never tested alone.
    parts = [part for part in (PACKAGES / name / "src" / "xorl").iterdir() if (part / "__init__.py").exists()]
    assert parts
    assert [part.name for part in parts if not (part / "py.typed").exists()] == []
    assert list((PACKAGES / name / "tests").glob("test_*.py"))
