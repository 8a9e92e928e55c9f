"""Cost of a permit at hand: `python -m benchmarks.permits` prints the CPU time of a request's permit in microseconds.

The store is in memory; its changes are made by a task, whose time is not counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from openapi_tool.jina.failures import key_failure
from openapi_tool.limits.limiter import Limiter
from openapi_tool.limits.permits import Need, Permits, Unlimited
from openapi_tool.options import KeyPool, LimitOptions
from openapi_tool.tools.deadline import Deadline
from openapi_tool.tools.placeholders import Secrets

_ROUNDS, _PERMITS_PER_ROUND, _PAUSE_S = 60, 100, 0.02
_UNREACHED = 10_000_000
_KINDS: dict[str, LimitOptions] = {
    "no limit": LimitOptions(),
    "requests": LimitOptions(search_requests_per_minute=1_000_000),
    "requests, tokens": LimitOptions(search_requests_per_minute=1_000_000, search_tokens_per_minute=10**5 * _UNREACHED),
    "pool of two keys": LimitOptions(pools={"A": KeyPool(("A", "B"))}),
}


class _Store:
    def __init__(self) -> None:
        self._records: dict[str, tuple[int, bytes]] = {}

    async def read(self, name: str) -> tuple[int, bytes | None]:
        return self._records.get(name, (0, None))

    async def write(self, name: str, value: bytes, revision: int) -> int | None:
        self._records[name] = revision + 1, value
        return revision + 1


async def _cost_us(permits: Permits, secrets: Secrets) -> float:
    need = Need("A", "search", ("project", "agent"), Deadline.after(600), secrets("A"))

    async def one_round() -> float:
        began = time.process_time()
        for _ in range(_PERMITS_PER_ROUND):
            (await permits.acquire(need)).done(1)
        return time.process_time() - began

    spent_s = []
    for _ in range(2 * _ROUNDS):
        spent_s.append(await one_round())
        await asyncio.sleep(_PAUSE_S)
    return round(sum(spent_s[_ROUNDS:]) / _ROUNDS / _PERMITS_PER_ROUND * 1e6, 1)  # the first half is warm-up


async def _costs() -> dict[str, float]:
    values = {"A": "the first value", "B": "the second value"}
    costs = {"no limiter": await _cost_us(Unlimited(), Secrets(values, values))}
    for name, options in _KINDS.items():
        secrets = Secrets(values, values, options.pool_of)
        limiter = Limiter("replica", options, _Store(), time.time, key_failure)
        limiter.keys.set_secrets(secrets)
        costs[name] = await _cost_us(limiter, secrets)
        await limiter.aclose()
    return costs


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(_costs())) + "\n")
