"""Short run of the canary; `make canary` runs all of it."""

from __future__ import annotations

from openapi_tool.telemetry.redact import MASK
from tests.canary.guesses import PLACES, Guess, comparable
from tests.canary.run import canary, encoded_forms, new_canary, new_number, planted, search
from tests.requirements import requirement

COMMANDS = ("deadletters show", "call", "wrong settings")
MASKED = ("log", "console log", "spans", "table public.cards", "bodies of dead letters", "`call`", "`deadletters show`")


@requirement("secrets.output", "secrets.guesses")
async def test_no_secret_is_in_any_output_and_no_result_confirms_a_guess_whatever_goes_wrong() -> None:
    # Statuses of the upstream, commands to run, and characters that a password does not escape.
    report = await canary((200, 422), COMMANDS, ("slash",))
    assert (report["hits"], report["where"]) == (0, [])
    assert report["planted_leak_found"]
    assert report["secrets_received"]
    assert report["sent_for_refused"] == 0, "requests were sent for tools that must be refused"
    assert report["confirmed"] == [], "a result tells a right guess of a secret from a wrong one"
    assert report["guesses"] > 10 * len(PLACES)
    assert report["masked_echoes"] > 10
    assert [name for name in MASKED if not report["masked"][name]] == [], "no secret was masked there"


def test_the_search_finds_a_secret_however_it_is_written() -> None:
    canaries = {"one": new_canary(), "two": new_canary(), "number": new_number()}
    assert search(canaries, {"clean": b"nothing"}) == []
    assert planted(canaries)  # the search finds each of them where it is planted
    for name in ("one", "number"):
        for text in encoded_forms(canaries[name]):
            assert {hit.canary for hit in search(canaries, {"log": f"x{text}x".encode()})} == {name}, text


def test_a_result_that_confirms_a_guess_is_told_from_others() -> None:
    def result(text: str) -> str:
        error = {"code": "bad_request", "message": f"{text}: is not an argument"}
        return comparable(guess, {"content": {"status": "failed", "result": None, "error": error}, "metadata": {}})

    for made in (new_canary(), new_number()):
        secret = Guess(made.head, made.specials, made.tail)
        for guess in (secret, secret.wrong()):
            assert result(str(guess)) == result(str(guess).upper()) != result(MASK)
        assert str(secret) != str(secret.wrong())
