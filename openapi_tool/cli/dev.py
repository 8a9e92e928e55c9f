"""`openapi-tool dev`."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from openapi_tool.cli.dev_executor import DevStatistics, dev_page
from openapi_tool.cli.embedded import extra_needed, running, this_program
from openapi_tool.cli.options import UpstreamChoice
from openapi_tool.cli.output import allowed_style, fail, print_line, print_status
from openapi_tool.local.caller import ERRORS, Caller
from openapi_tool.local.dev import AGENT, PROJECT, log_entries, prepare
from openapi_tool.local.dev_state import (
    ClaimedState,
    DevError,
    announce,
    automatic_names,
    claimed_state,
    database_of,
    persistent_folder,
    running_stacks,
    state_path,
)
from openapi_tool.local.requested_call import tools_of
from openapi_tool.nats_records.replica_statistics import gather_stats
from openapi_tool.protocol.cards import as_model_reads
from openapi_tool.protocol.dialect import DEFAULT_VERSION, ProtocolVersion
from openapi_tool.settings import PREFIX
from openapi_tool.tools.wording import counted, one_line

if TYPE_CHECKING:
    from openapi_tool.cli.dev_executor import DevSettings
    from openapi_tool.local.executor import ExecutorProcess
    from openapi_tool.local.stack import EmbeddedStack

_FAILED = 1
_LOG_LINES = 5  # of what ended
_POLL_S = 0.05
_STATISTICS_S = 0.3  # to wait for replies of the executors
_ARGUMENTS_CHARS = 75
_COLOURS = {"←": typer.colors.GREEN, "↻": typer.colors.YELLOW, "!": typer.colors.RED}
_RETRY_ACTIONS = (
    "call.redelivered",
    "call.overlapping",
    "command.requeued",
    "call.deduplicated",
    "call.unsettled",
    "upstream.retry",
)
_ALERT_LEVELS = ("warning", "error", "critical")
# Logged at a normal exit, too. `_should_continue` detects a server that has ended.
_IGNORED_ACTIONS = ("nats.disconnected",)
_DETAILS = ("reason", "author_id", "error", "error_code", "http_status", "attempt", "wait_s", "subject")


def dev(
    *,
    upstream: UpstreamChoice,
    protocol: ProtocolVersion | None,
    keep: Path | None,
    name: str | None,
    nats_port: int,
    pg_port: int,
    page_port: int,
    replicas: int,
) -> None:
    """Run the embedded stack and an executor until Ctrl-C, and print every call."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until `_stop_on_signals` it acts as Ctrl-C
    _require_free({"--nats-port": nats_port, "--pg-port": pg_port, "--page-port": page_port})
    with suppress(KeyboardInterrupt):
        version = protocol or DEFAULT_VERSION
        folder = keep.resolve() if keep else None
        _run(_DevOptions(upstream, version, folder, name, pg_port, nats_port, page_port, replicas))


def _require_free(ports: Mapping[str, int]) -> None:
    """Exit if a port cannot be listened on, before the servers start."""
    with ExitStack() as probes:
        for option, port in ports.items():
            try:
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError as error:
                why = os.strerror(error.errno or 0)  # the error's own text repeats the address
                fail(f"{option}: port {port} cannot be used: {why}; name another one, or 0 for any free one")


@dataclass(frozen=True, slots=True)
class _DevOptions:
    upstream: UpstreamChoice
    protocol: ProtocolVersion
    keep: Path | None
    name: str | None
    pg_port: int
    nats_port: int
    page_port: int
    replicas: int


def _run(options: _DevOptions) -> None:
    with extra_needed("dev"):
        from openapi_tool.cli.dev_executor import dev_settings  # noqa: PLC0415 - needs the extra [local]
        from openapi_tool.local.servers import ServerFailed  # noqa: PLC0415 - the same
        from openapi_tool.local.stack import CALLS  # noqa: PLC0415 - the same
    settings = dev_settings(options.upstream, os.environ, options.protocol)
    for remark in settings.remarks:
        print_status(remark)
    try:
        with _started(options, settings) as (running_stack, prefix):
            examples = [f"  {prefix}{_call_words(*example)}" for example in CALLS[options.upstream.value]]
            notes = [*_notes(running_stack.stack, options), "In another terminal:", *examples]
            asyncio.run(_watch(running_stack, notes, options.page_port))
    except (DevError, ServerFailed, OSError) as error:
        fail(str(error))


