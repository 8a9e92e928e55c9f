"""The SQLite file of the shared state: where it is, whether it can be trusted, and its tables.

`StateFile.open` calls `check_file` before SQLite opens a file, as SQLite could follow a link, or write into another
program's file. Then it opens the file with `connect`, and takes it from other users with `make_private`.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from openapi_tool.protocol.errors import ExecutorError

BUSY_S = 5.0  # for which a statement waits while another process writes

_APPLICATION_ID = 0x6F617469  # "oati" in the file's header, so that no other program's database is written to
_HEADER_BYTES = 100
_APPLICATION_ID_AT = 68  # first of its 4 bytes in the header
_VERSION = 1  # of the tables
_CHECKED_PAGES = 8_192  # of 4 KiB: to check a larger file would delay the start; its damage is found by what reads it
_MAX_LOG_BYTES = 16 * 2**20  # to which the file -wal is cut after a checkpoint
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


class StateUnusable(ExecutorError):
    """The state file cannot be used as it is; nothing was changed. The message says what to do."""


def default_path(environment: Mapping[str, str]) -> Path:
    """Return the state file in the user's state folder (XDG_STATE_HOME). Raises StateUnusable if there is none."""
    folder = environment.get("XDG_STATE_HOME", "")
    base = Path(folder) if Path(folder).is_absolute() else Path.home() / ".local" / "state"
    if not base.is_absolute():
        raise StateUnusable("HOME is no absolute path, so there is no place for the state file; name one with --state")
    return base / "openapi-tool" / "gateway.sqlite3"


def check_file(path: Path, *, create: bool) -> None:
    """Raise StateUnusable or OSError, and change nothing, unless the path is that of a state file of this user.

    With `create`, make the folder if it is missing, and accept a missing or empty file.
    """
    if path.is_dir():
        raise StateUnusable(f"{path} is a folder; name a file with --state")
    if create:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_folder(path.parent)
    for beside in _files_beside(path):
        if beside.is_symlink() or _is_of_another_user(beside):
            raise StateUnusable(f"{beside} is not a file of this user; delete it, or name another file with --state")
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, and no wait for the other end of a pipe
    if create:
        flags |= os.O_CREAT
    with os.fdopen(os.open(path, flags, 0o600), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise StateUnusable(f"{path} is not a file of this user; name another one with --state")
        _check_header(path, file.read(_HEADER_BYTES), create=create)


def _is_of_another_user(path: Path) -> bool:
    return path.exists() and path.stat().st_uid != os.geteuid()


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which other users can make files, or which they can replace.

    A user can replace it who can write to a folder above it. So these are checked, too, as OpenSSH does for its files,
    but with two exceptions. A folder above it may be sticky, as /tmp is: in such a folder, users can rename only what
    is theirs. And a mount point above it may be open to all: in Kubernetes, all users of a pod can write to the folder
    of a volume.
    """
    folder = folder.resolve()
    root = Path("/").stat().st_uid  # in a user namespace, root may have another number than 0
    trusted = {0, root, os.geteuid()}
    for each in (folder, *folder.parents):
        is_above = each != folder
        if is_above and os.path.ismount(each):
            continue
        status = each.stat()
        others_can_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        is_sticky = bool(status.st_mode & stat.S_ISVTX)
        is_unsafe = others_can_write and not (is_above and is_sticky)
        if status.st_uid not in trusted or is_unsafe:
            raise StateUnusable(
                f"{each} is a folder that other users can write to, so they could read or block a state file in it: "
                "run chmod go-w on it if it is yours, or name a file in a folder of your own with --state"
            )


def _check_header(path: Path, header: bytes, *, create: bool) -> None:
    """Refuse a file that does not begin as a state file does; `header` is empty if the file is."""
    if not header:
        if create:
            return
        raise StateUnusable(f"{path} is empty, so it is no state file; name another one with --state")
    if len(header) < _HEADER_BYTES or not header.startswith(b"SQLite format 3\0"):
        raise StateUnusable(_damaged(path, "its beginning is not that of a database"))
    if int.from_bytes(header[_APPLICATION_ID_AT:][:4]) != _APPLICATION_ID:
        raise StateUnusable(f"{path} is a database of another program; name another file with --state")


def _files_beside(path: Path) -> list[Path]:
    """Return the files that SQLite makes beside a database."""
    return [path.with_name(path.name + end) for end in ("-wal", "-shm", "-journal")]


def make_private(path: Path) -> None:
    """Let the file's user alone read and write it, and those beside it. SQLite gives later ones the same mode."""
    path.chmod(0o600)
    for beside in _files_beside(path):
        with suppress(FileNotFoundError):
            beside.chmod(0o600)


def connect(path: Path) -> sqlite3.Connection:
    """Connect, and create the tables in a new file. Raises StateUnusable, sqlite3.Error."""
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        with _exclusively(connection):
            _check_or_create(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = ON")  # deleted texts are overwritten
        connection.execute(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_or_create(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables in a new file; check version and pages of an existing one. Raises StateUnusable."""
    version = number(connection, "PRAGMA user_version")
    tables = number(connection, "SELECT count(*) FROM sqlite_master")
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
    elif number(connection, "PRAGMA page_count") <= _CHECKED_PAGES:
        damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise StateUnusable(_damaged(path, damage.splitlines()[-1]))


@contextmanager
def _exclusively(connection: sqlite3.Connection) -> Iterator[None]:
    """Run a transaction that waits for those of other processes before it reads."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def wait_for_lock(connection: sqlite3.Connection, *, waits: bool) -> None:
    """Let later statements wait for up to `BUSY_S` while another process writes, or fail at once."""
    seconds = BUSY_S if waits else 0
    connection.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}")


def number(connection: sqlite3.Connection, query: str) -> int:
    """Return the integer that is the result of a query."""
    return int(connection.execute(query).fetchone()[0])


def code_of(error: sqlite3.Error) -> int:
    """Return the primary result code of SQLite, such as SQLITE_BUSY; 0 if the error has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def unusable(path: Path, error: sqlite3.Error) -> str:
    """Return the message of an error of SQLite, with what to do."""
    code = code_of(error)
    if code == sqlite3.SQLITE_BUSY:
        return f"{path}: another process has written to it for {BUSY_S:.0f} s; end it, or name another file"
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
