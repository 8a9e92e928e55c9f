"""Hosts that are IP addresses, in any notation that browsers take: `127.0.0.1` is also `127.1` or `0x7f.1`.

The functions take a host as `hosts.folded_host` returns it: in lower case, and with plain digits and dots.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address

_LAST_IS_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.DOTALL)
"""A host whose last part is a number, such as `1.2.3.4`, and also `a.0x7f`, which is no valid address."""
_NUMBER = re.compile(r"0x[0-9a-f]*|0[0-7]*|[1-9][0-9]*")
_V4_PARTS = 4
_MAX_BYTE = 255
_MAX_CHARS = 253  # of a host


def ends_in_number(host: str) -> bool:
    """Return whether a host can only be an IPv4 address, valid or not."""
    return _LAST_IS_NUMBER.fullmatch(host) is not None


def ipv4_of(host: str) -> IPv4Address | None:
    """Return the IPv4 address that a host is; None if it is none.

    It has one to four parts, each decimal, octal (`0…`) or hexadecimal (`0x…`). The last part fills the remaining
    bytes: `127.1` is 127.0.0.1.
    """
    parts = host.split(".")
    if len(host) > _MAX_CHARS or len(parts) > _V4_PARTS or not all(map(_NUMBER.fullmatch, parts)):
        return None
    *first, last = map(_value, parts)
    if max(first, default=0) > _MAX_BYTE or last >= 256 ** (_V4_PARTS - len(first)):
        return None
    first_bytes = sum(byte << 8 * (_V4_PARTS - 1 - place) for place, byte in enumerate(first))
    return IPv4Address(first_bytes + last)


def _value(number: str) -> int:
    """Return the value of a hexadecimal, octal or decimal number."""
    if number.startswith("0x"):
        return int(number.removeprefix("0x") or "0", 16)
    return int(number, 8 if number.startswith("0") else 10)


def compared_address(host: str) -> str:
    """Return an IP address in the one form in which addresses are compared; another host unchanged.

    IPv6 has no brackets, and an IPv4 address that is mapped into IPv6 is that IPv4 address.
    """
    if ":" in host:
        return _compared_ipv6(host)
    address = ipv4_of(host) if ends_in_number(host) else None
    return host if address is None else str(address)


def _compared_ipv6(host: str) -> str:
    try:
        address = IPv6Address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return host
    return str(address.ipv4_mapped or address)
