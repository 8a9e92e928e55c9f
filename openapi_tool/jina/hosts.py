"""Host names in the form in which they are compared (UTS 46), and which of them belong to a site."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
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
_END = r"""/?#\\\s:,;!<>()"'\uff0c\u3001\uff1b"""  # none of these is in a host, also in running text
_HOST = re.compile(
    rf"\s*(?:https?:[/\\]*|[/\\]{{2}})?(?:[^/?#\\\s]*@)?(\[[^\]\s]*\]|[^{_END}]*)",
    re.IGNORECASE,
)


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


@lru_cache(maxsize=1_024)  # the links of a page name few hosts
def _folded_part(host: str) -> str:
    return folded_host(unquote(host))


def host_of(address: str) -> str:
    """Return the host of a web address or of what follows its scheme, folded; empty if there is none."""
    found = _HOST.match(address)
    host = found[1] if found else ""
    return "" if len(host) > MAX_ENCODED_NAME_CHARS else _folded_part(host)


def suffixes(sites: Iterable[str]) -> tuple[str, ...]:
    """Return sites as `belongs_to` takes them: folded, with a leading dot, without `*.` and path."""
    hosts = (host_of(site.removeprefix("*")).strip(".") for site in sites)
    return tuple(f".{host}" for host in hosts if host)


def belongs_to(host: str, sites: tuple[str, ...]) -> bool:
    """Return whether a folded host is one of the sites, or a subdomain of one."""
    return f".{host}".endswith(sites)


def denied_target(host: str) -> TargetRefused:
    """Return the error for a page of a host that the operator denies."""
    return TargetRefused(f"url: {host!r} is denied by the operator of this service. Use another source.")
