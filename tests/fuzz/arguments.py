"""Any definition and arguments: templates are rendered in one pass and only in definitions, never in a model's text."""

from __future__ import annotations

import re
from typing import Any

from pydantic import SecretStr

from openapi_tool.protocol.cards import ToolCall, read_tool_call
from openapi_tool.protocol.errors import ToolError
from openapi_tool.protocol.identity import CallIdentity
from openapi_tool.protocol.records import CardRecord, DefinitionRecord
from openapi_tool.tools.arguments import Arguments, CallOwner, OperatorEnvs, is_identity, prepare_arguments
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.definition import ToolDefinition, parse_definition
from openapi_tool.tools.placeholders import PLACEHOLDERS, placeholder_values, render
from openapi_tool.tools.result import failure
from openapi_tool.tools.scopes import SessionScope
from tests.fuzz.source import Source, assert_storable

_SCOPE = SessionScope(b"k" * 32)
_OPERATOR = OperatorEnvs(parameters=frozenset({"note"}))
_NAMES = ("query", "url", "count", "site", "session_id", "projectId", "api_key", "locale", "provider", "note", "urls")
_TEMPLATES = (
    *("{agent_id}", "{turn_epoch}", "a{project_id}b", "{step_id}{step_id}", "{{agent_id}}", "{trace_id}", "{}"),
    *("{context_box_id}", "{parent_step_id}", "{nobody}", "{agent_id", "agent_id}", "{agent_{step_id}id}", "plain"),
    *("{project_id.__class__}", "{0}", "%(agent_id)s", "${agent_id}", "{agent_id!r}", "{agent_id:>99}", "https://a.b/"),
)
_TEXTS = (*_NAMES, *_TEMPLATES)
_SCHEMA_WORDS = ("type", "string", "properties", "required", "enum", "$ref", "pattern", "items", "minimum", "const")
# An id's value may itself look like a template: it must not be rendered a second time.
_IDS = ("agent", "{project_id}", "{nobody}", "é", "x" * 200)


def check(data: bytes) -> None:
    """Prepare one call's arguments; raise AssertionError for wrong ones, or the exception of a defect."""
    source = Source(data, stored=True)
    identity = _identity(source)
    _check_render(source, identity)
    try:
        definition = parse_definition(_record(source))
        call = read_tool_call(_card(source), "call")
        owner = CallOwner(identity.project_id, identity.agent_id, placeholder_values(identity))
        arguments = prepare_arguments(definition, call, owner, _OPERATOR, lambda _: SecretStr("the-key"), _SCOPE)
    except ToolError as error:
        assert_storable(failure(error, 1).result)
        return
    _assert_prepared(arguments, definition, call)


def _identity(source: Source) -> CallIdentity:
    agent, step = source.pick(_IDS), source.pick((None, *_IDS))
    trace = source.pick((None, "0" * 31 + "1"))
    return CallIdentity("proj", "public", agent, "turn", source.below(3), "call", step, None, trace, None, None)


def _check_render(source: Source, identity: CallIdentity) -> None:
    """Compare the rendering of each text with an independent implementation."""
    values = placeholder_values(identity)
    assert tuple(values) == PLACEHOLDERS
    template = "".join(source.pick(_TEMPLATES) if source.byte() < 1 << 7 else source.text() for _ in range(3))
    names = re.findall(r"\{([^{}]*)\}", template)
    try:
        rendered = render(template, values, "here")
    except ToolError as error:
        assert any(not values.get(name) for name in names)
        assert "here" in error.message
        return
    assert all(values.get(name) for name in names)
    texts = re.split(r"\{[^{}]*\}", template)
    assert (
        rendered
        == "".join(text + (values[name] or "") for text, name in zip(texts, [*names, ""], strict=True) if name)
        + texts[-1]
    )


def _record(source: Source) -> DefinitionRecord:
    tool = CATALOGUE[source.pick(sorted(CATALOGUE))]
    parameters: Any = source.pick((None, tool.schema(), {}))
    if parameters is None:
        parameters = source.object((*_SCHEMA_WORDS, *_NAMES))
    options = {
        "jina": {"tool": tool.name, "mode": tool.operation.name},
        "args": {"defaults": _named(source), "fixed": _named(source)},
        "envs": source.pick(({}, {"api_key": "JINA_API_KEY"}, {"note": "JINA_API_KEY"})),
    }
    return DefinitionRecord("a_tool", "suspend", parameters, options)


def _named(source: Source) -> dict[str, Any]:
    return {source.pick(_NAMES): source.value(_TEXTS) for _ in range(source.below(4))}


def _card(source: Source) -> CardRecord:
    applied = {
        "tool_args_defaults_applied": [source.pick(_NAMES) for _ in range(source.below(3))],
        "tool_args_fixed_applied": [source.pick(_NAMES) for _ in range(source.below(2))],
    }
    arguments = _named(source) | source.object(_TEXTS) if source.below(8) else source.value(_TEXTS)
    content = {"__type__": "ToolCallContent", "tool_name": "a_tool", "arguments": arguments}
    return CardRecord("card", "call", content, {"type": "tool.call", **applied})


def _assert_prepared(arguments: Arguments, definition: ToolDefinition, call: ToolCall) -> None:
    own = {*definition.fixed, *definition.envs, *call.fixed_applied, *call.defaults_applied}
    for name in arguments.by_model:
        assert arguments.values[name] is call.arguments[name], name
        assert name not in own
    assert not any(is_identity(name) for name in arguments.values)
    for name in arguments.values.keys() - arguments.by_model:
        assert name in own or name in definition.defaults
    assert not arguments.values.keys() & definition.envs.keys() - definition.fixed.keys()
    assert re.fullmatch("[0-9a-f]{64}", arguments.session)
