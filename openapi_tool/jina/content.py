"""From the upstream's envelope to what a model reads and a UI renders (tool-design section 3)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from openapi_tool.protocol.errors import UpstreamRejected, UpstreamUnavailable
from openapi_tool.tools.result import ToolOutput, Usage, one_line, untrusted

_BODY_FIELDS = ("content", "text", "html")
_JOINED_PAIR = re.compile(r"(.*?),([a-z][a-z0-9+.-]*:.*)", re.DOTALL)


def search_output(envelope: Mapping[str, Any], query: str) -> ToolOutput:
    """Numbered results; none found is an answer, not an error."""
    results = envelope.get("data")
    if results is None:
        results = []
    if not isinstance(results, list) or not all(isinstance(item, dict) for item in results):
        raise UpstreamUnavailable("The search answered in an unexpected shape; try again later.")
    if not results:
        return _no_results(query, _usage(envelope))
    blocks = [_result_block(number, item) for number, item in enumerate(results, start=1)]
    state = {"results": [_present(item, ("title", "url", "date", "source")) for item in results]}
    return ToolOutput(untrusted("\n\n".join(blocks)), state, _usage(envelope))


def _no_results(query: str, usage: Usage) -> ToolOutput:
    """The answer for a search that found nothing."""
    return ToolOutput(
        f"No results for {one_line(query)[:200]!r}. "
        "Use other or fewer words, or drop filters such as site or language.",
        {"results": []},
        usage,
    )


def _result_block(number: int, item: Mapping[str, Any]) -> str:
    facts = _present(item, ("url", "date", "publishedTime", "source", "imageUrl", "warning"))
    lines = [f"{number}. {_line(item.get('title')) or '(no title)'}", *(_line(fact) for fact in facts.values())]
    snippet = _line(item.get("description"))
    page = next((text for field in _BODY_FIELDS if (text := _text(item.get(field)))), "")
    return "\n".join([*lines, *filter(None, (snippet, page))])


def page_output(envelope: Mapping[str, Any]) -> ToolOutput:
    """A page: title, url, published time, warnings, body; links and images where they were asked for."""
    page = envelope.get("data")
    if not isinstance(page, dict):
        raise UpstreamUnavailable("The reader answered in an unexpected shape; try again later.")
    body = "\n\n".join(_bodies(page))
    warning = _line(page.get("warning"))
    if not body and warning:
        raise UpstreamRejected(f"The page has nothing to read: {warning[:300]}. Check the address or use another page.")
    head = [
        f"Title: {_line(page.get('title')) or '(none)'}",
        f"URL: {_line(page.get('url'))}",
        *(f"Published: {_line(published)}" for published in _some(page.get("publishedTime"))),
        *(f"Pages: {count}" for count in _some(page.get("numPages"))),
        *(f"Warning: {_line(line)}" for line in _text(page.get("warning")).splitlines() if line.strip()),
    ]
    parts = ["\n".join(head), body or "(The page has no readable text.)", *_lists(page)]
    state = _present(page, ("title", "url", "publishedTime", "warning", "numPages"))
    return ToolOutput(untrusted("\n\n".join(parts)), state, _usage(envelope))


def _bodies(page: Mapping[str, Any]) -> Iterator[str]:
    """Every form of the body that came, in a fixed order; chunks where it came in chunks."""
    for field in _BODY_FIELDS:
        if text := _text(page.get(field)).strip():
            yield text
    chunks = page.get("chunks")
    if isinstance(chunks, list):
        yield from (chunk for chunk in chunks if isinstance(chunk, str) and chunk.strip())
    for field in ("screenshotUrl", "pageshotUrl"):
        if url := _line(page.get(field)):
            yield f"{field}: {url}"


def _lists(page: Mapping[str, Any]) -> Iterator[str]:
    links = [f"- {_line(text)}: {_line(url)}" for text, url in _pairs(page.get("links"))]
    images = [f"- {_line(text)}: {_line(url)}" for text, url in _pairs(page.get("images"))]
    if links:
        yield "Links:\n" + "\n".join(links)
    if images:
        yield "Images:\n" + "\n".join(images)


def _pairs(value: Any) -> Iterator[tuple[str, str]]:
    """Text and url from any of the shapes that the upstream uses for links and images (jina-api 3.1)."""
    if isinstance(value, dict):
        for text, url in value.items():
            joined = _JOINED_PAIR.fullmatch(_text(url)) if text.isdigit() else None
            yield (joined[1], joined[2]) if joined else (text, _text(url))
    elif isinstance(value, list):
        for pair in value:
            match pair:
                case [str(text), str(url)]:
                    yield text, url


def _usage(envelope: Mapping[str, Any]) -> Usage:
    """Tokens as charged, from wherever this form of answer puts them (jina-api section 5)."""
    meta, data = envelope.get("meta"), envelope.get("data")
    holders = [meta] if isinstance(meta, dict) else []
    holders += [data] if isinstance(data, dict) else []
    for holder in holders:
        usage = holder.get("usage")
        tokens = usage.get("tokens") if isinstance(usage, dict) else None
        if isinstance(tokens, int) and not isinstance(tokens, bool):
            return Usage(tokens=tokens, requests=1)
    return Usage(requests=1)


def _present(item: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {field: item[field] for field in fields if item.get(field) not in (None, "")}


def _some(value: Any) -> tuple[Any, ...]:
    return (value,) if value not in (None, "", 0) else ()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _line(value: Any) -> str:
    return one_line(str(value)) if isinstance(value, str | int | float) else ""
