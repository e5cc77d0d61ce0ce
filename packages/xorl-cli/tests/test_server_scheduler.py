"""The scheduler against any order of arrival: what runs, in which order, how often, and for whom."""

from hypothesis import given, settings
from hypothesis import strategies as st

from xorl.server.orchestrator.lane import Lane, Ticket
from xorl.server.orchestrator.scheduler import Scheduler


def ticket(name, *, lane="m", seq=None, client="c", group=None, cost=1.0, arrival=0):
    return Ticket(name, lane, seq, client, group, cost, arrival)


def queued(*tickets, **limits):
    """A scheduler with these tickets, and the lanes that they are in."""
    scheduler = Scheduler(**limits)
    for lane in dict.fromkeys(one.lane for one in tickets if one.lane is not None):
        scheduler.open_lane(lane)
    for one in tickets:
        scheduler.add(one)
    return scheduler


def run_all(scheduler):
    """The ids of what runs, group by group, until nothing can."""
    ran = []
    while group := scheduler.take():
        ran.append([t.request_id for t in group])
        scheduler.finish(group)
    return ran


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_numbered_requests_run_once_in_their_order_whatever_order_they_arrive_in(data):
    """Catches a gate that waits for a rejected number, lets a later one by, or runs a duplicate twice."""
    numbers = data.draw(st.integers(1, 12))
    rejected = data.draw(st.sets(st.integers(1, numbers)))
    events = data.draw(st.permutations([seq for seq in range(1, numbers + 1) for _ in range(2)]))
    scheduler = Scheduler()
    scheduler.open_lane("m")
    ran = []
    for arrival, seq in enumerate(events):
        if seq in rejected:
            scheduler.reject("m", seq)
        elif scheduler.admits("m", seq):
            scheduler.add(ticket(str(seq), seq=seq, arrival=arrival))
        if data.draw(st.booleans()):
            ran += run_all(scheduler)
        if data.draw(st.booleans()) and (group := scheduler.take()):
            scheduler.requeue(group)
    ran += run_all(scheduler)
    assert ran == [[str(seq)] for seq in range(1, numbers + 1) if seq not in rejected]
    assert len(scheduler) == 0
    assert not scheduler.gaps()


@given(st.lists(st.integers(1, 8), unique=True, min_size=1), st.sets(st.integers(1, 8)))
@settings(max_examples=100, deadline=None)
def test_a_missing_number_holds_back_all_above_it_and_is_named(seqs, rejected):
    """Catches half a gradient: a step that runs although a chunk before it never came."""
    scheduler = Scheduler()
    scheduler.open_lane("m")
    for seq in rejected:
        scheduler.reject("m", seq)
    sent = [seq for seq in seqs if seq not in rejected]
    for arrival, seq in enumerate(sent):
        scheduler.add(ticket(str(seq), seq=seq, arrival=arrival))
    missing = next(seq for seq in range(1, 10) if seq not in sent and seq not in rejected)
    assert run_all(scheduler) == [[str(seq)] for seq in sorted(sent) if seq < missing]
    held = sorted(seq for seq in sent if seq > missing)
    gaps = scheduler.gaps()
    assert [t.seq for t in gaps["m"].waiting] == held if held else gaps == {}
    assert [t.seq for t in scheduler.clear_lane("m")] == held
    assert scheduler.next_seq("m") > max(held, default=0)


def test_a_request_without_a_number_waits_for_what_arrived_before_it():
    """Catches an unload that overtakes the step sent before it, or waits for ever behind a missing number."""
    scheduler = queued(ticket("1", seq=1, arrival=1), ticket("unload", arrival=2), ticket("2", seq=2, arrival=3))
    assert run_all(scheduler) == [["1"], ["unload"], ["2"]]
    scheduler.add(ticket("4", seq=4, arrival=4))
    scheduler.add(ticket("late", arrival=5))
    assert run_all(scheduler) == [["late"]]


def test_a_lane_runs_one_request_at_a_time():
    """Catches an optimizer step that is sent while its gradient is computed in another pass."""
    lane = Lane()
    for seq in (1, 2):
        lane.add(ticket(str(seq), seq=seq, arrival=seq))
    assert lane.take().seq == 1
    assert lane.head() is None
    lane.requeue()
    assert lane.take().seq == 1
    lane.finish()
    assert lane.take().seq == 2


