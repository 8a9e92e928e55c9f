"""Every value that no output may show, by the name of what holds it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from openapi_tool.settings import Settings
from openapi_tool.settings.model import url_credentials
from openapi_tool.telemetry.redact import MIN_SECRET_CHARS
from openapi_tool.tools.secrets import Secrets

Named = tuple[str, str]
"""Where a value was set, and the value."""

_PASSWORD_VARIABLES = ("PGPASSWORD",)
_COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
_DSN_PASSWORDS = ("password", "sslpassword")
_TELLING_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|HEADERS|DSN|SERVERS|PROXY|ENDPOINT", re.IGNORECASE)
_LONG_LINE = re.compile(r"^[A-Za-z0-9._=-]{20,}$", re.MULTILINE)  # of a credentials file: its token and its seed


def confidential(settings: Settings, secrets: Secrets, environment: Mapping[str, str]) -> list[Named]:
    """What the redactor has to know: of the settings, of tools, and what drivers read by themselves."""
    return [
        *secrets.values().items(),
        *settings.confidential(),
        *_dsn_passwords(settings.postgres.dsn.get_secret_value()),
        *_of_files(settings.nats.credentials_file, settings.nats.nkey_seed_file),
        *((name, environment[name]) for name in _PASSWORD_VARIABLES if environment.get(name)),
        *_of_collector(environment),
    ]


def unmasked(named: list[Named]) -> list[str]:
    """Names of values that are too short to be masked."""
    return sorted({name for name, value in named if len(value) < MIN_SECRET_CHARS})


def likely_secrets(environment: Mapping[str, str]) -> list[str]:
    """What may be secret in an environment that is not read as settings yet; rather too much than too little."""
    likely = [value for name, value in environment.items() if _TELLING_NAME.search(name)]
    return [part for value in likely for part in (_of_url(value) if "://" in value else [value])]


def _of_url(value: str) -> list[str]:
    """The credentials of one or more URLs; where it can be read as none, all of it."""
    try:
        return [part for url in value.split(",") for part in url_credentials(url)]
    except ValueError:
        return [value]


def _dsn_passwords(dsn: str) -> Iterator[Named]:
    query = parse_qs(urlsplit(dsn).query)
    return (("postgres.dsn", value) for name in _DSN_PASSWORDS for value in query.get(name, []))


def _of_files(*files: Path | None) -> Iterator[Named]:
    for file in filter(None, files):
        for line in _LONG_LINE.findall(file.read_text(encoding="utf-8", errors="replace")):
            yield str(file), line


def _of_collector(environment: Mapping[str, str]) -> Iterator[Named]:
    """Values of the headers that go to the collector: `name=value,name=value`, percent-encoded."""
    for variable in _COLLECTOR_VARIABLES:
        for pair in filter(None, environment.get(variable, "").split(",")):
            value = unquote(pair.partition("=")[2]).strip()
            yield variable, value
            yield variable, value.rpartition(" ")[2]
