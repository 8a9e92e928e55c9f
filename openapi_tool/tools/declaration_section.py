"""Base class of the objects that a definition consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails

from openapi_tool.tools.declaration_errors import (
    PYDANTIC_MESSAGES,
    WARNING,
    ErrorDetails,
    details_of,
    error_at,
    raise_any,
    validation_error,
)
from openapi_tool.tools.declaration_types import is_row
from openapi_tool.tools.wording import any_of, did_you_mean, short


class Section(BaseModel):
    """Object of a definition, such as `options` or `options.args`, with messages for the author of a file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    path_prefix: ClassVar[str] = ""
    """Path of the section with a dot at its end, such as `options.`, for messages that name another key of it."""
    overrides: ClassVar[Mapping[str, str]] = {}
    """Keys of which a file should have only one: the key that is used, and the one that is ignored beside it."""
    missing_hints: ClassVar[Mapping[str, str]] = {}
    """What the message of a missing key ends with, by the key: `; give suspend or terminate`."""

    @classmethod
    def conflicts(cls, value: Mapping[str, Any]) -> Iterator[InitErrorDetails]:
        """Yield the errors of a file that depend on several keys."""
        for used, ignored in cls.overrides.items():
            if used in value and ignored in value:
                yield error_at(f"is ignored beside {cls.path_prefix}{used}; take it out", ignored, kind=WARNING)

    @classmethod
    def unknown_key(cls, name: str) -> str:
        """Return the message for a key that the section does not have."""
        return similar_key(name, list(cls.model_fields))

    @model_validator(mode="wrap")
    @classmethod
    def _validate_section(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:  # noqa: ANN401
        """In a file, replace pydantic's messages, and find conflicts between keys."""
        if is_row(info):
            return handler(value)
        conflicts = list(cls.conflicts(value)) if isinstance(value, dict) else []
        try:
            section = handler(value)
        except ValidationError as error:
            errors = list(details_of(error))
            if not conflicts and all(details.is_own for details in errors):
                raise
            raise validation_error([*conflicts, *map(cls._with_own_message, errors)]) from None
        raise_any(conflicts)
        return section

    @classmethod
    def _with_own_message(cls, error: ErrorDetails) -> InitErrorDetails:
        if error.is_own:
            return error.with_message(error.message)
        if error.error_type == "missing":
            return error.with_message(f"is missing{cls.missing_hints.get(str(error.path[-1]), '')}")
        if error.error_type == "extra_forbidden":
            return error.with_message(cls.unknown_key(str(error.path[-1])))
        return error.with_message(PYDANTIC_MESSAGES.get(error.error_type, f"is not valid: {error.message}"))


def similar_key(name: str, known: list[str]) -> str:
    """Return the message for an unknown key, with the most similar known one, or else all known ones."""
    return f"is not known here{did_you_mean(short(name), known) or '; known are ' + any_of(sorted(known))}"
