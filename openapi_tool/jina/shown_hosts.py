"""Which results and links of a response are shown, by their hosts.

Left out are hosts that the operator denies, and search results from other sites than the search asks for, since the
upstream may return some. Only hosts are compared: `example.com/docs` stands for all of `example.com`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from openapi_tool.jina.hosts import EXCLUDED, belongs_to, host_of, suffixes
from openapi_tool.tools.wording import counted

# A scheme other than http and https, before `//`: `ftp:` in `ftp://example.com`.
_OTHER_SCHEME = re.compile(r"\A\s*(?!https?:)[a-z][a-z0-9+.-]{0,20}:(?=[/\\]{2})", re.IGNORECASE)
_ADDRESS = re.compile(
    r"""(?:\bhttps?:[/\\]*|(?<=:)[/\\]{2}|(?<![\w:/\\])[/\\]{2})
    (?:(?:[^\s<>()\[\]"'`|/\\]*@)?\[[0-9a-f:.]{2,45}\])?  # an IPv6 address
    [^\s<>()\[\]"'`|\\]*""",
    re.IGNORECASE | re.VERBOSE,
)
"""An address in a text. Of one with another scheme or none (`//example.com`) it begins at the slashes.

A slash may be a backslash, as in `\\/`, which JSON writes.
"""
_REPLACEMENT = "denied:"
"""What stands in a text in place of an address on a denied host."""


class DeniedHosts:
    """Hosts that the operator denies; `links_left_out` counts the links to them in one response."""

    def __init__(self, denied: Sequence[str]) -> None:
        self._denied = suffixes(denied)
        self.is_empty = not self._denied
        self.links_left_out = 0

    def has(self, address: str) -> bool:
        """Return whether an address is on a denied host."""
        if not self._denied:
            return False
        return belongs_to(host_of(_OTHER_SCHEME.sub("", address)), self._denied)

    def has_link(self, address: str) -> bool:
        """Return whether a link is to a denied host; count it if so, since the caller leaves it out."""
        is_denied = self.has(address)
        self.links_left_out += is_denied
        return is_denied

    def without(self, text: str) -> str:
        """Return a text without addresses on denied hosts, and count these. Takes linear time."""
        return _ADDRESS.sub(self._replaced, text) if self._denied else text

    def uncounted(self, text: str) -> str:
        """Return a text without addresses on denied hosts. Do not count these, as another text that has them does."""
        counted_before = self.links_left_out
        text = self.without(text)
        self.links_left_out = counted_before
        return text

    def remark(self) -> str:
        """Return how many links were left out, or an empty text."""
        number = self.links_left_out
        return f"[{counted(number, 'link')} to {_denied(number)} left out.]" if number else ""

    def _replaced(self, address: re.Match[str]) -> str:
        return _REPLACEMENT if self.has_link(address[0]) else address[0]


class ShownResults:
    """The results of a search that are `shown`: those on the sites that it asks for, and not on denied hosts."""

    def __init__(
        self, results: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any], denied: DeniedHosts
    ) -> None:
        sites = suffixes(_texts(parameters.get("site")))
        excluded = suffixes(_excluded(parameters))
        of_sites = results
        if sites or excluded:
            of_sites = [result for result in results if _is_of(host_of(_address(result)), sites, excluded)]
        self.shown = of_sites
        if not denied.is_empty:
            self.shown = [result for result in of_sites if not denied.has(_address(result))]
        self.found = len(results)
        self.of_other_sites = len(results) - len(of_sites)
        self.of_denied_hosts = len(of_sites) - len(self.shown)

    def remarks(self) -> list[str]:
        """Return remarks on how many results were left out."""
        other, denied = self.of_other_sites, self.of_denied_hosts
        remarks = []
        if other:
            remarks.append(f"[{counted(other, 'result')} from other sites {_are(other)} left out.]")
        if denied:
            remarks.append(f"[{counted(denied, 'result')} from {_denied(denied)} left out.]")
        return remarks

    def none_shown(self) -> str:
        """Return why no result is shown although some were found."""
        first = "The only result is" if self.found == 1 else f"All {self.found:,} results are"
        origins = []
        if self.of_other_sites:
            origins.append("from other sites than those asked for")
        if self.of_denied_hosts:
            origins.append("from hosts that the operator denies")
        return f"{first} {' or '.join(origins)}, and {_are(self.found)} left out."


def _denied(number: int) -> str:
    """Return `a host that the operator denies is` for 1, else the plural."""
    hosts = "a host" if number == 1 else "hosts"
    return f"{hosts} that the operator denies {_are(number)}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _address(result: Mapping[str, Any]) -> str:
    address = result.get("url")
    return address if isinstance(address, str) else ""


def _is_of(host: str, sites: tuple[str, ...], excluded: tuple[str, ...]) -> bool:
    """Return whether a host is on one of `sites`, if there are any, and on none of `excluded`."""
    if sites and not belongs_to(host, sites):
        return False
    return not (excluded and belongs_to(host, excluded))


def _texts(value: object) -> list[str]:
    """Return the texts of a list, or the one that the value is."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def _excluded(parameters: Mapping[str, Any]) -> list[str]:
    """Return the sites in the parameter `exclude_sites`: a.com and b.com in `-site:a.com -site:b.com`."""
    operators = " ".join(_texts(parameters.get("exclude_sites"))).split()
    return [operator.removeprefix(EXCLUDED) for operator in operators]
