"""Strict parser of server URLs; its errors contain no part of the input."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from urllib.parse import unquote, urlsplit

_NOT_PRINTED = r"\s\x00-\x1f\x7f-\x9f\ud800-\udfff"
# scheme://user:password@host:port/path?query, of which only scheme and host are required.
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
        """The password, as written and decoded; without a password the user name, which then is a token of NATS."""
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
    check_with_urllib(text, "is not a URL of this kind")
    host = match["host"]
    check = check_v6 if host.startswith("[") else _check_name
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
    is_short_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_PORT))
    port = int(text) if is_short_number else 0
    if not 0 < port <= MAX_PORT:
        raise ValueError(f"a port is no number from 1 to {MAX_PORT}")
    return port


def check_with_urllib(text: str, problem: str) -> None:
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


def check_v6(literal: str) -> None:
    """Raise ValueError if a text is no IPv6 address."""
    try:
        IPv6Address(literal)
    except ValueError:
        raise ValueError("an address with colons is no IPv6 address") from None


def checked_address(host: str) -> str:
    """Return a host name or address (of IPv6 without brackets). Raises ValueError."""
    check = check_v6 if ":" in host else _check_name
    check(host)
    return host
