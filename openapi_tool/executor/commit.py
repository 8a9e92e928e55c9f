"""Commit results with retries; park those that cannot be committed, for the next delivery of the command.

Name and authentication tag (`seal`) of a parked result are HMACs over project, agent, turn and tool call id. So no
other call can find it, and no client without the executors' key can forge one (ADR 5).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from cachetools import TTLCache
from tenacity import RetryCallState, stop_after_delay, wait_exponential_jitter

from openapi_tool.concurrency import retried
from openapi_tool.executor.ports import Kernel, ResultStore, ids
from openapi_tool.executor.result_order import ReadyResult, ResultOrder
from openapi_tool.protocol import frozen
from openapi_tool.protocol.cards import ArtifactCard, Card
from openapi_tool.protocol.command import Report
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.result import ResultFields

log = logging.getLogger(__name__)

MAX_BYTES = 256 * 1024  # of a record
MAX_PROJECT_BYTES = 8 * 1024 * 1024
"""Bytes of a project in an hour, an eighth of the bucket: a project that changes its own rows can have every commit
refused, and would fill the bucket for all."""

_EXPIRY_S = 3600.0
_TIMEOUT_S = 2.0
_VERSION = 1
_SEAL_BYTES = 32


@frozen
class CallResult:
    """Fields of the result card, and the artifact card if the output was truncated."""

    fields: ResultFields
    artifact: ArtifactCard | None = None
    parked: bool = False


class ParkedResults:
    """Store of results, sealed with a `key` that all executors share; its failures never fail a call."""

    def __init__(self, store: ResultStore, key: bytes) -> None:
        self._store = store
        self._key = hmac.digest(key, b"parked result", hashlib.sha256)
        self._sizes: dict[str, TTLCache[str, int]] = {}  # of the records of each project, by name

    async def park(self, identity: CallIdentity, result: CallResult) -> bool:
        """Store a result; return False if it is too large, or not stored after two seconds."""
        record = _encode(result)
        if len(record) > MAX_BYTES:
            self._log("a result is too large to be parked; its call will be run again", identity, len(record))
            return False
        name = self._name(identity)
        if not self._count(identity.project_id, name, len(record)):
            self._log("too many results of this project are parked; its call will be run again", identity, len(record))
            return False
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._store.put(name, self._seal(identity, record) + record)
        except (Unavailable, TimeoutError) as error:
            self._sizes[identity.project_id].pop(name, None)
            self._log(f"cannot park a result; its call will be run again: {error}", identity, len(record))
            return False
        self._log("parked a result that could not be committed", identity, len(record))
        return True

    async def find(self, identity: CallIdentity) -> CallResult | None:
        """Return the parked result of a call, None if there is none or it cannot be read."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                sealed = await self._store.get(self._name(identity))
        except (Unavailable, TimeoutError):
            return None
        if sealed is None:
            return None
        seal, record = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(identity, record)):
            return None
        return _decode(record, identity.project_id)

    async def delete(self, identity: CallIdentity) -> None:
        """Delete the parked result; if that fails, it expires later."""
        name = self._name(identity)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._store.delete(name)
            if (sizes := self._sizes.get(identity.project_id)) is not None:
                sizes.pop(name, None)
        except (Unavailable, TimeoutError):
            log.debug("cannot delete a parked result; it will expire", extra={"action": "result.left_parked"})

    def _count(self, project: str, name: str, size: int) -> bool:
        """Count a record against the share of its project; return False if it exceeds it."""
        for other, stored in list(self._sizes.items()):
            stored.expire()
            if not stored:
                del self._sizes[other]
        sizes = self._sizes.setdefault(project, TTLCache(MAX_PROJECT_BYTES, _EXPIRY_S, getsizeof=int))
        sizes.pop(name, None)
        if sizes.currsize + size > MAX_PROJECT_BYTES:
            return False
        sizes[name] = size
        return True

    def _name(self, identity: CallIdentity) -> str:
        return self._digest(b"name", identity, b"").hex()

    def _seal(self, identity: CallIdentity, record: bytes) -> bytes:
        return self._digest(b"seal", identity, record)

    def _digest(self, purpose: bytes, identity: CallIdentity, record: bytes) -> bytes:
        owner = [identity.project_id, identity.agent_id, identity.agent_turn_id, identity.tool_call_id]
        return hmac.digest(self._key, b"\n".join((purpose, orjson.dumps(owner), record)), hashlib.sha256)

    def _log(self, message: str, identity: CallIdentity, size: int) -> None:
        log.warning("%s", message, extra={"action": "result.parked", "bytes": size} | ids(identity))


