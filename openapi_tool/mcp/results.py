"""Tools and results in the form of MCP."""

from __future__ import annotations

from mcp_types import CallToolResult, TextContent, Tool, ToolAnnotations

from openapi_tool.gateway.call import Answer
from openapi_tool.gateway.results import STRUCTURE, structure, text_of
from openapi_tool.gateway.tools import GatewayTool

CALL_ID = "openapi-tool/tool_call_id"
"""Name under which the `_meta` of a result has the id by which `inspect` finds the call."""

_ANNOTATIONS = ToolAnnotations(read_only_hint=True, open_world_hint=True)  # they change nothing, and read the web


def as_mcp_tool(tool: GatewayTool, *, structured: bool) -> Tool:
    """Return a tool for `tools/list`."""
    return Tool(
        name=tool.name,
        title=tool.shown.title,
        description=tool.shown.description,
        input_schema=dict(tool.shown.parameters),
        output_schema=dict(STRUCTURE) if structured else None,
        annotations=_ANNOTATIONS,
    )


def as_mcp_result(answer: Answer, *, structured: bool) -> CallToolResult:
    """Return a result as one text, which is what a model reads. That of a failed call has its code and what to do.

    With `structured` the result has a structure, too, which repeats the text: some clients show a model only the
    structure, if there is one.
    """
    return CallToolResult(
        content=[TextContent(text=text_of(answer))],
        structured_content=structure(answer) if structured else None,
        is_error=answer.fields.error is not None,
        _meta={CALL_ID: answer.call_id} if answer.call_id is not None else None,
    )
