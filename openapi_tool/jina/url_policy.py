"""URL policy: check page addresses before anything is billed, without DNS.

A URL is parsed as browsers and the reader do (WHATWG URL): `0x7f.1`, `①27.0.0.1` and `%31%32%37.0.0.1` are all
127.0.0.1. A valid URL is sent byte for byte; only its host is checked. The IP addresses of public names are not known
here; the reader checks them itself (jina-api section 7).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Annotated, NamedTuple
from urllib.parse import unquote

import orjson
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass as validated
from pydantic_settings import NoDecode

from openapi_tool.jina.hosts import (
    ENCODED_LABEL,
    MAX_ENCODED_NAME_CHARS,
    MAX_LABEL_CHARS,
    belongs_to,
    compared_address,
    denied_target,
    ends_in_number,
    folded_host,
    ipv4_of,
    suffixes,
)
from openapi_tool.options.section import Options, split
from openapi_tool.protocol.errors import BadRequest, TargetRefused

MAX_URL_CHARS = 16_000

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
# The reader and the search service: r.jina.ai, eu.r.jina.ai, eu-r-beta.jina.ai.
_READER = re.compile(r"(?:.+\.)?(?:[a-z0-9]+-)?r(?:-[a-z0-9]+)?\.jina\.ai")
_SEARCH = re.compile(r"(?:.+\.)?(?:[a-z0-9]+-)?s(?:-[a-z0-9]+)?\.jina\.ai")
_MAX_READER_PREFIXES = 3
_LABELS = re.compile(r"\.?[^\s.:/?#@*%\[\]\\]+(?:\.[^\s.:/?#@*%\[\]\\]+)*\.?")

_BLANKS = " \t\r\n\f\v\u00a0\u200b\u2060\u3000\ufeff"
_WRAPPERS = {'"': '"', "'": "'", "`": "`", "<": ">", "\u201c": "\u201d", "\u2018": "\u2019", "«": "»", "*": "*"}
_WRAPPERS |= {"(": ")", "\uff08": "\uff09", "\u300a": "\u300b", "\u300c": "\u300d", "\u3010": "\u3011"}
_LINK = re.compile(r"""!?\[.*\]\(\s*(\S+)(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)""", re.DOTALL)
# ASCII, because with IGNORECASE `s` also matches U+017F, which would pass an unknown scheme.
_DOI = re.compile(r"\A(?:doi:\s*)?(10\.[0-9]{4,9}/[^\s#?%]+)\Z", re.IGNORECASE)
"""A document's DOI. As a URL its `10.1234` would be a private IPv4 address."""
_ARXIV = re.compile(
    r"\Aarxiv:\s*((?:[0-9]{4}\.[0-9]{4,5}|[a-z-]{2,20}(?:\.[a-z]{2})?/[0-9]{7})(?:v[0-9]{1,3})?)\Z",
    re.IGNORECASE | re.ASCII,
)
_WITH_BLANKS = re.compile(
    r"((?:https?://)?[^\s/?#.]+\.[^\s/?#]+[/?#][^\s\x00-\x1f]*(?:[ \u00a0]+[^\s\x00-\x1f]+)+)", re.IGNORECASE
)
"""Address with blanks behind its host, as of a title that was put into it."""
_ANOTHER = re.compile(r"[\s,;]https?://", re.IGNORECASE | re.ASCII)
_AMONG_WORDS = re.compile(
    r"""(?:[^/?#.@\\]*\s|-{0,2}url\s*[:=]\s*)["'`<(]*(https?://[^\s"'`<>]+)[^:]*""", re.IGNORECASE | re.ASCII
)
"""The only address in a text, behind words or `url:`."""
_JSON_NAMES = ("url", "target_url", "link", "href")
_SCHEME = re.compile(r"(?:https?:/*){,2}(https?):/*", re.IGNORECASE | re.ASCII)
"""Up to three schemes, with any number of slashes; the last one counts."""
_ENCODED_SCHEME = re.compile(r"https?%3a", re.IGNORECASE | re.ASCII)
_OTHER_SCHEME = re.compile(r"(?!localhost:)[a-z][a-z0-9+-]*:", re.IGNORECASE)  # no dot: `host.name:80` is none
_URL = re.compile(r"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
_FORBIDDEN = re.compile(r"[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # white space, Cc, Cs
_HOST_AND_PORT = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]+)(?::([0-9]{0,5}))?")
_MAX_PORT = 65_535
_PORTS = range(1, _MAX_PORT + 1)

_MAX_NAME_CHARS = 253
_ASCII_OF_LABEL = re.compile(r"[a-z0-9_-]")
_SHOWN_CHARS = 80
_MAX_SHOWN_CHARS = 160

# The IANA special-purpose registries, multicast, and the one metadata address that looks public (Azure's).
_INTERNAL_V4_NETWORKS = (
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 168.63.129.16/32 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 "
    "192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3"
)
_INTERNAL_V4 = tuple(map(IPv4Network, _INTERNAL_V4_NETWORKS.split()))
_PUBLIC_V6 = IPv6Network("2000::/3")
# Teredo is in 2001::/23.
_INTERNAL_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))
# Networks whose addresses embed an IPv4 one (compatible, mapped, NAT64, 6to4), and its offset from the right in bits.
_EMBEDS_V4 = (
    (IPv6Network("::/96"), 0),
    (IPv6Network("::ffff:0:0/96"), 0),
    (IPv6Network("64:ff9b::/96"), 0),
    (IPv6Network("2002::/16"), 80),
)
# Upper half of an ISATAP interface identifier (RFC 5214), under any prefix; an IPv4 address of the site follows it.
_ISATAP = frozenset({0x0000_5EFE, 0x0200_5EFE})
_LOW_32_BITS = 0xFFFF_FFFF


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address, or the IPv4 one that it embeds, is public."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _INTERNAL_V4)
    if int(address) >> 32 & _LOW_32_BITS in _ISATAP:
        return False
    for network, shift in _EMBEDS_V4:
        if address in network:
            return is_public(IPv4Address(int(address) >> shift & _LOW_32_BITS))
    return address in _PUBLIC_V6 and not any(address in network for network in _INTERNAL_V6)


