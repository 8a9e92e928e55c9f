"""Records of limits, refused keys and budgets, which all replicas share in two buckets of NATS (ADR 9).

A `RecordStore` is made before NATS is connected, and passed to `Limiter` or `Budgets`, which read and write their
records through it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from nats.aio.client import Client
from prometheus_client import Counter

from openapi_tool.protocol.errors import Unavailable
from openapi_tool.quotas.account_record import from_version_1
from openapi_tool.quotas.budgets import Budgets
from openapi_tool.quotas.limiter import Limiter
from openapi_tool.state.nats_kv import MAX_VALUE_BYTES, Bucket, NatsKvRecords
from openapi_tool.state.port import AccessDenied, OnChange, Records, Stored
from openapi_tool.telemetry import metrics

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0  # of each request to NATS


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Bucket of shared records.

    - `keys`: pattern of its keys, for permissions.
    - `operations`: metric that counts reads, writes and conflicts.
    - `earlier`: bucket in which an earlier version kept the records, and `convert` turns one of them into ours.
    """

    bucket: Bucket
    keys: str
    operations: Counter
    earlier: Bucket | None = None
    convert: Callable[[bytes], bytes | None] = lambda _: None


LIMITS = BucketSpec(
    Bucket(
        "openapi_tool_key_limits",
        ttl_s=2 * 3600,
        max_bytes=64 * 2**20,
        max_value_bytes=MAX_VALUE_BYTES,
        changes="openapi_tool.key_limits",
    ),
    "*.*.*",
    metrics.LIMIT_OPERATIONS,
)
BUDGETS = BucketSpec(
    Bucket(
        "openapi_tool_accounts",
        ttl_s=40 * 86_400,
        max_bytes=256 * 2**20,
        max_value_bytes=MAX_VALUE_BYTES,
        changes="openapi_tool.accounts",
    ),
    "budget.*",
    metrics.BUDGET_OPERATIONS,
    Bucket("openapi_tool_budgets"),
    from_version_1,
)
"""Its TTL is longer than the month of a budget."""


class RecordStore:
    """Records of a bucket, counted; all methods raise Unavailable, also before `connected`."""

    def __init__(self, spec: BucketSpec) -> None:
        self._spec = spec
        self._records: Records | None = None
        self._earlier: Records | None = None

    @asynccontextmanager
    async def connected(self, user: Limiter | Budgets, client: Client, replicas: int) -> AsyncIterator[None]:
        """Share the records over this connection: pass those of all replicas to `user`, and close `user` in the end."""
        self.connect(client, replicas)
        async with self.watch(user.on_change), aclosing(user):
            yield

    def connect(self, client: Client, replicas: int) -> None:
        """Use this connection from now on; the first write creates a missing bucket with `replicas` replicas."""
        self._records = NatsKvRecords(client, replace(self._spec.bucket, replicas=replicas), _TIMEOUT_S)
        self._earlier = NatsKvRecords(client, self._spec.earlier, _TIMEOUT_S) if self._spec.earlier else None

    async def read(self, key: str) -> Stored:
        """Return a record. One that was never written is taken over from an earlier version."""
        stored = await self._counted("read").read(key)
        was_written = stored != Stored()
        if self._earlier is None or was_written:
            return stored
        try:
            earlier = await self._earlier.read(key)
        except AccessDenied:  # the user of NATS has only the permissions of this version
            self._earlier = None
            return stored
        if earlier.value is None:
            return stored
        return Stored(self._spec.convert(earlier.value), revision=0)  # the first write creates it in the new bucket

    async def write(self, key: str, value: bytes, revision: int) -> int | None:
        """Replace a record that still has this revision, 0 if it was never written."""
        written = await self._counted("write").write(key, value, revision)
        if written is None:
            self._spec.operations.labels("conflict").inc()
        return written

    @asynccontextmanager
    async def watch(self, on_change: OnChange) -> AsyncIterator[None]:
        """Call `on_change` for changes of other replicas, if possible; else conflicts of writes show them."""
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._counted("watch").watch(on_change))
            except Unavailable as error:
                log.warning(
                    "cannot subscribe to changes of %s: %s",
                    self._spec.bucket.name,
                    error,
                    extra={"action": "limits.not_followed"},
                )
            yield

    def _counted(self, operation: str) -> Records:
        """Return the records, and count an operation on them."""
        if self._records is None:
            raise Unavailable("NATS: not connected yet")
        self._spec.operations.labels(operation).inc()
        return self._records
