"""Parked results: stored for the next delivery of the command, as they could not be committed.

A record is its authentication tag (*seal*, 32 bytes) followed by the result as JSON. It is stored under a name that is
an HMAC over project, agent, turn and tool call id. The seal is an HMAC over the same and the JSON. So no other call can
find the record, and no client without the executors' key can forge one (ADR 5).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from typing import Any

import orjson
from cachetools import TTLCache

from openapi_tool.kernel.pipeline.ports import ResultStore
from openapi_tool.kernel.pipeline.result_to_commit import ResultToCommit
from openapi_tool.protocol.cards import ArtifactCard
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.tools.log_ids import log_ids
from openapi_tool.tools.result import ResultFields

log = logging.getLogger(__name__)

MAX_BYTES = 256 * 1024  # of a record without its seal
MAX_PROJECT_BYTES = 8 * 1024 * 1024
"""Bytes that this process parks for one project in an hour: an eighth of the store that all projects share.

By changes of its own rows a project can have every commit refused. Without this limit its parked results would fill the
store, and those of other projects could not be parked.
"""

_EXPIRY_S = 3600.0  # the store keeps a record for as long
_TIMEOUT_S = 2.0  # of one access to the store
_VERSION = 1  # of the format of a record
_SEAL_BYTES = 32  # of a SHA-256
_STORED_FIELDS = ("status", "result", "error", "tool_output")
"""Fields of a result that are stored. The others (`tool`, `cached`, `truncated`) are for telemetry, which reports a
parked result without them."""


class ParkedResults:
    """Store of results, sealed with a `key` that all executors share; its failures never fail a call."""

    def __init__(self, store: ResultStore, key: bytes) -> None:
        self._store = store
        self._key = hmac.digest(key, b"parked result", hashlib.sha256)
        # For each project, the sizes in bytes of the records that this process parked in the last hour, by name.
        self._sizes: dict[str, TTLCache[str, int]] = {}

    async def park(self, identity: CallIdentity, result: ResultToCommit) -> bool:
        """Store a result; return False if it is too large, or not stored after two seconds."""
        record = _encode(result)
        if len(record) > MAX_BYTES:
            self._log("a result is too large to be parked; its call will be run again", identity, len(record))
            return False
        name = self._name(identity)
        if not self._reserve(identity.project_id, name, len(record)):
            self._log("too many results of this project are parked; its call will be run again", identity, len(record))
            return False
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._store.put(name, self._seal(identity, record) + record)
        except (Unavailable, TimeoutError) as error:
            self._free(identity.project_id, name)
            self._log(f"cannot park a result; its call will be run again: {error}", identity, len(record))
            return False
        self._log("parked a result that could not be committed", identity, len(record))
        return True

    async def find(self, identity: CallIdentity) -> ResultToCommit | None:
        """Return the parked result of a call; None without one, or if it cannot be read or has a wrong seal."""
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
            self._free(identity.project_id, name)
        except (Unavailable, TimeoutError):
            log.debug("cannot delete a parked result; it will expire", extra={"action": "result.left_parked"})

    def _reserve(self, project: str, name: str, size: int) -> bool:
        """Count a record against MAX_PROJECT_BYTES of its project; return False, and do not count it, beyond that."""
        self._drop_expired()
        sizes = self._sizes.setdefault(project, TTLCache(MAX_PROJECT_BYTES, _EXPIRY_S, getsizeof=int))
        sizes.pop(name, None)  # an earlier record of the same call is replaced
        if sizes.currsize + size > MAX_PROJECT_BYTES:  # `currsize` is the sum of all sizes
            return False
        sizes[name] = size
        return True

    def _free(self, project: str, name: str) -> None:
        """Count a record no longer."""
        sizes = self._sizes.get(project)
        if sizes is not None:
            sizes.pop(name, None)

    def _drop_expired(self) -> None:
        """Remove the sizes of records that have expired, and projects that then have none."""
        for project, sizes in list(self._sizes.items()):
            sizes.expire()
            if not sizes:
                del self._sizes[project]

    def _name(self, identity: CallIdentity) -> str:
        return self._digest(b"name", identity, b"").hex()

    def _seal(self, identity: CallIdentity, record: bytes) -> bytes:
        return self._digest(b"seal", identity, record)

    def _digest(self, purpose: bytes, identity: CallIdentity, record: bytes) -> bytes:
        owner = [identity.project_id, identity.agent_id, identity.agent_turn_id, identity.tool_call_id]
        message = b"\n".join((purpose, orjson.dumps(owner), record))
        return hmac.digest(self._key, message, hashlib.sha256)

    def _log(self, message: str, identity: CallIdentity, size: int) -> None:
        # All outcomes of `park` have this action: the message says whether the result is parked.
        log.warning("%s", message, extra={"action": "result.parked", "bytes": size} | log_ids(identity))


def _encode(result: ResultToCommit) -> bytes:
    artifact = None
    card = result.artifact
    if card is not None:
        artifact = {
            "card_id": card.card_id,
            "content": orjson.Fragment(bytes(card.content)),  # it is JSON already
            "metadata": card.metadata,
            "ttl_s": card.ttl_s,
        }
    fields = {name: getattr(result.fields, name) for name in _STORED_FIELDS}
    return orjson.dumps({"version": _VERSION, **fields, "artifact": artifact})


def _decode(record: bytes, project_id: str) -> ResultToCommit | None:
    """Decode a record of any executor; return None for another version."""
    fields: dict[str, Any] = orjson.loads(record)
    if fields.pop("version") != _VERSION:
        return None
    artifact = None
    card = fields.pop("artifact")
    if card is not None:
        content = bytearray(orjson.dumps(card.pop("content")))
        artifact = ArtifactCard(tenant_id=project_id, content=content, **card)
    return ResultToCommit(ResultFields(**fields), artifact, was_parked=True)
