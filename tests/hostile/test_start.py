"""Secrets at the start: neither the error for an invalid setting nor a network intermediary shows one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.requirements import requirement

HEAD, TAIL = "canaryhead7f3a", "canarytail9c1b"
DATABASE = f"postgresql://user:{HEAD}{TAIL}@127.0.0.1:1/kernel"
SERVE, LETTERS = ("serve",), ("deadletters", "list")
APPLY = ("tools", "apply", "config/tools/jina_search.yaml", "--project", "p", "--db", "--yes")
TIMEOUT_S = 15.0


def dsn(between: str) -> dict[str, str]:
    """Return PG_DSN with a password that has `between` between its two halves."""
    return {"PG_DSN": f"postgresql://user:{HEAD}{between}{TAIL}@127.0.0.1:1/kernel"}


Outcome = tuple[int | None, str]
"""Exit code (None after a timeout) and output."""


@dataclass(frozen=True)
class Start:
    """Command that must exit with 2 because of a variable; `named` must occur in its output."""

    environment: Mapping[str, str]
    command: Sequence[str] = SERVE
    named: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


STARTS: Mapping[str, Start] = {
    "a slash in the password": Start(dsn("/"), named="postgres.dsn"),
    "a hash in the password": Start(dsn("#"), named="postgres.dsn"),
    "a question mark in the password": Start(dsn("?x"), named="postgres.dsn"),
    "a bracket in the password": Start(dsn("]/["), named="postgres.dsn"),
    "a slash, seen by tools apply": Start(dsn("/"), APPLY, "postgres.dsn"),
    "a hash, seen by deadletters": Start(dsn("#"), LETTERS, "postgres.dsn"),
    "a port that is a password": Start({"PG_DSN": f"postgresql://127.0.0.1:{HEAD}{TAIL}/kernel"}, named="postgres.dsn"),
    "another scheme": Start({"PG_DSN": f"postgre://user:{HEAD}{TAIL}@host/kernel"}, named="postgres.dsn"),
    "a password as port in libpq's variable": Start({"PG_DSN": DATABASE, "PGPORT": f"{HEAD}{TAIL}"}, named="PGPORT"),
    "a section that is not JSON": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__NATS": f'{{"token": "{HEAD}{TAIL}"'}, named="OPENAPI_TOOL__NATS"
    ),
    "a server without brackets": Start(
        {"PG_DSN": DATABASE, "NATS_SERVERS": f"nats://{HEAD}:{TAIL}@fe80::1:4222"}, named="nats.servers"
    ),
    "an invalid seed": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__NATS__NKEY_SEED_FILE": "seed"},
        named="nkey_seed_file",
        files={"seed": f"SU{HEAD}{TAIL}"},
    ),
    "an invalid credentials file": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__NATS__CREDENTIALS_FILE": "creds"},
        named="credentials_file",
        files={"creds": f"-----BEGIN NATS USER JWT-----\n{HEAD}{TAIL}\n"},
    ),
    "an invalid proxy URL": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__EGRESS__PROXY": f"http://u:{HEAD}/{TAIL}@h:1"}, named="egress.proxy"
    ),
    "PG_DSN in allowed_env": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__SECRETS__ALLOWED_ENV": "PG_DSN"}, named="PG_DSN"
    ),
    "nats_servers in allowed_env": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__SECRETS__ALLOWED_ENV": "nats_servers"}, named="nats_servers"
    ),
    "a setting of the executor as a tool's key": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__TOOLS__JINA__ENVS": '{"api_key": "OPENAPI_TOOL__SESSION__KEY"}'},
        named="OPENAPI_TOOL__SESSION__KEY",
    ),
    "HTTPS_PROXY as a tool's key": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__TOOLS__JINA__SERVICES": '{"jina": {"envs": {"api_key": "HTTPS_PROXY"}}}'},
        named="HTTPS_PROXY",
    ),
    "an upstream parameter in env_parameters": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__SECRETS__ENV_PARAMETERS": "url"}, named="env_parameters"
    ),
}


def _run(start: Start, folder: Path) -> Outcome:
    for name, content in start.files.items():
        (folder / name).write_text(content)
    environment = {
        name: str(folder / value) if value in start.files else value for name, value in start.environment.items()
    }
    try:
        done = subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-m", "openapi_tool", *start.command],
            env={"PATH": os.environ["PATH"], **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as timeout:  # it accepted the setting and waits for a server
        return None, (timeout.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Outcome]]:
    """Yield the outcome of each start; two run at a time, because each takes a second, most of it imports."""
    folders = {name: tmp_path_factory.mktemp("start") for name in STARTS}
    with ThreadPoolExecutor(2) as workers:
        running = {name: workers.submit(_run, start, folders[name]) for name, start in STARTS.items()}
        yield {name: done.result() for name, done in running.items()}


@pytest.mark.parametrize("name", STARTS)
@requirement("settings.errors")
def test_error_names_the_setting_and_shows_no_secret(outcomes: Mapping[str, Outcome], name: str) -> None:
    code, output = outcomes[name]
    assert code == 2, output
    assert "Traceback" not in output
    assert HEAD not in output
    assert TAIL not in output
    assert STARTS[name].named in output, output


class Listener:
    """NATS server without TLS, or an intermediary that strips it; records what it receives in `received`."""

    def __init__(self, info: Mapping[str, object]) -> None:
        self._info = {"server_id": "x", "version": "2.11.0", "max_payload": 1_000_000, "headers": True, **info}
        self.received = b""
        self._connections = 0
        self._left = asyncio.Event()
        self._left.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send INFO, reply to CONNECT with PONG, and record."""
        self._connections += 1
        self._left.clear()
        writer.write(b"INFO " + json.dumps(self._info).encode() + b"\r\n")
        with suppress(OSError):
            while data := await reader.read(65_536):
                self.received += data
                if data.startswith(b"CONNECT"):
                    writer.write(b"PONG\r\n")
        writer.close()
        self._connections -= 1
        if not self._connections:
            self._left.set()

    async def left(self) -> None:
        """Wait until no client is connected."""
        await self._left.wait()


@pytest.mark.parametrize(
    ("url", "tls", "info"),
    [
        ("tls://127.0.0.1", "false", {}),
        ("nats://127.0.0.1", "true", {}),
        ("tls://127.0.0.1", "false", {"tls_required": False, "tls_available": False}),
        # The server announces a further one of its cluster.
        ("nats://127.0.0.1", "true", {"connect_urls": ["127.0.0.1:1"]}),
    ],
    ids=["scheme", "setting", "stripped", "announced"],
)
@requirement("settings.errors")
async def test_requested_tls_is_never_downgraded(url: str, tls: str, info: Mapping[str, object]) -> None:
    listener = Listener(info)
    async with await asyncio.start_server(listener.serve, "127.0.0.1", 0) as server:
        environment = {
            "PATH": os.environ["PATH"],
            "PG_DSN": DATABASE,
            "NATS_SERVERS": f"{url}:{server.sockets[0].getsockname()[1]}",
            "OPENAPI_TOOL__NATS__TLS": tls,
            "OPENAPI_TOOL__NATS__USER": HEAD,
            "OPENAPI_TOOL__NATS__PASSWORD": TAIL,
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "openapi_tool", "deadletters", "list"),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
            await listener.left()
    assert HEAD.encode() not in listener.received
    assert TAIL.encode() not in listener.received
    assert process.returncode == 2
    assert b"TLS" in output, output
    assert TAIL.encode() not in output
