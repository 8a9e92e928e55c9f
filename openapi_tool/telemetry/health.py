"""Whether calls can be finished now, part by part, and the small server that says so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

POSTGRES, NATS, CONSUMER = "postgres", "nats", "consumer"

_TICK_S = 0.25
_LAG_WARNING_S = 0.5


@dataclass(slots=True)
class Part:
    """Something that calls need; `seen` is its last success on the monotonic clock, in seconds."""

    ok: bool = False
    seen: float | None = None

    def shown(self) -> dict[str, Any]:
        """For people and probes; the age in seconds, null before the first success."""
        return {"ok": self.ok, "age_s": None if self.seen is None else round(time.monotonic() - self.seen, 1)}


@dataclass(slots=True)
class Health:
    """All parts by name; ready while every one is there and the process does not drain."""

    parts: dict[str, Part] = field(default_factory=lambda: {name: Part() for name in (POSTGRES, NATS, CONSUMER)})
    draining: bool = False

    def note(self, name: str, *, ok: bool) -> bool:
        """Note how a part was found. True when that is a change."""
        part = self.parts[name]
        changed, part.ok = part.ok != ok, ok
        if ok:
            part.seen = time.monotonic()
        metrics.PART_UP.labels(name).set(ok)
        if changed:
            log.log(
                logging.INFO if ok else logging.WARNING,
                "%s is %s",
                name,
                "there" if ok else "away",
                extra={"action": "health.changed", "part": name, "ok": ok},
            )
        return changed

    def ok(self, name: str) -> bool:
        """Whether a part was there at the last look."""
        return self.parts[name].ok

    @property
    def ready(self) -> bool:
        """Whether new calls could be finished."""
        return not self.draining and all(part.ok for part in self.parts.values())

    def shown(self) -> dict[str, Any]:
        """The body of /readyz."""
        parts = {name: part.shown() for name, part in self.parts.items()}
        return {"ready": self.ready, "draining": self.draining, "parts": parts}


async def watch_loop_lag(tell: Callable[[float], None]) -> None:
    """Measure for ever how late the event loop wakes this task, in seconds; `tell` hears when it is bad."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(_TICK_S)
        lag_s = max(0.0, time.monotonic() - before - _TICK_S)
        metrics.LOOP_LAG.observe(lag_s)
        metrics.TASKS.set(len(asyncio.all_tasks()))
        if lag_s > _LAG_WARNING_S:
            tell(lag_s)
            log.warning("the event loop was blocked", extra={"action": "loop.lagged", "lag_s": round(lag_s, 3)})


@asynccontextmanager
async def health_server(host: str, port: int, health: Health) -> AsyncIterator[int]:
    """Serve /livez, /readyz and /metrics; yields the port. Raises OSError when it cannot listen."""
    app = web.Application()
    app.add_routes([web.get(path, handler) for path, handler in _handlers(health).items()])
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield port
    finally:
        await runner.cleanup()


def _handlers(health: Health) -> dict[str, Callable[[web.Request], Any]]:
    async def live(request: web.Request) -> web.Response:
        del request
        return web.json_response({"live": True})

    async def ready(request: web.Request) -> web.Response:
        del request
        return web.json_response(health.shown(), status=200 if health.ready else 503)

    async def scrape(request: web.Request) -> web.Response:
        del request
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return {"/livez": live, "/readyz": ready, "/metrics": scrape}
