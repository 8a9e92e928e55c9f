"""Classification of PostgreSQL errors, and of error responses of the upstream."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http import HTTPStatus
from typing import Any

import asyncpg
import httpx
import pytest
from asyncpg.exceptions import _base
from hypothesis import example, given
from hypothesis import strategies as st

from openapi_tool.jina.endpoints import ENDPOINTS
from openapi_tool.jina.failure_rules import RULES, Failures
from openapi_tool.jina.failures import MessageContext, upstream_failure
from openapi_tool.jina.options import CacheOptions, RetryOptions
from openapi_tool.jina.response import RESPONSES
from openapi_tool.kernel.postgres.failures import (
    KINDS,
    ReadOnly,
    StatementContended,
    kind_of,
    translate_connection_errors,
    translate_statement_errors,
)
from openapi_tool.local.recordings import error_classes, load_recordings
from openapi_tool.protocol.errors import BadRequest, NeedsOperator, ToolError, Unavailable, UpstreamRejected
from openapi_tool.tools.output import ToolOutput
from tests.answering import Answer, ToolsOverTransport, serving
from tests.requirements import requirement
from tests.support import assert_for_a_model, each, fetched, left_for_the_garbage_collector, retry


@pytest.mark.parametrize(
    ("kind", "states"),
    [
        ("defect", "22001 22P02 22021 23505 23514 21000 54000 P0001 XX000 F0000"),
        ("outage", "08006 08P01 28P01 28000 40001 40P01 53100 53200 53300 57P01 57014 58030 25006 55P03"),
        ("operator", "42501 42703 42P01 42883 3D000 3F000 26000 42P05"),
    ],
)
@requirement("postgres.failures")
def test_every_sqlstate_has_one_kind_and_an_unknown_one_is_a_fault_of_the_call(kind: str, states: str) -> None:
    assert {kind_of(state) for state in states.split()} == {kind}
    assert kind_of(None) == "defect"


def _all_errors() -> list[type[asyncpg.PostgresError]]:
    return [
        found
        for found in vars(asyncpg.exceptions).values()
        if isinstance(found, type) and issubclass(found, asyncpg.PostgresError) and getattr(found, "sqlstate", None)
    ]


@requirement("postgres.failures")
def test_the_table_names_only_states_that_the_driver_knows() -> None:
    known = {error.sqlstate for error in _all_errors()} | {(error.sqlstate or "")[:2] for error in _all_errors()}
    assert set(KINDS) <= known


@each("error", _all_errors())
@requirement("postgres.failures")
def test_every_error_of_the_driver_is_raised_or_waited_for(error: type[asyncpg.PostgresError]) -> None:
    kind = kind_of(error.sqlstate)
    expected = {"defect": error, "outage": Unavailable, "operator": NeedsOperator}[kind]
    with pytest.raises(expected) as caught, translate_statement_errors():
        raise error("what was said")
    assert isinstance(caught.value, NeedsOperator) == (kind == "operator")


@pytest.mark.parametrize(
    "error",
    [
        OSError("no route"),
        TimeoutError(),
        asyncpg.InterfaceError("connection is closed"),
        asyncpg.InternalClientError("unexpected"),
        _base.TargetServerAttributeNotMatched("None of the hosts match"),
    ],
    ids=lambda error: type(error).__name__,
)
@requirement("postgres.failures")
def test_a_connection_that_breaks_is_an_outage(error: Exception) -> None:
    with pytest.raises(Unavailable), translate_statement_errors():
        raise error


@requirement("postgres.failures")
def test_value_that_the_driver_cannot_send_is_a_fault_of_the_call() -> None:
    with pytest.raises(asyncpg.DataError), translate_statement_errors():
        raise asyncpg.DataError("invalid input for query argument $1")


@pytest.mark.parametrize("error", [asyncpg.DataError("x"), _base.ClientConfigurationError("y")])
@requirement("postgres.failures")
def test_connection_failure_is_never_a_fault_of_the_call(error: Exception) -> None:
    with pytest.raises(Unavailable), translate_connection_errors():
        raise error


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (asyncpg.InsufficientPrivilegeError, "sql grants"),
        (asyncpg.UndefinedColumnError, "configured version, with all its migrations"),
        (asyncpg.InvalidCatalogNameError, "check the database's name"),
    ],
)
@requirement("postgres.failures")
def test_error_that_an_operator_must_correct_names_the_remedy(error: type[asyncpg.PostgresError], remedy: str) -> None:
    with (
        pytest.raises(NeedsOperator, match=rf"PostgreSQL: so it is \(SQLSTATE .*An operator must.*{remedy}"),
        translate_statement_errors(),
    ):
        raise error("so it is")


@pytest.mark.parametrize("error", [asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError])
@pytest.mark.parametrize("statement", ["1", "2"])
@requirement("postgres.failures")
def test_lost_prepared_statements_are_named_in_the_same_words_each_time(
    error: type[asyncpg.PostgresError], statement: str
) -> None:
    """Each different text would be logged as another reason."""
    with pytest.raises(NeedsOperator) as raised, translate_statement_errors():
        raise error(f'prepared statement "__asyncpg_stmt_{statement}__"')
    assert str(raised.value) == (
        "PostgreSQL: prepared statements are lost (SQLSTATE 26000 or 42P05). An operator must correct this: "
        "a pooler in transaction mode is in between; set postgres.prepared_statements = false"
    )


@requirement("postgres.failures")
def test_a_database_without_writes_is_named_with_the_setting_that_finds_the_primary() -> None:
    with pytest.raises(ReadOnly, match=r"read-only .*target_session_attrs=read-write"), translate_statement_errors():
        raise asyncpg.ReadOnlySQLTransactionError("cannot execute INSERT in a read-only transaction")


@pytest.mark.parametrize(
    ("error", "contended"),
    [
        (asyncpg.QueryCanceledError("statement timeout"), True),
        (asyncpg.LockNotAvailableError("lock timeout"), True),
        (asyncpg.SerializationError("concurrent update"), True),
        (asyncpg.DeadlockDetectedError("deadlock"), True),
        (TimeoutError(), True),
        (asyncpg.AdminShutdownError("shutting down"), False),
        (asyncpg.DiskFullError("no space"), False),
        (ConnectionResetError(), False),
    ],
    ids=lambda value: type(value).__name__,
)
@requirement("breaker")
def test_contention_is_distinguished_from_an_outage(error: Exception, contended: bool) -> None:  # noqa: FBT001
    with pytest.raises(Unavailable) as caught, translate_statement_errors():
        raise error
    assert isinstance(caught.value, StatementContended) == contended


@pytest.mark.parametrize("translated", [translate_statement_errors, translate_connection_errors])
@requirement("breaker")
def test_a_cancelled_statement_is_named_with_the_setting_that_cancels_it(
    translated: Callable[[], AbstractContextManager[None]],
) -> None:
    with pytest.raises(Unavailable) as caught, translated():
        raise asyncpg.QueryCanceledError("canceling statement due to statement timeout")
    assert str(caught.value) == (
        "PostgreSQL: canceling statement due to statement timeout; check statement_timeout of the role and the "
        "database, the server's load, and locks (pg_stat_activity)"
    )


@requirement("breaker")
def test_a_server_without_free_connections_is_named_with_the_settings_that_limit_them() -> None:
    with pytest.raises(Unavailable) as caught, translate_connection_errors():
        raise asyncpg.TooManyConnectionsError("sorry, too many clients already")
    assert str(caught.value) == (
        "PostgreSQL: sorry, too many clients already; check max_connections, the limits of role and database, and "
        "postgres.pool_size of all replicas"
    )


@requirement("breaker")
def test_a_connection_that_does_not_come_in_time_is_an_outage() -> None:
    with pytest.raises(Unavailable) as caught, translate_connection_errors():
        raise TimeoutError
    assert not isinstance(caught.value, StatementContended)


# The error table of jina-api section 4, row by row, through the client: kind, retry, and what the model reads.


JSON = {"Content-Type": "application/json; charset=utf-8"}
HTML = {"Content-Type": "text/html; charset=UTF-8"}
TEXT = {"Content-Type": "text/plain; charset=utf-8"}
WORDS = "example message"
"""Texts of the recorded error classes."""
STREAM = {"Content-Type": "text/event-stream"}
UNAVAILABLE = "upstream_unavailable"
PAGE = b"<!DOCTYPE html><html><head><title>Attention Required! | Cloudflare</title></head><body>Ray ID</body></html>"


@dataclass(frozen=True)
class Row:
    """Row of the table for one `status`; `quoted` says whether the message may quote the upstream's text."""

    http: int
    status: int
    code: str
    retry: str
    remedy: str
    quoted: bool = True


