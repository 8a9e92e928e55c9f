"""NATS connection, one per kernel: doorbells (protocol section 6), and statistics of all replicas for `top`."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import nats.errors
import nats.js.errors
import orjson
from nats.aio.client import Client
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tenacity import RetryCallState, stop_after_delay, wait_exponential_jitter

from openapi_tool.bus.client import RECONNECT_WAIT_S, BusClient
from openapi_tool.bus.connection_errors import describe_jetstream_error
from openapi_tool.bus.options import BusOptions
from openapi_tool.concurrency import in_background, retried
from openapi_tool.protocol.command import Wakeup
from openapi_tool.protocol.errors import NotStored, Unavailable
from openapi_tool.protocol.jsontext import is_deeper_than
from openapi_tool.tools.problems import short

log = logging.getLogger(__name__)

_PING_INTERVAL_S = 10
_CLOSE_TIMEOUT_S = 3.0
_OUTAGE = (nats.errors.Error, OSError)  # also "no responders" and "no stream": a stream may have no leader


@asynccontextmanager
async def connected(options: BusOptions) -> AsyncIterator[BusClient]:
    """Connect, and reconnect after any outage; wait while NATS is unavailable at the start.

    Raises Unavailable if TLS is required and no server offers it, or with `once` if the attempt fails.
    """
    client = await _connect(options)
    try:
        yield client
    finally:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):  # an unresponsive server may never accept the pending writes
                await client.close()
        except _OUTAGE as error:
            log.info(
                "cannot close the NATS connection gracefully",
                extra={"action": "nats.connection_dropped", "error": f"{type(error).__name__}: {error}"},
            )


@contextmanager
def outage_as_unavailable(where: str = "") -> Iterator[None]:
    """Translate errors of NATS and of the network into Unavailable."""
    try:
        yield
    except _OUTAGE as error:
        raise Unavailable(describe_jetstream_error(error, where)) from error


async def _connect(options: BusOptions) -> BusClient:
    client = BusClient(options)

    async def log_disconnect() -> None:
        if not client.is_closed and not options.once:
            log.warning("lost the connection to NATS; reconnecting", extra={"action": "nats.disconnected"})

    async def log_reconnect() -> None:
        log.info("reconnected to NATS", extra={"action": "nats.reconnected"})

    try:
        await client.connect(
            list(options.nats.servers),
            name=options.name,
            connect_timeout=5,
            allow_reconnect=not options.once,
            max_reconnect_attempts=1 if options.once else -1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # a float is fine
            ping_interval=_PING_INTERVAL_S,
            inbox_prefix=options.nats.inbox_prefix,
            error_cb=client.on_error,
            disconnected_cb=log_disconnect,
            reconnected_cb=log_reconnect,
        )
    except asyncio.CancelledError:
        client.abort()  # nats-py would leave the socket of a login under way open
        raise
    except _OUTAGE as error:
        if not options.once:
            raise Unavailable(describe_jetstream_error(error, where="")) from error
        client.reported_error = client.reported_error or error
        if client.last_error is not None:  # an attempt was made
            await client.close()  # nats-py would leave the session of a WebSocket open
        raise Unavailable(f"cannot connect to {client.outage}") from error
    return client


_RETRY_LIMIT_S = 3.0  # in the slot of the call; then its command is requeued

_WAIT = wait_exponential_jitter(multiplier=0.1, max=1.0, jitter=0.1)
_TIMEOUT_S = 2.0  # of one attempt
_PERMANENT = (nats.errors.BadSubjectError, nats.errors.MaxPayloadError, nats.js.errors.BadRequestError)


_FREE = "free its disk or raise the limit"
_NOT_STORED = {
    **dict.fromkeys((10002, 10023, 10047, 10077), _FREE),  # a limit of account, server (its disk) or stream
    10109: "delete the stream, which is sealed, so that it is created again",
}
"""What to do, by JetStream's error code; some have the status 400. Source: nats-server, server/errors.json."""


