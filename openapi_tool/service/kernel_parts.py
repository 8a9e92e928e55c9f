"""Parts of the service that need a connection to the kernel."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tenacity import wait_exponential_jitter

from openapi_tool.bootstrap import Bootstrap, build_runner, scoped_key
from openapi_tool.concurrency.retries import retried
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.kernel.jetstream.consumer import CommandConsumer
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.doorbell_publisher import DoorbellPublisher
from openapi_tool.kernel.jetstream.durable_monitor import DurableMonitor
from openapi_tool.kernel.jetstream.fetch_mode import FetchMode
from openapi_tool.kernel.jetstream.parked_results import parked_results
from openapi_tool.kernel.jetstream.slots import Slots
from openapi_tool.kernel.jetstream.storage_check import StorageMonitor
from openapi_tool.kernel.pipeline.parked_results import ParkedResults
from openapi_tool.kernel.pipeline.pipeline import Pipeline, PipelineOptions
from openapi_tool.kernel.postgres.breaker import GuardedStore
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import connected
from openapi_tool.nats_client.options import BusOptions, ConsumerOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.nats_records.quota_monitor import QuotaMonitor
from openapi_tool.nats_records.replica_statistics import answering_stats
from openapi_tool.nats_records.replicas import replica_count
from openapi_tool.nats_records.session_key import shared_session_key
from openapi_tool.nats_records.switches import SwitchMonitor
from openapi_tool.options.postgres import PoolOptions
from openapi_tool.protocol.dialect import dialect_of
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.service.database_monitor import DatabaseMonitor
from openapi_tool.service.process_parts import ProcessParts
from openapi_tool.settings import Settings
from openapi_tool.telemetry.health import NATS, QUOTAS, Dependency, Health
from openapi_tool.tools.deadlines import TimeLimits, longest_call_s

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that the caller starts, monitors or stops."""

    consumer: CommandConsumer
    kernel: KernelStore
    durable_monitor: DurableMonitor
    storage: StorageMonitor
    database: DatabaseMonitor
    runner: ToolRunner
    switches: SwitchMonitor
    session_key: bytes = field(repr=False)


async def assemble(stack: AsyncExitStack, bootstrap: Bootstrap, process_parts: ProcessParts) -> Parts:
    """Connect to the kernel and build the parts without starting the consumer; `stack` closes them."""
    settings, health = bootstrap.settings, bootstrap.health
    database = DatabaseMonitor(health, bootstrap.pool)

    def nats_unavailable(error: Unavailable) -> None:
        health.record(NATS, ok=False, reason=str(error))

    async with asyncio.TaskGroup() as group:  # concurrently, so that all unavailable servers are named
        opening = group.create_task(_open_kernel(stack, bootstrap.pool, database))
        connecting = group.create_task(_connect(stack, bootstrap.bus, nats_unavailable))
    kernel, client = opening.result(), connecting.result()
    health.record(NATS, ok=True)
    with_quotas = bootstrap.quotas is None
    clock = process_parts.clock if with_quotas else ServerClock()
    slots = Slots(settings.executor.concurrency, settings.executor.max_paused)
    replicas = await _until_available(lambda: replica_count(client, bootstrap.durable), nats_unavailable)
    shared_key = await _session_key(settings, client, replicas, nats_unavailable)
    session_key = scoped_key(shared_key, bootstrap.scope)
    if with_quotas:
        await _share_quotas(stack, client, process_parts, replicas)
    else:
        await process_parts.quotas_tried.wait()
    guarded, parked = GuardedStore(kernel, database.breaker), parked_results(client, replicas)
    runner = build_runner(bootstrap, process_parts.upstream, guarded, session_key)
    doorbells = DoorbellPublisher(client)
    pipeline = Pipeline(
        PipelineOptions(settings.actor_id, settings.executor, settings.tools),
        dialect_of(settings.protocol.version, settings.actor_id),
        guarded,
        runner,
        doorbells,
        process_parts.tracer,
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
    process_parts.statistics.work = consumer.work
    database.wake = consumer.wake
    stored_key = None if settings.session.key else shared_key
    storage = StorageMonitor(
        client, consumer.leases, parked, letters, doorbells, stored_key, replicas, health, with_quotas
    )

    def doorbells_changed() -> None:
        storage.wake()
        consumer.wake()

    doorbells.changed = doorbells_changed
    doorbells.stream = lambda: consumer.durable.stream if consumer.durable is not None else ""
    monitor = DurableMonitor(client, bootstrap.durable, consumer, clock, health, replicas)
    await stack.enter_async_context(answering_stats(client, process_parts.statistics.now))
    switches = SwitchMonitor(client, runner.set_switches)
    await _until_available(switches.load, nats_unavailable)
    return Parts(consumer, kernel, monitor, storage, database, runner, switches, session_key)


async def _share_quotas(stack: AsyncExitStack, client: BusClient, process_parts: ProcessParts, replicas: int) -> None:
    """Store the records of quotas in this NATS."""
    await stack.enter_async_context(process_parts.limit_records.connected(process_parts.limiter, client, replicas))
    with suppress(Unavailable):  # blocked keys are then detected by their next refusal
        await process_parts.limiter.keys.load()
    await stack.enter_async_context(process_parts.budget_records.connected(process_parts.budgets, client, replicas))
    process_parts.quotas_tried.set()


async def run_quotas(stack: AsyncExitStack, bus: BusOptions, health: Health, process_parts: ProcessParts) -> None:
    """Share the records of quotas over a NATS that is not the kernel's, and monitor it until cancelled.

    While it is unavailable, limits and budgets go on by the last known records, as in an outage of the kernel's NATS.
    """
    health.dependencies[QUOTAS] = Dependency()

    def unavailable(error: Unavailable) -> None:
        health.record(QUOTAS, ok=False, reason=str(error))
        process_parts.quotas_tried.set()

    client = await _connect(stack, bus, unavailable)
    replicas = bus.nats.replicas or 1
    monitor = QuotaMonitor(client, process_parts.clock, health, replicas)
    await monitor.check()  # sets the clock
    await _share_quotas(stack, client, process_parts, replicas)
    await monitor.run()


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


def consumer_options(bootstrap: Bootstrap, replicas: int) -> ConsumerOptions:
    """Return the options of the consumer."""
    settings = bootstrap.settings
    limits = TimeLimits(settings.executor, settings.tools)
    max_run_s = longest_call_s(limits, bootstrap.authorizer, settings.postgres.timeout_s)
    return ConsumerOptions(bootstrap.durable, settings.executor, max_run_s, replicas, settings.fairness)


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