# fmt: off
TABLE = (
    Row(400, 40001, "bad_request", "no", "correct the arguments"),
    Row(400, 40003, UNAVAILABLE, "once", "try again"),
    Row(400, 40004, "upstream_rejected", "no", "use another source"),
    Row(401, 40102, "auth_failed", "no", "an operator must set a valid one", quoted=False),
    Row(401, 40103, "auth_failed", "no", "an operator must set a valid one", quoted=False),
    Row(401, 40104, "auth_failed", "no", "an operator must verify it", quoted=False),
    Row(402, 40201, "budget_exceeded", "no", "until an operator acts"),
    Row(402, 40202, "auth_failed", "no", "call without it"),
    Row(402, 40203, "budget_exceeded", "no", "until an operator acts"),
    Row(403, 40301, "target_refused", "later", "use another, or try again when that is over"),
    Row(403, 40302, "auth_failed", "no", "until an operator acts"),
    Row(403, 40303, "auth_failed", "no", "until an operator acts"),
    Row(403, 40304, "auth_failed", "no", "until an operator acts"),
    Row(404, 40401, "upstream_rejected", "no", "an operator must check"),
    Row(404, 40402, "upstream_rejected", "no", "an operator must check"),
    Row(404, 40403, "upstream_rejected", "no", "an operator must check"),
    Row(405, 40501, "upstream_rejected", "no", "an operator must check"),
    Row(405, 40502, "upstream_rejected", "no", "an operator must check"),
    Row(408, 40801, "upstream_unavailable", "yes", "try again"),
    Row(408, 40802, "upstream_unavailable", "yes", "try again"),
    Row(409, 40901, "upstream_unavailable", "yes", "try again"),
    Row(409, 40902, "target_refused", "no", "use another source"),
    Row(409, 40903, "upstream_unavailable", "yes", "try again"),
    Row(409, 40904, "budget_exceeded", "no", "read a smaller page"),
    Row(412, 41201, "bad_request", "no", "ask for fewer"),
    Row(413, 41301, "upstream_rejected", "no", "too large for the service; use another source"),
    Row(413, 41302, "upstream_rejected", "no", "too large for the service; use another source"),
    Row(422, 42201, "upstream_rejected", "no", "use another source"),
    Row(422, 42202, "upstream_rejected", "no", "use another source"),
    Row(422, 42203, "upstream_rejected", "no", "use another source"),
    Row(422, 42204, "upstream_unavailable", "yes", "try again"),
    Row(422, 42205, "upstream_unavailable", "yes", "try again"),
    Row(422, 42206, "upstream_rejected", "no", "use another source"),
    Row(429, 42901, "rate_limited", "yes", "wait, then call again", quoted=False),
    Row(429, 42902, "rate_limited", "yes", "wait, then call again", quoted=False),
    Row(429, 42903, "rate_limited", "yes", "wait, then call again", quoted=False),
    Row(451, 45101, "target_refused", "no", "use another source"),
    Row(451, 45102, "target_refused", "no", "use a public page"),
    Row(451, 45103, "target_refused", "no", "use another source"),
    Row(451, 45104, "target_refused", "no", "use another source"),
    Row(451, 45105, "target_refused", "no", "use another source"),
    Row(500, 50000, "upstream_unavailable", "once", "try again", quoted=False),
    Row(500, 50001, "upstream_unavailable", "once", "try again", quoted=False),
    Row(500, 50002, "upstream_unavailable", "once", "try again", quoted=False),
    Row(500, 50003, "upstream_unavailable", "once", "try again", quoted=False),
    Row(500, 50004, "upstream_unavailable", "once", "try again", quoted=False),
    Row(500, 50005, "upstream_unavailable", "once", "try again", quoted=False),
    Row(500, 50006, "upstream_unavailable", "once", "try again", quoted=False),
    Row(501, 50101, "upstream_rejected", "no", "use another source", quoted=False),
    Row(501, 50102, "upstream_rejected", "no", "use another source", quoted=False),
    Row(503, 50301, "upstream_unavailable", "yes", "try again", quoted=False),
    Row(503, 50302, "upstream_unavailable", "yes", "try again", quoted=False),
    Row(503, 50303, "upstream_unavailable", "yes", "try again", quoted=False),
    Row(503, 50304, "upstream_unavailable", "yes", "try again", quoted=False),
    Row(503, 50305, "upstream_unavailable", "yes", "try again", quoted=False),
)

