"""Render upstream responses as text for a model and as state for a UI (tool-design section 3).

Counts and lengths are limited before a text is traversed; only the body of a page stays whole.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from openapi_tool.jina import remarks
from openapi_tool.jina.barriers import barrier_type, title_type
from openapi_tool.jina.failures import quoted
from openapi_tool.jina.hosts import denied_target, host_of, is_lookalike
from openapi_tool.jina.inline_data import is_inline, without_inline_data, without_inline_images
from openapi_tool.jina.shown_hosts import DeniedHosts, ShownResults
from openapi_tool.protocol.errors import UpstreamRejected, UpstreamUnavailable
from openapi_tool.protocol.jsontext import whole_number
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.output import BLOCK_GAP, Item, ToolOutput, Usage
from openapi_tool.tools.wording import counted, one_line

_BODY_FIELDS = ("content", "text", "html")
_LABELS = {"url": "", "date": "Date: ", "publishedTime": "Published: ", "source": "Source: ", "imageUrl": "Image: "}
_RESULT_FACTS = ("title", *_LABELS)
_RESULT_PARTS = (
    *_RESULT_FACTS,
    *_BODY_FIELDS,
    "description",
    "chunks",
    "links",
    "images",
    "screenshotUrl",
    "pageshotUrl",
)
_STATE_FACTS = ("title", "url", "date", "source")
_NON_TEXT_BODIES = ("html", "chunks", "screenshotUrl", "pageshotUrl")  # without text, any of these still shows a page
_WALLS = ("captcha", "login", "consent")
_UNCERTAIN = ("not_loaded", "may_be_captcha")  # types of "maybe", which a known barrier replaces
_SCREENSHOT_LABELS = {"screenshotUrl": "Screenshot", "pageshotUrl": "Page shot"}
_JOINED_PAIR = re.compile(r"(.*?),([a-z][a-z0-9+.-]*:.*)", re.DOTALL)
_MAX_TOKENS = 10**9  # of a charge

_MAX_CHARS = 2_000
"""Limit of one field or line: a title, a warning, the text of a link."""
_MAX_URL_CHARS = 16_000
_MAX_DESCRIPTION_CHARS = 10_000
_MAX_PAGE_DESCRIPTION_CHARS = 200
"""Limit of a page's own description, which is shown only if it has a word that the page does not show."""
_MAX_COMPARED_CHARS = 20_000  # of title and body, in which these words are searched
_MAX_FAVICON_CHARS = 4_000  # the upstream's icons of 32 pixels have up to 3,000
_MAX_WARNINGS, _MAX_WARNING_CHARS = 20, 20_000
_MAX_RESULTS, _MAX_SITE_LINKS, _MAX_LINKS = 100, 20, 10_000
_JOINED_PAIR_CHARS = range(1, _MAX_CHARS + _MAX_URL_CHARS)  # limits the time of the regex; 0 is no string
_URLS = frozenset({"url", "imageUrl"})
_NUMBERS = (int, float)
_PLAIN = (str, *_NUMBERS)  # constants: `isinstance` with `str | int | float` would create that union for each field


@dataclass(frozen=True, slots=True)
class RenderContext:
    """Context of a response: `redactor` masks the secrets sent with its call (see `of_call`).

    `offers` returns whether a remedy may name an argument. `names` maps parameters to the model's names for them.
    `denied` are hosts that are not shown.
    """

    redactor: Redactor
    offers: remarks.Offers
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    denied: tuple[str, ...] = ()


