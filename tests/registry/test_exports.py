"""Exports equal the definitions in each consumer's form, and calls built from them are accepted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import mcp.types
import pytest
import yaml
from anthropic.types import ToolParam
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionFunctionToolParam
from openai.types.responses import FunctionToolParam
from pydantic import TypeAdapter
from typer.testing import CliRunner

from openapi_tool.cli import app
from openapi_tool.executor.continuation import requested_cursor
from openapi_tool.jina.batch import batch_items, item_arguments
from openapi_tool.jina.parameter_mapping import resolve_parameters
from openapi_tool.jina.request import build_request
from openapi_tool.jina.url_policy import UrlPolicy, checked_url
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.tools.arguments import OperatorEnvs, prepare_arguments
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.definition import ToolDefinition, parse_definition
from openapi_tool.tools.exports import (
    DuplicateName,
    all_built_in,
    complete,
    defined,
    openai_functions,
    registration,
    system_role,
    without_duplicates,
)
from openapi_tool.tools.names import camel_case, mangled, name_problem, unmangled
from openapi_tool.tools.scopes import SessionScope
from openapi_tool.tools.secrets import Secrets
from tests.requirements import requirement
from tests.support import owner, tool_call

TOOLS = Path(__file__).parent.parent.parent / "config" / "tools"
EXAMPLE = TOOLS / "example.yaml"
SECRETS = Secrets({"JINA_API_KEY": "key-one", "DOCS_READER_KEY": "key-two"}, {"JINA_API_KEY", "DOCS_READER_KEY"})
SCOPE = SessionScope(b"a key of sixteen bytes or more")
RULES = UrlPolicy()
OPTIONS: dict[str, Any] = {
    "jina": {"tool": "jina.search"},
    "envs": {"location": "HOME_TOWN"},
    "args": {"defaults": {"count": 5, "language": "{project_id}"}, "fixed": {"country": "de", "page": 1}},
}


def exported(form: str, *files: str) -> str:
    done = CliRunner().invoke(app, ["tools", "export", "--format", form, *files])
    assert done.exit_code == 0, done.output
    return done.stdout


def parsed(row: Mapping[str, Any]) -> ToolDefinition:
    return parse_definition(
        DefinitionRecord(row["tool_name"], row["after_execution"], row["parameters"], row["options"])
    )


def function(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = openai_functions([defined(row, parsed(row))])[0]["function"]
    return found


@requirement("definition.exports")
def test_openai_functions_equal_the_catalogue() -> None:
    functions = [entry["function"] for entry in json.loads(exported("openai"))]
    assert [entry["name"] for entry in functions] == [name.replace(".", "__") for name in CATALOGUE]
    for entry, tool in zip(functions, CATALOGUE.values(), strict=True):
        jsonschema_rs.meta.validate(entry["parameters"])
        assert entry == {"name": mangled(tool.name), "description": tool.description, "parameters": tool.schema()}
        assert unmangled(entry["name"]) == tool.name


@requirement("definition.exports")
@pytest.mark.parametrize("files", [(), (str(EXAMPLE),)], ids=["built in", "a project's own"])
@pytest.mark.parametrize(
    ("form", "kind", "at"),
    [
        ("openai", ChatCompletionFunctionToolParam, "function"),
        ("openai-responses", FunctionToolParam, None),
        ("anthropic", ToolParam, None),
    ],
)
def test_exports_match_the_types_of_the_vendors_libraries(form: str, kind: Any, at: str | None, files: Any) -> None:
    entries = json.loads(exported(form, *files))
    allowed = kind.__annotations__.keys() | {"async"}
    schema_name = "input_schema" if form == "anthropic" else "parameters"
    shown = {entry["function"]["name"]: entry["function"] for entry in json.loads(exported("openai", *files))}
    for entry in entries:
        TypeAdapter(kind).validate_python(entry, strict=True)
        assert entry.keys() <= allowed, "no key is unknown to the vendor"
        tool = entry[at] if at else entry
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tool["name"])
        assert tool[schema_name]["type"] == "object"
        assert (tool["description"], tool[schema_name]) == tuple(
            shown[tool["name"]][name] for name in ("description", "parameters")
        )
    assert len(entries) == len(shown)


@requirement("definition.exports")
def test_a_title_comes_from_the_definition_if_it_has_one() -> None:
    row = registration(CATALOGUE["jina.search"])
    renamed = {**row, "tool_name": "web_search.v2"}
    titled = {**renamed, "parameters": {**row["parameters"], "title": "Search our site"}}
    shown = [defined(one, parsed(one)).title for one in (row, renamed, titled)]
    assert shown == ["Web search", "Web search v2", "Search our site"]


@requirement("definition.exports")
def test_the_mcp_list_matches_the_models_of_the_mcp_library() -> None:
    text = exported("mcp")
    listed = mcp.types.ListToolsResult.model_validate_json(text)
    assert [tool.name for tool in listed.tools] == list(CATALOGUE)
    for tool in listed.tools:
        jsonschema_rs.meta.validate(tool.input_schema)
        assert tool.input_schema == CATALOGUE[tool.name].schema()
        assert tool.description == CATALOGUE[tool.name].description
    again = listed.model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert again == json.loads(text), "no key is unknown to the protocol"


@requirement("definition.exports")
def test_the_manifest_has_one_api_for_each_tool() -> None:
    manifest = json.loads(exported("lobehub"))
    assert manifest.keys() == {"identifier", "type", "meta", "systemRole", "humanIntervention", "api", "names"}
    assert manifest["meta"].keys() >= {"title", "description", "avatar"}
    assert manifest["names"] == {tool.api_name: name for name, tool in CATALOGUE.items()}
    assert [api["name"] for api in manifest["api"]] == list(manifest["names"])
    for api, tool in zip(manifest["api"], CATALOGUE.values(), strict=True):
        assert (api["parameters"], api["description"]) == (tool.schema(), tool.description)
    assert manifest["systemRole"].startswith(
        "You can search the web and read pages.\n\n"
        "- **search**: finds pages; gives titles, addresses, dates and snippets, not the pages themselves.\n"
        "- **searchMany**: several searches in one call. Prefer it to calling search again and again.\n"
    )


@requirement("definition.exports")
def test_the_system_role_mentions_only_exported_tools() -> None:
    manifest = json.loads(exported("lobehub", str(EXAMPLE)))
    (row,) = [yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))]
    assert manifest["names"] == {camel_case(row["tool_name"]): row["tool_name"]}
    role = manifest["systemRole"]
    assert role.startswith(f"You can read pages.\n\n- **{camel_case(row['tool_name'])}**: Reads a page of our docume")
    assert not re.search(r"[Ss]earch(Many)?\b|readPages?\b|cursor", role), "its schema takes no cursor"
    for built_in in CATALOGUE:
        alone = system_role([tool for tool in all_built_in() if tool.name == built_in])
        others = {tool.api_name for name, tool in CATALOGUE.items() if name != built_in}
        assert not re.search(rf"\b({'|'.join(others - {'search'})})\b", alone)
        assert ("cursor" in alone) == (built_in == "jina.read")


@requirement("definition.exports")
def test_kernel_yaml_equals_the_shipped_files() -> None:
    documents = list(yaml.safe_load_all(exported("kernel")))
    shipped = [
        yaml.safe_load((TOOLS / f"{document['tool_name']}.yaml").read_text(encoding="utf-8")) for document in documents
    ]
    assert documents == shipped
    assert [parsed(document).built_in.name for document in documents] == list(CATALOGUE)
    for document, tool in zip(documents, CATALOGUE.values(), strict=True):
        assert document["parameters"] == tool.schema()
        assert document["options"]["suspend_timeout_seconds"] == tool.suspend_timeout_s


@requirement("definition.exports")
@pytest.mark.parametrize("parameters", [None, CATALOGUE["jina.search"].schema()], ids=["derived", "given"])
def test_exports_hide_fixed_and_envs_and_show_defaults(parameters: Any) -> None:
    document = {"tool_name": "web_search", "after_execution": "suspend", "options": OPTIONS, "parameters": parameters}
    row = complete(document, CATALOGUE["jina.search"])
    shown = function(row)["parameters"]
    assert shown["properties"].keys().isdisjoint({"country", "page", "location"})
    assert shown["properties"]["count"]["default"] == 5
    assert "default" not in shown["properties"]["language"], "a template has no fixed value"
    assert shown["required"] == ["query"]
    jsonschema_rs.meta.validate(shown)
    assert (
        function({**row, "options": {**OPTIONS, "args": {"defaults": {"query": "news"}}}})["parameters"].get("required")
        is None
    )


@requirement("definition.exports")
@pytest.mark.parametrize("form", ["openai", "openai-responses", "anthropic", "mcp", "lobehub"])
def test_an_export_of_a_file_replaces_the_built_in_definition(form: str) -> None:
    text = exported(form, str(EXAMPLE))
    assert "Reads a page of our documentation" in text
    assert "wait_for_selector" not in text
    assert "DOCS_READER_KEY" not in text
    assert "nav, footer" not in text


@requirement("definition.exports")
def test_render_shows_the_row_and_the_models_view() -> None:
    done = CliRunner().invoke(app, ["tools", "render", str(EXAMPLE), "--project", "proj_a", "--json"])
    rendered = json.loads(done.stdout)
    document = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    assert rendered["stored"] == {"project_id": "proj_a", **document}
    assert rendered["subject"].startswith("cg.v1r4.proj_a.{channel_id}.")
    assert rendered["model_sees"] == json.loads(exported("openai", str(EXAMPLE)))[0]["function"]
    people = CliRunner().invoke(app, ["tools", "render", str(EXAMPLE), "--project", "proj_a"]).stdout
    assert yaml.safe_load(people.split("# a model sees")[0])["options"] == document["options"]


@requirement("catalogue")
@given(st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,30}", fullmatch=True))
def test_every_allowed_name_survives_mangling(name: str) -> None:
    if name_problem(name) is None:
        assert unmangled(mangled(name)) == name
        assert "." not in mangled(name)


@requirement("catalogue")
@pytest.mark.parametrize(
    "name", ["a__b", "a_.b", "a._b", "a..b", "a.", ".a", "", "a b", "ä", "1a", "a" * 65, "a." * 31 + "aaa"]
)
def test_a_name_that_would_not_survive_mangling_is_refused(name: str) -> None:
    assert name_problem(name)


@requirement("catalogue")
def test_two_tools_with_the_same_exported_name_are_refused() -> None:
    assert all(name_problem(name) is None for name in CATALOGUE)
    tools = all_built_in()
    assert without_duplicates(tools) == tools
    with pytest.raises(DuplicateName, match="jina"):
        without_duplicates([*tools, tools[0].__class__("jina__read", "x", "", "", {})])
    assert camel_case("docs_reader.v2") == "docsReaderV2"


def values(schema: Mapping[str, Any], name: str = "") -> st.SearchStrategy[Any]:
    """Return a strategy of values that a schema allows; addresses, sites and dates are valid."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if name == "after":
        return st.dates().map(str)
    if name in ("site", "exclude_sites") and schema["type"] == "string":
        return st.from_regex(r"[a-z]{3,10}\.com", fullmatch=True)
    if name in ("url", "urls") and schema["type"] == "string":
        return st.from_regex(r"https://[a-z]{3,10}\.com/[a-z0-9/]{0,20}", fullmatch=True)
    kinds: dict[str, Any] = {
        "string": lambda: st.text(
            st.characters(categories=["L", "N", "P"]),
            min_size=schema.get("minLength", 0),
            max_size=min(schema.get("maxLength", 30), 30),
        ),
        "integer": lambda: st.integers(schema.get("minimum", 0), schema.get("maximum", 10**6)),
        "number": lambda: st.floats(schema.get("exclusiveMinimum", 0), schema.get("maximum", 10**6), exclude_min=True),
        "boolean": st.booleans,
        "array": lambda: st.lists(
            values(schema["items"], name), min_size=schema.get("minItems", 0), max_size=schema.get("maxItems", 5)
        ),
        "object": lambda: st.fixed_dictionaries(
            {key: values(rule, key) for key, rule in schema["properties"].items() if key in schema.get("required", [])},
            optional={
                key: values(rule, key)
                for key, rule in schema["properties"].items()
                if key not in schema.get("required", [])
            },
        ),
    }
    strategy: st.SearchStrategy[Any] = kinds[schema["type"]]()
    return strategy


