"""The journal: stores every request on disk, from before it is acknowledged until it is no longer needed.

Tables:
- requests: one row per request.
- tombstones: (lane, number) of requests that the API refused, or that were cancelled while they were queued.
- operations: the bodies of requests that have not run yet or that `recovery` may replay.
- results.
- tail: the requests that changed a model since its boundary, in the order in which they ran; `recovery` replays them.
- records: the latest state of sessions, models, samplers and other objects.

A lane is the lifetime of one model, from its creation to its end. The journal does not interpret bodies.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from xorl.server.identifiers import Dialect
from xorl.server.orchestrator.commit import Damaged, GroupCommit, connect

T = TypeVar("T")

# Raise it whenever these tables change, or the form or meaning of their contents: the operations and results of
# `operations`, and the records of `registry` and `inference`. Other messages between processes may change without it;
# an upgraded service then continues with its requests and models.
JOURNAL_VERSION = 5
SCHEMA = """
CREATE TABLE IF NOT EXISTS requests(
  number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key TEXT, body_hash BLOB NOT NULL,
  lane TEXT, seq INTEGER, client TEXT NOT NULL, dialect TEXT NOT NULL, kind TEXT NOT NULL, share TEXT,
  cost REAL NOT NULL, size INTEGER NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, begun_by TEXT,
  finished REAL, retrieved REAL, result_bytes INTEGER);
