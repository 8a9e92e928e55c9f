"""Renders upstream responses: text for a model, and state for a UI (tool-design section 3).

`search_output` and `page_output` are the `render` functions of `response.py`. `fields.py` reads fields, each within its
limit. `page_warnings.py` finds what is wrong with a page. `remarks.py` has the words about that, and about what is
missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openapi_tool.jina import remarks
from openapi_tool.jina.failures import quoted
from openapi_tool.jina.fields import (
    BODY_FIELDS,
    MAX_CHARS,
    MAX_DESCRIPTION_CHARS,
    MAX_URL_CHARS,
    FieldReader,
    favicon,
    text_of,
)
from openapi_tool.jina.hosts import denied_target, host_of
from openapi_tool.jina.inline_data import is_inline, without_inline_images
from openapi_tool.jina.page_warnings import lookalike_type, target_status, warning_types
from openapi_tool.jina.shown_hosts import ShownResults
from openapi_tool.protocol.errors import UpstreamRejected, UpstreamUnavailable
from openapi_tool.protocol.jsontext import whole_number
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.output import PARAGRAPH_GAP, Item, ToolOutput, Usage
from openapi_tool.tools.wording import counted, one_line

_MAX_RESULTS = 100  # that are shown
_MAX_QUERY_CHARS = 200  # of the query, in the text about no results
_MAX_TOKENS = 10**9  # of a charge

_LABELS = {"url": "", "date": "Date: ", "publishedTime": "Published: ", "source": "Source: ", "imageUrl": "Image: "}
"""Fields of a search result that are shown below its title, in this order, each with what stands before its value."""
_RESULT_FACTS = ("title", *_LABELS)
_RESULT_PARTS = (
    *_RESULT_FACTS,
    *BODY_FIELDS,
    "description",
    "chunks",
    "links",
    "images",
    "screenshotUrl",
    "pageshotUrl",
)
"""Fields that make an object a search result: one of them is enough."""
_STATE_FACTS = ("title", "url", "date", "source")
"""Fields of a search result for a UI."""


@dataclass(frozen=True, slots=True)
class RenderContext:
    """What the rendering of a response depends on, beside its envelope and the parameters of its request.

    - `redactor` masks the secrets that were sent with the call (`of_call`).
    - `offers` returns whether a remedy may name an argument.
    - `names`: the model's names for the parameters that it gave, by the parameter's name.
    - `denied`: hosts that are not shown.
    """

    redactor: Redactor
    offers: remarks.Offers
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    denied: tuple[str, ...] = ()


def search_output(envelope: Mapping[str, Any], parameters: Mapping[str, Any], context: RenderContext) -> ToolOutput:
    """Render search results. An empty list is a success; an item of it that holds no result is left out."""
    data = envelope.get("data")
    results = list(filter(_holds_result, data)) if isinstance(data, list) else []
    if not isinstance(data, list) or (data and not results):
        raise UpstreamUnavailable("The search answered in an unexpected shape; try again later.")
    if not results:
        return _no_results(_nothing_found(parameters, context), envelope)
    reader = FieldReader(context.redactor, context.denied)
    kept = ShownResults(results, parameters, reader.denied)
    if not kept.shown:
        return _no_results(f"{kept.none_shown()} {remarks.other_search(context.names)}", envelope)
    with_pages = _asks_for_pages(parameters)
    max_tokens = parameters.get("maxTokens") if with_pages else None
    rendered = _RenderedResults(reader, max_tokens, with_pages=with_pages)
    for result in kept.shown[:_MAX_RESULTS]:
        rendered.add(result)
    captions = []
    left = len(kept.shown) - len(rendered.items)
    if left:
        captions.append(f"[{counted(left, 'more result', 'left out')}.]")
    unreadable = len(data) - len(results)
    if unreadable:
        captions.append(remarks.unreadable_results(unreadable))
    captions += rendered.about_pages()
    captions += kept.remarks()
    captions += filter(None, [reader.denied.remark()])
    captions += rendered.warnings(context.offers)
    items = [*rendered.items, *(Item(caption=caption) for caption in captions)]
    return ToolOutput(tuple(items), {"results": rendered.facts}, usage_of(envelope))


def page_output(envelope: Mapping[str, Any], parameters: Mapping[str, Any], context: RenderContext) -> ToolOutput:
    """Render a page."""
    page = envelope.get("data")
    if not isinstance(page, dict):
        raise UpstreamUnavailable("The reader answered in an unexpected shape; try again later.")
    reader = FieldReader(context.redactor, context.denied)
    address = text_of(page.get("url"))
    if reader.denied.has(address):
        raise denied_target(host_of(address))
    bodies = without_inline_images(list(reader.bodies(page)))
    lists = reader.lists(page)
    warnings = reader.warnings(page)
    types = (*warning_types(page, with_text=True), *lookalike_type(page))
    status = target_status(page)
    has_error = bool(text_of(page.get("warning")).strip())
    if not bodies and not lists and has_error:  # without an error the page is just empty
        raise _nothing_to_read(warnings, types, status, context)
    head = "\n".join(_page_lines(page, reader, warnings, bodies))
    state = reader.facts(page, ("title", "url", "publishedTime", "warning", "numPages"), are_shown=False)
    captions = [f"[Warning: {remarks.page_warning(kind, context.offers, status)}]" for kind in types]
    captions += filter(None, [reader.denied.remark()])
    usage = usage_of(envelope)
    max_tokens = parameters.get("maxTokens")
    after = ""
    if types:
        state["warnings"] = list(types)
    if status is not None:
        state["target_status"] = status
    if max_tokens and remarks.is_cut(usage.tokens, max_tokens):
        captions.append(remarks.cut_page(max_tokens, context.offers))
        after = remarks.end_of_cut_page(max_tokens)
        state["cut_at_tokens"] = max_tokens
    body = PARAGRAPH_GAP.join([*bodies, *lists])
    return ToolOutput((Item(head, body, "\n".join(captions), after),), state, usage)


def usage_of(envelope: Mapping[str, Any]) -> Usage:
    """Return the charged tokens: of the whole response, else the sum over its results (jina-api section 5).

    Each number is limited, so that metrics and cards can add up any value of the upstream.
    """
    data = envelope.get("data")
    tokens = _tokens(envelope.get("meta"))
    if tokens is None:
        tokens = _tokens(data)
    if tokens is None and isinstance(data, list):
        tokens = sum(_tokens(item) or 0 for item in data)
    return Usage(tokens=tokens or 0, requests=1)


def _tokens(holder: Any) -> int | None:
    """Return `usage.tokens` of an object, None if it has none."""
    usage = holder.get("usage") if isinstance(holder, dict) else None
    tokens = whole_number(usage.get("tokens")) if isinstance(usage, dict) else None
    return None if tokens is None else min(max(tokens, 0), _MAX_TOKENS)


def _asks_for_pages(parameters: Mapping[str, Any]) -> bool:
    """Return whether a search asks for the texts of its results' pages."""
    return parameters.get("respondWith") != "no-content"


