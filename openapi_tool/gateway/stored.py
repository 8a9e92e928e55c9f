"""What a gateway stores of calls: whole texts of truncated results, results that nobody took, one row per call."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from openapi_tool.protocol.cards import StoredText
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import Artifact
from openapi_tool.state.port import Texts, TextSets
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.result import ResultFields

UNTAKEN_S = 300
"""Seconds for which a paid result that nobody took is stored, for an identical call of the same caller."""

CANCELLED = "cancelled"
"""Status and error code of a call that was stopped because its client was gone or had cancelled it."""

WINDOW_CHARS = 512 * 1024
"""Characters that are stored, and read, at once; the search in a text reads as many."""

CALLS_DAYS = 90
"""Days for which the row of a call is kept."""

_UNTRACKED = frozenset({"donottrack", "dnt", "xdonottrack"})
"""Names, folded and without hyphens, of arguments, parameters and headers that say "do not track"."""


class StoredTexts:
    """Whole texts of truncated results, each found only by its owner (`executor.ports.Artifacts`).

    A text is stored in windows, so that a part of it is read without the rest.
    """

    def __init__(self, texts: TextSets) -> None:
        self._texts = texts

    async def put(self, identity: CallIdentity, stored: StoredText) -> None:
        """Store a text. Raises Unavailable."""
        name_parts = identity.project_id, identity.agent_id, stored.card_id
        head = {"chars": stored.chars, "sha256": stored.sha256, "items": [list(item) for item in stored.items]}
        text: str = orjson.loads(stored.content)["text"]
        windows = {
            text_name(*name_parts, start // WINDOW_CHARS): text[start : start + WINDOW_CHARS].encode()
            for start in range(0, len(text), WINDOW_CHARS)
        }
        await self._texts.put_all({text_name(*name_parts): orjson.dumps(head), **windows})

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """Return at most `chars` characters from `start`; None if the text is missing or expired."""
        name_parts = project_id, agent_id, card_id
        record = await self._texts.get(text_name(*name_parts))
        if record is None:
            return None
        head = orjson.loads(record)
        end = min(start + chars, head["chars"])
        first = start // WINDOW_CHARS
        behind_last = -(-end // WINDOW_CHARS)  # rounded up
        text = ""
        for number in range(first, behind_last):
            window = await self._texts.get(text_name(*name_parts, number))
            if window is None:
                return None
            text += window.decode()
        begin = start - first * WINDOW_CHARS
        items = tuple(map(tuple, head["items"]))
        return Artifact(card_id, head["chars"], head["sha256"], text[begin : begin + chars], items)


class UntakenResults:
    """Paid results that no client took: it had cancelled the call, or was gone."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    async def put(self, key: str, fields: ResultFields) -> None:
        """Store a result. Raises Unavailable."""
        record = {
            "status": fields.status,
            "result": fields.result,
            "error": fields.error,
            "tool_output": fields.tool_output,
            "tool": fields.tool,
            "truncated": fields.truncated,
        }
        await self._texts.put(key, orjson.dumps(record))

    async def get(self, key: str) -> ResultFields | None:
        """Return a stored result, as one that cost nothing. Raises Unavailable."""
        if (record := await self._texts.get(key)) is None:
            return None
        found = orjson.loads(record)
        for part in (found["tool_output"], found["result"]):
            if isinstance(part, dict) and "usage" in part:
                part |= {"usage": {"tokens": 0, "requests": 0}, "cached": True}
        return ResultFields(**found, cached=True)


def call_key(identity: CallIdentity, definition: ToolDefinition, arguments: Mapping[str, Any]) -> str:
    """Return the name by which an identical call of the same caller finds a result.

    Raises TypeError for arguments that are no JSON.
    """
    return text_name(identity.project_id, identity.agent_id, definition.digest.hex(), dict(arguments))


def may_store(definition: ToolDefinition, arguments: Mapping[str, Any]) -> bool:
    """Return whether a result may be stored at all: not if anything in the call says "do not track"."""
    given = {**definition.upstream_params, **definition.headers, **definition.defaults, **arguments, **definition.fixed}
    return not any(value for name, value in given.items() if fold(name).replace("-", "") in _UNTRACKED)


def text_name(project: str, *parts: object) -> str:
    """Return the name of a text: a digest of its project (the owner in `Texts`), a dot, and a digest of all parts."""
    return f"{_digest(project, 4)}.{_digest((project, *parts), 20)}"


def _digest(value: object, size: int) -> str:
    return hashlib.blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=size).hexdigest()


@dataclass(frozen=True, slots=True)
class CallRow:
    """Row of a finished call, without arguments and texts. `at` is its start in seconds since the epoch."""

    at: float
    tool_call_id: str
    project: str
    agent: str
    session: str | None
    tool: str
    status: str
    error: Mapping[str, Any] | None
    tokens: int
    requests: int
    cached: bool
    truncated: bool
    retries: int
    latency_ms: int
    attempts: list[Any]

    @property
    def error_code(self) -> str | None:
        """Code of its error; None if it succeeded."""
        if self.error:
            return str(self.error.get("code"))
        return CANCELLED if self.status == CANCELLED else None

    @property
    def values(self) -> tuple[object, ...]:
        """Values of the columns, in their order."""
        facts = (self.tokens, self.requests, self.cached, self.truncated, self.retries, self.latency_ms)
        ids = (self.at, self.tool_call_id, self.project, self.agent, self.session, self.tool)
        return (*ids, self.status, self.error_code, *facts, orjson.dumps({"attempts": self.attempts}))
