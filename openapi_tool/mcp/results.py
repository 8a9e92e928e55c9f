"""Tools and results in the form of MCP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcp_types import CallToolResult, TextContent, Tool, ToolAnnotations

from openapi_tool.gateway.calls import Answer
from openapi_tool.gateway.tools import GatewayTool
from openapi_tool.protocol.cards import as_model_reads

CALL_ID = "openapi-tool/tool_call_id"
"""Name in the `_meta` of a result."""

_ANNOTATIONS = ToolAnnotations(read_only_hint=True, open_world_hint=True)
_STRUCTURE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "description": "The text that a model reads, in its frames."},
        "state": {"type": "object", "description": "Addresses, titles and counts of the result."},
        "usage": {
            "type": "object",
            "properties": {"tokens": {"type": "integer"}, "requests": {"type": "integer"}},
            "description": "Tokens charged and requests sent.",
        },
        "truncated": {"type": "boolean"},
        "next_cursor": {"type": ["string", "null"], "description": "Argument `cursor` of the call for the next part."},
        "cached": {"type": "boolean"},
        "error": {"type": "object", "description": "Code and message of a failed call."},
    },
    "required": ["content"],
}
_IN_STRUCTURE = ("state", "usage", "truncated", "next_cursor", "cached", "budget")


def as_mcp_tool(tool: GatewayTool, *, structured: bool) -> Tool:
    """Return a tool for `tools/list`."""
    return Tool(
        name=tool.name,
        title=tool.shown.title,
        description=tool.shown.description,
        input_schema=dict(tool.shown.parameters),
        output_schema=dict(_STRUCTURE) if structured else None,
        annotations=_ANNOTATIONS,
    )


def as_mcp_result(answer: Answer, *, structured: bool) -> CallToolResult:
    """Return a result as one text, which is what a model reads; a failed call says its code and what to do.

    With `structured` its structure holds that text, too: some clients show a model only the structure, if there is one.
    """
    fields = answer.fields
    text = _text(answer)
    structure = None
    if structured:
        found = fields.result if isinstance(fields.result, dict) and not fields.error else {}
        found = {**(fields.tool_output or {}), **found}
        structure = {"content": text} | {name: found[name] for name in _IN_STRUCTURE if name in found}
        if fields.error is not None:
            structure["error"] = dict(fields.error)
    return CallToolResult(
        content=[TextContent(text=text)],
        structured_content=structure,
        is_error=fields.error is not None,
        _meta={CALL_ID: answer.call_id} if answer.call_id is not None else None,
    )


def _text(answer: Answer) -> str:
    fields = answer.fields
    if fields.error is not None:
        return f"{fields.error['code']}: {fields.error['message']}"
    result = fields.result
    if isinstance(result, dict) and isinstance(result.get("content"), str):  # of `result_format: object`
        return str(result["content"])
    return as_model_reads({"status": fields.status, "result": result, "error": None})