WITHOUT_ENVELOPE: tuple[tuple[int, Mapping[str, str], bytes, str, str, str], ...] = (
    # HTTP, headers, body, code, retry, remedy
    (302, HTML, PAGE, "upstream_rejected", "no", "an operator must check"),
    (400, TEXT, b"Bad Request", "bad_request", "no", "correct the arguments"),
    (401, TEXT, b"AuthenticationRequiredError: Authentication is required", "auth_failed", "no", "operator must set"),
    (403, HTML, PAGE, UNAVAILABLE, "once", "try again"),
    (403, {}, b"", UNAVAILABLE, "once", "try again"),
    (404, TEXT, b"Not Found", "upstream_rejected", "no", "an operator must check"),
    (405, TEXT, b"Method Not Allowed", "upstream_rejected", "no", "an operator must check"),
    (405, {}, b"", "upstream_rejected", "no", "an operator must check"),
    (413, HTML, PAGE, "upstream_rejected", "no", "too large for the service; use another source"),
    (418, TEXT, b"short and stout", "upstream_rejected", "no", "use another source"),
    (429, HTML, PAGE, "rate_limited", "yes", "wait, then call again"),
    (431, {}, b"", "bad_request", "no", "use a shorter one"),
    (500, TEXT, b"Error: ENOENT at /srv/app/index.js", UNAVAILABLE, "once", "try again"),
    (500, JSON, b'{"code":500,"status":50000,"message":"at /srv/app","name":"Error"}',
     UNAVAILABLE, "once", "try again"),
    (500, JSON, b'{"code":"ENOENT","message":"open \'/srv/app/data.mmdb\'","name":"Error"}',
     UNAVAILABLE, "once", "try again"),
    (502, HTML, PAGE, UNAVAILABLE, "yes", "try again"),
    (503, HTML, PAGE, UNAVAILABLE, "yes", "try again"),
    (504, HTML, PAGE, UNAVAILABLE, "yes", "try again"),
    (520, HTML, PAGE, UNAVAILABLE, "yes", "try again"),
    (524, HTML, PAGE, UNAVAILABLE, "later", "ask for less"),
    (200, HTML, PAGE, UNAVAILABLE, "once", "try again"),
    (200, STREAM, b'event: error\ndata: {"code":422}\n\n', UNAVAILABLE, "once", "try again"),
)
# fmt: on


