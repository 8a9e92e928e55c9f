"""All settings: defaults < the kernel's `config.toml` < our TOML file < environment < flags.

Any field can be set as `OPENAPI_TOOL__SECTION__KEY`; `PG_DSN` and `NATS_SERVERS` are short names.
Where they are read from is in `sources`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FilePath,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from openapi_tool.jina.budget import most_memory
from openapi_tool.protocol.subject import default_durable
from openapi_tool.settings.policy import PolicySettings
from openapi_tool.settings.secrets import JinaToolSettings, SecretsSettings
from openapi_tool.settings.section import Section, split
from openapi_tool.settings.sources import PREFIX, file_sources
from openapi_tool.settings.targets import TargetsSettings
from openapi_tool.tools.secrets import Secret
from openapi_tool.tools.session import MIN_KEY_BYTES

_TOKEN = r"^([A-Za-z0-9_-]+|\*)$"  # noqa: S105 - a subject's token
_NATS_URL = r"^(nats|tls|ws|wss)://[^\s/]+$"
_PROXY_URL = re.compile(r"http://(?:[^\s/?#@:]+(?::[^\s/?#@]*)?@)?(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}/?")
_POSTGRES_SCHEMES = ("postgres", "postgresql")

Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _is_a_url(url: str) -> str:
    try:
        urlsplit(url).port  # noqa: B018 - looking is enough
    except ValueError:
        raise ValueError("must look like nats://host:4222") from None
    return url


NatsUrl = Annotated[str, Field(pattern=_NATS_URL), AfterValidator(_is_a_url)]


class ProtocolSettings(Section):
    """Which dialect of the kernel's wire to speak, as whom."""

    version: Literal["v1r4"] = Field("v1r4", description="Protocol version, the second token of every subject.")
    target: str = Field("jina", pattern=r"^[A-Za-z0-9_-]+$", description="Tool target, the subject's seventh token.")
    actor_id: str = Field(
        "tool.openapi", pattern=r"^tool\.\S+$", description="Author of result cards; must start with `tool.`."
    )
    project: str = Field("*", pattern=_TOKEN, description="Only this project's commands; `*` for all.")
    channel: str = Field("*", pattern=_TOKEN, description="Only this channel's commands; `*` for all.")


