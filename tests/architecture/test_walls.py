"""Walls between the packages: the contracts of import-linter bite, and those it cannot express."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def imported_modules(file: Path) -> Iterator[str]:
    """Yields what a file imports, wherever the statement stands; `from a import b` counts as both a and a.b."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", ["xorl-core/src/xorl/core/models", "xorl-kernels/src/xorl/kernels"])
def test_models_and_kernels_never_import_torch_distributed(folder: str) -> None:
    # Would catch a model that places its own shards or a kernel that communicates.
    files = sorted((ROOT / "packages" / folder).rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in imported_modules(file)
        if name.split(".")[:2] == ["torch", "distributed"]
    ]
    assert not found


@pytest.mark.parametrize("module", ["xorl.config", "xorl.cli.app"])
def test_configuration_and_command_line_start_without_torch(module: str) -> None:
    # Would catch an import that makes `xorl --help` and a misspelt key take seconds.
    heavy = "{'torch', 'transformers', 'datasets', 'numpy', 'wandb'}"
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


@pytest.mark.parametrize(
    "modules", ["xorl.train.plan.plan", "xorl.train.report.page, xorl.train.report.read", "xorl.server.sampler.saved"]
)
def test_commands_that_train_nothing_start_with_little_beside_torch(modules: str) -> None:
    # Would catch an import that makes `xorl plan`, `report` and `chat` take seconds more.
    heavy = "{'transformers', 'datasets', 'wandb', 'torch._dynamo', 'torch._inductor'}"
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


@pytest.mark.parametrize(
    "module", ["xorl.server.launcher", "xorl.server.orchestrator.__main__", "xorl.server.api.__main__"]
)
def test_the_services_other_processes_start_without_torch(module: str) -> None:
    # Would catch an import that makes the API and the orchestrator take seconds and gigabytes.
    code = f"import sys, {module}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert (result.stdout.strip(), result.stderr) == ("False", "")


@pytest.mark.parametrize(
    ("importer", "statement", "contract"),
    [
        ("xorl-data/src/xorl/data", "import xorl.core", "Each layer"),
        ("xorl-kernels/src/xorl/kernels", "import xorl.ckpt", "Each layer"),
        ("xorl-cli/src/xorl/config", "def late():\n    import xorl.train", "Each layer"),
        ("xorl-core/src/xorl/core", "from xorl import data", "core and lora"),
        ("xorl-lora/src/xorl/lora", "import xorl.ckpt", "core and lora"),
        ("xorl-ckpt/src/xorl/ckpt", "import pydantic", "The libraries"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(tmp_path: Path, importer: str, statement: str, contract: str) -> None:
    # Would catch contracts that name modules in a way that import-linter does not look at, and so always hold.
    for source in (ROOT / "packages").glob("*/src"):
        shutil.copytree(source, tmp_path / source.relative_to(ROOT), ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "packages" / importer / "trespass.py").write_text(f'"""A file that oversteps."""\n\n{statement}\n')
    sources = os.pathsep.join(str(source) for source in (tmp_path / "packages").glob("*/src"))
    result = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": sources},
        text=True,
        capture_output=True,
        check=False,
    )
    broken = [line for line in result.stdout.splitlines() if line.startswith(contract)]
    assert result.returncode == 1
    assert "trespass" in result.stdout, broken
