"""Composition root of `serve`: builds all parts, starts, drains and stops them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import wait_exponential_jitter

from openapi_tool import __version__, process_memory
from openapi_tool.bootstrap import NAME, Bootstrap, build_bootstrap, build_runner
from openapi_tool.bus.connection import BusClient, connected, outage_as_unavailable
from openapi_tool.bus.consumer import CommandConsumer, ConsumerOptions
from openapi_tool.bus.dead_letters import DeadLetters
from openapi_tool.bus.durable_monitor import DurableMonitor
from openapi_tool.bus.limit_store import shared_limits
from openapi_tool.bus.parked_results import ParkedResultStore
from openapi_tool.bus.server_clock import ServerClock
from openapi_tool.bus.session_key_store import shared_session_key
from openapi_tool.bus.slots import slots_of
from openapi_tool.bus.stats import answer_stats
from openapi_tool.bus.storage import Storage
from openapi_tool.bus.streams import DurableOptions, replica_count
from openapi_tool.bus.switch_store import SwitchMonitor
from openapi_tool.bus.wakeup_publisher import WakeupPublisher
from openapi_tool.database_monitor import DatabaseMonitor
from openapi_tool.executor.parking import ParkedResults
from openapi_tool.executor.pipeline import Pipeline, PipelineOptions
from openapi_tool.executor.runner import ToolRunner
from openapi_tool.jina.egress import EgressTransport
from openapi_tool.jina.transport import AiohttpTransport, Resolver
from openapi_tool.kernel.guarded import GuardedStore
from openapi_tool.kernel.store import KernelStore
from openapi_tool.open_files import raise_limit, shortage
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.v1r4 import V1r4
from openapi_tool.reload import Reloader
from openapi_tool.retrying import retried
from openapi_tool.settings import Settings, SettingsError
from openapi_tool.settings.loading import ignored_variables
from openapi_tool.telemetry import metrics
from openapi_tool.telemetry.health import NATS, monitor_loop_lag
from openapi_tool.telemetry.health_server import health_server
from openapi_tool.telemetry.logs import configure_logging
from openapi_tool.telemetry.metrics import list_projects
from openapi_tool.telemetry.recent_warnings import RECENT_WARNINGS
from openapi_tool.telemetry.redact import MIN_SECRET_CHARS
from openapi_tool.telemetry.snapshot import Snapshots
from openapi_tool.telemetry.traces import Exporting, WireTracer, shut_down
from openapi_tool.tools.deadline import TimeLimits, longest_call_s

try:
    import uvloop
except ImportError:  # not built for this platform
    _new_event_loop = asyncio.new_event_loop
else:
    _new_event_loop = uvloop.new_event_loop

if TYPE_CHECKING:
    from openapi_tool.telemetry.otlp import ExportingTracer

T = TypeVar("T")

_REMIND_S = 60.0

INSTANCE = f"{socket.gethostname()}-{os.getpid()}"
"""Name of this process among the replicas, in spans, metrics over OTLP and `top`."""

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
    if too_few := shortage(settings, raise_limit()):
        log.warning("%s", too_few, extra={"action": "open_files.short"})
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(_serve(bootstrap, resolver, read, environment))


async def _serve(
    bootstrap: Bootstrap, resolver: Resolver | None, read: Callable[[], Settings], environment: Mapping[str, str]
) -> None:
    stop, reload = _stop_on_signals(), _reload_on_signal()
    async with AsyncExitStack() as stack:
        await _serve_health(stack, bootstrap)
        parts = await _unless_stopped(stop, assemble(stack, bootstrap, resolver))
        if parts is None:
            return
        consumer = parts.consumer
        process_memory.collect_garbage_rarely()
        process_memory.give_large_memory_back()
        consumer.start()
        log.info("serving", extra={"action": "service.started", "durable": bootstrap.durable.name})
        try:
            reloader = Reloader(bootstrap, parts.runner, read, environment)
            await _unless_stopped(stop, _side_tasks(parts, bootstrap, reloader.run(reload)))
        finally:
            bootstrap.health.draining = True
            await consumer.stop(bootstrap.settings.executor.drain_timeout_s)
    log.info("stopped", extra={"action": "service.stopped"})


@dataclass(frozen=True, slots=True)
class Parts:
    """The assembled parts that the caller starts, monitors or stops."""

    consumer: CommandConsumer
    kernel: KernelStore
    durable_monitor: DurableMonitor
    storage: Storage
    database: DatabaseMonitor
    runner: ToolRunner
    switches: SwitchMonitor


async def assemble(stack: AsyncExitStack, bootstrap: Bootstrap, resolver: Resolver | None) -> Parts:
    """Connect and build all parts without starting the consumer; `stack` closes them in reverse order."""
    settings, health = bootstrap.settings, bootstrap.health
    database = DatabaseMonitor(health, bootstrap.pool.where)
    kernel = await _until_available(lambda: KernelStore.open(bootstrap.pool), database.mark_unavailable)
    stack.push_async_callback(kernel.aclose)
    database.mark_available()

    def nats_unavailable(error: Unavailable) -> str:
        health.record(NATS, ok=False, reason=str(error))
        return str(error)

    reminder = Reminder()

    def nats_trouble(reason: str) -> None:
        reminder.log(nats_unavailable(Unavailable(reason)))

    bus = replace(bootstrap.bus, on_trouble=nats_trouble)
    client = await _until_available(lambda: stack.enter_async_context(connected(bus)), nats_unavailable)
    health.record(NATS, ok=True)
    transport = upstream_transport(bootstrap, resolver)
    stack.push_async_callback(transport.aclose)
    tracer, clock, slots = _tracer(bootstrap), ServerClock(), slots_of(settings.executor)
    stack.push_async_callback(shut_down, tracer)
    if (exporter := _metrics_exporter(bootstrap)) is not None:
        stack.push_async_callback(shut_down, exporter)
    replicas = await _until_available(lambda: _replica_count(client, bootstrap.durable), nats_unavailable)
    session_key = await _session_key(settings, client, replicas, nats_unavailable)
    guarded, answers = GuardedStore(kernel, database.breaker), ParkedResultStore(client, replicas)
    limiter = await stack.enter_async_context(shared_limits(client, replicas, INSTANCE, settings.limits, clock.time))
    health.limits = limiter.shown
    runner = build_runner(bootstrap, transport, guarded, session_key, permits=limiter)
    pipeline = Pipeline(
        PipelineOptions(settings.protocol.actor_id, settings.executor, settings.tools),
        V1r4(settings.protocol.actor_id, NAME),
        guarded,
        runner,
        WakeupPublisher(client),
        tracer,
        clock,
        ParkedResults(answers, session_key),
        slots,
    )
    letters = DeadLetters(client, bootstrap.redactor.at("dead_letter"), replicas)
    options = _consumer_options(bootstrap, replicas)
    consumer = CommandConsumer(client, options, letters, pipeline.handle, database.fetch_mode, clock, slots)
    database.wake = consumer.wake
    kept_key = None if settings.session.key else session_key
    storage = Storage(client, consumer.leases, answers, letters, kept_key, replicas, health)
    monitor = DurableMonitor(client, bootstrap.durable, consumer, clock, health)
    for variable in bootstrap.secrets.allowed:
        metrics.KEYS_REFUSED.labels(variable)  # at 0 from the start, so that an alert sees the first refusal
    await answer_stats(client, snapshots(bootstrap).now)
    switches = SwitchMonitor(client, runner.switch)
    await _until_available(switches.load, nats_unavailable)
    return Parts(consumer, kernel, monitor, storage, database, runner, switches)


def snapshots(bootstrap: Bootstrap) -> Snapshots:
    """Return the source of statistics for `top` and the page, with the limits that the settings set."""
    settings = bootstrap.settings
    limits = {
        "executor.concurrency": settings.executor.concurrency,
        "executor.max_held": settings.executor.max_held,
        "postgres.pool_size": settings.postgres.pool_size,
        "egress.max_connections": settings.egress.max_connections,
        "egress.body_budget_bytes": settings.egress.body_budget_bytes,
        "cache.max_bytes": settings.cache.max_bytes,
        "tools.max_timeout_s": settings.tools.max_timeout_s,
    }
    return Snapshots(INSTANCE, bootstrap.health, limits)


async def _replica_count(client: BusClient, durable: DurableOptions) -> int:
    with outage_as_unavailable(client.where):
        return await replica_count(client, durable)


async def _serve_health(stack: AsyncExitStack, bootstrap: Bootstrap) -> None:
    options = bootstrap.settings.health
    if options.port:
        page = snapshots(bootstrap) if options.page else None
        try:
            await stack.enter_async_context(health_server(options.host, options.port, bootstrap.health, page))
        except OSError as error:
            raise SettingsError([f"health.host, health.port: cannot listen: {error}"]) from error
        log.info("health server", extra={"action": "health.serving", "host": options.host, "port": options.port})


async def _side_tasks(parts: Parts, bootstrap: Bootstrap, reloading: Coroutine[Any, Any, None]) -> None:
    """Run the background tasks; none ends without a defect, whose exception this raises."""
    async with asyncio.TaskGroup() as group:
        group.create_task(parts.consumer.failed(), name="consumer")
        group.create_task(parts.durable_monitor.run(), name="durable monitor")
        group.create_task(parts.storage.run(), name="storage")
        group.create_task(parts.switches.run(), name="switches")
        group.create_task(reloading, name="reload")
        group.create_task(monitor_loop_lag(parts.consumer.stalled), name="loop lag")
        group.create_task(_monitor_database(parts, bootstrap.settings.health.check_interval_s), name="database monitor")


async def _monitor_database(parts: Parts, every_s: float) -> None:
    """Check the database periodically; no command is fetched while it is unavailable."""
    while True:
        await parts.database.check(parts.kernel, idle=not parts.consumer.running)
        await asyncio.sleep(every_s)


def _consumer_options(bootstrap: Bootstrap, replicas: int) -> ConsumerOptions:
    settings = bootstrap.settings
    limits = TimeLimits(settings.executor, settings.tools)
    hold_s = longest_call_s(limits, bootstrap.authorizer, settings.postgres.timeout_s)
    return ConsumerOptions(bootstrap.durable, settings.executor, hold_s, replicas, settings.fairness)


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
            "%s holds a secret of less than %s characters, which cannot be masked in logs and cards: set a longer one",
            name,
            MIN_SECRET_CHARS,
            extra={"action": "secret.short"},
        )
    for remark in [*settings.remarks, *ignored_variables(environment)]:
        log.warning("%s", remark, extra={"action": "setting.changed"})
    if settings.executor.concurrency == 1:
        log.warning("executor.concurrency is 1: calls run one after another", extra={"action": "concurrency.low"})


def upstream_transport(bootstrap: Bootstrap, resolver: Resolver | None) -> EgressTransport:
    """Return the transport for all upstream requests."""
    egress = bootstrap.settings.egress
    return EgressTransport(
        AiohttpTransport(
            bootstrap.upstream_tls,
            egress.max_connections,
            resolver,
            proxy=egress.proxy,
            public_addresses_only=egress.public_addresses_only,
        )
    )


async def _session_key(
    settings: Settings, client: BusClient, replicas: int, on_unavailable: Callable[[Unavailable], str]
) -> bytes:
    if settings.session.key is not None:
        return settings.session.key.get_secret_value().encode()
    return await _until_available(lambda: shared_session_key(client, replicas), on_unavailable)


class Reminder:
    """Logs once a minute why the start waits; the first time is the health record's. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()

    def log(self, reason: str) -> None:
        """Log, if a minute has passed."""
        now = self._clock()
        if now - self._last >= _REMIND_S:
            self._last = now
            log.warning("still waiting to start: %s", reason, extra={"action": "service.waiting"})


