from __future__ import annotations

from scripts.mutate import problems
from tests.mutations import MUTATIONS


def test_every_rule_has_a_mutation_that_still_applies() -> None:
    """That each turns its test red is found out by `make mutations`, which takes some minutes."""
    assert list(problems(MUTATIONS)) == []
