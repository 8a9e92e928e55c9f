"""Any text as a page's address: an accepted one is public for every other parser, too, and is unchanged."""

from __future__ import annotations

import contextlib
import socket
import unicodedata
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, IPv6Network
from urllib.parse import unquote, urlsplit

import idna
from yarl import URL

from openapi_tool.jina.url_policy import INTERNAL_SUFFIXES, UrlPolicy, checked_url
from openapi_tool.protocol.errors import BadRequest, TargetRefused

_RULES = UrlPolicy()
_METADATA = (IPv4Address("168.63.129.16"), IPv4Address("192.0.0.192"), IPv4Address("100.100.100.200"))
_NAT64 = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))
_SITE_LOCAL_OR_TEREDO = (IPv6Network("fec0::/10"), IPv6Network("2001::/32"))
_ISATAP = (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")
_NAMES = ("metadata.google.internal", "metadata.goog", "metadata.tencentyun.com", "localhost", "r.jina.ai", "s.jina.ai")


def check(data: bytes) -> None:
    """Check one text; raise AssertionError for a wrong result, or the exception of a defect."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        url = checked_url(text, _RULES)
    except (BadRequest, TargetRefused) as refusal:
        assert refusal.message.startswith("url: ")
        assert refusal.message.isprintable()
        assert len(refusal.message) < 400
        return
    assert checked_url(url, _RULES) == url
    _assert_form(url)
    for host in {spelling for read in _hosts(url) for spelling in _host_forms(read)}:
        assert_public(host)


def _assert_form(url: str) -> None:
    parts = urlsplit(url)
    assert parts.scheme in ("http", "https")
    assert url.lower().startswith(f"{parts.scheme}://")
    assert (parts.username, parts.password) == (None, None)
    assert not any(char.isspace() or unicodedata.category(char) in ("Cc", "Cs") for char in url)
    assert "\\" not in url


def _hosts(url: str) -> Iterator[str]:
    """Yield the host as read by two libraries, and by a careless parser: up to the first `/`, `?` or `#`."""
    yield urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        read = URL(url)
        assert read.user is None
        assert read.password is None
        yield read.host or ""
        yield read.raw_host or ""
    authority = url.split("://", 1)[1]
    for mark in "/?#":
        authority = authority.split(mark, 1)[0]
    yield authority.rsplit(":", 1)[0] if not authority.endswith("]") else authority


def _host_forms(host: str) -> Iterator[str]:
    """Return the forms of a host: decoded, folded, with and without invisible characters, in both IDNA standards."""
    plain = host.strip("[]")
    for text in {plain, unquote(plain), unquote(unquote(plain))}:
        folded = unicodedata.normalize("NFKC", text).casefold()
        visible = "".join(char for char in folded if unicodedata.category(char)[0] != "C" and char != "\u034f")
        for form in {text, folded, visible, unicodedata.normalize("NFKC", visible)}:
            yield form
            with contextlib.suppress(UnicodeError):
                yield form.encode("idna").decode()
            with contextlib.suppress(UnicodeError):
                yield idna.encode(form, uts46=True).decode()
            with contextlib.suppress(UnicodeError):
                yield idna.decode(form)


def assert_public(host: str) -> None:
    """Assert that a form of a host is public by the standard library's lists."""
    name = host.lower().replace("\u3002", ".").removesuffix(".")
    address = _address(name)
    if address is not None:
        _assert_public_address(address)
        return
    assert "." in name, f"{host!r} has no dot"
    assert name not in _NAMES, f"{host!r} is internal"
    assert not name.endswith(INTERNAL_SUFFIXES), f"{host!r} is internal"


def _address(name: str) -> IPv4Address | IPv6Address | None:
    """Return the address that the C library or the standard library reads, None if neither does."""
    with contextlib.suppress(ValueError):
        return IPv6Address(name)
    with contextlib.suppress(OSError, ValueError, UnicodeError):
        return IPv4Address(socket.inet_aton(name))
    return None


def _assert_public_address(address: IPv4Address | IPv6Address) -> None:
    # Newer versions of Python treat all of 2002::/16 as not global; the embedded address is checked below.
    is_6to4 = isinstance(address, IPv6Address) and address.sixtofour is not None
    assert address.is_global or is_6to4, f"{address} is not public"
    assert not address.is_multicast, f"{address} is not public"
    assert address.version != 4 or not address.is_reserved, f"{address} is not public"
    assert address not in _METADATA, f"{address} is a metadata service"
    if isinstance(address, IPv6Address):
        assert address.packed[8:12] not in _ISATAP, f"{address} holds an address of a site"
        assert not any(address in network for network in _SITE_LOCAL_OR_TEREDO), f"{address} is not public"
        for inner in _inside(address):
            _assert_public_address(inner)


def _inside(address: IPv6Address) -> Iterator[IPv4Address]:
    """Yield the IPv4 addresses that a gateway or operating system would extract from an IPv6 one."""
    yield from filter(None, (address.ipv4_mapped, address.sixtofour))
    if any(address in network for network in _NAT64) or address.packed.startswith(bytes(12)):
        yield IPv4Address(address.packed[12:])
