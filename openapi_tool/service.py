"""The composition root: builds the parts, starts, drains and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import AsyncRetrying, before_sleep_log, retry_if_exception_type, wait_exponential_jitter

from openapi_tool import __version__
from openapi_tool.bus.connection import Client, connected
from openapi_tool.bus.consumer import CommandConsumer, ConsumerOptions
from openapi_tool.bus.doorbell import Doorbell
from openapi_tool.bus.redacted import RedactedDeadLetters
from openapi_tool.bus.shared import shared_session_key
from openapi_tool.executor.continuation import Continuation, ContinuationOptions
from openapi_tool.executor.pipeline import Pipeline, PipelineOptions
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.egress import EgressTransport
from openapi_tool.jina.parameters import MAX_URL_CHARS
from openapi_tool.jina.retry import RetryOptions
from openapi_tool.jina.targets import TargetRules
from openapi_tool.jina.tools import JinaOptions, JinaTools
from openapi_tool.jina.transport import AiohttpTransport, Resolver
from openapi_tool.kernel.store import KernelStore
from openapi_tool.prepared import NAME, Prepared, operator_envs, prepare
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.settings import Settings, SettingsError
from openapi_tool.steps import Turns
from openapi_tool.telemetry.health import CONSUMER, NATS, POSTGRES, Health, health_server, watch_loop_lag
from openapi_tool.telemetry.logs import configure_logging
from openapi_tool.telemetry.redact import MIN_SECRET_CHARS
from openapi_tool.telemetry.traces import WireTracer
from openapi_tool.tools.cursor import Cursors
from openapi_tool.tools.session import SessionScope

try:
    import uvloop
except ImportError:  # not built for this platform
    _new_event_loop = asyncio.new_event_loop
else:
    _new_event_loop = uvloop.new_event_loop

if TYPE_CHECKING:
    from openapi_tool.telemetry.otlp import ExportingTracer

T = TypeVar("T")

_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _LARGE_BYTES = -3, -1, 4 * 2**20  # mallopt(3)
_CONSUMER_SILENCE_S = 15.0

log = logging.getLogger(__name__)


def run(settings: Settings, environment: Mapping[str, str], resolver: Resolver | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    `resolver` says where the upstream's hosts are; only the embedded stack passes one. Raises
    SettingsError before any connection is made.
    """
    prepared = prepare(settings, environment)
    configure_logging(settings.telemetry.log_level, settings.telemetry.log_format, prepared.redactor)
    _log_configuration(prepared)
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(_serve(prepared, resolver))


async def _serve(prepared: Prepared, resolver: Resolver | None) -> None:
    stop = _stop_on_signals()
    async with AsyncExitStack() as stack:
        await _serve_health(stack, prepared)
        parts = await _unless_stopped(stop, assemble(stack, prepared, resolver))
        if parts is None:
            return
        consumer = parts.consumer
        _collect_garbage_rarely()
        _give_large_memory_back()
        consumer.start()
        log.info("serving", extra={"action": "service.started", "durable": prepared.durable.name})
        try:
            await _unless_stopped(stop, _side_tasks(parts, prepared))
        finally:
            prepared.health.draining = True
            await consumer.stop(prepared.settings.executor.drain_s)
    log.info("stopped", extra={"action": "service.stopped"})


def _give_large_memory_back() -> None:
    """Let glibc take memory of 4 MB and more from the system each time, and give it back.

    By default it raises that threshold to the largest block that was ever freed, and answers of 10 MB leave holes that
    stay with the process. Other C libraries do it anyway.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 4 * _LARGE_BYTES)


def _collect_garbage_rarely() -> None:
    """Leave what lives as long as the process alone, and look for cycles less often: a call leaves hardly any."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@dataclass(frozen=True, slots=True)
class Parts:
    """What was put together, as far as somebody still has to look at it."""

    consumer: CommandConsumer
    kernel: KernelStore
    client: Client


async def assemble(stack: AsyncExitStack, prepared: Prepared, resolver: Resolver | None) -> Parts:
    """Connect everything, in an order that `stack` undoes backwards; the consumer is not yet started."""
    settings, health = prepared.settings, prepared.health
    kernel = await _until_available(lambda: KernelStore.open(prepared.pool))
    stack.push_async_callback(kernel.aclose)
    health.note(POSTGRES, ok=True)
    client = await _until_available(lambda: stack.enter_async_context(connected(prepared.bus)))
    health.note(NATS, ok=True)
    turns, errors = Turns(), prepared.redactor.at("error")
    jina = JinaClient(_transport(prepared, resolver), settings.egress.max_response_bytes, errors, turns)
    stack.push_async_callback(jina.aclose)
    tracer = _tracer(prepared)
    stack.callback(tracer.shutdown)
    session_key = await _session_key(settings, client)
    pipeline = Pipeline(
        _pipeline_options(prepared, SessionScope(session_key)),
        kernel,
        JinaTools(jina, _jina_options(settings), errors, turns),
        Continuation(kernel, Cursors(session_key), _continuation_options(prepared), turns),
        Doorbell(client, settings.protocol.version, NAME),
        tracer,
    )
    letters = RedactedDeadLetters(client, prepared.redactor.at("dead_letter"), settings.nats.replicas)
    consumer = CommandConsumer(
        client, _consumer_options(prepared), letters, pipeline.handle, lambda: health.ok(POSTGRES)
    )
    return Parts(consumer, kernel, client)


async def _serve_health(stack: AsyncExitStack, prepared: Prepared) -> None:
    options = prepared.settings.health
    if options.port:
        try:
            await stack.enter_async_context(health_server(options.host, options.port, prepared.health))
        except OSError as error:
            raise SettingsError([f"health.host, health.port: cannot be listened on: {error}"]) from error
        log.info("health server", extra={"action": "health.serving", "host": options.host, "port": options.port})


