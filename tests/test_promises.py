from __future__ import annotations

from pathlib import Path

import pytest

from scripts.docs import DOCUMENTS, claims
from tests.promises import PROMISES, requirement


def test_every_promise_has_a_test_and_every_claim_a_promise() -> None:
    claimed, promised = {promise for promise, _ in claims()}, {promise.id for promise in PROMISES}
    assert sorted(promised - claimed) == [], "promises without a test"
    assert sorted(claimed - promised) == [], "tests for unknown promises"


def test_no_promise_is_made_twice() -> None:
    ids = [promise.id for promise in PROMISES]
    assert len(ids) == len(set(ids))
    assert all(promise.text.endswith(".") for promise in PROMISES)


@pytest.mark.parametrize("document", sorted(DOCUMENTS), ids=lambda document: document.name)
@requirement("settings.reference")
def test_derived_documents_are_fresh(document: Path) -> None:
    assert document.read_text(encoding="utf-8") == DOCUMENTS[document](), "run: make docs"
