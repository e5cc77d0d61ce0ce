"""Runs the libraries' CPU tests on the oldest and the newest torch: `uv run tools/check_torch.py [--quick] [NAME ...]`.

The oldest is the lower bound in a distribution's pyproject.toml, the newest NEWEST: raise it for a new release, so that
one never changes what CI says of a commit. Each run has a
temporary environment, without the lock, so the newest versions of all other dependencies are tested as well. `--quick`
is for CI: of each distribution only the tests of what depends on private parts of torch.
"""

import argparse
import os
import re
import subprocess
import sys
import time

from workspace import ROOT, Distribution, distributions, uv

NEWEST = "torch~=2.15.0"
LIBRARIES = ("xorl-kernels", "xorl-data", "xorl-ckpt", "xorl-core", "xorl-lora")
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
# The tests of files that use private parts of torch, and run in seconds.
QUICK = {
    "xorl-kernels": ("test_kernels_attention.py", "test_kernels_arguments.py", "test_kernels_fused.py"),
    "xorl-ckpt": ("test_checkpointer.py", "test_plain_modules.py", "test_background.py"),
    "xorl-core": ("test_core_arguments.py", "test_optim.py", "test_parallel_recompute.py"),
}


def main() -> int:
    """Runs the tests and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*LIBRARIES, []], help="distributions [all libraries]")
    parser.add_argument("--quick", action="store_true", help="only the tests that private parts of torch concern")
    parser.add_argument("--torch", choices=["oldest", "newest"], help="only this one")
    options = parser.parse_args()
    known, code = distributions(), 0
    for name in options.names or (tuple(QUICK) if options.quick else LIBRARIES):
        tests = QUICK.get(name, ()) if options.quick else ("",)
        for which in [options.torch] if options.torch else ["oldest", "newest"]:
            code = max(code, _run(known[name], which, tests))
    return code


def _run(distribution: Distribution, which: str, tests: tuple[str, ...]) -> int:
    """Runs tests with the oldest or the newest torch, and prints one line, followed by all output if a test failed."""
    requirements = [NEWEST if which == "newest" else oldest_torch(distribution), *TEST_TOOLS]
    command = [uv(), "run", "--isolated", "--no-project", "--with-editable", str(distribution.folder)]
    command += [argument for requirement in requirements for argument in ("--with", requirement)]
    folder = distribution.folder / "tests"
    shown = "import torch; print(torch.__version__)"
    pytest = ["-m", "pytest", "-o", "cache_dir=/dev/null", *(str(folder / test) for test in tests)]
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTEST_ADDOPTS", "PYTHONPATH"}}
    start = time.monotonic()
    version = subprocess.run(
        [*command, "python", "-c", shown], cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )
    result = subprocess.run(
        [*command, "python", *pytest],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    verdict = "FAIL" if result.returncode else "ok"
    torch = version.stdout.strip() or which
    print(f"{verdict:4} {distribution.name:13} torch {torch:10} {time.monotonic() - start:5.1f} s", flush=True)
    if result.returncode:
        print(result.stdout + version.stderr, flush=True)
    return min(result.returncode, 1) if result.returncode >= 0 else 1


def oldest_torch(distribution: Distribution) -> str:
    """Returns the requirement of the oldest torch that a distribution, and those it builds on, accept."""
    members, found = distributions(), list[tuple[int, ...]]()
    for member in [distribution, *(members[re.split(r"[^a-z-]", name)[0]] for name in distribution.siblings)]:
        for requirement in member.dependencies:
            if bound := re.fullmatch(r"torch>=([\d.]+)", requirement):
                found.append(tuple(map(int, bound.group(1).split("."))))
    return f"torch=={'.'.join(map(str, max(found)))}.*"


if __name__ == "__main__":
    sys.exit(main())
