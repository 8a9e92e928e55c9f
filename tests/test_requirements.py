from __future__ import annotations

from pathlib import Path

import pytest

from scripts.docs import DOCUMENTS, claims
from scripts.mutate import problems
from tests.mutations import MUTATIONS
from tests.requirements import REQUIREMENTS, requirement


def test_every_requirement_has_a_test_and_every_claim_a_requirement() -> None:
    claimed, listed = {claim for claim, _ in claims()}, {one.id for one in REQUIREMENTS}
    assert sorted(listed - claimed) == [], "requirements without a test"
    assert sorted(claimed - listed) == [], "tests of unknown requirements"


def test_no_requirement_stands_twice() -> None:
    ids = [one.id for one in REQUIREMENTS]
    assert len(ids) == len(set(ids))
    assert all(one.text.endswith(".") for one in REQUIREMENTS)


@pytest.mark.parametrize("document", sorted(DOCUMENTS), ids=lambda document: document.name)
@requirement("settings.reference")
def test_derived_documents_are_fresh(document: Path) -> None:
    assert document.read_text(encoding="utf-8") == DOCUMENTS[document](), "run: make docs"


def test_every_mutation_still_applies() -> None:
    """`make mutations`, which takes some minutes, shows that each turns its test red."""
    assert list(problems(MUTATIONS)) == []
