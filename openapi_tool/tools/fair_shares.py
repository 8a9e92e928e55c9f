"""Fair division of a space among texts of different sizes."""

from __future__ import annotations

from collections.abc import Sequence


def max_min_shares(sizes: Sequence[int], space: int) -> list[int]:
    """Return max-min fair shares of `space`: small sizes in full, equal shares for the others.

    For example, sizes 10, 500 and 700 get shares of 10, 195 and 195 of a space of 400. A space below 0 is none.
    """
    left = max(0, space)
    shares = [0] * len(sizes)
    smallest_first = sorted(range(len(sizes)), key=sizes.__getitem__)  # what they do not need is for the others
    for done, index in enumerate(smallest_first):
        shares[index] = min(sizes[index], left // (len(sizes) - done))
        left -= shares[index]
    return shares
