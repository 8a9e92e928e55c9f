"""Starts that fail, and wrong settings."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.local import servers
from openapi_tool.local.database import prepare_database
from openapi_tool.local.servers import accepts
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.service.kernel_parts import assemble
from openapi_tool.service.process_parts import open_process_parts
from openapi_tool.settings import Settings
from openapi_tool.telemetry import health
from openapi_tool.telemetry.health import NATS, POSTGRES, Health
from tests.requirements import requirement
from tests.waiting import WAIT_S, until

UNREACHABLE = "127.0.0.1:1"
SERVERS_SETTING = "nats.servers (NATS_SERVERS)"
CHECK_DSN, CHECK_SERVERS = "check postgres.dsn (PG_DSN)", f"check {SERVERS_SETTING}"


class CountingHealth(Health):
    """Health that counts the failed attempts."""

    failed = 0

    def record(self, name: str, *, ok: bool, reason: str = "") -> bool:
        self.failed += not ok
        return super().record(name, ok=ok, reason=reason)


async def _assembled(stack: AsyncExitStack, bootstrap: Bootstrap) -> None:
    await assemble(stack, bootstrap, open_process_parts(stack, bootstrap, None))


async def begun(dsn: str, servers: str, attempts: int, **login: Any) -> CountingHealth:
    """Start until this number of attempts has failed."""
    settings = Settings(postgres={"dsn": dsn, "timeout_s": 0.5}, nats={"servers": servers, **login})
    return await begun_of(build_bootstrap(settings, {"JINA_API_KEY": "a-key-of-the-test"}), attempts)


async def begun_of(bootstrap: Bootstrap, attempts: int) -> CountingHealth:
    """Start a kernel until this number of attempts has failed."""
    counting = CountingHealth(redact=bootstrap.health.redact)
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(_assembled(stack, replace(bootstrap, health=counting)))
        await until(lambda: counting.failed >= attempts)
        starting.cancel()
        await asyncio.wait([starting])
    return counting


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def reason(
    dependency: str, dsn: str, servers: str, caplog: pytest.LogCaptureFixture, attempts: int = 3, **login: Any
) -> str:
    """Start; return why the dependency is unavailable, which must be in one log line.

    Several `attempts` must fail, as only the first one may be logged; one is enough if it takes seconds.
    """
    caplog.set_level(logging.INFO, "openapi_tool")
    waiting = await begun(dsn, servers, attempts, **login)
    logged = warnings(caplog)
    message = waiting.as_json()["dependencies"][dependency]["reason"]
    assert logged == [f"{dependency} is unavailable: {message}"]
    return str(message)


@contextmanager
def bare_nats(*options: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([servers._binary(), "-a", "127.0.0.1", "-p", str(port), *options])  # noqa: SLF001, S603 - ours
    try:
        while not accepts(port):
            assert server.poll() is None
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def address_of(dsn: str) -> str:
    return dsn.rpartition("@")[2].partition("/")[0]


@requirement("start.reasons")
@pytest.mark.parametrize(
    ("address", "expected"),
    [(UNREACHABLE, "connection refused"), ("no.such.host.invalid", "the host's name cannot be resolved")],
)
async def test_a_database_that_cannot_be_reached(
    stack: EmbeddedStack, caplog: pytest.LogCaptureFixture, address: str, expected: str
) -> None:
    message = await reason(POSTGRES, f"postgresql://user@{address}/kernel", stack.nats.url, caplog)
    where = address if ":" in address else f"{address}:5432"
    assert message == f"PostgreSQL at {where} (database kernel): {expected}; {CHECK_DSN}"


@requirement("start.reasons")
async def test_a_missing_database_or_table(stack: EmbeddedStack, caplog: pytest.LogCaptureFixture) -> None:
    where = address_of(stack.postgres.dsn())
    message = await reason(POSTGRES, stack.postgres.dsn("nowhere"), stack.nats.url, caplog)
    assert message.startswith(f'PostgreSQL at {where} (database nowhere): database "nowhere" does not exist')
    assert message.endswith("check the database's name in postgres.dsn (PG_DSN)")
    caplog.clear()
    await prepare_database(stack.postgres.dsn(), "without_tables", None)
    message = await reason(POSTGRES, stack.postgres.dsn("without_tables"), stack.nats.url, caplog)
    assert message.startswith(f"PostgreSQL at {where} (database without_tables): missing: table ")
    assert "resource.project_agents" in message
    assert "check that it is the kernel's database" in message
    assert "sql grants" not in message


@requirement("start.reasons", "dialects.recognised")
async def test_a_database_of_the_other_version(
    stack: EmbeddedStack, v1r3_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one line for it, as for other causes; the start waits until database or settings are corrected."""
    dsn = stack.postgres.dsn(v1r3_database)
    message = await reason(POSTGRES, dsn, stack.nats.url, caplog)
    where = f"PostgreSQL at {address_of(dsn)} (database {v1r3_database})"
    assert message.startswith(f"{where}: this is a database of protocol v1r3, but v1r4 is configured for it. ")
    assert message.endswith(
        "set protocol.version, or name the database of a kernel of that version in postgres.dsn (PG_DSN)"
    )


