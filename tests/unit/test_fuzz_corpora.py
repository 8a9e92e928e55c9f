"""Saved inputs of the fuzzer and random bytes, run through the same targets without the fuzzer."""

from __future__ import annotations

import difflib
import time
from collections.abc import Collection, Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openapi_tool.tools import names
from openapi_tool.tools.problems import MAX_PROBLEMS
from tests.fuzz import socket
from tests.fuzz.corpora import MAX_INPUTS, MAX_TOTAL_BYTES, saved, seeds
from tests.fuzz.targets import MAX_BYTES, TARGETS
from tests.requirements import requirement
from tests.support import each

MAX_S = 1.0
SAVED = [(name, known, data) for name in TARGETS for known, data in saved(name).items()]


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    socket.forget()


def checked(name: str, data: bytes) -> None:
    """Run a target within a limit of CPU time, which other processes do not lengthen."""
    began = time.process_time()
    TARGETS[name](data)
    assert time.process_time() - began < MAX_S


@each(("name", "known", "data"), SAVED)
@requirement("fuzz.corpora")
def test_saved_input_breaks_nothing(name: str, known: str, data: bytes) -> None:
    checked(name, data)


@requirement("fuzz.corpora")
def test_similar_names_are_searched_only_for_problems_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise 475 unknown arguments took 55 ms."""
    among: list[list[str]] = []

    def probably_meant(_: str, known: Iterable[str]) -> None:
        among.append(list(known))

    monkeypatch.setattr(names, "probably_meant", probably_meant)
    TARGETS["whole"](saved("whole")["found-unknown-arguments"])
    assert len(among) > MAX_PROBLEMS >= sum(map(bool, among)) > 0


@requirement("fuzz.corpora")
def test_a_name_is_compared_with_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 100, and for each item of a batch, 400 unknown arguments took 65 ms."""
    compared: list[int] = []

    def get_close_matches(_: str, others: Collection[str], n: int) -> list[str]:
        compared.append(len(others))
        return []

    monkeypatch.setattr(difflib, "get_close_matches", get_close_matches)
    TARGETS["whole"](saved("whole")["found-many-unknown-names-in-a-batch"])
    assert 0 < len(compared) <= 3 * MAX_PROBLEMS
    assert max(compared) <= 40


@pytest.mark.parametrize("name", TARGETS)
@requirement("fuzz.corpora")
def test_no_seed_breaks_anything(name: str) -> None:
    found = seeds(name)
    assert found
    for data in found:
        checked(name, data)


@pytest.mark.parametrize("name", TARGETS)
@requirement("fuzz.corpora")
def test_saved_corpus_is_small(name: str) -> None:
    sizes = list(map(len, saved(name).values()))
    assert 0 < len(sizes) <= MAX_INPUTS
    assert sum(sizes) <= MAX_TOTAL_BYTES
    assert max(sizes) <= MAX_BYTES[name]


@given(data=st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
@requirement("fuzz.corpora", "arguments.prepared")
def test_any_bytes_make_arguments_that_are_prepared_or_refused(data: bytes) -> None:
    checked("arguments", data)


@given(data=st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
@requirement("fuzz.corpora", "card.result")
def test_any_bytes_make_an_answer_that_can_be_stored_or_a_typed_failure(data: bytes) -> None:
    checked("answer", b"G" + data)
    checked("answer", data)
