"""`Idempotency-Key`: a repeated request gets the result of the first one, for which nothing is charged again.

A client sends this header with a text of its choice, the *key*, and the same one if it repeats the request.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Self

import orjson

from openapi_tool.gateway.call import Caller
from openapi_tool.gateway.stored import text_name
from openapi_tool.http.problems import Problem
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.state.port import Texts

log = logging.getLogger(__name__)

KEPT_S = 3_600  # seconds for which results are stored
MAX_KEY_CHARS = 255  # as other services with this header allow


class Idempotency:
    """Results of the last hour by caller and key, as bodies of responses; shared by all processes of a gateway."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._running: set[str] = set()  # names of the requests that run in this process

    def request(self, caller: Caller, key: str, tool: str, arguments: Mapping[str, Any]) -> IdempotentRequest:
        """Return a request with a key. Raises Problem."""
        is_printable = key.isascii() and key.isprintable()
        if not is_printable or not 1 <= len(key) <= MAX_KEY_CHARS:
            raise Problem(
                HTTPStatus.BAD_REQUEST,
                "bad_request",
                f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} printable ASCII characters.",
            )
        try:
            call_digest = _digest(tool, dict(arguments))
        except TypeError:
            call_digest = ""  # what orjson cannot write as JSON; the call refuses such arguments
        name = text_name(caller.project_id, caller.agent_id, key)
        return IdempotentRequest(self._texts, self._running, name, call_digest)


class IdempotentRequest:
    """Request with a key; as a context it is the only one with this key in this process.

    Its result is stored under `name`, after a line with `call_digest`. That identifies tool and arguments, as another
    call may not use the same key.
    """

    def __init__(self, texts: Texts, running: set[str], name: str, call_digest: str) -> None:
        self._texts = texts
        self._running = running
        self._name = name
        self._call_digest = call_digest

    def __enter__(self) -> Self:
        if self._name in self._running:
            raise Problem(
                HTTPStatus.CONFLICT, "bad_request", "A request with this Idempotency-Key runs; wait for its end."
            )
        self._running.add(self._name)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.discard(self._name)

    async def result(self) -> bytes | None:
        """Return the stored result, None without one. Raises Problem if the key was used for another call."""
        try:
            record = await self._texts.get(self._name)
        except Unavailable:  # the state is down: the call runs as if the request were the first one
            return None
        if record is None:
            return None
        stored_digest, _, body = record.partition(b"\n")
        if stored_digest != self._call_digest.encode():
            raise Problem(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                "bad_request",
                "This Idempotency-Key was used with other arguments; give each call a key of its own.",
            )
        return body

    async def store(self, body: bytes) -> None:
        """Store the result."""
        try:
            await self._texts.put(self._name, self._call_digest.encode() + b"\n" + body)
        except Unavailable as outage:
            log.error(  # noqa: TRY400 - no defect
                "cannot store a result by its key: %s", outage, extra={"action": "state.not_stored"}
            )


def _digest(*parts: object) -> str:
    return hashlib.blake2b(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS), digest_size=20).hexdigest()
