"""CUDA graphs on the CPU: compiled code that is called during a capture does not compute, and a replay calls it.

As with real graphs, a replay reads and writes the memory of the capture, and overwrites what the other graphs wrote.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from xorl.kernels.attention.kernel import Documents
from xorl.kernels.attention.operator import PackedAttention
from xorl.kernels.attention.reference import eager_backward, eager_forward

Compute = Callable[..., Sequence[object]]


def _on_device(kernel: Callable[..., object], *inputs: object, **options: object) -> object:
    """A kernel that reads the documents on the device, as FlashAttention does."""
    *tensors, documents, _, spec = inputs
    offsets = documents.cu_seqlens.unique().long()
    assert documents.longest >= offsets.diff().max()
    read = Documents(offsets.int(), offsets)
    return kernel(*tensors, read, read, spec, **options)


device_attention = PackedAttention(
    "emulated", partial(_on_device, eager_forward), partial(_on_device, eager_backward), reads_lengths=False
)


def address(tensor: Tensor) -> int:
    """Of its memory."""
    return tensor.untyped_storage().data_ptr()


class EmulatedGraph:
    """The calls of compiled code during a capture."""

    def __init__(self, memory: "EmulatedMemory") -> None:
        self._memory = memory
        self.calls: list[tuple[Compute, Sequence[object], Sequence[object]]] = []

    def replay(self) -> None:
        for graph in self._memory.graphs:
            graph.overwrite()
        for compute, inputs, outputs in self.calls:
            for place, value in zip(outputs, compute(*inputs), strict=True):
                if isinstance(place, Tensor) and isinstance(value, Tensor):
                    place.detach().copy_(value)

    def overwrite(self) -> None:
        """As if another graph used the memory of the outputs."""
        for _, inputs, outputs in self.calls:
            given = {address(each) for each in inputs if isinstance(each, Tensor)}
            for each in outputs:
                if isinstance(each, Tensor) and address(each) not in given:
                    each.detach().fill_(float("nan") if each.is_floating_point() else 127)


class EmulatedMemory:
    """In place of `xorl.core.graphs.GraphMemory`. Layers must be compiled with `backend`."""

    capturing: EmulatedGraph | None = None

    def __init__(self) -> None:
        self.graphs: list[EmulatedGraph] = []

    @contextmanager
    def capture(self) -> Iterator[EmulatedGraph]:
        graph = EmulatedGraph(self)
        self.graphs.append(graph)
        EmulatedMemory.capturing = graph
        try:
            yield graph
        finally:
            EmulatedMemory.capturing = None

    def place_of(self, tensor: Tensor) -> Tensor:
        return tensor


def _compile(seen: dict[object, Sequence[object]], graph: Compute, _: object) -> Compute:
    """`seen`: by their shapes, inputs with which it computed before; those of a capture have no values yet."""

    def run(*inputs: object) -> Sequence[object]:
        key = graph, tuple(each.shape if isinstance(each, Tensor) else each for each in inputs)
        capturing = EmulatedMemory.capturing
        if capturing is None:
            seen[key] = [each.clone() if isinstance(each, Tensor) else each for each in inputs]
            return graph(*inputs)
        # Inputs that it returns are those of the capture.
        given = {address(each): own for each, own in zip(seen[key], inputs, strict=True) if isinstance(each, Tensor)}
        outputs = [given.get(address(each), each) if isinstance(each, Tensor) else each for each in graph(*seen[key])]
        capturing.calls.append((graph, inputs, outputs))
        return outputs

    return make_boxed_func(run)


def backend() -> Callable[..., object]:
    """A backend for `compile_layers` whose code can be captured by `EmulatedMemory`."""
    compiler = partial(_compile, {})
    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
