"""Subjects of commands and doorbells, and the names of stream and durable (protocol section 1).

A command's subject is `cg.VERSION.PROJECT.CHANNEL.cmd.tool.TARGET.SUFFIX`, for example
`cg.v1r4.proj_example.public.cmd.tool.jina.search`. The *target* names the executors that run it. A *durable* is what
NATS calls the place in a stream up to which a group of executors has received commands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from openapi_tool.protocol.abridging import abridged
from openapi_tool.protocol.errors import Unanswerable
from openapi_tool.protocol.ids import MAX_ID_BYTES, is_too_long

_TOKENS_BEFORE_SUFFIX = 7
_MAX_TOKEN_BYTES = 1_024  # of a token of a doorbell's subject
_MAX_SHOWN_CHARS = 100  # of an invalid token in a message
_VERSION = re.compile(r"v\d+r\d+")  # `v1r4`
# Control characters (jsonb refuses some), and surrogates, which represent bytes that are not UTF-8.
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]")
# Any text without these, white space and the characters that NATS gives a meaning.
_TOKEN = re.compile(r"[^\s.*>\x00-\x20\x7f\ud800-\udfff]+")


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
    if _FORBIDDEN.search(subject):
        raise Unanswerable("bad_subject", f"{_shown(subject)!r} holds a control character or bytes that are not UTF-8")
    match subject.split(".", _TOKENS_BEFORE_SUFFIX):
        case ["cg", version, project_id, channel_id, "cmd", "tool", target, suffix]:
            parsed = CommandSubject(version, project_id, channel_id, target, suffix)
        case _:
            raise Unanswerable("bad_subject", f"{_shown(subject)!r} is not a tool command's subject")
    if is_too_long(parsed.project_id) or is_too_long(parsed.channel_id):
        problem = f"project or channel of {_shown(subject)!r} is longer than {MAX_ID_BYTES} bytes"
        raise Unanswerable("bad_subject", problem)
    return parsed


def _shown(subject: str) -> str:
    return abridged(subject, 2 * _MAX_SHOWN_CHARS)


def subject_in_version(subject: str, version: str) -> str:
    """Return a command's subject or pattern in another version: `cg.v1r3.a.b` → `cg.v1r4.a.b`.

    Any other text is returned unchanged.
    """
    root, _, after_root = subject.partition(".")
    old_version, _, after_version = after_root.partition(".")
    if root == "cg" and _VERSION.fullmatch(old_version):
        return f"cg.{version}.{after_version}"
    return subject


def command_filter(version: str, project: str, channel: str, target: str) -> str:
    """Return the subject filter of an executor of `target`. Project and channel may be `*`, which matches any."""
    return f"cg.{version}.{project}.{channel}.cmd.tool.{target}.>"


def command_stream(version: str) -> tuple[str, str]:
    """Return name and subjects of the kernel's command stream."""
    return f"cg_cmd_{version}", f"cg.{version}.*.*.cmd.*.*.>"


def default_durable(version: str, target: str) -> str:
    """Return the durable of the kernel's own executor.

    An executor that uses the same durable takes over from that one without losing a command.
    """
    return f"tool_{target}_openapi_cmd_{version}"


def doorbell_filter(version: str, project_id: str) -> str:
    """Return the subject filter of all doorbells of a project."""
    return f"cg.{version}.{project_id}.*.cmd.agent.*.wakeup"


def doorbell_subject(version: str, project_id: str, channel_id: str, worker_target: str) -> str:
    """Return the doorbell subject of an agent's worker. Raises ValueError for an invalid or overlong token.

    The length is limited because the server closes a connection that sends a line of more than 4 KiB with the subject.
    """
    for token in (project_id, channel_id, worker_target):
        if not is_token(token):
            raise ValueError(f"{token[:_MAX_SHOWN_CHARS]!r} cannot be a token of a doorbell's subject")
    return f"cg.{version}.{project_id}.{channel_id}.cmd.agent.{worker_target}.wakeup"
