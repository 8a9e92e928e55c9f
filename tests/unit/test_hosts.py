"""Hosts whose results, links and pages are shown: those that a search asks for, without denied ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import respx

from openapi_tool.jina.remarks import WARNINGS
from openapi_tool.testing import InProcessExecutor, ToolResult
from tests.requirements import requirement
from tests.support import definition, each

SEARCH, READ = definition({"tool": "jina.search"}), definition({"tool": "jina.read"})
READ_MANY = definition({"tool": "jina.read_many"})
SITES = ("https://www.linkedin.com/in/x", "https://lilium.com/", "https://notlilium.com/", "https://de.lilium.com/jobs")


def results(*urls: str) -> dict[str, Any]:
    return {"code": 200, "data": [{"title": f"at {url}", "url": url, "description": "text"} for url in urls]}


def urls_of(result: ToolResult) -> list[str]:
    assert isinstance(result.fields.tool_output, dict)
    state: Any = result.fields.tool_output["state"]
    return [item["url"] for item in state["results"]]


# Sites that a search asks for.


@each(
    "site",
    [
        ["lilium.com"],
        "lilium.com",
        ["https://lilium.com/"],
        ["site:lilium.com"],
        ["-site:Lilium.COM"],
        ["https://lilium.com/a/path"],
        ["*.lilium.com"],
        [".lilium.com"],
    ],
)
@requirement("content.search")
def test_results_of_other_sites_are_left_out_and_counted(
    site: Any, jina: respx.Router, run_tool: Callable[..., ToolResult]
) -> None:
    jina.post("https://s.jina.ai/").respond(json=results(*SITES))
    result = run_tool(SEARCH, {"query": "x", "site": site})
    assert urls_of(result) == ["https://lilium.com/", "https://de.lilium.com/jobs"]
    assert "[2 results from other sites are left out.]" in result.text
    assert "linkedin" not in result.text
    assert "1. at https://lilium.com/" in result.text
    assert "2. at https://de.lilium.com/jobs" in result.text


@each(
    ("given", "sent"),
    [
        (["https://example.com/"], ["example.com"]),
        (["site:example.com", "http://a.example/b/"], ["example.com", "a.example/b"]),
        ("site:example.com", "example.com"),
        (["-site:example.com"], ["example.com"]),
        (["SITE: example.com"], ["example.com"]),
        (["//example.com"], ["example.com"]),
        (["https:example.com:443/"], ["example.com"]),
        (["https://name:word@example.com:8080/docs"], ["example.com/docs"]),
        (["*.example.com", ".example.com", "example.com."], ["example.com"] * 3),
    ],
)
@requirement("upstream.request")
def test_a_site_is_sent_without_scheme_and_operator(
    given: Any, sent: Any, jina: respx.Router, run_tool: Callable[..., ToolResult]
) -> None:
    jina.post("https://s.jina.ai/").respond(json=results())
    assert json.loads(run_tool(SEARCH, {"query": f"for {given}", "site": given}).requests[0].content)["site"] == sent


@each("site", [".", "https://", "site:", "*", ["example.com", "/"]])
@requirement("arguments.checked")
def test_a_site_without_a_name_is_refused_as_it_would_restrict_nothing(
    site: Any, jina: respx.Router, run_tool: Callable[..., ToolResult]
) -> None:
    jina.post("https://s.jina.ai/").respond(json=results(*SITES))
    for name in ("site", "exclude_sites"):
        refused = run_tool(SEARCH, {"query": "x", name: site})
        assert (refused.error_code, refused.requests) == ("bad_request", ())
        assert f"{name}: must be names of sites" in refused.text
    fixed = run_tool(definition({"tool": "jina.search"}, args={"fixed": {"site": site}}), {"query": "x"})
    assert (fixed.error_code, fixed.requests) == ("tool_misconfigured", ())


@each(
    "url",
    [
        "https://lilium.com@evil.example/",
        "https://evil.example\\@lilium.com/",
        "https://evil.example#@lilium.com/",
        "https://lilium.com.evil.example/",
        "https://lilium\u2024com.evil.example/",
        "https://l\u0456lium.com/",
        "https://evil.example/https://lilium.com/",
        "javascript://lilium.com/%0ax",
        "https://evil.example%2f.lilium.com/",
        "https://evil.example%23.lilium.com/",
        "https://evil.example%00.lilium.com/",
        "https://evil.example%20.lilium.com/",
        "https://evil.example\uff0f.lilium.com/",
        "https://evil.example\uff1f.lilium.com/",
        "https://evil.c\u2100.lilium.com/",
        "https://lilium.com\uff20evil.example/",
        "https://lilium.com%40evil.example/",
        "https://lilium.com\u2215evil.example/",
        "https://evil.example:80:.lilium.com/",
        "https://[::1].lilium.com/",
        "https:///evil.example/.lilium.com",
        "lilium.com.",
    ],
)
@requirement("content.search")
def test_an_address_that_looks_like_a_site_is_of_it_only_if_its_host_is(
    url: str, jina: respx.Router, run_tool: Callable[..., ToolResult]
) -> None:
    jina.post("https://s.jina.ai/").respond(json=results("https://lilium.com/", url))
    shown = urls_of(run_tool(SEARCH, {"query": url, "site": ["lilium.com"]}))
    assert shown == ["https://lilium.com/", *([url] if url == "lilium.com." else [])]


@requirement("content.search")
def test_names_of_a_site_are_compared_in_one_form(jina: respx.Router, run_tool: Callable[..., ToolResult]) -> None:
    jina.post("https://s.jina.ai/").respond(
        json=results(
            "https://xn--bcher-kva.example/a", "https://BÜCHER.example:8443/b", "https://u:p@shop.bücher.example./c"
        )
    )
    for site in ("bücher.example", "xn--bcher-kva.example", "Bu\u0308cher.Example"):
        assert len(urls_of(run_tool(SEARCH, {"query": site, "site": [site]}))) == 3


@requirement("content.search")
def test_results_of_excluded_sites_are_left_out(jina: respx.Router, run_tool: Callable[..., ToolResult]) -> None:
    jina.post("https://s.jina.ai/").respond(json=results(*SITES))
    result = run_tool(SEARCH, {"query": "x", "exclude_sites": ["linkedin.com", "https://lilium.com/"]})
    assert urls_of(result) == ["https://notlilium.com/"]
    assert "[3 results from other sites are left out.]" in result.text


@each("place", ["params", "headers", "fixed"])
@requirement("content.search")
def test_the_operators_fixed_site_holds_for_results(
    place: str, jina: respx.Router, run_tool: Callable[..., ToolResult]
) -> None:
    jina.post("https://s.jina.ai/").respond(json=results(*SITES))
    options = {"headers": {"headers": {"X-Site": "lilium.com"}}}.get(place, {"params": {"site": "lilium.com"}})
    tool = definition({"tool": "jina.search"} | (options if place != "fixed" else {}))
    if place == "fixed":
        tool = definition({"tool": "jina.search"}, args={"fixed": {"site": ["lilium.com"]}})
    assert urls_of(run_tool(tool, {"query": "x"})) == ["https://lilium.com/", "https://de.lilium.com/jobs"]


@requirement("content.search")
def test_a_search_whose_results_are_all_of_other_sites_says_so(
    jina: respx.Router, run_tool: Callable[..., ToolResult]
) -> None:
    jina.post("https://s.jina.ai/").respond(json=results("https://a.example/", "https://b.example/"))
    result = run_tool(SEARCH, {"query": "x", "site": ["lilium.com"]})
    assert result.status == "success"
    assert "No results" not in result.text
    assert "All 2 results are from other sites than those asked for, and are left out." in result.text
    assert "drop site" in result.text
    assert urls_of(result) == []


# Hosts that look like others.


@each(
    ("host", "alike"),
    [
        ("www.p\u0430ypal.com", True),
        ("www.xn--pypal-4ve.com", True),
        ("\u0430\u0440\u0440\u04cf\u0435.com", True),
        ("xn--80ak6aa92e.com", True),
        ("g\u03bfogle.com", True),
        ("login.\u0455hop.example", True),
        ("www.paypal.com", False),
        ("b\u00fccher.example", False),
        ("caf\u00e9.\u0444\u0456\u0440\u043c\u0430.example", False),
        ("\u043f\u0440\u0438\u043c\u0435\u0440.\u0440\u0444", False),
        ("\u0430\u0440\u0440\u0435.\u0440\u0444", False),
        ("\u03b5\u03bb\u03bb\u03ac\u03b4\u03b1.gr", False),
        ("abc\u30cb\u30e5\u30fc\u30b9\u65b0\u805e.example", False),
        ("\u4e2d\u6587abc.example", False),
    ],
)
@requirement("content.search", "content.reader")
def test_a_host_that_looks_like_another_one_has_a_warning(
    host: str, jina: respx.Router, run_tool: Callable[..., ToolResult], *, alike: bool
) -> None:
    url = f"https://{host}/login"
    jina.post("https://s.jina.ai/").respond(json=results("https://ok.example/", url))
    found = run_tool(SEARCH, {"query": host})
    assert (f"[Warning about result 2: {WARNINGS['lookalike']}]" in found.text) == alike
    assert isinstance(found.fields.tool_output, dict)
    state: Any = found.fields.tool_output["state"]
    assert [one.get("warnings") for one in state["results"]] == [None, ["lookalike"] if alike else None]
    jina.post("https://r.jina.ai/").respond(json={"code": 200, "data": {"url": url, "content": "A page."}})
    read = run_tool(READ, {"url": "https://ok.example/", "no_cache": True})
    assert read.text.startswith(f"[Warning: {WARNINGS['lookalike']}]") == alike


# Hosts that the operator denies.


DENIED = {"url_policy": {"deny": ("bad.example", "böse.example")}}


async def run(jina: respx.Router, tool: Any, arguments: dict[str, Any], **settings: Any) -> ToolResult:
    return await InProcessExecutor(jina, settings=DENIED | settings).run_tool(tool, arguments)


@requirement("url.checked")
@each(
    "url",
    [
        "https://bad.example/",
        "bad.example",
        "https://www.BAD.example./x",
        "https://xn--bse-sna.example/",
        "https://b%61d.example/",
        "https://r.jina.ai/https://bad.example/",
    ],
)
async def test_a_page_of_a_denied_host_is_not_read(url: str, jina: respx.Router) -> None:
    result = await run(jina, READ, {"url": url})
    assert (result.error_code, result.requests) == ("target_refused", ())
    assert "Use another source" in result.text


NUMBERS = ("192.0.2.7", "2606:4700::1111")
SPELLINGS = (
    "http://192.0.2.7/x",
    "http://192.0.2.7.:80/",
    "http://0xC0000207/",
    "http://3221225991/",
    "http://0300.0.2.7/",
    "http://192.0.519/",
    "http://[::ffff:192.0.2.7]/",
    "http://[2606:4700::1111]/",
    "http://[2606:4700:0::0:1111]:8080/x",
    "http://[2606:4700:0:0:0:0:0:1111]",
)


@each("url", SPELLINGS)
@requirement("url.checked", "content.search", "content.reader")
async def test_a_denied_address_is_denied_in_every_spelling(url: str, jina: respx.Router) -> None:
    settings = {"url_policy": {"deny": NUMBERS, "allow": ("192.0.2.7", "::ffff:192.0.2.7")}}
    jina.post("https://s.jina.ai/").respond(json=results(url, "https://ok.example/"))
    page = {"url": "https://ok.example/", "content": f"see {url} or <{url}>", "links": {"x": url}}
    jina.post("https://r.jina.ai/").respond(json={"code": 200, "data": page})
    found = await run(jina, SEARCH, {"query": "x"}, **settings)
    assert urls_of(found) == ["https://ok.example/"]
    read = (await run(jina, READ, {"url": "https://ok.example/", "with_links": True}, **settings)).text
    assert "[3 links to hosts that the operator denies are left out.]" in read
    assert "see denied: or <denied:>" in read
    assert (await run(jina, READ, {"url": url}, **settings)).error_code in ("target_refused", "bad_request")


@each("denied", ["::ffff:93.184.216.34", "::ffff:5db8:d822", "0x5DB8D822"])
@requirement("url.checked")
async def test_an_address_may_be_denied_in_any_spelling(denied: str, jina: respx.Router) -> None:
    result = await run(jina, READ, {"url": "http://93.184.216.34/"}, url_policy={"deny": (denied,)})
    assert (result.error_code, result.requests) == ("target_refused", ())


@requirement("url.checked")
async def test_another_address_than_the_denied_one_is_read(jina: respx.Router) -> None:
    jina.post("https://r.jina.ai/").respond(json={"code": 200, "data": {"content": "http://[2606:4700::1112]/x"}})
    read = await run(jina, READ, {"url": "http://[2606:4700::1112]/"}, url_policy={"deny": NUMBERS})
    assert "http://[2606:4700::1112]/x" in read.text


@requirement("url.checked")
async def test_a_host_is_denied_even_if_it_is_allowed(jina: respx.Router) -> None:
    both = {"url_policy": {"deny": ("wiki.lan", "10.0.0.5"), "allow": (".lan", "10.0.0.5")}}
    for url in ("https://wiki.lan/", "http://10.0.0.5/"):
        assert (await run(jina, READ, {"url": url}, **both)).error_code == "target_refused"


@requirement("url.checked")
async def test_another_host_of_the_same_ending_is_read(jina: respx.Router) -> None:
    jina.post("https://r.jina.ai/").respond(json={"code": 200, "data": {"content": "x"}})
    for url in ("https://notbad.example/", "https://bad.example.org/"):
        assert (await run(jina, READ, {"url": url})).status == "success"


@requirement("url.checked", "content.search")
async def test_results_of_denied_hosts_are_left_out_and_counted(jina: respx.Router) -> None:
    answer = results("https://bad.example/1", "https://ok.example/", "https://www.böse.example/")
    answer["data"][1]["siteLinks"] = [
        {"title": "worse", "link": "https://bad.example/2"},
        {"title": "fine", "link": "https://ok.example/2"},
    ]
    answer["data"][1]["description"] = "See https://bad.example/3, or https://ok.example/3"
    answer["data"][1]["imageUrl"] = "https://bad.example/4.png"
    jina.post("https://s.jina.ai/").respond(json=answer)
    result = await run(jina, SEARCH, {"query": "x"})
    assert urls_of(result) == ["https://ok.example/"]
    assert "[2 results from hosts that the operator denies are left out.]" in result.text
    assert "[3 links to hosts that the operator denies are left out.]" in result.text
    assert "fine: https://ok.example/2" in result.text
    assert "bad.example" not in result.text
    assert "bad.example" not in json.dumps(result.fields.tool_output)


@requirement("url.checked", "content.search")
async def test_a_search_with_results_of_denied_hosts_only_says_so(jina: respx.Router) -> None:
    jina.post("https://s.jina.ai/").respond(json=results("https://bad.example/1"))
    text = (await run(jina, SEARCH, {"query": "x"})).text
    assert "The only result is from hosts that the operator denies, and is left out." in text
    assert "No results" not in text


@requirement("url.checked", "content.reader")
async def test_links_of_a_page_to_denied_hosts_are_left_out_and_counted(jina: respx.Router) -> None:
    page = {
        "url": "https://ok.example/",
        "content": 'A [worse](https://bad.example/1 "x") and [fine](https://ok.example/2); <https://WWW.bad.example>.',
        "links": {"worse": "https://bad.example/3", "fine": "https://ok.example/3"},
        "images": {"Image 1": "https://cdn.bad.example/4.png"},
    }
    jina.post("https://r.jina.ai/").respond(json={"code": 200, "data": page})
    for tool, arguments in (
        (READ, {"url": "https://ok.example/", "with_links": True}),
        (READ_MANY, {"urls": ["https://ok.example/"], "with_links": True}),
    ):
        text = (await run(jina, tool, arguments)).text
        assert "[4 links to hosts that the operator denies are left out.]" in text
        assert "bad.example" not in text.lower()
        assert "[worse](" in text
        assert "[fine](https://ok.example/2)" in text
        assert "- fine: https://ok.example/3" in text


@each(
    "text",
    [
        "[x](//bad.example/w)",
        "<script src='//cdn.bad.example/w.js'>",
        "https:bad.example/w",
        '{"u":"https:\\/\\/bad.example\\/w"}',
        "https:\\\\bad.example",
        "ftp://bad.example/w",
        "&#104;ttps://bad.example/w",
        "https://u:p@bad.example:8443/w",
        "https://bad\u3002example/w",
        "https://\uff42\uff41\uff44.example/w",
        "https://ba\u200bd.example/w",
        "https://bad.example\uff0fw",
        "https://bad.example%2fw",
        "https://ok.example\uff20bad.example/w",
    ],
)
@requirement("url.checked", "content.reader")
async def test_a_link_in_a_text_is_left_out_in_every_spelling(text: str, jina: respx.Router) -> None:
    page = {"url": "https://ok.example/", "title": text, "description": f"about {text}", "content": f"See {text} here"}
    jina.post("https://r.jina.ai/").respond(json={"code": 200, "data": page})
    result = await run(jina, READ, {"url": "https://ok.example/"})
    assert "denied:" in result.text
    assert "[3 links to hosts that the operator denies are left out.]" in result.text
    for hidden in ("bad.example", "bad\u3002", "\uff42\uff41\uff44", "ba\u200bd"):
        assert hidden not in result.text
        assert hidden not in json.dumps(result.fields.tool_output, ensure_ascii=False)


@each(
    "text",
    [
        "// comment",
        "a //b.example/c",
        "https://ok.example/?u=https://bad.example/",
        "notbad.example",
        "C:\\bad.example",
        "bad.example//x",
    ],
)
@requirement("content.reader")
async def test_other_text_stays(text: str, jina: respx.Router) -> None:
    jina.post("https://r.jina.ai/").respond(json={"code": 200, "data": {"title": "t", "content": f"See {text} here"}})
    assert f"See {text} here" in (await run(jina, READ, {"url": "https://ok.example/"})).text


@requirement("content.search")
async def test_texts_of_a_result_name_no_denied_host(jina: respx.Router) -> None:
    answer = results("https://ok.example/")
    texts = {"title": "see https://bad.example/1", "date": "https://bad.example/2", "source": "//bad.example"}
    answer["data"][0] |= texts
    answer["data"].append({"title": "tab", "url": "https://b\tad.example/\n"})
    jina.post("https://s.jina.ai/").respond(json=answer)
    result = await run(jina, SEARCH, {"query": "x"})
    assert "[3 links to hosts that the operator denies are left out.]" in result.text
    assert "[1 result from a host that the operator denies is left out.]" in result.text
    assert "bad.example" not in result.text + json.dumps(result.fields.tool_output)


@requirement("url.checked")
async def test_a_page_that_is_reported_at_a_denied_host_is_not_shown(jina: respx.Router) -> None:
    page = {"url": "https://bad.example/after-a-redirect", "content": "secret"}
    jina.post("https://r.jina.ai/").respond(json={"code": 200, "data": page | {"usage": {"tokens": 7}}})
    result = await run(jina, READ, {"url": "https://ok.example/"})
    assert (result.error_code, result.usage["tokens"]) == ("target_refused", 7)
    assert "secret" not in result.text


@requirement("url.checked")
@pytest.mark.parametrize("entry", ["https://bad.example", "bad.example/x", "*.bad.example", "a b", ""])
def test_a_denied_host_is_a_name(entry: str, jina: respx.Router) -> None:
    with pytest.raises(Exception, match="deny"):
        InProcessExecutor(jina, settings={"url_policy": {"deny": (entry,)}})
