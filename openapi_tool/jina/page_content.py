"""Renders a page that the upstream has read: text for a model, and state for a UI (tool-design section 3).

`page_output` is the `render` function of the reader in `response.py`. `fields.py` reads the fields of the page, each
within its limit. `page_warnings.py` finds what is wrong with the page, and `remarks.py` has the words for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openapi_tool.jina import remarks
from openapi_tool.jina.failures import quoted
from openapi_tool.jina.fields import MAX_CHARS, MAX_URL_CHARS, FieldReader, text_of
from openapi_tool.jina.hosts import denied_target, host_of
from openapi_tool.jina.inline_data import without_inline_images
from openapi_tool.jina.page_warnings import lookalike_type, target_status, warning_types
from openapi_tool.jina.rendering import RenderContext, usage_of
from openapi_tool.protocol.errors import UpstreamRejected, UpstreamUnavailable
from openapi_tool.tools.output import PARAGRAPH_GAP, Item, ToolOutput

_STATE_FIELDS = ("title", "url", "publishedTime", "warning", "numPages")


def page_output(envelope: Mapping[str, Any], parameters: Mapping[str, Any], context: RenderContext) -> ToolOutput:
    """Render a page. Raises ToolError if there is nothing to show."""
    page = envelope.get("data")
    if not isinstance(page, dict):
        raise UpstreamUnavailable("The reader answered in an unexpected shape; try again later.")
    reader = FieldReader(context.redactor, context.denied)
    address = text_of(page.get("url"))
    if reader.denied.has(address):  # a redirection led there
        raise denied_target(host_of(address))
    bodies = without_inline_images(list(reader.bodies(page)))
    lists = reader.lists(page)
    warnings = reader.warnings(page)
    types = (*warning_types(page, with_text=True), *lookalike_type(page))
    status = target_status(page)
    has_error = bool(text_of(page.get("warning")).strip())
    if not bodies and not lists and has_error:  # without an error the page is just empty
        raise _nothing_to_read(warnings, types, status, context)

    head = "\n".join(_head_lines(page, reader, warnings, bodies))
    body = PARAGRAPH_GAP.join([*bodies, *lists])
    captions = [f"[Warning: {remarks.page_warning(kind, context.offers, status)}]" for kind in types]
    state = reader.facts(page, _STATE_FIELDS, are_shown=False)  # `_head_lines` has counted the links left out in them
    if types:
        state["warnings"] = list(types)
    if status is not None:
        state["target_status"] = status
    links_left_out = reader.denied.remark()
    if links_left_out:
        captions.append(links_left_out)
    usage = usage_of(envelope)
    max_tokens = parameters.get("maxTokens")
    after = ""
    if max_tokens and remarks.is_cut(usage.tokens, max_tokens):
        captions.append(remarks.cut_page(max_tokens, context.offers))
        after = remarks.end_of_cut_page(max_tokens)
        state["cut_at_tokens"] = max_tokens
    return ToolOutput((Item(head, body, "\n".join(captions), after),), state, usage)


def _head_lines(
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
    """Return the error for a page without any text, with all that is known of the cause."""
    wait = "wait for it with wait_for_selector, " if context.offers("wait_for_selector") else ""
    sentences = [f"The page has nothing to read; check the address, {wait}or use another page."]
    causes = [kind for kind in types if kind != "empty"]
    sentences += [remarks.page_warning(kind, context.offers, status) for kind in causes]
    if warnings:
        sentences.append(f"The service says: {quoted(context.redactor.head(' '.join(warnings), MAX_CHARS))}")
    return UpstreamRejected(" ".join(sentences))
