"""State of a gateway in NATS, which the processes of the gateway share, also on several machines.

An *executor* is a process that runs the tool calls of a kernel (an agent platform). If executors use the same NATS, the
gateway shares limits, budgets, switches and the key of session identities with them, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from openapi_tool.bootstrap import Bootstrap, derived_key
from openapi_tool.concurrency.background import in_background
from openapi_tool.concurrency.cancellation import cancel_until_ended
from openapi_tool.gateway.nats_rows import NatsRows
from openapi_tool.gateway.state import TOKENS
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection import connected
from openapi_tool.nats_client.options import BusOptions
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.nats_records.quota_monitor import QuotaMonitor
from openapi_tool.nats_records.record_store import BUDGETS, LIMITS, BucketSpec, RecordStore
from openapi_tool.nats_records.replica_statistics import answering_stats
from openapi_tool.nats_records.replicas import replica_count
from openapi_tool.nats_records.session_key import shared_session_key
from openapi_tool.nats_records.switches import SwitchMonitor
from openapi_tool.settings.model import with_values
from openapi_tool.state.nats_kv import Bucket
from openapi_tool.state.nats_stream import ListedKvRecords
from openapi_tool.state.nats_texts import PartedTexts, Patience
from openapi_tool.state.port import ListedRecords, Records
from openapi_tool.telemetry.health import QUOTAS, Dependency
from openapi_tool.tools.switches import Switches

_MIB = 2**20

TEXT_BUCKETS = {"whole": 512 * _MIB, "untaken": 64 * _MIB, "idempotent": 64 * _MIB}
"""How many bytes each bucket of texts holds at most.

The texts are whole texts of truncated results, paid results that no client took, and results by `Idempotency-Key`.
"""

TOKEN_BUCKET = Bucket(f"openapi_tool_gateway_{TOKENS}", max_bytes=64 * _MIB, max_value_bytes=64 * 1024, restricted=True)


def text_bucket(name: str) -> Bucket:
    """Return a bucket of texts, still without the TTL, which the settings say."""
    return Bucket(f"openapi_tool_gateway_{name}", max_bytes=TEXT_BUCKETS[name], drops_oldest=True)


def gateway_bus(options: BusOptions) -> BusOptions:
    """Return the options of a gateway's connection: other than an executor it gets replies on an inbox of its own.

    So an operator can forbid each of them to read the replies of the other.
    """
    inbox = NatsUser.GATEWAY.inbox_prefix(options.nats.inbox_prefix)
    # Errors about missing permissions name this command.
    listed_by = f"openapi-tool nats permissions --for {NatsUser.GATEWAY}"
    return replace(options, nats=with_values(options.nats, inbox_prefix=inbox), listed_by=listed_by)


def stored_tokens(client: BusClient, replicas: int) -> ListedKvRecords:
    """Return the records of tokens."""
    return ListedKvRecords(client, replace(TOKEN_BUCKET, replicas=replicas))


class NatsState:
    """Implements `GatewayState` over connections to NATS.

    `client` is connected to the NATS of the gateway, and `quota_client` to that of limits and budgets. Without
    `quotas.nats` in the settings both are the same. New streams and buckets get as many copies as `replicas` says.
    """

    def __init__(self, bootstrap: Bootstrap, client: BusClient, quota_client: BusClient, replicas: int) -> None:
        self._client = client
        self._replicas = replicas
        self._patience = Patience(client)  # shared: if NATS does not answer one request, the next ones fail at once
        clock = ServerClock()  # set by `monitor`
        self.time = clock.time
        quota_replicas = replicas
        if quota_client is not client:
            quota_replicas = quota_client.bus.nats.replicas or 1
        self.limits: Records = _connected_records(LIMITS, quota_client, quota_replicas)
        self.budgets: Records = _connected_records(BUDGETS, quota_client, quota_replicas)
        self.tokens: ListedRecords = stored_tokens(client, replicas)
        self.rows = NatsRows(self._patience, replicas)
        self.monitor = QuotaMonitor(quota_client, clock, bootstrap.health, quota_replicas)

    def texts(self, bucket: str, ttl_s: float) -> PartedTexts:
        """Return the texts of a bucket, which expire `ttl_s` seconds after they were stored."""
        return PartedTexts(self._patience, replace(text_bucket(bucket), ttl_s=ttl_s, replicas=self._replicas))

    async def session_key(self) -> bytes:
        """Return the key that signs session identities and cursors. It is derived from the key of the executors.

        So a cursor of the gateway is of no use with an executor, and the other way round. Raises Unavailable.
        """
        return derived_key(await shared_session_key(self._client, self._replicas), "gateway")

    @asynccontextmanager
    async def operated(
        self, name: str, use: Callable[[Switches], None], snapshot: Callable[[], Mapping[str, Any]]
    ) -> AsyncIterator[None]:
        """While the context is open pass an operator's switches to `use`, and answer requests for statistics.

        The switches are read before the context opens, so that no call runs without them. Raises Unavailable.
        """
        del name  # of this process: the snapshot has it, too
        switches = SwitchMonitor(self._client, use)
        await switches.load()
        following = in_background(switches.run(), "switches")
        try:
            async with answering_stats(self._client, snapshot):
                yield
        finally:
            await cancel_until_ended(following)


def _connected_records(bucket: BucketSpec, client: BusClient, replicas: int) -> RecordStore:
    records = RecordStore(bucket)
    records.connect(client, replicas)
    return records


@asynccontextmanager
async def open_nats_state(
    bootstrap: Bootstrap, on_unavailable: Callable[[str], None] | None = None
) -> AsyncIterator[NatsState]:
    """Connect to the NATS of the settings, and to that of the quotas if it is another one.

    While one of them is unavailable, this waits, and tells `on_unavailable` why. Raises Unavailable if TLS is required
    and no server offers it.
    """
    async with AsyncExitStack() as stack:
        bus = replace(gateway_bus(bootstrap.bus), on_trouble=on_unavailable)
        client = await stack.enter_async_context(connected(bus))
        quota_client = client
        if bootstrap.quotas is not None:
            quota_bus = replace(bootstrap.quotas, on_trouble=on_unavailable)
            quota_client = await stack.enter_async_context(connected(quota_bus))
        bootstrap.health.dependencies[QUOTAS] = Dependency()
        state = NatsState(bootstrap, client, quota_client, await replica_count(client, bootstrap.durable))
        await state.monitor.check()  # sets the clock
        monitoring = in_background(state.monitor.run(), "quotas")
        try:
            yield state
        finally:
            await cancel_until_ended(monitoring)
