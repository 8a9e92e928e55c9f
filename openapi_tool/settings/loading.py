"""Load the settings, and report every mistake in one error; collect the secrets, to mask them."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, get_origin
from urllib.parse import unquote

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource
from pydantic_settings import SettingsError as UnreadableVariable

from openapi_tool.environment import CONFIG_VARIABLE, DEV_VARIABLE, PREFIX, SHORT_NAMES
from openapi_tool.files import MAX_SECRET_BYTES, read_regular_file
from openapi_tool.nats_client.options import NatsConnection
from openapi_tool.settings.model import Settings
from openapi_tool.settings.sections import fields_of
from openapi_tool.settings.sources import (
    DriverOptions,
    SourceUnreadable,
    file_ignored,
    file_sources,
    files,
    origin,
)
from openapi_tool.settings_error import SettingsError
from openapi_tool.telemetry.redact import MASK, is_maskable
from openapi_tool.tools.key_shapes import looks_like_a_key
from openapi_tool.tools.secret_variables import Secrets
from openapi_tool.tools.wording import short

_MAX_PROBLEMS = 1_000  # shown
_ANY_PREFIX = "OPENAPI_TOOL_"
_REMOVED = {
    "dialects": "one process serves one kernel; run a second process for the other kernel, as docs/migrating.md shows"
}
"""Sections of earlier versions, and what replaces them."""

_KUBERNETES_PREFIXES = ("OPENAPI_TOOL_SERVICE_", "OPENAPI_TOOL_PORT")  # of a Service of this name


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Load the settings from all sources. Raises SettingsError."""
    problems = list(_variable_problems(os.environ))
    settings, mistakes = _validated(flags or {})
    if settings is None or problems:
        raise SettingsError([*problems, *mistakes])
    return settings


def _validated(flags: Mapping[str, Any]) -> tuple[Settings | None, list[str]]:
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


def given_values() -> dict[str, dict[str, Any]]:
    """Return what files and environment set, by section, as written. Call it after `load_settings`."""
    values: dict[str, Any] = {}
    for source in (*reversed(file_sources(Settings)), EnvSettingsSource(Settings)):
        values = _merged(values, source())
    return values


def _merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(values[name], value)
        for name, value in more.items()
        if isinstance(value, dict) and isinstance(values.get(name), dict)
    }
    return {**values, **more, **both}