def _name(entry: str) -> str:
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
    """A URL, its host as a browser would read it (IPv6 in brackets), and what follows the host."""

    text: str
    host: str
    rest: str


def checked_url(text: str, rules: UrlPolicy) -> str:
    """Return the URL to send, repaired if the given text is none but its meaning is clear.

    Takes linear time. Raises BadRequest if the text is no web address, TargetRefused if its host is not public.
    """
    url = _parsed(_checked(_repaired(_unwrapped(_bounded(text)))))
    for _ in range(_MAX_READER_PREFIXES):
        if not _READER.fullmatch(url.host):
            break
        url = _parsed(_behind_reader(url))
    if _READER.fullmatch(url.host):
        raise BadRequest(
            f"url: names the reader more than {_MAX_READER_PREFIXES} times. Give the address of the page itself."
        )
    if _SEARCH.fullmatch(url.host):
        raise BadRequest(f"url: {_shown(url.host)} is a search service, no page. Give the address of a page.")
    host = _checked_host(url.host, rules)
    if belongs_to(compared_address(host), _compiled(rules).denied):
        raise denied_target(host)
    return _bounded(url.text)


def _bounded(text: str) -> str:
    if len(text) > MAX_URL_CHARS:
        raise BadRequest(f"url: has {len(text)} characters, at most {MAX_URL_CHARS} are read. Give a shorter address.")
    return text


def _repaired(text: str) -> str:
    """Return the address in a JSON text or among words, of a DOI or arXiv number, or with its blanks encoded."""
    if text[:1] in ("{", "["):
        text = _unwrapped(_in_json(text))
    if among_words := _AMONG_WORDS.fullmatch(text):
        text = _unwrapped(among_words[1])
    if _ANOTHER.search(text) and " " in text:
        first, *others = text.split("://")
        # Another address has a scheme, or looks like one without: `a.example/b https://c.example`.
        is_another = len(others) > 1 or any("." in word and "/" in word for word in first.split())
        raise _several() if is_another else _words_beside()
    text = _ARXIV.sub(r"https://arxiv.org/abs/\1", _DOI.sub(r"https://doi.org/\1", text))
    text = text.replace("&amp;", "&")  # copied from HTML
    if _WITH_BLANKS.fullmatch(text):
        return text.replace(" ", "%20").replace("\u00a0", "%20")
    if " " in text and "://" not in text:
        raise BadRequest(f"url: {_shown(text)} is no address. To find pages by words, use the search tool.")
    return text


