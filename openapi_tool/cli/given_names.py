"""Names and ids in options and arguments: without this check PostgreSQL or NATS would be blamed for some."""

from __future__ import annotations

from openapi_tool.cli.output import fail
from openapi_tool.protocol.jsontext import storable_text
from openapi_tool.tools.wording import short


def check_given(option: str, value: str | None, kind: str) -> None:
    """Exit with 2 if an option with a name or an id of this kind is empty, or cannot be stored."""
    if value is None:
        return
    if not value.strip():
        fail(f"{option}: is empty; give the {kind}")
    if storable_text(value) != value:
        fail(f"{option}: {short(value)!r} is no {kind}: it contains NUL or is not UTF-8, and PostgreSQL stores neither")
