"""Checks of the database, privileges, and the cost of a project's calls.

The whole suite shows that the printed privileges suffice: its executors have no others.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import asyncpg
import pytest
from aiohttp import ClientSession
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.kernel.postgres.breaker import CircuitBreaker
from openapi_tool.kernel.postgres.failures import PoolShareUsed
from openapi_tool.kernel.postgres.privileges import USAGE, reader_grants
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.kernel.postgres.unique_indexes import NEEDED_INDEXES, unique_index
from openapi_tool.kernel.postgres.usage import first_card_id, usage, usage_query
from openapi_tool.kernel.postgres.usage_keys import By
from openapi_tool.local.caller import Caller
from openapi_tool.local.database import prepare_database
from openapi_tool.local.servers import free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.nats_records.record_store import BUDGETS
from openapi_tool.options.postgres import PoolOptions, PostgresOptions
from openapi_tool.protocol.attempts import UpstreamAttempt
from openapi_tool.protocol.cards import ResultCard, new_id, result_card
from openapi_tool.protocol.errors import NeedsOperator, RateLimited, Unavailable
from openapi_tool.quotas.account_id import AccountId
from openapi_tool.quotas.account_record import OpenAttempt, unused
from openapi_tool.quotas.amounts import Amount
from openapi_tool.quotas.periods import Periods
from openapi_tool.quotas.shared_record import encode
from openapi_tool.state.nats_kv import NatsKvRecords
from openapi_tool.tools.output import Item, ToolOutput, Usage
from openapi_tool.tools.result import RenderedResult, ResultFields, failure, success
from openapi_tool.tools.secret_variables import Secret
from tests.conftest import AGENT, PROJECT, TEMPLATE, StartExecutor, search_tool
from tests.kernel.test_store import command_of, result_of
from tests.requirements import requirement
from tests.support import ROLE, V1R4, delivery, dsn_of, each, identity, make_role, pool_of
from tests.waiting import WAIT_S

COMMAND = V1R4.decode(delivery())


@pytest.fixture(params=[True, False], ids=["prepared", "unprepared"])
def options(stack: EmbeddedStack, database: str, request: pytest.FixtureRequest) -> PoolOptions:
    return PoolOptions("v1r4", PostgresOptions(Secret(dsn_of(stack, database)), 2, prepared_statements=request.param))


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
            r"missing: unique index on cards \(tenant_id, md5\(tool_call_id\)\) where tool_call_id is not null ",
        ),
        (
            (
                "drop index state.idx_agent_inbox_unique; "
                "create index on state.agent_inbox (project_id, message_type, md5(correlation_id))"
            ),
            r"missing: unique index on state.agent_inbox \(md5\(correlation_id\), message_type, project_id\)",
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
    async with store._connections.lend("") as connection:  # noqa: SLF001 - like a demoted primary, for one session
        await connection.execute("set default_transaction_read_only = on")
        before = connection.get_server_pid()
    with pytest.raises(Unavailable, match="read-only"):
        await store.ping()
    await store.ping()
    assert before not in await _backends(caller)


@requirement("postgres.failures")
async def test_a_load_from_a_read_only_database_is_discarded(store: KernelStore) -> None:
    async with store._connections.lend("") as connection:  # noqa: SLF001 - like a demoted primary, for one session
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
    monkeypatch.setattr("openapi_tool.kernel.postgres.connections._MAX_IDLE_S", 0.2)
    store = await KernelStore.open(options)
    async with store._connections.lend("a"), store._connections.lend("b"):  # noqa: SLF001 - two concurrent calls
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
    store = await KernelStore.open(replace(options, postgres=replace(options.postgres, pool_size=1)))
    order: list[str] = []

    async def query(project: str) -> None:
        await store.has_result(project, "call")
        order.append(project)

    async with asyncio.TaskGroup() as group, store._connections.lend("large"):  # noqa: SLF001 - blocks the pool like a long statement
        for project in ("large", "large", "large", "small"):
            group.create_task(query(project))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await store.aclose()
    assert order == ["small", "large", "large", "large"]


@requirement("fair.projects")
async def test_a_project_that_waits_for_its_own_statements_does_not_open_the_breaker(options: PoolOptions) -> None:
    """Slow statements of one project would otherwise stop the fetching of all projects' commands."""
    store = await KernelStore.open(replace(options, postgres=replace(options.postgres, pool_size=1, timeout_s=0.2)))
    breaker = CircuitBreaker(lambda: None)
    async with store._connections.lend("large"):  # noqa: SLF001 - blocks the pool like a long statement
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
    store = await KernelStore.open(replace(options, postgres=replace(options.postgres, pool_size=8)))
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


