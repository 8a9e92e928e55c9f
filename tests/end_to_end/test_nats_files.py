"""Files of the NATS connection that are replaced while the executor runs: CA, client certificate, nkey, password."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.servers import accepts, free_port
from openapi_tool.local.stack import EmbeddedStack
from tests.requirements import requirement
from tests.rotation import GuardedNats, Mount
from tests.support import dsn_of
from tests.waiting import WAIT_S

READY_S = 5.0
"""Longest time from the restart of the server to readiness."""

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Deployment:
    """The server, and an executor with these environment variables."""

    nats: GuardedNats
    environment: Mapping[str, str]
    executor: ExecutorProcess
    port: int

    def readiness(self) -> tuple[bool, str]:
        """Return whether the executor is ready, and why NATS is unavailable."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5) as answer:
                shown = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            shown = json.loads(error.read())
        return shown["ready"], shown["dependencies"]["nats"].get("reason", "")

    def wait(self, condition: Callable[[bool, str], bool], within_s: float = WAIT_S) -> str:
        """Wait for a state of readiness; return the reason."""
        give_up = time.monotonic() + within_s
        while not condition(*(state := self.readiness())):
            assert time.monotonic() < give_up, (state, self.executor.process.log_tail())
            time.sleep(_POLL_S)
        return state[1]

    def check(self) -> subprocess.CompletedProcess[str]:
        """Run `openapi-tool check`."""
        command = [sys.executable, "-m", "openapi_tool", "check"]
        return subprocess.run(  # noqa: S603 - our own code
            command, env={"PATH": os.environ["PATH"], **self.environment}, capture_output=True, text=True, check=False
        )

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.executor.log_text().splitlines() if line.startswith("{")]


@asynccontextmanager
async def deployed(stack: EmbeddedStack, database: str, folder: Path, login: str) -> AsyncIterator[Deployment]:
    """Yield a deployment that is ready; `login` is nkey or password."""
    nats, port = GuardedNats(stack, f"guarded-{folder.name}", Mount(folder / "mount")), free_port()
    settings = nats.settings(login) | {"PG_DSN": dsn_of(stack, database), "OPENAPI_TOOL__HEALTH__PORT": str(port)}
    executor = stack.executor(f"executor-{folder.name}", database, settings)
    made = Deployment(nats, settings | {"JINA_API_KEY": "a-key-of-the-test"}, executor, port)
    await asyncio.to_thread(nats.server.start)
    try:
        await asyncio.to_thread(executor.process.start, lambda: accepts(port))
        await asyncio.to_thread(made.wait, lambda ready, _: ready)
        yield made
    finally:
        stopped = await asyncio.to_thread(executor.stop)
        nats.server.stop()
    assert stopped == 0, executor.log_text()


@dataclass(frozen=True, slots=True)
class Rotation:
    """Change of the server, which returns the new files of the executor; `named` is in the reason until it has them."""

    change: Callable[[GuardedNats], dict[str, bytes]]
    named: str
    says: str


ROTATIONS = {
    "CA": Rotation(GuardedNats.new_ca, "nats.ca_file", "unable to get local issuer"),
    "client certificate": Rotation(
        GuardedNats.new_client_certificate, "nats.cert_file", "refuses the client certificate"
    ),
    "nkey": Rotation(GuardedNats.new_nkey, "nats.nkey_seed_file", "the login is refused"),
    "password": Rotation(GuardedNats.new_password, "nats.password_file", "the login is refused"),
}


@pytest.mark.parametrize("login", ["nkey", "password"])
@requirement("nats.rotation")
async def test_replaced_files_are_used_without_a_restart_and_old_ones_named(
    stack: EmbeddedStack, database: str, tmp_path: Path, login: str
) -> None:
    async with deployed(stack, database, tmp_path, login) as made:
        await asyncio.to_thread(_rotate, made, ["CA", "client certificate", login])


