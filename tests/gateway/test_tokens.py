"""Tokens of a gateway: the commands that create, list and revoke them, and what is accepted."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from openapi_tool.cli import app
from openapi_tool.gateway.token_stores import StoredTokens, TokenFile
from openapi_tool.gateway.tokens import Tokens
from openapi_tool.state.sqlite import StateFile
from tests.requirements import requirement


@pytest.fixture(params=["--state", "--file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Return the option that names where tokens are stored."""
    return request.param, tmp_path / "store"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tokens", *arguments])


def found(store: tuple[str, Path], text: str) -> str | None:
    """Return the agent of a token, None if it is refused."""
    option, path = store

    async def read() -> str | None:
        if option == "--file":
            tokens = Tokens([TokenFile(path)])
            await tokens.load()
        else:
            async with aclosing(StateFile.open(path)) as state:
                tokens = Tokens([StoredTokens(state.records("tokens"))])
                await tokens.load()
        token = tokens.find(text)
        return token.record.agent if token else None

    return asyncio.run(read())


@requirement("gateway.tokens")
def test_a_token_is_shown_once_stored_as_a_hash_and_revoked(store: tuple[str, Path]) -> None:
    where = (store[0], str(store[1]))
    created = run("create", "--project", "p", "--agent", "a", "--tools", "jina_*", "--expires", "30d", *where)
    assert created.exit_code == 0, created.stderr
    text = created.stdout.strip()
    secret = text.rpartition("_")[2]
    stored = b"".join(file.read_bytes() for file in store[1].parent.iterdir() if file.is_file())
    assert secret.encode() not in stored
    assert stat.S_IMODE(store[1].stat().st_mode) == 0o600
    [listed] = [json.loads(line) for line in run("list", "--json", *where).stdout.splitlines()]
    assert (listed["project"], listed["agent"], listed["tools"]) == ("p", "a", ["jina_*"])
    assert "hash" not in listed
    assert secret not in run("list", *where).stdout
    assert found(store, text) == "a"
    assert run("revoke", text, *where).exit_code == 0
    assert found(store, text) is None
    assert run("revoke", listed["id"], *where).exit_code == 0  # it is revoked already
    assert "revoked" in run("list", *where).stdout


@requirement("gateway.tokens")
def test_only_the_whole_right_token_is_accepted(store: tuple[str, Path]) -> None:
    text = run("create", "--project", "p", store[0], str(store[1])).stdout.strip()
    _, token_id, secret = text.split("_")
    assert found(store, text) == "default"
    wrong = [
        "",
        "oat_",
        token_id,
        f"oat_{token_id}",
        f"oat_{token_id}_",
        f"xyz_{token_id}_{secret}",
        f"{text}_",
        text[:-1],
    ]
    wrong += [f"oat_{'0' * 12}_{secret}", text.upper(), f" {text}", "ö" * 100, "\ud800"]
    assert [each for each in wrong if found(store, each)] == []


@requirement("gateway.tokens")
def test_an_expired_token_is_refused(store: tuple[str, Path]) -> None:
    text = run("create", "--project", "p", "--expires", "1m", store[0], str(store[1])).stdout.strip()

    async def at(now: float) -> bool:
        async with (
            aclosing(StateFile.open(store[1]))
            if store[0] == "--state"
            else aclosing(StateFile.open(Path(":memory:"))) as state
        ):
            source = StoredTokens(state.records("tokens")) if store[0] == "--state" else TokenFile(store[1])
            tokens = Tokens([source], lambda: now)
            await tokens.load()
            return tokens.find(text) is not None

    assert asyncio.run(at(time.time()))
    assert not asyncio.run(at(time.time() + 61))


@requirement("gateway.tokens")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "--project", "a b"], "--project: is no id"),
        (["create", "--project", "p", "--agent", "x" * 200], "--agent: is no id"),
        (["create", "--project", "p", "--expires", "soon"], "--expires 'soon' is neither"),
        (["create", "--project", "p", "--expires", "2001-01-01"], "--expires must be in the future"),
        (["create", "--project", "p", "--tools", ""], "--tools: names no tool"),
        (["create", "--project", "p", "--tools", " , "], "--tools: names no tool"),
        (["create", "--project", "p", "--file", "x"], "give --state or --file"),
        (["revoke", "nothing"], "is no id of a token"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], message: str, tmp_path: Path) -> None:
    refused = run(*arguments, "--state", str(tmp_path / "state"))
    assert refused.exit_code == 2
    assert message in refused.stderr


@requirement("gateway.tokens")
def test_an_unknown_token_cannot_be_revoked(store: tuple[str, Path]) -> None:
    assert run("create", "--project", "p", store[0], str(store[1])).exit_code == 0
    missing = run("revoke", "0123456789ab", store[0], str(store[1]))
    assert (missing.exit_code, "there is no token 0123456789ab" in missing.stderr) == (1, True)


@requirement("gateway.tokens")
@pytest.mark.parametrize("content", ["", "[]", "{", '{"0123456789ab": {}}', '{"x": null}', "\x00\x01", None])
@pytest.mark.parametrize("words", [["list"], ["revoke", "0123456789ab"], ["create", "--project", "p"]], ids=" ".join)
def test_a_wrong_file_of_tokens_is_refused_with_its_name_and_how_to_make_one(
    tmp_path: Path, content: str | None, words: list[str]
) -> None:
    file = tmp_path / "tokens.json"
    if content is not None:
        file.write_text(content)
    elif words[0] == "create":
        file.mkdir()  # `create` makes a missing file
    refused = run(*words, "--file", str(file))
    assert (refused.exit_code, "tokens.json: " in refused.stderr) == (2, True)
    assert "a file of tokens: a JSON object of records by id" in refused.stderr
    assert "`openapi-tool tokens create --project P --file NEW`" in refused.stderr