@dataclass(frozen=True, slots=True)
class _RunningStack:
    stack: EmbeddedStack
    version: ProtocolVersion
    executors: list[ExecutorProcess]

    @property
    def dsn(self) -> str:
        return self.stack.postgres.dsn(database_of(self.version))

    @property
    def variables(self) -> list[str]:
        """Shell assignments by which other commands find the kernel."""
        version = f"{PREFIX}PROTOCOL__VERSION"
        named = {"PG_DSN": self.dsn, "NATS_SERVERS": self.stack.nats.url, version: self.version.value}
        return [f"{name}={shlex.quote(value)}" for name, value in named.items()]


@contextmanager
def _started(options: _DevOptions, settings: DevSettings) -> Iterator[tuple[_RunningStack, str]]:
    """Run the stack; yield it, and the beginning of a command that finds it."""
    from openapi_tool.local.sample_calls import demo_tools  # noqa: PLC0415 - see _run
    from openapi_tool.local.stack import EmbeddedStack, kernel_schema  # noqa: PLC0415 - see _run

    with ExitStack() as exits:
        # The stack holds these locks until it has stopped, even if this process is killed.
        hold = [exits.enter_context(persistent_folder(options.keep))] if options.keep else []
        state = exits.enter_context(claimed_state(options.name))
        if state is not None:
            hold.append(state.descriptor)
        stack = EmbeddedStack(
            settings.key_names, keep=options.keep, pg_port=options.pg_port, nats_port=options.nats_port, hold=hold
        )
        if state is not None:
            stack.guard.delete_at_end(state_path(state.name))
        version, database = options.protocol, database_of(options.protocol)
        prepare_kernel = partial(prepare, version=version, schema=kernel_schema(version), tools=demo_tools(version))
        executors = [exits.enter_context(running(stack, database, prepare_kernel, settings.environment))]
        environment = {**settings.environment, f"{PREFIX}HEALTH__PORT": "0"}  # off: the first process uses the port
        real = options.upstream is UpstreamChoice.REAL
        for number in range(2, options.replicas + 1):
            executors.append(stack.executor(f"executor{number}", database, environment, real_upstream=real))
            executors[-1].start()
            exits.callback(executors[-1].stop)
        running_stack = _RunningStack(stack, version, executors)
        alone = not running_stacks()  # before `announce`, which adds this one to them
        if state is not None:
            announce(state.descriptor, running_stack.dsn, stack.nats.url, version)
        yield running_stack, _prefix(running_stack, state, alone=alone)


def _prefix(running_stack: _RunningStack, state: ClaimedState | None, *, alone: bool) -> str:
    """Return the beginning of a command that uses this stack; without its name if it is the only `dev`."""
    program = shlex.join(this_program())
    if state is None:
        return f"{' '.join(running_stack.variables)} {program} "
    unnamed = alone and state.name == next(automatic_names())
    return f"{program} " if unnamed else f"{program} --dev {state.name} "


def _call_words(tool: str, arguments: Mapping[str, Any]) -> str:
    return shlex.join(["call", tool, "--args", json.dumps(arguments)])


def _notes(stack: EmbeddedStack, options: _DevOptions) -> Iterator[str]:
    if options.upstream is UpstreamChoice.DOUBLE:
        rules = f"http://127.0.0.1:{stack.upstream.admin_port}/rules"
        yield f"the upstream is a double; a request without a recording gets another one's response (rules: {rules})"
    if options.keep:
        yield f"data is stored in {options.keep}"


async def _watch(running_stack: _RunningStack, notes: Sequence[str], page_port: int) -> None:
    """Describe the stack, then print its calls until a signal has stopped the executors."""
    stack, executors = running_stack.stack, running_stack.executors
    statistics = DevStatistics()
    stopping = _stop_on_signals(executors)
    async with AsyncExitStack() as parts:
        caller = await parts.enter_async_context(
            Caller.open(running_stack.dsn, running_stack.version, servers=stack.nats.url)
        )
        ask = partial(gather_stats, caller.client, _STATISTICS_S)
        page = await parts.enter_async_context(dev_page(ask, page_port, statistics))
        tools = sorted(await tools_of(caller, PROJECT))
        for variable in running_stack.variables:
            print_line(f"export {variable}")
        project = f"project {PROJECT}, agent {AGENT}, tools {', '.join(tools)}"
        for line in (project, f"page: {page}", *notes, "Ctrl-C stops it."):
            print_line(line)
        logs = [parts.enter_context(executor.process.log.open("rb")) for executor in executors]
        feed = Feed(caller, statistics.record_result)
        await _follow(logs, feed, lambda: _should_continue(running_stack, stopping))
    if not stopping.is_set():
        executor = next((executor for executor in executors if not executor.process.alive), executors[0])
        ended = stack.ended() or executor.process
        again = shlex.join([*this_program(), *sys.argv[1:]])
        log_end = "\n".join(["its log ends with:", *ended.log_tail().splitlines()[-_LOG_LINES:]])
        stops = (
            f"ended unexpectedly ({ended.end}), so dev stops everything that it started; start it again with: {again}"
        )
        fail(f"{ended.name} {stops}\n{log_end}", _FAILED)