def _body(row: Row) -> Mapping[str, Any]:
    for entry in error_classes().values():
        if entry["body"]["status"] == row.status:
            assert entry["http"] == row.http
            body: Mapping[str, Any] = entry["body"]
            return body
    return {
        "data": None,
        "code": row.http,
        "name": "UnlistedError",
        "status": row.status,
        "message": WORDS,
        "readableMessage": f"UnlistedError: {WORDS}",
    }


async def failure(status: int, headers: Mapping[str, str], body: object) -> ToolError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ToolError) as failed:
        await fetched(status, headers, data)
    assert_for_a_model(failed.value)
    return failed.value


@each("row", TABLE)
@requirement("upstream.errors", "upstream.retry")
async def test_each_status_of_the_table(row: Row) -> None:
    error = await failure(row.http, JSON, _body(row))
    assert (error.code, retry(error), error.http_status) == (row.code, row.retry, row.http)
    assert row.remedy in error.message
    assert (f'The service says: "{WORDS}"' in error.message) == row.quoted


@each(("http", "headers", "body", "code", "again", "does"), WITHOUT_ENVELOPE)
@requirement("upstream.errors", "upstream.retry")
async def test_answers_without_an_envelope(
    http: int, headers: Mapping[str, str], body: bytes, code: str, again: str, does: str
) -> None:
    error = await failure(http, headers, body)
    assert (error.code, retry(error)) == (code, again)
    assert error.http_status == (None if http == HTTPStatus.OK else http)
    assert does in error.message
    assert "The service says" not in error.message
    assert not any(word in json.dumps(error.as_error()) for word in ("/srv", "ENOENT", "Cloudflare", "Ray ID", "stout"))


