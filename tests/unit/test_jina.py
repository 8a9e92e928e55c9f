from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from openapi_tool.jina.content import page_output, search_output
from openapi_tool.jina.egress import ALLOWED_HEADERS
from openapi_tool.jina.plan import plan_call
from openapi_tool.jina.request import UpstreamRequest, build_request
from openapi_tool.local.recordings import load_recordings, read_question
from openapi_tool.protocol.errors import BadRequest, ToolError, ToolMisconfigured, UpstreamRejected, UpstreamUnavailable
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.result import FRAME_CLOSE, FRAME_OPEN
from tests.promises import requirement
from tests.support import definition

KEY = SecretStr("the-key")
READER = {"mode": "reader"}


def arguments(
    values: dict[str, Any], *, operator: tuple[str, ...] = (), secrets: dict[str, str] | None = None
) -> Arguments:
    hidden = {name: SecretStr(value) for name, value in (secrets or {}).items()}
    return Arguments(values, frozenset(values) - frozenset(operator), hidden, KEY, session="")


def request(values: dict[str, Any], jina: dict[str, Any] | None = None, **more: Any) -> UpstreamRequest:
    parameters = more.pop("parameters", None)
    tool = definition(jina or {"mode": "search"}, parameters=parameters)
    return build_request(tool, plan_call(tool, arguments(values, **more)))


def body(sent: UpstreamRequest) -> Any:
    return json.loads(sent.body or b"null")


@requirement("upstream.request")
def test_a_search_is_a_post_of_json_that_asks_for_json_only() -> None:
    sent = request({"query": "a & b", "count": 3})
    assert (sent.method, sent.host, sent.target) == ("POST", "s.jina.ai", "/")
    assert sent.headers["Accept"] == "application/json"
    assert sent.headers["Content-Type"] == "application/json"
    assert body(sent) == {"q": "a & b", "num": 3, "respondWith": "no-content"}


@requirement("upstream.request")
def test_a_search_with_content_leaves_the_default_unsaid() -> None:
    assert body(request({"query": "a", "with_content": True})) == {"q": "a"}


@requirement("upstream.request")
def test_a_read_is_a_post_with_nested_markdown_options() -> None:
    sent = request(
        {"url": "https://a.example/#x", "with_links": True, "link_style": "discarded", "no_cache": False}, READER
    )
    assert (sent.host, sent.target) == ("r.jina.ai", "/")
    assert body(sent) == {
        "url": "https://a.example/#x",
        "withLinksSummary": True,
        "markdown": {"linkStyle": "discarded"},
    }


@requirement("upstream.request")
def test_a_get_search_encodes_every_reserved_character() -> None:
    sent = request(
        {"query": "a+b & c=d#e/ü\N{GRINNING FACE}", "site": ["x.org", "y.org"]},
        {"mode": "search", "path": "/search", "method": "GET"},
    )
    assert sent.target == "/search?q=a%2Bb%20%26%20c%3Dd%23e%2F%C3%BC%F0%9F%98%80&site=x.org&site=y.org"
    assert sent.headers["X-Respond-With"] == "no-content"
    assert sent.body is None


@requirement("upstream.request")
def test_a_get_read_encodes_the_whole_target_once() -> None:
    sent = request(
        {"url": "http://a.example/p?q=a%20b&x=1%262#f", "target_selector": ["#a", ".b"], "with_images": True},
        {"mode": "reader", "endpoint_template": "https://r.jina.ai/{url}"},
    )
    assert sent.target == "/http%3A%2F%2Fa.example%2Fp%3Fq%3Da%2520b%26x%3D1%25262%23f"
    assert sent.headers["X-Target-Selector"] == "#a, .b"
    assert sent.headers["X-With-Images-Summary"] == "true"


@requirement("options.envs")
def test_a_secret_turns_a_get_into_a_post_and_stays_out_of_the_url() -> None:
    for jina, values in (
        ({"mode": "search", "method": "GET", "path": "/search"}, {"query": "x"}),
        ({"mode": "reader", "endpoint_template": "/{url}"}, {"url": "https://a.example"}),
    ):
        sent = request(values, jina, secrets={"tenant_token": "s3cret-value"})
        assert sent.method == "POST"
        assert "s3cret" not in sent.target + str(sent.headers)
        assert body(sent)["tenant_token"] == "s3cret-value"


@pytest.mark.parametrize("selector", ["h1\r\nX-Evil: 1", "ünïcode", "a\x00b"])
@requirement("upstream.request")
def test_a_text_that_no_header_can_hold_travels_in_a_body(selector: str) -> None:
    sent = request({"url": "https://a.example", "target_selector": selector}, {"mode": "reader", "method": "GET"})
    assert sent.method == "POST"
    assert body(sent)["targetSelector"] == selector


def test_a_long_address_travels_in_a_body() -> None:
    sent = request({"url": "https://a.example/" + "x" * 9000}, {"mode": "reader", "method": "GET"})
    assert (sent.method, sent.target) == ("POST", "/")