@requirement("start.reasons")
async def test_a_nats_server_at_the_address_of_postgresql(
    stack: EmbeddedStack, caplog: pytest.LogCaptureFixture
) -> None:
    address = stack.nats.url.partition("://")[2]
    message = await reason(POSTGRES, f"postgresql://user@{address}/kernel", stack.nats.url, caplog)
    assert message.startswith(f"PostgreSQL at {address} (database kernel): it does not speak PostgreSQL's protocol")
    assert message.endswith(CHECK_DSN)


@requirement("start.reasons")
async def test_no_server_or_postgresql_at_the_address_of_nats(
    stack: EmbeddedStack, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    dsn = stack.postgres.dsn(database)
    message = await reason(NATS, dsn, f"nats://{UNREACHABLE}", caplog)
    assert message == f"NATS at {UNREACHABLE}: connection refused; {CHECK_SERVERS}"
    caplog.clear()
    message = await reason(NATS, dsn, f"nats://{address_of(dsn)}", caplog, attempts=1)
    assert message == f"NATS at {address_of(dsn)}: no answer in time: is it a NATS server? {CHECK_SERVERS}"


@requirement("start.reasons")
async def test_each_server_that_cannot_be_reached_is_named(caplog: pytest.LogCaptureFixture) -> None:
    await begun(f"postgresql://user@{UNREACHABLE}/kernel", f"nats://{UNREACHABLE}", 6)  # so that both servers are tried
    assert sorted(warnings(caplog)) == [
        f"{NATS} is unavailable: NATS at {UNREACHABLE}: connection refused; {CHECK_SERVERS}",
        f"{POSTGRES} is unavailable: PostgreSQL at {UNREACHABLE} (database kernel): connection refused; {CHECK_DSN}",
    ]


@requirement("start.reasons")
async def test_nats_without_jetstream(stack: EmbeddedStack, database: str, caplog: pytest.LogCaptureFixture) -> None:
    with bare_nats() as address:
        message: Any = await reason(NATS, stack.postgres.dsn(database), f"nats://{address}", caplog)
    assert message.startswith(f"NATS: JetStream is not enabled on {address}, or not for this account")


@requirement("start.reasons")
@pytest.mark.parametrize(
    ("login", "named"),
    [
        ({}, f"a login in {SERVERS_SETTING} (sent as it is written there), or set nats.user or another login"),
        ({"user": "u", "password": "not-the-password"}, "nats.user and nats.password"),
        ({"token": "not-the-password"}, "nats.token"),
    ],
    ids=["none", "wrong password", "wrong token"],
)
async def test_a_login_that_nats_refuses(
    stack: EmbeddedStack, database: str, caplog: pytest.LogCaptureFixture, login: dict[str, Any], named: str
) -> None:
    """The server closes after its refusal, so later attempts may see only a reset. This is not logged as a change."""
    with bare_nats("--user", "u", "--pass", "the-password") as address:
        message = await reason(NATS, stack.postgres.dsn(database), f"nats://{address}", caplog, **login)
    assert message == f"NATS at {address}: the login is refused (Authorization Violation); check {named}"
    assert "the-password" not in caplog.text


@requirement("start.reasons")
async def test_a_login_that_postgresql_refuses(stack: EmbeddedStack, caplog: pytest.LogCaptureFixture) -> None:
    address = address_of(stack.postgres.dsn())
    message = await reason(POSTGRES, f"postgresql://nobody:not-it@{address}/kernel", stack.nats.url, caplog)
    assert message.startswith(f"PostgreSQL at {address} (database kernel): password authentication failed")
    assert message.endswith("check user and password in postgres.dsn (PG_DSN)")
    assert "not-it" not in caplog.text


@requirement("start.reasons")
async def test_a_role_without_grants(stack: EmbeddedStack, database: str, caplog: pytest.LogCaptureFixture) -> None:
    dsn = stack.postgres.dsn(database)
    connection = await asyncpg.connect(dsn)
    await connection.execute("drop role if exists ungranted; create role ungranted login password 'x'")
    await connection.close()
    address = address_of(dsn)
    message = await reason(POSTGRES, f"postgresql://ungranted:x@{address}/{database}", stack.nats.url, caplog)
    assert message.startswith(f"PostgreSQL at {address} (database {database}): permission denied for schema ")
    assert message.endswith("grant what `openapi-tool sql grants` prints")


@requirement("start.reasons")
@pytest.mark.parametrize("dependency", [POSTGRES, NATS])
async def test_a_start_that_waits_repeats_its_reason(
    stack: EmbeddedStack,
    database: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    dependency: str,
) -> None:
    monkeypatch.setattr(health, "_REPEAT_AFTER_S", 0.0)  # instead of a minute
    dsn, servers = stack.postgres.dsn(database), stack.nats.url
    if dependency == POSTGRES:
        dsn = f"postgresql://user@{UNREACHABLE}/kernel"
    else:
        servers = f"nats://{UNREACHABLE}"
    await begun(dsn, servers, 4)
    logged = warnings(caplog)
    assert len(logged) >= 4
    assert [line.startswith(f"{dependency} is unavailable: ") for line in set(logged)] == [True]


CANARY = "zq7canary"
TOOL = str(Path(__file__).parents[2] / "config" / "tools" / "jina_search.yaml")
COMMANDS = {
    "serve": ["serve"],
    "deadletters": ["deadletters", "list"],
    "tools list": ["tools", "list", "--project", "p", "--db"],
    "tools apply": ["tools", "apply", TOOL, "--project", "p", "--db", "--yes"],
    "call": ["call", "jina_search", "--project", "p", "--agent", "a"],
}
DSN, SERVERS = "postgresql://127.0.0.1:1/db", "nats://127.0.0.1:1"
AMBIGUOUS_DSN = f"postgresql://openapi:{CANARY}1/{CANARY}2@127.0.0.1:1/db"


def run(command: str, **variables: str) -> str:
    """Return the whole output of a command, which must exit with 2."""
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-m", "openapi_tool", *COMMANDS[command]],
        env={"PATH": os.environ["PATH"], "HOME": "/nowhere", "PG_DSN": DSN, "NATS_SERVERS": SERVERS, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
@requirement("settings.errors")
def test_an_ambiguous_connection_string_is_shown_nowhere(command: str) -> None:
    output = run(command, PG_DSN=AMBIGUOUS_DSN)
    assert "postgres.dsn" in output
    assert "%2F" in output
    assert CANARY not in output


# fmt: off
WRONG = [
    ("serve", "postgres.dsn", {"PG_DSN": f"postgresql://{CANARY}:5432#{CANARY}@127.0.0.1:1/db"}),
    ("serve", "nats.servers", {"NATS_SERVERS": f"nats://u:{CANARY}/x@127.0.0.1:4222"}),
    ("serve", "nats.servers", {"NATS_SERVERS": f"nats://u:5?{CANARY}@127.0.0.1:4222"}),
    ("serve", "nats.servers", {"NATS_SERVERS": f"nats://{CANARY}@::1:4222"}),
    ("serve", "egress.proxy", {"OPENAPI_TOOL__EGRESS__PROXY": f"http://u:{CANARY}/x@proxy:3128"}),
    ("serve", "telemetry.otlp_endpoint", {"OPENAPI_TOOL__TELEMETRY__OTLP_ENDPOINT": f"http://u:5/{CANARY}@collector:1"}),
    ("serve", "OPENAPI_TOOL__NATS", {"OPENAPI_TOOL__NATS": f'{{"token": "{CANARY}'}),
    ("serve", "PGPORT", {"PGPORT": CANARY}),
    ("serve", "PGSSLMODE", {"PGSSLMODE": CANARY}),
    ("tools list", "PGPORT", {"PGPORT": CANARY}),
    ("tools list", "PGSSLMODE", {"PGSSLMODE": CANARY}),
    ("serve", "nats.nkey_seed_file", {"OPENAPI_TOOL__NATS__NKEY_SEED_FILE": "FILE"}),
    ("serve", "nats.credentials_file", {"OPENAPI_TOOL__NATS__CREDENTIALS_FILE": "FILE"}),
    ("serve", "health.host", {"OPENAPI_TOOL__HEALTH__HOST": f"{CANARY}..x", "OPENAPI_TOOL__HEALTH__PORT": "1"}),
]
# fmt: on


@pytest.mark.parametrize(("command", "setting", "variables"), WRONG)
@requirement("settings.errors")
def test_an_unusable_value_is_reported_and_shown_nowhere(
    command: str, setting: str, variables: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text(CANARY)
    output = run(command, **{name: str(file) if value == "FILE" else value for name, value in variables.items()})
    assert setting in output
    assert CANARY not in output


@requirement("open_files", "start.reasons")
@pytest.mark.parametrize("files", [5, 14, 16, 18, 31])
def test_a_start_that_may_open_too_few_files_names_the_limit(files: int) -> None:
    """Else the first library that fails for want of a file hides the cause, or the start never ends."""
    command = ["/bin/sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", sys.executable, "-m", "openapi_tool", "serve"]
    ended = subprocess.run(  # noqa: S603 - ours
        command,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={"PG_DSN": f"postgresql://{UNREACHABLE}/x"},
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        f"openapi-tool: this process may open {files} files only (EMFILE beyond that): raise the limit "
        "(ulimit -Hn) to 32 at least\n"
    )
