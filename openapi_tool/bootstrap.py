"""Build from the settings all objects that need no connection, and report every mistake at once.

All doors use it: `build_bootstrap` checks files, hooks and logins, `Upstream` has what sends requests to Jina, and
`build_runner` makes the engine that runs tool calls. Helpers that may find several mistakes add them to a list
`problems`, which then becomes one SettingsError.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path

from openapi_tool.engine.pagination import Pagination
from openapi_tool.engine.ports import Artifacts
from openapi_tool.engine.runner import RunnerOptions, ToolRunner
from openapi_tool.isolation.service import Isolation
from openapi_tool.jina.backend import JinaBackend, JinaBackendOptions
from openapi_tool.jina.client import JinaClient
from openapi_tool.jina.egress import EgressTransport, tls_context
from openapi_tool.jina.retries import Sleep
from openapi_tool.nats_client.login import file_problems
from openapi_tool.nats_client.options import BusOptions, DurableOptions
from openapi_tool.nats_client.users import NatsUser
from openapi_tool.options.postgres import PoolOptions
from openapi_tool.protocol.subjects import command_filter
from openapi_tool.quotas.budgets import Budgets
from openapi_tool.quotas.permits import Permits
from openapi_tool.settings import PREFIX, Settings, SettingsError
from openapi_tool.settings.driver_options import DriverOptions
from openapi_tool.settings.known_secrets import secret_values, unmasked
from openapi_tool.settings.model import with_values
from openapi_tool.telemetry.health import Health
from openapi_tool.telemetry.redact import Redactor
from openapi_tool.tools.argument_names import fold
from openapi_tool.tools.arguments import ArgumentSources, OperatorEnvs
from openapi_tool.tools.cursors import Cursors
from openapi_tool.tools.lint import LintLimits
from openapi_tool.tools.policy import HOOKS_GROUP, Authorizer, Hook
from openapi_tool.tools.secret_variables import Secrets
from openapi_tool.tools.session_identities import SessionIdentities

NAME = "openapi-tool"
QUOTAS_SECTION = "quotas.nats"


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Settings and the objects built from them.

    - `secrets`: the variables that tools may use, with their values.
    - `unmasked`: names of secrets that are too short or common to be masked.
    - `bus`: the connection to the kernel's NATS; `pool`: to its PostgreSQL.
    - `quotas`: the connection to the NATS that holds the records of limits and budgets; None if that is the kernel's.
    """

    settings: Settings
    secrets: Secrets
    redactor: Redactor
    unmasked: list[str]
    upstream_tls: ssl.SSLContext
    bus: BusOptions
    pool: PoolOptions
    durable: DurableOptions
    authorizer: Authorizer
    health: Health
    quotas: BusOptions | None = None

    @property
    def version(self) -> str:
        """Return the protocol version."""
        return self.settings.protocol.version


def build_bootstrap(settings: Settings, environment: Mapping[str, str]) -> Bootstrap:
    """Build the bootstrap. Raises SettingsError with every mistake in files, hooks and logins."""
    problems: list[str] = []
    driver_options = _driver_options(settings, environment, problems)
    problems += file_problems(settings.nats)
    quotas = _quotas(settings, problems)
    secrets = tool_secrets(settings, environment)
    problems += secrets.problems
    ca_file = settings.egress.ca_file or environment.get("SSL_CERT_FILE")
    upstream_tls = _upstream_tls(str(ca_file) if ca_file else None, problems)
    hooks = _hooks(settings.policy.hooks, problems)
    if problems or upstream_tls is None or driver_options is None:
        raise SettingsError(problems)

    named_secrets = secret_values(settings, secrets, environment, driver_options)
    redactor = Redactor(secret.value for secret in named_secrets)
    authorizer = Authorizer(settings.policy, hooks)
    return Bootstrap(
        settings=settings,
        secrets=secrets,
        redactor=redactor,
        unmasked=unmasked(named_secrets),
        upstream_tls=upstream_tls,
        bus=BusOptions(settings.nats, NAME, on_login=redactor.add),
        pool=PoolOptions(settings.protocol.version, settings.postgres),
        durable=durable_options(settings),
        authorizer=authorizer,
        health=Health(redact=redactor.with_label("health").text),
        quotas=None if quotas is None else replace(quotas, on_login=redactor.add),
    )


def _quotas(settings: Settings, problems: list[str]) -> BusOptions | None:
    """Return the connection to the quotas' NATS, None if there is none; add mistakes in its files to `problems`."""
    options = settings.quotas.nats
    if options is None:
        return None
    problems += file_problems(options, QUOTAS_SECTION)
    variable = f"{PREFIX}{QUOTAS_SECTION.replace('.', '__').upper()}__SERVERS"
    setting = f"{QUOTAS_SECTION}.servers ({variable})"
    options = with_values(options, inbox_prefix=NatsUser.QUOTAS.inbox_prefix(options.inbox_prefix))
    return BusOptions(options, NAME, listed_by="openapi-tool nats permissions --for quotas", setting=setting)


