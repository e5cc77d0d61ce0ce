"""Collectives on copy engines among more ranks than GPUs are at hand: threads, and windows in the host's memory."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.parallel import copy_engine
from xorl.kernels.fused.reference import widened_sum_

CPU = torch.device("cpu")
SIZES = [1, 64, 1000, 4001]


class Ranks:
    """What one rank knows of the others' windows."""

    def __init__(self, rank: int, windows: list[Tensor], met: threading.Barrier) -> None:
        self.rank, self.world_size, self._windows, self._met = rank, met.parties, windows, met

    def get_buffer(self, peer: int, size: Sequence[int], dtype: torch.dtype, offset: int) -> Tensor:
        window = self._windows[peer].view(-1)
        assert window.dtype == dtype
        assert offset + size[0] <= window.numel()
        return window[offset : offset + size[0]]

    def barrier(self) -> None:
        self._met.wait(20)


class Event:
    """On a host everything is done when it is called."""

    def wait(self) -> None:
        pass

    record = wait


@pytest.fixture
def by_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list]:
    """(make a collective, what each rank does with its own, number of ranks) -> the results in rank order."""
    monkeypatch.setattr(copy_engine, "HALF_BYTES", 2048)
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def empty(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(size, 99, dtype=dtype, device=device)

    monkeypatch.setattr(copy_engine.symmetric_memory, "empty", empty)

    def run(make: Callable[[], object], work: Callable[[object, int], object], num_ranks: int) -> list:
        windows: list[Tensor] = []
        met = threading.Barrier(num_ranks)

        def rendezvous(window: Tensor, group: object) -> Ranks:
            windows.append(window)
            return Ranks(len(windows) - 1, windows, met)

        monkeypatch.setattr(copy_engine.symmetric_memory, "rendezvous", rendezvous)
        collectives = [make() for _ in range(num_ranks)]
        with ThreadPoolExecutor(num_ranks) as pool:
            return list(pool.map(work, collectives, range(num_ranks)))

    return run


def vector(size: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * size + rank)).to(dtype)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_gradients_of_many_ranks_are_added_up(num_ranks: int, by_ranks: Callable[..., list]) -> None:
    # Catches two peers that write to one place of a window, pieces that are left out, and sums in half precision.
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    group = None

    def make() -> copy_engine.CopyEngineReduceScatter:
        collective = copy_engine.CopyEngineReduceScatter(group, CPU, torch.bfloat16)
        collective._sum_ = widened_sum_
        return collective

    def work(collective: copy_engine.CopyEngineReduceScatter, rank: int) -> list[Tensor]:
        sums = []
        for size in SIZES * 3:
            whole = collective.allocate((num_ranks * size,), dtype=torch.float32, device=CPU)
            whole.copy_(vector(num_ranks * size, rank, torch.bfloat16))
            out = collective.allocate((size,), dtype=torch.float32, device=CPU)
            assert (whole.dtype, out.dtype) == (torch.bfloat16, torch.float32)
            time.sleep(0.001 * ((rank + size) % 3))
            collective(out, whole, group, dist.ReduceOp.SUM)
            sums.append(out)
            del whole
        return sums

    for rank, sums in enumerate(by_ranks(make, work, num_ranks)):
        for size, found in zip(SIZES * 3, sums, strict=True):
            parts = [vector(num_ranks * size, other, torch.bfloat16) for other in range(num_ranks)]
            wanted = sum(part[rank * size : (rank + 1) * size].double() for part in parts)
            torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_shards_of_many_ranks_are_gathered(num_ranks: int, by_ranks: Callable[..., list]) -> None:
    # Catches a peer's shard in another's place, and a window that is written again while it is read.
    def work(collective: copy_engine.CopyEngineAllGather, rank: int) -> list[Tensor]:
        found = []
        for size in SIZES * 3:
            out = collective.allocate((num_ranks * size,), dtype=torch.bfloat16, device=CPU)
            own = out[rank * size : (rank + 1) * size]
            own.copy_(vector(size, rank, torch.bfloat16))
            time.sleep(0.001 * ((rank + size) % 3))
            collective(out, own, None)
            found.append(out)
        return found

    for gathered in by_ranks(lambda: copy_engine.CopyEngineAllGather(None, CPU), work, num_ranks):
        for size, found in zip(SIZES * 3, gathered, strict=True):
            assert torch.equal(found, torch.cat([vector(size, rank, torch.bfloat16) for rank in range(num_ranks)]))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_shards_of_several_tensors_come_to_their_places(num_ranks: int, by_ranks: Callable[..., list]) -> None:
    # Catches parts of tensors that lie on each other in a window, the end of one that does not fit, values that are not
    # converted, and memory of the first call.
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]

    def work(collective: copy_engine.CopyEngineAllGather, rank: int) -> list[list[Tensor]]:
        wholes = [torch.empty(num_ranks * size, dtype=dtype) for size, dtype in zip(SIZES, dtypes, strict=True)]
        gather = collective.gather_into(wholes)
        found = []
        for call in range(4):
            for whole in wholes:
                whole.untyped_storage().resize_(0)
                whole.untyped_storage().resize_(whole.nbytes)
            time.sleep(0.001 * ((rank + call) % 3))
            gather([vector(size, rank + call, torch.float32) for size in SIZES])
            found.append([whole.clone() for whole in wholes])
        return found

    for calls in by_ranks(lambda: copy_engine.CopyEngineAllGather(None, CPU), work, num_ranks):
        for call, wholes in enumerate(calls):
            for size, dtype, found in zip(SIZES, dtypes, wholes, strict=True):
                parts = [vector(size, rank + call, torch.float32) for rank in range(num_ranks)]
                assert torch.equal(found, torch.cat(parts).to(dtype))
