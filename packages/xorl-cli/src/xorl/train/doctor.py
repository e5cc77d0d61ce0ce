"""Examines a machine for `xorl doctor`: a finding for each part, with advice."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.cuda import nccl

from xorl.core import runtime
from xorl.core.nn.kernels import choose_kernels
from xorl.kernels.attention import ATTENTION, AttentionRequest, AttentionSpec, resolve_attention
from xorl.kernels.attention.sdpa import sdpa_attention
from xorl.kernels.experts import EXPERTS, ExpertsRequest
from xorl.kernels.experts.reference import experts as plain_experts
from xorl.kernels.fused import reference, triton_refusal
from xorl.kernels.layout import SequenceLayout
from xorl.train.observe.devices import peak_flops

Status = Literal["ok", "warn", "fail"]

GIB = 2**30
# Below these, a machine is slower than others of its kind, or soon full.
SHARE_OF_PEAK = 0.55
LINK_GBPS = 20.0
DISK_MBPS = 100.0
FREE_GIB = 20.0
SHARED_MEMORY_GIB = 1.0
USED_GIB = 2.0
CORES_PER_GPU = 4
# Of a loop in Python over 1,000 numbers. Slower hosts launch kernels more slowly than GPUs compute them.
LOOP_US = 130.0
# Relative differences in bf16 and fp32 between a kernel and its plain twin.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
# What to set if kernels do not work.
INSTEAD = {
    "attention": "choose another model.attn_implementation",
    "experts": "choose another model.moe_implementation",
    "norms": "set model.rmsnorm_native: true",
}
WRITTEN = 64 * 2**20
COPIED = 256 * 2**20


@dataclass(frozen=True)
class Finding:
    """About one part of the machine. ok: as it should be; warn: a run is slow or ends early; fail: it does not start.

    advice: what to do, for everything that is not ok.
    """

    part: str
    status: Status
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.status:<5} {self.part:<10} {self.text}" + (f"\n{'':<17}{self.advice}" if self.advice else "")


def findings(folder: Path) -> Iterator[Finding]:
    """Examines the machine for a run that writes to `folder`, one part after the other; takes less than a minute."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    parts: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("torch", lambda: _torch()),
        ("host", lambda: _host(len(devices))),
        *((f"gpu {device.index}", lambda device=device: _gpu(device)) for device in devices),
        ("links", lambda: _links(devices)),
        ("kernels", lambda: _kernels(devices[0] if devices else torch.device("cpu"))),
        ("disk", lambda: _disk(folder)),
    ]
    for part, examine in parts:
        try:
            yield from examine()
        except Exception as error:  # noqa: BLE001  (what breaks one part must not hide the others)
            text = str(error).strip() or "no message"
            yield Finding(
                part, "fail", f"{type(error).__name__}: {text.splitlines()[0]}", "Report this with the versions above."
            )


def _torch() -> Iterator[Finding]:
    built = f"{torch.__version__}, Python {'.'.join(map(str, sys.version_info[:3]))}"
    if torch.cuda.is_available():
        yield Finding("torch", "ok", f"{built}, for CUDA {torch.version.cuda}")
    elif shutil.which("nvidia-smi"):
        reason = "is built for CPUs" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        yield Finding(
            "torch",
            "fail",
            f"{built} finds no GPU, but there is nvidia-smi: torch {reason}",
            "Install a build of torch for the driver that nvidia-smi shows, or a newer driver.",
        )
    else:
        yield Finding("torch", "ok", f"{built}; there is no GPU, so runs use the CPU")
    if (missing := runtime.missing_compiler("cuda" if torch.cuda.is_available() else "cpu")) is not None:
        yield Finding("compiler", "warn", missing, "Install it, or set train.enable_compile: false.")


