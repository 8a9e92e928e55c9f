"""Calls of the built-in tools below a replaced transport, and `openapi_tool.testing`."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from openapi_tool.jina.egress import ALLOWED_HEADERS
from openapi_tool.jina.request import UpstreamRequest, build_request
from openapi_tool.jina.resolved_parameters import resolve_parameters
from openapi_tool.jina.response import NothingToShow
from openapi_tool.local.recordings import Recording, exchanges, load_recordings
from openapi_tool.local.request_content import parse_request
from openapi_tool.protocol.errors import BadRequest, ToolError, ToolMisconfigured, UpstreamRejected, UpstreamUnavailable
from openapi_tool.settings import SettingsError
from openapi_tool.testing import (
    InProcessExecutor,
    InvalidDefinition,
    ToolResult,
    UnansweredRequest,
    error_names,
    recorded,
    recordings,
)
from openapi_tool.tools.arguments import Arguments
from openapi_tool.tools.output import ToolOutput
from scripts.answers import is_search, successes
from tests.requirements import requirement
from tests.support import assert_for_a_model, definition, each, fetched, framed_items, page_output, retry, search_output

KEY = SecretStr("the-key")
READER = {"mode": "reader"}


def arguments(
    values: dict[str, Any], *, operator: tuple[str, ...] = (), secrets: dict[str, str] | None = None
) -> Arguments:
    hidden = {name: SecretStr(value) for name, value in (secrets or {}).items()}
    return Arguments(values, frozenset(values) - frozenset(operator), hidden, KEY, session_identity="")


def request(values: dict[str, Any], jina: dict[str, Any] | None = None, **more: Any) -> UpstreamRequest:
    parameters = more.pop("parameters", None)
    tool = definition(jina or {"mode": "search"}, parameters=parameters)
    return build_request(tool, resolve_parameters(tool, arguments(values, **more)))


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
def test_search_with_content_omits_the_default_format() -> None:
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
def test_text_that_no_header_can_hold_is_sent_in_a_body(selector: str) -> None:
    sent = request({"url": "https://a.example", "target_selector": selector}, {"mode": "reader", "method": "GET"})
    assert sent.method == "POST"
    assert body(sent)["targetSelector"] == selector


def test_long_address_is_sent_in_a_body() -> None:
    sent = request({"url": "https://a.example/" + "x" * 9000}, {"mode": "reader", "method": "GET"})
    assert (sent.method, sent.target) == ("POST", "/")


@pytest.mark.parametrize("name", ["q", "query", "Q", "QUERY"])
@requirement("arguments.any")
def test_names_of_the_query_agree(name: str) -> None:
    assert body(request({name: "x"}))["q"] == "x"


@pytest.mark.parametrize("name", ["url", "URL", "target_url", "targetUrl", "TARGET-URL"])
@requirement("arguments.any")
def test_names_of_the_url_agree(name: str) -> None:
    assert body(request({name: "https://a.example"}, READER))["url"] == "https://a.example"


@requirement("arguments.any")
def test_two_names_for_one_argument_are_refused() -> None:
    with pytest.raises(BadRequest, match="only one"):
        request({"q": "a", "query": "b"})


@requirement("arguments.prepared")
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
@requirement("arguments.any")
def test_a_model_may_set_only_its_own_parameters(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        request({"url": "https://a.example", name: "x"}, READER)


@pytest.mark.parametrize(
    "name", ["proxyUrl", "X-Proxy-Url", "setCookies", "customHeader", "Authorization", "_token", "pdf"]
)
@requirement("arguments.any")
def test_refused_parameters_are_refused_to_operators_too(name: str) -> None:
    for jina in ({"mode": "reader", "params": {name: "x"}}, {"mode": "reader", "headers": {name: "x"}}):
        with pytest.raises(ToolMisconfigured, match=name):
            request({"url": "https://a.example"}, jina)
    with pytest.raises(ToolMisconfigured, match=name):
        request({"url": "https://a.example", name: "x"}, READER, operator=(name,))
    with pytest.raises(ToolMisconfigured, match=name):
        request({"url": "https://a.example"}, READER, secrets={name: "some-secret"})


@requirement("arguments.any")
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


@requirement("arguments.any")
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
@requirement("arguments.any")
def test_a_value_of_the_wrong_kind_is_refused_before_it_costs(values: dict[str, Any], jina: Any) -> None:
    with pytest.raises(BadRequest):
        request(values, jina)


def test_null_means_not_given() -> None:
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
@requirement("arguments.any", "egress.hosts")
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
        parse_request(sent.host, sent.method, sent.target, sent.headers, sent.body or b"")


@requirement("content.search")
def test_search_results_are_numbered_and_complete() -> None:
    recording = load_recordings()["s-post-json"]
    output = search_output(json.loads(recording.body), "foo")
    for item in json.loads(recording.body)["data"]:
        assert all(item[name] in output.content for name in ("title", "url", "description", "date") if name in item)
    assert "1. Result 1 for foo" in output.content
    assert "2. Result 2 for foo" in output.content
    assert (output.usage.tokens, output.usage.requests) == (10000, 1)
    results: Any = output.state["results"]
    assert [result["url"] for result in results]


@requirement("content.search")
def test_an_empty_search_says_so() -> None:
    output = search_output({"code": 200, "data": []}, "no such\nthing")
    assert "No results for 'no such thing'" in output.content
    assert "without page content" not in output.content
    slow = search_output({"code": 200, "data": []}, "no such\nthing", with_pages=True)
    assert "search without page content" in slow.content


@requirement("content.reader")
def test_a_page_has_its_head_body_and_lists() -> None:
    page = json.loads(load_recordings()["o-links-summary-json"].body)
    output = page_output(page)
    data = page["data"]
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
    assert "[Warning: Error 404. " in output.content
    with pytest.raises(UpstreamRejected, match="404"):
        page_output({"data": {"content": "", "warning": "Target URL returned error 404: Not Found"}})


@requirement("content.reader")
def test_an_empty_page_is_never_an_empty_string() -> None:
    assert "The page has no text" in page_output(json.loads(load_recordings()["t-empty-json"].body)).content


@pytest.mark.parametrize("data", ["text", 7, [1], {"a": 1}])
@requirement("upstream.errors")
def test_a_search_of_another_shape_is_a_typed_error(data: Any) -> None:
    with pytest.raises(UpstreamUnavailable):
        search_output({"data": data}, "x")


@pytest.mark.parametrize("data", ["text", 7, [1], None])
@requirement("upstream.errors")
def test_a_page_of_another_shape_is_a_typed_error(data: Any) -> None:
    with pytest.raises(UpstreamUnavailable):
        page_output({"data": data})


@given(
    st.dictionaries(
        st.sampled_from(["title", "url", "content", "links", "images", "warning", "usage", "chunks"]), VALUES
    )
)
@requirement("upstream.errors")
def test_a_page_with_any_members_is_rendered_or_refused(page: dict[str, Any]) -> None:
    try:
        assert page_output({"data": page, "meta": page}).content
        assert search_output({"data": [page], "meta": page}, "x").content
    except ToolError as error:
        assert error.message


# Every recorded exchange through the client: a result, no results or a typed failure; the others have a reason.


FAILURES = {
    ("bad_request", "no"): """
        e-bad-scheme-file e-bad-scheme-ftp e-bad-scheme-js e-body-bad-retain e-body-timeout-500 e-invalid-url-json
        e-invalid-url-word e-maxtokens-low e-md-bad e-post-badjson e-post-empty e-scheme-data e-selector-star
        e-timing-bad e-unknown-host-json e-unknown-host-textplain r-double-slash r-get-root-url-query
        r-get-root-url-respondwith-query r-path-scheme-less r-rpc-crawl-get s-gl-bad s-hl-bad s-maxtokens s-num-21
        s-num-neg s-num-word s-provider-bad s-type-bad ssrf-self""",
    ("auth_failed", "no"): "s-anon",
    ("budget_exceeded", "no"): "o-budget-exceeded-json",
    ("target_refused", "no"): """
        o-robots-denied ssrf-10 ssrf-127 ssrf-169254 ssrf-dec ssrf-dns-private ssrf-localhost ssrf-localhost-dot
        ssrf-redirect-to-localhost-browser ssrf-v6 ssrf-zero""",
    ("upstream_rejected", "no"): """
        e-selector-syntax o-target-selector-nomatch s-put s-search-path-slash t-binary t-redirect-loop""",
    ("upstream_unavailable", "once"): """
        o-budget-exceeded-sse s-bad-pct s-upstream-quota t-404-text t-conn-refused t-conn-refused-curl to-hang-default
        to-hang-timeout3-browser to-hang-timeout3-curl to-slow6s-timeout3""",
}
"""Recordings that are refusals, or answers in a form that was not asked for, by error code and retry."""
REFUSED = [(name, code, again) for (code, again), names in FAILURES.items() for name in names.split()]
FOUND_NOTHING = ("s-nothing", "s-provider-reader")
HIDDEN = ("s-anon", "e-unknown-host-textplain", "e-post-badjson", "s-put", "s-search-path-slash")
"""Refusals below 500 whose texts are not shown: those of a key, and those without an envelope."""
NOTHING_TO_READ = "t-204-json"
UNUSED = tomllib.loads(
    """
