"""Composition root of `serve`: starts, drains and stops the kernels that one process serves."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from openapi_tool import __version__, runtime
from openapi_tool.assembly import Parts, Shared, assemble, open_shared, snapshots
from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.jina.transport import Resolver
from openapi_tool.runtime import Reloader, file_limit_problem, raise_file_limit
from openapi_tool.settings import PREFIX, Settings, SettingsError
from openapi_tool.settings.loading import ignored_variables
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.calls import CALL_FIELDS
from openapi_tool.telemetry.health import monitor_loop_lag
from openapi_tool.telemetry.health_server import health_server
from openapi_tool.telemetry.logs import configure_logging
from openapi_tool.telemetry.metrics import list_projects
from openapi_tool.telemetry.redact import MIN_SECRET_CHARS
from openapi_tool.telemetry.snapshot import RECENT_WARNINGS

try:
    import uvloop
except ImportError:  # not built for this platform
    _new_event_loop = asyncio.new_event_loop
else:
    _new_event_loop = uvloop.new_event_loop

T = TypeVar("T")

log = logging.getLogger(__name__)


def run(read: Callable[[], Settings], environment: Mapping[str, str], resolver: Resolver | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    `read` returns the settings, at the start and on every SIGHUP. `resolver` replaces DNS for the upstream's hosts;
    only the embedded stack passes one. Raises SettingsError before any connection is made.
    """
    bootstrap = build_bootstrap(read(), environment)
    settings = bootstrap.settings
    configure_logging(settings.telemetry.log_level, settings.telemetry.log_format, bootstrap.redactor)
    RECENT_WARNINGS.install(bootstrap.redactor)
    list_projects(settings.telemetry.projects)
    _log_configuration(bootstrap, environment)
    if problem := file_limit_problem(settings, raise_file_limit()):
        log.warning("%s", problem, extra={"action": "open_files.short"})
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(_serve(bootstrap, resolver, read, environment))


async def _serve(
    bootstrap: Bootstrap, resolver: Resolver | None, read: Callable[[], Settings], environment: Mapping[str, str]
) -> None:
    """Serve every kernel; one that is unavailable does not delay the others."""
    stop, reload = _stop_on_signals(), _reload_on_signal()
    async with AsyncExitStack() as stack:
        await _serve_health(stack, bootstrap)
        runtime.set_malloc_thresholds()
        shared = open_shared(stack, bootstrap, resolver)
        reloader = Reloader(bootstrap, read, environment, use_keys=shared.limits.limiter.keys.set_secrets)
        process = _Process(stop, stack, shared, reloader)
        async with asyncio.TaskGroup() as group:
            for kernel in (bootstrap, *bootstrap.others):
                group.create_task(_serve_kernel(kernel, process), name=f"kernel {kernel.version}")
            group.create_task(_unless_stopped(stop, reloader.run(reload)), name="reload")
            group.create_task(_unless_stopped(stop, monitor_loop_lag(process.stalled)), name="loop lag")
    log.info("stopped", extra={"action": "service.stopped"})


@dataclass(frozen=True, slots=True)
class _Process:
    """State shared by the kernels of one process; `serving` has the parts of the connected ones.

    `stack` closes connections after every kernel has drained: calls of one need permits from the other's NATS.
    """

    stop: asyncio.Event
    stack: AsyncExitStack
    shared: Shared
    reloader: Reloader
    serving: list[Parts] = field(default_factory=list)

    def stalled(self, seconds: float) -> None:
        """Notify the consumers of a stall of the event loop."""
        for parts in self.serving:
            parts.consumer.stalled(seconds)