@requirement("privilege.grants")
def test_a_role_that_may_not_register_tools_is_told_what_to_grant(stack: EmbeddedStack, granted: str) -> None:
    environment = {"PG_DSN": dsn_of(stack, granted, ROLE)}
    result = CliRunner().invoke(app, ["tools", "list", "--project", "p", "--db"], env=environment)
    assert result.exit_code == 1
    remedy = "An operator must correct this: grant what `openapi-tool sql grants --registration` prints"
    assert result.stderr == f"openapi-tool: PostgreSQL: permission denied for table projects. {remedy}\n"


@pytest.mark.parametrize("user", ["inspect", "usage"])
@requirement("privilege.grants")
def test_privileges_to_register_tools_are_refused_for_a_command_that_only_reads(user: str) -> None:
    result = printed("--role", "reader", "--for", user, "--registration")
    assert result.exit_code == 2
    assert (
        result.stderr == f"openapi-tool: --registration: {user} registers no tools; leave out --registration or --for\n"
    )


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
def test_the_default_role_is_the_user_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no `dev` is found
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
    store = await KernelStore.open(PoolOptions("v1r4", PostgresOptions(Secret(dsn_of(stack, database)), 1)))
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
    store = await KernelStore.open(PoolOptions("v1r4", PostgresOptions(Secret(dsn_of(stack, database)), 1)))
    await caller.database.execute(fault)
    with pytest.raises(Unavailable, match=rf"{message}.*An operator must correct this"):
        await store.has_result("project", "call")
    await store.aclose()


@requirement("postgres.failures")
async def test_grants_on_the_columns_in_use_are_enough_to_be_ready(
    stack: EmbeddedStack, caller: Caller, database: str
) -> None:
    await caller.database.execute("revoke select on resource.tools from openapi_tool")
    used = "project_id, tool_name, after_execution, parameters"
    await caller.database.execute(f"grant select ({used}) on resource.tools to openapi_tool")
    options = PoolOptions("v1r4", PostgresOptions(Secret(dsn_of(stack, database)), 1))
    with pytest.raises(NeedsOperator, match=r"permission denied for table tools .*sql grants"):
        await KernelStore.open(options)
    await caller.database.execute("grant select (options) on resource.tools to openapi_tool")
    store = await KernelStore.open(options)
    await store.ping()
    await store.aclose()


SHAPE_FAULTS = {
    "a column is renamed": (
        "alter table state.agent_inbox rename column enqueue_mode to mode",
        "alter table state.agent_inbox rename column mode to enqueue_mode",
        'column "enqueue_mode"',
    ),
    "a column that is read has another type": (
        "alter table state.agent_inbox alter column turn_epoch type text",
        "alter table state.agent_inbox alter column turn_epoch type bigint using turn_epoch::bigint",
        "a column has another type: operator does not exist: text = bigint",
    ),
    "a column that is written has another type": (
        "alter table state.agent_inbox alter column payload drop default, alter column payload type text",
        "alter table state.agent_inbox alter column payload type jsonb using payload::jsonb",
        "a column has another type: .*expected str",
    ),
    "a unique index is dropped": (
        "drop index uniq_cards_tool_result_call",
        (
            "create unique index uniq_cards_tool_result_call on cards (tenant_id, md5(tool_call_id)) "
            "where tool_call_id is not null and metadata ->> 'type' = 'tool.result'"
        ),
        "missing: unique index on cards",
    ),
    "a unique index is no longer unique": (
        (
            "drop index state.idx_agent_inbox_unique; create index idx_agent_inbox_unique on state.agent_inbox "
            "(project_id, message_type, md5(correlation_id))"
        ),
        (
            "drop index state.idx_agent_inbox_unique; create unique index idx_agent_inbox_unique on state.agent_inbox "
            "(project_id, message_type, md5(correlation_id))"
        ),
        "missing: unique index on state.agent_inbox",
    ),
    "a privilege on a column is revoked": (
        (
            "revoke insert on state.execution_edges from openapi_tool; "
            "grant insert (edge_id) on state.execution_edges to openapi_tool"
        ),
        "grant insert on state.execution_edges to openapi_tool",
        "permission denied for table execution_edges",
    ),
    "a column is required": (
        (
            "alter table state.agent_inbox add column priority int not null default 0; "
            "alter table state.agent_inbox alter column priority drop default"
        ),
        "alter table state.agent_inbox alter column priority set default 0",
        r"columns that this version does not write are required: state\.agent_inbox\.priority",
    ),
    "a null is refused": (
        "alter table state.agent_inbox alter column enqueue_mode set not null",
        "alter table state.agent_inbox alter column enqueue_mode drop not null",
        r"columns that this version does not write are required: state\.agent_inbox\.enqueue_mode",
    ),
    "a policy hides rows": (
        "alter table resource.tools enable row level security",
        "alter table resource.tools disable row level security",
        "row-level security may hide rows of resource.tools.*bypassrls",
    ),
    "a view takes a table's place": (
        (
            "alter table cards rename to stored; create view cards as select * from stored union all "
            "select * from stored; grant select, insert on cards to openapi_tool"
        ),
        "drop view cards; alter table stored rename to cards",
        "PostgreSQL: ObjectNotInPrerequisiteStateError: cannot insert into view",
    ),
    "a rule takes an insert's place": (
        "create rule nothing as on insert to cards do instead nothing",
        "drop rule nothing on cards",
        "PostgreSQL: FeatureNotSupportedError",
    ),
    "a table is dropped": (
        "alter table resource.project_agents rename to agents",
        "alter table resource.agents rename to project_agents",
        "missing: table resource.project_agents",
    ),
}


