"""Body of a command: the fields and rules that all protocol versions share (protocol section 2)."""

from __future__ import annotations

from dataclasses import field
from typing import cast

from openapi_tool.frozen import frozen
from openapi_tool.protocol.command import (
    AFTER_EXECUTION,
    HEARTBEAT_NAMES,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADER_LINES,
    AfterExecution,
    Command,
    Delivery,
)
from openapi_tool.protocol.errors import BadRequest
from openapi_tool.protocol.identity import ClaimedIdentity
from openapi_tool.protocol.jsontext import loads, storable_text
from openapi_tool.protocol.jsonvalue import JsonObject
from openapi_tool.protocol.subject import MAX_ID_BYTES, CommandSubject, is_too_long

INLINE_DATA = frozenset({"args", "arguments", "result"})


@frozen
class Body:
    """Fields of a body, empty if it is no JSON object, and the problems of the message; dialects add theirs."""

    fields: JsonObject
    problems: list[str] = field(default_factory=list)


def read_body(delivery: Delivery) -> Body:
    """Parse a body and check the fields that all versions have. Raises nothing."""
    body = _parsed(delivery)
    if not delivery.headers_complete:
        body.problems.insert(0, f"the headers have more than {MAX_HEADER_LINES} lines or {MAX_HEADER_BYTES:,} bytes")
    return body


def command_of(subject: CommandSubject, identity: ClaimedIdentity, body: Body) -> Command:
    """Return the decoded command; problems of identity and body make it a violation."""
    after_execution, problems = body.fields.get("after_execution"), [*identity.problems, *body.problems]
    return Command(
        identity=identity,
        suffix=subject.suffix,
        card_id=name_of(body.fields.get("tool_call_card_id")),
        tool_name=name_of(body.fields.get("tool_name")),
        after_execution=cast("AfterExecution", after_execution) if after_execution in AFTER_EXECUTION else None,
        violation=_violation(problems) if problems else None,
    )


def name_of(value: object) -> str | None:
    """Return a name or id without surrounding white space; None if it is empty, too long or no string."""
    text = storable_text(value).strip() if isinstance(value, str) else ""
    return text if text and not is_too_long(text) else None


def _parsed(delivery: Delivery) -> Body:
    if delivery.truncated_body is not None:
        return Body({}, [f"the body is larger than {MAX_BODY_BYTES:,} bytes"])
    try:
        body = loads(delivery.data)
    except ValueError:
        return Body({}, ["the body is not JSON"])
    if not isinstance(body, dict):
        return Body({}, ["the body is not a JSON object"])
    return Body(body, _problems(body))


def _problems(body: JsonObject) -> list[str]:
    problems = [
        f"body field {name} must be a non-empty string of at most {MAX_ID_BYTES} bytes"
        for name in ("tool_call_card_id", "tool_name")
        if name_of(body.get(name)) is None
    ]
    if name_of(body.get("tool_name")) in HEARTBEAT_NAMES:
        problems.append("body field tool_name is reserved: workers treat results of this name as heartbeats")
    if body.get("after_execution") not in AFTER_EXECUTION:
        problems.append("body field after_execution must be 'suspend' or 'terminate'")
    inline = sorted(INLINE_DATA & body.keys())
    if inline:
        problems.append(f"inline data is forbidden in the body ({', '.join(inline)}): it belongs in the tool.call card")
    return problems


def _violation(problems: list[str]) -> BadRequest:
    return BadRequest(
        "The tool call's command breaks the protocol; the calling system must correct it: " + "; ".join(problems) + ".",
        detail={"problems": problems},
    )
