"""URL policy: checks page addresses before a request is sent and billed, by the address alone, without DNS.

`checked_url` repairs an address (`address_repair.py`), finds its host (`page_urls.py`), and decides whether that may be
read. A valid URL is sent byte for byte. Which IP address a public name has is not known here; the reader, which is the
upstream's service that loads the page, checks that itself (jina-api section 7).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass as validated
from pydantic_settings import NoDecode

from openapi_tool.jina.address_repair import bounded, repaired_address, shown_address
from openapi_tool.jina.hosts import ENCODED_LABEL, MAX_LABEL_CHARS, belongs_to, denied_target, folded_host, suffixes
from openapi_tool.jina.ip_notations import compared_address, ends_in_number, ipv4_of
from openapi_tool.jina.page_urls import PageUrl, no_host, parsed_url
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

_MAX_NAME_CHARS = 253
_ASCII_OF_LABEL = re.compile(r"[a-z0-9_-]")


def _name(entry: str) -> str:
    """Return an entry of the settings. Raises ValueError if it is neither a name nor a suffix."""
    if not _LABELS.fullmatch(entry):
        raise ValueError("must be names such as wiki.lan, or suffixes such as .lan, without scheme, port and wildcard")
    return entry


def _address(entry: str) -> str:
    """Return an IP address of the settings in canonical form; empty if the entry is none."""
    try:
        return str(ip_address(entry.strip("[]")))
    except ValueError:
        return ""


def _name_or_address(entry: str) -> str:
    return _address(entry) or _name(entry)


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
        tuple[Annotated[str, AfterValidator(_name_or_address)], ...],
        NoDecode,
        BeforeValidator(split),
        Field(
            description="Host names, addresses, or suffixes with a leading dot (`.lan`) that may be read although they "
            "look internal."
        ),
    ] = ()
    deny: Annotated[
        tuple[Annotated[str, AfterValidator(_name_or_address)], ...],
        NoDecode,
        BeforeValidator(split),
        Field(
            description="Host names and addresses that are neither read nor shown in results and links, with all their "
            "subdomains; wins over `allow`."
        ),
    ] = ()


def checked_url(text: str, rules: UrlPolicy) -> str:
    """Return the URL to send: the text, repaired if it is no URL but its meaning is clear.

    Takes linear time. Raises BadRequest if the text is no web address, TargetRefused if its host is not public.
    """
    url = parsed_url(repaired_address(text))
    for _ in range(_MAX_READER_PREFIXES):
        if not _READER.fullmatch(url.host):
            break
        url = parsed_url(_address_behind_reader(url))
    if _READER.fullmatch(url.host):
        raise BadRequest(
            f"url: names the reader more than {_MAX_READER_PREFIXES} times. Give the address of the page itself."
        )
    if _SEARCH.fullmatch(url.host):
        raise BadRequest(f"url: {shown_address(url.host)} is a search service, no page. Give the address of a page.")
    host = _checked_host(url.host, rules)
    if belongs_to(compared_address(host), _folded(rules).denied):
        raise denied_target(host)
    return bounded(url.text)


def _address_behind_reader(reader: PageUrl) -> str:
    """Return the URL inside a reader URL (`r.jina.ai/https://example.com`)."""
    target = reader.rest.lstrip("/")
    if not reader.rest.startswith("/") or not target or target[0] in "?#":
        host = shown_address(reader.host)
        raise BadRequest(f"url: {host} is the reader itself, no page. Give the address of a page.")
    return target


def _checked_host(host: str, rules: UrlPolicy) -> str:
    """Return a folded host. Raises BadRequest for one that cannot exist, TargetRefused for an internal one.

    An IPv4 address in another notation than `1.2.3.4` is refused even if it is public, since programs read it
    differently.
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
    if not is_public(address) and str(address) not in _folded(rules).hosts:
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
        raise no_host(host)
    policy = _folded(rules)
    if host in policy.hosts or belongs_to(host, policy.allowed):
        return
    if "." not in host:
        raise _refused(host, "has no dot and so names no public site")
    if host in _METADATA_NAMES or belongs_to(host, policy.internal):
        raise _refused(host, "is an internal name")


def _is_label(label: str) -> bool:
    if not 0 < len(label) <= MAX_LABEL_CHARS or label.startswith(ENCODED_LABEL):
        return False
    return all(map(_may_be_in_label, label))


def _may_be_in_label(char: str) -> bool:
    if char.isascii():
        return _ASCII_OF_LABEL.match(char) is not None
    general_category = unicodedata.category(char)  # such as `Ll` for a small letter
    return not general_category.startswith(("C", "Z"))  # neither a control character nor a blank


class _FoldedPolicy(NamedTuple):
    """A policy in the form in which hosts are compared with it.

    `hosts` are the names and addresses of `allow`. The other members are suffixes with a leading dot.
    """

    hosts: frozenset[str]
    allowed: tuple[str, ...]
    internal: tuple[str, ...]
    denied: tuple[str, ...]


@functools.lru_cache(maxsize=4)  # a process has one policy; without a cache each call would fold its names again
def _folded(rules: UrlPolicy) -> _FoldedPolicy:
    return _FoldedPolicy(
        hosts=frozenset(_address(entry) or folded_host(entry) for entry in rules.allow if not entry.startswith(".")),
        allowed=suffixes(entry for entry in rules.allow if entry.startswith(".")),
        internal=suffixes((*INTERNAL_SUFFIXES, *rules.internal_suffixes)),
        denied=suffixes(rules.deny),
    )


def _refused(host: str, why: str) -> TargetRefused:
    shown = shown_address(host)
    return TargetRefused(f"url: {shown} {why}; such targets are not read. Use the address of a public page.")