def _host(num_gpus: int) -> Iterator[Finding]:
    loop = statistics.median(_loop_us() for _ in range(50))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{cores} cores; a loop of Python takes {loop:.0f} us"
    if num_gpus and loop > LOOP_US:
        advice = "Launching kernels may limit the speed: use long rows, large micro-batches and train.enable_compile."
        yield Finding("host", "warn", f"{text}, usual are 40 to {LOOP_US:.0f}", advice)
    elif cores < CORES_PER_GPU * num_gpus:
        advice = "Ask for more cores, or lower data.dataloader_num_workers."
        yield Finding("host", "warn", f"{text}; {num_gpus} GPUs need {CORES_PER_GPU} each", advice)
    else:
        yield Finding("host", "ok", text)
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free / GIB) < SHARED_MEMORY_GIB:
        advice = "Workers pass batches through it, and NCCL its data: start containers with --shm-size=8g."
        yield Finding("memory", "warn", f"/dev/shm has {free:.2f} GiB free", advice)


def _loop_us() -> float:
    started = time.perf_counter()
    total = 0
    for number in range(1000):
        total += number * number
    return (time.perf_counter() - started) * 1e6


def _gpu(device: torch.device) -> Iterator[Finding]:
    part, name = f"gpu {device.index}", torch.cuda.get_device_name(device)
    free, total = torch.cuda.mem_get_info(device)
    if total - free > USED_GIB * GIB:
        advice = "nvidia-smi shows which processes they are; end them, or leave the GPU out with CUDA_VISIBLE_DEVICES."
        yield Finding(part, "warn", f"{name}: other processes use {(total - free) / GIB:.1f} GiB", advice)
        return
    rate, peak = _product_flops(device), peak_flops(device)
    text = f"{name}, {total / GIB:.0f} GiB, {rate / 1e12:.0f} TFLOP/s in bf16 products"
    if peak is not None and rate < SHARE_OF_PEAK * peak:
        advice = "It may be limited in power or clock, or too hot: nvidia-smi -q -d PERFORMANCE."
        yield Finding(part, "warn", f"{text}, {rate / peak:.0%} of its peak; usual are 65 to 80 %", advice)
    else:
        yield Finding(part, "ok", text)


def _product_flops(device: torch.device) -> float:
    size, count = 8192, 40
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(left)
    milliseconds = []
    for _ in range(2):  # The clock rises in the first round.
        milliseconds.append(_device_ms(device, lambda: [torch.mm(left, left, out=out) for _ in range(count)]))
    return 2 * size**3 * count / (milliseconds[-1] / 1000)


def _device_ms(device: torch.device, work: Callable[[], object]) -> float:
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def _links(devices: list[torch.device]) -> Iterator[Finding]:
    if len(devices) < 2:
        return
    rates: list[float] = []
    for first, second in zip(devices, [*devices[1:], devices[0]], strict=True):
        if not torch.cuda.can_device_access_peer(first.index, second.index):
            advice = "Data goes through the host's memory: nvidia-smi topo -m shows the links; check IOMMU and MIG."
            yield Finding("links", "warn", f"{first} cannot read the memory of {second}", advice)
            return
        source, place = (torch.empty(COPIED, dtype=torch.uint8, device=device) for device in (first, second))
        place.copy_(source)
        torch.cuda.synchronize(first)
        rates.append(COPIED / _device_ms(first, lambda source=source, place=place: place.copy_(source)) / 1e6)
    version = ".".join(map(str, nccl.version()))
    text = f"{min(rates):.0f} to {max(rates):.0f} GB/s from each GPU to the next, NCCL {version}"
    advice = "Sharding will wait for them: prefer replicas, or few large micro-batches. nvidia-smi topo -m shows them."
    is_slow = min(rates) < LINK_GBPS
    yield Finding("links", "warn" if is_slow else "ok", text, advice if is_slow else "")