@dataclass(slots=True)
class WakeupPublisher:
    """Publishes doorbells; if that is impossible, the kernel's periodic scan of the inbox finds the result.

    `outage` is why JetStream stores none, empty if it does; `changed` is called on every change. `stream` returns the
    name of the command stream, which stores them; empty while it is unknown.
    """

    client: BusClient
    stream: Callable[[], str] = field(default=str)
    changed: Callable[[], None] = field(default=lambda: None, init=False)
    outage: str = field(default="", init=False)
    _unsent: Wakeup | None = field(default=None, init=False)

    async def publish(self, wakeup: Wakeup) -> bool:
        """Return False if NATS refuses a doorbell permanently.

        Raises Unavailable in an outage, NotStored if JetStream stores none: the command is then requeued, and its next
        delivery publishes again.
        """
        try:
            return await retried(
                lambda: self._publish(wakeup),
                on=_OUTAGE,
                wait=_WAIT,
                stop=stop_after_delay(_RETRY_LIMIT_S),
                before_sleep=_log_retry,
            )
        except _OUTAGE as error:
            if self.outage:
                raise NotStored(f"NATS: cannot publish the doorbell: {self.outage}") from error
            raise Unavailable(f"NATS: cannot publish the doorbell: {type(error).__name__}: {error}") from error

    async def _publish(self, wakeup: Wakeup) -> bool:
        try:
            await self.client.publish_to_stream(wakeup.subject, wakeup.body, dict(wakeup.headers), _TIMEOUT_S)
        except _OUTAGE as error:
            if why := self._why_not_stored(error):
                self._unsent = wakeup
                self._set_outage(why)
                raise
            if not isinstance(error, _PERMANENT):
                raise
            log.warning(
                "cannot publish the doorbell; the kernel's inbox scan will find the result",
                extra={
                    "action": "doorbell.failed",
                    "subject": short(wakeup.subject),
                    "error": f"{type(error).__name__}: {error}",
                },
            )
            return False
        self._set_outage("")
        return True

    def _why_not_stored(self, error: Exception) -> str:
        """Return why JetStream stores no message at all, empty if it may store others."""
        stream = self.stream() or "the command stream"
        if isinstance(error, nats.js.errors.APIError):
            reason, remedy = error.description or "", _NOT_STORED.get(error.err_code or 0)
            if remedy is None or "per subject" in reason:
                return ""
            return f"JetStream stores no message in {stream}: {reason}; {remedy}"
        if isinstance(error, nats.errors.TimeoutError) and self.client.is_connected:
            return (
                f"JetStream confirms no doorbell in {stream}; after a write error, as of a full disk, restart "
                "nats-server (see its log); else check that this stream captures doorbells"
            )
        return ""

    def _set_outage(self, why: str) -> None:
        changed, self.outage = self.outage != why, why
        if not why:
            self._unsent = None
        if changed:
            self.changed()

    async def problem(self) -> str:
        """Return `outage`, after another attempt to publish a doorbell that failed: a copy does no harm."""
        if self._unsent is not None and self.client.is_connected:
            with suppress(*_OUTAGE):
                await self._publish(self._unsent)
        return self.outage


def _log_retry(state: RetryCallState) -> None:
    outage = state.outcome and state.outcome.exception()
    log.debug("cannot publish the doorbell; retrying: %s", outage, extra={"action": "doorbell.retried"})


INSTANCE = f"{socket.gethostname()}-{os.getpid()}"
"""Name of this process among the replicas."""

STATS_SUBJECT = "openapi_tool.stats"
STATS_REPLIES = f"{STATS_SUBJECT}.*"  # so that a replica needs no permission to publish to inboxes of other clients
MAX_REPLICAS = 500
_RESUBSCRIBE_AFTER_S = 60.0
_MAX_PER_SECOND = 20  # replies: more than dashboards need, too few to slow down calls
_MAX_PATH_CHARS = 100  # of an invalid field
_MAX_DEPTH = 12  # of nested objects and arrays in a reply

T = TypeVar("T")
_Name = Annotated[str, Field(max_length=1_024)]
_Text = Annotated[str, Field(max_length=4_000)]
_Rows = Annotated[list[T], Field(max_length=200)]
_Sequences = Annotated[list[int], Field(max_length=10_000)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True)


class _DependencyStats(_StrictModel):
    ok: bool = True
    for_s: float | None = None
    reason: _Text | None = None


class _HealthStats(_StrictModel):
    dependencies: dict[str, _DependencyStats] = {}
    clock_offset_s: float | None = None
    budgets_by_last_known_state: _Text = ""


class _KernelStats(_StrictModel):
    protocol: _Name
    pending: int
    unacknowledged: int
    max_unacknowledged: int


class _CallStats(_StrictModel):
    protocol: _Name = ""
    project: _Name
    tool: _Name
    calls: int


class _ErrorStats(_CallStats):
    error_code: _Name


class _WarningStats(_StrictModel):
    action: _Name
    count: int
    ago_s: float | None = None
    message: _Text
    project_id: _Name | None = None
    variable: _Name | None = None


class _LimitStats(_StrictModel):
    variable: _Name | None = None
    endpoint: _Name | None = None
    pool: _Name | None = None
    not_set: bool = False
    used: float | None = None
    used_tokens: float | None = None
    paused_s: float | None = None
    running: int | None = None
    refused: int | None = None
    waiting: int | None = None
    waiting_by_project: dict[str, int] | None = None


