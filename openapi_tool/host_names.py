"""Host names of requests, to detect DNS rebinding: a web page whose name resolves to a server of a private network."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

_INTERNAL = (".localhost", ".local", ".internal", ".svc")


def host_of_header(header: str) -> str | None:
    """Return the name in a Host header in lower case, without the port; None if the header is malformed."""
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port  # raises ValueError
    except ValueError:
        return None
    return parts.hostname if parts.netloc == header and "@" not in header else None


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
