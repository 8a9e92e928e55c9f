"""What a gateway stores for later calls: whole texts of truncated results, and paid results that nobody took."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
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

WINDOW_CHARS = 512 * 1024
"""Characters of a whole text that are stored, and read, at once: as many as a search in a text asks for at once."""

_DO_NOT_TRACK = frozenset({"donottrack", "dnt", "xdonottrack"})
"""Names of arguments, parameters and headers that say "do not track", as `fold` returns them: `X-Do-Not-Track`."""


class StoredTexts:
    """Whole texts of truncated results (`engine.ports.Artifacts`). Each is found only for the agent whose call it was.

    A text is stored as a head, and as windows of `WINDOW_CHARS` characters, so that a part of it is read without the
    rest. The head has what is known of the whole text: its length, its digest, and the places at which its items begin,
    such as the results of a search. `card_id` is the id of the text.
    """

    def __init__(self, texts: TextSets) -> None:
        self._texts = texts

    async def put(self, identity: CallIdentity, stored: StoredText) -> None:
        """Store a text. Raises Unavailable."""
        owner_and_card = identity.project_id, identity.agent_id, stored.card_id
        head = {"chars": stored.chars, "sha256": stored.sha256, "items": [list(item) for item in stored.items]}
        # `put_all` stores the first entry last. So whoever finds the head finds the windows, too.
        parts = {text_name(*owner_and_card): orjson.dumps(head)}
        text: str = orjson.loads(stored.content)["text"]
        for number, start in enumerate(range(0, len(text), WINDOW_CHARS)):
            parts[text_name(*owner_and_card, number)] = text[start : start + WINDOW_CHARS].encode()
        await self._texts.put_all(parts)

    async def artifact(self, project_id: str, agent_id: str, card_id: str, start: int, chars: int) -> Artifact | None:
        """Return at most `chars` characters from `start`; None if the text is missing or expired.

        Raises Unavailable.
        """
        owner_and_card = project_id, agent_id, card_id
        record = await self._texts.get(text_name(*owner_and_card))
        if record is None:
            return None
        head = orjson.loads(record)
        end = min(start + chars, head["chars"])
        first_window = start // WINDOW_CHARS
        after_last_window = math.ceil(end / WINDOW_CHARS)
        read = ""
        for number in range(first_window, after_last_window):
            window = await self._texts.get(text_name(*owner_and_card, number))
            if window is None:
                return None
            read += window.decode()
        skipped = start - first_window * WINDOW_CHARS  # characters of the first window that come before `start`
        items = tuple(map(tuple, head["items"]))
        return Artifact(card_id, head["chars"], head["sha256"], read[skipped : skipped + chars], items)


class UntakenResults:
    """Paid results that no client took: it had cancelled the call, or was gone.

    They expire soon (`UNTAKEN_S`). Until then an identical call of the same caller gets one at no cost.
    """

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    async def put(self, result_name: str, fields: ResultFields) -> None:
        """Store a result. Raises Unavailable."""
        record = {
            "status": fields.status,
            "result": fields.result,
            "error": fields.error,
            "tool_output": fields.tool_output,
            "tool": fields.tool,
            "truncated": fields.truncated,
        }
        await self._texts.put(result_name, orjson.dumps(record))

    async def get(self, result_name: str) -> ResultFields | None:
        """Return a stored result, as one that cost nothing. Raises Unavailable."""
        record = await self._texts.get(result_name)
        if record is None:
            return None
        fields = orjson.loads(record)
        for part in (fields["tool_output"], fields["result"]):  # `result_format` says which of them has the usage
            if isinstance(part, dict) and "usage" in part:
                part["usage"] = {"tokens": 0, "requests": 0}
                part["cached"] = True
        return ResultFields(**fields, cached=True)


def name_of_result(identity: CallIdentity, definition: ToolDefinition, arguments: Mapping[str, Any]) -> str:
    """Return the name by which an identical call finds a result: of the same caller, definition and arguments.

    Raises TypeError for arguments that are no JSON.
    """
    return text_name(identity.project_id, identity.agent_id, definition.digest.hex(), dict(arguments))


def may_store(definition: ToolDefinition, arguments: Mapping[str, Any]) -> bool:
    """Return whether a result may be stored at all: not if anything in the call says "do not track"."""
    set_for_upstream = {**definition.upstream_params, **definition.headers}
    # Arguments of the model replace the definition's defaults, and its fixed arguments replace those of the model.
    values = {**set_for_upstream, **definition.defaults, **arguments, **definition.fixed}
    return not any(value and fold(name) in _DO_NOT_TRACK for name, value in values.items())


def text_name(project: str, *parts: object) -> str:
    """Return the name of a text: a digest of its project, a dot, and a digest of all parts.

    By the first digest a store knows the owner, whose texts it drops if they take too much room (`state.port.Texts`).
    Its four bytes suffice: two projects with the same one would share only that room.
    """
    return f"{_digest(project, 4)}.{_digest((project, *parts), 20)}"


def _digest(value: object, size: int) -> str:
    """Return a digest of a JSON value, of `size` bytes in hexadecimal."""
    return hashlib.blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=size).hexdigest()
