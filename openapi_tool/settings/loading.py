"""Load the settings, and report every mistake in all sources in one error, with the source of each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import EnvSettingsSource
from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.environment import PREFIX, SHORT_NAMES
from openapi_tool.settings.model import Settings
from openapi_tool.settings.sections import fields_of
from openapi_tool.settings.sources import SourceUnreadable, file_ignored, file_sources, files, origin
from openapi_tool.settings.variables import REMOVED_SECTIONS, did_you_mean, variable_problems
from openapi_tool.settings_error import SettingsError
from openapi_tool.telemetry.redact import MASK
from openapi_tool.tools.key_shapes import looks_like_a_key
from openapi_tool.tools.wording import short

_MAX_PROBLEMS = 1_000  # shown


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Load the settings from all sources. Raises SettingsError."""
    problems = list(variable_problems(os.environ))
    settings, mistakes = _validated(flags or {})
    if settings is None or problems:
        raise SettingsError([*problems, *mistakes])
    return settings


def given_values() -> dict[str, dict[str, Any]]:
    """Return what files and environment set, by section, as written. Call it after `load_settings`."""
    values: dict[str, Any] = {}
    for source in (*reversed(file_sources(Settings)), EnvSettingsSource(Settings)):  # in ascending precedence
        values = _merged(values, source())
    return values


def _merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, with the values of `more` if both have one; tables in both are merged in the same way."""
    merged = {**values, **more}
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            merged[name] = _merged(values[name], value)
    return merged


def _validated(flags: Mapping[str, Any]) -> tuple[Settings | None, list[str]]:
    """Return the settings, or None and the mistakes in them."""
    try:
        return Settings(**flags), []
    except ValidationError as error:
        return None, _problems(error, flags)
    except SourceUnreadable as error:
        with file_ignored(error.variable):
            _, others = _validated(flags)
        # A setting that the unreadable file may contain is not missing.
        return None, [str(error), *(problem for problem in others if ": is missing" not in problem)]
    except (UnreadableVariable, RecursionError):  # do not chain or print it: message and cause contain the value
        return None, list(_invalid_json(os.environ)) or ["settings: are nested too deep; correct the file or variable"]


def _invalid_json(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for each variable of a section or mapping whose value is no JSON."""
    for variable in sorted(environment):
        if not variable.startswith(PREFIX):
            continue
        type_ = _type_of(variable.removeprefix(PREFIX).lower().split("__"))
        if get_origin(type_) is dict or fields_of(type_):
            try:
                json.loads(environment[variable])
            except (ValueError, RecursionError):
                yield f'{variable}: is not JSON; give an object such as {{"key": "value"}}, for a list ["A", "B"]'


def _type_of(path: Sequence[str]) -> Any:
    """Return the type of a section or setting, for a mapping's key that of the mapping, None if unknown."""
    type_: Any = Settings
    for part in path:
        if get_origin(type_) is not dict:
            field = fields_of(type_).get(part)
            type_ = field.annotation if field else None
    return type_


def _problems(error: ValidationError, flags: Mapping[str, Any]) -> list[str]:
    """Return a line for each mistake that pydantic has found."""
    mistakes = error.errors(include_input=False, include_url=False)
    # pydantic drops invalid entries of a list and may then report the list as too short; skip that second report.
    with_invalid_entries = {mistake["loc"][:-1] for mistake in mistakes}
    mistakes = [
        mistake for mistake in mistakes if mistake["type"] != "too_short" or mistake["loc"] not in with_invalid_entries
    ]
    from_files = files()
    lines = [_problem(mistake, flags, from_files) for mistake in mistakes[:_MAX_PROBLEMS]]
    if len(mistakes) > _MAX_PROBLEMS:
        lines.append(f"and {len(mistakes) - _MAX_PROBLEMS:,} more")
    return lines


def _problem(mistake: ErrorDetails, flags: Mapping[str, Any], from_files: Mapping[str, dict[str, Any]]) -> str:
    """Return a mistake as one line: the setting, the source of its value, and what is wrong."""
    path = [str(part) for part in mistake["loc"]]
    # A section has no single source: its keys may come from several.
    source = "" if fields_of(_type_of(path)) else origin(path, flags, from_files)
    where = _shown_path(path) + (f" ({source})" if source else "")
    if mistake["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # of a model, of a dataclass
        if path[0] in REMOVED_SECTIONS:
            return f"{where}: {REMOVED_SECTIONS[path[0]]}"
        hint = did_you_mean(path[-1], fields_of(_type_of(path[:-1])))
        return f"{where}: is not a setting{hint or '; remove it'}"
    if mistake["type"] == "missing":
        for variable, setting in SHORT_NAMES.items():
            if setting[: len(path)] == tuple(path):
                return f"{where}: is missing; set {variable}"
        return f"{where}: is missing"
    if mistake["type"] == "value_error":  # ours, without pydantic's prefix
        return f"{where}: {mistake['ctx']['error']}"
    return f"{where}: {mistake['msg']}"


def _shown_path(path: Sequence[str]) -> str:
    """Return the name of a setting, such as `nats.servers.0`; a key may be pasted in place of a name, so mask it."""
    shown = ".".join(MASK if looks_like_a_key(part) else short(part) for part in path)
    return shown or "settings"
