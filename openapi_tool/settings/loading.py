"""Read all settings, or name every mistake in them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from openapi_tool.settings.model import Settings
from openapi_tool.settings.sources import PREFIX, SHORT_NAMES, SourceUnreadable


class SettingsError(Exception):
    """The configuration is not usable; `problems` has one line for each mistake, without values."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Read every source. Raises SettingsError naming all mistakes at once."""
    problems = list(_unknown_variables(os.environ))
    try:
        settings = Settings(**(flags or {}))
    except ValidationError as error:
        problems += [_problem(item) for item in error.errors(include_input=False, include_url=False)]
    except SourceUnreadable as error:
        problems.append(str(error))
    else:
        if not problems:
            return settings
    raise SettingsError(problems)


def _unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Variables with our prefix whose section does not exist; keys inside a section are checked with it."""
    for variable in sorted(environment):
        section = variable.removeprefix(PREFIX).split("__")[0].lower()
        if variable.startswith(PREFIX) and section not in Settings.model_fields:
            yield f"{variable}: there is no section {section!r}{_did_you_mean(section, Settings.model_fields)}"


def _problem(item: Mapping[str, Any]) -> str:
    path = [str(part) for part in item["loc"]]
    where = ".".join(path) or "settings"
    if item["type"] == "extra_forbidden":
        return f"{where}: is no setting{_did_you_mean(path[-1], _siblings(path[:-1]))}"
    if item["type"] == "missing":
        short = next((name for name, target in SHORT_NAMES.items() if target[: len(path)] == tuple(path)), None)
        return f"{where}: is missing" + (f"; set {short}" if short else "")
    return f"{where}: {item['msg'].removeprefix('Value error, ')}"


def _siblings(path: list[str]) -> list[str]:
    """The names that could have stood where an unknown one does."""
    model: type[BaseModel] = Settings
    for part in path:
        field = model.model_fields.get(part)
        kind: Any = field.annotation if field else None
        if not hasattr(kind, "model_fields"):
            return []
        model = kind
    return list(model.model_fields)


def _did_you_mean(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
