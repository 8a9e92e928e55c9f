"""Every store of shared state does the same."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from nats.js.errors import NotFoundError

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_client.connection import connected
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import Settings
from openapi_tool.state.change import change
from openapi_tool.state.memory import MemoryRecords
from openapi_tool.state.nats_kv import Bucket, NatsKvRecords, NatsKvTexts
from openapi_tool.state.port import Contended, Records, Stored, Texts
from openapi_tool.state.sqlite import MEMORY, StateFile
from tests.requirements import requirement
from tests.waiting import WAIT_S, until

DSN = {"dsn": "postgresql://127.0.0.1:1/unused"}
TTL_S = 1.0


@dataclass
class Store:
    """One store as two replicas open it, each with its own connection."""

    records: Records
    others: Records
    texts: Texts


@pytest.fixture(params=["memory", "nats", "sqlite"])
async def store(request: pytest.FixtureRequest, stack: EmbeddedStack, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "memory":
        shared = MemoryRecords()
        async with aclosing(StateFile.open(MEMORY)) as state:
            yield Store(shared, shared, state.texts("test", TTL_S))
        return
    if request.param == "sqlite":
        state, other_state = (StateFile.open(tmp_path / "state.sqlite3") for _ in range(2))
        async with aclosing(state), aclosing(other_state):
            yield Store(state.records("test"), other_state.records("test"), state.texts("test", TTL_S))
        return
    name = f"test_{uuid.uuid4().hex[:8]}"
    records = Bucket(name, changes=f"{name}.changes", max_value_bytes=1_000)
    texts = Bucket(f"{name}_texts", ttl_s=TTL_S)
    settings = Settings(postgres=cast("Any", DSN), nats=cast("Any", {"servers": stack.nats.url}))
    bus = build_bootstrap(settings, {}).bus
    async with connected(bus) as client, connected(bus) as other:
        yield Store(NatsKvRecords(client, records), NatsKvRecords(other, records), NatsKvTexts(client, texts, "text."))
        for bucket in (records, texts):
            with suppress(NotFoundError):
                await client.jetstream().delete_key_value(bucket.name)


def appended(text: bytes) -> Callable[[bytes | None], bytes]:
    return lambda value: (value or b"") + text


@requirement("state.records")
async def test_a_record_is_replaced_only_at_its_revision(store: Store) -> None:
    assert await store.records.read("a.record") == Stored(None, 0)
    first = await store.records.write("a.record", b"one", 0)
    assert first
    assert await store.others.read("a.record") == Stored(b"one", first)
    assert await store.others.write("a.record", b"two", 0) is None
    second = await store.others.write("a.record", b"two", first)
    assert second is not None
    assert second > first
    assert await store.records.write("a.record", b"three", first) is None
    assert await store.records.read("a.record") == Stored(b"two", second)
    await store.records.write("another", b"", 0)
    assert (await store.records.read("another")).value == b""


@requirement("state.records")
async def test_concurrent_changes_are_all_stored(store: Store) -> None:
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(
            *(
                change(records, "a.record", appended(b"x"))
                for records in (store.records, store.others)
                for _ in range(5)
            )
        )
    assert (await store.records.read("a.record")).value == b"x" * 10


@requirement("state.records")
async def test_a_change_from_an_outdated_copy_is_applied_to_the_record(store: Store) -> None:
    known = await change(store.records, "a.record", appended(b"1"))
    await change(store.others, "a.record", appended(b"2"))
    after = await change(store.records, "a.record", appended(b"3"), known)
    assert after.value == b"123"
    assert await change(store.records, "a.record", lambda _: None) == after


@requirement("state.records")
async def test_a_change_that_always_conflicts_ends_with_an_error() -> None:
    records = MemoryRecords()

    class Storm(MemoryRecords):
        async def write(self, key: str, value: bytes, revision: int) -> int | None:
            await records.write(key, value, revision)
            return None

    with pytest.raises(Contended, match="others keep changing the shared record"):
        await change(Storm(), "a.record", appended(b"1"))


@requirement("state.records")
async def test_changes_of_others_are_seen(store: Store) -> None:
    seen: list[tuple[str, Stored]] = []
    async with store.records.watch(lambda key, stored: seen.append((key, stored))):
        revision = await store.others.write("a.record", b"one", 0)
        await until(lambda: seen)
    assert seen == [("a.record", Stored(b"one", revision or 0))]
    await store.others.write("a.record", b"two", revision or 0)
    await asyncio.sleep(0.1)
    assert len(seen) == 1


@requirement("state.texts")
async def test_a_text_can_be_read_until_it_is_deleted_or_expires(store: Store) -> None:
    assert await store.texts.get("one") is None
    await store.texts.delete("one")
    await store.texts.put("one", b"text")
    await store.texts.put("two", b"another")
    await store.texts.put("one", b"replaced")
    assert await store.texts.get("one") == b"replaced"
    await store.texts.delete("one")
    await store.texts.delete("one")
    assert (await store.texts.get("one"), await store.texts.get("two")) == (None, b"another")
    async with asyncio.timeout(TTL_S + 5):
        while await store.texts.get("two") is not None:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.1)


@requirement("state.records")
async def test_an_outage_is_reported_as_such(stack: EmbeddedStack) -> None:
    settings = Settings(postgres=cast("Any", DSN), nats=cast("Any", {"servers": stack.nats.url}))
    async with connected(build_bootstrap(settings, {}).bus) as client:
        records = NatsKvRecords(client, Bucket("test_outage"), timeout_s=0.3)
    with pytest.raises(Unavailable, match="NATS"):
        await records.read("a.record")
    with pytest.raises(Unavailable, match="NATS"):
        await records.write("a.record", b"one", 0)
