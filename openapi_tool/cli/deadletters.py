"""`openapi-tool deadletters`: commands that were never answered, to look at and to send again."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from openapi_tool.bus import dead_letters
from openapi_tool.bus.connection import Client, connected, outage_as_unavailable
from openapi_tool.bus.dead_letters import DeadLetter
from openapi_tool.bus.redacted import without_secrets
from openapi_tool.cli.common import USAGE, fail, say
from openapi_tool.kernel.store import KernelStore
from openapi_tool.prepared import Prepared, prepare
from openapi_tool.protocol.errors import Unanswerable, Unavailable
from openapi_tool.protocol.subject import parse_command_subject
from openapi_tool.settings import SettingsError, load_settings

_CONNECT_S = 10.0

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, help="Commands that were never answered: list, show, replay.")

JsonOption = Annotated[bool, typer.Option("--json", help="JSON on standard output, nothing else.")]
AbandonedOption = Annotated[
    bool,
    typer.Option(
        "--abandoned", help="Also commands in the stream that another executor gave up on and that have no result."
    ),
]


@app.command("list")
def list_(*, abandoned: AbandonedOption = False, as_json: JsonOption = False) -> None:
    """List dead letters, oldest first. Exit codes: 0, or 2 when NATS or the configuration is not there."""
    letters = _run(lambda prepared, client: _readable(prepared, client, abandoned=abandoned))
    if as_json:
        for letter in letters:
            sys.stdout.write(json.dumps(_shown(letter)) + "\n")
        return
    table = Table("id", "published", "reason", "subject", "tool call")
    for letter in letters:
        table.add_row(
            letter.id, letter.published_at, letter.reason, letter.subject, letter.headers.get("CG-Tool-Call-Id", "-")
        )
    Console().print(table if letters else "no dead letters")


@app.command()
def show(
    letter: Annotated[str, typer.Argument(help="An id that `list` prints.")], *, as_json: JsonOption = False
) -> None:
    """Show one dead letter whole. Exit codes: 0, 2 there is none of this id."""
    found = _shown(_chosen(_run(_whichever(letter)), letter))
    sys.stdout.write(json.dumps(found, indent=None if as_json else 2, ensure_ascii=False) + "\n")


@app.command()
def replay(
    letters: Annotated[list[str], typer.Argument(help="Ids that `list` prints.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Send them; without it nothing is changed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Send commands again as they came, and forget their records.

    A turn that no longer waits is not woken: such a command becomes a dead letter again. Exit codes:
    0 sent (or shown, without --yes), 1 one could not be sent, 2 there is none of an id.
    """

    async def send(prepared: Prepared, client: Client) -> list[dict[str, Any]]:
        known = await _letters(prepared, client, abandoned=any(letter.startswith("command-") for letter in letters))
        chosen = [_chosen(known, letter) for letter in letters]
        if yes:
            for letter in chosen:
                await dead_letters.replay(client, letter)
        clean = [without_secrets(letter, prepared.redactor) for letter in chosen]
        return [{"id": letter.id, "subject": letter.subject, "sent": yes} for letter in clean]

    for sent in _run(send):
        if as_json:
            sys.stdout.write(json.dumps(sent) + "\n")
        else:
            sys.stdout.write(f"{'sent' if yes else 'would send'} {sent['id']} to {sent['subject']}\n")
    if not yes:
        say("nothing was changed; add --yes to send")


def _whichever(letter: str) -> Callable[[Prepared, Client], Coroutine[Any, Any, list[DeadLetter]]]:
    return lambda prepared, client: _readable(prepared, client, abandoned=letter.startswith("command-"))


async def _readable(prepared: Prepared, client: Client, *, abandoned: bool) -> list[DeadLetter]:
    """For people; what is sent again stays as it is."""
    letters = await _letters(prepared, client, abandoned=abandoned)
    return [without_secrets(letter, prepared.redactor) for letter in letters]


async def _letters(prepared: Prepared, client: Client, *, abandoned: bool) -> list[DeadLetter]:
    letters = await dead_letters.dead_letters(client)
    if not abandoned:
        return letters
    kernel = await KernelStore.open(prepared.pool)

    async def answered(subject: str, headers: Mapping[str, str]) -> bool:
        try:
            project_id = parse_command_subject(subject).project_id
        except Unanswerable:
            return False
        return await kernel.answered(project_id, headers.get("CG-Tool-Call-Id", ""))

    try:
        return letters + await dead_letters.abandoned_commands(client, prepared.durable, letters, answered)
    finally:
        await kernel.aclose()


def _chosen(letters: list[DeadLetter], wanted: str) -> DeadLetter:
    found = next((letter for letter in letters if letter.id == wanted), None)
    return found or fail(f"there is no dead letter {wanted!r}; `openapi-tool deadletters list` shows all", USAGE)


def _shown(letter: DeadLetter) -> dict[str, Any]:
    """For people: the body as text, with what is no UTF-8 escaped."""
    fields = asdict(letter) | {"id": letter.id, "data": letter.data.decode("utf-8", "backslashreplace")}
    return {name: fields[name] for name in sorted(fields, key=lambda name: name != "id")}


def _run(work: Callable[[Prepared, Client], Coroutine[Any, Any, T]]) -> T:
    """Do something with a connection to NATS; what keeps it from being done is said in a line."""
    try:
        prepared = prepare(load_settings({}), os.environ)
    except SettingsError as error:
        for problem in error.problems:
            say(f"openapi-tool: {problem}")
        raise typer.Exit(USAGE) from None
    try:
        return asyncio.run(_connected(prepared, work))
    except Unavailable as error:
        fail(prepared.redactor.text(str(error)), USAGE)


async def _connected(prepared: Prepared, work: Callable[[Prepared, Client], Coroutine[Any, Any, T]]) -> T:
    with outage_as_unavailable():
        async with asyncio.timeout(_CONNECT_S) as timeout, connected(prepared.bus) as client:
            timeout.reschedule(None)
            return await work(prepared, client)
