"""Sections of the settings that belong to no single component, and so are no options class elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, field_validator
from pydantic.dataclasses import dataclass as validated
from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from openapi_tool.dsn import ESCAPE
from openapi_tool.jina.parameters import is_documented, secret_problem
from openapi_tool.options.section import HostNames, Options, Seconds, split
from openapi_tool.options.tools import ToolOptions
from openapi_tool.protocol.dialect import DEFAULT_VERSION, ProtocolVersion
from openapi_tool.tools.arguments import API_KEY
from openapi_tool.tools.secret_variables import Secret, is_executors_own
from openapi_tool.tools.session_identities import MIN_KEY_BYTES
from openapi_tool.urls import HTTP_SCHEMES, checked_address, parse_url


def fields_of(kind: Any) -> Mapping[str, FieldInfo]:
    """Return the fields of a section by name. `kind` is its class, or `CLASS | None`; another type has no fields."""
    is_union = get_origin(kind) in (Union, UnionType)
    for part in get_args(kind) if is_union else (kind,):
        if hasattr(part, "__pydantic_fields__"):
            fields: Mapping[str, FieldInfo] = part.__pydantic_fields__
            return fields
    return {}


TARGET = "{target}"  # in an actor id


def _without_unknown_placeholders(actor_id: str) -> str:
    if set("{}") & set(actor_id.replace(TARGET, "")):
        raise ValueError(f"holds an unknown placeholder or a lone brace; the only placeholder is {TARGET}")
    return actor_id


ActorId = Annotated[str, AfterValidator(_without_unknown_placeholders)]
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


# `envs` name the arguments of a tool that get their values, such as an API key, from variables of this process:
# {"api_key": "JINA_API_KEY"}. No model sees these values.
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
_PARAMETER = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def _is_not_the_executors_own(variable: str) -> str:
    if is_executors_own(variable):
        raise ValueError(f"{variable} is one of the executor's own settings, which tools are never given; remove it")
    return variable


VariableName = Annotated[str, Field(pattern=_VARIABLE), AfterValidator(_is_not_the_executors_own)]


def _may_take_a_secret(name: str) -> str:
    if not _PARAMETER.fullmatch(name):
        raise ValueError("must be the name of one upstream parameter: letters, digits, '_' and '-'")
    if name != API_KEY and (problem := secret_problem(name)):
        shown = f"{name} " if is_documented(name) else ""  # an unknown name may be a secret that was pasted here
        raise ValueError(f"{shown}{problem}; remove it")
    return name


def _all_may_take_a_secret(envs: dict[str, str]) -> dict[str, str]:
    for name in envs:
        _may_take_a_secret(name)
    return envs


EnvParameter = Annotated[str, AfterValidator(_may_take_a_secret)]
Envs = Annotated[dict[str, VariableName], AfterValidator(_all_may_take_a_secret)]


@validated(frozen=True)
class ServiceEnvs(Options):
    """Service-side `envs` of one target, which the kernel's settings call a service."""

    envs: Envs = Field(default_factory=dict, description="Argument name to variable name.")


@validated(frozen=True)
class JinaToolSettings(Options):
    """Service-side settings of the Jina tools; they override a definition's own."""

    envs: Envs = Field(default_factory=dict, description="Argument name to variable, for all targets.")
    services: dict[str, ServiceEnvs] = Field(
        default_factory=dict, description="The same for single targets, which overrides `envs`."
    )

    def envs_of(self, target: str) -> dict[str, str]:
        """Map argument names to variable names for one target."""
        service = self.services.get(target)
        return {**self.envs, **(service.envs if service else {})}


@validated(frozen=True)
class ToolsSettings(ToolOptions):
    """Limits of tool calls."""

    jina: Annotated[
        JinaToolSettings,
        Field(
            description="Secret arguments and their variables: `envs` for all targets, `services.TARGET.envs` for one."
        ),
    ] = field(default_factory=JinaToolSettings)


@validated(frozen=True)
class SecretsSettings(Options):
    """Variables that definitions may name, and arguments that may take their values.

    Instead of a variable `NAME`, `NAME_FILE` may name a file that contains the value.
    """

    allowed_env: Annotated[tuple[VariableName, ...], NoDecode, BeforeValidator(split)] = Field(
        default=(),
        description="Variables that definitions may name, beside JINA_API_KEY and those in `tools.jina`. Any "
        "definition of any project may name each of them, also in `auth_env`; comma-separated in the environment.",
    )
    env_parameters: Annotated[tuple[EnvParameter, ...], NoDecode, BeforeValidator(split)] = Field(
        default=(),
        description="Body members of your own, named `tenant_…`, that a definition's `envs` may fill, beside `api_key` "
        "and those in `tools.jina`; comma-separated in the environment.",
    )


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
