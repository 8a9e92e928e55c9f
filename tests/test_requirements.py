from __future__ import annotations

from pathlib import Path

import pytest

from scripts import docs
from scripts.docs import CHART_README, DOCUMENTS, claims
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


def test_a_changed_row_or_a_lost_mark_in_the_readme_of_the_chart_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, copy = CHART_README.read_text(encoding="utf-8"), tmp_path / "README.md"
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setitem(docs.PARTS, copy, docs.PARTS[CHART_README])
    copy.write_text(text.replace("| `replicaCount` | `2` |", "| `replicaCount` | `3` |"), encoding="utf-8")
    assert copy.read_text(encoding="utf-8") != docs.with_parts(copy) == text
    copy.write_text(text.replace("<!-- end -->", ""), encoding="utf-8")
    with pytest.raises(ValueError, match=r"README\.md lacks the marks of its generated part values"):
        docs.with_parts(copy)


def test_every_mutation_still_applies() -> None:
    """`make mutations`, which takes some minutes, shows that each turns its test red."""
    assert list(problems(MUTATIONS)) == []
