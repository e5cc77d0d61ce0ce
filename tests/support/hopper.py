"""Compiles Triton kernels for Hopper without a GPU: records their launches, lowers them and assembles machine code."""

import importlib
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import triton
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver

TARGET = GPUTarget("cuda", 90, 32)
PACKAGES = Path(__file__).parents[2] / "packages"
NARROW = re.compile(r"\b(?:ld|st)\.global(?:\.\w+)*\.[bsuf](?:8|16)\b")


class AbsentDriver:
    """Answers the questions that Triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Launch:
    """A kernel and the arguments that it is compiled for."""

    kernel: triton.JITFunction
    source: ASTSource
    num_warps: int
    key: str


@dataclass(frozen=True)
class Machine:
    """A kernel in machine code: its PTX, and its use of registers and memory."""

    ptx: str
    registers: int
    spilled_bytes: int
    narrow_accesses: int


@contextmanager
def recorded(see: Callable[[triton.JITFunction, dict[str, object]], None] | None = None) -> Iterator[list[Launch]]:
    """Record launches without running them, and call `see(kernel, arguments by name)` for each."""
    launches: list[Launch] = []

    def record(*, fn, compile, key, **_) -> bool:
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        launches.append(Launch(fn.jit_function, source, compile["num_warps"], f"{fn.module}.{fn.name}{key}"))
        return True

    def observer(kernel: triton.JITFunction) -> Callable[..., None]:
        def observe(*values: object, **options: object) -> None:
            assert see is not None
            names = {name: value for name, value in options.items() if name in kernel.arg_names}
            see(kernel, kernel.signature.bind(*values, **names).arguments)

        return observe

    driver.set_active(AbsentDriver())
    knobs.runtime.jit_cache_hook = record
    for kernel in all_kernels() if see else ():
        kernel.pre_run_hooks.append(observer(kernel))
    try:
        yield launches
    finally:
        knobs.runtime.jit_cache_hook = None
        for kernel in all_kernels():
            kernel.pre_run_hooks.clear()


def lower(launch: Launch, last: str) -> object:
    """The kernel in one of Triton's representations: ttir, ttgir, llir or ptx."""
    backend = make_backend(TARGET)
    options = backend.parse_options({"num_warps": launch.num_warps})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    form = launch.source.make_ir(
        TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    stages: dict[str, Callable] = {}
    backend.add_stages(stages, options, launch.source.language)
    metadata: dict[str, object] = {}
    for name, stage in stages.items():
        form = stage(form, metadata)
        if name == last:
            break
    return form


def assemble(launch: Launch, directory: Path) -> Machine:
    """Compile a kernel to machine code; `directory` holds the files."""
    ptx = str(lower(launch, "ptx"))
    path = directory / "kernel.ptx"
    path.write_text(ptx)
    ptxas = get_ptxas(TARGET.arch).path
    command = [ptxas, "-v", "--gpu-name=sm_90a", str(path), "-o", str(directory / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    return Machine(ptx, int(registers[1]), int(spilled[1]) + int(spilled[2]), len(NARROW.findall(ptx)))


@cache
def all_kernels() -> tuple[triton.JITFunction, ...]:
    """All functions of all packages that are compiled by Triton."""
    sources = sorted(path for path in PACKAGES.glob("*/src/**/*.py") if "@triton.jit" in path.read_text())
    names = [".".join(path.with_suffix("").parts[path.parts.index("src") + 1 :]) for path in sources]
    return tuple(
        member
        for module in map(importlib.import_module, names)
        for member in vars(module).values()
        if isinstance(member, triton.JITFunction) and member.fn.__module__ == module.__name__
    )


def called_by_others() -> set[triton.JITFunction]:
    """The functions that kernels call; all others are launched."""
    named = (kernel.fn.__globals__.get(name) for kernel in all_kernels() for name in kernel.fn.__code__.co_names)
    return {function for function in named if isinstance(function, triton.JITFunction)}


def narrow(kernel: triton.JITFunction) -> list[str]:
    """The arguments that Triton takes as integers of 32 bits."""
    return [p.name for p in kernel.params if not p.is_constexpr and p.annotation_type in ("i32", "u32")]


def full_name(kernel: triton.JITFunction) -> str:
    return f"{kernel.module}.{kernel.__name__}"
