"""Processes of a hostile run, and actions and observations of an attacker."""

from __future__ import annotations

import asyncio
import secrets
import sys
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

import orjson
import psutil
from nats.js.errors import NotFoundError

from openapi_tool.kernel.jetstream.dead_letters import STREAM as DEAD_LETTERS
from openapi_tool.local.caller import Caller, ResultRows
from openapi_tool.local.executor import ExecutorProcess
from openapi_tool.local.guard import Guard
from openapi_tool.local.placed_call import VERSION, PlacedCall
from openapi_tool.local.servers import ServerProcess, free_port
from openapi_tool.local.stack import EmbeddedStack
from openapi_tool.protocol.subjects import command_stream, default_durable
from tests.hostile.executor import PROBE_VARIABLE, SEARCH_PORT_VARIABLE, LagProbe
from tests.hostile.upstream import RECEIVED
from tests.hostile.victim import VictimProcess
from tests.support import dsn_of

_FORGET_PEAK = "5"  # proc(5): writing this to clear_refs resets VmHWM


@dataclass(frozen=True, slots=True)
class Vitals:
    """State of the executor after a case: bytes, seconds, and whether the same process still runs."""

    peak_bytes: int
    lag_s: float
    log_bytes: int
    alive: bool


class Stage:
    """All processes of a run. Call `begin` before and `vitals` after each case.

    After a case that `has_failed` the executor is replaced. In a `short` run attacks have an eighth of the number and
    size of `make hostile`. The kernel is of protocol `version`.
    """

    def __init__(
        self,
        stack: EmbeddedStack,
        database: str,
        settings: Mapping[str, str] | None = None,
        *,
        short: bool = False,
        version: str = VERSION,
    ) -> None:
        self.short = short
        self.version = version
        self.stack = stack
        self.database = database
        self.has_failed = False
        self._exits = ExitStack()
        self._guard = Guard()
        self._exits.callback(self._guard.close)
        self.folder = stack.folder / f"hostile-{uuid.uuid4().hex[:8]}"
        self.answers = self.folder / "answers"
        self.answers.mkdir(parents=True)
        self.health_port = free_port()
        self.secrets = {
            **{name: f"{name.lower()}-{secrets.token_hex(12)}" for name in ("JINA_API_KEY", "SEARCH_API_KEY")},
            "TENANT_TOKEN": f"tenant-{secrets.token_hex(12)}",
            "PGPASSWORD": f"libpq-{secrets.token_hex(12)}",
        }
        self.probe = LagProbe(self.folder / "lag")
        self._settings = dict(settings or {})

    def __enter__(self) -> Self:
        try:
            self.upstream_port, self.search_port = self._start_upstream("upstream"), self._start_upstream("searches")
            dsn = self.stack.postgres.dsn(self.database)
            victim = VictimProcess(dsn, self.stack.nats.url, self.version, self._guard)
            self.victim = self._exits.enter_context(victim)
            self.executor = self._executor({})
            self.executor.start()
        except BaseException:
            self._exits.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _start_upstream(self, name: str) -> int:
        """Start an upstream and return its port."""
        command: list[str | Path] = [
            *(sys.executable, "-m", "tests.hostile.upstream", "--folder", self.answers),
            *("--certificate", self.stack.certificates.server),
        ]
        log = self.folder / f"{name}.log"
        upstream = ServerProcess(f"the hostile upstream ({name})", command, self._guard, log)
        upstream.start(lambda: log.read_text().endswith("\n"))
        return int(log.read_text().splitlines()[0])

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the executor and of the command line."""
        return {
            "PG_DSN": dsn_of(self.stack, self.database),
            "NATS_SERVERS": self.stack.nats.url,
            "OPENAPI_TOOL__PROTOCOL__VERSION": self.version,
            "SSL_CERT_FILE": str(self.stack.certificates.ca),
            "OPENAPI_TOOL__SECRETS__ALLOWED_ENV": "SEARCH_API_KEY,TENANT_TOKEN",
            "OPENAPI_TOOL__HEALTH__PORT": str(self.health_port),
            "OPENAPI_TOOL__RETRY__INITIAL_BACKOFF_S": "0.05",
            **self.secrets,
            **self._settings,
        }

    def _executor(self, settings: Mapping[str, str]) -> ExecutorProcess:
        own = {PROBE_VARIABLE: str(self.folder / "lag"), SEARCH_PORT_VARIABLE: str(self.search_port)}
        environment = {**self.environment, **own, **settings}
        return ExecutorProcess(
            "executor", self.folder, self._guard, environment, self.upstream_port, "tests.hostile.executor"
        )

    def restart(self, settings: Mapping[str, str] | None = None) -> None:
        """Replace the executor by a new one with additional settings."""
        if self.executor.process.alive:
            self.executor.process.kill()
        self.executor = self._executor(settings or {})
        self.executor.start()

    def begin(self) -> None:
        """Reset all measurements."""
        self._pid = self.executor.process.pid
        self._log_from = self._log_size()
        self.received_from = self._received_size()
        self.probe.forget()
        self._status("clear_refs").write_text(_FORGET_PEAK)

    def vitals(self) -> Vitals:
        """Return the measurements since `begin`."""
        alive = self.executor.process.alive and self.executor.process.pid == self._pid
        peak = self._peak_bytes() if alive else 0
        return Vitals(peak, self.probe.worst_s, self._log_size() - self._log_from, alive)

    def _status(self, name: str) -> Path:
        return Path("/proc") / str(self._pid) / name

    def _peak_bytes(self) -> int:
        """Return the peak resident memory since `begin`, as counted by Linux."""
        lines = self._status("status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    def resident_bytes(self) -> int:
        """Return the current resident memory."""
        return int(psutil.Process(self.executor.process.pid).memory_info().rss)

    def log_text(self) -> str:
        """Return the executor's log since `begin`."""
        with self.executor.process.log.open("rb") as log:
            log.seek(self._log_from)
            return log.read().decode(errors="replace")

    def received(self) -> bytes:
        """Return the attackers' requests that the upstream received since `begin`."""
        path = self.answers / RECEIVED
        return path.read_bytes()[self.received_from :] if path.exists() else b""

    def _received_size(self) -> int:
        path = self.answers / RECEIVED
        return path.stat().st_size if path.exists() else 0

    def _log_size(self) -> int:
        return self.executor.process.log.stat().st_size


