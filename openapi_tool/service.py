"""The composition root: builds the parts from settings, starts, drains and stops them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import AsyncRetrying, before_sleep_log, retry_if_exception_type, wait_exponential_jitter

from openapi_tool import __version__
from openapi_tool.bus.connection import connected
from openapi_tool.bus.consumer import CommandConsumer, ConsumerOptions
from openapi_tool.bus.dead_letters import DeadLetters
from openapi_tool.bus.doorbell import Doorbell
from openapi_tool.bus.streams import DurableOptions
from openapi_tool.executor.pipeline import Pipeline, PipelineOptions
from openapi_tool.executor.time_limit import TimeLimits
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.egress import EgressTransport, tls_context
from openapi_tool.jina.tools import JinaTools
from openapi_tool.jina.transport import AiohttpTransport, Resolver
from openapi_tool.kernel.store import KernelStore, PoolOptions
from openapi_tool.protocol.errors import Unavailable
from openapi_tool.protocol.subject import command_filter
from openapi_tool.settings import Settings, SettingsError
from openapi_tool.telemetry.logs import configure_logging
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.telemetry.traces import WireTracer
from openapi_tool.tools.definition import DEFAULT_AUTH_ENV
from openapi_tool.tools.secrets import Secrets

try:
    import uvloop
except ImportError:  # not built for this platform
    _new_event_loop = asyncio.new_event_loop
else:
    _new_event_loop = uvloop.new_event_loop

if TYPE_CHECKING:
    from openapi_tool.telemetry.otlp import ExportingTracer

T = TypeVar("T")

log = logging.getLogger(__name__)

NAME = "openapi-tool"


def run(settings: Settings, environment: Mapping[str, str], resolver: Resolver | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    `resolver` says where the upstream's hosts are; only the embedded stack passes one. Raises
    SettingsError when a setting can only be judged by trying it.
    """
    secrets = Secrets(environment, _allowed_variables(settings))
    redactor = Redactor([*secrets.values(), *settings.confidential()])
    configure_logging(settings.telemetry.log_level, settings.telemetry.log_format, redactor)
    tls = _tls(settings, environment)
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        runner.run(_serve(settings, secrets, redactor, AiohttpTransport(tls, settings.egress.connections, resolver)))


async def _serve(settings: Settings, secrets: Secrets, redactor: Redactor, transport: AiohttpTransport) -> None:
    stop = _stop_on_signals()
    async with AsyncExitStack() as stack:
        consumer = await _unless_stopped(stop, _build(stack, settings, secrets, redactor, transport))
        if consumer is None:
            return
        consumer.start()
        _log_start(settings, secrets)
        try:
            await _unless_stopped(stop, consumer.failed())
        finally:
            await consumer.stop(settings.executor.drain_s)
    log.info("stopped", extra={"action": "service.stopped"})


async def _build(
    stack: AsyncExitStack, settings: Settings, secrets: Secrets, redactor: Redactor, transport: AiohttpTransport
) -> CommandConsumer:
    """Connect everything, in an order that is undone backwards."""
    kernel = await _connect_kernel(settings)
    stack.push_async_callback(kernel.aclose)
    client = await stack.enter_async_context(connected(settings.nats.servers, NAME))
    jina = JinaClient(EgressTransport(transport), settings.egress.max_response_bytes)
    stack.push_async_callback(jina.aclose)
    tracer = _tracer(settings, redactor)
    stack.callback(tracer.shutdown)
    pipeline = Pipeline(
        _pipeline_options(settings, secrets, redactor),
        kernel,
        JinaTools(jina),
        Doorbell(client, settings.protocol.version, NAME),
        tracer,
    )
    options = ConsumerOptions(_durable_options(settings), settings.executor.concurrency)
    return CommandConsumer(client, options, DeadLetters(client), pipeline.handle)


def _log_start(settings: Settings, secrets: Secrets) -> None:
    for variable in secrets.missing():
        log.warning(
            "%s is not set: calls of tools that need it will fail", variable, extra={"action": "secret.missing"}
        )
    log.info("serving", extra={"action": "service.started", "version": __version__, "durable": settings.durable})


def _pipeline_options(settings: Settings, secrets: Secrets, redactor: Redactor) -> PipelineOptions:
    executor = settings.executor
    return PipelineOptions(
        actor_id=settings.protocol.actor_id,
        limits=TimeLimits(executor.worker_default_s, executor.margin_s, settings.tools.max_timeout_ms / 1000),
        service_envs=settings.tools.jina.envs_of(settings.protocol.target),
        secret=secrets,
        redact=redactor.value,
        retry_delay_s=executor.retry_delay_s,
    )


def _durable_options(settings: Settings) -> DurableOptions:
    protocol = settings.protocol
    return DurableOptions(
        version=protocol.version,
        name=settings.durable,
        filter_subject=command_filter(protocol.version, protocol.project, protocol.channel, protocol.target),
        ack_wait_s=settings.nats.ack_wait_s,
        max_ack_pending=settings.nats.max_ack_pending,
    )


def _allowed_variables(settings: Settings) -> set[str]:
    service_envs = settings.tools.jina.envs_of(settings.protocol.target)
    return {DEFAULT_AUTH_ENV, *settings.secrets.allowed_env, *service_envs.values()}


def _tls(settings: Settings, environment: Mapping[str, str]) -> ssl.SSLContext:
    ca_file = settings.egress.ca_file or environment.get("SSL_CERT_FILE")
    try:
        return tls_context(str(ca_file) if ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError([f"egress.ca_file or SSL_CERT_FILE: {ca_file}: {error}"]) from None


async def _connect_kernel(settings: Settings) -> KernelStore:
    """Connect to PostgreSQL, however long it takes to come up."""
    postgres = settings.postgres
    options = PoolOptions(
        postgres.dsn.get_secret_value(), postgres.pool_size, postgres.timeout_s, postgres.prepared_statements
    )
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(Unavailable),
        wait=wait_exponential_jitter(initial=0.2, max=5),
        before_sleep=before_sleep_log(log, logging.WARNING),
    ):
        with attempt:
            return await KernelStore.open(options)
    raise AssertionError("retrying never ends without a result")


def _tracer(settings: Settings, redactor: Redactor) -> WireTracer | ExportingTracer:
    endpoint = settings.telemetry.otlp_endpoint
    if endpoint is None:
        return WireTracer()
    from openapi_tool.telemetry.otlp import open_tracer  # noqa: PLC0415 - 30 MB that few deployments need

    return open_tracer(endpoint, redactor)


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
