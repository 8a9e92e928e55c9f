"""What an executor would do with a stored definition: run it, refuse it, or leave it to another executor."""

from __future__ import annotations

import os
from typing import Any

from openapi_tool.bootstrap import operator_envs, tool_secrets
from openapi_tool.jina.stored_check import StoredCheck
from openapi_tool.settings import Settings
from openapi_tool.tools.bounds import MAX_ROW_BYTES
from openapi_tool.tools.definition import stored_record
from openapi_tool.tools.registry import TOO_LARGE


def stored_check(settings: Settings) -> StoredCheck:
    """Return the check of stored definitions for an executor with these settings."""
    return StoredCheck(
        operator_envs(settings),
        tool_secrets(settings, os.environ),
        settings.url_policy,
        settings.tools.max_batch_items,
        settings.protocol.target,
    )


def judge(row: dict[str, Any], check: StoredCheck, version: str | None) -> dict[str, Any]:
    """Return the `kind` of a stored definition, and the `problems`: what the executor would refuse or ignore in it.

    The kind is the name of the built-in tool that the definition is based on, `unusable`, or for a tool with another
    target `not ours`. `version` is the kernel's protocol version, None if unknown.
    """
    target = row.get("target_subject")
    if isinstance(target, str) and f".cmd.tool.{check.target}." not in target:
        return {"kind": "not ours", "problems": []}
    for name in ("parameters", "options"):
        if str(row.get(name)).endswith(TOO_LARGE):  # `ToolRows` replaces a larger column by a text with this end
            why = f"{name}: is too large; a definition may have at most {MAX_ROW_BYTES:,} bytes"
            return {"kind": "unusable", "problems": [why]}
    definition, problems = check.check(stored_record(row))
    if version and isinstance(target, str) and not target.startswith(f"cg.{version}."):
        why = f"target_subject: must begin with cg.{version}., or no executor of this kernel gets a call"
        return {"kind": "unusable", "problems": [why, *problems]}
    return {"kind": definition.built_in.name if definition else "unusable", "problems": problems}
