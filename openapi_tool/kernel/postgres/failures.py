"""Classification of PostgreSQL errors, by their SQLSTATE: what happens to the call whose statement failed.

- *defect*: caused by the values of one call. The error is raised unchanged, and the run of the call counts as lost:
  after a few lost runs the call is not tried again. If the database would refuse the result of any call,
  `writability.py` raises NeedsOperator instead.
- *outage*: temporary. It is raised as Unavailable, and the call is tried again later, without a limit.
- *operator*: an outage that lasts until an operator adds a grant, migration or setting. It is raised as NeedsOperator,
  an Unavailable with the remedy.

A SQLSTATE that is not listed is a defect, since retries of an outage might never end.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

import asyncpg

from openapi_tool.open_files import OUT_OF_FILES, is_out_of_files
from openapi_tool.options.postgres import DSN_SETTING, PoolOptions
from openapi_tool.protocol.errors import NeedsOperator, Unavailable

Kind = Literal["defect", "outage", "operator"]

KINDS: dict[str, Kind] = {
    "08": "outage",  # connection
    "28": "outage",  # login; a rotated password is refused until its new value is everywhere
    "40": "outage",  # serialization, deadlock
    "42": "operator",  # privileges, tables, columns
    "53": "outage",  # disk full, memory, connections
    "57": "outage",  # shutdown, cancelled, statement_timeout
    "58": "outage",  # the server's own files
    "25006": "outage",  # read-only: a standby, or a setting
    "26000": "operator",  # prepared statement does not exist
    "3D000": "operator",  # no such database
    "3F000": "operator",  # no such schema
    "42P05": "operator",  # prepared statement exists already
    "55P03": "outage",  # lock not available
}
"""Kind by SQLSTATE, a code of five characters; one that is not listed has the kind of its class, the first two."""

# Remedies of a NeedsOperator.
_OPERATOR = "An operator must correct this: "
GRANT_PRIVILEGES = f"{_OPERATOR}grant what `openapi-tool sql grants` prints"
RUN_MIGRATIONS = f"{_OPERATOR}check that it is the kernel's database of the configured version, with all its migrations"
UPGRADE = f"{_OPERATOR}use a version of openapi-tool that knows them, or give them a default"
ADMIT_RESULTS = f"{_OPERATOR}change the trigger or constraint so that it admits results, or drop it"
BYPASS_ROW_SECURITY = f"{_OPERATOR}disable it, or run `alter role ROLE bypassrls`"
SET_SEARCH_PATH = f"{_OPERATOR}run `alter role ROLE set search_path = public`, or as the kernel's schema is named"
SET_VERSION = f"{_OPERATOR}set protocol.version, or name the database of a kernel of that version in {DSN_SETTING}"
_POOLER = f"{_OPERATOR}a pooler in transaction mode is in between; set postgres.prepared_statements = false"

_READ_ONLY = "25006"
_CANCELLED = "57014"  # usually by statement_timeout
_LOST_STATEMENT = ("26000", "42P05")  # a prepared statement does not exist, or exists already
_CONTENTION = ("40", "55P03", _CANCELLED)  # conflict, lock, timeout; SQLSTATEs or their beginnings

_REMEDIES = {"42501": GRANT_PRIVILEGES, "3D000": f"{_OPERATOR}check the database's name in {DSN_SETTING}"}
"""Remedy of an error of the kind *operator* by SQLSTATE; of all others it is RUN_MIGRATIONS."""

_LOAD = "the server's load, and locks (pg_stat_activity)"
_TO_CHECK = {
    "53300": "max_connections, the limits of role and database, and postgres.pool_size of all replicas",
    _CANCELLED: f"statement_timeout of the role and the database, {_LOAD}",
}
"""What to check after an error of the kind *outage*, by SQLSTATE."""

_DRIVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)


class ReadOnly(Unavailable):
    """The database takes no writes."""

    def __init__(self) -> None:
        super().__init__(
            "PostgreSQL: read-only (a standby, or default_transaction_read_only); with several hosts use "
            "target_session_attrs=read-write, so that connections find the primary"
        )


class PoolShareUsed(Unavailable):
    """The other calls of the same project use its whole share of the connections."""


class StatementContended(Unavailable):
    """A statement failed at a lock, a conflict or its timeout: its rows are locked, or the whole database is slow."""


def kind_of(sqlstate: str | None) -> Kind:
    """Return the kind of an error by its SQLSTATE; an error without one is a defect."""
    state = sqlstate or ""
    state_class = state[:2]
    return KINDS.get(state) or KINDS.get(state_class, "defect")


def refusal_of(error: asyncpg.PostgresError) -> str:
    """Return why PostgreSQL refuses a row, with the place in the database that raised the error, such as a trigger."""
    # The context has a line for each function, the innermost first: `PL/pgSQL function check_card() line 3 at RAISE`.
    where = (error.context or "").partition("\n")[0]
    details = "; ".join(filter(None, (error.sqlstate, where)))
    return f"{error.message} (SQLSTATE {details})"


class _Translation:
    """Context that replaces an error of the driver by the Unavailable that `translated` returns for it.

    If `translated` returns None, the error stays. This is a class instead of a `@contextmanager`, which costs more CPU:
    every call enters six of these contexts.
    """

    def __init__(self, translated: Callable[[Exception], Unavailable | None]) -> None:
        self._translated = translated

    def __enter__(self) -> None:
        """Keep no state, so that one instance serves all tasks."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, _DRIVER_ERRORS):
            return
        translated = self._translated(error)
        if translated is not None:
            raise translated from error


