"""The process of `serve`: runs the calls of a kernel until it is asked to end.

At the start it builds what needs no connection, waits for the kernel's servers, and starts the consumer of commands.
At the end (`shutdown.py`) the consumer finishes running calls first (the *drain*), then connections are closed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import NoReturn

try:
    from uvloop import new_event_loop
except ImportError:  # not built for this platform
    from asyncio import new_event_loop  # type: ignore[assignment]
from openapi_tool import __version__
from openapi_tool.bootstrap import Bootstrap, build_bootstrap
from openapi_tool.concurrency.cancellation import cancel_until_ended
from openapi_tool.jina.transport import Resolver
from openapi_tool.kernel.jetstream.consumer import CommandConsumer
from openapi_tool.reloading import Reloader
from openapi_tool.service.file_limit import file_limit_problem, fit_to_file_limit, health_connections, raise_file_limit
from openapi_tool.service.kernel_parts import Parts, assemble
from openapi_tool.service.memory import collect_garbage_rarely, set_malloc_thresholds
from openapi_tool.service.process_parts import ProcessParts, open_process_parts, snapshots
from openapi_tool.service.quota_parts import run_quotas
from openapi_tool.settings import PREFIX, Settings, SettingsError
from openapi_tool.settings.variables import ignored_variables
from openapi_tool.shutdown import Shutdown, end_process
from openapi_tool.telemetry.health_server import health_server
from openapi_tool.telemetry.logs import CALL_FIELDS, configure_logging, log_crash
from openapi_tool.telemetry.loop_lag import monitor_loop_lag
from openapi_tool.telemetry.metrics import list_projects
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS
from openapi_tool.telemetry.redact import MIN_SECRET_CHARS

log = logging.getLogger(__name__)


def run(read: Callable[[], Settings], environment: Mapping[str, str], resolver: Resolver | None = None) -> NoReturn:
    """Serve until SIGTERM, SIGINT or SIGQUIT, and end the process. Raises SettingsError before any connection is made.

    `resolver` replaces DNS for the upstream's hosts in the embedded stack.
    """
    file_limit = raise_file_limit()
    wanted = read()

    def read_fitted() -> Settings:
        return fit_to_file_limit(read(), file_limit)

    bootstrap = build_bootstrap(fit_to_file_limit(wanted, file_limit), environment)
    telemetry = bootstrap.settings.telemetry
    configure_logging(telemetry.log_level, telemetry.log_format, bootstrap.redactor, background=True)
    RECENT_WARNINGS.install(bootstrap.redactor)
    list_projects(telemetry.projects)
    _log_configuration(bootstrap, environment)
    problem = file_limit_problem(wanted, file_limit)
    if problem is not None:
        log.warning("%s", problem, extra={"action": "open_files.short"})
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(_serve(Reloader(bootstrap, read_fitted, environment), resolver))
        except SettingsError:  # a port that cannot be used; nothing has begun
            raise
        except Exception as error:  # noqa: BLE001 - a normal end of the process might take minutes
            defect = error
            end_process(1, lambda: log_crash(defect))
        end_process(0)


async def _serve(reloader: Reloader, resolver: Resolver | None) -> None:
    """Run all tasks of the process until the end is requested or one of them fails; then close everything."""
    bootstrap = reloader.bootstrap
    kernel = _Kernel()
    shutdown = Shutdown(bootstrap.settings.executor, lambda: kernel.running)
    reload = asyncio.Event()
    shutdown.handle_signals(reload)
    async with AsyncExitStack() as stack:
        await _serve_health(stack, bootstrap)
        set_malloc_thresholds()
        upstream, connections = AsyncExitStack(), AsyncExitStack()
        parts = open_process_parts(upstream, bootstrap, resolver, lambda: shutdown.left_s)
        reloader.use_keys = parts.limiter.keys.set_secrets
        reloader.use_limits = parts.limiter.apply_options
        process = _Process(shutdown, connections, parts, reloader, kernel)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_serve_kernel(bootstrap, process), name="kernel")
                if bootstrap.quotas is not None:
                    quotas = run_quotas(connections, bootstrap.quotas, bootstrap.health, parts)
                    group.create_task(shutdown.unless_requested(quotas), name="quotas")
                group.create_task(shutdown.unless_requested(reloader.run(reload)), name="reload")
                group.create_task(shutdown.unless_requested(monitor_loop_lag(kernel.stalled)), name="loop lag")
        finally:
            shutdown.begin()  # after a failure
            # Before the connections: a server that does not answer would use up the time for the last spans.
            with shutdown.step("export spans and metrics, close upstream connections"):
                await upstream.aclose()
            with shutdown.step("close connections to NATS and PostgreSQL"):
                await connections.aclose()
    log.info("stopped", extra={"action": "service.stopped"})


@dataclass(slots=True)
class _Kernel:
    """Holds the consumer of the kernel's commands, which is None until the servers are connected."""

    consumer: CommandConsumer | None = None

    @property
    def running(self) -> int:
        """Return the number of running calls."""
        return self.consumer.running if self.consumer else 0

    def stalled(self, seconds: float) -> None:
        """Notify the consumer that the event loop stood still."""
        if self.consumer:
            self.consumer.stalled(seconds)


