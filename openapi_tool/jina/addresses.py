"""Check whether an IP address is public, without DNS; remove the addresses of inline images from a text.

A model cannot open the address of an inline image (`data:…`, `blob:…`), and the address may be longer than its page.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from openapi_tool.concurrency import Steps

# The IANA special-purpose registries, multicast, and the one metadata address that looks public (Azure's).
_INTERNAL_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
    )
)
_PUBLIC_V6 = IPv6Network("2000::/3")
# Teredo is in 2001::/23.
_INTERNAL_V6 = tuple(IPv6Network(network) for network in ("2001::/23", "2001:db8::/32", "3fff::/20"))
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
    """Return whether an address, or the IPv4 address that it embeds, is public."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _INTERNAL_V4)
    if int(address) >> 32 & _LOW_32_BITS in _ISATAP:
        return False
    for network, shift in _EMBEDS_V4:
        if address in network:
            return is_public(IPv4Address(int(address) >> shift & _LOW_32_BITS))
    return address in _PUBLIC_V6 and not any(address in network for network in _INTERNAL_V6)


_MARKS = (("](blob:", ")"), ("](data:image/", ")"), ('src="data:image/', '"'), ("src='data:image/", "'"))
"""Beginning and end of an inline address in Markdown and HTML."""
_MAX_DROPPED = 10_000


def is_inline(url: str) -> bool:
    """Return whether an address is that of an inline image."""
    return url.startswith(("blob:", "data:"))


def without_inline_images(texts: list[str]) -> Steps[list[str]]:
    """Return the texts with `![alt]` for `![alt](blob:…)`, and `src=""` for `src="data:image/…"`.

    An address must end on its line. Takes linear time; drops at most 10,000 addresses of each kind in each text.
    """
    for text in texts:
        if "blob:" in text or "data:image/" in text:
            break
    else:
        return texts
    found = []
    for text in texts:
        for mark, closing in _MARKS:
            text = (yield from _drop_addresses(text, mark, closing)) if mark in text else text  # noqa: PLW2901 - step by step
        found.append(text)
    return found


def _drop_addresses(text: str, mark: str, closing: str) -> Steps[str]:
    pieces: list[str] = []
    copied_until = at = end = 0
    while len(pieces) < _MAX_DROPPED and (start := text.find(mark, at)) >= 0:
        if end < start + len(mark):  # else the end that was found before is also the next one after this mark
            end = text.find(closing, start + len(mark))
        if end < 0:
            break
        line_end = text.find("\n", start, end)
        if line_end >= 0:
            at = line_end  # no address that begins later on this line ends on it either
            yield
            continue
        in_markdown = mark[0] == "]"  # keep `]`, else `src="`
        pieces.append(text[copied_until : start + (1 if in_markdown else len("src=."))])
        copied_until = at = end + in_markdown
        yield
    return "".join([*pieces, text[copied_until:]]) if pieces else text
