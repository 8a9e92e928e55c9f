"""What a call asks of an earlier, truncated result: its next part, or a search in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from openapi_tool.tools.arguments import (
    CURSOR,
    FIND,
    QUESTION,
    Arguments,
    correction_error,
    requested_cursor,
    requested_tokens,
    takes_cursor,
)
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.text_search import SearchRequest, terms

_MAX_CHARS = {FIND: 200, QUESTION: 500}


def requested(definition: ToolDefinition, arguments: Arguments) -> tuple[str | None, int | None, SearchRequest | None]:
    """Return a call's cursor, limit of the tokens to show, and search, or None.

    Raises BadRequest, and ToolMisconfigured for a value that the definition sets.
    """
    cursor, tokens = requested_cursor(definition, arguments), requested_tokens(definition, arguments)
    names = [name for name in _MAX_CHARS if name in arguments.by_model and takes_cursor(definition)]
    given = {name: value for name in names if (value := arguments.values[name]) not in (None, "")}
    if problems := list(_problems(given, cursor)):
        raise correction_error(problems)
    return cursor, tokens, next((SearchRequest(name, str(text)) for name, text in given.items()), None)


def _problems(given: Mapping[str, object], cursor: str | None) -> Iterator[str]:
    for name, text in given.items():
        if cursor is None:
            yield (
                f"{name}: searches an earlier truncated result, and needs the {CURSOR} that it named; call without "
                f"{name} first"
            )
            return
        if not isinstance(text, str) or not text.strip() or len(text) > _MAX_CHARS[name]:
            yield f"{name}: must be a text of 1 to {_MAX_CHARS[name]} characters"
        elif name == QUESTION and not next(terms(text), None):
            yield f"{name}: has no word to look for"
    if len(given) > 1:
        yield f"{FIND}: cannot be given together with {QUESTION}; give one of them"
