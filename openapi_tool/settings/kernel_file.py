"""Settings of this program in the kernel's own `config.toml`, so that an operator need not write them twice.

The variable CG_CONFIG_TOML names that file. `sources.py` reads it, and takes from it what no other source sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openapi_tool.protocol.jsontext import as_object

INFLIGHT_KEY = "nats.pull.max_inflight"
_KERNEL_KEYS: Mapping[str, tuple[str, ...]] = {
    "protocol.version": ("protocol", "version"),
    "nats.servers": ("nats", "servers"),
    "nats.tls_enabled": ("nats", "tls"),
    INFLIGHT_KEY: ("executor", "concurrency"),
    "worker.default_timeout_seconds": ("executor", "worker_timeout_s"),
    "worker.suspend_timeout_seconds": ("executor", "worker_timeout_s"),
    "cardbox.postgres_dsn": ("postgres", "dsn"),
    "tools.jina.envs": ("tools", "jina", "envs"),
    "tools.jina.services": ("tools", "jina", "services"),
}
"""Keys of the kernel's file, with their settings (section and key); the last key of a setting wins."""

_KERNEL_CERTIFICATES = {"ca_file": "ca.crt", "cert_file": "client.crt", "key_file": "client.key"}
"""Settings of `nats`, with the kernel's names for these files in its folder `nats.cert_dir`."""

# Sections for the executor that the kernel has itself, read for the variables of API keys only; the last one wins. What
# these sections call a service is a tool target here.
_KERNEL_ENVS = ("openapi.envs", "tools.openapi.envs")
_KERNEL_SERVICES = ("openapi.services", "tools.openapi.services", "tools.openapi_services")


def settings_in_kernel_file(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the kernel's file, whose content is `config`, by section and key."""
    values: dict[str, Any] = {}
    for key, path in _KERNEL_KEYS.items():
        value = _value_at(config, key)
        if value is None or (key == INFLIGHT_KEY and is_inflight_ignored(config)):
            continue
        set_at(values, path, value)
    _add_api_keys(config, values)
    folder = _value_at(config, "nats.cert_dir")
    if folder is not None and _value_at(config, "nats.tls_enabled"):
        for key, name in _KERNEL_CERTIFICATES.items():
            set_at(values, ("nats", key), str(Path(str(folder)) / name))
    return values


def is_inflight_ignored(config: Mapping[str, Any]) -> bool:
    """Return whether the number of calls at a time is 1, too low here: the kernel's own executor runs one call."""
    return bool(_value_at(config, INFLIGHT_KEY) == 1)


def _add_api_keys(config: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Add the variables of the API keys that the kernel's own executor uses, unless `tools.jina` names some."""
    envs: dict[str, Any] = {}
    for section in _KERNEL_ENVS:
        envs |= _only_api_key(_value_at(config, section))
    service_envs: dict[str, dict[str, Any]] = {}
    for section in _KERNEL_SERVICES:
        for target, service in as_object(_value_at(config, section)).items():
            service_envs.setdefault(target, {}).update(_only_api_key(as_object(service).get("envs")))
    jina = _value_at(values, "tools.jina") or {}
    jina_envs = jina.get("envs", {})
    if envs and isinstance(jina_envs, dict):
        set_at(values, ("tools", "jina", "envs"), {**envs, **jina_envs})
    for target, target_envs in service_envs.items():
        if target_envs and _value_at(jina, f"services.{target}.envs") is None:
            set_at(values, ("tools", "jina", "services", target, "envs"), target_envs)


def _only_api_key(envs: Any) -> dict[str, Any]:
    """Return the variable of the argument `api_key` alone, of a mapping from arguments to variables."""
    return {"api_key": envs["api_key"]} if isinstance(envs, dict) and "api_key" in envs else {}


def _value_at(config: Mapping[str, Any], dotted: str) -> Any:
    """Return the value of a key such as `nats.pull.max_inflight`; None without one."""
    value: Any = config
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def set_at(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set a value of nested dictionaries, which are created if they are missing."""
    *parents, leaf = path
    for parent in parents:
        values = values.setdefault(parent, {})
    values[leaf] = value
