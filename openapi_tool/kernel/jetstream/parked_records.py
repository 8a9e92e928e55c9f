"""The bucket with the records of parked results: those that an executor could not commit, kept for another one."""

from __future__ import annotations

from nats.aio.client import Client

from openapi_tool.state.nats_kv import Bucket, NatsKvTexts

PARKED_BUCKET = "openapi_tool_parked"
PARKED_KEYS = "result.*"


def parked_record_store(client: Client, replicas: int) -> NatsKvTexts:
    """Return the store of parked results, which keeps them for an hour, 64 MiB together."""
    bucket = Bucket(PARKED_BUCKET, ttl_s=3600, max_bytes=64 * 2**20, max_value_bytes=512 * 1024, replicas=replicas)
    return NatsKvTexts(client, bucket, PARKED_KEYS.removesuffix("*"))
