"""Strict parsers of connection strings and of server URLs; their errors contain no part of the input.

If a user name or password has an unescaped `/`, `?`, `#` or `@`, programs take a part of it for host, port, path or
database, and show it in errors and name look-ups. So such input is refused before anything else reads it.
Every other connection string that asyncpg accepts is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from urllib.parse import parse_qs, unquote, urlsplit

_NOT_PRINTED = r"\s\x00-\x1f\x7f-\x9f\ud800-\udfff"
_URL = re.compile(
    r"(?P<scheme>[a-z]+)://"
    rf"(?:(?P<user>[^{_NOT_PRINTED}/?#@:\[\]]*)(?::(?P<password>[^{_NOT_PRINTED}/?#@\[\]]*))?@)?"
    rf"(?P<host>\[[0-9A-Fa-f:.]+\]|[^{_NOT_PRINTED}/?#@:\[\]\\%]+)(?::(?P<port>[0-9]{{1,5}}))?"
    rf"(?P<path>/[^{_NOT_PRINTED}?#@]*)?(?:\?(?P<query>[^{_NOT_PRINTED}#@]*))?",
    re.IGNORECASE,
)
_NOT_IN_HOST_NAME = re.compile(r"[\s\x00-\x1f\x7f,/?#@:\[\]\\%]")
MAX_PORT = 65_535
NATS_SCHEMES, HTTP_SCHEMES = ("nats", "tls", "ws", "wss"), ("http", "https")
SCHEMES = (*NATS_SCHEMES, *HTTP_SCHEMES)  # of all URLs but the database's
POSTGRES_SCHEMES = ("postgres", "postgresql")


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """Parts of a URL as written; an IPv6 `host` is in brackets."""

    scheme: str
    host: str
    port: int | None
    path: str
    user: str | None = field(repr=False)
    password: str | None = field(repr=False)
    query: str = field(repr=False)

    @property
    def credentials(self) -> tuple[str, ...]:
        """The password, as written and decoded; without one the user name, which then is a token."""
        secret = self.password or self.user
        return (secret, unquote(secret)) if secret else ()

    @property
    def where(self) -> str:
        """Host and port, by default that of NATS."""
        return f"{self.host}:{self.port or 4222}"

    @property
    def shown(self) -> str:
        """URL with `***` for user and password, and without its query."""
        login = "***@" if self.user or self.password else ""
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{login}{self.host}{port}{self.path}"


def parse_url(text: str, schemes: Collection[str]) -> ServerUrl:
    """Read a URL of one of `schemes`. Raises ValueError."""
    match = _URL.fullmatch(text)
    if not match or match["scheme"].lower() not in schemes:
        raise ValueError("is not a URL of this kind")
    _check_with_urllib(text, "is not a URL of this kind")
    host = match["host"]
    check = _check_v6 if host.startswith("[") else _check_name
    check(host.strip("[]"))
    return ServerUrl(
        scheme=match["scheme"].lower(),
        host=host,
        port=None if match["port"] is None else checked_port(match["port"]),
        path=match["path"] or "",
        user=match["user"],
        password=match["password"],
        query=match["query"] or "",
    )


def checked_port(text: str) -> int:
    """Return the port number. Raises ValueError."""
    port = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_PORT)) else 0
    if not 0 < port <= MAX_PORT:
        raise ValueError(f"a port is no number from 1 to {MAX_PORT}")
    return port


def _check_with_urllib(text: str, problem: str) -> None:
    """Raise ValueError if urllib, which drivers call, refuses the text."""
    try:
        urlsplit(text)
    except ValueError:
        raise ValueError(problem) from None


def _check_name(host: str) -> None:
    try:
        host.encode("idna")
    except UnicodeError:  # the look-up would raise it, and drivers do not handle it
        raise ValueError("a host name has an empty or too long part; correct it") from None
    if _NOT_IN_HOST_NAME.search(host):
        raise ValueError("a host name holds a character that none can hold")


def _check_v6(literal: str) -> None:
    try:
        IPv6Address(literal)
    except ValueError:
        raise ValueError("an address with colons is no IPv6 address") from None


def checked_address(host: str) -> str:
    """Return a host name or address (of IPv6 without brackets). Raises ValueError."""
    check = _check_v6 if ":" in host else _check_name
    check(host)
    return host


ESCAPE = "in names and passwords write % as %25, / as %2F, ? as %3F, # as %23, @ as %40, [ as %5B, ] as %5D"
_FORM = "must look like postgresql://user:password@host:5432/database"
_FORBIDDEN = re.compile(r"[#\s\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_HOST = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[^\[\]:]*))(?::(?P<port>[^\[\]:]*))?")
_PASSWORDS = ("password", "sslpassword")

Host = tuple[str, int | None]
"""A host name, an address, or the folder of a socket; and its port, None for the default."""


@dataclass(frozen=True, slots=True)
class Dsn:
    """Decoded connection string; a part that it leaves to the environment is None or empty.

    `shown` is masked; `credentials` are all passwords, as written and decoded.
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
        named = [(f"[{host}]" if ":" in host else host, port or 5432) for host, port in self.hosts]
        hosts = ", ".join(f"{host}:{port}" for host, port in named)
        return f"{hosts or 'the default host'} (database {self.database or self.user or 'by default'})"


def parse_dsn(text: str) -> Dsn:
    """Parse a connection string. Raises ValueError."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() not in POSTGRES_SCHEMES:
        raise ValueError(_FORM)
    try:
        return _parsed(text, rest)
    except ValueError as problem:
        raise ValueError(f"{problem}; {_FORM}, and {ESCAPE}") from None


def _parsed(text: str, rest: str) -> Dsn:
    address, _, query = rest.partition("?")
    netloc, _, path = address.partition("/")
    login, at, hosts = netloc.rpartition("@")
    has_stray_at = rest.count("@") > len(at)  # `at` is "@" or empty
    if _FORBIDDEN.search(rest) or has_stray_at or "[" in login or "]" in login:
        raise ValueError("contains a character in a place where it is not allowed")
    _check_with_urllib(text, "is no URL")
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
    try:
        return {name: values[-1] for name, values in parse_qs(query, strict_parsing=True).items()} if query else {}
    except ValueError:
        raise ValueError("what follows ? must be name=value, joined by &") from None


def _hosts_of(options: Mapping[str, str]) -> tuple[Host, ...]:
    hosts, ports = parse_hosts(options.get("host", "")), options.get("port", "").split(",")
    if ports == [""]:
        return hosts
    numbers = [checked_port(port) for port in ports]
    if hosts and len(numbers) not in (1, len(hosts)):
        raise ValueError("port must hold one port, or one for each host")
    return tuple((host, numbers[at % len(numbers)]) for at, (host, _) in enumerate(hosts))


def parse_hosts(text: str, *, decode: bool = False) -> tuple[Host, ...]:
    """Parse comma-separated hosts; `decode` those before the query, which are percent-encoded. Raises ValueError."""
    return tuple(_host(part, decode=decode) for part in text.split(",")) if text else ()


def _host(text: str, *, decode: bool) -> Host:
    if text.startswith("/") and not decode:
        return text, None
    match = _HOST.fullmatch(text)
    if not match or not text:
        raise ValueError("a host is missing, or an IPv6 address is outside brackets")
    name = match["v6"] or match["name"]
    name = unquote(name) if decode else name
    if match["v6"]:
        _check_v6(name)
    elif not name.startswith("/"):
        checked_address(name)
    port = unquote(match["port"] or "") if decode else match["port"]
    return name, checked_port(port) if port else None
