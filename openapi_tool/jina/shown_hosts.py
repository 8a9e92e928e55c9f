"""Which results and links of a response are shown, by their hosts.

An upstream takes `site` as a wish, so its results are checked. Only whole hosts count, not the path of a site.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from openapi_tool.jina.hosts import EXCLUDED, belongs_to, host_of, suffixes
from openapi_tool.tools.wording import counted

_OTHER_SCHEME = re.compile(r"\A\s*(?!https?:)[a-z][a-z0-9+.-]{0,20}:(?=[/\\]{2})", re.IGNORECASE)
_ADDRESS = re.compile(
    r"""(?:\bhttps?:[/\\]*|(?<=:)[/\\]{2}|(?<![\w:/\\])[/\\]{2})
    (?:(?:[^\s<>()\[\]"'`|/\\]*@)?\[[0-9a-f:.]{2,45}\])?  # an IPv6 address
    [^\s<>()\[\]"'`|\\]*""",
    re.IGNORECASE | re.VERBOSE,
)
"""Address, from its slashes on if it has another scheme or none (`//example.com`); JSON writes them as `\\/`."""
_IN_PLACE = "denied:"
"""In place of an address in a text."""


class DeniedHosts:
    """Hosts that the operator denies; `links` counts the addresses that were left out."""

    def __init__(self, denied: Sequence[str]) -> None:
        self._denied = suffixes(denied)
        self.is_empty = not self._denied
        self.links = 0

    def has(self, address: str) -> bool:
        """Return whether an address is on a denied host."""
        return bool(self._denied) and belongs_to(host_of(_OTHER_SCHEME.sub("", address)), self._denied)

    def has_link(self, address: str) -> bool:
        """Return the same, and count the address."""
        found = self.has(address)
        self.links += found
        return found

    def without(self, text: str) -> str:
        """Return a text without addresses on denied hosts, which are counted. Takes linear time."""
        return _ADDRESS.sub(self._replaced, text) if self._denied else text

    def uncounted(self, text: str) -> str:
        """Return the same for a text that is also shown elsewhere."""
        links = self.links
        text = self.without(text)
        self.links = links
        return text

    def _replaced(self, address: re.Match[str]) -> str:
        return _IN_PLACE if self.has_link(address[0]) else address[0]

    def remark(self) -> str:
        """Return how many links were left out, or nothing."""
        return f"[{counted(self.links, 'link')} to {_denied(self.links)} left out.]" if self.links else ""


class ShownResults:
    """Results of a search on the sites that it asks for, without those on denied hosts."""

    def __init__(
        self, results: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any], denied: DeniedHosts
    ) -> None:
        sites = suffixes(_texts(parameters.get("site")))
        excluded = suffixes(_excluded(parameters))
        of_sites: Sequence[Mapping[str, Any]] = results
        if sites or excluded:
            of_sites = [result for result in results if _is_of(host_of(_address(result)), sites, excluded)]
        self.shown = of_sites if denied.is_empty else [each for each in of_sites if not denied.has(_address(each))]
        self.found = len(results)
        self.of_other_sites = len(results) - len(of_sites)
        self.of_denied_hosts = len(of_sites) - len(self.shown)

    def remarks(self) -> list[str]:
        """Return how many results were left out."""
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
    hosts = "a host" if number == 1 else "hosts"
    return f"{hosts} that the operator denies {_are(number)}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _address(result: Mapping[str, Any]) -> str:
    address = result.get("url")
    return address if isinstance(address, str) else ""


def _is_of(host: str, sites: tuple[str, ...], excluded: tuple[str, ...]) -> bool:
    return not (sites and not belongs_to(host, sites)) and not (excluded and belongs_to(host, excluded))


def _texts(value: object) -> list[str]:
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _excluded(parameters: Mapping[str, Any]) -> list[str]:
    return [site.removeprefix(EXCLUDED) for text in _texts(parameters.get("exclude_sites")) for site in text.split()]