def _holds_result(item: Any) -> bool:
    return isinstance(item, dict) and any(map(item.get, _RESULT_PARTS))


def _no_results(text: str, envelope: Mapping[str, Any]) -> ToolOutput:
    return ToolOutput((Item(caption=text),), {"results": []}, usage_of(envelope))


def _nothing_found(parameters: Mapping[str, Any], context: RenderContext) -> str:
    query = one_line(str(parameters.get("q", "")))[:_MAX_QUERY_CHARS]
    text = f"No results for {query!r}. {remarks.other_search(context.names)}"
    if _asks_for_pages(parameters):  # it may have timed out (jina-api 2.2)
        text += " If there should be some, search without page content: pages that load slowly are left out."
    return text


class _RenderedResults:
    """Search results as items for the model and as `facts` for a UI, and what is to be said about them.

    `max_tokens` is the limit of each page, None without pages (`with_pages`) or limit.
    """

    def __init__(self, reader: FieldReader, max_tokens: int | None, *, with_pages: bool) -> None:
        self.items: list[Item] = []
        self.facts: list[dict[str, Any]] = []
        self._reader = reader
        self._max_tokens = max_tokens
        self._with_pages = with_pages
        self._first_with: dict[tuple[str, ...], int] = {}  # number of the first result with these lines of warning
        self._warned: dict[str, list[int]] = {}  # numbers of the results by type of warning

    def add(self, result: Mapping[str, Any]) -> None:
        """Render the next result."""
        number = len(self.items) + 1
        facts = self._reader.facts(result, _RESULT_FACTS, are_shown=True)
        bodies = without_inline_images(list(self._reader.bodies(result)))
        head = "\n".join(filter(None, self._lines(number, result, facts)))
        body = PARAGRAPH_GAP.join([*bodies, *self._reader.lists(result)])
        self.items.append(Item(head, body))
        self.facts.append(self._facts_for_ui(number, result, facts, has_body=bool(bodies)))

    def about_pages(self) -> list[str]:
        """Return remarks on which pages are cut, and which are errors of their servers."""
        found = []
        numbered = list(enumerate(self.facts, start=1))
        cut = [number for number, facts in numbered if "cut_at_tokens" in facts]
        if cut and self._max_tokens:
            found.append(remarks.cut_results(cut, self._max_tokens))
        errors = {number: facts["target_status"] for number, facts in numbered if "target_status" in facts}
        if errors:
            found.append(remarks.target_errors(errors))
        return found

    def warnings(self, offers: remarks.Offers) -> list[str]:
        """Return a warning for each type, with the numbers of its results."""
        return [remarks.result_warning(kind, numbers, offers) for kind, numbers in self._warned.items()]

    def _lines(self, number: int, result: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines above the body; some may be empty."""
        yield f"{number}. {str(facts.get('title', '')) or '(no title)'}"
        for field, fact in facts.items():
            if field == "title" or (field == "imageUrl" and not self._shows_image(str(fact))):
                continue
            yield f"{_LABELS[field]}{fact}"
        warnings = self._reader.warnings(result)
        if warnings:
            for warning in self._once(warnings, number):
                yield f"Warning: {warning}"
        yield self._reader.line(result.get("description"), MAX_DESCRIPTION_CHARS)
        yield from self._reader.site_links(result)

    def _shows_image(self, address: str) -> bool:
        return not is_inline(address) and not self._reader.denied.has_link(address)

    def _once(self, warnings: tuple[str, ...], number: int) -> tuple[str, ...]:
        """Return the lines of a warning, or `as for 1` if an earlier result has the same."""
        first = self._first_with.setdefault(warnings, number)
        return warnings if first == number else (f"as for {first}",)

    def _facts_for_ui(
        self, number: int, result: Mapping[str, Any], facts: Mapping[str, Any], *, has_body: bool
    ) -> dict[str, Any]:
        """Return the state of a result, and record the types of its warnings."""
        for_ui = {field: facts[field] for field in _STATE_FACTS if field in facts}
        icon = favicon(result)
        if icon:
            for_ui["favicon"] = icon
        if self._max_tokens and remarks.is_cut(_tokens(result), self._max_tokens):
            for_ui["cut_at_tokens"] = self._max_tokens
        # Without any of these there is no text to be judged: skip the search.
        is_judged = self._with_pages or has_body or result.get("warning")
        types = warning_types(result, with_text=self._with_pages) if is_judged else ()
        types = (*types, *lookalike_type(result))
        if types:
            for_ui["warnings"] = list(types)
            for kind in types:
                if kind not in remarks.TARGET_ERROR_TYPES:  # `about_pages` lists these with their statuses
                    self._warned.setdefault(kind, []).append(number)
        status = target_status(result)
        if status is not None:
            for_ui["target_status"] = status
        return for_ui


def _page_lines(
    page: Mapping[str, Any], reader: FieldReader, warnings: Sequence[str], bodies: list[str]
) -> Iterator[str]:
    """Yield the lines above the body of a page."""
    yield f"Title: {reader.line(page.get('title')) or '(none)'}"
    yield f"URL: {reader.line(page.get('url'), MAX_URL_CHARS)}"
    for label, field in (("Published", "publishedTime"), ("Pages", "numPages")):
        if page.get(field) not in (None, "", 0):
            yield f"{label}: {reader.line(page[field])}"
    for warning in warnings:
        yield f"Warning: {warning}"
    description = reader.description(page, bodies)
    if description:
        yield f"Description: {description}"


def _nothing_to_read(
    warnings: tuple[str, ...], types: tuple[str, ...], status: int | None, context: RenderContext
) -> UpstreamRejected:
    wait = "wait for it with wait_for_selector, " if context.offers("wait_for_selector") else ""
    parts = [
        f"The page has nothing to read; check the address, {wait}or use another page.",
        *(remarks.page_warning(kind, context.offers, status) for kind in types if kind != "empty"),
    ]
    if warnings:
        parts.append(f"The service says: {quoted(context.redactor.head(' '.join(warnings), MAX_CHARS))}")
    return UpstreamRejected(" ".join(parts))
