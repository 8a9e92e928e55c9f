"""What every section of the settings has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of the settings: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def split(value: object) -> object:
    """A list in one environment variable: comma-separated."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
