"""Tools as they are shown to a model: name, description and the schema of the arguments that the model may give.

`exports.py` writes them in the forms of model providers and clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from openapi_tool.protocol.jsontext import JsonObject, JsonValue, object_at
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.placeholders import is_template
from openapi_tool.tools.schema import visible_schema
from openapi_tool.tools.tool_names import camel_case, in_words, mangled


@dataclass(frozen=True, slots=True)
class ShownTool:
    """Tool as shown to a model; `api_name` is its name in manifests, `built_in` the tool that runs it."""

    name: str
    api_name: str
    title: str
    description: str
    parameters: JsonObject
    built_in: str = ""


class DuplicateName(ValueError):
    """Two exported tools would have the same name."""


def defined(row: Mapping[str, JsonValue], definition: ToolDefinition) -> ShownTool:
    """Return a project's tool as shown to a model."""
    name = str(row["tool_name"])
    return ShownTool(
        name=name,
        api_name=camel_case(name),
        title=_title(row, definition.built_in),
        description=str(row["description"] or ""),
        parameters=shown_schema(object_at(row, "parameters"), object_at(row, "options")),
        built_in=definition.built_in.name,
    )


def all_built_in() -> list[ShownTool]:
    """Return every built-in tool as shown without a definition."""
    return [
        ShownTool(tool.name, tool.api_name, tool.title, tool.description, tool.schema(), tool.name)
        for tool in CATALOGUE.values()
    ]


def without_duplicates(tools: Iterable[ShownTool]) -> list[ShownTool]:
    """Return the tools, each once. Raises DuplicateName if two have the same exported name."""
    unique: dict[str, ShownTool] = {}
    by_exported_name: dict[str, ShownTool] = {}
    for tool in tools:
        unique[tool.name] = tool
        for exported_name in {tool.name, tool.api_name, mangled(tool.name)}:
            if by_exported_name.setdefault(exported_name, tool) is not tool:
                raise DuplicateName(f"two tools would be named {exported_name!r}")
    return list(unique.values())


def shown_schema(schema: Mapping[str, JsonValue], options: Mapping[str, JsonValue]) -> JsonObject:
    """Return the schema without the arguments of `fixed` and `envs`, and with the definition's defaults.

    An argument with a default is not required. A default with placeholders differs in each call, so it is not shown.
    """
    defaults, fixed = object_at(options, "args", "defaults"), object_at(options, "args", "fixed")
    shown = dict(visible_schema(schema, frozenset(fixed) | frozenset(object_at(options, "envs"))))
    properties = shown.get("properties")
    if isinstance(properties, dict):
        shown["properties"] = {name: _with_default(name, rule, defaults) for name, rule in properties.items()}
    required = shown.pop("required", None)
    still_required = [name for name in required if name not in defaults] if isinstance(required, list) else []
    if still_required:
        shown["required"] = still_required
    return shown


def _with_default(name: str, rule: JsonValue, defaults: Mapping[str, JsonValue]) -> JsonValue:
    if not isinstance(rule, dict) or name not in defaults or is_template(defaults[name]):
        return rule
    return rule | {"default": defaults[name]}


def _title(row: Mapping[str, JsonValue], tool: BuiltInTool) -> str:
    """Return the title of the definition's schema, else of the built-in tool if it has its name, else the name."""
    title = object_at(row, "parameters").get("title")
    if isinstance(title, str) and title.strip():
        return title
    name = str(row["tool_name"])
    return tool.title if name == tool.name.replace(".", "_") else in_words(name)
