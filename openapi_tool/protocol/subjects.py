"""Subjects of commands and doorbells, and the names of stream and durable (protocol section 1)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from openapi_tool.protocol.errors import Unanswerable
from openapi_tool.protocol.ids import MAX_ID_BYTES, is_too_long

_TOKENS_BEFORE_SUFFIX = 7
_MAX_TOKEN_BYTES = 1_024
_MAX_SHOWN_CHARS = 100
_TOKEN = re.compile(r"[^\s.*>\x00-\x20\x7f\ud800-\udfff]+")
_VERSION = re.compile(r"v\d+r\d+")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]")
"""Control characters (jsonb refuses some), and surrogates, which represent bytes that are not UTF-8."""


def is_token(text: str) -> bool:
    """Return whether a text can be one token of a published subject."""
    return bool(_TOKEN.fullmatch(text)) and len(text.encode(errors="replace")) <= _MAX_TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class CommandSubject:
    """Parsed subject of a tool command; `suffix` may hold dots."""

    version: str
    project_id: str
    channel_id: str
    target: str
    suffix: str


def parse_command_subject(subject: str) -> CommandSubject:
    """Parse a `cmd.tool` subject. Raises Unanswerable for any other subject and for control characters."""
    tokens = subject.split(".", _TOKENS_BEFORE_SUFFIX)
    if _FORBIDDEN.search(subject):
        raise Unanswerable("bad_subject", f"{subject!r} holds a control character or bytes that are not UTF-8")
    if len(tokens) <= _TOKENS_BEFORE_SUFFIX or tokens[0] != "cg" or tokens[4:6] != ["cmd", "tool"]:
        raise Unanswerable("bad_subject", f"{subject!r} is not a tool command's subject")
    if any(is_too_long(token) for token in tokens[2:4]):
        raise Unanswerable("bad_subject", f"project or channel of {subject!r} is longer than {MAX_ID_BYTES} bytes")
    return CommandSubject(tokens[1], tokens[2], tokens[3], tokens[6], tokens[7])


def subject_in_version(subject: str, version: str) -> str:
    """Return a command's subject or pattern in another version; any other text unchanged."""
    root, _, rest = subject.partition(".")
    known, _, rest = rest.partition(".")
    return f"cg.{version}.{rest}" if root == "cg" and _VERSION.fullmatch(known) else subject


def command_filter(version: str, project: str, channel: str, target: str) -> str:
    """Return the subject filter of an executor of `target`; `*` matches any project or channel."""
    return f"cg.{version}.{project}.{channel}.cmd.tool.{target}.>"


def command_stream(version: str) -> tuple[str, str]:
    """Return name and subjects of the kernel's command stream."""
    return f"cg_cmd_{version}", f"cg.{version}.*.*.cmd.*.*.>"


def default_durable(version: str, target: str) -> str:
    """Return the durable of the kernel's own executor: one that shares it takes over without losing a command."""
    return f"tool_{target}_openapi_cmd_{version}"


def doorbell_filter(version: str, project_id: str) -> str:
    """Return the subject filter of all doorbells of a project."""
    return f"cg.{version}.{project_id}.*.cmd.agent.*.wakeup"


def doorbell_subject(version: str, project_id: str, channel_id: str, worker_target: str) -> str:
    """Return the doorbell subject of an agent's worker. Raises ValueError for an invalid or overlong token.

    The server closes the connection on a control line over 4 KiB.
    """
    for token in (project_id, channel_id, worker_target):
        if not is_token(token):
            raise ValueError(f"{token[:_MAX_SHOWN_CHARS]!r} cannot be a token of a doorbell's subject")
    return f"cg.{version}.{project_id}.{channel_id}.cmd.agent.{worker_target}.wakeup"
