"""Shared state in one SQLite file (WAL), which several processes of a machine may use at the same time.

`StateFile` is the open file. Its `SqliteRecords` and `SqliteTexts` implement the port (`port`). How a file is checked
and opened is in `sqlite_file`.

A committed write survives kill -9 of any process at any moment. After a power failure the last writes may be missing,
as only checkpoints wait for the disk.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from openapi_tool.concurrency.background import in_background, repeat
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.state.port import ALL_RECORDS, OnChange, Stored
from openapi_tool.state.sqlite_file import (
    StateUnusable,
    check_file,
    code_of,
    connect,
    make_private,
    number,
    unusable,
    wait_for_lock,
)

T = TypeVar("T")

MEMORY = Path(":memory:")
"""Path of a state that ends with its process, and that no other process shares."""

MAX_TEXT_BYTES = 64 * 2**20
"""Size of one text."""

MAX_TEXTS_BYTES = 512 * 2**20
"""Size of all texts; a write beyond it deletes others (`_drop_excess`)."""

_POLL_S = 0.25  # between two looks for records that other processes have changed
_FOREVER = 1e12  # seconds: some 30,000 years

# Queries of texts. The name of a text begins with its owner and a dot: "p1.result.7" has the owner "p1.", and "a" has
# the empty one. `_LARGEST` is the owner who has the most bytes in one bucket, and that bucket. `_LARGEST_FIRST` lists
# that owner's texts there first, then all others; those that expire first come first.
_OWNER = "substr(name, 1, instr(name, '.'))"
_LARGEST = f"SELECT bucket, {_OWNER} FROM texts GROUP BY 1, 2 ORDER BY sum(bytes) DESC LIMIT 1"  # noqa: S608 - constant
_LARGEST_FIRST = f"SELECT rowid, bytes FROM texts ORDER BY (bucket, {_OWNER}) = ({_LARGEST}) DESC, expires"  # noqa: S608

_PURGES = "purges"  # bucket of one record without a value, whose revision is that of the last purge
_LAST_REVISION = "SELECT revision FROM counter"
_LAST_PURGE = f"SELECT coalesce(max(revision), 0) FROM records WHERE bucket = '{_PURGES}'"  # noqa: S608


class _Watcher(NamedTuple):
    bucket: str
    on_change: OnChange


class StateFile:
    """Open state file. Its statements run one after the other in a thread of their own.

    `purged` is the revision of the last purge that this process knows of.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, "state")
        self._is_locked = False  # whether the last transaction has waited in vain for another process
        self._watchers: list[_Watcher] = []
        self._polling: asyncio.Task[None] | None = None
        self._seen = number(connection, _LAST_REVISION)  # highest one that the watchers have been told of
        self.purged = number(connection, _LAST_PURGE)

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> StateFile:
        """Open the file for its user alone; create it if it is missing or empty. Raises StateUnusable.

        A folder that somebody else can write to is refused: the files that SQLite makes beside it could be theirs.
        """
        if path == MEMORY:
            return cls(path, connect(path))
        try:
            check_file(path, create=create)
            connection = connect(path)
            make_private(path)
            return cls(path, connection)
        except OSError as error:
            raise StateUnusable(f"{path} cannot be opened: {error.strerror}; name another file with --state") from error
        except sqlite3.Error as error:
            raise StateUnusable(unusable(path, error)) from error

    def records(self, bucket: str, ttl_s: float = _FOREVER) -> SqliteRecords:
        """Return the records of a bucket, which expire `ttl_s` seconds after their last change."""
        return SqliteRecords(self, bucket, ttl_s)

    def texts(self, bucket: str, ttl_s: float) -> SqliteTexts:
        """Return the texts of a bucket, which expire `ttl_s` seconds after they were stored."""
        return SqliteTexts(self, bucket, ttl_s)

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work`, which runs as one transaction in the thread of the file.

        Raises Unavailable; then nothing was changed.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work)

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        with self._errors():
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
            except BaseException:
                with suppress(sqlite3.Error):  # a full disk may have ended the transaction already
                    connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
            self._set_locked(locked=False)
        return result

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise Unavailable instead of SQLite's errors."""
        try:
            yield
        except sqlite3.Error as error:
            if code_of(error) == sqlite3.SQLITE_BUSY:
                self._set_locked(locked=True)
            raise Unavailable(unusable(self.path, error)) from error

    def _set_locked(self, *, locked: bool) -> None:
        """Remember whether another process holds the lock.

        After one statement has waited for it in vain, later ones do not wait, until one gets the lock: otherwise all
        that are queued would wait one after another.
        """
        if locked != self._is_locked:
            self._is_locked = locked
            wait_for_lock(self._connection, waits=not locked)

    @asynccontextmanager
    async def watch(self, bucket: str, on_change: OnChange) -> AsyncIterator[None]:
        """Call `on_change` for changed records of a bucket, at most about `_POLL_S` after the change.

        It is called while the context is open. The first watch also tells of the changes since the file was opened: a
        purge among them must be heard of.
        """
        watcher = _Watcher(bucket, on_change)
        self._watchers.append(watcher)
        if self._polling is None:
            self._polling = in_background(repeat(self._poll, _POLL_S, "the watch of the state file"), "state file")
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    async def _poll(self) -> None:
        with suppress(Unavailable):  # the next read or write reports it
            await self._notify()

    async def _notify(self) -> None:
        """Tell the watchers which records were changed or purged since the last time."""
        query = "SELECT bucket, key, CAST(value AS BLOB), revision FROM records WHERE revision > ? ORDER BY revision"
        for bucket, key, value, revision in await self.read(query, (self._seen,)):
            self._seen = max(self._seen, revision)
            if bucket == _PURGES:
                self.purged = revision
                for watcher in list(self._watchers):  # of all buckets
                    watcher.on_change(ALL_RECORDS, Stored(None, revision))
            for watcher in list(self._watchers):
                if watcher.bucket == bucket:
                    watcher.on_change(key, Stored(value, revision))

    async def read(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        """Return the rows of a query, which runs in the thread of the file and takes no write lock.

        Raises Unavailable.
        """

        def work() -> list[tuple[Any, ...]]:
            with self._errors():
                return self._connection.execute(query, values).fetchall()

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def aclose(self) -> None:
        """Close the file, after the statements that wait."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown(wait=False)

    async def purge(self) -> None:
        """Delete everything, also from the free pages of the file; running processes hear of it. Raises Unavailable."""

        def delete(connection: sqlite3.Connection) -> None:
            for table in ("records", "texts", "calls"):
                connection.execute(f"DELETE FROM {table}")  # noqa: S608 - a constant
            self.records(_PURGES).store(connection, "last", b"", time.time())

        await self.run(delete)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._compact)

    def _compact(self) -> None:
        with self._errors():
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


class SqliteRecords:
    """Records of one bucket (`Records`, `ListedRecords`); they expire `ttl_s` seconds after their last change.

    Queries cast values to BLOB: SQLite returns a value as it was stored. If somebody has changed the file, that may be
    text.
    """

    def __init__(self, state: StateFile, bucket: str, ttl_s: float) -> None:
        self._state = state
        self._bucket = bucket
        self._ttl_s = ttl_s

    async def read(self, key: str) -> Stored:
        """Return a record; `Stored()` if there is none or it has expired."""
        query = "SELECT CAST(value AS BLOB), revision FROM records WHERE bucket = ? AND key = ? AND expires > ?"
        rows = await self._state.read(query, (self._bucket, key, time.time()))
        return Stored(*rows[0]) if rows else Stored()

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        """Replace a record that still has this revision, 0 if there is none; return the new revision, or None.

        Nothing is written after a purge that this process has not heard of: the value may come from a deleted record.
        """
        now = time.time()
        purged = self._state.purged
        query = "SELECT revision FROM records WHERE bucket = ? AND key = ? AND expires > ?"

        def work(connection: sqlite3.Connection) -> int | None:
            row = connection.execute(query, (self._bucket, key, now)).fetchone()
            stored_revision = row[0] if row else 0
            if stored_revision != revision or number(connection, _LAST_PURGE) != purged:
                return None
            return self.store(connection, key, value, now)

        return await self._state.run(work)

    async def put(self, key: str, value: bytes) -> None:
        """Store a record whatever its revision: one that only this process writes."""
        now = time.time()
        await self._state.run(lambda connection: self.store(connection, key, value, now))

    async def all(self) -> dict[str, bytes]:
        """Return all records by key that have not expired."""
        query = "SELECT key, CAST(value AS BLOB) FROM records WHERE bucket = ? AND expires > ?"
        return dict(await self._state.read(query, (self._bucket, time.time())))

    def store(self, connection: sqlite3.Connection, key: str, value: bytes, now: float) -> int:
        """Store a record within a transaction; return its revision."""
        connection.execute("UPDATE counter SET revision = revision + 1")
        written = number(connection, _LAST_REVISION)
        connection.execute(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)",
            (self._bucket, key, value, written, now + self._ttl_s),
        )
        return written

    @asynccontextmanager
    async def watch(self, on_change: OnChange) -> AsyncIterator[None]:
        """Call `on_change` for changed records while the context is open."""
        async with self._state.watch(self._bucket, on_change):
            yield


class SqliteTexts:
    """Texts of one bucket (`Texts`, `TextSets`), of at most 64 MiB each; all buckets together have 512 MiB."""

    def __init__(self, state: StateFile, bucket: str, ttl_s: float) -> None:
        self._state = state
        self._bucket = bucket
        self._ttl_s = ttl_s

    async def put(self, name: str, text: bytes) -> None:
        """Store or replace a text."""
        await self.put_all({name: text})

    async def put_all(self, texts: Mapping[str, bytes]) -> None:
        """Store all of these texts, or none. Raises Unavailable."""
        size = sum(map(len, texts.values()))
        if size > MAX_TEXT_BYTES:
            raise Unavailable(f"{self._state.path}: a text of {size:,} bytes is larger than {MAX_TEXT_BYTES:,}")
        now = time.time()

        def work(connection: sqlite3.Connection) -> None:
            _drop_expired(connection, now)
            expires = now + self._ttl_s
            rows = [(self._bucket, name, len(text), expires, text) for name, text in texts.items()]
            connection.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?)", rows)
            _drop_excess(connection)

        await self._state.run(work)

    async def get(self, name: str) -> bytes | None:
        """Return a text; None if there is none or it has expired."""
        query = "SELECT CAST(text AS BLOB) FROM texts WHERE bucket = ? AND name = ? AND expires > ?"
        rows = await self._state.read(query, (self._bucket, name, time.time()))
        return rows[0][0] if rows else None

    async def delete(self, name: str) -> None:
        """Delete a text if there is one."""
        statement = "DELETE FROM texts WHERE bucket = ? AND name = ?"
        await self._state.run(lambda connection: connection.execute(statement, (self._bucket, name)))


def _drop_expired(connection: sqlite3.Connection, now: float) -> None:
    connection.execute("DELETE FROM texts WHERE expires <= ?", (now,))
    connection.execute("DELETE FROM records WHERE expires <= ?", (now,))


def _drop_excess(connection: sqlite3.Connection) -> None:
    """Delete texts beyond `MAX_TEXTS_BYTES`.

    The first to go are those of the owner who has the most bytes in one bucket, and of these the ones that expire
    first. So an owner who stores too much loses own texts, and not those of others, nor of other kinds (buckets).
    """
    excess = number(connection, "SELECT coalesce(sum(bytes), 0) FROM texts") - MAX_TEXTS_BYTES
    if excess <= 0:
        return
    for rowid, size in connection.execute(_LARGEST_FIRST).fetchall():
        if excess <= 0:
            return
        connection.execute("DELETE FROM texts WHERE rowid = ?", (rowid,))
        excess -= size