@requirement("upstream.errors")
def test_the_table_has_every_class_of_the_server_and_every_rule() -> None:
    statuses = {row.status for row in TABLE}
    assert {entry["body"]["status"] for entry in error_classes().values()} <= statuses
    assert set(RULES) <= statuses | {row.http for row in TABLE} | {http for http, *_ in WITHOUT_ENVELOPE}
    assert len(statuses) == len(TABLE)


@each("row", TABLE)
@requirement("upstream.errors")
async def test_an_error_inside_a_200_is_the_same_error(row: Row) -> None:
    inside = await failure(200, JSON, _body(row))
    assert inside.as_error() == (await failure(row.http, JSON, _body(row))).as_error()


_PAGE_WORDS = r"(?:the|a|this|another|smaller|public) page\b|\bsite\b|address|selector"
_SEARCH_WORDS = r"search|quer(?:y|ies)|results?\b|filters?\b|no page content"
_SELECTORS = {"targetSelector": "target_selector", "waitForSelector": "wait_for_selector"}


@each(
    ("failures", "of_others"),
    [
        (RESPONSES["search"].failures, _PAGE_WORDS),
        (RESPONSES["reader"].failures, _SEARCH_WORDS),
        (Failures(), f"{_PAGE_WORDS}|{_SEARCH_WORDS}"),  # of a further operation
    ],
)
@requirement("upstream.errors", "upstream.retry")
def test_no_message_is_about_another_operation(failures: Failures, of_others: str) -> None:
    rows: list[tuple[int, Any, str, str]] = [(row.http, {"status": row.status}, row.code, row.retry) for row in TABLE]
    rows += [(http, None, code, again) for http, _, _, code, again, _ in WITHOUT_ENVELOPE if http != HTTPStatus.OK]
    rows += [(422, refusal("Navigation timeout of 15000 ms exceeded"), UNAVAILABLE, "once")]
    rows += [(422, refusal("Recv failure: Connection reset by peer"), UNAVAILABLE, "once")]
    rows += [(422, refusal("Failed to process the page: Expected name"), "upstream_rejected", "no")]
    rows += [(422, refusal("No content available with target selector #x"), "upstream_rejected", "no")]
    for http, body, code, again in rows:
        error = upstream_failure(http, body, None, failures=failures)
        assert (error.code, retry(error)) == (code, again), (http, body)
        ours, _, _ = error.message.partition(" The service says: ")
        about_pages = (body or {}).get("status") in RULES  # whichever operation read the page, or searched
        assert about_pages or not re.search(of_others, ours, re.IGNORECASE), (http, body, ours)


@pytest.mark.parametrize("mode", ENDPOINTS)
@requirement("upstream.errors")
def test_an_error_of_a_selector_names_the_argument_in_a_search_too(mode: str) -> None:
    body = refusal("Failed to process the page: Expected name")
    error = upstream_failure(422, body, None, RESPONSES[mode].failures, MessageContext(names=_SELECTORS))
    assert error.message.startswith("target_selector or wait_for_selector: is no CSS selector")


