"""Activation offloading: tensors saved for the backward pass move to host memory and are fetched one layer ahead.

Copies run on a separate stream: to the host while later layers compute their forward pass, and back while the next
layer computes its backward pass. With recomputed layers, only one [T, D] tensor per layer is offloaded, which is the
cheapest way to save memory; otherwise, everything that a layer saves is offloaded.
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

from xorl.core.nn.fp8 import Fp8Linear
from xorl.core.torch_private import is_traceable_wrapper_subclass

# Smaller storages are not worth a copy: a layer saves a few, for norms and document boundaries.
MIN_BYTES = 1 << 20
# Host memory is allocated in pages, so packs of any length share it without fragmentation. It is pinned in slabs, whose
# size is a power of two because torch rounds the sizes of pinned allocations up to powers of two.
PAGE_BYTES = 16 << 20
PAGES_PER_SLAB = 16
PLAIN = (Tensor, nn.Parameter)


class ActivationOffload:
    """Offloads the activations that the layers of one model save, except for the `limit_bytes` saved last.

    On a CPU device it copies within host memory, without a stream; this is for tests only. Tensors are handled by
    storage, so views of one storage are copied once. Parameters and tensors that share their storage, fp8 copies of
    weights, inputs of a layer other than the first, and storages below `min_bytes` are not offloaded.
    """

    def __init__(self, device: torch.device, *, limit_bytes: float, min_bytes: int = MIN_BYTES) -> None:
        self._transfers = _Transfers(device)
        self._limit_bytes = limit_bytes
        self._min_bytes = min_bytes
        self._kept: deque[_Group] = deque()
        self._last_group: _Group | None = None

    @property
    def host_bytes(self) -> int:
        """Host memory allocated so far; it is reused and never freed."""
        return self._transfers.pages.num_bytes

    @property
    def traffic_bytes(self) -> int:
        """Bytes copied to the host so far."""
        return self._transfers.bytes_to_host

    def install(self, layers: Sequence[nn.Module]) -> None:
        """Wrap the forward functions of `layers`, given in execution order, in place.

        The last layer is not offloaded: the backward pass starts with it, while the layer before is fetched.
        """
        for index, layer in enumerate(layers[:-1]):
            layer.forward = self._offloaded(layer, layer.forward, is_first=index == 0)
        layers[-1].forward = self._prefetching(layers[-1].forward)

    def _offloaded(self, layer: nn.Module, forward: Callable[..., Tensor], *, is_first: bool) -> Callable[..., Tensor]:
        def offloaded(hidden: Tensor, *inputs: object) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(hidden, *inputs)
            if is_first:
                self._start()
            with self._saving(layer, inputs):
                return forward(hidden, *inputs)

        return offloaded

    def _prefetching(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def prefetching(*inputs: object) -> Tensor:
            outputs = forward(*inputs)
            output = outputs[0] if isinstance(outputs, tuple) else outputs
            group = self._last_group
            if group is not None and output.requires_grad:
                # Runs when the gradient of the output is ready, just before the backward pass of this layer.
                output.register_hook(lambda _: group.fetch())
            return outputs

        return prefetching

    def _start(self) -> None:
        """Start a forward pass. Drop groups left by an earlier forward pass that had no backward pass."""
        self._kept.clear()
        self._last_group = None

    @contextmanager
    def _saving(self, layer: nn.Module, inputs: Sequence[object]) -> Iterator[None]:
        group = _Group(self._last_group, self._transfers)
        saved: dict[int, _Block] = {}
        # Collected now, because the gathered values of sharded parameters exist only while their unit runs.
        excluded = {_address(tensor) for tensor in (*_plain_tensors(_weights(layer)), *_tensors(inputs))}
        gathers_inside = any(isinstance(module, FSDPModule) for module in layer.modules() if module is not layer)

        def is_excluded(tensor: Tensor) -> bool:
            if type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.is_conj():
                return True
            if tensor.device != self._transfers.device or tensor.untyped_storage().nbytes() < self._min_bytes:
                return True
            address = _address(tensor)
            return address in excluded or (gathers_inside and address in map(_address, _plain_tensors(_weights(layer))))

        def pack(tensor: Tensor) -> Tensor | _View:
            if is_excluded(tensor):
                return tensor
            address = _address(tensor)
            if address not in saved:
                storage = tensor.untyped_storage()
                saved[address] = group.add(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            return _View(saved[address], tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        with saved_tensors_hooks(pack, _unpack):
            yield
        self._last_group = group
        self._kept.append(group)
        self._evict()

    def _evict(self) -> None:
        """Offload the oldest groups until the rest is within the limit."""
        self._transfers.release(num_left=1)
        num_bytes = sum(group.num_bytes for group in self._kept)
        while self._kept and num_bytes > self._limit_bytes:
            group = self._kept.popleft()
            num_bytes -= group.num_bytes
            group.to_host()


def _tensors(inputs: Sequence[object]) -> Iterator[Tensor]:
    """The tensors in `inputs`: direct ones, elements of tuples, and attributes of other objects."""
    for value in inputs:
        parts = value if isinstance(value, tuple) else [value, *getattr(value, "__dict__", {}).values()]
        yield from (part for part in parts if isinstance(part, Tensor))


def _weights(layer: nn.Module) -> Iterator[Tensor]:
    """The parameters of `layer`, and the fp8 copies used in their place."""
    yield from layer.parameters()
    for module in layer.modules():
        if isinstance(module, Fp8Linear) and module.weight_fp8 is not None:
            yield module.weight_fp8


def _plain_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The plain tensors among `tensors` and inside wrapper subclasses, except DTensors: layers use gathered values."""
    for tensor in tensors:
        if type(tensor) in PLAIN:
            yield tensor
        elif is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _plain_tensors(getattr(tensor, name) for name in names)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Block:
    """The bytes of one storage: on the device, in host pages, or both. Saved tensors hold references to it."""

    def __init__(self, device_bytes: Tensor, group: _Group) -> None:
        self.num_bytes = device_bytes.numel()
        self.device_bytes: Tensor | None = device_bytes
        self.pages: list[Tensor] = []
        self.group = group


