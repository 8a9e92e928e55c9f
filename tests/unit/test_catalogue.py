"""Built-in tools: their descriptions for the model agree with the checks of the executor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openapi_tool.jina.endpoints import ENDPOINTS
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.tools.arguments import OperatorEnvs, prepare_arguments
from openapi_tool.tools.catalogue import CATALOGUE, OPERATIONS, BuiltInTool, DuplicateTool, catalogue
from openapi_tool.tools.names import fold
from openapi_tool.tools.scopes import SessionScope
from openapi_tool.tools.secrets import Secrets
from tests.requirements import requirement
from tests.support import definition, owner, tool_call

TOOLS = [pytest.param(tool, id=name) for name, tool in CATALOGUE.items()]
EXECUTOR_ARGUMENTS = {
    "with_content",
    "timeout",
    "cursor",
    "find",
    "question",
    "queries",
    "urls",
    "max_result_tokens",
}  # handled by this service; no upstream parameter
NOT_OFFERED = {
    "search": {
        *("type", "respondWith"),  # type: only if a definition declares it; respondWith: set by with_content
        *("ext", "loc"),  # rarely used search operators
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


@requirement("catalogue")
@pytest.mark.parametrize("tool", TOOLS)
def test_schema_uses_only_keywords_of_the_subset_and_describes_every_argument(tool: BuiltInTool) -> None:
    schema = tool.schema()
    jsonschema_rs.meta.validate(schema)
    for node in nodes(schema):
        assert node.keys() <= KEYWORDS
        assert isinstance(node["type"], str)
        assert node["type"] != "array" or "items" in node
    assert all(len(rule["description"]) > 20 for rule in schema["properties"].values())
    assert schema["additionalProperties"] is False


@requirement("catalogue")
def test_schema_returns_a_copy() -> None:
    tool = CATALOGUE["jina.search"]
    changed, before = tool.schema(), tool.schema()
    changed["properties"].clear()
    assert tool.schema() == before


@requirement("catalogue")
@pytest.mark.parametrize("tool", TOOLS)
def test_offered_arguments_are_those_that_a_model_may_set(tool: BuiltInTool) -> None:
    endpoint, offered = ENDPOINTS[tool.operation.name], set()
    for name in tool.schema()["properties"].keys() - EXECUTOR_ARGUMENTS:
        parameter = endpoint.find(name)
        assert parameter is not None, name
        assert parameter.model, name
        offered.add(parameter.name)
    single_item_parameters = set() if tool.items is None else {"q", "url", "pdf_page"}
    may_set = {entry.name for entry in endpoint.parameters if entry.model}
    assert may_set - NOT_OFFERED[tool.operation.name] - single_item_parameters == offered


@requirement("catalogue")
def test_every_operation_has_one_endpoint_and_every_tool_an_operation() -> None:
    assert [endpoint.operation for endpoint in ENDPOINTS.values()] == list(OPERATIONS)
    assert {tool.operation for tool in CATALOGUE.values()} == set(OPERATIONS)
    for endpoint in ENDPOINTS.values():
        main = endpoint.find(endpoint.operation.main_parameter)
        assert main is endpoint.find(endpoint.operation.argument)
        assert main is not None
        assert {fold(name) for name in (main.name, *main.aliases)} == endpoint.operation.main_parameter_names


@requirement("catalogue")
def test_a_name_is_declared_once() -> None:
    tool = CATALOGUE["jina.read"]
    with pytest.raises(DuplicateTool, match=r"jina\.read"):
        catalogue(tool, tool)


@requirement("catalogue")
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
    assert (found.built_in.name, found.operation) == (name, CATALOGUE[name].operation)


@requirement("catalogue")
@pytest.mark.parametrize(
    ("jina", "complaint"),
    [
        ({"tool": "jina.crawl", "mode": "reader"}, "tool: must be 'jina.read' or 'jina.read_many' for a reader tool"),
        ({"tool": "jina.read", "mode": "search"}, "must be 'jina.search' or 'jina.search_many'"),
        ({"tool": "jina.read", "base_url": "https://s.jina.ai"}, "must be 'jina.search'"),
        ({"tool": ["jina.read"], "mode": "reader"}, "must be 'jina.read'"),
        ({"tool": "jina.crawl"}, "neither mode nor base_url nor a built-in tool"),
    ],
)
def test_definition_of_no_built_in_tool_is_refused(jina: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ToolMisconfigured, match=complaint):
        definition(jina)


KEY = b"0123456789abcdef"
SCOPE = SessionScope(KEY)
SECRETS = Secrets({"JINA_API_KEY": "the-key"}, {"JINA_API_KEY"})

ids = st.text(max_size=30) | st.sampled_from(["a", "a ", "A", "a\u0301", "á", "a,b", 'a","b', "[]", "\u0430", "a\x00"])
aliases = (
    ids
    | st.none()
    | st.integers()
    | st.sampled_from([2**64, 10**400, str(10**400)])
    | st.booleans()
    | st.text(min_size=1000, max_size=1100)
)
owners = st.tuples(ids, ids, aliases)


@given(owners, owners)
@requirement("session.scoped")
def test_identities_agree_exactly_where_owner_and_alias_do(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    same = [(type(part), part) for part in one] == [(type(part), part) for part in other]
    assert (SCOPE.identity(*one) == SCOPE.identity(*other)) == same


@given(st.text(max_size=10), st.text(max_size=10), st.text(max_size=10))
@requirement("session.scoped")
def test_separator_in_an_id_does_not_make_two_owners_equal(project: str, agent: str, alias: str) -> None:
    for separator in ("", "/", ":", '","', "\x00"):
        shifted = (project + separator + agent, alias, "")
        assert SCOPE.identity(project, agent, alias) != SCOPE.identity(*shifted) or (project, agent, alias) == shifted


@given(owners)
@requirement("session.scoped")
def test_replicas_with_the_same_key_agree_and_others_do_not(owner: tuple[Any, ...]) -> None:
    assert SessionScope(KEY).identity(*owner) == SCOPE.identity(*owner)
    assert SessionScope(KEY[::-1]).identity(*owner) != SCOPE.identity(*owner)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        SessionScope(b"short")


def session_of(arguments: dict[str, Any], **options: Any) -> str:
    return prepare_arguments(
        definition(**options), tool_call(arguments), owner(), OperatorEnvs(), SECRETS, SCOPE
    ).session


@requirement("session.scoped")
def test_the_alias_comes_from_fixed_then_arguments_then_defaults() -> None:
    expected = {alias: SCOPE.identity("proj", "agent", alias) for alias in ("model", "default", "fixed", None)}
    assert session_of({}) == expected[None]
    assert session_of({"sessionId": "model"}) == expected["model"]
    assert session_of({}, args={"defaults": {"session_id": "default"}}) == expected["default"]
    assert session_of({"session_id": "model"}, args={"defaults": {"session_id": "default"}}) == expected["model"]
    assert session_of({"sessionId": "model"}, args={"fixed": {"session_id": "fixed"}}) == expected["fixed"]
    assert session_of({"session_id": None}, args={"defaults": {"session_id": "default"}}) == expected[None]