@requirement("postgres.shape")
@pytest.mark.parametrize(("fault", "repair", "message"), SHAPE_FAULTS.values(), ids=SHAPE_FAULTS)
async def test_damage_of_the_tables_is_found_by_the_next_ping_and_cleared_by_an_inspection_only(
    store: KernelStore, caller: Caller, fault: str, repair: str, message: str
) -> None:
    await store.ping()
    await caller.database.execute(fault)
    for _ in range(3):
        with pytest.raises(Unavailable, match=message):
            await store.ping(thorough="rule" in fault)
    await caller.database.execute(repair)
    await store.ping()


@requirement("postgres.shape")
async def test_row_security_that_is_forced_on_the_owner_of_a_table_is_found(store: KernelStore, caller: Caller) -> None:
    owner = await caller.database.fetchval("select current_user")
    await caller.database.execute(
        f"alter table resource.tools owner to {ROLE}; alter table resource.tools enable row level security"
    )
    await store.ping()
    await caller.database.execute("alter table resource.tools force row level security")
    with pytest.raises(Unavailable, match=r"row-level security may hide rows of resource\.tools"):
        await store.ping()
    await caller.database.execute(
        "alter table resource.tools no force row level security, disable row level security; "
        f'alter table resource.tools owner to "{owner}"; grant select on resource.tools to {ROLE}'
    )
    await store.ping()


@requirement("postgres.shape")
async def test_settings_of_the_role_are_named_or_make_no_difference(
    stack: EmbeddedStack, caller: Caller, database: str
) -> None:
    options = PoolOptions("v1r4", PostgresOptions(Secret(dsn_of(stack, database)), 1))
    await caller.database.execute(f'alter role {ROLE} in database "{database}" set quote_all_identifiers = on')
    await (await KernelStore.open(options)).aclose()
    await caller.database.execute(f'alter role {ROLE} in database "{database}" set search_path = state')
    with pytest.raises(NeedsOperator, match=r"search_path of the role does not find the table cards.*set search_path"):
        await KernelStore.open(options)


@requirement("postgres.shape")
async def test_a_new_optional_column_or_index_is_no_damage(store: KernelStore, caller: Caller) -> None:
    await store.ping()
    await caller.database.execute("alter table state.agent_inbox add column priority int not null default 0")
    await caller.database.execute("alter table cards add column note text; create index on cards (note)")
    await store.ping()


@requirement("postgres.shape", "answer.atomic")
@pytest.mark.parametrize("index", ["uniq_cards_tool_result_call", "state.idx_execution_edges_unique"])
async def test_a_commit_is_refused_without_the_index_that_allows_one_result_per_call(
    stack: EmbeddedStack, caller: Caller, database: str, index: str
) -> None:
    """Two replicas would both write a result of a redelivered call."""
    store = await KernelStore.open(PoolOptions("v1r4", PostgresOptions(Secret(dsn_of(stack, database)), 1)))
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    card, report = result_of(call, await store.load(command_of(call)))
    await caller.database.execute(f"drop index {index}")
    with pytest.raises(NeedsOperator, match="ON CONFLICT"):
        await store.commit(card, report)
    await store.aclose()


def trigger(does: str, table: str, timing: str = "before insert") -> str:
    """Return the SQL of a trigger on the rows that the executor writes."""
    kind = "constraint trigger" if "after" in timing else "trigger"
    deferred = "deferrable initially deferred" if "after" in timing else ""
    return (
        f"create function public.meddle() returns trigger language plpgsql as $$ begin if current_user = '{ROLE}' "
        f"then {does} end if; return new; end $$; create {kind} meddle {timing} on {table} {deferred} "
        "for each row execute function public.meddle()"
    )


