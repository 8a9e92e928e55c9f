"""Whole texts of truncated results in a state file."""

from __future__ import annotations

import hashlib
from contextlib import aclosing

import orjson
import pytest

from openapi_tool.engine import stored_search
from openapi_tool.gateway.stored import WINDOW_CHARS, StoredTexts
from openapi_tool.protocol.cards import StoredText
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.state.sqlite import MEMORY, SqliteTexts, StateFile
from tests.requirements import requirement

ME = CallIdentity("p", "a")
TEXT = '\u0436\U0001f600 "word"\n' * 120_000


class CountedTexts(SqliteTexts):
    """Texts that remember the sizes of what was read."""

    def __init__(self, state: StateFile) -> None:
        super().__init__(state, "whole", 60)
        self.read_bytes: list[int] = []

    async def get(self, name: str) -> bytes | None:
        text = await super().get(name)
        self.read_bytes.append(len(text or b""))
        return text


def stored_text() -> StoredText:
    content = bytearray(orjson.dumps({"text": TEXT}))
    return StoredText("card", content, len(TEXT), hashlib.sha256(TEXT.encode()).hexdigest(), ())


@requirement("mcp.results")
async def test_a_search_through_a_large_text_reads_each_part_of_it_once() -> None:
    assert stored_search._WINDOW_CHARS == WINDOW_CHARS  # noqa: SLF001
    async with aclosing(StateFile.open(MEMORY)) as state:
        counted = CountedTexts(state)
        texts = StoredTexts(counted)
        await texts.put(ME, stored_text())
        found = ""
        while len(found) < len(TEXT):
            part = await texts.artifact("p", "a", "card", len(found), WINDOW_CHARS)
            assert part is not None
            found += part.text
        assert found == TEXT
        assert max(counted.read_bytes) < 4 * WINDOW_CHARS
        assert sum(counted.read_bytes) < len(TEXT.encode()) + 1_000


@requirement("mcp.results")
@pytest.mark.parametrize(
    ("start", "chars"),
    [(0, 10), (WINDOW_CHARS - 5, 10), (5, 2 * WINDOW_CHARS), (len(TEXT) - 3, 10), (len(TEXT), 10), (len(TEXT) + 9, 1)],
)
async def test_any_part_of_a_stored_text_is_returned(start: int, chars: int) -> None:
    async with aclosing(StateFile.open(MEMORY)) as state:
        texts = StoredTexts(state.texts("whole", 60))
        await texts.put(ME, stored_text())
        part = await texts.artifact("p", "a", "card", start, chars)
        assert part is not None
        assert part.text == TEXT[start : start + chars]
        assert await texts.artifact("p", "another", "card", start, chars) is None


@requirement("mcp.results")
async def test_a_text_whose_part_was_deleted_is_gone() -> None:
    async with aclosing(StateFile.open(MEMORY)) as state:
        texts = StoredTexts(state.texts("whole", 60))
        await texts.put(ME, stored_text())
        largest = "DELETE FROM texts WHERE bytes = (SELECT max(bytes) FROM texts)"
        await state.run(lambda connection: connection.execute(largest))
        assert await texts.artifact("p", "a", "card", 0, len(TEXT)) is None
