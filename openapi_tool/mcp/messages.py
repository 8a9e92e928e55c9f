"""Mistakes in a client's message that the SDK does not answer in a usable way.

It would take the message for one of another kind, or answer with the text of a library's error.
"""

from __future__ import annotations

from mcp_types import jsonrpc_message_adapter
from pydantic import ValidationError
from pydantic_core import from_json


def problem_of(message: bytes) -> str:
    """Return what is wrong with a JSON-RPC message, empty if nothing is known to be."""
    try:
        value = from_json(message)
    except ValueError:
        return ""  # the SDK answers what is no JSON
    if isinstance(value, list):
        return "several messages in one are not served; send each by itself"
    if isinstance(value, dict) and "method" in value and "id" in value:
        request_id = value["id"]
        is_right_id = isinstance(request_id, str | int) and not isinstance(request_id, bool)
        if not is_right_id:
            # The SDK takes such a request for a notification and does not answer it; so the client would wait for ever.
            return "the id of a request must be a text or a whole number"
    try:
        jsonrpc_message_adapter.validate_python(value, by_name=False)
    except ValidationError:  # its text names classes and fields of a library
        return "the body is no JSON-RPC message; send an object with jsonrpc: 2.0, a method, and an id to get an answer"
    return ""
