"""Hosts of addresses, *folded*: in the one form in which they are compared; and which of them belong to a site.

Programs read an address in different ways, and a host has many spellings. Folded, `EXAMPLE.com.` is `example.com`,
`xn--bcher-kva.example` is `bücher.example`, and `0x7f.1` is `127.0.0.1`. Folding follows browsers (UTS 46, WHATWG URL).

A site is given by settings, definition or model, such as `example.com` or `*.example.com`. Either stands for that host
and all hosts below it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote

from openapi_tool.jina.ip_notations import compared_address
from openapi_tool.protocol.errors import TargetRefused
from openapi_tool.tools.wording import short

EXCLUDED = "-site:"
"""Operator of the upstream's query before each excluded site."""
ENCODED_LABEL = "xn--"  # before the ASCII form of an international label
MAX_LABEL_CHARS = 63
MAX_ENCODED_NAME_CHARS = 1_024
"""Limit of a host before it is decoded. More than a name may have, because of percent-encoding.

Without a limit NFKC, which sorts combining marks in quadratic time, would take 0.4 s for 16,000 of them.
"""

_END = r"""/?#\\\s:,;!<>()"'\uff0c\u3001\uff1b"""  # each of these ends a host, also that of an address among words
_HOST = re.compile(
    rf"\s*(?:https?:[/\\]*|[/\\]{{2}})?(?:[^/?#\\\s]*@)?(\[[^\]\s]*\]|[^{_END}]*)",
    re.IGNORECASE,
)
"""Start of an address, with or without scheme and login: `https://user@example.com` of `https://user@example.com/a`.

The group is its host, and may be empty.
"""
_REMOVED_BY_BROWSERS = re.compile(r"[\t\r\n]+")  # also within a host (WHATWG URL)
_DELIMITER = re.compile(r"[/?#\\@:]")
_END_OF_HOST = re.compile(r"[/?#\\]")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f%<>^|]")
# Characters that the mapping of international names (UTS 46) removes: Default_Ignorable_Code_Point of Unicode.
_IGNORED = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)

_ALPHABETS = frozenset({"LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "COPTIC", "GEORGIAN", "LISU"})
"""Alphabets with letters that look alike: the first words of the names of their letters in Unicode."""
_CYRILLIC_LIKE_LATIN = (
    "\u0430\u0441\u0501\u0435\u04bb\u0456\u0458\u04cf\u043e\u0440\u051b\u0455\u051d\u0445\u0443\u0475"
)
# A label that has only Cyrillic letters which look like Latin ones, as in a Cyrillic spelling of `apache`.
_LOOKS_LATIN = re.compile(f"[0-9-]*[{_CYRILLIC_LIKE_LATIN}][{_CYRILLIC_LIKE_LATIN}0-9-]+")


def host_of(address: str) -> str:
    """Return the folded host of a web address, whose scheme may be missing; empty if it has none."""
    found = _HOST.match(_REMOVED_BY_BROWSERS.sub("", address))
    host = found[1] if found else ""
    if len(host) > MAX_ENCODED_NAME_CHARS:
        return ""
    return _folded_part(host)


@lru_cache(maxsize=1_024)  # the links of a page name few hosts
def _folded_part(part: str) -> str:
    """Return the folded host in that part of an address which should be the host; empty if it cannot be one."""
    folded = folded_host(unquote(part))
    if not folded.startswith("[") and _DELIMITER.search(folded):
        # Mapping made a delimiter: `a.c℀.b.example` becomes `a.ca/c.b.example`. A program that maps before it splits an
        # address reads the host `a.ca`, so that one counts.
        authority = _END_OF_HOST.split(folded, maxsplit=1)[0]
        folded = authority.rpartition("@")[2].partition(":")[0]  # without login and port
    return "" if _FORBIDDEN.search(folded) else compared_address(folded)


def folded_host(host: str) -> str:
    """Return a host in the form in which names are compared: mapped, `xn--` labels decoded, no trailing dot.

    Each character that UTS 46 maps to others is replaced by them, and some more are, such as ß by ss. An IP address
    stays in its notation (`compared_address`).
    """
    return ".".join(map(_decode_label, _mapped(host).split("."))).removesuffix(".")


def _mapped(text: str) -> str:
    """Return a text in lower case and without characters that international names ignore, with plain dots."""
    mapped = unicodedata.normalize("NFKC", text).casefold()
    return unicodedata.normalize("NFKC", _IGNORED.sub("", mapped)).replace("\u3002", ".")


def _decode_label(label: str) -> str:
    """Decode an `xn--` label; return an invalid one unchanged, so that a check of its characters refuses it."""
    if not label.startswith(ENCODED_LABEL) or len(label) > MAX_LABEL_CHARS:
        return label
    try:
        decoded = label.removeprefix(ENCODED_LABEL).encode("ascii").decode("punycode")
    except UnicodeError:
        return label
    return label if decoded.isascii() else _mapped(decoded)


def suffixes(sites: Iterable[str]) -> tuple[str, ...]:
    """Return sites or IP addresses as `belongs_to` takes them: `.example.com` for `*.Example.com/docs`."""
    names = (_site_host(site).strip(".") for site in sites)
    return tuple(f".{name}" for name in names if name)


def _site_host(site: str) -> str:
    if site.count(":") > 1:  # an IPv6 address; without brackets `host_of` would cut it at its first colon
        return compared_address(site)
    return host_of(site.removeprefix("*"))


def belongs_to(host: str, sites: tuple[str, ...]) -> bool:
    """Return whether a host of `host_of` is one of the sites of `suffixes`, or a subdomain of one."""
    return f".{host}".endswith(sites)


def denied_target(host: str) -> TargetRefused:
    """Return the error for a page of a host that the operator denies."""
    return TargetRefused(f"url: {short(host)!r} is denied by the operator of this service. Use another source.")


def is_lookalike(host: str) -> bool:
    """Return whether a host of `host_of` looks like another one.

    It does if a label of it has letters of several alphabets. It also does if a label has only Cyrillic letters that
    look Latin, and the top-level domain is ASCII.
    """
    if host.isascii():
        return False
    labels = host.split(".")
    if any(len(_alphabets(label)) > 1 for label in labels):
        return True
    return labels[-1].isascii() and any(map(_LOOKS_LATIN.fullmatch, labels))


def _alphabets(label: str) -> frozenset[str]:
    """Return those of _ALPHABETS that a label has letters of."""
    names = (unicodedata.name(char, "").partition(" ")[0] for char in label if char.isalpha())
    return _ALPHABETS.intersection(names)
