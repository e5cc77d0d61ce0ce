"""Chooses the requests that the workers run next: in order for each model, fairly between clients, batched if possible.

A pure data structure without time, disk or network. Every request in it is also in the journal.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from xorl.server.orchestrator.lane import FIRST_SEQ, Lane, SequenceGap, Ticket

# Beyond a few dozen calls, a shared pass saves little more, and each call waits for the whole pass.
MAX_GROUP_SIZE = 64
MAX_GROUP_COST = 64 * 1024 * 1024


@dataclass
class _Client:
    """A client with its queued requests. served: the cost run for it; a new client starts at the current floor."""

    served: float
    lanes: set[str] = field(default_factory=set)
    unordered: deque[Ticket] = field(default_factory=deque)


class Scheduler:
    """The requests that are queued for the workers or running on them.

    The client with the least served cost goes next (start-time fair queueing, Goyal et al. 1996). An idle client gains
    no credit and no debt. Requests of one client run in the order of their arrival.
    """

    def __init__(self, *, max_group_size: int = MAX_GROUP_SIZE, max_group_cost: float = MAX_GROUP_COST) -> None:
        self._max_group_size = max_group_size
        self._max_group_cost = max_group_cost
        self._lanes: dict[str, Lane] = {}
        self._ready: dict[str, Ticket] = {}  # the head of each lane that has one
        self._clients: dict[str, _Client] = {}
        self._arrivals: list[int] = []  # of all queued requests, sorted
        self._alone: set[str] = set()
        self._left: dict[str, float] = {}  # the remaining share of the cost of suspended requests in the queue
        self._num_queued: Counter[str] = Counter()  # by client
        self._bytes_queued: Counter[str] = Counter()
        self._floor = 0.0

    def open_lane(self, lane: str, next_seq: int = FIRST_SEQ) -> None:
        """Open the lane of a model. A lane must be open before requests are added to it."""
        assert lane not in self._lanes, f"lane {lane} is already open"
        self._lanes[lane] = Lane(next_seq)

    def close_lane(self, lane: str) -> list[Ticket]:
        """Close the lane of a model without a running request; returns the requests that were queued in it."""
        dropped = self.clear_lane(lane)
        del self._lanes[lane]
        return dropped

    def clear_lane(self, lane: str) -> list[Ticket]:
        """Remove and return the requests queued in a lane, which then waits for later numbers."""
        dropped = self._lanes[lane].clear()
        for ticket in dropped:
            self._leave(ticket)
        self._refresh(lane)
        return dropped

    def has_lane(self, lane: str) -> bool:
        """Whether the lane is open."""
        return lane in self._lanes

    def next_seq(self, lane: str) -> int:
        """The lowest number of an open lane that has neither started nor been skipped."""
        return self._lanes[lane].next_seq

    def next_unended(self, lane: str, leaving: Ticket) -> int:
        """The lowest number of an open lane that has neither ended nor been skipped, once `leaving` has left it."""
        running = self._lanes[lane].running
        if running is not None and running.seq is not None and running.request_id != leaving.request_id:
            return running.seq
        return self._lanes[lane].next_seq

    def fills_gap(self, lane: str, seq: int | None) -> bool:
        """Whether queued requests of an open lane wait for this number."""
        gap = self._lanes[lane].gap_ahead()
        return gap is not None and gap.seq == seq

    def is_pristine(self, lane: str) -> bool:
        """Whether no numbered request of an open lane has arrived, run or been skipped."""
        return self._lanes[lane].is_pristine

    def admits(self, lane: str, seq: int | None) -> bool:
        """Whether a request with this number can still be queued in an open lane."""
        return self._lanes[lane].admits(seq)

    def add(self, ticket: Ticket) -> None:
        """Queue a request. Its lane must be open and admit it."""
        self._enter(ticket)
        client = self._clients.setdefault(ticket.client, _Client(self._floor))
        if ticket.lane is None:
            client.unordered.append(ticket)
        else:
            self._lanes[ticket.lane].add(ticket)
            self._refresh(ticket.lane)

    def reject(self, lane: str, seq: int) -> None:
        """Skip a number of an open lane: it will never arrive."""
        self._lanes[lane].reject(seq)
        self._refresh(lane)

    def take(self, max_pass_cost: float = math.inf) -> list[Ticket]:
        """Start the next requests: one, or several of one group and of different models; [] if none can run.

        max_pass_cost: the maximum cost of several requests together that share a pass.
        """
        turns = self._turns()
        if not turns:
            return []
        first = turns[0]
        group = [first]
        if first.group is not None and first.request_id not in self._alone:
            max_cost = self._max_group_cost if first.lane is None else min(max_pass_cost, self._max_group_cost)
            group += self._companions(first, max_cost)
        self._floor = max(self._floor, self._clients[first.client].served)
        for ticket in group:
            self._start(ticket)
        self._drop_idle_clients()
        return group

    def finish(self, tickets: Sequence[Ticket]) -> None:
        """Mark running requests as ended."""
        for ticket in tickets:
            self._alone.discard(ticket.request_id)
            if ticket.lane is not None and ticket.lane in self._lanes:
                self._lanes[ticket.lane].finish()
                self._refresh(ticket.lane)
        self._drop_idle_clients()

    def requeue(self, tickets: Sequence[Ticket], *, alone: bool = False) -> None:
        """Queue running requests again, before others of their model. alone: run each in a separate pass."""
        for ticket in tickets:
            self._enter(ticket)
            client = self._clients.setdefault(ticket.client, _Client(self._floor))
            if alone:
                self._alone.add(ticket.request_id)
            if ticket.lane is None:
                client.unordered.appendleft(ticket)
            else:
                self._lanes[ticket.lane].requeue()
                self._refresh(ticket.lane)

    def suspend(self, ticket: Ticket, left: float, *, alone: bool) -> None:
        """Queue a running request again, as `requeue` does. Its client is charged for what it used.

        left: the share of its whole cost that it has not used yet.
        """
        client = self._clients.setdefault(ticket.client, _Client(self._floor))
        client.served = max(client.served - left * ticket.cost, self._floor)
        self._left[ticket.request_id] = left
        self.requeue([ticket], alone=alone)

    def drop(self, ticket: Ticket) -> bool:
        """Remove a queued request; its number, if it has one, is skipped. False if it is not queued."""
        client = self._clients.get(ticket.client)
        if ticket.lane is not None:
            if ticket.lane not in self._lanes or not self._lanes[ticket.lane].drop(ticket):
                return False
            self._refresh(ticket.lane)
        elif client is None or ticket not in client.unordered:
            return False
        else:
            client.unordered.remove(ticket)
        self._leave(ticket)
        self._drop_idle_clients()
        return True

    def drain(self) -> list[Ticket]:
        """Remove and return all queued requests."""
        tickets = [ticket for lane in self._lanes for ticket in self.clear_lane(lane)]
        for client in self._clients.values():
            tickets += client.unordered
            for ticket in client.unordered:
                self._leave(ticket)
            client.unordered.clear()
        self._drop_idle_clients()
        return tickets

    def gaps(self) -> dict[str, SequenceGap]:
        """The gaps of all lanes that wait for a missing number."""
        found = {name: lane.gap() for name, lane in self._lanes.items()}
        return {name: gap for name, gap in found.items() if gap is not None}

    def gaps_behind(self, source: str) -> dict[str, SequenceGap]:
        """The first gap of each lane whose next request is from this source, even if earlier requests can run."""
        found = {name: lane.gap_ahead() for name, lane in self._lanes.items()}
        return {name: gap for name, gap in found.items() if gap is not None and gap.waiting[0].source == source}

    def gap(self, lane: str) -> SequenceGap | None:
        """The gap of a lane, if it waits for a missing number."""
        return self._lanes[lane].gap() if lane in self._lanes else None

    def queue_position(self, arrival: int) -> int:
        """The number of queued requests that arrived before this one."""
        return bisect_left(self._arrivals, arrival)

    def __len__(self) -> int:
        """The number of queued requests."""
        return len(self._arrivals)

    @property
    def num_bytes(self) -> int:
        """The size of all queued requests."""
        return self._bytes_queued.total()

    def load_of(self, client: str) -> tuple[int, int]:
        """The number of a client's queued requests, and their size in bytes."""
        return self._num_queued[client], self._bytes_queued[client]

    def _turns(self) -> list[Ticket]:
        """The head request of each client that has one, in the order of the clients' turns."""
        heads = [head for head in map(self._head_of, self._clients.values()) if head is not None]
        return sorted(heads, key=lambda ticket: (self._clients[ticket.client].served, ticket.arrival))

    def _head_of(self, client: _Client) -> Ticket | None:
        ready = [self._ready[lane] for lane in client.lanes]
        if client.unordered:
            ready.append(client.unordered[0])
        return min(ready, key=lambda ticket: ticket.arrival, default=None)

    def _companions(self, first: Ticket, max_cost: float) -> list[Ticket]:
        """The requests to run in one pass with `first`, preferring clients with the least served cost."""
        ready = [*self._ready.values(), *(t for client in self._clients.values() for t in client.unordered)]
        candidates = [
            ticket
            for ticket in ready
            if ticket is not first and ticket.group == first.group and ticket.request_id not in self._alone
        ]
        candidates.sort(key=lambda ticket: (self._clients[ticket.client].served, ticket.arrival))
        companions, cost = [], self._cost_left(first)
        for ticket in candidates[: self._max_group_size - 1]:
            cost += self._cost_left(ticket)
            if cost > max_cost:
                break
            companions.append(ticket)
        return companions

    def _start(self, ticket: Ticket) -> None:
        client = self._clients[ticket.client]
        client.served = max(client.served, self._floor) + self._cost_left(ticket)
        if ticket.lane is None:
            client.unordered.remove(ticket)
        else:
            self._lanes[ticket.lane].take()
            self._refresh(ticket.lane)
        self._forget(ticket)

    def _refresh(self, lane: str) -> None:
        """Update `_ready` and the client's lanes after a change of the lane's head."""
        before = self._ready.pop(lane, None)
        if before is not None:
            self._clients[before.client].lanes.discard(lane)
        head = self._lanes[lane].head()
        if head is not None:
            self._ready[lane] = head
            self._clients.setdefault(head.client, _Client(self._floor)).lanes.add(lane)

    def _enter(self, ticket: Ticket) -> None:
        insort(self._arrivals, ticket.arrival)
        self._num_queued[ticket.client] += 1
        self._bytes_queued[ticket.client] += ticket.size

    def _cost_left(self, ticket: Ticket) -> float:
        return self._left.get(ticket.request_id, 1.0) * ticket.cost

    def _leave(self, ticket: Ticket) -> None:
        """Forget everything about a queued request that will not run."""
        self._alone.discard(ticket.request_id)
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        """Forget what concerns a request only while it is queued."""
        self._left.pop(ticket.request_id, None)
        index = bisect_left(self._arrivals, ticket.arrival)
        if index < len(self._arrivals) and self._arrivals[index] == ticket.arrival:
            del self._arrivals[index]
            self._num_queued[ticket.client] -= 1
            self._bytes_queued[ticket.client] -= ticket.size
            if not self._num_queued[ticket.client]:
                del self._num_queued[ticket.client], self._bytes_queued[ticket.client]

    def _drop_idle_clients(self) -> None:
        """Forget idle clients without debt, so that memory does not grow with every new client."""
        if not self._arrivals:
            # The queue is empty, so no client waits for another: clear all debts.
            self._floor = max((client.served for client in self._clients.values()), default=self._floor)
        idle = [
            name
            for name, client in self._clients.items()
            if not client.lanes and not client.unordered and client.served <= self._floor
        ]
        for name in idle:
            del self._clients[name]
