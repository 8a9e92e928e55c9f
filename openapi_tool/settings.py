"""All settings: defaults < TOML file (`OPENAPI_TOOL_CONFIG`) < environment < flags.

Any field can be set as `OPENAPI_TOOL__SECTION__KEY`; `PG_DSN` and `NATS_SERVERS` are short names.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.sources import InitSettingsSource

from openapi_tool.protocol.subject import default_durable

CONFIG_VARIABLE = "OPENAPI_TOOL_CONFIG"
PREFIX = "OPENAPI_TOOL__"
SHORT_NAMES: Mapping[str, tuple[str, str]] = {"PG_DSN": ("postgres", "dsn"), "NATS_SERVERS": ("nats", "servers")}
_TOKEN = r"^([A-Za-z0-9_-]+|\*)$"  # noqa: S105 - a subject's token
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"

Seconds = Annotated[float, Field(gt=0, le=86_400)]
VariableName = Annotated[str, Field(pattern=_VARIABLE)]


class Section(BaseModel):
    """One section of the settings: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


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
    """The bus."""

    servers: Annotated[tuple[str, ...], NoDecode] = Field(
        ("nats://127.0.0.1:4222",), min_length=1, description="Server URLs; comma-separated in the environment."
    )
    durable: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_-]+$",
        description="Durable consumer shared by all replicas; by default the kernel executor's own name.",
    )
    ack_wait_s: Seconds = Field(6, description="Seconds without a heartbeat until a command is delivered again.")
    max_ack_pending: int = Field(10_000, ge=1, description="Commands in flight over all replicas.")

    @field_validator("servers", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class PostgresSettings(Section):
    """The kernel's database."""

    dsn: SecretStr = Field(
        SecretStr("postgresql://127.0.0.1:5432/postgres"), description="Connection string; never shown."
    )
    pool_size: int = Field(8, ge=1, le=100, description="Connections of one process.")
    timeout_s: Seconds = Field(5, description="Seconds to wait for a connection or a statement.")
    prepared_statements: bool = Field(default=True, description="Switch off behind PgBouncer in transaction mode.")


class ExecutorSettings(Section):
    """How calls are run."""

    concurrency: int = Field(64, ge=1, le=512, description="Calls that one process runs at once.")
    worker_default_s: Seconds = Field(30, description="How long the kernel's workers wait by default.")
    margin_s: Seconds = Field(3, description="Kept back from the worker's patience for the commit.")
    retry_delay_s: Seconds = Field(2, description="Before a command is delivered again after an outage.")
    drain_s: Seconds = Field(25, description="Grace for running calls after SIGTERM.")


class ServiceEnvs(Section):
    """Service-side `envs` of one target."""

    envs: dict[str, VariableName] = Field(default_factory=dict, description="Argument name to variable name.")


class JinaToolSettings(Section):
    """Service-side settings of the Jina tools; they win over a definition's own."""

    envs: dict[str, VariableName] = Field(default_factory=dict, description="For all targets.")
    services: dict[str, ServiceEnvs] = Field(default_factory=dict, description="By target.")

    def envs_of(self, target: str) -> dict[str, str]:
        """Argument name to variable name for one target."""
        service = self.services.get(target)
        return {**self.envs, **(service.envs if service else {})}


class ToolsSettings(Section):
    """What tools may do."""

    max_timeout_ms: int = Field(120_000, ge=1_000, description="Longest time that any call may take.")
    jina: JinaToolSettings = Field(default_factory=JinaToolSettings, description="The Jina tools.")


class SecretsSettings(Section):
    """Which environment variables a tool definition may name."""

    allowed_env: Annotated[tuple[VariableName, ...], NoDecode] = Field(
        (), description="Beside JINA_API_KEY and the service's own `envs`; comma-separated in the environment."
    )

    @field_validator("allowed_env", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class EgressSettings(Section):
    """The way to the upstream."""

    connections: int = Field(512, ge=1, description="Connections to the upstream at once.")
    max_response_bytes: int = Field(10_000_000, ge=1_000, description="Largest answer that is read.")
    ca_file: Path | None = Field(None, description="One more CA (PEM) to trust; SSL_CERT_FILE does the same.")


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
    postgres: PostgresSettings = Field(default_factory=PostgresSettings)
    executor: ExecutorSettings = Field(default_factory=ExecutorSettings)
    tools: ToolsSettings = Field(default_factory=ToolsSettings)
    secrets: SecretsSettings = Field(default_factory=SecretsSettings)
    egress: EgressSettings = Field(default_factory=EgressSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)

    @model_validator(mode="after")
    def _narrowed_durable_has_its_own_name(self) -> Settings:
        narrowed = self.protocol.project != "*" or self.protocol.channel != "*"
        if narrowed and self.nats.durable is None:
            raise ValueError("nats.durable must be set where protocol.project or protocol.channel narrows the filter")
        return self

    @property
    def durable(self) -> str:
        """The durable's name."""
        return self.nats.durable or default_durable(self.protocol.version, self.protocol.target)

    def confidential(self) -> list[str]:
        """Every part of the settings that no output may show."""
        urls = [self.postgres.dsn.get_secret_value(), *self.nats.servers]
        return [part for url in urls for part in _credentials(url)]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, long names, short names, file; the first that says something wins."""
        del dotenv_settings, file_secret_settings
        short = InitSettingsSource(settings_cls, _short_names(os.environ))
        file = InitSettingsSource(settings_cls, _read_file(os.environ.get(CONFIG_VARIABLE)))
        return init_settings, env_settings, short, file


class SourcesError(Exception):
    """A source of settings cannot be read at all."""


class SettingsError(Exception):
    """The configuration is not usable; `problems` has one line for each mistake, without values."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Read every source. Raises SettingsError naming all mistakes at once."""
    try:
        settings = Settings(**(flags or {}))
    except ValidationError as error:
        raise SettingsError([_problem(item) for item in error.errors(include_input=False, include_url=False)]) from None
    except SourcesError as error:
        raise SettingsError([str(error)]) from None
    return settings


def _credentials(url: str) -> list[str]:
    """The password of a URL as it is written and as it is meant; for NATS a token may stand for the user."""
    authority = urlsplit(url.strip())
    secrets = [authority.password or "", authority.username or "" if authority.scheme != "postgresql" else ""]
    return [form for secret in secrets if secret for form in (secret, unquote(secret))]


def _problem(item: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in item["loc"]) or "settings"
    return f"{where}: {item['msg']}"


def _short_names(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, (section, key) in SHORT_NAMES.items():
        if environment.get(variable):
            values.setdefault(section, {})[key] = environment[variable]
    return values


def _read_file(path: str | None) -> dict[str, Any]:
    if not path:
        return {}
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SourcesError(f"{CONFIG_VARIABLE}={path}: {error}") from None
