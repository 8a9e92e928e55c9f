"""Results of a gateway as clients read them, whatever the protocol: as one text, or as an object, the *structure*."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openapi_tool.gateway.call import Answer
from openapi_tool.protocol.cards import as_model_reads

STRUCTURE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "description": "The text that a model reads, in its frames."},
        "state": {"type": "object", "description": "Addresses, titles and counts of the result; web content."},
        "usage": {
            "type": "object",
            "properties": {"tokens": {"type": "integer"}, "requests": {"type": "integer"}},
            "description": "Tokens charged and requests sent.",
        },
        "truncated": {"type": "boolean"},
        "next_cursor": {"type": ["string", "null"], "description": "Argument `cursor` of the call for the next part."},
        "cached": {"type": "boolean"},
        "budget": {"type": "object", "description": "What is left of each budget, by its name."},
        "error": {"type": "object", "description": "Code and message of a failed call."},
    },
    "required": ["content"],
}
"""JSON schema of the object that `structure` returns."""

_FACTS_SHOWN = ("state", "usage", "truncated", "next_cursor", "cached", "budget")
"""Facts of an answer (`Answer.facts`) that clients get."""


def text_of(answer: Answer) -> str:
    """Return what a model reads. For a failed call that is its error code, and what the model is to do."""
    fields = answer.fields
    if fields.error is not None:
        return f"{fields.error['code']}: {fields.error['message']}"
    result = fields.result
    if isinstance(result, dict) and isinstance(result.get("content"), str):  # of a definition's `result_format: object`
        return str(result["content"])
    return as_model_reads({"status": fields.status, "result": result, "error": None})


def structure(answer: Answer) -> dict[str, Any]:
    """Return the result as an object: the text that a model reads, and what is known of the result."""
    fields = answer.fields
    facts = answer.facts
    shown = {name: facts[name] for name in _FACTS_SHOWN if name in facts}
    result = {"content": text_of(answer), **shown}
    if fields.error is not None:
        result["error"] = dict(fields.error)
    return result
