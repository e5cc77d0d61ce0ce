"""The queue of one model's requests, ordered by sequence number, not by arrival. A pure data structure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

FIRST_SEQ = 1


@dataclass(frozen=True)
class Ticket:
    """A request as the scheduler sees it.

    Attributes:
        lane: the lane of its model; None if it belongs to no model's order.
        seq: its sequence number in the lane; None puts it behind everything that arrived before it.
        client: the client whose share of the workers' time it uses.
        group: requests of one group can share a pass; None runs alone.
        cost: the workers' time that it takes, in any common unit.
        arrival: a number that increases from request to request.
        size: bytes of its body.
        source: the client's address and program, as in Submit; "" for internal requests and after a restart.
    """

    request_id: str
    lane: str | None
    seq: int | None
    client: str
    group: Hashable
    cost: float
    arrival: int
    size: int = 0
    source: str = ""


@dataclass(frozen=True)
class SequenceGap:
    """A missing number in a lane, and the requests that wait behind it."""

    seq: int
    waiting: tuple[Ticket, ...]

    @property
    def reason(self) -> str:
        """Why the requests wait."""
        return f"request {self.seq} of this model has not arrived"


class Lane:
    """The requests of one model. At most one runs at a time; numbered requests run once each, in order.

    The number of a refused or dropped request (a tombstone) is skipped. A number that has not arrived holds back all
    later ones.
    """

    def __init__(self, next_seq: int = FIRST_SEQ) -> None:
        self._next = next_seq
        self._numbered: dict[int, Ticket] = {}
        self._unnumbered: deque[Ticket] = deque()
        self._tombstones: set[int] = set()
        self.running: Ticket | None = None

    @property
    def next_seq(self) -> int:
        """The lowest number that has neither started nor been skipped."""
        return self._next

    def admits(self, seq: int | None) -> bool:
        """Whether a request with this number can still be queued: the number is not used yet."""
        return seq is None or (seq >= self._next and seq not in self._numbered and seq not in self._tombstones)

    def add(self, ticket: Ticket) -> None:
        """Queue a request that the lane admits."""
        assert self.admits(ticket.seq), f"number {ticket.seq} is already used"
        if ticket.seq is None:
            self._unnumbered.append(ticket)
        else:
            self._numbered[ticket.seq] = ticket

    def reject(self, seq: int) -> None:
        """Skip a number: its request was refused and will never arrive."""
        if self.admits(seq):
            self._tombstones.add(seq)
            self._pass_tombstones()

    def drop(self, ticket: Ticket) -> bool:
        """Remove a queued request and skip its number; False if it is not queued."""
        if ticket.seq is None:
            if ticket not in self._unnumbered:
                return False
            self._unnumbered.remove(ticket)
        elif self._numbered.get(ticket.seq) != ticket:
            return False
        else:
            del self._numbered[ticket.seq]
            self.reject(ticket.seq)
        return True

    def head(self) -> Ticket | None:
        """The request that can run now, if any."""
        if self.running is not None:
            return None
        ready = [self._numbered[self._next]] if self._next in self._numbered else []
        if self._unnumbered:
            ready.append(self._unnumbered[0])
        return min(ready, key=lambda ticket: ticket.arrival, default=None)

    def take(self) -> Ticket:
        """Start the head and return it."""
        ticket = self.head()
        assert ticket is not None, "the lane has no request that can run"
        if ticket.seq is None:
            self._unnumbered.popleft()
        else:
            del self._numbered[ticket.seq]
            self._next += 1
        self.running = ticket
        self._pass_tombstones()
        return ticket

    def finish(self) -> None:
        """Mark the running request as ended."""
        self.running = None

    def requeue(self) -> None:
        """Queue the running request again, before all others."""
        ticket = self.running
        assert ticket is not None, "no request is running"
        self.running = None
        if ticket.seq is None:
            self._unnumbered.appendleft(ticket)
        else:
            # The tombstones after it have been skipped already; restore them so that they are skipped again.
            self._tombstones.update(range(ticket.seq + 1, self._next))
            self._next = ticket.seq
            self._numbered[ticket.seq] = ticket

    def gap(self) -> SequenceGap | None:
        """The gap, if the lane has numbered requests but the next number is missing."""
        if not self._numbered or self._next in self._numbered or self.running is not None:
            return None
        return self.gap_ahead()

    def gap_ahead(self) -> SequenceGap | None:
        """The first gap, even if requests before it are running or can run."""
        missing = self._next
        while not self.admits(missing):
            missing += 1
        waiting = tuple(self._numbered[seq] for seq in sorted(self._numbered) if seq > missing)
        return SequenceGap(missing, waiting) if waiting else None

    def clear(self) -> list[Ticket]:
        """Remove and return all queued requests, in order; the lane then waits for later numbers."""
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
        """Whether no numbered request has arrived, run or been skipped."""
        return self._next == FIRST_SEQ and not self._numbered and not self._tombstones

    def _pass_tombstones(self) -> None:
        while self._next in self._tombstones:
            self._tombstones.remove(self._next)
            self._next += 1