# Exchanges that were recorded in all.
recorded = 257

[[unused]]
reason = "plain text, not asked for (Accept: application/json); t-404-text and e-unknown-host-textplain stand for it"
names = '''
e-accept-image e-invalid-url-text o-budget-exceeded-text o-chunking-text o-images-summary-text o-links-summary-text
o-respond-content-text o-respond-html-text o-respond-markdown-text o-respond-screenshot-text o-respond-text-text
o-return-format-html o-target-selector-text r-accept-json-q r-accept-json-star r-ok-accept-html
r-ok-accept-json-and-text r-ok-accept-markdown r-ok-accept-star r-ok-accept-textplain r-ok-default-noaccept
r-post-json-textplain s-anon-text s-nothing-text s-q-content-text s-q-nocontent-text ssrf-127-text t-403-text
t-conn-refused-text t-pdf-text t-plaintxt to-slow6s-timeout3-text'''

[[unused]]
reason = "an event stream, which is not asked for; o-budget-exceeded-sse stands for it"
names = "e-unknown-host-sse o-sse-spa r-ok-sse s-q-content-sse t-conn-refused-sse"

[[unused]]
reason = "the same JSON as a recording that is here, for an Accept that is never sent"
names = '''
e-compound-plain e-unknown-host-text o-budget-exceeded-noaccept o-target-selector-nomatch-text
r-get-root-url-query-text r-ok-accept-textjson'''

