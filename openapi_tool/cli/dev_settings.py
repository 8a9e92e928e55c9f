"""Settings of the executor of `dev`: the user's, except for what the embedded stack decides."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from openapi_tool.bootstrap import build_bootstrap, tool_secrets
from openapi_tool.cli.common import NO_DATABASE, Upstream, executor_settings
from openapi_tool.cli.kernel_option import ProtocolVersion
from openapi_tool.cli.tools_files import settings_failed
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.local.stack import KEY_NAMES
from openapi_tool.settings import PREFIX, SettingsError, given_values, load_settings
from openapi_tool.settings.loading import ignored_variables
from openapi_tool.settings.sources import kernel_remarks
from openapi_tool.tools.secrets import FILE_SUFFIX

_CA = "SSL_CERT_FILE"
_DURABLE_SETTINGS = ("nats.ack_wait_s", "nats.max_ack_pending")
"""The only settings of section `nats` that do not concern the connection, so the user may set them."""

_OF_KERNEL = ("protocol", "dialects")
"""Sections that the stack decides: the executor of `dev` must serve the simulated kernel only."""

_STACK_SETTINGS = ("postgres.dsn", "telemetry.log_level", "telemetry.log_format")
_UPSTREAM_CONNECTION = ("egress.ca_file", "egress.proxy", "egress.public_addresses_only")
"""No effect with the double, which is on loopback and has a certificate of its own."""


@dataclass(frozen=True, slots=True)
class DevSettings:
    """Environment variables of the executor, names of the keys that the double accepts, and lines for the user."""

    environment: Mapping[str, str]
    key_names: tuple[str, ...]
    remarks: tuple[str, ...]


def dev_settings(
    upstream: Upstream, environment: Mapping[str, str], protocol: ProtocolVersion = ProtocolVersion.V1R4
) -> DevSettings:
    """Return the executor's settings: those of the user, except for what the stack decides.

    `environment` is that of the process, `protocol` the version of the stack's kernel. Exits with 2 if a setting is
    invalid or a key is missing.
    """
    stack_settings = executor_settings(upstream) | {f"{PREFIX}PROTOCOL__VERSION": protocol.value}
    try:
        settings = load_settings(NO_DATABASE)
        allowed = tool_secrets(settings, {}).allowed
        passed = _passed(environment, allowed) if upstream is Upstream.REAL else {}
        build_bootstrap(settings, passed)
    except SettingsError as error:
        settings_failed(error)
    configured = given_values()
    unused = [name for name in _names(configured) if not _takes_effect(name, upstream)]
    unused += [_CA] if environment.get(_CA) and _CA not in passed else []
    if upstream is Upstream.DOUBLE:
        stack_settings["OPENAPI_TOOL__URL_POLICY__ALLOW"] = ",".join((RECORDED_HOSTS, *settings.url_policy.allow))
        stack_settings["OPENAPI_TOOL__SECRETS__ALLOWED_ENV"] = ",".join(
            sorted({*KEY_NAMES, *settings.secrets.allowed_env})
        )
    remarks = [*kernel_remarks(), *ignored_variables(environment)]
    remarks += [f"Not used by this stack, which has its own: {', '.join(unused)}"] if unused else []
    sections = {
        f"{PREFIX}{section}".upper(): json.dumps(
            {key: value for key, value in values.items() if f"{section}.{key}" not in unused}
        )
        for section, values in configured.items()
    }
    return DevSettings({**sections, **passed, **stack_settings}, tuple(sorted({*KEY_NAMES, *allowed})), tuple(remarks))


def _passed(environment: Mapping[str, str], allowed: Iterable[str]) -> dict[str, str]:
    """Return the variables that an executor with the real upstream needs beside its settings."""
    names = [_CA, *(name + suffix for name in allowed for suffix in ("", FILE_SUFFIX))]
    return {name: environment[name] for name in names if environment.get(name)}


def _names(configured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return sorted(f"{section}.{key}" for section, values in configured.items() for key in values)


def _takes_effect(name: str, upstream: Upstream) -> bool:
    """Return whether the executor of `dev` uses a setting; else the stack decides."""
    section = name.partition(".")[0]
    if section == "nats":
        return name in _DURABLE_SETTINGS
    if name in _UPSTREAM_CONNECTION:
        return upstream is Upstream.REAL
    return section not in _OF_KERNEL and name not in _STACK_SETTINGS