@requirement("upstream.errors")
def test_a_rule_of_an_operation_replaces_only_that_of_its_own_status() -> None:
    failures = RESPONSES["search"].failures
    message = upstream_failure(422, {"status": 42205}, None, failures=failures).message
    assert message == "A service behind the search failed; try again."
    assert upstream_failure(400, {"status": 422}, None, failures=failures).code == "bad_request"  # an HTTP status


@requirement("upstream.errors")
async def test_internals_of_a_500_never_reach_the_model() -> None:
    recording = load_recordings()["s-upstream-quota"]
    error = await failure(500, recording.headers, recording.body)
    assert not any(word in json.dumps(error.as_error()) for word in ("127.0.0.1", "credits", "config", "dispatcher"))


# 422, whose meaning depends on its text.


def refusal(text: str, **changes: Any) -> dict[str, Any]:
    name = "AssertionFailureError"
    envelope = {"data": None, "code": 422, "name": name, "status": 42206, "message": text}
    return {**envelope, "readableMessage": f"{name}: {text}", **changes}


@pytest.mark.parametrize(
    "text",
    [
        "Failed to goto https://a.example/: TimeoutError: Navigation timeout of 15000 ms exceeded",
        "Failed to goto https://a.example/: Error: net::ERR_CONNECTION_REFUSED at https://a.example/",
        "Failed to goto https://a.example/: Error: net::ERR_CONNECTION_RESET at https://a.example/",
        "Failed to goto https://a.example/: Error: net::ERR_TIMED_OUT at https://a.example/",
        "Failed to goto https://a.example/: Error: net::ERR_ADDRESS_UNREACHABLE at https://a.example/",
        "Failed to goto https://a.example/: Error: net::ERR_EMPTY_RESPONSE at https://a.example/",
        "Failed to connect to a.example port 443: Could not connect to server",
        "Operation timed out after 3000 milliseconds with 0 bytes received",
        "Recv failure: Connection reset by peer",
        "Empty reply from server",
        "SSL connection timeout",
        "Timeout was reached",
    ],
)
@requirement("upstream.errors", "upstream.retry")
async def test_slow_or_unreachable_page_is_retried_once(text: str) -> None:
    error = await failure(422, JSON, refusal(text))
    assert (error.code, retry(error)) == ("upstream_unavailable", "once")
    assert "try again later or use another source" in error.message
    assert text.rpartition("Error: ")[2] in error.message


@pytest.mark.parametrize(
    "text",
    [
        "Failed to goto https://a.example/: Error: net::ERR_TOO_MANY_REDIRECTS at https://a.example/",
        "Failed to goto https://a.example/: Error: net::ERR_CERT_DATE_INVALID at https://a.example/",
        "Failed to goto https://a.example/: Error: net::ERR_SSL_PROTOCOL_ERROR at https://a.example/",
        "Failed to goto https://a.example/: Error: net::ERR_NAME_NOT_RESOLVED at https://a.example/",
        "Failed to goto https://a.example/: Error: net::ERR_ABORTED at https://a.example/net::ERR_TIMED_OUT",
        "SSL certificate problem: certificate has expired",
        "TLS connect error: error:0A000438:SSL routines::tlsv1 alert internal error",
        "No content available for URL https://connect.example/?connection=refused with target selector #x",
        "No content available for URL https://a.example/ with target selector .timeout exceeded",
        "Failed to interpret https://timeout.example/bin: unexpected content type application/octet-stream",
        "Failed to process the page: Expected name, found [",
        "Could not resolve host: connect.example",
    ],
)
@requirement("upstream.errors", "upstream.retry")
async def test_permanent_failure_of_a_page_is_not_retried(text: str) -> None:
    error = await failure(422, JSON, refusal(text))
    assert (error.code, retry(error)) == ("upstream_rejected", "no")
    assert "use another source" in error.message
    assert text.replace("Error: net", "net") in error.message


