"""Chaos profile `shape`: columns, indexes, privileges, types, triggers and constraints come and go under load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial

import asyncpg

from tests.chaos import faults
from tests.chaos.harness import Fault, Profile, Run, execute, outage
from tests.support import ROLE

_TRIES = 10
_INDEXES = {
    "uniq_cards_tool_result_call": (
        "cards (tenant_id, md5(tool_call_id)) where tool_call_id is not null and metadata ->> 'type' = 'tool.result'"
    ),
    "state.idx_agent_inbox_unique": "state.agent_inbox (project_id, message_type, md5(correlation_id))",
    "state.idx_execution_edges_unique": (
        "state.execution_edges (project_id, md5(correlation_id), primitive, edge_phase)"
    ),
}


def _trigger(does: str, table: str) -> tuple[str, str]:
    """Return the SQL that adds a trigger on the executors' rows of a table, and that which drops it."""
    added = (
        "create function public.meddle() returns trigger language plpgsql as $$ begin "
        f"if current_user = '{ROLE}' then {does} end if; return new; end $$; "
        f"create trigger meddle before insert on {table} for each row execute function public.meddle()"
    )
    return added, "drop function public.meddle() cascade"


_NOT_NEEDED_BY_CALLERS = {
    "column": (
        "alter table state.agent_inbox rename column retry_count to retries",
        "alter table state.agent_inbox rename column retries to retry_count",
    ),
    "column_of_load": (
        "alter table resource.project_agents rename column worker_target to worker",
        "alter table resource.project_agents rename column worker to worker_target",
    ),
    "type": (
        "alter table cards alter column ttl_seconds type jsonb using to_jsonb(ttl_seconds)",
        "alter table cards alter column ttl_seconds type int using (ttl_seconds #>> '{}')::int",
    ),
    "grant": (
        (
            f"revoke insert on state.execution_edges from {ROLE}; "
            f"grant insert (edge_id) on state.execution_edges to {ROLE}"
        ),
        f"grant insert on state.execution_edges to {ROLE}",
    ),
    "refused": _trigger("raise 'results are frozen';", "cards"),
    "discarded": _trigger("return null;", "state.agent_inbox"),
    "constraint": (
        "alter table cards add constraint calls_only check (metadata ->> 'type' <> 'tool.result') not valid",
        "alter table cards drop constraint calls_only",
    ),
}
"""Damage and repair by name; the load, which plays the kernel, can still write its rows."""


class Shape(Profile):
    """One server. A unique index that is built again proves that nothing was written twice without it."""

    def faults(self) -> Mapping[str, Fault]:
        return {
            "poison": faults.poison,
            **{name: partial(self.damage, name) for name in _NOT_NEEDED_BY_CALLERS},
            **{f"index_{number}": partial(self.drop, [name]) for number, name in enumerate(_INDEXES)},
            "indexes": partial(self.drop, list(_INDEXES)),
            "kill_executor": faults.kill,
        }

    async def damage(self, name: str, run: Run) -> int:
        """Damage the tables for the length of an outage."""
        damage, repair = _NOT_NEEDED_BY_CALLERS[name]
        return await outage(run, f"shape: {name}", _changed(run, damage, repair))

    async def drop(self, names: list[str], run: Run) -> int:
        """Drop unique indexes, and build them again, which fails if a row was doubled meanwhile."""
        damage = "; ".join(f"drop index {name}" for name in names)
        repair = "; ".join(f"create unique index {name.rpartition('.')[2]} on {_INDEXES[name]}" for name in names)
        return await outage(run, f"shape: without {', '.join(names)}", _changed(run, damage, repair))


@asynccontextmanager
async def _changed(run: Run, damage: str, repair: str) -> AsyncIterator[None]:
    await _at_last(run, damage)
    try:
        yield
    finally:
        await _at_last(run, repair)


async def _at_last(run: Run, statement: str) -> None:
    """Execute a statement, again if PostgreSQL ended it because it and a commit waited for each other's tables."""
    for _ in range(_TRIES):
        with suppress(asyncpg.DeadlockDetectedError):
            return await execute(run.addresses.dsn, statement)
    raise RuntimeError(f"deadlocks at {_TRIES} tries of: {statement}")