def _should_continue(running_stack: _RunningStack, stopping: asyncio.Event) -> bool:
    """Return False once all executors have ended, or one of them or a server unexpectedly."""
    alive = [executor.process.alive for executor in running_stack.executors]
    if stopping.is_set():
        return any(alive)
    return all(alive) and running_stack.stack.ended() is None


def _stop_on_signals(executors: Sequence[ExecutorProcess]) -> asyncio.Event:
    """Return an event that the first SIGINT or SIGTERM sets, draining the executors; a second one kills them."""
    stopping = asyncio.Event()

    def on_signal() -> None:
        if not stopping.is_set():
            print_status("Stopping after running calls end; press Ctrl-C again to stop at once …")
        for executor in executors:
            if stopping.is_set():
                executor.process.kill()
            else:
                executor.signal(signal.SIGTERM)
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stopping


async def _follow(logs: Sequence[BinaryIO], feed: Feed, should_continue: Callable[[], bool]) -> None:
    """Print the events, until the executors have ended and the logs are read to their ends."""
    more = True
    while more:
        more = should_continue()
        for entry in chain.from_iterable(map(log_entries, logs)):
            async for line in feed.lines(entry):
                typer.secho(line, **allowed_style(_COLOURS.get(line.split()[1])))
        if more:
            await asyncio.sleep(_POLL_S)


class Feed:
    """Renderer of call events from the executor's log; `on_result` gets each tool call id and what the model reads."""

    def __init__(self, caller: Caller, on_result: Callable[[str, str], None] = lambda *_: None) -> None:
        self._caller = caller
        self._on_result = on_result
        self._begun: set[str] = set()

    async def lines(self, entry: Mapping[str, Any]) -> AsyncIterator[str]:
        """Yield the lines of an entry: none, one, or two if the log lacks the start of the call."""
        action = entry["action"]
        call_id = entry.get("tool_call_id", "")
        if action in ("call.running", "call.finished") and call_id not in self._begun:
            self._begun.add(call_id)
            yield await self._begin(entry)
        if action == "call.finished":
            self._begun.discard(call_id)
            yield await self._end(entry)
        elif action in _RETRY_ACTIONS:
            yield _line("↻", entry, _message(entry))
        elif entry["level"] in _ALERT_LEVELS and action not in _IGNORED_ACTIONS:
            yield _line("!", entry, _message(entry))

    async def _begin(self, entry: Mapping[str, Any]) -> str:
        content = await self._content(entry, "tool.call")
        arguments = json.dumps(content.get("arguments"), ensure_ascii=False)
        return _line("→", entry, f"{content.get('tool_name')} {_shortened(arguments)}")

    async def _end(self, entry: Mapping[str, Any]) -> str:
        content = await self._content(entry, "tool.result")
        text = as_model_reads(content)
        self._on_result(entry["tool_call_id"], text)
        again = f", delivery {entry['attempt']}" if entry["attempt"] > 1 else ""
        summary = f"{entry['tool_name']} {entry['status']}, {entry['duration_ms']} ms{again}"
        error = content.get("error")
        if entry["status"] != "success":
            return _line("!", entry, f"{summary}, {entry.get('error_code')}: {error and error.get('message')}")
        return _line("←", entry, f"{summary}, {counted(len(text), 'character')}")

    async def _content(self, entry: Mapping[str, Any], card_type: str) -> Mapping[str, Any]:
        with suppress(*ERRORS):
            card = await self._caller.card(entry["project_id"], entry["tool_call_id"], card_type)
            content: Mapping[str, Any] = card.get("content") or {}
            return content
        return {}


def _message(entry: Mapping[str, Any]) -> str:
    details = [f"{name}={entry[name]}" for name in _DETAILS if name in entry]
    return ", ".join([entry["message"].partition("\n")[0], *details])


def _line(sign: str, entry: Mapping[str, Any], text: str) -> str:
    time = datetime.fromisoformat(entry["time"]).astimezone().strftime("%H:%M:%S.%f")[:-3]
    call_id = entry.get("tool_call_id")
    return one_line(f"{time} {sign} {text}" + (f" [{call_id}]" if call_id else ""))


def _shortened(text: str) -> str:
    return text if len(text) <= _ARGUMENTS_CHARS else text[: _ARGUMENTS_CHARS - 1] + "…"