@pytest.mark.parametrize("text", ["No search results available for query foo", "No search results available"])
@requirement("upstream.errors", "content.search")
async def test_empty_search_is_no_failure(text: str) -> None:
    answer = json.dumps(refusal(text)).encode()
    outcome = await fetched(422, JSON, answer, "search")
    assert isinstance(outcome, ToolOutput)
    assert outcome.state == {"results": []}
    with pytest.raises(UpstreamRejected):
        await fetched(422, JSON, answer)  # for a page it is a failure


@requirement("upstream.errors")
async def test_a_message_that_is_no_text_is_a_failure() -> None:
    answer = b'{"message": %b%b}' % (b"[" * 1_000, b"]" * 1_000)
    with pytest.raises(UpstreamRejected):
        await fetched(422, JSON, answer, "search")


@requirement("upstream.errors")
async def test_a_refused_value_that_is_no_plain_one_is_not_shown() -> None:
    answer = b'{"readableMessage": "ParamValidationError(num): Rejected by validator.", "value": %b%b}'
    with pytest.raises(BadRequest, match="num: its value is not accepted"):
        await fetched(400, JSON, answer % (b"[" * 1_000, b"]" * 1_000))


# Texts of the upstream.


@requirement("upstream.errors")
async def test_message_contains_the_time_that_unblocks_a_page() -> None:
    text = "This URL has failed too often. Blocked until Sat Nov 21 2026 12:00:00 GMT+0000"
    body = {
        **error_classes()["OperationNotAllowedError"]["body"],
        "readableMessage": f"OperationNotAllowedError: {text}",
    }
    assert f'"{text}"' in (await failure(403, JSON, body)).message


@pytest.mark.parametrize(
    ("readable", "shown"),
    [
        ("ParamValidationError(num): Rejected by validator.", "num: its value is not accepted"),
        ("ParamValidationError(undefined): No URL provided", "No URL provided"),
        ("ParamValidationError(targetSelector[0]): TypeError: bad", "targetSelector[0]: bad"),
        ("ParamValidationError(url): Error: ENOTFOUND", "url: ENOTFOUND"),
        ('Not "one" of\nthese:\t\x00\u2028"two"', "Not 'one' of these: 'two'"),
        ("long " * 200, ("long " * 200)[:300]),
    ],
)
@requirement("upstream.errors")
async def test_upstream_message_is_one_quoted_line_without_class_names(readable: str, shown: str) -> None:
    body = {"data": None, "code": 400, "status": 40001, "message": "40001", "readableMessage": readable}
    assert (await failure(400, JSON, body)).message.endswith(f' The service says: "{shown}"')


@pytest.mark.parametrize("readable", [None, 7, "", "  ", "ParamValidationError", ["a"]])
@requirement("upstream.errors")
async def test_without_an_upstream_message_only_our_sentence_is_shown(readable: Any) -> None:
    body = {"data": None, "code": 400, "status": 40001, "message": "secret internals", "readableMessage": readable}
    error = await failure(400, JSON, body)
    assert "says" not in error.message
    assert "secret" not in error.message


# Retry-After.


def _in(seconds: int) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("header", "body", "seconds"),
    [
        ("17", {}, 17),
        (" 17 ", {"retryAfter": 9}, 17),
        ("0", {"retryAfter": 9}, 0),
        (format_datetime(_in(3600), usegmt=True), {"retryAfter": 9}, 3600),
        ("Wed, 21 Oct 2015 07:28:00 GMT", {}, 0),
        (None, {"retryAfter": 9, "retryAfterDate": "2015-10-21T07:28:00.000Z"}, 9),
        (None, {"retryAfter": 2.5}, 2.5),
        (None, {"retryAfter": -3}, 0),
        (None, {"retryAfterDate": _in(3600).isoformat(timespec="milliseconds").replace("+00:00", "Z")}, 3600),
        (None, {"retryAfterDate": "2015-10-21T07:28:00.000Z"}, 0),
        ("soon", {"retryAfter": 9}, 9),
        ("soon", {}, None),
        ("\u00b2", {}, None),
        ("Wed, 21 Oct 2015 07:28:00", {}, None),
        (None, {"retryAfter": True, "retryAfterDate": 7}, 7),
        (None, {"retryAfter": None, "retryAfterDate": "tomorrow"}, None),
        (None, {}, None),
        ("9" * 400, {}, 1e9),
        (None, {"retryAfter": 10**400}, 1e9),
    ],
    ids=itertools.count(),  # some texts contain the current second
)
@requirement("upstream.errors", "upstream.retry")
async def test_retry_after_is_read_from_header_or_body(header: str | None, body: Any, seconds: float | None) -> None:
    known = error_classes()["TooManyRequestsError"]["body"]
    error = await failure(429, JSON | ({"Retry-After": header} if header else {}), known | body)
    assert (error.code, retry(error)) == ("rate_limited", "yes")
    assert error.retry_after == (
        None if seconds is None else pytest.approx(seconds, abs=1800 if seconds == 3600 else 0)
    )