def _rotate(made: Deployment, names: list[str]) -> None:
    for name in names:
        rotation = ROTATIONS[name]
        files = rotation.change(made.nats)
        made.nats.restart()
        reason = made.wait(lambda _, why, named=rotation.named: named in why)  # type: ignore[misc]
        assert rotation.says in reason
        checked = made.check()
        assert checked.returncode == 1
        assert checked.stderr == ""
        [line] = [line for line in checked.stdout.splitlines() if line.startswith("nats: ")]
        assert rotation.named in line
        assert rotation.says in line
        made.nats.mount.replace(files)
        made.wait(lambda ready, _: ready, READY_S)
        assert made.check().returncode == 0
    changed = {name: ROTATIONS[name].change(made.nats) for name in names}
    made.nats.mount.replace({name: data for files in changed.values() for name, data in files.items()})
    made.nats.restart()
    made.wait(lambda ready, _: ready, READY_S)
    log = made.log()
    assert [line for line in log if line["action"] == "log"] == []
    logged = " ".join(line["message"] for line in log if line["action"] in ("nats.error", "health.changed"))
    assert all(ROTATIONS[name].named in logged for name in names)
    assert "is it a NATS server" not in logged


Unusable = tuple[Mapping[str, bytes | None], str]
UNUSABLE: Mapping[str, Unusable] = {
    "no CA": ({"ca.crt": None}, "nats.ca_file ({folder}/ca.crt): cannot be read: No such file or directory"),
    "an empty CA": ({"ca.crt": b""}, "nats.ca_file ({folder}/ca.crt): holds no certificate (PEM)"),
    "no certificate": ({"tls.crt": None}, "nats.cert_file ({folder}/tls.crt): cannot be read"),
    "a broken certificate": ({"tls.crt": b"no PEM"}, "nats.cert_file ({folder}/tls.crt): holds no certificate (PEM)"),
    "no key": ({"tls.key": None}, "nats.key_file ({folder}/tls.key): cannot be read"),
    "a broken key": ({"tls.key": b"no PEM"}, "nats.key_file ({folder}/tls.key): holds no unencrypted private key"),
    "no seed": ({"user.nk": None}, "nats.nkey_seed_file ({folder}/user.nk): cannot be read"),
    "a broken seed": ({"user.nk": b"SUABC"}, "nats.nkey_seed_file ({folder}/user.nk): holds no seed of a user"),
}


@requirement("nats.rotation")
async def test_a_file_that_cannot_be_used_is_named_until_it_is_replaced(
    stack: EmbeddedStack, database: str, tmp_path: Path
) -> None:
    async with deployed(stack, database, tmp_path, "nkey") as made:
        await asyncio.to_thread(_break_each_file, made)


def _break_each_file(made: Deployment) -> None:
    good = dict(made.nats.mount.files)
    other = trustme.CA().issue_cert("another").private_key_pem.bytes()
    pair: Unusable = {"tls.key": other}, "nats.key_file ({folder}/tls.key): is not the key of"
    for changes, expected in (*UNUSABLE.values(), pair):
        made.nats.mount.replace(changes)
        made.nats.restart()
        text = expected.format(folder=made.nats.mount.folder)
        made.wait(lambda _, why, text=text: text in why)  # type: ignore[misc]
        made.nats.mount.replace(good)
        made.wait(lambda ready, _: ready, READY_S)


@requirement("nats.rotation", "start.reasons")
async def test_files_may_be_replaced_while_the_start_waits(stack: EmbeddedStack, database: str, tmp_path: Path) -> None:
    async with deployed(stack, database, tmp_path, "nkey") as made:
        await asyncio.to_thread(_start_with_the_old_ca, made)


def _start_with_the_old_ca(made: Deployment) -> None:
    made.executor.stop()
    files = ROTATIONS["CA"].change(made.nats)
    made.nats.restart()
    made.executor.process.start(lambda: accepts(made.port))
    made.wait(lambda _, why: "nats.ca_file" in why)
    made.nats.mount.replace(files)
    made.wait(lambda ready, _: ready)


@requirement("nats.rotation", "outage")
async def test_a_server_that_was_killed_is_not_taken_for_another_program(
    stack: EmbeddedStack, database: str, tmp_path: Path
) -> None:
    async with deployed(stack, database, tmp_path, "nkey") as made:
        await asyncio.to_thread(_kill, made)


def _kill(made: Deployment) -> None:
    assert made.nats.server.process is not None
    made.nats.server.process.kill()
    reason = made.wait(lambda _, why: "connection refused" in why)
    made.nats.server.start()
    made.wait(lambda ready, _: ready, READY_S)
    logged = [line["message"] for line in made.log() if line["action"] in ("nats.error", "health.changed")]
    assert not [message for message in (reason, *logged) if "is it a NATS server" in message], logged
