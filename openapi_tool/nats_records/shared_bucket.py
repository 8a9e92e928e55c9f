"""The bucket of single records that belong to no other: session key, ack floors, disabled tools."""

from __future__ import annotations

from openapi_tool.state.nats_kv import Bucket

BUCKET = "openapi_tool"
STREAM = f"KV_{BUCKET}"
RESTRICT = f"nats stream edit {STREAM} --allow-direct --no-allow-rollup --force"
"""Command with which a bucket of an earlier version gets the configuration of a new one."""


def shared_bucket(replicas: int = 1) -> Bucket:
    """Return the bucket; its users are permitted its keys one by one."""
    return Bucket(BUCKET, replicas=replicas, restricted=True)
