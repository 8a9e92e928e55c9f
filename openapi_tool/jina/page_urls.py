"""Splits the address of a page into its parts, as browsers and the reader do (WHATWG URL).

The host is decoded and folded (`hosts.py`): `①27.0.0.1` and `%31%32%37.0.0.1` are both 127.0.0.1. `url_policy.py`
decides whether it may be read.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from openapi_tool.jina.address_repair import checked_characters, shown_address
from openapi_tool.jina.hosts import MAX_ENCODED_NAME_CHARS, folded_host
from openapi_tool.protocol.errors import BadRequest

_SCHEME = re.compile(r"(?:https?:/*){,2}(https?):/*", re.IGNORECASE | re.ASCII)
"""Up to three schemes, with any number of slashes, as in `http:https://`; the last one counts."""
# A scheme whose colon is encoded, as in `https%3A%2F%2Fexample.com`.
_ENCODED_SCHEME = re.compile(r"https?%3a", re.IGNORECASE | re.ASCII)
_OTHER_SCHEME = re.compile(r"(?!localhost:)[a-z][a-z0-9+-]*:", re.IGNORECASE)  # no dot: `host.name:80` is none
_URL = re.compile(r"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
# For example `example.com:8080`, or `[::1]`.
_HOST_AND_PORT = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]+)(?::(?P<port>[0-9]{0,5}))?")
_MAX_PORT = 65_535
_PORTS = range(1, _MAX_PORT + 1)


class PageUrl(NamedTuple):
    """A URL: its whole `text`, its folded `host` (IPv6 in brackets), and the `rest` behind host and port."""

    text: str
    host: str
    rest: str


def parsed_url(text: str) -> PageUrl:
    """Split an address, with or without scheme, into its parts. Raises BadRequest."""
    url = _with_scheme(text)
    parts = _URL.fullmatch(url)
    authority, rest = parts.groups() if parts else ("", "")  # authority: login, host and port
    if "@" in authority:
        raise BadRequest("url: holds a user name or password before '@'. Give the address without it.")
    match = _HOST_AND_PORT.fullmatch(authority)
    if not match or len(match["host"]) > MAX_ENCODED_NAME_CHARS:
        raise no_host(authority)
    host, port = match["host"], match["port"]
    if port and int(port) not in _PORTS:
        raise no_host(authority)
    if not host.startswith("["):  # an IPv6 address is neither decoded nor mapped
        host = folded_host(_decoded(host))
        if host.startswith("["):
            raise no_host(authority)
    return PageUrl(url, host, rest)


def _with_scheme(text: str) -> str:
    """Return an address with the scheme http or https, by default https. Raises BadRequest for another scheme."""
    text = text.removeprefix("//")
    if _ENCODED_SCHEME.match(text):
        text = checked_characters(_decoded(text))
    scheme = _SCHEME.match(text)
    if scheme:
        return f"{scheme[1]}://{text[scheme.end() :]}"
    other = _OTHER_SCHEME.match(text)
    if other:
        raise BadRequest(f"url: {shown_address(other[0])} cannot be read. Give an http:// or https:// address.")
    return f"https://{text}"


def _decoded(text: str) -> str:
    """Return a text without percent-encoding. Raises BadRequest if that is no UTF-8."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise BadRequest(f"url: the escapes in {shown_address(text)} are no UTF-8. Give the plain address.") from None


def no_host(text: str) -> BadRequest:
    """Return the error for a text in place of a host."""
    if not text:
        return BadRequest(
            "url: has no host name; a local file cannot be read. Give an address such as https://example.com/page."
        )
    return BadRequest(f"url: {shown_address(text)} is no host name. Give an address such as https://example.com/page.")
