"""What an executor would do with a stored definition: run it, refuse it, or leave it to another executor."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from openapi_tool.bootstrap import operator_envs, tool_secrets
from openapi_tool.jina.stored_check import StoredCheck
from openapi_tool.settings import Settings
from openapi_tool.tools.bounds import MAX_ROW_BYTES
from openapi_tool.tools.definition import stored_record
from openapi_tool.tools.registry import TOO_LARGE
from openapi_tool.tools.secret_variables import Secrets

if TYPE_CHECKING:
    from openapi_tool.local.dev_state import StackAddress

UNUSABLE = "unusable"
NOT_OURS = "not ours"


def stored_check(settings: Settings, dev: StackAddress | None = None) -> StoredCheck:
    """Return the check of stored definitions for an executor with these settings, or one of `dev`, with its keys."""
    return StoredCheck(
        operator_envs(settings),
        tool_secrets(settings, os.environ) if dev is None else secrets_of_dev(settings, dev),
        settings.url_policy,
        settings.tools.max_batch_items,
        settings.protocol.target,
    )


def secrets_of_dev(settings: Settings, dev: StackAddress) -> Secrets:
    """Return the variables that the executors of a `dev` may read, with a value for those that hold a key there."""
    allowed = {*settings.tool_variables, *dev.keys}
    return Secrets(dict.fromkeys(dev.keys, "-"), allowed, settings.limits.pool_of)


class Verdict(NamedTuple):
    """What an executor would do with a definition, and the problems: what it would refuse or ignore.

    The kind is the name of the built-in tool that the definition is based on, `UNUSABLE`, or `NOT_OURS` for a tool with
    another target, whose calls another executor runs.
    """

    kind: str
    problems: list[str]


def judge(row: dict[str, Any], check: StoredCheck, version: str | None) -> Verdict:
    """Return the verdict on a stored definition; `version` is the kernel's protocol version, None if unknown."""
    target = row.get("target_subject")
    if isinstance(target, str) and f".cmd.tool.{check.target}." not in target:
        return Verdict(NOT_OURS, [])
    for name in ("parameters", "options"):
        if str(row.get(name)).endswith(TOO_LARGE):  # `ToolRows` replaces a larger column by a text with this end
            why = f"{name}: is too large; a definition may have at most {MAX_ROW_BYTES:,} bytes"
            return Verdict(UNUSABLE, [why])
    definition, problems = check.check(stored_record(row))
    if version and isinstance(target, str) and not target.startswith(f"cg.{version}."):
        why = f"target_subject: must begin with cg.{version}., or no executor of this kernel gets a call"
        return Verdict(UNUSABLE, [why, *problems])
    return Verdict(definition.built_in.name if definition else UNUSABLE, problems)