async def _side_tasks(parts: Parts, prepared: Prepared) -> None:
    """Everything that runs beside calls and never ends on its own; raises what ended one of them."""
    async with asyncio.TaskGroup() as group:
        group.create_task(parts.consumer.failed(), name="consumer")
        group.create_task(watch_loop_lag(parts.consumer.stalled), name="loop lag")
        group.create_task(_watch_parts(parts, prepared.health, prepared.settings.health.check_s), name="health")


async def _watch_parts(parts: Parts, health: Health, every_s: float) -> None:
    """Look at every part again and again; nothing is fetched while the database is away."""
    trouble = ""
    while True:
        trouble = await _trouble(parts.kernel, trouble)
        heard_s = time.monotonic() - parts.consumer.last_heard
        if health.note(POSTGRES, ok=not trouble):
            parts.consumer.wake()
        health.note(NATS, ok=parts.client.is_connected)
        health.note(CONSUMER, ok=heard_s < _CONSUMER_SILENCE_S)
        await asyncio.sleep(every_s)


async def _trouble(kernel: KernelStore, before: str) -> str:
    """Why the database cannot be used now, empty where it can; logged where it is not the same as `before`."""
    try:
        await kernel.ping()
    except Unavailable as error:
        if str(error) != before:
            log.warning("%s", error, extra={"action": "postgres.unavailable"})
        return str(error)
    return ""


def _consumer_options(prepared: Prepared) -> ConsumerOptions:
    executor = prepared.settings.executor
    return ConsumerOptions(
        durable=prepared.durable,
        concurrency=executor.concurrency,
        max_attempts=executor.max_attempts,
        hold_s=prepared.limits.maximum_s + executor.result_wait_s,
    )


def _log_configuration(prepared: Prepared) -> None:
    """The banner: what is in effect, credentials masked, keys by name and whether they are set."""
    settings, missing = prepared.settings, prepared.secrets.missing()
    keys = {variable: "missing" if variable in missing else "set" for variable in sorted(prepared.secrets.allowed)}
    log.info(
        "openapi-tool %s",
        __version__,
        extra={"action": "service.configured", "settings": settings.shown(), "keys": keys},
    )
    for variable in missing:
        log.warning(
            "%s is not set: calls of tools that need it will fail", variable, extra={"action": "secret.missing"}
        )
    for name in prepared.unmasked:
        log.warning(
            "%s holds a secret of less than %s characters, which cannot be masked in logs and cards: set a longer one",
            name,
            MIN_SECRET_CHARS,
            extra={"action": "secret.short"},
        )
    if settings.executor.concurrency == 1:
        log.warning(
            "executor.concurrency is 1: every call waits for the one before it", extra={"action": "concurrency.low"}
        )


def _pipeline_options(prepared: Prepared, scope: SessionScope) -> PipelineOptions:
    settings = prepared.settings
    return PipelineOptions(
        actor_id=settings.protocol.actor_id,
        limits=prepared.limits,
        gate=prepared.gate,
        envs=operator_envs(settings),
        secret=prepared.secrets,
        scope=scope,
        redact=prepared.redactor.at("error").value,
        retry_delay_s=settings.executor.retry_delay_s,
        result_wait_s=settings.executor.result_wait_s,
    )


def _continuation_options(prepared: Prepared) -> ContinuationOptions:
    settings = prepared.settings
    return ContinuationOptions(
        max_chars=settings.tools.max_result_chars,
        ttl_s=settings.tools.artifact_ttl_s,
        actor_id=settings.protocol.actor_id,
    )


def _jina_options(settings: Settings) -> JinaOptions:
    return JinaOptions(
        retry=RetryOptions(**settings.retry.model_dump()),
        max_batch_items=settings.tools.max_batch_items,
        body_budget_bytes=settings.egress.body_budget_bytes,
        cache_ttl_s=settings.cache.ttl_s,
        cache_bytes=settings.cache.max_bytes,
        targets=TargetRules(settings.targets.internal_suffixes, settings.targets.allow, MAX_URL_CHARS),
    )


def _transport(prepared: Prepared, resolver: Resolver | None) -> EgressTransport:
    """The one way out: every upstream call leaves through it."""
    egress = prepared.settings.egress
    return EgressTransport(
        AiohttpTransport(
            prepared.upstream_tls,
            egress.connections,
            resolver,
            proxy=egress.proxy,
            public_addresses_only=egress.public_addresses_only,
        )
    )


async def _session_key(settings: Settings, client: Client) -> bytes:
    if settings.session.key is not None:
        return settings.session.key.get_secret_value().encode()
    return await _until_available(lambda: shared_session_key(client, settings.nats.replicas))


async def _until_available(attempt: Callable[[], Awaitable[T]]) -> T:
    """Try for however long a part of the kernel takes to come up."""
    async for trial in AsyncRetrying(
        retry=retry_if_exception_type(Unavailable),
        wait=wait_exponential_jitter(multiplier=0.2, max=5, jitter=0.2),
        before_sleep=before_sleep_log(log, logging.WARNING),
    ):
        with trial:
            return await attempt()
    raise AssertionError("retrying never ends without a result")


def _tracer(prepared: Prepared) -> WireTracer | ExportingTracer:
    endpoint = prepared.settings.telemetry.otlp_endpoint
    if endpoint is None:
        return WireTracer()
    from openapi_tool.telemetry.otlp import open_tracer  # noqa: PLC0415 - 30 MB that few deployments need

    return open_tracer(endpoint, prepared.redactor.at("span"))


def _stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; a second one ends the process at once."""
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


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when `stop` comes first; `work` is cancelled then."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait([working, stopping])
