"""Short run of the canary; `make canary` runs all of it."""

from __future__ import annotations

from tests.canary.run import canary, encoded_forms, new_canary, new_number, planted, search
from tests.requirements import requirement

COMMANDS = ("deadletters show", "call", "wrong settings")
MASKED = ("log", "console log", "spans", "table public.cards", "bodies of dead letters", "`call`", "`deadletters show`")


@requirement("secrets.output")
async def test_no_secret_is_in_any_output_whatever_goes_wrong() -> None:
    # Statuses of the upstream, commands to run, and characters that a password does not escape.
    report = await canary((200, 422), COMMANDS, ("slash",))
    assert (report["hits"], report["where"]) == (0, [])
    assert report["planted_leak_found"]
    assert report["secrets_received"]
    assert report["sent_for_refused"] == 0, "requests were sent for tools that must be refused"
    assert [name for name in MASKED if not report["masked"][name]] == [], "no secret was masked there"


def test_the_search_finds_a_secret_however_it_is_written() -> None:
    canaries = {"one": new_canary(), "two": new_canary(), "number": new_number()}
    assert search(canaries, {"clean": b"nothing"}) == []
    assert planted(canaries)  # the search finds each of them where it is planted
    for name in ("one", "number"):
        for text in encoded_forms(canaries[name]):
            assert {hit.canary for hit in search(canaries, {"log": f"x{text}x".encode()})} == {name}, text
