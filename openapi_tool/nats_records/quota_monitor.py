"""Check of the NATS that holds the records of quotas (limits and budgets), if it is not the kernel's.

The kernel's NATS is checked elsewhere (`kernel/jetstream/storage_check.py`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from datetime import datetime

import nats.errors
import orjson
from nats.js.api import StreamInfo
from nats.js.errors import APIError

from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.connection_errors import Denied
from openapi_tool.nats_client.server_clock import ServerClock
from openapi_tool.nats_records.record_store import BUDGETS, LIMITS
from openapi_tool.nats_records.stream_problems import (
    CHECK_INTERVAL_S,
    QUOTA_BYTES,
    RETRY_INTERVAL_S,
    failure_of_stream,
    problem_of_stream,
)
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.state.nats_kv import Bucket, NatsKvRecords
from openapi_tool.state.port import AccessDenied
from openapi_tool.telemetry.health import QUOTAS, Health

_TIMEOUT_S = 2.0  # of each request to NATS
_NOT_FOUND = 404


@dataclass(slots=True)
class QuotaMonitor:
    """Creates the buckets of quotas in a NATS that is not the kernel's, and records in `health` if they cannot be used.

    `clock` is set to the time of this NATS, by which all that share the records count.
    """

    client: BusClient
    clock: ServerClock
    health: Health
    replicas: int

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_INTERVAL_S if self.health.ok(QUOTAS) else RETRY_INTERVAL_S)

    async def check(self) -> None:
        """Check once."""
        if self.client.is_connected:
            problems = [await self._bucket_problem(spec.bucket) for spec in (LIMITS, BUDGETS)]
            reason = "; ".join(filter(None, problems))
        else:
            reason = f"no connection: {self.client.outage}" if self.client.outage else "no connection"
        self.health.record(QUOTAS, ok=not reason, reason=reason)

    async def _bucket_problem(self, bucket: Bucket) -> str:
        """Return why a bucket cannot be used, empty if it can."""
        try:
            info = await self._info(bucket.stream)
            if info is None:
                await NatsKvRecords(self.client, replace(bucket, replicas=self.replicas), _TIMEOUT_S).ensure()
                info = await self._info(bucket.stream)
        except (Denied, AccessDenied) as denied:
            return f"{bucket.stream}: {denied}"
        except Unavailable as unavailable:
            return str(unavailable)
        except (nats.errors.Error, OSError, ValueError) as error:
            return f"{bucket.stream} {failure_of_stream(error)}"
        return problem_of_stream(info, QUOTA_BYTES[bucket.stream]) if info else f"{bucket.stream} is missing"

    async def _info(self, stream: str) -> StreamInfo | None:
        """Return a stream's state, None if it is missing; pass the server's time to `clock`.

        nats-py's `stream_info` does not return the time of the reply.
        """
        requested_at = time.monotonic()
        message = await self.client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=_TIMEOUT_S)
        replied_at = time.monotonic()
        reply = orjson.loads(message.data)
        if error := reply.get("error"):
            if error.get("code") == _NOT_FOUND:
                return None
            raise APIError.from_error(error)
        if timestamp := reply.get("ts"):  # absent before nats-server 2.10
            self.clock.observe(datetime.fromisoformat(timestamp).timestamp(), requested_at, replied_at)
        info: StreamInfo = StreamInfo.from_response(reply)
        return info
