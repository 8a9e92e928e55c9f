"""Types of the values in a definition, with their error messages and their conversions for stored rows.

A *file* is validated as the types say. A *stored row* may have been written by another program, and in an older form.
Therefore some types first convert the values of rows: the names of most of these conversions end with `_IN_ROWS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, get_args

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from openapi_tool.tools.declaration_errors import details_of, error_at, raise_any, wrong_value
from openapi_tool.tools.wording import any_of, did_you_mean, short

MAX_SUSPEND_S = 3_600
"""Longest time, in seconds, that a definition may set for a call or for the worker that waits for it."""

ROW_CONTEXT = {"row": True}
"""Validation context of a stored row."""


def is_row(info: ValidationInfo) -> bool:
    """Return whether a stored row is being validated, not a file."""
    return info.context is ROW_CONTEXT


@dataclass(frozen=True, slots=True)
class ErrorMessage:
    """Annotation of a type: the message for a value that does not fit. Errors of the value's members keep their own."""

    text: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        """Wrap the type's validation."""
        return core_schema.no_info_wrap_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Add `errorMessage`, which editors show."""
        return {**handler(core), "errorMessage": self.text}

    def _validate(self, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            only_of_members = all(details.path for details in details_of(error))
            if only_of_members:
                raise
        raise wrong_value(self.text)


@dataclass(frozen=True, slots=True)
class NamesChoices:
    """Annotation of a Literal: the message for another value names all choices, and the most similar one."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401
        """Wrap the type's validation."""
        literals = (source, *get_args(source))  # `source` is a Literal, or `Literal[…] | None`
        choices = [choice for literal in literals for choice in get_args(literal) if isinstance(choice, str)]

        def validate(value: object, inner: ValidatorFunctionWrapHandler) -> object:
            try:
                return inner(value)
            except ValidationError:
                message = f"must be {any_of(choices)}{did_you_mean(short(str(value)), choices)}"
            raise wrong_value(message)

        return core_schema.no_info_wrap_validator_function(validate, handler(source))


def in_rows(convert: Callable[[Any], Any]) -> BeforeValidator:
    """Return a conversion of a stored row's value, before its validation. A file's value is left as it is."""

    def convert_if_row(value: object, info: ValidationInfo) -> object:
        return convert(value) if is_row(info) else value

    return BeforeValidator(convert_if_row)


def _is_empty(value: object) -> bool:
    return value in (None, False, 0, "", [], {})


EMPTY_IS_UNSET_IN_ROWS = in_rows(lambda value: None if _is_empty(value) else value)
"""In old rows `false`, `0`, and an empty text, list or object stand for the default."""

NULL_IS_EMPTY_IN_ROWS = in_rows(lambda value: {} if value is None else value)
"""For types whose values are objects: `null` stands for an empty one."""

IGNORED_IN_ROWS = in_rows(lambda _: None)

TEXT_IN_ROWS = in_rows(lambda value: value if value is None else str(value))
"""A value of another type becomes a text. `definition_parser.py` names what would fit, or needs no value."""

TEXT_MESSAGE = ErrorMessage("must be a text that is not empty")
OBJECT_MESSAGE = ErrorMessage("must be an object")

omittable = partial(Field, None)
"""`omittable(…)` is a field that a file may omit, but not set to null."""

Text = Annotated[str, Field(min_length=1), TEXT_MESSAGE]
TextOrNull = Annotated[str | None, Field(min_length=1), TEXT_MESSAGE]
VariableName = Annotated[
    str | None,
    Field(min_length=1),
    ErrorMessage("must be the name of an environment variable"),
    EMPTY_IS_UNSET_IN_ROWS,
]


def positive_seconds(value: object) -> float | None:
    """Return a finite number above 0; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return float(value)


def _lenient_seconds(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
    """In a row, read a value that is no positive number as unset, and allow one above MAX_SUSPEND_S."""
    return positive_seconds(value) if is_row(info) else handler(value)


Seconds = Annotated[
    float | None,
    Field(gt=0, le=MAX_SUSPEND_S),
    ErrorMessage(f"must be a number of seconds above 0, at most {MAX_SUSPEND_S}"),
    WrapValidator(_lenient_seconds),
]


def _only_texts(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    """Refuse members that are no text; pydantic takes ten times as long for an error, and there may be 100."""
    if isinstance(value, dict):
        raise_any(
            error_at(TEXT_MESSAGE.text, name)
            for name, member in value.items()
            if not isinstance(member, str) or not member
        )
    return handler(value)


Texts = Annotated[
    dict[str, Annotated[str, Field(min_length=1)]], OBJECT_MESSAGE, WrapValidator(_only_texts), NULL_IS_EMPTY_IN_ROWS
]
"""Object whose members are texts, such as `envs`."""


def _no_nulls_in_files(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
    if isinstance(value, dict) and not is_row(info):
        raise_any(
            error_at("is empty; give it a value or take it out", name)
            for name, member in value.items()
            if member is None
        )
    return handler(value)


Values = Annotated[dict[str, Any], OBJECT_MESSAGE, NULL_IS_EMPTY_IN_ROWS, WrapValidator(_no_nulls_in_files)]
"""Object whose members have any type, such as `params`."""