def translate_connection_errors() -> AbstractContextManager[None]:
    """Translate errors while a connection is opened, prepared or released, all to Unavailable."""
    return _CONNECTION


def translate_statement_errors() -> AbstractContextManager[None]:
    """Translate errors of a statement to Unavailable, except for a defect of the call."""
    return _STATEMENT


def _sqlstate(error: Exception) -> str:
    """Return the SQLSTATE, empty for an error of the driver or the connection, which has none."""
    if not isinstance(error, asyncpg.PostgresError):
        return ""
    return error.sqlstate or ""


def _statement_error(error: Exception) -> Unavailable | None:
    """Return the Unavailable for an error of a statement, None for a defect of the call."""
    state = _sqlstate(error)
    if isinstance(error, asyncpg.PostgresError) and kind_of(state) == "defect":
        return None
    if state == _CANCELLED:
        return StatementContended(f"PostgreSQL: {describe_connection_error(error)}")
    if isinstance(error, TimeoutError) or state.startswith(_CONTENTION):
        why = str(error) or "no answer in the statement's time: the server is overloaded, or a lock blocks it"
        return StatementContended(f"PostgreSQL: {type(error).__name__}: {why}")
    return _as_unavailable(error)


def _as_unavailable(error: Exception) -> Unavailable:
    """Return the Unavailable for an error that no values of a call have caused."""
    state = _sqlstate(error)
    if state == _READ_ONLY:
        return ReadOnly()
    if state in _LOST_STATEMENT:  # one text for both, so that an outage with both is logged once
        return NeedsOperator(
            f"PostgreSQL: prepared statements are lost (SQLSTATE {' or '.join(_LOST_STATEMENT)})", _POOLER
        )
    if kind_of(state) == "operator":
        return NeedsOperator(f"PostgreSQL: {error} (SQLSTATE {state})", _REMEDIES.get(state, RUN_MIGRATIONS))
    return Unavailable(f"PostgreSQL: {describe_connection_error(error)}")


_CONNECTION = _Translation(_as_unavailable)
_STATEMENT = _Translation(_statement_error)


def describe_connection_error(error: Exception) -> str:
    """Return why PostgreSQL cannot be reached or used, and what to check."""
    state = _sqlstate(error)
    if state.startswith("28"):
        return f"{error} (SQLSTATE {state}); check user and password in {DSN_SETTING}"
    if state in _TO_CHECK:
        return f"{error}; check {_TO_CHECK[state]}"
    if is_out_of_files(error):
        return OUT_OF_FILES
    check = f"; check {DSN_SETTING}"
    if isinstance(error, socket.gaierror):
        why = f"the host's name cannot be resolved{check}"
    elif isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        why = f"connection refused{check}"
    elif isinstance(error, TimeoutError):
        why = f"no answer in time{check}, {_LOAD}"
    elif isinstance(error, asyncpg.InternalClientError):  # of the driver, whose text names its own states
        why = "the connection broke off during a statement"
    elif isinstance(error, OSError) and "SSL upgrade" in str(error):
        why = f"it does not speak PostgreSQL's protocol, or not with TLS{check}"
    else:
        why = f"{type(error).__name__}: {error}"
    return why


def located(problem: str, pool: PoolOptions) -> str:
    """Name server and database in the text of an error: `PostgreSQL: …` → `PostgreSQL at HOST:PORT/NAME: …`."""
    return problem.replace("PostgreSQL:", f"PostgreSQL at {pool.where}:", 1)