[[unused]]
reason = "an answer to a parameter or form that is never sent (jina-api 6.3), of a shape that is here"
names = '''
o-auth-not-forwarded o-cookie-echo o-custom-header o-html-body o-inject-script o-post-html-fixture o-post-html-nourl
o-post-pdf-base64 o-proxyurl-bad r-anon-inject r-options r-origin-cors r-post-form r-post-locale-etc r-post-viewport
s-post-form s-search-path-noq s-tbs'''

[[unused]]
reason = "about who asks the self-hosted server (X-Forwarded-For, which never leaves); s-anon stands for no key"
names = "anon-xff r-anon-noauth r-xff-private-bearer"

[[unused]]
reason = "a method that is never sent; s-put stands for it"
names = "r-head r-put"

[[unused]]
reason = "the index or an asset of the service, which is no answer to a call"
names = "e-favicon index-json index-text openapi s-empty-q s-index-json s-index-text"

[[unused]]
reason = "compressed, which is refused unread (Accept-Encoding is not sent)"
names = "r-br r-gzip"

[[unused]]
reason = "thousands of times the letter a; long addresses travel in a body, and an error table has the empty 431"
names = "r-header-too-long r-long-url"

[[unused]]
reason = "no answer at all: another protocol on the port"
names = "r-http2-port-http1"
"""
)
"""Recorded exchanges that are not in openapi_tool/local/data/jina, each under the reason why not."""


async def answer(name: str) -> dict[str, Any]:
    recording, operation = load_recordings()[name], "search" if name.startswith("s-") else "reader"
    await fetched(recording.status, recording.headers, recording.body, operation)
    envelope: dict[str, Any] = json.loads(recording.body)
    return envelope if envelope["code"] == 200 else {"code": 200, "data": []}  # a search without results


def output(envelope: dict[str, Any]) -> ToolOutput:
    return search_output(envelope, "a query") if is_search(envelope) else page_output(envelope)


def words(recording: Recording) -> str:
    """Return the server's texts for people, without its error class names."""
    readable = json.loads(recording.body)["readableMessage"]
    text = re.sub(r"\w*Error(\(\w*\))?: ", "", readable).replace('"', "'")
    return "is not accepted" if text.startswith("Rejected by validator") else text


# Completeness of the lists.