class _KeyStats(_StrictModel):
    variable: _Name | None = None
    state: _Name | None = None
    tried_again_s: float | None = None


class _AccountStats(_StrictModel):
    share: float | None = None


class _WorkStats(_StrictModel):
    durable: _Name
    running: _Sequences = []
    waiting: _Sequences = []


class _ReplicaStats(_StrictModel):
    """Fields that the CLI evaluates; others are only displayed."""

    instance: Annotated[str, Field(max_length=256)]
    work: _Rows[_WorkStats] = []
    durables: _Rows[str] = []
    waiting: float | None = None
    slots: float | None = None
    kernels: _Rows[_KernelStats] = []
    waiting_for_memory: float | None = None
    log_lines_dropped: int | None = None
    phases_p95_ms: dict[str, float | None] = {}
    health: _HealthStats = _HealthStats()
    tools: _Rows[_CallStats] = []
    errors: _Rows[_ErrorStats] = []
    warnings: _Rows[_WarningStats] = []
    last: _Rows[dict[str, Any]] = []
    limits: dict[str, Any] = {}
    upstream_limits: _Rows[_LimitStats] = []
    upstream_keys: _Rows[_KeyStats] = []
    budgets: _Rows[_AccountStats] = []


@asynccontextmanager
async def answering_stats(client: Client, snapshot: Callable[[], Mapping[str, Any]]) -> AsyncIterator[None]:
    """Answer requests for statistics with `snapshot`; without permission `top` does not see this replica."""
    task = in_background(_answer_requests(client, snapshot), "statistics")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _answer_requests(client: Client, snapshot: Callable[[], Mapping[str, Any]]) -> None:
    """Subscribe anew every second, to `_MAX_PER_SECOND` messages: the server then does not deliver a flood."""
    while True:
        began = time.monotonic()
        try:
            subscription = await client.subscribe(STATS_SUBJECT)
            await subscription.unsubscribe(_MAX_PER_SECOND)
            async for message in subscription.messages:
                if _is_reply_subject(message.reply):
                    with suppress(*_OUTAGE):  # a later reply may succeed
                        await client.publish(message.reply, orjson.dumps(snapshot()))
        except Exception as error:  # also a defect: if this task ended, nobody would get an answer again
            defect = None if isinstance(error, _OUTAGE) else error
            log.warning(
                "cannot answer `openapi-tool top`: %s", error, exc_info=defect, extra={"action": "stats.not_answered"}
            )
            began += _RESUBSCRIBE_AFTER_S  # prolongs the sleep below
        await asyncio.sleep(max(0.0, began + 1.0 - time.monotonic()))


def _is_reply_subject(subject: str) -> bool:
    """Return whether a subject is one that `gather_stats` makes; others may be denied, or have any bytes."""
    prefix, _, token = subject.rpartition(".")
    return prefix == STATS_SUBJECT and token.isascii() and token.isalnum()


async def gather_stats(client: Client, within_s: float) -> list[dict[str, Any]]:
    """Return the statistics of all replicas that answer within `within_s` seconds, sorted by instance.

    Of several replies of one instance the first counts, whose `answers` is their number. Raises nats.errors.Error.
    """
    inbox = f"{STATS_SUBJECT}.{secrets.token_hex(8)}"
    replies = await client.subscribe(inbox)
    found: dict[str, dict[str, Any]] = {}
    try:
        await client.publish(STATS_SUBJECT, b"", inbox)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while len(found) < MAX_REPLICAS:
                    value = _decoded((await replies.next_msg(timeout=within_s)).data)
                    if value:
                        first = found.setdefault(value["instance"], value)
                        first["answers"] = first.get("answers", 0) + 1
    finally:
        await replies.unsubscribe()
    return [found[name] for name in sorted(found)]


def _decoded(data: bytes) -> dict[str, Any]:
    """Decode a reply, {} for any other message; reduce an invalid one to the instance, with the reason as `unreadable`.

    A replica of another version, or any client with permission to publish here, may have sent it.
    """
    try:
        value = orjson.loads(data)
    except ValueError:
        return {}
    if not isinstance(value, dict) or not isinstance(value.get("instance"), str):
        return {}  # such as the server's message "no responders"
    value.pop("answers", None)  # only `gather_stats` sets it
    return value if (why := _problem(value)) is None else {"instance": short(value["instance"]), "unreadable": why}


def _problem(value: Mapping[str, Any]) -> str | None:
    if is_deeper_than(value, _MAX_DEPTH + 1):  # the innermost values are a level, too
        return f"it is nested more than {_MAX_DEPTH} deep"
    try:
        _ReplicaStats.model_validate(value)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        return f"{'.'.join(map(str, first['loc']))[:_MAX_PATH_CHARS]}: {first['msg']}"
    return None