async def _serve_kernel(bootstrap: Bootstrap, process: _Process) -> None:
    CALL_FIELDS.set(lambda: {"protocol": bootstrap.version})  # every task of this kernel inherits it
    parts = await _unless_stopped(process.stop, assemble(process.stack, bootstrap, process.shared))
    if parts is None:
        return
    process.serving.append(parts)
    process.reloader.add(parts.runner)
    runtime.collect_garbage_rarely()
    parts.consumer.start()
    log.info("serving", extra={"action": "service.started", "durable": bootstrap.durable.name})
    try:
        await _unless_stopped(process.stop, _background_tasks(parts, bootstrap))
    finally:
        bootstrap.health.draining = True
        await parts.consumer.stop(bootstrap.settings.executor.drain_timeout_s)


async def _serve_health(stack: AsyncExitStack, bootstrap: Bootstrap) -> None:
    options = bootstrap.settings.health
    if options.port:
        page = snapshots(bootstrap) if options.page else None
        try:
            await stack.enter_async_context(health_server(options.host, options.port, bootstrap.health, page))
        except OSError as error:
            raise SettingsError([_cannot_listen(options.host, options.port, error)]) from error
        log.info("health server", extra={"action": "health.serving", "host": options.host, "port": options.port})


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        why = f"port {port} is in use; set another in {PREFIX}HEALTH__PORT, or 0 for no health server"
    else:
        why = f"{error.strerror or error}; check {PREFIX}HEALTH__HOST ({host}) and {PREFIX}HEALTH__PORT ({port})"
    return f"health.host, health.port: cannot listen: {why}"


async def _background_tasks(parts: Parts, bootstrap: Bootstrap) -> None:
    """Run the background tasks of a kernel. They end only by a defect, whose exception is raised."""
    async with asyncio.TaskGroup() as group:
        group.create_task(parts.consumer.failed(), name="consumer")
        group.create_task(parts.durable_monitor.run(), name="durable monitor")
        group.create_task(parts.storage.run(), name="storage")
        group.create_task(parts.switches.run(), name="switches")
        group.create_task(_monitor_database(parts, bootstrap.settings.health.check_interval_s), name="database monitor")


async def _monitor_database(parts: Parts, every_s: float) -> None:
    """Check the database periodically; no command is fetched while it is unavailable."""
    while True:
        await parts.database.check(parts.kernel, idle=not parts.consumer.running)
        await asyncio.sleep(every_s)


def _log_configuration(bootstrap: Bootstrap, environment: Mapping[str, str]) -> None:
    """Log the settings in effect, credentials masked, and which keys are set; warn of weak settings."""
    settings, missing = bootstrap.settings, bootstrap.secrets.missing()
    keys = {variable: "missing" if variable in missing else "set" for variable in sorted(bootstrap.secrets.allowed)}
    for variable in keys:
        metrics.KEYS_REFUSED.labels(variable)  # start at 0, so that an alert sees the first increase
    log.info(
        "openapi-tool %s",
        __version__,
        extra={"action": "service.configured", "settings": settings.shown(), "keys": keys},
    )
    for variable in missing:
        log.warning(
            "%s is not set: calls of tools that need it will fail", variable, extra={"action": "secret.missing"}
        )
    for name in bootstrap.unmasked:
        log.warning(
            "%s holds a secret of less than %s characters or a common word, which is not masked in logs and cards: "
            "set another one",
            name,
            MIN_SECRET_CHARS,
            extra={"action": "secret.short"},
        )
    for remark in [*settings.remarks, *ignored_variables(environment)]:
        log.warning("%s", remark, extra={"action": "setting.changed"})
    if settings.executor.concurrency == 1:
        log.warning("executor.concurrency is 1: calls run one after another", extra={"action": "concurrency.low"})


def _stop_on_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second one ends the process at once."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            log.warning("stopping now", extra={"action": "service.killed", "signal": number})
            os._exit(128 + number)
        log.info("stopping", extra={"action": "service.stopping", "signal": number})
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _reload_on_signal() -> asyncio.Event:
    """Return an event that SIGHUP sets; without a handler SIGHUP would end the process."""
    requested = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, requested.set)
    return requested


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; if `stop` is set first, cancel `work` and return None."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait([working, stopping])