CREATE UNIQUE INDEX IF NOT EXISTS requests_by_key ON requests(key) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS requests_unfinished ON requests(number) WHERE finished IS NULL;
CREATE INDEX IF NOT EXISTS requests_kept ON requests(number) WHERE result_bytes IS NOT NULL;
CREATE INDEX IF NOT EXISTS requests_by_lane ON requests(lane) WHERE key IS NOT NULL;
CREATE TABLE IF NOT EXISTS tombstones(lane TEXT, seq INTEGER, PRIMARY KEY(lane, seq)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS operations(number INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS results(number INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS tail(
  position INTEGER PRIMARY KEY AUTOINCREMENT, lane TEXT NOT NULL, number INTEGER NOT NULL, settles INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS tail_by_lane ON tail(lane, position);
CREATE TABLE IF NOT EXISTS records(kind TEXT, name TEXT, body BLOB NOT NULL, PRIMARY KEY(kind, name)) WITHOUT ROWID;
"""
# The most rows pruned in one transaction, since submissions wait for it.
PRUNED_AT_ONCE = 1000
# The number of free pages (4 KiB) to keep in the file for further requests, and to return per transaction.
FREE_PAGES_KEPT, PAGES_AT_ONCE = 2048, 16384


@dataclass(frozen=True)
class Record:
    """The latest state of an object, by kind and name; body None deletes it."""

    kind: str
    name: str
    body: bytes | None


@dataclass(frozen=True)
class Submission:
    """A new request. key: the same for every retry. share: the group with which it can share a pass (`Ticket.group`).

    records: written in the same transaction. ends_lane: a lane whose keys, tombstones and tail are deleted.
    """

    request_id: str
    key: str | None
    body_hash: bytes
    lane: str | None
    seq: int | None
    client: str
    dialect: Dialect
    kind: str
    share: str | None
    cost: float
    body: bytes
    records: Sequence[Record] = field(default=())
    ends_lane: str | None = None


@dataclass(frozen=True)
class Written:
    """The result of a submission. number: its position among all requests, or None if the request was known already.

    is_same: whether the known request has the same body.
    """

    request_id: str
    number: int | None
    is_same: bool = True


@dataclass(frozen=True)
class Unfinished:
    """An acknowledged request without a result.

    attempts: how many times the workers were lost while running it. begun_by: the incarnation that it was last sent to.
    """

    request_id: str
    number: int
    lane: str | None
    seq: int | None
    client: str
    kind: str
    share: str | None
    cost: float
    size: int
    attempts: int
    begun_by: str | None


@dataclass(frozen=True)
class Outcome:
    """The end of a request and its changes, written in one transaction.

    tail: "changes" if the request changed its model and must be replayed when the model is restored; "settles" if in
    addition no accumulated gradient is left; None otherwise. cuts: "settled" deletes the lane's tail up to the last
    request that settled, since a checkpoint now holds it; "all" deletes the whole tail. skipped: the request's number,
    if the request did not run and later requests of its lane must not wait for it.
    """

    request_id: str
    result: bytes
    finished: float
    tail: Literal["changes", "settles"] | None = None
    cuts: Literal["settled", "all"] | None = None
    lane: str | None = None
    records: Sequence[Record] = field(default=())
    skipped: int | None = None


@dataclass(frozen=True)
class Stored:
    """The stored state of a request. result: None if it has not ended, or (if is_finished) has been deleted."""

    dialect: Dialect
    number: int
    is_finished: bool
    result: bytes | None


@dataclass(frozen=True)
class Retention:
    """Limits on how long and how many finished requests are kept. Times are in seconds."""

    after_retrieval_s: float = 600.0
    unretrieved_s: float = 24 * 3600.0
    result_bytes: int = 8 * 1024**3
    num_requests: int = 200_000


class Journal:
    """The journal's file, opened in the event loop that uses it. A write is durable once its await returns.

    Methods raise JournalError if a write fails, in which case nothing of it is kept, and Damaged if the file's contents
    are inconsistent.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._commit = GroupCommit(path, schema=SCHEMA, version=JOURNAL_VERSION)
        self._reader = connect(path, read_only=True)

    def close(self) -> None:
        """Write what is queued, and stop."""
        self._reader.close()
        self._commit.close()

    # --- writing ---

    async def submit(self, submission: Submission) -> Written:
        """Write a request and its records, unless the request is known already."""
        return await self._commit.write(lambda connection: _submit(connection, submission))

    async def finish(self, outcomes: Sequence[Outcome]) -> None:
        """Write results and their records; a second result of the same request is ignored."""
        await self._commit.write(lambda connection: _finish(connection, outcomes))

    async def reject(self, lane: str, seq: int) -> None:
        """Record that a number of a lane will never arrive."""
        await self._commit.write(lambda connection: _skip(connection, lane, seq))

    async def put(self, records: Iterable[Record]) -> None:
        """Write or delete records."""
        kept = list(records)
        await self._commit.write(lambda connection: _put(connection, kept))

    async def begin(self, request_ids: Sequence[str], workers: str) -> None:
        """Record that these requests are about to be sent to workers; a change of workers counts as another attempt."""
        statement = (
            "UPDATE requests SET attempts = attempts + (begun_by IS NOT NULL AND begun_by != ?), begun_by = ?"
            " WHERE id = ?"
        )
        rows = [(workers, workers, request_id) for request_id in request_ids]
        await self._commit.write(lambda connection: _execute_many(connection, statement, rows))

    async def settle(self, lane: str, records: Iterable[Record], cuts: Literal["settled", "all"] = "settled") -> None:
        """Write records, and cut a lane's tail as in `Outcome`, after its model was saved or ended."""
        kept = list(records)
        await self._commit.write(lambda connection: (_cut_tail(connection, lane, cuts), _put(connection, kept)))

    async def mark_retrieved(self, request_ids: Iterable[str], now: float) -> None:
        """Record that these results were fetched."""
        statement = "UPDATE requests SET retrieved = ? WHERE id = ? AND retrieved IS NULL"
        rows = [(now, request_id) for request_id in request_ids]
        await self._commit.write(lambda connection: _execute_many(connection, statement, rows))

    async def prune(self, now: float, retention: Retention, next_seqs: Mapping[str, int]) -> int:
        """Delete results and requests beyond `retention`, up to PRUNED_AT_ONCE of each; returns the number of results.

        next_seqs: by lane, the lowest number that has not been skipped; earlier tombstones are deleted.
        """
        lanes = list(next_seqs.items())
        return await self._commit.write(lambda connection: _prune(connection, now, retention, lanes))

    # --- reading ---

    def unfinished(self) -> list[Unfinished]:
        """All requests without a result, in the order in which they were acknowledged."""
        rows = self._reader.execute(
            "SELECT id, number, lane, seq, client, kind, share, cost, size, attempts, begun_by FROM requests"
            " WHERE finished IS NULL ORDER BY number"
        )
        return [Unfinished(*row) for row in rows]

    def tombstones(self) -> list[tuple[str, int]]:
        """(lane, number) of all tombstones."""
        return self._reader.execute("SELECT lane, seq FROM tombstones").fetchall()

    def operation(self, request_id: str) -> bytes:
        """The body of a request that has not finished."""
        statement = "SELECT body FROM operations JOIN requests USING(number) WHERE id = ?"
        return self._body(statement, (request_id,))

    def tail(self, lane: str) -> list[int]:
        """The numbers of the requests that changed a model since its boundary, in the order in which they ran."""
        rows = self._reader.execute("SELECT number FROM tail WHERE lane = ? ORDER BY position", (lane,))
        return [number for (number,) in rows]

    def num_settled(self, lane: str) -> int:
        """How many requests of a tail a save would make obsolete: all but those of the accumulated gradient."""
        last = "SELECT max(position) FROM tail WHERE lane = ? AND settles"
        statement = f"SELECT count(*) FROM tail WHERE lane = ? AND position <= ({last})"
        (count,) = self._reader.execute(statement, (lane, lane)).fetchone()
        return count

    def tail_operation(self, number: int) -> bytes:
        """The body of a request in a tail."""
        return self._body("SELECT body FROM operations WHERE number = ?", (number,))

    def find(self, request_id: str) -> Stored | None:
        """The stored state of a request; None if it is unknown."""
        row = self._reader.execute(
            "SELECT dialect, number, finished IS NOT NULL, body FROM requests LEFT JOIN results USING(number)"
            " WHERE id = ?",
            (request_id,),
        ).fetchone()
        return None if row is None else Stored(row[0], row[1], bool(row[2]), row[3])

    def find_key(self, key: str, body_hash: bytes) -> Written | None:
        """The request with this idempotency key, or None."""
        row = self._reader.execute("SELECT id, body_hash FROM requests WHERE key = ?", (key,)).fetchone()
        return None if row is None else Written(row[0], None, row[1] == body_hash)

    def records(self, kind: str) -> list[tuple[str, bytes]]:
        """(name, body) of all records of a kind."""
        return self._reader.execute("SELECT name, body FROM records WHERE kind = ?", (kind,)).fetchall()

    def size_bytes(self) -> int:
        """The size of the file, without the write-ahead log."""
        (pages,) = self._reader.execute("PRAGMA page_count").fetchone()
        (page,) = self._reader.execute("PRAGMA page_size").fetchone()
        return pages * page

    def _body(self, statement: str, row: tuple[object, ...]) -> bytes:
        found = self._reader.execute(statement, row).fetchone()
        if found is None:
            raise Damaged("the body of a request is missing")
        return found[0]


def decoded(decode: Callable[[bytes], T], body: bytes, what: str) -> T:
    """Decode a stored body. Raises Damaged, naming `what`, if that fails."""
    try:
        return decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as problem:
        raise Damaged(f"{what} cannot be read: {problem}") from problem


def _submit(connection: sqlite3.Connection, submission: Submission) -> Written:
    s = submission
    if s.ends_lane is not None:
        connection.execute("UPDATE requests SET key = NULL WHERE lane = ? AND key IS NOT NULL", (s.ends_lane,))
        connection.execute("DELETE FROM tombstones WHERE lane = ?", (s.ends_lane,))
        _cut_tail(connection, s.ends_lane, "all")
    found = connection.execute("SELECT id, body_hash FROM requests WHERE key = ? OR id = ?", (s.key, s.request_id))
    existing = found.fetchone()
    if existing is not None:
        return Written(existing[0], None, existing[1] == s.body_hash)
    columns = "id, key, body_hash, lane, seq, client, dialect, kind, share, cost, size"
    values = (s.request_id, s.key, s.body_hash, s.lane, s.seq, s.client, s.dialect, s.kind, s.share, s.cost)
    insert = f"INSERT INTO requests({columns}) VALUES({', '.join('?' * 11)})"
    number = connection.execute(insert, (*values, len(s.body))).lastrowid
    connection.execute("INSERT INTO operations VALUES(?, ?)", (number, s.body))
    _put(connection, s.records)
    return Written(s.request_id, number)


def _finish(connection: sqlite3.Connection, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        statement = "UPDATE requests SET finished = ?, result_bytes = ? WHERE id = ? AND finished IS NULL"
        row = (outcome.finished, len(outcome.result), outcome.request_id)
        if not connection.execute(statement, row).rowcount:
            continue
        find = "SELECT number FROM requests WHERE id = ?"
        (number,) = connection.execute(find, (outcome.request_id,)).fetchone()
        connection.execute("INSERT INTO results VALUES(?, ?)", (number, outcome.result))
        if outcome.tail is None:
            connection.execute("DELETE FROM operations WHERE number = ?", (number,))
        else:
            insert = "INSERT INTO tail(lane, number, settles) VALUES(?, ?, ?)"
            connection.execute(insert, (outcome.lane, number, outcome.tail == "settles"))
        if outcome.cuts is not None:
            _cut_tail(connection, outcome.lane, outcome.cuts)
        if outcome.skipped is not None:
            _skip(connection, outcome.lane, outcome.skipped)
        _put(connection, outcome.records)


def _skip(connection: sqlite3.Connection, lane: str | None, seq: int) -> None:
    connection.execute("INSERT OR IGNORE INTO tombstones VALUES(?, ?)", (lane, seq))


def _cut_tail(connection: sqlite3.Connection, lane: str | None, cuts: Literal["settled", "all"]) -> None:
    settled = "" if cuts == "all" else " AND settles"
    find = f"SELECT max(position) FROM tail WHERE lane = ?{settled}"
    (last,) = connection.execute(find, (lane,)).fetchone()
    if last is None:
        return
    chosen = "WHERE lane = ? AND position <= ?"
    operations = f"DELETE FROM operations WHERE number IN (SELECT number FROM tail {chosen})"
    connection.execute(operations, (lane, last))
    connection.execute(f"DELETE FROM tail {chosen}", (lane, last))


def _put(connection: sqlite3.Connection, records: Sequence[Record]) -> None:
    for record in records:
        if record.body is None:
            connection.execute("DELETE FROM records WHERE kind = ? AND name = ?", (record.kind, record.name))
        else:
            row = (record.kind, record.name, record.body)
            connection.execute("INSERT OR REPLACE INTO records VALUES(?, ?, ?)", row)


def _prune(connection: sqlite3.Connection, now: float, retention: Retention, lanes: Sequence[tuple[str, int]]) -> int:
    """Delete results first. The row of a request stays longer, up to num_requests, since retries find it by key."""
    expired = "finished <= ? OR retrieved <= ?"
    times = (now - retention.unretrieved_s, now - retention.after_retrieval_s)
    find = f"SELECT number FROM requests WHERE result_bytes IS NOT NULL AND ({expired}) LIMIT {PRUNED_AT_ONCE}"
    rows = connection.execute(find, times).fetchall()
    _drop_results(connection, rows)
    (total,) = connection.execute("SELECT coalesce(sum(result_bytes), 0) FROM requests").fetchone()
    if total > retention.result_bytes:
        # Delete retrieved results first, then the oldest.
        find = "SELECT number, result_bytes FROM requests WHERE result_bytes IS NOT NULL"
        sizes = connection.execute(f"{find} ORDER BY retrieved IS NULL, number LIMIT {PRUNED_AT_ONCE}")
        for number, size in sizes.fetchall():
            if total <= retention.result_bytes:
                break
            total -= size
            rows.append((number,))
            _drop_results(connection, [(number,)])
    finished = "finished IS NOT NULL AND result_bytes IS NULL AND number NOT IN (SELECT number FROM tail)"
    oldest = f"SELECT number FROM requests WHERE {finished} AND number <= (SELECT max(number) FROM requests) - ?"
    remove = f"DELETE FROM requests WHERE number IN ({oldest} LIMIT {PRUNED_AT_ONCE})"
    connection.execute(remove, (retention.num_requests,))
    _execute_many(connection, "DELETE FROM tombstones WHERE lane = ? AND seq < ?", lanes)
    _shrink(connection)
    return len(rows)


def _shrink(connection: sqlite3.Connection) -> None:
    """Return free pages at the end of the file to the system, a bounded number at a time, and keep some."""
    (num_free,) = connection.execute("PRAGMA freelist_count").fetchone()
    for _ in range(min(num_free - FREE_PAGES_KEPT, PAGES_AT_ONCE)):
        # The sqlite3 module only steps this statement once, which returns one page regardless of the argument.
        connection.execute("PRAGMA incremental_vacuum(1)")


def _drop_results(connection: sqlite3.Connection, rows: Sequence[tuple[int]]) -> None:
    _execute_many(connection, "DELETE FROM results WHERE number = ?", rows)
    _execute_many(connection, "UPDATE requests SET result_bytes = NULL WHERE number = ?", rows)


def _execute_many(connection: sqlite3.Connection, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
    connection.executemany(statement, rows)
