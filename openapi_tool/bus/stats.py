"""Statistics of all replicas, by request and reply: `openapi-tool top` asks, every replica answers.

A replica answers only on subjects below its own, so that its user needs no permission for anybody's inbox.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import nats.errors
import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg

log = logging.getLogger(__name__)

SUBJECT = "openapi_tool.stats"
ANSWERS = f"{SUBJECT}.*"
MAX_REPLICAS = 500
_MOST_A_SECOND = 20
"""Requests that a replica answers; more than people and dashboards send, and few enough to cost calls nothing."""


async def answer_stats(client: Client, snapshot: Callable[[], Mapping[str, Any]]) -> None:
    """Answer requests for statistics from now on, with `snapshot`; without permission `top` does not see this replica.

    An error here concerns `top` alone, so it is logged and calls go on. Anybody may ask who may publish on the subject,
    so requests beyond `_MOST_A_SECOND` get no answer.
    """
    answered: deque[float] = deque(maxlen=_MOST_A_SECOND)

    async def answer(message: Msg) -> None:
        if message.reply.startswith(f"{SUBJECT}."):
            now = time.monotonic()
            if len(answered) == _MOST_A_SECOND and now - answered[0] < 1.0:
                return
            answered.append(now)
            with suppress(nats.errors.Error, OSError):
                await client.publish(message.reply, orjson.dumps(snapshot()))

    try:
        await client.subscribe(SUBJECT, cb=answer)
    except (nats.errors.Error, OSError) as error:
        log.warning("cannot answer `openapi-tool top`: %s", error, extra={"action": "stats.not_answered"})


async def gather_stats(client: Client, within_s: float) -> list[dict[str, Any]]:
    """Return the statistics of all replicas that answer within `within_s` seconds, by instance.

    Raises nats.errors.Error.
    """
    inbox = f"{SUBJECT}.{secrets.token_hex(8)}"
    answers = await client.subscribe(inbox)
    found: dict[str, dict[str, Any]] = {}
    try:
        await client.publish(SUBJECT, b"", inbox)
        with suppress(TimeoutError, nats.errors.TimeoutError):
            async with asyncio.timeout(within_s):
                while len(found) < MAX_REPLICAS:
                    value = _object((await answers.next_msg(timeout=within_s)).data)
                    if "instance" in value:  # else it is the server's message that nobody listens
                        found[str(value["instance"])] = value
    finally:
        await answers.unsubscribe()
    return [found[name] for name in sorted(found)]


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
