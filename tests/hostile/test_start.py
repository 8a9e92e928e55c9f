"""What a wrong setting, or somebody on the way, gets to see of a secret before anything runs."""

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
    """A connection string whose password has something between its halves."""
    return {"PG_DSN": f"postgresql://user:{HEAD}{between}{TAIL}@127.0.0.1:1/kernel"}


Outcome = tuple[int | None, str]
"""Exit code, None for what did not end, and output."""


@dataclass(frozen=True)
class Start:
    """A command that ends with 2 because of a variable; `named` stands in what it says."""

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
    "a port of libpq's": Start({"PG_DSN": DATABASE, "PGPORT": f"{HEAD}{TAIL}"}, named="PGPORT"),
    "a section that is no JSON": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__NATS": f'{{"token": "{HEAD}{TAIL}"'}, named="OPENAPI_TOOL__NATS"
    ),
    "a server without brackets": Start(
        {"PG_DSN": DATABASE, "NATS_SERVERS": f"nats://{HEAD}:{TAIL}@fe80::1:4222"}, named="nats.servers"
    ),
    "a seed that is none": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__NATS__NKEY_SEED_FILE": "seed"},
        named="nkey_seed_file",
        files={"seed": f"SU{HEAD}{TAIL}"},
    ),
    "credentials that are none": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__NATS__CREDENTIALS_FILE": "creds"},
        named="credentials_file",
        files={"creds": f"-----BEGIN NATS USER JWT-----\n{HEAD}{TAIL}\n"},
    ),
    "a proxy that is none": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__EGRESS__PROXY": f"http://u:{HEAD}/{TAIL}@h:1"}, named="egress.proxy"
    ),
    "the DSN for tools": Start({"PG_DSN": DATABASE, "OPENAPI_TOOL__SECRETS__ALLOWED_ENV": "PG_DSN"}, named="PG_DSN"),
    "a setting of NATS for tools": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__SECRETS__ALLOWED_ENV": "nats_servers"}, named="nats_servers"
    ),
    "a setting of ours for tools": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__TOOLS__JINA__ENVS": '{"api_key": "OPENAPI_TOOL__SESSION__KEY"}'},
        named="OPENAPI_TOOL__SESSION__KEY",
    ),
    "a proxy for tools": Start(
        {"PG_DSN": DATABASE, "OPENAPI_TOOL__TOOLS__JINA__SERVICES": '{"jina": {"envs": {"api_key": "HTTPS_PROXY"}}}'},
        named="HTTPS_PROXY",
    ),
    "a page's parameter for a secret": Start(
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
    except subprocess.TimeoutExpired as endless:  # it took the setting and waits for what is not there
        return None, (endless.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Outcome]]:
    """Every start, two at a time: each takes a second, most of it imports."""
    folders = {name: tmp_path_factory.mktemp("start") for name in STARTS}
    with ThreadPoolExecutor(2) as workers:
        running = {name: workers.submit(_run, start, folders[name]) for name, start in STARTS.items()}
        yield {name: done.result() for name, done in running.items()}


@pytest.mark.parametrize("name", STARTS)
@requirement("settings.errors")
def test_a_wrong_setting_is_named_and_shows_nothing(outcomes: Mapping[str, Outcome], name: str) -> None:
    code, said = outcomes[name]
    assert code == 2, said
    assert "Traceback" not in said
    assert HEAD not in said
    assert TAIL not in said
    assert STARTS[name].named in said, said


class Listener:
    """A NATS server that offers no TLS, or somebody on the way who says so; keeps what it hears."""

    def __init__(self, info: Mapping[str, object]) -> None:
        self._info = {"server_id": "x", "version": "2.11.0", "max_payload": 1_000_000, "headers": True, **info}
        self.heard = b""
        self._connections = 0
        self._left = asyncio.Event()
        self._left.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say what a server says first, and listen."""
        self._connections += 1
        self._left.clear()
        writer.write(b"INFO " + json.dumps(self._info).encode() + b"\r\n")
        with suppress(OSError):
            while data := await reader.read(65_536):
                self.heard += data
                if data.startswith(b"CONNECT"):
                    writer.write(b"PONG\r\n")
        writer.close()
        self._connections -= 1
        if not self._connections:
            self._left.set()

    async def left(self) -> None:
        """Wait until nobody is connected."""
        await self._left.wait()


@pytest.mark.parametrize(
    ("url", "tls", "info"),
    [
        ("tls://127.0.0.1", "false", {}),
        ("nats://127.0.0.1", "true", {}),
        ("tls://127.0.0.1", "false", {"tls_required": False, "tls_available": False}),
        ("nats://127.0.0.1", "true", {"connect_urls": ["127.0.0.1:1"]}),
    ],
    ids=["scheme", "setting", "stripped", "announced"],
)
@requirement("settings.errors")
async def test_tls_that_was_asked_for_is_tls_or_nothing(url: str, tls: str, info: Mapping[str, object]) -> None:
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
            said, _ = await process.communicate()
            await listener.left()
    assert HEAD.encode() not in listener.heard
    assert TAIL.encode() not in listener.heard
    assert process.returncode == 2
    assert b"TLS" in said, said
    assert TAIL.encode() not in said
