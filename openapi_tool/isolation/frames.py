"""Format of a task and of its answer on a socket, for both sides. Imports nothing but orjson and `protocol.jsontext`.

    task:   id of the task, number of its function, CPU seconds, length; then the JSON of its argument
    answer: id of the task, status, length; then the JSON of the result, or the name of the defect

Never pickle: unpickling runs code, and a worker must not be able to run code in the service.
"""

from __future__ import annotations

import json
import struct

import orjson

from openapi_tool.protocol.jsontext import JsonValue, loads

TASK = struct.Struct("!QHHI")
ANSWER = struct.Struct("!QHI")

MAX_TASK_BYTES = 16 * 2**20
"""Bytes of an argument: a call card and a definition are smaller."""

MAX_ANSWER_BYTES = 2 * 2**20
"""Bytes of a result: repaired arguments, and texts about at most 20 problems."""

DONE, DEFECT = 0, 1
"""Status of an answer. `DEFECT`: an exception in our own code."""


def encode(value: object) -> bytes:
    """Return JSON, also of numbers beyond 64 bits and lone surrogates, which orjson refuses. Raises ValueError."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, allow_nan=False).encode()


def decode(text: bytes | bytearray) -> dict[str, JsonValue]:
    """Return the JSON object that `encode` made. Raises ValueError."""
    value = loads(text)
    if not isinstance(value, dict):
        raise ValueError("the JSON is no object")  # noqa: TRY004 - of the same kind as text that is no JSON
    return value
