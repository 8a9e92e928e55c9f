"""Composition of a gateway: the engine, which runs tool calls, with quotas and stored texts over one state."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from openapi_tool.bootstrap import Upstream, build_runner
from openapi_tool.gateway.calls import Gateway, GatewayParts
from openapi_tool.gateway.quotas import Quotas, shared_quotas
from openapi_tool.gateway.state import GatewayState
from openapi_tool.gateway.stored import UNTAKEN_S, StoredTexts, UntakenResults
from openapi_tool.gateway.tools import Tools
from openapi_tool.isolation.pool import WorkerPool
from openapi_tool.isolation.privacy import hide_memory
from openapi_tool.isolation.service import Isolation
from openapi_tool.jina.egress import EgressTransport
from openapi_tool.jina.transport import AiohttpTransport, Resolver
from openapi_tool.reloading import Reloader
from openapi_tool.telemetry.health import DEPENDENCIES, Health
from openapi_tool.telemetry.snapshots import Snapshots

INSTANCE = f"{socket.gethostname()}-{os.getpid()}"
"""Name of this process among those that share the state."""


@asynccontextmanager
async def open_gateway(
    reloader: Reloader, state: GatewayState, tools: Tools, resolver: Resolver | None = None
) -> AsyncIterator[Gateway]:
    """Yield a running gateway. At the end it waits for its calls, which are then charged what they have cost.

    `resolver` replaces DNS for the upstream's hosts in tests and demos. Raises Unavailable.
    """
    bootstrap = reloader.bootstrap
    settings = bootstrap.settings
    configured_key = settings.session.key
    session_key = configured_key.get_secret_value().encode() if configured_key else await state.session_key()
    transport = EgressTransport(AiohttpTransport(bootstrap.upstream_tls, settings.egress, resolver))
    hide_memory()  # of this process, from the workers, which run as the same user
    # Worker processes for what is costly, such as large pages. The first task starts them.
    pool = WorkerPool(settings.isolation.workers, settings.egress.max_response_bytes)
    async with shared_quotas(bootstrap, state) as quotas:
        upstream = Upstream(bootstrap, transport, quotas.limiter, quotas.budgets, isolation=Isolation(pool))
        texts = StoredTexts(state.texts("whole", settings.tools.artifact_ttl_s))
        runner = build_runner(bootstrap, upstream, texts, session_key)
        untaken = UntakenResults(state.texts("untaken", UNTAKEN_S))
        parts = GatewayParts(
            runner=runner,
            call_timeout_s=settings.gateway.call_timeout_s,
            max_timeout_s=settings.tools.max_timeout_s,
            executor=settings.executor,
            state=state,
            texts=texts,
            untaken=untaken,
            budgets=quotas.budgets,
        )
        gateway = Gateway(parts, tools, lambda: reloader.policy)
        # What a reload of the settings changes.
        reloader.use_keys = quotas.limiter.keys.set_secrets
        reloader.use_limits = quotas.limiter.apply_options
        reloader.add(runner)
        _show_health_of(quotas, bootstrap.health)
        statistics = Snapshots(INSTANCE, bootstrap.health, {"executor.concurrency": settings.executor.concurrency})
        try:
            async with state.operated(INSTANCE, gateway.use_switches, statistics.now):
                yield gateway
        finally:
            await gateway.aclose()
            await pool.aclose()
            await transport.aclose()


def _show_health_of(quotas: Quotas, health: Health) -> None:
    """Let the health show limits and budgets, and none of the dependencies that only a kernel's executor has."""
    for dependency_of_kernel in DEPENDENCIES:
        health.dependencies.pop(dependency_of_kernel, None)
    health.limits = quotas.limiter.snapshot
    health.keys = quotas.limiter.keys.snapshot
    health.configured_limits = quotas.limiter.configured
    health.budgets = quotas.budgets.snapshot
    health.budget_outage = quotas.budgets.outage