def search_output(envelope: Mapping[str, Any], parameters: Mapping[str, Any], context: RenderContext) -> ToolOutput:
    """Render search results; an empty list is a success, and an item that holds no result is left out."""
    with_pages = parameters.get("respondWith") != "no-content"
    max_tokens = parameters.get("maxTokens") if with_pages else None
    data = envelope.get("data")
    results = list(filter(_holds_result, data)) if isinstance(data, list) else []
    if not isinstance(data, list) or (data and not results):
        raise UpstreamUnavailable("The search answered in an unexpected shape; try again later.")
    if not results:
        query = one_line(str(parameters.get("q", "")))[:200]
        text = f"No results for {query!r}. {remarks.other_search(context.names)}"
        if with_pages:  # it may have timed out (jina-api 2.2)
            text += " If there should be some, search without page content: pages that load slowly are left out."
        return ToolOutput((Item(caption=text),), {"results": []}, usage_of(envelope))
    reader = _FieldReader(context)
    unreadable = len(data) - len(results)
    kept = ShownResults(results, parameters, reader.denied)
    if not kept.shown:
        text = f"{kept.none_shown()} {remarks.other_search(context.names)}"
        return ToolOutput((Item(caption=text),), {"results": []}, usage_of(envelope))
    shown = kept.shown[:_MAX_RESULTS]
    items, facts, warned = _result_items(shown, reader, max_tokens, with_pages=with_pages)
    if len(kept.shown) > len(shown):
        items.append(Item(caption=f"[{counted(len(kept.shown) - len(shown), 'more result', 'left out')}.]"))
    if unreadable:
        items.append(Item(caption=remarks.unreadable_results(unreadable)))
    numbered = list(enumerate(facts, start=1))
    if max_tokens and (cut := [number for number, one in numbered if "cut_at_tokens" in one]):
        items.append(Item(caption=remarks.cut_results(cut, max_tokens)))
    if errors := {number: one["target_status"] for number, one in numbered if "target_status" in one}:
        items.append(Item(caption=remarks.target_errors(errors)))
    items += [Item(caption=remark) for remark in [*kept.remarks(), reader.denied.remark()] if remark]
    items += [Item(caption=remarks.result_warning(kind, numbers, context.offers)) for kind, numbers in warned.items()]
    return ToolOutput(tuple(items), {"results": facts}, usage_of(envelope))


def _result_items(
    results: Sequence[Mapping[str, Any]], reader: _FieldReader, max_tokens: int | None, *, with_pages: bool
) -> tuple[list[Item], list[dict[str, Any]], dict[str, list[int]]]:
    """Return for each result its item and its facts for a UI; and the numbers of results by warning type."""
    first_with: dict[tuple[str, ...], int] = {}  # number of the first result with these warnings
    items: list[Item] = []
    state: list[dict[str, Any]] = []
    warned: dict[str, list[int]] = {}
    for number, result in enumerate(results, start=1):
        facts = reader.facts(result, _RESULT_FACTS, are_shown=True)  # for the text
        ui_facts = {field: facts[field] for field in _STATE_FACTS if field in facts}
        title = str(facts.pop("title", ""))
        if favicon := _favicon(result):
            ui_facts["favicon"] = favicon
        image = str(facts.get("imageUrl", ""))
        if image and (is_inline(image) or reader.denied.has_link(image)):
            del facts["imageUrl"]
        warnings = reader.warnings(result)
        if warnings and (first := first_with.setdefault(warnings, number)) != number:
            warnings = (f"as for {first}",)
        lines = [
            f"{number}. {title or '(no title)'}",
            *(f"{_LABELS[field]}{fact}" for field, fact in facts.items()),
            *(f"Warning: {warning}" for warning in warnings),
            reader.line(result.get("description"), _MAX_DESCRIPTION_CHARS),
            *reader.site_links(result),
        ]
        bodies = without_inline_images(list(reader.bodies(result)))
        body = BLOCK_GAP.join([*bodies, *reader.lists(result)])
        if max_tokens and remarks.is_cut(_tokens(result), max_tokens):
            ui_facts["cut_at_tokens"] = max_tokens
        items.append(Item("\n".join(filter(None, lines)), body))
        # Without any of these no text is there to be judged: skip the search.
        is_judged = with_pages or bodies or result.get("warning")
        types = reader.warning_types(result, with_text=with_pages) if is_judged else ()
        if types := (*types, *_lookalike(result)):
            ui_facts["warnings"] = list(types)
            for kind in types:
                if kind not in remarks.TARGET_ERROR_TYPES:  # these are listed with their statuses (`search_output`)
                    warned.setdefault(kind, []).append(number)
        if (status := reader.target_status(result)) is not None:
            ui_facts["target_status"] = status
        state.append(ui_facts)
    return items, state, warned


