"""Definitions in files: lint, comparison and registration."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import respx
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr
from rich.console import Console
from typer.testing import CliRunner

from openapi_tool.cli import app, tools_registry
from openapi_tool.cli.management_api import ManagementApi
from openapi_tool.jina.definition_checks import definition_problems, source_problems
from openapi_tool.jina.stored_check import StoredCheck
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.kernel.postgres.tool_rows import ToolRows
from openapi_tool.local.caller import Caller
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.errors import ToolMisconfigured
from openapi_tool.protocol.jsontext import JsonObject
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.testing import InProcessExecutor
from openapi_tool.tools.arguments import OperatorEnvs
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.declaration import json_schema
from openapi_tool.tools.definition import stored_record
from openapi_tool.tools.definition_parser import parse_definition
from openapi_tool.tools.lint import LintLimits
from openapi_tool.tools.problems import Problem
from openapi_tool.tools.registry import COLUMNS, RegistryError
from openapi_tool.tools.stored_rows import registration
from openapi_tool.tools.yaml_source import MAX_BYTES, read_source, read_sources
from tests.conftest import PROJECT, search_tool
from tests.registry.conftest import served
from tests.requirements import requirement
from tests.support import dsn_of, each, make_role, pool_of
from tests.waiting import WAIT_S

ROOT = Path(__file__).parent.parent.parent
BROKEN_FILE = ROOT / "tests" / "data" / "broken_tools.yaml"
"""Each line `--- # name` starts a definition; a comment below it has the path of its mistake."""
_PARTS = re.split(r"(?m)^--- # (\w+)\n", BROKEN_FILE.read_text(encoding="utf-8"))[1:]
BROKEN = dict(zip(_PARTS[::2], _PARTS[1::2], strict=True))
SHIPPED = sorted((ROOT / "config" / "tools").glob("*.yaml"))
EXAMPLES = sorted((ROOT / "examples").rglob("tools/*.yaml"))
PUBLISHED = ROOT / "config" / "tool.schema.json"
KEY = "jina_000000000000example111111111111"
SEARCH: dict[str, Any] = {
    "tool_name": "web_search",
    "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search",
    "after_execution": "suspend",
}


ALLOWED = ("JINA_API_KEY", "SEARCH_API_KEY", "DOCS_READER_KEY", "HOME_TOWN", "SITE_COOKIE")
"""Variables that tools may use in these tests."""


def problems_of(text: str) -> list[Problem]:
    limits = LintLimits(env_parameters=frozenset({"tenanttoken"}), allowed_env=frozenset(ALLOWED))
    return [problem for source in read_sources(text) for problem in source_problems(source, limits, UrlPolicy())]


def messages(text: str) -> list[str]:
    """Return the findings that the linter must print for a broken definition, in any order."""
    return sorted(re.findall(r"^# says: (.*)$", text, re.MULTILINE))


def expectation(text: str) -> tuple[str, bool]:
    match = re.match(r"# expects( warning)?: (.+)", text)
    assert match, text
    return match[2], match[1] is not None


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tools", *arguments])


@requirement("definition.lint")
def test_the_corpus_is_large() -> None:
    assert len(BROKEN) >= 60


@requirement("definition.lint")
@each("name", BROKEN)
def test_each_mistake_is_found_at_its_path(name: str) -> None:
    found = {(problem.where, problem.warning) for problem in problems_of(BROKEN[name])}
    assert found == {expectation(BROKEN[name])}


@requirement("definition.lint")
@each("name", BROKEN)
def test_the_command_prints_position_and_remedy_of_each_mistake(name: str) -> None:
    text, (path, warning) = BROKEN[name], expectation(BROKEN[name])
    settings = {"ALLOWED_ENV": ",".join(ALLOWED), "ENV_PARAMETERS": "tenant_token"}
    environment = {f"OPENAPI_TOOL__SECRETS__{key}": value for key, value in settings.items()}
    for flags, code in ([], int(not warning)), (["--strict"], 1):
        done = CliRunner().invoke(app, ["tools", "lint", "-", *flags], input=text, env=environment)
        assert done.exit_code == code
        lines = done.stdout.splitlines()
        found = [re.fullmatch(r"-:(\d+):(\d+): (error|warning): (.*)", line) for line in lines]
        assert all(found), lines
        assert all(1 <= int(one[1]) <= text.count("\n") + 1 for one in found if one)
        severity = "warning" if warning else "error"
        assert sorted(one[4] for one in found if one) == sorted(f"{path}: {message}" for message in messages(text))
        assert {one[3] for one in found if one} == {severity}


@requirement("definition.lint")
@pytest.mark.parametrize("file", [*SHIPPED, *EXAMPLES], ids=lambda file: file.stem)
def test_the_shipped_definitions_have_no_problems(file: Path) -> None:
    assert problems_of(file.read_text(encoding="utf-8")) == []


@requirement("definition.lint")
@pytest.mark.parametrize(
    "options",
    [
        {"jina": {"mode": "read"}},
        {"jina": {"mode": "crawl", "base_url": "https://r.jina.ai/"}},
        {"jina": {"base_url": "https://s.jina.ai:443"}},
        {"jina": {"mode": "search", "path": "/search", "method": "GET", "auth_env": "JINA_API_KEY"}},
        {"jina": {"mode": "search", "defaults": {"num": 3}, "timeout": 20, "headers": {"X-No-Cache": "true"}}},
        {"jina": {"mode": "reader", "params": {"engine": "browser"}, "timeout_s": 20}},
        {"jina": {"mode": "reader", "endpoint_template": "https://r.jina.ai/{url}", "method": "get"}},
        {"jina": {"tool": "jina.search_many"}},
        {"openapi": {"base_url": "https://s.jina.ai", "path": "/search", "method": "GET", "timeout": 20}},
        {"openapi": {"base_url": "https://r.jina.ai", "headers": {"X-Timeout": "10"}, "auth": {"env": "JINA_API_KEY"}}},
        {
            "args": {"defaults": {"session_id": "{agent_turn_id}"}, "fixed": {"project_id": "{project_id}"}},
            "envs": {"api_key": "SEARCH_API_KEY"},
            "jina": {"mode": "search", "base_url": "https://s.jina.ai", "path": "/search", "auth_env": "JINA_API_KEY"},
            "suspend_timeout_seconds": 60,
            "result_format": "object",
            "ui_allowed": True,
        },
    ],
)
def test_legacy_forms_have_no_problems(options: dict[str, Any]) -> None:
    assert definition_problems({**SEARCH, "options": options}) == []
    del options
    assert definition_problems({"name": "web_search"} | {k: v for k, v in SEARCH.items() if k != "tool_name"})


@requirement("definition.lint")
def test_a_key_in_the_place_of_a_name_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "tool.yaml"
    options = {"jina": {"mode": "search"}, "args": {"fixed": {KEY: 1}}}
    file.write_text(json.dumps({**SEARCH, "options": options}), encoding="utf-8")
    for flags in ([], ["--json"]):
        done = run("lint", str(file), *flags)
        assert done.exit_code == 1
        assert "options.args.fixed.[redacted]" in done.output
        assert KEY[5:] not in done.output


@requirement("definition.lint")
def test_a_file_of_mistakes_prints_a_thousand_lines_at_most(tmp_path: Path) -> None:
    unknown = {f"unknown_{number}": 1 for number in range(1_500)}
    file = tmp_path / "tool.yaml"
    file.write_text(
        json.dumps({**SEARCH, "options": {"jina": {"mode": "search"}, "args": {"fixed": unknown}}}), encoding="utf-8"
    )
    done = run("lint", str(file))
    assert done.exit_code == 1
    assert "only the first 1,000 are shown" in done.output
    assert len(done.output.splitlines()) < 1_010


@requirement("definition.lint")
@pytest.mark.parametrize("where", ["envs", "auth_env", "params", "description", "name"])
def test_a_pasted_key_is_refused_and_never_shown(where: str, tmp_path: Path) -> None:
    jina: dict[str, Any] = {"mode": "search"}
    document: dict[str, Any] = {**SEARCH, "options": {"jina": jina}}
    if where == "envs":
        document["options"]["envs"] = {"api_key": KEY}
    elif where == "description":
        document["description"] = f"Uses {KEY}."
    elif where == "name":
        document["tool_name"] = KEY
    else:
        jina[where] = KEY if where == "auth_env" else {"locale": KEY}
    file = tmp_path / "tool.yaml"
    file.write_text(json.dumps(document), encoding="utf-8")
    for flags in ([], ["--json"]):
        done = run("lint", str(file), *flags)
        assert done.exit_code == 1
        assert "looks like a key" in done.output
        assert KEY[5:] not in done.output


@requirement("definition.lint")
@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        ({"optoins": {}}, "did you mean 'options'?"),
        ({"options": {"jina": {"mode": "search"}, "arg": {}}}, "did you mean 'args'?"),
        ({"options": {"jina": {"mode": "search"}, "params": {"num": 3}}}, "'params' belongs in options.jina"),
        ({"options": {"jina": {"mode": "search", "tool": "jina.serach"}}}, "did you mean 'jina.search'?"),
        ({"options": {"jina": {"mode": "search"}, "args": {"fixed": {"contry": "de"}}}}, "did you mean 'country'?"),
        ({"options": {"jina": {"mode": "search"}, "args": {"fixed": {"limit": 3}}}}, "did you mean 'count'?"),
        ({"options": {"jina": {"mode": "search", "params": {"num_results": 3}}}}, "did you mean 'count'?"),
        ({"options": {"jina": {"mode": "search", "params": {"time_range": "d"}}}}, "; for recent pages give recency;"),
        ({"parameters": {"type": "object", "properties": {"query": {}, "limit": {}}}}, "; did you mean 'count'?"),
        ({"parameters": {"type": "object", "properties": {"query": {}, "size": {}}}}, "; did you mean 'count'?"),
        ({"options": {"jina": {"mode": "search"}, "args": {"fixed": {"url": "x"}}}}, "it is one of 'jina.read'"),
        ({"options": {"jina": {"mode": "search", "headers": {"X-Enginee": "curl"}}}}, "did you mean 'X-Engine'?"),
        (
            {"options": {"jina": {"mode": "search", "headers": {"X-Viewport": "9x9"}}}},
            "is not a header that may be sent; set 'viewport' in options.jina.params",
        ),
    ],
)
def test_a_typo_gets_a_suggestion(mistake: dict[str, Any], hint: str) -> None:
    options = {"options": {"jina": {"mode": "search"}}}
    assert any(hint in problem.message for problem in definition_problems({**SEARCH, **options, **mistake}))


@requirement("definition.lint", "options.envs")
def test_a_secret_is_allowed_only_in_the_parameters_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"jina": {"mode": "search"}, "envs": {"api_key": "A_KEY", "Tenant-Token": "A_KEY", "tenant_pin": "A_KEY"}}
    file = tmp_path / "tool.yaml"
    file.write_text(json.dumps({**SEARCH, "options": options}), encoding="utf-8")
    refused = run("lint", str(file))
    assert refused.exit_code == 1
    assert re.findall(r"options\.envs\.(\S+): may not take a secret", refused.output) == ["Tenant-Token", "tenant_pin"]
    monkeypatch.setenv("OPENAPI_TOOL__SECRETS__ENV_PARAMETERS", "tenant_token")
    monkeypatch.setenv("OPENAPI_TOOL__TOOLS__JINA__ENVS", '{"tenant_pin": "A_KEY"}')
    assert run("lint", str(file)).exit_code == 0


QUERY = ("parameters", "properties", "query")


@requirement("definition.lint", "definition.bounds")
@pytest.mark.parametrize(
    ("rule", "where", "says"),
    [
        ({"enum": [f"{n}" for n in range(501)]}, (*QUERY, "enum"), "has more than 500 values"),
        ({"pattern": "a" * 501}, (*QUERY, "pattern"), "has more than 500 characters"),
        ({"pattern": "(a{1000}){60}"}, (*QUERY, "pattern"), "is no supported regular expression"),
        ({"description": "x" * 300_000}, (), "is larger than 262,144 bytes"),
        ({"examples": ["x"] * 2_500}, ("parameters",), "holds more than 2,000 values"),
    ],
)
def test_values_that_the_executor_would_refuse_are_found_at_their_path(
    rule: dict[str, Any], where: tuple[str, ...], says: str
) -> None:
    query = {"type": "string", "description": "What to search for.", **rule}
    schema = {"type": "object", "additionalProperties": False, "required": ["query"], "properties": {"query": query}}
    document = {**SEARCH, "parameters": schema, "options": {"jina": {"mode": "search"}}}
    (problem,) = definition_problems(document)
    assert problem.path == where
    assert says in problem.message


TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}


def with_rule(tool: str, name: str, rule: dict[str, Any]) -> dict[str, Any]:
    """Return the definition of a built-in tool with another rule for an argument."""
    row: Any = registration(CATALOGUE[tool])
    row["parameters"]["properties"][name] = {"description": "Of the test.", **rule}
    return dict(row)


@requirement("definition.lint")
@pytest.mark.parametrize(
    ("name", "rule", "where", "value", "says"),
    [
        ("site", {"type": "array", "items": {"type": "integer"}}, "items.type", [1], "or a list of 1 to 20 texts"),
        ("site", {"type": "array", "items": {"enum": ["a b"]}}, "items.enum[0]", ["a b"], "must be names of sites"),
        ("site", {**TEXTS, "minItems": 21}, "minItems", ["a"] * 21, "or a list of 1 to 20 texts"),
        ("max_result_tokens", {"type": "boolean"}, "type", True, "must be an integer of at least 500"),
        ("max_result_tokens", {"enum": ["few"]}, "enum[0]", "few", "must be an integer of at least 500"),
        ("max_result_tokens", {"type": "integer", "maximum": 10}, "maximum", 10, "must be an integer of at least 500"),
        ("cursor", {"type": "integer"}, "type", 5, "must be the text that an earlier result named"),
        ("find", {"type": "integer"}, "type", 5, "must be a text of 1 to 200 characters"),
        ("question", {"type": "string", "minLength": 501}, "minLength", "a" * 501, "text of 1 to 500 characters"),
        ("count", {"type": "integer", "exclusiveMinimum": 20}, "exclusiveMinimum", 21, "from 1 to 20"),
        ("count", {"type": "number", "exclusiveMaximum": 1}, "exclusiveMaximum", 0, "from 1 to 20"),
        ("count", {"type": "integer", "minimum": 1, "maximum": 1000.5}, "maximum", 1000, "from 1 to 20"),
        ("count", {"type": "integer", "minimum": -0.5, "maximum": 20}, "minimum", 0, "from 1 to 20"),
        ("location", {"type": "string", "minLength": 300}, "minLength", "a" * 300, "text of 1 to 200 characters"),
        ("urls", {**TEXTS, "minItems": 11}, "minItems", ["a"] * 11, "must be a list of 1 to 10 texts"),
    ],
)
async def test_a_rule_is_an_error_if_the_executor_refuses_its_values(
    name: str, rule: dict[str, Any], where: str, value: Any, says: str
) -> None:
    tool = {"urls": "jina.read_many", **dict.fromkeys(("cursor", "find", "question"), "jina.read")}.get(name)
    row = with_rule(tool or "jina.search", name, rule)
    (problem,) = definition_problems(row)
    assert (problem.where, problem.warning) == (f"parameters.properties.{name}.{where}", False)
    assert says in problem.message
    main = {None: {"query": "x"}, "jina.read": {"cursor": "x"}}.get(tool, {})
    definition = parse_definition(stored_record(row))
    result = await InProcessExecutor(respx.Router()).run_tool(definition, {**main, name: value})
    assert result.error is not None
    assert result.error["code"] == "bad_request"
    assert says in result.text


@requirement("definition.lint")
@each(
    ("tool", "name", "rule"),
    [
        ("jina.search", "max_result_tokens", {"type": "string"}),  # "900" is a number, too
        ("jina.search", "max_result_tokens", {"type": "string", "enum": ["900"]}),
        ("jina.search", "max_result_tokens", {"type": "integer", "exclusiveMinimum": 499}),
        ("jina.search", "count", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 21}),
        ("jina.search", "count", {"type": "integer", "minimum": 1, "maximum": 5, "exclusiveMinimum": -5}),
        ("jina.search", "location", {"type": "string", "minLength": 200}),
        ("jina.search", "location", {"type": "string", "minLength": 300, "maxLength": 10_000, "pattern": "^b"}),
        ("jina.search", "site", {"type": "array", "items": {"enum": ["a.com"]}, "minItems": 2}),
        ("jina.search", "title_words", {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 20}),
        ("jina.search", "after", {"type": "string", "minLength": 10}),
        ("jina.read", "link_style", {"type": "string", "minLength": 8}),
        ("jina.read", "timeout", {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
        ("jina.read", "cursor", {"type": "string", "minLength": 300}),
        ("jina.read", "find", {"type": "string", "minLength": 3, "enum": ["Contents", "Summary"]}),
        ("jina.read_many", "urls", {**TEXTS, "minItems": 10}),
        ("jina.read_many", "urls", {"type": "array", "items": {"type": "string", "minLength": 0}}),
        ("jina.search", "title_words", {"type": "array", "items": {"type": "string", "minLength": 0}}),
        ("jina.search", "max_result_tokens", {"type": "string", "minLength": 3}),  # "900" again
        ("jina.search", "count", {"type": "integer", "minimum": 0.5, "maximum": 20.5}),
        ("jina.search", "count", {"type": "integer", "minimum": 0, "exclusiveMinimum": 0, "maximum": 20}),
    ],
)
def test_a_rule_is_no_error_if_the_executor_may_accept_a_value(tool: str, name: str, rule: dict[str, Any]) -> None:
    assert [problem for problem in definition_problems(with_rule(tool, name, rule)) if name in problem.path] == []


@requirement("definition.lint")
@pytest.mark.parametrize("group", ["fixed", "defaults"])
@pytest.mark.parametrize(
    ("tool", "name", "value", "where", "says"),
    [
        ("jina.search", "max_result_tokens", 100, "", "must be an integer of at least 500"),
        ("jina.read", "max_result_tokens", "many", "", "must be an integer of at least 500"),
        ("jina.read_many", "urls", "https://site.example/", "", "must be a list of 1 to 10 texts"),
        ("jina.read_many", "urls", [], "", "must be a list of 1 to 10 texts"),
        ("jina.search_many", "queries", ["a", 2], "[1]", "must be a text that is not empty"),
    ],
)
async def test_a_value_that_a_definition_sets_is_an_error_if_no_call_can_use_it(
    tool: str, name: str, value: Any, where: str, says: str, group: str
) -> None:
    """The model cannot correct it: a fixed value is hidden from it, and so is a default that is not declared."""
    row: Any = registration(CATALOGUE[tool])
    del row["parameters"]["properties"][name]
    row["parameters"]["required"] = [other for other in row["parameters"].get("required", ()) if other != name]
    row["options"]["args"] = {group: {name: value}}
    found = [(problem.where, says in problem.message) for problem in definition_problems(row) if not problem.warning]
    assert found == [(f"options.args.{group}.{name}{where}", True)]
    stored = StoredCheck(OperatorEnvs(), lambda _: SecretStr("a-key-of-the-test"), UrlPolicy(), 10)
    usable, problems = stored.check(stored_record(row))
    assert (usable, problems) == (None, [f"options.args.{group}.{name}{where}: {says}"])
    main = {"jina.search": {"query": "x"}, "jina.read": {"url": "https://site.fixture.test:8099/short"}}.get(tool, {})
    result = await InProcessExecutor(respx.Router()).run_tool(parse_definition(stored_record(row)), main)
    assert result.error_code == "tool_misconfigured"
    assert f"options.args.{group}.{name}{where}: {says}" in result.text


@requirement("definition.lint")
@pytest.mark.parametrize("group", ["fixed", "defaults"])
def test_a_template_is_no_error_for_what_a_sample_id_renders(group: str) -> None:
    row: Any = registration(CATALOGUE["jina.search"])
    del row["parameters"]["properties"]["max_result_tokens"]
    row["options"]["args"] = {group: {"max_result_tokens": "{project_id}"}}
    assert [str(problem) for problem in definition_problems(row) if not problem.warning] == []


@requirement("definition.lint")
@each("limit", [10**400, -(10**30), float("inf"), True, "x", None])
def test_no_limit_makes_the_linter_fail(limit: Any) -> None:
    keywords = ("exclusiveMinimum", "exclusiveMaximum", "minLength", "minItems", "maxItems")
    for name, kind in (("count", "integer"), ("location", "string"), ("site", "array"), ("queries", "array")):
        rule = {"type": kind, "items": {"type": "string"}, **dict.fromkeys(keywords, limit)}
        assert all(problem.message for problem in definition_problems(with_rule("jina.search_many", name, rule)))


@requirement("definition.lint")
def test_lint_uses_the_limits_of_the_executor() -> None:
    options = {"jina": {"mode": "search", "timeout_s": 200}, "suspend_timeout_seconds": 300}
    assert definition_problems({**SEARCH, "options": options}, LintLimits(tools=ToolOptions(max_timeout_s=290))) == []
    assert definition_problems({**SEARCH, "options": options})[0].where == "options.jina.timeout_s"


@requirement("definition.lint")
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["options", "jina", "args", "fixed", "parameters", "properties", "query", "type", "items"]
                )
                | st.sampled_from(COLUMNS),
                inner,
                max_size=4,
            )
        ),
        max_leaves=20,
    )
)
def test_no_json_value_makes_the_linter_fail(document: Any) -> None:
    assert all(problem.message for problem in definition_problems(document))


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all members of a JSON value."""
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, name)
        if isinstance(item, dict | list):
            yield from paths_of(item, (*path, name))


