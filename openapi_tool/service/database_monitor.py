"""Whether the kernel's database is available, and so which commands may be fetched from JetStream.

There are two sources: health checks, and a circuit breaker (`kernel/postgres/breaker.py`), which opens after loads and
commits of calls have failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from openapi_tool.kernel.jetstream.fetch_mode import FetchMode
from openapi_tool.kernel.postgres.breaker import CircuitBreaker
from openapi_tool.kernel.postgres.failures import located
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.options.postgres import PoolOptions
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.telemetry.health import POSTGRES, Health

_MAX_CHECK_S = 3.0  # a hanging check ends only after several timeouts of the driver, so do not wait for its end
_NO_ANSWER = Unavailable(f"PostgreSQL: no answer within {_MAX_CHECK_S:.0f} s")


class DatabaseMonitor:
    """Keeps the state of the database, and records it in `health`.

    Messages contain server, database and the setting of its DSN. `wake` is called whenever the state may have changed.
    """

    def __init__(self, health: Health, pool: PoolOptions) -> None:
        self._health = health
        self._located = partial(located, pool=pool)
        self._outage = ""  # why the last health check failed
        self.wake: Callable[[], None] = lambda: None
        self.breaker = CircuitBreaker(self._changed)

    def fetch_mode(self) -> FetchMode:
        """Return which commands may be fetched now."""
        if self._outage:
            return FetchMode.NONE
        if not self.breaker.reason:
            return FetchMode.UNLIMITED
        return FetchMode.PROBE if self.breaker.may_probe else FetchMode.NONE

    async def check(self, kernel: KernelStore, *, idle: bool) -> None:
        """Run a health check; `idle` is whether no call runs.

        While the breaker is open the check is thorough. If no call runs, none can close the breaker, so the check may.
        """
        timer = asyncio.get_running_loop().call_later(_MAX_CHECK_S, self.mark_unavailable, _NO_ANSWER)
        try:
            was_inspected = await kernel.ping(thorough=bool(self.breaker.reason))
            if was_inspected:  # the tables may have changed, so what failed may succeed now
                self.breaker.probe_soon()
        except Unavailable as error:
            self.mark_unavailable(error)
            return
        finally:
            timer.cancel()
        if idle:
            self.breaker.close_if_quiet()
        self.mark_available()

    def mark_available(self) -> None:
        """Record that the database is available."""
        if self._outage:
            self.breaker.probe_soon()
        self._outage = ""
        self._changed()

    def mark_unavailable(self, error: Unavailable) -> None:
        """Record that the database is unavailable."""
        self._outage = self._located(str(error))
        self._changed()

    def _changed(self) -> None:
        reason = self._outage or self.breaker.reason
        self._health.record(POSTGRES, ok=not reason, reason=self._located(reason))
        self.wake()