def page_output(envelope: Mapping[str, Any], parameters: Mapping[str, Any], context: RenderContext) -> ToolOutput:
    """Render a page."""
    page = envelope.get("data")
    if not isinstance(page, dict):
        raise UpstreamUnavailable("The reader answered in an unexpected shape; try again later.")
    reader = _FieldReader(context)
    if reader.denied.has(address := _text(page.get("url"))):
        raise denied_target(host_of(address))
    bodies = without_inline_images(list(reader.bodies(page)))
    lists = reader.lists(page)
    warnings = reader.warnings(page)
    warning_types = (*reader.warning_types(page, with_text=True), *_lookalike(page))
    status = reader.target_status(page)
    if not bodies and not lists and _text(page.get("warning")).strip():  # its error; without one it is just empty
        raise _nothing_to_read(warnings, warning_types, status, context)
    head = [
        f"Title: {reader.line(page.get('title')) or '(none)'}",
        f"URL: {reader.line(page.get('url'), _MAX_URL_CHARS)}",
        *(
            f"{label}: {reader.line(page[field])}"
            for label, field in (("Published", "publishedTime"), ("Pages", "numPages"))
            if page.get(field) not in (None, "", 0)
        ),
        *(f"Warning: {warning}" for warning in warnings),
        *([f"Description: {text}"] if (text := reader.description(page, bodies)) else []),
    ]
    state = reader.facts(page, ("title", "url", "publishedTime", "warning", "numPages"), are_shown=False)
    body = BLOCK_GAP.join([*bodies, *lists])
    captions = [f"[Warning: {remarks.page_warning(kind, context.offers, status)}]" for kind in warning_types]
    captions += filter(None, [reader.denied.remark()])
    usage = usage_of(envelope)
    max_tokens = parameters.get("maxTokens")
    after = ""
    if warning_types:
        state["warnings"] = list(warning_types)
    if status is not None:
        state["target_status"] = status
    if max_tokens and remarks.is_cut(usage.tokens, max_tokens):
        captions.append(remarks.cut_page(max_tokens, context.offers))
        after = remarks.end_of_cut_page(max_tokens)
        state["cut_at_tokens"] = max_tokens
    return ToolOutput((Item("\n".join(head), body, "\n".join(captions), after),), state, usage)


def _nothing_to_read(
    warnings: tuple[str, ...], types: tuple[str, ...], status: int | None, context: RenderContext
) -> UpstreamRejected:
    wait = "wait for it with wait_for_selector, " if context.offers("wait_for_selector") else ""
    parts = [
        f"The page has nothing to read; check the address, {wait}or use another page.",
        *(remarks.page_warning(kind, context.offers, status) for kind in types if kind != "empty"),
    ]
    if warnings:
        parts.append(f"The service says: {quoted(context.redactor.head(' '.join(warnings), _MAX_CHARS))}")
    return UpstreamRejected(" ".join(parts))


