"""Statistics of all replicas for `openapi-tool top`: requested, answered and validated."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, TypeVar

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openapi_tool.concurrency.background import in_background
from openapi_tool.nats_client.connection import OUTAGE
from openapi_tool.protocol.jsontext import is_deeper_than
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

STATS_SUBJECT = "openapi_tool.stats"
STATS_REPLIES = f"{STATS_SUBJECT}.*"  # so that a replica needs no permission to publish to inboxes of other clients
MAX_REPLICAS = 500  # whose answers are read
_RESUBSCRIBE_AFTER_S = 60.0  # a failure to answer
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


class _CallStats(_StrictModel):
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
    lasts: bool | None = None
    project_id: _Name | None = None
    variable: _Name | None = None


class _LimitStats(_StrictModel):
    variable: _Name | None = None
    endpoint: _Name | None = None
    pool: _Name | None = None
    not_set: bool = False
    used: float | None = None
    used_tokens: float | None = None
    estimated_tokens: int | None = None
    paused_s: float | None = None
    running: int | None = None
    refused: int | None = None
    dry_run: bool | None = None
    would_have_waited: int | None = None
    waiting: int | None = None
    waiting_by_project: dict[str, int] | None = None


class _ConfiguredStats(_StrictModel):
    variable: _Name | None = None
    endpoint: _Name | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    dry_run: bool = False


class _KeyStats(_StrictModel):
    variable: _Name | None = None
    endpoint: _Name | None = None
    state: _Name | None = None
    tried_again_s: float | None = None


class _WaitStats(_StrictModel):
    host: _Name = ""
    oldest_s: float = 0.0
    silent_s: float = 0.0


class _AccountStats(_StrictModel):
    share: float | None = None


class _WorkStats(_StrictModel):
    running: _Sequences = []
    waiting: _Sequences = []


class _ReplicaStats(_StrictModel):
    """Fields that the CLI evaluates; others are only displayed."""

    instance: Annotated[str, Field(max_length=256)]
    protocol: _Name = ""
    durable: _Name = ""
    work: _WorkStats = _WorkStats()
    calls: int = 0
    failed: int = 0
    waiting: float | None = None
    slots: float | None = None
    pending: int = 0
    unacknowledged: int = 0
    max_unacknowledged: int = 0
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
    configured_limits: _Rows[_ConfiguredStats] = []
    upstream_keys: _Rows[_KeyStats] = []
    upstream_waits: _Rows[_WaitStats] = []
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
                subject = _wanted_subject(message)
                if _is_reply_subject(subject):
                    with suppress(*OUTAGE):  # a later reply may succeed
                        await client.publish(subject, orjson.dumps(snapshot()))
        except Exception as error:  # also a defect: if this task ended, nobody would get an answer again
            defect = None if isinstance(error, OUTAGE) else error
            log.warning(
                "cannot answer `openapi-tool top`: %s", error, exc_info=defect, extra={"action": "stats.not_answered"}
            )
            began += _RESUBSCRIBE_AFTER_S  # prolongs the sleep below
        await asyncio.sleep(max(0.0, began + 1.0 - time.monotonic()))


def _wanted_subject(message: Msg) -> str:
    """Return the subject that the body names, else the reply subject.

    Between accounts the server replaces reply subjects; the command line of an earlier version sends no body.
    """
    return message.data.decode("ascii", "replace") if message.data else message.reply


def _is_reply_subject(subject: str) -> bool:
    """Return whether a subject is one that `gather_stats` makes; others may be denied, or have any bytes."""
    prefix, _, token = subject.rpartition(".")
    return prefix == STATS_SUBJECT and token.isascii() and token.isalnum()


async def gather_stats(client: Client, within_s: float, protocol: str | None = None) -> list[dict[str, Any]]:
    """Return the statistics of all replicas that answer within `within_s` seconds, sorted by instance.

    With `protocol` only of those that serve this version, or do not say which: two kernels may share a NATS. Of several
    replies of one instance the first counts, whose `answers` is their number. Raises nats.errors.Error.
    """
    inbox = f"{STATS_SUBJECT}.{secrets.token_hex(8)}"
    replies = await client.subscribe(inbox)
    found: dict[str, dict[str, Any]] = {}
    try:
        await client.publish(STATS_SUBJECT, inbox.encode(), inbox)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while len(found) < MAX_REPLICAS:
                    value = _decoded((await replies.next_msg(timeout=within_s)).data)
                    if value and (protocol is None or value.get("protocol", protocol) == protocol):
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
    if problem := _problem(value):
        return {"instance": short(value["instance"]), "unreadable": problem}
    return value


def _problem(value: Mapping[str, Any]) -> str | None:
    if is_deeper_than(value, _MAX_DEPTH + 1):  # the innermost values are a level, too
        return f"it is nested more than {_MAX_DEPTH} deep"
    try:
        _ReplicaStats.model_validate(value)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        return f"{'.'.join(map(str, first['loc']))[:_MAX_PATH_CHARS]}: {first['msg']}"
    return None
