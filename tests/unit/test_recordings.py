"""Every recorded exchange through the client: an answer, no results or a typed failure; the rest has its reason."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from openapi_tool.jina.content import page_output, search_output
from openapi_tool.local.recordings import Recording, load_recordings
from openapi_tool.protocol.errors import ToolError
from openapi_tool.tools.result import ToolOutput
from scripts.content_sizes import is_search, successes
from tests.promises import requirement
from tests.upstream import assert_for_a_model, fetched, retry

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
"""Refusals below 500 whose words are not shown: of a key, or without an envelope."""
NOTHING_TO_READ = "t-204-json"
NO_EXCHANGES = {"ORIGIN.md", "error-bodies.json"}
UNUSED = tomllib.loads((Path(__file__).parents[1] / "data" / "unused_recordings.toml").read_text(encoding="utf-8"))


async def answer(name: str) -> dict[str, Any]:
    recording = load_recordings()[name]
    return await fetched(recording.status, recording.headers, recording.body)


def output(envelope: dict[str, Any]) -> ToolOutput:
    return search_output(envelope, "a query") if is_search(envelope) else page_output(envelope)


def words(recording: Recording) -> str:
    """What the server says to people, without its error class names."""
    readable = json.loads(recording.body)["readableMessage"]
    return re.sub(r"\w*Error(\(\w*\))?: ", "", readable).replace('"', "'")


# Which there are.


@requirement("upstream.recordings")
def test_every_recording_is_used_here_and_once() -> None:
    names = [*successes(), *FOUND_NOTHING, *(name for name, _, _ in REFUSED)]
    assert sorted(names) == sorted(load_recordings())
    folder = files("openapi_tool.local") / "data" / "jina"
    assert {entry.name for entry in folder.iterdir()} == {f"{name}.http" for name in names} | NO_EXCHANGES


@requirement("upstream.recordings")
def test_every_exchange_that_is_not_here_has_its_reason() -> None:
    listed = [name for group in UNUSED["unused"] for name in group["names"].split()]
    assert sorted(set(listed)) == sorted(listed), "a recording is listed twice"
    assert not set(listed) & set(load_recordings()), "a recording that is here is listed as not here"
    assert len(listed) + len(load_recordings()) == UNUSED["recorded"]
    assert all(group["reason"] for group in UNUSED["unused"])


# Refusals.


@pytest.mark.parametrize(("name", "code", "again"), REFUSED)
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


@pytest.mark.parametrize("name", sorted(successes()))
@requirement("upstream.recordings")
async def test_a_recorded_answer_passes_the_client_whole(name: str) -> None:
    assert await answer(name) == successes()[name]


@pytest.mark.parametrize("name", sorted(set(successes()) - {NOTHING_TO_READ}))
@requirement("upstream.recordings", "content.kept")
async def test_the_usage_is_what_the_answer_says_in_all_its_places(name: str) -> None:
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
    "o-respond-screenshot-json": ("Title: Short", "(The page has no readable text.)"),
    "o-respond-pageshot-json": ("Title: Short", "<p>Short page.</p>"),
    "o-target-selector-json": ("Title: A Fixture Article", "URL: http://site.fixture.test:8099/article"),
    "t-pdf-json": ("\nPages: 2\n", "Hello from the first page", "Text on the second page."),
    "t-pdf-page2": ("URL: http://site.fixture.test:8099/doc.pdf#2", "Text on the second page."),
    "t-redirect-json": ("URL: http://site.fixture.test:8099/redirect", FIRST),
    "t-redirect-base-final": ("URL: http://site.fixture.test:8099/article", FIRST),
    "t-404-json": ("\nWarning: Target URL returned error 404: Not Found\n", "## Nothing here"),
    "t-500-json": ("\nWarning: Target URL returned error 500: Internal Server Error\n", "# Internal error page"),
    "t-empty-json": ("Title: (none)", "(The page has no readable text.)"),
    "t-datajson": ('{"a":1,"b":[1,2,3]}',),
    "t-image": ("Title: one.png", "A 1x1 image"),
    "o-engine-curl": ("\nPublished: 2024-05-06T07:08:09Z\n",),
    "s-q-nocontent-json": ("1. Result 1 for hello world\nhttp://site.fixture.test:8099/article\nSnippet number 1.",),
    "s-q-content-json": ("\nDescription of A Fixture Article\n", FIRST),
    "s-q-links-json": ("Links:\n- Home: ", "Images:\n- Image 1: First image: "),
    "s-type-images": ("http://site.fixture.test:8099/img/0.png\n", "\nsrc\n"),
    "s-type-news": ("\nMay 6, 2024\nFixture News\nSnippet number 2.",),
    "s-favicons": ("1. Result 1 for foo\nhttp://site.fixture.test:8099/article\nSnippet number 1.",),
    "s-num-0": ("\n10. Result 10 for foo\n",),
    "s-timeout3": ("No results for 'a query'.",),
    "s-default-slow": ("Warning: Target URL returned error 404: Not Found", "Warning: as for "),
}
"""What is shown of each form that an answer can have, by a recording of it."""


@pytest.mark.parametrize("name", FORMS)
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
    assert "This page maybe not yet fully loaded" in failed.value.message
