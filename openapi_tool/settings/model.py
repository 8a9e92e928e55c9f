"""The settings: all sections together, with the checks that concern several sections.

Sources in ascending precedence: defaults, the kernel's `config.toml`, the executor's TOML file, short names of
variables, `OPENAPI_TOOL__SECTION__KEY`, flags. The section of a component is the options class of that component; other
sections are in `sections.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from typing import Any, TypeVar

from pydantic import Field, PrivateAttr, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from openapi_tool.environment import DEFAULT_AUTH_ENV, PREFIX
from openapi_tool.jina.options import CacheOptions, EgressOptions, RetryOptions
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.nats_client.options import FairnessOptions, NatsConnection, NatsOptions, QuotaOptions
from openapi_tool.options.budgets import BudgetOptions
from openapi_tool.options.executor import ExecutorOptions
from openapi_tool.options.gateway import GatewayOptions
from openapi_tool.options.isolation import IsolationOptions
from openapi_tool.options.postgres import PostgresOptions
from openapi_tool.options.section import Options
from openapi_tool.protocol.dialect import namespace_of
from openapi_tool.protocol.subjects import default_durable
from openapi_tool.quotas.options import LimitOptions
from openapi_tool.settings.sections import (
    TARGET,
    HealthSettings,
    ProtocolSettings,
    SecretsSettings,
    SessionSettings,
    TelemetrySettings,
    ToolsSettings,
)
from openapi_tool.settings.sources import file_sources, kernel_remarks
from openapi_tool.tools.key_shapes import looks_like_a_key
from openapi_tool.tools.policy import Policy
from openapi_tool.tools.secret_variables import is_executors_own
from openapi_tool.urls import HTTP_SCHEMES, ServerUrl, parse_url

T = TypeVar("T", bound=Options)


def with_values(options: T, **values: Any) -> T:
    """Return a copy with other values, which are not validated.

    `dataclasses.replace` would validate all values again, and a file that one of them names may be gone meanwhile.
    """
    changed = copy(options)
    changed.__dict__.update(values)  # the class is frozen, so `setattr` is refused
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
        """Lower max_lost_runs so that these runs fit into the time that a worker waits; it refuses a later result.

        A lost run is a run of a command whose process has died. NATS redelivers the command `ack_wait_s` later.
        """
        wait_s = self.executor.worker_timeout_s - self.executor.commit_margin_s
        ack_wait_s = self.nats.ack_wait_s
        fitting = max(1, math.ceil(wait_s / ack_wait_s) - 1)  # the most for which fitting * ack_wait_s < wait_s
        if fitting < self.executor.max_lost_runs:
            self._remarks.append(
                f"executor.max_lost_runs is lowered from {self.executor.max_lost_runs} to {fitting}: times "
                f"nats.ack_wait_s ({ack_wait_s:g} s) it must be less than executor.worker_timeout_s less "
                f"executor.commit_margin_s ({wait_s:g} s), or a call that lost its executors is answered too late"
            )
            lowered = with_values(self.executor, max_lost_runs=fitting)
            object.__setattr__(self, "executor", lowered)  # the model is frozen
        return self

    @model_validator(mode="after")
    def _requeue_delay_fits(self) -> Settings:
        """Refuse a delay after which no worker waits for the call any more."""
        wait_s = self.executor.worker_timeout_s - self.executor.commit_margin_s
        if self.executor.requeue_delay_s >= wait_s:
            raise ValueError("executor.requeue_delay_s must be less than the time that a worker waits; lower it")
        return self

    @model_validator(mode="after")
    def _limits_name_keys_of_tools(self) -> Settings:
        """Refuse limits for the key in a variable that no tool may use: they would have no effect."""
        allowed = {name.upper() for name in self.tool_variables}
        for section in ("keys", "pools"):
            for name in getattr(self.limits, section):
                if name.upper() not in allowed:  # may be a key that was pasted here
                    shown = "a variable" if looks_like_a_key(name) else name
                    raise ValueError(f"limits.{section}: no tool may use {shown}; add it to secrets.allowed_env")
        for name in self.limits.pooled:
            if is_executors_own(name):
                raise ValueError(f"limits.pools: {name} is one of the executor's own settings; remove it")
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
        """Return the name of the durable, JetStream's record of which commands are delivered and acknowledged."""
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
        in_urls = [(f"{section}.{key}", url.credentials) for section, key, url in self._urls()]
        for section, nats in self.nats_connections:
            secrets += [(f"{section}.password", nats.password), (f"{section}.token", nats.token)]
            in_urls += [(f"{section}.servers", url.credentials) for url in nats.parsed]
        in_urls.append(("postgres.dsn", self.postgres.parsed.credentials))
        for name, secret in secrets:
            if secret is not None:
                yield name, secret.get_secret_value()
        for name, credentials in in_urls:
            for credential in credentials:
                yield name, credential

    @property
    def nats_connections(self) -> list[tuple[str, NatsConnection]]:
        """Return the connections to NATS, by the name of their section."""
        connections: list[tuple[str, NatsConnection]] = [("nats", self.nats)]
        if self.quotas.nats:
            connections.append(("quotas.nats", self.quotas.nats))
        return connections

    def _urls(self) -> Iterator[tuple[str, str, ServerUrl]]:
        """Yield section, key and value of each setting that is a single URL, which may contain a password."""
        if self.egress.proxy is not None:
            yield "egress", "proxy", parse_url(self.egress.proxy.get_secret_value(), HTTP_SCHEMES)
        for key in ("otlp_endpoint", "otlp_metrics_endpoint"):
            url = getattr(self.telemetry, key)
            if url is not None:
                yield "telemetry", key, parse_url(url, HTTP_SCHEMES)

    def shown(self) -> dict[str, Any]:
        """Return the effective settings for display, with masked credentials."""
        shown = self.model_dump(mode="json", exclude_none=True)
        shown["postgres"]["dsn"] = self.postgres.parsed.shown
        shown["nats"]["servers"] = [url.shown for url in self.nats.parsed]
        shown["nats"]["durable"] = self.durable
        if self.quotas.nats is not None:
            shown["quotas"]["nats"]["servers"] = [url.shown for url in self.quotas.nats.parsed]
        for section, key, url in self._urls():
            shown[section][key] = url.shown
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
        """Return the sources in descending precedence (called by pydantic-settings)."""
        del dotenv_settings, file_secret_settings
        if isinstance(env_settings, EnvSettingsSource):
            # Each section searches all variables, so pass ours only, which saves time.
            env_settings.env_vars = {
                name: value for name, value in env_settings.env_vars.items() if name.startswith(PREFIX.lower())
            }
        return init_settings, env_settings, *file_sources(settings_cls)
