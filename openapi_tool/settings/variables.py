"""Environment variables that look like settings of this program, but set none: misspelt or unknown names.

The variable of a setting is `OPENAPI_TOOL__SECTION__KEY`. pydantic reports an unknown key of a known section itself,
but ignores every other variable. So this module compares all variables with the names that exist.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, get_origin

from openapi_tool.environment import CONFIG_VARIABLE, DEV_VARIABLE, PREFIX
from openapi_tool.settings.model import Settings
from openapi_tool.settings.sections import fields_of

REMOVED_SECTIONS = {
    "dialects": "one process serves one kernel; run a second process for the other kernel, as docs/migrating.md shows"
}
"""Sections of earlier versions, and what replaces them."""

_ANY_PREFIX = "OPENAPI_TOOL_"
_KUBERNETES_PREFIXES = ("OPENAPI_TOOL_SERVICE_", "OPENAPI_TOOL_PORT")  # of a Service of this name
_SIMILAR = 0.7  # from 0 to 1, from which on a name counts as CONFIG_VARIABLE misspelt


def variable_problems(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for each variable that looks like a setting and sets none."""
    yield from empty_servers(environment)
    for variable in sorted(environment):
        is_prefixed = variable.startswith(PREFIX)
        section = variable.removeprefix(PREFIX).split("__")[0].lower()
        meant = _known_by_folded_name().get(_folded(variable))
        if meant is None and not is_prefixed:
            meant = _misspelt_config(variable)
        if meant == variable or (is_prefixed and section in Settings.model_fields):
            continue  # correct, or an unknown key of a known section, which pydantic reports
        if meant:
            yield f"{variable}: is no setting; did you mean {meant}?"
        elif section in REMOVED_SECTIONS and is_prefixed:
            yield f"{variable}: {REMOVED_SECTIONS[section]}"
        elif is_prefixed:
            hint = did_you_mean(section, Settings.model_fields) or f"; known are {', '.join(Settings.model_fields)}"
            yield f"{variable}: there is no section {section!r}{hint}"


def empty_servers(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem if NATS_SERVERS names no server."""
    servers = environment.get("NATS_SERVERS")
    if servers is not None and not servers.strip():
        yield "NATS_SERVERS: is empty; name a server, such as nats://host:4222, or unset it"


def ignored_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a line for each variable that has the prefix, but is no setting and not similar to one."""
    known = _known_by_folded_name()
    return [
        f"{variable} is no setting and has no effect"
        for variable in sorted(environment)
        if variable.upper().startswith(_ANY_PREFIX)
        and not variable.startswith((PREFIX, *_KUBERNETES_PREFIXES))
        and _folded(variable) not in known
    ]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that is most similar; empty if none is."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@cache
def _known_by_folded_name() -> Mapping[str, str]:
    """Return all variables of settings, by their folded names."""
    return {_folded(name): name for name in (CONFIG_VARIABLE, DEV_VARIABLE, *_variables_of(Settings, PREFIX))}


def _folded(variable: str) -> str:
    """Return a name without what is often mistyped: underscores (one instead of two), and lower case."""
    return variable.replace("_", "").upper()


def _variables_of(section: Any, beginning: str) -> Iterator[str]:
    """Yield the variables of sections and settings, but not of a mapping's entries, whose names are free."""
    for name, field in fields_of(section).items():
        variable = f"{beginning}{name.upper()}"
        yield variable
        if get_origin(field.annotation) is not dict:
            yield from _variables_of(field.annotation, f"{variable}__")


def _misspelt_config(variable: str) -> str | None:
    """Return `CONFIG_VARIABLE` for a similar name, with which the whole file is ignored.

    Skip `_PORT`: Kubernetes sets `OPENAPI_TOOL_CONFIG_PORT` for a Service `openapi-tool-config`.
    """
    name = variable.upper()
    if not name.startswith(_ANY_PREFIX) or name.endswith("_PORT"):
        return None
    # Without the prefix, which all have, and which would make any two names similar.
    correct_end = CONFIG_VARIABLE.removeprefix(_ANY_PREFIX)
    is_similar = difflib.get_close_matches(name.removeprefix(_ANY_PREFIX), [correct_end], cutoff=_SIMILAR)
    return CONFIG_VARIABLE if is_similar else None
