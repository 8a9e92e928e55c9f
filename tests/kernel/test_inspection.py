"""Checks of the database, and privileges.

The whole suite shows that they are enough: its executors have no others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from aiohttp import ClientSession
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.kernel.breaker import CircuitBreaker
from openapi_tool.kernel.failures import PoolShareUsed
from openapi_tool.kernel.inspection import NEEDED_INDEXES, unique_index
from openapi_tool.kernel.store import KernelStore, PoolOptions
from openapi_tool.local.caller import Caller, prepare_database
from openapi_tool.local.servers import free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.errors import NeedsOperator, Unavailable
from tests.conftest import AGENT, PROJECT, TEMPLATE, StartExecutor, search_tool
from tests.requirements import requirement
from tests.support import ROLE, V1R4, delivery, dsn_of, each, make_role

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


DATABASE, REGISTRAR = "grants", "registrar"
HOSTILE = 'r"; drop table cards; --'

COLUMNS = {
    "cards": "card_id",
    "public.projects": "title",
    "resource.tools": "tool_name",
    "resource.project_agents": "agent_id",
    "state.agent_inbox": "status",
    "state.execution_edges": "edge_id",
    "state.turn_waiting_tools": "wait_status",
}
# Privileges listed at the end of protocol section 6.
ALLOWED = {
    "cards": {"select", "insert"},
    "resource.tools": {"select"},
    "resource.project_agents": {"select"},
    "state.agent_inbox": {"select", "insert"},
    "state.execution_edges": {"select", "insert"},
}
REGISTRATION = {"public.projects": {"select"}, "resource.tools": {"insert", "update", "delete"}}
VERBS = {
    "select": "select {column} from {table}",
    "insert": "insert into {table} default values",
    "update": "update {table} set {column} = 'x'",
    "delete": "delete from {table}",
    "truncate": "truncate {table}",
    "drop": "drop table {table}",
    "alter": "alter table {table} add column more text",
    "index": "create index on {table} ({column})",
    "trigger": "create trigger t before insert on {table} execute function suppress_redundant_updates_trigger()",
}
FORBIDDEN_STATEMENTS = [
    "create table public.mine (x int)",
    "create table state.mine (x int)",
    "create table resource.mine (x int)",
    "create schema mine",
    "drop schema state cascade",
    "create role mine",
    "set role kernel",
    "grant insert on state.turn_waiting_tools to openapi_tool",
    "copy cards to program 'true'",
    "select pg_read_file('/etc/hostname')",
]


@pytest.fixture(scope="module")
def granted(stack: EmbeddedStack) -> Iterator[str]:
    """Yield a database in which two roles have their grants."""

    async def prepare() -> None:
        await prepare_database(stack.postgres.dsn(), DATABASE, None, TEMPLATE)
        await make_role(stack.postgres.dsn(DATABASE), REGISTRAR, registration=True)

    asyncio.run(prepare())
    yield DATABASE
    asyncio.run(drop(stack, DATABASE, REGISTRAR))


async def drop(stack: EmbeddedStack, database: str, role: str) -> None:
    connection = await asyncpg.connect(stack.postgres.dsn())
    await connection.execute(f'drop database "{database}" with (force)')
    await connection.execute(f'drop role "{role}"')
    await connection.close()


@pytest.fixture
async def roles(stack: EmbeddedStack, granted: str) -> AsyncIterator[dict[str, asyncpg.Connection]]:
    roles = {role: await asyncpg.connect(dsn_of(stack, granted, role)) for role in (ROLE, REGISTRAR)}
    yield roles
    for connection in roles.values():
        await connection.close()


def may(table: str, verb: str, role: str) -> bool:
    return verb in ALLOWED.get(table, ()) or (role == REGISTRAR and verb in REGISTRATION.get(table, ()))


@each("role", [ROLE, REGISTRAR])
@each("verb", VERBS)
@each("table", COLUMNS)
@requirement("privilege.grants")
async def test_a_role_may_do_what_the_protocol_lists_and_nothing_else(
    roles: dict[str, asyncpg.Connection], table: str, verb: str, role: str
) -> None:
    outcome = await tried(roles[role], VERBS[verb].format(table=table, column=COLUMNS[table]))
    if may(table, verb, role):
        assert not isinstance(outcome, asyncpg.InsufficientPrivilegeError), outcome
    else:
        assert isinstance(outcome, asyncpg.InsufficientPrivilegeError), outcome


@pytest.mark.parametrize("statement", FORBIDDEN_STATEMENTS)
@requirement("privilege.grants")
async def test_a_role_may_do_nothing_outside_its_tables(roles: dict[str, asyncpg.Connection], statement: str) -> None:
    for connection in roles.values():
        assert isinstance(await tried(connection, statement), asyncpg.InsufficientPrivilegeError)


async def tried(connection: asyncpg.Connection, statement: str) -> Exception | None:
    """Return the error of a statement, and roll it back."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        await connection.execute(statement)
    except asyncpg.PostgresError as error:
        refusal: Exception = error
        return refusal
    finally:
        await transaction.rollback()
    return None


def printed(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["sql", "grants", *arguments])


