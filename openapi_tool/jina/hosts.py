"""Host names in the form in which they are compared (UTS 46), and which of them belong to a site."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import unquote

from openapi_tool.protocol.errors import TargetRefused

EXCLUDED = "-site:"
"""Operator of the upstream's query before each excluded site."""
MAX_LABEL_CHARS = 63
MAX_ENCODED_NAME_CHARS = 1_024
"""More than a name may have, because of percent-encoding.

Limited, because NFKC sorts combining marks in quadratic time: 0.4 s for 16,000."""
ENCODED_LABEL = "xn--"
# Characters that the mapping of international names (UTS 46) removes: Default_Ignorable_Code_Point of Unicode.
_IGNORED = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_END = r"""/?#\\\s:,;!<>()"'\uff0c\u3001\uff1b"""  # each of these ends a host, also that of an address among words
_HOST = re.compile(
    rf"\s*(?:https?:[/\\]*|[/\\]{{2}})?(?:[^/?#\\\s]*@)?(\[[^\]\s]*\]|[^{_END}]*)",
    re.IGNORECASE,
)
"""Start of an address, with or without scheme and login; the group is its host, and may be empty."""

_DELIMITER = re.compile(r"[/?#\\@:]")
_END_OF_HOST = re.compile(r"[/?#\\]")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f%<>^|]")
_ALPHABETS = frozenset({"LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "COPTIC", "GEORGIAN", "LISU"})
"""First words of the names of letters, in alphabets with letters that look alike."""
_CYRILLIC_LIKE_LATIN = (
    "\u0430\u0441\u0501\u0435\u04bb\u0456\u0458\u04cf\u043e\u0440\u051b\u0455\u051d\u0445\u0443\u0475"
)
_LOOKS_LATIN = re.compile(f"[0-9-]*[{_CYRILLIC_LIKE_LATIN}][{_CYRILLIC_LIKE_LATIN}0-9-]+")
_REMOVED_BY_BROWSERS = re.compile(r"[\t\r\n]+")  # also within a host (WHATWG URL)
_LAST_IS_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.DOTALL)
_NUMBER = re.compile(r"0x[0-9a-f]*|0[0-7]*|[1-9][0-9]*")
_V4_PARTS = 4
_MAX_BYTE = 255
_MAX_NAME_CHARS = 253


def folded_host(host: str) -> str:
    """Return a host in the form in which names are compared: `xn--` labels decoded, no trailing dot.

    It maps more characters than UTS 46 (ß), never fewer.
    """
    return ".".join(map(_decode_label, _mapped(host).split("."))).removesuffix(".")


def _mapped(text: str) -> str:
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


def ends_in_number(host: str) -> bool:
    """Return whether a folded host can only be an IPv4 address, in any notation."""
    return _LAST_IS_NUMBER.fullmatch(host) is not None


def ipv4_of(host: str) -> IPv4Address | None:
    """Parse one to four parts, each decimal, octal (0…) or hexadecimal (0x…); the last fills the remaining bytes."""
    parts = host.split(".")
    if len(host) <= _MAX_NAME_CHARS and len(parts) <= _V4_PARTS and all(map(_NUMBER.fullmatch, parts)):
        *front, last = map(_number, parts)
        if max(front, default=0) <= _MAX_BYTE and last < 256 ** (_V4_PARTS - len(front)):
            first_bytes = sum(byte << 8 * (_V4_PARTS - 1 - place) for place, byte in enumerate(front))
            return IPv4Address(first_bytes + last)
    return None


def _number(part: str) -> int:
    if part.startswith("0x"):
        return int(part.removeprefix("0x") or "0", 16)
    return int(part, 8 if part.startswith("0") else 10)


def compared_address(host: str) -> str:
    """Return an IP address in the one form in which it is compared (IPv6 without brackets); another host unchanged."""
    if ":" not in host:
        return str(ipv4_of(host) or host) if ends_in_number(host) else host
    try:
        address = IPv6Address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return host
    return str(address.ipv4_mapped or address)


@lru_cache(maxsize=1_024)  # the links of a page name few hosts
def _folded_part(host: str) -> str:
    folded = folded_host(unquote(host))
    if not folded.startswith("[") and _DELIMITER.search(folded):
        # A program that maps first reads another host: `a.c℀.b.example` becomes `a.ca/c.b.example`.
        authority = _END_OF_HOST.split(folded, maxsplit=1)[0]
        folded = authority.rpartition("@")[2].partition(":")[0]  # without login and port
    return "" if _FORBIDDEN.search(folded) else compared_address(folded)


def is_lookalike(host: str) -> bool:
    """Return whether a host of `host_of` has a label of several alphabets, or one that only looks Latin."""
    if host.isascii():
        return False
    labels = host.split(".")
    ends_in_ascii = labels[-1].isascii()
    return any(
        len(_alphabets(label)) > 1 or (ends_in_ascii and _LOOKS_LATIN.fullmatch(label) is not None) for label in labels
    )


def _alphabets(label: str) -> frozenset[str]:
    names = (unicodedata.name(char, "").partition(" ")[0] for char in label if char.isalpha())
    return _ALPHABETS.intersection(names)


def host_of(address: str) -> str:
    """Return the host of a web address or of what follows its scheme, folded; empty if there is none."""
    found = _HOST.match(_REMOVED_BY_BROWSERS.sub("", address))
    host = found[1] if found else ""
    return "" if len(host) > MAX_ENCODED_NAME_CHARS else _folded_part(host)


def suffixes(sites: Iterable[str]) -> tuple[str, ...]:
    """Return sites or IP addresses as `belongs_to` takes them: folded, with a leading dot, without `*.` and path."""
    # Without brackets an IPv6 address would be cut at its first colon.
    hosts = (compared_address(site) if site.count(":") > 1 else host_of(site.removeprefix("*")) for site in sites)
    names = (host.strip(".") for host in hosts)
    return tuple(f".{name}" for name in names if name)


def belongs_to(host: str, sites: tuple[str, ...]) -> bool:
    """Return whether a host of `host_of` is one of the sites, or a subdomain of one."""
    return f".{host}".endswith(sites)


def denied_target(host: str) -> TargetRefused:
    """Return the error for a page of a host that the operator denies."""
    return TargetRefused(f"url: {host!r} is denied by the operator of this service. Use another source.")