@pytest.mark.parametrize("name", ["q", "query", "Q", "QUERY"])
@requirement("upstream.parameters")
def test_names_of_the_query_agree(name: str) -> None:
    assert body(request({name: "x"}))["q"] == "x"


@pytest.mark.parametrize("name", ["url", "URL", "target_url", "targetUrl", "TARGET-URL"])
@requirement("upstream.parameters")
def test_names_of_the_url_agree(name: str) -> None:
    assert body(request({name: "https://a.example"}, READER))["url"] == "https://a.example"


@requirement("upstream.parameters")
def test_two_names_for_one_argument_are_refused() -> None:
    with pytest.raises(BadRequest, match="only one"):
        request({"q": "a", "query": "b"})


@requirement("options.fixed")
def test_a_fixed_argument_wins_over_any_alias_of_the_models() -> None:
    values = {"q": "the model's", "query": "fixed"}
    assert body(request(values, operator=("query",)))["q"] == "fixed"


@pytest.mark.parametrize(
    "name",
    [
        "proxyUrl",
        "X-Proxy-Url",
        "set_cookies",
        "customHeader",
        "referer",
        "user_agent",
        "injectPageScript",
        "html",
        "pdf",
        "file",
        "instruction",
        "jsonSchema",
        "X-Forwarded-For",
        "Authorization",
        "_token",
        "nonsense",
        "engine",
        "proxy",
        "viewport",
        "tokenBudget",
    ],
)
@requirement("upstream.parameters")
def test_a_model_may_set_only_its_own_parameters(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        request({"url": "https://a.example", name: "x"}, READER)


@pytest.mark.parametrize(
    "name", ["proxyUrl", "X-Proxy-Url", "setCookies", "customHeader", "Authorization", "_token", "pdf"]
)
@requirement("upstream.parameters")
def test_refused_parameters_are_refused_to_operators_too(name: str) -> None:
    for jina in ({"mode": "reader", "params": {name: "x"}}, {"mode": "reader", "headers": {name: "x"}}):
        with pytest.raises(ToolMisconfigured, match=name):
            request({"url": "https://a.example"}, jina)
    with pytest.raises(ToolMisconfigured, match=name):
        request({"url": "https://a.example", name: "x"}, READER, operator=(name,))
    with pytest.raises(ToolMisconfigured, match=name):
        request({"url": "https://a.example"}, READER, secrets={name: "some-secret"})


@requirement("upstream.parameters")
def test_the_operators_parameters_come_from_params_and_headers() -> None:
    jina = {
        "mode": "reader",
        "params": {"engine": "browser", "cache_tolerance": 60, "unknown_thing": 1},
        "headers": {"X-Timeout": "20", "Accept": "text/plain", "DNT": "1", "X-No-Cache": "false"},
    }
    assert body(request({"url": "https://a.example"}, jina)) == {
        "url": "https://a.example",
        "engine": "browser",
        "cacheTolerance": 60,
        "timeout": 20,
        "doNotTrack": True,
    }


def test_an_unknown_header_of_a_definition_is_refused() -> None:
    with pytest.raises(ToolMisconfigured, match="X-Whatever"):
        request({"url": "https://a.example"}, {"mode": "reader", "headers": {"X-Whatever": "1"}})


@requirement("upstream.parameters")
def test_expensive_types_are_the_models_only_where_the_definition_declares_them() -> None:
    with pytest.raises(BadRequest, match="type"):
        request({"query": "x", "type": "images"})
    declared = {"type": "object", "properties": {"type": {"enum": ["web", "news"]}}}
    assert body(request({"query": "x", "type": "news"}, parameters=declared))["type"] == "news"


@pytest.mark.parametrize(
    ("values", "jina"),
    [
        ({"query": "x", "count": 0}, None),
        ({"query": "x", "count": 21}, None),
        ({"query": "x", "count": True}, None),
        ({"query": "x", "count": "many"}, None),
        ({"query": "x", "page": 0}, None),
        ({"query": ""}, None),
        ({"query": ["x"]}, None),
        ({"query": "x", "with_content": "yes"}, None),
        ({"query": "x", "format": "screenshot"}, None),
        ({"query": "x", "timeout": 0}, None),
        ({"query": "x", "timeout": True}, None),
        ({}, None),
        ({}, READER),
        ({"url": "https://a.example", "max_tokens": 499}, READER),
        ({"url": "https://a.example", "format": "vlm"}, READER),
        ({"url": "https://a.example", "target_selector": []}, READER),
        ({"url": "https://a.example", "target_selector": ["a" * 5000]}, READER),
        ({"url": "https://a.example", "retain_images": "some"}, READER),
        ({"url": "https://a.example", "no_cache": "perhaps"}, READER),
    ],
)
@requirement("upstream.parameters")
def test_a_value_of_the_wrong_kind_is_refused_before_it_costs(values: dict[str, Any], jina: Any) -> None:
    with pytest.raises(BadRequest):
        request(values, jina)


def test_null_means_not_said() -> None:
    assert body(request({"query": "x", "count": None, "with_content": None, "timeout": None})) == {
        "q": "x",
        "respondWith": "no-content",
    }


NAMES = st.sampled_from(
    [
        "query",
        "q",
        "count",
        "page",
        "url",
        "target_selector",
        "with_links",
        "timeout",
        "with_content",
        "proxyUrl",
        "x",
        "_token",
    ]
) | st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


@given(
    st.dictionaries(NAMES, VALUES, max_size=6), st.sampled_from(["search", "reader"]), st.sampled_from(["GET", "POST"])
)
@requirement("upstream.parameters", "egress.hosts")
def test_any_arguments_give_a_clean_request_or_a_refusal(values: dict[str, Any], mode: str, method: str) -> None:
    try:
        sent = request(values, {"mode": mode, "method": method})
    except BadRequest as refused:
        assert refused.message
        return
    assert {name.lower() for name in sent.headers} <= ALLOWED_HEADERS
    assert all(value.isascii() and value.isprintable() for value in sent.headers.values())
    assert sent.target.isascii()
    assert sent.target.isprintable()
    assert " " not in sent.target
    if sent.headers.get("Content-Type") or sent.method == "GET":
        read_question(sent.host, sent.method, sent.target, sent.headers, sent.body or b"")


@requirement("content.search")
def test_search_results_are_numbered_and_complete() -> None:
    recording = load_recordings()["s-post-json"]
    output = search_output(json.loads(recording.body), "foo")
    for item in json.loads(recording.body)["data"]:
        assert all(item[name] in output.content for name in ("title", "url", "description", "date") if name in item)
    assert "1. Result 1 for foo" in output.content
    assert "2. Result 2 for foo" in output.content
    assert (output.usage.tokens, output.usage.requests) == (10000, 1)
    assert [result["url"] for result in output.state["results"]]


@pytest.mark.parametrize("data", [[], None])
@requirement("content.search")
def test_an_empty_search_says_so(data: Any) -> None:
    output = search_output({"code": 200, "data": data}, "no such\nthing")
    assert "No results for 'no such thing'" in output.content
    assert "without page content" not in output.content
    slow = search_output({"code": 200, "data": data}, "no such\nthing", with_pages=True)
    assert "search without page content" in slow.content


@requirement("content.reader")
def test_a_page_has_its_head_body_lists_and_frame() -> None:
    page = json.loads(load_recordings()["o-links-summary-json"].body)
    output = page_output(page)
    data = page["data"]
    assert output.content.startswith(FRAME_OPEN)
    assert output.content.endswith(FRAME_CLOSE)
    assert all(data[name] in output.content for name in ("title", "url", "content", "publishedTime"))
    assert all(f"{text}: {url}" in output.content for text, url in data["links"].items())
    assert data["content"] not in json.dumps(output.state)


@pytest.mark.parametrize("links", [{"Home": "http://a/"}, {"0": "Home,http://a/"}, [["Home", "http://a/"]]])
@requirement("content.reader")
def test_links_are_read_in_every_shape(links: Any) -> None:
    assert "- Home: http://a/" in page_output({"data": {"content": "x", "links": links}}).content


@requirement("content.reader")
def test_a_targets_error_is_a_warning_where_there_is_something_to_read() -> None:
    output = page_output(json.loads(load_recordings()["t-404-json"].body))
    assert "Warning: Target URL returned error 404: Not Found" in output.content
    with pytest.raises(UpstreamRejected, match="404"):
        page_output({"data": {"content": "", "warning": "Target URL returned error 404: Not Found"}})


@requirement("content.reader")
def test_an_empty_page_is_never_an_empty_string() -> None:
    assert "no readable text" in page_output(json.loads(load_recordings()["t-empty-json"].body)).content


@pytest.mark.parametrize("data", ["text", 7, [1], {"a": 1}])
@requirement("upstream.shapes")
def test_a_search_of_another_shape_is_a_typed_error(data: Any) -> None:
    with pytest.raises(UpstreamUnavailable):
        search_output({"data": data}, "x")


@pytest.mark.parametrize("data", ["text", 7, [1], None])
@requirement("upstream.shapes")
def test_a_page_of_another_shape_is_a_typed_error(data: Any) -> None:
    with pytest.raises(UpstreamUnavailable):
        page_output({"data": data})


@given(
    st.dictionaries(
        st.sampled_from(["title", "url", "content", "links", "images", "warning", "usage", "chunks"]), VALUES
    )
)
@requirement("upstream.shapes")
def test_a_page_with_any_members_is_rendered_or_refused(page: dict[str, Any]) -> None:
    try:
        assert page_output({"data": page, "meta": page}).content
        assert search_output({"data": [page], "meta": page}, "x").content
    except ToolError as error:
        assert error.message
