"""The tools that `mcp` and `gateway` serve: the built-in ones, or those of a folder, which is watched for changes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from openapi_tool.bootstrap import lint_limits
from openapi_tool.cli.output import fail
from openapi_tool.gateway.tools import ToolFolder, Tools, ToolsInvalid, built_in_tools
from openapi_tool.settings import Settings


class ServedTools(NamedTuple):
    """The tools as they are now, and the folder that they are from, None for the built-in ones."""

    tools: Tools
    folder: ToolFolder | None


def served_tools(path: Path | None, settings: Settings) -> ServedTools:
    """Return the tools of a folder, or the built-in ones; exit with 2 if a definition has a mistake."""
    if path is None:
        return ServedTools(built_in_tools(), None)
    folder = ToolFolder(path, lint_limits(settings), settings.url_policy)
    try:
        return ServedTools(folder.load(), folder)
    except ToolsInvalid as error:
        fail(str(error))
