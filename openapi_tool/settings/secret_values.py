"""Secret values to mask in all output, with the name of their source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

from openapi_tool.settings import Settings
from openapi_tool.settings.libpq import DriverOptions
from openapi_tool.settings.sections import SCHEMES
from openapi_tool.settings.urls import parse_dsn, parse_url
from openapi_tool.telemetry.redact import is_maskable
from openapi_tool.tools.secrets import Secrets

NamedSecret = tuple[str, str]
"""Name of the source, and the value."""

_COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|HEADERS|DSN|SERVERS|PROXY|ENDPOINT", re.IGNORECASE)
_DELIMITER = re.compile(r"[:/?#@\[\]&=,;\s]+")
_NOT_SECRET = ("", "postgres", "postgresql", *SCHEMES)  # common words; masking them would spoil every message
_LONG_LINE = re.compile(r"^[A-Za-z0-9._=-]{20,}$", re.MULTILINE)  # in a credentials file: JWT and seed


def secret_values(
    settings: Settings, secrets: Secrets, environment: Mapping[str, str], driver_options: Iterable[DriverOptions]
) -> list[NamedSecret]:
    """Return the secrets for the redactor: of the settings, of tools, and of files and variables that drivers read."""
    return [
        *secrets.values().items(),
        *settings.secret_values(),
        *((option.where, option.value) for options in driver_options for option in options.passwords()),
        *(
            secret
            for kernel in settings.kernels
            for secret in _of_files(kernel.nats.credentials_file, kernel.nats.nkey_seed_file)
        ),
        *_collector_secrets(environment),
    ]


def unmasked(named: list[NamedSecret]) -> list[str]:
    """Return the names of values that are too short or too common to be masked."""
    return sorted({name for name, value in named if not is_maskable(value)})


def likely_secrets(environment: Mapping[str, str]) -> list[str]:
    """Return likely secrets of an environment, to mask before the settings are loaded; false positives do no harm."""
    likely = [value.strip() for name, value in environment.items() if _SECRET_NAME.search(name)]
    return [part for value in likely for part in (_url_credentials(value) if "://" in value else [value])]


def _url_credentials(value: str) -> list[str]:
    """Return the credentials in a connection string or in URLs; for a text that is neither, the whole and its parts.

    A library that fails to parse such a text may show a part of it in its error.
    """
    try:
        return list(parse_dsn(value).credentials)
    except ValueError:
        pass
    try:
        return [part for url in value.split(",") for part in parse_url(url.strip(), SCHEMES).credentials]
    except ValueError:
        return [value, *(part for part in _DELIMITER.split(value) if part.lower() not in _NOT_SECRET)]


def _of_files(*files: Path | None) -> Iterator[NamedSecret]:
    for file in filter(None, files):
        for line in _LONG_LINE.findall(file.read_text(encoding="utf-8", errors="replace")):
            yield str(file), line


def _collector_secrets(environment: Mapping[str, str]) -> Iterator[NamedSecret]:
    """Return the values of the collector's headers: `name=value,name=value`, percent-encoded."""
    for variable in _COLLECTOR_VARIABLES:
        for pair in filter(None, environment.get(variable, "").split(",")):
            value = unquote(pair.partition("=")[2]).strip()
            yield variable, value
            yield variable, value.rpartition(" ")[2]  # `Bearer TOKEN`: the token alone, too
