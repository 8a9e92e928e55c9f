"""Subjects: `cg.{ver}.{project}.{channel}.{category}.{component}.{target}.{suffix}` (section 1)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from openapi_tool.protocol.errors import Unanswerable

_TOKENS_BEFORE_SUFFIX = 7
_TOKEN = re.compile(r"[^\s.*>\x00-\x20\x7f]+")


@dataclass(frozen=True, slots=True)
class CommandSubject:
    """A tool command's subject, taken apart; `suffix` may hold dots."""

    version: str
    project_id: str
    channel_id: str
    target: str
    suffix: str


def parse_command_subject(subject: str) -> CommandSubject:
    """Take a `cmd.tool` subject apart. Raises Unanswerable for anything else."""
    tokens = subject.split(".", _TOKENS_BEFORE_SUFFIX)
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
    """Where the worker of the calling agent listens. Raises ValueError for an impossible token."""
    for token in (project_id, channel_id, worker_target):
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"{token!r} cannot be a token of a subject")
    return f"cg.{version}.{project_id}.{channel_id}.cmd.agent.{worker_target}.wakeup"
