"""Mistakes in a client's message that the SDK does not answer in a usable way.

It would take the message for one of another kind, or answer with the text of a library's error.
"""

from __future__ import annotations

from pydantic_core import from_json


def problem_of(message: bytes) -> str:
    """Return what is wrong with a JSON-RPC message, empty if nothing is known to be."""
    try:
        value = from_json(message)
    except ValueError:
        return ""  # the SDK answers what is no JSON
    if isinstance(value, list):
        return "several messages in one are not served; send each by itself"
    if not isinstance(value, dict) or "method" not in value or "id" not in value:
        return ""  # it is no request
    request_id = value["id"]
    is_right_id = isinstance(request_id, str | int) and not isinstance(request_id, bool)
    if is_right_id:
        return ""
    # The SDK takes such a request for a notification and does not answer it; so the client would wait for ever.
    return "the id of a request must be a text or a whole number"
