"""One embedded stack for the whole run; a database of its own, and fresh streams, for every test."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import shutil
import signal
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import asyncpg
import pytest
import typer.main
from hypothesis import HealthCheck, settings

from openapi_tool.jina.egress import tls_context
from openapi_tool.local.caller import Caller
from openapi_tool.local.database import prepare_database
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.stack import EmbeddedStack, kernel_schema
from openapi_tool.telemetry.calls import RECENT
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS
from openapi_tool.telemetry.redact import Redactor
from tests.forking import forking
from tests.support import ONE_WORKER, copy_clusters, delete_streams, dsn_of, make_role
from tests.waiting import WAIT_S

# A shell's background job ignores SIGINT, and its children inherit that; tests send it to them.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A forked child ignores variables of the interpreter, so tests/forking.py does not fork for them. Without a locale the
# interpreter uses UTF-8.
for _variable in list(os.environ):
    if _variable in ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED") or _variable.startswith(("LANG", "LC_")):
        del os.environ[_variable]


_BEGAN = time.monotonic()
_SUITE = "not alone and not thorough and not long"  # the marker expression of `make test`
PROJECT, AGENT = "proj_test", "agent_test"
TEMPLATE = "kernel_template"
_PLENTY_BYTES = 2_000_000_000

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection while tests are imported: it takes a tenth of the time and finds hardly anything."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude the objects that collection made from garbage collection, which would traverse them in every run."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Store the duration of a whole `make test` in seconds, for `make figures`."""
    whole = config.option.markexpr == _SUITE and config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole and not config.option.keyword and not hasattr(config, "workerinput") and config.cache is not None:
        config.cache.set("suite/seconds", round(time.monotonic() - _BEGAN))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo what a command that was run within this process has set: it would hide the lines of later tests.

    Nor does a test see the warnings and the calls of earlier ones, which a process keeps for `top`.
    """
    root, package = logging.getLogger(), logging.getLogger("openapi_tool")
    handlers, levels = root.handlers[:], (root.level, package.level)
    RECENT_WARNINGS.install(Redactor())  # forgets what it knows
    package.removeHandler(RECENT_WARNINGS)
    RECENT.clear()
    yield
    if (root.level, package.level) != levels:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        package.setLevel(levels[1])


@pytest.fixture(scope="session", autouse=True)
def forked_processes() -> Iterator[None]:
    """Fork the processes of this project, which saves their imports; copy PostgreSQL clusters, which saves `initdb`."""
    with TemporaryDirectory(dir=_fast_folder()) as folder, forking(model := Path(folder) / "cluster"):
        copy_clusters(model)
        yield


@pytest.fixture(scope="session", autouse=True)
def built_command() -> Iterator[None]:
    """Build the command line once for all calls of `CliRunner`, which takes 50 ms."""
    with mock.patch("typer.testing._get_command", functools.cache(typer.main.get_command)):
        yield


@pytest.fixture(scope="session", autouse=True)
def known_roots() -> Iterator[None]:
    """Cache TLS contexts by the file of additional CAs: reading the public CAs takes 30 ms."""
    cached = functools.cache(lambda file, _version: tls_context(file))  # `_version` changes when the file does

    def remembered(file: str | None) -> ssl.SSLContext:
        path = Path(file or "/nowhere")
        version = path.stat() if path.is_file() else None
        return cached(file, version and (version.st_ino, version.st_mtime_ns, version.st_size))

    with mock.patch("openapi_tool.bootstrap.tls_context", remembered):
        yield


@pytest.fixture(scope="session")
def stack() -> Iterator[EmbeddedStack]:
    with EmbeddedStack(base=_fast_folder()) as stack:
        asyncio.run(prepare_database(stack.postgres.dsn(), TEMPLATE, kernel_schema()))
        asyncio.run(make_role(stack.postgres.dsn(TEMPLATE)))
        yield stack


def _fast_folder() -> Path | None:
    """Return a folder in memory if much is free: creating a database writes 300 small files."""
    memory = Path("/dev/shm")  # noqa: S108 - the stack makes a folder of its own in it
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > _PLENTY_BYTES else None


@pytest.fixture
async def database(stack: EmbeddedStack) -> AsyncIterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    await prepare_database(stack.postgres.dsn(), name, None, TEMPLATE)
    yield name
    connection = await asyncpg.connect(stack.postgres.dsn())
    await connection.execute(f'drop database "{name}" with (force)')
    await connection.close()


@pytest.fixture(scope="session")
def v1r3_template(stack: EmbeddedStack) -> str:
    name = f"{TEMPLATE}_v1r3"
    asyncio.run(prepare_database(stack.postgres.dsn(), name, kernel_schema("v1r3")))
    asyncio.run(make_role(stack.postgres.dsn(name)))
    return name


@pytest.fixture
async def v1r3_database(stack: EmbeddedStack, v1r3_template: str) -> AsyncIterator[str]:
    """Create a database of protocol v1r3; yield its name."""
    name = f"test_{uuid.uuid4().hex}"
    await prepare_database(stack.postgres.dsn(), name, None, v1r3_template)
    yield name
    connection = await asyncpg.connect(stack.postgres.dsn())
    await connection.execute(f'drop database "{name}" with (force)')
    await connection.close()


@pytest.fixture
async def v1r3_caller(stack: EmbeddedStack, v1r3_database: str) -> AsyncIterator[Caller]:
    """A kernel of protocol v1r3, with a project and an agent in its roster."""
    async with Caller.connect(stack.postgres.dsn(v1r3_database), stack.nats.url, "v1r3") as caller:
        await caller.add_project(PROJECT)
        await caller.add_agent(PROJECT, AGENT)
        yield caller
        await delete_streams(caller)


@pytest.fixture
async def caller(stack: EmbeddedStack, database: str) -> AsyncIterator[Caller]:
    """A kernel of protocol v1r4, with a project and an agent in its roster."""
    stack.upstream.rules()
    stack.upstream.clear_requests()
    async with Caller.connect(stack.postgres.dsn(database), stack.nats.url) as caller:
        await caller.add_project(PROJECT)
        await caller.add_agent(PROJECT, AGENT)
        yield caller
        await delete_streams(caller)


StartExecutor = Callable[..., ExecutorProcess]


@pytest.fixture
def start_executor(stack: EmbeddedStack, database: str, caller: Caller) -> Iterator[StartExecutor]:
    """Return a function that starts a `serve` process; each must drain cleanly at the end of the test."""
    started: list[ExecutorProcess] = []

    def start(settings: Mapping[str, str] | None = None) -> ExecutorProcess:
        defaults = {
            "PG_DSN": dsn_of(stack, database),
            "OPENAPI_TOOL__SECRETS__ALLOWED_ENV": "SEARCH_API_KEY,TENANT_TOKEN",
            "OPENAPI_TOOL__SECRETS__ENV_PARAMETERS": "tenant_token",
            "TENANT_TOKEN": "tenant-value",
            "OPENAPI_TOOL__CACHE__TTL_S": "0",
            "OPENAPI_TOOL__ISOLATION__WORKERS": str(ONE_WORKER["workers"]),
        }
        executor = stack.executor(f"executor-{uuid.uuid4().hex[:8]}", database, {**defaults, **(settings or {})})
        executor.start()
        started.append(executor)
        return executor

    yield start
    for executor in started:
        was_alive = executor.process.alive
        code = executor.stop(WAIT_S)
        log = executor.log_text()
        assert "call.broken" not in log, log
        assert "Traceback" not in log, log
        assert not was_alive or code == 0, log


def search_tool(**options: Any) -> dict[str, Any]:
    return {
        "tool_name": "jina_search",
        "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.search",
        "options": {"jina": {"mode": "search"}, **options},
    }


def reader_tool(**options: Any) -> dict[str, Any]:
    return {
        "tool_name": "jina_reader",
        "target_subject": "cg.v1r4.{project_id}.{channel_id}.cmd.tool.jina.read",
        "options": {"jina": {"mode": "reader"}, **options},
    }