def _variable_problems(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for each variable that looks like a setting and sets none."""
    yield from empty_servers(environment)
    for variable in sorted(environment):
        section = variable.removeprefix(PREFIX).split("__")[0].lower()
        is_prefixed = variable.startswith(PREFIX)
        meant = _by_folded_name().get(_folded(variable))
        if meant is None and not is_prefixed:
            meant = _misspelt_config(variable)
        if meant == variable or (is_prefixed and section in Settings.model_fields):
            continue
        if meant:
            yield f"{variable}: is no setting; did you mean {meant}?"
        elif section in _REMOVED and is_prefixed:
            yield f"{variable}: {_REMOVED[section]}"
        elif is_prefixed:
            hint = _did_you_mean(section, Settings.model_fields) or f"; known are {', '.join(Settings.model_fields)}"
            yield f"{variable}: there is no section {section!r}{hint}"


def empty_servers(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem if NATS_SERVERS names no server."""
    if not environment.get("NATS_SERVERS", "-").strip():
        yield "NATS_SERVERS: is empty; name a server, such as nats://host:4222, or unset it"


def _misspelt_config(variable: str) -> str | None:
    """Return `CONFIG_VARIABLE` for a similar name, with which the whole file is ignored.

    Skip `_PORT`: Kubernetes sets `OPENAPI_TOOL_CONFIG_PORT` for a Service `openapi-tool-config`.
    """
    name = variable.upper()
    if not name.startswith(_ANY_PREFIX) or name.endswith("_PORT"):
        return None
    own = CONFIG_VARIABLE.removeprefix(_ANY_PREFIX)
    return CONFIG_VARIABLE if difflib.get_close_matches(name.removeprefix(_ANY_PREFIX), [own], cutoff=0.7) else None


def ignored_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a line for each variable that has the prefix, but is no setting and not similar to one."""
    known = _by_folded_name()
    return [
        f"{variable} is no setting and has no effect"
        for variable in sorted(environment)
        if variable.upper().startswith(_ANY_PREFIX)
        and not variable.startswith((PREFIX, *_KUBERNETES_PREFIXES))
        and _folded(variable) not in known
    ]


@cache
def _by_folded_name() -> Mapping[str, str]:
    return {_folded(name): name for name in (CONFIG_VARIABLE, DEV_VARIABLE, *_variables_of(Settings, PREFIX))}


def _variables_of(kind: Any, beginning: str) -> Iterator[str]:
    """Yield the variables of sections and settings, but not of a mapping's entries, whose names are free."""
    for name, field in fields_of(kind).items():
        variable = f"{beginning}{name.upper()}"
        yield variable
        if get_origin(field.annotation) is not dict:
            yield from _variables_of(field.annotation, f"{variable}__")


def _folded(variable: str) -> str:
    return variable.replace("_", "").upper()


def _invalid_json(environment: Mapping[str, str]) -> Iterator[str]:
    for variable in sorted(environment):
        path = variable.removeprefix(PREFIX).lower().split("__")
        kind = _type_of(path) if variable.startswith(PREFIX) else None
        if get_origin(kind) is dict or fields_of(kind):
            try:
                json.loads(environment[variable])
            except (ValueError, RecursionError):
                yield f'{variable}: is not JSON; give an object such as {{"key": "value"}}, for a list ["A", "B"]'


def _type_of(path: Sequence[str]) -> Any:
    """Return the type of a section or setting, for a mapping's key that of the mapping, None if unknown."""
    kind: Any = Settings
    for part in path:
        if get_origin(kind) is not dict:
            field = fields_of(kind).get(part)
            kind = field.annotation if field else None
    return kind


def _problems(error: ValidationError, flags: Mapping[str, Any]) -> list[str]:
    # pydantic drops invalid entries of a list and may then report the list as too short; skip that second report.
    items = error.errors(include_input=False, include_url=False)
    parents = {tuple(item["loc"][:-1]) for item in items}
    items = [item for item in items if item["type"] != "too_short" or tuple(item["loc"]) not in parents]
    place = partial(origin, flags=flags, from_files=files())
    more = [f"and {len(items) - _MAX_PROBLEMS:,} more"] if len(items) > _MAX_PROBLEMS else []
    return [*(_problem(item, place) for item in items[:_MAX_PROBLEMS]), *more]


def _problem(item: Mapping[str, Any], place: Callable[[Sequence[str]], str]) -> str:
    path = [str(part) for part in item["loc"]]
    where = _where(path, place)
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # of a model, of a dataclass
        if path[0] in _REMOVED:
            return f"{where}: {_REMOVED[path[0]]}"
        hint = _did_you_mean(path[-1], fields_of(_type_of(path[:-1])))
        return f"{where}: is not a setting{hint or '; remove it'}"
    if item["type"] == "missing":
        variable = next((name for name, target in SHORT_NAMES.items() if target[: len(path)] == tuple(path)), None)
        return f"{where}: is missing" + (f"; set {variable}" if variable else "")
    if item["type"] == "value_error":  # ours, without pydantic's prefix
        return f"{where}: {item['ctx']['error']}"
    return f"{where}: {item['msg']}"


def _where(path: Sequence[str], place: Callable[[Sequence[str]], str]) -> str:
    """Return the name of a setting and the source of its value; no source for a section, which may have several."""
    source = "" if fields_of(_type_of(path)) else place(path)
    shown = ".".join(MASK if looks_like_a_key(part) else short(part) for part in path)  # one may be pasted as a name
    return (shown or "settings") + (f" ({source})" if source else "")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


NamedSecret = tuple[str, str]
"""Name of the source, and the value."""

_COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
_LONG_LINE = re.compile(r"^[A-Za-z0-9._=-]{20,}$", re.MULTILINE)  # in a credentials file: JWT and seed


def secret_values(
    settings: Settings, secrets: Secrets, environment: Mapping[str, str], driver_options: DriverOptions
) -> list[NamedSecret]:
    """Return the secrets of settings, of tools, and of files and variables that drivers read."""
    return [
        *secrets.values().items(),
        *settings.secret_values(),
        *((option.where, option.value) for option in driver_options.passwords()),
        *_of_nats_files(nats for _, nats in settings.nats_connections),
        *_collector_secrets(environment),
    ]


def unmasked(named: list[NamedSecret]) -> list[str]:
    """Return the names of values that are too short or common to be masked."""
    return sorted({name for name, value in named if not is_maskable(value)})


def _of_nats_files(sections: Iterable[NatsConnection]) -> Iterator[NamedSecret]:
    for nats in sections:
        for file in filter(None, (nats.credentials_file, nats.nkey_seed_file)):
            yield from ((str(file), line) for line in _LONG_LINE.findall(_text_of(file)))
        for file in filter(None, (nats.password_file, nats.token_file)):
            yield str(file), _text_of(file).strip()


def _text_of(file: Path) -> str:
    try:
        return read_regular_file(file, MAX_SECRET_BYTES).decode(errors="replace")
    except OSError as error:
        raise SettingsError([f"{file}: cannot be read: {error.strerror}"]) from error


def _collector_secrets(environment: Mapping[str, str]) -> Iterator[NamedSecret]:
    """Yield the values of `name=value,name=value`, percent-encoded."""
    for variable in _COLLECTOR_VARIABLES:
        for pair in filter(None, environment.get(variable, "").split(",")):
            value = unquote(pair.partition("=")[2]).strip()
            yield variable, value
            yield variable, value.rpartition(" ")[2]  # `Bearer TOKEN`: the token alone, too
