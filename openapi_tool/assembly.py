"""Assemble the parts of the service: shared ones, and those of one kernel."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from tenacity import wait_exponential_jitter

from openapi_tool.bootstrap import Bootstrap, Upstream, build_runner, scoped_key
from openapi_tool.bus.client import BusClient
from openapi_tool.bus.connection import (
    INSTANCE,
    WakeupPublisher,
    answering_stats,
    connected,
)
from openapi_tool.bus.consumer import CommandConsumer
from openapi_tool.bus.dead_letters import DeadLetters
from openapi_tool.bus.durable import ServerClock
from openapi_tool.bus.durable_monitor import DurableMonitor
from openapi_tool.bus.leases import FetchMode
from openapi_tool.bus.options import BusOptions, ConsumerOptions
from openapi_tool.bus.parked_results import parked_results
from openapi_tool.bus.session_key import shared_session_key
from openapi_tool.bus.storage import BUDGETS, LIMITS, RecordStore, Storage
from openapi_tool.bus.streams import replica_count
from openapi_tool.bus.switches import SwitchMonitor
from openapi_tool.bus.worker import Slots
from openapi_tool.concurrency import retried
from openapi_tool.executor.commit import ParkedResults
from openapi_tool.executor.pipeline import Pipeline, PipelineOptions
from openapi_tool.executor.runner import ToolRunner
from openapi_tool.isolation.pool import WorkerPool
from openapi_tool.isolation.privacy import hide_memory
from openapi_tool.isolation.service import Isolation
from openapi_tool.jina.client import EgressTransport
from openapi_tool.jina.failures import key_failure
from openapi_tool.jina.transport import AiohttpTransport, Resolver
from openapi_tool.kernel.breaker import CircuitBreaker, GuardedStore
from openapi_tool.kernel.failures import located
from openapi_tool.kernel.store import KernelStore
from openapi_tool.options import PoolOptions
from openapi_tool.protocol.dialect import dialect_of
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.quotas.account import SCOPES
from openapi_tool.quotas.budgets import Budgets
from openapi_tool.quotas.limiter import Limiter
from openapi_tool.settings import Settings
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.calls import WireTracer, shut_down
from openapi_tool.telemetry.health import NATS, POSTGRES, Health, Snapshots
from openapi_tool.tools.policy import TimeLimits, longest_call_s

if TYPE_CHECKING:
    from openapi_tool.telemetry.otlp import ExportingTracer

log = logging.getLogger(__name__)

_MAX_CHECK_S = 3.0  # a hanging check ends only after several timeouts of the driver, so do not wait for its end
_NO_ANSWER = Unavailable(f"PostgreSQL: no answer within {_MAX_CHECK_S:.0f} s")


class DatabaseMonitor:
    """State of the database from health checks and from the loads and commits of calls.

    Messages contain server, database and the setting of its DSN. `wake` is called on every change.
    """

    def __init__(self, health: Health, pool: PoolOptions) -> None:
        self._health = health
        self._located = partial(located, pool=pool)
        self._outage = ""
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
        """Run a health check, thorough while the breaker is open, which may close it if no call runs (`idle`)."""
        timer = asyncio.get_running_loop().call_later(_MAX_CHECK_S, self.mark_unavailable, _NO_ANSWER)
        try:
            if await kernel.ping(thorough=bool(self.breaker.reason)):
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


T = TypeVar("T")

_SHOWN_LIMITS = (
    "executor.concurrency",
    "executor.max_held",
    "postgres.pool_size",
    "egress.max_connections",
    "egress.body_budget_bytes",
    "cache.max_bytes",
    "tools.max_timeout_s",
)


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a kernel that the caller starts, monitors or stops."""

    consumer: CommandConsumer
    kernel: KernelStore
    durable_monitor: DurableMonitor
    storage: Storage
    database: DatabaseMonitor
    runner: ToolRunner
    switches: SwitchMonitor
    session_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts that all kernels share.

    `limiter` and `budgets` store their records in the main kernel's NATS and use its `clock`. On each NATS only one
    connection answers requests for the `statistics`: `answering` has the servers where one does.
    """

    upstream: Upstream
    limiter: Limiter
    limit_records: RecordStore
    budgets: Budgets
    budget_records: RecordStore
    clock: ServerClock
    tracer: WireTracer | ExportingTracer
    statistics: Snapshots
    answering: set[tuple[str, ...]] = field(default_factory=set)


def open_shared(
    stack: AsyncExitStack,
    bootstrap: Bootstrap,
    resolver: Resolver | None,
    left_s: Callable[[], float] = lambda: math.inf,
) -> Shared:
    """Build the shared parts; `stack` closes them, within the seconds that `left_s` returns then."""
    transport = upstream_transport(bootstrap, resolver)
    stack.push_async_callback(transport.aclose)
    settings, tracer = bootstrap.settings, _tracer(bootstrap)
    stack.push_async_callback(shut_down, tracer.shutdown, left_s)
    if settings.telemetry.otlp_metrics_endpoint is not None:
        from openapi_tool.telemetry.otlp import open_exporter  # noqa: PLC0415 - 30 MB that few deployments need

        exporter = open_exporter(
            settings.telemetry.otlp_metrics_endpoint, settings.telemetry.otlp_metrics_interval_s, INSTANCE
        )
        stack.push_async_callback(shut_down, exporter.shutdown, left_s)
    for variable in bootstrap.secrets.allowed:
        metrics.KEYS_REFUSED.labels(variable)  # so that an alert sees the first refusal
    clock = ServerClock()
    limit_records, budget_records = RecordStore(LIMITS), RecordStore(BUDGETS)
    limit_replica = secrets.token_hex(5)  # short: a record of limits contains up to 1,000 names
    limiter = Limiter(limit_replica, settings.limits, limit_records, clock.time, key_failure, settings.fairness.weights)
    limiter.keys.set_secrets(bootstrap.secrets)
    budget_replica = f"{INSTANCE}-{secrets.token_hex(3)}"  # a restarted process may have the same name
    budgets = Budgets(budget_replica, settings.budgets, budget_records, clock.time)
    for scope in SCOPES:
        metrics.BUDGET_USED.set_function(partial(budgets.largest_used_fraction, scope), scope)
    health = bootstrap.health
    health.limits, health.keys = limiter.snapshot, limiter.keys.snapshot
    health.budgets, health.budget_outage = budgets.snapshot, budgets.outage
    hide_memory()  # from the workers
    pool = WorkerPool(settings.isolation.workers, settings.egress.max_response_bytes)
    stack.push_async_callback(pool.aclose)
    pool.start()
    upstream = Upstream(bootstrap, transport, limiter, budgets, isolation=Isolation(pool))
    return Shared(upstream, limiter, limit_records, budgets, budget_records, clock, tracer, snapshots(bootstrap))


async def assemble(stack: AsyncExitStack, bootstrap: Bootstrap, shared: Shared) -> Parts:
    """Connect to a kernel and build its parts without starting the consumer; `stack` closes them."""
    settings, health = bootstrap.settings, bootstrap.health
    database = DatabaseMonitor(health, bootstrap.pool)

    def nats_unavailable(error: Unavailable) -> None:
        health.record(NATS, ok=False, reason=str(error))

    async with asyncio.TaskGroup() as group:  # concurrently, so that all unavailable servers are named
        opening = group.create_task(_open_kernel(stack, bootstrap.pool, database))
        connecting = group.create_task(_connect(stack, bootstrap.bus, nats_unavailable))
    kernel, client = opening.result(), connecting.result()
    health.record(NATS, ok=True)
    clock = shared.clock if bootstrap.main else ServerClock()
    slots = Slots(settings.executor.concurrency, settings.executor.max_paused)
    replicas = await _until_available(lambda: replica_count(client, bootstrap.durable), nats_unavailable)
    shared_key = await _session_key(settings, client, replicas, nats_unavailable)
    session_key = scoped_key(shared_key, bootstrap.scope)
    if bootstrap.main:
        await stack.enter_async_context(shared.limit_records.shared_by(shared.limiter, client, replicas))
        with suppress(Unavailable):  # blocked keys are then detected by their next refusal
            await shared.limiter.keys.load()
        await stack.enter_async_context(shared.budget_records.shared_by(shared.budgets, client, replicas))
    guarded, parked = GuardedStore(kernel, database.breaker), parked_results(client, replicas)
    runner = build_runner(bootstrap, shared.upstream, guarded, session_key)
    doorbells = WakeupPublisher(client)
    pipeline = Pipeline(
        PipelineOptions(settings.actor_id, settings.executor, settings.tools),
        dialect_of(settings.protocol.version, settings.actor_id),
        guarded,
        runner,
        doorbells,
        shared.tracer,
        clock.time,
        ParkedResults(parked, session_key),
        slots.of,
    )
    letters = DeadLetters(client, bootstrap.redactor.with_label("dead_letter"), replicas)
    options = consumer_options(bootstrap, replicas)

    def fetch_mode() -> FetchMode:
        # Calls that have not begun are left in the stream: without a doorbell no worker would read their results.
        return FetchMode.NONE if doorbells.outage else database.fetch_mode()

    consumer = CommandConsumer(client, options, letters, pipeline.handle, fetch_mode, clock, slots)
    shared.statistics.work.append(consumer.work)
    database.wake = consumer.wake
    stored_key = None if settings.session.key else shared_key
    storage = Storage(client, consumer.leases, parked, letters, doorbells, stored_key, replicas, health)

    def doorbells_changed() -> None:
        storage.wake()
        consumer.wake()

    doorbells.changed = doorbells_changed
    doorbells.stream = lambda: consumer.durable.stream if consumer.durable is not None else ""
    monitor = DurableMonitor(client, bootstrap.durable, consumer, clock, health)
    if (servers := tuple(bootstrap.bus.nats.servers)) not in shared.answering:
        shared.answering.add(servers)
        await stack.enter_async_context(answering_stats(client, shared.statistics.now))
    switches = SwitchMonitor(client, runner.set_switches)
    await _until_available(switches.load, nats_unavailable)
    return Parts(consumer, kernel, monitor, storage, database, runner, switches, session_key)


async def _open_kernel(stack: AsyncExitStack, pool: PoolOptions, database: DatabaseMonitor) -> KernelStore:
    kernel = await _until_available(lambda: KernelStore.open(pool), database.mark_unavailable)
    stack.push_async_callback(kernel.aclose)
    database.mark_available()
    return kernel


async def _connect(
    stack: AsyncExitStack, options: BusOptions, on_unavailable: Callable[[Unavailable], None]
) -> BusClient:
    bus = replace(options, on_trouble=lambda reason: on_unavailable(Unavailable(reason)))
    return await _until_available(lambda: stack.enter_async_context(connected(bus)), on_unavailable)


def snapshots(bootstrap: Bootstrap) -> Snapshots:
    """Return the source of statistics for `top` and the page."""
    limits = {name: attrgetter(name)(bootstrap.settings) for name in _SHOWN_LIMITS}
    durables = [kernel.durable.name for kernel in (bootstrap, *bootstrap.others)]
    return Snapshots(INSTANCE, bootstrap.health, limits, durables)


def consumer_options(bootstrap: Bootstrap, replicas: int) -> ConsumerOptions:
    """Return the options of the consumer of a kernel."""
    settings = bootstrap.settings
    limits = TimeLimits(settings.executor, settings.tools)
    max_run_s = longest_call_s(limits, bootstrap.authorizer, settings.postgres.timeout_s)
    return ConsumerOptions(bootstrap.durable, settings.executor, max_run_s, replicas, settings.fairness)


def upstream_transport(bootstrap: Bootstrap, resolver: Resolver | None) -> EgressTransport:
    """Return the transport for all upstream requests."""
    return EgressTransport(AiohttpTransport(bootstrap.upstream_tls, bootstrap.settings.egress, resolver))


async def _session_key(
    settings: Settings, client: BusClient, replicas: int, on_unavailable: Callable[[Unavailable], None]
) -> bytes:
    if settings.session.key is not None:
        return settings.session.key.get_secret_value().encode()
    return await _until_available(lambda: shared_session_key(client, replicas), on_unavailable)


async def _until_available(attempt: Callable[[], Awaitable[T]], on_unavailable: Callable[[Unavailable], None]) -> T:
    """Retry until a dependency is available; `on_unavailable` records a failure."""

    async def trial() -> T:
        try:
            return await attempt()
        except Unavailable as error:
            on_unavailable(error)
            raise

    return await retried(trial, on=Unavailable, wait=wait_exponential_jitter(multiplier=0.2, max=5, jitter=0.2))


def _tracer(bootstrap: Bootstrap) -> WireTracer | ExportingTracer:
    telemetry = bootstrap.settings.telemetry
    if telemetry.otlp_endpoint is None:
        return WireTracer()
    from openapi_tool.telemetry.otlp import open_tracer  # noqa: PLC0415 - 30 MB that few deployments need

    return open_tracer(telemetry.otlp_endpoint, bootstrap.redactor.with_label("span"), telemetry.trace_ratio, INSTANCE)
