"""Definitions, templates and the catalogue of built-in tools; disabled tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from openapi_tool.jina.endpoints import ENDPOINTS
from openapi_tool.options.budgets import BUDGETS
from openapi_tool.protocol.errors import BadRequest, ToolError, ToolMisconfigured, ToolNotAvailable
from openapi_tool.protocol.jsontext import JsonObject, JsonValue
from openapi_tool.protocol.records import DefinitionRecord
from openapi_tool.quotas.options import KeyLimits
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.arguments import Arguments, ArgumentSources, OperatorEnvs
from openapi_tool.tools.catalogue import CATALOGUE, BuiltInTool, DuplicateTool, catalogue
from openapi_tool.tools.declaration import (
    Args,
    LegacyUpstream,
    Options,
    Upstream,
    file_problems,
    suspend_timeout,
)
from openapi_tool.tools.declaration_section import Section
from openapi_tool.tools.definition_parser import parse_definition, parse_for_linter
from openapi_tool.tools.operations import OPERATIONS, READER, Operation
from openapi_tool.tools.output import Item, ToolOutput, Usage
from openapi_tool.tools.placeholders import PLACEHOLDERS, render
from openapi_tool.tools.result import RenderedResult, failure, success
from openapi_tool.tools.schema import schema_problems
from openapi_tool.tools.secret_variables import MissingVariable, Secret, Secrets
from openapi_tool.tools.session_identities import SessionIdentities
from openapi_tool.tools.switches import ALL, Switch, Switches, SwitchRecordInvalid
from openapi_tool.tools.wording import counted
from tests.requirements import requirement
from tests.support import TRACE_ID, definition, identity, tool_call

ENVIRONMENT = {"JINA_API_KEY": "key-one", "SEARCH_API_KEY": "key-two", "EXTRA": "extra-value", "PG_DSN": "dsn"}
SECRETS = Secrets(ENVIRONMENT, {"JINA_API_KEY", "SEARCH_API_KEY", "EXTRA", "UNSET"})
SESSIONS = SessionIdentities(b"a key of sixteen bytes or more")
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["query"],
    "properties": {"query": {"type": "string"}, "count": {"type": "integer"}},
}


def nested(depth: int) -> Any:
    """Return a text nested in this number of lists."""
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def prepare(
    arguments: dict[str, Any],
    *,
    applied: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    operator: OperatorEnvs = OperatorEnvs(),  # noqa: B008 - frozen
    caller: Any = None,
    **options: Any,
) -> Arguments:
    parameters = options.pop("parameters", None)
    return ArgumentSources(operator, SECRETS, SESSIONS).resolve(
        definition(parameters=parameters, **options), tool_call(arguments, *applied), caller or identity()
    )


@requirement("arguments.prepared")
def test_a_default_fills_only_what_the_model_did_not_give() -> None:
    options: dict[str, Any] = {"args": {"defaults": {"count": 3, "hl": "de"}}}
    assert prepare({"query": "x", "count": 5}, **options).values == {"query": "x", "count": 5, "hl": "de"}


@requirement("arguments.prepared")
def test_an_explicit_null_counts_as_given() -> None:
    assert prepare({"query": "x", "count": None}, args={"defaults": {"count": 3}}).values["count"] is None


@requirement("arguments.prepared")
def test_a_fixed_argument_overwrites_and_is_never_validated_as_the_models() -> None:
    arguments = prepare({"query": "x", "site": 7}, parameters=SCHEMA, args={"fixed": {"site": "example.org"}})
    assert arguments.values == {"query": "x", "site": "example.org"}
    assert arguments.by_model == {"query"}


@requirement("arguments.prepared")
def test_envs_names_given_by_the_model_are_dropped_before_validation() -> None:
    arguments = prepare({"query": "x", "api_key": "stolen"}, parameters=SCHEMA, envs={"api_key": "SEARCH_API_KEY"})
    assert arguments.values == {"query": "x"}
    assert arguments.api_key.get_secret_value() == "key-two"


@requirement("arguments.prepared")
def test_arguments_added_by_the_worker_pass_a_closed_schema() -> None:
    arguments = prepare(
        {"query": "x", "session_id": "turn", "project_id": "proj", "hl": "de"},
        applied=(("session_id", "hl"), ("project_id",)),
        parameters=SCHEMA,
        args={"defaults": {"session_id": "{agent_turn_id}", "hl": "de"}, "fixed": {"project_id": "{project_id}"}},
    )
    assert arguments.values == {"query": "x", "hl": "de"}


@requirement("arguments.prepared")
def test_required_arguments_hidden_from_the_model_are_not_required() -> None:
    schema = {**SCHEMA, "required": ["query", "count"]}
    assert prepare({"query": "x"}, parameters=schema, args={"fixed": {"count": 2}}).values == {"query": "x", "count": 2}


@requirement("arguments.checked")
def test_all_problems_are_named_in_one_answer() -> None:
    with pytest.raises(BadRequest) as refused:
        prepare({"count": "many", "colour": "red"}, parameters=SCHEMA)
    assert all(word in refused.value.message for word in ("query", "count", "colour"))


@requirement("arguments.checked")
def test_default_of_a_declared_argument_is_validated() -> None:
    """The model cannot correct a wrong default: it may not even know the argument."""
    with pytest.raises(ToolMisconfigured, match=r"options\.args\.defaults\.count: "):
        prepare({"query": "x"}, parameters=SCHEMA, args={"defaults": {"count": "many"}})
    with pytest.raises(BadRequest, match="colour"):
        prepare({"query": "x", "colour": "red"}, parameters=SCHEMA, args={"defaults": {"count": 3}})


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "nope"}, {"$ref": "https://example.org/schema"}, {"properties": 7}, {"required": [["query"]]}),
        *({"const": 10**400}, {"const": nested(300)}, {"properties": {"query": nested(300)}}),
    ],
)
@requirement("arguments.checked")
def test_unusable_schema_is_a_misconfiguration_and_no_reference_is_fetched(schema: dict[str, Any]) -> None:
    with pytest.raises(ToolMisconfigured):
        prepare({"query": "x"}, parameters=schema, args={"defaults": {"count": 1}, "fixed": {"site": "a.example"}})


@requirement("arguments.prepared")
def test_identity_arguments_are_removed_in_every_spelling() -> None:
    names = [
        "session_id",
        "sessionId",
        "SESSION-ID",
        "project_id",
        "agentId",
        "turn_epoch",
        "trace_id",
        "context_box_id",
    ]
    assert prepare({"query": "x", **dict.fromkeys(names, "x")}).values == {"query": "x"}


@requirement("options.envs")
def test_the_key_is_the_definitions_own_then_auth_env() -> None:
    jina = {"mode": "search", "auth_env": "JINA_API_KEY"}
    assert prepare({}, jina=jina).api_key.get_secret_value() == "key-one"
    assert prepare({}, jina=jina, envs={"api_key": "SEARCH_API_KEY"}).api_key.get_secret_value() == "key-two"
    for passed_over in ("UNSET", "HOME"):
        prepared = prepare({}, jina=jina, envs={"api_key": passed_over})
        assert prepared.api_key.get_secret_value() == "key-one"
        assert passed_over in (prepared.key_fallback_reason or "")
    assert prepare({}, jina=jina, envs={"api_key": "SEARCH_API_KEY"}).key_fallback_reason is None


@requirement("options.envs")
@pytest.mark.parametrize("name", ["PG_DSN", "OPENAPI_TOOL__SESSION__KEY", "jina_" + "0a" * 20])
def test_executors_own_variable_or_pasted_key_is_refused_without_fallback(name: str) -> None:
    with pytest.raises(ToolMisconfigured, match=r"own settings|looks like a key"):
        prepare({}, jina={"mode": "search", "auth_env": "JINA_API_KEY"}, envs={"api_key": name})


@requirement("tool.definition")
@pytest.mark.parametrize(
    ("options", "path", "timeout_s"),
    [
        ({"jina": {"mode": " SEARCH ", "path": "search"}}, "/search", None),
        ({"jina": {"mode": "search"}, "timeout": 7}, "/", 7),
        ({"jina": {"mode": "search"}, "timeout": 7, "timeout_s": 8}, "/", 8),
        ({"jina": {"mode": "search", "timeout": 6}, "timeout_s": 8}, "/", 6),
    ],
)
def test_definitions_are_read_as_the_kernels_own_executor_reads_them(
    options: dict[str, Any], path: str, timeout_s: float | None
) -> None:
    definition = parse_definition(DefinitionRecord("t", None, {}, options))
    assert (definition.path, definition.timeout_s) == (path, timeout_s)


@requirement("options.envs")
def test_a_missing_variable_is_named() -> None:
    with pytest.raises(MissingVariable, match="UNSET"):
        prepare({}, envs={"other": "UNSET"}, operator=OperatorEnvs(parameters=frozenset({"other"})))
    with pytest.raises(MissingVariable, match="UNSET"):
        prepare({}, jina={"mode": "search", "auth_env": "UNSET"}, envs={"api_key": "UNSET"})


@requirement("options.envs")
def test_a_variable_that_is_not_allowed_is_refused_with_the_setting_to_extend() -> None:
    cases: list[dict[str, Any]] = [
        {"jina": {"mode": "search", "auth_env": "HOME"}},
        {"jina": {"mode": "search", "auth_env": "HOME"}, "envs": {"api_key": "PATH"}},
    ]
    for options in cases:
        with pytest.raises(ToolMisconfigured, match=r"HOME.*secrets\.allowed_env"):
            prepare({}, **options)


@requirement("arguments.prepared")
def test_envs_of_the_settings_override_the_definition() -> None:
    operator = OperatorEnvs({"api_key": "SEARCH_API_KEY", "x": "EXTRA"})
    arguments = prepare({}, envs={"api_key": "JINA_API_KEY"}, operator=operator)
    assert arguments.api_key.get_secret_value() == "key-two"
    assert {name: value.get_secret_value() for name, value in arguments.secrets.items()} == {"x": "extra-value"}


def test_secrets_are_masked_wherever_arguments_are_shown() -> None:
    operator = OperatorEnvs(parameters=frozenset({"x"}))
    shown = repr(prepare({}, envs={"api_key": "SEARCH_API_KEY", "x": "EXTRA"}, operator=operator))
    assert "key-two" not in shown
    assert "extra-value" not in shown


@pytest.mark.parametrize("depth", [21, 300, 900])
@requirement("arguments.prepared")
def test_too_deeply_nested_template_is_a_misconfiguration(depth: int) -> None:
    assert prepare({}, args={"fixed": {"q": nested(20)}}).values["q"] == nested(20)
    for place in ("defaults", "fixed"):
        with pytest.raises(ToolMisconfigured) as refused:
            prepare({}, args={place: {"q": nested(depth)}})
        assert "nested deeper than" in refused.value.message
        assert f"options.args.{place}.q" in refused.value.message


@requirement("arguments.prepared")
def test_every_placeholder_is_rendered_at_any_depth() -> None:
    values = {name: f"<{name}>" for name in PLACEHOLDERS}
    template: Any = {"a": ["{project_id}/{agent_id}", {"b": "{turn_epoch}"}], "c": 7, "d": "none"}
    assert render(template, values, "x") == {
        "a": ["<project_id>/<agent_id>", {"b": "<turn_epoch>"}],
        "c": 7,
        "d": "none",
    }


@requirement("arguments.prepared")
def test_a_substituted_value_is_never_read_as_a_template() -> None:
    caller = identity(agent_id="{project_id}")
    assert prepare({}, caller=caller, args={"fixed": {"q": "{agent_id}"}}).values["q"] == "{project_id}"


@requirement("arguments.prepared")
def test_the_models_values_are_never_rendered() -> None:
    assert prepare({"query": "{project_id} {nonsense} {}"}).values["query"] == "{project_id} {nonsense} {}"


@pytest.mark.parametrize("text", ["{nonsense}", "{}", "{ project_id }", "a {project_id} {Project_Id}"])
@requirement("arguments.prepared")
def test_an_unknown_placeholder_names_itself_and_its_place(text: str) -> None:
    with pytest.raises(ToolMisconfigured, match=r"options\.args\.fixed\.q\.deep\[0\]"):
        prepare({}, args={"fixed": {"q": {"deep": [text]}}})


@requirement("arguments.prepared")
def test_a_known_placeholder_without_a_value_is_a_clear_failure() -> None:
    for args in ({"defaults": {"q": "{context_box_id}"}}, {"fixed": {"q": "{parent_step_id}"}}):
        with pytest.raises(ToolMisconfigured, match="does not have"):
            prepare({}, args=args)


@given(st.text(), st.text())
@requirement("arguments.prepared")
def test_rendering_is_one_pass_for_any_ids(project_id: str, agent_id: str) -> None:
    values = dict.fromkeys(PLACEHOLDERS, "-") | {"project_id": project_id or "p", "agent_id": agent_id or "a"}
    assert render("{project_id}|{agent_id}", values, "x") == f"{project_id or 'p'}|{agent_id or 'a'}"


@requirement("arguments.prepared")
def test_placeholders_that_the_worker_left_in_a_default_are_rendered_again() -> None:
    direct = prepare({}, args={"defaults": {"q": {"deep": "{trace_id}"}}})
    left = prepare(
        {"q": {"deep": "{trace_id}"}}, applied=(("q",), ()), args={"defaults": {"q": {"deep": "{trace_id}"}}}
    )
    assert left.values == direct.values == {"q": {"deep": TRACE_ID}}
    assert left.by_model == frozenset()


@requirement("arguments.prepared")
def test_a_fixed_value_is_rendered_afresh_where_it_can_be() -> None:
    arguments = prepare({"q": "stale"}, applied=((), ("q",)), args={"fixed": {"q": "{agent_id}"}})
    assert arguments.values == {"q": "agent"}


@requirement("arguments.prepared")
def test_a_fixed_value_keeps_the_cards_where_a_placeholder_has_none_here() -> None:
    options: dict[str, Any] = {"args": {"fixed": {"q": "box {context_box_id}"}}}
    assert prepare({"q": "box b1"}, applied=((), ("q",)), **options).values == {"q": "box b1"}
    with pytest.raises(ToolMisconfigured):
        prepare({"q": "forged by the model"}, **options)
    with pytest.raises(ToolMisconfigured):
        prepare({"q": "box {context_box_id}"}, applied=((), ("q",)), **options)


@requirement("arguments.prepared")
def test_fixed_argument_that_the_definition_no_longer_has_is_removed() -> None:
    assert prepare({"query": "x", "old": 1}, applied=((), ("old",)), parameters=SCHEMA).values == {"query": "x"}


@pytest.mark.parametrize(
    ("jina", "expected"),
    [
        ({"mode": "search"}, ("s.jina.ai", "POST", "/")),
        ({"mode": "reader"}, ("r.jina.ai", "POST", "/")),
        ({"mode": "read"}, ("r.jina.ai", "POST", "/")),
        ({"mode": "crawl"}, ("r.jina.ai", "POST", "/")),
        ({"base_url": "https://s.jina.ai"}, ("s.jina.ai", "POST", "/")),
        ({"base_url": "https://r.jina.ai:443/"}, ("r.jina.ai", "POST", "/")),
        ({"mode": "search", "path": "/search", "method": "get"}, ("s.jina.ai", "GET", "/search")),
        ({"mode": "search", "path": "/search/"}, ("s.jina.ai", "POST", "/search")),
        ({"mode": "reader", "endpoint_template": "https://r.jina.ai/{url}"}, ("r.jina.ai", "GET", "/{url}")),
        ({"mode": "reader", "path": "/{url}", "method": "POST"}, ("r.jina.ai", "POST", "/{url}")),
    ],
)
@requirement("options.jina")
def test_each_form_of_a_definition_is_understood(jina: dict[str, Any], expected: tuple[str, str, str]) -> None:
    parsed = definition(jina)
    assert (parsed.operation.host, parsed.method, parsed.path) == expected


@requirement("options.jina")
def test_jina_is_read_before_its_legacy_form_unless_it_is_empty() -> None:
    legacy: JsonObject = {"mode": "reader", "auth": {"env": "OLD_KEY"}}
    cases: list[tuple[JsonObject, tuple[str, str]]] = [
        ({"mode": "search"}, ("search", "JINA_API_KEY")),
        ({}, ("reader", "OLD_KEY")),
    ]
    for jina, expected in cases:
        parsed = parse_definition(DefinitionRecord("t", None, {}, {"jina": jina, "openapi": legacy}))
        assert (parsed.operation.name, parsed.auth_env) == expected


@requirement("options.jina")
def test_the_legacy_section_is_understood() -> None:
    options: JsonObject = {
        "openapi": {"base_url": "https://r.jina.ai", "method": "GET", "auth": {"env": "OLD_KEY"}, "timeout": 9}
    }
    parsed = parse_definition(DefinitionRecord("t", None, {}, options))
    assert (parsed.operation, parsed.method, parsed.auth_env, parsed.timeout_s) == (
        READER,
        "GET",
        "OLD_KEY",
        9.0,
    )


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, "options.jina"),
        (None, "options.jina"),
        ([], "options"),
        ({"jina": "search"}, "options.jina"),
        ({"jina": {"path": "/search"}}, "mode"),
        ({"jina": {"mode": "delete"}}, "mode"),
        ({"jina": {"mode": "search", "base_url": "https://r.jina.ai"}}, "mode"),
        ({"jina": {"mode": "search", "method": "PUT"}}, "method"),
        ({"jina": {"mode": "search", "path": "/../x"}}, "path"),
        ({"jina": {"mode": "search", "endpoint_template": "https://s.jina.ai/{url}"}}, "endpoint_template"),
        ({"jina": {"mode": "reader", "endpoint_template": "https://evil.example/{url}"}}, "endpoint_template"),
        ({"jina": {"mode": "search", "tool": "jina.read"}}, "tool"),
        ({"jina": {"mode": "search"}, "envs": {"a": 1}}, "options.envs.a"),
        ({"jina": {"mode": "search"}, "result_format": "xml"}, "result_format"),
        *(({"jina": {"mode": "search"}, "max_result_tokens": wrong}, "at least 500") for wrong in (500.0, 1e300, True)),
        *(({"jina": {"mode": "search"}, "budget": {"session_tokens": wrong}}, "at least 0") for wrong in (5.0, 1e300)),
        *(
            ({"jina": {"base_url": url}}, "base_url")
            for url in (
                "http://s.jina.ai",
                "https://s.jina.ai:8443",
                "https://user:pw@s.jina.ai",
                "https://s.jina.ai.evil.example",
                "https://s.jina.ai./",
                "https://S.JINA.AI",
                "https://s.jina.ai/search",
                "https://s.jina.ai?x=1",
                "https://s.jina.ai\n",
                "//s.jina.ai",
                "s.jina.ai",
                7,
            )
        ),
    ],
)
@requirement("options.jina", "egress.hosts")
def test_unusable_definition_names_the_place(options: Any, names: str) -> None:
    with pytest.raises(ToolMisconfigured) as refused:
        parse_definition(DefinitionRecord("t", "suspend", {}, options))
    assert names in refused.value.message


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_an_unset_option_of_an_old_row_has_its_default(value: JsonValue) -> None:
    options: JsonObject = {"jina": {"mode": "search", "method": value, "auth_env": value}, "result_format": value}
    parsed = parse_definition(DefinitionRecord("t", None, {}, options))
    assert (parsed.method, parsed.auth_env, parsed.result_format) == ("POST", "JINA_API_KEY", "text")


def test_many_wrong_budgets_are_one_problem() -> None:
    options: JsonObject = {"jina": {"mode": "search"}, "budget": {f"session_token_{n}": 1 for n in range(1_900)}}
    with pytest.raises(ToolMisconfigured) as refused:
        parse_definition(DefinitionRecord("t", None, {}, options))
    assert refused.value.message.count("options.budget.") == 1


@pytest.mark.parametrize("value", [None, 0, -1, True, "60", float("inf"), []])
def test_a_suspend_timeout_that_is_no_positive_number_is_as_none(value: object) -> None:
    assert suspend_timeout({"suspend_timeout_seconds": value}) is None
    assert suspend_timeout({"suspend_timeout_seconds": 60}) == 60.0


@requirement("options.result_format")
def test_a_text_result_is_the_content_with_the_rest_in_metadata() -> None:
    fields = success(ToolOutput((Item("hello"),), {"results": []}, Usage(7, 1)), RenderedResult("hello"), "text", 12)
    assert (fields.status, fields.result, fields.error) == ("success", "hello", None)
    assert fields.tool_output == {
        "state": {"results": []},
        "usage": {"tokens": 7, "requests": 1},
        "truncated": False,
        "artifact_ref": None,
        "next_cursor": None,
        "cached": False,
        "latency_ms": 12,
        "retries": 0,
    }


@requirement("options.result_format")
def test_an_object_result_holds_everything() -> None:
    fields = success(ToolOutput((Item("hello"),), {"a": 1}, Usage(7, 1)), RenderedResult("hello"), "object", 12)
    assert fields.tool_output == {"retries": 0}
    assert isinstance(fields.result, dict)
    assert fields.result.keys() == {
        *("content", "state", "usage", "truncated", "artifact_ref", "next_cursor", "cached", "latency_ms")
    }


@requirement("answer.errors")
def test_a_failure_says_the_same_in_error_and_result() -> None:
    fields = failure(BadRequest("Correct x.", detail={"problems": ["x"], "kind": "y"}, http_status=400), 5)
    assert fields.status == "failed"
    assert fields.error == {
        "code": "bad_request",
        "message": "Correct x.",
        "source": "tool",
        "retryable": False,
        "detail": {"kind": "y"},
        "http_status": 400,
    }
    assert isinstance(fields.result, dict)
    assert fields.result["error_code"] == "bad_request"
    assert fields.result["error_message"] == "Correct x."
    assert fields.result["error_detail"] == {"problems": ["x"], "kind": "y"}
    assert "detail" not in BadRequest("Correct x.", detail={"problems": ["x"]}).as_error()


def _subclasses(kind: type[ToolError]) -> list[type[ToolError]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in _subclasses(child))]


@requirement("answer.errors")
def test_every_tool_error_makes_an_error_that_readers_accept() -> None:
    for kind in _subclasses(ToolError):
        fields = failure(kind("What happened; what to do."), 1)
        assert fields.status in ("failed", "timeout")
        assert fields.error is not None
        assert fields.error["code"]
        assert fields.error["message"]


def test_secrets_return_only_allowed_variables() -> None:
    assert SECRETS.values() == {"EXTRA": "extra-value", "JINA_API_KEY": "key-one", "SEARCH_API_KEY": "key-two"}
    assert SECRETS.missing() == ["UNSET"]
    assert SECRETS("EXTRA") == Secret("extra-value")


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 items are left"), (1, "1 item is left"), (2_000, "2,000 items are left")]
)
@requirement("arguments.checked")
def test_counted_uses_the_singular_for_one(number: int, expected: str) -> None:
    assert counted(number, "item", "left") == expected
    assert counted(number, "item") == expected.partition(" is")[0].partition(" are")[0]
    assert schema_problems({"properties": {"a": {"minLength": number + 1}}}, {"a": ""}) == (
        [f"a: must be a text of at least {counted(number + 1, 'character')}"]
    )


TOOLS = [pytest.param(tool, id=name) for name, tool in CATALOGUE.items()]
EXECUTOR_ARGUMENTS = {
    "with_content",
    "recency",
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
    schema: Any = tool.schema()
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
    changed: Any = tool.schema()
    before = tool.schema()
    changed["properties"].clear()
    assert tool.schema() == before


@requirement("catalogue")
@pytest.mark.parametrize("tool", TOOLS)
def test_offered_arguments_are_those_that_a_model_may_set(tool: BuiltInTool) -> None:
    endpoint, offered = ENDPOINTS[tool.operation.name], set()
    schema: Any = tool.schema()
    for name in schema["properties"].keys() - EXECUTOR_ARGUMENTS:
        parameter = endpoint.find(name)
        assert parameter is not None, name
        assert parameter.model, name
        offered.add(parameter.name)
    single_item_parameters = set() if tool.list_argument is None else {"q", "url", "pdf_page"}
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
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_operation_has_settings_for_its_limits(operation: Operation) -> None:
    values: dict[str, Any] = {"requests_per_minute": 1, "tokens_per_minute": operation.min_tokens, "concurrent": 1}
    KeyLimits(**{f"{operation.limits}_{name}": value for name, value in values.items()})
    below: dict[str, Any] = {f"{operation.limits}_tokens_per_minute": operation.min_tokens - 1}
    with pytest.raises(ValidationError, match="greater than or equal"):
        KeyLimits(**below)


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
CATALOGUE_SESSIONS = SessionIdentities(KEY)
CATALOGUE_SECRETS = Secrets({"JINA_API_KEY": "the-key"}, {"JINA_API_KEY"})

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
    assert (CATALOGUE_SESSIONS.identity(*one) == CATALOGUE_SESSIONS.identity(*other)) == same


@given(st.text(max_size=10), st.text(max_size=10), st.text(max_size=10))
@requirement("session.scoped")
def test_separator_in_an_id_does_not_make_two_owners_equal(project: str, agent: str, alias: str) -> None:
    for separator in ("", "/", ":", '","', "\x00"):
        shifted = (project + separator + agent, alias, "")
        assert (
            CATALOGUE_SESSIONS.identity(project, agent, alias) != CATALOGUE_SESSIONS.identity(*shifted)
            or (project, agent, alias) == shifted
        )


@given(owners)
@requirement("session.scoped")
def test_replicas_with_the_same_key_agree_and_others_do_not(owner: tuple[Any, ...]) -> None:
    assert SessionIdentities(KEY).identity(*owner) == CATALOGUE_SESSIONS.identity(*owner)
    assert SessionIdentities(KEY[::-1]).identity(*owner) != CATALOGUE_SESSIONS.identity(*owner)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        SessionIdentities(b"short")


def session_of(arguments: dict[str, Any], **options: Any) -> str:
    return (
        ArgumentSources(OperatorEnvs(), CATALOGUE_SECRETS, CATALOGUE_SESSIONS)
        .resolve(definition(**options), tool_call(arguments), identity())
        .session_identity
    )


@requirement("session.scoped")
def test_the_alias_comes_from_fixed_then_arguments_then_defaults() -> None:
    aliases = ("model", "default", "fixed", None)
    expected = {alias: CATALOGUE_SESSIONS.identity("proj", "agent", alias) for alias in aliases}
    assert session_of({}) == expected[None]
    assert session_of({"sessionId": "model"}) == expected["model"]
    assert session_of({}, args={"defaults": {"session_id": "default"}}) == expected["default"]
    assert session_of({"session_id": "model"}, args={"defaults": {"session_id": "default"}}) == expected["model"]
    assert session_of({"sessionId": "model"}, args={"fixed": {"session_id": "fixed"}}) == expected["fixed"]
    assert session_of({"session_id": None}, args={"defaults": {"session_id": "default"}}) == expected[None]


def switch(project: str = "p", tool: str = "t", reason: str = "Too dear.") -> Switch:
    return Switch(project, tool, reason, "an operator", "2030-01-01T00:00:00+00:00")


@requirement("switches")
@pytest.mark.parametrize(
    ("project", "tool", "refused"),
    [
        ("p", "t", {("p", "t")}),
        ("p", ALL, {("p", "t"), ("p", "u")}),
        (ALL, "t", {("p", "t"), ("q", "t")}),
        (ALL, ALL, {("p", "t"), ("p", "u"), ("q", "t"), ("q", "u")}),
    ],
)
def test_a_switch_disables_just_its_scope(project: str, tool: str, refused: set[tuple[str, str]]) -> None:
    switches = Switches([switch(project, tool)])
    found = set()
    for scope in (("p", "t"), ("p", "u"), ("q", "t"), ("q", "u")):
        try:
            switches.check(*scope)
        except ToolNotAvailable as refusal:
            assert "Too dear." in refusal.message
            found.add(scope)
    assert found == refused


@requirement("switches")
def test_a_set_is_stored_and_read_back() -> None:
    switches = (
        Switches([switch(), switch(ALL, "u")]).with_disabled(switch(reason="Another.")).with_enabled(switch(ALL, "u"))
    )
    again = Switches.decode(switches.encode())
    assert again.all == switches.all == [switch(reason="Another.")]
    assert again.enablings == (switch(ALL, "u"),)
    assert switches.with_enabled(switch("q")) is switches


@requirement("switches")
@pytest.mark.parametrize(
    "record", [b"", b"null", b"[]", b"{}", b'{"disabled": [3], "enabled": []}', b"\xff", b"[" * 9_000]
)
def test_invalid_record_of_switches_is_refused(record: bytes) -> None:
    with pytest.raises(SwitchRecordInvalid, match="it is not a record of disabled tools"):
        Switches.decode(record)


@requirement("switches")
def test_only_the_last_enablings_are_stored() -> None:
    switches = Switches()
    for number in range(50):
        switches = switches.with_disabled(switch(str(number))).with_enabled(switch(str(number)))
    assert [each.project_id for each in switches.enablings] == [str(number) for number in range(30, 50)]


_VALUES = st.one_of(
    st.sampled_from([None, False, True, 0, 1, 0.5, -1, 500, 10**13, "", "x", "search", "GET", "/{url}", "jina.read"]),
    st.sampled_from(["https://s.jina.ai", [], [1], {}, {"a": 1}, {"a": "b"}, {"a": ""}, {"env": "KEY"}, {"env": 5}]),
)


def _sections(section: type[Section]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from([*section.model_fields, "unknown"]), _VALUES, max_size=5)


@requirement("definition.bounds")
@given(
    options=st.builds(
        lambda own, parts: own | parts,
        _sections(Options),
        st.fixed_dictionaries(
            {},
            optional={
                "jina": _sections(Upstream),
                "openapi": _sections(LegacyUpstream),
                "args": _sections(Args),
                "budget": st.dictionaries(st.sampled_from([*BUDGETS, "unknown"]), _VALUES, max_size=3),
            },
        ),
    )
)
def test_every_row_gives_a_definition_or_its_problems(options: dict[str, Any]) -> None:
    """A wrong value may uncover others, such as `openapi` when nothing of `jina` is left."""
    definition, problems = parse_for_linter(DefinitionRecord("tool", "suspend", {}, options))
    assert definition is not None or problems


@requirement("definition.bounds")
@pytest.mark.parametrize(
    "options",
    [
        {"unknown": 1, "jina": {"mode": "search", "unknown": {}}, "args": {"unknown": 2}},
        {"jina": {"mode": "Search ", "method": "", "path": 0, "auth_env": False}, "result_format": []},
        {"jina": {"mode": "search", "accept": 5, "timeout_s": "x"}, "ui_allowed": 5, "suspend_timeout_seconds": 9_999},
        {"jina": {"mode": "search"}, "openapi": {"mode": 5, "headers": 6}, "envs": None, "args": None, "budget": None},
        {"jina": {"endpoint_template": "/{url}", "path": 7, "mode": "reader"}},
        {"jina": None, "openapi": {"base_url": "https://s.jina.ai", "auth": "JINA_API_KEY"}},
    ],
)
def test_a_row_may_hold_what_a_file_may_not(options: JsonObject) -> None:
    assert parse_definition(DefinitionRecord("tool", "whatever", None, options)).built_in.name in CATALOGUE
    document: JsonObject = {
        "tool_name": "tool",
        "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search",
        "after_execution": "suspend",
        "options": options,
    }
    assert file_problems(document) != []
