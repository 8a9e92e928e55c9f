"""The store of calls in PostgreSQL, with the tables of both protocol versions, and its TLS connections.

The embedded server is built without TLS, so a proxy in front of it terminates TLS: it answers PostgreSQL's
SSLRequest with one byte and forwards the rest.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import trustme

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.kernel.postgres import v1r3
from openapi_tool.kernel.postgres.call_rows import call_rows
from openapi_tool.kernel.postgres.lookups import LAST_RESULT_AGE
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.kernel.postgres.v1r4 import LOAD
from openapi_tool.local.caller import Caller
from openapi_tool.local.placed_call import PlacedCall
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_client.options import BusOptions, NatsOptions
from openapi_tool.options.postgres import PoolOptions, PostgresOptions
from openapi_tool.protocol.cards import ResultCard, artifact_card, result_card
from openapi_tool.protocol.command import Command, Delivery
from openapi_tool.protocol.errors import NeedsOperator, Unavailable
from openapi_tool.protocol.identity import identify
from openapi_tool.protocol.records import Artifact, CallRecords
from openapi_tool.protocol.report import Report
from openapi_tool.protocol.tracing import new_root
from openapi_tool.protocol.v1r3 import V1r3
from openapi_tool.settings import Settings, SettingsError
from openapi_tool.tools.output import Item
from openapi_tool.tools.secret_variables import Secret
from openapi_tool.tools.stored_items import StoredItem
from openapi_tool.tools.stored_text import stored_text
from tests.conftest import AGENT, PROJECT, search_tool
from tests.requirements import requirement
from tests.support import V1R4, delivery, dsn_of

ACTOR = "tool.openapi"
TEXT = stored_text([Item("text")], [])


@pytest.fixture
async def store(stack: EmbeddedStack, database: str) -> AsyncIterator[KernelStore]:
    store = await KernelStore.open(PoolOptions("v1r4", PostgresOptions(Secret(dsn_of(stack, database)), 4)))
    yield store
    await store.aclose()


def command_of(call: PlacedCall, **changes: Any) -> Command:
    return V1R4.decode(_delivery_of(call, **changes))


def _delivery_of(call: PlacedCall, headers: Any = None, data: bytes | None = None) -> Delivery:
    return delivery(call.headers if headers is None else headers, call.body, subject=call.subject, data=data)


def result_of(call: PlacedCall, records: CallRecords, text: str = "hello") -> tuple[ResultCard, Report]:
    identity = identify(command_of(call).identity, records.card)
    card = result_card(
        actor_id=ACTOR,
        function_name="jina_search",
        identity=identity,
        call_card=records.card,
        status="success",
        after_execution="suspend",
        result=text,
        error=None,
        tool_output=None,
    )
    report = V1R4.report(V1R4.accept(identity, records), new_root(), None, card.card_id, card.content)
    return card, report


async def count(caller: Caller, table: str, condition: str = "true") -> int:
    query = f"select count(*) from {table} where {condition}"  # noqa: S608 - texts of this file
    return int(await caller.database.fetchval(query))


async def test_one_read_brings_everything_that_is_known_of_a_call(caller: Caller, store: KernelStore) -> None:
    await caller.add_tool(PROJECT, search_tool())
    call = await caller.place(PROJECT, AGENT, "jina_search", {"query": "x"}, publish=False)
    records = await store.load(command_of(call))
    assert records.card is not None
    assert isinstance(records.card.content, dict)
    assert records.card.content["arguments"] == {"query": "x"}
    assert records.definition is not None
    assert records.definition.options == {"jina": {"mode": "search"}}
    assert records.worker_target == "worker_generic"
    assert records.waiting_turn is not None
    assert records.waiting_turn.message_type == "command_anchor"
    assert records.request_edge is not None
    assert records.earlier is None


@requirement("performance")
async def test_a_plan_cached_for_small_tables_reads_no_more_after_they_grow(caller: Caller, store: KernelStore) -> None:
    await caller.add_tool(PROJECT, search_tool())
    call = await caller.place(PROJECT, AGENT, "jina_search", {"query": "x"}, publish=False)
    await grow(caller.database, "tool.call", "command_anchor", 1_000)
    await caller.database.execute("set plan_cache_mode = force_generic_plan")
    for table in ("cards", "state.agent_inbox", "state.execution_edges"):
        await caller.database.execute(f"analyze {table}")
    await caller.database.execute(f"prepare load(text, text, text, text, text, bigint, text, text) as {LOAD}")
    command = command_of(call)
    blocks_before = await blocks_read(caller.database, command)
    await grow(caller.database, "tool.result", "tool_result", 4_000)
    await caller.database.execute(
        "insert into resource.project_agents (project_id, agent_id, profile_box_id, worker_target) "
        "select $1, 'agent_' || n, gen_random_uuid(), 'worker' from generate_series(1, 4000) as n",
        PROJECT,
    )
    assert await blocks_read(caller.database, command) <= blocks_before + 10


@requirement("hostile.neighbour")
async def test_a_load_reads_few_of_the_cards_of_a_call_id(caller: Caller, store: KernelStore) -> None:
    """A load without a card id looks for a tool.call card; the metadata of each card may take megabytes."""
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    await caller.database.execute("delete from cards")
    await caller.database.execute(f"prepare load(text, text, text, text, text, bigint, text, text) as {LOAD}")
    command = replace(command_of(call), card_id=None)
    blocks_before = await blocks_read(caller.database, command)
    await caller.database.execute(
        "insert into cards (card_id, tenant_id, content, tool_call_id, metadata) "
        "select 'more' || n, $1, '{}', $2, jsonb_build_object('type', 'other', 'note', repeat('x', 4000000)) "
        "from generate_series(1, 300) as n",
        PROJECT,
        call.tool_call_id,
    )
    # Reads some 160 blocks of 20 cards (`_MAX_CARDS`); all 300 would take 2,500.
    assert await blocks_read(caller.database, command) < blocks_before + 600
    assert (await store.load(command)).card is None


@requirement("run.turn_deadline")
async def test_the_newest_result_of_a_step_is_found_by_an_index(caller: Caller, store: KernelStore) -> None:
    assert await store.last_result_age_s(PROJECT, "turn", "step") is None
    metadata = {"type": "tool.result", "agent_turn_id": "turn", "step_id": "step"}
    for number, changes in enumerate(({}, {"step_id": "other"}, {"agent_turn_id": "other"}, {"type": "tool.call"})):
        await caller.database.execute(
            "insert into cards (card_id, tenant_id, metadata, created_at) "
            "values ($1, $2, $3, now() - make_interval(secs => $4))",
            f"card-{number}",
            PROJECT,
            {**metadata, **changes},
            100 - 20 * number,
        )
    age_s = await store.last_result_age_s(PROJECT, "turn", "step")
    assert age_s is not None
    assert age_s >= 100
    assert await store.last_result_age_s("proj_other", "turn", "step") is None
    await grow(caller.database, "tool.result", "tool_result", 4_000)
    await caller.database.execute("analyze cards")
    plan = await caller.database.fetch(f"explain {LAST_RESULT_AGE}", PROJECT, "turn", "step")
    assert not any("Seq Scan" in line["QUERY PLAN"] for line in plan)


async def grow(database: asyncpg.Connection, card: str, row: str, count: int) -> None:
    """Add `count` cards and inbox rows to the same project."""
    await database.execute(
        "insert into cards (card_id, tenant_id, content, tool_call_id, metadata) "
        "select $2 || n, $1, '{}', $2 || n, jsonb_build_object('type', $2::text) from generate_series(1, $3) as n",
        PROJECT,
        card,
        count,
    )
    await database.execute(
        "insert into state.agent_inbox (inbox_id, project_id, agent_id, message_type, correlation_id) "
        "select $2 || n, $1, $2 || n, $2, $2 || n from generate_series(1, $3) as n",
        PROJECT,
        row,
        count,
    )


def claiming(command: Command, **changes: Any) -> Command:
    return replace(command, identity=replace(command.identity, **changes))


async def blocks_read(database: asyncpg.Connection, command: Command) -> int:
    """Return the number of blocks that one load reads with the session's plan, cached or not."""
    identity = command.identity
    values = (identity.project_id, command.card_id, identity.tool_call_id, identity.agent_id, identity.agent_turn_id)
    explained = await database.fetchval(
        "explain (analyze, buffers, format json) execute load("
        + ", ".join("null" if value is None else f"'{value}'" for value in values)
        + f", {identity.turn_epoch or 0}, '{command.tool_name}', null)"
    )
    plan = json.loads(explained)[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


async def test_a_load_without_any_row_returns_no_records(store: KernelStore) -> None:
    records = await store.load(V1R4.decode(delivery()))
    assert records == CallRecords(None, None, None, None, None, None)


@requirement("identity.headers")
async def test_a_call_is_found_by_its_id_if_the_body_names_no_card(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    records = await store.load(command_of(call, data=b"[1]"))
    assert records.card is not None
    assert records.card.card_id == call.card_id


@requirement("identity.headers")
async def test_a_call_is_found_by_its_card_if_headers_are_missing(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    records = await store.load(command_of(call, headers={}))
    assert records.waiting_turn is not None
    assert records.request_edge is not None
    assert records.worker_target == "worker_generic"


async def test_every_look_up_is_scoped_by_project(caller: Caller, store: KernelStore) -> None:
    await caller.add_tool(PROJECT, search_tool())
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    foreign = claiming(command_of(call), project_id="another")
    assert await store.load(foreign) == CallRecords(None, None, None, None, None, None)


async def test_the_epoch_is_compared_only_if_the_header_gives_one(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    command = command_of(call)
    assert (await store.load(claiming(command, turn_epoch=0))).waiting_turn is not None
    assert (await store.load(claiming(command, turn_epoch=None))).waiting_turn is not None
    assert (await store.load(claiming(command, turn_epoch=2))).waiting_turn is None
    assert (await store.load(claiming(command, agent_turn_id="stale"))).waiting_turn is None
    assert (await store.load(claiming(command, agent_id="somebody"))).waiting_turn is None


async def test_the_newest_turn_row_replaces_a_missing_anchor(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    await caller.database.execute("delete from state.agent_inbox")
    for number, kind in enumerate(("turn", "ui_action", "turn", "tool_result")):
        await caller.database.execute(
            "insert into state.agent_inbox (inbox_id, project_id, agent_id, message_type, correlation_id, "
            "agent_turn_id, turn_epoch, created_at) values ($1, $2, $3, $4, $1, $5, 1, now() + $6 * interval '1 s')",
            f"row_{number}",
            PROJECT,
            AGENT,
            kind,
            call.agent_turn_id,
            number,
        )
    target = (await store.load(command_of(call))).waiting_turn
    assert target is not None
    assert target.inbox_id == "row_2"


async def test_numbers_and_texts_of_any_size_are_read(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    await caller.database.execute(
        """update cards set content = '{"n": 1e400, "m": 123456789012345678901234567890, "t": "ü"}'"""
    )
    records = await store.load(command_of(call))
    assert records.card is not None
    assert isinstance(records.card.content, dict)
    assert records.card.content["t"] == "ü"


@requirement("answer.atomic")
async def test_a_commit_writes_card_row_and_edge_together(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    card, report = result_of(call, await store.load(command_of(call)))
    assert await store.commit(card, report)
    answer = await caller.read_result(call)
    assert answer.card["content"]["result"] == "hello"
    assert answer.inbox_row["payload"]["tool_result_card_id"] == card.card_id
    assert answer.edge["metadata"]["inbox_id"] == report.inbox_id
    assert answer.inbox_row["next_retry_at"] == answer.inbox_row["created_at"]
    assert answer.inbox_row["next_retry_at"] <= await caller.database.fetchval("select now()")


@requirement("postgres.refusals")
@pytest.mark.parametrize("refusal", ["return null", "raise exception 'closed'"])
async def test_a_refusal_that_ends_while_it_is_examined_is_no_defect_of_the_call(
    caller: Caller, store: KernelStore, refusal: str
) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    records = await store.load(command_of(call))
    await caller.database.execute("create sequence rows_tried")  # which no rollback sets back
    await caller.database.execute(
        "create function refuse_first() returns trigger language plpgsql security definer as "
        f"$$ begin if nextval('rows_tried') = 1 then {refusal}; end if; return new; end $$"
    )
    await caller.database.execute(
        "create trigger refuse before insert on state.execution_edges for each row execute function refuse_first()"
    )
    assert await store.commit(*result_of(call, records))
    assert (await caller.read_result(call)).card["content"]["status"] == "success"


@requirement("answer.atomic", "answer.earlier")
async def test_the_second_commit_of_a_call_writes_nothing(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    records = await store.load(command_of(call))
    assert await store.commit(*result_of(call, records, "first"))
    assert not await store.commit(*result_of(call, records, "second"))
    assert await count(caller, "cards", "metadata ->> 'type' = 'tool.result'") == 1
    assert await count(caller, "state.agent_inbox", "message_type = 'tool_result'") == 1
    assert await count(caller, "state.execution_edges", "primitive = 'report'") == 1


@requirement("answer.atomic", "answer.earlier")
async def test_the_unique_index_refuses_a_second_result_by_another_author(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    records = await store.load(command_of(call))
    await caller.database.execute(
        "insert into cards (card_id, tenant_id, tool_call_id, metadata) values ('w', $1, $2, $3)",
        PROJECT,
        call.tool_call_id,
        {"type": "tool.result", "author_id": "worker.watchdog"},
    )
    assert not await store.commit(*result_of(call, records))
    assert await count(caller, "state.agent_inbox", "message_type = 'tool_result'") == 0
    earlier = (await store.load(command_of(call))).earlier
    assert earlier is not None
    assert earlier.author_id == "worker.watchdog"


@pytest.mark.parametrize("statement", ["delete from state.agent_inbox", "delete from state.execution_edges"])
@requirement("answer.atomic")
async def test_a_commit_whose_turn_or_edge_was_deleted_writes_no_card(
    caller: Caller, store: KernelStore, statement: str
) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    card, report = result_of(call, await store.load(command_of(call)))
    await caller.database.execute(statement)
    assert not await store.commit(card, report)
    assert await count(caller, "cards", "metadata ->> 'type' = 'tool.result'") == 0


@requirement("answer.atomic")
async def test_an_inbox_row_without_its_card_rolls_the_commit_back(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    card, report = result_of(call, await store.load(command_of(call)))
    await caller.database.execute(
        "insert into state.agent_inbox (inbox_id, project_id, agent_id, message_type, correlation_id) "
        "values ('stray', $1, $2, 'tool_result', $3)",
        PROJECT,
        AGENT,
        call.tool_call_id,
    )
    assert not await store.commit(card, report)
    assert await count(caller, "cards", "metadata ->> 'type' = 'tool.result'") == 0


@requirement("catalogue")
async def test_a_mangled_name_finds_the_tool_with_dots(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina__search", {}, publish=False)
    command = command_of(call)
    assert (await store.load(command)).definition is None
    await caller.add_tool(PROJECT, {**search_tool(), "tool_name": "jina.search"})
    found = (await store.load(command)).definition
    assert found is not None
    assert found.tool_name == "jina.search"
    await caller.add_tool(PROJECT, {**search_tool(), "tool_name": "jina__search"})
    exact = (await store.load(command)).definition
    assert exact is not None
    assert exact.tool_name == "jina__search"


@requirement("definition.bounds")
async def test_a_too_large_definition_is_not_read(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    command = command_of(call)
    # Random, so that PostgreSQL stores it uncompressed, unlike "x" * n.
    noise = "".join(map(chr, random.Random(0).choices(range(33, 123), k=270_000)))  # noqa: S311 - reproducible
    texts = {"x" * 200_000: False, noise[:250_000]: False, "x" * 20_000_000: True, noise: True, noise * 8: True}
    for text, oversized in texts.items():
        for column in ("parameters", "options"):
            await caller.add_tool(PROJECT, {**search_tool(), "parameters": {}, column: {"description": text}})
            await caller.database.execute("update resource.tools set after_execution = $1", "suspend" + text)
            tool = (await store.load(command)).definition
            assert tool is not None
            assert tool.oversized is oversized
            assert (tool.parameters is None, tool.options is None) == (oversized, oversized)
            assert len(str(tool.after_execution or "")) == 16  # more characters are never read


LONG_NUMBERS = {
    "large": ("1e131071", 400),
    "negative": ("-1e131071", 400),
    "many decimal places": ("1." + "0" * 16_383, 1_400),
    "small": ("1e-16383", 1_400),
    "few": ("1e131071", 50),
}


@pytest.mark.thorough
@requirement("definition.bounds", "answer.precheck")
@pytest.mark.parametrize("name", LONG_NUMBERS)
async def test_numbers_that_are_short_only_as_stored_are_not_read(
    caller: Caller, store: KernelStore, name: str
) -> None:
    """2,000 times 1e131071 take 579 bytes as stored and 262 MB as text."""
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    command, (number, times) = command_of(call), LONG_NUMBERS[name]
    await _save_earlier_result(caller, call)
    for column in ("parameters", "options"):
        await caller.add_tool(PROJECT, search_tool())
        await _add_numbers(caller, f"resource.tools set {column} = {column}", number, times)
        tool = (await store.load(command)).definition
        assert tool is not None
        assert (tool.parameters, tool.options) == (None, None)
        # Python cannot read an integer of that length. "few" is a small column, whose text is measured instead.
        assert (tool.oversized, tool.unreadable) == ((False, True) if name in ("large", "negative") else (True, False))
    for column in ("cards set content = content", "cards set metadata = metadata"):
        await _add_numbers(caller, column, number, times)
    await _add_numbers(caller, "state.agent_inbox set context_headers = context_headers", number, times)
    records = await store.load(command)
    assert records.card is not None
    assert records.waiting_turn is not None
    assert records.earlier is not None
    assert (records.card.content, records.card.metadata, records.waiting_turn.context_headers) == (None, {}, {})
    assert records.earlier.author_id is None


@requirement("definition.bounds")
async def test_every_float_of_a_definition_is_read(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    await caller.add_tool(PROJECT, {**search_tool(), "options": {"floats": [5e-324, 1.7976931348623157e308, 0.1, -0]}})
    tool = (await store.load(command_of(call))).definition
    assert tool is not None
    assert tool.options == {"floats": [5e-324, 1.7976931348623157e308, 0.1, 0]}


async def _add_numbers(caller: Caller, update: str, number: str, times: int) -> None:
    numbers = "select jsonb_agg($1::text::numeric) from generate_series(1, $2)"
    await caller.database.execute(f"update {update} || jsonb_build_object('n', ({numbers}))", number, times)


@requirement("answer.precheck")
async def test_no_row_of_a_call_is_read_beyond_its_size_limit(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    command = command_of(call)
    await _save_earlier_result(caller, call)
    for chars, oversized in {60_000: False, 70_000: True, 20_000_000: True}.items():
        for column in ("cards set metadata = metadata", "state.agent_inbox set context_headers = context_headers"):
            await caller.database.execute(
                f"update {column} || jsonb_build_object('parent_step_id', repeat('x', $1::int))",
                chars,
            )
        records = await store.load(command)
        assert records.card is not None
        assert records.waiting_turn is not None
        assert records.earlier is not None
        assert (records.card.oversized, records.waiting_turn.oversized) == (oversized, oversized)
        assert (records.card.metadata == {}, records.waiting_turn.context_headers == {}) == (oversized, oversized)
        assert records.earlier.content == {"status": "success", "after_execution": None}
        assert records.earlier.author_id == (None if oversized else "tool.other")


@requirement("answer.precheck")
async def test_a_result_with_a_large_stored_size_is_not_decompressed(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    await _save_earlier_result(caller, call)
    await caller.database.execute(
        "update cards set metadata = metadata || jsonb_build_object('x', repeat('x', $1::int)), "
        "content = content || jsonb_build_object('x', repeat('x', $1::int)) where card_id = 'earlier'",
        60_000_000,
    )
    earlier = (await store.load(command_of(call))).earlier
    assert earlier is not None
    assert not earlier.is_deleted
    assert (earlier.author_id, earlier.content) == (None, {"status": None, "after_execution": None})


@requirement("answer.precheck")
async def test_text_columns_are_read_up_to_a_limit(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    command = claiming(command_of(call), tool_call_id=None)
    await caller.database.execute("update cards set tool_call_id = repeat('x', 20000000)")
    await caller.database.execute(
        "update state.agent_inbox set channel_id = repeat('x', 20000000), correlation_id = repeat('x', 65536)"
    )
    records = await store.load(command)
    assert records.card is not None
    assert records.waiting_turn is not None
    assert len(records.card.tool_call_id or "") == 65_536
    assert len(records.waiting_turn.channel_id) == 4_096


@requirement("answer.precheck")
async def test_a_turn_is_searched_among_the_newest_rows_of_its_agent(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    await caller.database.execute("update state.agent_inbox set message_type = 'turn', created_at = now()")
    assert (await store.load(command_of(call))).waiting_turn is not None
    await caller.database.execute(
        "insert into state.agent_inbox (inbox_id, project_id, agent_id, message_type, agent_turn_id, turn_epoch, "
        "created_at) select 'row_' || n, $1, $2, 'turn', 'other_' || n, 1, now() + interval '1s' "
        "from generate_series(1, 1000) as n",
        PROJECT,
        AGENT,
    )
    assert (await store.load(command_of(call))).waiting_turn is None


async def _save_earlier_result(caller: Caller, call: PlacedCall) -> None:
    """Insert a result of the call with 20 MB, by another author."""
    content = {"status": "success", "result": "x" * 20_000_000, "after_execution": None}
    await caller.database.execute(
        "insert into cards (card_id, tenant_id, tool_call_id, content, metadata) values ('earlier', $1, $2, $3, $4)",
        PROJECT,
        call.tool_call_id,
        content,
        {"type": "tool.result", "author_id": "tool.other"},
    )


def test_the_repr_of_options_hides_logins() -> None:
    assert "hidden" not in repr(PoolOptions("v1r4", PostgresOptions(Secret("postgresql://u:hidden@db/x"), 1, 1.0)))
    assert "hidden" not in repr(BusOptions(NatsOptions(servers=("nats://hidden@bus:4222",), token=Secret("hidden"))))


@requirement("answer.atomic", "content.cursor")
async def test_an_artifact_is_saved_with_its_result_or_not_at_all(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    records = await store.load(command_of(call))
    artifact = artifact_card("tool.openapi", identify(command_of(call).identity, records.card), records.card, TEXT, 60)
    assert await store.commit(*result_of(call, records), artifact)
    second = replace(artifact, card_id="another")
    assert not await store.commit(*result_of(call, records), second)
    rows = await caller.database.fetch("select * from cards where metadata ->> 'type' = 'tool.artifact'")
    assert [row["card_id"] for row in rows] == [artifact.card_id]


@requirement("content.cursor")
async def test_an_artifact_is_readable_by_its_owner_only(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    records = await store.load(command_of(call))
    text = 'Größe 🎉 und "mehr"\n'
    stored = stored_text([Item(text)], [StoredItem(0, 3, len(text))])
    artifact = artifact_card(
        "tool.openapi", identify(command_of(call).identity, records.card), records.card, stored, 60
    )
    assert await store.commit(*result_of(call, records), artifact)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    found = await store.artifact(PROJECT, AGENT, artifact.card_id, 6, 5)
    items: Any = [[0, 3, len(text), None, "", "", ""]]
    assert found == Artifact(artifact.card_id, len(text), sha256, text[6:11], items)
    assert await store.artifact(PROJECT, "agent_other", artifact.card_id, 0, 5) is None
    assert await store.artifact("proj_other", AGENT, artifact.card_id, 0, 5) is None
    assert await store.artifact(PROJECT, AGENT, call.card_id, 0, 5) is None


@requirement("answer.earlier")
async def test_a_result_that_was_saved_but_not_reported_can_be_reported(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    card, report = result_of(call, await store.load(command_of(call)))
    assert await store.commit(card, report)
    await caller.database.execute("delete from state.agent_inbox where message_type = 'tool_result'")
    await caller.database.execute("delete from state.execution_edges where primitive = 'report'")
    assert await store.report(card.card_id, report)
    assert not await store.report("no such card", replace(report, inbox_id="x", edge_id="y"))
    assert (await caller.read_result(call)).inbox_row["payload"]["tool_result_card_id"] == card.card_id


async def test_ids_of_any_characters_and_length_are_stored_unchanged(caller: Caller, store: KernelStore) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    odd = "call'; drop table cards; -- ü %s {} " + "x" * 5000
    await caller.database.execute("update cards set tool_call_id = $1", odd)
    await caller.database.execute("update state.agent_inbox set correlation_id = $1", odd)
    await caller.database.execute("update state.execution_edges set correlation_id = $1", odd)
    call = replace(call, tool_call_id=odd, headers={**call.headers, "CG-Tool-Call-Id": odd})
    assert await store.commit(*result_of(call, await store.load(command_of(call))))
    assert (await caller.read_result(call)).inbox_row["context_headers"]["CG-Tool-Call-Id"] == odd


async def test_the_store_works_without_prepared_statements(stack: EmbeddedStack, database: str, caller: Caller) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    store = await KernelStore.open(
        PoolOptions("v1r4", PostgresOptions(Secret(dsn_of(stack, database)), 2, prepared_statements=False))
    )
    assert await store.commit(*result_of(call, await store.load(command_of(call))))
    await store.aclose()


async def test_an_unreachable_database_raises_unavailable(
    stack: EmbeddedStack, caller: Caller, store: KernelStore
) -> None:
    with pytest.raises(Unavailable):
        await KernelStore.open(
            PoolOptions("v1r4", PostgresOptions(Secret("postgresql://nobody:x@127.0.0.1:1/none"), 1, 1.0))
        )
    await caller.database.execute("drop table state.execution_edges")
    with pytest.raises(Unavailable, match="execution_edges"):
        await store.load(V1R4.decode(delivery()))


SSL_REQUEST_BYTES = 8


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    client = authority.issue_cert("executor")
    client.cert_chain_pems[0].write_to_path(str(tmp_path / "client.pem"))
    client.private_key_pem.write_to_path(str(tmp_path / "client_key.pem"))
    (tmp_path / "client_key.pem").chmod(0o600)
    return authority


@asynccontextmanager
async def tls_proxy(stack: EmbeddedStack, authority: trustme.CA, *, ask_client: bool = False) -> AsyncIterator[int]:
    """Yield the port of a proxy that accepts TLS only, with a certificate for `localhost`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED if ask_client else ssl.CERT_NONE

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(SSL_REQUEST_BYTES)
        writer.write(b"S")
        try:
            await writer.start_tls(context)
            await _forward(reader, writer, stack.postgres.port)
        except (OSError, ssl.SSLError):
            pass  # one side refused the certificate of the other
        finally:
            writer.close()

    server = await asyncio.start_server(enter, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
    sink.close()


async def connects(stack: EmbeddedStack, database: str, port: int, query: str, host: str = "localhost") -> bool:
    """Return whether the store connects through the proxy with these TLS parameters."""
    inner = dsn_of(stack, database)
    dsn = inner.replace(f"127.0.0.1:{stack.postgres.port}", f"{host}:{port}") + "?" + query
    try:
        store = await KernelStore.open(build_bootstrap(Settings(postgres={"dsn": dsn}), {}).pool)
    except Unavailable:
        return False
    await store.aclose()
    return True


@requirement("postgres.connection")
async def test_the_servers_certificate_and_name_are_verified(
    stack: EmbeddedStack, database: str, authority: trustme.CA, tmp_path: Path
) -> None:
    trusted = f"sslmode=verify-full&sslrootcert={tmp_path / 'ca.pem'}"
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other_ca.pem"))
    async with tls_proxy(stack, authority) as port:
        assert await connects(stack, database, port, trusted)
        assert not await connects(stack, database, port, trusted, host="127.0.0.1")
        assert not await connects(stack, database, port, f"sslmode=verify-full&sslrootcert={tmp_path / 'other_ca.pem'}")


@requirement("postgres.connection")
async def test_the_client_certificate_is_sent(
    stack: EmbeddedStack, database: str, authority: trustme.CA, tmp_path: Path
) -> None:
    trusted = f"sslmode=verify-full&sslrootcert={tmp_path / 'ca.pem'}"
    mine = f"&sslcert={tmp_path / 'client.pem'}&sslkey={tmp_path / 'client_key.pem'}"
    async with tls_proxy(stack, authority, ask_client=True) as port:
        assert await connects(stack, database, port, trusted + mine)
        assert not await connects(stack, database, port, trusted)


@pytest.mark.parametrize(
    ("query", "names"),
    [("sslmode=sure", "sslmode"), ("sslmode=verify-full&sslrootcert=/nowhere/ca.pem", "sslrootcert")],
)
@requirement("postgres.connection")
def test_invalid_tls_parameters_are_reported_before_any_connection(query: str, names: str) -> None:
    sections: dict[str, Any] = {"postgres": {"dsn": f"postgresql://u:p@127.0.0.1/x?{query}"}}
    with pytest.raises(SettingsError, match=rf"postgres\.dsn: {names}"):
        build_bootstrap(Settings(**sections), {})


V1R3_ACTOR = "tool.openapi.jina"
V1R3 = V1r3(V1R3_ACTOR)


@pytest.fixture
def options(stack: EmbeddedStack, v1r3_database: str) -> PoolOptions:
    return PoolOptions("v1r3", PostgresOptions(Secret(dsn_of(stack, v1r3_database)), 4))


@pytest.fixture
async def v1r3_store(options: PoolOptions) -> AsyncIterator[KernelStore]:
    v1r3_store = await KernelStore.open(options)
    yield v1r3_store
    await v1r3_store.aclose()


@pytest.fixture
async def call(v1r3_caller: Caller) -> PlacedCall:
    await v1r3_caller.add_tool(PROJECT, search_tool())
    return await v1r3_caller.place(PROJECT, AGENT, "jina_search", {"query": "x"}, publish=False)


def v1r3_command_of(call: PlacedCall) -> Command:
    return V1R3.decode(delivery(call.headers, call.body, subject=call.subject))


def v1r3_result_of(call: PlacedCall, records: CallRecords) -> tuple[ResultCard, Report]:
    identity = identify(v1r3_command_of(call).identity, records.card)
    card = result_card(
        actor_id=V1R3_ACTOR,
        function_name="jina_search",
        identity=identity,
        call_card=records.card,
        status="success",
        after_execution="suspend",
        result="hello",
        error=None,
        tool_output=None,
    )
    return card, V1R3.report(V1R3.accept(identity, records), new_root(), "a=b", card.card_id, card.content)


async def edges(caller: Caller) -> list[dict[str, Any]]:
    rows = await caller.database.fetch("select * from state.execution_edges order by primitive")
    return [dict(row) for row in rows]


@requirement("v1r3.report")
async def test_one_read_brings_everything_of_a_call_of_v1r3(call: PlacedCall, v1r3_store: KernelStore) -> None:
    records = await v1r3_store.load(v1r3_command_of(call))
    assert records.card is not None
    assert isinstance(records.card.content, dict)
    assert records.card.content["arguments"] == {"query": "x"}
    assert records.definition is not None
    assert records.worker_target == "worker_generic"
    assert records.request_edge is not None
    assert records.request_edge.recursion_depth == 0
    assert (records.waiting_turn, records.earlier, records.reported_inbox_id) == (None, None, None)


@requirement("v1r3.report", "answer.atomic")
async def test_a_commit_writes_card_row_and_edge_in_the_columns_of_the_version(
    call: PlacedCall, v1r3_store: KernelStore, v1r3_caller: Caller
) -> None:
    card, report = v1r3_result_of(call, records := await v1r3_store.load(v1r3_command_of(call)))
    artifact = artifact_card(V1R3_ACTOR, identify(v1r3_command_of(call).identity, records.card), records.card, TEXT, 60)
    assert await v1r3_store.commit(card, report, artifact)
    answer = await v1r3_caller.read_result(call)
    row = answer.inbox_row
    assert row["traceparent"] == report.context_headers["traceparent"]
    assert (row["tracestate"], row["trace_id"], row["recursion_depth"]) == ("a=b", report.trace_id, 0)
    assert (row["source_agent_id"], row["source_step_id"], row["parent_step_id"]) == (V1R3_ACTOR, None, call.step_id)
    assert row["payload"] == report.payload
    assert (answer.edge["source_agent_id"], answer.edge["target_agent_turn_id"]) == (V1R3_ACTOR, None)
    assert answer.edge["parent_step_id"] == call.step_id
    assert await v1r3_store.has_result(PROJECT, call.tool_call_id)
    assert await v1r3_store.artifact(PROJECT, AGENT, artifact.card_id, 0, 10) is not None
    assert not await v1r3_store.commit(replace(card, card_id="other"), replace(report, inbox_id="other"))


@requirement("v1r3.report")
async def test_a_missing_request_edge_is_created_and_an_existing_one_is_unchanged(
    call: PlacedCall, v1r3_store: KernelStore, v1r3_caller: Caller
) -> None:
    existing = await edges(v1r3_caller)
    records = await v1r3_store.load(v1r3_command_of(call))
    assert await v1r3_store.commit(*v1r3_result_of(call, records))
    report, request = await edges(v1r3_caller)
    assert [request] == existing
    for table in ("cards", "state.agent_inbox", "state.execution_edges"):
        condition = "metadata ->> 'type' = 'tool.result'" if table == "cards" else "true"
        await v1r3_caller.database.execute(f"delete from {table} where {condition}")  # noqa: S608 - texts of this file
    records = await v1r3_store.load(v1r3_command_of(call))
    assert records.request_edge is None
    assert await v1r3_store.commit(*v1r3_result_of(call, records))
    report, request = await edges(v1r3_caller)
    assert (report["primitive"], report["edge_phase"]) == ("report", "response")
    assert (request["primitive"], request["edge_phase"], request["recursion_depth"]) == ("tool_call", "request", 0)
    assert (request["source_agent_id"], request["source_step_id"]) == (AGENT, call.step_id)
    assert (request["trace_id"], request["channel_id"]) == (report["trace_id"], "public")


@requirement("v1r3.doorbell", "answer.earlier")
async def test_the_doorbell_of_an_earlier_report_is_built_from_its_row(
    call: PlacedCall, v1r3_store: KernelStore
) -> None:
    card, report = v1r3_result_of(call, await v1r3_store.load(v1r3_command_of(call)))
    assert await v1r3_store.commit(card, report)
    earlier = (await v1r3_store.load(v1r3_command_of(call))).earlier
    assert earlier is not None
    assert (earlier.author_id, earlier.report_status) == (V1R3_ACTOR, "pending")
    assert (earlier.is_deleted, earlier.is_of_this_call) == (False, True)
    assert V1R3.doorbell(PROJECT, "worker_generic", earlier.report_headers or {}) == report.doorbell


@requirement("answer.earlier")
async def test_a_card_without_its_report_is_reported(
    call: PlacedCall, v1r3_store: KernelStore, v1r3_caller: Caller
) -> None:
    card, report = v1r3_result_of(call, await v1r3_store.load(v1r3_command_of(call)))
    assert await v1r3_store.commit(card, report)
    await v1r3_caller.database.execute("delete from state.agent_inbox")
    assert (await v1r3_store.load(v1r3_command_of(call))).earlier is not None
    assert await v1r3_store.report(card.card_id, report)
    assert not await v1r3_store.report(card.card_id, report)
    assert not await v1r3_store.report("missing", replace(report, inbox_id="other"))


@requirement("tenant.scoped")
async def test_nothing_of_another_project_is_read(call: PlacedCall, v1r3_store: KernelStore) -> None:
    card, report = v1r3_result_of(call, await v1r3_store.load(v1r3_command_of(call)))
    assert await v1r3_store.commit(card, report)
    command = v1r3_command_of(call)
    foreign = await v1r3_store.load(replace(command, identity=replace(command.identity, project_id="other")))
    assert foreign == CallRecords(None, None, None, None, None, None)


@requirement("performance")
async def test_a_load_uses_indexes_only(call: PlacedCall, v1r3_caller: Caller) -> None:
    for table in ("cards", "state.agent_inbox", "state.execution_edges"):
        await v1r3_caller.database.execute(f"analyze {table}")
    await v1r3_caller.database.execute("set enable_seqscan = off")
    await v1r3_caller.database.execute(f"prepare load(text, text, text, text, text, text, text, text) as {v1r3.LOAD}")
    plan = await v1r3_caller.database.fetch(
        "explain execute load($1, $2, $3, 'a', 't', 'c', 'n', 'n')".replace("$1", f"'{PROJECT}'")
        .replace("$2", f"'{call.card_id}'")
        .replace("$3", f"'{call.tool_call_id}'")
    )
    assert not [row[0] for row in plan if "Seq Scan" in row[0]]


@requirement("dialects.recognised")
async def test_a_database_of_the_other_version_is_named(
    stack: EmbeddedStack, options: PoolOptions, database: str
) -> None:
    with pytest.raises(NeedsOperator, match=r"a database of protocol v1r3, but v1r4 is configured.*protocol\.version"):
        await KernelStore.open(replace(options, version="v1r4"))
    with pytest.raises(NeedsOperator, match="a database of protocol v1r4, but v1r3 is configured"):
        await KernelStore.open(replace(options, postgres=PostgresOptions(Secret(dsn_of(stack, database)))))


@requirement("postgres.failures")
async def test_a_missing_column_is_not_mistaken_for_the_other_version(
    options: PoolOptions, v1r3_caller: Caller
) -> None:
    await v1r3_caller.database.execute("alter table state.execution_edges rename column metadata to meta")
    with pytest.raises(NeedsOperator, match='column "metadata" of relation "execution_edges"'):
        await KernelStore.open(options)


async def test_the_timeline_reads_the_inbox_of_the_version(
    call: PlacedCall, v1r3_store: KernelStore, options: PoolOptions
) -> None:
    assert await v1r3_store.commit(*v1r3_result_of(call, await v1r3_store.load(v1r3_command_of(call))))
    rows = await call_rows(options, PROJECT, call.tool_call_id)
    assert [row["status"] for row in rows.inbox] == ["pending"]
    assert {row["edge_phase"] for row in rows.edges} == {"request", "response"}
    assert {row["type"] for row in rows.cards} == {"tool.call", "tool.result"}


@requirement("v1r3.report", "postgres.refusals")
async def test_a_row_of_v1r3_that_any_result_would_lack_is_no_defect_of_the_call(
    call: PlacedCall, v1r3_store: KernelStore, v1r3_caller: Caller
) -> None:
    card, report = v1r3_result_of(call, await v1r3_store.load(v1r3_command_of(call)))
    database = v1r3_caller.database
    for number, table in enumerate(("cards", "state.agent_inbox", "state.execution_edges")):
        await database.execute(
            f"create function nothing{number}() returns trigger language plpgsql as 'begin return null; end'; "
            f"create trigger nothing before insert on {table} for each row execute function nothing{number}()"
        )
        with pytest.raises(NeedsOperator, match=f"discards new rows of {table}"):
            await v1r3_store.commit(card, report)
        await database.execute(f"drop trigger nothing on {table}")
    assert await v1r3_store.commit(card, report)
    assert not await v1r3_store.commit(card, report)
