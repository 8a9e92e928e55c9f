"""All secrets that this process knows from its settings, files and variables: what the redactor must mask.

Besides the settings these are the files and variables that drivers read by themselves, such as a NATS credentials file
or the headers for an OTLP collector.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from openapi_tool.files import MAX_SECRET_BYTES, read_regular_file
from openapi_tool.nats_client.options import NatsConnection
from openapi_tool.settings.driver_options import DriverOptions
from openapi_tool.settings.model import Settings
from openapi_tool.settings_error import SettingsError
from openapi_tool.telemetry.redact import is_maskable
from openapi_tool.tools.secret_variables import Secrets

_COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")

# In a credentials file: the line of a JWT (eyJ0….eyJq….Zx…) or of a seed (SUAK…), but not the dashed headings.
_LONG_LINE = re.compile(r"^[A-Za-z0-9._=-]{20,}$", re.MULTILINE)


class NamedSecret(NamedTuple):
    """A secret, and the setting, variable or file that it comes from."""

    name: str
    value: str


def secret_values(
    settings: Settings, secrets: Secrets, environment: Mapping[str, str], driver_options: DriverOptions
) -> list[NamedSecret]:
    """Return the secrets of settings, of tools, and of files and variables that drivers read. Raises SettingsError."""
    found = [NamedSecret(variable, value) for variable, value in secrets.values().items()]
    found += [NamedSecret(setting, value) for setting, value in settings.secret_values()]
    found += [NamedSecret(option.where, option.value) for option in driver_options.passwords()]
    found += _in_nats_files(connection for _, connection in settings.nats_connections)
    found += _in_collector_headers(environment)
    return found


def unmasked(named: list[NamedSecret]) -> list[str]:
    """Return the names of values that are too short or common to be masked."""
    return sorted({secret.name for secret in named if not is_maskable(secret.value)})


def _in_nats_files(connections: Iterable[NatsConnection]) -> Iterator[NamedSecret]:
    for connection in connections:
        for file in (connection.credentials_file, connection.nkey_seed_file):
            if file is not None:
                for line in _LONG_LINE.findall(_text_of(file)):
                    yield NamedSecret(str(file), line)
        for file in (connection.password_file, connection.token_file):
            if file is not None:
                yield NamedSecret(str(file), _text_of(file).strip())


def _text_of(file: Path) -> str:
    try:
        return read_regular_file(file, MAX_SECRET_BYTES).decode(errors="replace")
    except OSError as error:
        raise SettingsError([f"{file}: cannot be read: {error.strerror}"]) from error


def _in_collector_headers(environment: Mapping[str, str]) -> Iterator[NamedSecret]:
    """Yield the values in `name=value,name=value`, which are percent-encoded."""
    for variable in _COLLECTOR_VARIABLES:
        for pair in filter(None, environment.get(variable, "").split(",")):
            _, _, encoded = pair.partition("=")
            value = unquote(encoded).strip()
            yield NamedSecret(variable, value)
            yield NamedSecret(variable, value.rpartition(" ")[2])  # `Bearer TOKEN`: the token alone, too
