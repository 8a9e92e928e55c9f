"""Base of settings sections that are pydantic models, and a function that lists the fields of any section."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator
from pydantic.fields import FieldInfo

from openapi_tool.options import one_line


def _check_file(path: Path) -> Path:
    try:
        if path.is_file():
            return path
    except OSError:  # such as a name that is too long
        pass
    raise ValueError("names no file that can be read; correct the path, or mount the file")


File = Annotated[Path, AfterValidator(_check_file)]

TARGET = "{target}"
"""Placeholder of an actor id for the tool target."""


def _without_unknown_placeholders(actor_id: str) -> str:
    if set("{}") & set(actor_id.replace(TARGET, "")):
        raise ValueError(f"holds an unknown placeholder or a lone brace; the only placeholder is {TARGET}")
    return actor_id


ActorId = Annotated[str, AfterValidator(_without_unknown_placeholders)]


class Section(BaseModel):
    """Section that no component takes as its options; the others derive from `Options`, with the same rules."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_one_line(cls, value: Any) -> Any:
        return one_line(value)


def fields_of(kind: Any) -> Mapping[str, FieldInfo]:
    """Return the fields of a section by name, for a model (also an optional one) or a dataclass, else none."""
    kind = next((part for part in get_args(kind) if hasattr(part, "model_fields")), kind)
    is_dataclass = isinstance(kind, type) and dataclasses.is_dataclass(kind)
    return _fields_of_dataclass(kind) if is_dataclass else getattr(kind, "model_fields", {})


@cache
def _fields_of_dataclass(kind: type[Any]) -> Mapping[str, FieldInfo]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: FieldInfo.from_annotated_attribute(hints[field.name], field) for field in dataclasses.fields(kind)
    }
