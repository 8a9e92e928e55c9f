"""Stored and exported forms of definitions, and the policy of calls."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from pydantic import SecretStr, TypeAdapter
from typer.testing import CliRunner

from openapi_tool import bootstrap
from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.cli import app
from openapi_tool.jina.batches import batch_items, item_arguments
from openapi_tool.jina.request import build_request
from openapi_tool.jina.resolved_parameters import resolve_parameters
from openapi_tool.jina.url_policy import UrlPolicy, checked_url
from openapi_tool.kernel.postgres.tool_rows import ToolRows
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.errors import ToolNotAvailable
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.settings import Settings, SettingsError, load_settings
from openapi_tool.tools.arguments import Arguments, ArgumentSources, OperatorEnvs
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.definition_parser import parse_definition
from openapi_tool.tools.exports import openai_functions, system_role
from openapi_tool.tools.policy import Authorizer, Denial, Hook, PlannedCall, Policy
from openapi_tool.tools.registry import stored_row
from openapi_tool.tools.result_request import requested_cursor
from openapi_tool.tools.secret_variables import Secrets
from openapi_tool.tools.session_identities import SessionIdentities
from openapi_tool.tools.shown_tools import DuplicateName, all_built_in, defined, without_duplicates
from openapi_tool.tools.stored_rows import complete, registration
from openapi_tool.tools.time_limits import TimeLimits
from openapi_tool.tools.tool_names import camel_case, mangled, name_problem, unmangled
from tests.conftest import PROJECT, search_tool
from tests.requirements import requirement
from tests.support import definition, identity, pool_of, tool_call
from tests.unit.test_executor import left_s
from tests.wire.conftest import RECORDED_ARGUMENTS, World

TOOLS = Path(__file__).parent.parent.parent / "config" / "tools"
EXAMPLE = TOOLS / "example.yaml"
SECRETS = Secrets({"JINA_API_KEY": "key-one", "DOCS_READER_KEY": "key-two"}, {"JINA_API_KEY", "DOCS_READER_KEY"})
SESSIONS = SessionIdentities(b"a key of sixteen bytes or more")
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


def function(row: Mapping[str, Any]) -> Any:
    return openai_functions([defined(row, parsed(row))])[0]["function"]


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
    row: Any = registration(CATALOGUE["jina.search"])
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
def test_the_system_role_mentions_only_exported_tools(tmp_path: Path) -> None:
    row = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    assert "cursor" in json.loads(exported("lobehub", str(EXAMPLE)))["systemRole"]
    del row["parameters"]["properties"]["cursor"]
    (tmp_path / "tool.yaml").write_text(yaml.safe_dump(row), encoding="utf-8")
    manifest = json.loads(exported("lobehub", str(tmp_path / "tool.yaml")))
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
    prepared = ArgumentSources(OperatorEnvs(), SECRETS, SESSIONS).resolve(definition, tool_call(arguments), identity())
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


@pytest.mark.thorough
@requirement("definition.exports")
@pytest.mark.parametrize("name", [*CATALOGUE, "example"])
@given(data=st.data())
def test_a_call_made_from_the_exported_schema_alone_is_accepted(name: str, data: st.DataObject) -> None:
    definition, strategy = declared(name)
    arguments = data.draw(strategy)
    if name in ("jina.read", "example") and ("cursor" in arguments) == (
        "url" in arguments
    ):  # exactly one of both, as their descriptions require
        arguments.pop("cursor", None)
        arguments.setdefault("url", "https://example.com/")
    if name == "jina.read" and "cursor" not in arguments:  # they need a cursor, as their descriptions require
        arguments.pop("find", None)
        arguments.pop("question", None)
    accept(definition, arguments)


ARGUMENTS = Arguments({"query": "x", "site": ["a"]}, frozenset({"query"}), {}, SecretStr("key"), "session")
NAMES = set(CATALOGUE)


@dataclass(frozen=True)
class FakeEntryPoint:
    """Entry point of an installed package."""

    name: str
    hook: Any

    def load(self) -> Any:
        if isinstance(self.hook, Exception):
            raise self.hook
        return self.hook


def installed(monkeypatch: pytest.MonkeyPatch, **hooks: Any) -> None:
    points = [FakeEntryPoint(name, hook) for name, hook in hooks.items()]
    monkeypatch.setattr(bootstrap, "entry_points", lambda group: points if group == "openapi_tool.hooks" else [])


def settings(**sections: Any) -> Settings:
    return Settings(**{"postgres": {"dsn": "postgresql://127.0.0.1/kernel"}, **sections})


async def denial_of(authorizer: Authorizer) -> str | None:
    """Return why the call is denied, None if it is allowed."""
    try:
        await authorizer.authorize(definition({"tool": "jina.search"}), identity(), ARGUMENTS)
    except ToolNotAvailable as refusal:
        assert refusal.code == "tool_not_available"
        return refusal.message
    return None


@requirement("policy.tools")
@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        ({}, NAMES),
        ({"allow": []}, set()),
        ({"allow": ["jina.search"]}, {"jina.search"}),
        ({"allow": ["jina.search*"]}, {"jina.search", "jina.search_many"}),
        ({"allow": ["tag:read"]}, {"jina.read", "jina.read_many"}),
        ({"deny": ["tag:network"]}, set()),
        ({"deny": ["jina.*_many"]}, {"jina.search", "jina.read"}),
        ({"allow": ["jina.read"], "deny": ["jina.read"]}, set()),
        ({"projects": {"proj": {"deny": ["tag:search"]}}}, {"jina.read", "jina.read_many"}),
        ({"projects": {"other": {"deny": ["*"]}}}, NAMES),
        ({"deny": ["jina.read"], "projects": {"proj": {"allow": ["jina.read"]}}}, set()),
    ],
)
def test_deny_takes_precedence_and_a_project_can_only_restrict(rules: dict[str, Any], allowed: set[str]) -> None:
    policy = settings(policy=rules).policy
    assert {name for name, tool in CATALOGUE.items() if policy.permits_in("proj", tool)} == allowed


@requirement("policy.tools")
def test_a_pattern_that_matches_no_tool_is_a_settings_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://127.0.0.1/kernel")
    monkeypatch.setenv("OPENAPI_TOOL__POLICY__DENY", "jina.serach,tag:red")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert len(caught.value.problems) == 2
    assert caught.value.problems[0].startswith("policy.deny.0 (OPENAPI_TOOL__POLICY__DENY): matches no tool")


@requirement("policy.tools")
async def test_a_denied_call_fails_without_an_upstream_request(
    world_without_executor: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with world_without_executor.executor(policy={"projects": {PROJECT: {"deny": ["tag:search"]}}}):
        outcome = await world_without_executor.send(await world_without_executor.place())
    assert outcome.content["error"]["code"] == "tool_not_available"
    assert "switched off" in outcome.content["error"]["message"]
    assert outcome.upstream_requests == []
    denied = [record for record in caplog.records if getattr(record, "action", "") == "call.denied"]
    assert [(record.levelno, vars(record)["tool"]) for record in denied] == [(logging.WARNING, "jina.search")]


@requirement("policy.tools")
async def test_a_hook_sees_the_call_and_denies_with_a_reason(
    world_without_executor: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PlannedCall] = []

    async def no_hello(call: PlannedCall) -> Denial | None:
        seen.append(call)
        return Denial("say something else than hello") if "hello" in str(call.arguments["query"]) else None

    installed(monkeypatch, no_hello=no_hello)
    args = {"fixed": {"site": "example.org"}}
    await world_without_executor.caller.add_tool(PROJECT, search_tool(args=args))
    async with world_without_executor.executor(policy={"hooks": ("no_hello",)}):
        denied = await world_without_executor.send(await world_without_executor.place())
        allowed = await world_without_executor.send(await world_without_executor.place({"query": "good day"}))
    assert "say something else than hello" in denied.content["error"]["message"]
    assert denied.upstream_requests == []
    assert len(allowed.upstream_requests) == 1
    assert (seen[0].tool, seen[0].tool_name, seen[0].project_id) == ("jina.search", "jina_search", PROJECT)
    assert seen[0].arguments == {**RECORDED_ARGUMENTS, "site": "example.org"}


@requirement("policy.tools")
async def test_hooks_run_before_the_policy() -> None:
    called: list[str] = []

    async def record(call: PlannedCall) -> None:
        called.append(call.tool)

    authorizer = Authorizer(Policy(deny=("*",)), {"record": record})
    assert "switched off" in str(await denial_of(authorizer))
    assert called == ["jina.search"]


async def slow(call: PlannedCall) -> None:
    await asyncio.sleep(10)


async def failing(call: PlannedCall) -> None:
    raise KeyError(call.tool)


async def cancelled(call: PlannedCall) -> None:
    raise asyncio.CancelledError


async def returning_true(call: PlannedCall) -> bool:
    return True


async def denying(call: PlannedCall) -> Denial:
    return Denial("no")


async def allowing(call: PlannedCall) -> None:
    arguments: Any = call.arguments
    arguments["query"] = "changed"
    arguments["site"].append("b")


@requirement("policy.tools")
@pytest.mark.parametrize("hook", [slow, failing, cancelled, returning_true, denying])
async def test_a_hook_without_a_valid_decision_denies(hook: Hook) -> None:
    authorizer = Authorizer(Policy(hook_timeout_s=0.02), {"allowing": allowing, "hook": hook})
    assert "not available" in str(await denial_of(authorizer))
    assert await denial_of(replace(authorizer, hooks={"allowing": allowing})) is None
    assert ARGUMENTS.values == {"query": "x", "site": ["a"]}, "a hook cannot change arguments"


@requirement("policy.tools")
async def test_a_call_cancelled_during_a_hook_stays_cancelled() -> None:
    task = asyncio.create_task(denial_of(Authorizer(Policy(hook_timeout_s=5), {"slow": slow})))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@requirement("policy.tools")
def test_unusable_hooks_are_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, broken=ImportError("no such module"), plain=print, good=allowing)
    options = settings(policy={"hooks": ("absent", "broken", "plain", "good")})
    with pytest.raises(SettingsError) as caught:
        build_bootstrap(options, {})
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 3
    assert "policy.hooks.0: no installed package has this entry point" in text
    assert "broken cannot be loaded: ImportError" in text
    assert "plain is not an async callable" in text
    assert build_bootstrap(settings(policy={"hooks": ("good",)}), {}).authorizer.hooks == {"good": allowing}


@requirement("answer.time")
@pytest.mark.parametrize(
    ("suspend_s", "timeout_s", "expected"), [(None, None, 10), (60, None, 57), (None, 20, 27), (500, None, 120)]
)
def test_the_default_timeout_applies_to_definitions_without_time_limits(
    suspend_s: float | None, timeout_s: float | None, expected: float
) -> None:
    limits = TimeLimits(ExecutorOptions(), ToolOptions(default_timeout_s=10))
    assert left_s(0, suspend_s, limits, timeout_s) == pytest.approx(expected, abs=0.5)


@requirement("answer.time")
def test_the_default_timeout_may_not_exceed_the_maximum() -> None:
    with pytest.raises(ValueError, match="default_timeout_s must not be more than max_timeout_s"):
        settings(tools={"default_timeout_s": 200})
    tools = settings(tools={"default_timeout_s": 12.5}).tools
    assert (tools.default_timeout_s, tools.max_timeout_s) == (12.5, 120)


@requirement("tool.definition")
async def test_an_edited_definition_applies_from_the_next_call(world_without_executor: World) -> None:
    def search_tool_with_limit(maximum: int) -> dict[str, Any]:
        properties = {"query": {"type": "string"}, "count": {"type": "integer", "maximum": maximum}}
        return {**search_tool(), "parameters": {"type": "object", "properties": properties}}

    async with world_without_executor.executor():
        await world_without_executor.caller.add_tool(PROJECT, search_tool_with_limit(2))
        refused = await world_without_executor.send(await world_without_executor.place(RECORDED_ARGUMENTS))
        await world_without_executor.caller.add_tool(PROJECT, search_tool_with_limit(5))
        answered = await world_without_executor.send(await world_without_executor.place(RECORDED_ARGUMENTS))
    assert refused.content["error"]["code"] == "bad_request"
    assert answered.content["status"] == "success"


# Shipped definitions, registered like an operator and called like the kernel does.


PAGE = "http://site.fixture.test:8099/article"
CALLS: dict[str, dict[str, Any]] = {
    "jina_search": {"query": "hello world", "count": 3},
    "jina_search_many": {"queries": ["hello world"], "count": 3},
    "jina_read": {"url": PAGE},
    "jina_read_many": {"urls": [PAGE]},
}


@requirement("definition.exports")
@pytest.mark.parametrize("tool", CALLS)
async def test_calls_of_a_shipped_definition_succeed(world_without_executor: World, tool: str) -> None:
    row = yaml.safe_load((TOOLS / f"{tool}.yaml").read_text(encoding="utf-8"))
    dsn = world_without_executor.stack.postgres.dsn(world_without_executor.database)
    async with ToolRows.open(pool_of(dsn)) as registry:
        await registry.put(PROJECT, row)
        assert await registry.row(PROJECT, tool) == stored_row(row)
    async with world_without_executor.executor():
        outcome = await world_without_executor.send(await world_without_executor.place(CALLS[tool], tool=tool))
    assert outcome.content["status"] == "success", outcome.content["error"]
    assert len(outcome.upstream_requests) == 1
