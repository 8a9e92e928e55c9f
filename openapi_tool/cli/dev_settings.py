"""The settings of the executors that `dev` starts: the user's own, except for what the stack decides."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from openapi_tool.bootstrap import build_bootstrap, tool_secrets
from openapi_tool.cli.embedded import executor_settings
from openapi_tool.cli.kernel import NO_DATABASE
from openapi_tool.cli.options import UpstreamChoice
from openapi_tool.local.dev import KEY_NAMES
from openapi_tool.local.recordings import RECORDED_HOSTS
from openapi_tool.protocol.dialect import DEFAULT_VERSION, ProtocolVersion
from openapi_tool.settings import PREFIX, given_values, load_settings
from openapi_tool.settings.sources import kernel_remarks
from openapi_tool.settings.variables import ignored_variables
from openapi_tool.tools.secret_variables import FILE_SUFFIX

_CA = "SSL_CERT_FILE"  # variable of OpenSSL: the certificates that TLS connections trust
_DURABLE_SETTINGS = ("nats.ack_wait_s", "nats.max_ack_pending")
"""Settings of section `nats` that do not concern the connection."""

_OF_KERNEL = ("protocol", "quotas")
"""Sections of the stack: the executor must use nothing but the simulated kernel."""

_STACK_SETTINGS = ("postgres.dsn", "telemetry.log_level", "telemetry.log_format")
"""Further settings of the stack: `dev` reads the log to print the calls."""

_UPSTREAM_CONNECTION = ("egress.ca_file", "egress.proxy", "egress.public_addresses_only")
"""No effect with the double, which is on loopback and has a certificate of its own."""


@dataclass(frozen=True, slots=True)
class DevSettings:
    """Variables of the executor, names of the keys that the double accepts, and lines for the user."""

    environment: Mapping[str, str]
    key_names: tuple[str, ...]
    remarks: tuple[str, ...]


def dev_settings(
    upstream: UpstreamChoice, environment: Mapping[str, str], protocol: ProtocolVersion = DEFAULT_VERSION
) -> DevSettings:
    """Return the user's settings, except for what the stack decides. Raises SettingsError; exits without a key."""
    stack_settings = executor_settings(upstream) | {f"{PREFIX}PROTOCOL__VERSION": protocol.value}
    settings = load_settings(NO_DATABASE)
    key_names = tool_secrets(settings, {}).allowed
    passed = _passed_variables(environment, key_names) if upstream is UpstreamChoice.REAL else {}
    build_bootstrap(settings, passed)  # reports what `load_settings` does not check, before any server starts
    if upstream is UpstreamChoice.DOUBLE:
        stack_settings[f"{PREFIX}URL_POLICY__ALLOW"] = ",".join((RECORDED_HOSTS, *settings.url_policy.allow))
        allowed_keys = sorted({*KEY_NAMES, *settings.secrets.allowed_env})
        stack_settings[f"{PREFIX}SECRETS__ALLOWED_ENV"] = ",".join(allowed_keys)
    configured = given_values()
    unused = _unused_settings(configured, upstream)
    remarks = [*kernel_remarks(), *ignored_variables(environment)]
    ca_is_unused = environment.get(_CA) and _CA not in passed
    if unused or ca_is_unused:
        names = [*unused, _CA] if ca_is_unused else unused
        remarks.append(f"Not used by this stack, which has its own: {', '.join(names)}")
    return DevSettings(
        environment={**_as_variables(configured, unused), **passed, **stack_settings},
        key_names=tuple(sorted({*KEY_NAMES, *key_names})),
        remarks=tuple(remarks),
    )


def _passed_variables(environment: Mapping[str, str], key_names: Iterable[str]) -> dict[str, str]:
    """Return the variables that the real upstream needs beside settings: keys, or the files that contain them."""
    names = [_CA]
    for key_name in key_names:
        names += [key_name, key_name + FILE_SUFFIX]
    return {name: environment[name] for name in names if environment.get(name)}


def _unused_settings(configured: Mapping[str, Mapping[str, Any]], upstream: UpstreamChoice) -> list[str]:
    """Return the names of the configured settings, such as `nats.servers`, for which the stack has its own values."""
    names = sorted(f"{section}.{key}" for section, values in configured.items() for key in values)
    return [name for name in names if not _takes_effect(name, upstream)]


def _takes_effect(name: str, upstream: UpstreamChoice) -> bool:
    section = name.partition(".")[0]
    if section == "nats":
        return name in _DURABLE_SETTINGS
    if name in _UPSTREAM_CONNECTION:
        return upstream is UpstreamChoice.REAL
    return section not in _OF_KERNEL and name not in _STACK_SETTINGS


def _as_variables(configured: Mapping[str, Mapping[str, Any]], unused: Collection[str]) -> dict[str, str]:
    """Return a variable for each section, with the JSON of its used settings: OPENAPI_TOOL__EXECUTOR={…}."""
    variables = {}
    for section, values in configured.items():
        used = {key: value for key, value in values.items() if f"{section}.{key}" not in unused}
        variables[f"{PREFIX}{section}".upper()] = json.dumps(used)
    return variables
