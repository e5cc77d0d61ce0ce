"""A name has one place: model families in their own file, and nothing but re-exports in `__init__.py`."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from xorl.config.options import all_options

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
MODELS = PACKAGES / "xorl-core" / "src" / "xorl" / "core" / "models"
SOURCES = sorted(PACKAGES.glob("*/src/**/*.py"))


@cache
def tree(file: Path) -> ast.Module:
    """Returns a parsed file, which several tests look at."""
    return ast.parse(file.read_text(encoding="utf-8"))


def families() -> list[str]:
    """The families of the table, which is made of what `__init__.py` imports from beside it."""
    body = tree(MODELS / "__init__.py").body
    tables = [node for node in body if isinstance(node, ast.ImportFrom) and node.module == "xorl.core.models"]
    return [alias.name for table in tables for alias in table.names]


@pytest.mark.parametrize("family", families())
def test_a_model_family_is_named_in_its_own_file_and_the_table_alone(family: str) -> None:
    # Would catch a branch on one family outside its file, which every new model would have to find.
    # A family whose name contains another one's has that name in its own file too.
    own = {MODELS / f"{other}.py" for other in families() if family in other} | {MODELS / "__init__.py"}
    elsewhere = [
        f"{file.relative_to(PACKAGES)}:{number}: {line.strip()}"
        for file in SOURCES
        if file not in own
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        # Keys and values of a config.json may be named for the release of another family that they came from.
        if re.search(rf"{family}(?!_?\d)", line, re.IGNORECASE)
    ]
    assert not elsewhere
    assert all(file.exists() for file in own)


@pytest.mark.parametrize("library", ["core", "kernels", "data", "ckpt", "lora"])
def test_libraries_name_arguments_and_not_options(library: str) -> None:
    # Would catch an error that a user of the library alone cannot act on: `xorl.config.arguments` makes options of it.
    options = set(all_options())
    named = [
        f"{file.relative_to(PACKAGES)}:{node.lineno}: {option}"
        for file in (PACKAGES / f"xorl-{library}" / "src").rglob("*.py")
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for option in re.findall(r"\b(?:model|data|train|lora)\.\w+", node.value)
        if option in options
    ]
    assert not named


def is_re_export(statement: ast.stmt) -> bool:
    """Says whether a statement is a docstring, an absolute import, `__all__`, `__version__` or a table in capitals."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str())) | ast.ImportFrom(level=0):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
            return True
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() | ast.Tuple()):
            return name.isupper()
        case _:
            return False


@pytest.mark.parametrize(
    "file",
    [file for file in SOURCES if file.name == "__init__.py" and file.parent != MODELS],
    ids=lambda file: ".".join(file.relative_to(PACKAGES).parts[2:-1]),
)
def test_a_package_only_re_exports(file: Path) -> None:
    # Would catch logic that hides in `__init__.py` and runs whenever anything below is imported.
    body = tree(file).body
    other = [f"line {statement.lineno}" for statement in body if not is_re_export(statement)]
    assert not other, (
        f"{file.relative_to(PACKAGES)} holds more than a docstring, `from ... import`, tables, __all__ and __version__"
    )


# Private names of other libraries, and of Python, that are used where they are needed, and one that torch documents:
# `_version`, a tensor's counter of changes in place.
ALLOWED = {
    "_LangPatchScope",
    "_current_frames",
    "_exit",
    "_model_mapping",
    "_patch_lang_tensor",
    "_replace",
    "_strip_protocol",
    "_supports_sdpa",
    "_version",
}


@pytest.mark.parametrize("package", sorted(path.name for path in PACKAGES.iterdir()))
def test_private_parts_of_torch_stand_in_one_file(package: str) -> None:
    # Would catch a private name elsewhere, which a new release of torch could change without anyone looking there.
    # Only names of the same package: another one may happen to define what torch does, such as a function `_version`.
    files = [file for file in SOURCES if file.is_relative_to(PACKAGES / package)]
    ours = {name for file in files for node in ast.walk(tree(file)) for name in defined_names(node)} | ALLOWED
    named = [
        f"{file.relative_to(PACKAGES)}:{node.lineno}: {name}"
        for file in files
        if file.name != "torch_private.py"
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Attribute | ast.Import | ast.ImportFrom)
        for name in used_names(node)
        if re.match(r"_[^_]", name) and name not in ours
    ]
    assert not named


def defined_names(node: ast.AST) -> list[str]:
    """The names that a statement defines: functions, classes, variables, and attributes of self or cls."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name) | ast.Name(id=name, ctx=ast.Store()):
            return [name]
    return []


def used_names(node: ast.Attribute | ast.Import | ast.ImportFrom) -> list[str]:
    """The names that an attribute or an import from torch uses."""
    match node:
        case ast.Attribute(attr=name):
            return [name]
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "torch":
            return [*module.split("."), *(alias.name for alias in node.names)]
        case ast.Import():
            return [part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")]
    return []