@pytest.mark.thorough
@requirement("definition.lint")
@pytest.mark.parametrize("wrong", [None, True, 5, 0.5, "x", [], [1], {}, {"x": 1}], ids=repr)
@pytest.mark.parametrize("tool", ["jina.search", "jina.read_many"])
def test_no_value_of_a_wrong_type_makes_the_linter_fail(tool: str, wrong: Any) -> None:
    """Without checks of types 166 of 19,720 such definitions ended the linter with a traceback."""
    row: Any = registration(CATALOGUE[tool])
    args = {"defaults": {"page": 2}, "fixed": {"urls": ["https://example.com"]}}
    row["options"] |= {"args": args, "envs": {"a": "B"}}
    for *above, last in paths_of(row):
        document: Any = deepcopy(row)
        part = document
        for name in above:
            part = part[name]
        part[last] = wrong
        assert all(problem.message for problem in definition_problems(document))


@requirement("definition.lint")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 2024-01-01", "date; put it in quotes"),
        ("a: !!binary x", "put it in quotes"),
        ("a: .nan", "finite"),
        ('a: "\\0"', "cannot be stored in the database"),
        ("a: 99999999999999999999", "cannot be stored in the database"),
        ("a: 1\na: 2", "given twice"),
        ("2024: 1", "a key must be a text"),
        ("a: &x\n  b: *x", "refers to itself"),
        ("a: [" * 500, "is n"),
        (f"a: {':'.join(['59'] * 50_000)}", "too long for a number"),
        (f"a: {'9' * 5_000}", "too long for a number"),
    ],
)
def test_yaml_values_without_json_equivalent_are_reported(text: str, message: str) -> None:
    assert any(message in problem.message for problem in read_source(text).problems)