async def _until_available(attempt: Callable[[], Awaitable[T]], on_unavailable: Callable[[Unavailable], str]) -> T:
    """Retry until a dependency is available. `on_unavailable` records a failure and returns its line of each minute."""
    reminder = Reminder()

    async def trial() -> T:
        try:
            return await attempt()
        except Unavailable as error:
            reminder.log(on_unavailable(error))
            raise

    return await retried(trial, on=Unavailable, wait=wait_exponential_jitter(multiplier=0.2, max=5, jitter=0.2))


def _tracer(bootstrap: Bootstrap) -> WireTracer | ExportingTracer:
    telemetry = bootstrap.settings.telemetry
    if telemetry.otlp_endpoint is None:
        return WireTracer()
    from openapi_tool.telemetry.otlp import open_tracer  # noqa: PLC0415 - 30 MB that few deployments need

    return open_tracer(telemetry.otlp_endpoint, bootstrap.redactor.at("span"), telemetry.trace_ratio, INSTANCE)


def _metrics_exporter(bootstrap: Bootstrap) -> Exporting | None:
    telemetry = bootstrap.settings.telemetry
    if telemetry.otlp_metrics_endpoint is None:
        return None
    from openapi_tool.telemetry.otlp_metrics import open_exporter  # noqa: PLC0415 - the same

    return open_exporter(telemetry.otlp_metrics_endpoint, telemetry.otlp_metrics_interval_s, INSTANCE)


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
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    return asked


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
