"""CUDA graphs: the host launches all kernels of a function at once instead of one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import count
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

Compute = Callable[..., tuple[Tensor, ...]]

# Calls before the capture, which compile kernels and choose configurations: a capture cannot.
WARMUP_CALLS = 1
# Sizes of inputs that get graphs. Further sizes are too rare for a capture to pay.
MAX_SIZES = 8
# Beyond this number all graphs are dropped: those of parameters that have moved in memory are never used again.
MAX_GRAPHS = 1024

_numbers = count()
_by_number: WeakValueDictionary[int, Graphs] = WeakValueDictionary()
_all: WeakSet[torch.cuda.CUDAGraph] = WeakSet()


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The stream on which all graphs are captured. For each further stream, cuBLAS would keep another workspace."""
    return torch.cuda.Stream(device)


def new_graph() -> torch.cuda.CUDAGraph:
    """A graph to capture, which `reset_all` finds."""
    graph = torch.cuda.CUDAGraph()
    _all.add(graph)
    return graph


def reset_all() -> None:
    """Make all graphs of this process unusable: NCCL does not end a group while a graph holds its collectives."""
    for graph in _all:
        graph.reset()
    _all.clear()


class GraphMemory:
    """Memory that graphs share for what they compute.

    A call must end before the next begins, which holds on one stream, and what is kept must be copied.
    """

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Context manager: the graph of the kernels that are launched inside, which do not run yet."""
        graph, outer = new_graph(), torch.cuda.current_stream()
        stream = _capture_stream(torch.cuda.current_device())
        stream.wait_stream(outer)
        with torch.cuda.stream(stream):
            pool = None if self._first is None else self._first.pool()
            # NCCL's watchdog queries events from its own thread.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield graph
            except BaseException:
                with suppress(RuntimeError):  # which would hide the cause
                    graph.capture_end()
                raise
            graph.capture_end()
        outer.wait_stream(stream)
        if self._first is None:
            self._first = graph

    def place_of(self, tensor: Tensor) -> Tensor:
        """A tensor that reads the memory of a contiguous one without keeping it from being used otherwise."""
        if not tensor.numel():
            return tensor
        place = torch.as_tensor(_Place(tensor), device=tensor.device)
        return place.view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True)
class _Captured:
    """A graph with the inputs that it reads and the outputs that it writes, in memory of the graphs."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


class Graphs:
    """Captures a function at its second call with the same sizes, and replays it from then on.

    A function may communicate: ranks that make the same calls capture at the same ones. Inside another capture, it is
    a part of that one.

    Attributes:
        number: identifies this object to operators (`graphs_of`), whose arguments cannot be objects.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        _by_number[self.number] = self
        self._calls: Counter[Hashable] = Counter()
        self._memory = GraphMemory()
        self._captured: dict[Hashable, _Captured] = {}
        # By the sizes of the inputs that are copied.
        self._inputs: dict[Hashable, list[Tensor]] = {}

    def __len__(self) -> int:
        """The number of graphs."""
        return len(self._captured)

    def run(
        self, compute: Compute, copied: Sequence[Tensor], fixed: Sequence[Tensor], constants: Hashable
    ) -> tuple[Tensor, ...]:
        """`compute(*copied, *fixed)`, without gradients.

        Args:
            compute: launches the same kernels in every call with the same sizes and constants, and never waits for the
                device.
            copied: inputs that change between calls; they are copied into the memory that a graph reads.
            fixed: inputs that a graph reads in place, such as parameters. Each set of addresses needs a graph.
            constants: everything else in which calls may differ.
        """
        if torch.cuda.is_current_stream_capturing():
            return compute(*copied, *fixed)
        sizes = constants, tuple((each.shape, each.dtype) for each in copied)
        key = sizes, tuple((each.data_ptr(), each.shape, each.dtype) for each in fixed)
        captured = self._captured.get(key)
        if captured is None:
            self._calls[key] += 1
            if self._calls[key] <= WARMUP_CALLS or (sizes not in self._inputs and len(self._inputs) >= MAX_SIZES):
                return compute(*copied, *fixed)
            if sizes not in self._inputs:
                self._inputs[sizes] = [torch.empty_like(each) for each in copied]
            if len(self._captured) >= MAX_GRAPHS:
                self._captured.clear()
                self._memory = GraphMemory()
            captured = self._captured[key] = self._capture(compute, self._inputs[sizes], fixed)
        for place, given in zip(captured.inputs, copied, strict=True):
            place.copy_(given)
        captured.graph.replay()
        return tuple(each.clone() for each in captured.outputs)

    def _capture(self, compute: Compute, inputs: Sequence[Tensor], fixed: Sequence[Tensor]) -> _Captured:
        with self._memory.capture() as graph:
            outputs = [each.contiguous() for each in compute(*inputs, *fixed)]
        # The memory of the outputs is free for the graphs that are captured next, as that of everything in between is.
        return _Captured(graph, inputs, [self._memory.place_of(each) for each in outputs])


def graphs_of(number: int) -> Graphs:
    """The graphs with this number. Raises KeyError if there are none any more."""
    return _by_number[number]


class _Place:
    """The memory of a tensor, without a share in keeping it."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
