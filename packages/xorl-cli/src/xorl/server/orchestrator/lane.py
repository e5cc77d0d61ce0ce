"""The order of one model's requests: by their numbers, whatever order they arrive in. A pure data structure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

FIRST_SEQ = 1


@dataclass(frozen=True)
class Ticket:
    """A request as the scheduler sees it.

    Attributes:
        lane: the model in whose order it runs; None if the order does not matter.
        seq: its number in that order; None puts it behind everything that arrived before it.
        client: whose share of the workers' time it takes.
        group: requests of one group can share a pass; None runs alone.
        cost: how much of the workers' time it takes, in any unit that is the same for all.
        arrival: a number that grows from request to request.
        size: bytes of its body.
    """

    request_id: str
    lane: str | None
    seq: int | None
    client: str
    group: Hashable
    cost: float
    arrival: int
    size: int = 0


@dataclass(frozen=True)
class Gap:
    """A missing number, for which a lane waits, and the requests that wait behind it."""

    seq: int
    waiting: tuple[Ticket, ...]


class Lane:
    """The requests of one model. At most one runs at a time; those with numbers run in their order, once each.

    A number that was refused (a tombstone) is passed over. A number that has not arrived holds back all later ones.
    """

    def __init__(self, next_seq: int = FIRST_SEQ) -> None:
        self._next = next_seq
        self._numbered: dict[int, Ticket] = {}
        self._unnumbered: deque[Ticket] = deque()
        self._tombstones: set[int] = set()
        self.running: Ticket | None = None

    @property
    def next_seq(self) -> int:
        """The lowest number that has neither run nor been passed over."""
        return self._next

    def admits(self, seq: int | None) -> bool:
        """Whether a request with this number can still run: the number is not taken yet."""
        return seq is None or (seq >= self._next and seq not in self._numbered and seq not in self._tombstones)

    def add(self, ticket: Ticket) -> None:
        """Queue a request that the lane admits."""
        assert self.admits(ticket.seq), f"request {ticket.seq} is a second one"
        if ticket.seq is None:
            self._unnumbered.append(ticket)
        else:
            self._numbered[ticket.seq] = ticket

    def reject(self, seq: int) -> None:
        """Never wait for a number: its request was refused, so none will come."""
        if self.admits(seq):
            self._tombstones.add(seq)
            self._pass_tombstones()

    def head(self) -> Ticket | None:
        """The request that can run now, if any."""
        if self.running is not None:
            return None
        ready = [self._numbered[self._next]] if self._next in self._numbered else []
        if self._unnumbered:
            ready.append(self._unnumbered[0])
        return min(ready, key=lambda ticket: ticket.arrival, default=None)

    def take(self) -> Ticket:
        """Start the head."""
        ticket = self.head()
        assert ticket is not None, "nothing can run"
        if ticket.seq is None:
            self._unnumbered.popleft()
        else:
            del self._numbered[ticket.seq]
            self._next += 1
        self.running = ticket
        self._pass_tombstones()
        return ticket

    def finish(self) -> None:
        """The running request has ended."""
        self.running = None

    def put_back(self) -> None:
        """Queue the running request again, before all others."""
        ticket = self.running
        assert ticket is not None, "nothing runs"
        self.running = None
        if ticket.seq is None:
            self._unnumbered.appendleft(ticket)
        else:
            # Tombstones between it and the next one were passed; they are passed over again as they come.
            self._tombstones.update(range(ticket.seq + 1, self._next))
            self._next = ticket.seq
            self._numbered[ticket.seq] = ticket

    def gap(self) -> Gap | None:
        """The gap, if the lane holds numbered requests but not the next number."""
        if not self._numbered or self._next in self._numbered or self.running is not None:
            return None
        return Gap(self._next, tuple(self._numbered[seq] for seq in sorted(self._numbered)))

    def clear(self) -> list[Ticket]:
        """Remove everything that is queued and return it in order; the lane then waits for later numbers."""
        tickets = [self._numbered[seq] for seq in sorted(self._numbered)] + list(self._unnumbered)
        if self._numbered:
            self._next = max(self._numbered) + 1
        self._tombstones = {seq for seq in self._tombstones if seq >= self._next}
        self._numbered.clear()
        self._unnumbered.clear()
        self._pass_tombstones()
        return tickets

    @property
    def is_pristine(self) -> bool:
        """Whether the lane has never seen a number."""
        return self._next == FIRST_SEQ and not self._numbered and not self._tombstones

    def _pass_tombstones(self) -> None:
        while self._next in self._tombstones:
            self._tombstones.remove(self._next)
            self._next += 1