# The attacker: its commands, calls and definitions, and observations of their effects.


PROJECT, AGENT = "proj_attacker", "agent_attacker"
ANSWER_S = 20.0
_POLL_S = 0.01
_NUMBERS = count()
_CONNECT = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"protocol":1,"lang":"raw","version":"0"}\r\n'


def hpub(subject: bytes, headers: bytes | None, data: bytes = b"{}") -> bytes:
    """Return a frame of the NATS protocol with any bytes; without headers if `headers` is None."""
    if headers is None:
        return b"PUB %b %d\r\n%b\r\n" % (subject, len(data), data)
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, len(headers), len(headers) + len(data), headers, data)


class Scene:
    """One attacker on a stage."""

    def __init__(self, stage: Stage, caller: Caller) -> None:
        self.stage = stage
        self.caller = caller
        self.subject = f"cg.{caller.version}.{PROJECT}.public.cmd.tool.jina.search"
        self.doorbells = f"cg.{caller.version}.{PROJECT}.*.cmd.agent.*.wakeup"
        self._letters_from = 0
        self._log_from = 0

    @classmethod
    async def open(cls, stage: Stage, caller: Caller) -> Scene:
        """Create an attacker with a project; reset all measurements."""
        await caller.set_up_project(PROJECT, AGENT, [])
        scene = cls(stage, caller)
        await caller.listen(scene.doorbells)
        stage.begin()
        await scene.begin_round()
        return scene

    async def begin_round(self) -> None:
        """Reset dead letters and log: earlier rounds may have filled this project's share. Delete settled commands.

        Settled commands of a flood would otherwise fill gigabytes of page cache. On a virtual machine, which gets each
        page from its host, that doubles the CPU time of the server and so falsifies the measurement.
        """
        jetstream = self.caller.client.jetstream()
        with suppress(NotFoundError):
            await jetstream.purge_stream(DEAD_LETTERS)
        stream, durable = self._durable
        with suppress(NotFoundError):
            if floor := (await jetstream.consumer_info(stream, durable)).ack_floor:
                await jetstream.purge_stream(stream, seq=floor.stream_seq + 1)
        self._letters_from = await self.last_letter()
        self._log_from = len(self.stage.log_text())

    def scaled(self, number: int) -> int:
        """Return the number, or an eighth of it in a short run."""
        return number // 8 if self.stage.short else number

    # Definitions and calls

    async def define(self, options: Any = None, parameters: Any = None, name: str = "") -> str:
        """Store a definition without a lint; return its name."""
        name = name or f"tool_{next(_NUMBERS)}"
        tool = {
            "tool_name": name,
            "target_subject": f"cg.{self.caller.version}.{{project_id}}.{{channel_id}}.cmd.tool.jina.x",
            "options": {"jina": {"mode": "search"}} if options is None else options,
            "parameters": {} if parameters is None else parameters,
        }
        await self.caller.add_tool(PROJECT, tool)
        return name

    async def define_text(self, options: str | None = None, parameters: str = "{}") -> str:
        """Store a definition from JSON texts, which may contain what no library would write."""
        name = await self.define()
        await self.caller.database.execute(
            "update resource.tools set options = coalesce($3::text::jsonb, options), parameters = $4::text::jsonb "
            "where project_id = $1 and tool_name = $2",
            PROJECT,
            name,
            options,
            parameters,
        )
        return name

    async def place(self, tool: str, arguments: Any, **changes: Any) -> PlacedCall:
        """Write the rows of a call and publish its command."""
        return await self.caller.place(PROJECT, AGENT, tool, arguments, **changes)

    async def call_text(self, tool: str, arguments: str) -> ResultRows:
        """Place a call whose arguments are a JSON text; return its answer."""
        call = await self.place(tool, {}, publish=False)
        await self.caller.database.execute(
            "update cards set content = jsonb_set(content, '{arguments}', $2::text::jsonb) where card_id = $1",
            call.card_id,
            arguments,
        )
        await self.caller.publish(call)
        return await self.caller.result(call, ANSWER_S)

    async def call(self, tool: str, arguments: Any, answer_s: float = ANSWER_S, **changes: Any) -> ResultRows:
        """Place a call; return its answer. Raises TimeoutError."""
        return await self.caller.result(await self.place(tool, arguments, **changes), answer_s)

    async def calls(self, number: int, tool: str, arguments: Any, answer_s: float = ANSWER_S) -> list[ResultRows]:
        """Place `number` calls at once; `{n}` in an argument becomes the call's number."""
        return await asyncio.gather(*(self.call(tool, _numbered(arguments), answer_s) for _ in range(number)))

    async def search(self, query: str, **jina: Any) -> ResultRows:
        """Define a search tool and call it."""
        tool = await self.define({"jina": {"mode": "search", **jina}})
        return await self.call(tool, {"query": query})

    async def read(self, arguments: Mapping[str, Any] | str, **options: Any) -> ResultRows:
        """Define a reader tool and call it."""
        given = {"url": arguments} if isinstance(arguments, str) else dict(arguments)
        many = {"tool": "jina.read_many"} if "urls" in given else {}
        tool = await self.define({"jina": {"mode": "reader", **many}, **options})
        return await self.call(tool, given)

    # Raw frames

    async def publish_raw(self, *frames: bytes) -> bytes:
        """Send raw frames; return the server's output until it has read all of them (an -ERR closes the connection)."""
        host, _, port = self.stage.stack.nats.url.removeprefix("nats://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        output = b""
        try:
            async with asyncio.timeout(ANSWER_S):
                await reader.readline()
                writer.write(_CONNECT)
                for frame in frames:
                    writer.write(frame)
                    await writer.drain()
                writer.write(b"PING\r\n")
                while not output.endswith(b"PONG\r\n") and (line := await reader.readline()):
                    output += line
        finally:
            writer.close()
        return output

    # Observations

    @property
    def _durable(self) -> tuple[str, str]:
        """Return the names of the command stream and of the executor's durable."""
        version = self.caller.version
        return command_stream(version)[0], default_durable(version, "jina")

    async def settled(self) -> None:
        """Wait until all current commands are settled. Raises TimeoutError."""
        jetstream = self.caller.client.jetstream()
        stream, durable = self._durable
        last = (await jetstream.stream_info(stream)).state.last_seq
        async with asyncio.timeout(ANSWER_S):
            while True:
                info = await jetstream.consumer_info(stream, durable)
                if not info.num_pending and not info.num_ack_pending:
                    return
                if info.ack_floor and info.ack_floor.stream_seq >= last:  # others continue to send
                    return
                await asyncio.sleep(_POLL_S)

    async def letters(self, at_least: int = 1) -> list[dict[str, Any]]:
        """Return this round's dead letters once there are `at_least` that many. Raises TimeoutError."""
        async with asyncio.timeout(ANSWER_S):
            while (last := await self.last_letter()) < self._letters_from + at_least:  # noqa: ASYNC110 - another process
                await asyncio.sleep(_POLL_S)
        jetstream = self.caller.client.jetstream()
        messages = [await jetstream.get_msg(DEAD_LETTERS, n) for n in range(self._letters_from + 1, last + 1)]
        return [orjson.loads(message.data or b"") for message in messages]

    async def last_letter(self) -> int:
        """Return the sequence of the last dead letter; 0 if there is none."""
        try:
            return int((await self.caller.client.jetstream().stream_info(DEAD_LETTERS)).state.last_seq)
        except NotFoundError:
            return 0

    def sent(self) -> bytes:
        """Return the upstream requests of attackers."""
        return self.stage.received()

    async def received(self, text: bytes, times: int) -> None:
        """Wait until the upstream's requests contain `text` this many times. Raises TimeoutError."""
        async with asyncio.timeout(ANSWER_S):
            while self.sent().count(text) < times:  # noqa: ASYNC110 - another process
                await asyncio.sleep(_POLL_S)

    def log(self) -> str:
        """Return the executor's log of this round."""
        return self.stage.log_text()[self._log_from :]


def _numbered(arguments: Any) -> Any:
    number = str(next(_NUMBERS))
    if not isinstance(arguments, dict):
        return arguments
    return {name: text.replace("{n}", number) if isinstance(text, str) else text for name, text in arguments.items()}


def content_of(answer: ResultRows) -> Mapping[str, Any]:
    """Return the content of the result card."""
    content: Mapping[str, Any] = answer.card["content"]
    return content


def assert_failed(answer: ResultRows, *codes: str) -> str:
    """Assert a typed failure with a message that is short enough for a model; return the message."""
    content = content_of(answer)
    assert content["status"] != "success", content
    error = content["error"]
    assert error["code"] in codes, error
    assert len(error["message"]) < 6_000, len(error["message"])
    assert len(orjson.dumps(content)) < 64_000, len(orjson.dumps(content))
    return str(error["message"])


def assert_succeeded(answer: ResultRows) -> str:
    """Assert a success; return its text."""
    content = content_of(answer)
    assert content["status"] == "success", content["error"]
    return str(content["result"])
