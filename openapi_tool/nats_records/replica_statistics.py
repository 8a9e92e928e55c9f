"""Statistics of all replicas, over NATS: each replica answers requests for its own, and commands gather them.

A command such as `openapi-tool top` publishes a request on STATS_SUBJECT. Every replica replies with a JSON object
(`telemetry/snapshots.py`) on the subject that the request names.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg

from openapi_tool.concurrency.background import in_background
from openapi_tool.concurrency.cancellation import cancel_until_ended
from openapi_tool.nats_client.connection import OUTAGE
from openapi_tool.nats_records.statistics_schema import schema_problem
from openapi_tool.tools.wording import short

log = logging.getLogger(__name__)

STATS_SUBJECT = "openapi_tool.stats"
STATS_REPLIES = f"{STATS_SUBJECT}.*"
"""Subjects of replies; not inboxes, as a replica may have no permission to publish to those of other clients."""

MAX_REPLICAS = 500  # whose answers are read
_MAX_PER_SECOND = 20  # replies: more than dashboards need, too few to slow down calls
_RESUBSCRIBE_AFTER_S = 60.0  # a failure to answer, in addition to the second between two subscriptions


@asynccontextmanager
async def answering_stats(client: Client, snapshot: Callable[[], Mapping[str, Any]]) -> AsyncIterator[None]:
    """Answer requests for statistics with `snapshot`; without permission `top` does not see this replica."""
    task = in_background(_answer_requests(client, snapshot), "statistics")
    try:
        yield
    finally:
        await cancel_until_ended(task)


async def _answer_requests(client: Client, snapshot: Callable[[], Mapping[str, Any]]) -> None:
    """Answer until cancelled.

    Each second a new subscription takes `_MAX_PER_SECOND` messages at most, so that the server delivers no flood.
    """
    while True:
        next_at = time.monotonic() + 1.0
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
            next_at += _RESUBSCRIBE_AFTER_S
        await asyncio.sleep(max(0.0, next_at - time.monotonic()))


def _wanted_subject(message: Msg) -> str:
    """Return the subject on which to answer: the body of the request, else its reply subject.

    If the sender uses another account of NATS, the server has replaced the reply subject. The command line of an
    earlier version sends no body.
    """
    if message.data:
        return message.data.decode("ascii", "replace")
    return message.reply


def _is_reply_subject(subject: str) -> bool:
    """Return whether a subject is one that `gather_stats` makes; others may be denied, or have any bytes."""
    prefix, _, token = subject.rpartition(".")
    return prefix == STATS_SUBJECT and token.isascii() and token.isalnum()


async def gather_stats(client: Client, within_s: float, protocol: str | None = None) -> list[dict[str, Any]]:
    """Return the statistics of all replicas that answer within `within_s` seconds, sorted by instance.

    With `protocol`, the version of a kernel's protocol, only of replicas that serve it, or do not say which: two
    kernels may share a NATS. If several replies have the same instance (name of a replica), the first one counts, and
    gets their number as `answers`. Raises nats.errors.Error.
    """
    reply_subject = f"{STATS_SUBJECT}.{secrets.token_hex(8)}"
    replies = await client.subscribe(reply_subject)
    by_instance: dict[str, dict[str, Any]] = {}
    try:
        await client.publish(STATS_SUBJECT, reply_subject.encode(), reply_subject)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while len(by_instance) < MAX_REPLICAS:
                    message = await replies.next_msg(timeout=within_s)
                    statistics = _decoded(message.data)
                    if not statistics:
                        continue
                    if protocol is not None and statistics.get("protocol", protocol) != protocol:
                        continue
                    first = by_instance.setdefault(statistics["instance"], statistics)
                    first["answers"] = first.get("answers", 0) + 1
    finally:
        await replies.unsubscribe()
    return [by_instance[name] for name in sorted(by_instance)]


def _decoded(data: bytes) -> dict[str, Any]:
    """Return the statistics in a message; {} for a message that is no reply, such as the server's "no responders".

    A replica of another version, or any client with permission to publish here, may have sent it. Of a reply that does
    not fit the schema, only the instance is left, with the reason as `unreadable`.
    """
    try:
        value = orjson.loads(data)
    except ValueError:
        return {}
    if not isinstance(value, dict) or not isinstance(value.get("instance"), str):
        return {}
    value.pop("answers", None)  # only `gather_stats` sets it
    problem = schema_problem(value)
    if problem is not None:
        return {"instance": short(value["instance"]), "unreadable": problem}
    return value