def _encode(result: CallResult) -> bytes:
    card = result.artifact
    artifact = card and {
        "card_id": card.card_id,
        "content": orjson.Fragment(bytes(card.content)),
        "metadata": card.metadata,
        "ttl_s": card.ttl_s,
    }
    fields = {name: getattr(result.fields, name) for name in ("status", "result", "error", "tool_output")}
    return orjson.dumps({"version": _VERSION, **fields, "artifact": artifact})


def _decode(record: bytes, project_id: str) -> CallResult | None:
    """Decode a record of any executor; return None for another version."""
    fields: dict[str, Any] = orjson.loads(record)
    if fields.pop("version") != _VERSION:
        return None
    card = fields.pop("artifact")
    if card is not None:
        card["content"] = bytearray(orjson.dumps(card["content"]))
    artifact = None if card is None else ArtifactCard(tenant_id=project_id, **card)
    return CallResult(ResultFields(**fields), artifact, parked=True)


_PARK_AFTER_S = 10.0
"""Seconds of failed commits until the result is parked for another executor; workers wait at least 30 s."""

_BACKOFF = wait_exponential_jitter(multiplier=0.1, max=2.0, jitter=0.1)


@dataclass(frozen=True, slots=True)
class ResultCommitter:
    """Commits results in their turn's order; retries for `retry_timeout_s` seconds in an outage of the database."""

    kernel: Kernel
    parked: ParkedResults
    order: ResultOrder
    retry_timeout_s: float

    async def commit(self, ready: ReadyResult, result: CallResult, card: Card, report: Report) -> bool:
        """Commit the result; return whether it was written. If that fails, park it and raise the failure.

        It is parked after `_PARK_AFTER_S`, for an executor that reaches the database; if it is too large, retry here
        instead.
        """
        commit = partial(self.kernel.commit, card, report, result.artifact), partial(self.kernel.is_turn_busy, report)
        park_after_s = min(_PARK_AFTER_S, self.retry_timeout_s)
        try:
            return await self._commit(ready, *commit, park_after_s)
        except (Exception, asyncio.CancelledError) as failure:
            parked = result.parked or await self.parked.park(ready.identity, result)
            if parked or not isinstance(failure, Unavailable) or self.retry_timeout_s <= park_after_s:
                raise
        try:
            return await self._commit(ready, *commit, self.retry_timeout_s - park_after_s, retry=True)
        except (Exception, asyncio.CancelledError):
            await self.parked.park(ready.identity, result)  # NATS may have been unavailable at the first attempt
            raise

    async def _commit(
        self,
        ready: ReadyResult,
        commit: Callable[..., Awaitable[bool]],
        is_busy: Callable[[float], Awaitable[bool]],
        for_s: float,
        *,
        retry: bool = False,
    ) -> bool:
        """Commit, with retries for `for_s` seconds. `retry` reports an earlier failed commit to the circuit breaker."""

        async def attempt() -> bool:
            nonlocal retry
            failed_before, retry = retry, True
            return await self.order.write(ready, partial(commit, retry=failed_before), is_busy)

        return await retried(
            attempt, on=Unavailable, wait=_BACKOFF, stop=stop_after_delay(for_s), before_sleep=_log_retry
        )


def _log_retry(state: RetryCallState) -> None:
    outage = state.outcome and state.outcome.exception()
    log.debug("commit failed; retrying: %s", outage, extra={"action": "commit.retried"})
