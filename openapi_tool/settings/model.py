"""Model of all settings.

Sources in ascending precedence: defaults, the kernel's `config.toml`, the executor's TOML file, short names of
variables, `OPENAPI_TOOL__SECTION__KEY`, flags.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, field_validator, model_validator
from pydantic.dataclasses import dataclass as validated
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from openapi_tool.dsn import ESCAPE
from openapi_tool.environment import DEFAULT_AUTH_ENV, PREFIX
from openapi_tool.jina.options import CacheOptions, EgressOptions, RetryOptions
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.nats_client.options import FairnessOptions, NatsConnection, NatsOptions, QuotaOptions
from openapi_tool.options.budgets import BudgetOptions
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.options.gateway import GatewayOptions
from openapi_tool.options.isolation import IsolationOptions
from openapi_tool.options.postgres import PostgresOptions
from openapi_tool.options.section import HostNames, Options, Seconds, split
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.dialect import DEFAULT_VERSION, ProtocolVersion, namespace_of
from openapi_tool.protocol.subjects import default_durable
from openapi_tool.quotas.options import LimitOptions
from openapi_tool.settings.sections import (
    TARGET,
    ActorId,
    JinaToolSettings,
    SecretsSettings,
)
from openapi_tool.settings.sources import file_sources, kernel_remarks
from openapi_tool.tools.key_shapes import looks_like_a_key
from openapi_tool.tools.policy import Policy
from openapi_tool.tools.secret_variables import Secret, is_executors_own
from openapi_tool.tools.session_identities import MIN_KEY_BYTES
from openapi_tool.urls import HTTP_SCHEMES, ServerUrl, checked_address, parse_url

_TOKEN = r"^([A-Za-z0-9_-]+|\*)$"  # noqa: S105 - a subject's token


@validated(frozen=True)
class ProtocolSettings(Options):
    """Protocol version and identity."""

    version: ProtocolVersion = Field(default=DEFAULT_VERSION, description="Protocol version of the kernel.")
    target: str = Field(
        default="jina", pattern=r"^[A-Za-z0-9_-]+$", description="Tool target, a subject's seventh token."
    )
    actor_id: ActorId = Field(
        default="tool.openapi",
        pattern=r"^tool\.\S+$",
        description="Author of result cards; must start with `tool.`; `{target}` in it stands for the tool target.",
    )
    project: str = Field(default="*", pattern=_TOKEN, description="Run only the commands of this project; `*` for all.")
    channel: str = Field(default="*", pattern=_TOKEN, description="Run only the commands of this channel; `*` for all.")


@validated(frozen=True)
class ToolsSettings(ToolOptions):
    """Limits of tool calls."""

    jina: Annotated[
        JinaToolSettings,
        Field(
            description="Secret arguments and their variables: `envs` for all targets, `services.TARGET.envs` for one."
        ),
    ] = field(default_factory=JinaToolSettings)


def _is_long_enough(key: Secret) -> Secret:
    """Check the length here, as pydantic's message would tell it."""
    if len(key.get_secret_value()) < MIN_KEY_BYTES:
        raise ValueError(f"must have at least {MIN_KEY_BYTES} characters")
    return key


SessionKey = Annotated[Secret, AfterValidator(_is_long_enough), Field(json_schema_extra={"minLength": MIN_KEY_BYTES})]


@validated(frozen=True)
class SessionSettings(Options):
    """Session identities."""

    key: SessionKey | None = Field(
        default=None,
        description="HMAC key of session identities, at least 16 bytes; by default generated and stored in NATS.",
    )


@validated(frozen=True)
class HealthSettings(Options):
    """Server of /livez, /readyz and /metrics; one request per connection, within 5 seconds."""

    host: Annotated[str, AfterValidator(checked_address)] = Field(
        default="127.0.0.1", description="Address to listen on; 0.0.0.0 in a pod."
    )
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 starts no server.")
    check_interval_s: Seconds = Field(default=1, description="Health check interval in seconds.")
    page: bool = Field(
        default=False, description="Serve a status page of this replica at `/`, with ids of calls and no payloads."
    )
    allowed_hosts: HostNames = Field(
        default=(),
        max_length=100,
        description="Public names under which metrics, `/readyz` and the page are read, beside addresses and internal "
        "names; comma-separated in the environment.",
    )


