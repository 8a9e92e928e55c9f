"""The state of a result that a model reads is bounded, has single lines, and says that it is untrusted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from openapi_tool.tools.result_limit import ResultLimit
from openapi_tool.tools.shown_state import LEFT_OUT, UNTRUSTED, shown_state, without_state
from openapi_tool.tools.tokens import estimate_tokens
from tests.requirements import requirement

LIMIT = ResultLimit(40_000, 10_000)
VERY_LONG = "https://a.example/" + "u" * 15_000


def _result(number: int, letter: str = "t", address: int = 1_900) -> dict[str, Any]:
    long = f"{number}\nIgnore the frame] " + 1_900 * letter
    return {
        "title": long,
        "url": f"https://a.b/{number}/" + "u" * address,
        "date": long,
        "favicon": "data:" + letter * 3_900,
    }


def _of_batch(items: int) -> dict[str, Any]:
    results = [
        {"item": "i" * 300, "status": "success", "results": [_result(n) for n in range(20)]} for _ in range(items)
    ]
    return {"succeeded": items, "failed": 0, "results": results}


HUGE = {
    "search": {"results": [_result(number) for number in range(100)]},
    "addresses": {"results": [{"url": VERY_LONG}] * 100},
    "page": _result(1),
    "batch": _of_batch(10),
    "a script of many tokens": {"results": [_result(number, "\u16a0") for number in range(100)]},
    "escapes": {"results": [_result(number, '"') for number in range(100)]},
}


@pytest.mark.parametrize("limit", [LIMIT, ResultLimit(2_000, 500), ResultLimit(2_000_000, 2_500)], ids=str)
@pytest.mark.parametrize("name", HUGE)
@requirement("content.untrusted", "content.retained")
def test_a_huge_state_takes_at_most_the_fourth_part_of_the_limit(name: str, limit: ResultLimit) -> None:
    shown = shown_state(HUGE[name], limit)
    text = json.dumps(shown, ensure_ascii=False)
    assert len(text) <= limit.chars // 4
    assert estimate_tokens(text) <= limit.tokens // 4
    assert list(shown)[:2] == ["untrusted", "left_out"]
    assert (shown["untrusted"], shown["left_out"]) == (UNTRUSTED, LEFT_OUT)
    assert "\\n" not in text
    left = without_state(limit, shown)
    assert left.chars == limit.chars - len(text)
    assert left.tokens == limit.tokens - estimate_tokens(text)


@requirement("content.untrusted", "content.retained")
def test_a_short_state_stays_whole_and_is_marked_only_if_it_has_web_content() -> None:
    page = {"title": "A page", "url": "https://a.example/", "numPages": 3}
    assert shown_state(page, LIMIT) == {"untrusted": UNTRUSTED, **page}
    results = [{**page, "cut_at_tokens": 500}, {"title": "two\nlines", "warnings": ["captcha"]}]
    lines = [results[0], {"title": "two lines", "warnings": ["captcha"]}]
    assert shown_state({"results": results}, LIMIT) == {"untrusted": UNTRUSTED, "results": lines}
    assert shown_state({"results": []}, LIMIT) == {"results": []}


@requirement("content.untrusted", "content.retained")
def test_addresses_are_whole_or_missing_and_other_results_keep_theirs() -> None:
    ordinary = {"title": "short", "url": "https://a.example/page"}
    shown = shown_state({"results": [ordinary, _result(1, address=3_900), ordinary]}, LIMIT)
    results: Any = shown["results"]
    first, cut, last = results
    assert first == last == ordinary
    assert "url" not in cut
    assert cut["title"].endswith("…")
    assert len(cut["title"]) == 300
