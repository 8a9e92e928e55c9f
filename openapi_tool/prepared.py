"""Everything that can be made from settings before any connection: what is wrong shows here."""

from __future__ import annotations

import inspect
import os
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from openapi_tool.bus.connection import BusOptions
from openapi_tool.bus.streams import DurableOptions
from openapi_tool.confidential import confidential, unmasked
from openapi_tool.executor.time_limit import TimeLimits
from openapi_tool.jina.egress import tls_context
from openapi_tool.kernel.store import PoolOptions
from openapi_tool.protocol.subject import command_filter
from openapi_tool.settings import Settings, SettingsError
from openapi_tool.settings.model import NatsSettings
from openapi_tool.telemetry.health import Health
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.arguments import OperatorEnvs, fold
from openapi_tool.tools.definition import DEFAULT_AUTH_ENV
from openapi_tool.tools.policy import HOOKS_GROUP, Gate, Hook
from openapi_tool.tools.secrets import Secrets

NAME = "openapi-tool"
_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_SSL_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")


@dataclass(frozen=True, slots=True)
class Prepared:
    """The settings with all that follows from them; `unmasked` names secrets that are too short to be masked."""

    settings: Settings
    secrets: Secrets
    redactor: Redactor
    unmasked: list[str]
    upstream_tls: ssl.SSLContext
    bus: BusOptions
    pool: PoolOptions
    durable: DurableOptions
    limits: TimeLimits
    gate: Gate
    health: Health


def prepare(settings: Settings, environment: Mapping[str, str]) -> Prepared:
    """Judge what only trying can judge. Raises SettingsError naming every mistake."""
    problems = _dsn_problems(settings.postgres.dsn.get_secret_value())
    secrets = Secrets(environment, _allowed_variables(settings))
    problems += [*secrets.problems, *_unreadable(settings.nats)]
    upstream_tls = _tried(lambda: _upstream_tls(settings, environment), "egress.ca_file or SSL_CERT_FILE", problems)
    bus_tls = _tried(lambda: _bus_tls(settings.nats), "nats.ca_file, nats.cert_file or nats.key_file", problems)
    hooks = _hooks(settings.policy.hooks, problems)
    if problems or upstream_tls is None:
        raise SettingsError(problems)
    named = confidential(settings, secrets, environment)
    return Prepared(
        settings=settings,
        secrets=secrets,
        redactor=Redactor(value for _, value in named),
        unmasked=unmasked(named),
        upstream_tls=upstream_tls,
        bus=BusOptions(settings.nats.servers, NAME, bus_tls, _login(settings.nats)),
        pool=_pool_options(settings),
        durable=durable_options(settings),
        limits=_limits(settings),
        gate=Gate(settings.policy.policy(), hooks, settings.policy.hook_timeout_ms / 1000),
        health=Health(),
    )


def _limits(settings: Settings) -> TimeLimits:
    executor, tools = settings.executor, settings.tools
    default_s = None if tools.default_timeout_ms is None else tools.default_timeout_ms / 1000
    return TimeLimits(executor.worker_default_s, executor.margin_s, tools.max_timeout_ms / 1000, default_s)


def _hooks(names: Iterable[str], problems: list[str]) -> dict[str, Hook]:
    """The hooks of these names, as installed packages offer them."""
    offered = {point.name: point for point in entry_points(group=HOOKS_GROUP)}
    found: dict[str, Hook] = {}
    for name in names:
        try:
            found[name] = offered[name].load()
        except KeyError:
            problems.append(
                f"policy.hooks: no installed package offers {name!r} in the entry point group {HOOKS_GROUP}"
            )
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything while it is imported
            problems.append(f"policy.hooks: {name} cannot be loaded: {type(error).__name__}: {error}")
    problems += [f"policy.hooks: {name} is no async callable" for name, hook in found.items() if not _is_async(hook)]
    return found


def _is_async(hook: Hook) -> bool:
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004


def _tried(make: Callable[[], ssl.SSLContext | None], settings: str, problems: list[str]) -> ssl.SSLContext | None:
    try:
        return make()
    except (OSError, ssl.SSLError) as error:
        problems.append(f"{settings}: cannot be used: {error}")
        return None


def _dsn_problems(dsn: str) -> list[str]:
    """What the driver would say of the connection string's TLS part only when it connects, and again and again."""
    query = dict(parse_qsl(urlsplit(dsn).query))
    mode = query.get("sslmode", "prefer")
    problems = [] if mode in _SSL_MODES else [f"postgres.dsn: sslmode {mode!r} is none of {', '.join(_SSL_MODES)}"]
    unreadable = [name for name in _SSL_FILES if name in query and not os.access(query[name], os.R_OK)]
    return [*problems, *(f"postgres.dsn: {name}={query[name]} cannot be read" for name in unreadable)]


def _unreadable(nats: NatsSettings) -> list[str]:
    files = {"credentials_file": nats.credentials_file, "nkey_seed_file": nats.nkey_seed_file}
    return [f"nats.{name}: cannot be read" for name, file in files.items() if file and not os.access(file, os.R_OK)]


def _allowed_variables(settings: Settings) -> set[str]:
    service_envs = settings.tools.jina.envs_of(settings.protocol.target)
    return {DEFAULT_AUTH_ENV, *settings.secrets.allowed_env, *service_envs.values()}


def operator_envs(settings: Settings) -> OperatorEnvs:
    """The operator's `envs` for his target, and the arguments that definitions may map to a secret."""
    variables = settings.tools.jina.envs_of(settings.protocol.target)
    parameters = frozenset(fold(name) for name in (*settings.secrets.env_parameters, *variables))
    return OperatorEnvs(variables, parameters)


def _upstream_tls(settings: Settings, environment: Mapping[str, str]) -> ssl.SSLContext:
    return tls_context(str(settings.egress.ca_file or environment.get("SSL_CERT_FILE") or "") or None)


def _bus_tls(nats: NatsSettings) -> ssl.SSLContext | None:
    if not nats.tls and nats.ca_file is None and not any(url.startswith(("tls:", "wss:")) for url in nats.servers):
        return None
    context = ssl.create_default_context(cafile=nats.ca_file)
    if nats.cert_file and nats.key_file:
        context.load_cert_chain(nats.cert_file, nats.key_file)
    context.check_hostname = nats.tls_check_hostname
    return context


def _login(nats: NatsSettings) -> dict[str, str]:
    """The client library's own names for the one way to authenticate that is set."""
    ways: dict[str, str | Path | None] = {
        "user": nats.user,
        "password": nats.password.get_secret_value() if nats.password else None,
        "token": nats.token.get_secret_value() if nats.token else None,
        "user_credentials": nats.credentials_file,
        "nkeys_seed": nats.nkey_seed_file,
    }
    return {name: str(value) for name, value in ways.items() if value}


def _pool_options(settings: Settings) -> PoolOptions:
    postgres = settings.postgres
    return PoolOptions(
        dsn=postgres.dsn.get_secret_value(),
        size=postgres.pool_size,
        timeout_s=postgres.timeout_s,
        prepared_statements=postgres.prepared_statements,
    )


def durable_options(settings: Settings) -> DurableOptions:
    """The durable that settings ask for."""
    protocol = settings.protocol
    return DurableOptions(
        version=protocol.version,
        name=settings.durable,
        filter_subject=command_filter(protocol.version, protocol.project, protocol.channel, protocol.target),
        ack_wait_s=settings.nats.ack_wait_s,
        max_ack_pending=settings.nats.max_ack_pending,
        replicas=settings.nats.replicas,
    )
