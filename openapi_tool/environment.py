"""Environment variables: the names that settings have there, and which values are likely secrets.

Imports almost nothing, as the command line needs them before it knows which command runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from openapi_tool.dsn import POSTGRES_SCHEMES, parse_dsn
from openapi_tool.urls import SCHEMES, parse_url

CONFIG_VARIABLE = "OPENAPI_TOOL_CONFIG"
DEV_VARIABLE = "OPENAPI_TOOL_DEV"
"""Names the running `dev` stack that commands use."""

KERNEL_CONFIG_VARIABLE = "CG_CONFIG_TOML"
PREFIX = "OPENAPI_TOOL__"
SHORT_NAMES: Mapping[str, tuple[str, str]] = {"PG_DSN": ("postgres", "dsn"), "NATS_SERVERS": ("nats", "servers")}
"""Section and key of the settings that have a variable without `PREFIX`."""

DEFAULT_AUTH_ENV = "JINA_API_KEY"

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|HEADERS|DSN|SERVERS|PROXY|ENDPOINT", re.IGNORECASE)
# Where a URL that cannot be parsed is divided into parts.
_DELIMITER = re.compile(r"[:/?#@\[\]&=,;\s]+")
_NOT_SECRET = ("", *POSTGRES_SCHEMES, *SCHEMES)


@contextmanager
def temporary_variable(name: str, value: str | None) -> Iterator[None]:
    """Set a variable for a while; do nothing without a value."""
    if value is None:
        yield
        return
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextmanager
def without_variable(name: str) -> Iterator[None]:
    """Unset a variable for a while."""
    before = os.environ.pop(name, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before


def likely_secrets(environment: Mapping[str, str]) -> list[str]:
    """Return likely secrets, to mask before the settings are loaded; false ones do no harm."""
    likely = []
    for name, value in environment.items():
        if _SECRET_NAME.search(name):
            is_url = "://" in value
            likely += _url_credentials(value.strip()) if is_url else [value.strip()]
    return likely


def _url_credentials(value: str) -> list[str]:
    """Return the credentials of a connection string, or of URLs that commas separate.

    If the value is neither, return all its parts, as the error of a library may quote any of them.
    """
    try:
        return list(parse_dsn(value).credentials)
    except ValueError:
        pass
    try:
        urls = [parse_url(url.strip(), SCHEMES) for url in value.split(",")]
    except ValueError:
        return [value, *(part for part in _DELIMITER.split(value) if part.lower() not in _NOT_SECRET)]
    return [credential for url in urls for credential in url.credentials]
