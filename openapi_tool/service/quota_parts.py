"""Sharing of quotas (rate limits and budgets) with other processes: in the kernel's NATS, or in another one."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress

from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.options import BusOptions
from openapi_tool.nats_records.quota_monitor import QuotaMonitor
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.service.connecting import connect_to_nats
from openapi_tool.service.process_parts import ProcessParts
from openapi_tool.telemetry.health import QUOTAS, Dependency, Health


async def share_quotas(stack: AsyncExitStack, client: BusClient, process_parts: ProcessParts, replicas: int) -> None:
    """Let limits and budgets share their records in this NATS from now on."""
    await stack.enter_async_context(process_parts.limit_records.connected(process_parts.limiter, client, replicas))
    with suppress(Unavailable):  # blocked keys are then detected by their next refusal
        await process_parts.limiter.keys.load()
    await stack.enter_async_context(process_parts.budget_records.connected(process_parts.budgets, client, replicas))
    process_parts.quotas_connection_settled.set()


async def run_quotas(stack: AsyncExitStack, bus: BusOptions, health: Health, process_parts: ProcessParts) -> None:
    """Share the records of quotas over a NATS that is not the kernel's, and monitor it until cancelled.

    While it is unavailable, limits and budgets go on by the last known records, as in an outage of the kernel's NATS.
    """
    health.dependencies[QUOTAS] = Dependency()

    def unavailable(error: Unavailable) -> None:
        health.record(QUOTAS, ok=False, reason=str(error))
        process_parts.quotas_connection_settled.set()

    client = await connect_to_nats(stack, bus, unavailable)
    replicas = bus.nats.replicas or 1
    monitor = QuotaMonitor(client, process_parts.clock, health, replicas)
    await monitor.check()  # sets the clock
    await share_quotas(stack, client, process_parts, replicas)
    await monitor.run()
