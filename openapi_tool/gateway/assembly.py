"""Composition of a gateway: engine, quotas and stored texts over one state file."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from openapi_tool.bootstrap import Bootstrap, Upstream, build_runner
from openapi_tool.gateway.calls import Gateway, GatewayParts
from openapi_tool.gateway.quotas import shared_quotas
from openapi_tool.gateway.stored import UNTAKEN_S, StoredTexts, UntakenResults
from openapi_tool.gateway.tools import Tools
from openapi_tool.isolation.pool import WorkerPool
from openapi_tool.isolation.privacy import hide_memory
from openapi_tool.isolation.service import Isolation
from openapi_tool.jina.client import EgressTransport
from openapi_tool.jina.transport import AiohttpTransport, Resolver
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.reloading import Reloader
from openapi_tool.state.change import change
from openapi_tool.state.port import Records
from openapi_tool.state.sqlite import StateFile
from openapi_tool.tools.policy import Switches, SwitchRecordInvalid, TimeLimits

log = logging.getLogger(__name__)

SWITCHES, SESSION_KEY = "switches", "session_key"
"""Records of the bucket `gateway`."""

_SWITCHES_READ_S = 1.0


def gateway_records(state: StateFile) -> Records:
    """Return the records of switches and session key."""
    return state.records("gateway")


@asynccontextmanager
async def open_gateway(
    reloader: Reloader, state: StateFile, tools: Tools, resolver: Resolver | None = None
) -> AsyncIterator[Gateway]:
    """Yield a running gateway; at the end its calls are stopped, and what they cost is settled.

    `resolver` replaces DNS for the upstream's hosts in tests and demos. Raises Unavailable.
    """
    bootstrap = reloader.bootstrap
    settings = bootstrap.settings
    records = gateway_records(state)
    session_key = await _session_key(bootstrap, records)
    transport = EgressTransport(AiohttpTransport(bootstrap.upstream_tls, settings.egress, resolver))
    hide_memory()  # from the workers
    pool = WorkerPool(settings.isolation.workers, settings.egress.max_response_bytes)  # started by its first task
    async with shared_quotas(bootstrap, state) as quotas:
        upstream = Upstream(bootstrap, transport, quotas.limiter, quotas.budgets, isolation=Isolation(pool))
        texts = StoredTexts(state.texts("whole", settings.tools.artifact_ttl_s))
        runner = build_runner(bootstrap, upstream, texts, session_key)
        untaken = UntakenResults(state.texts("untaken", UNTAKEN_S))
        limits = TimeLimits(settings.executor, settings.tools)
        parts = GatewayParts(runner, limits, settings.executor, state, texts, untaken)
        gateway = Gateway(parts, tools, lambda: reloader.policy)
        reloader.use_keys = quotas.limiter.keys.set_secrets
        reloader.add(runner)
        health = bootstrap.health
        health.limits, health.keys = quotas.limiter.snapshot, quotas.limiter.keys.snapshot
        health.budgets, health.budget_outage = quotas.budgets.snapshot, quotas.budgets.outage
        following = asyncio.create_task(_follow_switches(records, gateway), name="disabled tools")
        try:
            yield gateway
        finally:
            following.cancel()
            await gateway.aclose()
            await pool.aclose()
            await transport.aclose()


async def _session_key(bootstrap: Bootstrap, records: Records) -> bytes:
    """Return the key of session identities and cursors, which the first process creates. Raises Unavailable."""
    if bootstrap.settings.session.key is not None:
        return bootstrap.settings.session.key.get_secret_value().encode()
    fresh = secrets.token_bytes(32)
    stored = await change(records, SESSION_KEY, lambda found: None if found else fresh)
    return stored.value or fresh


async def _follow_switches(records: Records, gateway: Gateway) -> None:
    """Read every second which tools an operator has disabled; if that fails, the last known ones stay so."""
    known = 0
    while True:
        with suppress(Unavailable, SwitchRecordInvalid):
            stored = await records.read(SWITCHES)
            if stored.revision != known:
                gateway.use_switches(Switches.decode(stored.value) if stored.value else Switches())
                known = stored.revision
                log.warning("an operator has disabled or enabled tools", extra={"action": "tool.switched"})
        await asyncio.sleep(_SWITCHES_READ_S)
