"""Streams and buckets of the executor in NATS: created at the start, then checked every few seconds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import nats.errors
from nats.js.api import StreamInfo
from nats.js.errors import NotFoundError

from openapi_tool.bus import dead_letters, leases, parked_results, session_key_store
from openapi_tool.bus.client import BusClient, Denied
from openapi_tool.bus.shared_records import BUDGETS, LIMITS
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.telemetry.health import JETSTREAM, Health

log = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 4.0
_TIMEOUT_S = 2.0
_MIN_FREE_BYTES = 1024
_LEASES, _SESSIONS, _PARKED = f"KV_{leases.BUCKET}", f"KV_{session_key_store.BUCKET}", f"KV_{parked_results.BUCKET}"
_STORED = (_LEASES, _SESSIONS, _PARKED, f"KV_{LIMITS.bucket}", f"KV_{BUDGETS.bucket}", dead_letters.STREAM)


async def denied(client: BusClient) -> list[str]:
    """Return for which streams and buckets of the executor this user lacks permission. Raises nats.errors.Error."""
    return [str(refusal) for refusal in await asyncio.gather(*(_denied(client, name) for name in _STORED)) if refusal]


async def _denied(client: BusClient, stream: str) -> Denied | None:
    try:
        await client.jetstream(timeout=_TIMEOUT_S).stream_info(stream)
    except NotFoundError:
        return None  # it is created when it is needed
    except Denied as refusal:
        return refusal
    return None


@dataclass(slots=True)
class Storage:
    """Creates missing streams and buckets, and records in `health` which are full or do not answer.

    `session_key` is stored again after its bucket was deleted, so that executors which start later use the same; None
    if it is not stored in NATS. Streams and buckets are created with `replicas` replicas; fewer cause a warning.
    """

    client: BusClient
    leases: leases.Leases
    parked: parked_results.ParkedResultStore
    dead_letter_stream: dead_letters.DeadLetters
    session_key: bytes | None
    replicas: int
    health: Health
    _warned: set[str] = field(default_factory=set)

    async def run(self) -> None:
        """Check every few seconds until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(_CHECK_INTERVAL_S)

    async def check(self) -> None:
        """Check once, and create what is missing."""
        creators: dict[str, Callable[[], Awaitable[object]]] = {
            _LEASES: self.leases.ensure,
            _SESSIONS: self._restore_session_key,
            _PARKED: self.parked.ensure,
            dead_letters.STREAM: self.dead_letter_stream.ensure,
        }
        problems = await asyncio.gather(*(self._problem(stream, create) for stream, create in creators.items()))
        reason = "; ".join(problem for problem in problems if problem)
        self.health.record(JETSTREAM, ok=not reason, reason=reason)

    async def _restore_session_key(self) -> None:
        await session_key_store.ensure_bucket(self.client, self.replicas)
        if self.session_key is not None:
            await session_key_store.restore_session_key(self.client, self.session_key, self.replicas)

    async def _problem(self, stream: str, create: Callable[[], Awaitable[object]]) -> str:
        """Return why a stream cannot be used, empty if it can; create a missing one."""
        jetstream = self.client.jetstream(timeout=_TIMEOUT_S)
        try:
            try:
                info = await jetstream.stream_info(stream)
            except NotFoundError:
                await create()
                log.info("created %s", stream, extra={"action": "storage.created", "stream": stream})
                return ""
        except Denied as denied:
            return f"{stream}: {denied}"
        except Unavailable as unusable:
            return str(unusable)
        except (nats.errors.Error, OSError) as error:
            return f"{stream} does not answer: {type(error).__name__}"
        self._warn_of_replicas(stream, info)
        return f"{stream} is full ({info.state.bytes} of {info.config.max_bytes} bytes)" if _is_full(info) else ""

    def _warn_of_replicas(self, stream: str, info: StreamInfo) -> None:
        replicas = info.config.num_replicas or 1
        if replicas < self.replicas and stream not in self._warned:
            self._warned.add(stream)
            log.warning(
                "%s has fewer replicas than the command stream: if its servers fail, redelivered calls wait; run: "
                "nats stream edit %s --replicas %s --force",
                stream,
                stream,
                self.replicas,
                extra={"action": "storage.replicas", "stream": stream, "copies": replicas},
            )


def _is_full(info: StreamInfo) -> bool:
    """Return whether the next record may not fit; the server counts some overhead per record."""
    bytes_limit, messages_limit = info.config.max_bytes or 0, info.config.max_msgs or 0
    if bytes_limit > 0 and info.state.bytes + _MIN_FREE_BYTES > bytes_limit:
        return True
    return messages_limit > 0 and info.state.messages >= messages_limit