def _in_json(text: str) -> str:
    """Return the address in a JSON object or list, the text itself if it is no JSON."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if isinstance(value, list) and len(value) > 1:
        raise _several()
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = value[0]
    if isinstance(value, dict):  # its first address, as a list
        value = [value[name] for name in _JSON_NAMES if isinstance(value.get(name), str)][:1]
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value[0]
    raise BadRequest("url: is JSON without an address. Give the address alone, such as https://example.com/page.")


def _several() -> BadRequest:
    return BadRequest(
        "url: holds several addresses. Give one; call the tool for each, or use the tool that takes several."
    )


def _words_beside() -> BadRequest:
    return BadRequest("url: holds words beside the address. Give the address alone.")


def _unwrapped(text: str) -> str:
    text = text.strip(_BLANKS)
    while inner := _without_wrapper(text):
        text = inner
    if not text:
        raise BadRequest("url: is empty. Give the full address of a page, such as https://example.com/page.")
    return text


def _without_wrapper(text: str) -> str:
    """Return the text inside the outermost quotes, brackets or markdown, without the punctuation after these; or "".

    Removes a run of the same wrapper (`**…**`) at once; one by one would take quadratic time. Also removes a comma or
    semicolon at the inner end, but no dot, since addresses may end in one (`/Acme_Inc.`).
    """
    wrapped = text.rstrip(".,;:!?\u3002\uff0c")
    link = _LINK.fullmatch(wrapped) if wrapped.count("](") == 1 else None
    if link:
        return link[1].rstrip(",;")
    opening, closing = wrapped[:1], wrapped[-1:]
    if _WRAPPERS.get(opening) != closing or closing in wrapped.strip(opening + closing):
        return ""
    without_run = max(len(wrapped.lstrip(opening)), len(wrapped.rstrip(closing)))  # the longer one has the shorter run
    run = min(len(wrapped) - without_run, len(wrapped) // 2)
    return wrapped[run:-run].strip(_BLANKS).rstrip(",;") if run else ""


def _behind_reader(reader: _ParsedUrl) -> str:
    """Return the URL inside a reader URL (`r.jina.ai/https://example.com`)."""
    target = reader.rest.lstrip("/")
    if not reader.rest.startswith("/") or not target or target[0] in "?#":
        raise BadRequest(f"url: {_shown(reader.host)} is the reader itself, no page. Give the address of a page.")
    return target


def _parsed(text: str) -> _ParsedUrl:
    url = _with_scheme(text)
    parts = _URL.fullmatch(url)
    authority, rest = parts.groups() if parts else ("", "")
    if "@" in authority:
        raise BadRequest("url: holds a user name or password before '@'. Give the address without it.")
    match = _HOST_AND_PORT.fullmatch(authority)
    # Without a port any valid number stands in.
    if not match or len(match[1]) > MAX_ENCODED_NAME_CHARS or int(match[2] or _MAX_PORT) not in _PORTS:
        raise _no_host(authority)
    host = match[1]
    if not host.startswith("["):  # an IPv6 address is neither decoded nor mapped
        host = folded_host(_decoded(host))
        if host.startswith("["):
            raise _no_host(authority)
    return _ParsedUrl(url, host, rest)


def _with_scheme(text: str) -> str:
    text = text.removeprefix("//")
    if _ENCODED_SCHEME.match(text):
        text = _checked(_decoded(text))
    if scheme := _SCHEME.match(text):
        return f"{scheme[1]}://{text[scheme.end() :]}"
    if other := _OTHER_SCHEME.match(text):
        raise BadRequest(f"url: {_shown(other[0])} cannot be read. Give an http:// or https:// address.")
    return f"https://{text}"


def _checked(text: str) -> str:
    """Refuse characters that a URL cannot contain, except for trailing white space, which is removed."""
    text = text.rstrip(_BLANKS)
    if _FORBIDDEN.search(text):
        raise BadRequest("url: holds blanks, line breaks or control characters. Write one address, blanks as %20.")
    if "\\" in text:
        raise BadRequest("url: holds a backslash. Write / between parts, or %5C where a backslash is meant.")
    return text


def _decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise BadRequest(f"url: the escapes in {_shown(text)} are no UTF-8. Give the plain address.") from None


def _checked_host(host: str, rules: UrlPolicy) -> str:
    """Return a folded host. Raises BadRequest for one that cannot exist, TargetRefused for an internal one.

    Non-canonical IPv4 addresses are refused even if public: programs parse them differently.
    """
    address: IPv4Address | IPv6Address
    if host.startswith("["):
        text = host.strip("[]")
        literal, zone, _ = text.partition("%")
        try:
            address = IPv6Address(literal)
        except ValueError:
            raise BadRequest(f"url: {_shown(text)} is no IPv6 address. Use the page's host name.") from None
        problem = f"{_shown(text)} names a network interface. Use the page's host name." if zone else ""
    elif ends_in_number(host):
        number = ipv4_of(host)
        if number is None:
            raise BadRequest(
                f"url: {_shown(host)} is neither a host name nor an IPv4 address. Use the page's host name."
            )
        address = number
        problem = ""
        if str(address) != host:
            problem = f"{_shown(host)} is an unusual spelling. Write {address}, or the page's host name."
    else:
        _check_name(host, rules)
        return host
    if not is_public(address) and str(address) not in _compiled(rules).hosts:
        raise _refused(str(address), "is a private, local or reserved address")
    if problem:
        raise BadRequest(f"url: {problem}")
    return str(address)


def _check_name(host: str, rules: UrlPolicy) -> None:
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
    """Policy with folded names; each suffix with its leading dot."""

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
    return BadRequest(f"url: {_shown(text)} is no host name. Give an address such as https://example.com/page.")


def _refused(host: str, why: str) -> TargetRefused:
    return TargetRefused(f"url: {_shown(host)} {why}; such targets are not read. Use the address of a public page.")


def _shown(text: str) -> str:
    shown = repr(text[:_SHOWN_CHARS])
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}…"
