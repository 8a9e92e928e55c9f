"""Attacks on the HTTP door beside the calls of another token; `python -m tests.hostile.doors` has narrower limits."""

from __future__ import annotations

import pytest

from tests.hostile.door_attacks import ATTACKS
from tests.hostile.doors import attacked
from tests.requirements import requirement

SLOWER_S = 15.0
"""As for a kernel's victim: a slow machine needs several times the time."""


@pytest.mark.long
@requirement("gateway.access", "gateway.shared")
@pytest.mark.parametrize("name", list(ATTACKS))
async def test_an_attack_with_one_token_leaves_another_served(name: str) -> None:
    with attacked() as gateway:
        found = await gateway.play(name, 10)
    assert found.wrong(SLOWER_S) == []