class NatsSettings(Section):
    """The bus. At most one way to authenticate: user and password, token, credentials file or nkey seed."""

    servers: Annotated[tuple[NatsUrl, ...], NoDecode, BeforeValidator(split)] = Field(
        ("nats://127.0.0.1:4222",), min_length=1, description="Server URLs; comma-separated in the environment."
    )
    tls: bool = Field(
        default=False, description="TLS or no connection; a `tls://` or `wss://` server and `ca_file` ask for it, too."
    )
    tls_check_hostname: bool = Field(default=True, description="Hold the server's certificate to its name.")
    ca_file: FilePath | None = Field(None, description="CA (PEM) that signed the server's certificate.")
    cert_file: FilePath | None = Field(None, description="Client certificate (PEM); needs `key_file`.")
    key_file: FilePath | None = Field(None, description="Key of the client certificate (PEM).")
    user: str | None = Field(None, description="User name; needs `password`.")
    password: Secret | None = Field(None, description="Password of `user`.")
    token: Secret | None = Field(None, description="Token.")
    credentials_file: FilePath | None = Field(None, description="Credentials file of a NATS account (`.creds`).")
    nkey_seed_file: FilePath | None = Field(None, description="File with an nkey seed.")
    durable: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]+$",
        description="Durable consumer shared by all replicas; by default the kernel executor's own name.",
    )
    ack_wait_s: Seconds = Field(6, description="Seconds without a heartbeat until a command is delivered again.")
    max_ack_pending: int = Field(10_000, ge=1, description="Commands in flight over all replicas.")
    replicas: int = Field(
        1, ge=1, le=5, description="Servers that keep a copy of each stream and bucket that is made here."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> NatsSettings:
        ways = (self.user, self.token, self.credentials_file, self.nkey_seed_file)
        if sum(way is not None for way in ways) > 1:
            raise ValueError("only one of user, token, credentials_file and nkey_seed_file may be set")
        for one, other in (("user", "password"), ("cert_file", "key_file")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{one} and {other} go together")
        return self


class PostgresSettings(Section):
    """The kernel's database."""

    dsn: Secret = Field(
        description="Connection string (`PG_DSN`); TLS by `?sslmode=verify-full&sslrootcert=…`. Never shown."
    )
    pool_size: int = Field(8, ge=1, le=100, description="Connections of one process.")
    timeout_s: Seconds = Field(5, description="Seconds to wait for a connection or a statement.")
    prepared_statements: bool = Field(default=True, description="Switch off behind PgBouncer in transaction mode.")

    @field_validator("dsn")
    @classmethod
    def _is_a_dsn(cls, dsn: Secret) -> Secret:
        try:
            scheme = urlsplit(dsn.get_secret_value()).scheme
        except ValueError:
            scheme = ""
        if scheme not in _POSTGRES_SCHEMES:
            raise ValueError("must look like postgresql://user@host:5432/database")
        return dsn


class ExecutorSettings(Section):
    """How calls are run."""

    concurrency: int = Field(64, ge=1, le=512, description="Calls that one process runs at once.")
    worker_default_s: Seconds = Field(30, description="How long the kernel's workers wait by default.")
    margin_s: Seconds = Field(3, description="Kept back from the worker's patience for the commit.")
    retry_delay_s: Seconds = Field(2, description="Before a command is delivered again after an outage.")
    result_wait_s: Seconds = Field(60, description="How long a finished result waits for a database that is away.")
    max_attempts: int = Field(3, ge=1, description="Lost executors after which a command is answered without a run.")
    drain_s: Seconds = Field(25, description="Grace for running calls after SIGTERM.")

    @model_validator(mode="after")
    def _leaves_time_to_run(self) -> ExecutorSettings:
        if self.margin_s >= self.worker_default_s:
            raise ValueError("margin_s must be less than worker_default_s, or no call has time to run")
        return self


class ToolsSettings(Section):
    """What tools may do."""

    default_timeout_ms: int | None = Field(
        None,
        ge=1_000,
        description="Time of a call whose definition says nothing of time; by default all that the worker waits.",
    )
    max_timeout_ms: int = Field(120_000, ge=1_000, description="Longest time that any call may take.")
    max_batch_items: int = Field(10, ge=1, le=100, description="Most queries or urls of one call.")
    max_result_chars: int = Field(
        40_000, ge=2_000, le=10_000_000, description="Most characters of a result (four are about a token)."
    )
    artifact_ttl_s: int = Field(
        604_800, ge=60, le=31_536_000, description="How long the whole text of a result that was cut is kept."
    )
    jina: JinaToolSettings = Field(default_factory=JinaToolSettings, description="The Jina tools.")

    @model_validator(mode="after")
    def _default_fits(self) -> ToolsSettings:
        if self.default_timeout_ms is not None and self.default_timeout_ms > self.max_timeout_ms:
            raise ValueError("default_timeout_ms must not be more than max_timeout_ms")
        return self


class SessionSettings(Section):
    """Session identities."""

    key: Secret | None = Field(
        None,
        min_length=MIN_KEY_BYTES,
        description="Key behind session identities, at least 16 bytes; without one it is made once and kept in NATS.",
    )


class EgressSettings(Section):
    """The way to the upstream."""

    connections: int = Field(512, ge=1, description="Connections to the upstream at once.")
    max_response_bytes: int = Field(10_000_000, ge=1_000, description="Largest answer that is read.")
    body_budget_bytes: int = Field(
        256_000_000, ge=1_000, description="Memory for all answers together, until they are stored; calls wait for it."
    )
    ca_file: FilePath | None = Field(None, description="One more CA (PEM) to trust; SSL_CERT_FILE does the same.")
    proxy: Secret | None = Field(
        None, description="Forward proxy (`http://user:password@host:port`), the only one used; TLS goes through it."
    )
    public_addresses_only: bool = Field(
        default=False, description="Connect only where the upstream's hosts resolve to public addresses."
    )

    @field_validator("proxy")
    @classmethod
    def _is_a_proxy(cls, proxy: Secret | None) -> Secret | None:
        if proxy is not None and not _PROXY_URL.fullmatch(proxy.get_secret_value()):
            raise ValueError("must look like http://user:password@host:port, with the port")
        return proxy

    @model_validator(mode="after")
    def _proxy_resolves_names(self) -> EgressSettings:
        if self.proxy is not None and self.public_addresses_only:
            raise ValueError("public_addresses_only cannot be held with a proxy, which resolves the names; unset one")
        return self

    @model_validator(mode="after")
    def _holds_the_largest_answer(self) -> EgressSettings:
        least = most_memory(self.max_response_bytes) + self.max_response_bytes
        if self.body_budget_bytes < least:
            raise ValueError(f"body_budget_bytes must be at least {least}, so that the largest answer finds room")
        return self


class RetrySettings(Section):
    """Asking the upstream again within a call; never past the call's deadline."""

    max_repeats: int = Field(3, ge=0, le=10, description="Most repeats of one request; 0 asks once.")
    first_wait_s: Seconds = Field(0.5, description="First wait, doubled each time, where the upstream names none.")
    max_wait_s: Seconds = Field(8, description="Longest wait of our own; Retry-After may ask for more.")

    @model_validator(mode="after")
    def _waits_grow(self) -> RetrySettings:
        if self.first_wait_s > self.max_wait_s:
            raise ValueError("first_wait_s must not be more than max_wait_s")
        return self


class CacheSettings(Section):
    """Answers that are kept, for the same project, agent and session only."""

    ttl_s: float = Field(300, ge=0, le=86_400, description="Seconds that an answer is kept; 0 keeps none.")
    max_bytes: int = Field(4_000_000, ge=0, description="Memory for the answers that one process keeps.")


class HealthSettings(Section):
    """The server for probes and metrics: /livez, /readyz, /metrics."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 in a pod.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 starts no server.")
    check_s: Seconds = Field(1, description="Seconds between looks at the database.")


class TelemetrySettings(Section):
    """Logs and traces."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level logged.")
    log_format: Literal["json", "console"] = Field("json", description="For machines or for people.")
    otlp_endpoint: str | None = Field(None, pattern=r"^https?://", description="Traces URL of an OTLP/HTTP collector.")


class Settings(BaseSettings):
    """Everything that an operator can set."""

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
    executor: ExecutorSettings = Field(default_factory=ExecutorSettings)
    tools: ToolsSettings = Field(default_factory=ToolsSettings)
    policy: PolicySettings = Field(default_factory=PolicySettings)
    targets: TargetsSettings = Field(default_factory=TargetsSettings)
    secrets: SecretsSettings = Field(default_factory=SecretsSettings)
    session: SessionSettings = Field(default_factory=SessionSettings)
    egress: EgressSettings = Field(default_factory=EgressSettings)
    retry: RetrySettings = Field(default_factory=RetrySettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    health: HealthSettings = Field(default_factory=HealthSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)

    @model_validator(mode="after")
    def _narrowed_durable_has_its_own_name(self) -> Settings:
        narrowed = self.protocol.project != "*" or self.protocol.channel != "*"
        if narrowed and self.nats.durable is None:
            raise ValueError("nats.durable must be set where protocol.project or protocol.channel narrows the filter")
        return self

    @model_validator(mode="after")
    def _lost_calls_are_answered_in_time(self) -> Settings:
        patience_s = self.executor.worker_default_s - self.executor.margin_s
        if self.nats.ack_wait_s * self.executor.max_attempts >= patience_s:
            raise ValueError(
                "nats.ack_wait_s times executor.max_attempts must be less than executor.worker_default_s less "
                f"executor.margin_s ({patience_s:g} s), or a call that lost its executors is answered too late"
            )
        if self.executor.retry_delay_s >= patience_s:
            raise ValueError("executor.retry_delay_s must be less than the time that a worker waits")
        return self

    @property
    def durable(self) -> str:
        """The durable's name."""
        return self.nats.durable or default_durable(self.protocol.version, self.protocol.target)

    def confidential(self) -> list[tuple[str, str]]:
        """Every part of the settings that no output may show, with the name of its setting."""
        whole = {
            "session.key": self.session.key,
            "nats.password": self.nats.password,
            "nats.token": self.nats.token,
        }
        urls = [("postgres.dsn", self.postgres.dsn.get_secret_value())]
        urls += [("nats.servers", url) for url in self.nats.servers]
        urls += [("egress.proxy", self.egress.proxy.get_secret_value())] if self.egress.proxy else []
        urls += [("telemetry.otlp_endpoint", self.telemetry.otlp_endpoint)] if self.telemetry.otlp_endpoint else []
        return [
            *((name, secret.get_secret_value()) for name, secret in whole.items() if secret is not None),
            *((name, part) for name, url in urls for part in url_credentials(url)),
        ]

    def shown(self) -> dict[str, Any]:
        """The effective settings for people: credentials masked, paths and names as they are."""
        shown = self.model_dump(mode="json", exclude_none=True)
        shown["postgres"]["dsn"] = _without_credentials(self.postgres.dsn.get_secret_value())
        shown["nats"]["servers"] = [_without_credentials(url) for url in self.nats.servers]
        shown["nats"]["durable"] = self.durable
        if self.egress.proxy is not None:
            shown["egress"]["proxy"] = _without_credentials(self.egress.proxy.get_secret_value())
        if self.telemetry.otlp_endpoint is not None:
            shown["telemetry"]["otlp_endpoint"] = _without_credentials(self.telemetry.otlp_endpoint)
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
        """Flags, long names, short names, our file, the kernel's file; the first that says something wins."""
        del dotenv_settings, file_secret_settings
        return init_settings, env_settings, *file_sources(settings_cls)


def url_credentials(url: str) -> list[str]:
    """The password of a URL as it is written and as it is meant; for NATS a user without one is a token.

    Raises ValueError where it is no URL.
    """
    parts = urlsplit(url.strip())
    secret = parts.password or (None if parts.scheme in _POSTGRES_SCHEMES else parts.username)
    return [secret, unquote(secret)] if secret else []


def _without_credentials(url: str) -> str:
    """A URL with `***` for user and password, and without its query."""
    parts = urlsplit(url)
    credentials, at, host = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, f"***@{host}" if at and credentials else host, parts.path, "", ""))
