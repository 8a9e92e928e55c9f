"""Why a stream or bucket in NATS cannot be used, and what an operator does about it."""

from __future__ import annotations

from nats.js.api import DiscardPolicy, StreamInfo
from nats.js.errors import APIError

from openapi_tool.nats_client.connection_errors import describe_refusal
from openapi_tool.nats_records.record_store import BUDGETS, LIMITS
from openapi_tool.state.nats_kv import MAX_VALUE_BYTES

CHECK_INTERVAL_S = 4.0
"""Seconds between two checks."""

RETRY_INTERVAL_S = 1.0
"""Seconds between two checks while something cannot be used."""

_MIN_FREE_BYTES = 1024  # the server counts some overhead per message

QUOTA_BYTES = {LIMITS.bucket.stream: MAX_VALUE_BYTES, BUDGETS.bucket.stream: MAX_VALUE_BYTES}
"""Streams of the records of quotas, and the size of the largest message that is written to each."""


def failure_of_stream(error: Exception) -> str:
    """Return what a request for a stream failed with."""
    if isinstance(error, APIError):
        return f"cannot be used: {describe_refusal(error)}"
    return f"does not answer: {type(error).__name__}"


def problem_of_stream(info: StreamInfo, written_bytes: int) -> str:
    """Return why a stream does not store what is written to it, and what to do; empty if it does."""
    config, state = info.config, info.state
    name = config.name
    # None, 0 and negative numbers mean no limit.
    max_size = config.max_msg_size or -1
    max_bytes = config.max_bytes or 0
    max_messages = config.max_msgs or 0
    if config.sealed:
        return f"{name} is sealed for good: delete it (nats stream rm {name}), so that it is created again"
    if 0 <= max_size < written_bytes:
        edit = f"nats stream edit {name} --max-msg-size {written_bytes} --force"
        return f"{name} takes messages of up to {max_size} bytes only, and some have {written_bytes}: run {edit}"
    if config.discard != DiscardPolicy.NEW:  # if it is full it deletes old messages
        return ""
    free = f"delete messages, or raise the limit (nats stream edit {name})"
    if 0 < max_bytes < state.bytes + _MIN_FREE_BYTES:
        return f"{name} is full ({state.bytes} of {max_bytes} bytes): {free}"
    if 0 < max_messages <= state.messages:
        return f"{name} is full ({state.messages} of {max_messages} messages): {free}"
    return ""