class _View(NamedTuple):
    """A saved tensor, as a strided view of its storage."""

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
    """The tensors that one layer saved in one forward pass.

    References to blocks are weak, so that the layer's backward pass frees each block when it is done with it.
    """

    def __init__(self, previous: _Group | None, transfers: _Transfers) -> None:
        self._previous = previous
        self._transfers = transfers
        self._blocks: list[weakref.ref[_Block]] = []
        self._arriving: list[Tensor] = []
        self._arrival: _StreamEvent | None = None
        self._is_used = False

    def add(self, device_bytes: Tensor) -> _Block:
        block = _Block(device_bytes, self)
        self._blocks.append(weakref.ref(block))
        return block

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self._alive())

    def to_host(self) -> None:
        """Start copying the blocks still in use to the host. Their device memory is freed once that is done."""
        self._transfers.to_host([block for block in self._alive() if block.device_bytes is not None])

    def use(self) -> None:
        """Called for every tensor that the backward pass reads; the first call waits for the blocks to arrive."""
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
        """Start copying blocks back from the host, once."""
        blocks = [block for block in self._alive() if block.device_bytes is None]
        if blocks and self._arrival is None:
            # Keep the tensors alive until the compute stream has waited for the copy, even if the blocks are freed.
            self._arriving, self._arrival = self._transfers.to_device(blocks)

    def _alive(self) -> list[_Block]:
        return [block for reference in self._blocks if (block := reference()) is not None]

    def __del__(self) -> None:
        if self._arriving and self._arrival is not None:
            self._arrival.wait()


class _StreamEvent:
    """An event on the copy stream that the compute stream can wait for; a no-op on a CPU."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = None if stream is None else stream.record_event()

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class _Transfers:
    """Copies between a device and host pages, in the order of the calls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pages = _PagePool(pinned=device.type == "cuda")
        self.bytes_to_host = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._outgoing: deque[tuple[_StreamEvent, list[Tensor]]] = deque()

    def to_host(self, blocks: list[_Block]) -> None:
        """Start copying `blocks` to the host; `release` frees their device memory."""
        sources: list[Tensor] = []
        with self._after_compute():
            for block in blocks:
                assert block.device_bytes is not None
                if not block.pages:
                    block.pages = self.pages.allocate(block.num_bytes)
                    weakref.finalize(block, self.pages.free, block.pages).atexit = False
                    for page, part in _page_parts(block.pages, block.device_bytes):
                        page.copy_(part, non_blocking=True)
                    self.bytes_to_host += block.num_bytes
                sources.append(block.device_bytes)
                block.device_bytes = None
        self._outgoing.append((_StreamEvent(self._stream), sources))

    def release(self, num_left: int = 0) -> None:
        """Free the device memory of offloaded groups, except for the last `num_left`.

        The compute stream waits for the copies. This bounds the memory in flight, and prevents reuse of memory that a
        copy still reads.
        """
        while len(self._outgoing) > num_left:
            event, _ = self._outgoing.popleft()
            event.wait()

    def to_device(self, blocks: list[_Block]) -> tuple[list[Tensor], _StreamEvent]:
        """Start copying `blocks` back, into memory allocated on the compute stream."""
        self.release()
        arriving = [torch.empty(block.num_bytes, dtype=torch.uint8, device=self.device) for block in blocks]
        with self._after_compute():
            for block, target in zip(blocks, arriving, strict=True):
                for page, part in _page_parts(block.pages, target):
                    part.copy_(page, non_blocking=True)
                block.device_bytes = target
        return arriving, _StreamEvent(self._stream)

    @contextmanager
    def _after_compute(self) -> Iterator[None]:
        """Context manager for copies that run after the work queued on the compute stream so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


def _page_parts(pages: list[Tensor], whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(page, part of `whole` that it holds), with pages cut to the size of their parts."""
    return ((page[: part.numel()], part) for page, part in zip(pages, whole.split(PAGE_BYTES), strict=True))


class _PagePool:
    """A pool of host pages. A page may be reused while a copy still reads it, because copies run in order."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[Tensor] = []
        self.num_bytes = 0

    def allocate(self, num_bytes: int) -> list[Tensor]:
        num_pages = -(-num_bytes // PAGE_BYTES)
        while len(self._free) < num_pages:
            slab = torch.empty(PAGES_PER_SLAB * PAGE_BYTES, dtype=torch.uint8, pin_memory=self._pinned)
            self._free += slab.split(PAGE_BYTES)
            self.num_bytes += slab.numel()
        taken, self._free = self._free[-num_pages:], self._free[:-num_pages]
        return taken

    def free(self, pages: list[Tensor]) -> None:
        self._free += pages
