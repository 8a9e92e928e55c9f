"""PostgreSQL with a streaming standby: read-only periods, a full disk, an operator's mistakes, and a promotion.

Replication is synchronous, so that nothing that was committed is lost with the promotion. The kernel's own connection
writes in spite of `default_transaction_read_only`: what is measured is what executors do meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg

from openapi_tool.local.postgres import PostgresServer
from openapi_tool.local.stack import EmbeddedStack
from tests.chaos.harness import DATABASE, Fault, Profile, Run, Site, outage
from tests.chaos.servers import Standby, execute
from tests.chaos.switch import Switch
from tests.role import ROLE, dsn_of

_POLL_S = 0.05
_NO_SPACE = f"""
create function public.no_space() returns trigger language plpgsql as $$ begin
  if current_user = '{ROLE}' then
    raise exception 'could not extend file: No space left on device' using errcode = '53100';
  end if;
  return new;
end $$
"""


class Failover(Profile):
    """Executors reach the database through a switch; their open connections stay where they are when it moves."""

    def __init__(self, stack: EmbeddedStack) -> None:
        super().__init__(stack)
        self.primary: PostgresServer = stack.postgres
        self.standby: PostgresServer = stack.postgres
        self.executors = self.kernel = Switch(stack.postgres.port)

    async def open(self, exits: AsyncExitStack) -> Site:
        folder = self.stack.folder / "standby"
        folder.mkdir()
        self.standby = Standby(folder, self.stack.guard, self.primary)
        await asyncio.to_thread(self.standby.start)
        await execute(self.primary.dsn(), "alter system set synchronous_standby_names = '*'", "select pg_reload_conf()")
        self.executors = await exits.enter_async_context(Switch(self.primary.port).listening())
        self.kernel = await exits.enter_async_context(Switch(self.primary.port).listening())
        kernel = self.primary.dsn(DATABASE).replace(f":{self.primary.port}/", f":{self.kernel.port}/")
        nats_urls = [self.stack.nats.url]
        return Site(f"{kernel}?default_transaction_read_only=off", nats_urls, {"PG_DSN": self._executor_dsn()})

    def _executor_dsn(self) -> str:
        return dsn_of(self.stack, DATABASE, at=f"127.0.0.1:{self.executors.port}")

    def faults(self) -> Mapping[str, Fault]:
        return {
            "read_only": self.read_only,
            "to_standby": self.to_standby,
            "disk_full": self.disk_full,
            "revoked": self.revoked,
            "renamed": self.renamed,
            "promotion": self.promotion,
        }

    async def read_only(self, run: Run) -> int:
        """Make new transactions of the primary read-only, those of open connections, too."""
        return await outage(run, "primary read-only", self._changed(_read_only("on"), _read_only("off")))

    async def to_standby(self, run: Run) -> int:
        """Lead connections to the standby for a while; those that were made then stay there."""

        @asynccontextmanager
        async def broken() -> AsyncIterator[None]:
            self.executors.move(self.standby.port, drop=True)
            yield
            self.executors.move(self.primary.port, drop=False)

        return await outage(run, "connections lead to the standby", broken())

    async def disk_full(self, run: Run) -> int:
        """Imitate a full disk: every result is refused with 53100."""
        trigger = "create trigger no_space before insert on cards for each row execute function public.no_space()"
        broken = self._changed([_NO_SPACE, trigger], ["drop function public.no_space() cascade"])
        return await outage(run, "disk full (53100)", broken)

    async def revoked(self, run: Run) -> int:
        """Take a privilege away (42501)."""
        broken = self._changed([f"revoke insert on cards from {ROLE}"], [f"grant insert on cards to {ROLE}"])
        return await outage(run, "insert revoked (42501)", broken)

    async def renamed(self, run: Run) -> int:
        """Rename a column that only executors write (42703)."""
        rename = "alter table state.execution_edges rename column {} to {}"
        broken = self._changed([rename.format("metadata", "meta")], [rename.format("meta", "metadata")])
        return await outage(run, "column renamed (42703)", broken)

    async def promotion(self, run: Run) -> int:
        """Promote the standby, move the switch, leave the old primary running and read-only."""
        running, began = await run.running(), time.time()
        await execute(self.primary.dsn(), *_read_only("on"))
        since = time.time()
        await self._caught_up()
        await execute(self.standby.dsn(), "select pg_promote()")
        self.primary, self.standby = self.standby, self.primary
        until = time.time()
        self.executors.move(self.primary.port, drop=False)
        self.kernel.move(self.primary.port, drop=True)
        run.journal.note(outage="promotion", began=began, since=since, until=until, over=time.time(), fetched=None)
        return running

    async def _caught_up(self) -> None:
        """Wait until the standby has replayed what the primary has written."""
        primary, standby = await asyncpg.connect(self.primary.dsn()), await asyncpg.connect(self.standby.dsn())
        try:
            written = await primary.fetchval("select pg_current_wal_flush_lsn()::text")
            replayed = "select pg_last_wal_replay_lsn() >= $1::text::pg_lsn"
            while not await standby.fetchval(replayed, written):  # noqa: ASYNC110 - only the standby knows
                await asyncio.sleep(_POLL_S)
        finally:
            await primary.close()
            await standby.close()

    @asynccontextmanager
    async def _changed(self, there: list[str], back: list[str]) -> AsyncIterator[None]:
        """Change the primary's database and change it back, whatever is read-only."""
        dsn = f"{self.primary.dsn(DATABASE)}?default_transaction_read_only=off"
        await execute(dsn, *there)
        try:
            yield
        finally:
            await execute(dsn, *back)


class FailoverHosts(Failover):
    """Executors know both servers by `target_session_attrs=read-write` instead of a switch."""

    def _executor_dsn(self) -> str:
        hosts = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}"
        return f"{dsn_of(self.stack, DATABASE, at=hosts)}?target_session_attrs=read-write"

    def faults(self) -> Mapping[str, Fault]:
        return {name: fault for name, fault in super().faults().items() if name != "to_standby"}


def _read_only(value: str) -> list[str]:
    return [f"alter system set default_transaction_read_only = {value}", "select pg_reload_conf()"]