@requirement("upstream.recordings")
def test_every_recording_is_used_here_and_once() -> None:
    names = [*successes(), *FOUND_NOTHING, *(name for name, _, _ in REFUSED)]
    assert sorted(names) == sorted(load_recordings())
    assert [exchange["name"] for exchange in exchanges()] == sorted(names)


@requirement("upstream.recordings")
def test_every_exchange_that_is_not_here_has_its_reason() -> None:
    listed = [name for group in UNUSED["unused"] for name in group["names"].split()]
    assert sorted(set(listed)) == sorted(listed), "a recording is listed twice"
    assert not set(listed) & set(load_recordings()), "a recording that is here is listed as not here"
    assert len(listed) + len(load_recordings()) == UNUSED["recorded"]
    assert all(group["reason"] for group in UNUSED["unused"])


# Refusals.


@each(("name", "code", "again"), REFUSED)
@requirement("upstream.recordings", "upstream.errors")
async def test_a_recorded_refusal_is_a_typed_error_for_a_model(name: str, code: str, again: str) -> None:
    recording = load_recordings()[name]
    with pytest.raises(ToolError) as failed:
        await answer(name)
    assert_for_a_model(failed.value)
    assert (failed.value.code, retry(failed.value)) == (code, again)
    assert failed.value.http_status == (recording.status if recording.status != 200 else None)
    if 400 <= recording.status < 500 and name not in HIDDEN:
        assert words(recording) in failed.value.message
    else:
        assert "The service says" not in failed.value.message


@pytest.mark.parametrize("name", FOUND_NOTHING)
@requirement("upstream.recordings", "content.search")
async def test_a_recorded_search_without_results_is_an_answer(name: str) -> None:
    shown = output(await answer(name))
    assert shown.content.startswith("No results for 'a query'. Use other or fewer words")
    assert shown.state == {"results": []}


# Answers.


@each("name", sorted(successes()))
@requirement("upstream.recordings")
async def test_the_client_shows_a_recorded_answer_whole(name: str) -> None:
    recording, envelope = load_recordings()[name], dict(successes()[name])
    operation = "search" if is_search(envelope) else "reader"
    parameters = {"q": "a query", "respondWith": "no-content"} if operation == "search" else {}
    shown = await fetched(recording.status, recording.headers, recording.body, operation, parameters)
    if name == NOTHING_TO_READ:
        assert isinstance(shown, NothingToShow)
    else:
        assert shown == output(envelope)


@each("name", sorted(set(successes()) - {NOTHING_TO_READ}))
@requirement("upstream.recordings", "content.retained")
async def test_usage_is_the_same_in_all_places_of_the_response(name: str) -> None:
    envelope, headers = await answer(name), load_recordings()[name].headers
    used = output(envelope).usage
    assert (used.tokens, used.requests) == (envelope["meta"]["usage"]["tokens"], 1)
    header = next((value for key, value in headers.items() if key.lower() == "x-usage-tokens"), None)
    assert (header is not None) == is_search(envelope)
    assert header is None or int(header) == used.tokens
    if not is_search(envelope):
        assert used.tokens == envelope["data"]["usage"]["tokens"]