@requirement("definition.lint")
@pytest.mark.parametrize("separator", ["\n", "\n---\n"])
def test_a_file_of_very_many_values_is_not_parsed_to_its_end(separator: str) -> None:
    *_, last = read_sources(separator.join(f"key{number}: 1" for number in range(30_000)))
    assert [problem.message for problem in last.problems] == [
        "the file has more than 50,000 keys and values; split it, or shorten it"
    ]
    assert last.position(())[0] < 59_000


@requirement("definition.lint")
def test_lint_refuses_a_fifo_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tool.yaml")
    words = [sys.executable, "-m", "openapi_tool", "tools", "lint", str(tmp_path / "tool.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)  # noqa: S603 - our command
    assert done.returncode == 2
    assert "tool.yaml: cannot be read: not a regular file; for standard input name -" in done.stderr


@requirement("definition.lint")
@given(st.text(alphabet="ab:-[]{}&*!<> \n\t'\"|0.", max_size=40))
def test_no_text_makes_the_reader_fail(text: str) -> None:
    problems_of(text)


@requirement("definition.lint")
def test_all_problems_of_all_files_are_reported_with_line_and_column(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(
        "tool_name: fork_join\ntarget_subject: cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search\n"
        "after_execution: resume\noptions:\n  jina:\n    mode: search\n    params:\n      num: 99\n",
        encoding="utf-8",
    )
    two.write_text("tool_name: [\n", encoding="utf-8")
    done = run("lint", str(one), str(two))
    assert done.exit_code == 1
    places = [line.split(": ")[0].rpartition("/")[2] for line in done.stdout.splitlines()]
    assert places == ["one.yaml:1:1", "one.yaml:3:1", "one.yaml:8:7", "two.yaml:2:1"]
    objects = [json.loads(line) for line in run("lint", str(one), "--json").stdout.splitlines()]
    assert [(item["line"], item["path"]) for item in objects][2] == (8, "options.jina.params.num")


@requirement("definition.lint")
def test_warnings_fail_only_with_strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "accept_given.yaml"
    file.write_text(BROKEN["accept_given"], encoding="utf-8")
    assert run("lint", str(file)).exit_code == 0
    assert run("lint", str(file), "--strict").exit_code == 1
    monkeypatch.setenv("OPENAPI_TOOL__SECRETS__ALLOWED_ENV", "DOCS_READER_KEY")
    assert run("lint", *map(str, SHIPPED), "--strict").exit_code == 0


@requirement("definition.lint")
@pytest.mark.parametrize(("own", "warns"), [(9, False), (10, True), (11, True)])
def test_a_budget_that_lowers_nothing_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: int, *, warns: bool
) -> None:
    monkeypatch.setenv("OPENAPI_TOOL__BUDGETS__SESSION_REQUESTS", "10")
    file = tmp_path / "tool.yaml"
    options = {"jina": {"mode": "search"}, "budget": {"session_requests": own}}
    file.write_text(json.dumps({**SEARCH, "options": options}), encoding="utf-8")
    done = run("lint", str(file))
    says = "warning: options.budget.session_requests: changes nothing: budgets.session_requests is 10, and a definition"
    assert (done.exit_code, says in done.stdout) == (0, warns), done.output


@requirement("definition.lint", "options.jina")
@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        ("session_requests", 1_000_000_001, "1,000,000,000"),
        ("project_month_requests", 2**31 - 1, "1,000,000,000"),
        ("agent_day_tokens", 2**53 - 1, "1,000,000,000,000"),
        ("session_tokens", 10**12 + 1, "1,000,000,000,000"),
    ],
)
def test_a_budget_beyond_its_upper_bound_is_a_typed_error(tmp_path: Path, name: str, value: int, most: str) -> None:
    options: JsonObject = {"jina": {"mode": "search"}, "budget": {name: value}}
    says = f"options.budget.{name}: must be at most {most}"
    file = tmp_path / "tool.yaml"
    file.write_text(json.dumps({**SEARCH, "options": options}), encoding="utf-8")
    done = run("lint", str(file))
    assert (done.exit_code, f"options.budget.{name}: must be " in done.stdout) == (1, True), done.output
    for stored in (value, 2**64 - 1):
        options["budget"] = {name: stored}
        with pytest.raises(ToolMisconfigured, match=says):
            parse_definition(DefinitionRecord("web_search", None, {}, options))


