"""Generated parts of docs/tools.md: built-in tools, upstream parameters, warnings, error codes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from openapi_tool.jina.endpoints import ENDPOINTS
from openapi_tool.jina.parameters import Parameter
from openapi_tool.jina.remarks import WARNINGS
from openapi_tool.jina.url_policy import INTERNAL_SUFFIXES
from openapi_tool.protocol.errors import ToolError
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool

PAGE = Path(__file__).parent.parent / "docs" / "tools.md"
_PART = re.compile(r"(<!-- make docs: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_LIMITS = (("minLength", "maxLength", "characters"), ("minItems", "maxItems", "items"), ("minimum", "maximum", ""))


def tools_page() -> str:
    """Return docs/tools.md with all generated parts updated."""
    text = PAGE.read_text(encoding="utf-8")
    return _PART.sub(lambda part: f"{part[1]}\n{_PARTS[part[2]]().strip()}\n\n{part[3]}", text)


def _tools() -> str:
    return "\n\n".join(map(_tool, CATALOGUE.values()))


def _tool(tool: BuiltInTool) -> str:
    schema = tool.schema()
    rows = [_argument(tool, name, rule, schema) for name, rule in schema["properties"].items()]
    tags = ", ".join(f"`{tag}`" for tag in sorted(tool.tags))
    return "\n".join(
        [
            f"### `{tool.name}`",
            "",
            tool.description,
            "",
            f"Tags: {tags}. Suggested `suspend_timeout_seconds`: {tool.suspend_timeout_s}.",
            "",
            "| argument | value | upstream | text for the model |",
            "| --- | --- | --- | --- |",
            *rows,
        ]
    )


def _argument(tool: BuiltInTool, name: str, rule: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    parameter = ENDPOINTS[tool.operation.name].find(name)
    upstream = f"`{parameter.name}`" if parameter and name != "timeout" else "-"
    if parameter and parameter.separator:
        upstream = f"in `{tool.operation.main_parameter}`"
    required = ", required" if name in schema.get("required", ()) else ""
    return f"| `{name}` | {_value(rule)}{required} | {upstream} | {rule['description']} |"


def _value(rule: Mapping[str, Any]) -> str:
    if "enum" in rule:
        return ", ".join(f"`{choice}`" for choice in rule["enum"])
    kind = f"array of {rule['items']['type']}" if rule["type"] == "array" else str(rule["type"])
    if "exclusiveMinimum" in rule:
        return f"{kind}, above {rule['exclusiveMinimum']:g}, at most {rule['maximum']:,.0f}"
    for low, high, unit in _LIMITS:
        if high in rule:
            least = rule[low]
            span = f"{least:,} to {rule[high]:,}" if least != rule[high] else str(least)
            return f"{kind}, {span} {unit}".rstrip()
    return f"{kind}, at least {rule['minimum']:,}" if "minimum" in rule else kind


def _operator() -> str:
    rows = [f"| `{entry.name}` | {_header(entry)} | {_hosts(entry)} |" for entry in _operator_parameters()]
    return "\n".join(["| parameter | header | operation |", "| --- | --- | --- |", *rows])


def _operator_parameters() -> Iterator[Parameter]:
    seen = set()
    for entry in (entry for endpoint in ENDPOINTS.values() for entry in endpoint.parameters):
        if not entry.model and entry.name not in seen:
            seen.add(entry.name)
            yield entry


def _header(entry: Parameter) -> str:
    return f"`{entry.header}`" if entry.header else "-"


def _hosts(entry: Parameter) -> str:
    return ", ".join(
        name for name, endpoint in ENDPOINTS.items() if entry.name in {e.name for e in endpoint.parameters}
    )


def _errors() -> str:
    kinds = sorted(_kinds(ToolError), key=lambda kind: kind.code)
    rows = [f"| `{kind.code}` | {(kind.__doc__ or '').split(chr(10))[0]} |" for kind in kinds]
    return "\n".join(["| code | means |", "| --- | --- |", *dict.fromkeys(rows)])


def _kinds(kind: type[ToolError]) -> Iterator[type[ToolError]]:
    for child in kind.__subclasses__():
        if "code" in vars(child):
            yield child
        yield from _kinds(child)


def _suffixes() -> str:
    return "\n".join(textwrap.wrap(", ".join(f"`{suffix}`" for suffix in INTERNAL_SUFFIXES), 120))


def _warnings() -> str:
    rows = [f"| `{kind}` | {text} |" for kind, text in WARNINGS.items()]
    return "\n".join(["| type | text for the model |", "| --- | --- |", *rows])


_PARTS: Mapping[str, Callable[[], str]] = {
    "tools": _tools,
    "operator": _operator,
    "errors": _errors,
    "suffixes": _suffixes,
    "warnings": _warnings,
}
