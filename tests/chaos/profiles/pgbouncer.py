"""PgBouncer in transaction mode between executors and PostgreSQL, with `postgres.prepared_statements` off."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from openapi_tool.local.stack import EmbeddedStack
from tests.chaos import faults
from tests.chaos.harness import DATABASE, Absent, Fault, Profile, Run, Site, outage
from tests.chaos.servers import PgBouncer
from tests.role import dsn_of

_AWAY_S, _PAUSE_S = 1.0, 3.0


class Bouncer(Profile):
    """The kernel reaches PostgreSQL directly; executors have more connections than PgBouncer has."""

    def __init__(self, stack: EmbeddedStack) -> None:
        super().__init__(stack)
        self._bouncer: PgBouncer | None = None

    @property
    def bouncer(self) -> PgBouncer:
        if self._bouncer is None:
            raise AssertionError("the profile was not opened")
        return self._bouncer

    async def open(self, exits: AsyncExitStack) -> Site:
        if why := PgBouncer.missing():
            raise Absent(why)
        self._bouncer = start_bouncer(self.stack)
        settings = {
            "PG_DSN": dsn_of(self.stack, DATABASE, at=f"127.0.0.1:{self.bouncer.port}"),
            "OPENAPI_TOOL__POSTGRES__PREPARED_STATEMENTS": "false",
        }
        site = await super().open(exits)
        return Site(site.dsn, site.nats_urls, settings)

    def faults(self) -> Mapping[str, Fault]:
        return {
            "restart": self.restart,
            "pause": self.pause,
            "kill_executor": faults.kill,
            "backends_ended": faults.end_backends,
            "long_pause": self.long_pause,
            "postgres_restart": faults.restart_postgres,
            "stopped": self.stopped,
        }

    async def restart(self, run: Run) -> int:
        """Stop and start it; the connections of its clients end."""
        return await outage(run, "PgBouncer restarted", self._stopped(), _AWAY_S)

    async def stopped(self, run: Run) -> int:
        """The same, but it stays away."""
        return await outage(run, "PgBouncer stopped", self._stopped())

    async def pause(self, run: Run) -> int:
        """PAUSE and RESUME: statements wait, no connection ends."""
        return await outage(run, "PgBouncer paused shortly", self._paused(), _PAUSE_S)

    async def long_pause(self, run: Run) -> int:
        """The same for longer than a statement may take."""
        return await outage(run, "PgBouncer paused", self._paused())

    @asynccontextmanager
    async def _stopped(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self.bouncer.stop)
        yield
        await asyncio.to_thread(self.bouncer.start)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        self.bouncer.signal(signal.SIGUSR1)
        yield
        self.bouncer.signal(signal.SIGUSR2)


def start_bouncer(stack: EmbeddedStack) -> PgBouncer:
    """A PgBouncer before the stack's PostgreSQL. Raises ServerFailed."""
    folder = stack.folder / "pgbouncer"
    folder.mkdir()
    bouncer = PgBouncer(folder, stack.guard, stack.postgres, [dsn_of(stack, DATABASE)])
    bouncer.start()
    return bouncer
