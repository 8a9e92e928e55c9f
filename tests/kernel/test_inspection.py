"""Checks of a new database connection, on a real PostgreSQL with the kernel's tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from urllib.parse import urlsplit

import asyncpg
import pytest

from openapi_tool.kernel.breaker import CircuitBreaker
from openapi_tool.kernel.failures import PoolShareUsed
from openapi_tool.kernel.inspection import NEEDED_INDEXES, unique_index
from openapi_tool.kernel.store import KernelStore, PoolOptions
from openapi_tool.local.caller import Caller
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.errors import NeedsOperator, Unavailable
from tests.requirements import requirement
from tests.support import V1R4, delivery, dsn_of

COMMAND = V1R4.decode(delivery())


@pytest.fixture(params=[True, False], ids=["prepared", "unprepared"])
def options(stack: EmbeddedStack, database: str, request: pytest.FixtureRequest) -> PoolOptions:
    return PoolOptions(dsn_of(stack, database), 2, 5.0, prepared_statements=request.param)


@pytest.fixture
async def store(options: PoolOptions) -> AsyncIterator[KernelStore]:
    store = await KernelStore.open(options)
    yield store
    await store.aclose()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "alter table state.execution_edges rename column metadata to meta",
            r'column "metadata" of relation "execution_edges" does not exist \(SQLSTATE 42703\).*configured version',
        ),
        (
            "alter table resource.project_agents rename column worker_target to worker",
            r'column "worker_target" does not exist \(SQLSTATE 42703\).*configured version',
        ),
        (
            "drop table state.execution_edges",
            "missing: table state.execution_edges.*check that it is the kernel.s database",
        ),
        ("revoke insert on cards from openapi_tool", "missing: insert on cards.*sql grants"),
        (
            "drop index uniq_cards_tool_result_call",
            r"missing: unique index on cards \(tenant_id, tool_call_id\) where metadata.*configured version",
        ),
        (
            (
                "drop index state.idx_agent_inbox_unique; "
                "create index on state.agent_inbox (project_id, message_type, md5(correlation_id))"
            ),
            r"missing: unique index on state.agent_inbox \(correlation_id, message_type, project_id\)",
        ),
        (
            (
                "drop index state.idx_execution_edges_unique; "
                "create unique index on state.execution_edges (project_id, md5(correlation_id), primitive)"
                " where edge_phase = 'x'"
            ),
            "missing: unique index on state.execution_edges",
        ),
    ],
)
@requirement("postgres.failures")
async def test_missing_objects_are_named_at_the_start_and_by_a_thorough_ping(
    options: PoolOptions, store: KernelStore, caller: Caller, fault: str, message: str
) -> None:
    await caller.database.execute(fault)
    with pytest.raises(NeedsOperator, match=message):
        await KernelStore.open(options)
    with pytest.raises(NeedsOperator, match=message):
        await store.ping(thorough=True)


@pytest.mark.parametrize(
    "change",
    [
        "alter index uniq_cards_tool_result_call rename to another",
        (
            "drop index uniq_cards_tool_result_call; create unique index on cards (md5(tool_call_id), tenant_id) "
            "where metadata ->> 'type' = 'tool.result'"
        ),
        (
            "drop index state.idx_agent_inbox_unique; "
            "create unique index on state.agent_inbox (correlation_id, project_id, message_type)"
        ),
    ],
)
@requirement("postgres.failures")
async def test_an_index_is_identified_by_its_columns_not_by_its_name(
    options: PoolOptions, caller: Caller, change: str
) -> None:
    await caller.database.execute(change)
    await (await KernelStore.open(options)).aclose()


@requirement("postgres.failures")
def test_an_index_on_more_rows_or_fewer_columns_does_not_match() -> None:
    where = "tool_call_id IS NOT NULL AND (metadata ->> 'type'::text) = 'tool.result'::text"
    assert unique_index("cards", ["tenant_id", "md5(tool_call_id)"], where) == NEEDED_INDEXES[0]
    assert unique_index("cards", ["tenant_id", "md5(tool_call_id)"], "") != NEEDED_INDEXES[0]
    assert unique_index("cards", ["tenant_id"], where) != NEEDED_INDEXES[0]
    assert unique_index("cards", ["tenant_id", "tool_call_id"], where.replace(".result", ".call")) != NEEDED_INDEXES[0]


@requirement("postgres.failures")
async def test_a_database_that_turns_read_only_is_reported_and_its_connections_are_closed(
    store: KernelStore, caller: Caller, database: str
) -> None:
    await store.load(COMMAND)
    before = await _backends(caller)
    await caller.database.execute(f'alter database "{database}" set default_transaction_read_only = on')
    await store.ping()  # a setting of the database reaches new connections only
    await caller.database.execute("select pg_terminate_backend(pid) from pg_stat_activity where pid = any($1)", before)
    with pytest.raises(Unavailable, match=r"read-only .*target_session_attrs=read-write"):
        await _until_reconnected(store)
    await caller.database.execute("set default_transaction_read_only = off")
    await caller.database.execute(f'alter database "{database}" reset default_transaction_read_only')
    await store.ping()
    await store.load(COMMAND)


async def _until_reconnected(store: KernelStore) -> None:
    """Load twice: the first load on a terminated connection fails with another error."""
    try:
        await store.load(COMMAND)
    except Unavailable as error:
        if "read-only" in str(error):
            raise
    await store.load(COMMAND)


@requirement("postgres.failures")
async def test_a_ping_that_finds_a_read_only_database_replaces_the_connections(
    store: KernelStore, caller: Caller
) -> None:
    async with store._connection("") as connection:  # noqa: SLF001 - like a demoted primary, for one session
        await connection.execute("set default_transaction_read_only = on")
        before = connection.get_server_pid()
    with pytest.raises(Unavailable, match="read-only"):
        await store.ping()
    await store.ping()
    assert before not in await _backends(caller)


@requirement("postgres.failures")
async def test_a_load_from_a_read_only_database_is_discarded(store: KernelStore) -> None:
    async with store._connection("") as connection:  # noqa: SLF001 - like a demoted primary, for one session
        await connection.execute("set default_transaction_read_only = on")
    with pytest.raises(Unavailable, match="read-only"):
        await store.load(COMMAND)
    assert (await store.load(COMMAND)).waiting_turn is None


@requirement("postgres.failures")
async def test_a_text_that_the_driver_cannot_encode_does_not_count_as_outage(store: KernelStore) -> None:
    with pytest.raises(asyncpg.DataError, match="query argument"):
        await store.has_result("project", "\ud800")


@requirement("postgres.connection")
async def test_an_idle_pool_shrinks_to_one_connection(
    options: PoolOptions, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openapi_tool.kernel.store._MAX_IDLE_S", 0.2)
    store = await KernelStore.open(options)
    async with store._connection("a"), store._connection("b"):  # noqa: SLF001 - two concurrent calls
        assert len(await _backends(caller)) == 2
    while len(await _backends(caller)) > 1:
        await store.ping()
    await store.ping()
    assert len(await _backends(caller)) == 1
    await store.aclose()


async def _backends(caller: Caller) -> list[int]:
    """Return the process ids of the executors' connections to this database."""
    rows: list[asyncpg.Record] = await caller.database.fetch(
        "select pid from pg_stat_activity where application_name = 'openapi-tool' and datname = current_database()"
    )
    return [row["pid"] for row in rows]