def accept(definition: ToolDefinition, arguments: dict[str, Any]) -> None:
    """Run all checks that can refuse a call before the network."""
    prepared = prepare_arguments(definition, tool_call(arguments), owner(), OperatorEnvs(), SECRETS, SCOPE)
    if requested_cursor(definition, prepared) is not None:
        return
    items = batch_items(definition, prepared, 10)
    for one in [prepared] if items is None else [item_arguments(definition, prepared, item) for item in items]:
        resolved = resolve_parameters(definition, one)
        build_request(definition, resolved)
        if definition.operation.name == "reader":
            checked_url(resolved.parameters["url"], RULES)


@cache
def declared(name: str) -> tuple[ToolDefinition, st.SearchStrategy[Any]]:
    """Return a definition and a strategy of the arguments that its exported schema allows."""
    row = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")) if name == "example" else registration(CATALOGUE[name])
    return parsed(row), values(function(row)["parameters"])


@requirement("definition.exports")
@pytest.mark.parametrize("name", [*CATALOGUE, "example"])
@given(data=st.data())
def test_a_call_made_from_the_exported_schema_alone_is_accepted(name: str, data: st.DataObject) -> None:
    definition, strategy = declared(name)
    arguments = data.draw(strategy)
    if name == "jina.read" and ("cursor" in arguments) == (
        "url" in arguments
    ):  # exactly one of both, as their descriptions require
        arguments.pop("cursor", None)
        arguments.setdefault("url", "https://example.com/")
    if name == "jina.read" and "cursor" not in arguments:  # they need a cursor, as their descriptions require
        arguments.pop("find", None)
        arguments.pop("question", None)
    accept(definition, arguments)
