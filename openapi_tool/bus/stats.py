"""Statistics of all replicas, by request and reply: `openapi-tool top` asks, every replica answers.

A replica answers only on subjects below `SUBJECT`, so that its user needs no permission for the inboxes of others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

import nats.errors
import orjson
from nats.aio.client import Client
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openapi_tool.concurrency import in_background
from openapi_tool.tools.problems import short

log = logging.getLogger(__name__)

INSTANCE = f"{socket.gethostname()}-{os.getpid()}"
"""Name of this process among the replicas, in spans, metrics over OTLP, lease records and `top`."""
SUBJECT = "openapi_tool.stats"
ANSWERS = f"{SUBJECT}.*"
MAX_REPLICAS = 500
_RESUBSCRIBE_AFTER_S = 60.0
_MAX_PER_SECOND = 20
"""Limit of requests that get a reply: more than dashboards send, too few to slow down calls."""
_MAX_PATH_CHARS, _MAX_DEPTH = 100, 12

_Name = Annotated[str, Field(max_length=1_024)]
_MAX_ROWS, _MAX_HELD = Field(max_length=200), Field(max_length=10_000)


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True)


class _Dependency(_StrictModel):
    ok: bool = True
    reason: Annotated[str, Field(max_length=4_000)] | None = None


class _Health(_StrictModel):
    dependencies: dict[str, _Dependency] = {}
    clock_offset_s: float | None = None


class _Kernel(_StrictModel):
    protocol: _Name
    pending: int
    unacknowledged: int
    max_unacknowledged: int


class _Row(_StrictModel):
    protocol: _Name = ""
    project: _Name
    tool: _Name
    error_code: _Name | None = None
    calls: int


class _Warning(_StrictModel):
    action: _Name
    count: int
    ago_s: float | None = None
    message: Annotated[str, Field(max_length=4_000)]
    project_id: _Name | None = None


class _Limit(_StrictModel):
    pool: _Name | None = None
    not_set: bool = False
    used: float | None = None
    used_tokens: float | None = None
    paused_s: float | None = None
    running: int | None = None
    refused: int | None = None
    waiting: int | None = None
    waiting_by_project: dict[str, int] | None = None


class _Key(_StrictModel):
    tried_again_s: float | None = None


class _Account(_StrictModel):
    share: float | None = None


class _Work(_StrictModel):
    durable: _Name
    running: Annotated[list[int], _MAX_HELD] = []
    waiting: Annotated[list[int], _MAX_HELD] = []


class _Statistics(_StrictModel):
    """Fields that commands compute with, so their types are checked; other fields are only displayed."""

    instance: Annotated[str, Field(max_length=256)]
    work: Annotated[list[_Work], _MAX_ROWS] = []
    durables: Annotated[list[str], _MAX_ROWS] = []
    waiting: float | None = None
    slots: float | None = None
    kernels: Annotated[list[_Kernel], _MAX_ROWS] = []
    waiting_for_memory: float | None = None
    phases_p95_ms: dict[str, float | None] = {}
    health: _Health = _Health()
    tools: Annotated[list[_Row], _MAX_ROWS] = []
    errors: Annotated[list[_Row], _MAX_ROWS] = []
    warnings: Annotated[list[_Warning], _MAX_ROWS] = []
    last: Annotated[list[dict[str, Any]], _MAX_ROWS] = []
    limits: dict[str, Any] = {}
    upstream_limits: Annotated[list[_Limit], _MAX_ROWS] = []
    upstream_keys: Annotated[list[_Key], _MAX_ROWS] = []
    budgets: Annotated[list[_Account], _MAX_ROWS] = []


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
    """Answer up to `_MAX_PER_SECOND` requests per second. An error concerns only that reply; a later one may succeed.

    Any client with permission to publish on the subject may send requests. The server ends each subscription after
    `_MAX_PER_SECOND`, so it does not deliver the rest of a flood: receiving it would slow down calls.
    """
    while True:
        began = time.monotonic()
        try:
            subscription = await client.subscribe(SUBJECT)
            await subscription.unsubscribe(_MAX_PER_SECOND)
            async for message in subscription.messages:
                if message.reply.startswith(f"{SUBJECT}."):
                    with suppress(nats.errors.Error, OSError):
                        await client.publish(message.reply, orjson.dumps(snapshot()))
        except (nats.errors.Error, OSError) as error:
            log.warning("cannot answer `openapi-tool top`: %s", error, extra={"action": "stats.not_answered"})
            began += _RESUBSCRIBE_AFTER_S  # sleep longer
        await asyncio.sleep(max(0.0, began + 1.0 - time.monotonic()))


async def gather_stats(client: Client, within_s: float) -> list[dict[str, Any]]:
    """Return the statistics of all replicas that answer within `within_s` seconds, sorted by instance.

    Of several replies of one instance the first counts; its field `answers` is their number. Raises nats.errors.Error.
    """
    inbox = f"{SUBJECT}.{secrets.token_hex(8)}"
    replies = await client.subscribe(inbox)
    found: dict[str, dict[str, Any]] = {}
    try:
        await client.publish(SUBJECT, b"", inbox)
        with suppress(TimeoutError, nats.errors.TimeoutError):
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
    """Decode a reply; return only its name and `unreadable` if a value has a wrong type, {} for any other message.

    Such replies come from replicas of another version, or from any client with permission to publish here.
    """
    try:
        value = orjson.loads(data)
    except ValueError:
        return {}
    if not isinstance(value, dict) or not isinstance(value.get("instance"), str):
        return {}  # the server's message "no responders"
    value.pop("answers", None)
    return value if (why := _problem(value)) is None else {"instance": short(value["instance"]), "unreadable": why}


def _problem(value: Mapping[str, Any]) -> str | None:
    if not _is_nested_at_most(value, _MAX_DEPTH):
        return f"it is nested more than {_MAX_DEPTH} deep"
    try:
        _Statistics.model_validate(value)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        return f"{'.'.join(map(str, first['loc']))[:_MAX_PATH_CHARS]}: {first['msg']}"
    return None


def _is_nested_at_most(value: object, depth: int) -> bool:
    if isinstance(value, dict):
        return depth > 0 and all(_is_nested_at_most(each, depth - 1) for each in value.values())
    return not isinstance(value, list) or (depth > 0 and all(_is_nested_at_most(each, depth - 1) for each in value))
