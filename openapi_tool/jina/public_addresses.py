"""Which IP addresses are public: none of private, local and reserved networks, in either version."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

# The IANA special-purpose registries, multicast, and the one metadata address that looks public (Azure's).
_INTERNAL_V4_NETWORKS = (
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 168.63.129.16/32 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 "
    "192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3"
)
_INTERNAL_V4 = tuple(map(IPv4Network, _INTERNAL_V4_NETWORKS.split()))
_PUBLIC_V6 = IPv6Network("2000::/3")
# Networks within the public one that are not public; 2001::/23 holds Teredo.
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
    """Return whether an address is public; of an IPv6 address that embeds an IPv4 one, whether that is public."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _INTERNAL_V4)
    upper_half_of_interface = int(address) >> 32 & _LOW_32_BITS
    if upper_half_of_interface in _ISATAP:
        return False
    for network, shift in _EMBEDS_V4:
        if address in network:
            return is_public(IPv4Address(int(address) >> shift & _LOW_32_BITS))
    return address in _PUBLIC_V6 and not any(address in network for network in _INTERNAL_V6)