FIRST = "Intro with a [relative link](http://site.fixture.test:8099/short)"
FORMS = {
    "r-ok-json": ("Title: A Fixture Article", "URL: http://site.fixture.test:8099/article", FIRST),
    "o-links-summary-json": ("\nLinks:\n", "\n- About us: http://site.fixture.test:8099/about?x=1&y=2\n"),
    "o-links-summary-all-json": ("\nLinks:\n", "\n- About us: http://site.fixture.test:8099/about?x=1&y=2\n"),
    "o-retain-links-gpt-oss": ("\nLinks:\n- 1: http://site.fixture.test:8099/short\n",),
    "o-images-summary-json": ("\nImages:\n", "- Image 1: First image: http://site.fixture.test:8099/img/one.png\n"),
    "o-chunking-json": (FIRST, "## Section one"),
    "o-respond-html-json": ('<html lang="en"><head>', "<h1>A Fixture Article</h1>"),
    "o-respond-text-json": ("Home About us\nA Fixture Article\n", "Intro with a relative link and an absolute link."),
    "o-respond-markdown-json": ("# A Fixture Article\n", FIRST),
    "o-compound-json": (FIRST, '<html lang="en"><head>'),
    "o-respond-screenshot-json": ("Title: Short", "The page has no text"),
    "o-respond-pageshot-json": ("Title: Short", "<p>Short page.</p>"),
    "o-target-selector-json": ("Title: A Fixture Article", "URL: http://site.fixture.test:8099/article"),
    "t-pdf-json": ("\nPages: 2\n", "Hello from the first page", "Text on the second page."),
    "t-pdf-page2": ("URL: http://site.fixture.test:8099/doc.pdf#2", "Text on the second page."),
    "t-redirect-json": ("URL: http://site.fixture.test:8099/redirect", FIRST),
    "t-redirect-base-final": ("URL: http://site.fixture.test:8099/article", FIRST),
    "t-404-json": ("[Warning: Error 404. No such page. ", "## Nothing here"),
    "t-500-json": ("[Warning: Error 500. The server failed. ", "# Internal error page"),
    "t-empty-json": ("Title: (none)", "The page has no text"),
    "t-datajson": ('{"a":1,"b":[1,2,3]}',),
    "t-image": ("Title: one.png", "A 1x1 image"),
    "o-engine-curl": ("\nPublished: 2024-05-06T07:08:09Z\n",),
    "s-q-nocontent-json": ("1. Result 1 for hello world\nhttp://site.fixture.test:8099/article\nSnippet number 1.",),
    "s-q-content-json": ("\nDescription of A Fixture Article\n", FIRST),
    "s-q-links-json": ("Links:\n- Home: ", "Images:\n- Image 1: First image: "),
    "s-type-images": ("\nImage: http://site.fixture.test:8099/img/0.png\n", "\nSource: src\n"),
    "s-type-news": ("\nDate: May 6, 2024\nSource: Fixture News\nSnippet number 2.",),
    "s-favicons": ("1. Result 1 for foo\nhttp://site.fixture.test:8099/article\nSnippet number 1.",),
    "s-num-0": ("\n10. Result 10 for foo\n",),
    "s-timeout3": ("No results for 'a query'.",),
    "s-default-slow": (" (404)", "\n[Warning about results 2, "),
}
"""Text shown for each form of an answer, by the name of a recording."""


@each("name", FORMS)
@requirement("upstream.recordings", "content.reader", "content.search")
async def test_each_form_of_an_answer_is_shown(name: str) -> None:
    shown = output(await answer(name)).content
    for part in FORMS[name]:
        assert part in shown


@requirement("upstream.recordings", "content.reader")
async def test_a_page_of_nothing_but_a_warning_is_a_failure() -> None:
    envelope = await answer(NOTHING_TO_READ)
    with pytest.raises(ToolError) as failed:
        output(envelope)
    assert (failed.value.code, retry(failed.value)) == ("upstream_rejected", "no")
    assert "wait_for_selector" in failed.value.message


ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "config" / "tools"
SEARCH, READ = TOOLS / "jina_search.yaml", TOOLS / "jina_read.yaml"
EXAMPLE = ROOT / "examples" / "own-tools"
PAGE = "https://a.example/"

Run = Callable[..., ToolResult]


def defined(mode: str = "reader", **options: Any) -> dict[str, Any]:
    """Return a custom definition, as in a file."""
    jina = {"mode": mode, **options.pop("jina", {})}
    return {
        "tool_name": "own",
        "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.own",
        "after_execution": "suspend",
        "options": {"jina": jina, **options},
    }


def page(content: str) -> dict[str, Any]:
    return {"code": 200, "data": {"title": "t", "url": PAGE, "content": content, "usage": {"tokens": 12}}}


@requirement("testing.runner")
def test_a_call_is_answered_from_a_route_and_shows_the_request_that_left(jina: respx.Router, run_tool: Run) -> None:
    route = jina.post("https://r.jina.ai/").respond(json=page("Hello."))
    result = run_tool(defined(args={"fixed": {"with_links": True}}), {"url": PAGE})
    assert (result.status, result.error, result.error_code) == ("success", None, None)
    assert framed_items(result.text) == ["Title: t\nURL: https://a.example/\n\nHello."]
    assert (result.usage["tokens"], result.usage["requests"]) == (12, 1)
    [request] = result.requests
    assert route.calls.last.request is request
    assert request.headers["authorization"] == "Bearer key-of-the-test"
    sent = json.loads(request.content)
    assert sent.pop("timeout") > 0
    assert sent == {"url": PAGE, "withLinksSummary": True, "maxTokens": 20_000}


