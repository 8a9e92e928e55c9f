"""Outputs of tools as bytes: in the cache, and on the way from a worker process."""

from __future__ import annotations

from itertools import chain

from openapi_tool.protocol.jsontext import as_object
from openapi_tool.protocol.payload import Payload, pack_texts
from openapi_tool.tools.output import Item, ToolOutput, Usage


def pack_output(output: ToolOutput, **more: object) -> bytes:
    """Return the bytes that `unpack_output` reads: items, state and usage.

    `more` are further members, for a reader that knows them.
    """
    texts = list(chain.from_iterable(output.items))
    usage = output.usage
    return pack_texts({"state": output.state, "usage": [usage.tokens, usage.requests], **more}, texts)


def unpack_output(packed: Payload) -> ToolOutput:
    """Return a packed output. Raises ValueError."""
    texts = packed.texts()
    width = len(Item._fields)
    items = tuple(Item(*texts[at : at + width]) for at in range(0, len(texts), width))
    match packed.value.get("usage"):
        case [int(tokens), int(requests)] if tokens >= 0 and requests >= 0:
            return ToolOutput(items, as_object(packed.value.get("state")), Usage(tokens, requests))
    raise ValueError("the packed output has no usage")