REFUSALS = {
    "a trigger raises": (trigger("raise 'results are frozen';", "cards"), "results are frozen .SQLSTATE P0001; PL/pgS"),
    "a trigger raises an error of data": (
        trigger("perform 1 / 0;", "state.agent_inbox"),
        "division by zero .SQLSTATE 22012; SQL statement",
    ),
    "a trigger raises at the end of the transaction": (
        trigger("raise 'not now';", "state.execution_edges", "after insert"),
        "not now .SQLSTATE P0001",
    ),
    "a constraint": (
        "alter table state.agent_inbox add constraint known check (message_type = 'turn') not valid",
        'relation "agent_inbox" violates check constraint "known" .SQLSTATE 23514',
    ),
    "a foreign key": (
        (
            "create table owners (id text primary key); grant select on owners to public; "
            "alter table cards add constraint owned foreign key (tenant_id) references owners (id) "
            "deferrable initially deferred not valid"
        ),
        'table "cards" violates foreign key constraint "owned" .SQLSTATE 23503',
    ),
    "a further unique index": (
        (
            "create unique index one_each on state.execution_edges (primitive) where edge_phase = 'response'; "
            "insert into state.execution_edges (edge_id, project_id, primitive, edge_phase, recursion_depth) "
            "values ('other', 'other', 'report', 'response', 0)"
        ),
        'unique constraint "one_each" .SQLSTATE 23505',
    ),
    "a shorter text": (
        "alter table state.execution_edges alter column edge_phase type varchar(7)",
        r"value too long for type character varying\(7\) .SQLSTATE 22001",
    ),
    "cards are discarded": (trigger("return null;", "cards"), "discards new rows of cards"),
    "inbox rows are discarded": (
        trigger("return null;", "state.agent_inbox"),
        r"discards new rows of state\.agent_inbox, as a trigger does that returns null",
    ),
    "edges are discarded": (trigger("return null;", "state.execution_edges"), r"new rows of state\.execution_edges"),
}
"""Changes that no inspection of the catalogue can judge, since only running them shows what they do."""


@requirement("postgres.refusals", "answer.atomic")
@pytest.mark.parametrize(("change", "message"), REFUSALS.values(), ids=REFUSALS)
async def test_what_would_refuse_any_result_is_no_defect_of_the_call_and_writes_nothing(
    store: KernelStore, caller: Caller, change: str, message: str
) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    card, report = result_of(call, await store.load(command_of(call)))
    await caller.database.execute(change)
    before = await rows_of(caller)
    for _ in range(2):
        with pytest.raises(NeedsOperator, match=message):
            await store.commit(card, report)
    assert await rows_of(caller) == before


@requirement("postgres.refusals")
async def test_an_inbox_row_that_is_discarded_is_noticed_for_a_card_that_exists(
    store: KernelStore, caller: Caller
) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    card, report = result_of(call, await store.load(command_of(call)))
    await caller.database.execute(
        "insert into cards (card_id, tenant_id, content, tool_call_id, metadata) values ($1, $2, '{}', $3, $4)",
        card.card_id,
        PROJECT,
        call.tool_call_id,
        json.dumps(card.metadata),
    )
    await caller.database.execute(trigger("return null;", "state.agent_inbox"))
    with pytest.raises(NeedsOperator, match=r"discards new rows of state\.agent_inbox"):
        await store.report(card.card_id, report)


@requirement("postgres.refusals")
@pytest.mark.parametrize("column", ["project_id", "agent_id", "agent_turn_id", "correlation_id"])
async def test_what_refuses_some_calls_only_is_a_defect_of_each_of_them(
    store: KernelStore, caller: Caller, column: str
) -> None:
    """Else a project could stop the calls of all others, by whatever the operator's own rules refuse."""
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    card, report = result_of(call, await store.load(command_of(call)))
    values = {"project_id": PROJECT, "agent_id": AGENT, "correlation_id": call.tool_call_id}
    value = values.get(column, report.acceptance.waiting_turn.agent_turn_id)
    change = trigger(f"if new.{column} = '{value}' then raise 'suspended'; end if;", "state.agent_inbox")
    await caller.database.execute(change)
    with pytest.raises(asyncpg.RaiseError, match="suspended"):
        await store.commit(card, report)
    await caller.database.execute("drop function public.meddle() cascade")
    assert await store.commit(card, report)
    assert not await store.commit(card, report), "it has its result now"


@requirement("postgres.refusals")
async def test_a_value_that_the_database_cannot_store_is_a_defect_of_the_call(
    store: KernelStore, caller: Caller
) -> None:
    call = await caller.place(PROJECT, AGENT, "jina_search", {}, publish=False)
    card, report = result_of(call, await store.load(command_of(call)), "a\0b")
    with pytest.raises(asyncpg.UntranslatableCharacterError):
        await store.commit(card, report)


async def rows_of(caller: Caller) -> list[int]:
    """Return the number of rows in each table that a commit writes."""
    tables = ("cards", "state.agent_inbox", "state.execution_edges")
    return [await caller.database.fetchval(f"select count(*) from {table}") for table in tables]  # noqa: S608 - constants


