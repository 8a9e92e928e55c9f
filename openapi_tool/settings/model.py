"""Model of all settings.

Sources in ascending precedence: defaults, the kernel's `config.toml`, our TOML file, environment, flags. Each setting
is also the variable `OPENAPI_TOOL__SECTION__KEY`; `PG_DSN` and `NATS_SERVERS` are short names. The module
`sources` reads the files.
"""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, field_validator, model_validator
from pydantic.dataclasses import dataclass
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from openapi_tool.jina.byte_semaphore import most_memory
from openapi_tool.jina.url_policy import UrlPolicy
from openapi_tool.options import (
    MAX_ACK_PENDING,
    TERABYTE,
    CacheOptions,
    ExecutorOptions,
    FairnessOptions,
    LimitOptions,
    RetryOptions,
    Seconds,
    ToolOptions,
    split,
)
from openapi_tool.protocol.subject import default_durable
from openapi_tool.settings.dsn import ESCAPE, Dsn, parse_dsn
from openapi_tool.settings.secrets import JinaToolSettings, SecretsSettings
from openapi_tool.settings.section import File, Section
from openapi_tool.settings.sources import PREFIX, file_sources, kernel_remarks
from openapi_tool.settings.urls import checked_address, parse_url
from openapi_tool.tools.definition import DEFAULT_AUTH_ENV
from openapi_tool.tools.pasted_keys import looks_like_a_key
from openapi_tool.tools.policy import Policy
from openapi_tool.tools.secrets import Secret
from openapi_tool.tools.session import MIN_KEY_BYTES

_TOKEN = r"^([A-Za-z0-9_-]+|\*)$"  # noqa: S105 - a subject's token
_TCP, _WEB_SOCKET, _HTTP = ("nats", "tls"), ("ws", "wss"), ("http", "https")
SCHEMES = (*_TCP, *_WEB_SOCKET, *_HTTP)
"""Schemes of all URLs in the settings except the database's."""
_PROXY_FORM = "must look like http://user:password@host:port, with the port"


def _is_a_server(url: str) -> str:
    try:
        found = parse_url(url, (*_TCP, *_WEB_SOCKET))
    except ValueError as problem:
        raise ValueError(
            f"{problem}; must look like nats://host:4222, with an IPv6 address in brackets; set a user or password "
            "with one of / ? # @ : [ ] as nats.user and nats.password"
        ) from None
    if found.path or found.query:
        raise ValueError("must end with the host or its port: nats://host:4222")
    return url


NatsUrl = Annotated[str, AfterValidator(_is_a_server)]


class ProtocolSettings(Section):
    """Protocol version and identity."""

    version: Literal["v1r4"] = Field("v1r4", description="Protocol version, the second token of every subject.")
    target: str = Field("jina", pattern=r"^[A-Za-z0-9_-]+$", description="Tool target, the subject's seventh token.")
    actor_id: str = Field(
        "tool.openapi", pattern=r"^tool\.\S+$", description="Author of result cards; must start with `tool.`."
    )
    project: str = Field("*", pattern=_TOKEN, description="Only this project's commands; `*` for all.")
    channel: str = Field("*", pattern=_TOKEN, description="Only this channel's commands; `*` for all.")


