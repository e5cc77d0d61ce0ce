"""CUDA graphs of functions that operators compute: kernels that the host launches together instead of one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Compute = Callable[..., tuple[Tensor, ...]]

# Calls before the first capture: they compile kernels and choose configurations, which a capture cannot.
CALLS_BEFORE = 1
# The most sizes of inputs that have graphs: one for a size that occurs only once or twice costs more than it saves.
MOST_SIZES = 8
# Graphs read parameters where they were at the capture, so parameters that move leave useless graphs behind.
MOST_GRAPHS = 1024

_numbers = count()
_by_number: WeakValueDictionary[int, Graphs] = WeakValueDictionary()


@dataclass(frozen=True)
class _Captured:
    """A graph with the inputs that it reads and the outputs that it writes, in memory of the graphs."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


class Graphs:
    """Captures functions on the call after the first with the same sizes, and replays them from then on.

    The graphs share memory for what they compute in between and for their outputs, so one call must be done before the
    next, which a stream ensures. Outputs are copied. Functions may communicate: ranks that make the same calls capture
    the same of them.

    Attributes:
        number: by which an operator finds them (`graphs_of`), because it cannot be given objects.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        _by_number[self.number] = self
        self._calls: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, _Captured] = {}
        # By the sizes of the inputs that are copied.
        self._inputs: dict[Hashable, list[Tensor]] = {}

    def __len__(self) -> int:
        """The number of graphs."""
        return len(self._captured)

    def run(
        self, compute: Compute, moved: Sequence[Tensor], fixed: Sequence[Tensor], constants: Hashable
    ) -> tuple[Tensor, ...]:
        """`compute(*moved, *fixed)`, without gradients.

        Args:
            compute: launches the same kernels in every call with the same sizes and constants, and never waits for the
                device.
            moved: inputs that are copied to where a graph reads them.
            fixed: inputs that a graph reads where they are, such as parameters. Others at another place have a graph of
                their own.
            constants: everything else in which calls differ.
        """
        sizes = constants, tuple((each.shape, each.dtype) for each in moved)
        key = sizes, tuple((each.data_ptr(), each.shape, each.dtype) for each in fixed)
        captured = self._captured.get(key)
        if captured is None:
            self._calls[key] += 1
            if self._calls[key] <= CALLS_BEFORE or (sizes not in self._inputs and len(self._inputs) >= MOST_SIZES):
                return compute(*moved, *fixed)
            if sizes not in self._inputs:
                self._inputs[sizes] = [torch.empty_like(each) for each in moved]
            if len(self._captured) >= MOST_GRAPHS:
                self._captured.clear()
            captured = self._captured[key] = self._capture(compute, self._inputs[sizes], fixed)
        for place, given in zip(captured.inputs, moved, strict=True):
            place.copy_(given)
        captured.graph.replay()
        return tuple(each.clone() for each in captured.outputs)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def _capture(self, compute: Compute, inputs: Sequence[Tensor], fixed: Sequence[Tensor]) -> _Captured:
        graph, outer = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # The first graph makes the memory that the others share.
        first = next(iter(self._captured.values()), None)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            # NCCL's watchdog queries events from its own thread.
            graph.capture_begin(pool=None if first is None else first.graph.pool(), capture_error_mode="thread_local")
            try:
                outputs = [each.contiguous() for each in compute(*inputs, *fixed)]
            finally:
                graph.capture_end()
        outer.wait_stream(self._stream)
        # The memory of the outputs is free for the graphs that are captured next, as that of everything in between is.
        return _Captured(graph, inputs, [_at_same_place(each) for each in outputs])


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


def _at_same_place(tensor: Tensor) -> Tensor:
    """A tensor that reads the memory of a contiguous one without keeping it from being used otherwise."""
    if not tensor.numel():
        return tensor
    place = torch.as_tensor(_Place(tensor), device=tensor.device)
    return place.view(tensor.dtype).view(tensor.shape)
