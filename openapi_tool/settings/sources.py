"""Where settings come from beside `OPENAPI_TOOL__…` and flags: variables with short names, and two files.

The *settings file* is that of this program, named by the variable OPENAPI_TOOL_CONFIG or the option --config. The
kernel's file is read, too (`kernel_file.py`). `model.Settings` reads these sources; commands and error messages ask
where a value comes from (`origin`).
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource
from pydantic_settings.sources import InitSettingsSource

from openapi_tool.environment import CONFIG_VARIABLE, KERNEL_CONFIG_VARIABLE, PREFIX, SHORT_NAMES, temporary_variable
from openapi_tool.files import MAX_CONFIG_BYTES, read_regular_file
from openapi_tool.settings.kernel_file import INFLIGHT_KEY, is_inflight_ignored, set_at, settings_in_kernel_file

_ignored_files: ContextVar[frozenset[str]] = ContextVar("ignored_files", default=frozenset())
"""Variables whose files are not read."""

_config_option: ContextVar[str] = ContextVar("config_option", default="")
"""File of the option --config."""


def use_settings_file(config: Path | None) -> None:
    """Read the settings from the file of the option --config from now on; messages then name the option."""
    if config is not None and str(config) != os.environ.get(CONFIG_VARIABLE):  # else the value is the variable's
        _config_option.set(str(config))
        os.environ[CONFIG_VARIABLE] = str(config)


@contextmanager
def settings_file(config: Path | None) -> Iterator[None]:
    """Read the settings from the file of the option --config for a while."""
    with temporary_variable(CONFIG_VARIABLE, os.environ.get(CONFIG_VARIABLE, "")):
        use_settings_file(config)
        yield


def named_by(variable: str) -> str:
    """Return what names a settings file: its variable, or the option."""
    is_option = variable == CONFIG_VARIABLE and _config_option.get() == os.environ.get(CONFIG_VARIABLE)
    return "--config" if is_option else variable


def file_sources(settings_class: type[BaseSettings]) -> tuple[PydanticBaseSettingsSource, ...]:
    """Return the sources below `OPENAPI_TOOL__…` that are not empty, in descending precedence. Raises SourceUnreadable.

    They are the variables with short names, the settings file, and the kernel's file.
    """
    sources = [_short_names(), *files().values()]
    return tuple(InitSettingsSource(settings_class, values) for values in sources if values)


def _short_names() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, path in SHORT_NAMES.items():
        value = os.environ.get(variable, "")
        if value.strip():
            set_at(values, path, value)
    return values


def files() -> dict[str, dict[str, Any]]:
    """Return the values of the settings file and the kernel's file, by variable. Raises SourceUnreadable."""
    return {
        CONFIG_VARIABLE: _read(CONFIG_VARIABLE),
        KERNEL_CONFIG_VARIABLE: settings_in_kernel_file(_read(KERNEL_CONFIG_VARIABLE)),
    }


def _read(variable: str) -> dict[str, Any]:
    """Return the content of the TOML file that a variable names; {} if it names none. Raises SourceUnreadable."""
    path = os.environ.get(variable)
    if not path or variable in _ignored_files.get():
        return {}
    try:
        return tomllib.loads(read_regular_file(path, MAX_CONFIG_BYTES).decode())
    except OSError as error:
        raise SourceUnreadable(variable, f"cannot be read: {error.strerror}; name a TOML file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SourceUnreadable(variable, f"is no TOML in UTF-8: {error}; correct it there") from None
    except (ValueError, RecursionError):
        raise SourceUnreadable(variable, "has too long a number, or is nested too deep; correct it there") from None


class SourceUnreadable(Exception):
    """The settings file that `variable` names cannot be read."""

    def __init__(self, variable: str, problem: str) -> None:
        super().__init__(f"{named_by(variable)}={os.environ[variable]}: {problem}")
        self.variable = variable


@contextmanager
def file_ignored(variable: str) -> Iterator[None]:
    """Do not read the file that a variable names, so that mistakes elsewhere can be listed."""
    token = _ignored_files.set(_ignored_files.get() | {variable})
    try:
        yield
    finally:
        _ignored_files.reset(token)


def kernel_remarks() -> list[str]:
    """Return a line for each ignored value of the kernel's file. Raises SourceUnreadable."""
    if not is_inflight_ignored(_read(KERNEL_CONFIG_VARIABLE)):
        return []
    where = f"{INFLIGHT_KEY} = 1 of {KERNEL_CONFIG_VARIABLE}"
    return [f"{where} is ignored: it is the kernel's own executor's; set executor.concurrency = 1 for the same"]


def origin(path: Sequence[str], flags: Mapping[str, Any], from_files: Mapping[str, dict[str, Any]]) -> str:
    """Return where the value of a setting comes from: the name of its variable, or "in FILE".

    Empty for a flag or a default. `path` is section and key, `from_files` the result of `files`.
    """
    if _contains(flags, path):
        return ""
    variable = _variable_setting(path)
    if variable is not None:
        return variable
    for file_variable, values in from_files.items():
        if _contains(values, path):
            return f"in {os.environ[file_variable]}"
    return ""


def _variable_setting(path: Sequence[str]) -> str | None:
    """Return the variable that sets a setting, if one does: its own, that of its section (as JSON), or a short name."""
    present = {name.upper() for name, value in os.environ.items() if value.strip()}
    names = [PREFIX + "__".join(path[:length]).upper() for length in range(len(path), 0, -1)]
    names += [short_name for short_name, setting in SHORT_NAMES.items() if setting == tuple(path[:2])]
    for name in names:
        if name in present:
            return name
    return None


def _contains(values: Any, path: Sequence[str]) -> bool:
    """Return whether these values contain a setting, or a wrong value in place of its table."""
    for part in path:
        if not isinstance(values, dict):
            return True
        if part not in values:
            return False
        values = values[part]
    return True
