"""What a call asks to be shown: a new result, the next part of an earlier one, or a search in it.

The model says so with arguments that this service reads itself: `cursor`, `find`, `question`, `max_result_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from openapi_tool.protocol.jsontext import JsonValue
from openapi_tool.tools.arguments import (
    CURSOR,
    FIND,
    QUESTION,
    Arguments,
    correction_error,
    cursor_problems,
    requested_cursor,
    requested_tokens,
    takes_cursor,
    tokens_problems,
)
from openapi_tool.tools.definition import ToolDefinition
from openapi_tool.tools.problems import Problem
from openapi_tool.tools.question_search import terms
from openapi_tool.tools.text_search import SearchRequest

_MAX_CHARS = {FIND: 200, QUESTION: 500}  # of the two arguments that ask for a search


class ResultRequest(NamedTuple):
    """What a call asks to be shown, at most `max_tokens`.

    - Without `cursor`: the result of new requests.
    - With `cursor` alone: the next part of an earlier, truncated result.
    - With `cursor` and `search`: what the search finds in that result.
    """

    cursor: str | None
    max_tokens: int | None
    search: SearchRequest | None


def result_request(definition: ToolDefinition, arguments: Arguments) -> ResultRequest:
    """Return what a call asks to be shown.

    Raises BadRequest, and ToolMisconfigured for a value that the definition sets.
    """
    cursor = requested_cursor(definition, arguments)
    max_tokens = requested_tokens(definition, arguments)
    searches = _search_arguments(definition, arguments)
    problems = list(_search_problems(searches, cursor))
    if problems:
        raise correction_error(list(map(str, problems)))
    search = None
    for name, text in searches.items():  # at most one, else there is a problem
        search = SearchRequest(name, str(text))
    return ResultRequest(cursor, max_tokens, search)


def request_problems(definition: ToolDefinition, arguments: Arguments) -> list[Problem]:
    """Return the problems for which `result_request` would raise."""
    cursor = arguments.values.get(CURSOR)
    if cursor == "" or not takes_cursor(definition):
        cursor = None
    problems = [] if cursor is None else list(cursor_problems(definition, arguments))
    problems += tokens_problems(arguments)
    problems += _search_problems(_search_arguments(definition, arguments), cursor)
    return problems


def _search_arguments(definition: ToolDefinition, arguments: Arguments) -> dict[str, JsonValue]:
    """Return those of `find` and `question` that the model gave a value."""
    if not takes_cursor(definition):
        return {}
    given = {name: arguments.values[name] for name in _MAX_CHARS if name in arguments.by_model}
    return {name: value for name, value in given.items() if value not in (None, "")}


def _search_problems(searches: Mapping[str, JsonValue], cursor: JsonValue) -> Iterator[Problem]:
    for name, text in searches.items():
        if cursor is None:
            remedy = f"call without {name} first"
            problem = f"searches an earlier truncated result, and needs the {CURSOR} that it named; {remedy}"
            yield Problem((name,), problem)
            return
        if not isinstance(text, str) or not text.strip() or len(text) > _MAX_CHARS[name]:
            yield Problem((name,), f"must be a text of 1 to {_MAX_CHARS[name]} characters")
        elif name == QUESTION and not any(terms(text)):
            yield Problem((name,), "has no word to look for")
    if len(searches) > 1:
        yield Problem((FIND,), f"cannot be given together with {QUESTION}; give one of them")