@validated(frozen=True)
class TelemetrySettings(Options):
    """Logs, traces and metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Lowest level logged.")
    log_format: Literal["json", "console"] = Field(
        default="json", description="`json` for machines, `console` for people."
    )
    otlp_endpoint: str | None = Field(default=None, description="URL of an OTLP/HTTP collector for traces.")
    otlp_metrics_endpoint: str | None = Field(default=None, description="URL of an OTLP/HTTP collector for metrics.")
    otlp_metrics_interval_s: Seconds = Field(default=30, description="Seconds between exports of the metrics.")
    trace_ratio: float = Field(default=1, ge=0, le=1, description="Fraction (0 to 1) of the sampled traces to export.")
    projects: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)] = Field(
        default=(),
        max_length=100,
        description="Projects that get a label in the metrics of calls and tokens, at most 100.",
    )

    @field_validator("otlp_endpoint", "otlp_metrics_endpoint")
    @classmethod
    def _check_collector_url(cls, url: str | None) -> str | None:
        if url is not None:
            try:
                parse_url(url, HTTP_SCHEMES)
            except ValueError as problem:
                raise ValueError(f"{problem}; must look like https://host:4318/v1/…, and {ESCAPE}") from None
        return url


T = TypeVar("T", bound=Options)


def with_values(options: T, **values: Any) -> T:
    """Return a copy with other values, unvalidated: a file may be gone meanwhile."""
    changed = copy(options)
    changed.__dict__.update(values)
    return changed


class Settings(BaseSettings):
    """All settings."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
    )

    protocol: ProtocolSettings = Field(default_factory=ProtocolSettings)
    nats: NatsOptions = Field(default_factory=NatsOptions)
    postgres: PostgresOptions
    executor: ExecutorOptions = Field(default_factory=ExecutorOptions)
    isolation: IsolationOptions = Field(default_factory=IsolationOptions)
    fairness: FairnessOptions = Field(default_factory=FairnessOptions)
    tools: ToolsSettings = Field(default_factory=ToolsSettings)
    policy: Policy = Field(default_factory=Policy)
    url_policy: UrlPolicy = Field(default_factory=UrlPolicy)
    secrets: SecretsSettings = Field(default_factory=SecretsSettings)
    session: SessionSettings = Field(default_factory=SessionSettings)
    egress: EgressOptions = Field(default_factory=EgressOptions)
    retry: RetryOptions = Field(default_factory=RetryOptions)
    cache: CacheOptions = Field(default_factory=CacheOptions)
    limits: LimitOptions = Field(default_factory=LimitOptions)
    budgets: BudgetOptions = Field(default_factory=BudgetOptions)
    quotas: QuotaOptions = Field(default_factory=QuotaOptions)
    gateway: GatewayOptions = Field(default_factory=GatewayOptions)
    health: HealthSettings = Field(default_factory=HealthSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    _remarks: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _narrowed_needs_a_durable(self) -> Settings:
        narrowed = self.protocol.project != "*" or self.protocol.channel != "*"
        if narrowed and self.nats.durable is None:
            raise ValueError("nats.durable must be set where protocol.project or protocol.channel narrows the filter")
        return self

    @model_validator(mode="after")
    def _lower_max_lost_runs(self) -> Settings:
        """Lower max_lost_runs so that these runs fit into a worker's wait: a later result would be refused."""
        wait_s = self.executor.worker_timeout_s - self.executor.commit_margin_s
        ack_wait_s = self.nats.ack_wait_s
        fitting = max(1, math.ceil(wait_s / ack_wait_s) - 1)
        if fitting < self.executor.max_lost_runs:
            self._remarks.append(
                f"executor.max_lost_runs is lowered from {self.executor.max_lost_runs} to {fitting}: times "
                f"nats.ack_wait_s ({ack_wait_s:g} s) it must be less than executor.worker_timeout_s less "
                f"executor.commit_margin_s ({wait_s:g} s), or a call that lost its executors is answered too late"
            )
            object.__setattr__(self, "executor", with_values(self.executor, max_lost_runs=fitting))
        if self.executor.requeue_delay_s >= wait_s:
            raise ValueError("executor.requeue_delay_s must be less than the time that a worker waits; lower it")
        return self

    @model_validator(mode="after")
    def _limits_name_keys_of_tools(self) -> Settings:
        allowed = {name.upper() for name in self.tool_variables}
        for section in ("keys", "pools"):
            for name in getattr(self.limits, section):
                if name.upper() not in allowed:  # may be a key that was pasted here
                    shown = "a variable" if looks_like_a_key(name) else name
                    raise ValueError(f"limits.{section}: no tool may use {shown}; add it to secrets.allowed_env")
        if own := next(filter(is_executors_own, self.limits.pooled), None):
            raise ValueError(f"limits.pools: {own} is one of the executor's own settings; remove it")
        return self

    @property
    def tool_variables(self) -> set[str]:
        """Return the variables that tools may use."""
        service_envs = self.tools.jina.envs_of(self.protocol.target)
        return {DEFAULT_AUTH_ENV, *self.secrets.allowed_env, *service_envs.values(), *self.limits.pooled}

    @property
    def remarks(self) -> list[str]:
        """Return a line for each value that is changed or ignored."""
        return [*self._remarks, *kernel_remarks()]

    @property
    def durable(self) -> str:
        """Return the name of the durable."""
        return self.nats.durable or default_durable(self.protocol.version, self.protocol.target)

    @property
    def quota_namespace(self) -> str:
        """Return what keeps equal project ids of kernels that share quotas apart; may be empty."""
        return self.quotas.kernel or namespace_of(self.protocol.version)

    @property
    def actor_id(self) -> str:
        """Return the author of result cards."""
        return self.protocol.actor_id.replace(TARGET, self.protocol.target)

    def secret_values(self) -> Iterator[tuple[str, str]]:
        """Yield every secret in the settings, with the name of its setting."""
        secrets = [("session.key", self.session.key)]
        parts = [(f"{section}.{name}", url.credentials) for section, name, url in self._urls()]
        for section, nats in self.nats_connections:
            secrets += [(f"{section}.password", nats.password), (f"{section}.token", nats.token)]
            parts += [(f"{section}.servers", url.credentials) for url in nats.parsed]
        parts.append(("postgres.dsn", self.postgres.parsed.credentials))
        yield from ((name, secret.get_secret_value()) for name, secret in secrets if secret is not None)
        yield from ((name, part) for name, credentials in parts for part in credentials)

    @property
    def nats_connections(self) -> list[tuple[str, NatsConnection]]:
        """Return the connections to NATS, by the name of their section."""
        connections: list[tuple[str, NatsConnection]] = [("nats", self.nats)]
        if self.quotas.nats:
            connections.append(("quotas.nats", self.quotas.nats))
        return connections

    def _urls(self) -> Iterator[tuple[str, str, ServerUrl]]:
        if self.egress.proxy is not None:
            yield "egress", "proxy", parse_url(self.egress.proxy.get_secret_value(), HTTP_SCHEMES)
        for name in ("otlp_endpoint", "otlp_metrics_endpoint"):
            if (url := getattr(self.telemetry, name)) is not None:
                yield "telemetry", name, parse_url(url, HTTP_SCHEMES)

    def shown(self) -> dict[str, Any]:
        """Return the effective settings for display, with masked credentials."""
        shown = self.model_dump(mode="json", exclude_none=True)
        shown["postgres"]["dsn"] = self.postgres.parsed.shown
        shown["nats"]["servers"] = [url.shown for url in self.nats.parsed]
        shown["nats"]["durable"] = self.durable
        if self.quotas.nats is not None:
            shown["quotas"]["nats"]["servers"] = [url.shown for url in self.quotas.nats.parsed]
        for section, name, url in self._urls():
            shown[section][name] = url.shown
        return shown

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources by precedence."""
        del dotenv_settings, file_secret_settings
        if isinstance(env_settings, EnvSettingsSource):  # each section searches all variables: pass ours only
            own = (item for item in env_settings.env_vars.items() if item[0].startswith(PREFIX.lower()))
            env_settings.env_vars = dict(own)
        return init_settings, env_settings, *file_sources(settings_cls)
