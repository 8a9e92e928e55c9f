"""Shared state in one SQLite file (WAL), which several processes of a machine may use at the same time.

A committed write survives kill -9 of any process at any moment; after a power failure the last ones may be missing,
as only checkpoints wait for the disk.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from openapi_tool.concurrency.background import in_background, repeat
from openapi_tool.protocol.errors import ExecutorError, Unavailable
from openapi_tool.state.port import ALL_RECORDS, OnChange, Stored

T = TypeVar("T")

MEMORY = Path(":memory:")
"""Path of a state that ends with its process, and that no other process shares."""

MAX_TEXT_BYTES = 64 * 2**20
MAX_TEXTS_BYTES = 512 * 2**20
"""Size of all texts; beyond it those that expire first are deleted."""

_APPLICATION_ID = 0x6F617469  # in the file's header, so that no other program's database is written to
_HEADER_BYTES, _APPLICATION_ID_AT = 100, 68
_VERSION = 1
_BUSY_S = 5.0
_POLL_S = 0.25
_SCHEMA = """
CREATE TABLE counter (revision INTEGER NOT NULL);
INSERT INTO counter VALUES (0);
CREATE TABLE records (
    bucket TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, revision INTEGER NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (bucket, key)
) WITHOUT ROWID;
CREATE INDEX records_by_revision ON records (revision);
CREATE TABLE texts (
    bucket TEXT NOT NULL, name TEXT NOT NULL, bytes INTEGER NOT NULL, expires REAL NOT NULL, text BLOB NOT NULL,
    PRIMARY KEY (bucket, name)
);
CREATE INDEX texts_by_expiry ON texts (expires, bytes);
CREATE TABLE calls (
    at REAL NOT NULL, tool_call_id TEXT NOT NULL, project TEXT NOT NULL, agent TEXT NOT NULL, session TEXT,
    tool TEXT NOT NULL, status TEXT NOT NULL, error TEXT, tokens INTEGER NOT NULL, requests INTEGER NOT NULL,
    cached INTEGER NOT NULL, truncated INTEGER NOT NULL, retries INTEGER NOT NULL, latency_ms INTEGER NOT NULL,
    details BLOB NOT NULL
);
CREATE INDEX calls_by_time ON calls (project, at);
CREATE INDEX calls_by_id ON calls (project, tool_call_id);
"""
_CHECKED_PAGES = 8_192  # of 4 KiB: a larger file would delay the start; damage is then found by what reads it
_FOREVER = 1e12
_OWNER = "substr(name, 1, instr(name, '.'))"
_LARGEST = f"SELECT bucket, {_OWNER} FROM texts GROUP BY 1, 2 ORDER BY sum(bytes) DESC LIMIT 1"  # noqa: S608 - constant
_LARGEST_FIRST = f"SELECT rowid, bytes FROM texts ORDER BY (bucket, {_OWNER}) = ({_LARGEST}) DESC, expires"  # noqa: S608
_PURGES = "purges"  # bucket of one record without a value, whose revision is that of the last purge
_LAST_PURGE = f"SELECT coalesce(max(revision), 0) FROM records WHERE bucket = '{_PURGES}'"  # noqa: S608


class StateUnusable(ExecutorError):
    """The state file cannot be used as it is; nothing was changed. The message says what to do."""


class StateFile:
    """Open state file. Its statements run one after the other in a thread of their own."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, "state")
        self._is_locked = False
        self._watching: list[tuple[str, OnChange]] = []
        self._polling: asyncio.Task[None] | None = None
        self._seen = 0
        self.purged = _one(connection, _LAST_PURGE)

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> StateFile:
        """Open the file for its user alone; create it if it is missing or empty. Raises StateUnusable.

        A folder that somebody else can write to is refused: the files that SQLite makes beside it could be theirs.
        """
        if path == MEMORY:
            return cls(path, _connect(path))
        try:
            _check(path, create=create)
            connection = _connect(path)
            _make_private(path)
            return cls(path, connection)
        except OSError as error:
            raise StateUnusable(f"{path} cannot be opened: {error.strerror}; name another file with --state") from error
        except sqlite3.Error as error:
            raise StateUnusable(_unusable(path, error)) from error

    def records(self, bucket: str, ttl_s: float = _FOREVER) -> SqliteRecords:
        """Return the records of a bucket, which expire `ttl_s` seconds after their last change."""
        return SqliteRecords(self, bucket, ttl_s)

    def texts(self, bucket: str, ttl_s: float) -> SqliteTexts:
        """Return the texts of a bucket, which expire `ttl_s` seconds after they were stored."""
        return SqliteTexts(self, bucket, ttl_s)

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work`, which runs as one transaction. Raises Unavailable; then nothing was changed."""
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
            if _code(error) == sqlite3.SQLITE_BUSY:
                self._set_locked(locked=True)
            raise Unavailable(_unusable(self.path, error)) from error

    def _set_locked(self, *, locked: bool) -> None:
        """After one has waited in vain no statement waits for the lock, until one gets it."""
        if locked != self._is_locked:
            self._is_locked = locked
            _wait_for_lock(self._connection, 0 if locked else _BUSY_S)

    @asynccontextmanager
    async def watch(self, bucket: str, on_change: OnChange) -> AsyncIterator[None]:
        """Call `on_change` for changed records of a bucket while the context is open, within `_POLL_S`."""
        watcher = bucket, on_change
        self._watching.append(watcher)
        if self._polling is None:
            self._seen = (await self.read("SELECT revision FROM counter", ()))[0][0]
            self._polling = in_background(repeat(self._poll, _POLL_S, "the watch of the state file"), "state file")
        try:
            yield
        finally:
            self._watching.remove(watcher)

    async def _poll(self) -> None:
        with suppress(Unavailable):  # the next read or write reports it
            await self._notify()

    async def _notify(self) -> None:
        query = "SELECT bucket, key, CAST(value AS BLOB), revision FROM records WHERE revision > ? ORDER BY revision"
        for bucket, key, value, revision in await self.read(query, (self._seen,)):
            self._seen = max(self._seen, revision)
            if bucket == _PURGES:
                self.purged = revision
                for _, on_change in list(self._watching):
                    on_change(ALL_RECORDS, Stored(None, revision))
            for watched, on_change in list(self._watching):
                if watched == bucket:
                    on_change(key, Stored(value, revision))

    async def read(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        """Return the rows of a query, which takes no write lock. Raises Unavailable."""

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
    """Records of one bucket."""

    def __init__(self, state: StateFile, bucket: str, ttl_s: float) -> None:
        self._state, self._bucket, self._ttl_s = state, bucket, ttl_s

    async def read(self, key: str) -> Stored:
        """See `Records`."""
        query = "SELECT CAST(value AS BLOB), revision FROM records WHERE bucket = ? AND key = ? AND expires > ?"
        rows = await self._state.read(query, (self._bucket, key, time.time()))
        return Stored(*rows[0]) if rows else Stored()

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        """See `Records`. Until this process has heard of a purge it writes nothing, as it may know what was deleted."""
        now, purged = time.time(), self._state.purged
        query = "SELECT revision FROM records WHERE bucket = ? AND key = ? AND expires > ?"

        def work(connection: sqlite3.Connection) -> int | None:
            row = connection.execute(query, (self._bucket, key, now)).fetchone()
            if (row[0] if row else 0) != revision or _one(connection, _LAST_PURGE) != purged:
                return None
            return self.store(connection, key, value, now)

        return await self._state.run(work)

    async def put(self, key: str, value: bytes) -> None:
        """Store a record whatever its revision: one that only this process writes."""
        now = time.time()
        await self._state.run(lambda connection: self.store(connection, key, value, now))

    async def all(self) -> dict[str, bytes]:
        """Return all records by key."""
        query = "SELECT key, CAST(value AS BLOB) FROM records WHERE bucket = ? AND expires > ?"
        return dict(await self._state.read(query, (self._bucket, time.time())))

    def store(self, connection: sqlite3.Connection, key: str, value: bytes, now: float) -> int:
        """Store a record within a transaction; return its revision."""
        connection.execute("UPDATE counter SET revision = revision + 1")
        written = _one(connection, "SELECT revision FROM counter")
        connection.execute(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)",
            (self._bucket, key, value, written, now + self._ttl_s),
        )
        return written

    @asynccontextmanager
    async def watch(self, on_change: OnChange) -> AsyncIterator[None]:
        """See `Records`."""
        async with self._state.watch(self._bucket, on_change):
            yield


class SqliteTexts:
    """Texts of one bucket, of at most 64 MiB; all buckets together have 512 MiB."""

    def __init__(self, state: StateFile, bucket: str, ttl_s: float) -> None:
        self._state, self._bucket, self._ttl_s = state, bucket, ttl_s

    async def put(self, name: str, text: bytes) -> None:
        """See `Texts`."""
        await self.put_all({name: text})

    async def put_all(self, texts: Mapping[str, bytes]) -> None:
        """Store all of these texts, or none."""
        size = sum(map(len, texts.values()))
        if size > MAX_TEXT_BYTES:
            raise Unavailable(f"{self._state.path}: a text of {size:,} bytes is larger than {MAX_TEXT_BYTES:,}")
        now = time.time()

        def work(connection: sqlite3.Connection) -> None:
            _drop_expired(connection, now)
            rows = ((self._bucket, name, len(text), now + self._ttl_s, text) for name, text in texts.items())
            connection.executemany("INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?, ?)", rows)
            _drop_excess(connection)

        await self._state.run(work)

    async def get(self, name: str) -> bytes | None:
        """See `Texts`."""
        query = "SELECT CAST(text AS BLOB) FROM texts WHERE bucket = ? AND name = ? AND expires > ?"
        rows = await self._state.read(query, (self._bucket, name, time.time()))
        return rows[0][0] if rows else None

    async def delete(self, name: str) -> None:
        """See `Texts`."""
        statement = "DELETE FROM texts WHERE bucket = ? AND name = ?"
        await self._state.run(lambda connection: connection.execute(statement, (self._bucket, name)))


def _drop_expired(connection: sqlite3.Connection, now: float) -> None:
    connection.execute("DELETE FROM texts WHERE expires <= ?", (now,))
    connection.execute("DELETE FROM records WHERE expires <= ?", (now,))


def _drop_excess(connection: sqlite3.Connection) -> None:
    """Delete texts beyond the limit: of the owner with the most bytes in a bucket first, and of these the oldest.

    So no flood of one owner or kind takes all of another.
    """
    excess = _one(connection, "SELECT coalesce(sum(bytes), 0) FROM texts") - MAX_TEXTS_BYTES
    if excess <= 0:
        return
    for rowid, size in connection.execute(_LARGEST_FIRST).fetchall():
        if excess <= 0:
            return
        connection.execute("DELETE FROM texts WHERE rowid = ?", (rowid,))
        excess -= size


def _one(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])


def _wait_for_lock(connection: sqlite3.Connection, seconds: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")


def _connect(path: Path) -> sqlite3.Connection:
    """Connect, and create the tables in a new file. Raises StateUnusable, sqlite3.Error."""
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        with _exclusively(connection):
            _check_or_create(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")  # deleted texts are overwritten
        connection.execute(f"PRAGMA journal_size_limit = {16 * 2**20}")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_or_create(connection: sqlite3.Connection, path: Path) -> None:
    version = _one(connection, "PRAGMA user_version")
    tables = _one(connection, "SELECT count(*) FROM sqlite_master")
    if not tables:
        for statement in filter(str.strip, _SCHEMA.split(";")):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {_VERSION}")
    elif version > _VERSION:
        raise StateUnusable(
            f"{path} was written by a newer version of openapi-tool (schema {version}, this one knows {_VERSION}): "
            "update it, or name another file with --state"
        )
    elif _one(connection, "PRAGMA page_count") <= _CHECKED_PAGES:
        damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise StateUnusable(_damaged(path, damage.splitlines()[-1]))


@contextmanager
def _exclusively(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _check(path: Path, *, create: bool) -> None:
    """Refuse what is no state file of this user alone, and change nothing then. Raises StateUnusable, OSError."""
    if create:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_folder(path.parent)
    for beside in _files_beside(path):
        if beside.is_symlink() or (beside.exists() and beside.stat().st_uid != os.geteuid()):
            raise StateUnusable(f"{beside} is not a file of this user; delete it, or name another file with --state")
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    with os.fdopen(os.open(path, flags, 0o600), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise StateUnusable(f"{path} is not a file of this user; name another one with --state")
        _check_header(path, file.read(_HEADER_BYTES), create=create)


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which others can make files, or that they can replace by way of a folder above it.

    As OpenSSH, but a folder above it may be sticky, as /tmp: only its owner can rename what is in it. Also a mount
    point above it may be anybody's: in Kubernetes all users of a pod can write to the folder of a volume. Who owns / is
    trusted as root: in a user namespace root may have another number.
    """
    folder = folder.resolve()
    trusted = {0, os.geteuid(), Path("/").stat().st_uid}
    for each in (folder, *folder.parents):
        if each != folder and os.path.ismount(each):
            continue
        status = each.stat()
        is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid not in trusted or (is_open and (each == folder or not status.st_mode & stat.S_ISVTX)):
            raise StateUnusable(
                f"{each} is a folder that other users can write to, so they could read or block a state file in it: "
                "run chmod go-w on it if it is yours, or name a file in a folder of your own with --state"
            )


def _check_header(path: Path, header: bytes, *, create: bool) -> None:
    if not header:
        if create:
            return
        raise StateUnusable(f"{path} is empty, so it is no state file; name another one with --state")
    if len(header) < _HEADER_BYTES or not header.startswith(b"SQLite format 3\0"):
        raise StateUnusable(_damaged(path, "its beginning is not that of a database"))
    if int.from_bytes(header[_APPLICATION_ID_AT:][:4]) != _APPLICATION_ID:
        raise StateUnusable(f"{path} is a database of another program; name another file with --state")


def _files_beside(path: Path) -> list[Path]:
    return [path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal")]


def _make_private(path: Path) -> None:
    """Files that SQLite makes beside it later get its mode."""
    path.chmod(0o600)
    for beside in _files_beside(path):
        with suppress(FileNotFoundError):
            beside.chmod(0o600)


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _unusable(path: Path, error: sqlite3.Error) -> str:
    code = _code(error)
    if code == sqlite3.SQLITE_BUSY:
        return f"{path}: another process has written to it for {_BUSY_S:.0f} s; end it, or name another file"
    if code == sqlite3.SQLITE_FULL:
        return f"{path}: the disk is full; free some space"
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return _damaged(path, str(error))
    return f"{path} cannot be used: {error}; check its disk and its permissions, or name another file with --state"


def _damaged(path: Path, how: str) -> str:
    return (
        f"{path} is damaged ({how}), and was not changed: restore it, or move it and the files {path.name}-wal and "
        f"{path.name}-shm away, then budgets and limits start anew"
    )


def default_path(environment: Mapping[str, str]) -> Path:
    """Return the state file in the user's state folder (XDG_STATE_HOME). Raises StateUnusable if there is none."""
    folder = environment.get("XDG_STATE_HOME", "")
    base = Path(folder) if Path(folder).is_absolute() else Path.home() / ".local" / "state"
    if not base.is_absolute():
        raise StateUnusable("HOME is no absolute path, so there is no place for the state file; name one with --state")
    return base / "openapi-tool" / "gateway.sqlite3"
