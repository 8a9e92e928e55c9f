from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openapi_tool.tools.arguments import OperatorEnvs, prepare_arguments
from openapi_tool.tools.secrets import Secrets
from openapi_tool.tools.session import SessionScope
from tests.promises import requirement
from tests.support import definition, identity, tool_call

KEY = b"0123456789abcdef"
SCOPE = SessionScope(KEY)
SECRETS = Secrets({"JINA_API_KEY": "the-key"}, {"JINA_API_KEY"})

ids = st.text(max_size=30) | st.sampled_from(["a", "a ", "A", "a\u0301", "á", "a,b", 'a","b', "[]", "\u0430", "a\x00"])
aliases = (
    ids
    | st.none()
    | st.integers()
    | st.sampled_from([2**64, 10**400, str(10**400)])
    | st.booleans()
    | st.text(min_size=1000, max_size=1100)
)
owners = st.tuples(ids, ids, aliases)


@given(owners, owners)
@requirement("session.scoped")
def test_identities_agree_exactly_where_owner_and_alias_do(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    same = [(type(part), part) for part in one] == [(type(part), part) for part in other]
    assert (SCOPE.identity(*one) == SCOPE.identity(*other)) == same


@given(st.text(max_size=10), st.text(max_size=10), st.text(max_size=10))
@requirement("session.scoped")
def test_no_separator_in_an_id_makes_two_owners_look_alike(project: str, agent: str, alias: str) -> None:
    for separator in ("", "/", ":", '","', "\x00"):
        shifted = (project + separator + agent, alias, "")
        assert SCOPE.identity(project, agent, alias) != SCOPE.identity(*shifted) or (project, agent, alias) == shifted


@given(owners)
@requirement("session.scoped")
def test_replicas_with_the_same_key_agree_and_others_do_not(owner: tuple[Any, ...]) -> None:
    assert SessionScope(KEY).identity(*owner) == SCOPE.identity(*owner)
    assert SessionScope(KEY[::-1]).identity(*owner) != SCOPE.identity(*owner)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        SessionScope(b"short")


def session_of(arguments: dict[str, Any], **options: Any) -> str:
    return prepare_arguments(
        definition(**options), tool_call(arguments), identity(), OperatorEnvs(), SECRETS, SCOPE
    ).session


@requirement("session.alias")
def test_the_alias_comes_from_arguments_defaults_or_fixed_by_weight() -> None:
    expected = {alias: SCOPE.identity("proj", "agent", alias) for alias in ("model", "default", "fixed", None)}
    assert session_of({}) == expected[None]
    assert session_of({"sessionId": "model"}) == expected["model"]
    assert session_of({}, args={"defaults": {"session_id": "default"}}) == expected["default"]
    assert session_of({"session_id": "model"}, args={"defaults": {"session_id": "default"}}) == expected["model"]
    assert session_of({"sessionId": "model"}, args={"fixed": {"session_id": "fixed"}}) == expected["fixed"]
    assert session_of({"session_id": None}, args={"defaults": {"session_id": "default"}}) == expected[None]
