"""Fair division of a space among texts of different sizes."""

from __future__ import annotations

from collections.abc import Sequence


def max_min_shares(sizes: Sequence[int], space: int) -> list[int]:
    """Return max-min fair shares of `space`: small sizes in full, equal shares for the others.

    For example, sizes 10, 500 and 700 get shares of 10, 195 and 195 of a space of 400.
    """
    shares = [0] * len(sizes)
    indexes = sorted(
        range(len(sizes)), key=sizes.__getitem__
    )  # smallest first: what it does not need is for the others
    for done, index in enumerate(indexes):
        shares[index] = min(sizes[index], space // (len(sizes) - done))
        space -= shares[index]
    return shares
