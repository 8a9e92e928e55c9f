"""Permits of all keys and endpoints of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from openapi_tool.limits.flow import Flow, Store
from openapi_tool.limits.ledger import Rates
from openapi_tool.limits.permits import Need, Permit
from openapi_tool.options import LimitOptions


class Limiter:
    """Permits of all keys of this process. `clock` is the server's, in seconds since the epoch."""

    def __init__(self, name: str, options: LimitOptions, store: Store, clock: Callable[[], float]) -> None:
        self._name, self._clock = name, clock
        self._options = options
        self._store = store
        self._flows: dict[tuple[str, str], Flow] = {}

    async def acquire(self, need: Need) -> Permit:
        """Wait for a permit. Raises RateLimited once it is certain that none comes before the deadline."""
        flow = self._flows.get((need.variable, need.endpoint)) or self._open(need.variable, need.endpoint)
        return flow.try_take() or await flow.wait(need)

    def news(self, name: str, revision: int, value: bytes) -> None:
        """Adopt a record that another replica wrote."""
        for flow in self._flows.values():
            if flow.record_name == name:
                flow.news(revision, value)

    def shown(self) -> list[dict[str, Any]]:
        """Return the state of every key and endpoint that is limited or was used."""
        return [flow.shown() for flow in self._flows.values() if flow.allowance.limited]

    async def aclose(self) -> None:
        """Give back unused permits and stop."""
        await asyncio.gather(*(flow.aclose() for flow in self._flows.values()))

    def _open(self, variable: str, endpoint: str) -> Flow:
        rates = _rates(self._options, variable, endpoint)
        flow = self._flows[variable, endpoint] = Flow(variable, endpoint, rates, self._store, self._name, self._clock)
        return flow


def _rates(options: LimitOptions, variable: str, endpoint: str) -> Rates:
    limits = options.of(variable)
    names = ("requests_per_minute", "tokens_per_minute", "concurrent")
    return Rates(*(getattr(limits, f"{endpoint}_{name}", None) for name in names))
