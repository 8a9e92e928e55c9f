"""Renders search results: text for a model, and state for a UI (tool-design section 3).

`search_output` is the `render` function of the search in `response.py`. `fields.py` reads the fields of a result, each
within its limit. `page_warnings.py` finds what is wrong with a result's page, and `remarks.py` has the words for that,
and for what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from openapi_tool.jina import remarks
from openapi_tool.jina.fields import BODY_FIELDS, MAX_DESCRIPTION_CHARS, FieldReader, favicon
from openapi_tool.jina.inline_data import is_inline, without_inline_images
from openapi_tool.jina.page_warnings import lookalike_type, target_status, warning_types
from openapi_tool.jina.rendering import RenderContext, tokens_of, usage_of
from openapi_tool.jina.shown_hosts import ShownResults
from openapi_tool.protocol.errors import UpstreamUnavailable
from openapi_tool.tools.output import PARAGRAPH_GAP, Item, ToolOutput
from openapi_tool.tools.wording import counted, one_line

_MAX_RESULTS = 100  # that are shown
_MAX_QUERY_CHARS = 200  # of the query, in the text about no results

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
    max_page_tokens = parameters.get("maxTokens") if with_pages else None
    rendered = _RenderedResults(reader, max_page_tokens, with_pages=with_pages)
    for result in kept.shown[:_MAX_RESULTS]:
        rendered.add(result)

    captions = []
    left_out = len(kept.shown) - len(rendered.items)
    if left_out:
        captions.append(f"[{counted(left_out, 'more result', 'left out')}.]")
    unreadable = len(data) - len(results)
    if unreadable:
        captions.append(remarks.unreadable_results(unreadable))
    captions += rendered.about_pages()
    captions += kept.remarks()
    links_left_out = reader.denied.remark()
    if links_left_out:
        captions.append(links_left_out)
    captions += rendered.warnings(context.offers)
    items = [*rendered.items, *(Item(caption=caption) for caption in captions)]
    return ToolOutput(tuple(items), {"results": rendered.facts}, usage_of(envelope))


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

    `with_pages` means that the results have the texts of their pages; each is cut at `max_page_tokens`, if not None.
    """

    def __init__(self, reader: FieldReader, max_page_tokens: int | None, *, with_pages: bool) -> None:
        self.items: list[Item] = []
        self.facts: list[dict[str, Any]] = []
        self._reader = reader
        self._max_page_tokens = max_page_tokens
        self._with_pages = with_pages
        # Results are numbered from 1.
        self._first_with: dict[tuple[str, ...], int] = {}  # the first result, by the lines of its warning
        self._warned: dict[str, list[int]] = {}  # results by type of warning

    def add(self, result: Mapping[str, Any]) -> None:
        """Render the next result."""
        number = len(self.items) + 1
        facts = self._reader.facts(result, _RESULT_FACTS, are_shown=True)
        bodies = without_inline_images(list(self._reader.bodies(result)))
        head = "\n".join(filter(None, self._head_lines(number, result, facts)))
        body = PARAGRAPH_GAP.join([*bodies, *self._reader.lists(result)])
        self.items.append(Item(head, body))
        # Without any of these there is no text to be judged: skip the search for signs of a barrier.
        is_judged = self._with_pages or bodies or result.get("warning")
        types = warning_types(result, with_text=self._with_pages) if is_judged else ()
        types = (*types, *lookalike_type(result))
        for kind in types:
            if kind not in remarks.TARGET_ERROR_TYPES:  # `about_pages` lists these with their statuses
                self._warned.setdefault(kind, []).append(number)
        self.facts.append(self._facts_for_ui(result, facts, types))

    def about_pages(self) -> list[str]:
        """Return remarks on which pages are cut, and which are errors of their servers."""
        found = []
        numbered = list(enumerate(self.facts, start=1))
        cut = [number for number, facts in numbered if "cut_at_tokens" in facts]
        if cut and self._max_page_tokens:
            found.append(remarks.cut_results(cut, self._max_page_tokens))
        errors = {number: facts["target_status"] for number, facts in numbered if "target_status" in facts}
        if errors:
            found.append(remarks.target_errors(errors))
        return found

    def warnings(self, offers: remarks.Offers) -> list[str]:
        """Return a warning for each type, with the numbers of its results."""
        return [remarks.result_warning(kind, numbers, offers) for kind, numbers in self._warned.items()]

    def _head_lines(self, number: int, result: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines above the body; some may be empty."""
        title = str(facts.get("title", "")) or "(no title)"
        yield f"{number}. {title}"
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
        self, result: Mapping[str, Any], facts: Mapping[str, Any], types: tuple[str, ...]
    ) -> dict[str, Any]:
        """Return the state of a result with these types of warnings."""
        for_ui = {field: facts[field] for field in _STATE_FACTS if field in facts}
        icon = favicon(result)
        if icon:
            for_ui["favicon"] = icon
        if self._max_page_tokens and remarks.is_cut(tokens_of(result), self._max_page_tokens):
            for_ui["cut_at_tokens"] = self._max_page_tokens
        if types:
            for_ui["warnings"] = list(types)
        status = target_status(result)
        if status is not None:
            for_ui["target_status"] = status
        return for_ui
