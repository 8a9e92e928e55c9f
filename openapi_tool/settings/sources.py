"""Where settings come from: two TOML files and the short names of the environment."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
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
    "worker.default_timeout_seconds": ("executor", "worker_default_s"),
    "cardbox.postgres_dsn": ("postgres", "dsn"),
    "tools.jina.envs": ("tools", "jina", "envs"),
    "tools.jina.services": ("tools", "jina", "services"),
}
"""Keys of the kernel's `config.toml` that count here, and where they go; it has many others."""

_KERNEL_CERTIFICATES = {"ca_file": "ca.crt", "cert_file": "client.crt", "key_file": "client.key"}


class SourceUnreadable(Exception):
    """A source of settings cannot be read at all; the message names it."""


def file_sources(settings_class: type[BaseSettings]) -> tuple[PydanticBaseSettingsSource, ...]:
    """Short names, our file, the kernel's file. Raises SourceUnreadable."""
    return (
        InitSettingsSource(settings_class, _short_names(os.environ)),
        InitSettingsSource(settings_class, _read(CONFIG_VARIABLE)),
        InitSettingsSource(settings_class, from_kernel(_read(KERNEL_CONFIG_VARIABLE))),
    )


def _short_names(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, path in SHORT_NAMES.items():
        if environment.get(variable):
            _put(values, path, environment[variable])
    return values


def _read(variable: str) -> dict[str, Any]:
    path = os.environ.get(variable)
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SourceUnreadable(f"{variable}={path}: {error}") from None


def from_kernel(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings out of the kernel's `config.toml`; what is not ours is left alone."""
    values: dict[str, Any] = {}
    for key, path in KERNEL_KEYS.items():
        value = _get(config, key)
        if value is not None:
            _put(values, path, value)
    folder = _get(config, "nats.cert_dir")
    if folder is not None and _get(config, "nats.tls_enabled"):
        for key, name in _KERNEL_CERTIFICATES.items():
            _put(values, ("nats", key), str(Path(str(folder)) / name))
    return values


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