@requirement("postgres.refusals")
async def test_a_ping_tells_when_what_was_refused_may_be_accepted(store: KernelStore, caller: Caller) -> None:
    """So a repair is tried at once, and not after the back-off of probes."""
    await store.ping()
    assert not await store.ping(thorough=True)
    raising = trigger("raise 'results are frozen';", "cards")
    for change in (
        raising,
        raising.partition("create trigger")[0].replace("create function", "create or replace function"),
        "alter table cards disable trigger meddle",
        "drop trigger meddle on cards",
        "alter table state.agent_inbox add constraint known check (status <> 'x')",
        "alter table state.agent_inbox drop constraint known",
    ):
        await caller.database.execute(change)
        assert await store.ping(), change
        assert not await store.ping()


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
    async with asyncio.timeout(WAIT_S):  # the log is written by a thread
        expected = "missing: select on cards, insert on cards. An operator must correct this"
        while expected not in executor.log_text():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    call = await caller.place(PROJECT, AGENT, "jina_search", {"query": "hello world", "count": 3})
    await asyncio.sleep(0.3)
    assert stack.upstream.requests() == []
    await caller.database.execute("grant select, insert on cards to openapi_tool")
    assert (await caller.result(call, WAIT_S)).card["content"]["status"] == "success"
    assert len(stack.upstream.requests()) == 1
    assert executor.log_text().count("missing: ") == 1  # logged once, not at every check


@requirement("postgres.shape")
@pytest.mark.parametrize("fault", ["a column is renamed", "a unique index is dropped", "a column is required"])
async def test_damage_of_the_tables_while_nothing_is_sent_stops_fetching_until_it_is_repaired(
    stack: EmbeddedStack, caller: Caller, start_executor: StartExecutor, fault: str
) -> None:
    """Else the next requests are billed, and their results cannot be stored, or are stored twice."""
    damage, repair, message = SHAPE_FAULTS[fault]
    port = free_port()
    await caller.add_tool(PROJECT, search_tool())
    executor = start_executor(
        {"OPENAPI_TOOL__HEALTH__PORT": str(port), "OPENAPI_TOOL__HEALTH__CHECK_INTERVAL_S": "0.05"}
    )
    await readiness(port, wanted=True)
    call = await caller.place(PROJECT, AGENT, "jina_search", {"query": "hello world", "count": 3}, publish=False)
    await caller.database.execute(damage)
    shown = await readiness(port, wanted=False)
    assert re.search(message, shown["dependencies"]["postgres"]["reason"])
    await caller.publish(call)
    await asyncio.sleep(0.5)
    assert stack.upstream.requests() == []
    assert (await readiness(port, wanted=False))["dependencies"]["postgres"]["reason"]
    await caller.database.execute(repair)
    await readiness(port, wanted=True)
    assert (await caller.result(call, WAIT_S)).card["content"]["status"] == "success"
    lines = [json.loads(line) for line in executor.log_text().splitlines() if '"health.changed"' in line]
    changes = [line["ok"] for line in lines if line["dependency"] == "postgres"]
    assert changes == [True, False, True], "logged once each way, however often it is checked"


async def readiness(port: int, *, wanted: bool) -> dict[str, Any]:
    """Return the body of /readyz once `ready` equals `wanted`. Raises TimeoutError."""
    async with asyncio.timeout(WAIT_S), ClientSession() as session:
        while True:
            async with session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                shown: dict[str, Any] = await answer.json()
            if shown["ready"] == wanted:
                return shown
            await asyncio.sleep(0.02)


ACTOR = "tool.openapi"
SINCE, UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
MANY = int(os.environ.get("USAGE_CARDS", "50000"))
"""Cards in the test of the query plan; docs/performance.md has the figures of a million."""
PROJECTS = 100


def fields_of(cost: Usage, ms: int, *, cached: bool = False, truncated: bool = False, **options: Any) -> ResultFields:
    output = ToolOutput((Item("x"),), {}, cost, cached=cached)
    return success(output, RenderedResult("x", truncated), options.pop("form", "text"), ms, **options)


def limited(cost: Usage, ms: int) -> ResultFields:
    error = RateLimited("Wait.")
    error.tokens, error.requests = cost.tokens, cost.requests
    return failure(
        error,
        ms,
        [
            UpstreamAttempt(0.0, "GET", "s.jina.ai", 0, is_sent=True),
            UpstreamAttempt(1.0, "GET", "s.jina.ai", 1, is_sent=True),
        ],
        session="s2",
    )


def card_of(fields: ResultFields, number: int, tool: str = "jina_search", actor_id: str = ACTOR) -> ResultCard:
    return result_card(
        actor_id=actor_id,
        function_name=tool,
        identity=identity(project_id=PROJECT, agent_id=AGENT, tool_call_id=f"tc_{number}"),
        call_card=None,
        status=fields.status,
        after_execution="suspend",
        result=fields.result,
        error=fields.error,
        tool_output=fields.tool_output,
    )