@requirement("upstream.errors", "upstream.retry")
async def test_retry_after_is_read_without_an_envelope() -> None:
    assert (await failure(429, HTML | {"Retry-After": "17"}, PAGE)).retry_after == 17
    assert (await failure(503, HTML | {"Retry-After": "17"}, PAGE)).retry_after == 17


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40) | st.datetimes().map(str)
BODIES = (
    st.none()
    | st.lists(SCALARS)
    | st.dictionaries(
        st.sampled_from(["code", "status", "name", "message", "readableMessage", "retryAfter", "retryAfterDate"]),
        SCALARS,
    )
)


@example(100, {"retryAfter": float("nan")}, None)
@given(st.integers(100, 999), BODIES, st.none() | st.text(max_size=40) | st.datetimes().map(format_datetime))
@requirement("upstream.errors")
def test_any_refusal_is_a_typed_error_with_a_sentence(http: int, body: Any, header: str | None) -> None:
    error = upstream_failure(http, body, header)
    assert error.message.isprintable()
    assert error.retryable >= bool(error.max_retries)
    assert error.retry_after is None or error.retry_after >= 0


HOSTILE_MESSAGES = ("a", "A", "a://", "Error(", "AError", "Error(a ", "net::ERR_A", " with target selector ", " ", "\n")


@pytest.mark.parametrize("pump", HOSTILE_MESSAGES)
@requirement("upstream.errors", "loop.answers")
def test_long_message_is_parsed_in_linear_time(pump: str) -> None:
    body = {"status": 42206, "readableMessage": pump * (1_000_000 // len(pump)), "retryAfter": "9" * 1_000_000}
    began = time.process_time()
    error = upstream_failure(422, body, None)
    assert time.process_time() - began < 0.5  # some 1 ms; a quadratic pattern takes hours
    assert len(error.message) < 550


async def _never(_: httpx.Request) -> httpx.Response:
    await asyncio.sleep(3_600)
    raise AssertionError


@pytest.mark.parametrize("answer", [serving(b"{}", 503), serving(b"{}", 422), _never], ids=["503", "422", "never"])
@pytest.mark.parametrize("ttl_s", [0, 60])
@pytest.mark.parametrize(
    "asked", [{"url": "https://a.example/"}, {"urls": ["https://a.example/", "https://b.example/"]}]
)
@requirement("loop.answers")
async def test_failed_calls_leave_nothing_for_the_garbage_collector(
    asked: dict[str, Any], ttl_s: int, answer: Answer
) -> None:
    """Some hundred objects for each refused response made one collection block the event loop for 0.7 s."""
    options = {"retry": RetryOptions(1, 0.001, 0.001), "cache": CacheOptions(ttl_s=ttl_s)}
    answering = ToolsOverTransport(answer, options=options)

    async def call() -> None:
        for cancel_after_s in (None, 0.01):  # one call ends at its deadline, and one is cancelled before that
            calling = asyncio.create_task(answering.output(**asked, seconds=0.05))
            await asyncio.wait([calling], timeout=cancel_after_s)
            calling.cancel()
            await asyncio.wait([calling])
            del calling
        await asyncio.sleep(0.005)

    assert not await left_for_the_garbage_collector(call)