@requirement("testing.runner")
def test_a_request_without_a_route_is_answered_by_its_recording(run_tool: Run) -> None:
    result = run_tool(SEARCH, {"query": "hello world", "count": 3})
    assert result.status == "success"
    assert "hello" in result.text.lower()


@requirement("testing.runner")
@pytest.mark.parametrize("name", ["o-compound-json", "InsufficientBalanceError"])
def test_recorded_responses_are_found_by_name(name: str, jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").mock(recorded(name))
    result = run_tool(READ, {"url": PAGE})
    if name in load_recordings():
        assert result.status == "success"
    else:
        assert result.error is not None
        assert (result.error_code, result.error["http_status"]) == ("budget_exceeded", 402)
        assert json.loads(result.text) == {"error": result.error}


@requirement("testing.runner")
def test_every_recording_and_error_class_is_an_answer_and_another_name_is_refused() -> None:
    for name in (*recordings(), *error_names()):
        assert recorded(name).status_code >= 200
    with pytest.raises(LookupError, match=r"is named 'x'; recordings\(\) and error_names\(\) list them"):
        recorded("x")
    with pytest.raises(LookupError, match="no recorded answer is named 's-post-jsom'; did you mean 's-post-json"):
        recorded("s-post-jsom")


@requirement("testing.runner")
def test_a_request_that_nothing_answers_fails_the_test_and_says_what_to_add(run_tool: Run) -> None:
    with pytest.raises(UnansweredRequest, match=r'jina\.post\("https://r\.jina\.ai/"\)') as refused:
        run_tool(READ, {"url": PAGE})
    assert PAGE in str(refused.value)


@requirement("testing.runner")
def test_a_batch_with_an_unanswered_item_fails_the_test(jina: respx.Router, run_tool: Run) -> None:
    jina.post(json__url=PAGE).respond(json=page("x"))
    with pytest.raises(UnansweredRequest, match=r"other\.example"):
        run_tool(TOOLS / "jina_read_many.yaml", {"urls": [PAGE, "https://other.example/"]})


@requirement("testing.runner")
def test_long_result_continues_for_its_agent_only_without_a_request(jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").respond(json=page("word " * 20_000))
    first = run_tool(READ, {"url": PAGE})
    assert first.cursor is not None
    assert first.cursor in first.text
    second = run_tool(READ, {"cursor": first.cursor})
    assert (second.status, second.requests) == ("success", ())
    assert "word" in second.text
    for other in ({"project": "proj_other"}, {"agent": "agent_other"}):
        assert run_tool(READ, {"cursor": first.cursor}, **other).error_code == "not_found"


@requirement("testing.runner")
def test_usage_and_cursor_are_found_in_both_formats_of_results(jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").respond(json=page("word " * 20_000))
    for result_format in ("text", "object"):
        found = defined(result_format=result_format)
        success, failure = (run_tool(found, {"url": url}, agent=result_format) for url in (PAGE, "https://[::1]/"))
        assert success.usage["requests"] == 1
        assert success.cursor is not None
        assert success.cursor in success.text
        assert (failure.usage["requests"], failure.cursor) == (0, None)


@requirement("testing.runner")
def test_the_second_of_two_equal_calls_comes_from_the_cache_of_its_owner(jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").respond(json=page("x"))
    sent = [len(run_tool(READ, {"url": PAGE}, agent=agent).requests) for agent in ("one", "one", "two")]
    assert sent == [1, 0, 1]


@requirement("testing.runner")
def test_placeholders_take_the_ids_of_the_call(jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://s.jina.ai/").mock(recorded("s-post-json"))
    tool = defined("search", args={"fixed": {"query": "{project_id} {agent_id} {agent_turn_id} {channel_id}"}})
    result = run_tool(tool, {}, project="p", agent="a", ids={"channel_id": "private"})
    assert json.loads(result.requests[0].content)["q"] == "p a turn_test private"


@requirement("testing.runner")
def test_waits_between_attempts_are_skipped_and_recorded(jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").mock(
        side_effect=[
            recorded("RateLimitTriggeredError"),
            httpx.ConnectError("refused"),
            httpx.Response(200, json=page("x")),
        ]
    )
    result = run_tool(READ, {"url": PAGE})
    assert (result.status, len(result.requests), len(result.waits_s)) == ("success", 3, 2)
    assert result.waits_s[0] >= 17, "what Retry-After of the recorded answer says"


@requirement("testing.runner")
def test_a_mistake_of_the_model_costs_no_request_and_reads_as_the_model_reads_it(run_tool: Run) -> None:
    result = run_tool(SEARCH, {"quary": "x"})
    assert (result.status, result.error_code, result.requests) == ("failed", "bad_request", ())
    assert "quary" in json.loads(result.text)["error"]["message"]


@requirement("testing.runner")
def test_a_definition_that_may_not_be_applied_is_refused_with_its_place(tmp_path: Path, run_tool: Run) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(SEARCH.read_text(encoding="utf-8").replace("mode: search", "mode: serach"), encoding="utf-8")
    with pytest.raises(InvalidDefinition, match=r"own\.yaml:\d+:\d+: error: options\.jina\.mode"):
        run_tool(file, {"query": "x"})
    with pytest.raises(InvalidDefinition, match=r"definition:1:1: error: options\.jina\.mode"):
        run_tool(defined("serach"), {"query": "x"})


@pytest.fixture
def openapi_tool_settings() -> Mapping[str, Any]:
    """Settings of the tests below."""
    return {
        "secrets": {"allowed_env": ["DOCS_KEY"], "env_parameters": ["tenant_token"]},
        "policy": {"projects": {"proj_quiet": {"deny": ["*"]}}},
    }


@pytest.fixture
def openapi_tool_environment() -> Mapping[str, str]:
    return {"DOCS_KEY": "key-of-the-docs"}


@requirement("testing.runner")
def test_missing_definition_is_named_with_the_folder_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_tool: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path}/tools/nope.yaml; a relative path starts at")):
        run_tool("tools/nope.yaml", {})


@requirement("testing.runner")
def test_settings_and_environment_are_those_of_the_fixtures(
    jina: respx.Router, run_tool: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAPI_TOOL__TOOLS__MAX_RESULT_CHARS", "1000")
    jina.post("https://r.jina.ai/").respond(json=page("x" * 2_000))
    result = run_tool(defined(envs={"api_key": "DOCS_KEY"}), {"url": PAGE})
    assert result.requests[0].headers["authorization"] == "Bearer key-of-the-docs"
    assert result.cursor is None, "settings of the shell do not count"
    assert run_tool(READ, {"url": PAGE}, project="proj_quiet").error_code == "tool_not_available"


@requirement("testing.runner")
async def test_in_an_asynchronous_test_the_executor_is_awaited(jina: respx.Router, run_tool: Run) -> None:
    jina.post("https://r.jina.ai/").respond(json=page("x"))
    executor = InProcessExecutor(jina)
    urls = [f"{PAGE}{number}" for number in range(3)]
    results = await asyncio.gather(*(executor.run_tool(READ, {"url": url}) for url in urls))
    assert [json.loads(request.content)["url"] for result in results for request in result.requests] == urls
    with pytest.raises(RuntimeError, match=r"await InProcessExecutor\(jina\)\.run_tool"):
        run_tool(READ, {"url": PAGE})


@requirement("testing.runner")
def test_settings_that_serve_would_refuse_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"policy\.hooks"):
        InProcessExecutor(respx.Router(), settings={"policy": {"hooks": ["no-such-hook"]}})


@requirement("testing.runner")
def test_request_refused_by_the_egress_checks_is_not_sent(
    jina: respx.Router, run_tool: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    jina.route().respond(json=page("x"))
    monkeypatch.setattr("openapi_tool.jina.egress.ALLOWED_HOSTS", frozenset({"elsewhere.example"}))
    assert run_tool(READ, {"url": PAGE}).error_code == "internal_error"
    assert not jina.calls


@requirement("testing.example")
def test_the_example_project_passes_and_notices_a_broken_definition(tmp_path: Path) -> None:
    project = tmp_path / "own-tools"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))

    def tested() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False, timeout=120)  # noqa: S603 - pytest

    passed = tested()
    assert passed.returncode == 0, passed.stdout
    tool = project / "tools" / "product_docs.yaml"
    tool.write_text(tool.read_text(encoding="utf-8").replace("docs.example.org", "blog.example.org"), encoding="utf-8")
    failed = tested()
    assert failed.returncode == 1, failed.stdout
    assert "blog.example.org" in failed.stdout
