"""The project's own checks find what they are for."""

import ast
import itertools
from pathlib import Path

import pytest

import check_cycles
import check_docs
import check_isolated
import check_layout
import check_sizes
import check_text
import plant_faults
import unless_passed


def test_a_size_exception_may_neither_grow_nor_idle() -> None:
    # Would catch a list of exceptions under which code grows on.
    too_long = {"new.py": (501, 500), "grown.py": (620, 500), "shrunk.py": (510, 500), "same.py": (600, 500)}
    allowed = {"grown.py": 610, "shrunk.py": 600, "same.py": 600, "mended.py": 550}
    assert [line.split(":")[0] for line in check_sizes.compare(too_long, allowed)] == [
        "grown.py",
        "new.py",
        "shrunk.py",
        "mended.py",
    ]


def test_every_function_is_measured() -> None:
    # Would catch long methods and nested functions that hide from the limit.
    source = """
class A:
    def b(self):
        def c():
            pass
        if self:
            async def d(): ...
"""
    assert check_sizes.functions(ast.parse(source), "") == [("A.b", 5), ("A.b.c", 2), ("A.b.d", 1)]


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("packages/xorl-core/src/xorl/__init__.py", True),
        ("packages/xorl-core/src/xorl/core/__init__.py", False),
        ("packages/xorl-core/tests/__init__.py", True),
        (".github/workflows/ci.yml", True),
        (".ci/run", False),
    ],
)
def test_misplaced_files_are_refused(path: str, fault: bool) -> None:
    # Would catch the stray file that makes the other five distributions vanish.
    assert bool(check_layout.reasons_against(Path(path))) == fault


def test_an_import_cycle_is_found() -> None:
    # Would catch files that grow together until neither can be read or moved alone.
    imports = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": []}
    cycle = check_cycles.first_cycle(imports)
    assert sorted(cycle[1:]) == ["a", "b", "c"]
    assert all(second in imports[first] for first, second in itertools.pairwise(cycle))
    assert check_cycles.first_cycle({**imports, "c": ["d"]}) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("see https://" + "pypi." + "org/simple/torch", True),
        ("model_path: /" + "home/me/models/tiny", True),
        ("pip install --extra-" + "index-url x", True),
        ("model_path: ./models/tiny, ~/work/tiny or /path/to/it", False),
        ("https://huggingface.co/docs/home/x", False),
        ("xorl.config.local", False),
    ],
)
def test_names_of_one_machine_are_refused(text: str, fault: bool) -> None:
    # Would catch documents that only work where they were written.
    assert bool(check_text.problems_in(text)) == fault


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("`train.output_dir`, `data.datasets[].path` and `--train.output_dir x`", []),
        ("`data.batch` is a module", []),
        ("`train.outptu_dir: x` and --data.nothing", ["data.nothing", "train.outptu_dir"]),
        ("```yaml\ndata:\n  datasets: [{path: a, tyype: b}]\n```", ["data.datasets.0.tyype"]),
        ("```yaml\ntrain: {lrr: 1}\n```", ["train.lrr"]),
        ("```yaml\nother: {train: 1}\n```", []),
    ],
)
def test_documents_name_options_that_exist(text: str, unknown: list[str]) -> None:
    # Would catch documents that keep an option's old name.
    assert sorted(line.removeprefix("unknown option ") for line in check_docs.unknown_in_markdown(text)) == unknown


def test_imports_are_found_wherever_they_stand() -> None:
    # Would catch a dependency that only a function imports, and that a distribution alone would lack.
    source = """
import numpy as np, torch.nn
from xorl import data
def late():
    from xorl.core.nn import Linear
    import liger_kernel  # pyright: ignore[reportMissingImports]
    try:
        import peft
    except ImportError:
        import xxhash
if TYPE_CHECKING:
    from PIL.Image import Image
"""
    assert list(check_isolated.imports(source)) == [
        (2, "numpy"),
        (2, "torch"),
        (3, "xorl.data"),
        (5, "xorl.core"),
        (10, "xxhash"),
    ]