@requirement("definition.lint")
@pytest.mark.parametrize("wrong", ["base_url", "mode", "tool_name", "auth_env", "parameters"])
def test_no_mistake_hides_another(wrong: str) -> None:
    """Otherwise each run of the linter would show one more mistake."""
    jina: dict[str, Any] = {"mode": "search", "params": {"proxyUrl": "x", "engine": 5}, "headers": {"Cookie": "x"}}
    options = {"jina": jina, "envs": {"locale": "A_KEY"}, "args": {"fixed": {"colour": "x"}}}
    document: dict[str, Any] = {**SEARCH, "options": options}
    expected = {"options.envs.locale"}
    if wrong == "tool_name":
        document["tool_name"] = "no name"
        expected |= {"tool_name"}
    elif wrong == "parameters":
        document["parameters"] = {"properties": {"query": {"$ref": "#/x"}}}
        jina["base_url"] = "https://evil.example"
        expected |= {"parameters.properties.query.$ref", "options.jina.base_url"}
    else:
        jina[wrong] = {"base_url": "https://evil.example", "mode": "searching", "auth_env": "PG_DSN"}[wrong]
        expected |= {f"options.jina.{wrong}"}
    places = ("jina.params.proxyUrl", "jina.params.engine", "jina.headers.Cookie", "args.fixed.colour")
    expected |= {f"options.{place}" for place in places}  # a misspelt mode counts as the most similar one
    assert expected <= {problem.where for problem in definition_problems(document) if not problem.warning}


@requirement("definition.lint")
def test_the_published_schema_is_a_json_schema() -> None:
    jsonschema_rs.meta.validate(json_schema())


SCHEMA_LINE = re.compile(r"# yaml-language-server: \$schema=(\S+)\n")
DEFINITION_FILES = [*SHIPPED, *EXAMPLES]


def published() -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(json.loads(PUBLISHED.read_text(encoding="utf-8")))


