"""`openapi-tool tokens`: create, list and revoke the tokens by which a gateway knows its clients.

Tokens are in the gateway's state (a file or NATS), or in a file of their own. Only a hash of a token is stored.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.table import Table

from openapi_tool.cli.given_names import check_given
from openapi_tool.cli.nats_connection import with_nats
from openapi_tool.cli.output import fail, print_json, print_line, print_status
from openapi_tool.cli.selection import check_not_memory, chosen_state, say_default_file
from openapi_tool.cli.tables import cell, output
from openapi_tool.cli.times import time_after
from openapi_tool.gateway.opening import NATS
from openapi_tool.gateway.state import TOKENS
from openapi_tool.gateway.token_record import TokensInvalid, id_of, new_token, shown
from openapi_tool.gateway.token_stores import StoredTokens, TokenFile, TokenStore
from openapi_tool.gateway.tools import built_in_tools
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.state.sqlite import StateFile
from openapi_tool.state.sqlite_file import StateUnusable
from openapi_tool.tools.wording import did_you_mean, short

if TYPE_CHECKING:
    from openapi_tool.bootstrap import Bootstrap
    from openapi_tool.nats_client.client import BusClient

T = TypeVar("T")
_NO_SUCH_TOKEN = 1
_CHARS_TO_MINUTES = len("2026-01-01T00:00")


def create(
    *,
    project: str,
    agent: str,
    tools: list[str],
    any_agent: bool,
    expires: str | None,
    state: Path | None,
    file: Path | None,
    as_json: bool,
) -> None:
    """Create a token and print it, once."""
    now = datetime.now(UTC)
    until = time_after(expires, now, "--expires").timestamp() if expires else None
    if until is not None and until <= now.timestamp():
        fail("--expires must be in the future")
    patterns = [pattern for option in tools for pattern in option.split(",") if pattern.strip()]
    for pattern in patterns:
        check_given("--tools", pattern, "name or pattern of tools")
    if tools and not patterns:
        fail("--tools: names no tool; leave it out for all tools, or give names or patterns such as jina_*")
    try:
        text, token_id, token = new_token(project, agent, tuple(patterns) or ("*",), any_agent=any_agent, expires=until)
    except TokensInvalid as error:
        fail(f"--{error}")
    _with_store(state, file, lambda store: store.add(token_id, token), create=True)
    _warn_of_unknown_tools(patterns)
    if as_json:
        print_json({"token": text, **_with_times(shown(token_id, token, time.time()))})
        return
    print_line(text)
    print_status(
        f"token {token_id} of project {project}, agent {agent}, is shown only now; running gateways take it within 2 s"
    )


def _warn_of_unknown_tools(patterns: Iterable[str]) -> None:
    """Warn of patterns that match no built-in tool; which tools a folder of the gateway has is not known here."""
    names = list(built_in_tools())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = did_you_mean(pattern, names) or f"; they are {', '.join(names)}"
            print_status(
                f"--tools: {short(pattern)!r} matches no built-in tool{hint} "
                "(a gateway with --tools FOLDER has the tools of that folder)"
            )


def list_(*, state: Path | None, file: Path | None, as_json: bool) -> None:
    """Print all tokens, without their secrets."""
    found = _with_store(state, file, lambda store: store.all())
    now = time.time()
    oldest_first = sorted(found.items(), key=lambda each: each[1].created)
    rows = [_with_times(shown(token_id, token, now)) for token_id, token in oldest_first]
    if as_json:
        for row in rows:
            print_json(row)
        return
    if not rows:
        print_status("no tokens")
        return
    table = Table("id", "project", "agent", "tools", "state", "created", "expires", box=None, pad_edge=False)
    for row in rows:
        agent = f"{row['agent']} or X-Agent-Id" if row["any_agent"] else row["agent"]
        created = str(row["created"] or "never")[:_CHARS_TO_MINUTES]
        expires = str(row["expires"] or "never")[:_CHARS_TO_MINUTES]
        tools = ", ".join(row["tools"])
        table.add_row(*map(cell, (row["id"], row["project"], agent, tools, row["state"], created, expires)))
    output().print(table)


def revoke(token: str, *, state: Path | None, file: Path | None) -> None:
    """Revoke a token."""
    try:
        token_id = id_of(token)
    except TokensInvalid as error:
        fail(f"{error}; {_listed_by(state, file)}")
    if not _with_store(state, file, lambda store: store.revoke(token_id)):
        fail(f"there is no token {token_id}; {_listed_by(state, file)}", _NO_SUCH_TOKEN)
    print_status(f"revoked token {token_id}; running gateways refuse it within 2 s")


def _listed_by(state: Path | None, file: Path | None) -> str:
    """Return which command lists the tokens of the same file or state."""
    words = ["openapi-tool", "tokens", "list"]
    if file is not None:
        words += ["--file", str(file)]
    elif state is not None:
        words += ["--state", str(state)]
    return f"`{shlex.join(words)}` shows them"


def _with_store(
    state: Path | None, file: Path | None, work: Callable[[TokenStore], Awaitable[T]], *, create: bool = False
) -> T:
    """Return the result of `work` with the tokens of a file, or of the state; exit with 2 if it is unusable."""
    if state is not None and file is not None:
        fail("give --state or --file, not both")
    check_not_memory(state)
    path = file or chosen_state(state)
    if file is None and state is None and path != NATS:
        say_default_file(path)
    if file is None and path == NATS:
        return _with_store_in_nats(work)
    if file is None and not create and _is_missing(path):
        option = f" --state {shlex.quote(str(path))}" if state else ""
        makes = f"`openapi-tool tokens create --project P{option}` makes it"
        fail(f"there is no state file {path}: {makes}, or name another one with --state")

    async def open_and_work() -> T:
        if file is not None:
            return await work(TokenFile(file))
        async with aclosing(StateFile.open(path, create=create)) as state_file:
            return await work(StoredTokens(state_file.records(TOKENS)))

    try:
        return asyncio.run(open_and_work())
    except (StateUnusable, Unavailable, TokensInvalid) as error:
        fail(str(error))


def _is_missing(path: Path) -> bool:
    try:
        return not path.exists()
    except OSError:  # a folder that may not be read, or a name that is too long: to open the file says so
        return False


def _with_store_in_nats(work: Callable[[TokenStore], Awaitable[T]]) -> T:
    from openapi_tool.gateway.nats_state import stored_tokens  # noqa: PLC0415 - drivers that a file needs not
    from openapi_tool.nats_records.replicas import replica_count  # noqa: PLC0415 - the same

    async def work_on_store(bootstrap: Bootstrap, client: BusClient) -> T:
        replicas = await replica_count(client, bootstrap.durable)
        return await work(StoredTokens(stored_tokens(client, replicas)))

    try:
        return with_nats(work_on_store, user=NatsUser.GATEWAY)
    except TokensInvalid as error:
        fail(str(error))


def _with_times(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its times as texts in place of seconds."""
    times = {
        name: datetime.fromtimestamp(row[name], UTC).isoformat(timespec="seconds")
        for name in ("created", "expires", "revoked")
        if row[name] is not None
    }
    return row | times
