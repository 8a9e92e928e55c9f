"""From the upstream's envelope to what a model reads and a UI renders (tool-design section 3)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from openapi_tool.jina.failures import quoted
from openapi_tool.protocol.errors import UpstreamRejected, UpstreamUnavailable
from openapi_tool.tools.result import ToolOutput, Usage, one_line, untrusted, untrusted_blocks

_BODY_FIELDS = ("content", "text", "html")
_MOST_TOKENS = 10**9
_SHOTS = {"screenshotUrl": "Screenshot", "pageshotUrl": "Page shot"}
_JOINED_PAIR = re.compile(r"(.*?),([a-z][a-z0-9+.-]*:.*)", re.DOTALL)


def search_output(envelope: Mapping[str, Any], query: str, *, with_pages: bool = False) -> ToolOutput:
    """Numbered results; none found is an answer, not an error. `with_pages` says that their pages were asked for."""
    results = envelope.get("data")
    if results is None:
        results = []
    if not isinstance(results, list) or not all(isinstance(item, dict) for item in results):
        raise UpstreamUnavailable("The search answered in an unexpected shape; try again later.")
    if not results:
        return _no_results(query, _usage(envelope), with_pages=with_pages)
    state = {"results": [_present(item, ("title", "url", "date", "source")) for item in results]}
    return ToolOutput(untrusted_blocks(_result_blocks(results)), state, _usage(envelope), whole=True)


def _no_results(query: str, usage: Usage, *, with_pages: bool) -> ToolOutput:
    """The answer for a search that found nothing; with pages it may only have run out of time (jina-api 2.2)."""
    says = (
        f"No results for {one_line(query)[:200]!r}. Use other or fewer words, or drop filters such as site or language."
    )
    if with_pages:
        says += " If there should be some, search without page content: pages that load slowly are left out."
    return ToolOutput((says,), {"results": []}, usage, whole=True)


def _result_blocks(results: list[Mapping[str, Any]]) -> Iterator[str]:
    """Each result; warnings that an earlier one has in full are told by its number."""
    first: dict[tuple[str, ...], int] = {}
    for number, item in enumerate(results, start=1):
        facts = _present(item, ("url", "date", "publishedTime", "source", "imageUrl"))
        warnings = _warnings(item)
        if warnings and (same := first.setdefault(warnings, number)) != number:
            warnings = (f"as for {same}",)
        lines = [
            f"{number}. {_line(item.get('title')) or '(no title)'}",
            *(_line(fact) for fact in facts.values()),
            *(f"Warning: {warning}" for warning in warnings),
            _line(item.get("description")),
            *_site_links(item),
            "\n\n".join(_bodies(item)),
            *_lists(item),
        ]
        yield "\n".join(filter(None, lines))


def page_output(envelope: Mapping[str, Any]) -> ToolOutput:
    """A page: title, url, published time, warnings, body; links and images where they were asked for."""
    page = envelope.get("data")
    if not isinstance(page, dict):
        raise UpstreamUnavailable("The reader answered in an unexpected shape; try again later.")
    body = "\n\n".join(_bodies(page))
    lists, warnings = list(_lists(page)), _warnings(page)
    if warnings and not body and not lists:
        raise _nothing_to_read(warnings, _usage(envelope).tokens)
    head = [
        f"Title: {_line(page.get('title')) or '(none)'}",
        f"URL: {_line(page.get('url'))}",
        *(f"Published: {_line(published)}" for published in _some(page.get("publishedTime"))),
        *(f"Pages: {count}" for count in _some(page.get("numPages"))),
        *(f"Warning: {warning}" for warning in warnings),
    ]
    parts = ["\n".join(head), body or "(The page has no readable text.)", *lists]
    state = _present(page, ("title", "url", "publishedTime", "warning", "numPages"))
    return ToolOutput((untrusted("\n\n".join(parts)),), state, _usage(envelope))


def _nothing_to_read(warnings: tuple[str, ...], tokens: int) -> UpstreamRejected:
    """The failure of a page of which only warnings came, which is charged all the same."""
    failure = UpstreamRejected(
        "The page has nothing to read; check the address or use another page. "
        f"The service says: {quoted(' '.join(warnings))}"
    )
    failure.tokens = tokens
    return failure


def _warnings(item: Mapping[str, Any]) -> tuple[str, ...]:
    """One per line of the upstream's text, in which a target's own error is one too (jina-api 3.1)."""
    return tuple(filter(None, map(_line, _text(item.get("warning")).splitlines())))


def _bodies(page: Mapping[str, Any]) -> Iterator[str]:
    """Every form of the body that came, in a fixed order; chunks, which repeat the content, only in its place."""
    texts = [text for field in _BODY_FIELDS if (text := _text(page.get(field)).strip())]
    chunks = page.get("chunks")
    if isinstance(chunks, list) and not _text(page.get("content")).strip():
        texts += [chunk for chunk in chunks if isinstance(chunk, str) and chunk.strip()]
    yield from texts
    for field, label in _SHOTS.items():
        if url := _line(page.get(field)):
            yield f"{label}: {url}"


def _lists(page: Mapping[str, Any]) -> Iterator[str]:
    for title, field in (("Links", "links"), ("Images", "images")):
        pairs = [(_line(text), _line(url)) for text, url in _pairs(page.get(field))]
        if pairs:
            yield "\n".join([f"{title}:", *(f"- {text}: {url}" if text else f"- {url}" for text, url in pairs)])


def _site_links(item: Mapping[str, Any]) -> Iterator[str]:
    """The pages of its site that a search lists under a result, each `{title, link, snippet?}`."""
    links = item.get("siteLinks")
    for link in filter(lambda link: isinstance(link, dict), links if isinstance(links, list) else ()):
        title, url, snippet = (_line(link.get(field)) for field in ("title", "link", "snippet"))
        if url:
            yield (f"- {title}: {url}" if title else f"- {url}") + (f" ({snippet})" if snippet else "")


def _pairs(value: Any) -> Iterator[tuple[str, str]]:
    """Text and url from any of the shapes that the upstream uses for links and images (jina-api 3.1)."""
    if isinstance(value, dict):
        counted = list(value) == [str(index) for index in range(len(value))]  # then "text,url" is under each number
        for text, url in value.items():
            joined = _JOINED_PAIR.fullmatch(_text(url)) if counted else None
            yield (joined[1], joined[2]) if joined else (text, _text(url))
    elif isinstance(value, list):
        for pair in value:
            match pair:
                case [str(text), str(url)]:
                    yield text, url


def _usage(envelope: Mapping[str, Any]) -> Usage:
    """Tokens as charged: of the whole answer, else the results' shares of it, rounded up (jina-api section 5).

    Each number is held to what a metric and a card can add up, whatever the upstream says.
    """
    meta, data = envelope.get("meta"), envelope.get("data")
    tokens = next((found for holder in (meta, data) if (found := _tokens(holder)) is not None), None)
    if tokens is None and isinstance(data, list):
        tokens = sum(_tokens(item) or 0 for item in data)
    return Usage(tokens=tokens or 0, requests=1)


def _tokens(holder: Any) -> int | None:
    usage = holder.get("usage") if isinstance(holder, dict) else None
    tokens = usage.get("tokens") if isinstance(usage, dict) else None
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        return None
    return min(max(tokens, 0), _MOST_TOKENS)


def _present(item: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Fields that are there; only texts and numbers, since what is nested too deeply could not be stored."""
    return {
        field: item[field] for field in fields if isinstance(item.get(field), str | int | float) and item[field] != ""
    }


def _some(value: Any) -> tuple[Any, ...]:
    return (value,) if value not in (None, "", 0) else ()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _line(value: Any) -> str:
    return one_line(str(value)) if isinstance(value, str | int | float) else ""