class _FieldReader:
    """Reads fields, each within its limit; a secret that the limit would cut is masked."""

    def __init__(self, context: RenderContext) -> None:
        self._redactor = context.redactor
        self.denied = DeniedHosts(context.denied)

    def line(self, value: Any, chars: int = _MAX_CHARS) -> str:
        """Return a text or number in one line, and nothing for any other value."""
        return one_line(self.denied.without(self._short(str(value), chars))) if isinstance(value, _PLAIN) else ""

    def _short(self, text: str, chars: int) -> str:
        text = without_inline_data(text)
        if len(text) <= chars:
            return text
        return f"{self._redactor.head(text, chars)} … ({counted(len(text) - chars, 'character')} more)"

    def facts(self, item: Mapping[str, Any], fields: tuple[str, ...], *, are_shown: bool) -> dict[str, Any]:
        """Return those of the fields that are texts or numbers: deeply nested values cannot be stored.

        With `are_shown` no other method returns them, so the links in them are counted.
        """
        facts: dict[str, Any] = {}
        clean = self.denied.without if are_shown else self.denied.uncounted
        for field in fields:
            value = item.get(field)
            if not isinstance(value, str):
                if isinstance(value, _NUMBERS):
                    facts[field] = value
            elif field in _URLS and value:
                facts[field] = one_line(self._short(value, _MAX_URL_CHARS))
            elif value:
                text = clean(self._short(value, _MAX_CHARS))
                facts[field] = text if field == "warning" else one_line(text)
        return facts

    def warnings(self, item: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the free-text lines, such as an error of the page."""
        text = _text(item.get("warning"))
        if not text:
            return ()
        lines = [
            line
            for line in self._short(text, _MAX_WARNING_CHARS).splitlines()
            if not remarks.UPSTREAM_WARNINGS.get(line) and not remarks.is_plain_target_error(line)
        ]
        shown = tuple(filter(None, map(self.line, lines[:_MAX_WARNINGS])))
        left = len(lines) - _MAX_WARNINGS
        return (*shown, f"({counted(left, 'more line')})") if left > 0 else shown

    def warning_types(self, item: Mapping[str, Any], *, with_text: bool) -> tuple[str, ...]:
        """Return the types, such as `captcha` for a bot check; `with_text` means that page text was requested."""
        text = _text(item.get("content")) or _text(item.get("text"))
        title = _text(item.get("title"))
        if text and not text.isspace():
            barrier = barrier_type(title, text)
        elif not with_text or any(map(item.get, _NON_TEXT_BODIES)):
            barrier = None
        else:
            barrier = title_type(title) or "empty"
        found = dict.fromkeys(filter(None, (barrier, *map(_warning_type, _warning_lines(item)))))  # each once, in order
        if barrier in _WALLS:  # this is why anything else is missing, unless the server says that there is no page
            return ("not_found",) if "not_found" in found else (barrier,)
        return tuple(kind for kind in found if barrier is None or kind not in _UNCERTAIN)

    @staticmethod
    def target_status(item: Mapping[str, Any]) -> int | None:
        """Return the HTTP status of the page's own server if it was an error."""
        statuses = map(remarks.target_status, _warning_lines(item))
        return next((status for status in statuses if status is not None), None)

    def description(self, page: Mapping[str, Any], bodies: list[str]) -> str:
        """Return the description if it has a word that is neither in the title nor in the body."""
        description = self.line(page.get("description"), _MAX_PAGE_DESCRIPTION_CHARS)
        if not description:
            return ""
        texts = _text(page.get("title")), *bodies[:1]
        shown = "\n".join(text[:_MAX_COMPARED_CHARS] for text in texts).lower()
        words = description.lower().replace(".", " ").replace(",", " ").split()
        return "" if all(map(shown.__contains__, words)) else description

    def bodies(self, page: Mapping[str, Any]) -> Iterator[str]:
        """Yield all forms of the body; chunks only without content, which they repeat."""
        texts = [text for field in _BODY_FIELDS if (given := page.get(field)) and (text := _text(given).strip())]
        chunks = page.get("chunks")
        if isinstance(chunks, list) and not _text(page.get("content")).strip():
            texts += [chunk for chunk in chunks if isinstance(chunk, str) and chunk.strip()]
        yield from map(self.denied.without, texts)
        for field, label in _SCREENSHOT_LABELS.items():
            if page.get(field) and (url := self.line(page[field], _MAX_URL_CHARS)):
                yield f"{label}: {url}"

    def lists(self, page: Mapping[str, Any]) -> list[str]:
        found = []
        for title, field in (("Links", "links"), ("Images", "images")):
            if not page.get(field):
                continue
            lines = [f"{title}:"]
            for text, url in islice(_pairs(page.get(field)), _MAX_LINKS):
                if not self.denied.has_link(url):
                    lines.append(self._link(text, url))
            if len(lines) > _MAX_LINKS and (left := len(page[field]) - _MAX_LINKS):
                lines.append(f"({left:,} more {'is' if left == 1 else 'are'} left out.)")
            if len(lines) > 1:
                found.append("\n".join(lines))
        return found

    def _link(self, text: str, url: str, snippet: str = "") -> str:
        title, note = self.line(text), self.line(snippet)
        if is_inline(url):
            return f"- {title}"
        address = self.line(url, _MAX_URL_CHARS)
        return (f"- {title}: {address}" if title else f"- {address}") + (f" ({note})" if note else "")

    def site_links(self, item: Mapping[str, Any]) -> Iterator[str]:
        """Each is `{title, link, snippet?}`."""
        links = item.get("siteLinks")
        known = [link for link in links if isinstance(link, dict)] if isinstance(links, list) else []
        for link in known[:_MAX_SITE_LINKS]:
            url = self.line(link.get("link"), _MAX_URL_CHARS)
            if url and not self.denied.has_link(url):
                yield self._link(_text(link.get("title")), url, link.get("snippet") or "")


def _holds_result(item: Any) -> bool:
    return isinstance(item, dict) and any(map(item.get, _RESULT_PARTS))


def _lookalike(item: Mapping[str, Any]) -> tuple[str, ...]:
    return ("lookalike",) if is_lookalike(host_of(_text(item.get("url")))) else ()


def _favicon(item: Mapping[str, Any]) -> str:
    """Return the address of a result's icon, which only a UI can show."""
    address = _text(item.get("favicon"))
    return address if len(address) <= _MAX_FAVICON_CHARS and address.startswith(("data:image/", "https://")) else ""


def _warning_lines(item: Mapping[str, Any]) -> list[str]:
    return _text(item.get("warning"))[:_MAX_WARNING_CHARS].splitlines()[:_MAX_WARNINGS]


def _warning_type(line: str) -> str | None:
    status = remarks.target_status(line)
    return remarks.UPSTREAM_WARNINGS.get(line) if status is None else remarks.target_error_type(status)


def usage_of(envelope: Mapping[str, Any]) -> Usage:
    """Return the charged tokens: of the whole response, else the sum over its results (jina-api section 5).

    Each number is limited, so that metrics and cards can add up any value of the upstream.
    """
    meta, data = envelope.get("meta"), envelope.get("data")
    tokens = next((found for holder in (meta, data) if (found := _tokens(holder)) is not None), None)
    if tokens is None and isinstance(data, list):
        tokens = sum(_tokens(item) or 0 for item in data)
    return Usage(tokens=tokens or 0, requests=1)


def _tokens(holder: Any) -> int | None:
    usage = holder.get("usage") if isinstance(holder, dict) else None
    tokens = whole_number(usage.get("tokens")) if isinstance(usage, dict) else None
    return None if tokens is None else min(max(tokens, 0), _MAX_TOKENS)


def _pairs(value: Any) -> Iterator[tuple[str, str]]:
    """Yield text and url from each of the upstream's shapes of links and images (jina-api 3.1)."""
    if isinstance(value, dict):
        is_numbered = all(text == str(place) for place, text in enumerate(value))  # then each value is "text,url"
        for text, url in value.items():
            joined = _JOINED_PAIR.fullmatch(url) if is_numbered and len(_text(url)) in _JOINED_PAIR_CHARS else None
            yield (joined[1], joined[2]) if joined else (text, _text(url))
    elif isinstance(value, list):
        for pair in value:
            match pair:
                case [str(text), str(url)]:
                    yield text, url


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
