"""GroupCommit: one thread that writes to a SQLite file; what waits at the same time shares a transaction and its fsync.

Here is how writes become durable; what is written is `journal`'s.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
Write = Callable[[sqlite3.Connection], T]

# A transaction that takes more than this of others' waiting time for its own is cut.
MAX_WRITES = 256


class JournalError(Exception):
    """Nothing of a write was kept: the disk is full or broken, or what was to be written is none. It says why."""


class OtherVersion(JournalError):
    """The file was written by another version, which alone can read it."""


class Damaged(Exception):
    """The file holds what nobody has written there, although SQLite takes it; it says what."""


class GroupCommit:
    """Runs writes in the order in which they were given, each whole or not at all.

    WAL with synchronous FULL: once `write` returns, what was written survives the process and the machine. One loop
    gives writes; a thread runs them. `write` raises JournalError, a file of another version OtherVersion, and one whose
    tables are not those of the schema Damaged. If the thread ends, so does the loop, since all that is given from then
    on would wait for ever.
    """

    def __init__(self, path: Path, *, schema: str, version: int) -> None:
        self._path = path
        self._waiting: SimpleQueue[tuple[Write[Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._connection = connect(path)
        _check_version(self._connection, path, version)
        _check_tables(self._connection, schema)
        # All tables or none: a file that has some of them is damaged.
        self._connection.executescript(f"BEGIN;{schema}COMMIT;")
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def write(self, write: Write[T]) -> asyncio.Future[T]:
        """Run `write` in a transaction; the future is done when it is durable."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.put((write, future))
        return future

    def close(self) -> None:
        """Write what waits, and stop."""
        self._waiting.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        try:
            self._write_until_closed()
        except BaseException:
            # Whoever supervises this process starts it again.
            logger.critical("event=journal_ended path=%s", self._path, exc_info=True)
            self._call(self._loop.stop)

    def _write_until_closed(self) -> None:
        is_open = True
        while is_open:
            batch = [self._waiting.get()]
            while len(batch) < MAX_WRITES and batch[-1] is not None and not self._waiting.empty():
                batch.append(self._waiting.get())
            is_open = batch[-1] is not None
            writes = [item for item in batch if item is not None]
            if writes:
                self._commit(writes)

    def _commit(self, writes: list[tuple[Write[Any], asyncio.Future[Any]]]) -> None:
        try:
            values = self._transact([write for write, _ in writes])
        except Exception as error:
            # Whatever it was, who gave the write is told, and the thread goes on.
            if len(writes) > 1:
                # One of them may be to blame, and the others must not fail with it.
                for write in writes:
                    self._commit([write])
                return
            if not isinstance(error, sqlite3.Error):
                logger.error("event=not_written path=%s", self._path, exc_info=error)
            failure = JournalError(f"{self._path}: {error}")
            self._call(_resolve, [(writes[0][1], None, failure)])
        else:
            self._call(_resolve, [(future, value, None) for (_, future), value in zip(writes, values, strict=True)])

    def _transact(self, writes: list[Write[Any]]) -> list[Any]:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            values = [write(connection) for write in writes]
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:  # what failed is not kept; a full disk may have rolled it back already
                connection.execute("ROLLBACK")
        return values

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return  # the loop has ended: nobody waits


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection as the journal's are set; statements begin no transaction by themselves."""
    # As a URI, in which a folder's name may have another meaning unless it is quoted.
    source = path.absolute().as_uri() + ("?mode=ro" if read_only else "")
    connection = sqlite3.connect(source, uri=True, isolation_level=None, check_same_thread=False, timeout=30)
    if not read_only:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        # The log is cut back to this when it has been copied into the file; large results make it grow.
        connection.execute(f"PRAGMA journal_size_limit={64 * 1024 * 1024}")
    return connection


def _check_version(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """What is in the file was written in the form of a version, and is read by the same."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and found != version:
        raise OtherVersion(
            f"{path} was written by another version of xorl-cli (in a journal of version {found}, here it is of "
            f"{version}): end its sessions with that one, or move {path.name} and the files beside it away; "
            "checkpoints stay where they are"
        )
    connection.execute(f"PRAGMA user_version = {version}")


def _check_tables(connection: sqlite3.Connection, schema: str) -> None:
    """A file has the columns of the schema, or nothing yet; a table that went missing would be made anew, empty."""
    plain = sqlite3.connect(":memory:")
    plain.executescript(schema)
    found = _columns(connection)
    for table, columns in _columns(plain).items() if found else ():
        if table not in found:
            raise Damaged(f"it has no table {table}")
        if missing := [column for column in columns if column not in found[table]]:
            raise Damaged(f"its table {table} has no column {missing[0]}")
    plain.close()


def _columns(connection: sqlite3.Connection) -> dict[str, list[str]]:
    statement = (
        "SELECT tables.name, columns.name FROM sqlite_master AS tables, pragma_table_info(tables.name) AS columns"
        " WHERE tables.type = 'table'"
    )
    found: dict[str, list[str]] = {}
    for table, column in connection.execute(statement):
        found.setdefault(table, []).append(column)
    return found


def _resolve(answers: list[tuple[asyncio.Future[Any], Any, JournalError | None]]) -> None:
    for future, value, failure in answers:
        if future.cancelled():
            continue
        if failure is None:
            future.set_result(value)
        else:
            future.set_exception(failure)
