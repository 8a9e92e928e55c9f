"""What a call asks to be shown: a new result, the next part of an earlier one, or a search in it.

The model says so with arguments that this service reads itself: `cursor`, `find`, `question`, `max_result_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from openapi_tool.protocol.jsontext import JsonValue, whole_number
from openapi_tool.tools.arguments import (
    CURSOR,
    FIND,
    MAX_RESULT_TOKENS,
    QUESTION,
    Arguments,
    correction_error,
    names_main_parameter,
    takes_cursor,
)
from openapi_tool.tools.declaration import MIN_RESULT_TOKENS
from openapi_tool.tools.definition import ToolDefinition, unusable
from openapi_tool.tools.problems import Problem, listed
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
    problems = [] if cursor is None else list(_cursor_problems(definition, arguments))
    problems += tokens_problems(arguments)
    problems += _search_problems(_search_arguments(definition, arguments), cursor)
    return problems


def requested_cursor(definition: ToolDefinition, arguments: Arguments) -> str | None:
    """Return the cursor argument, None for a call without one. Raises BadRequest if it is combined with others.

    A page address beside it is ignored if the definition requires one, since the model had to give it.
    """
    cursor = arguments.values.get(CURSOR)
    if cursor in (None, "") or not takes_cursor(definition):
        return None
    problems = _cursor_problems(definition, arguments)
    if problems:
        raise correction_error(listed(list(map(str, problems))))
    return str(cursor)


def _cursor_problems(definition: ToolDefinition, arguments: Arguments) -> list[Problem]:
    """Return why a call with a cursor cannot be answered."""
    required = definition.schema.get("required")
    needed = required if isinstance(required, list) else []
    problems = []
    if not isinstance(arguments.values[CURSOR], str):
        problems.append(Problem((CURSOR,), "must be the text that an earlier result named"))
    for name in sorted(arguments.by_model):
        is_main = names_main_parameter(definition, name)
        if is_main and name not in needed and arguments.values[name] is not None:
            problems.append(Problem((name,), f"cannot be given together with {CURSOR}; give one of them"))
    return problems


def requested_tokens(definition: ToolDefinition, arguments: Arguments) -> int | None:
    """Return the call's own limit of the tokens to show, None without one.

    Raises BadRequest, or ToolMisconfigured if the definition sets it.
    """
    for problem in tokens_problems(arguments):
        if MAX_RESULT_TOKENS in arguments.by_model:
            raise correction_error([str(problem)])
        group = "fixed" if MAX_RESULT_TOKENS in definition.fixed else "defaults"
        raise unusable(definition.tool_name, [str(replace(problem, path=("options", "args", group, *problem.path)))])
    return whole_number(arguments.values.get(MAX_RESULT_TOKENS))


def tokens_problems(arguments: Arguments) -> list[Problem]:
    """Return the problem of a call's own limit of the tokens to show."""
    value = arguments.values.get(MAX_RESULT_TOKENS)
    if value in (None, ""):
        return []
    tokens = whole_number(value)
    if tokens is not None and tokens >= MIN_RESULT_TOKENS:
        return []
    return [Problem((MAX_RESULT_TOKENS,), f"must be an integer of at least {MIN_RESULT_TOKENS}")]


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
