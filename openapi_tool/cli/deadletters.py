"""`openapi-tool deadletters`: list, show and replay commands whose result could not reach any turn."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.bus import dead_letter_reader
from openapi_tool.bus.client import BusClient
from openapi_tool.bus.dead_letter_reader import NotReplayable
from openapi_tool.bus.dead_letters import DeadLetter, without_secrets
from openapi_tool.bus.options import NatsUser
from openapi_tool.cli.common import USAGE, JsonOption, Rows, fail, output, print_json, print_line, print_status
from openapi_tool.cli.kernels import ProtocolOption, result_lookup, with_nats
from openapi_tool.tools.problems import counted

_NOT_SENT = 1
_DEFAULT_LIMIT = 100
_CHARS_TO_SECONDS = len("2026-01-01T00:00:00")

_with_nats = partial(with_nats, user=NatsUser.DEADLETTERS)

app = typer.Typer(no_args_is_help=True, help="List, show and replay commands that got no result.")

AbandonedOption = Annotated[
    bool,
    typer.Option("--abandoned", help="Include commands that were settled without a result and without a dead letter."),
]


@app.command("list", short_help="List dead letters, newest first.")
def list_(
    *,
    project: Annotated[str | None, typer.Option(help="List this project only.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(help="Newest N only [default: 100; with --json: all].", min=1)] = None,
    abandoned: AbandonedOption = False,
    protocol: ProtocolOption = None,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, newest first; with --json and without --limit oldest first, as they are read.

    --protocol lists those of one kernel, if several use the same NATS servers.
    Exit codes: 0, or 2 if NATS cannot be reached or the settings are invalid.
    """
    newest: deque[DeadLetter] = deque(maxlen=limit or _DEFAULT_LIMIT)
    total = 0

    async def gather(bootstrap: Bootstrap, client: BusClient) -> None:
        nonlocal total
        async for letter in _letters(bootstrap, client, abandoned=abandoned):
            clean = without_secrets(letter, bootstrap.redactor)
            if project is not None and clean.identity()["project_id"] != project:
                continue
            if protocol is not None and clean.version != protocol:
                continue
            total += 1
            if as_json and limit is None:
                print_json(_as_object(clean))
            else:
                newest.append(clean)

    _with_nats(gather, protocol, database=abandoned)
    if as_json:
        for letter in reversed(newest):
            print_json(_as_object(letter))
        return
    _show_table(reversed(newest))
    if total > len(newest):
        print_status(f"{counted(total - len(newest), 'older one', 'not shown')}; --limit shows more")


def _show_table(letters: Iterable[DeadLetter]) -> None:
    table = Rows("id", "published", "reason", "project", "tool", "call")
    for letter in letters:
        identity = letter.identity()
        tool = letter.subject.partition(".cmd.tool.")[2] or letter.subject
        published = letter.published_at[:_CHARS_TO_SECONDS]
        known = (identity["project_id"] or "-", tool, identity["tool_call_id"] or "-")
        table.add(letter.id, published, letter.reason, *known)
    output().print(table if len(table) else "no dead letters")


@app.command(short_help="Show a dead letter in full.")
def show(
    letter: Annotated[str, typer.Argument(help="Id from `list`.")],
    *,
    protocol: ProtocolOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a dead letter in full. Exit codes: 0, 2 there is no such id."""
    abandoned = _is_abandoned(letter)

    async def read(bootstrap: Bootstrap, client: BusClient) -> list[DeadLetter]:
        letters = _letters(bootstrap, client, abandoned=abandoned)
        return [without_secrets(known, bootstrap.redactor) async for known in letters]

    chosen = _chosen(_with_nats(read, protocol, database=abandoned), letter)
    print_json(_as_object(chosen), indent=None if as_json else 2)


@app.command(short_help="Publish commands again and delete their records.")
def replay(
    letters: Annotated[list[str], typer.Argument(help="Ids from `list`.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Publish; without it nothing is changed.")] = False,
    protocol: ProtocolOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publish commands again and delete their records.

    A command over 64 KiB is read from the command stream, where it may have expired. If its turn no longer waits, it
    becomes a dead letter again. Exit codes: 0 published (or shown, without --yes), 1 one could not be published, 2 an
    id does not exist.
    """
    abandoned = any(map(_is_abandoned, letters))

    async def send(bootstrap: Bootstrap, client: BusClient) -> bool:
        known = [letter async for letter in _letters(bootstrap, client, abandoned=abandoned)]
        all_sent = True
        for letter in [_chosen(known, letter_id) for letter_id in dict.fromkeys(letters)]:
            outcome = await _replay(bootstrap, client, letter, yes=yes)
            _print_outcome(outcome, yes=yes, as_json=as_json)  # at once: an outage may prevent the next ones
            all_sent = all_sent and not outcome["why"]
        return all_sent

    all_sent = _with_nats(send, protocol, database=abandoned)
    if not yes:
        print_status("nothing was changed; add --yes to send")
    if not all_sent:
        raise typer.Exit(_NOT_SENT)


def _print_outcome(outcome: Mapping[str, Any], *, yes: bool, as_json: bool) -> None:
    if as_json:
        print_json(dict(outcome))
    elif outcome["why"]:
        print_status(f"openapi-tool: {outcome['id']} cannot be sent: {outcome['why']}")
    else:
        print_line(f"{'sent' if yes else 'would send'} {outcome['id']} to {outcome['subject']}")


async def _replay(bootstrap: Bootstrap, client: BusClient, letter: DeadLetter, *, yes: bool) -> dict[str, Any]:
    """Publish the command again if `yes`; `why` of the outcome is the reason of a failure, else None."""
    why = None
    if yes:
        try:
            await dead_letter_reader.replay(client, letter)
        except NotReplayable as reason:
            why = str(reason)
    shown = without_secrets(letter, bootstrap.redactor)
    return {"id": shown.id, "subject": shown.subject, "sent": yes and why is None, "why": why}


async def _letters(bootstrap: Bootstrap, client: BusClient, *, abandoned: bool) -> AsyncIterator[DeadLetter]:
    """Yield the dead letters, then if `abandoned` the settled commands without a result and a dead letter."""
    recorded = set[int]()
    async for letter in dead_letter_reader.dead_letters(client):
        recorded.add(letter.stream_sequence)
        yield letter
    if not abandoned:
        return
    async with result_lookup(bootstrap) as has_result:
        for letter in await dead_letter_reader.abandoned_commands(client, bootstrap.durable, recorded, has_result):
            yield letter


def _chosen(letters: list[DeadLetter], letter_id: str) -> DeadLetter:
    match = next((letter for letter in letters if letter.id == letter_id), None)
    return match or fail(
        f"there is no dead letter {letter_id!r}; `openapi-tool deadletters list` prints the ids", USAGE
    )


def _as_object(letter: DeadLetter) -> dict[str, Any]:
    data = letter.data.decode("utf-8", "backslashreplace")
    return {"id": letter.id, **asdict(letter), **letter.identity(), "data": data}


def _is_abandoned(letter_id: str) -> bool:
    return letter_id.startswith("command-")  # see `DeadLetter.id`
