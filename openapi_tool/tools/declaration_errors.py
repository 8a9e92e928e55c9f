"""Errors of a definition's declaration: how its validators raise them, and how they are read from pydantic's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from openapi_tool.tools.problems import Path

WRONG: Final = "wrong"
WARNING: Final = "warning"
"""Types of our own errors; their messages are final."""

Kind = Literal["wrong", "warning"]

PYDANTIC_MESSAGES = {"model_type": "must be an object", "recursion_loop": "is nested too deeply; flatten it"}
"""Messages for errors that pydantic itself raises, by their type."""


def own_error(kind: Kind, message: str) -> PydanticCustomError:
    """Return an error with a final message."""
    return PydanticCustomError(kind, "{message}", {"message": message})


def wrong_value(message: str) -> PydanticCustomError:
    """Return the error of the value that is being validated."""
    return own_error(WRONG, message)


def error_at(message: str, *path: str | int, kind: Kind = WRONG) -> InitErrorDetails:
    """Return an error at a path below the value that is being validated."""
    return InitErrorDetails(type=own_error(kind, message), loc=path, input=None)


def validation_error(errors: list[InitErrorDetails]) -> ValidationError:
    """Return one exception with several errors."""
    return ValidationError.from_exception_data("definition", errors)


def raise_any(errors: Iterable[InitErrorDetails]) -> None:
    """Raise the errors, if there are some."""
    if found := list(errors):
        raise validation_error(found)


def details_of(error: ValidationError) -> Iterator[tuple[str, Path, str, Mapping[str, Any]]]:
    """Yield type, path, message and context of each error."""
    for one in error.errors(include_url=False, include_input=False):
        yield one["type"], one["loc"], one["msg"], one.get("ctx", {})
