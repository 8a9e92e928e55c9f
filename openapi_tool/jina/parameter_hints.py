"""Hints for the author of a definition that names something which its tool does not take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from openapi_tool.jina.endpoints import ENDPOINTS, Endpoint
from openapi_tool.jina.parameters import REFUSED
from openapi_tool.tools.argument_hints import hint
from openapi_tool.tools.argument_names import fold, probably_meant
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool
from openapi_tool.tools.lint import PROPERTIES_PATH
from openapi_tool.tools.problems import Path, Problem
from openapi_tool.tools.wording import any_of, did_you_mean


def with_hint(problem: Problem, tool: BuiltInTool, endpoint: Endpoint) -> Problem:
    """Return the problem of a name with what to do: another place for it, another tool, or the name that is meant.

    The name is the end of the problem's path. `tool` and `endpoint` are those of the definition.
    """
    return replace(problem, message=problem.message + _hint(problem, tool, endpoint))


def _hint(problem: Problem, tool: BuiltInTool, endpoint: Endpoint) -> str:
    """Return the end of the problem's message; empty if that needs no hint."""
    name = str(problem.path[-1])
    parameter = endpoint.find(name)
    if parameter and not parameter.model and problem.path[:2] == PROPERTIES_PATH:
        return "; an operator may set it in options.jina.params"
    reason = REFUSED.get(fold(name))
    if reason:
        return "" if reason in problem.message else f": {reason}"
    if parameter:
        return ""
    if "headers" in problem.path:
        without_x = endpoint.find(name[2:]) if name.lower().startswith("x-") else None
        if without_x:
            return f"; set {without_x.name!r} in options.jina.params"
    other_tools = _tools_that_take(name)
    if other_tools:
        return f"; it is one of {other_tools}"
    return _hint_of_similar(problem, _known_names(problem.path, tool, endpoint))


def _hint_of_similar(problem: Problem, known: Sequence[str]) -> str:
    """Return what to give in place of the name: for an argument what a call would be told."""
    name = str(problem.path[-1])
    if "headers" in problem.path:
        return did_you_mean(name, known) or "; take it out"
    instead = hint(fold(name), set(map(fold, known)))  # of a model's argument the message has it already
    if instead:
        return "; take it out" if instead in problem.message else f"; {instead}; take it out"
    meant = probably_meant(name, known)
    return f"; did you mean {meant!r}?" if meant else did_you_mean(name, known) or "; take it out"


def _tools_that_take(name: str) -> str:
    """Return the other tools that have this argument, or the kind of tool that has this parameter; else nothing."""
    tools = [tool.name for tool in CATALOGUE.values() if name in tool.arguments.model_fields]
    if tools:
        return any_of(tools)
    for operation, endpoint in ENDPOINTS.items():
        if endpoint.find(name):
            return f"a {operation} tool"
    return ""


def _known_names(path: Path, tool: BuiltInTool, endpoint: Endpoint) -> list[str]:
    """Return the names that may stand at this place of a definition."""
    if "headers" in path:
        return [parameter.header for parameter in endpoint.parameters if parameter.header]
    return [*tool.arguments.model_fields, *(parameter.name for parameter in endpoint.parameters)]
