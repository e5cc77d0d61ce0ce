"""`Executor`: runs the passes of micro-batches on a rank, and exchanges activations and gradients between stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from xorl.core.mesh import Link
from xorl.core.parallel.schedule import Action, Schedule, steps

Tensors = tuple[Tensor, ...]


class Passes(Protocol):
    """The passes of a rank's chunks, for each micro-batch of a step."""

    def received(self, index: int, chunk: int) -> Tensors:
        """Empty tensors for what the chunk before sends; none for the first chunk."""
        ...

    def forward(self, index: int, chunk: int, received: Tensors) -> Tensors:
        """The tensors for the next chunk; of the last chunk, the loss."""
        ...

    def backward(self, index: int, chunk: int, outputs: Tensors, gradients: Tensors | None) -> None:
        """Compute gradients from those of the outputs; None: those of the loss."""
        ...

    def waited(self) -> None:
        """Called once the values of another stage are there."""
        ...


class Channel:
    """One direction between neighbouring stages. Sends do not wait; what is sent is kept until it has arrived.

    Args:
        link: the groups, in which the last stage comes first.
        step: to the stage that receives, +1 or -1; after the last stage comes the first.
    """

    def __init__(self, link: Link, step: int) -> None:
        rank, size = link.sends.rank(), link.sends.size()
        # Ranks count from the last stage.
        self._link, self._source, self._target = link, (rank + step) % size, (rank - step) % size
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, values: Sequence[Tensor]) -> None:
        """Send tensors, in order."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        for value in values:
            kept = value.detach().contiguous()
            work = dist.isend(kept, group=self._link.sends, group_dst=self._target)
            assert work is not None, "this rank is in the group"
            self._sent.append((work, kept))

    def receive(self, into: Sequence[Tensor]) -> list[dist.Work]:
        """Begin to receive tensors, in order; wait for the results before using them."""
        found = [dist.irecv(tensor, group=self._link.receives, group_src=self._source) for tensor in into]
        return [work for work in found if work is not None]

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._sent:
            self._sent.popleft()[0].wait()


class Executor:
    """Runs the passes of one rank. `stage` is the rank's among `num_stages`, which `links` connect.

    links: in the direction of the next stage and of the previous one, as those of a `Mesh`. None: there is one stage.
    """

    def __init__(
        self,
        schedule: Schedule = "1F1B",
        stage: int = 0,
        num_stages: int = 1,
        num_chunks: int = 1,
        links: tuple[Link, Link] | None = None,
    ) -> None:
        self.schedule: Schedule = schedule
        self.stage, self.num_stages, self.num_chunks = stage, num_stages, num_chunks
        assert (links is None) == (num_stages == 1), "several stages need links"
        self._channels = None if links is None else (Channel(links[0], 1), Channel(links[1], -1))

    def run(self, count: int, passes: Passes) -> None:
        """Compute the forward and backward passes of `count` micro-batches. Collective among the stages."""
        alive: dict[tuple[int, int], tuple[Tensors, Tensors]] = {}
        begun: dict[Action, tuple[Tensors, list[dist.Work]]] = {}

        def begin(action: Action) -> None:
            """Begin to receive what an action needs."""
            key = action.micro_batch, action.chunk
            into = passes.received(*key) if action.is_forward else tuple(map(torch.empty_like, alive[key][1]))
            begun[action] = into, self._receive(into, down=action.is_forward)

        for action, receives in steps(self.schedule, self.stage, self.num_stages, count, self.num_chunks):
            for each in receives:
                begin(each)
            received, works = begun.pop(action, ((), []))
            for work in works:
                work.wait()
            if works:
                passes.waited()
            _, index, chunk = action
            if action.is_forward:
                leaves = tuple(tensor.requires_grad_() for tensor in received)
                outputs = passes.forward(index, chunk, leaves)
                self._send(() if self._ends(chunk) else outputs, down=True)
                alive[index, chunk] = leaves, outputs
                continue
            leaves, outputs = alive.pop((index, chunk))
            passes.backward(index, chunk, outputs, received if works else None)
            self._send([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves], down=False)
        self.finish()

    def forward(self, received: Callable[[int], Tensors], forward: Callable[[int, Tensors], Tensors]) -> None:
        """Compute the forward pass of one micro-batch. Collective among the stages, which need not wait for each other.

        received, forward: of each chunk, as those of `Passes`.
        """
        for chunk in range(self.num_chunks):
            into = received(chunk)
            for work in self._receive(into, down=True):
                work.wait()
            outputs = forward(chunk, into)
            self._send(() if self._ends(chunk) else outputs, down=True)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for channel in self._channels or ():
            channel.finish()

    def _ends(self, chunk: int) -> bool:
        return self.stage == self.num_stages - 1 and chunk == self.num_chunks - 1

    def _receive(self, into: Sequence[Tensor], *, down: bool) -> list[dist.Work]:
        return [] if self._channels is None or not into else self._channels[0 if down else 1].receive(into)

    def _send(self, values: Sequence[Tensor], *, down: bool) -> None:
        if self._channels is not None and values:
            self._channels[0 if down else 1].send(values)
