"""The rows of definitions that are stored: of a file, and of a built-in tool that is registered unchanged."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from openapi_tool.environment import DEFAULT_AUTH_ENV
from openapi_tool.protocol.jsontext import JsonObject, JsonValue, object_at
from openapi_tool.tools.catalogue import DEFAULT_MAX_TOKENS, BuiltInTool
from openapi_tool.tools.shown_tools import shown_schema


def complete(document: Mapping[str, JsonValue], tool: BuiltInTool) -> JsonObject:
    """Return the row to store; the built-in tool fills what the file omits."""
    return {
        "tool_name": document.get("tool_name", document.get("name")),
        "description": document.get("description") or tool.description,
        "target_subject": document.get("target_subject"),
        "after_execution": document.get("after_execution"),
        "parameters": document.get("parameters") or shown_schema(tool.schema(), object_at(document, "options")),
        "options": document.get("options") or {},
    }


def registration(tool: BuiltInTool) -> JsonObject:
    """Return the definition that registers a built-in tool unchanged."""
    jina: JsonObject = {
        "tool": tool.name,
        "mode": tool.operation.name,
        "base_url": f"https://{tool.operation.host}",
        "auth_env": DEFAULT_AUTH_ENV,
    }
    if "max_tokens" in tool.arguments.model_fields:
        jina["params"] = {"maxTokens": DEFAULT_MAX_TOKENS}
    return {
        "tool_name": tool.name.replace(".", "_"),
        "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool." + tool.name,
        "after_execution": "suspend",
        "description": tool.description,
        "parameters": tool.schema(),
        "options": {"jina": jina, "suspend_timeout_seconds": tool.suspend_timeout_s},
    }


def as_yaml(value: Mapping[str, object]) -> str:
    """Return YAML in key order; escape non-ASCII if a text has control or bidirectional characters."""
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=112)
    if text.replace("\n", "").isprintable():
        return text
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=False, width=112)
