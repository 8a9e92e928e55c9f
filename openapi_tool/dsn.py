"""Strict parser of PostgreSQL connection strings (DSN); its errors contain no part of the input.

Such as postgresql://user:password@host:5432/database?sslmode=require
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote

from openapi_tool.urls import check_v6, check_with_urllib, checked_address, checked_port

POSTGRES_SCHEMES = ("postgres", "postgresql")

ESCAPE = "in names and passwords write % as %25, / as %2F, ? as %3F, # as %23, @ as %40, [ as %5B, ] as %5D"
_FORM = "must look like postgresql://user:password@host:5432/database"
# A character that a connection string must escape.
_FORBIDDEN = re.compile(r"[#\s\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# `host`, `host:5432`, `[::1]:5432`, or empty with a port.
_HOST = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[^\[\]:]*))(?::(?P<port>[^\[\]:]*))?")
_PASSWORDS = ("password", "sslpassword")

Host = tuple[str, int | None]
"""A host name, an address, or the folder of a socket; and its port, None for the default."""


@dataclass(frozen=True, slots=True)
class Dsn:
    """Decoded connection string; a part that it leaves to the environment is None or empty.

    `query` has the options behind the question mark. `shown` is masked. `credentials` are all passwords, each as it is
    written and decoded, so that both forms can be masked in messages.
    """

    shown: str
    hosts: tuple[Host, ...]
    user: str | None
    database: str | None
    password: str | None = field(repr=False)
    query: Mapping[str, str] = field(repr=False)
    credentials: tuple[str, ...] = field(repr=False)

    @property
    def where(self) -> str:
        """Hosts, ports and database, for messages."""
        addresses = []
        for host, port in self.hosts:
            bracketed = f"[{host}]" if ":" in host else host  # IPv6
            addresses.append(f"{bracketed}:{port or 5432}")
        hosts = ", ".join(addresses)
        return f"{hosts or 'the default host'} (database {self.database or self.user or 'by default'})"


def parse_dsn(text: str) -> Dsn:
    """Parse a connection string. Raises ValueError."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() not in POSTGRES_SCHEMES:
        raise ValueError(_FORM)
    try:
        return _parsed(text, rest)  # what follows ://
    except ValueError as problem:
        raise ValueError(f"{problem}; {_FORM}, and {ESCAPE}") from None


def _parsed(text: str, rest: str) -> Dsn:
    address, _, query = rest.partition("?")
    netloc, _, path = address.partition("/")
    login, at, hosts = netloc.rpartition("@")
    has_stray_at = rest.count("@") > len(at)  # `at` is "@" or empty
    has_bracket_in_login = "[" in login or "]" in login
    if _FORBIDDEN.search(rest) or has_stray_at or has_bracket_in_login:
        raise ValueError("contains a character in a place where it is not allowed")
    check_with_urllib(text, "is no URL")
    options = _options(query)
    if hosts:  # the driver then ignores hosts in the query
        options = {name: value for name, value in options.items() if name not in ("host", "port")}
    user, _, password = login.partition(":")
    secrets = (password, unquote(password), *(options.get(name, "") for name in _PASSWORDS))
    dsn = Dsn(
        shown=f"postgresql://{'***@' if login else ''}{hosts}/{path}",
        hosts=parse_hosts(hosts, decode=True) or _hosts_of(options),
        user=unquote(user) or options.get("user"),
        database=unquote(path) if "/" in address else options.get("dbname", options.get("database")),
        password=unquote(password) or options.get("password"),
        query=options,
        credentials=tuple(dict.fromkeys(filter(None, secrets))),
    )
    if any("\0" in part for part in (dsn.user, dsn.database, dsn.password, *options.values()) if part):
        raise ValueError("holds a NUL character")
    return dsn


def _options(query: str) -> dict[str, str]:
    """Parse a query; the last value of a name counts. Raises ValueError."""
    if not query:
        return {}
    try:
        return {name: values[-1] for name, values in parse_qs(query, strict_parsing=True).items()}
    except ValueError:
        raise ValueError("what follows ? must be name=value, joined by &") from None


def _hosts_of(options: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts in the query's `host`, with the ports in its `port`: one for all, or one for each."""
    hosts = parse_hosts(options.get("host", ""))
    ports = options.get("port", "")
    if not ports:
        return hosts
    numbers = [checked_port(port) for port in ports.split(",")]
    if len(numbers) == 1:
        numbers *= len(hosts)
    elif hosts and len(numbers) != len(hosts):
        raise ValueError("port must hold one port, or one for each host")
    return tuple((host, number) for (host, _), number in zip(hosts, numbers, strict=False))


def parse_hosts(text: str, *, decode: bool = False) -> tuple[Host, ...]:
    """Parse comma-separated hosts; `decode` those before the query, which are percent-encoded. Raises ValueError."""
    return tuple(_host(part, decode=decode) for part in text.split(",")) if text else ()


def _host(text: str, *, decode: bool) -> Host:
    if text.startswith("/") and not decode:  # the folder of a socket
        return text, None
    match = _HOST.fullmatch(text)
    if not match or not text:
        raise ValueError("a host is missing, or an IPv6 address is outside brackets")
    name = match["v6"] or match["name"]
    name = unquote(name) if decode else name
    if match["v6"]:
        check_v6(name)
    elif not name.startswith("/"):
        checked_address(name)
    port = unquote(match["port"] or "") if decode else match["port"]
    return name, (checked_port(port) if port else None)
