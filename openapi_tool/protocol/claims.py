"""Unverified identity of a command of any protocol version, to list and search commands."""

from __future__ import annotations

from collections.abc import Mapping

from openapi_tool.protocol.body import Body
from openapi_tool.protocol.identity import ClaimedIdentity, read_identity
from openapi_tool.protocol.jsontext import loads
from openapi_tool.protocol.jsonvalue import JsonObject
from openapi_tool.protocol.subject import CommandSubject
from openapi_tool.protocol.v1r3 import V1r3, identity_in_body


def claimed_identity(subject: str, headers: Mapping[str, str], data: bytes) -> ClaimedIdentity:
    """Return the ids in subject, headers and, in v1r3, the body; empty or None if unknown. Raises nothing."""
    tokens = [*subject.split(".", 4), "", "", "", ""]
    parsed = CommandSubject(tokens[1], tokens[2], tokens[3], "", "")
    if parsed.version == V1r3.version:
        return identity_in_body(parsed, headers, Body(_fields(data)))
    return read_identity(parsed, headers)


def _fields(data: bytes) -> JsonObject:
    try:
        fields = loads(data)
    except ValueError:  # not JSON, or a truncated body
        return {}
    return fields if isinstance(fields, dict) else {}
