"""`openapi-tool deadletters`: list, show and replay commands whose result could not reach any turn.

A *dead letter* is the record of such a command. An *abandoned* command has no record: it was settled, so it is not
delivered any more, and has no result. It is found by a search of the command stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import typer

from openapi_tool.bootstrap import Bootstrap
from openapi_tool.cli.dev_choice import say_dev_in_use
from openapi_tool.cli.given_names import check_given
from openapi_tool.cli.kernel import result_lookup
from openapi_tool.cli.nats_connection import with_nats
from openapi_tool.cli.output import USAGE, fail, print_json, print_line, print_status
from openapi_tool.cli.selection import command_about_same
from openapi_tool.cli.tables import Rows, output
from openapi_tool.kernel.jetstream import dead_letter_reader
from openapi_tool.kernel.jetstream.dead_letter_reader import NotReplayable
from openapi_tool.kernel.jetstream.dead_letter_records import DeadLetter, without_secrets
from openapi_tool.nats_client.client import BusClient
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.tools.wording import counted, short

_NOT_SENT = 1
_LETTER_ID = "id of a dead letter"
_DEFAULT_LIMIT = 100
T = TypeVar("T")
_CHARS_TO_SECONDS = len("2026-01-01T00:00:00")

_WITHOUT_NATS = (
    "dead letters are stored in NATS, so they cannot be read meanwhile; the replicas' log lines `call.dead_lettered` "
    "name them, and GET /readyz on a replica's health.port says what is down"
)


def list_(*, project: str | None, limit: int | None, abandoned: bool, as_json: bool) -> None:
    """Print dead letters, newest first; as JSON without `limit` oldest first, as they are read."""
    check_given("--project", project, "project id")
    newest: deque[DeadLetter] = deque(maxlen=limit or _DEFAULT_LIMIT)
    total = 0

    async def gather(bootstrap: Bootstrap, client: BusClient) -> None:
        nonlocal total
        async for letter in _letters(bootstrap, client, abandoned=abandoned):
            masked = without_secrets(letter, bootstrap.redactor)
            if project is not None and masked.identity()["project_id"] != project:
                continue
            total += 1
            if as_json and limit is None:
                print_json(_as_object(masked))
            else:
                newest.append(masked)

    _with_nats(gather, abandoned=abandoned)
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
        tool = (
            letter.subject.partition(".cmd.tool.")[2] or letter.subject
        )  # jina.search of cg.v1r4.….cmd.tool.jina.search
        published = letter.published_at[:_CHARS_TO_SECONDS]
        known = (identity["project_id"] or "-", tool, identity["tool_call_id"] or "-")
        table.add(letter.id, published, letter.reason, *known)
    output().print(table if len(table) else "no dead letters")


def show(letter: str, *, as_json: bool) -> None:
    """Print a dead letter in full."""
    check_given("LETTER", letter, _LETTER_ID)
    abandoned = _is_abandoned(letter)

    async def read(bootstrap: Bootstrap, client: BusClient) -> list[DeadLetter]:
        letters = _letters(bootstrap, client, abandoned=abandoned)
        return [without_secrets(known, bootstrap.redactor) async for known in letters]

    chosen = _chosen(_with_nats(read, abandoned=abandoned), letter)
    print_json(_as_object(chosen), indent=None if as_json else 2)


def replay(letters: list[str], *, yes: bool, as_json: bool) -> None:
    """Publish commands again and delete their records; without `yes` print which."""
    for letter_id in letters:
        check_given("LETTERS", letter_id, _LETTER_ID)
    abandoned = any(map(_is_abandoned, letters))

    async def send(bootstrap: Bootstrap, client: BusClient) -> bool:
        known = [letter async for letter in _letters(bootstrap, client, abandoned=abandoned)]
        chosen = [_chosen(known, letter_id) for letter_id in dict.fromkeys(letters)]  # exits before anything is sent
        all_sent = True
        for letter in chosen:
            outcome = await _replay(bootstrap, client, letter, yes=yes)
            _print_outcome(outcome, yes=yes, as_json=as_json)  # at once: an outage may prevent the next ones
            all_sent = all_sent and not outcome["why"]
        return all_sent

    all_sent = _with_nats(send, abandoned=abandoned)
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


def _with_nats(work: Callable[[Bootstrap, BusClient], Awaitable[T]], *, abandoned: bool) -> T:
    say_dev_in_use()
    if abandoned:  # PostgreSQL is needed, too, and the outage may be its own
        return with_nats(work, user=NatsUser.DEADLETTERS, database=True)
    return with_nats(work, user=NatsUser.DEADLETTERS, advice=_WITHOUT_NATS)


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
    for letter in letters:
        if letter.id == letter_id:
            return letter
    command = "deadletters list --abandoned" if _is_abandoned(letter_id) else "deadletters list"
    return fail(f"there is no dead letter {short(letter_id)!r}; `{command_about_same(command)}` prints the ids", USAGE)


def _as_object(letter: DeadLetter) -> dict[str, Any]:
    data = letter.data.decode("utf-8", "backslashreplace")
    return {"id": letter.id, **asdict(letter), **letter.identity(), "data": data}


def _is_abandoned(letter_id: str) -> bool:
    return letter_id.startswith("command-")  # see `DeadLetter.id`
