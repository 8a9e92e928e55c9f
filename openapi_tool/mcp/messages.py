"""What is wrong with a client's message although the SDK would take it, or answer in the words of a library."""

from __future__ import annotations

from pydantic_core import from_json


def problem_of(message: bytes) -> str:
    """Return what is wrong with a JSON-RPC message, empty if nothing is known to be."""
    try:
        value = from_json(message)
    except ValueError:
        return ""  # the SDK answers it
    if isinstance(value, list):
        return "several messages in one are not served; send each by itself"
    if not isinstance(value, dict) or "method" not in value or "id" not in value:
        return ""
    request_id = value["id"]
    if isinstance(request_id, str | int) and not isinstance(request_id, bool):
        return ""
    # The SDK takes it for a notification, and so the client would wait for an answer.
    return "the id of a request must be a text or a whole number"