async def store_result(
    caller: Caller, card: ResultCard, project: str = PROJECT, agent: str | None = AGENT, **columns: Any
) -> None:
    await caller.database.execute(
        "insert into cards (card_id, tenant_id, content, metadata, tool_call_id, created_at) "
        "values ($1, $2, $3, $4, $5, coalesce($6, now()))",
        columns.get("card_id", card.card_id),
        project,
        card.content,
        card.metadata,
        card.tool_call_id,
        columns.get("created_at"),
    )
    if agent:
        await caller.database.execute(
            "insert into state.agent_inbox (inbox_id, project_id, agent_id, message_type, correlation_id) "
            "values ($1, $2, $3, 'tool_result', $4)",
            new_id("inbox_"),
            project,
            agent,
            card.tool_call_id,
        )


async def store_calls(caller: Caller) -> None:
    """Store three calls with costs, a cached one, and cards that must not be counted."""
    await store_result(caller, card_of(fields_of(Usage(100, 1), 10, session="s1"), 1))
    await store_result(
        caller, card_of(fields_of(Usage(900, 3), 30, truncated=True, form="object"), 2, "jina_read"), agent="b"
    )
    await store_result(caller, card_of(limited(Usage(5, 2), 20), 3))
    await store_result(caller, card_of(fields_of(Usage(), 1, cached=True), 4))
    await store_result(caller, card_of(fields_of(Usage(7_000, 7), 1), 5, actor_id="another"))
    await store_result(caller, card_of(fields_of(Usage(7_000, 7), 1), 6), project="proj_other")
    old = {"card_id": first_card_id(SINCE - timedelta(days=1)) + "7" * 20}
    await store_result(caller, card_of(fields_of(Usage(7_000, 7), 1), 7), **old)
    ours = card_of(fields_of(Usage(7_000, 7), 1), 8)
    await store_result(caller, ResultCard(ours.card_id, "tc_8", ours.content, {**ours.metadata, "type": "tool.call"}))


@pytest.fixture
def dsn(stack: EmbeddedStack, database: str) -> str:
    return stack.postgres.dsn(database)


async def read(dsn: str, by: By) -> list[dict[str, Any]]:
    return await usage(pool_of(dsn), PROJECT, SINCE, UNTIL, ACTOR, by)


@requirement("usage")
async def test_usage_sums_up_the_cards_of_one_project(caller: Caller, dsn: str) -> None:
    await store_calls(caller)
    total, *rows = await read(dsn, By.TOOL)
    assert total == {
        "key": None,
        "calls": 4,
        "tokens": 1_005,
        "requests": 6,
        "cache_hits": 1,
        "errors": 1,
        "truncated": 1,
        "retries": 1,
        "p50_ms": 10,
        "p95_ms": 30,
        "total": True,
    }
    assert [(row["key"], row["calls"], row["tokens"]) for row in rows] == [
        ("jina_read", 1, 900),
        ("jina_search", 3, 105),
    ]


@requirement("usage")
@pytest.mark.parametrize(
    ("by", "calls"),
    [
        (By.AGENT, {AGENT: 3, "b": 1}),
        (By.SESSION, {"s1": 1, "s2": 1, None: 2}),
        (By.ERROR, {"rate_limited": 1, None: 3}),
        (By.DAY, {"today": 4}),
    ],
)
async def test_usage_is_summed_up_by_agent_session_error_and_day(
    caller: Caller, dsn: str, by: By, calls: dict[str | None, int]
) -> None:
    today = f"{datetime.now(UTC):%Y-%m-%d}"  # not when tests are collected, which may be before midnight
    await store_calls(caller)
    _, *rows = await read(dsn, by)
    assert {"today" if row["key"] == today else row["key"]: row["calls"] for row in rows} == calls


@requirement("usage")
async def test_a_row_with_a_null_key_is_not_the_total(caller: Caller, dsn: str) -> None:
    await store_result(caller, card_of(fields_of(Usage(1, 1), 1), 1))
    assert [(row["key"], row["total"]) for row in await read(dsn, By.SESSION)] == [(None, True), (None, False)]


@requirement("usage")
@pytest.mark.parametrize(
    "tool_output",
    [
        None,
        {},
        {"usage": 3},
        {"usage": {"tokens": "x"}, "latency_ms": [1], "retries": {}},
        {"usage": {"tokens": 1e30, "requests": -5}, "latency_ms": -1, "retries": 10**13},
    ],
)
async def test_a_figure_that_no_card_records_is_null_not_zero(caller: Caller, dsn: str, tool_output: Any) -> None:
    card = card_of(fields_of(Usage(1, 1), 1), 1)
    await store_result(
        caller, ResultCard(card.card_id, "tc_1", card.content, {**card.metadata, "tool_output": tool_output})
    )
    total, *_ = await read(dsn, By.TOOL)
    unknown = ("tokens", "requests", "retries", "p50_ms", "p95_ms")
    assert (total["calls"], total["errors"], {total[name] for name in unknown}) == (1, 0, {None})


