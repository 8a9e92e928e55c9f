"""Any subject, headers and body through the decoder of commands: typed errors only, identity from no other source.

An input is a message as text: the subject on the first line, a header on each further one, an empty line, the body.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime

from openapi_tool.protocol.command import HEARTBEAT_NAMES, Command, Delivery
from openapi_tool.protocol.errors import Unanswerable
from openapi_tool.protocol.identity import MAX_EPOCH, ClaimedIdentity
from openapi_tool.tools.result import failure
from tests.fuzz.source import assert_storable
from tests.support import V1R4

_PUBLISHED = datetime(2026, 1, 1, tzinfo=UTC)


def check(data: bytes) -> None:
    """Decode one message; raise AssertionError for a wrong result, or the exception of a defect."""
    head, _, body = data.partition(b"\n\n")
    subject, *lines = head.decode("utf-8", "replace").split("\n")
    headers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
    tokens = subject.split(".")
    is_text = not any(char == " " or (unicodedata.category(char) == "Cc" and char < "\x80") for char in subject)
    is_command = is_text and len(tokens) >= 8 and tokens[0] == "cg" and tokens[4:6] == ["cmd", "tool"]
    try:
        command = V1R4.decode(Delivery(subject, headers, body, _PUBLISHED, attempt=1, stream_sequence=1))
    except Unanswerable as refusal:
        assert not is_command
        assert refusal.reason == "bad_subject"
        return
    assert is_command
    _assert_identity(command.identity, tokens, headers)
    _assert_command(command)


def _assert_identity(identity: ClaimedIdentity, tokens: list[str], headers: Mapping[str, str]) -> None:
    assert (identity.project_id, identity.channel_id) == (tokens[2], tokens[3])
    sent = {value.strip() for value in headers.values()}
    ids = (identity.agent_id, identity.agent_turn_id, identity.step_id, identity.tool_call_id, identity.parent_step_id)
    for text in (*ids, identity.tracestate):
        assert text is None or (text in sent and "\x00" not in text)
    for number in (identity.turn_epoch, identity.recursion_depth):
        assert number is None or 0 <= number <= MAX_EPOCH
    if identity.trace is not None:
        assert identity.trace.traceparent()[2:] in {text[2:55] for text in sent}


def _assert_command(command: Command) -> None:
    if command.violation is None:
        identity = command.identity
        assert identity.agent_id
        assert identity.tool_call_id
        assert command.card_id
        assert command.tool_name
        assert command.after_execution in ("suspend", "terminate")
    else:
        assert_storable(failure(command.violation, 1).result)
    assert command.function_name not in HEARTBEAT_NAMES
    assert_storable([command.card_id, command.tool_name])
