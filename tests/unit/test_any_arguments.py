"""Whatever a model gives: a valid request with allowed names only, or a refusal that names every wrong argument."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from openapi_tool.jina.batch import batch_items, item_arguments
from openapi_tool.jina.egress import ALLOWED_HEADERS
from openapi_tool.jina.parameters import READER, REFUSED, SEARCH
from openapi_tool.jina.plan import plan_call
from openapi_tool.jina.request import UpstreamRequest, build_request
from openapi_tool.jina.stages import within
from openapi_tool.jina.targets import TargetRules, checked_target
from openapi_tool.protocol.errors import BadRequest, TargetRefused
from openapi_tool.tools.arguments import IDENTITY_ARGUMENTS, Arguments, OperatorEnvs, fold, prepare_arguments
from openapi_tool.tools.catalogue import CATALOGUE
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.session import SessionScope
from tests.promises import requirement
from tests.support import definition, identity, tool_call

SCOPE = SessionScope(b"k" * 32)
RULES = TargetRules(max_chars=16_000)
MOST = 10
MAY_SET = {
    mode: {entry.name for entry in table if entry.model and not entry.declared} | {"timeout", "respondTiming"}
    for mode, table in (("search", SEARCH), ("reader", READER))
}
HEADERS = {
    mode: {entry.header.lower() for entry in (*SEARCH, *READER) if entry.header and entry.name in names}
    | {"accept", "accept-encoding", "content-type", "user-agent"}
    for mode, names in MAY_SET.items()
}

known_names = sorted(
    {name for entry in (*SEARCH, *READER) for name in (entry.name, entry.header, *entry.aliases) if name}
    | {name for tool in CATALOGUE.values() for name in tool.schema()["properties"]}
)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)  # what jsonb can hold
names = st.one_of(
    st.sampled_from(known_names),
    st.sampled_from(sorted(REFUSED | IDENTITY_ARGUMENTS | {"__cg_control", "X-Forwarded-For", "session_id"})),
    texts.map(lambda text: text[:12] or "_"),
).flatmap(lambda name: st.sampled_from([name, name.upper(), name.replace("_", "-"), name.title()]))
words = st.one_of(
    st.sampled_from(["content", "no-content", "html", "vlm", "images", "de", "true", "false", "none", "all", "7", ""]),
    st.sampled_from(["a\r\nX-Injected: 1", "b\nHost: evil.example", "c\td", "ü\u2028", "x" * 2_001]),
    texts,
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 200_000), st.floats(allow_nan=False), words),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
subjects = st.sampled_from(["https://site.example/a?b=c#d", "plain words", "http://127.0.0.1/", "a\r\nb", "", "x"])
definitions = st.builds(
    lambda name, schema, method, session: definition(
        {"tool": name, "method": method},
        parameters=CATALOGUE[name].schema() if schema else {},
        args={"defaults": {"session_id": "{agent_turn_id}"}} if session else {},
    ),
    st.sampled_from(sorted(CATALOGUE)),
    st.booleans(),
    st.sampled_from(["GET", "POST"]),
    st.booleans(),
)


hopeful = st.sampled_from(
    [
        *(("engine", "browser"), ("X-Engine", "curl"), ("proxy", "de"), ("locale", "de"), ("provider", "bing")),
        *(("session_id", "s"), ("projectId", "p"), ("X-Forwarded-For", "1.2.3.4"), ("api_key", "k")),
        *(("target_selector", "a\r\nX-Injected: 1"), ("site", "ü"), ("max_tokens", 500), ("with_links", True)),
        *(("count", 3), ("format", "text"), ("location", "b\nHost: evil.example"), ("link_style", "discarded")),
    ]
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[ToolDefinition, dict[str, Any]]:
    """A definition and arguments, most of them with something to ask for and few others."""
    found = draw(definitions)
    arguments: dict[str, Any] = dict(draw(st.lists(hopeful, max_size=2)))
    if draw(st.integers(0, 2)) == 0:
        arguments |= draw(st.dictionaries(names, values, max_size=4))
    if draw(st.integers(0, 9)):
        single = "https://site.example/a?b=c#d" if draw(st.booleans()) else draw(subjects)
        key = found.tool.items or ("query" if found.mode == "search" else "url")
        arguments[key] = [single, draw(subjects)] if found.tool.items else single
    return found, arguments


def prepared(found: ToolDefinition, arguments: dict[str, Any]) -> Arguments:
    return prepare_arguments(
        found, tool_call(arguments), identity(), OperatorEnvs(), lambda _: SecretStr("the-key"), SCOPE
    )


def requests_of(found: ToolDefinition, arguments: dict[str, Any]) -> list[UpstreamRequest]:
    ready = prepared(found, arguments)
    items = batch_items(found, ready, MOST)
    each = [ready] if items is None else [item_arguments(found, ready, item) for item in items]
    requests = []
    for one in each:
        plan = within(plan_call(found, one), found.mode, 27)
        url = plan.parameters.get("url")
        if url is not None:
            checked_target(url, RULES)
        requests.append(build_request(found, plan))
    return requests


@requirement("arguments.any")
@settings(max_examples=400)
@given(call=calls())
def test_arguments_make_an_allowed_request_or_a_refusal(call: tuple[ToolDefinition, dict[str, Any]]) -> None:
    found, arguments = call
    try:
        requests = requests_of(found, arguments)
    except (BadRequest, TargetRefused) as refused:
        assert refused.message
        return
    assert requests
    for request in requests:
        assert (request.host, request.method) in {(found.host, "GET"), (found.host, "POST")}
        assert {name.lower() for name in request.headers} <= HEADERS[found.mode] <= ALLOWED_HEADERS
        assert all(value.isascii() and value.isprintable() for value in request.headers.values())
        assert re.fullmatch(r"/[!-~]*", request.target)
        assert keys(request) <= MAY_SET[found.mode]
        assert not {fold(name) for name in keys(request)} & (REFUSED | IDENTITY_ARGUMENTS)


def keys(request: UpstreamRequest) -> set[str]:
    """Names in a request's body and query."""
    body = json.loads(request.body or b"{}")
    nested = {f"markdown.{name}" for name in body.pop("markdown", {})}
    return {*body, *nested, *(name for name, _ in parse_qsl(urlsplit(request.target).query))}


@requirement("arguments.any")
@settings(max_examples=400)
@given(call=calls())
def test_a_refusal_names_everything_that_is_wrong(call: tuple[ToolDefinition, dict[str, Any]]) -> None:
    """Without what one refusal of a kind named, there is nothing more of that kind to refuse."""
    found, arguments = call
    for _ in range(4):  # first the schema speaks, then the batch, then the plan; required ones may come on top
        try:
            requests_of(found, arguments)
        except TargetRefused:
            return
        except BadRequest as refused:
            if found.tool.items and refused.message.startswith("url:"):
                return  # one item's failure, which the answer names by its item
            problems = refused.detail["problems"] if isinstance(refused.detail, dict) else [refused.message]
            named = {
                name
                for name in arguments
                if any(problem.startswith(f"{name}{end}") for problem in problems for end in ":[.")
            }
            if not named:
                assert all("required" in problem or "must be a list" in problem for problem in problems), problems
                return
            arguments = {name: value for name, value in arguments.items() if name not in named}
        else:
            return
    raise AssertionError(arguments)