@requirement("usage")
async def test_usage_without_calls_has_only_the_total(dsn: str) -> None:
    [total] = await read(dsn, By.TOOL)
    assert (total["calls"], total["tokens"]) == (0, None)


@requirement("usage")
async def test_usage_of_a_week_uses_an_index_with_the_cards_of_many_projects(caller: Caller, dsn: str) -> None:
    """With two weeks of cards, no plan scans the whole table."""
    now = datetime.now(UTC)
    start = int((now - timedelta(days=14)).timestamp() * 1000)
    metadata = card_of(fields_of(Usage(100, 1), 10, session="s"), 1).metadata
    await caller.database.execute(
        "insert into cards (card_id, tenant_id, content, metadata, tool_call_id, created_at) "
        "select lpad(to_hex($1::bigint + n * $2::bigint), 12, '0') || lpad(to_hex(n), 20, '7'), "
        "'proj_' || n % $3, $4, $5, 'tc_' || n, to_timestamp(($1 + n * $2) / 1000.0) from generate_series(1, $6) as n",
        start,
        14 * 86_400_000 // MANY,
        PROJECTS,
        {"status": "success", "result": "x" * 200},
        metadata,
        MANY,
    )
    await caller.database.execute("analyze cards")
    values = ("proj_7", first_card_id(now - timedelta(days=7)), first_card_id(now), ACTOR, 1000)
    for by in By:
        [line] = await caller.database.fetchrow(f"explain (analyze, format json) {usage_query(by)}", *values)
        plan = line if isinstance(line, list) else json.loads(line)
        nodes = list(_nodes(plan[0]["Plan"]))
        assert not [node for node in nodes if node.get("Relation Name") == "cards" and node["Node Type"] == "Seq Scan"]
        if "USAGE_CARDS" in os.environ:
            print(by, round(plan[0]["Execution Time"]), "ms")  # noqa: T201 - requested by USAGE_CARDS
    total, *_ = await usage(pool_of(dsn), "proj_7", now - timedelta(days=7), now, ACTOR, By.TOOL)
    assert total["calls"] == pytest.approx(MANY / PROJECTS / 2, rel=0.01, abs=2)


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", ()) for node in _nodes(child))]


@requirement("usage")
async def test_the_printed_grants_are_enough_for_usage(caller: Caller, database: str, stack: EmbeddedStack) -> None:
    role = f"reader_{database[-8:]}"
    dsn = urlsplit(dsn_of(stack, database, role))
    await caller.database.execute(f"create role {role} login password '{dsn.password}'")
    for grant in reader_grants(role, USAGE):
        await caller.database.execute(grant)
    try:
        for by in By:
            await usage(pool_of(dsn.geturl()), PROJECT, SINCE, UNTIL, ACTOR, by)
    finally:
        await caller.database.execute(f"drop owned by {role}")
        await caller.database.execute(f"drop role {role}")


Run = Callable[..., Any]


