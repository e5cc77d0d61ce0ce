"""Activation offloading: what layers save for the backward pass waits in host memory, and comes back a layer ahead.

Traffic runs on one stream of its own: to the host while the following layers compute their forward pass, back while the
layer after computes its backward pass. With recomputed layers that is one [T, D] tensor a layer, the cheapest way to
save memory; without, everything that a layer saves.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from xorl.core.nn.fp8 import Fp8Linear

# Smaller storages are not worth a copy of their own: a layer has a few, of norms and document borders.
MIN_BYTES = 1 << 20
# Host memory is handed out in pages, so packs of any length share it without gaps; a slab is pinned at a time, a power
# of two since torch's pinned memory is rounded up to one.
PAGE_BYTES = 16 << 20
PAGES_OF_SLAB = 16
PLAIN = (Tensor, nn.Parameter)


class ActivationOffload:
    """Offloads what the layers of one model save, keeping the `limit_bytes` saved last on the device.

    On a CPU device it copies within host memory, without a stream: of use in tests alone.
    Tensors are handled by storage, so views of one are copied once. Parameters (whatever shares their storage), their
    copies in fp8, tensors that layers take besides their first, and storages below `min_bytes` stay where they are.
    """

    def __init__(self, device: torch.device, *, limit_bytes: float, min_bytes: int = MIN_BYTES) -> None:
        self._traffic = _Traffic(device)
        self._limit_bytes = limit_bytes
        self._min_bytes = min_bytes
        self._kept: deque[_Group] = deque()
        self._last: _Group | None = None

    @property
    def host_bytes(self) -> int:
        """Host memory taken so far; it is reused, and never given back."""
        return self._traffic.pages.num_bytes

    @property
    def traffic_bytes(self) -> int:
        """Bytes copied to the host so far."""
        return self._traffic.bytes_to_host

    def install(self, layers: Sequence[nn.Module]) -> None:
        """Wrap the forward functions of `layers`, in the order in which they run; changes them in place.

        What the last layer saves stays: the backward pass begins with it, and meanwhile the layer before comes back.
        """
        for index, layer in enumerate(layers[:-1]):
            layer.forward = self._offloaded(layer, layer.forward, is_first=index == 0)
        layers[-1].forward = self._announcing(layers[-1].forward)

    def _offloaded(self, layer: nn.Module, forward: Callable[..., Tensor], *, is_first: bool) -> Callable[..., Tensor]:
        def offloaded(hidden: Tensor, *inputs: object) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(hidden, *inputs)
            if is_first:
                self._start()
            with self._saving(layer, inputs):
                return forward(hidden, *inputs)

        return offloaded

    def _announcing(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def announcing(*inputs: object) -> Tensor:
            output = forward(*inputs)
            group = self._last
            if group is not None and output.requires_grad:
                # Called when the gradient of the output is there: the backward pass of this layer is what comes next.
                output.register_hook(lambda _: group.fetch())
            return output

        return announcing

    def _start(self) -> None:
        """A forward pass begins: what an earlier one may have left without a backward pass is not waited for."""
        self._kept.clear()
        self._last = None

    @contextmanager
    def _saving(self, layer: nn.Module, inputs: Sequence[object]) -> Iterator[None]:
        group = _Group(self._last, self._traffic)
        saved: dict[int, _Block] = {}
        # Sharded parameters have their gathered values only while the module runs that they are gathered for.
        stay = {_address(tensor) for tensor in (*_plain(_weights(layer)), *_tensors(inputs))}
        gathers_inside = any(isinstance(module, FSDPModule) for module in layer.modules() if module is not layer)

        def stays(tensor: Tensor) -> bool:
            if type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.is_conj():
                return True
            if tensor.device != self._traffic.device or tensor.untyped_storage().nbytes() < self._min_bytes:
                return True
            address = _address(tensor)
            return address in stay or (gathers_inside and address in map(_address, _plain(_weights(layer))))

        def pack(tensor: Tensor) -> Tensor | _View:
            if stays(tensor):
                return tensor
            address = _address(tensor)
            if address not in saved:
                storage = tensor.untyped_storage()
                saved[address] = group.add(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            return _View(saved[address], tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        with saved_tensors_hooks(pack, _unpack):
            yield
        self._last = group
        self._kept.append(group)
        self._evict()

    def _evict(self) -> None:
        """Send the groups that were saved first on their way, until what is kept is within the limit."""
        self._traffic.release(num_left=1)
        num_bytes = sum(group.num_bytes for group in self._kept)
        while self._kept and num_bytes > self._limit_bytes:
            group = self._kept.popleft()
            num_bytes -= group.num_bytes
            group.to_host()


def _tensors(inputs: Sequence[object]) -> Iterator[Tensor]:
    """The tensors among `inputs`, which may be in tuples or be attributes of them."""
    for value in inputs:
        parts = value if isinstance(value, tuple) else [value, *getattr(value, "__dict__", {}).values()]
        yield from (part for part in parts if isinstance(part, Tensor))


def _weights(layer: nn.Module) -> Iterator[Tensor]:
    """The parameters of `layer`, and the copies in fp8 that are computed with in their place."""
    yield from layer.parameters()
    for module in layer.modules():
        if isinstance(module, Fp8Linear) and module.weight_fp8 is not None:
            yield module.weight_fp8


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The plain tensors that `tensors` are, or are made of; what is sharded is not what a layer computes with."""
    for tensor in tensors:
        if type(tensor) in PLAIN:
            yield tensor
        elif is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _plain(getattr(tensor, name) for name in names)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Block:
    """The bytes of one storage: on the device, in pages of the host, or both. What refers to it are saved tensors."""

    def __init__(self, device_bytes: Tensor, group: _Group) -> None:
        self.num_bytes = device_bytes.numel()
        self.device_bytes: Tensor | None = device_bytes
        self.pages: list[Tensor] = []
        self.group = group


