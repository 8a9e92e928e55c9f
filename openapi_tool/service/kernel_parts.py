"""Parts of the service that need a connection to the kernel: to its NATS and its PostgreSQL.

`assemble` waits until both are available, builds the consumer of commands and everything that a call needs, and
connects these parts with each other. The caller (`process.py`) starts and stops them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

from openapi_tool.bootstrap import Bootstrap, build_runner, derived_key
from openapi_tool.engine.runner import ToolRunner
from openapi_tool.kernel.jetstream.consumer import CommandConsumer
from openapi_tool.kernel.jetstream.dead_letters import DeadLetters
from openapi_tool.kernel.jetstream.doorbell_publisher import DoorbellPublisher
from openapi_tool.kernel.jetstream.durable_monitor import DurableMonitor
from openapi_tool.kernel.jetstream.fetch_mode import FetchMode
from openapi_tool.kernel.jetstream.parked_records import parked_record_store
from openapi_tool.kernel.jetstream.slots import Slots
from openapi_tool.kernel.jetstream.storage_check import StorageMonitor
from openapi_tool.kernel.pipeline.parked_results import ParkedResults
from openapi_tool.kernel.pipeline.pipeline import Pipeline, PipelineOptions
from openapi_tool.kernel.postgres.guarded_store import GuardedStore
from openapi_tool.kernel.postgres.store import KernelStore
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.options import ConsumerOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.nats_records.replica_statistics import answering_stats
from openapi_tool.nats_records.replicas import replica_count
from openapi_tool.nats_records.session_key import shared_session_key
from openapi_tool.nats_records.switches import SwitchMonitor
from openapi_tool.options.postgres import PoolOptions
from openapi_tool.protocol.dialect import dialect_of, namespace_of
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.service.connecting import connect_to_nats, until_available
from openapi_tool.service.database_monitor import DatabaseMonitor
from openapi_tool.service.process_parts import ProcessParts, snapshots
from openapi_tool.service.quota_parts import share_quotas
from openapi_tool.settings import Settings
from openapi_tool.telemetry.health import NATS
from openapi_tool.tools.time_limits import TimeLimits, longest_call_s

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that the caller of `assemble` starts, monitors or stops."""

    consumer: CommandConsumer
    kernel: KernelStore
    durable_monitor: DurableMonitor
    storage: StorageMonitor
    database: DatabaseMonitor
    runner: ToolRunner
    switches: SwitchMonitor


async def assemble(stack: AsyncExitStack, bootstrap: Bootstrap, process_parts: ProcessParts) -> Parts:
    """Connect to the kernel and build the parts without starting the consumer; `stack` closes them."""
    settings, health = bootstrap.settings, bootstrap.health
    database = DatabaseMonitor(health, bootstrap.pool)

    def nats_unavailable(error: Unavailable) -> None:
        health.record(NATS, ok=False, reason=str(error))

    async with asyncio.TaskGroup() as group:  # concurrently, so that all unavailable servers are named
        opening = group.create_task(_open_kernel(stack, bootstrap.pool, database))
        connecting = group.create_task(connect_to_nats(stack, bootstrap.bus, nats_unavailable))
    kernel, client = opening.result(), connecting.result()
    health.record(NATS, ok=True)

    # What is shared with other replicas, in NATS.
    stream_replicas = await until_available(lambda: replica_count(client, bootstrap.durable), nats_unavailable)
    session_key = await _session_key(settings, client, stream_replicas, nats_unavailable)
    key_of_version = derived_key(session_key, namespace_of(settings.protocol.version))
    quotas_in_kernel_nats = bootstrap.quotas is None
    if quotas_in_kernel_nats:
        clock = process_parts.clock
        await share_quotas(stack, client, process_parts, stream_replicas)
    else:
        clock = ServerClock()  # that of the process is for the NATS of the quotas
        await process_parts.quotas_connection_settled.wait()

    # From a command to its result.
    slots = Slots(settings.executor.concurrency, settings.executor.max_paused)
    guarded = GuardedStore(kernel, database.breaker)
    parked_records = parked_record_store(client, stream_replicas)
    runner = build_runner(bootstrap, process_parts.upstream, guarded, key_of_version)
    doorbells = DoorbellPublisher(client)
    pipeline = Pipeline(
        PipelineOptions(settings.actor_id, settings.executor, settings.tools),
        dialect_of(settings.protocol.version, settings.actor_id),
        guarded,
        runner,
        doorbells,
        process_parts.tracer,
        clock.time,
        ParkedResults(parked_records, key_of_version),
        slots.of,
    )

    def fetch_mode() -> FetchMode:
        # Calls that have not begun are left in the stream: without a doorbell no worker would read their results.
        return FetchMode.NONE if doorbells.outage else database.fetch_mode()

    letters = DeadLetters(client, bootstrap.redactor.with_label("dead_letter"), stream_replicas)
    options = consumer_options(bootstrap, stream_replicas)
    consumer = CommandConsumer(client, options, letters, pipeline.handle, fetch_mode, clock, slots)

    # Monitors.
    key_to_store = None if settings.session.key else session_key
    storage = StorageMonitor(
        client,
        consumer.leases,
        parked_records,
        letters,
        doorbells,
        key_to_store,
        stream_replicas,
        health,
        quotas=quotas_in_kernel_nats,
    )
    durable_monitor = DurableMonitor(client, bootstrap.durable, consumer, clock, health, stream_replicas)

    def doorbells_changed() -> None:
        storage.wake()
        consumer.wake()

    # Set late: the consumer and the storage monitor need these parts.
    database.wake = consumer.wake
    doorbells.changed = doorbells_changed
    doorbells.stream = lambda: consumer.durable.stream if consumer.durable is not None else ""

    await stack.enter_async_context(answering_stats(client, snapshots(bootstrap, consumer.sequences).now))
    switches = SwitchMonitor(client, runner.set_switches)
    await until_available(switches.load, nats_unavailable)
    return Parts(consumer, kernel, durable_monitor, storage, database, runner, switches)


async def _open_kernel(stack: AsyncExitStack, pool: PoolOptions, database: DatabaseMonitor) -> KernelStore:
    kernel = await until_available(lambda: KernelStore.open(pool), database.mark_unavailable)
    stack.push_async_callback(kernel.aclose)
    database.mark_available()
    return kernel


def consumer_options(bootstrap: Bootstrap, replicas: int) -> ConsumerOptions:
    """Return the options of the consumer."""
    settings = bootstrap.settings
    limits = TimeLimits(settings.executor, settings.tools)
    max_run_s = longest_call_s(limits, bootstrap.authorizer, settings.postgres.timeout_s)
    return ConsumerOptions(bootstrap.durable, settings.executor, max_run_s, replicas, settings.fairness)


async def _session_key(
    settings: Settings, client: BusClient, replicas: int, on_unavailable: Callable[[Unavailable], None]
) -> bytes:
    """Return the key of session identities: that of the settings, else the one that all executors share in NATS."""
    if settings.session.key is not None:
        return settings.session.key.get_secret_value().encode()
    return await until_available(lambda: shared_session_key(client, replicas), on_unavailable)