@requirement("fair.projects")
async def test_a_connection_goes_to_the_next_project_before_the_rest_of_a_queue(options: PoolOptions) -> None:
    store = await KernelStore.open(replace(options, size=1))
    order: list[str] = []

    async def query(project: str) -> None:
        await store.has_result(project, "call")
        order.append(project)

    async with asyncio.TaskGroup() as group, store._connection("large"):  # noqa: SLF001 - blocks the pool like a long statement
        for project in ("large", "large", "large", "small"):
            group.create_task(query(project))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await store.aclose()
    assert order == ["large", "small", "large", "large"]


@requirement("fair.projects")
async def test_a_project_that_waits_for_its_own_statements_does_not_open_the_breaker(options: PoolOptions) -> None:
    """Slow statements of one project would otherwise stop the fetching of all projects' commands."""
    store = await KernelStore.open(replace(options, size=1, timeout_s=0.2))
    breaker = CircuitBreaker(lambda: None)
    async with store._connection("large"):  # noqa: SLF001 - blocks the pool like a long statement
        for _ in range(3):
            with pytest.raises(PoolShareUsed), breaker.attempt("load", "proj"):
                await store.has_result("large", "call")
    assert breaker.reason == ""
    assert not await store.has_result("large", "call"), "the permit was not lost"
    await store.aclose()


@requirement("postgres.failures")
async def test_calls_share_existing_connections_if_the_server_allows_no_more(
    stack: EmbeddedStack, options: PoolOptions, caller: Caller
) -> None:
    """Otherwise each call that gets no connection would make the executor unready."""
    role = await caller.database.fetchval("select quote_ident($1)", urlsplit(options.dsn).username)
    store = await KernelStore.open(replace(options, size=8))
    await caller.database.execute(f"alter role {role} connection limit 1")
    try:
        await asyncio.gather(*(store.has_result(f"project {number}", "call") for number in range(20)))
    finally:
        await caller.database.execute(f"alter role {role} connection limit -1")
        await store.aclose()