class _View(NamedTuple):
    """A saved tensor: how it lies in its storage."""

    block: _Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(packed: Tensor | _View) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    block, dtype, size, stride, offset = packed
    block.group.use()
    assert block.device_bytes is not None
    tensor = torch.empty(0, dtype=dtype, device=block.device_bytes.device)
    return tensor.set_(block.device_bytes.untyped_storage(), offset, size, stride)


class _Group:
    """What one layer saved in one forward pass.

    It refers to its blocks weakly: they are freed one by one, as the backward pass of the layer is done with them.
    """

    def __init__(self, previous: _Group | None, traffic: _Traffic) -> None:
        self._previous = previous
        self._traffic = traffic
        self._blocks: list[weakref.ref[_Block]] = []
        self._arriving: list[Tensor] = []
        self._arrival: _Moment | None = None
        self._is_used = False

    def add(self, device_bytes: Tensor) -> _Block:
        block = _Block(device_bytes, self)
        self._blocks.append(weakref.ref(block))
        return block

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self._alive())

    def to_host(self) -> None:
        """Begin to copy what is still needed to the host, and give up the device's memory when that is done."""
        self._traffic.to_host([block for block in self._alive() if block.device_bytes is not None])

    def use(self) -> None:
        """The backward pass of the layer begins, or goes on: the bytes are on the device for what is queued next."""
        if self._is_used:
            return
        self._is_used = True
        self.fetch()
        if self._arrival is not None:
            self._arrival.wait()
        self._arriving.clear()
        if self._previous is not None:
            self._previous.fetch()
            self._previous = None

    def fetch(self) -> None:
        """Begin to copy back what is on the host, once."""
        blocks = [block for block in self._alive() if block.device_bytes is None]
        if blocks and self._arrival is None:
            # Held until a stream that frees them has waited, whatever becomes of the blocks.
            self._arriving, self._arrival = self._traffic.to_device(blocks)

    def _alive(self) -> list[_Block]:
        return [block for reference in self._blocks if (block := reference()) is not None]

    def __del__(self) -> None:
        if self._arriving and self._arrival is not None:
            self._arrival.wait()


class _Moment:
    """A point in the work of the traffic's stream, for which the computing stream waits; on a CPU, nothing."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = None if stream is None else stream.record_event()

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class _Traffic:
    """Copies between a device and host pages, in the order in which they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pages = _Pages(pinned=device.type == "cuda")
        self.bytes_to_host = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: deque[tuple[_Moment, list[Tensor]]] = deque()

    def to_host(self, blocks: list[_Block]) -> None:
        """Begin to copy `blocks`; `release` frees their memory on the device."""
        sources: list[Tensor] = []
        with self._after_compute():
            for block in blocks:
                assert block.device_bytes is not None
                if not block.pages:
                    block.pages = self.pages.take(block.num_bytes)
                    weakref.finalize(block, self.pages.give_back, block.pages).atexit = False
                    for page, part in _pairs(block.pages, block.device_bytes):
                        page.copy_(part, non_blocking=True)
                    self.bytes_to_host += block.num_bytes
                sources.append(block.device_bytes)
                block.device_bytes = None
        self._leaving.append((_Moment(self._stream), sources))

    def release(self, num_left: int = 0) -> None:
        """Free what has left the device, but for the `num_left` groups that were sent last.

        The computing stream waits, should the copies be slower than it: what is on its way is bounded, and memory that
        a copy reads is never handed out.
        """
        while len(self._leaving) > num_left:
            moment, _ = self._leaving.popleft()
            moment.wait()

    def to_device(self, blocks: list[_Block]) -> tuple[list[Tensor], _Moment]:
        """Begin to copy `blocks` back, into memory of the computing stream."""
        self.release()
        arriving = [torch.empty(block.num_bytes, dtype=torch.uint8, device=self.device) for block in blocks]
        with self._after_compute():
            for block, target in zip(blocks, arriving, strict=True):
                for page, part in _pairs(block.pages, target):
                    part.copy_(page, non_blocking=True)
                block.device_bytes = target
        return arriving, _Moment(self._stream)

    @contextmanager
    def _after_compute(self) -> Iterator[None]:
        """Within it, copies are queued behind what the computing stream was given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


def _pairs(pages: list[Tensor], whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return ((page[: part.numel()], part) for page, part in zip(pages, whole.split(PAGE_BYTES), strict=True))


class _Pages:
    """Host memory in pages. A page may be taken again while a copy still reads it: copies keep their order."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[Tensor] = []
        self.num_bytes = 0

    def take(self, num_bytes: int) -> list[Tensor]:
        num_pages = -(-num_bytes // PAGE_BYTES)
        while len(self._free) < num_pages:
            slab = torch.empty(PAGES_OF_SLAB * PAGE_BYTES, dtype=torch.uint8, pin_memory=self._pinned)
            self._free += slab.split(PAGE_BYTES)
            self.num_bytes += slab.numel()
        taken, self._free = self._free[-num_pages:], self._free[:-num_pages]
        return taken

    def give_back(self, pages: list[Tensor]) -> None:
        self._free += pages