@requirement("definition.lint")
@pytest.mark.parametrize("file", DEFINITION_FILES, ids=lambda file: file.stem)
def test_a_shipped_definition_names_the_published_schema_and_fits_it(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    line = SCHEMA_LINE.match(text)
    assert line is not None
    assert (file.parent / line[1]).resolve() == PUBLISHED
    published().validate(yaml.safe_load(text))


@requirement("definition.lint")
@each("name", BROKEN)
def test_what_the_published_schema_refuses_is_an_error_of_the_linter(name: str) -> None:
    """Else an editor would refuse what the linter accepts."""
    (source,) = read_sources(BROKEN[name])
    if published().is_valid(source.document):
        return
    assert not expectation(BROKEN[name])[1]


@requirement("definition.lint")
@pytest.mark.parametrize(
    ("above", "name"),
    [
        ((), "optoins"),
        (("options",), "arg"),
        (("options", "args"), "fixd"),
        (("options", "jina"), "param"),
        (("options", "budget"), "session_token"),
        (("parameters",), "requird"),
        (("parameters", "properties", "query"), "maxlength"),
    ],
)
def test_the_published_schema_refuses_unknown_keys_at_each_level(above: tuple[str, ...], name: str) -> None:
    row: Any = registration(CATALOGUE["jina.search"])
    row["options"] |= {"args": {}, "budget": {}}
    assert published().is_valid(row)
    part = row
    for key in above:
        part = part[key]
    part[name] = 1
    assert not published().is_valid(row)


def written(folder: Path, **documents: Any) -> list[str]:
    """Write definitions to files of these names; return their paths."""
    for name, document in documents.items():
        (folder / f"{name}.yaml").write_text(json.dumps(document), encoding="utf-8")
    return [str(folder / f"{name}.yaml") for name in documents]


def lines_of(result: Any) -> list[str]:
    """Return the output of the linter without folders."""
    return [re.sub(r"\S*/", "", line) for line in result.stdout.splitlines()]


PLAIN = {**SEARCH, "options": {"jina": {"mode": "search"}}}


@requirement("definition.lint", "options.envs")
@pytest.mark.parametrize("where", ["auth_env", "envs", "legacy"])
def test_an_unknown_variable_is_an_error_if_the_executors_settings_are_given(where: str, tmp_path: Path) -> None:
    forms: dict[str, Any] = {
        "auth_env": {"jina": {"mode": "search", "auth_env": "MY_DOSC_KEY"}},
        "envs": {"jina": {"mode": "search"}, "envs": {"api_key": "MY_DOSC_KEY"}},
        "legacy": {"openapi": {"base_url": "https://s.jina.ai", "auth": {"env": "MY_DOSC_KEY"}}},
    }
    place = {"auth_env": "jina.auth_env", "envs": "envs.api_key", "legacy": "openapi.auth.env"}[where]
    (file,), config = written(tmp_path, a={**SEARCH, "options": forms[where]}), tmp_path / "executor.toml"
    config.write_text('[secrets]\nallowed_env = ["MY_DOCS_KEY"]\n')
    says = f"options.{place}: MY_DOSC_KEY is no variable that these settings pass to tools"
    alone, checked = run("lint", file), run("lint", file, "--config", str(config))
    assert alone.exit_code == 0
    assert f"warning: {says}; list it in secrets.allowed_env" in alone.stdout
    assert checked.exit_code == 1
    assert f"error: {says}; did you mean 'MY_DOCS_KEY'?" in checked.stdout
    config.write_text('[secrets]\nallowed_env = ["MY_DOSC_KEY"]\n')
    assert run("lint", file, "--config", str(config), "--strict").exit_code == 0


@requirement("definition.lint")
@pytest.mark.parametrize(
    ("text", "says"), [(None, "No such file"), ("[secrets", "executor.toml"), ("[x]", "executor.toml): is not")]
)
def test_an_unreadable_configuration_is_reported(text: str | None, says: str, tmp_path: Path) -> None:
    (file,), config = written(tmp_path, a=PLAIN), tmp_path / "executor.toml"
    if text is not None:
        config.write_text(text)
    done = run("lint", file, "--config", str(config))
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr


@requirement("definition.lint")
def test_folders_and_standard_input_are_read(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    written(tmp_path, b={**PLAIN, "after_execution": "x"}, a=PLAIN)
    (tmp_path / "below" / "c.yml").write_text("tool_name: c")
    (tmp_path / "notes.txt").write_text("no: definition")
    done = run("lint", str(tmp_path))
    assert done.exit_code == 1
    places = ["b.yaml:1:2: error: tool_name", "b.yaml:1:105: error: after_execution"]
    assert [line.rsplit(": ", 1)[0] for line in lines_of(done)][:2] == places
    assert "c.yml:1:1: error: options" in done.stdout
    assert "notes" not in done.output
    assert done.stderr.startswith("3 files, ")
    text = (tmp_path / "a.yaml").read_text()
    assert CliRunner().invoke(app, ["tools", "lint", "-"], input=text).exit_code == 0
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run("lint", str(empty))
    assert done.exit_code == 2
    assert "empty: holds no file whose name ends in .yaml or .yml" in done.stderr


@requirement("definition.exports")
def test_a_kernel_export_into_a_folder_has_one_document_per_file(tmp_path: Path) -> None:
    """The kernel's API refuses a file with several documents."""
    folder = tmp_path / "new folder" / "tools"
    done = run("export", "--format", "kernel", "--output-dir", str(folder))
    assert (done.exit_code, done.stdout.splitlines()) == (0, [str(folder / file.name) for file in built_in_files()])
    for file in built_in_files():
        [document] = yaml.safe_load_all((folder / file.name).read_text())
        assert document == yaml.safe_load(file.read_text())
    assert run("lint", str(folder)).exit_code == 0


def built_in_files() -> list[Path]:
    return [TOOLS / f"{registration(tool)['tool_name']}.yaml" for tool in CATALOGUE.values()]


@requirement("definition.exports")
def test_a_folder_for_an_export_is_refused_if_it_cannot_be_written_or_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("export", "--format", "kernel", "--output-dir", str(tmp_path / "file"))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert f"--output-dir: {tmp_path / 'file'}: is a file, not a folder" in done.stderr
    done = run("export", "--format", "mcp", "--output-dir", str(tmp_path / "new"))
    assert done.exit_code == 2
    assert not (tmp_path / "new").exists()
    twice = written(tmp_path, a=PLAIN, b=PLAIN)
    assert run("export", "--format", "kernel", "--output-dir", str(tmp_path / "new"), *twice).exit_code == 1
    outside = written(tmp_path, c={**PLAIN, "tool_name": "../outside"})
    assert run("export", "--format", "kernel", "--output-dir", str(tmp_path / "new"), *outside).exit_code == 1
    assert not (tmp_path / "outside.yaml").exists()


@requirement("definition.lint", "definition.exports")
def test_a_kernel_export_can_be_linted_and_exported_again(tmp_path: Path) -> None:
    odd = {"type": "string", "description": "Where.", "enum": ["010", "1:30", "1e3", "08", "no", "2024-01-01"]}
    document = {**PLAIN, "parameters": {**CATALOGUE["jina.search"].schema()}}
    document["parameters"]["properties"] |= {"location": odd}
    exported = run("export", "--format", "kernel", *written(tmp_path, a=document), *map(str, SHIPPED)).stdout
    assert len(read_sources(exported)) == 1 + len(SHIPPED)
    done = CliRunner().invoke(app, ["tools", "lint", "-"], input=exported)
    assert done.exit_code == 0, done.output
    (tmp_path / "all.yaml").write_text(exported)
    assert run("export", "--format", "kernel", str(tmp_path / "all.yaml")).stdout == exported
    assert run("render", str(tmp_path / "all.yaml"), "--project", "p").exit_code == 1
    assert run("lint", "-").exit_code == 1  # empty input contains no definition


@requirement("definition.lint")
def test_problems_of_each_document_have_the_line_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    text = "".join(f"---\n{json.dumps({**PLAIN, 'tool_name': name})}\n" for name in ("one", "fork_join", "three"))
    file.write_text(text + "---\ntool_name: [\n")
    done = run("lint", str(file))
    assert done.exit_code == 1
    assert [line.split(" error: ")[0] for line in lines_of(done)] == ["two.yaml:4:2:", "two.yaml:9:1:"]


@requirement("definition.lint")
@pytest.mark.parametrize("command", ["lint", "export"])
def test_two_definitions_with_one_name_are_both_named(command: str, tmp_path: Path) -> None:
    done = run(command, *written(tmp_path, a=PLAIN, b={**PLAIN, "after_execution": "terminate"}))
    assert done.exit_code == 1
    (line,) = [re.sub(r"\S*/", "", line) for line in done.output.splitlines() if "error: " in line]
    says = "is the name of the definition at a.yaml:1, too; a project has each name once"
    assert line == f"b.yaml:1:2: error: tool_name: {says}"


@requirement("definition.lint")
@pytest.mark.parametrize(
    ("chars", "says"),
    [
        (5_000_000, "description: has 5,000,000 characters, at most 10,000 are stored"),
        (MAX_BYTES, "definition: is larger than 8,000,000 bytes; split it, or shorten its texts"),
    ],
)
def test_an_overlong_text_is_reported(chars: int, says: str, tmp_path: Path) -> None:
    done = run("lint", *written(tmp_path, a={**PLAIN, "description": "x" * chars}))
    assert done.exit_code == 1
    assert f"error: {says}" in done.stdout


@requirement("definition.lint")
def test_a_file_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"tool_name: \xff")
    assert lines_of(run("lint", str(file))) == ["a.yaml:1:1: error: definition: is not UTF-8 text; save it as UTF-8"]
    assert run("lint", str(tmp_path / "b.yaml")).exit_code == 2


TOOLS = Path(__file__).parent.parent.parent / "config" / "tools"
SEARCH_FILE, EXAMPLE = str(TOOLS / "jina_search.yaml"), str(TOOLS / "example.yaml")
SEARCH_TEXT = Path(SEARCH_FILE).read_text(encoding="utf-8")
OTHER = "proj_other"

Tools = Callable[..., Any]


@pytest.fixture
def api(stack: EmbeddedStack, database: str) -> Iterator[str]:
    with served(stack.postgres.dsn(database)) as url:
        yield url


@pytest.fixture
def tools(stack: EmbeddedStack, database: str) -> Tools:
    """Return a function that runs `openapi-tool tools …` in a thread."""
    environment = {"PG_DSN": stack.postgres.dsn(database), "COLUMNS": "200"}

    async def run(*arguments: str, answer: str = "") -> Any:
        return await asyncio.to_thread(
            CliRunner().invoke, app, ["tools", *arguments], input=answer, env=environment, catch_exceptions=False
        )

    return run


async def rows(caller: Caller, project: str) -> list[dict[str, Any]]:
    found = await caller.database.fetch(
        "select tool_name, description, parameters, target_subject, after_execution, options "
        "from resource.tools where project_id = $1 order by tool_name",
        project,
    )
    return [dict(row) for row in found]


@requirement("definition.apply")
async def test_api_and_database_store_the_same_row(caller: Caller, api: str, tools: Tools) -> None:
    await caller.add_project(OTHER)
    files = [str(file) for file in TOOLS.glob("*.yaml")]
    assert (await tools("apply", *files, "--project", PROJECT, "--api", api, "--yes")).exit_code == 0
    assert (await tools("apply", *files, "--project", OTHER, "--db", "--yes")).exit_code == 0
    through_api, through_database = await rows(caller, PROJECT), await rows(caller, OTHER)
    assert len(through_api) == 5
    assert through_api == through_database
    listed = [(await tools("list", "--project", PROJECT, *way, "--json")).stdout for way in (["--api", api], ["--db"])]
    assert listed[0] == listed[1]
    shown = [(await tools("show", "jina_read", "--project", OTHER, *way)).stdout for way in (["--api", api], ["--db"])]
    assert shown[0] == shown[1]
    assert yaml.safe_load(shown[0]) == yaml.safe_load((TOOLS / "jina_read.yaml").read_text(encoding="utf-8"))


@requirement("definition.apply")
@pytest.mark.parametrize("way", ["api", "db"])
async def test_applying_again_changes_nothing(caller: Caller, api: str, tools: Tools, way: str) -> None:
    where = ["--project", PROJECT, *(["--db"] if way == "db" else ["--api", api])]
    first = await tools("apply", SEARCH_FILE, *where, "--yes", "--json")
    assert json.loads(first.stdout)["outcome"] == "created"
    version = "select xmin::text from resource.tools where tool_name = 'jina_search'"
    before = await caller.database.fetchval(version)
    again = await tools("apply", SEARCH_FILE, *where)
    assert again.exit_code == 0
    assert "1 unchanged" in again.stdout
    await tools("apply", SEARCH_FILE, EXAMPLE, *where, "--yes")
    assert len(await rows(caller, PROJECT)) == 2
    assert await caller.database.fetchval(version) == before, (
        "unchanged definitions are not written together with others"
    )


@requirement("definition.apply")
@pytest.mark.parametrize("way", ["api", "db"])
async def test_a_difference_is_shown_and_needs_confirmation(
    caller: Caller, api: str, tools: Tools, tmp_path: Path, way: str
) -> None:
    where = ["--project", PROJECT, *(["--db"] if way == "db" else ["--api", api])]
    await tools("apply", SEARCH_FILE, *where, "--yes")
    edited = tmp_path / "edited.yaml"
    edited.write_text(
        SEARCH_TEXT.replace("suspend_timeout_seconds: 60", "suspend_timeout_seconds: 75"),
        encoding="utf-8",
    )
    for flags, answer, code in ((["--dry-run"], "", 0), ([], "n\n", 1), ([], "", 1)):
        done = await tools("apply", str(edited), *where, *flags, answer=answer)
        assert done.exit_code == code
        no_terminal = done.stderr.endswith(
            "[y/N]: \nopenapi-tool: nothing was changed: no terminal to ask; use --yes\n"
        )
        assert no_terminal == (not answer and not flags)
        assert done.stdout == "" or flags
        changed = [
            line for line in done.stderr.splitlines() if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")
        ]
        assert changed == ["-  suspend_timeout_seconds: 60", "+  suspend_timeout_seconds: 75"]
        assert (await rows(caller, PROJECT))[0]["options"]["suspend_timeout_seconds"] == 60
    done = await tools("apply", str(edited), *where, answer="y\n")
    assert done.exit_code == 0
    assert (await rows(caller, PROJECT))[0]["options"]["suspend_timeout_seconds"] == 75


@pytest.mark.thorough
@requirement("definition.apply")
async def test_a_failed_project_does_not_stop_the_others(
    caller: Caller, api: str, tools: Tools, tmp_path: Path
) -> None:
    names = [f"proj_{number:03}" for number in range(60)]
    for name in names:
        await caller.add_project(name)
    listed = tmp_path / "projects.txt"
    listed.write_text(
        "# all of them\n" + "\n".join(["proj_gone", *names, "proj_broken", names[0]]) + "\n\n", encoding="utf-8"
    )
    for way in (["--api", api], ["--db"]):
        done = await tools("apply", SEARCH_FILE, "--projects-file", str(listed), *way, "--yes", "--json")
        assert done.exit_code == 1
        outcomes = {item["project_id"]: item for item in map(json.loads, done.stdout.splitlines())}
        assert len(outcomes) == 62
        assert {outcomes[name]["outcome"] for name in names} == {"created"}
        assert "not_found" in (outcomes["proj_gone"]["reason"] or "")
        assert outcomes["proj_broken"]["outcome"] == "failed"
        await caller.database.execute("delete from resource.tools")
    done = await tools("apply", SEARCH_FILE, "--projects-file", str(listed), "--db", "--yes")
    assert "60 created" in done.stdout
    assert "2 failed" in done.stdout


@requirement("definition.apply")
async def test_files_with_errors_prevent_any_change(caller: Caller, tools: Tools, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("tool_name: fork_join\n", encoding="utf-8")
    done = await tools("apply", SEARCH_FILE, str(broken), "--project", PROJECT, "--db", "--yes")
    assert done.exit_code == 1
    assert "reserved by the kernel" in done.stderr
    assert await rows(caller, PROJECT) == []
    assert (await tools("apply", SEARCH_FILE, SEARCH_FILE, "--project", PROJECT, "--db", "--yes")).exit_code == 1


@requirement("definition.apply")
@pytest.mark.parametrize("way", ["api", "db"])
async def test_definitions_are_deleted(caller: Caller, api: str, tools: Tools, way: str) -> None:
    where = ["--project", PROJECT, *(["--db"] if way == "db" else ["--api", api])]
    await tools("apply", SEARCH_FILE, *where, "--yes")
    assert (await tools("delete", "jina_search", *where)).exit_code == 1
    assert len(await rows(caller, PROJECT)) == 1
    assert (await tools("delete", "jina_search", *where, "--yes")).exit_code == 0
    assert await rows(caller, PROJECT) == []
    await tools("apply", SEARCH_FILE, *where, "--yes")
    for command in (["delete", "jina_search", "jina_serch", "--yes"], ["show", "jina_serch"]):
        unknown = await tools(*command, *where)
        assert (unknown.exit_code, unknown.stdout) == (2, "")
        assert f"project {PROJECT} has no tool 'jina_serch'; did you mean 'jina_search'?" in unknown.stderr
    assert len(await rows(caller, PROJECT)) == 1, "nothing is deleted if one name is unknown"
    for command in (["delete", "x", "--yes"], ["show", "x"], ["list"]):
        unknown = await tools(*command, "--project", "proj_gone", *where[2:])
        assert (unknown.exit_code, "not_found: " in unknown.stderr) == (2, True)


@requirement("definition.apply")
async def test_the_kernels_own_tools_cannot_be_deleted(caller: Caller, tools: Tools, api: str) -> None:
    await caller.add_tool(PROJECT, {"tool_name": "inner", "target_subject": "cg.v1r4.p.c.cmd.sys.pmo.inner"})
    for way in (["--api", api], ["--db"]):
        done = await tools("delete", "inner", "--project", PROJECT, *way, "--yes")
        assert (done.exit_code, "bad_request" in done.stdout) == (1, True)


@requirement("definition.apply")
async def test_many_tools_are_listed_page_by_page(caller: Caller, tools: Tools, api: str) -> None:
    for number in range(205):
        await caller.add_tool(
            PROJECT, {"tool_name": f"tool_{number:03}", "target_subject": "cg.v1r4.p.c.cmd.tool.jina.x", "options": {}}
        )
    listed = [(await tools("list", "--project", PROJECT, *way, "--json")).stdout for way in (["--api", api], ["--db"])]
    assert listed[0] == listed[1]
    assert len(listed[0].splitlines()) == 205


@requirement("definition.bounds", "options.envs")
async def test_the_list_shows_which_stored_rows_the_executor_would_refuse(
    caller: Caller, tools: Tools, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: dict[str, dict[str, Any]] = {
        "a_good": search_tool(),
        "b_referring": {**search_tool(), "parameters": {"properties": {"query": {"$ref": "#/[bold]"}}}},
        "c_large": {**search_tool(), "parameters": {"description": "x" * 300_000}},
        "d_leaking": search_tool(envs={"tenant_token": "JINA_API_KEY"}),
        "e_odd": {**search_tool(), "options": ["no", "object"]},
    }
    for name, row in rows.items():
        await caller.add_tool(PROJECT, {**row, "tool_name": name})
    for way in (["--api", api], ["--db"]):
        done = await tools("list", "--project", PROJECT, *way, "--json")
        found = {row["tool_name"]: row["problems"] for row in map(json.loads, done.stdout.splitlines())}
        assert (found.keys(), found["a_good"]) == (rows.keys(), [])
        assert "parameters.properties.query.$ref: references are not read" in found["b_referring"][0]
        assert "larger than 262,144 bytes" in found["c_large"][0]
        assert found["d_leaking"] == ["options.envs.tenant_token: may not take a secret"]
        assert found["e_odd"][0] == "options: must be an object"
    shown = await tools("list", "--project", PROJECT, "--db")
    assert (shown.exit_code, shown.stdout.count("unusable")) == (0, 4)
    monkeypatch.setenv("OPENAPI_TOOL__SECRETS__ENV_PARAMETERS", "tenant_token")
    shown = await tools("list", "--project", PROJECT, "--db")
    assert shown.stdout.count("unusable") == 3


REFUSED_BY_EVERY_CALL: list[tuple[dict[str, Any], str]] = [
    ({"jina": {"mode": "search", "auth_env": "PG_DSN"}}, "'PG_DSN', which is one of the executor's own"),
    ({"jina": {"mode": "search", "auth_env": "HOME"}}, "'HOME', which this executor does not pass to tools"),
    ({"jina": {"mode": "search", "auth_env": "jina_" + "0a" * 20}}, "has what looks like a key where the name"),
    ({"envs": {"api_key": "0123456789abcdef0123"}}, "has what looks like a key where the name"),
    ({"jina": {"mode": "search", "headers": {"Authorization": "x"}}}, "options.jina.headers.Authorization: is not"),
    ({"jina": {"mode": "reader", "headers": {"X-Set-Cookie": "x"}}}, "options.jina.headers.X-Set-Cookie: is not"),
    ({"jina": {"mode": "reader", "params": {"proxyUrl": "http://x"}}}, "options.jina.params.proxyUrl: may not be sent"),
    ({"jina": {"mode": "reader", "params": {"base": 5}}}, "options.jina.params.base: must be one of initial, final"),
    ({"args": {"fixed": {"site": "{api_key}"}}}, "unknown placeholder {api_key} in options.args.fixed.site"),
    ({"args": {"defaults": {"hl": ["{nowhere}"]}}}, "unknown placeholder {nowhere} in options.args.defaults.hl"),
    ({"args": {"defaults": {"count": "many"}}}, "options.args.defaults.count: "),
    (
        {"jina": {"mode": "reader"}, "args": {"fixed": {"url": "http://10.0.0.1/"}}},
        "options.args.fixed.url: is no address that may be read (target_refused)",
    ),
    (
        {"jina": {"mode": "reader", "tool": "jina.read_many"}, "args": {"fixed": {"urls": ["http://10.0.0.1/"]}}},
        "options.args.fixed.urls: is no address that may be read (target_refused)",
    ),
    ({"suspend_timeout_seconds": "forever"}, "options.suspend_timeout_seconds: is ignored"),
]


@requirement("definition.bounds")
async def test_the_list_runs_the_checks_of_a_call(caller: Caller, tools: Tools) -> None:
    for number, (options, _) in enumerate(REFUSED_BY_EVERY_CALL):
        row = search_tool() | {"tool_name": f"tool_{number:02}", "options": {"jina": {"mode": "search"}} | options}
        await caller.add_tool(PROJECT, row)
    await caller.add_tool(PROJECT, search_tool() | {"tool_name": "tool_x0", "parameters": False})
    await caller.add_tool(PROJECT, search_tool() | {"tool_name": "tool_x1", "after_execution": "explode"})
    fixed = {"site": "{project_id}.example", "location": "{{agent_id}}"}  # rendered once, to `{…}`
    good = {"defaults": {"session_id": "{agent_turn_id}", "hl": "de"}, "fixed": fixed}
    await caller.add_tool(PROJECT, search_tool(args=good) | {"tool_name": "tool_x2"})
    done = await tools("list", "--project", PROJECT, "--db", "--json")
    found = [row["problems"] for row in map(json.loads, done.stdout.splitlines())]
    expected = [*(says for _, says in REFUSED_BY_EVERY_CALL), "parameters: must be an object"]
    expected.append("after_execution: is ignored")
    for problems, says in zip(found, expected, strict=False):
        assert len(problems) == 1, (says, problems)
        assert says in problems[0]
    assert found[-1] == []


@pytest.mark.parametrize("way", ["show", "list"])
@requirement("secrets.output")
async def test_a_pasted_key_is_masked_in_output(
    caller: Caller, tools: Tools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    pasted, plain, mounted = "jina_" + "0a" * 20, "0123456789abcdef0123", "a-tenants-value"
    (tmp_path / "key").write_text(mounted)
    monkeypatch.setenv("JINA_API_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("SOME_TOKEN", "another-value")
    options = {
        "jina": {"mode": "search", "auth_env": pasted, "params": {"locale": pasted}},
        "envs": {"api_key": plain, "x": pasted},
        "args": {"fixed": {"site": [mounted], "hl": "another-value"}},
    }
    row = search_tool() | {"tool_name": "a_tool", "description": f"Uses {pasted}.", "options": options}
    await caller.add_tool(PROJECT, row)
    arguments = ["show", "a_tool"] if way == "show" else ["list"]
    for flags in ([], ["--json"]):
        done = await tools(*arguments, "--project", PROJECT, "--db", *flags)
        assert done.exit_code == 0
        assert "[redacted]" in done.output or "a key where the name" in done.output
        assert not [text for text in (pasted[5:], plain, mounted, "another-value") if text in done.output]


@requirement("definition.apply")
async def test_an_unreachable_api_is_reported_without_credentials_or_traceback(tools: Tools) -> None:
    for url in ("http://me:word-of-mine@127.0.0.1:9", "no url", "http://me:word-of-mine@:x"):
        done = await tools("apply", SEARCH_FILE, "--project", PROJECT, "--api", url, "--yes")
        assert done.exit_code == 2
        assert "word-of-mine" not in done.output
        assert "Traceback" not in done.output
    assert (await tools("list", "--project", PROJECT)).exit_code == 2
    assert (await tools("apply", SEARCH_FILE, "--db")).exit_code == 2
    assert (await tools("apply", SEARCH_FILE, "--db", "--project", PROJECT, "--json")).exit_code == 2


@requirement("definition.apply")
async def test_the_fake_api_refuses_like_the_kernels(caller: Caller, api: str) -> None:
    async with httpx.AsyncClient(base_url=api) as client:
        path = f"/projects/{PROJECT}/tools"
        assert (await client.post(path)).status_code == 422
        reserved = {"file": ("t.yaml", b"name: fork_join")}
        refused = await client.post(path, files=reserved)
        assert (refused.status_code, refused.json()["detail"]["error_code"]) == (400, "bad_request")
        assert (await client.get("/projects/none/tools")).status_code == 404


@requirement("definition.apply")
async def test_a_write_to_an_unknown_project_is_refused(
    caller: Caller, stack: EmbeddedStack, database: str, api: str
) -> None:
    row = yaml.safe_load(SEARCH_TEXT)
    async with ToolRows.open(pool_of(stack.postgres.dsn(database))) as registry, ManagementApi.open(api) as client:
        for store in (registry, client):
            with pytest.raises(RegistryError, match="not_found"):
                await store.put("proj_gone", row)
            with pytest.raises(RegistryError, match="bad_request"):
                await store.put(PROJECT, {**row, "tool_name": "fork_join"})
    assert await caller.database.fetchval("select count(*) from resource.tools") == 0


@requirement("definition.apply")
async def test_an_unparsable_row_hides_no_other(caller: Caller, tools: Tools) -> None:
    await caller.set_up_project(
        PROJECT, "agent_1", [{**search_tool(), "tool_name": name} for name in ("deep", "huge", "numbers", "whole")]
    )
    odd = {
        "deep": "[" * 3_000 + "]" * 3_000,
        "huge": json.dumps({"a": "x" * 2_000_000}),
        "numbers": f"[{','.join(['1e131071'] * 10_000)}]",  # 1.3 GB as text, more than PostgreSQL can return
    }
    for name, parameters in odd.items():
        await caller.database.execute(
            "update resource.tools set parameters = $3::text::jsonb where project_id = $1 and tool_name = $2",
            PROJECT,
            name,
            parameters,
        )
    listed = await tools("list", "--project", PROJECT, "--db", "--json")
    assert listed.exit_code == 0, listed.output
    problems = {row["tool_name"]: row["problems"] for row in map(json.loads, listed.output.splitlines())}
    assert problems["deep"], listed.output[:1_000]
    assert problems["whole"] == []
    for name in ("huge", "numbers"):
        assert problems[name] == ["parameters: is too large; a definition may have at most 262,144 bytes"]
        shown = await tools("show", name, "--project", PROJECT, "--db")
        assert "too large to show" in shown.output
        assert len(shown.output) < 10_000
    assert (await tools("delete", *odd, "--project", PROJECT, "--db", "--yes")).exit_code == 0


@requirement("definition.apply")
async def test_the_grants_for_registration_are_enough_and_missing_ones_are_named(
    caller: Caller, stack: EmbeddedStack, database: str
) -> None:
    row, own = yaml.safe_load(SEARCH_TEXT), stack.postgres.dsn(database)
    await make_role(own, "reader_only")
    async with ToolRows.open(pool_of(dsn_of(stack, database, "reader_only"))) as registry:
        with pytest.raises(RegistryError, match="permission denied for table"):
            await registry.put(PROJECT, row)
    await make_role(own, "registrar_only", registration=True)
    async with ToolRows.open(pool_of(dsn_of(stack, database, "registrar_only"))) as registry:
        await registry.put(PROJECT, row)
        await registry.put(PROJECT, row)
        assert await registry.delete(PROJECT, row["tool_name"])


@requirement("definition.apply")
@pytest.mark.parametrize("db", [False, True], ids=["api", "db"])
async def test_an_unknown_project_is_reported_before_the_confirmation(api: str, tools: Tools, *, db: bool) -> None:
    way = ["--db"] if db else ["--api", api]
    done = await tools("apply", SEARCH_FILE, "--project", "proj_gone", *way, answer="y\n")
    assert done.exit_code == 1
    assert "Write" not in done.stderr
    assert "not_found" in done.stdout


@requirement("definition.apply")
async def test_a_tool_of_another_executor_is_listed_as_not_ours(caller: Caller, tools: Tools) -> None:
    subject = "cg.v1r4.{project_id}.{channel_id}.cmd.tool.e2b.run"
    await caller.add_tool(PROJECT, {"tool_name": "sandbox", "target_subject": subject, "options": {"e2b": {}}})
    shown = await tools("list", "--project", PROJECT, "--db")
    assert "not ours" in shown.stdout
    assert "unusable" not in shown.stdout


@requirement("definition.apply")
async def test_the_list_is_complete_in_a_narrow_terminal(
    caller: Caller, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    await caller.add_tool(PROJECT, {**search_tool(), "tool_name": "search_of_a_long_name", "options": ["none"]})
    monkeypatch.setattr(tools_registry, "output", partial(Console, width=50))
    shown = await tools("list", "--project", PROJECT, "--db")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.stdout.splitlines() if "│" in line]
    assert ["".join(column) for column in zip(*cells, strict=True)][:2] == ["search_of_a_long_name", "unusable"]
    assert "must be an object" in " ".join(row[3] for row in cells)