@pytest.fixture
def run(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs the command in a thread, because it starts its own event loop."""
    monkeypatch.setenv("PG_DSN", dsn)
    monkeypatch.setenv("COLUMNS", "200")

    async def run(*arguments: str) -> Any:
        return await asyncio.to_thread(CliRunner().invoke, app, ["usage", "--project", PROJECT, *arguments])

    return run


@requirement("usage")
async def test_the_command_prints_a_table_json_and_csv(caller: Caller, run: Run) -> None:
    await store_calls(caller)
    hostile = card_of(fields_of(Usage(1, 1), 1, session="=1+1\x1b[31m[bold]"), 9)
    await store_result(caller, hostile)
    table = await run("--by", "session")
    assert table.exit_code == 0
    assert "1,006" in table.stdout
    assert r"=1+1\x1b[31m[bold]" in table.stdout
    assert "\N{EN DASH}" in table.stdout  # stands for calls without a session
    printed = json.loads((await run("--by", "session", "--json")).stdout)
    assert printed["total"]["tokens"] == 1_006
    assert {row["key"] for row in printed["rows"]} == {"s1", "s2", None, "=1+1\x1b[31m[bold]"}
    head, *rows = csv.reader((await run("--by", "session", "--csv")).stdout.splitlines())
    assert head[:3] == ["session", "calls", "tokens"]
    assert "'=1+1\\x1b[31m[bold]" in {row[0] for row in rows}


@requirement("usage.lost")
async def test_requests_without_a_card_have_a_column_of_their_own(
    caller: Caller, run: Run, monkeypatch: pytest.MonkeyPatch, stack: EmbeddedStack
) -> None:
    """The account also holds what a killed executor sent, settled or not; months count if there is no day."""
    monkeypatch.setenv("NATS_SERVERS", stack.nats.url)
    monkeypatch.setenv("OPENAPI_TOOL__BUDGETS__TIME_ZONE", "Asia/Tokyo")
    await store_calls(caller)

    async def shown(*arguments: str) -> dict[str, Any]:
        found = await run("--json", *arguments)
        assert (found.exit_code, found.stderr) == (0, "")
        total: dict[str, Any] = json.loads(found.stdout)["total"]
        return total

    assert (await shown())["no_result"] is None, "there is no budget"
    periods, now = Periods(ZoneInfo("Asia/Tokyo")), datetime.now(UTC).timestamp()
    record = unused({}).model_copy(update={"used": Amount(7, 1_105), "lost": Amount(2, 20)})
    record.open["x.1"] = OpenAttempt(1, 3, now + 60)
    records = NatsKvRecords(caller.client, BUDGETS.bucket)
    try:
        for scope, period in (("project_month", periods.month(now)), ("project_day", periods.day(now))):
            key = AccountId(scope, PROJECT).record_name(period)
            stored = encode(record) if scope == "project_month" else encode(unused({}))
            await records.write(key, stored, (await records.read(key)).revision)
            total = await shown("--since", "1h", "--by", "tool")
            expected = (4, 123) if scope == "project_month" else (0, 0)
            assert (total["no_result"], total["no_result_tokens"]) == expected
            assert (total["requests"], total["tokens"]) == (6, 1_005)
    finally:
        await caller.client.jetstream().delete_key_value(BUDGETS.bucket.name)


@requirement("usage.lost")
async def test_usage_without_nats_says_what_it_does_not_show(
    caller: Caller, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_SERVERS", f"nats://127.0.0.1:{free_port()}")
    await store_calls(caller)
    found = await run("--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["total"]["no_result"] is None
    assert "no data for requests without a card" in found.stderr
    assert "cannot connect to NATS" in found.stderr


@requirement("usage")
async def test_the_command_accepts_durations_and_dates(caller: Caller, run: Run) -> None:
    await store_calls(caller)
    tomorrow = f"{datetime.now(UTC) + timedelta(days=1):%Y-%m-%d}"
    for arguments, calls in (
        (("--since", "30m"), 4),
        (("--since", "2020-01-01T00:00:00+02:00", "--until", tomorrow), 4),
        (("--since", "2d", "--until", "1d"), 0),
    ):
        assert json.loads((await run("--json", *arguments)).stdout)["total"]["calls"] == calls
    assert "no calls of project" in (await run("--since", "2d", "--until", "1d")).stderr


@requirement("usage")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--since", "7 days"), "--since '7 days' is neither a span such as 7d, 24h or 30m nor a date"),
        (("--since", "99999d"), "--since '99999d' is neither"),
        (("--until", "soon"), "--until 'soon' is neither"),
        (("--since", "0001-01-01T00:00+14:00"), "--since '0001-01-01T00:00+14:00' is neither"),
        (("--until", "9999-12-31T23:59:59-14:00"), "--until '9999-12-31T23:59:59-14:00' is neither"),
        (("--project", "a\udcff"), "--project: 'a\\udcff' is no project id"),
        (("--since", "1d", "--until", "2d"), "--since must be before --until"),
        (("--json", "--csv"), "--json and --csv exclude each other"),
    ],
)
async def test_an_invalid_option_is_named(run: Run, arguments: tuple[str, ...], says: str) -> None:
    found = await run(*arguments)
    assert found.exit_code == 2
    assert says in found.stderr


@requirement("usage")
async def test_an_unreachable_database_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1:1/kernel")
    found = await run()
    assert found.exit_code == 2
    assert "127.0.0.1:1" in found.stderr


@requirement("usage")
async def test_the_plot_is_a_png_file(caller: Caller, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
    await store_calls(caller)
    file = tmp_path / "usage.png"
    assert (await run("--plot", str(file))).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    refused = await run("--plot", str(tmp_path / "missing" / "usage.png"))
    assert (refused.exit_code, "cannot write" in refused.stderr) == (2, True)


@requirement("usage")
async def test_a_plot_without_matplotlib_names_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = await run("--plot", "usage.png")
    assert (found.exit_code, "pip install 'openapi-tool[plot]'" in found.stderr) == (2, True)


def test_a_card_id_begins_with_its_time() -> None:
    assert (
        first_card_id(datetime.now(UTC) - timedelta(minutes=1))
        < new_id()
        < first_card_id(datetime.now(UTC) + timedelta(minutes=1))
    )
    assert first_card_id(datetime(1960, 1, 1, tzinfo=UTC)) == "0" * 12
