"""URL policy: checks page addresses before a request is sent and billed, by the address alone, without DNS.

`checked_url` repairs an address (`address_repair.py`), finds its host, and decides whether that may be read. A URL is
parsed as browsers and the reader do (WHATWG URL): `0x7f.1`, `①27.0.0.1` and `%31%32%37.0.0.1` are all 127.0.0.1. A
valid URL is sent byte for byte. Which IP address a public name has is not known here; the reader checks that itself
(jina-api section 7).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, NamedTuple
from urllib.parse import unquote

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass as validated
from pydantic_settings import NoDecode

from openapi_tool.jina.address_repair import bounded, checked_characters, repaired_address, shown_address
from openapi_tool.jina.hosts import (
    ENCODED_LABEL,
    MAX_ENCODED_NAME_CHARS,
    MAX_LABEL_CHARS,
    belongs_to,
    denied_target,
    folded_host,
    suffixes,
)
from openapi_tool.jina.ip_notations import compared_address, ends_in_number, ipv4_of
from openapi_tool.jina.public_addresses import is_public
from openapi_tool.options.section import Options, split
from openapi_tool.protocol.errors import BadRequest, TargetRefused

# `.example` (RFC 6761) is missing: no internal host has such a name, but examples of tools and documents use it.
INTERNAL_SUFFIXES = (
    ".alt",  # RFC 9476
    ".arpa",  # infrastructure and reverse zones; holds .home.arpa (RFC 8375) and ipv4only.arpa (RFC 8880)
    ".cluster",
    ".consul",
    ".corp",
    ".home",
    ".internal",
    ".intranet",
    ".invalid",  # RFC 6761
    ".kube",
    ".lan",
    ".local",  # RFC 6762
    ".localdomain",
    ".localhost",  # RFC 6761
    ".mail",  # like .corp and .home never delegated, since many networks use these names internally
    ".onion",  # RFC 7686
    ".private",
    ".svc",
    ".test",  # RFC 6761
)
"""Suffixes that no public host has; `UrlPolicy.internal_suffixes` adds more."""

_METADATA_NAMES = frozenset({"metadata.goog", "metadata.tencentyun.com"})
"""Hosts in clouds that give secrets to machines there, and whose names look public."""
# The reader and the search service: r.jina.ai, eu.r.jina.ai, eu-r-beta.jina.ai.
_READER = re.compile(r"(?:.+\.)?(?:[a-z0-9]+-)?r(?:-[a-z0-9]+)?\.jina\.ai")
_SEARCH = re.compile(r"(?:.+\.)?(?:[a-z0-9]+-)?s(?:-[a-z0-9]+)?\.jina\.ai")
_MAX_READER_PREFIXES = 3  # `https://r.jina.ai/https://r.jina.ai/…`, of which the page behind them is read
# A name of labels, or a suffix with its leading dot.
_LABELS = re.compile(r"\.?[^\s.:/?#@*%\[\]\\]+(?:\.[^\s.:/?#@*%\[\]\\]+)*\.?")

_SCHEME = re.compile(r"(?:https?:/*){,2}(https?):/*", re.IGNORECASE | re.ASCII)
"""Up to three schemes, with any number of slashes, as in `http:https://`; the last one counts."""
_ENCODED_SCHEME = re.compile(r"https?%3a", re.IGNORECASE | re.ASCII)
_OTHER_SCHEME = re.compile(r"(?!localhost:)[a-z][a-z0-9+-]*:", re.IGNORECASE)  # no dot: `host.name:80` is none
_URL = re.compile(r"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
_HOST_AND_PORT = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]+)(?::([0-9]{0,5}))?")
_MAX_PORT = 65_535
_PORTS = range(1, _MAX_PORT + 1)

_MAX_NAME_CHARS = 253
_ASCII_OF_LABEL = re.compile(r"[a-z0-9_-]")


def _name(entry: str) -> str:
    """Return an entry of the settings. Raises ValueError if it is no name."""
    if not _LABELS.fullmatch(entry):
        raise ValueError("must be names such as wiki.lan, or suffixes such as .lan, without scheme, port and wildcard")
    return entry


def _address(entry: str) -> str:
    """Return the canonical form, empty if the entry is no IP address."""
    try:
        return str(ip_address(entry.strip("[]")))
    except ValueError:
        return ""


@validated(frozen=True)
class UrlPolicy(Options):
    """Page URLs that may be read, decided from the URL alone, without DNS, and hosts that are never shown."""

    internal_suffixes: Annotated[
        tuple[Annotated[str, AfterValidator(_name)], ...],
        NoDecode,
        BeforeValidator(split),
        Field(
            description="Suffixes of host names that are not public, beside the built-in ones (`.local`, `.internal`, "
            "…); comma-separated in the environment."
        ),
    ] = ()
    allow: Annotated[
        tuple[Annotated[str, AfterValidator(lambda entry: _address(entry) or _name(entry))], ...],
        NoDecode,
        BeforeValidator(split),
        Field(
            description="Host names, addresses, or suffixes with a leading dot (`.lan`) that may be read although they "
            "look internal."
        ),
    ] = ()
    deny: Annotated[
        tuple[Annotated[str, AfterValidator(lambda entry: _address(entry) or _name(entry))], ...],
        NoDecode,
        BeforeValidator(split),
        Field(
            description="Host names and addresses that are neither read nor shown in results and links, with all their "
            "subdomains; wins over `allow`."
        ),
    ] = ()


class _ParsedUrl(NamedTuple):
    """A URL: its `text`, its `host` as a browser reads it (IPv6 in brackets), and the `rest` behind host and port."""

    text: str
    host: str
    rest: str


def checked_url(text: str, rules: UrlPolicy) -> str:
    """Return the URL to send: the text, repaired if it is no URL but its meaning is clear.

    Takes linear time. Raises BadRequest if the text is no web address, TargetRefused if its host is not public.
    """
    url = _parsed(repaired_address(text))
    for _ in range(_MAX_READER_PREFIXES):
        if not _READER.fullmatch(url.host):
            break
        url = _parsed(_behind_reader(url))
    if _READER.fullmatch(url.host):
        raise BadRequest(
            f"url: names the reader more than {_MAX_READER_PREFIXES} times. Give the address of the page itself."
        )
    if _SEARCH.fullmatch(url.host):
        raise BadRequest(f"url: {shown_address(url.host)} is a search service, no page. Give the address of a page.")
    host = _checked_host(url.host, rules)
    if belongs_to(compared_address(host), _compiled(rules).denied):
        raise denied_target(host)
    return bounded(url.text)


def _behind_reader(reader: _ParsedUrl) -> str:
    """Return the URL inside a reader URL (`r.jina.ai/https://example.com`)."""
    target = reader.rest.lstrip("/")
    if not reader.rest.startswith("/") or not target or target[0] in "?#":
        host = shown_address(reader.host)
        raise BadRequest(f"url: {host} is the reader itself, no page. Give the address of a page.")
    return target


def _parsed(text: str) -> _ParsedUrl:
    """Split an address, with or without scheme, into its parts. Raises BadRequest."""
    url = _with_scheme(text)
    parts = _URL.fullmatch(url)
    authority, rest = parts.groups() if parts else ("", "")
    if "@" in authority:
        raise BadRequest("url: holds a user name or password before '@'. Give the address without it.")
    match = _HOST_AND_PORT.fullmatch(authority)
    if not match or len(match[1]) > MAX_ENCODED_NAME_CHARS:
        raise _no_host(authority)
    port = match[2]
    if port and int(port) not in _PORTS:
        raise _no_host(authority)
    host = match[1]
    if not host.startswith("["):  # an IPv6 address is neither decoded nor mapped
        host = folded_host(_decoded(host))
        if host.startswith("["):
            raise _no_host(authority)
    return _ParsedUrl(url, host, rest)


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


def _checked_host(host: str, rules: UrlPolicy) -> str:
    """Return a folded host. Raises BadRequest for one that cannot exist, TargetRefused for an internal one.

    Non-canonical IPv4 addresses are refused even if public: programs parse them differently.
    """
    address: IPv4Address | IPv6Address
    if host.startswith("["):
        address, problem = _ipv6(host.strip("[]"))
    elif ends_in_number(host):
        address, problem = _ipv4(host)
    else:
        _check_name(host, rules)
        return host
    # A private address is refused as such, also if it is spelled in an unusual way.
    if not is_public(address) and str(address) not in _compiled(rules).hosts:
        raise _refused(str(address), "is a private, local or reserved address")
    if problem:
        raise BadRequest(f"url: {problem}")
    return str(address)


def _ipv6(text: str) -> tuple[IPv6Address, str]:
    """Return the address, and what is wrong with its spelling, or an empty text. Raises BadRequest if it is none."""
    literal, zone, _ = text.partition("%")
    try:
        address = IPv6Address(literal)
    except ValueError:
        raise BadRequest(f"url: {shown_address(text)} is no IPv6 address. Use the page's host name.") from None
    return address, f"{shown_address(text)} names a network interface. Use the page's host name." if zone else ""


def _ipv4(host: str) -> tuple[IPv4Address, str]:
    """Return the address, and what is wrong with its spelling, or an empty text. Raises BadRequest if it is none."""
    address = ipv4_of(host)
    if address is None:
        raise BadRequest(
            f"url: {shown_address(host)} is neither a host name nor an IPv4 address. Use the page's host name."
        )
    if str(address) == host:
        return address, ""
    return address, f"{shown_address(host)} is an unusual spelling. Write {address}, or the page's host name."


def _check_name(host: str, rules: UrlPolicy) -> None:
    """Raise BadRequest if a folded host is no name, TargetRefused if it is internal and not allowed."""
    if len(host) > _MAX_NAME_CHARS or not all(map(_is_label, host.split("."))):
        raise _no_host(host)
    compiled = _compiled(rules)
    if host in compiled.hosts or belongs_to(host, compiled.allowed):
        return
    if "." not in host:
        raise _refused(host, "has no dot and so names no public site")
    if host in _METADATA_NAMES or belongs_to(host, compiled.internal):
        raise _refused(host, "is an internal name")


def _is_label(label: str) -> bool:
    if not 0 < len(label) <= MAX_LABEL_CHARS or label.startswith(ENCODED_LABEL):
        return False
    return all(map(_may_be_in_label, label))


def _may_be_in_label(char: str) -> bool:
    if char.isascii():
        return _ASCII_OF_LABEL.match(char) is not None
    return unicodedata.category(char)[0] not in "CZ"  # neither a control character nor a blank


class _FoldedPolicy(NamedTuple):
    """A policy in the form in which hosts are compared with it.

    `hosts` are the names and addresses of `allow`. The other members are suffixes with a leading dot.
    """

    hosts: frozenset[str]
    allowed: tuple[str, ...]
    internal: tuple[str, ...]
    denied: tuple[str, ...]


@functools.lru_cache(maxsize=4)  # a process has one policy; without a cache each call would fold its names again
def _compiled(rules: UrlPolicy) -> _FoldedPolicy:
    return _FoldedPolicy(
        hosts=frozenset(_address(entry) or folded_host(entry) for entry in rules.allow if not entry.startswith(".")),
        allowed=suffixes(entry for entry in rules.allow if entry.startswith(".")),
        internal=suffixes((*INTERNAL_SUFFIXES, *rules.internal_suffixes)),
        denied=suffixes(rules.deny),
    )


def _no_host(text: str) -> BadRequest:
    if not text:
        return BadRequest(
            "url: has no host name; a local file cannot be read. Give an address such as https://example.com/page."
        )
    return BadRequest(f"url: {shown_address(text)} is no host name. Give an address such as https://example.com/page.")


def _refused(host: str, why: str) -> TargetRefused:
    shown = shown_address(host)
    return TargetRefused(f"url: {shown} {why}; such targets are not read. Use the address of a public page.")