@given(st.lists(st.integers(1, 30), min_size=2, max_size=6), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_clients_get_the_same_share_however_much_they_send(loads, cost):
    """Catches a client with many models or many requests that keeps the others waiting."""
    calls = [(str(client), f"{client}-{index % 3}") for client, load in enumerate(loads) for index in range(load)]
    tickets = [
        ticket(client, lane=lane, client=client, cost=float(cost), arrival=arrival)
        for arrival, (client, lane) in enumerate(calls)
    ]
    order = [names[0] for names in run_all(queued(*tickets))]
    assert len(order) == sum(loads)
    shortest = min(loads)
    first_turns = order[: shortest * len(loads)]
    assert all(first_turns.count(str(client)) == shortest for client in range(len(loads)))


def test_a_client_that_was_idle_is_not_owed_for_it():
    """Catches a newcomer that takes over the workers until it has caught up with the past of the others."""
    scheduler = Scheduler()
    arrival = 0

    def send(client, count):
        nonlocal arrival
        for _ in range(count):
            arrival += 1
            scheduler.add(ticket(client, lane=None, client=client, arrival=arrival))

    send("old", 50)
    for _ in range(40):
        scheduler.finish(scheduler.take())
    send("new", 10)
    order = [names[0] for names in run_all(scheduler)]
    assert order[:8].count("old") in (3, 4, 5)


def test_calls_of_one_group_share_a_pass_and_others_come_alone():
    """Catches models that train one by one, two calls of one model in a pass, and a mix of different losses."""
    tickets = [ticket("ppo", lane="other", group="ppo", client="z", arrival=100)]
    for index in range(5):
        mine = {"lane": f"m{index}", "client": f"c{index}"}
        tickets += [ticket(f"a{index}", **mine, group="ce", arrival=10 * index)]
        tickets += [ticket(f"b{index}", **mine, arrival=10 * index + 1)]
    groups = run_all(queued(*tickets, max_group_size=3, max_group_cost=100))
    assert groups[:2] == [["a0", "a1", "a2"], ["a3", "a4"]]
    assert sorted(names[0] for names in groups[2:]) == ["b0", "b1", "b2", "b3", "b4", "ppo"]
    assert all(len(names) == 1 for names in groups[2:])


def test_members_of_a_failed_pass_run_again_alone_and_first():
    """Catches one client's bad call that fails the calls of others with it for ever."""
    scheduler = queued(*(ticket(f"a{i}", lane=f"m{i}", seq=1, group="ce", client=f"c{i}", arrival=i) for i in range(3)))
    group = scheduler.take()
    assert len(group) == 3
    scheduler.requeue(group, alone=True)
    assert len(scheduler) == 3
    assert sorted(names[0] for names in run_all(scheduler)) == ["a0", "a1", "a2"]


def test_a_pass_is_bounded_by_cost():
    """Catches a mixed pass that no worker has the memory for."""
    tickets = [ticket(str(i), lane=None, group="s", cost=4, client=str(i), arrival=i) for i in range(4)]
    assert run_all(queued(*tickets, max_group_cost=10)) == [["0", "1"], ["2", "3"]]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
@settings(max_examples=60, deadline=None)
def test_places_count_what_is_queued_before(events):
    """Catches a position in the queue that a client sees grow, and counters that drift."""
    scheduler = Scheduler()
    waiting, running = [], []
    for arrival, (kind, back) in enumerate(events):
        if kind < 2:
            scheduler.add(ticket(str(arrival), lane=None, client=str(kind), arrival=arrival))
            waiting.append(arrival)
        elif kind == 2 and (group := scheduler.take()):
            running.append(group)
            waiting = [a for a in waiting if a not in {t.arrival for t in group}]
        elif running:
            group = running.pop()
            if back:
                scheduler.requeue(group)
                waiting = sorted(waiting + [t.arrival for t in group])
            else:
                scheduler.finish(group)
        assert [scheduler.queue_position(a) for a in waiting] == list(range(len(waiting)))
        assert len(scheduler) == len(waiting)


def test_memory_does_not_grow_with_the_clients_that_came():
    """Catches a record that stays for every session there ever was."""
    scheduler = Scheduler()
    for arrival in range(1000):
        scheduler.add(ticket(str(arrival), lane=None, client=str(arrival), arrival=arrival))
        scheduler.finish(scheduler.take())
    assert len(scheduler._clients) <= 1


@given(st.lists(st.integers(1, 6), unique=True, min_size=1), st.data())
@settings(max_examples=100, deadline=None)
def test_a_dropped_request_is_skipped_whatever_has_arrived(seqs, data):
    """Catches a queue that counts a cancelled request, runs it, or waits for its number."""
    scheduler = Scheduler()
    scheduler.open_lane("m")
    tickets = [ticket(str(seq), seq=seq, arrival=arrival) for arrival, seq in enumerate(seqs)]
    tickets.append(ticket("last", arrival=len(seqs)))
    for one in tickets:
        scheduler.add(one)
    for seq in {*range(1, 7)} - {*seqs}:
        scheduler.reject("m", seq)
    gone = [one for one in tickets if data.draw(st.booleans())]
    for one in gone:
        assert scheduler.drop(one)
        assert not scheduler.drop(one)
    assert len(scheduler) == len(tickets) - len(gone)
    kept = sorted((one for one in tickets if one not in gone), key=lambda one: one.seq or 7)
    ran = [name for group in run_all(scheduler) for name in group]
    assert sorted(ran) == sorted(one.request_id for one in kept)
    assert [name for name in ran if name != "last"] == [one.request_id for one in kept if one.seq is not None]
    assert not scheduler.gaps()
    assert scheduler.next_seq("m") == 7


def test_a_suspended_request_pays_for_what_it_used_and_waits_for_its_turn():
    """Catches a long request that is charged as a whole, and waits for all others, or not at all, and goes first."""
    long = ticket("long", lane="long", client="a", cost=100.0)
    scheduler = queued(long)
    left, ran, arrival = 1.0, [], 0
    while left > 0:
        arrival += 1
        scheduler.add(ticket(f"short{arrival}", lane=None, client="b", cost=10.0, arrival=arrival))
        (one,) = scheduler.take()
        ran.append(one.request_id[:5].rstrip("0123456789"))
        if one is long:
            left = round(left - 0.1, 1)
            if left > 0:
                scheduler.suspend(one, left, alone=True)
                continue
        scheduler.finish([one])
    # Each turn of the long request costs as much as a short one.
    assert abs(ran.count("short") - ran.count("long")) <= 2
    assert ran.count("long") == 10
    longest = max(len(run) for run in "".join("l" if name == "long" else "s" for name in ran).split("l"))
    assert longest <= 2
    scheduler.finish([long])
    assert not scheduler._left


def test_a_pass_that_models_share_is_bounded_by_a_micro_batch_and_samples_are_not():
    """Catches a shared pass, which is not suspended, that takes minutes."""
    shared = [ticket(f"p{i}", lane=str(i), group="p", cost=4, client=str(i), arrival=i) for i in range(3)]
    samples = [ticket(f"s{i}", lane=None, group="s", cost=4, client=str(i), arrival=i) for i in range(3, 6)]
    scheduler = queued(*shared, *samples)
    taken = [[one.request_id for one in scheduler.take(8.0)] for _ in range(3)]
    assert taken == [["p0", "p1"], ["p2"], ["s3", "s4", "s5"]]


def test_requests_that_leave_the_queue_without_running_leave_nothing_behind():
    """Catches a scheduler that grows with each request that failed in a shared pass and was then dropped."""
    scheduler = Scheduler()

    def requeued_alone(*tickets):
        for lane in {one.lane for one in tickets} - {None}:
            if not scheduler.has_lane(lane):
                scheduler.open_lane(lane)
        for one in tickets:
            scheduler.add(one)
        started = [one for _ in tickets for one in scheduler.take()]
        assert started == list(tickets)
        scheduler.requeue(started, alone=True)

    numbered, unordered = ticket("a", seq=1), ticket("b", lane=None, arrival=1)
    for leave in (lambda: scheduler.drop(numbered) and scheduler.drop(unordered), scheduler.drain):
        requeued_alone(numbered, unordered)
        leave()
        assert (len(scheduler), scheduler._alone, scheduler._left) == (0, set(), {})
        scheduler.close_lane("m")
    requeued_alone(numbered)
    scheduler.close_lane("m")
    assert not scheduler._alone
