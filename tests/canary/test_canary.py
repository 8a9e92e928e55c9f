"""The canary's short run; `make canary` plays all of it."""

from __future__ import annotations

from tests.canary.needles import new_canary, planted, search, spoken
from tests.canary.run import canary
from tests.promises import requirement

COMMANDS = ("deadletters show", "call", "wrong settings")
MASKED = ("log", "spans", "table public.cards", "bodies of dead letters", "`call`", "`deadletters show`")


@requirement("secrets.canary", "secrets.output")
async def test_no_secret_is_in_any_output_whatever_goes_wrong() -> None:
    found = await canary((200, 422), COMMANDS)
    assert (found["hits"], found["where"]) == (0, [])
    assert found["planted_leak_found"]
    assert found["uttered"]
    assert [name for name in MASKED if not found["masked"][name]] == [], "nothing was tried there"


def test_the_search_finds_a_secret_however_it_is_written() -> None:
    canaries = {"one": new_canary(), "two": new_canary()}
    assert search(canaries, {"clean": b"nothing"}) == []
    assert planted(canaries, {"log": b""})
    for text in spoken(canaries["one"]):
        assert {hit.canary for hit in search(canaries, {"log": f"x{text}x".encode()})} == {"one"}, text