class NatsSettings(Section):
    """NATS connection. At most one way to authenticate: user and password, token, credentials file or nkey seed."""

    servers: Annotated[tuple[NatsUrl, ...], NoDecode, BeforeValidator(split)] = Field(
        ("nats://127.0.0.1:4222",), min_length=1, description="Server URLs; comma-separated in the environment."
    )
    tls: bool = Field(
        default=False, description="Require TLS; a `tls://` or `wss://` server and `ca_file` require it, too."
    )
    tls_check_hostname: bool = Field(default=True, description="Verify the server's hostname.")
    ca_file: File | None = Field(None, description="CA (PEM) that signed the server's certificate.")
    cert_file: File | None = Field(None, description="Client certificate (PEM); needs `key_file`.")
    key_file: File | None = Field(None, description="Key of the client certificate (PEM).")
    user: str | None = Field(None, description="User name; needs `password`.")
    password: Secret | None = Field(None, description="Password of `user`.")
    token: Secret | None = Field(None, description="Token.")
    credentials_file: File | None = Field(None, description="Credentials file of a NATS account (`.creds`).")
    nkey_seed_file: File | None = Field(None, description="File with an nkey seed.")
    durable: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]+$",
        description="Durable consumer shared by all replicas; by default the kernel executor's own name.",
    )
    ack_wait_s: Seconds = Field(6, description="Seconds without a heartbeat until a command is delivered again.")
    max_ack_pending: int = Field(
        100_000,
        ge=1,
        le=MAX_ACK_PENDING,
        description="Commands in flight over all replicas; raised up to 1,000,000 while a backlog fills it.",
    )
    create_stream: bool = Field(
        default=True, description="Make the command stream where none captures its subjects; off where only others may."
    )
    jetstream_domain: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]+$",
        description="JetStream domain of the kernel, where executors are on a leaf node.",
    )
    inbox_prefix: str = Field(
        "_INBOX.openapi_tool",
        pattern=r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$",
        description="Prefix of the subjects on which replies are received.",
    )
    replicas: int | None = Field(
        None,
        ge=1,
        le=5,
        description="Servers that keep each stream and bucket that is made here; by default as for the command stream.",
    )

    @field_validator("servers")
    @classmethod
    def _use_one_transport(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        if len({url.lower().startswith(tuple(f"{scheme}:" for scheme in _WEB_SOCKET)) for url in servers}) > 1:
            raise ValueError("must be all nats:// and tls://, or all ws:// and wss://")
        return servers

    @model_validator(mode="after")
    def _fits_together(self) -> NatsSettings:
        ways = (self.user, self.token, self.credentials_file, self.nkey_seed_file)
        if sum(way is not None for way in ways) > 1:
            raise ValueError(
                "only one of user, token, credentials_file and nkey_seed_file may be set; unset the others"
            )
        for one, other in (("user", "password"), ("cert_file", "key_file")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{one} and {other} go together; set both, or neither")
        return self


class PostgresSettings(Section):
    """The kernel's database."""

    dsn: Secret = Field(
        description="Connection string (`PG_DSN`); TLS by `?sslmode=verify-full&sslrootcert=…`; with several hosts "
        "`target_session_attrs=read-write`. Never shown."
    )
    pool_size: int = Field(8, ge=1, le=100, description="Size of the connection pool of one process.")
    timeout_s: Seconds = Field(5, description="Seconds to wait for a connection or a statement.")
    prepared_statements: bool = Field(default=True, description="Switch off behind PgBouncer in transaction mode.")

    @field_validator("dsn")
    @classmethod
    def _is_a_dsn(cls, dsn: Secret) -> Secret:
        parse_dsn(dsn.get_secret_value())
        return dsn

    @property
    def parsed(self) -> Dsn:
        """Return the parsed connection string."""
        return parse_dsn(self.dsn.get_secret_value())


@dataclass(frozen=True)
class ToolsSettings(ToolOptions):
    """Limits of tool calls."""

    jina: Annotated[JinaToolSettings, Field(description="The Jina tools.")] = field(default_factory=JinaToolSettings)


class SessionSettings(Section):
    """Session identities."""

    key: Secret | None = Field(
        None,
        min_length=MIN_KEY_BYTES,
        description="Key behind session identities, at least 16 bytes; by default one is generated and stored in NATS.",
    )


class EgressSettings(Section):
    """Connections to the upstream."""

    max_connections: int = Field(512, ge=1, le=65_535, description="Most concurrent connections to the upstream.")
    max_response_bytes: int = Field(10_000_000, ge=1_000, le=TERABYTE, description="Largest response in bytes.")
    body_budget_bytes: int = Field(
        256_000_000,
        ge=1_000,
        le=TERABYTE,
        description="Memory in bytes of all responses until their commit; calls wait.",
    )
    ca_file: File | None = Field(None, description="One more CA (PEM) to trust; SSL_CERT_FILE does the same.")
    proxy: Secret | None = Field(
        None, description="Forward proxy (`http://user:password@host:port`), the only one used; TLS goes through it."
    )
    public_addresses_only: bool = Field(
        default=False, description="Connect only where the upstream's hosts resolve to public addresses."
    )

    @field_validator("proxy")
    @classmethod
    def _is_a_proxy(cls, proxy: Secret | None) -> Secret | None:
        if proxy is None:
            return proxy
        try:
            found = parse_url(proxy.get_secret_value(), ("http",))
        except ValueError as problem:
            raise ValueError(f"{problem}; {_PROXY_FORM}, and {ESCAPE}") from None
        if found.port is None or found.path not in ("", "/") or found.query:
            raise ValueError(_PROXY_FORM)
        return proxy

    @model_validator(mode="after")
    def _proxy_resolves_names(self) -> EgressSettings:
        if self.proxy is not None and self.public_addresses_only:
            raise ValueError("public_addresses_only has no effect with a proxy, which resolves the names; unset one")
        return self

    @model_validator(mode="after")
    def _holds_the_largest_answer(self) -> EgressSettings:
        least = most_memory(self.max_response_bytes) + self.max_response_bytes
        if self.body_budget_bytes < least:
            raise ValueError(f"body_budget_bytes must be at least {least}, so that the largest response fits")
        return self


class HealthSettings(Section):
    """Server of /livez, /readyz and /metrics; one request per connection, within 5 seconds."""

    host: Annotated[str, AfterValidator(checked_address)] = Field(
        "127.0.0.1", description="Address to listen on; 0.0.0.0 in a pod."
    )
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 starts no server.")
    check_interval_s: Seconds = Field(1, description="Health check interval in seconds.")
    page: bool = Field(
        default=False, description="Serve a page at `/`: what `top` shows, of this replica; ids of calls, no payloads."
    )


class TelemetrySettings(Section):
    """Logs, traces and metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level logged.")
    log_format: Literal["json", "console"] = Field("json", description="`json` for machines, `console` for people.")
    otlp_endpoint: str | None = Field(None, description="Traces URL of an OTLP/HTTP collector.")
    otlp_metrics_endpoint: str | None = Field(None, description="Metrics URL of an OTLP/HTTP collector.")
    otlp_metrics_interval_s: Seconds = Field(30, description="Seconds between exports of the metrics.")
    trace_ratio: float = Field(1, ge=0, le=1, description="Share of the traces sampled by their parent to export.")
    projects: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)] = Field(
        (), max_length=100, description="Projects that get a label in the metrics of calls and tokens, at most 100."
    )

    @field_validator("otlp_endpoint", "otlp_metrics_endpoint")
    @classmethod
    def _is_a_collector(cls, url: str | None) -> str | None:
        if url is not None:
            try:
                parse_url(url, _HTTP)
            except ValueError as problem:
                raise ValueError(f"{problem}; must look like https://host:4318/v1/…, and {ESCAPE}") from None
        return url


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
    nats: NatsSettings = Field(default_factory=NatsSettings)
    postgres: PostgresSettings
    executor: ExecutorOptions = Field(default_factory=ExecutorOptions)
    fairness: FairnessOptions = Field(default_factory=FairnessOptions)
    tools: ToolsSettings = Field(default_factory=ToolsSettings)
    policy: Policy = Field(default_factory=Policy)
    url_policy: UrlPolicy = Field(default_factory=UrlPolicy)
    secrets: SecretsSettings = Field(default_factory=SecretsSettings)
    session: SessionSettings = Field(default_factory=SessionSettings)
    egress: EgressSettings = Field(default_factory=EgressSettings)
    retry: RetryOptions = Field(default_factory=RetryOptions)
    cache: CacheOptions = Field(default_factory=CacheOptions)
    limits: LimitOptions = Field(default_factory=LimitOptions)
    health: HealthSettings = Field(default_factory=HealthSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    _remarks: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _narrowed_durable_has_its_own_name(self) -> Settings:
        narrowed = self.protocol.project != "*" or self.protocol.channel != "*"
        if narrowed and self.nats.durable is None:
            raise ValueError("nats.durable must be set where protocol.project or protocol.channel narrows the filter")
        return self

    @model_validator(mode="after")
    def _lost_calls_are_answered_in_time(self) -> Settings:
        """Lower the lost runs to what fits into a worker's wait: an early end is better than none."""
        patience_s = self.executor.worker_timeout_s - self.executor.commit_margin_s
        fitting = max(1, math.ceil(patience_s / self.nats.ack_wait_s) - 1)
        if fitting < self.executor.max_lost_runs:
            self._remarks.append(
                f"executor.max_lost_runs is lowered from {self.executor.max_lost_runs} to {fitting}: times "
                f"nats.ack_wait_s ({self.nats.ack_wait_s:g} s) it must be less than executor.worker_timeout_s less "
                f"executor.commit_margin_s ({patience_s:g} s), or a call that lost its executors is answered too late"
            )
            object.__setattr__(self, "executor", replace(self.executor, max_lost_runs=fitting))
        if self.executor.requeue_delay_s >= patience_s:
            raise ValueError("executor.requeue_delay_s must be less than the time that a worker waits; lower it")
        return self

    @model_validator(mode="after")
    def _limits_name_keys_of_tools(self) -> Settings:
        allowed = {name.upper() for name in self.tool_variables}
        for name in self.limits.keys:
            if name.upper() not in allowed:  # may be a key that was pasted here
                shown = "a variable" if looks_like_a_key(name) else name
                raise ValueError(f"limits.keys: no tool may use {shown}; add it to secrets.allowed_env")
        return self

    @property
    def tool_variables(self) -> set[str]:
        """Return the variables that tool definitions may name."""
        service_envs = self.tools.jina.envs_of(self.protocol.target)
        return {DEFAULT_AUTH_ENV, *self.secrets.allowed_env, *service_envs.values()}

    @property
    def remarks(self) -> list[str]:
        """Return a line for each setting whose given value is changed or ignored."""
        return [*self._remarks, *kernel_remarks()]

    @property
    def durable(self) -> str:
        """Return the name of the durable."""
        return self.nats.durable or default_durable(self.protocol.version, self.protocol.target)

    def secret_values(self) -> list[tuple[str, str]]:
        """Return every secret in the settings, with the name of its setting."""
        whole = {
            "session.key": self.session.key,
            "nats.password": self.nats.password,
            "nats.token": self.nats.token,
        }
        urls = [("nats.servers", url) for url in self.nats.servers]
        urls += [("egress.proxy", self.egress.proxy.get_secret_value())] if self.egress.proxy else []
        collectors = ("otlp_endpoint", "otlp_metrics_endpoint")
        named = ((f"telemetry.{name}", getattr(self.telemetry, name)) for name in collectors)
        urls += [(name, url) for name, url in named if url]
        return [
            *((name, secret.get_secret_value()) for name, secret in whole.items() if secret is not None),
            *(("postgres.dsn", part) for part in self.postgres.parsed.credentials),
            *((name, part) for name, url in urls for part in parse_url(url, SCHEMES).credentials),
        ]

    def shown(self) -> dict[str, Any]:
        """Return the effective settings for display, with masked credentials."""
        shown = self.model_dump(mode="json", exclude_none=True)
        shown["postgres"]["dsn"] = self.postgres.parsed.shown
        shown["nats"]["servers"] = [parse_url(url, SCHEMES).shown for url in self.nats.servers]
        shown["nats"]["durable"] = self.durable
        if self.egress.proxy is not None:
            shown["egress"]["proxy"] = parse_url(self.egress.proxy.get_secret_value(), SCHEMES).shown
        for name in ("otlp_endpoint", "otlp_metrics_endpoint"):
            if (url := getattr(self.telemetry, name)) is not None:
                shown["telemetry"][name] = parse_url(url, SCHEMES).shown
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
        """Return the sources in descending precedence: flags, long names, short names, our file, the kernel's file."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, *file_sources(settings_cls)
