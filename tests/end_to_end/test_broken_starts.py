"""Start-ups that cannot work: what, where and the remedy are named once, in the log and in the health report."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import pytest

from openapi_tool.bootstrap import build_bootstrap
from openapi_tool.local import nats_server
from openapi_tool.local.caller import prepare_database
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.service import assemble
from openapi_tool.settings import Settings
from openapi_tool.telemetry.health import NATS, POSTGRES
from tests.requirements import requirement

NOBODY = "127.0.0.1:1"
CHECK_DSN, CHECK_SERVERS = "check postgres.dsn (PG_DSN)", "check nats.servers (NATS_SERVERS)"


async def reason(dependency: str, dsn: str, servers: str, caplog: pytest.LogCaptureFixture) -> str:
    """Begin to start, for a few tries; return why the dependency is unavailable, which one line of the log says."""
    settings = Settings(postgres={"dsn": dsn, "timeout_s": 0.5}, nats={"servers": servers})
    bootstrap = build_bootstrap(settings, {"JINA_API_KEY": "a-key-of-the-test"})
    caplog.set_level(logging.INFO, "openapi_tool")
    part = bootstrap.health.dependencies[dependency]
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(assemble(stack, bootstrap, None))
        async with asyncio.timeout(30):
            while not part.reason:  # noqa: ASYNC110 - a record has no event
                await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        starting.cancel()
        await asyncio.wait([starting])
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == [f"{dependency} is unavailable: {part.reason}"]
    return part.reason


@contextmanager
def nats_without_jetstream() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([nats_server._binary(), "-a", "127.0.0.1", "-p", str(port)])  # noqa: SLF001, S603 - ours
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def address_of(dsn: str) -> str:
    return dsn.rpartition("@")[2].partition("/")[0]


@requirement("start.reasons")
@pytest.mark.parametrize(
    ("address", "says"),
    [(NOBODY, "connection refused"), ("no.such.host.invalid", "the host's name cannot be resolved")],
)
async def test_a_database_that_cannot_be_reached(
    stack: EmbeddedStack, caplog: pytest.LogCaptureFixture, address: str, says: str
) -> None:
    found = await reason(POSTGRES, f"postgresql://user@{address}/kernel", stack.nats.url, caplog)
    where = address if ":" in address else f"{address}:5432"
    assert found == f"PostgreSQL at {where} (database kernel): {says}; {CHECK_DSN}"


@requirement("start.reasons")
async def test_a_database_or_a_table_that_is_not_there(stack: EmbeddedStack, caplog: pytest.LogCaptureFixture) -> None:
    where = address_of(stack.postgres.dsn())
    found = await reason(POSTGRES, stack.postgres.dsn("nowhere"), stack.nats.url, caplog)
    assert found.startswith(f'PostgreSQL at {where} (database nowhere): database "nowhere" does not exist')
    assert found.endswith("check the database's name in postgres.dsn (PG_DSN)")
    caplog.clear()
    await prepare_database(stack.postgres.dsn(), "without_tables", None)
    found = await reason(POSTGRES, stack.postgres.dsn("without_tables"), stack.nats.url, caplog)
    assert found.startswith(f"PostgreSQL at {where} (database without_tables): missing: table ")
    assert "resource.project_agents" in found
    assert "check that it is the kernel's database" in found
    assert "sql grants" not in found


@requirement("start.reasons")
async def test_nats_in_the_place_of_postgresql(stack: EmbeddedStack, caplog: pytest.LogCaptureFixture) -> None:
    address = stack.nats.url.partition("://")[2]
    found = await reason(POSTGRES, f"postgresql://user@{address}/kernel", stack.nats.url, caplog)
    assert found.startswith(f"PostgreSQL at {address} (database kernel): it does not speak PostgreSQL's protocol")
    assert found.endswith(CHECK_DSN)


@requirement("start.reasons")
async def test_nats_that_nobody_answers_or_that_is_postgresql(
    stack: EmbeddedStack, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    dsn = stack.postgres.dsn(database)
    found = await reason(NATS, dsn, f"nats://{NOBODY}", caplog)
    assert found == f"NATS at {NOBODY}: connection refused; {CHECK_SERVERS}"
    caplog.clear()
    found = await reason(NATS, dsn, f"nats://{address_of(dsn)}", caplog)
    assert found == f"NATS at {address_of(dsn)}: no answer in time: is it a NATS server? {CHECK_SERVERS}"


@requirement("start.reasons")
async def test_nats_without_jetstream(stack: EmbeddedStack, database: str, caplog: pytest.LogCaptureFixture) -> None:
    with nats_without_jetstream() as address:
        found: Any = await reason(NATS, stack.postgres.dsn(database), f"nats://{address}", caplog)
    assert found.startswith(f"NATS: JetStream is not enabled on {address}, or not for this account")
