"""Host names of requests, to detect DNS rebinding: a web page whose name resolves to a server of a private network."""

from __future__ import annotations

import re
from ipaddress import ip_address

_INTERNAL = (".localhost", ".local", ".internal", ".svc")  # nobody can register a name with these suffixes
_HOST = re.compile(
    r"(?:\[(?P<v6>[0-9a-f:.]+(?:%[\w.~%-]+)?)\]|(?P<name>[\w-][\w.-]*))(?::(?P<port>[0-9]{0,5}))?",
    re.IGNORECASE | re.ASCII,
)
"""An IPv6 address in brackets, which may have a zone, or a name or IPv4 address; then perhaps a port.

`[fe80::1%eth0]:8080`, `example.org`, `10.0.0.1:80`."""
_MAX_PORT = 65_535


def host_of_header(header: str) -> str | None:
    """Return the name in a Host header in lower case, without the port; None if the header is malformed."""
    match = _HOST.fullmatch(header)
    if match is None or int(match["port"] or 0) > _MAX_PORT:
        return None
    return (match["v6"] or match["name"]).lower()


def is_internal(host: str | None) -> bool:
    """Return whether no attacker can own a name: an IP address, a name without a dot or one of a few suffixes."""
    if not host:
        return False
    if "." not in host or host.endswith(_INTERNAL):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