def test_a_phase_is_left_out_only_while_what_it_passed_with_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Would catch a phase of CI that is left out after a change, or after it failed, or whose leaving out is not told.
    tested = ["a"]
    monkeypatch.setattr(unless_passed, "RECORD", tmp_path / "passed.json")
    monkeypatch.setattr(unless_passed, "ROOT", tmp_path)
    monkeypatch.setattr(unless_passed, "INPUTS", {"wheels": lambda: iter(tested), "torch": lambda: iter(["b"])})

    def run(phase: str, code: int, *options: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["", *options, phase, "sh", "-c", f"echo ran; exit {code}"])
        return unless_passed.main(), capfd.readouterr().out.split(":")[0].split("\n")[0]

    left_out = (0, "left out")
    assert [run("wheels", 1), run("wheels", 0), run("wheels", 0)] == [(1, "ran"), (0, "ran"), left_out]
    assert [run("wheels", 3, "--all"), run("torch", 0), run("torch", 1)] == [(3, "ran"), (0, "ran"), left_out]
    tested.append("c")
    assert [run("wheels", 1), run("wheels", 0), run("wheels", 1)] == [(1, "ran"), (0, "ran"), left_out]


@pytest.mark.parametrize(
    ("line", "packages", "torch"),
    [
        ("import numpy.linalg", {"numpy"}, set()),
        ("def f():\n    from xorl.core.nn import (\n        Linear,\n    )", {"xorl.core"}, set()),
        ("PROGRAM = 'import liger_kernel'", {"liger_kernel"}, set()),
        ("run('python', '-m', 'xorl.train')", {"xorl.train"}, set()),
        ("from torch.nn import Linear as L, functional", {"torch"}, {"torch.nn.Linear", "torch.nn.functional"}),
        ("import torch._inductor", {"torch"}, {"torch._inductor"}),
        ("from xorl import data", {"xorl.data"}, set()),
    ],
)
def test_imports_that_phases_of_ci_test_are_found(line: str, packages: set[str], torch: set[str]) -> None:
    # Would catch a new dependency with which a phase is not repeated.
    assert unless_passed.packages_imported(line) == packages
    assert set(unless_passed.names_of_torch(line)) == torch


def test_tests_that_took_long_are_told_from_the_others(tmp_path: Path) -> None:
    # Would catch a report that is misread, so that all tests run twice, or none.
    times = {"packages.xorl-core.tests.test_a": 1.5, "packages.xorl-core.tests.test_b": 0.1, "tests.multi.test_c": 9}
    cases = "".join(f'<testcase classname="{name}" name="test_x[1.5]" time="{s}" />' for name, s in times.items())
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found = list(check_isolated._that_took_long(tmp_path / "report.xml", "packages/xorl-core/tests"))
    assert found == ["packages/xorl-core/tests/test_a.py::test_x[1.5]"]


def test_a_fault_that_can_no_longer_be_planted_is_named() -> None:
    # Would catch a list of faults that are tried in vain, because their text or their tests have moved.
    file, tests = "tools/plant_faults.py", "tests/architecture/test_checks.py"
    fault = plant_faults.Fault(
        "gone", file, old="no such" + " text", new="", tests=f"{tests} tests/test_gone.py", effect=""
    )
    assert plant_faults.misplaced([fault]) == [
        f"gone: its text occurs 0 times in {file}, not once; update tests/faults.toml",
        "gone: there is no tests/test_gone.py; update tests/faults.toml",
    ]
    with pytest.raises(ValueError, match="occurs 2 times"):
        plant_faults.Fault("twice", file, old="a", new="b", tests=tests, effect="").planted_in("a a")


def test_tests_that_catch_a_fault_are_told_from_those_that_always_fail(tmp_path: Path) -> None:
    # Would catch a tool that takes any failure for a catch, or that tests the files of the working tree.
    names = ("missed", "noticed", "always")
    for name in names:
        (tmp_path / "tests").mkdir(exist_ok=True)
        check = {"missed": "1", "noticed": "text == 'right'", "always": "0"}[name]
        code = f"from pathlib import Path\ndef test_it():\n    text = Path('product').read_text()\n    assert {check}\n"
        (tmp_path / "tests" / f"test_{name}.py").write_text(code)
    (tmp_path / "product").write_text("right")
    faults = [plant_faults.Fault(name, "product", "right", "wrong", f"tests/test_{name}.py", "") for name in names]
    assert plant_faults.verdicts(faults, tmp_path) == {"missed": "escaped", "noticed": "caught", "always": "broken"}
    assert (tmp_path / "product").read_text() == "right"
