"""`openapi-tool dev`: runs the embedded stack until Ctrl-C, and prints the calls that its executors run."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import typer

from openapi_tool.cli.dev_feed import Feed
from openapi_tool.cli.dev_page import DevStatistics, dev_page
from openapi_tool.cli.dev_stack import DevFlags, DevStack, running_dev_stack
from openapi_tool.cli.embedded import extra_needed, this_program
from openapi_tool.cli.options import UpstreamChoice
from openapi_tool.cli.output import allowed_style, fail, print_line, print_status
from openapi_tool.local.caller import Caller
from openapi_tool.local.dev import AGENT, PROJECT, log_entries
from openapi_tool.local.dev_state import DevError
from openapi_tool.local.requested_call import tools_of
from openapi_tool.local.sample_arguments import SAMPLE_CALLS
from openapi_tool.nats_records.replica_statistics import gather_stats
from openapi_tool.protocol.dialect import DEFAULT_VERSION, ProtocolVersion

if TYPE_CHECKING:
    from openapi_tool.local.executor import ExecutorProcess

_FAILED = 1
_LOG_LINES = 5  # of what ended
_POLL_S = 0.05
_STATISTICS_S = 0.3  # to wait for replies of the executors
_COLOURS = {"←": typer.colors.GREEN, "↻": typer.colors.YELLOW, "!": typer.colors.RED}  # by the sign of a line


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
        _run(DevFlags(upstream, version, folder, name, pg_port, nats_port, page_port, replicas))


def _require_free(ports: Mapping[str, int]) -> None:
    """Exit if a port cannot be listened on, before the servers start."""
    with ExitStack() as probes:
        for option, port in ports.items():
            try:
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError as error:
                why = os.strerror(error.errno or 0)  # the error's own text repeats the address
                fail(f"{option}: port {port} cannot be used: {why}; name another one, or 0 for any free one")


def _run(options: DevFlags) -> None:
    with extra_needed("dev"):
        from openapi_tool.cli.dev_settings import dev_settings  # noqa: PLC0415 - needs the extra [local]
        from openapi_tool.local import stack as _  # noqa: F401, PLC0415 - the same; `running_dev_stack` imports it
        from openapi_tool.local.servers import ServerFailed  # noqa: PLC0415 - the same
    settings = dev_settings(options.upstream, os.environ, options.protocol)
    for remark in settings.remarks:
        print_status(remark)
    try:
        with running_dev_stack(options, settings) as stack:
            asyncio.run(_watch(stack, options))
    except (DevError, ServerFailed, OSError) as error:
        fail(str(error))


async def _watch(stack: DevStack, options: DevFlags) -> None:
    """Describe the stack, then print its calls until a signal has stopped the executors."""
    statistics = DevStatistics()
    stopping = _stop_on_signals(stack.executors)
    async with AsyncExitStack() as parts:
        caller = await parts.enter_async_context(Caller.open(stack.dsn, stack.version, servers=stack.servers.nats.url))
        ask = partial(gather_stats, caller.client, _STATISTICS_S)
        page_url = await parts.enter_async_context(dev_page(ask, options.page_port, statistics))
        tools = sorted(await tools_of(caller, PROJECT))
        for line in _description(stack, options, tools, page_url):
            print_line(line)
        logs = [parts.enter_context(executor.process.log.open("rb")) for executor in stack.executors]
        feed = Feed(caller, statistics.record_result)
        await _follow(logs, feed, lambda: _should_continue(stack, stopping))
    if not stopping.is_set():
        _fail_after_end(stack)


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


def _description(stack: DevStack, options: DevFlags, tools: Sequence[str], page_url: str) -> Iterator[str]:
    for variable in stack.variables:
        yield f"export {variable}"
    yield f"project {PROJECT}, agent {AGENT}, tools {', '.join(tools)}"
    yield f"page: {page_url}"
    if options.upstream is UpstreamChoice.DOUBLE:
        rules = f"http://127.0.0.1:{stack.servers.upstream.admin_port}/rules"
        yield f"the upstream is a double; a request without a recording gets another one's response (rules: {rules})"
    if options.keep:
        yield f"data is stored in {options.keep}"
    yield "In another terminal:"
    for tool, arguments in SAMPLE_CALLS[options.upstream.value]:
        yield f"  {stack.command_prefix}{_call_words(tool, arguments)}"
    yield "Ctrl-C stops it."


def _call_words(tool: str, arguments: Mapping[str, Any]) -> str:
    return shlex.join(["call", tool, "--args", json.dumps(arguments)])


async def _follow(logs: Sequence[BinaryIO], feed: Feed, should_continue: Callable[[], bool]) -> None:
    """Print the events, until the executors have ended and the logs are read to their ends."""
    more = True
    while more:
        more = should_continue()  # before the logs are read: so none of their last lines is missed
        for entry in chain.from_iterable(map(log_entries, logs)):
            async for line in feed.lines(entry):
                sign = line.split()[1]
                typer.secho(line, **allowed_style(_COLOURS.get(sign)))
        if more:
            await asyncio.sleep(_POLL_S)


def _should_continue(stack: DevStack, stopping: asyncio.Event) -> bool:
    """Return False once all executors have ended, or one of them or a server unexpectedly."""
    alive = [executor.process.alive for executor in stack.executors]
    if stopping.is_set():
        return any(alive)
    return all(alive) and stack.servers.ended() is None


def _fail_after_end(stack: DevStack) -> NoReturn:
    """Exit; say which server or executor has ended, and how its log ends."""
    ended = stack.servers.ended()
    if ended is None:
        ended_executors = [executor for executor in stack.executors if not executor.process.alive]
        ended = (ended_executors or stack.executors)[0].process
    again = shlex.join([*this_program(), *sys.argv[1:]])
    last_lines = ended.log_tail().splitlines()[-_LOG_LINES:]
    log_end = "\n".join(["its log ends with:", *last_lines])
    fail(
        f"{ended.name} ended unexpectedly ({ended.end}), so dev stops everything that it started; "
        f"start it again with: {again}\n{log_end}",
        _FAILED,
    )