@pytest.mark.parametrize("more", [(), ("--registration",)])
@requirement("privilege.grants")
async def test_printed_grants_can_be_run_unchanged_for_any_role(
    stack: EmbeddedStack, database: str, more: tuple[str, ...]
) -> None:
    text = printed("--role", HOSTILE, *more).stdout
    assert json.loads(printed("--role", HOSTILE, *more, "--json").stdout) == {
        "role": HOSTILE,
        "statements": text.replace(";\n", "\n").splitlines(),
    }
    quoted = '"' + HOSTILE.replace('"', '""') + '"'
    connection = await asyncpg.connect(stack.postgres.dsn(database))
    await connection.execute(f"create role {quoted}")
    try:
        await connection.execute(text)
        given = await connection.fetch(
            "select replace(table_schema || '.' || table_name, 'public.cards', 'cards'), lower(privilege_type) "
            "from information_schema.role_table_grants where grantee = $1",
            HOSTILE,
        )
        role = REGISTRAR if more else ROLE
        assert set(map(tuple, given)) == {
            (table, verb) for table in COLUMNS for verb in VERBS if may(table, verb, role)
        }
    finally:
        await connection.execute(f"drop owned by {quoted}; drop role {quoted}")
        await connection.close()


@requirement("privilege.grants")
def test_the_default_role_is_the_user_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://its_role@db/kernel")
    assert printed().stdout == printed("--role", "its_role").stdout
    for dsn in ("", "postgresql://db/kernel"):
        monkeypatch.setenv("PG_DSN", dsn)
        assert (printed().exit_code, printed().stdout) == (2, "")
        assert printed().stderr.startswith("openapi-tool: --role: name the database role")


@pytest.mark.parametrize("role", ["", "public", "none", "r" * 64, "ü" * 32, "a\nb", "a\x00b"])
@requirement("privilege.grants")
def test_an_impossible_role_name_is_refused(role: str) -> None:
    refused = printed("--role", role)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--role" in refused.stderr


@pytest.mark.parametrize(
    ("fault", "message", "remedy"),
    [
        ("revoke insert on state.agent_inbox from openapi_tool", "missing: insert on state.agent_inbox", "sql grants"),
        ("revoke select on resource.tools from openapi_tool", "missing: select on resource.tools", "sql grants"),
        (
            "revoke usage on schema state from openapi_tool",
            r"permission denied for schema state \(SQLSTATE 42501\)",
            "sql grants",
        ),
        ("drop table state.execution_edges", "missing: table state.execution_edges", "with all its migrations"),
        ("drop table cards", "missing: table cards", "with all its migrations"),
    ],
)
@requirement("postgres.failures")
async def test_a_denial_and_a_missing_table_need_an_operator(
    stack: EmbeddedStack, caller: Caller, database: str, fault: str, message: str, remedy: str
) -> None:
    store = await KernelStore.open(PoolOptions(dsn_of(stack, database), 1, 5.0, prepared_statements=True))
    await store.ping()
    await caller.database.execute(fault)
    with pytest.raises(Unavailable, match=rf"{message}.*\. An operator must correct this: .*{remedy}"):
        await store.ping()
    await store.aclose()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("revoke select on cards from openapi_tool", r"permission denied for table cards \(SQLSTATE 42501\)"),
        ("drop table cards", r'relation "cards" does not exist \(SQLSTATE 42P01\)'),
    ],
)
@requirement("postgres.failures")
async def test_a_denied_statement_names_the_table(
    stack: EmbeddedStack, caller: Caller, database: str, fault: str, message: str
) -> None:
    store = await KernelStore.open(PoolOptions(dsn_of(stack, database), 1, 5.0, prepared_statements=True))
    await caller.database.execute(fault)
    with pytest.raises(Unavailable, match=rf"{message}.*An operator must correct this"):
        await store.has_result("project", "call")
    await store.aclose()


@requirement("postgres.failures")
async def test_grants_on_single_columns_are_enough_to_be_ready(
    stack: EmbeddedStack, caller: Caller, database: str
) -> None:
    await caller.database.execute("revoke select on resource.tools from openapi_tool")
    await caller.database.execute("grant select (project_id, tool_name) on resource.tools to openapi_tool")
    store = await KernelStore.open(PoolOptions(dsn_of(stack, database), 1, 5.0, prepared_statements=True))
    await store.ping()
    await store.aclose()


@requirement("postgres.failures")
async def test_without_a_privilege_it_is_not_ready_and_waiting_calls_are_answered_later(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor
) -> None:
    port = free_port()
    await caller.add_tool(PROJECT, search_tool())
    executor = start_executor(
        {"OPENAPI_TOOL__HEALTH__PORT": str(port), "OPENAPI_TOOL__HEALTH__CHECK_INTERVAL_S": "0.05"}
    )
    await readiness(port, wanted=True)
    await caller.database.execute("revoke select, insert on cards from openapi_tool")
    shown = await readiness(port, wanted=False)
    assert [name for name, part in shown["dependencies"].items() if not part["ok"]] == ["postgres"]
    assert "missing: select on cards, insert on cards. An operator must correct this" in executor.log_text()
    call = await caller.place(PROJECT, AGENT, "jina_search", {"query": "hello world", "count": 3})
    await asyncio.sleep(0.3)
    assert stack.upstream.requests() == []
    await caller.database.execute("grant select, insert on cards to openapi_tool")
    assert (await caller.result(call, 10)).card["content"]["status"] == "success"
    assert len(stack.upstream.requests()) == 1
    assert executor.log_text().count("missing: ") == 1  # logged once, not at every check


async def readiness(port: int, *, wanted: bool) -> dict[str, Any]:
    """Return the body of /readyz once `ready` equals `wanted`. Raises TimeoutError."""
    async with asyncio.timeout(15), ClientSession() as session:
        while True:
            async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                shown: dict[str, Any] = await answer.json()
            if shown["ready"] == wanted:
                return shown
            await asyncio.sleep(0.02)
