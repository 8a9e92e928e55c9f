"""Parts of the service that need no connection to the kernel: upstream, limits, budgets, traces, worker processes."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from openapi_tool.bootstrap import Bootstrap, Upstream
from openapi_tool.isolation.pool import WorkerPool
from openapi_tool.isolation.privacy import hide_memory
from openapi_tool.isolation.service import Isolation
from openapi_tool.jina.egress import EgressTransport
from openapi_tool.jina.failures import key_failure
from openapi_tool.jina.transport import AiohttpTransport, Resolver
from openapi_tool.kernel.jetstream.instance import INSTANCE
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.nats_records.record_store import BUDGETS, LIMITS, RecordStore
from openapi_tool.options.budgets import SCOPES
from openapi_tool.quotas.budgets import Budgets
from openapi_tool.quotas.limiter import Limiter
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.snapshots import Snapshots
from openapi_tool.telemetry.spans import WireTracer, shut_down
from openapi_tool.tools.operations import OPERATIONS

if TYPE_CHECKING:
    from openapi_tool.telemetry.otlp_spans import ExportingTracer

# Settings that `top` and the status page show.
_SHOWN_SETTINGS = (
    "executor.concurrency",
    "executor.max_held",
    "postgres.pool_size",
    "egress.max_connections",
    "egress.body_budget_bytes",
    "cache.max_bytes",
    "tools.max_timeout_s",
)


@dataclass(frozen=True, slots=True)
class ProcessParts:
    """Parts that need no connection to the kernel.

    `limiter` and `budgets` store their records in the NATS of the quotas, by default the kernel's, and use its `clock`.
    `quotas_connection_settled` is set once that NATS is connected, or known to be unavailable; no call runs before.
    """

    upstream: Upstream
    limiter: Limiter
    limit_records: RecordStore
    budgets: Budgets
    budget_records: RecordStore
    clock: ServerClock
    tracer: WireTracer | ExportingTracer
    quotas_connection_settled: asyncio.Event = field(default_factory=asyncio.Event)


def open_process_parts(
    stack: AsyncExitStack,
    bootstrap: Bootstrap,
    resolver: Resolver | None,
    left_s: Callable[[], float] = lambda: math.inf,
) -> ProcessParts:
    """Build the parts; `stack` closes them, within the seconds that `left_s` returns then."""
    settings = bootstrap.settings
    transport = upstream_transport(bootstrap, resolver)
    stack.push_async_callback(transport.aclose)
    tracer = _open_telemetry(stack, bootstrap, left_s)

    clock = ServerClock()
    limit_records, budget_records = RecordStore(LIMITS), RecordStore(BUDGETS)
    # This process in shared records. Short, as a record contains up to 1,000 names and 4,000 attempts; random, as a
    # restarted process may have the same host and process number.
    replica = secrets.token_hex(5)
    limiter = Limiter(replica, settings.limits, limit_records, clock.time, key_failure, settings.fairness.weights)
    limiter.keys.set_secrets(bootstrap.secrets)
    budgets = Budgets(replica, settings.budgets, budget_records, clock.time, limiter.max_wait_share)
    _show(bootstrap, limiter, budgets)

    hide_memory()  # from the workers
    pool = WorkerPool(settings.isolation.workers, settings.egress.max_response_bytes)
    stack.push_async_callback(pool.aclose)
    pool.start()
    upstream = Upstream(bootstrap, transport, limiter, budgets, isolation=Isolation(pool))
    return ProcessParts(upstream, limiter, limit_records, budgets, budget_records, clock, tracer)


def _open_telemetry(
    stack: AsyncExitStack, bootstrap: Bootstrap, left_s: Callable[[], float]
) -> WireTracer | ExportingTracer:
    """Start the exports of traces and metrics that the settings ask for; return the tracer."""
    telemetry = bootstrap.settings.telemetry
    tracer = _tracer(bootstrap)
    stack.push_async_callback(shut_down, tracer.shutdown, left_s)
    if telemetry.otlp_metrics_endpoint is not None:
        from openapi_tool.telemetry.otlp_metrics import open_exporter  # noqa: PLC0415 - 30 MB that few deployments need

        exporter = open_exporter(telemetry.otlp_metrics_endpoint, telemetry.otlp_metrics_interval_s, INSTANCE)
        stack.push_async_callback(shut_down, exporter.shutdown, left_s)
    return tracer


def _tracer(bootstrap: Bootstrap) -> WireTracer | ExportingTracer:
    telemetry = bootstrap.settings.telemetry
    if telemetry.otlp_endpoint is None:
        return WireTracer()
    from openapi_tool.telemetry.otlp_spans import open_tracer  # noqa: PLC0415 - 30 MB that few deployments need

    return open_tracer(telemetry.otlp_endpoint, bootstrap.redactor.with_label("span"), telemetry.trace_ratio, INSTANCE)


def _show(bootstrap: Bootstrap, limiter: Limiter, budgets: Budgets) -> None:
    """Let metrics and `/readyz` show the state of limits, keys and budgets."""
    for variable in bootstrap.secrets.allowed:
        for operation in OPERATIONS:
            metrics.KEYS_REFUSED.labels(variable, operation.name)  # so that an alert sees the first refusal
    for scope in SCOPES:
        metrics.BUDGET_USED.labels(scope).set_function(partial(budgets.largest_used_fraction, scope))
    health = bootstrap.health
    health.limits = limiter.snapshot
    health.keys = limiter.keys.snapshot
    health.configured_limits = limiter.configured
    health.budgets = budgets.snapshot
    health.budget_outage = budgets.outage


def snapshots(bootstrap: Bootstrap, work: Callable[[], Mapping[str, Any]] = dict) -> Snapshots:
    """Return the source of statistics for `top` and the page; `work` returns the commands that a consumer holds."""
    shown_settings = {name: attrgetter(name)(bootstrap.settings) for name in _SHOWN_SETTINGS}
    return Snapshots(INSTANCE, bootstrap.health, shown_settings, bootstrap.version, bootstrap.durable.name, work)


def upstream_transport(bootstrap: Bootstrap, resolver: Resolver | None) -> EgressTransport:
    """Return the transport for all upstream requests."""
    return EgressTransport(AiohttpTransport(bootstrap.upstream_tls, bootstrap.settings.egress, resolver))
