"""The built-in tools: what a model is told agrees with what is enforced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from openapi_tool.jina.parameters import READER, SEARCH, find_parameter
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool, DuplicateTool, catalogue
from tests.promises import requirement
from tests.support import definition

TOOLS = [pytest.param(tool, id=name) for name, tool in CATALOGUE.items()]
OWN = {"with_content", "timeout", "cursor", "queries", "urls"}  # arguments that are not one upstream parameter
NOT_OFFERED = {
    "search": {
        *("type", "respondWith"),  # where a definition declares it; with_content says it
        *("ext", "filetype", "intitle", "loc"),  # operators of the query text
        *("targetSelector", "waitForSelector", "removeSelector", "retainImages", "retainLinks"),
        *("withLinksSummary", "withImagesSummary", "markdown.linkStyle", "noCache"),
    },
    "reader": set(),
}
KEYWORDS = {
    *("type", "enum", "description", "properties", "required", "additionalProperties", "items"),
    *("minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "pattern"),
}


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for rule in schema.get("properties", {}).values():
        yield from nodes(rule)
    if "items" in schema:
        yield from nodes(schema["items"])


@requirement("catalogue.schema")
@pytest.mark.parametrize("tool", TOOLS)
def test_a_schema_keeps_to_the_subset_and_describes_every_argument(tool: BuiltInTool) -> None:
    schema = tool.schema()
    jsonschema_rs.meta.validate(schema)
    for node in nodes(schema):
        assert node.keys() <= KEYWORDS
        assert isinstance(node["type"], str)
        assert node["type"] != "array" or "items" in node
    assert all(len(rule["description"]) > 20 for rule in schema["properties"].values())
    assert schema["additionalProperties"] is False


@requirement("catalogue.schema")
@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_offered_is_what_a_model_may_set(tool: BuiltInTool) -> None:
    offered = set()
    for name in tool.schema()["properties"].keys() - OWN:
        parameter = find_parameter(tool.mode, name)
        assert parameter is not None, name
        assert parameter.model, name
        offered.add(parameter.name)
    table = SEARCH if tool.mode == "search" else READER
    subject = set() if tool.items is None else {"q", "url"}
    assert {entry.name for entry in table if entry.model} - NOT_OFFERED[tool.mode] - subject == offered


@requirement("catalogue.names")
def test_a_name_is_declared_once() -> None:
    tool = CATALOGUE["jina.read"]
    with pytest.raises(DuplicateTool, match=r"jina\.read"):
        catalogue(tool, tool)


@requirement("catalogue.names")
@pytest.mark.parametrize(
    ("jina", "name"),
    [
        ({"mode": "search"}, "jina.search"),
        ({"mode": "crawl"}, "jina.read"),
        ({"base_url": "https://r.jina.ai"}, "jina.read"),
        ({"tool": "jina.read_many"}, "jina.read_many"),
        ({"tool": "jina.search_many", "mode": "search"}, "jina.search_many"),
    ],
)
def test_a_definition_says_which_tool_it_is(jina: dict[str, Any], name: str) -> None:
    found = definition(jina)
    assert (found.tool.name, found.mode) == (name, CATALOGUE[name].mode)


@requirement("catalogue.names")
@pytest.mark.parametrize(
    ("jina", "complaint"),
    [
        ({"tool": "jina.crawl", "mode": "reader"}, "tool for a reader tool must be 'jina.read' or 'jina.read_many'"),
        ({"tool": "jina.read", "mode": "search"}, "must be 'jina.search' or 'jina.search_many'"),
        ({"tool": "jina.read", "base_url": "https://s.jina.ai"}, "must be 'jina.search'"),
        ({"tool": ["jina.read"], "mode": "reader"}, "must be 'jina.read'"),
        ({"tool": "jina.crawl"}, "neither mode nor base_url nor a built-in tool"),
    ],
)
def test_a_definition_that_is_no_tool(jina: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ToolMisconfigured, match=complaint):
        definition(jina)
