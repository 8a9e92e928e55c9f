"""Sources of settings: two TOML files and short names of environment variables."""

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

CONFIG_VARIABLE = "OPENAPI_TOOL_CONFIG"
KERNEL_CONFIG_VARIABLE = "CG_CONFIG_TOML"
PREFIX = "OPENAPI_TOOL__"
SHORT_NAMES: Mapping[str, tuple[str, str]] = {"PG_DSN": ("postgres", "dsn"), "NATS_SERVERS": ("nats", "servers")}

KERNEL_KEYS: Mapping[str, tuple[str, ...]] = {
    "protocol.version": ("protocol", "version"),
    "nats.servers": ("nats", "servers"),
    "nats.tls_enabled": ("nats", "tls"),
    "nats.pull.max_inflight": ("executor", "concurrency"),
    "worker.default_timeout_seconds": ("executor", "worker_timeout_s"),
    "worker.suspend_timeout_seconds": ("executor", "worker_timeout_s"),
    "cardbox.postgres_dsn": ("postgres", "dsn"),
    "tools.jina.envs": ("tools", "jina", "envs"),
    "tools.jina.services": ("tools", "jina", "services"),
}
"""Keys of the kernel's `config.toml` that are read, with their settings; of several for one setting the last counts."""

_INFLIGHT = "nats.pull.max_inflight"
_KERNEL_ENVS = ("openapi.envs", "tools.openapi.envs")
_KERNEL_SERVICES = ("openapi.services", "tools.openapi.services", "tools.openapi_services")
"""Sections of the kernel's own executor, from which only the variables of API keys are taken; the last counts."""

_API_KEY = "api_key"

_KERNEL_CERTIFICATES = {"ca_file": "ca.crt", "cert_file": "client.crt", "key_file": "client.key"}


_skipped: ContextVar[frozenset[str]] = ContextVar("skipped", default=frozenset())
"""Variables whose files are not read, within `file_ignored`."""


class SourceUnreadable(Exception):
    """The settings file that `variable` names cannot be read."""

    def __init__(self, variable: str, problem: str) -> None:
        super().__init__(f"{variable}={os.environ[variable]}: {problem}")
        self.variable = variable


@contextmanager
def file_ignored(variable: str) -> Iterator[None]:
    """Do not read the file that a variable names, so that mistakes elsewhere can be listed."""
    token = _skipped.set(_skipped.get() | {variable})
    try:
        yield
    finally:
        _skipped.reset(token)


def file_sources(settings_class: type[BaseSettings]) -> tuple[PydanticBaseSettingsSource, ...]:
    """Return short names, the executor's file and the kernel's, unless empty. Raises SourceUnreadable."""
    files = (_short_names(os.environ), _read(CONFIG_VARIABLE), from_kernel(_read(KERNEL_CONFIG_VARIABLE)))
    return tuple(InitSettingsSource(settings_class, values) for values in files if values)


def origin(path: Sequence[str], flags: Mapping[str, Any]) -> str:
    """Return the variable that gave a setting, or "in FILE"; empty for a flag or a default."""
    if _contains(flags, path):
        return ""
    names = {name.upper() for name, value in os.environ.items() if value.strip()}
    variables = (PREFIX + "__".join(path[:length]).upper() for length in range(len(path), 0, -1))
    short = (name for name, setting in SHORT_NAMES.items() if setting == tuple(path[:2]))
    if variable := next((name for name in (*variables, *short) if name in names), None):
        return variable
    files = {
        CONFIG_VARIABLE: _read(CONFIG_VARIABLE),
        KERNEL_CONFIG_VARIABLE: from_kernel(_read(KERNEL_CONFIG_VARIABLE)),
    }
    return next((f"in {os.environ[variable]}" for variable, values in files.items() if _contains(values, path)), "")


def _contains(values: Any, path: Sequence[str]) -> bool:
    """Return whether a file contains this setting, or the mapping in which it is an entry."""
    for part in path:
        if not isinstance(values, dict):
            return True
        if part not in values:
            return False
        values = values[part]
    return True


def _short_names(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, path in SHORT_NAMES.items():
        if (value := environment.get(variable, "")).strip():
            _put(values, path, value)
    return values


def _read(variable: str) -> dict[str, Any]:
    path = os.environ.get(variable)
    if not path or variable in _skipped.get():
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceUnreadable(variable, f"cannot be read: {error.strerror}; name a TOML file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SourceUnreadable(variable, f"is no TOML in UTF-8: {error}; correct it there") from None


def from_kernel(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the executor's settings in the kernel's `config.toml`; ignore other keys."""
    values: dict[str, Any] = {}
    for key, path in KERNEL_KEYS.items():
        value = _get(config, key)
        # The kernel's own executor runs one call at a time, so its config.toml has 1, too low for this one.
        if value is not None and not (key == _INFLIGHT and value == 1):
            _put(values, path, value)
    _add_api_keys(config, values)
    folder = _get(config, "nats.cert_dir")
    if folder is not None and _get(config, "nats.tls_enabled"):
        for key, name in _KERNEL_CERTIFICATES.items():
            _put(values, ("nats", key), str(Path(str(folder)) / name))
    return values


def _add_api_keys(config: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Add the variables of API keys from the sections of the kernel's own executor, unless `tools.jina` has some."""
    envs: dict[str, Any] = {}
    for section in _KERNEL_ENVS:
        envs |= _key_of(_get(config, section))
    services: dict[str, dict[str, Any]] = {}
    for section in _KERNEL_SERVICES:
        section_services = _get(config, section)
        for target, service in section_services.items() if isinstance(section_services, dict) else ():
            services.setdefault(target, {}).update(_key_of(_get({"service": service}, "service.envs")))
    own = _get(values, "tools.jina") or {}
    if envs and isinstance(own.get("envs", {}), dict):
        _put(values, ("tools", "jina", "envs"), {**envs, **own.get("envs", {})})
    for target, keys in services.items():
        if keys and _get(own, f"services.{target}.envs") is None:
            _put(values, ("tools", "jina", "services", target, "envs"), keys)


def _key_of(envs: Any) -> dict[str, Any]:
    return {_API_KEY: envs[_API_KEY]} if isinstance(envs, dict) and _API_KEY in envs else {}


def kernel_remarks() -> list[str]:
    """Return a line for each key of the kernel's `config.toml` whose value is ignored. Raises SourceUnreadable."""
    if _get(_read(KERNEL_CONFIG_VARIABLE), _INFLIGHT) != 1:
        return []
    where = f"{_INFLIGHT} = 1 of {KERNEL_CONFIG_VARIABLE}"
    return [f"{where} is ignored: it is the kernel's own executor's; set executor.concurrency = 1 for the same"]


def _get(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, leaf = path
    for parent in parents:
        values = values.setdefault(parent, {})
    values[leaf] = value
