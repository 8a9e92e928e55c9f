"""Errors of the declaration of definitions, between our messages and pydantic's.

The validators of `declaration.py` and its neighbours raise errors whose message is written for the author of a
definition. pydantic collects these together with errors of its own, whose messages still have to be replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from openapi_tool.tools.problems import Path

WRONG: Final = "wrong"
WARNING: Final = "warning"
Kind = Literal["wrong", "warning"]
"""Types of our own errors. A definition with warnings only can be registered."""

PYDANTIC_MESSAGES = {"model_type": "must be an object", "recursion_loop": "is nested too deeply; flatten it"}
"""Messages for errors that pydantic itself raises, by their type."""


def own_error(kind: Kind, message: str) -> PydanticCustomError:
    """Return an error of the value that is being validated."""
    return PydanticCustomError(kind, "{message}", {"message": message})


def wrong_value(message: str) -> PydanticCustomError:
    """Return an error, not a warning, of the value that is being validated."""
    return own_error(WRONG, message)


def error_at(message: str, *path: str | int, kind: Kind = WRONG) -> InitErrorDetails:
    """Return an error at a path below the value that is being validated."""
    return InitErrorDetails(type=own_error(kind, message), loc=path, input=None)


def validation_error(errors: list[InitErrorDetails]) -> ValidationError:
    """Return one exception with several errors."""
    return ValidationError.from_exception_data("definition", errors)


def raise_any(errors: Iterable[InitErrorDetails]) -> None:
    """Raise the errors, if there are some."""
    found = list(errors)
    if found:
        raise validation_error(found)


class ErrorDetails(NamedTuple):
    """One of the errors in a ValidationError: ours, or one of pydantic's, of which `context` has the violated bound."""

    error_type: str
    path: Path
    message: str
    context: Mapping[str, Any]

    @property
    def is_warning(self) -> bool:
        """Return whether the error is one of our warnings."""
        return self.error_type == WARNING

    @property
    def is_own(self) -> bool:
        """Return whether the error is ours, so that its message is final."""
        return self.error_type in (WRONG, WARNING)

    def with_message(self, message: str) -> InitErrorDetails:
        """Return the error with another message, to be raised again."""
        return error_at(message, *self.path, kind=WARNING if self.is_warning else WRONG)


def details_of(error: ValidationError) -> Iterator[ErrorDetails]:
    """Yield each error of a ValidationError."""
    for one in error.errors(include_url=False, include_input=False):
        yield ErrorDetails(one["type"], one["loc"], one["msg"], one.get("ctx", {}))