class Upstream:
    """What sends requests to Jina (`backend`), and runs costly work in worker processes (`isolation`).

    With None for `permits` (rate limits) or `budgets` nothing is limited. Without `isolation` all runs in this process.
    """

    def __init__(
        self,
        bootstrap: Bootstrap,
        transport: EgressTransport,
        permits: Permits | None,
        budgets: Budgets | None,
        sleep: Sleep = asyncio.sleep,
        isolation: Isolation | None = None,
    ) -> None:
        self.isolation = isolation or Isolation()
        settings = bootstrap.settings
        client = JinaClient(transport, settings.egress.max_response_bytes, self.isolation.pool)
        options = JinaBackendOptions(
            settings.retry, settings.cache, settings.tools, settings.url_policy, settings.egress
        )
        self.backend = JinaBackend(client, options, sleep, permits, budgets)


def build_runner(bootstrap: Bootstrap, upstream: Upstream, artifacts: Artifacts, session_key: bytes) -> ToolRunner:
    """Build the runner; `session_key` derives session identities and signs cursors."""
    settings = bootstrap.settings
    options = RunnerOptions(
        authorizer=bootstrap.authorizer,
        arguments=ArgumentSources(operator_envs(settings), bootstrap.secrets, SessionIdentities(session_key)),
        quota_namespace=settings.quota_namespace,
        isolation=upstream.isolation,
    )
    pagination = Pagination(artifacts, Cursors(session_key), settings.tools, upstream.isolation)
    return ToolRunner(options, upstream.backend, pagination)


def derived_key(key: bytes, namespace: str) -> bytes:
    """Return the session key of a namespace, such as that of a protocol version; an empty one has the `key` itself.

    Kernels of two versions may share a NATS, and so its key, but their agents must share no session.
    """
    if not namespace:
        return key
    return hmac.digest(key, namespace.encode(), hashlib.sha256)


def _hooks(names: Sequence[str], problems: list[str]) -> dict[str, Hook]:
    """Load the hooks of the policy, functions of installed packages that may refuse a call."""
    if not names:  # reading entry points takes a while
        return {}
    offered = {point.name: point for point in entry_points(group=HOOKS_GROUP)}
    hooks: dict[str, Hook] = {}
    for index, name in enumerate(names):
        try:
            hooks[name] = offered[name].load()
        except KeyError:
            problems.append(
                f"policy.hooks.{index}: no installed package has this entry point in the group {HOOKS_GROUP}; "
                f"available: {', '.join(offered) or 'none'}"
            )
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything while it is imported
            problems.append(f"policy.hooks: {name} cannot be loaded: {type(error).__name__}: {error}")
    for name, hook in hooks.items():
        if not _is_async(hook):
            problems.append(f"policy.hooks: {name} is not an async callable")
    return hooks


def _is_async(hook: Hook) -> bool:
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004


def _upstream_tls(ca_file: str | None, problems: list[str]) -> ssl.SSLContext | None:
    """Return the TLS context for upstream requests."""
    try:
        return tls_context(ca_file)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "reason", None) or error.strerror or type(error).__name__
        why = why.partition(" (_ssl.c:")[0]  # a line of CPython's source
        problems.append(f"egress.ca_file or SSL_CERT_FILE: cannot be used: {why}; name readable PEM files")
        return None


def pool_options(settings: Settings, environment: Mapping[str, str]) -> PoolOptions:
    """Return the options of the database. Raises SettingsError."""
    problems: list[str] = []
    _driver_options(settings, environment, problems)
    if problems:
        raise SettingsError(problems)
    return PoolOptions(settings.protocol.version, settings.postgres)


def _driver_options(settings: Settings, environment: Mapping[str, str], problems: list[str]) -> DriverOptions | None:
    """Return the options that the PostgreSQL driver reads by itself; None if its service file cannot be parsed."""
    try:
        driver_options = DriverOptions(settings.postgres.parsed, environment, _home())
        problems += driver_options.problems()
    except ValueError as problem:
        problems.append(str(problem))
        return None
    return driver_options


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and no such user
        return None


def tool_secrets(settings: Settings, environment: Mapping[str, str]) -> Secrets:
    """Return the variables that definitions may name, with their values."""
    return Secrets(environment, settings.tool_variables, settings.limits.pool_of)


def operator_envs(settings: Settings) -> OperatorEnvs:
    """Return the operator's `envs`: which arguments of tools get their values from which variables."""
    variables = settings.tools.jina.envs_of(settings.protocol.target)
    parameters = frozenset(fold(name) for name in (*settings.secrets.env_parameters, *variables))
    return OperatorEnvs(variables, parameters)


def lint_limits(settings: Settings, *, known_to_be_serving: bool = False) -> LintLimits:
    """Return the limits for the linter; `known_to_be_serving` as in LintLimits."""
    return LintLimits(
        executor=settings.executor,
        tools=settings.tools,
        targets=frozenset({settings.protocol.target, *settings.tools.jina.services}),
        env_parameters=operator_envs(settings).parameters,
        allowed_env=frozenset(settings.tool_variables),
        known_to_be_serving=known_to_be_serving,
        budgets=settings.budgets,
    )


def durable_options(settings: Settings) -> DurableOptions:
    """Return name and configuration of the durable."""
    protocol = settings.protocol
    subjects = command_filter(protocol.version, protocol.project, protocol.channel, protocol.target)
    return DurableOptions(protocol.version, settings.durable, subjects, settings.nats)
