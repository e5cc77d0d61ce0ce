"""GroupCommit: one thread that writes to a SQLite file; concurrent writes share a transaction and its fsync.

This module makes writes durable; `journal` defines their contents.
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

# Bounds a transaction, since each write in it waits for all of them.
MAX_WRITES = 256


class JournalError(Exception):
    """A write failed and was rolled back, for example because the disk is full. The message has the reason."""


class OtherVersion(JournalError):
    """The file was written by another version of the journal, which this one cannot read."""


class Damaged(Exception):
    """SQLite can read the file, but its contents are inconsistent. The message says where."""


class GroupCommit:
    """Runs writes in the order in which they were submitted, each completely or not at all.

    It uses WAL with synchronous FULL: once the future of `write` is done, the data survive a crash of the process and
    of the machine. Writes come from one event loop and run in a thread. A failed write raises JournalError. The
    constructor raises OtherVersion for a file of another version, and Damaged if the tables do not match the schema.
    If the thread fails, it stops the loop, since later writes would wait forever.
    """

    def __init__(self, path: Path, *, schema: str, version: int) -> None:
        self._path = path
        self._waiting: SimpleQueue[tuple[Write[Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._connection = connect(path)
        _check_version(self._connection, path, version)
        _check_tables(self._connection, schema)
        # In one transaction, so that a file with only some of the tables is known to be damaged.
        self._connection.executescript(f"BEGIN;{schema}COMMIT;")
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def write(self, write: Write[T]) -> asyncio.Future[T]:
        """Run `write` in a transaction; the future completes once it is durable."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.put((write, future))
        return future

    def close(self) -> None:
        """Finish all queued writes, and stop."""
        self._waiting.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        try:
            self._write_until_closed()
        except BaseException:
            # The launcher restarts this process.
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
            # Report any error to the write's caller and keep the thread running.
            if len(writes) > 1:
                # A single write may have caused it, so retry each one alone.
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
            if connection.in_transaction:  # SQLite itself may have rolled back, for example on a full disk
                connection.execute("ROLLBACK")
        return values

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return  # the loop is closed, so no caller is waiting


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a connection with the journal's settings, without implicit transactions."""
    # `as_uri` quotes characters such as ? and #, which have a meaning in a URI.
    source = path.absolute().as_uri() + ("?mode=ro" if read_only else "")
    connection = sqlite3.connect(source, uri=True, isolation_level=None, check_same_thread=False, timeout=30)
    if not read_only:
        # Lets free pages be returned (`journal`). Only has an effect on a new file, before anything else is written.
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        # The log is cut back to this when it has been copied into the file; large results make it grow.
        connection.execute(f"PRAGMA journal_size_limit={8 * 1024 * 1024}")
    return connection


def _check_version(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Raise OtherVersion if another version wrote the file; set the version of a new file."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and found != version:
        raise OtherVersion(
            f"{path} was written by another version of xorl-cli (journal version {found}; this one reads version "
            f"{version}): finish its sessions with that version, or move {path.name} and the files beside it away; "
            "checkpoints are kept"
        )
    connection.execute(f"PRAGMA user_version = {version}")


def _check_tables(connection: sqlite3.Connection, schema: str) -> None:
    """Raise Damaged if a file that is not new lacks tables or columns; a missing table would be recreated empty."""
    expected = sqlite3.connect(":memory:")
    expected.executescript(schema)
    found = _columns(connection)
    for table, columns in _columns(expected).items() if found else ():
        if table not in found:
            raise Damaged(f"table {table} is missing")
        if missing := [column for column in columns if column not in found[table]]:
            raise Damaged(f"table {table} has no column {missing[0]}")
    expected.close()


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