def _kernels(device: torch.device) -> Iterator[Finding]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = AttentionRequest(device.type, dtype, 128)
    experts = ExpertsRequest(device.type, dtype, 256, 128)
    for kind, name, missing, compare in (
        ("attention", ATTENTION.resolved_name("auto", attention), ATTENTION.missing(attention), _compare_attention),
        ("experts", EXPERTS.resolved_name("auto", experts), EXPERTS.missing(experts), _compare_experts),
        ("norms", "torch" if triton_refusal(device.type) else "Triton", [], _compare_norms),
    ):
        started = time.perf_counter()
        error = compare(device, dtype)
        seconds = time.perf_counter() - started
        text = f"{kind} by {name}, within {error:.0e} of plain torch, in {seconds:.1f} s"
        if not error < TOLERANCE[dtype]:
            yield Finding("kernels", "fail", text, f"They compute something else here: {INSTEAD[kind]}.")
        elif missing:
            yield Finding("kernels", "warn", text, f"A faster one lacks a library. {'; '.join(missing)}")
        else:
            yield Finding("kernels", "ok", text)


def _difference(found: Tensor, expected: Tensor) -> float:
    """The relative difference; infinite if something found is not finite."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return float(error) if error.isfinite() else float("inf")


def _compare_attention(device: torch.device, dtype: torch.dtype) -> float:
    layout = SequenceLayout.from_lengths([100, 156], device)
    q, k, v = (torch.randn(256, heads, 128, device=device, dtype=dtype) for heads in (8, 2, 2))
    function = resolve_attention("auto", AttentionRequest(device.type, dtype, 128))
    spec = AttentionSpec(128**-0.5)
    plain = sdpa_attention(q.float(), k.float(), v.float(), layout, spec)
    return _difference(function(q, k, v, layout, spec), plain)


def _compare_experts(device: torch.device, dtype: torch.dtype) -> float:
    num_experts, width, inner = 8, 256, 128
    x, up, down = (
        torch.randn(*size, device=device, dtype=dtype)
        for size in ((64, width), (num_experts, 2 * inner, width), (num_experts, width, inner))
    )
    weights, ids = torch.randn(64, num_experts, device=device).softmax(-1).topk(2)
    function = EXPERTS.resolve("auto", ExpertsRequest(device.type, dtype, width, inner))
    plain = plain_experts(x.float(), up.float(), down.float(), weights, ids)
    return _difference(function(x, up, down, weights, ids), plain)


def _compare_norms(device: torch.device, dtype: torch.dtype) -> float:
    x, weight = torch.randn(64, 256, device=device, dtype=dtype), torch.rand(256, device=device, dtype=dtype)
    options = {"compiled": False, "native": (), "cast_bf16": False}
    kernels = choose_kernels(sdpa_attention, device_type=device.type, dtype=dtype, **options)
    found = kernels.add_rms_norm(x, x, weight, 1e-6, 0.0)[1]
    return _difference(found, reference.add_rms_norm(x.float(), x.float(), weight.float(), 1e-6)[1])


def _disk(folder: Path) -> Iterator[Finding]:
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(there).free / GIB
    try:
        rate = _write_rate(there)
    except OSError as error:
        advice = "Name a folder that you may write to: --output, and train.output_dir in the configuration."
        yield Finding("disk", "fail", f"{there} cannot be written ({error.strerror})", advice)
        return
    text = f"{there}: {free:,.0f} GiB free, {rate:,.0f} MB/s written"
    if free < FREE_GIB:
        advice = "A checkpoint takes 12 to 16 bytes a parameter: free space, or set train.output_dir elsewhere."
        yield Finding("disk", "warn", text, advice)
    elif rate < DISK_MBPS:
        yield Finding(
            "disk", "warn", text, "Checkpoints take long: save less often, or set train.output_dir elsewhere."
        )
    else:
        yield Finding("disk", "ok", text)


def _write_rate(folder: Path) -> float:
    """MB/s of writing a file until it is on the disk."""
    data = os.urandom(WRITTEN)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return WRITTEN / (time.perf_counter() - started) / 1e6