@dataclass(frozen=True, slots=True)
class _Process:
    """What the tasks of the process share.

    `connections` (to NATS and PostgreSQL) are closed after the drain, as running calls need both.
    """

    shutdown: Shutdown
    connections: AsyncExitStack
    parts: ProcessParts
    reloader: Reloader
    kernel: _Kernel


async def _serve_kernel(bootstrap: Bootstrap, process: _Process) -> None:
    """Run the kernel's calls until the end is requested; then let running ones finish."""
    CALL_FIELDS.set(lambda: {"protocol": bootstrap.version})  # every task of a call inherits it
    shutdown = process.shutdown
    parts = await shutdown.unless_requested(assemble(process.connections, bootstrap, process.parts))
    if parts is None:
        return
    process.kernel.consumer = parts.consumer
    process.reloader.add(parts.runner)
    collect_garbage_rarely()
    parts.consumer.start()
    log.info("serving", extra={"action": "service.started", "durable": bootstrap.durable.name})
    background = asyncio.create_task(_background_tasks(parts, bootstrap), name="background tasks")
    try:
        await shutdown.requested_or_done(background)
        if background.done():
            background.result()  # raises the defect
    finally:
        bootstrap.health.draining = True
        shutdown.begin()
        background.cancel()  # awaited after the drain: a check of a server that hangs ends only seconds later
        with shutdown.step("drain"):
            # Two thirds of `hand_back_s` for commits and handing back; the last one for the steps after the drain
            # (`shutdown.py`).
            await parts.consumer.stop(shutdown.calls_left_s, bootstrap.settings.executor.hand_back_s * 2 / 3)
            await cancel_until_ended(background)


async def _serve_health(stack: AsyncExitStack, bootstrap: Bootstrap) -> None:
    """Start the health server if the settings name a port. Raises SettingsError."""
    options = bootstrap.settings.health
    if options.port:
        page = snapshots(bootstrap) if options.page else None
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        connections = health_connections(soft_limit)
        server = health_server(options.host, options.port, bootstrap.health, page, connections, options.allowed_hosts)
        try:
            await stack.enter_async_context(server)
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
    """Run the background tasks, which end only by a defect."""
    async with asyncio.TaskGroup() as group:
        group.create_task(parts.consumer.wait_for_failure(), name="consumer")
        group.create_task(parts.durable_monitor.run(), name="durable monitor")
        group.create_task(parts.storage.run(), name="storage")
        group.create_task(parts.switches.run(), name="switches")
        group.create_task(_monitor_database(parts, bootstrap.settings.health.check_interval_s), name="database monitor")


async def _monitor_database(parts: Parts, every_s: float) -> None:
    """Check the database again and again."""
    while True:
        await parts.database.check(parts.kernel, idle=not parts.consumer.running)
        await asyncio.sleep(every_s)


def _log_configuration(bootstrap: Bootstrap, environment: Mapping[str, str]) -> None:
    """Log the effective settings, and a warning for whatever may be a mistake in them."""
    settings, missing = bootstrap.settings, bootstrap.secrets.missing()
    keys = {variable: "missing" if variable in missing else "set" for variable in sorted(bootstrap.secrets.allowed)}
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
