"""From the upstream's envelope to what a model reads and a UI renders (tool-design section 3).

Counts and lengths are capped before anything walks through a text; only a page's body stays whole. Computations are in
steps, because one answer may bring 10 MB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from openapi_tool.jina.failures import NOTHING_SECRET, quoted
from openapi_tool.protocol.errors import UpstreamRejected, UpstreamUnavailable
from openapi_tool.steps import Steps, at_once, each
from openapi_tool.telemetry.redact import Redactor, of_call
from openapi_tool.tools.result import ToolOutput, Usage, framed, framed_text, one_line

_BODY_FIELDS = ("content", "text", "html")
_SHOTS = {"screenshotUrl": "Screenshot", "pageshotUrl": "Page shot"}
_JOINED_PAIR = re.compile(r"(.*?),([a-z][a-z0-9+.-]*:.*)", re.DOTALL)
_MOST_TOKENS = 10**9

_MOST_CHARS = 2_000
"""Characters of one fact or one line: a title, a warning, the text of a link."""
_MOST_URL_CHARS = 16_000
_MOST_DESCRIPTION_CHARS = 10_000
_MOST_WARNINGS, _MOST_WARNING_CHARS = 20, 20_000
_MOST_RESULTS, _MOST_SITE_LINKS, _MOST_LINKS = 100, 20, 10_000
_JOINED_CHARS = range(1, _MOST_CHARS + _MOST_URL_CHARS)
_URLS = frozenset({"url", "imageUrl"})


@dataclass(frozen=True, slots=True)
class Masks:
    """What an answer must not show (what was sent with its call), and what no error may (every secret)."""

    answer: Redactor
    error: Redactor


NOTHING_KNOWN = Masks(of_call(()), NOTHING_SECRET)


def search_output(envelope: Mapping[str, Any], query: str, *, with_pages: bool = False) -> ToolOutput:
    """Numbered results; none found is an answer, not an error. `with_pages` says that their pages were asked for."""
    return at_once(search_steps(envelope, query, with_pages=with_pages))


def search_steps(
    envelope: Mapping[str, Any], query: str, *, with_pages: bool = False, masks: Masks = NOTHING_KNOWN
) -> Steps[ToolOutput]:
    """As `search_output`, in steps, without secrets."""
    output = yield from _search_steps(envelope, query, masks, with_pages=with_pages)
    del envelope
    return (yield from _masked(output, masks.answer))


def _search_steps(envelope: Mapping[str, Any], query: str, masks: Masks, *, with_pages: bool) -> Steps[ToolOutput]:
    results = envelope.get("data")
    if results is None:
        results = []
    if not isinstance(results, list) or not all(isinstance(item, dict) for item in results):
        raise UpstreamUnavailable("The search answered in an unexpected shape; try again later.")
    if not results:
        return _no_results(query, _usage(envelope), masks.answer, with_pages=with_pages)
    page = _Page(masks.answer)
    shown = results[:_MOST_RESULTS]
    blocks = yield from framed((yield from _result_blocks(shown, page)))
    if len(results) > len(shown):
        blocks = (*blocks, f"[{len(results) - len(shown):,} more results are left out.]")
    state = {"results": [page.facts(item, ("title", "url", "date", "source")) for item in shown]}
    return ToolOutput(blocks, state, _usage(envelope), whole=True)


def _no_results(query: str, usage: Usage, redactor: Redactor, *, with_pages: bool) -> ToolOutput:
    """The answer for a search that found nothing; with pages it may only have run out of time (jina-api 2.2)."""
    says = (
        f"No results for {redactor.head(one_line(query), 200)!r}. "
        "Use other or fewer words, or drop filters such as site or language."
    )
    if with_pages:
        says += " If there should be some, search without page content: pages that load slowly are left out."
    return ToolOutput((says,), {"results": []}, usage, whole=True)


def _masked(output: ToolOutput, redactor: Redactor) -> Steps[ToolOutput]:
    """An output without secrets, before anything of it is cut: half a key is not known as one."""
    blocks = yield from each(map(redactor.steps, output.blocks))
    return ToolOutput(tuple(blocks), redactor.value(output.state), output.usage, whole=output.whole)


def _result_blocks(results: list[Mapping[str, Any]], page: _Page) -> Steps[list[str]]:
    """Each result; warnings that an earlier one has in full are told by its number."""
    first: dict[tuple[str, ...], int] = {}
    blocks = []
    for number, item in enumerate(results, start=1):
        facts = page.facts(item, ("url", "date", "publishedTime", "source", "imageUrl"))
        warnings = page.warnings(item)
        if warnings and (same := first.setdefault(warnings, number)) != number:
            warnings = (f"as for {same}",)
        lines = [
            f"{number}. {page.line(item.get('title')) or '(no title)'}",
            *(one_line(str(fact)) for fact in facts.values()),
            *(f"Warning: {warning}" for warning in warnings),
            page.line(item.get("description"), _MOST_DESCRIPTION_CHARS),
            *page.site_links(item),
            "\n\n".join(page.bodies(item)),
        ]
        yield
        lines += yield from page.lists(item)
        blocks.append("\n".join(filter(None, lines)))
    return blocks


def page_output(envelope: Mapping[str, Any]) -> ToolOutput:
    """A page: title, url, published time, warnings, body; links and images where they were asked for."""
    return at_once(page_steps(envelope))


def page_steps(envelope: Mapping[str, Any], masks: Masks = NOTHING_KNOWN) -> Steps[ToolOutput]:
    """As `page_output`, in steps, without secrets."""
    output = yield from _page_steps(envelope, masks)
    del envelope  # and with it the text as it came: a copy may be four times as large as the answer
    return (yield from _masked(output, masks.answer))


def _page_steps(envelope: Mapping[str, Any], masks: Masks) -> Steps[ToolOutput]:
    item = envelope.get("data")
    if not isinstance(item, dict):
        raise UpstreamUnavailable("The reader answered in an unexpected shape; try again later.")
    page = _Page(masks.answer)
    parts = list(page.bodies(item))
    yield
    lists = yield from page.lists(item)
    warnings = page.warnings(item)
    if warnings and not parts and not lists:
        raise _nothing_to_read(_text(item.get("warning")), _usage(envelope).tokens, masks.error)
    head = [
        f"Title: {page.line(item.get('title')) or '(none)'}",
        f"URL: {page.line(item.get('url'), _MOST_URL_CHARS)}",
        *(f"Published: {page.line(published)}" for published in _some(item.get("publishedTime"))),
        *(f"Pages: {page.line(count)}" for count in _some(item.get("numPages"))),
        *(f"Warning: {warning}" for warning in warnings),
    ]
    state = page.facts(item, ("title", "url", "publishedTime", "warning", "numPages"))
    text = yield from framed_text(["\n".join(head), *(parts or ["(The page has no readable text.)"]), *lists])
    return ToolOutput((text,), state, _usage(envelope))


def _nothing_to_read(warning: str, tokens: int, redactor: Redactor) -> UpstreamRejected:
    """The failure of a page of which only warnings came, which is charged all the same."""
    failure = UpstreamRejected(
        "The page has nothing to read; check the address or use another page. "
        f"The service says: {quoted(redactor.head(warning, _MOST_CHARS))}"
    )
    failure.tokens = tokens
    return failure


class _Page:
    """Reads the fields of a page or a result, each held to its length; a cut leaves no half of a secret."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor

    def line(self, value: Any, chars: int = _MOST_CHARS) -> str:
        """A text or a number as one line."""
        return one_line(self._short(str(value), chars)) if isinstance(value, str | int | float) else ""

    def _short(self, text: str, chars: int) -> str:
        if len(text) <= chars:
            return text
        return f"{self._redactor.head(text, chars)} … ({len(text) - chars:,} characters more)"

    def facts(self, item: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
        """Fields that are there; only texts and numbers, since what is nested too deeply could not be stored."""
        return {
            field: self._short(item[field], _MOST_URL_CHARS if field in _URLS else _MOST_CHARS)
            if isinstance(item[field], str)
            else item[field]
            for field in fields
            if isinstance(item.get(field), str | int | float) and item[field] != ""
        }

    def warnings(self, item: Mapping[str, Any]) -> tuple[str, ...]:
        """One per line of the upstream's text, in which a target's own error is one too (jina-api 3.1)."""
        lines = self._short(_text(item.get("warning")), _MOST_WARNING_CHARS).splitlines()
        shown = tuple(filter(None, map(self.line, lines[:_MOST_WARNINGS])))
        left = len(lines) - _MOST_WARNINGS
        return (*shown, f"({left:,} more lines)") if left > 0 else shown

    def bodies(self, page: Mapping[str, Any]) -> Iterator[str]:
        """Every form of the body that came, in a fixed order; chunks, which repeat the content, only in its place."""
        texts = [text for field in _BODY_FIELDS if (text := _text(page.get(field)).strip())]
        chunks = page.get("chunks")
        if isinstance(chunks, list) and not _text(page.get("content")).strip():
            texts += [chunk for chunk in chunks if isinstance(chunk, str) and chunk.strip()]
        yield from texts
        for field, label in _SHOTS.items():
            if url := self.line(page.get(field), _MOST_URL_CHARS):
                yield f"{label}: {url}"

    def lists(self, page: Mapping[str, Any]) -> Steps[list[str]]:
        """The links and the images, each with its title."""
        found = []
        for title, field in (("Links", "links"), ("Images", "images")):
            lines = [f"{title}:"]
            for text, url in islice(_pairs(page.get(field)), _MOST_LINKS):
                lines.append(self._link(text, url))
                yield
            if len(lines) > _MOST_LINKS and (left := len(page[field]) - _MOST_LINKS):
                lines.append(f"({left:,} more are left out.)")
            if len(lines) > 1:
                found.append("\n".join(lines))
        return found

    def _link(self, text: str, url: str, snippet: str = "") -> str:
        title, address, about = self.line(text), self.line(url, _MOST_URL_CHARS), self.line(snippet)
        return (f"- {title}: {address}" if title else f"- {address}") + (f" ({about})" if about else "")

    def site_links(self, item: Mapping[str, Any]) -> Iterator[str]:
        """The pages of its site that a search lists under a result, each `{title, link, snippet?}`."""
        links = item.get("siteLinks")
        known = [link for link in links if isinstance(link, dict)] if isinstance(links, list) else []
        for link in known[:_MOST_SITE_LINKS]:
            if self.line(link.get("link"), _MOST_URL_CHARS):
                yield self._link(_text(link.get("title")), link["link"], link.get("snippet") or "")


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


def _pairs(value: Any) -> Iterator[tuple[str, str]]:
    """Text and url from any of the shapes that the upstream uses for links and images (jina-api 3.1)."""
    if isinstance(value, dict):
        counted = all(text == str(place) for place, text in enumerate(value))  # then "text,url" is under each number
        for text, url in value.items():
            joined = _JOINED_PAIR.fullmatch(url) if counted and len(_text(url)) in _JOINED_CHARS else None
            yield (joined[1], joined[2]) if joined else (text, _text(url))
    elif isinstance(value, list):
        for pair in value:
            match pair:
                case [str(text), str(url)]:
                    yield text, url


def _some(value: Any) -> tuple[Any, ...]:
    return (value,) if value not in (None, "", 0) else ()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
