"""Subjects: `cg.{ver}.{project}.{channel}.{category}.{component}.{target}.{suffix}` (section 1)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from openapi_tool.protocol.errors import Unanswerable

_TOKENS_BEFORE_SUFFIX = 7
_MAX_TOKEN_BYTES = 1_024
_SHOWN_CHARS = 100
_TOKEN = re.compile(r"[^\s.*>\x00-\x20\x7f]+")
_NO_TEXT = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]")
"""Control characters, which no token needs and jsonb cannot all hold; and what stands for bytes that are not UTF-8."""


@dataclass(frozen=True, slots=True)
class CommandSubject:
    """A tool command's subject, taken apart; `suffix` may hold dots."""

    version: str
    project_id: str
    channel_id: str
    target: str
    suffix: str


def parse_command_subject(subject: str) -> CommandSubject:
    """Take a `cmd.tool` subject apart. Raises Unanswerable for anything else, and for what is not plain text."""
    tokens = subject.split(".", _TOKENS_BEFORE_SUFFIX)
    if _NO_TEXT.search(subject):
        raise Unanswerable("bad_subject", f"{subject!r} holds a control character or bytes that are not UTF-8")
    if len(tokens) <= _TOKENS_BEFORE_SUFFIX or tokens[0] != "cg" or tokens[4:6] != ["cmd", "tool"]:
        raise Unanswerable("bad_subject", f"{subject!r} is not a tool command's subject")
    return CommandSubject(tokens[1], tokens[2], tokens[3], tokens[6], tokens[7])


def command_filter(version: str, project: str, channel: str, target: str) -> str:
    """The subjects that an executor of `target` listens on; `*` for any project or channel."""
    return f"cg.{version}.{project}.{channel}.cmd.tool.{target}.>"


def command_stream(version: str) -> tuple[str, str]:
    """Name and subjects of the kernel's command stream."""
    return f"cg_cmd_{version}", f"cg.{version}.*.*.cmd.*.*.>"


def default_durable(version: str, target: str) -> str:
    """The durable that the kernel's own executor uses; sharing it makes a hand-over lossless."""
    return f"tool_{target}_openapi_cmd_{version}"


def doorbell_subject(version: str, project_id: str, channel_id: str, worker_target: str) -> str:
    """Where the worker of the calling agent listens. Raises ValueError for an impossible token.

    A subject that is too long for a control line of the server (4 KiB) would cost us the connection.
    """
    for token in (project_id, channel_id, worker_target):
        if not _TOKEN.fullmatch(token) or len(token.encode()) > _MAX_TOKEN_BYTES:
            raise ValueError(f"{token[:_SHOWN_CHARS]!r} cannot be a token of a doorbell's subject")
    return f"cg.{version}.{project_id}.{channel_id}.cmd.agent.{worker_target}.wakeup"
