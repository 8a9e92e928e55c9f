from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.promises import PROMISES

TESTS = Path(__file__).parent


def _claims() -> Iterator[tuple[str, str]]:
    """Every (promise, test) pair that the sources of the suite claim."""
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "requirement":
                        yield from ((ast.literal_eval(argument), node.name) for argument in decorator.args)


def test_every_promise_has_a_test_and_every_claim_a_promise() -> None:
    claimed, promised = {promise for promise, _ in _claims()}, {promise.id for promise in PROMISES}
    assert sorted(promised - claimed) == [], "promises without a test"
    assert sorted(claimed - promised) == [], "tests for unknown promises"


def test_no_promise_is_made_twice() -> None:
    ids = [promise.id for promise in PROMISES]
    assert len(ids) == len(set(ids))
    assert all(promise.text.endswith(".") for promise in PROMISES)
